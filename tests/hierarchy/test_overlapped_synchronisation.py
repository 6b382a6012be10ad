"""Leaders of a star or tree send their models while slower groups train: against the whole interval as one graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import (
    Cluster,
    LayerProfile,
    ModelProfile,
    TaskGraph,
    Transfer,
    Usage,
    parse_cluster,
)
from socflower.cluster.topology import Server
from socflower.hierarchy import GroupPlan, IntervalCosts, Rebalancing, SyncInterval, plan_groups
from socflower.hierarchy.rebalancing import CapacitiesInUse
from socflower.sim import EventClock, Trace, steady_state
from socflower.sim.symmetry import fold
from tests.hierarchy.test_rebalancing import Weather

DEVICES = ("snapdragon-865", "snapdragon-8gen1", "jetson-nano", "raspberry-pi-4b")
NEVER = 1e9


def profile(flops: float, num_bytes: float) -> ModelProfile:
    return ModelProfile(
        name="toy",
        input_bytes=4.0,
        layers=(
            LayerProfile(
                name="only",
                kind="Linear",
                forward_flops=flops,
                output_bytes=4.0,
                weight_bytes=num_bytes,
                num_tensors=2,
            ),
        ),
    )


def interval(num_steps: int, *, across_servers: bool = True) -> SyncInterval:
    return SyncInterval(
        index=0,
        first_step=0,
        num_steps=num_steps,
        epoch_end=1.0,
        deal_epoch=0,
        across_servers=across_servers,
    )


def work(cluster: Cluster, plan: GroupPlan, **changes: Any) -> IntervalCosts:
    values: dict[str, Any] = {
        "cluster": cluster,
        "plan": plan,
        "profile": profile(1e8, 4e6),
        "num_samples": 640,
        "batch_size": 32,
        "steps_per_epoch": 10,
        "uplink_turns": True,
    }
    return IntervalCosts(**(values | changes))


def without_barrier(
    steps: TaskGraph, closing: TaskGraph, waits: Mapping[int, Sequence[int]], repeat: int
) -> TaskGraph:
    """Every step as tasks of its own, and what closes them: each leader after the last step of its group."""
    size, tasks = len(steps.tasks), list(steps.tasks)
    for number in range(1, repeat):
        for index, task in enumerate(steps.tasks):
            changes: dict[str, Any] = {
                "after_previous": (),
                "after": (
                    *(number * size + other for other in task.after),
                    *((number - 1) * size + other for other in {index, *task.after_previous}),
                ),
            }
            if isinstance(task, Transfer):
                changes["after_round"] = tuple(number * size + other for other in task.after_round)
            tasks.append(replace(task, **changes))
    tasks[:size] = [replace(task, after_previous=()) for task in steps.tasks]
    first = len(tasks)
    for task in closing.tasks:
        place = task.source if isinstance(task, Transfer) else task.device
        ends = [
            (repeat - 1) * size + index
            for index, step in enumerate(steps.tasks)
            if place in waits
            and {*waits[place]}
            & {*([step.source, step.target] if isinstance(step, Transfer) else [step.device])}
        ]
        tasks.append(replace(task, after=(*ends, *(first + other for other in task.after))))
    return TaskGraph(tasks=tuple(tasks), participants=steps.participants)


def brute_force(of: IntervalCosts, this: SyncInterval) -> Usage:
    steps, closing = of.step(), of.synchronisation(across_servers=this.across_servers)
    clock = EventClock(of.cluster, extrapolate=False)
    if closing is None:
        return clock.run(steps, repeat=this.num_steps)
    waits = {group.leader: group.members for group in of.plan.groups}
    return clock.run(without_barrier(steps, closing, waits, this.num_steps))


def with_barrier(of: IntervalCosts, this: SyncInterval) -> Usage:
    clock, closing = EventClock(of.cluster), of.synchronisation(across_servers=this.across_servers)
    usage = clock.run(of.step(), repeat=this.num_steps)
    return usage if closing is None else usage + clock.run(closing)


def close(left: Usage, right: Usage) -> None:
    assert left.duration_s == pytest.approx(right.duration_s, rel=1e-9, abs=1e-9)
    for name in ("soc_seconds", "energy_j", "num_bytes"):
        ours = {
            key: value
            for key, value in getattr(left, name).items()
            if value or key in getattr(right, name)
        }
        assert ours == pytest.approx(getattr(right, name), rel=1e-9, abs=1e-9)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Boards of different devices, so that groups are of unequal speed; perhaps in two servers."""
    boards = draw(
        st.lists(st.tuples(st.integers(1, 4), st.sampled_from(DEVICES)), min_size=1, max_size=5)
    )
    cluster = parse_cluster({}, [{"socs": count, "device": device} for count, device in boards])
    if len(boards) > 1 and draw(st.booleans()):
        first = draw(st.integers(1, len(boards) - 1))
        cluster = replace(
            cluster,
            servers=tuple(
                Server(num_boards=count, uplink_bytes_per_s=2e8)
                for count in (first, len(boards) - first)
            ),
        )
    return cluster


