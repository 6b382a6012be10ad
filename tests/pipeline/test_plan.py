"""Plans: stages, shares, slices, memory and bytes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import StepTimings
from socflower.errors import InfeasiblePlan
from socflower.pipeline.plan import (
    PipelinePlan,
    Policy,
    Stage,
    TwoDPlan,
    from_json,
    intervals,
    slices_between,
)
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.problem import LayerSeconds
from socflower.pipeline.schedule.run import simulate_schedule
from tests.one_line import refused
from tests.pipeline.problems import even, layer, linear_seconds, parts, problem, straight_plan

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(senders=SHARES, data=st.data())
def test_every_sample_crosses_once_from_its_sender_to_its_receiver(
    senders: Sequence[int], data: st.DataObject
) -> None:
    total = sum(senders)
    receivers = data.draw(parts(total, data.draw(st.integers(1, min(6, total)))))
    pieces = slices_between(senders, receivers)
    crossing = [sample for piece in pieces for sample in range(piece.first, piece.stop)]
    assert crossing == list(range(total))
    for piece in pieces:
        for shares, rank in ((senders, piece.sender), (receivers, piece.receiver)):
            first, stop = intervals(shares)[rank]
            assert first <= piece.first < piece.stop <= stop
    assert len(pieces) <= len(senders) + len(receivers) - 1


@given(
    steps=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=5),
    gaps=st.data(),
    num_samples=st.integers(0, 70),
)
def test_layer_seconds_are_those_of_step_timings(
    steps: list[float], gaps: st.DataObject, num_samples: int
) -> None:
    batches = tuple(np.cumsum([gaps.draw(st.integers(1, 12)) for _ in steps]).tolist())
    forward_s, backward_s = np.array([steps, steps]), np.array([steps, steps[::-1]])
    seconds = LayerSeconds(
        device="toy", batches=batches, forward_s=forward_s, backward_s=backward_s
    )
    there_s, back_s = (
        StepTimings(batches=batches, step_s=tuple(own)).seconds(num_samples)
        for own in (steps, steps[::-1])
    )
    assert seconds.forward(0, 0, num_samples) == pytest.approx(there_s)
    assert seconds.forward(0, 1, num_samples) == pytest.approx(2 * there_s)
    assert seconds.backward(1, 1, num_samples) == pytest.approx(back_s)


def test_memory_is_weights_gradients_optimiser_and_what_is_in_flight() -> None:
    """2 copies of 30 B and one of the optimiser; 3 in flight x 2 samples x (5 B of input + 7 + 8 B kept)."""
    case = problem(
        [layer(output=5.0), layer(weight=10.0, activation=7.0), layer(weight=20.0, activation=8.0)],
        [linear_seconds([1] * 3, [1] * 3)],
    )
    stage = Stage(first_layer=1, last_layer=2, devices=(0,), shares=(2,), in_flight=3)
    assert stage.memory_bytes(case, 2) == 3 * 30 + 3 * 2 * (5 + 7 + 8)


def test_the_document_is_plain_and_complete() -> None:
    case = even(2, 3, output=5.0)
    found = json.loads(json.dumps(straight_plan([0, 1], [[3, 1], [4]], 4).to_document(case)))
    assert [stage["layers"] for stage in found["stages"]] == [[0, 0], [1, 1]]
    assert found["stages"][0]["devices"][1] == {
        "soc": 1,
        "device": "toy 1",
        "share": 1,
        "samples": [3, 4],
        "processor": "cpu",
        "memory_bytes": 0.0,
        "budget_bytes": 1e9,
    }
    assert found["communication_bytes"] == 2 * 16 * 5


# ---------------------------------------------------------------------------------------------------- mistakes


def two_stages(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> PipelinePlan:
    """Return a plan of two stages of one device, changed."""
    one, other = straight_plan([0, 1], [[4], [4]], 4).stages
    stages = (replace(one, **first), replace(other, **second))
    return PipelinePlan(
        **{"stages": stages, "micro_batch_size": 4, "num_micro_batches": 4, **changes}
    )


BUDGET = even(1, 1, weight=1e6, memory=1e6)
ONE = straight_plan([0], [[4]], 4)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: two_stages({"shares": (3,)}, {}), "[3] 4"),
        (lambda: two_stages({"devices": (0, 2), "shares": (4, 0)}, {}), "shares 0"),
        (lambda: two_stages({"devices": (0, 0), "shares": (2, 2)}, {}), "[0, 0]"),
        (lambda: two_stages({"devices": (0, 2)}, {}), "[0, 2]"),
        (lambda: two_stages({"last_layer": -1}, {}), "-1"),
        (lambda: two_stages({}, {}, num_micro_batches=0), "num_micro_batches 0"),
        (lambda: two_stages({"in_flight": 1}, {"in_flight": 2}), "in_flight 1 2"),
        (lambda: two_stages({"in_flight": 5}, {}), "in_flight 5 4"),
        (lambda: two_stages({}, {}, policy=Policy.BACKWARD_AFTER_FORWARD), "in_flight 1 4"),
        (lambda: two_stages({}, {"first_layer": 3, "last_layer": 3}), "3 1"),
        (lambda: two_stages({}, {"devices": (0,)}), "[0, 0]"),
        (lambda: TwoDPlan(groups=(ONE, ONE)), "[0, 0]"),
        (lambda: TwoDPlan(groups=()), "group"),
        (
            lambda: TwoDPlan(groups=(ONE, straight_plan([1], [[4]], 4, first_soc=1))),
            "layers",
        ),
        (lambda: ONE.check(even(2, 1)), "1 2 toy"),
        (lambda: from_json("{}"), "version"),
    ],
)
def test_mistakes_in_plans_are_named(call: Callable[[], object], named: str) -> None:
    refused(call, *named.split(" "))


def test_a_plan_over_a_budget_is_refused_with_both_numbers() -> None:
    named = ("3.0 MB", "toy 0", "SoC 0", "1.0 MB")
    refused(lambda: ONE.check(BUDGET), *named, error=InfeasiblePlan)


@given(coded=st.sampled_from([1.0, 0.5, 0.25, 0.125]))
def test_what_is_coded_costs_its_part_of_a_cut(coded: float) -> None:
    own = even(2, 2, 0.0, 0.0, output=50.0)
    plan = straight_plan((0, 1), ((4,), (4,)), 4)
    both = replace(own, activation_part=coded, gradient_part=coded)
    whole, part = simulate_schedule(own, plan), simulate_schedule(both, plan)
    assert plan.communication_bytes(both) == coded * plan.communication_bytes(own)
    assert part.num_bytes == coded * whole.num_bytes
    assert part.step_s == pytest.approx(coded * whole.step_s)
    assert update_latency(both, plan) == pytest.approx(coded * update_latency(own, plan))
    one_way = simulate_schedule(replace(own, activation_part=coded), plan)
    assert one_way.num_bytes == (1 + coded) / 2 * whole.num_bytes
