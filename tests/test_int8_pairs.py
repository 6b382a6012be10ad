"""The paired trainings of benchmarks/int8_pairs.py: what is interrupted goes on as if it had not been."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import int8_pairs
from benchmarks.int8_pairs import ARITHMETICS, QUICK, Store, interval, train

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SOCFLOWER_DATA", ROOT.parent / "shared" / "data"))
TINY = replace(QUICK, epochs=2, num_images=128)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (DATA / "cifar10").exists():
        pytest.skip(f"no cifar10/ in {DATA}; SOCFLOWER_DATA names another folder")
    monkeypatch.setenv("SOCFLOWER_DATA", str(DATA))
    monkeypatch.setattr(int8_pairs, "_accuracy", lambda module, data: 0.0)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_training_goes_on_from_its_last_epoch(
    arithmetic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(TINY, arithmetic, 1, 0.05)

    def interrupted(checkpoint: Path, *state: object) -> None:
        keep(checkpoint, *state)
        raise KeyboardInterrupt

    keep = int8_pairs._keep
    monkeypatch.setattr(int8_pairs, "_keep", interrupted)
    checkpoint = tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt):
        train(TINY, arithmetic, 1, 0.05, checkpoint=checkpoint)
    monkeypatch.setattr(int8_pairs, "_keep", keep)
    resumed = train(TINY, arithmetic, 1, 0.05, checkpoint=checkpoint)
    assert resumed.train_loss == whole.train_loss


def test_a_finished_training_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_pairs, "CHECKPOINTS", tmp_path)
    case = replace(TINY, epochs=1)
    store = Store(tmp_path / "pairs.json")
    first = store.training(case, "fp32", 1, 0.05)
    monkeypatch.setattr(int8_pairs, "train", pytest.fail)
    assert store.training(case, "fp32", 1, 0.05) == first


def test_the_interval_is_that_of_student() -> None:
    assert interval([0.1, -0.3, 0.2]) == "+0.00 ± 0.66"
    assert interval([0.25]) == "+0.25"