@st.composite
def works(draw: st.DrawFn) -> IntervalCosts:
    cluster = draw(clusters())
    plan = plan_groups(cluster, draw(st.integers(1, cluster.num_socs)))
    return work(
        cluster,
        plan,
        profile=profile(draw(st.sampled_from([1e6, 1e8])), draw(st.sampled_from([4e4, 4e7]))),
        uplink_turns=draw(st.booleans()),
        leaders=draw(st.sampled_from(["star", "tree"])),
        fusion=draw(st.sampled_from(["buckets", "per-tensor"])),
        overlap_buckets=draw(st.sampled_from([1, 2])),
    )


@settings(max_examples=120)
@given(of=works(), num_steps=st.integers(1, 30), across_servers=st.booleans())
def test_an_interval_takes_what_a_graph_of_it_without_barrier_takes(
    of: IntervalCosts,
    num_steps: int,
    across_servers: bool,
) -> None:
    this = interval(num_steps, across_servers=across_servers)
    close(of.run(this, EventClock(of.cluster)), brute_force(of, this))


@settings(max_examples=40)
@given(of=works(), num_steps=st.integers(1, 30))
def test_folded_it_takes_the_same(of: IntervalCosts, num_steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady_state, "fold", lambda program: fold(program, 0))
        ours = of.run(interval(num_steps), EventClock(of.cluster))
    close(ours, brute_force(of, interval(num_steps)))


@settings(max_examples=30)
@given(of=works(), num_steps=st.integers(1, 30))
def test_with_dynamics_that_change_nothing_it_takes_the_same(
    of: IntervalCosts, num_steps: int
) -> None:
    this, capacities = interval(num_steps), CapacitiesInUse(0.05)
    clock = EventClock(of.cluster, Weather((0.0, [1.0] * of.cluster.num_socs, frozenset())))
    rebalanced = replace(of, rebalancing=Rebalancing())
    close(rebalanced.run(this, clock, capacities=capacities), of.run(this, EventClock(of.cluster)))


@settings(max_examples=40)
@given(
    num_boards=st.integers(1, 4),
    slots=st.integers(1, 4),
    num_steps=st.integers(1, 30),
    leaders=st.sampled_from(["star", "tree", "ring"]),
    fusion=st.sampled_from(["buckets", "per-tensor"]),
)
def test_equal_groups_take_the_time_of_a_barrier(
    num_boards: int,
    slots: int,
    num_steps: int,
    leaders: str,
    fusion: str,
) -> None:
    """One group to a board: all are done at once, and the numbers are the same to the last bit."""
    cluster = parse_cluster({"boards": [slots] * num_boards})
    of = work(cluster, plan_groups(cluster, num_boards), leaders=leaders, fusion=fusion)
    assert of.run(interval(num_steps), EventClock(cluster)) == with_barrier(of, interval(num_steps))


@settings(max_examples=30)
@given(of=works(), num_steps=st.integers(1, 30))
def test_a_ring_waits_for_all(of: IntervalCosts, num_steps: int) -> None:
    ring = replace(of, leaders="ring")
    assert ring.run(interval(num_steps), EventClock(of.cluster)) == with_barrier(
        ring, interval(num_steps)
    )


