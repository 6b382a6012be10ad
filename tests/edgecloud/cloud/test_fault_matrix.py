"""Link, cloud and edge fail in all ways of the matrix: training goes on as if nothing had been, or ends with a line."""

import json
from pathlib import Path

import pytest

from tests.edgecloud.cloud.fault_matrix import Cell, cells

pytestmark = pytest.mark.timeout(900)

SAYS = {
    "cloud-without-folder": "is not open at this cloud; its manager has to open it",
    "edge-without-folder": "have no checkpoint in common",
    "cloud-gone": "is out of reach, after trying for",
    "same-party-number": "another edge has taken the place of party 0",
    "wrong-token": "a 'Train' call with a wrong token",
    "wrong-run": "a 'Train' call with a wrong token",
    "wrong-operator-token": "a 'Status' call with a wrong token",
    "strange-authority": "the certificates do not fit",
    "strange-name": "the certificates do not fit",
    "no-client-certificate": "",  # TLS 1.3 tells an edge late, if at all
    "tls-edge-plain-cloud": "the certificates do not fit",
    "plain-edge-tls-cloud": "is out of reach, after trying for",
}
RESULTS = Path(__file__).parents[3] / "docs" / "results" / "split-faults.json"


# In make test the same happens to halves that need no torch: test_reconnect.py, test_faults.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cell"), [pytest.param(name, cell, id=name) for name, cell in cells()]
)
def test_whatever_happens_no_batch_is_lost_or_repeated_and_nothing_hangs(
    name: str, cell: Cell, tmp_path: Path
) -> None:
    """Weights and ledgers are checked by the cell itself."""
    row = cell(tmp_path)
    assert row.outcome == ("ended" if name in SAYS else "went on")
    if name in SAYS:
        assert any(SAYS[name] in line for line in row.says), row.says
        assert all("\n" not in line and len(line) < 500 for line in row.says)
    else:
        assert row.once and (row.window or row.weights == "bit for bit")


def test_the_written_matrix_is_of_these_cells() -> None:
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
    assert len(rows) == len(list(cells()))
    for row in rows:
        assert row["outcome"] == "ended" or (
            row["once"] and (row["window"] or row["weights"] == "bit for bit")
        )
        assert row["outcome"] == "went on" or (
            all("\n" not in line for line in row["says"]) and row["says"]
        )
