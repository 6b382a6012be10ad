"""Algorithms 1 and 2 against brute force, and the closed form against the simulator."""

from dataclasses import replace
from itertools import combinations
from math import inf
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.pipeline.plan import Policy
from socflower.pipeline.planner import dynamic_program
from socflower.pipeline.planner.allocation import Allocator, DeviceClass, LayerRanges, class_shares
from socflower.pipeline.planner.closed_form import latency, update_latency
from socflower.pipeline.planner.dynamic_program import search
from socflower.pipeline.planner.pruning import search_work
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.schedule.run import simulate_schedule
from tests.pipeline.brute_force import best_shares, plans_of_order
from tests.pipeline.problems import (
    even,
    layer,
    linear_seconds,
    plans,
    problem,
    problems,
    random_problem,
    straight_plan,
)


@settings(max_examples=100)
@given(case=problems(max_devices=4, memory=True), in_flight=st.integers(1, 5))
def test_algorithm_1_finds_the_least_time_of_the_slowest_device(
    case: PipelineProblem, in_flight: int
) -> None:
    num_layers = case.model.num_layers
    first, stop = (array.astype(np.int64) for array in np.triu_indices(num_layers + 1, 1))
    ranges = LayerRanges.of(case, first, stop)
    groups: dict[DeviceClass, list[int]] = {}
    for device in case.devices:
        groups.setdefault(DeviceClass.of(device), []).append(device.soc)
    counts = [len(socs) for socs in groups.values()]
    found = Allocator(ranges, case.micro_batch_size).allocate(list(groups), counts, in_flight)
    for index, (begin, end) in enumerate(zip(first, stop, strict=True)):
        expected_s, _ = best_shares(case, int(begin), int(end) - 1, case.devices, in_flight)
        if expected_s == inf:
            assert found.forward_s[index] == inf
            continue
        shares: dict[int, int] = {}
        for total, socs in zip(found.totals[:, index], groups.values(), strict=True):
            shares |= zip(socs, class_shares(int(total), len(socs)), strict=True)
        assert sum(shares.values()) == case.micro_batch_size
        own_s = np.array(
            [
                case.pass_s(case.device(soc), int(begin), int(end) - 1, share)
                for soc, share in shares.items()
            ]
        )
        forward_s, backward_s = own_s.max(axis=0)
        assert own_s.sum(axis=1).max() == pytest.approx(expected_s)
        assert found.forward_s[index] == pytest.approx(forward_s)
        assert found.backward_s[index] == pytest.approx(backward_s)
        assert found.most_share[index] == max(shares.values())
        assert found.num_devices[index] == np.count_nonzero(list(shares.values()))


@settings(max_examples=60)
@given(case=problems(max_devices=4, memory=True), width=st.sampled_from([1, 4, 8]))
def test_algorithm_2_keeps_the_budgets_and_its_latency_is_that_of_the_plan(
    case: PipelineProblem, width: int
) -> None:
    for found in search(case, case.devices, width=width):
        found.plan.check(case)
        # Otherwise the number of messages at an end is estimated.
        if not case.cluster.message_s:
            assert found.latency_s == pytest.approx(update_latency(case, found.plan), rel=1e-9)


def test_a_wide_search_of_an_order_finds_what_brute_force_finds() -> None:
    """The pairs (D, A) that none beats give the best plan of an order; one pair is not always enough."""
    gaps: dict[int, list[float]] = {1: [], 16: []}
    for seed in range(30):
        case = random_problem(
            np.random.default_rng(seed),
            5,
            4,
            memory=seed % 2 == 0,
            micro_batch_size=4,
            num_micro_batches=4,
            message_s=0.0,
        )
        every = (
            plan
            for size in range(1, 5)
            for order in combinations(case.devices, size)
            for plan in plans_of_order(case, order)
        )
        best_s = min((update_latency(case, plan) for plan in every), default=inf)
        for width, own in gaps.items():
            found = search(case, case.devices, width=width, may_skip=True)
            found_s = min((update_latency(case, each.plan) for each in found), default=inf)
            assert (found_s < inf) == (best_s < inf)
            if best_s < inf:
                assert found_s >= best_s * (1.0 - 1e-9)
                own.append(found_s / best_s)
    assert np.median(gaps[1]) == pytest.approx(1.0)
    assert max(gaps[16]) < 1.05
    assert sum(gaps[16]) <= sum(gaps[1])


