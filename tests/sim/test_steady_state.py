"""Repetition: what is not simulated again must not show in the result."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import (
    HUB,
    Activity,
    Cluster,
    Device,
    GraphBuilder,
    Processor,
    TaskGraph,
    Usage,
)
from socflower.cluster.topology import uniform_cluster
from socflower.errors import ConfigError
from socflower.sim import EventClock
from socflower.sim.compiled_graph import compile_graph
from socflower.sim.energy import power_w
from socflower.sim.execution import Execution
from socflower.sim.flows import RateTable
from tests.unrolled_graphs import unrolled

MakeCluster = Callable[..., Cluster]
AddRing = Callable[..., list[int]]
TOY = Device(
    name="toy",
    idle_w=1.0,
    network_w=0.5,
    memory_bytes=1e9,
    memory_bytes_per_s=1e9,
    layer_overhead_s=0.0,
    processors={
        "cpu": Processor(name="cpu", flops_per_s=1e9, active_w=5.0),
        "npu": Processor(name="npu", flops_per_s=1e9, active_w=3.0),
    },
)
SMALL = uniform_cluster(
    TOY,
    (3, 2, 1),
    soc_bytes_per_s=100.0,
    board_bytes_per_s=70.0,
    hub_bytes_per_s=90.0,
    message_s=0.05,
)


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Any small graph; durations are from a coarse grid, so that ties and recurrences are frequent."""
    b = GraphBuilder()
    size = draw(st.integers(1, 9))
    for index in range(size):
        after = sorted(draw(st.sets(st.integers(0, index - 1), max_size=2))) if index else ()
        previous = sorted(draw(st.sets(st.integers(0, size - 1), max_size=2)))
        if draw(st.booleans()):
            b.compute(
                "c",
                draw(st.one_of(st.integers(0, 5), st.just(HUB))),
                draw(st.integers(0, 6)) / 2,
                processor=draw(st.sampled_from(("cpu", "npu"))),
                after=after,
                after_previous=previous,
                activity=draw(st.sampled_from((Activity.COMPUTE, Activity.UPDATE))),
            )
        else:
            source, target = draw(st.permutations((0, 1, 2, 3, 4, 5, HUB)))[:2]
            b.transfer(
                "t",
                source,
                target,
                draw(st.integers(0, 5)) * 50.0,
                num_messages=draw(st.integers(0, 3)),
                after=after,
                after_previous=previous,
            )
    return b.build(sorted(draw(st.sets(st.integers(0, 5)))))


def close(left: Usage, right: Usage) -> None:
    assert left.duration_s == pytest.approx(right.duration_s, rel=1e-9, abs=1e-9)
    for name in ("soc_seconds", "energy_j", "num_bytes"):
        assert getattr(left, name) == pytest.approx(getattr(right, name), rel=1e-9, abs=1e-9)


@settings(max_examples=100)
@given(graphs(), st.integers(1, 60))
def test_extrapolation_equals_full_simulation(graph: TaskGraph, repeat: int) -> None:
    close(
        EventClock(SMALL).run(graph, repeat=repeat),
        EventClock(SMALL, extrapolate=False).run(graph, repeat=repeat),
    )


