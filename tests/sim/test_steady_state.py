"""Repetition: what is not simulated again must not show in the result."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import HUB, Activity, Cluster, TaskGraph, TaskGraphBuilder
from socflower.sim import EventClock
from socflower.sim.compiled_graph import compile_graph
from socflower.sim.energy import power_w
from socflower.sim.execution import Execution, Outcome
from socflower.sim.flows import RateTable
from tests.one_line import refused
from tests.toy_clusters import TOY, Weather, ring_all_reduce, same_usage, toy_cluster
from tests.unrolled_graphs import unrolled

SMALL = toy_cluster((3, 2, 1), uplink=70.0, hub=90.0, message_s=0.05)


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Any small graph; durations are from a coarse grid, so that ties and recurrences are frequent."""
    b = TaskGraphBuilder()
    size = draw(st.integers(1, 9))
    for index in range(size):
        order = {
            "after": sorted(draw(st.sets(st.integers(0, index - 1), max_size=2))) if index else (),
            "after_previous": sorted(draw(st.sets(st.integers(0, size - 1), max_size=2))),
        }
        if draw(st.booleans()):
            place = draw(st.one_of(st.integers(0, 5), st.just(HUB)))
            processor = draw(st.sampled_from(("cpu", "npu")))
            activity = draw(st.sampled_from((Activity.COMPUTE, Activity.UPDATE)))
            seconds = draw(st.integers(0, 6)) / 2
            b.compute("c", place, seconds, processor=processor, activity=activity, **order)
        else:
            source, target = draw(st.permutations((0, 1, 2, 3, 4, 5, HUB)))[:2]
            num_bytes, num_messages = draw(st.integers(0, 5)) * 50.0, draw(st.integers(0, 3))
            b.transfer("t", source, target, num_bytes, num_messages=num_messages, **order)
    return b.build(sorted(draw(st.sets(st.integers(0, 5)))))


def in_full(cluster: Cluster) -> EventClock:
    return EventClock(cluster, extrapolate=False)


@settings(max_examples=100)
@given(graphs(), st.integers(1, 60))
def test_extrapolation_equals_full_simulation(graph: TaskGraph, repeat: int) -> None:
    same_usage(
        EventClock(SMALL).run(graph, repeat=repeat), in_full(SMALL).run(graph, repeat=repeat)
    )


