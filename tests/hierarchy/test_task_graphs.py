"""What plans lower to: who sends how much to whom, and what waits for what."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import (
    HUB,
    Activity,
    Cluster,
    Compute,
    Device,
    Endpoint,
    Processor,
    ProcessorCost,
    Server,
    StepCost,
    TaskGraph,
    Tier,
    Transfer,
    parse_cluster,
)
from socflower.cluster.task_graph import Task
from socflower.cluster.topology import uniform_cluster
from socflower.errors import ConfigError
from socflower.hierarchy import (
    Exchange,
    GroupPlan,
    conflicts,
    deal_graph,
    exchange_graph,
    plan_groups,
    step_graph,
)
from socflower.hierarchy import synchronisation_graph as sync_graph
from socflower.hierarchy.leader_topology import COMPRESSIONS, KINDS, choose_leaders, exchanged_bytes
from socflower.sim import EventClock
from tests.unrolled_graphs import unrolled

EXCHANGE = Exchange(num_bytes=1200.0, num_tensors=7)
BOARDS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def rack(*slots: int) -> Cluster:
    return parse_cluster({"boards": list(slots)})


def costs_of(plan: GroupPlan) -> dict[int, StepCost]:
    cost = StepCost(forward_s=1.0, backward_s=2.0, update_s=0.1, processor="npu")
    return dict.fromkeys(plan.participants, cost)


def transfers(graph: TaskGraph) -> list[Transfer]:
    return [task for task in graph.tasks if isinstance(task, Transfer)]


def bytes_by_tier(cluster: Cluster, graph: TaskGraph) -> Counter[Tier]:
    found = Counter[Tier]()
    for task in transfers(graph):
        found[cluster.tier(task.source, task.target)] += task.num_bytes
    return found


def ancestors(graph: TaskGraph, index: int) -> set[int]:
    seen: set[int] = set()
    waiting = [index]
    while waiting:
        for other in graph.tasks[waiting.pop()].after:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def unrolled_step(plan: GroupPlan, *arguments: Any, **settings: Any) -> TaskGraph:
    """Return a step with every round of a ring as tasks of its own."""
    return unrolled(step_graph(plan, *arguments, **settings))


def ends_of(task: Task) -> tuple[Endpoint, ...]:
    return (task.device,) if isinstance(task, Compute) else (task.source, task.target)


def group_of(plan: GroupPlan) -> dict[int, int]:
    return {soc: group.group_id for group in plan.groups for soc in group.members}


def crossings(plan: GroupPlan, graph: TaskGraph) -> set[tuple[int, int, bool]]:
    """Return (waiting group, group waited for, whether in the previous step) over groups' borders."""
    owner = group_of(plan)
    place = [
        owner[task.device if isinstance(task, Compute) else task.source] for task in graph.tasks
    ]
    return {
        (place[index], place[other], loop)
        for index, task in enumerate(graph.tasks)
        for others, loop in ((task.after, False), (task.after_previous, True))
        for other in others
        if place[other] != place[index]
    }


@given(size=st.integers(1, 12))
def test_ring_sends_2_n_minus_1_nths_of_the_bytes_per_member(size: int) -> None:
    plan = plan_groups(rack(*[4] * 3), 1, size)
    graph = unrolled_step(plan, costs_of(plan), EXCHANGE)
    sent = Counter[int]()
    for task in transfers(graph):
        assert task.num_messages == 7 and task.num_bytes == pytest.approx(1200.0 / size)
        assert (
            plan.groups[0].members.index(task.target)
            == (plan.groups[0].members.index(task.source) + 1) % size
        )
        sent[task.source] += 1
    assert len(transfers(graph)) == 2 * (size - 1) * size
    assert set(sent.values()) <= {2 * (size - 1)}


