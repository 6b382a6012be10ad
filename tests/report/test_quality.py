"""Targets of accuracy and of loss, and what reaching them cost."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.report.quality import (
    ACCURACY,
    LOSS,
    Quality,
    costs_to_target,
    final_figures,
    quality_of,
)
from socflower.report.report import render_report
from socflower.report.spread import means_of
from socflower.report.summary import headline_of


def result(
    strategy: str, losses: list[float | None], *, seed: int = 1, target: float | None = 2.5
) -> dict[str, Any]:
    rounds = [
        {
            "round": index,
            "accuracy": None,
            "loss": loss,
            "virtual_s": 10.0 * index,
            "energy_j": 3.0 * index,
        }
        for index, loss in enumerate(losses)
    ]
    made = {
        "strategy": strategy,
        "seed": seed,
        "rounds": rounds,
        "virtual_s": 10.0 * len(losses),
        "energy_j": 9.0,
        "bytes": {"hub": 1.0},
        **final_figures(rounds[-1]),
    }
    return made | costs_to_target(made, LOSS, target)


@pytest.mark.parametrize(
    ("quality", "values", "target", "at"),
    [
        (ACCURACY, (0.1, 0.5, 0.8, 0.7, 0.9), 0.7, 2),
        (ACCURACY, (0.1, None, 0.8), 0.0, 0),
        (ACCURACY, (0.1,), 0.2, None),
        (LOSS, (5.5, 3.0, 2.4, 2.6, 2.2), 2.5, 2),
        (LOSS, (None, 3.0), 3.0, 1),
        (LOSS, (3.0, 2.9), 2.8, None),
        (LOSS, (3.0,), None, None),
    ],
)
def test_the_costs_of_a_target_are_those_of_the_first_round_that_is_as_good(
    quality: Quality,
    values: tuple[float | None, ...],
    target: float | None,
    at: int | None,
) -> None:
    rounds = [
        {quality.name: value, "virtual_s": float(index), "energy_j": 3.0 * index}
        for index, value in enumerate(values)
    ]
    costs = costs_to_target({"rounds": rounds}, quality, target)
    assert costs[quality.target_key] == target and costs["quality"] == quality.name
    assert (costs[quality.time_key], costs[quality.energy_key]) == (
        (None, None) if at is None else (at, 3.0 * at)
    )
    other = LOSS if quality is ACCURACY else ACCURACY
    assert costs[other.target_key] is costs[other.time_key] is costs[other.energy_key] is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
def test_all_reach_the_common_target(values: list[float]) -> None:
    for quality in (ACCURACY, LOSS):
        own = [abs(value) / 1e6 if quality is ACCURACY else value for value in values]
        target = quality.common_target([{quality.final_key: value} for value in own])
        assert target is not None and all(quality.reaches(value, target) for value in own)


def test_an_accuracy_that_one_lacks_is_no_target_and_a_diverged_loss_reaches_none() -> None:
    assert ACCURACY.common_target([{"final_accuracy": 0.5}, {"final_accuracy": None}]) is None
    assert ACCURACY.common_target([{"final_accuracy": 0.001}]) == 0.0
    assert LOSS.common_target([{"final_loss": 2.0}, {"final_loss": None}]) == pytest.approx(2.02)
    assert LOSS.common_target([{"final_loss": None}]) is None


def test_a_run_is_judged_by_its_loss_only_where_it_has_no_accuracy() -> None:
    assert final_figures({"accuracy": 0.5, "loss": 2.0}) == {
        "quality": "accuracy",
        "final_accuracy": 0.5,
        "final_loss": 2.0,
    }
    assert final_figures({"accuracy": None, "loss": None})["quality"] == "loss"  # diverged
    assert final_figures({})["quality"] == "accuracy"
    assert quality_of([{"quality": "accuracy"}, {"quality": "loss"}]) is LOSS
    shown = list(map(LOSS.shown, (2.41302, 2.0, 1234.5, math.nan, None)))
    assert shown == ["2.413", "2", "1234", "–", "–"]


@pytest.mark.usefixtures("with_pictures")
def test_the_report_of_losses_says_so_everywhere() -> None:
    results = [result("a", [5.5, 2.4, 2.2]), result("b", [5.5, 3.0, 2.45])]
    results += [result("a", [5.5, 2.5, 2.3], seed=2), result("b", [5.5, 3.0, 2.46], seed=2)]
    means = means_of(results)
    assert means[0]["final_loss"] == pytest.approx(2.25) and "final_accuracy" not in means[0]
    assert headline_of(means) == (
        "a reaches loss 2.5 in 10.0 s of virtual time, 2.00× as fast as the best "
        "alternative: b takes 20.0 s."
    )
    tried = [{"value": 0.1, "final_loss": 2.4, "time_to_loss_s": 2.0}]
    found = {"a": {"chosen": 0.1, "tried": tried}}
    tuning = {"key": "learning_rate", "seed": 3, "strategies": found}
    page = render_report(results, title="t", means=means, tuning=tuning)
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    for expected in ("2.25 ± 0.07071", "0.1: 2.4, 2.00 s", "target 2.5", "Final loss"):
        assert expected in text
    assert "Loss over virtual time" in page
    assert "loss on the test data (lower is better)" in page
    assert "Accuracy" not in text.replace("Accuracy Loss", "")
