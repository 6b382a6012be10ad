"""What the simulator says of a run in the testbed: the plan's own task graph, on the rack as a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from socflower.cluster import Cluster, Compute, StepCost, TaskGraph, Transfer
from socflower.hierarchy import Exchange, Group, GroupPlan, communication_groups, step_graph
from socflower.sim import EventClock, Trace
from tests.testbed.ring_driver import Run
from tests.testbed.topology import Rack

_UPDATE_S = 1e-6  # the testbed's SoCs update nothing; the simulator's do for a moment, which ends the step in its trace


def plan_of(cluster: Cluster, rings: Sequence[Sequence[int]]) -> GroupPlan:
    """Return a plan with just these rings; what a planner made in the same order comes out equal."""
    groups = tuple(
        Group(
            group_id=index,
            members=tuple(ring),
            leader=ring[0],
            boards=tuple(sorted({cluster.board_of(soc) for soc in ring})),
        )
        for index, ring in enumerate(rings)
    )
    split = [group for group in groups if group.split]
    return GroupPlan(
        groups=groups,
        communication_groups=communication_groups(groups),
        contention=max(
            sum(board in group.boards for group in split) for board in range(len(cluster.boards))
        ),
        slots_per_board=cluster.slots_per_board,
        participants=tuple(sorted(soc for ring in rings for soc in ring)),
        proven_optimal=False,
    )


@cache
def predicted_ends_s(rack: Rack, run: Run) -> tuple[tuple[float, ...], ...]:
    """Return, for each ring, when the simulator ends its steps, from the end of the first one on."""
    cluster = rack.cluster()
    plan = plan_of(cluster, run.rings)
    cost = StepCost(forward_s=run.compute_s, backward_s=0.0, update_s=_UPDATE_S, processor="cpu")
    step = step_graph(
        plan,
        dict.fromkeys(plan.participants, cost),
        Exchange(num_bytes=run.num_bytes, num_tensors=1),
        uplink_turns=run.in_turn,
    )
    delays_s = {
        soc: delay_s for ring, delay_s in zip(run.rings, run.delays_s, strict=False) for soc in ring
    }
    trace = Trace(max_spans=1_000_000)
    EventClock(cluster, trace=trace, extrapolate=False).run(unrolled(step, run.num_steps, delays_s))
    assert not trace.num_dropped
    ends: dict[str, list[float]] = {}
    for _, name, start_s, duration_s, _ in trace.state()["spans"]:
        ends.setdefault(name, []).append(start_s + duration_s)
    by_ring = []
    for group in plan.groups:
        # A step of the ring is over when the last of its members has updated; members update once a step.
        updates = sorted(ends[f"group {group.group_id} update"])
        last = updates[len(group.members) - 1 :: len(group.members)]
        by_ring.append(tuple(end_s - last[0] for end_s in last))
    return tuple(by_ring)


def predicted_steps_s(rack: Rack, run: Run) -> list[list[float]]:
    """Return, for each ring, what its steps take in the simulator, but for the first."""
    return [
        [after - before for before, after in pairwise(ends)] for ends in predicted_ends_s(rack, run)
    ]


def unrolled(
    graph: TaskGraph, repetitions: int, delays_s: Mapping[int, float] | None = None
) -> TaskGraph:
    """Return `repetitions` of a graph written out as one, with SoCs that begin late by `delays_s`.

    A repeated graph cannot say that a group begins later than another: there is but one first repetition.
    """
    tasks: list[Compute | Transfer] = []
    late = {}
    for soc, delay_s in (delays_s or {}).items():
        late[soc] = len(tasks)
        tasks.append(Compute(name="late", device=soc, seconds=delay_s))
    for repetition in range(repetitions):
        first, before = len(tasks), len(tasks) - len(graph.tasks)
        for index, task in enumerate(graph.tasks):
            after = {first + other for other in task.after}
            if repetition:
                after |= {before + other for other in (*task.after_previous, index)}
            elif not task.after and isinstance(task, Compute) and task.device in late:
                after.add(late[int(task.device)])
            if isinstance(task, Transfer):
                task = replace(task, after_round=tuple(first + other for other in task.after_round))
            tasks.append(replace(task, after=tuple(sorted(after)), after_previous=()))
    return TaskGraph(tasks=tuple(tasks), participants=graph.participants)