@settings(max_examples=40)
@given(graphs(), st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_what_is_remembered_from_other_runs_does_not_show(
    graph: TaskGraph, repeats: list[int]
) -> None:
    clock = EventClock(SMALL)
    for repeat in repeats:
        same_usage(clock.run(graph, repeat=repeat), EventClock(SMALL).run(graph, repeat=repeat))


def outcomes(graph: TaskGraph, cluster: Cluster, repeat: int, **options: bool) -> list[Outcome]:
    """Return what happens to each component of a graph."""
    programs = [component.program for component in compile_graph(graph, cluster).components]
    return [
        Execution(
            program,
            RateTable(program.paths, program.capacities),
            repeat,
            max_instances=10**6,
            **options,
        ).run()
        for program in programs
    ]


@settings(max_examples=60)
@given(graphs(), st.integers(1, 5))
def test_activities_close_to_the_integral_of_power(graph: TaskGraph, repeat: int) -> None:
    """Power is integrated from the log of tasks, which knows nothing of states and shares."""
    usage = EventClock(SMALL).run(graph, repeat=repeat)
    all_s = len(graph.participants) * usage.duration_s
    assert sum(usage.soc_seconds.values()) == pytest.approx(all_s)
    busy: list[tuple[float, float, object, str]] = []
    components = compile_graph(graph, SMALL).components
    for component, outcome in zip(
        components, outcomes(graph, SMALL, repeat, extrapolate=False), strict=True
    ):
        for instance in outcome.instances:
            task = graph.tasks[component.tasks[instance.task]]
            is_compute = hasattr(task, "device")
            ends = (task.device,) if is_compute else (task.source, task.target)
            kind = task.processor if is_compute else ""
            busy += [(instance.start_s, instance.end_s, end, kind) for end in ends]
    instants = sorted({0.0, usage.duration_s, *(time for span in busy for time in span[:2])})
    energy_j = 0.0
    for start_s, end_s in pairwise(instants):
        under_way = [span[2:] for span in busy if span[0] <= start_s and span[1] >= end_s]
        for soc in graph.participants:
            now = {kind for place, kind in under_way if place == soc}
            watts = 1.0 + 4.0 * ("cpu" in now) + 2.0 * ("npu" in now) + 0.5 * ("" in now)
            energy_j += watts * (end_s - start_s)
    assert usage.total_energy_j == pytest.approx(energy_j, rel=1e-9, abs=1e-9)


def recurring(cluster: Cluster, graph: TaskGraph, repeat: int) -> list[tuple[int, int]]:
    """Simulated repetitions and period of each component."""
    return [
        (outcome.repetitions, outcome.recurrence.repetitions if outcome.recurrence else 0)
        for outcome in outcomes(graph, cluster, repeat)
    ]


def test_a_synchronous_group_is_simulated_a_few_times() -> None:
    b = TaskGraphBuilder()
    for members in (range(5), range(5, 10)):
        computes = [b.compute("compute", member, 1.0 + member) for member in members]
        sync = ring_all_reduce(b, members, 1000.0, 18, after=computes)
        for compute, arrived in zip(computes, sync, strict=True):
            b.follow_previous(compute, [arrived])
    found = recurring(toy_cluster((5, 5), message_s=0.01), b.build(range(10)), 1000)
    assert len(found) == 2, "groups on boards of their own are independent"
    assert all(repetitions <= 5 and period == 1 for repetitions, period in found)


def test_components_keep_their_own_periods() -> None:
    b = TaskGraphBuilder()
    b.compute("slow", 0, math.pi)
    b.compute("fast", 1, 1.0)
    usage = EventClock(toy_cluster()).run(b.build((0, 1)), repeat=10**6)
    assert usage.duration_s == pytest.approx(math.pi * 1e6)
    assert usage.soc_seconds[Activity.COMPUTE] == pytest.approx((math.pi + 1) * 1e6)


def test_without_a_steady_state_everything_is_simulated() -> None:
    """The sender is faster than its link in every repetition: no two states are alike."""
    b = TaskGraphBuilder()
    b.compute("compute", 0, 1.0)
    b.transfer("send", 0, 1, 300.0, num_messages=0, after=(0,))
    graph = b.build((0, 1))
    assert recurring(toy_cluster(), graph, 50) == [(50, 0)]
    assert EventClock(toy_cluster()).run(graph, repeat=50).duration_s == pytest.approx(1 + 50 * 3)


def test_a_period_of_several_repetitions_is_found() -> None:
    """The loop x, y, z takes 5 s and carries two repetitions at a time: x starts at 0, 2, 5, 7, 10, ... s."""
    b = TaskGraphBuilder()
    b.compute("x", 0, 1.0)
    b.compute("y", 1, 2.0, after=(0,))
    b.compute("z", 2, 2.0, after_previous=(1,))
    b.follow_previous(0, [2])
    graph, cluster = b.build((0, 1, 2)), toy_cluster()
    same_usage(EventClock(cluster).run(graph, repeat=77), in_full(cluster).run(graph, repeat=77))
    assert recurring(cluster, graph, 77)[0][1] == 2


def slow_down(at_s: float) -> Weather:
    """Halve SoC 3's speed at a given time, at the same watts."""
    return Weather((0.0, [1.0] * 5, ()), (at_s, [1.0, 1.0, 1.0, 0.5, 1.0], ()), watts={0.5: 1.0})


def synchronous_pair(first: int, second: int) -> TaskGraph:
    b = TaskGraphBuilder()
    computes = [b.compute("compute", soc, 0.5) for soc in (first, second)]
    exchange = [
        b.transfer("x", source, target, 50.0, num_messages=0, after=computes)
        for source, target in ((first, second), (second, first))
    ]
    for compute in computes:
        b.follow_previous(compute, exchange)
    return b.build((first, second))


@pytest.mark.parametrize(("at_s", "slow_steps"), [(10.0, 20), (9.5, 20), (0.3, 29), (1000.0, 0)])
def test_speed_factors_hold_for_a_chunk(at_s: float, slow_steps: int) -> None:
    dynamics, fast_steps = slow_down(at_s), 30 - slow_steps
    usage = EventClock(toy_cluster(), dynamics).run(synchronous_pair(2, 3), repeat=30)
    assert usage.duration_s == pytest.approx(fast_steps * 1.0 + slow_steps * 1.5)
    assert dynamics.now_s == pytest.approx(usage.duration_s)
    # Half of a fast step computes (5 W), half exchanges (1.5 W); SoC 0 idles.
    assert dynamics.loads[0][1] == pytest.approx([1.0, 1.0, 3.25, 3.25, 1.0])
    # A slow step: SoC 3 computes for 1 s, SoC 2 for 0.5 s and waits. All that is drawn heats.
    heat_j = [sum(long_s * watts[soc] for long_s, watts in dynamics.loads) for soc in range(5)]
    pair_j = [3.25 * fast_steps + slow_j * slow_steps for slow_j in (2.5 + 0.5 + 0.75, 5.75)]
    idle_j = usage.duration_s
    assert heat_j == pytest.approx([idle_j, idle_j, *pair_j, idle_j])


def test_other_socs_do_not_notice() -> None:
    clock = EventClock(toy_cluster(), slow_down(10.0))
    assert clock.run(synchronous_pair(0, 1), repeat=30).duration_s == 30.0


def test_filling_a_pipeline_does_not_overrun_the_chunk() -> None:
    """Three stages of 1 s: n repetitions take n + 2, so 8 fit into 10 s, not 10 * 30 / 32 = 9."""
    b = TaskGraphBuilder()
    b.compute("first", 0, 1.0)
    b.compute("second", 1, 1.0, after=(0,))
    b.compute("third", 3, 1.0, after=(1,))
    dynamics = slow_down(10.0)
    usage = EventClock(toy_cluster(), dynamics).run(b.build((0, 1, 3)), repeat=30)
    assert len(dynamics.loads) == 2
    assert usage.duration_s == pytest.approx(10.0 + 2.0 + 22 * 2.0)


def test_no_time_no_mean_power() -> None:
    b = TaskGraphBuilder()
    b.compute("nothing", 0, 0.0)
    dynamics = slow_down(10.0)
    assert EventClock(toy_cluster(), dynamics).run(b.build((0,)), repeat=3).duration_s == 0.0
    assert dynamics.loads == [(0.0, [1.0] * 5)]


@pytest.mark.parametrize("factors", [[1.0], [1.0, 1.0, 0.0, 1.0, 1.0]])
def test_impossible_speeds_are_refused(factors: Sequence[float]) -> None:
    clock = EventClock(toy_cluster(), Weather((0.0, factors, ())))
    refused(lambda: clock.run(synchronous_pair(0, 1)), "5 speed factors")


def test_steady_states_are_forgotten_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socflower.sim.event_clock._STEADY_STATES_KEPT", 2)
    clock = EventClock(toy_cluster())
    for seconds in (1.0, 2.0, 3.0, 1.0, 1.0):
        b = TaskGraphBuilder()
        b.compute("c", 0, seconds)
        assert clock.run(b.build((0,)), repeat=4).duration_s == 4 * seconds


def test_power_of_a_state() -> None:
    assert power_w(((), False), TOY) == 1.0
    both = (("cpu", Activity.COMPUTE), ("npu", Activity.COMPUTE))
    assert power_w((both, True), TOY) == 1.0 + 4.0 + 2.0 + 0.5


def add_rounds(
    b: TaskGraphBuilder,
    members: Sequence[int],
    num_bytes: float,
    rounds: int,
    works: Sequence[int] = (),
    messages: Callable[[], int] = lambda: 1,
) -> list[int]:
    """Add a ring whose every transfer takes place in rounds, each after the work of its sender."""
    first, size = b.next_index, len(members)
    return [
        b.transfer(
            "ring",
            soc,
            members[(rank + 1) % size],
            num_bytes,
            num_messages=messages(),
            rounds=rounds,
            after=works[rank : rank + 1],
            after_round=(first + (rank - 1) % size,),
        )
        for rank, soc in enumerate(members)
    ]


@st.composite
def rings(draw: st.DrawFn) -> TaskGraph:
    """Computing and rings of some groups, in rounds; groups may share processors and wait for each other."""
    b = TaskGraphBuilder()
    ended: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.permutations(range(6)))[: draw(st.integers(2, 6))]
        works = []
        for soc in members:
            after = draw(st.sampled_from([(), tuple(ended[-1:])]))
            works.append(
                b.compute("work", soc, draw(st.sampled_from([0.0, 1.0, 2.5])), after=after)
            )
        sent = add_rounds(
            b,
            members,
            draw(st.sampled_from([0.0, 50.0, 75.0])),
            draw(st.sampled_from([1, 3, 2 * (len(members) - 1), 90])),
            works,
            lambda: draw(st.integers(0, 2)),
        )
        if draw(st.booleans()):
            for work in works:
                b.follow_previous(work, sent)
        ended.append(b.compute("end", members[0], 0.5, after=sent))
    return b.build(range(6))


