"""Exact event logs and hand-calculated contention on graphs small enough to follow."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import (
    HUB,
    Activity,
    Cluster,
    GraphBuilder,
    Tier,
    Usage,
    VirtualClock,
    parse_cluster,
)
from socflower.cluster.virtual_clock import Pace
from socflower.errors import ConfigError
from socflower.sim import EventClock
from socflower.sim.compiled_graph import compile_graph
from socflower.sim.execution import Execution, Instance
from socflower.sim.flows import RateTable

MakeCluster = Callable[..., Cluster]
AddRing = Callable[..., list[int]]


def log(
    builder: GraphBuilder, cluster: Cluster, participants: Sequence[int] = (0,), repeat: int = 1
) -> list[tuple[float, float, str]]:
    """Start, end and name of every task, in the order in which they ended (one component)."""
    graph = builder.build(participants)
    (component,) = compile_graph(graph, cluster).components
    program = component.program
    outcome = Execution(
        program,
        RateTable(program.paths, program.capacities),
        repeat,
        extrapolate=False,
        max_instances=1000,
    ).run()
    return [
        (start_s, end_s, graph.tasks[component.tasks[task]].name)
        for task, _, _, start_s, _, end_s in map(Instance._make, outcome.instances)
    ]


def duration(builder: GraphBuilder, cluster: Cluster, repeat: int = 1) -> float:
    return EventClock(cluster).run(builder.build(range(cluster.num_socs)), repeat=repeat).duration_s


def test_it_is_a_virtual_clock(make_cluster: MakeCluster) -> None:
    clock: VirtualClock = EventClock(make_cluster())
    assert clock.now_s == 0.0


@pytest.mark.parametrize("repeat", [0, 1, 7])
def test_a_prediction_is_what_a_run_would_take_and_passes_no_time(
    make_cluster: MakeCluster, repeat: int
) -> None:
    b = GraphBuilder()
    b.transfer("bytes", 0, 5, 200.0, after=(b.compute("work", 0, 1.0),))
    b.compute("other", 6, 2.5)
    clock, graph = EventClock(make_cluster((5, 5))), b.build(range(10))
    predicted_s = clock.predicted_s(graph, repeat=repeat)
    assert (clock.now_s, clock.usage) == (0.0, Usage())
    assert clock.run(graph, repeat=repeat).duration_s == predicted_s
    with pytest.raises(ConfigError, match="repeat must not be negative"):
        clock.predicted_s(graph, repeat=-1)


def test_a_processor_serves_by_ready_time_then_task(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("a", 0, 2.0)
    b.compute("on npu", 0, 1.0, processor="npu")
    b.compute("late", 0, 1.0, after=(1,))
    b.compute("early", 0, 1.0)
    b.compute("nothing", 0, 0.0, after=(0,))
    assert log(b, make_cluster()) == [
        (0.0, 1.0, "on npu"),
        (0.0, 2.0, "a"),
        (2.0, 3.0, "early"),
        (3.0, 4.0, "late"),
        (4.0, 4.0, "nothing"),
    ]


def test_two_flows_share_an_uplink(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.transfer("long", 0, 5, 200.0, num_messages=0)
    b.transfer("short", 1, 6, 100.0, num_messages=0)
    # 50 bytes/s each until the short one ends at 2 s, then 100 bytes/s for the remaining 100 bytes.
    assert log(b, make_cluster((5, 5))) == [(0.0, 2.0, "short"), (0.0, 3.0, "long")]


def test_links_are_full_duplex(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.transfer("there", 0, 5, 100.0, num_messages=0)
    b.transfer("back", 5, 0, 100.0, num_messages=0)
    assert duration(b, make_cluster((5, 5))) == 1.0


def test_the_slowest_link_of_a_path_limits_it(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.transfer("over two boards", 0, 5, 100.0, num_messages=0)
    assert duration(b, make_cluster((5, 5), uplink=20.0)) == 5.0
    assert duration(b, make_cluster((5, 5), uplink=500.0)) == 1.0


def test_a_flow_takes_what_a_limited_one_leaves(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    for source in (0, 1, 2):
        b.transfer("to one", source, 5, 100.0, num_messages=0)
    b.transfer("other", 3, 6, 200.0, num_messages=0)
    # Equal shares of the uplink are 37.5, but SoC 5 receives only 33.3 from each of three, so 50 are left for
    # the other; after 3 s it has 50 bytes to go and its own link to itself.
    assert [end_s for _, end_s, _ in log(b, make_cluster((5, 5), uplink=150.0))] == pytest.approx(
        [3, 3, 3, 3.5]
    )


def test_handling_is_paid_at_both_ends_before_the_bytes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(message_s=0.5)
    b = GraphBuilder()
    b.transfer("two messages", 0, 1, 100.0, num_messages=2)
    b.compute("then", 1, 1.0, after=(0,))
    assert log(b, cluster) == [(0.0, 2.0, "two messages"), (2.0, 3.0, "then")]


def test_a_parameter_server_handles_one_message_at_a_time(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    for source in range(1, 5):
        b.transfer("up", source, 0, 0.0, num_messages=3)
    assert duration(b, make_cluster(message_s=0.1)) == pytest.approx(4 * 3 * 0.1)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_closed_form_of_the_ring(make_cluster: MakeCluster, add_ring: AddRing, n: int) -> None:
    """2(n-1)·tensors·a + 2(n-1)/n·bytes/B: both directions of a link are used, no link twice."""
    b = GraphBuilder()
    add_ring(b, range(n), 1000.0, 18)
    assert duration(b, make_cluster(message_s=0.01)) == pytest.approx(
        2 * (n - 1) * (18 * 0.01 + 1000 / n / 100)
    )


def test_closed_form_of_the_ring_over_boards(make_cluster: MakeCluster, add_ring: AddRing) -> None:
    """Members contiguous by board send one flow each way over an uplink, so nothing slows down."""
    b = GraphBuilder()
    add_ring(b, range(10), 1000.0, 18)
    assert duration(b, make_cluster((5, 5), message_s=0.01)) == pytest.approx(
        2 * 9 * (18 * 0.01 + 1000 / 10 / 100)
    )


def test_interleaved_ranks_double_the_bytes_on_the_uplink(
    make_cluster: MakeCluster, add_ring: AddRing
) -> None:
    contiguous, interleaved = GraphBuilder(), GraphBuilder()
    add_ring(contiguous, (0, 1, 5, 6), 1000.0)
    add_ring(interleaved, (0, 5, 1, 6), 1000.0)
    cluster = make_cluster((5, 5))
    assert duration(interleaved, cluster) == pytest.approx(2 * duration(contiguous, cluster))


@pytest.mark.parametrize("n", [2, 5])
def test_closed_form_of_the_parameter_server(make_cluster: MakeCluster, n: int) -> None:
    """2(n-1)·bytes/B + 2(n-1)·tensors·a: the server's link and its handler serve all others in turn."""
    b = GraphBuilder()
    up = [b.transfer("up", source, 0, 1000.0, num_messages=18) for source in range(1, n)]
    reduce = b.compute("reduce", 0, 0.0, after=up)
    for target in range(1, n):
        b.transfer("down", 0, target, 1000.0, num_messages=18, after=(reduce,))
    assert duration(b, make_cluster(message_s=0.01)) == pytest.approx(
        2 * (n - 1) * (18 * 0.01 + 1000 / 100)
    )


