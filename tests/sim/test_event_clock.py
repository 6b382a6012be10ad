"""Exact event logs and hand-calculated contention on graphs small enough to follow."""

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import HUB, Activity, Cluster, TaskGraphBuilder, Tier, Usage, parse_cluster
from socflower.cluster.virtual_clock import Pace
from socflower.sim import EventClock
from socflower.sim.compiled_graph import compile_graph
from socflower.sim.execution import Execution, Instance
from socflower.sim.flows import RateTable
from tests.one_line import refused
from tests.toy_clusters import TOY, Weather, ring_all_reduce, toy_cluster

TWO_BOARDS = toy_cluster((5, 5))


def log(
    builder: TaskGraphBuilder, cluster: Cluster, repeat: int = 1
) -> list[tuple[float, float, str]]:
    """Start, end and name of every task, in the order in which they ended (one component)."""
    graph = builder.build((0,))
    (component,) = compile_graph(graph, cluster).components
    program = component.program
    table = RateTable(program.paths, program.capacities)
    run = Execution(program, table, repeat, extrapolate=False, max_instances=1000)
    return [
        (start_s, end_s, graph.tasks[component.tasks[task]].name)
        for task, _, _, start_s, _, end_s in map(Instance._make, run.run().instances)
    ]


def duration(builder: TaskGraphBuilder, cluster: Cluster, repeat: int = 1) -> float:
    return EventClock(cluster).run(builder.build(range(cluster.num_socs)), repeat=repeat).duration_s


@pytest.mark.parametrize("repeat", [0, 1, 7])
def test_a_prediction_is_what_a_run_would_take_and_passes_no_time(repeat: int) -> None:
    b = TaskGraphBuilder()
    b.transfer("bytes", 0, 5, 200.0, after=(b.compute("work", 0, 1.0),))
    b.compute("other", 6, 2.5)
    clock, graph = EventClock(TWO_BOARDS), b.build(range(10))
    predicted_s = clock.predicted_s(graph, repeat=repeat)
    assert (clock.now_s, clock.usage) == (0.0, Usage())
    assert clock.run(graph, repeat=repeat).duration_s == predicted_s


def test_a_processor_serves_by_ready_time_then_task() -> None:
    b = TaskGraphBuilder()
    b.compute("a", 0, 2.0)
    b.compute("on npu", 0, 1.0, processor="npu")
    b.compute("late", 0, 1.0, after=(1,))
    b.compute("early", 0, 1.0)
    b.compute("nothing", 0, 0.0, after=(0,))
    assert log(b, toy_cluster()) == [
        (0.0, 1.0, "on npu"),
        (0.0, 2.0, "a"),
        (2.0, 3.0, "early"),
        (3.0, 4.0, "late"),
        (4.0, 4.0, "nothing"),
    ]


def test_two_flows_share_an_uplink() -> None:
    b = TaskGraphBuilder()
    b.transfer("long", 0, 5, 200.0, num_messages=0)
    b.transfer("short", 1, 6, 100.0, num_messages=0)
    # 50 bytes/s each until the short one ends at 2 s, then 100 bytes/s for the remaining 100 bytes.
    assert log(b, TWO_BOARDS) == [(0.0, 2.0, "short"), (0.0, 3.0, "long")]


@pytest.mark.parametrize(("uplink", "seconds"), [(20.0, 5.0), (500.0, 1.0)])
def test_links_are_full_duplex_and_the_slowest_of_a_path_limits_it(
    uplink: float, seconds: float
) -> None:
    b = TaskGraphBuilder()
    b.transfer("there", 0, 5, 100.0)
    b.transfer("back", 5, 0, 100.0)
    assert duration(b, toy_cluster((5, 5), uplink=uplink)) == seconds


def test_a_flow_takes_what_a_limited_one_leaves() -> None:
    b = TaskGraphBuilder()
    for source in (0, 1, 2):
        b.transfer("to one", source, 5, 100.0)
    b.transfer("other", 3, 6, 200.0)
    # Equal shares of the uplink are 37.5, but SoC 5 receives only 33.3 from each of three, so 50 are left for
    # the other; after 3 s it has 50 bytes to go and its own link to itself.
    ends_s = [end_s for _, end_s, _ in log(b, toy_cluster((5, 5), uplink=150.0))]
    assert ends_s == pytest.approx([3, 3, 3, 3.5])