@settings(max_examples=60)
@given(rings(), st.integers(1, 5))
def test_rounds_are_what_a_task_for_each_of_them_would_be(graph: TaskGraph, repeat: int) -> None:
    """Whole, and with periods of rounds and of repetitions skipped."""
    expected = in_full(SMALL).run(unrolled(graph, in_order=True), repeat=repeat)
    same_usage(in_full(SMALL).run(graph, repeat=repeat), expected)
    same_usage(EventClock(SMALL).run(graph, repeat=repeat), expected)


def test_a_long_ring_is_executed_for_a_few_rounds() -> None:
    def ring(rounds: int) -> TaskGraph:
        b = TaskGraphBuilder()
        add_rounds(b, range(6), 50.0, rounds)
        return b.build(range(6))

    (outcome,) = outcomes(ring(100_000), SMALL, 1)
    assert len(outcome.instances) < 6 * 100
    thousand_s = in_full(SMALL).run(ring(1000)).duration_s
    ten_thousand_s = EventClock(SMALL).run(ring(10_000)).duration_s
    assert outcome.duration_s == pytest.approx(
        ten_thousand_s + 90_000 * (ten_thousand_s - thousand_s) / 9000
    )


@pytest.mark.parametrize(
    ("rounds", "after_round", "named"),
    [(0, (), "0 rounds"), (2, (1,), "(1,)"), (2, (0, 5), "(0, 5)")],
)
def test_rounds_that_cannot_be_are_refused(
    rounds: int, after_round: tuple[int, ...], named: str
) -> None:
    b = TaskGraphBuilder()
    b.transfer("t", 0, 1, 1.0, rounds=rounds, after_round=after_round)
    b.compute("c", 0, 1.0)
    refused(lambda: b.build((0, 1)), "task 0", named)