def test_the_closed_form_of_two_stages_by_hand() -> None:
    """M = 3; E = (1 + 2, 0.5 + 0.5, 2 + 2); T_a 1 s of the first stage, which has two devices and 100 B."""
    case = problem(
        [layer(weight=100.0, output=6.25), layer()],
        [linear_seconds([0.5, 9.0], [1.0, 9.0])] * 2 + [linear_seconds([9.0, 0.5], [9.0, 0.5])],
        num_micro_batches=3,
    )
    found = latency(case, straight_plan([0, 1], [[2, 2], [4]], 3))
    assert [(step.forward_s, step.backward_s, step.after_s) for step in found.steps] == [
        (1.0, 2.0, 1.0),
        (0.25, 0.25, 0.0),
        (2.0, 2.0, 0.0),
    ]
    # D: 9, 3 x 0.5 + 3, 3 x 4 + 3 + 0.5; A: 1, -2, -2.25.
    assert (found.dominant, found.aligned_s, found.tail_s) == (2, 15.5, 1.0)


@settings(max_examples=80)
@given(data=st.data(), case=problems(max_devices=4))
def test_the_closed_form_never_exceeds_the_simulator_by_much(
    data: st.DataObject, case: PipelineProblem
) -> None:
    """F32: its ratio to the simulator has a median near 1; it omits bubbles, and where K_p is small many."""
    plan = data.draw(plans(case))
    run = simulate_schedule(case, plan)
    assert update_latency(case, plan) <= run.step_s * 1.35 + 1e-9
    # Eq. 8 adds the slowest forward and the slowest backward pass, which unequal devices may have.
    kinds = {id(case.device(soc).seconds) for soc in plan.socs}
    if len(plan.stages) == len(kinds) == 1:
        assert update_latency(case, plan) == pytest.approx(run.step_s, rel=1e-6)


def test_backward_after_forward_in_the_closed_form_is_exact_for_equal_stages() -> None:
    case = even(3, 3, 0.5, 0.75, num_micro_batches=8)
    plan = straight_plan([0, 1, 2], [[4]] * 3, 8, policy=Policy.BACKWARD_AFTER_FORWARD)
    assert update_latency(case, plan) == pytest.approx(simulate_schedule(case, plan).step_s)


@settings(max_examples=20)
@given(num_layers=st.integers(1, 8), num_devices=st.integers(1, 8))
def test_the_work_of_a_search_is_in_proportion_to_the_stages_that_it_prepends(
    num_layers: int,
    num_devices: int,
) -> None:
    case = random_problem(np.random.default_rng(1), num_layers, num_devices, micro_batch_size=8)
    with patch.object(dynamic_program, "_prepended", wraps=dynamic_program._prepended) as counted:
        list(search(case, case.devices, may_skip=True))
    one = search_work(replace(case, devices=case.devices[:1]), 1)
    assert search_work(case, 3) == 3 * max(1, counted.call_count) * one


def test_devices_may_be_skipped_and_cuts_restricted() -> None:
    """A slow device in the middle of the order is left out; only cuts after the second layer are allowed."""
    quick, slow = linear_seconds([1.0] * 4, [1.0] * 4), linear_seconds([1e3] * 4, [1e3] * 4)
    case = problem(
        [layer(output=1.0, weight=1e5) for _ in range(4)], [quick, slow, quick], num_micro_batches=8
    )
    found = min(
        search(case, case.devices, may_skip=True, width=4, bounds=np.array([0, 2, 4])),
        key=lambda each: each.latency_s,
    )
    assert found.plan.socs == (0, 2)
    assert [stage.last_layer for stage in found.plan.stages] == [1, 3]


@pytest.mark.parametrize(
    ("memory_bytes", "in_flight", "most"), [(99.0, 0, 0), (100.0, 1, 0), (129.0, 2, 1)]
)
def test_a_budget_holds_the_weights_and_then_samples_in_flight(
    memory_bytes: float, in_flight: int, most: int
) -> None:
    kept, begin = np.array([10.0]), np.array([0])
    ranges = LayerRanges(begin, begin + 1, np.array([100.0]), kept, kept, kept)
    assert ranges.most_samples(memory_bytes, in_flight) == most
    # The weights alone fill it, and nothing is in flight: any number of samples.
    assert ranges.most_samples(100.0, 0) > 10**6
