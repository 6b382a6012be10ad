"""A short piece of the accuracy grid (benchmarks/int8_accuracy.py), and of what its stored results claim."""

import json
import os
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import int8_accuracy

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SOCFLOWER_DATA", ROOT.parent / "shared" / "data"))
CURVES = ROOT / "docs" / "results" / "int8-accuracy-curves.json"


@pytest.mark.slow
def test_one_epoch_of_niti_learns_digits_as_one_of_fp32_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not (DATA / "mnist").exists():
        pytest.skip(f"no mnist/ in {DATA}; SOCFLOWER_DATA names another folder")
    monkeypatch.setenv("SOCFLOWER_DATA", str(DATA))
    (row,) = int8_accuracy.run(quick=True)
    assert row.ok
    assert row.ours > 88.0
    assert row.ours > row.peer_value - 4.0


@pytest.mark.parametrize(
    ("model", "method", "most"),
    [
        ("lenet5", "niti", 0.5),
        ("lenet5", "adaptive-fixed-point", 0.5),
        ("vgg-small", "niti, bits 2-1-0", 3.0),
        ("vgg-small", "adaptive-fixed-point", 3.0),
        ("resnet8", "niti, bits 2-1-0", 3.0),
        ("resnet8", "adaptive-fixed-point", 3.0),
    ],
)
def test_the_stored_runs_lose_no_more_points_than_claimed(
    model: str, method: str, most: float
) -> None:
    final: dict[str, dict[int, float]] = {}
    for run in json.loads(CURVES.read_text()):
        if run["case"]["model"] == model:
            final.setdefault(run["method"], {})[run["seed"]] = 100 * run["test_accuracy"][-1]
    assert len(final["fp32"]) >= 3
    assert final["fp32"].keys() == final[method].keys()
    assert mean(final["fp32"].values()) - mean(final[method].values()) <= most
