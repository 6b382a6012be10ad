"""The simulator's side of the comparison: the plan's task graph on the rack, against closed forms and the planner."""

from dataclasses import replace
from itertools import pairwise

import pytest

from socflower.cluster import StepCost
from socflower.hierarchy import Exchange, plan_groups, step_graph
from socflower.sim import EventClock
from tests.one_line import refused
from tests.testbed.cases import (
    CASES,
    CONTENDING,
    FREE,
    INSIDE,
    INTERLEAVED,
    RACK,
    SMALL_BYTES,
    VGG11_BYTES,
)
from tests.testbed.comparison import closed_form_s
from tests.testbed.prediction import plan_of, predicted_ends_s, predicted_steps_s, unrolled
from tests.testbed.ring_driver import Run
from tests.testbed.topology import MESSAGE_S

CLUSTER = RACK.cluster()
TWO_OF_SIX = CONTENDING.rings


def exchange_s(size: int, num_bytes: int = SMALL_BYTES) -> float:
    """Return what a ring takes that has its links to itself, from its 2(n-1) sub-steps."""
    return 2 * (size - 1) * (num_bytes / size / CLUSTER.link_bytes_per_s["soc0/tx"] + MESSAGE_S)


def test_rings_in_a_planners_order_are_the_planners_plan() -> None:
    for num_groups in (1, 2, 3, 4, 6):
        planned = plan_groups(CLUSTER, num_groups)
        ours = plan_of(CLUSTER, [group.members for group in planned.groups])
        assert [(group.members, group.boards, group.split) for group in ours.groups] == [
            (group.members, group.boards, group.split) for group in planned.groups
        ]
        assert (ours.communication_groups, ours.contention) == (
            planned.communication_groups,
            planned.contention,
        )


@pytest.mark.parametrize("uplink_turns", [False, True])
def test_a_graph_written_out_takes_as_long_as_the_graph_repeated(uplink_turns: bool) -> None:
    plan = plan_groups(CLUSTER, 2)
    cost = StepCost(forward_s=0.3, backward_s=0.0, update_s=0.01, processor="cpu")
    step = step_graph(
        plan,
        dict.fromkeys(plan.participants, cost),
        Exchange(num_bytes=1e6, num_tensors=1),
        uplink_turns=uplink_turns,
    )
    repeated = EventClock(CLUSTER).run(step, repeat=5)
    assert EventClock(CLUSTER).run(unrolled(step, 5)).duration_s == pytest.approx(
        repeated.duration_s
    )
    assert len(unrolled(step, 5).tasks) == 5 * len(step.tasks)


def test_a_ring_alone_takes_its_sub_steps_and_an_interleaved_one_twice_their_bytes() -> None:
    (inside,), (interleaved,) = (
        predicted_steps_s(RACK, case.run("gloo", SMALL_BYTES)) for case in (INSIDE, INTERLEAVED)
    )
    assert inside == pytest.approx([exchange_s(4)] * 8, rel=1e-5)
    assert interleaved == pytest.approx([2 * exchange_s(4) - 6 * MESSAGE_S] * 8, rel=1e-5)


@pytest.mark.parametrize("compute_s", [0.1, 0.5, 1.0])
def test_taking_turns_takes_what_F7_says(compute_s: float) -> None:
    """C + 2S for groups that start together, max(C + S, 2S) in turn."""
    alone_s = exchange_s(6)
    run = Run(
        transport="gloo", rings=TWO_OF_SIX, num_bytes=SMALL_BYTES, num_steps=5, compute_s=compute_s
    )
    for steps in predicted_steps_s(RACK, run):
        assert steps == pytest.approx([compute_s + 2 * alone_s] * 4, rel=0.01)
    for steps in predicted_steps_s(RACK, replace(run, in_turn=True)):
        assert steps == pytest.approx([max(compute_s + alone_s, 2 * alone_s)] * 4, rel=0.01)


def test_groups_keep_their_distance_and_are_faster_by_it() -> None:
    run = replace(FREE.run("gloo", SMALL_BYTES), delays_s=(0.0, 0.2))
    together_s = FREE.run("gloo", SMALL_BYTES).compute_s + 2 * exchange_s(6)
    for steps in predicted_steps_s(RACK, run):
        assert steps[:-1] == pytest.approx([together_s - 0.2] * 7, rel=0.01)


def test_the_simulator_and_the_closed_form_agree_on_every_case() -> None:
    """All rings start together, so they agree on those that drift in reality, too."""
    for case in CASES:
        for num_bytes in (SMALL_BYTES, VGG11_BYTES):
            run = case.run("gloo", num_bytes)
            for ring, steps in enumerate(predicted_steps_s(RACK, run)):
                # The last exchange of all has nobody beside it where rings take turns or ended before.
                assert steps[:-1] == pytest.approx(
                    [closed_form_s(RACK, run, ring)] * (run.num_steps - 2), rel=0.02
                )


def test_the_first_step_ends_at_zero() -> None:
    ends = predicted_ends_s(RACK, CONTENDING.run("gloo", SMALL_BYTES))
    assert [len(steps) for steps in ends] == [9, 9]
    assert all(steps[0] == 0.0 and all(a < b for a, b in pairwise(steps)) for steps in ends)


@pytest.mark.parametrize(
    ("rings", "num_steps", "delays_s", "said"),
    [
        (((0, 1), (1, 2)), 3, (), "none in common"),
        (((0,),), 3, (), "two members or more"),
        (((0, 1),), 1, (), "two steps or more"),
        (((0, 1, 2, 3),), 60, (), "overflow"),
        (((0, 1),), 3, (0.0, 1.0), "2 delays for 1 rings"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    rings: tuple[tuple[int, ...], ...], num_steps: int, delays_s: tuple[float, ...], said: str
) -> None:
    refused(
        lambda: Run(
            transport="gloo", rings=rings, num_bytes=4000, num_steps=num_steps, delays_s=delays_s
        ),
        said,
    )