def test_handling_is_paid_at_both_ends_before_the_bytes_one_message_at_a_time() -> None:
    b = TaskGraphBuilder()
    b.transfer("two messages", 0, 1, 100.0, num_messages=2)
    b.compute("then", 1, 1.0, after=(0,))
    assert log(b, toy_cluster(message_s=0.5)) == [(0.0, 2.0, "two messages"), (2.0, 3.0, "then")]
    server = TaskGraphBuilder()
    for source in range(1, 5):
        server.transfer("up", source, 0, 0.0, num_messages=3)
    assert duration(server, toy_cluster(message_s=0.1)) == pytest.approx(4 * 3 * 0.1)


@pytest.mark.parametrize(("slots", "n"), [((5,), 2), ((5,), 5), ((5, 5), 10)])
def test_closed_form_of_the_ring(slots: tuple[int, ...], n: int) -> None:
    """2(n-1)·tensors·a + 2(n-1)/n·bytes/B: both directions of a link are used, no link twice."""
    b = TaskGraphBuilder()
    ring_all_reduce(b, range(n), 1000.0, 18)
    expected_s = 2 * (n - 1) * (18 * 0.01 + 1000 / n / 100)
    assert duration(b, toy_cluster(slots, message_s=0.01)) == pytest.approx(expected_s)


def test_interleaved_ranks_double_the_bytes_on_the_uplink() -> None:
    contiguous, interleaved = TaskGraphBuilder(), TaskGraphBuilder()
    ring_all_reduce(contiguous, (0, 1, 5, 6), 1000.0)
    ring_all_reduce(interleaved, (0, 5, 1, 6), 1000.0)
    assert duration(interleaved, TWO_BOARDS) == pytest.approx(2 * duration(contiguous, TWO_BOARDS))


@pytest.mark.parametrize("n", [2, 5])
def test_closed_form_of_the_parameter_server(n: int) -> None:
    """2(n-1)·bytes/B + 2(n-1)·tensors·a: the server's link and its handler serve all others in turn."""
    b = TaskGraphBuilder()
    up = [b.transfer("up", source, 0, 1000.0, num_messages=18) for source in range(1, n)]
    reduce = b.compute("reduce", 0, 0.0, after=up)
    for target in range(1, n):
        b.transfer("down", 0, target, 1000.0, num_messages=18, after=(reduce,))
    expected_s = 2 * (n - 1) * (18 * 0.01 + 1000 / 100)
    assert duration(b, toy_cluster(message_s=0.01)) == pytest.approx(expected_s)


def groups_on_one_uplink(turns: bool) -> TaskGraphBuilder:
    """Two groups, each with a member on either board: computing takes 3 s, an exchange alone 2 s (F7)."""
    b = TaskGraphBuilder()
    starts: list[int] = []
    syncs: list[list[int]] = []
    for members in ((0, 5), (1, 6)):
        computes = [b.compute("compute", member, 3.0) for member in members]
        after = [*computes, *syncs[0]] if turns and syncs else computes
        starts.append(b.compute("turn", HUB, 0.0, processor=str(members), after=after))
        syncs.append(ring_all_reduce(b, members, 200.0, after=(starts[-1], starts[-1])))
        for compute in computes:
            b.follow_previous(compute, syncs[-1])
    if turns:
        b.follow_previous(starts[0], syncs[1])
    return b


@pytest.mark.parametrize(
    ("turns", "link", "once_s", "step_s"),
    [
        (False, 100.0, 3 + 2 * 2, 3 + 2 * 2),
        (True, 100.0, 3 + 2 + 2, max(3 + 2, 2 * 2)),
        (True, 25.0, 3 + 8 + 8, max(3 + 8, 2 * 8)),
    ],
)
def test_taking_turns_hides_all_but_the_larger_of_c_plus_s_and_2s(
    turns: bool, link: float, once_s: float, step_s: float
) -> None:
    b, cluster = groups_on_one_uplink(turns), toy_cluster((5, 5), link=link)
    assert duration(b, cluster) == pytest.approx(once_s)
    assert duration(b, cluster, 11) - duration(b, cluster, 10) == pytest.approx(step_s)


def test_repetitions_overlap_unless_told_otherwise() -> None:
    b = TaskGraphBuilder()
    b.compute("compute", 0, 1.0)
    b.transfer("send", 0, 1, 100.0, num_messages=0, after=(0,))
    assert log(b, toy_cluster(), repeat=3) == [
        (0.0, 1.0, "compute"),
        (1.0, 2.0, "compute"),
        (1.0, 2.0, "send"),
        (2.0, 3.0, "compute"),
        (2.0, 3.0, "send"),
        (3.0, 4.0, "send"),
    ]
    b.follow_previous(0, [1])
    assert duration(b, toy_cluster(), 3) == 6.0