def groups_on_one_uplink(add_ring: AddRing, turns: bool) -> GraphBuilder:
    """Two groups, each with a member on either board: computing takes 3 s, an exchange alone 2 s (F7)."""
    b = GraphBuilder()
    starts: list[int] = []
    syncs: list[list[int]] = []
    for members in ((0, 5), (1, 6)):
        computes = [b.compute("compute", member, 3.0) for member in members]
        after = [*computes, *syncs[0]] if turns and syncs else computes
        starts.append(b.compute("turn", HUB, 0.0, processor=str(members), after=after))
        syncs.append(add_ring(b, members, 200.0, after=(starts[-1], starts[-1])))
        for compute in computes:
            b.follow_previous(compute, syncs[-1])
    if turns:
        b.follow_previous(starts[0], syncs[1])
    return b


def test_groups_that_share_an_uplink_run_at_half_rate(
    make_cluster: MakeCluster, add_ring: AddRing
) -> None:
    cluster = make_cluster((5, 5))
    b = groups_on_one_uplink(add_ring, turns=False)
    assert duration(b, cluster) == pytest.approx(3 + 2 * 2)
    assert duration(b, cluster, 11) - duration(b, cluster, 10) == pytest.approx(3 + 2 * 2)


def test_taking_turns_hides_all_but_the_larger_of_c_plus_s_and_2s(
    make_cluster: MakeCluster, add_ring: AddRing
) -> None:
    cluster = make_cluster((5, 5))
    b = groups_on_one_uplink(add_ring, turns=True)
    assert duration(b, cluster) == pytest.approx(3 + 2 + 2)
    assert duration(b, cluster, 11) - duration(b, cluster, 10) == pytest.approx(max(3 + 2, 2 * 2))
    slow_links = make_cluster((5, 5), link=25.0)  # S = 8 s
    assert duration(b, slow_links, 11) - duration(b, slow_links, 10) == pytest.approx(
        max(3 + 8, 2 * 8)
    )