def test_every_update_needs_every_members_compute_and_follows_into_the_next_step() -> None:
    plan = plan_groups(rack(3, 3), 1, 5)
    for buckets in (1, 3):
        graph = unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=buckets)
        works = [
            i
            for i, task in enumerate(graph.tasks)
            if isinstance(task, Compute) and task.activity is Activity.COMPUTE
        ]
        updates = [
            i
            for i, task in enumerate(graph.tasks)
            if isinstance(task, Compute) and task.activity is Activity.UPDATE
        ]
        assert len(updates) == 5 and len(works) == 5 * buckets
        assert all(set(works) <= ancestors(graph, update) for update in updates)
        loops = {
            (task.device, graph.tasks[other].device)
            for task in graph.tasks
            for other in task.after_previous
        }
        assert loops == {(soc, soc) for soc in plan.participants}
        for soc in plan.participants:
            own = [task for task in graph.tasks if isinstance(task, Compute) and task.device == soc]
            assert sum(task.seconds for task in own) == pytest.approx(3.1)
            assert {task.processor for task in own} == {"npu"}


@given(slots=BOARDS, data=st.data())
def test_turn_taking_edges_lie_between_conflicting_groups_only_and_all_of_them(
    slots: list[int],
    data: st.DataObject,
) -> None:
    num_groups = data.draw(st.integers(1, sum(slots)))
    plan = plan_groups(rack(*slots), num_groups)
    turn = {
        group_id: index for index, ids in enumerate(plan.communication_groups) for group_id in ids
    }
    expected = {
        (left, right, turn[right] > turn[left])
        for left, others in conflicts(plan.groups).items()
        for right in others
    }
    assert crossings(plan, unrolled_step(plan, costs_of(plan), EXCHANGE)) == expected
    assert (
        crossings(plan, unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=3))
        == expected
    )
    assert not crossings(plan, unrolled_step(plan, costs_of(plan), EXCHANGE, uplink_turns=False))


def test_a_group_waits_for_the_whole_exchange_of_its_predecessor() -> None:
    plan = plan_groups(rack(5, 5, 5), 2, 14)
    assert plan.communication_groups == ((0,), (1,))
    graph = unrolled_step(plan, costs_of(plan), EXCHANGE)
    owner = group_of(plan)
    sends = {
        group: [
            i
            for i, task in enumerate(graph.tasks)
            if isinstance(task, Transfer) and owner[task.source] == group
        ]
        for group in (0, 1)
    }
    assert set(sends[0]) <= ancestors(graph, sends[1][0])
    assert not any(
        isinstance(graph.tasks[i], Transfer) and owner[graph.tasks[i].source] == 1
        for i in ancestors(graph, sends[0][-1])
    )


def test_buckets_carry_all_bytes_and_tensors_one_after_the_other() -> None:
    plan = plan_groups(rack(2), 1)
    for buckets in (1, 2, 7, 20):
        sends = transfers(unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=buckets))
        assert len(sends) == 2 * 2 * min(buckets, 7)
        assert sum(task.num_bytes for task in sends) == pytest.approx(2 * 1200.0)
        assert sum(task.num_messages for task in sends) == 2 * 2 * 7
    graph = unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=2)
    sends_at = [i for i, task in enumerate(graph.tasks) if isinstance(task, Transfer)]
    assert set(sends_at[:4]) <= ancestors(graph, sends_at[4]) | ancestors(graph, sends_at[5])
    first = ancestors(graph, sends_at[0])
    assert [graph.tasks[i].seconds for i in first] == [2.0]  # forward and half the backward


