"""The profiler: what it times is what it says, smoothing is the nearest sequence."""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.runtime.measuring import (
    Measuring,
    both_parts,
    from_document,
    measure_cloud,
    measure_costs,
    monotone,
    to_document,
)
from socflower.model_graph.cut_points import capture_split
from tests.edgecloud.runtime.split_training import adam, chain, chain_split, image_model, sgd
from tests.one_line import refused

HOW = Measuring(optimizer=adam, batch_size=4, num_repeats=2, num_warm_ups=1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_monotone_is_the_nearest_non_decreasing_sequence(values: list[int]) -> None:
    """Against brute force over pools: the best fit is constant on runs, with the means of the runs."""

    def error(fit: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(fit, values, strict=True))

    best = min(
        (
            fit
            for bounds in itertools.product((False, True), repeat=len(values) - 1)
            if (fit := pooled(values, bounds)) == sorted(fit)
        ),
        key=error,
    )
    found = monotone(values)
    assert found == sorted(found) and error(found) == pytest.approx(error(best))
    assert sum(found) == pytest.approx(sum(values))
    assert monotone(sorted(values)) == sorted(values)


def pooled(values: list[int], bounds: tuple[bool, ...]) -> list[float]:
    runs = [[values[0]]]
    for value, starts in zip(values[1:], bounds, strict=True):
        if starts:
            runs.append([])
        runs[-1].append(value)
    return [sum(run) / len(run) for run in runs for _ in run]


class Clock:
    """A clock by which the n-th interval takes n seconds."""

    def __init__(self) -> None:
        self.now_s, self.reads = 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        self.now_s += self.reads // 2 if self.reads % 2 == 0 else 0.0
        return self.now_s


def test_what_counts_is_the_median_of_the_repeats_after_warm_ups() -> None:
    calls: list[int] = []
    how = Measuring(optimizer=adam, batch_size=1, num_repeats=5, num_warm_ups=3, clock=Clock())
    assert how.seconds(lambda: calls.append(0)) == 3.0 and len(calls) == 8


def test_runs_that_last_less_than_asked_for_are_repeated() -> None:
    how = replace(SMALL, at_least_s=4.5, clock=Clock())
    assert how.seconds(lambda: None) == pytest.approx((1 + 2 + 3) / 3)


def test_costs_of_a_small_model_are_complete_and_leave_it_as_it_was() -> None:
    model, shape = image_model("lenet5")
    split = capture_split(model, shape, name="lenet5")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    costs = measure_costs(split, HOW, bits=(4, 8, 32), feedback="diagonal")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [cut.name for cut in costs.cuts] == ["1", "2", "4", "5", "8", "10"]
    for cut, point in zip(costs.cuts, split.cuts, strict=True):
        assert cut.feature_elements == 4 * point.feature_elements
        # Adam keeps two moments, and a count per tensor.
        num_tensors = len(split.front_names(split.cuts.index(point)))
        assert cut.front_weight_bytes == 3 * point.front_weight_bytes + 4 * num_tensors
        assert cut.edge_memory_bytes > 4 * point.front_weight_bytes
    for key, rising in (("edge_forward_s", True), ("cloud_s", False)):
        values = [getattr(cut, key) for cut in costs.cuts]
        assert values == sorted(values, reverse=not rising) and min(values) > 0
    assert (
        set(costs.codec_s_per_element) == set(costs.decode_s_per_element) == {4, 8}
        and costs.label_bytes == 32
    )
    assert costs.edge_only_s >= max(
        cut.edge_forward_s + cut.edge_backward_s for cut in costs.cuts
    ) * (1 - 1e-9)
    num_bytes = sum(value.numel() * 4 for value in model.parameters())
    assert costs.model_weight_bytes == 3 * num_bytes + 4 * len(before)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_two_durations_and_their_sum_are_what_was_timed(first_s: float, second_s: float) -> None:
    assert both_parts(first_s, second_s, first_s + second_s) == pytest.approx((first_s, second_s))


def test_the_sum_makes_both_durations_more_exact() -> None:
    """Errors of 10 % in each timing of equal durations: the squares of what is left are a sixth smaller."""
    noise = 1.0 + 0.1 * np.random.default_rng(1).standard_normal((2000, 3))
    found = np.array([both_parts(first, second, 2.0 * both) for first, second, both in noise])
    assert np.square(found - 1.0).mean() < 0.85 * np.square(noise[:, :2] - 1.0).mean()
    assert abs(found.mean() - 1.0) < 0.01
    assert both_parts(0.0, 1.0, 1.0) == (0.0, 1.0)


def test_frozen_layers_have_no_backward_pass_and_no_activations_to_keep() -> None:
    costs = measure_costs(capture_split(chain(), (6,), frozen=1), HOW)
    free = measure_costs(chain_split(), HOW)
    assert [cut.front_trains for cut in costs.cuts][:3] == [False, False, True]
    assert [cut.edge_backward_s for cut in costs.cuts[:2]] == [0.0, 0.0]
    assert all(
        frozen.edge_memory_bytes < cut.edge_memory_bytes
        for frozen, cut in zip(costs.cuts, free.cuts, strict=True)
    )


def test_the_cloud_is_measured_there() -> None:
    split = chain_split()
    cloud_s = measure_cloud(split, HOW)
    costs = measure_costs(split, HOW, cloud_s=cloud_s)
    assert tuple(cut.cloud_s for cut in costs.cuts) == cloud_s
    refused(lambda: measure_costs(split, HOW, cloud_s=[1.0]), "1", "5 cuts")


SMALL = Measuring(optimizer=sgd, batch_size=2, num_repeats=1, num_warm_ups=1)


def test_costs_come_back_from_json_and_what_is_no_costs_does_not() -> None:
    costs = measure_costs(chain_split(), SMALL)
    document: dict[str, Any] = json.loads(json.dumps(to_document(costs)))
    assert from_document(document) == costs
    cut = document["cuts"][0]
    less = {key: value for key, value in document.items() if key != "edge_only_s"}
    for wrong, named in (
        ({}, "schema"),
        ({**document, "schema": 2}, "2"),
        ({**document, "speed": 1}, "'speed'"),
        ({**document, "cuts": 3}, "cuts"),
        ({**document, "cuts": [{**cut, "edge_forward_s": "1"}]}, "edge_forward_s"),
        ({**document, "cuts": [{**cut, "edge_forward_s": -1.0}]}, "edge_forward_s = -1"),
        ({**document, "cuts": [{**cut, "front_trains": 1}]}, "front_trains"),
        (less, "edge_only_s"),
        ({**document, "codec_s_per_element": {"few": 1.0}}, "codec_s_per_element"),
    ):
        refused(lambda wrong=wrong: from_document(wrong), "split costs", named)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 0),
        ("num_repeats", 0),
        ("num_warm_ups", 0),
        ("evict_bytes", -1),
        ("at_least_s", -1),
    ],
)
def test_measuring_nothing_is_refused(key: str, value: int) -> None:
    refused(lambda: replace(SMALL, **{key: value}), f"{key} = {value}")
    assert np.isfinite(HOW.seconds(lambda: None))


def test_a_timing_may_be_a_mean_over_as_many_runs_as_last_long_enough() -> None:
    """Every fourth run is stopped for long, as by a quota: a median of single runs would not see it."""
    now_s, runs = [0.0], [0]

    def work() -> None:
        runs[0] += 1
        now_s[0] += 9.0 if runs[0] % 4 == 0 else 1.0

    single = replace(SMALL, num_repeats=7, clock=lambda: now_s[0])
    assert single.seconds(work) == 1.0
    assert replace(single, at_least_s=300.0).seconds(work) == pytest.approx(3.0, rel=0.02)


def test_parts_of_a_disturbed_timing_are_never_negative() -> None:
    for first_s, second_s, sum_s in itertools.product((1e-4, 1e-3, 5e-2), repeat=3):
        assert min(both_parts(first_s, second_s, sum_s)) >= 0.0
    assert both_parts(1.0, 2.0, 3.0) == pytest.approx((1.0, 2.0))