def test_repetitions_overlap_unless_told_otherwise(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("compute", 0, 1.0)
    b.transfer("send", 0, 1, 100.0, num_messages=0, after=(0,))
    assert log(b, make_cluster(), repeat=3) == [
        (0.0, 1.0, "compute"),
        (1.0, 2.0, "compute"),
        (1.0, 2.0, "send"),
        (2.0, 3.0, "compute"),
        (2.0, 3.0, "send"),
        (3.0, 4.0, "send"),
    ]
    b.follow_previous(0, [1])
    assert duration(b, make_cluster(), 3) == 6.0


def test_usage_of_work_transfer_and_waiting(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("compute", 0, 2.0)
    b.compute("update", 0, 1.0, activity=Activity.UPDATE, after=(0,))
    b.transfer("send", 0, 1, 200.0, num_messages=0, after=(0,))
    b.transfer("report", 1, HUB, 100.0, num_messages=0, after=(2,))
    usage = EventClock(make_cluster()).run(b.build((0, 1, 2)))
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
    assert usage.num_bytes == {
        Tier.INTRA_BOARD: 200.0,
        Tier.INTER_BOARD: 0.0,
        Tier.INTER_SERVER: 0.0,
        Tier.HUB: 100.0,
        Tier.WAN: 0.0,
    }


def test_processors_that_work_together_draw_idle_watts_once(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("cpu", 0, 2.0)
    b.compute("npu", 0, 2.0, processor="npu", activity=Activity.UPDATE)
    usage = EventClock(make_cluster()).run(b.build((0,)))
    assert usage.soc_seconds[Activity.COMPUTE] == usage.soc_seconds[Activity.UPDATE] == 1.0
    assert usage.total_energy_j == 2.0 * (1.0 + 4.0 + 2.0)
    assert usage.energy_j[Activity.COMPUTE] == 2.0 * (4.0 + 0.5)


def test_only_participants_count_and_servers_draw_nothing(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("aggregate", HUB, 3.0)
    b.compute("elsewhere", 1, 1.0)
    usage = EventClock(make_cluster()).run(b.build((0,)))
    assert usage.duration_s == 3.0
    assert usage.total_energy_j == usage.energy_j[Activity.IDLE] == 3.0


def test_runs_add_up(make_cluster: MakeCluster) -> None:
    b = GraphBuilder()
    b.compute("compute", 0, 2.0)
    clock = EventClock(make_cluster())
    first = clock.run(b.build((0,)), repeat=3)
    second = clock.run(b.build((0,)))
    assert (first.duration_s, second.duration_s, clock.now_s) == (6.0, 2.0, 8.0)
    assert clock.usage == first + second
    assert clock.run(b.build((0,)), repeat=0) == Usage()
    assert clock.run(GraphBuilder().build((0,)), repeat=5).duration_s == 0.0
    assert clock.now_s == 8.0


def test_equal_runs_give_equal_results(make_cluster: MakeCluster, add_ring: AddRing) -> None:
    def once() -> Usage:
        b = GraphBuilder()
        for first in range(0, 15, 3):
            add_ring(b, range(first, first + 3), 1000.0 / 3, 7)
        return EventClock(make_cluster((5, 5, 5), message_s=0.01)).run(
            b.build(range(15)), repeat=20
        )

    assert once() == once()


@pytest.mark.parametrize(
    ("add", "text"),
    [
        (lambda b: b.compute("c", 99, 1.0), "no SoC 99"),
        (lambda b: b.compute("c", "cloud", 1.0), "no server 'cloud'"),
        (lambda b: b.compute("c", 0, 1.0, processor="gpu"), "no processor 'gpu'"),
        (lambda b: b.compute("c", 0, -1.0), "seconds must be finite"),
        (lambda b: b.transfer("c", 0, 99, 1.0), "no SoC 99"),
        (lambda b: b.transfer("c", 0, 0, 1.0), "to itself"),
        (lambda b: b.transfer("c", 0, 1, float("inf")), "num_bytes must be finite"),
        (lambda b: b.transfer("c", 0, 1, 1.0, num_messages=-1), "num_messages must be finite"),
    ],
)
def test_what_the_cluster_does_not_have_is_a_config_error(
    make_cluster: MakeCluster,
    add: Callable[[GraphBuilder], int],
    text: str,
) -> None:
    b = GraphBuilder()
    add(b)
    with pytest.raises(ConfigError, match=text) as error:
        EventClock(make_cluster()).run(b.build((0,)))
    assert "task 'c'" in str(error.value)


def test_unknown_participants_and_negative_repeats_are_config_errors(
    make_cluster: MakeCluster,
) -> None:
    with pytest.raises(ConfigError, match="no SoC 5"):
        EventClock(make_cluster()).run(GraphBuilder().build((5,)))
    with pytest.raises(ConfigError, match="repeat must not be negative"):
        EventClock(make_cluster()).run(GraphBuilder().build((0,)), repeat=-1)


# ------------------------------------------------------------------------------------- leaving off and going on
@settings(max_examples=30)
@given(
    before=st.lists(st.integers(0, 40), max_size=4), after=st.lists(st.integers(0, 40), max_size=4)
)
def test_a_restored_clock_goes_on_to_the_last_bit(before: list[int], after: list[int]) -> None:
    cluster = parse_cluster({"boards": 2, "socs_per_board": 2})
    b = GraphBuilder()
    last = b.compute("compute", 0, 0.1)
    b.compute(
        "update",
        3,
        0.7,
        activity=Activity.UPDATE,
        after=[b.transfer("send", 0, 3, 1e6 / 3, after=[last])],
    )
    b.transfer("up", 1, HUB, 1234.5)
    graph = b.build(range(4))
    whole, restored = EventClock(cluster), EventClock(cluster)
    for repeat in before:
        whole.run(graph, repeat=repeat)
    restored.restore(json.loads(json.dumps(whole.state())))
    for repeat in after:
        assert restored.run(graph, repeat=repeat) == whole.run(graph, repeat=repeat)
    assert restored.usage == whole.usage
    assert (restored.now_s, restored.usage.total_energy_j) == (
        whole.now_s,
        whole.usage.total_energy_j,
    )
    assert restored.state() == whole.state()


class Switching:
    """SoC 0 runs at half speed and a third of its watts for 2 s, then at full; fans draw 10 W."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def speed_factors(self) -> list[float]:
        return [0.5 if self.now_s < 2.0 else 1.0, 1.0, 1.0, 1.0]

    def power_factors(self) -> list[float]:
        return [1.0 / 3.0 if self.now_s < 2.0 else 1.0, 1.0, 1.0, 1.0]

    def taken_socs(self) -> frozenset[int]:
        return frozenset({3} if self.now_s < 2.0 else ())

    def steady_s(self, power_w: Sequence[float]) -> float:
        return 2.0 - self.now_s if self.now_s < 2.0 else inf

    def advance(self, duration_s: float, power_w: Sequence[float]) -> float:
        self.now_s += duration_s
        return 10.0 * duration_s

    def state(self) -> dict[str, Any]:
        return {"now_s": self.now_s}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.now_s = state["now_s"]


def switching_clock(make_cluster: MakeCluster) -> EventClock:
    return EventClock(make_cluster([4]), dynamics=Switching())


def test_watts_above_idle_follow_the_dynamics_and_cooling_is_an_activity_of_its_own(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster([4])
    device = cluster.device_of(0)
    builder = GraphBuilder()
    builder.compute("work", 0, 1.0)
    clock = EventClock(cluster, dynamics=Switching())
    usage = clock.run(builder.build([0]), repeat=3)  # 2 s at half speed, then 2 s at full
    above_idle_w = device.processor(device.default_processor).active_w - device.idle_w
    assert usage.duration_s == pytest.approx(4.0)
    assert usage.energy_j[Activity.COMPUTE] == pytest.approx(
        4.0 * device.idle_w + 2.0 * above_idle_w * (1 / 3 + 1)
    )
    assert usage.energy_j[Activity.COOLING] == pytest.approx(40.0)
    assert Activity.COOLING not in usage.soc_seconds


def test_running_while_steady_ends_at_the_change_and_says_how_often(
    make_cluster: MakeCluster,
) -> None:
    clock = switching_clock(make_cluster)
    builder = GraphBuilder()
    builder.compute("work", 0, 0.25)
    graph = builder.build([0])
    pace = Pace({0: 100})
    usage = clock.run_while_steady(graph, pace)
    assert (pace.remaining, usage.duration_s) == ({0: 96}, pytest.approx(2.0))
    clock.run_while_steady(graph, pace, at_most=7)
    assert pace.remaining == {0: 89}
    assert clock.now_s == pytest.approx(2.0 + 7 * 0.25)
    with pytest.raises(ConfigError, match="at_most must be 1"):
        clock.run_while_steady(graph, pace, at_most=0)
    with pytest.raises(ConfigError, match="without dynamics speeds never change"):
        EventClock(make_cluster()).run_while_steady(graph, pace)


def test_parts_that_never_wait_for_each_other_go_on_at_their_own_pace(
    make_cluster: MakeCluster,
) -> None:
    """SoC 0 is slow in the first two seconds only: it does not hold SoC 1 up, and ends what it began as it began."""
    clock = switching_clock(make_cluster)
    builder = GraphBuilder()
    builder.compute(
        "work", 0, 0.75
    )  # 1.5 s at half speed: at 0 and 1.5 s, then at full speed from 3 s on
    builder.compute("work", 1, 0.5)
    graph, pace = builder.build([0, 1]), Pace({0: 4, 1: 4})
    clock.run_while_steady(graph, pace)
    assert clock.now_s == 2.0
    assert (pace.remaining, pace.ahead_s) == ({0: 2, 1: 0}, {0: pytest.approx(1.0), 1: 0.0})
    usage = clock.run_while_steady(graph, pace)
    assert pace.done
    assert clock.now_s == pytest.approx(3.0 + 2 * 0.75)
    assert usage.soc_seconds[Activity.IDLE] == pytest.approx(2.5)  # SoC 1's, who has done all
    assert clock.usage.soc_seconds[Activity.COMPUTE] == pytest.approx(4.5 + 2.0)


def test_resting_lasts_until_something_changes_and_costs_idle_watts_and_fans(
    make_cluster: MakeCluster,
) -> None:
    clock = switching_clock(make_cluster)
    assert clock.taken_socs() == {3}
    usage = clock.idle([0, 1])
    device = make_cluster([4]).device_of(0)
    assert usage.duration_s == clock.now_s == 2.0
    assert usage.energy_j == {
        Activity.IDLE: pytest.approx(4.0 * device.idle_w),
        Activity.COOLING: 20.0,
    }
    assert clock.taken_socs() == frozenset()
    with pytest.raises(ConfigError, match="would never end"):
        clock.idle([0])
    with pytest.raises(ConfigError, match="would never end"):
        EventClock(make_cluster()).idle([0])


def test_a_clock_keeps_its_dynamics(make_cluster: MakeCluster) -> None:
    builder = GraphBuilder()
    builder.compute("work", 0, 0.75)
    graph = builder.build([0])
    whole, restored = switching_clock(make_cluster), switching_clock(make_cluster)
    whole.run(graph)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert restored.run(graph, repeat=5) == whole.run(graph, repeat=5)
