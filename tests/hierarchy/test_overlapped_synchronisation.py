"""Leaders of a star or tree send their models while slower groups train: against the whole interval as one graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Cluster, Endpoint, TaskGraph, Transfer, Usage, parse_cluster
from socflower.cluster.task_graph import Task
from socflower.cluster.topology import Server
from socflower.hierarchy import IntervalCosts, Rebalancing, SyncInterval
from socflower.hierarchy.exchange.models import ModelExchange
from socflower.hierarchy.rebalancing import CapacitiesInUse
from socflower.sim import EventClock, Trace, steady_state
from socflower.sim.symmetry import reduce_program
from tests.hierarchy.toy_trainings import interval_costs
from tests.toy_clusters import Weather, same_usage, toy_profile

DEVICES = ("snapdragon-865", "snapdragon-8gen1", "jetson-nano", "raspberry-pi-4b")


def interval(num_steps: int, *, across_servers: bool = True) -> SyncInterval:
    return SyncInterval(
        index=0,
        first_step=0,
        num_steps=num_steps,
        epoch_end=1.0,
        deal_epoch=0,
        across_servers=across_servers,
    )


def ends_of(task: Task) -> set[Endpoint]:
    return {task.source, task.target} if isinstance(task, Transfer) else {task.device}


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
    last_step = list(enumerate(steps.tasks, (repeat - 1) * size))
    for task in closing.tasks:
        place = task.source if isinstance(task, Transfer) else task.device
        own = set(waits.get(place, ()))
        ends = [index for index, step in last_step if own & ends_of(step)]
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


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Boards of different devices, so that groups are of unequal speed; perhaps in two servers."""
    board = st.fixed_dictionaries({"socs": st.integers(1, 4), "device": st.sampled_from(DEVICES)})
    boards = draw(st.lists(board, min_size=1, max_size=5))
    cluster = parse_cluster({}, boards)
    if len(boards) > 1 and draw(st.booleans()):
        first = draw(st.integers(1, len(boards) - 1))
        servers = [
            Server(num_boards=count, uplink_bytes_per_s=2e8)
            for count in (first, len(boards) - first)
        ]
        cluster = replace(cluster, servers=tuple(servers))
    return cluster


@st.composite
def works(draw: st.DrawFn) -> IntervalCosts:
    cluster = draw(clusters())
    profile = toy_profile(draw(st.sampled_from([1e6, 1e8])), draw(st.sampled_from([4e4, 4e7])), 2)
    return interval_costs(
        cluster,
        draw(st.integers(1, cluster.num_socs)),
        profile=profile,
        uplink_turns=draw(st.booleans()),
        models=ModelExchange(kind=draw(st.sampled_from(["star", "tree"]))),
        fusion=draw(st.sampled_from(["buckets", "per-tensor"])),
        overlap_buckets=draw(st.sampled_from([1, 2])),
    )


@pytest.mark.slow
@settings(max_examples=25)
@given(of=works(), num_steps=st.integers(1, 30), across_servers=st.booleans())
def test_an_interval_takes_what_a_graph_of_it_without_barrier_takes(
    of: IntervalCosts,
    num_steps: int,
    across_servers: bool,
) -> None:
    this = interval(num_steps, across_servers=across_servers)
    same_usage(of.run(this, EventClock(of.cluster)), brute_force(of, this))


@settings(max_examples=12)
@given(of=works(), num_steps=st.integers(1, 30))
def test_reduced_it_takes_the_same(of: IntervalCosts, num_steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady_state, "reduce_program", lambda program: reduce_program(program, 0))
        ours = of.run(interval(num_steps), EventClock(of.cluster))
    same_usage(ours, brute_force(of, interval(num_steps)))


@settings(max_examples=30)
@given(of=works(), num_steps=st.integers(1, 30))
def test_with_dynamics_that_change_nothing_it_takes_the_same(
    of: IntervalCosts, num_steps: int
) -> None:
    this, capacities = interval(num_steps), CapacitiesInUse(0.05)
    clock = EventClock(of.cluster, Weather((0.0, [1.0] * of.cluster.num_socs, frozenset())))
    rebalanced = replace(of, rebalancing=Rebalancing())
    same_usage(
        rebalanced.run(this, clock, capacities=capacities), of.run(this, EventClock(of.cluster))
    )


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
    of = interval_costs(cluster, num_boards, models=ModelExchange(kind=leaders), fusion=fusion)
    assert of.run(interval(num_steps), EventClock(cluster)) == with_barrier(of, interval(num_steps))