@settings(max_examples=40)
@given(graphs(), st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_what_is_remembered_from_other_runs_does_not_show(
    graph: TaskGraph, repeats: list[int]
) -> None:
    clock = EventClock(SMALL)
    for repeat in repeats:
        close(clock.run(graph, repeat=repeat), EventClock(SMALL).run(graph, repeat=repeat))


@settings(max_examples=60)
@given(graphs(), st.integers(1, 5))
def test_activities_close_to_the_integral_of_power(graph: TaskGraph, repeat: int) -> None:
    """Power is integrated from the log of tasks, which knows nothing of states and shares."""
    usage = EventClock(SMALL).run(graph, repeat=repeat)
    assert sum(usage.soc_seconds.values()) == pytest.approx(
        len(graph.participants) * usage.duration_s
    )
    busy: list[tuple[float, float, int, str]] = []
    for component in compile_graph(graph, SMALL).components:
        program = component.program
        table = RateTable(program.paths, program.capacities)
        for instance in (
            Execution(program, table, repeat, extrapolate=False, max_instances=10**6)
            .run()
            .instances
        ):
            task = graph.tasks[component.tasks[instance.task]]
            ends = (
                {"": (task.source, task.target)}
                if hasattr(task, "source")
                else {task.processor: (task.device,)}
            )
            busy += [
                (instance.start_s, instance.end_s, soc, processor)
                for processor, socs in ends.items()
                for soc in socs
                if isinstance(soc, int)
            ]
    instants = sorted({0.0, usage.duration_s, *(time for span in busy for time in span[:2])})
    energy_j = 0.0
    for start_s, end_s in pairwise(instants):
        for soc in graph.participants:
            now = {
                processor
                for begin, end, at, processor in busy
                if at == soc and begin <= start_s and end >= end_s
            }
            watts = 1.0 + 4.0 * ("cpu" in now) + 2.0 * ("npu" in now) + 0.5 * ("" in now)
            energy_j += watts * (end_s - start_s)
    assert usage.total_energy_j == pytest.approx(energy_j, rel=1e-9, abs=1e-9)


def recurring(cluster: Cluster, graph: TaskGraph, repeat: int) -> list[tuple[int, int]]:
    """Simulated repetitions and period of each component."""
    outcomes = []
    for component in compile_graph(graph, cluster).components:
        program = component.program
        outcome = Execution(program, RateTable(program.paths, program.capacities), repeat).run()
        outcomes.append(
            (outcome.repetitions, outcome.recurrence.repetitions if outcome.recurrence else 0)
        )
    return outcomes


def test_a_synchronous_group_is_simulated_a_few_times(
    make_cluster: MakeCluster, add_ring: AddRing
) -> None:
    b = GraphBuilder()
    for members in (range(5), range(5, 10)):
        computes = [b.compute("compute", member, 1.0 + member) for member in members]
        sync = add_ring(b, members, 1000.0, 18, after=computes)
        for compute, arrived in zip(computes, sync, strict=True):
            b.follow_previous(compute, [arrived])
    found = recurring(make_cluster((5, 5), message_s=0.01), b.build(range(10)), 1000)
    assert len(found) == 2, "groups on boards of their own are independent"
    assert all(repetitions <= 5 and period == 1 for repetitions, period in found)


def test_components_keep_their_own_periods(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("slow", 0, math.pi)
    b.compute("fast", 1, 1.0)
    usage = EventClock(make_cluster()).run(b.build((0, 1)), repeat=10**6)
    assert usage.duration_s == pytest.approx(math.pi * 1e6)
    assert usage.soc_seconds[Activity.COMPUTE] == pytest.approx((math.pi + 1) * 1e6)


def test_without_a_steady_state_everything_is_simulated(make_cluster: MakeCluster) -> None:
    """The sender runs ahead of its link for ever: no two states are alike."""
    b = GraphBuilder()
    b.compute("compute", 0, 1.0)
    b.transfer("send", 0, 1, 300.0, num_messages=0, after=(0,))
    graph = b.build((0, 1))
    assert recurring(make_cluster(), graph, 50) == [(50, 0)]
    assert EventClock(make_cluster()).run(graph, repeat=50).duration_s == pytest.approx(1 + 50 * 3)


def test_a_period_of_several_repetitions_is_found(make_cluster: MakeCluster) -> None:
    """The loop x, y, z takes 5 s and carries two repetitions at a time: x starts at 0, 2, 5, 7, 10, ... s."""
    b = GraphBuilder()
    b.compute("x", 0, 1.0)
    b.compute("y", 1, 2.0, after=(0,))
    b.compute("z", 2, 2.0, after_previous=(1,))
    b.follow_previous(0, [2])
    graph = b.build((0, 1, 2))
    close(
        EventClock(make_cluster()).run(graph, repeat=77),
        EventClock(make_cluster(), extrapolate=False).run(graph, repeat=77),
    )
    assert recurring(make_cluster(), graph, 77)[0][1] == 2


class SlowDown:
    """Halves SoC 3's speed at a given time; checks what the clock tells it."""

    def __init__(self, num_socs: int, at_s: float) -> None:
        self.num_socs, self.at_s, self.now_s = num_socs, at_s, 0.0
        self.loads: list[Sequence[float]] = []
        self.heat_j = [0.0] * num_socs

    def speed_factors(self) -> list[float]:
        return [
            0.5 if soc == 3 and self.now_s >= self.at_s - 1e-9 else 1.0
            for soc in range(self.num_socs)
        ]

    def power_factors(self) -> list[float]:
        return [1.0] * self.num_socs

    def taken_socs(self) -> frozenset[int]:
        return frozenset()

    def steady_s(self, power_w: Sequence[float]) -> float:
        return self.at_s - self.now_s if self.now_s < self.at_s - 1e-9 else math.inf

    def advance(self, duration_s: float, power_w: Sequence[float]) -> float:
        self.now_s += duration_s
        self.loads.append(power_w)
        self.heat_j = [
            before_j + duration_s * watts
            for before_j, watts in zip(self.heat_j, power_w, strict=True)
        ]
        return 0.0

    def state(self) -> dict[str, Any]:
        return {"now_s": self.now_s}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.now_s = state["now_s"]


def synchronous_pair(first: int, second: int) -> TaskGraph:
    b = GraphBuilder()
    computes = [b.compute("compute", first, 0.5), b.compute("compute", second, 0.5)]
    exchange = [
        b.transfer("x", first, second, 50.0, num_messages=0, after=computes),
        b.transfer("x", second, first, 50.0, num_messages=0, after=computes),
    ]
    for compute in computes:
        b.follow_previous(compute, exchange)
    return b.build((first, second))


@pytest.mark.parametrize(("at_s", "slow_steps"), [(10.0, 20), (9.5, 20), (0.3, 29), (1000.0, 0)])
def test_speed_factors_hold_for_a_chunk(
    make_cluster: MakeCluster, at_s: float, slow_steps: int
) -> None:
    dynamics = SlowDown(5, at_s)
    usage = EventClock(make_cluster(), dynamics).run(synchronous_pair(2, 3), repeat=30)
    assert usage.duration_s == pytest.approx((30 - slow_steps) * 1.0 + slow_steps * 1.5)
    assert dynamics.now_s == pytest.approx(usage.duration_s)
    # Half of a fast step computes (5 W), half exchanges (1.5 W); SoC 0 idles.
    assert dynamics.loads[0] == pytest.approx([1.0, 1.0, 3.25, 3.25, 1.0])
    # A slow step: SoC 3 computes for 1 s, SoC 2 for 0.5 s and waits. All that is drawn heats.
    fast_steps = 30 - slow_steps
    assert dynamics.heat_j == pytest.approx(
        [
            usage.duration_s,
            usage.duration_s,
            3.25 * fast_steps + (2.5 + 0.5 + 0.75) * slow_steps,
            3.25 * fast_steps + (5.0 + 0.75) * slow_steps,
            usage.duration_s,
        ]
    )


def test_other_socs_do_not_notice(make_cluster: MakeCluster) -> None:
    dynamics = SlowDown(5, 10.0)
    assert (
        EventClock(make_cluster(), dynamics).run(synchronous_pair(0, 1), repeat=30).duration_s
        == 30.0
    )


def test_filling_a_pipeline_does_not_overrun_the_chunk(make_cluster: MakeCluster) -> None:
    """Three stages of 1 s: n repetitions take n + 2, so 8 fit into 10 s, not 10 * 30 / 32 = 9."""
    b = GraphBuilder()
    b.compute("first", 0, 1.0)
    b.compute("second", 1, 1.0, after=(0,))
    b.compute("third", 3, 1.0, after=(1,))
    dynamics = SlowDown(5, 10.0)
    usage = EventClock(make_cluster(), dynamics).run(b.build((0, 1, 3)), repeat=30)
    assert len(dynamics.loads) == 2
    assert usage.duration_s == pytest.approx(10.0 + 2.0 + 22 * 2.0)


def test_no_time_no_mean_power(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("nothing", 0, 0.0)
    dynamics = SlowDown(5, 10.0)
    assert EventClock(make_cluster(), dynamics).run(b.build((0,)), repeat=3).duration_s == 0.0
    assert dynamics.loads == [[1.0] * 5]


@pytest.mark.parametrize("factors", [[1.0], [1.0, 1.0, 0.0, 1.0, 1.0]])
def test_impossible_speeds_are_config_errors(
    make_cluster: MakeCluster, factors: list[float]
) -> None:
    dynamics = SlowDown(5, 10.0)
    dynamics.speed_factors = lambda: factors
    with pytest.raises(ConfigError, match="need 5 speed factors above 0"):
        EventClock(make_cluster(), dynamics).run(synchronous_pair(0, 1))


def test_solutions_are_forgotten_in_turn(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socflower.sim.event_clock._SOLUTIONS_KEPT", 2)
    clock = EventClock(make_cluster())
    for seconds in (1.0, 2.0, 3.0, 1.0, 1.0):
        b = GraphBuilder()
        b.compute("c", 0, seconds)
        assert clock.run(b.build((0,)), repeat=4).duration_s == 4 * seconds


def test_power_of_a_state() -> None:
    assert power_w(((), False), TOY) == 1.0
    assert (
        power_w(((("cpu", Activity.COMPUTE), ("npu", Activity.COMPUTE)), True), TOY)
        == 1.0 + 4.0 + 2.0 + 0.5
    )


def rings(draw: st.DrawFn) -> TaskGraph:
    """Computing and rings of some groups, in rounds; groups may share processors and wait for each other."""
    b = GraphBuilder()
    ended: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.permutations(range(6)))[: draw(st.integers(2, 6))]
        seconds = draw(
            st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=len(members), max_size=len(members))
        )
        works = [
            b.compute("work", soc, one_s, after=draw(st.sampled_from([(), tuple(ended[-1:])])))
            for soc, one_s in zip(members, seconds, strict=True)
        ]
        first, size = b.next_index, len(members)
        num_bytes, rounds = (
            draw(st.sampled_from([0.0, 50.0, 75.0])),
            draw(st.sampled_from([1, 3, 2 * (size - 1), 90])),
        )
        sent = [
            b.transfer(
                "ring",
                soc,
                members[(rank + 1) % size],
                num_bytes,
                num_messages=draw(st.integers(0, 2)),
                rounds=rounds,
                after=(works[rank],),
                after_round=(first + (rank - 1) % size,),
            )
            for rank, soc in enumerate(members)
        ]
        if draw(st.booleans()):
            for work in works:
                b.follow_previous(work, sent)
        ended.append(b.compute("end", members[0], 0.5, after=sent))
    return b.build(range(6))


@settings(max_examples=60)
@given(st.composite(rings)(), st.integers(1, 5))
def test_rounds_are_what_a_task_for_each_of_them_would_be(graph: TaskGraph, repeat: int) -> None:
    """Whole, and with periods of rounds and of repetitions skipped."""
    expected = EventClock(SMALL, extrapolate=False).run(
        unrolled(graph, in_order=True), repeat=repeat
    )
    close(EventClock(SMALL, extrapolate=False).run(graph, repeat=repeat), expected)
    close(EventClock(SMALL).run(graph, repeat=repeat), expected)


def test_a_long_ring_is_executed_for_a_few_rounds() -> None:
    b = GraphBuilder()
    sent = [
        b.transfer("ring", soc, (soc + 1) % 6, 50.0, rounds=100_000, after_round=((soc - 1) % 6,))
        for soc in range(6)
    ]
    assert sent == list(range(6))
    (component,) = compile_graph(b.build(range(6)), SMALL).components
    execution = Execution(
        component.program,
        RateTable(component.program.paths, component.program.capacities),
        1,
        max_instances=10**6,
    )
    outcome = execution.run()
    assert len(outcome.instances) < 6 * 100
    thousand = EventClock(SMALL, extrapolate=False).run(ring_of_rounds(1000))
    ten_thousand = EventClock(SMALL).run(ring_of_rounds(10_000))
    assert outcome.duration_s == pytest.approx(
        ten_thousand.duration_s + 90_000 * (ten_thousand.duration_s - thousand.duration_s) / 9000
    )


def ring_of_rounds(rounds: int) -> TaskGraph:
    b = GraphBuilder()
    for soc in range(6):
        b.transfer("ring", soc, (soc + 1) % 6, 50.0, rounds=rounds, after_round=((soc - 1) % 6,))
    return b.build(range(6))


@pytest.mark.parametrize(
    ("rounds", "after_round", "complaint"),
    [
        (0, (), "has 0 rounds; it needs 1 or more"),
        (2, (1,), "not all transfers of 2 rounds"),
        (2, (0, 5), "not all transfers of 2 rounds"),
    ],
)
def test_rounds_that_cannot_be_are_refused(
    rounds: int, after_round: tuple[int, ...], complaint: str
) -> None:
    b = GraphBuilder()
    b.transfer("t", 0, 1, 1.0, rounds=rounds, after_round=after_round)
    b.compute("c", 0, 1.0)
    with pytest.raises(ConfigError, match=complaint):
        b.build((0, 1))
