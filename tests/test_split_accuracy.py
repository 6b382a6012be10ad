"""What the stored runs of benchmarks/split_accuracy.py claim, and in the slow suite all of it on digits."""

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import split_accuracy
from benchmarks.split_accuracy_runs.recipes import NORMAL, Recipe, full_plan, works

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "split-accuracy.json"


def stored() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text()))


def runs_of(setting: str, variant: str) -> dict[int, dict[str, Any]]:
    return {
        run["seed"]: run
        for run in stored()["runs"]
        if (run["setting"], run["variant"]) == (setting, variant)
    }


@pytest.mark.parametrize(
    ("setting", "variant"),
    [
        ("scratch", "K = 5, 8 bits"),
        ("scratch", "K = 5, 8 bits, diagonal"),
        ("type 1", "K = 5, 8 bits"),
        ("type 2", "K = 5, 8 bits"),
    ],
)
def test_the_stored_runs_with_8_bits_are_within_a_point_of_normal(
    setting: str, variant: str
) -> None:
    ours, normal = runs_of(setting, variant), runs_of(setting, NORMAL.name)
    assert set(ours) == {1, 2, 3} == set(normal)
    assert mean(normal[seed]["accuracy"] - ours[seed]["accuracy"] for seed in ours) <= 0.01


def test_the_stored_runs_with_window_0_had_the_weights_of_normal_training() -> None:
    compared = stored()["same_weights"]
    assert {each["setting"] for each in compared} == {"scratch", "type 2"}
    assert all(
        not each["different"] and each["tensors"] == 26 and each["batches"] >= 8
        for each in compared
    )


def test_behind_a_frozen_front_half_a_window_changed_nothing_in_the_stored_runs() -> None:
    """No gradient is sent back, so none can be late."""
    ours, normal = runs_of("type 2", "K = 5"), runs_of("type 2", NORMAL.name)
    assert len(ours) == 3
    assert all(
        run["weights_sha256"] == normal[seed]["weights_sha256"] for seed, run in ours.items()
    )


def test_the_stored_runs_were_as_late_as_their_window_and_are_all_different_trainings() -> None:
    runs = stored()["runs"]
    assert all(
        run["staleness"] == int(run["variant"].removeprefix("K = ").partition(",")[0])
        for run in runs
        if run["variant"] != NORMAL.name
    )
    trained = [
        run["weights_sha256"]
        for run in runs
        if (run["setting"], run["variant"]) != ("type 2", "K = 5")
    ]
    assert len(set(trained)) == len(trained) > 30


def test_the_stored_plan_is_the_benchmarks() -> None:
    """Otherwise `--resume` would refuse to go on."""
    split_accuracy.Runs(RESULTS, full_plan(), resume=True)
    with pytest.raises(SystemExit, match="give --resume to go on, or remove it"):
        split_accuracy.Runs(RESULTS, full_plan(), resume=False)


def test_the_rate_rises_to_its_full_value_and_falls_to_nothing() -> None:
    recipe = Recipe(
        classes=None, num_images=1000, num_held_out=0, epochs=3, batch_size=30, learning_rate=0.1
    )
    factors = [recipe.schedule(batch) for batch in range(recipe.num_batches)]
    top = math.ceil(recipe.warm_up * recipe.num_batches)
    assert recipe.num_batches == 3 * 34
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[0] > 0
    assert 0.99 < max(factors) <= 1
    assert 0 <= factors[-1] < 0.01


def test_every_training_is_named_once() -> None:
    keys = [work.key for work in works((1, 2, 3))]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_of_it_runs_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = split_accuracy.run(quick=True)
    assert all(row.ok for row in rows)
    document = json.loads((tmp_path / "out" / "split-accuracy-quick.json").read_text())
    assert len(document["runs"]) == len(works((1,)))
    assert len(document["rows"]) == len(rows)
    sent = {
        run["variant"]: run["feature_bytes"]
        for run in document["runs"]
        if run["setting"] == "scratch"
    }
    assert sent["K = 5"] == 4 * 8192
    assert sent["K = 5, 8 bits"] == pytest.approx(8192, rel=1e-3)
    assert sent["K = 5, 2 bits"] == pytest.approx(2048, rel=1e-3)
    # Error feedback cannot change what is sent.
    assert sent["K = 5, 2 bits, diagonal"] == sent["K = 5, 2 bits"]
    errors = {
        (row["bits"], row["grouping"]): row for row in document["gradients"] if row["progress"] == 1
    }
    assert errors[8, "tensor"]["none"] < errors[4, "tensor"]["none"] < errors[2, "tensor"]["none"]
