"""Means over seeds against NumPy."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.report.quality import ACCURACY
from socflower.report.report import render_report
from socflower.report.spread import COSTS, means_of
from socflower.report.summary import headline_of, name_runs


def result(strategy: str, seed: int, value: float, reached: float | None = 1.0) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "seed": seed,
        "target_accuracy": 0.5,
        "bytes": {"hub": value},
        **dict.fromkeys((ACCURACY.final_key, ACCURACY.energy_key, *COSTS), value),
        "time_to_accuracy_s": reached,
    }


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=6))
def test_mean_and_spread_are_those_of_numpy(values: list[float]) -> None:
    ours, other = means_of(
        [result(name, seed, value) for name in ("a", "b") for seed, value in enumerate(values)]
    )
    assert (ours["strategy"], other["strategy"]) == ("a", "b")
    assert ours["seeds"] == list(range(len(values)))
    assert ours["energy_j"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert ours["spread"]["energy_j"] == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)
    assert ours["bytes"]["hub"] == pytest.approx(np.mean(values))


def test_a_figure_that_a_seed_lacks_has_no_mean_and_one_seed_has_no_spread() -> None:
    (mean,) = means_of([result("a", 1, 2.0), result("a", 2, 4.0, reached=None)])
    assert mean["time_to_accuracy_s"] is mean["spread"]["time_to_accuracy_s"] is None
    assert mean["num_reached"] == 1
    assert means_of([result("a", 1, 2.0), result("b", 1, 2.0)]) == []


def test_the_headline_is_about_means_and_the_seeds_of_a_strategy_look_the_same() -> None:
    results = [
        result("a", 1, 1.0, 10.0),
        result("b", 1, 1.0, 90.0),
        result("a", 2, 1.0, 30.0),
        result("b", 2, 1.0, 30.0),
    ]
    assert headline_of(means_of(results)) == (
        "a reaches 50.0% in 20.0 s of virtual time, 3.00× as fast as the best alternative: b takes 1 min 00 s."
    )
    assert [run.style for run in name_runs(results)] == [0, 1, 0, 1]
    assert [run.label for run in name_runs(results)][:2] == ["a (seed 1)", "b (seed 1)"]


def test_the_report_has_means_with_their_spread_and_what_a_search_chose() -> None:
    results = [
        result("a", 1, 0.5, 10.0),
        result("b", 1, 0.5, 90.0),
        result("a", 2, 0.7, 30.0),
        result("b", 2, 0.7, None),
    ]
    tried = [
        {"value": 0.1, "final_accuracy": 0.6, "time_to_accuracy_s": 2.0},
        {"value": 0.2, "final_accuracy": 0.5, "time_to_accuracy_s": None},
    ]
    found = {"a": {"chosen": 0.1, "tried": tried}}
    tuning = {"key": "learning_rate", "seed": 3, "strategies": found}
    page = render_report(results, title="t", means=means_of(results), tuning=tuning)
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "60.0% ± 14.1%" in text  # sqrt(0.02) = 0.141
    assert "20.0 s ± 14.1 s" in text
    assert "1 of 2 reached it" in text
    assert "Search of learning_rate" in text and "0.1: 60.0%, 2.00 s; 0.2: 50.0%" in text