@given(slots=BOARDS, data=st.data())
def test_hub_traffic_is_n_up_and_n_down_never_m(slots: list[int], data: st.DataObject) -> None:
    cluster = rack(*slots)
    num_groups = data.draw(st.integers(1, sum(slots)))
    plan = plan_groups(cluster, num_groups)
    graph = sync_graph(plan, EXCHANGE, cluster)
    uploads = [
        i for i, task in enumerate(graph.tasks) if isinstance(task, Transfer) and task.target == HUB
    ]
    downloads = [
        i for i, task in enumerate(graph.tasks) if isinstance(task, Transfer) and task.source == HUB
    ]
    leaders = {group.leader for group in plan.groups}
    assert {graph.tasks[i].source for i in uploads} == leaders and len(uploads) == num_groups
    assert {graph.tasks[i].target for i in downloads} == leaders and len(downloads) == num_groups
    assert all(set(uploads) <= ancestors(graph, i) for i in downloads)
    assert bytes_by_tier(cluster, graph)[Tier.HUB] == 2 * num_groups * 1200.0
    received = Counter(task.target for task in transfers(graph) if task.target != HUB)
    assert received == Counter(plan.participants)  # every member gets the result once
    for group in plan.groups:
        rounds = (
            max(
                len([i for i in ancestors(graph, index) if HUB not in ends_of(graph.tasks[i])]) + 1
                for index, task in enumerate(graph.tasks)
                if isinstance(task, Transfer)
                and task.target in group.members
                and task.source != HUB
            )
            if len(group.members) > 1
            else 0
        )
        assert rounds <= (len(group.members) - 1).bit_length()


@given(num_servers=st.integers(2, 5), groups_of_each=st.integers(1, 4), across=st.booleans())
def test_servers_meet_at_the_hub_once_their_groups_have(
    num_servers: int, groups_of_each: int, across: bool
) -> None:
    """In closed form: a model at a time through the port of each server's first leader, and through the hub's."""
    cluster = parse_cluster(
        {"boards": groups_of_each, "socs_per_board": 1}, servers=[{"count": num_servers}]
    )
    plan = plan_groups(cluster, num_servers * groups_of_each)
    graph = sync_graph(plan, EXCHANGE, cluster, across_servers=across)
    model_s = (
        EXCHANGE.num_bytes / cluster.hub_bytes_per_s + EXCHANGE.num_tensors * cluster.message_s
    )
    found = bytes_by_tier(cluster, graph)
    assert found[Tier.HUB] == across * 2 * num_servers * EXCHANGE.num_bytes
    assert found[Tier.INTER_BOARD] == 2 * num_servers * (groups_of_each - 1) * EXCHANGE.num_bytes
    assert not found[Tier.INTER_SERVER]
    usage = EventClock(cluster).run(graph)
    assert usage.duration_s == pytest.approx(
        2 * (groups_of_each - 1 + across * num_servers) * model_s
    )


@given(
    slots=BOARDS,
    servers=st.sampled_from([1, 2, 3]),
    leaders=st.sampled_from(["ring", "tree"]),
    hub_decides=st.booleans(),
    across=st.booleans(),
    data=st.data(),
)
def test_every_member_gets_all_models_and_the_hub_one(
    slots: list[int],
    servers: int,
    leaders: str,
    hub_decides: bool,
    across: bool,
    data: st.DataObject,
) -> None:
    """Also inside servers, where the hub gets nothing; with an outer step one model comes back, and all wait for it."""
    cluster = replace(
        rack(*slots * servers),
        servers=(Server(num_boards=len(slots), uplink_bytes_per_s=1e6),) * servers
        if servers > 1
        else (),
    )
    plan = plan_groups(cluster, data.draw(st.integers(servers, servers * sum(slots))))
    graph = unrolled(
        sync_graph(
            plan, EXCHANGE, cluster, leaders=leaders, across_servers=across, hub_decides=hub_decides
        )
    )
    whole = across or servers == 1
    ends = {
        soc: [
            index
            for index, task in enumerate(graph.tasks)
            if isinstance(task, Transfer) and soc in (task.source, task.target)
        ]
        for soc in plan.participants
    }
    for group in plan.groups:
        leaders_met = {each.leader for each in plan.groups if whole or each.server == group.server}
        for soc in group.members:
            before = {index for end in ends[soc] for index in (*ancestors(graph, end), end)}
            heard = {end for index in before for end in ends_of(graph.tasks[index])} | {soc}
            assert leaders_met <= heard
    found = Counter((task.source == HUB, task.target == HUB) for task in transfers(graph))
    assert found[False, True] == whole and found[True, False] == (whole and hub_decides)
    assert bytes_by_tier(cluster, graph)[Tier.HUB] == whole * (1 + hub_decides) * EXCHANGE.num_bytes
    if whole and hub_decides:
        (back,) = [
            index
            for index, task in enumerate(graph.tasks)
            if HUB in ends_of(task) and task.source == HUB
        ]
        last = {soc: max(own) for soc, own in ends.items() if own}
        assert all(back == index or back in ancestors(graph, index) for index in last.values())