def test_usage_of_work_transfer_and_waiting() -> None:
    b = TaskGraphBuilder()
    b.compute("compute", 0, 2.0)
    b.compute("update", 0, 1.0, activity=Activity.UPDATE, after=(0,))
    b.transfer("send", 0, 1, 200.0, after=(0,))
    b.transfer("report", 1, HUB, 100.0, after=(2,))
    usage = EventClock(toy_cluster()).run(b.build((0, 1, 2)))
    # SoC 0: compute 0-2, update 2-3 while sending, sends 2-4, idle 4-5. SoC 1: idle 0-2, network 2-5. SoC 2: idle.
    assert usage.duration_s == 5.0
    assert usage.soc_seconds == {
        Activity.COMPUTE: 2.0,
        Activity.UPDATE: 1.0,
        Activity.SYNCHRONISATION: 4.0,
        Activity.IDLE: 8.0,
    }
    assert usage.energy_j == {
        Activity.COMPUTE: 10.0,
        Activity.UPDATE: 5.0,
        Activity.IDLE: 8.0,
        Activity.SYNCHRONISATION: 0.5 + 1.5 + 3 * 1.5,
    }
    assert usage.num_bytes == dict.fromkeys(Tier, 0.0) | {Tier.INTRA_BOARD: 200.0, Tier.HUB: 100.0}


def test_processors_that_work_together_draw_idle_watts_once() -> None:
    b = TaskGraphBuilder()
    b.compute("cpu", 0, 2.0)
    b.compute("npu", 0, 2.0, processor="npu", activity=Activity.UPDATE)
    usage = EventClock(toy_cluster()).run(b.build((0,)))
    assert usage.soc_seconds[Activity.COMPUTE] == usage.soc_seconds[Activity.UPDATE] == 1.0
    assert usage.total_energy_j == 2.0 * (1.0 + 4.0 + 2.0)
    assert usage.energy_j[Activity.COMPUTE] == 2.0 * (4.0 + 0.5)


def test_only_participants_count_and_servers_draw_nothing() -> None:
    b = TaskGraphBuilder()
    b.compute("aggregate", HUB, 3.0)
    b.compute("elsewhere", 1, 1.0)
    usage = EventClock(toy_cluster()).run(b.build((0,)))
    assert usage.duration_s == 3.0
    assert usage.total_energy_j == usage.energy_j[Activity.IDLE] == 3.0


def test_runs_add_up() -> None:
    b = TaskGraphBuilder()
    b.compute("compute", 0, 2.0)
    clock, graph = EventClock(toy_cluster()), b.build((0,))
    first, second = clock.run(graph, repeat=3), clock.run(graph)
    assert (first.duration_s, second.duration_s, clock.now_s) == (6.0, 2.0, 8.0)
    assert clock.usage == first + second
    assert clock.run(graph, repeat=0) == Usage()
    assert clock.run(TaskGraphBuilder().build((0,)), repeat=5).duration_s == 0.0
    assert clock.now_s == 8.0


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (lambda b: b.compute("c", 99, 1.0), "SoC 99"),
        (lambda b: b.compute("c", "cloud", 1.0), "'cloud'"),
        (lambda b: b.compute("c", 0, 1.0, processor="gpu"), "'gpu'"),
        (lambda b: b.compute("c", 0, -1.0), "seconds"),
        (lambda b: b.transfer("c", 0, 99, 1.0), "SoC 99"),
        (lambda b: b.transfer("c", 0, 0, 1.0), "from 0"),
        (lambda b: b.transfer("c", 0, 1, float("inf")), "num_bytes"),
        (lambda b: b.transfer("c", 0, 1, 1.0, num_messages=-1), "num_messages"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    add: Callable[[TaskGraphBuilder], int], named: str
) -> None:
    b = TaskGraphBuilder()
    add(b)
    refused(lambda: EventClock(toy_cluster()).run(b.build((0,))), "task 'c'", named)


def test_unknown_participants_and_negative_repeats_are_refused() -> None:
    clock, none = EventClock(toy_cluster()), TaskGraphBuilder()
    refused(lambda: clock.run(none.build((5,))), "SoC 5")
    for run in (clock.run, clock.predicted_s):
        refused(lambda run=run: run(none.build((0,)), repeat=-1), "repeat", "-1")


