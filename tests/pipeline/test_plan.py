"""Plans: stages, shares, slices, memory and bytes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import StepTimings
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.pipeline.plan import PipelinePlan, Policy, Stage, intervals, slices_between
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.problem import LayerSeconds, PipelineModel
from socflower.pipeline.schedule.run import simulate_schedule
from tests.pipeline.problems import layer, linear_seconds, problem, straight_plan

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(senders=SHARES, data=st.data())
def test_every_sample_crosses_once_from_its_sender_to_its_receiver(
    senders: Sequence[int], data: st.DataObject
) -> None:
    total = sum(senders)
    ends = data.draw(
        st.sets(st.integers(1, total - 1), max_size=5) if total > 1 else st.just(set())
    )
    bounds = [0, *sorted(ends), total]
    receivers = [after - before for before, after in pairwise(bounds)]
    pieces = slices_between(senders, receivers)
    assert [sample for piece in pieces for sample in range(piece.first, piece.stop)] == list(
        range(total)
    )
    for piece in pieces:
        for shares, rank in ((senders, piece.sender), (receivers, piece.receiver)):
            first, stop = intervals(shares)[rank]
            assert first <= piece.first < piece.stop <= stop
    assert len(pieces) <= len(senders) + len(receivers) - 1


TIMES = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=5)


@given(steps=TIMES, gaps=st.data(), num_samples=st.integers(0, 70))
def test_layer_seconds_are_those_of_step_timings(
    steps: list[float], gaps: st.DataObject, num_samples: int
) -> None:
    batches = tuple(np.cumsum([gaps.draw(st.integers(1, 12)) for _ in steps]).tolist())
    seconds = LayerSeconds(
        device="toy",
        batches=batches,
        forward_s=np.array([steps, steps]),
        backward_s=np.array([steps, steps[::-1]]),
    )
    expected = StepTimings(batches=batches, step_s=tuple(steps)).seconds(num_samples)
    assert seconds.forward(0, 0, num_samples) == pytest.approx(expected)
    assert seconds.forward(0, 1, num_samples) == pytest.approx(2 * expected)
    assert seconds.backward(1, 1, num_samples) == pytest.approx(
        StepTimings(batches=batches, step_s=tuple(steps[::-1])).seconds(num_samples)
    )


def test_memory_is_weights_gradients_optimiser_and_what_is_in_flight() -> None:
    """2 copies of 30 B and one of the optimiser; 3 in flight x 2 samples x (5 B of input + 7 + 8 B kept)."""
    case = problem(
        [layer(output=5.0), layer(weight=10.0, activation=7.0), layer(weight=20.0, activation=8.0)],
        [linear_seconds([1] * 3, [1] * 3)],
    )
    stage = Stage(first_layer=1, last_layer=2, devices=(0,), shares=(2,), in_flight=3)
    assert stage.memory_bytes(case, 2) == 3 * 30 + 3 * 2 * (5 + 7 + 8)


def test_a_plan_over_a_budget_is_refused_with_both_numbers() -> None:
    case = problem([layer(weight=1e6)], [linear_seconds([1], [1])], memory=1e6)
    plan = straight_plan([0], [[4]], 4)
    with pytest.raises(
        InfeasiblePlan,
        match=r"need 3\.0 MB on toy 0 \(SoC 0\), whose budget is 1\.0 MB; use smaller",
    ):
        plan.check(case)
    other = replace(
        case,
        model=PipelineModel(name="other", layers=(layer(), layer()), input_bytes=0.0),
        devices=(replace(case.devices[0], seconds=linear_seconds([1, 1], [1, 1])),),
    )
    with pytest.raises(ConfigError, match="the plan has 1 layers, and model other has 2"):
        plan.check(other)


def test_the_document_is_plain_and_complete() -> None:
    case = problem(
        [layer("first", output=5.0), layer("second", weight=10.0)],
        [linear_seconds([1, 1], [1, 1])] * 3,
    )
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
    assert found["predicted"] is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cuts": [0, 1], "shares": [[3], [4]]}, "do not add up to the micro-batch of 3"),
        ({"shares": [[4, 0], [4]]}, "leave out devices without samples"),
        ({"num_micro_batches": 0}, "num_micro_batches = 0 must be 1 or more"),
    ],
)
def test_mistakes_in_plans_are_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        straight_plan(**{"cuts": [0, 1], "shares": [[4], [4]], "num_micro_batches": 4, **change})


def test_stages_that_would_wait_for_ever_are_refused() -> None:
    first, second = (
        Stage(first_layer=index, last_layer=index, devices=(index,), shares=(4,), in_flight=count)
        for index, count in enumerate((1, 2))
    )
    with pytest.raises(ConfigError, match="would wait for ever"):
        PipelinePlan(stages=(first, second), micro_batch_size=4, num_micro_batches=4)
    with pytest.raises(ConfigError, match="keeps all 4 micro-batches, but in_flight = 1"):
        PipelinePlan(
            stages=(first,),
            micro_batch_size=4,
            num_micro_batches=4,
            policy=Policy.BACKWARD_AFTER_FORWARD,
        )
    with pytest.raises(ConfigError, match="stages follow each other without gap"):
        PipelinePlan(
            stages=(first, replace(second, first_layer=3, last_layer=3)),
            micro_batch_size=4,
            num_micro_batches=4,
        )
    with pytest.raises(ConfigError, match="a SoC is in two stages"):
        PipelinePlan(
            stages=(first, replace(second, devices=(0,), in_flight=1)),
            micro_batch_size=4,
            num_micro_batches=4,
        )


@given(coded=st.sampled_from([1.0, 0.5, 0.25, 0.125]))
def test_what_is_coded_costs_its_part_of_a_cut(coded: float) -> None:
    own = problem(
        [layer(output=50.0), layer(weight=8.0)],
        [linear_seconds([0.0, 0.0], [0.0, 0.0])] * 2,
        link=100.0,
    )
    plan = straight_plan((0, 1), ((4,), (4,)), 4)
    both = replace(own, activation_part=coded, gradient_part=coded)
    assert plan.communication_bytes(both) == coded * plan.communication_bytes(own)
    assert simulate_schedule(both, plan).num_bytes == coded * simulate_schedule(own, plan).num_bytes
    assert simulate_schedule(both, plan).step_s == pytest.approx(
        coded * simulate_schedule(own, plan).step_s
    )
    assert update_latency(both, plan) == pytest.approx(coded * update_latency(own, plan))
    one_way = replace(own, activation_part=coded)
    assert (
        simulate_schedule(one_way, plan).num_bytes
        == (1 + coded) / 2 * simulate_schedule(own, plan).num_bytes
    )