@pytest.mark.parametrize(
    ("leaders", "models"),
    [
        ("star", lambda n: 2 * n),
        ("ring", lambda n: 2 * (n - 1) / n + 1),
        ("tree", lambda n: 2 * (n - 1) + 1),
    ],
)
@pytest.mark.parametrize("num_leaders", [2, 3, 8])
def test_the_time_of_leaders_in_closed_form(
    leaders: str, models: Callable[[int], float], num_leaders: int
) -> None:
    """On boards of one SoC with equal links, and the hub's model after the ring: F8's 2(n-1)/n against 2n models."""
    cluster = parse_cluster({"boards": num_leaders, "socs_per_board": 1})
    plan = plan_groups(cluster, num_leaders)
    took_s = (
        EventClock(cluster).run(sync_graph(plan, EXCHANGE, cluster, leaders=leaders)).duration_s
    )
    num_messages = 2 * num_leaders if leaders == "star" else 2 * (num_leaders - 1) + 1
    assert took_s == pytest.approx(
        models(num_leaders) * EXCHANGE.num_bytes / cluster.hub_bytes_per_s
        + num_messages * EXCHANGE.num_tensors * cluster.message_s
    )


@pytest.mark.parametrize("leaders", KINDS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_only_what_leaders_exchange_among_themselves_is_compressed(
    leaders: str, compression: str
) -> None:
    cluster = rack(1, 1, 1, 1)
    graph = sync_graph(
        plan_groups(cluster, 4), EXCHANGE, cluster, leaders=leaders, compression=compression
    )
    sizes = {task.num_bytes for task in transfers(graph)}
    between = exchanged_bytes(EXCHANGE.num_bytes, compression)
    assert sizes == (
        {EXCHANGE.num_bytes}
        if leaders == "star"
        else {between / 4 if leaders == "ring" else between, EXCHANGE.num_bytes}
    )


def test_auto_takes_the_quickest_leaders_and_says_so() -> None:
    plan = plan_groups(rack(1, 1, 1), 3)
    seconds = {"star": 3.0, "ring": 2.0, "tree": 1.0}
    chosen = choose_leaders(plan, "auto", seconds.__getitem__)
    assert chosen.to_document() == {
        "leaders": "tree",
        "leaders_by": "predicted",
        "leaders_s": seconds,
        "leader_compression": "none",
    }
    assert choose_leaders(plan, "star", seconds.__getitem__).to_document() == {
        "leaders": "star",
        "leaders_by": "asked",
        "leaders_s": {},
        "leader_compression": "none",
    }
    compressed = choose_leaders(
        plan, "auto", {"star": 0.5, "ring": 2.0, "tree": 3.0}.__getitem__, "int8"
    )
    assert compressed.kind == "ring"  # the star cannot
    with pytest.raises(
        ConfigError, match="leader_compression = 'int8' sums at most 63 groups, and there are 64"
    ):
        choose_leaders(plan_groups(rack(64), 64), "ring", None, "int8")
    assert choose_leaders(plan, "auto", None).decided_by == "not-predicted"
    assert (
        choose_leaders(plan_groups(rack(3), 1), "auto", seconds.__getitem__).decided_by
        == "one-group"
    )
    with pytest.raises(
        ConfigError, match="leaders = 'mesh' is unknown; use 'auto', 'ring', 'tree', 'star'"
    ):
        choose_leaders(plan, "mesh", None)


@given(size=st.integers(2, 6), num_tensors=st.integers(1, 40), buckets=st.integers(1, 5))
def test_a_fused_ring_sends_one_message_for_each_bucket_a_sub_step(
    size: int, num_tensors: int, buckets: int
) -> None:
    """Buckets follow each other in a ring on one board; unfused, each takes as many messages as tensors (F8a)."""
    cluster, seconds = rack(size), {}
    for fused in (False, True):
        parts = Exchange(num_bytes=1e6, num_tensors=num_tensors, fused=fused).buckets(buckets)
        clock = EventClock(cluster)
        for part in parts:
            clock.run(exchange_graph(range(size), part.exchange))
        num_messages = min(buckets, num_tensors) if fused else num_tensors
        assert sum(part.exchange.num_messages for part in parts) == num_messages
        seconds[num_messages] = clock.now_s - 2 * (size - 1) * num_messages * cluster.message_s
    assert max(seconds.values()) - min(seconds.values()) < 1e-9


@pytest.mark.parametrize(
    ("slots", "num_groups", "crossing_bytes"),
    [((5, 5), 2, 0.0), ((5, 5), 1, 1200.0), ((2, 5), 1, 2400.0)],
)
def test_few_sends_of_a_broadcast_cross_boards(
    slots: tuple[int, ...],
    num_groups: int,
    crossing_bytes: float,
) -> None:
    cluster = rack(*slots)
    graph = sync_graph(plan_groups(cluster, num_groups), EXCHANGE, cluster)
    assert bytes_by_tier(cluster, graph)[Tier.INTER_BOARD] == crossing_bytes


def test_a_ring_over_two_boards_crosses_each_uplink_once_a_sub_step() -> None:
    cluster = rack(3, 3)
    plan = plan_groups(cluster, 1)
    tiers = bytes_by_tier(cluster, unrolled_step(plan, costs_of(plan), EXCHANGE))
    assert tiers[Tier.INTER_BOARD] == pytest.approx(2 * 5 * 2 * 200.0)
    assert tiers[Tier.INTRA_BOARD] == pytest.approx(2 * 5 * 4 * 200.0)


def test_exchanges_alone_are_a_ring_or_a_server_of_two_n_minus_1_messages() -> None:
    ring, server = (
        unrolled(exchange_graph((4, 0, 2), EXCHANGE, kind)) for kind in ("ring", "server")
    )
    assert sum(task.num_bytes for task in transfers(ring)) == pytest.approx(2 * 2 / 3 * 1200.0 * 3)
    assert [(task.source, task.target) for task in transfers(server)] == [
        (0, 4),
        (2, 4),
        (4, 0),
        (4, 2),
    ]
    assert set(server.tasks[2].after) == {0, 1}
    assert ring.participants == server.participants == (0, 2, 4)


def test_what_cannot_be_lowered_is_refused() -> None:
    plan = plan_groups(rack(3), 1)
    with pytest.raises(ConfigError, match=r"members \[2\]"):
        unrolled_step(
            plan, {soc: cost for soc, cost in costs_of(plan).items() if soc < 2}, EXCHANGE
        )
    with pytest.raises(ConfigError, match="overlap_buckets"):
        unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=0)
    with pytest.raises(ConfigError, match="num_bytes"):
        Exchange(num_bytes=-1.0, num_tensors=1)
    with pytest.raises(ConfigError, match="num_tensors"):
        Exchange(num_bytes=1.0, num_tensors=0)
    with pytest.raises(ConfigError, match="'tree'"):
        exchange_graph((0, 1), EXCHANGE, "tree")
    with pytest.raises(ConfigError, match="1 SoCs"):
        exchange_graph((0,), EXCHANGE)


