"""Link, cloud and edge fail in the ways of the matrix: training continues unharmed, or ends with a line."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.edgecloud.cloud.fault_matrix import cells
from tests.edgecloud.cloud.processes import WAIT_S, CloudSide, EdgeSide, open_run, undisturbed
from tests.edgecloud.runtime.numpy_halves import same

# A sample over faults and windows; what the user sees of those that end the training.
SAMPLED = {
    "link-down-k5": "",
    "link-silent-k0": "",
    "cloud-killed-k5": "",
    "edge-killed-k0": "",
    "both-killed-k5": "",
    "strangers-k0": "",
    "garbled-under-tls": "",
    "cloud-without-folder": "is not open",
    "edge-without-folder": "checkpoint",
    "same-party-number": "party 0",
    "wrong-operator-token": "token",
    "strange-name": "certificates",
}
RESULTS = Path(__file__).parents[3] / "docs" / "results" / "split-faults.json"


def check(row: dict[str, Any]) -> None:
    assert all(line and "\n" not in line and len(line) < 500 for line in row["says"])
    if row["outcome"] == "ended":
        assert row["says"]
    else:
        assert row["once"] and (row["window"] or row["weights"] == "bit for bit")


# In make test the same happens to halves that need no torch: test_reconnect.py, test_faults.py.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAMPLED)
def test_whatever_happens_no_batch_is_lost_or_repeated_and_nothing_hangs(
    name: str, tmp_path: Path
) -> None:
    """Weights and ledgers are checked by the cell itself."""
    row = dict(cells())[name](tmp_path)
    check(asdict(row))
    assert (row.outcome == "ended") == bool(SAMPLED[name])
    assert not SAMPLED[name] or any(SAMPLED[name] in line for line in row.says)


@pytest.mark.slow
def test_a_cloud_whose_half_stands_still_ends_and_continues_when_it_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port still answers, so that the edge would wait for it."""
    flag = tmp_path / "hangs"
    flag.touch()
    monkeypatch.setenv("HANGS", str(flag))
    cloud = CloudSide(tmp_path, program="hanging_program")
    task = open_run(cloud.operator(), window=0, num_batches=24)
    edge = EdgeSide(tmp_path / "edge", task)
    try:
        assert cloud.process.wait(WAIT_S) == os.EX_TEMPFAIL
        assert "has stood still" in (tmp_path / "cloud-errors").read_text("utf-8")
        cloud.close()
        cloud = CloudSide(tmp_path, cloud.port)
        end = edge.end()
        weights, ledger = cloud.result(task.run)
        assert end["ledger"] == ledger == list(range(24))
        with np.load(edge.weights_file) as of_edge:
            assert same(of_edge, weights, wanted=undisturbed(24))
    finally:
        edge.close()
        cloud.close()


def test_the_written_matrix_is_of_these_cells() -> None:
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
    assert sorted(row["name"] for row in rows) == sorted(name for name, _ in cells())
    for row in rows:
        check(row)
