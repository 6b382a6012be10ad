"""What the stored runs of benchmarks/mixed_accuracy.py claim, and in the slow suite a short piece of them."""

import json
import os
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import mixed_accuracy

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SOCFLOWER_DATA", ROOT.parent / "shared" / "data"))
CURVES = ROOT / "docs" / "results" / "mixed-accuracy-curves.json"


def stored(key: str, method: str) -> dict[int, dict[str, object]]:
    return {
        run["seed"]: run
        for run in json.loads(CURVES.read_text())
        if run["scenario"] == key and run["method"] == method
    }


@pytest.mark.parametrize(
    ("key", "method", "most"),
    [
        ("mixed_mnist", "paper", 0.5),
        ("mixed_mnist", "normalised", 0.5),
        ("mixed_cifar10_lenet5", "paper", 1.0),
        ("mixed_cifar10_lenet5", "normalised", 1.0),
        ("mixed_cifar10", "normalised", 1.0),
        # Splitting the batches of a network with BatchNorm costs more than int8 does, see docs/guides/precision.md.
        ("mixed_cifar10", "paper", 1.5),
    ],
)
def test_the_stored_runs_lose_no_more_points_than_claimed(
    key: str, method: str, most: float
) -> None:
    ours, fp32 = stored(key, method), stored(key, "fp32")
    assert len(ours) >= 2
    assert ours.keys() <= fp32.keys()
    assert (
        mean(100 * (fp32[seed]["final_accuracy"] - ours[seed]["final_accuracy"]) for seed in ours)
        <= most
    )


@pytest.mark.parametrize("key", ["mixed_mnist", "mixed_cifar10_lenet5", "mixed_cifar10"])
@pytest.mark.parametrize("method", ["paper", "normalised"])
def test_the_stored_runs_took_less_virtual_time_than_fp32(key: str, method: str) -> None:
    fp32 = stored(key, "fp32")
    for seed, run in stored(key, method).items():
        assert run["virtual_s"] < fp32[seed]["virtual_s"]


def test_alone_in_int8_the_stored_runs_lose_on_cifar10() -> None:
    for key, least in (("mixed_cifar10_lenet5", 0.5), ("mixed_cifar10", 2.0)):
        fp32, niti = stored(key, "fp32"), stored(key, "niti")
        assert (
            mean(
                100 * (fp32[seed]["final_accuracy"] - niti[seed]["final_accuracy"]) for seed in niti
            )
            >= least
        )


def test_copies_stayed_alike_in_the_stored_runs() -> None:
    """What docs/guides/precision.md says of it."""
    similarities = [
        entry["copy_similarity"]
        for run in json.loads(CURVES.read_text())
        for entry in run["rounds"]
        if entry.get("copy_similarity") is not None
    ]
    assert len(similarities) > 100
    assert min(similarities) >= 0.994


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_epoch_of_mixed_precision_learns_digits_as_one_of_fp32_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not (DATA / "mnist").exists():
        pytest.skip(f"no mnist/ in {DATA}; SOCFLOWER_DATA names another folder")
    monkeypatch.setenv("SOCFLOWER_DATA", str(DATA))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(mixed_accuracy, "FOLDER", tmp_path)
    fp32, paper = mixed_accuracy.run(quick=True)
    assert fp32.ours > 0.9
    assert paper.ours > fp32.ours - 0.02