@given(BOARDS)
def test_a_deal_sends_every_soc_one_share_from_another(slots: list[int]) -> None:
    plan = plan_groups(rack(*slots), 1)
    sent = transfers(deal_graph(plan, 50.0))
    if sum(slots) == 1:
        assert not sent
    else:
        assert (
            sorted(task.source for task in sent)
            == sorted(task.target for task in sent)
            == list(range(sum(slots)))
        )
        assert all(task.source != task.target and task.num_bytes == 50.0 for task in sent)


# ------------------------------------------------------------------------------------- two processors a member
BOTH = Device(
    name="both",
    idle_w=1.0,
    network_w=0.0,
    memory_bytes=1e9,
    memory_bytes_per_s=1e9,
    layer_overhead_s=0.0,
    processors={
        name: Processor(name=name, flops_per_s=1e9, active_w=5.0) for name in ("cpu", "npu")
    },
)
SECONDS = st.floats(0.0, 50.0)
WORK = st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0.0, 5.0), st.floats(0.0, 5.0))
"""Forward and backward of the CPU and of the NPU, merge, update."""


def both(work: tuple[float, ...]) -> StepCost:
    forward_s, backward_s, npu_forward_s, npu_backward_s, merge_s, update_s = work
    npu = ProcessorCost(processor="npu", forward_s=npu_forward_s, backward_s=npu_backward_s)
    return StepCost(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        processor="cpu",
        concurrent=(npu,),
        merge_s=merge_s,
    )