def uneven(leaders: str = "star", **changes: Any) -> IntervalCosts:
    """Three boards of three devices, a group on each: nothing that one exchanges crosses another's links."""
    cluster = parse_cluster({}, [{"socs": 2, "device": device} for device in DEVICES[:3]])
    return work(cluster, plan_groups(cluster, 3), leaders=leaders, **changes)


def test_quick_groups_have_sent_their_models_when_the_slowest_is_done() -> None:
    of, num_steps = uneven(profile=profile(1e9, 4e7)), 20
    model_s = of.exchange.num_bytes / of.cluster.hub_bytes_per_s
    early = (
        with_barrier(of, interval(num_steps)).duration_s
        - of.run(interval(num_steps), EventClock(of.cluster)).duration_s
    )
    assert early == pytest.approx(2.0 * model_s, rel=1e-2), (
        "two of three models were at the hub already"
    )


@pytest.mark.parametrize("leaders", ["star", "tree"])
def test_after_a_change_of_speed_leaders_have_the_same_head_start(leaders: str) -> None:
    """Half-way all SoCs become slower, which changes nothing in who is done when but by that."""
    of, num_steps = uneven(leaders, profile=profile(1e9, 4e7)), 20
    first_s = EventClock(of.cluster).predicted_s(of.step(), repeat=num_steps) / 10
    weather = Weather((0.0, [1.0] * 6, frozenset()), (first_s, [0.999999] * 6, frozenset()))
    usage, steady = (
        of.run(interval(num_steps), EventClock(of.cluster, weather)),
        of.run(interval(num_steps), EventClock(of.cluster)),
    )
    assert usage.duration_s == pytest.approx(steady.duration_s, rel=1e-4)
    assert usage.total_energy_j == pytest.approx(steady.total_energy_j, rel=1e-4)
    assert dict(usage.num_bytes) == pytest.approx(dict(steady.num_bytes))
    assert sum(usage.soc_seconds.values()) == pytest.approx(6 * usage.duration_s)


def test_groups_with_long_rings_have_head_starts_too() -> None:
    """Their rounds are not simulated one by one: only what would share links with them is left out, here nothing."""
    cluster = parse_cluster(
        {}, [{"socs": 24, "device": "snapdragon-865"}, {"socs": 24, "device": "jetson-nano"}]
    )
    of = work(cluster, plan_groups(cluster, 2), profile=profile(1e9, 4e7), batch_size=240)
    assert (
        EventClock(cluster).run_overlapped(
            of.step(), of.synchronisation() or of.step(), {0: (0,), 24: (24,)}, repeat=4
        )
        is None
    )
    close(of.run(interval(4), EventClock(cluster)), brute_force(of, interval(4)))


def test_the_trace_shows_both_and_what_was_skipped() -> None:
    of, trace = uneven(profile=profile(1e9, 4e7)), Trace()
    usage = of.run(interval(400), EventClock(of.cluster, trace=trace))
    spans = list(_spans(trace))
    runs = [(name, duration_s) for row, name, _, duration_s in spans if row == "runs"]
    assert [name for name, _ in runs] == ["to epoch 1", "synchronisation"]
    assert sum(duration_s for _, duration_s in runs) == pytest.approx(usage.duration_s)
    uploads = [
        start_s
        for row, name, start_s, _ in spans
        if name == "sync upload" and row.startswith("SoC")
    ]
    assert len(uploads) == 3 and min(uploads) < runs[0][1] * 0.9
    skipped = [span for span in spans if "more repetitions" in span[1]]
    assert skipped
    for row in {row for row, *_ in skipped}:
        own = sorted(
            (start_s, start_s + duration_s)
            for other, _, start_s, duration_s in spans
            if other == row
        )
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))


def _spans(trace: Trace) -> Iterator[tuple[str, str, float, float]]:
    state = trace.state()
    for row, name, start_s, duration_s, _ in state["spans"]:
        yield state["rows"][row][1], name, start_s, duration_s