# ------------------------------------------------------------------------------------- states and dynamics
@settings(max_examples=20)
@given(
    before=st.lists(st.integers(0, 40), max_size=4), after=st.lists(st.integers(0, 40), max_size=4)
)
def test_a_restored_clock_continues_to_the_last_bit(
    before: Sequence[int], after: Sequence[int]
) -> None:
    cluster = parse_cluster({"boards": 2, "socs_per_board": 2})
    b = TaskGraphBuilder()
    sent = b.transfer("send", 0, 3, 1e6 / 3, after=[b.compute("compute", 0, 0.1)])
    b.compute("update", 3, 0.7, activity=Activity.UPDATE, after=[sent])
    b.transfer("up", 1, HUB, 1234.5)
    graph, whole, restored = b.build(range(4)), EventClock(cluster), EventClock(cluster)
    for repeat in before:
        whole.run(graph, repeat=repeat)
    restored.restore(json.loads(json.dumps(whole.state())))
    for repeat in after:
        assert restored.run(graph, repeat=repeat) == whole.run(graph, repeat=repeat)
    assert (restored.now_s, restored.usage) == (whole.now_s, whole.usage)
    assert restored.state() == whole.state()


def switching_clock() -> EventClock:
    """SoC 0 runs at half speed and a third of its watts for 2 s, then at full; fans draw 10 W."""
    weather = Weather(
        (0.0, [0.5, 1.0, 1.0, 1.0], {3}), (2.0, [1.0] * 4, ()), watts={0.5: 1 / 3}, fans_w=10.0
    )
    return EventClock(toy_cluster([4]), dynamics=weather)


def works(*seconds: float) -> TaskGraphBuilder:
    b = TaskGraphBuilder()
    for soc, each in enumerate(seconds):
        b.compute("work", soc, each)
    return b


def test_watts_above_idle_follow_the_dynamics_and_cooling_is_an_activity_of_its_own() -> None:
    # 2 s at half speed, then 2 s at full.
    usage = switching_clock().run(works(1.0).build([0]), repeat=3)
    assert usage.duration_s == pytest.approx(4.0)
    assert usage.energy_j[Activity.COMPUTE] == pytest.approx(4.0 * 1.0 + 2.0 * 4.0 * (1 / 3 + 1))
    assert usage.energy_j[Activity.COOLING] == pytest.approx(40.0)
    assert Activity.COOLING not in usage.soc_seconds


def test_running_while_steady_ends_at_the_change_and_says_how_often() -> None:
    clock, graph, pace = switching_clock(), works(0.25).build([0]), Pace({0: 100})
    usage = clock.run_while_steady(graph, pace)
    assert (pace.remaining, usage.duration_s) == ({0: 96}, pytest.approx(2.0))
    clock.run_while_steady(graph, pace, at_most=7)
    assert pace.remaining == {0: 89}
    assert clock.now_s == pytest.approx(2.0 + 7 * 0.25)
    refused(lambda: clock.run_while_steady(graph, pace, at_most=0), "at_most", "0")


def test_parts_that_never_wait_for_each_other_continue_at_their_own_pace() -> None:
    """SoC 0 is slow in the first two seconds only: it does not hold SoC 1 up, and ends what it began as it began."""
    # SoC 0 takes 1.5 s at half speed: it begins at 0 and 1.5 s, then at full speed from 3 s on.
    clock, graph, pace = switching_clock(), works(0.75, 0.5).build([0, 1]), Pace({0: 4, 1: 4})
    clock.run_while_steady(graph, pace)
    assert clock.now_s == 2.0
    assert (pace.remaining, pace.ahead_s) == ({0: 2, 1: 0}, {0: pytest.approx(1.0), 1: 0.0})
    usage = clock.run_while_steady(graph, pace)
    assert pace.done
    assert clock.now_s == pytest.approx(3.0 + 2 * 0.75)
    assert usage.soc_seconds[Activity.IDLE] == pytest.approx(2.5)  # SoC 1's, which has done all
    assert clock.usage.soc_seconds[Activity.COMPUTE] == pytest.approx(4.5 + 2.0)


def test_resting_lasts_until_something_changes_and_costs_idle_watts_and_fans() -> None:
    clock = switching_clock()
    assert clock.taken_socs() == {3}
    usage = clock.idle([0, 1])
    assert usage.duration_s == clock.now_s == 2.0
    assert usage.energy_j == {
        Activity.IDLE: pytest.approx(4.0 * TOY.idle_w),
        Activity.COOLING: 20.0,
    }
    assert clock.taken_socs() == frozenset()
    for still in (clock, EventClock(toy_cluster())):
        refused(lambda still=still: still.idle([0]), "inf s")


def test_a_clock_keeps_its_dynamics() -> None:
    graph, whole, restored = works(0.75).build([0]), switching_clock(), switching_clock()
    whole.run(graph)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert restored.run(graph, repeat=5) == whole.run(graph, repeat=5)