def seconds_of(works: list[tuple[float, ...]], *, repeat: int, overlap_buckets: int = 1) -> float:
    """Return what a group of one member for each work takes on the clock; links of 100 bytes a second."""
    cluster = uniform_cluster(
        BOTH,
        (len(works),),
        soc_bytes_per_s=100.0,
        board_bytes_per_s=100.0,
        hub_bytes_per_s=100.0,
        message_s=0.0,
    )
    plan = plan_groups(cluster, 1)
    graph = unrolled_step(
        plan, dict(enumerate(map(both, works))), EXCHANGE, overlap_buckets=overlap_buckets
    )
    return EventClock(cluster).run(graph, repeat=repeat).duration_s


@given(work=WORK, repeat=st.integers(1, 4), buckets=st.integers(1, 3))
def test_a_step_alone_takes_the_slower_processor_then_merge_then_update(
    work: tuple[float, ...],
    repeat: int,
    buckets: int,
) -> None:
    """Also repeated: neither processor begins a step before the update of the last one."""
    slower_s = max(work[0] + work[1], work[2] + work[3])
    if buckets > 1:  # merges of earlier parts then take turns with the backward pass
        work = (*work[:4], 0.0, work[5])
    step_s = slower_s + work[4] + work[5]
    assert seconds_of([work], repeat=repeat, overlap_buckets=buckets) == pytest.approx(
        repeat * step_s
    )


@given(works=st.lists(WORK, min_size=2, max_size=4))
def test_the_exchange_waits_for_both_processors_and_the_merge_of_every_member(
    works: list[tuple[float, ...]],
) -> None:
    """A ring of n has 2 (n - 1) sub-steps of 1200 / n bytes over links of 100 bytes a second."""
    ready_s = max(max(work[0] + work[1], work[2] + work[3]) + work[4] for work in works)
    ring_s = 2 * (len(works) - 1) * 1200.0 / len(works) / 100.0
    last_update_s = max(work[5] for work in works)
    # A ring hands a member's delay on by one member a sub-step, so that the latest one holds up all.
    assert seconds_of(works, repeat=1) == pytest.approx(ready_s + ring_s + last_update_s)