@settings(max_examples=30)
@given(of=works(), num_steps=st.integers(1, 30))
def test_a_ring_waits_for_all(of: IntervalCosts, num_steps: int) -> None:
    ring = replace(of, models=ModelExchange(kind="ring"))
    this = interval(num_steps)
    assert ring.run(this, EventClock(of.cluster)) == with_barrier(ring, this)


HEAVY = toy_profile(1e9, 4e7, 2)


def uneven(leaders: str = "star") -> IntervalCosts:
    """Three boards of three devices, a group on each: nothing that one exchanges crosses another's links."""
    cluster = parse_cluster({}, [{"socs": 2, "device": device} for device in DEVICES[:3]])
    return interval_costs(cluster, 3, models=ModelExchange(kind=leaders), profile=HEAVY)


def test_quick_groups_have_sent_their_models_when_the_slowest_is_done() -> None:
    """Two of three models are at the hub already."""
    of, this = uneven(), interval(20)
    model_s = of.exchange.num_bytes / of.cluster.hub_bytes_per_s
    duration_s = of.run(this, EventClock(of.cluster)).duration_s
    early_s = with_barrier(of, this).duration_s - duration_s
    assert early_s == pytest.approx(2.0 * model_s, rel=1e-2)


@pytest.mark.parametrize("leaders", ["star", "tree"])
def test_after_a_change_of_speed_leaders_have_the_same_head_start(leaders: str) -> None:
    """Half-way all SoCs become slower, which changes nothing in who is done when but by that."""
    of, this = uneven(leaders), interval(20)
    first_s = EventClock(of.cluster).predicted_s(of.step(), repeat=20) / 10
    weather = Weather((0.0, [1.0] * 6, frozenset()), (first_s, [0.999999] * 6, frozenset()))
    usage = of.run(this, EventClock(of.cluster, weather))
    steady = of.run(this, EventClock(of.cluster))
    assert usage.duration_s == pytest.approx(steady.duration_s, rel=1e-4)
    assert usage.total_energy_j == pytest.approx(steady.total_energy_j, rel=1e-4)
    assert dict(usage.num_bytes) == pytest.approx(dict(steady.num_bytes))
    assert sum(usage.soc_seconds.values()) == pytest.approx(6 * usage.duration_s)


def test_groups_with_long_rings_have_head_starts_too() -> None:
    """Their rounds are not simulated one by one: only what would share links with them is left out, here nothing."""
    cluster = parse_cluster(
        {}, [{"socs": 24, "device": "snapdragon-865"}, {"socs": 24, "device": "jetson-nano"}]
    )
    of = interval_costs(cluster, 2, profile=HEAVY, batch_size=240)
    closing = of.synchronisation()
    assert closing is not None
    waits, clock = {0: (0,), 24: (24,)}, EventClock(cluster)
    assert clock.run_overlapped(of.step(), closing, waits, repeat=4) is None
    same_usage(of.run(interval(4), EventClock(cluster)), brute_force(of, interval(4)))


def test_the_trace_shows_both_and_what_was_skipped() -> None:
    of, trace = uneven(), Trace()
    usage = of.run(interval(400), EventClock(of.cluster, trace=trace))
    spans = list(_spans(trace))
    runs = [(name, duration_s) for row, name, _, duration_s in spans if row == "runs"]
    assert [name for name, _ in runs] == ["to epoch 1", "synchronisation"]
    assert sum(duration_s for _, duration_s in runs) == pytest.approx(usage.duration_s)
    uploads_s = [
        start_s for row, name, start_s, _ in spans if name == "sync upload" and row[:3] == "SoC"
    ]
    assert len(uploads_s) == 3 and min(uploads_s) < runs[0][1] * 0.9
    skipped = {row for row, name, *_ in spans if "more repetitions" in name}
    assert skipped
    for skipping in skipped:
        own = sorted((start_s, long_s) for row, _, start_s, long_s in spans if row == skipping)
        for (start_s, long_s), (next_s, _) in pairwise(own):
            assert start_s + long_s <= next_s + 1e-9


def _spans(trace: Trace) -> Iterator[tuple[str, str, float, float]]:
    state = trace.state()
    for row, name, start_s, duration_s, _ in state["spans"]:
        yield state["rows"][row][1], name, start_s, duration_s