@given(cpu=st.tuples(SECONDS, SECONDS), npu=st.tuples(SECONDS, SECONDS), buckets=st.integers(1, 6))
def test_each_bucket_leaves_as_soon_as_both_processors_have_it(
    cpu: tuple[float, float],
    npu: tuple[float, float],
    buckets: int,
) -> None:
    """Two equal members: a bucket's ring begins when its part is done and the ring before has ended."""
    end_s = 0.0
    sizes = [bucket.exchange.num_bytes for bucket in EXCHANGE.buckets(buckets)]
    assert len(sizes) == buckets and sum(sizes) == pytest.approx(1200.0)
    for part, num_bytes in enumerate(sizes, start=1):
        ready_s = max(
            forward_s + backward_s * part / buckets for forward_s, backward_s in (cpu, npu)
        )
        end_s = max(end_s, ready_s) + 2 * num_bytes / 2 / 100.0
    assert seconds_of(
        [(*cpu, *npu, 0.0, 0.5)] * 2, repeat=1, overlap_buckets=buckets
    ) == pytest.approx(end_s + 0.5)


@pytest.mark.parametrize("buckets", [1, 3])
def test_what_both_processors_made_of_a_part_is_merged_on_the_first_before_it_is_sent(
    buckets: int,
) -> None:
    plan = plan_groups(rack(2), 1)
    graph = unrolled_step(
        plan,
        dict.fromkeys((0, 1), both((1.0, 2.0, 3.0, 6.0, 0.9, 0.1))),
        EXCHANGE,
        overlap_buckets=buckets,
    )
    for soc in (0, 1):
        own = [
            (i, task)
            for i, task in enumerate(graph.tasks)
            if isinstance(task, Compute) and task.device == soc
        ]
        seconds = Counter[tuple[str, str]]()
        for _, task in own:
            seconds[task.processor, task.activity] += task.seconds
        assert seconds == pytest.approx(
            {("cpu", "compute"): 3.0, ("npu", "compute"): 9.0, ("cpu", "update"): 1.0}
        )
        merges = [i for i, task in own if task.name.endswith("merge")]
        assert len(merges) == buckets
        for number, merge in enumerate(merges, start=1):
            done = [graph.tasks[i] for i in ancestors(graph, merge)]
            for processor, whole_s in (("cpu", (1.0, 2.0)), ("npu", (3.0, 6.0))):
                assert sum(
                    task.seconds
                    for task in done
                    if isinstance(task, Compute) and task.processor == processor
                ) == pytest.approx(whole_s[0] + whole_s[1] * number / buckets)
        sends = [
            i
            for i, task in enumerate(graph.tasks)
            if isinstance(task, Transfer) and task.source == soc
        ]
        assert all(ancestors(graph, send) & set(merges) for send in sends)
        begins = [task for _, task in own if not task.after]
        assert [task.processor for task in begins] == ["cpu", "npu"]
        (update,) = [i for i, task in own if task.name.endswith("update")]
        assert [task.after_previous for task in begins] == [(update,)] * 2


def test_a_processor_without_samples_has_no_tasks() -> None:
    """All samples on the NPU: the CPU only merges and updates."""
    plan = plan_groups(rack(1), 1)
    graph = unrolled_step(plan, {0: both((0.0, 0.0, 1.0, 2.0, 0.5, 0.1))}, EXCHANGE)
    assert [
        (task.processor, task.seconds) for task in graph.tasks if isinstance(task, Compute)
    ] == [("npu", 3.0), ("cpu", 0.5), ("cpu", 0.1)]


@pytest.mark.parametrize("leaders", ["star", "tree"])
def test_models_meet_at_socs_whose_processors_have_other_names(leaders: str) -> None:
    """A Jetson has a GPU in the catalogue, and no CPU."""
    cluster = parse_cluster({"boards": [2, 2], "device": "jetson-nano"})
    cluster = replace(
        cluster, servers=tuple(Server(num_boards=1, uplink_bytes_per_s=1e8) for _ in range(2))
    )
    graph = sync_graph(plan_groups(cluster, 4), EXCHANGE, cluster, leaders=leaders)
    assert EventClock(cluster).run(graph).duration_s > 0.0
