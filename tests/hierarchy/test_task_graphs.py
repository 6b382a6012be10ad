"""Task graphs of plans: who sends how much to whom, and what waits for what."""

from collections import Counter
from collections.abc import Callable, Iterable
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
    Endpoint,
    ProcessorCost,
    Server,
    StepCost,
    TaskGraph,
    Tier,
    Transfer,
    parse_cluster,
)
from socflower.cluster.task_graph import Task
from socflower.hierarchy import (
    Exchange,
    GradientExchange,
    GroupPlan,
    conflicts,
    deal_graph,
    dispatch_graph,
    exchange_graph,
    gradient_coding,
    plan_groups,
    step_graph,
)
from socflower.hierarchy import synchronisation_graph as sync_graph
from socflower.hierarchy.exchange.models import COMPRESSIONS, KINDS, ModelExchange, choose_leaders
from socflower.sim import EventClock
from tests.one_line import refused
from tests.toy_clusters import toy_cluster
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


def where(graph: TaskGraph, holds: Callable[[Any], object]) -> list[int]:
    """Return the indices of the tasks for which something holds."""
    return [index for index, task in enumerate(graph.tasks) if holds(task)]


def from_soc(soc: object) -> Callable[[Task], bool]:
    return lambda task: isinstance(task, Transfer) and task.source == soc


def to_soc(soc: object) -> Callable[[Task], bool]:
    return lambda task: isinstance(task, Transfer) and task.target == soc


def computes(graph: TaskGraph) -> list[Compute]:
    return [task for task in graph.tasks if isinstance(task, Compute)]


def ancestors(graph: TaskGraph, index: int) -> set[int]:
    seen: set[int] = set()
    waiting = [index]
    while waiting:
        new = set(graph.tasks[waiting.pop()].after) - seen
        seen |= new
        waiting += new
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
    place = [owner[ends_of(task)[0]] for task in graph.tasks]
    found = set()
    for own, task in zip(place, graph.tasks, strict=True):
        found |= {(own, place[other], False) for other in task.after}
        found |= {(own, place[other], True) for other in task.after_previous}
    return {(own, other, loop) for own, other, loop in found if own != other}


@given(size=st.integers(1, 12))
def test_ring_sends_2_n_minus_1_nths_of_the_bytes_per_member(size: int) -> None:
    plan = plan_groups(rack(*[4] * 3), 1, size)
    graph = unrolled_step(plan, costs_of(plan), EXCHANGE)
    members, sent = plan.groups[0].members, transfers(graph)
    for task in sent:
        assert task.num_messages == 7 and task.num_bytes == pytest.approx(1200.0 / size)
        assert members.index(task.target) == (members.index(task.source) + 1) % size
    assert Counter(task.source for task in sent) == (
        dict.fromkeys(members, 2 * (size - 1)) if size > 1 else {}
    )


def test_every_update_needs_every_members_compute_and_follows_into_the_next_step() -> None:
    plan = plan_groups(rack(3, 3), 1, 5)
    for buckets in (1, 3):
        graph = unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=buckets)
        works, updates = (
            where(graph, lambda task, kind=kind: getattr(task, "activity", None) is kind)
            for kind in (Activity.COMPUTE, Activity.UPDATE)
        )
        assert len(updates) == 5 and len(works) == 5 * buckets
        assert all(set(works) <= ancestors(graph, update) for update in updates)
        loops = {
            (task.device, graph.tasks[other].device)
            for task in graph.tasks
            for other in task.after_previous
        }
        assert loops == {(soc, soc) for soc in plan.participants}
        seconds = Counter[int]()
        for task in computes(graph):
            assert task.processor == "npu"
            seconds[task.device] += task.seconds
        assert seconds == pytest.approx(dict.fromkeys(plan.participants, 3.1))


@given(slots=BOARDS, data=st.data())
def test_turn_taking_edges_lie_between_conflicting_groups_only_and_all_of_them(
    slots: list[int],
    data: st.DataObject,
) -> None:
    num_groups = data.draw(st.integers(1, sum(slots)))
    plan = plan_groups(rack(*slots), num_groups)
    turn = {group: index for index, ids in enumerate(plan.communication_groups) for group in ids}
    expected = {
        (left, right, turn[right] > turn[left])
        for left, others in conflicts(plan.groups).items()
        for right in others
    }
    for settings, edges in (
        ({}, expected),
        ({"overlap_buckets": 3}, expected),
        ({"uplink_turns": False}, set()),
    ):
        graph = unrolled_step(plan, costs_of(plan), EXCHANGE, **settings)
        assert crossings(plan, graph) == edges


def test_a_group_waits_for_the_whole_exchange_of_its_predecessor() -> None:
    plan = plan_groups(rack(5, 5, 5), 2, 14)
    assert plan.communication_groups == ((0,), (1,))
    graph = unrolled_step(plan, costs_of(plan), EXCHANGE)
    first, second = (
        where(
            graph,
            lambda task, group=group: isinstance(task, Transfer) and task.source in group.members,
        )
        for group in plan.groups
    )
    assert set(first) <= ancestors(graph, second[0])
    assert not set(second) & ancestors(graph, first[-1])


def test_buckets_carry_all_bytes_and_tensors_one_after_the_other() -> None:
    plan = plan_groups(rack(2), 1)
    for buckets in (1, 2, 7, 20):
        sends = transfers(unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=buckets))
        assert len(sends) == 2 * 2 * min(buckets, 7)
        assert sum(task.num_bytes for task in sends) == pytest.approx(2 * 1200.0)
        assert sum(task.num_messages for task in sends) == 2 * 2 * 7
    graph = unrolled_step(plan, costs_of(plan), EXCHANGE, overlap_buckets=2)
    sends_at = where(graph, lambda task: isinstance(task, Transfer))
    assert set(sends_at[:4]) <= ancestors(graph, sends_at[4]) | ancestors(graph, sends_at[5])
    first = ancestors(graph, sends_at[0])
    assert [graph.tasks[i].seconds for i in first] == [2.0]  # forward and half the backward


@given(slots=BOARDS, data=st.data())
def test_hub_traffic_is_n_up_and_n_down_never_m(slots: list[int], data: st.DataObject) -> None:
    cluster = rack(*slots)
    num_groups = data.draw(st.integers(1, sum(slots)))
    plan = plan_groups(cluster, num_groups)
    graph = sync_graph(plan, EXCHANGE, cluster)
    uploads, downloads = where(graph, to_soc(HUB)), where(graph, from_soc(HUB))
    leaders = sorted(group.leader for group in plan.groups)
    assert sorted(graph.tasks[i].source for i in uploads) == leaders
    assert sorted(graph.tasks[i].target for i in downloads) == leaders
    assert all(set(uploads) <= ancestors(graph, i) for i in downloads)
    assert bytes_by_tier(cluster, graph)[Tier.HUB] == 2 * num_groups * 1200.0
    received = Counter(task.target for task in transfers(graph) if task.target != HUB)
    assert received == Counter(plan.participants)  # every member gets the result once
    inside = {i for i, task in enumerate(graph.tasks) if HUB not in ends_of(task)}
    for group in plan.groups:
        rounds = [
            len(inside & ancestors(graph, index)) + 1
            for index in inside
            if graph.tasks[index].target in group.members
        ]
        assert max(rounds, default=0) <= (len(group.members) - 1).bit_length()


def model_seconds(cluster: Cluster, num_models: float = 1, num_messages: int = 1) -> float:
    """Return how long the hub's port takes to handle so many messages and to carry so many models."""
    bytes_s = num_models * EXCHANGE.num_bytes / cluster.hub_bytes_per_s
    return bytes_s + num_messages * EXCHANGE.num_tensors * cluster.message_s


@given(num_servers=st.integers(2, 5), groups_of_each=st.integers(1, 4), across=st.booleans())
def test_servers_meet_at_the_hub_once_their_groups_have(
    num_servers: int, groups_of_each: int, across: bool
) -> None:
    """In closed form: a model at a time through the port of each server's first leader, and through the hub's."""
    cluster = parse_cluster(
        {"boards": groups_of_each, "socs_per_board": 1}, site={"servers": num_servers}
    )
    plan = plan_groups(cluster, num_servers * groups_of_each)
    graph = sync_graph(plan, EXCHANGE, cluster, across_servers=across)
    model_s, found = model_seconds(cluster), bytes_by_tier(cluster, graph)
    assert found[Tier.HUB] == across * 2 * num_servers * EXCHANGE.num_bytes
    assert found[Tier.INTER_BOARD] == 2 * num_servers * (groups_of_each - 1) * EXCHANGE.num_bytes
    assert not found[Tier.INTER_SERVER]
    expected_s = 2 * (groups_of_each - 1 + across * num_servers) * model_s
    assert EventClock(cluster).run(graph).duration_s == pytest.approx(expected_s)


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
    each = Server(num_boards=len(slots), uplink_bytes_per_s=1e6)
    cluster = replace(rack(*slots * servers), servers=(each,) * servers if servers > 1 else ())
    plan = plan_groups(cluster, data.draw(st.integers(servers, servers * sum(slots))))
    models = ModelExchange(kind=leaders, hub_decides=hub_decides)
    graph = unrolled(sync_graph(plan, EXCHANGE, cluster, models=models, across_servers=across))
    whole = across or servers == 1
    own: dict[Endpoint, list[int]] = {soc: [] for soc in (HUB, *plan.participants)}
    for index, task in enumerate(graph.tasks):
        for end in ends_of(task) if isinstance(task, Transfer) else ():
            own[end].append(index)
    for group in plan.groups:
        leaders_met = {each.leader for each in plan.groups if whole or each.server == group.server}
        for soc in group.members:
            before = {index for end in own[soc] for index in (*ancestors(graph, end), end)}
            heard = {end for index in before for end in ends_of(graph.tasks[index])} | {soc}
            assert leaders_met <= heard
    found = Counter((task.source == HUB, task.target == HUB) for task in transfers(graph))
    assert found[False, True] == whole and found[True, False] == (whole and hub_decides)
    assert bytes_by_tier(cluster, graph)[Tier.HUB] == whole * (1 + hub_decides) * EXCHANGE.num_bytes
    if whole and hub_decides:
        (back,) = where(graph, from_soc(HUB))
        last = [max(own[soc]) for soc in plan.participants if own[soc]]
        assert all(back in {index, *ancestors(graph, index)} for index in last)


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
    graph = sync_graph(plan, EXCHANGE, cluster, models=ModelExchange(kind=leaders))
    num_messages = 2 * num_leaders if leaders == "star" else 2 * (num_leaders - 1) + 1
    expected_s = model_seconds(cluster, models(num_leaders), num_messages)
    assert EventClock(cluster).run(graph).duration_s == pytest.approx(expected_s)


@pytest.mark.parametrize("leaders", KINDS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_only_what_leaders_exchange_among_themselves_is_compressed(
    leaders: str, compression: str
) -> None:
    cluster = rack(1, 1, 1, 1)
    coding = gradient_coding(compression)
    models = ModelExchange(kind=leaders, coding=coding)
    graph = sync_graph(plan_groups(cluster, 4), EXCHANGE, cluster, models=models)
    between = {
        operation.send_bytes(4) if leaders == "ring" else operation.num_bytes
        for operation in coding.operations(EXCHANGE, 4)
    }
    sizes = {task.num_bytes for task in transfers(graph)}
    assert sizes == {1200.0} | (set() if leaders == "star" else between)


@pytest.mark.parametrize(
    ("num_groups", "asked", "star_s", "compression", "kind", "decided_by"),
    [
        (3, "auto", 3.0, "none", "tree", "predicted"),
        (3, "star", 3.0, "none", "star", "asked"),
        (3, "auto", 0.5, "int8", "tree", "predicted"),  # the star cannot
        (3, "auto", None, "none", "ring", "not-predicted"),
        (1, "auto", 3.0, "none", "ring", "one-group"),
    ],
)
def test_auto_takes_the_quickest_leaders_and_says_so(
    num_groups: int, asked: str, star_s: float | None, compression: str, kind: str, decided_by: str
) -> None:
    seconds = {"star": star_s, "ring": 2.0, "tree": 1.0}
    predict = None if star_s is None else seconds.__getitem__
    chosen = choose_leaders(plan_groups(rack(3), num_groups), asked, predict, compression)
    if compression != "none":
        del seconds["star"]
    assert chosen.to_document() == {
        "leaders": kind,
        "leaders_by": decided_by,
        "leaders_s": seconds if decided_by == "predicted" else {},
        "leader_compression": compression,
    }


def test_leaders_that_cannot_be_are_refused() -> None:
    many = plan_groups(rack(64), 64)
    refused(lambda: choose_leaders(many, "ring", None, "int8"), "'int8'", "63", "64")
    refused(lambda: choose_leaders(many, "mesh", None), "'mesh'", "'auto'", *map(repr, KINDS))


@given(size=st.integers(2, 6), num_tensors=st.integers(1, 40), buckets=st.integers(1, 5))
def test_a_fused_ring_sends_one_message_for_each_bucket_a_sub_step(
    size: int, num_tensors: int, buckets: int
) -> None:
    """Buckets follow each other in a ring on one board; unfused, each takes as many messages as tensors (F8a)."""
    cluster, seconds = rack(size), []
    for fused in (False, True):
        parts = Exchange(num_bytes=1e6, num_tensors=num_tensors, fused=fused).buckets(buckets)
        clock = EventClock(cluster)
        for part in parts:
            clock.run(exchange_graph(range(size), part.exchange))
        num_messages = min(buckets, num_tensors) if fused else num_tensors
        assert sum(part.exchange.num_messages for part in parts) == num_messages
        seconds.append(clock.now_s - 2 * (size - 1) * num_messages * cluster.message_s)
    assert max(seconds) - min(seconds) < 1e-9


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


def test_exchanges_alone_are_a_ring_or_a_server_of_two_n_minus_1_messages() -> None:
    ring, server = (
        unrolled(exchange_graph((4, 0, 2), EXCHANGE, GradientExchange(kind=kind)))
        for kind in ("ring", "server")
    )
    assert sum(task.num_bytes for task in transfers(ring)) == pytest.approx(2 * 2 / 3 * 1200.0 * 3)
    assert list(map(ends_of, transfers(server))) == [(0, 4), (2, 4), (4, 0), (4, 2)]
    assert set(server.tasks[2].after) == {0, 1}
    assert ring.participants == server.participants == (0, 2, 4)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda plan, costs: unrolled_step(plan, {0: costs[0], 1: costs[1]}, EXCHANGE), "[2]"),
        (
            lambda plan, costs: unrolled_step(plan, costs, EXCHANGE, overlap_buckets=0),
            "overlap_buckets",
        ),
        (lambda plan, costs: Exchange(num_bytes=-1.0, num_tensors=1), "num_bytes"),
        (lambda plan, costs: Exchange(num_bytes=1.0, num_tensors=0), "num_tensors"),
        (lambda plan, costs: GradientExchange(kind="tree"), "'tree'"),
        (lambda plan, costs: exchange_graph((0,), EXCHANGE), "1"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(make: Callable[..., object], named: str) -> None:
    plan = plan_groups(rack(3), 1)
    refused(lambda: make(plan, costs_of(plan)), named)


@given(BOARDS)
def test_a_deal_sends_every_soc_one_share_from_another(slots: list[int]) -> None:
    plan = plan_groups(rack(*slots), 1)
    sent = transfers(deal_graph(plan, 50.0))
    socs = list(range(sum(slots))) if sum(slots) > 1 else []
    assert sorted(task.source for task in sent) == sorted(task.target for task in sent) == socs
    assert all(task.source != task.target and task.num_bytes == 50.0 for task in sent)


@given(BOARDS)
def test_the_hub_dispatches_a_share_to_every_soc(slots: list[int]) -> None:
    plan = plan_groups(rack(*slots), 1)
    sent = transfers(dispatch_graph(plan, 50.0))
    assert sorted(task.target for task in sent) == list(range(sum(slots)))
    assert all(task.source == HUB and task.num_bytes == 50.0 for task in sent)


# ------------------------------------------------------------------------------------- two processors a member
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
    cluster = toy_cluster((len(works),))
    costs = dict(enumerate(map(both, works)))
    graph = unrolled_step(plan_groups(cluster, 1), costs, EXCHANGE, overlap_buckets=overlap_buckets)
    return EventClock(cluster).run(graph, repeat=repeat).duration_s


@given(work=WORK, repeat=st.integers(1, 4), buckets=st.integers(1, 3))
def test_a_step_alone_takes_the_slower_processor_then_merge_then_update(
    work: tuple[float, ...],
    repeat: int,
    buckets: int,
) -> None:
    """Also repeated: neither processor begins a step before the update of the last one."""
    slower_s = max(work[0] + work[1], work[2] + work[3])
    # Merges of earlier parts then take turns with the backward pass.
    if buckets > 1:
        work = (*work[:4], 0.0, work[5])
    expected_s = repeat * (slower_s + work[4] + work[5])
    assert seconds_of([work], repeat=repeat, overlap_buckets=buckets) == pytest.approx(expected_s)


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
        done_s = [forward_s + backward_s * part / buckets for forward_s, backward_s in (cpu, npu)]
        end_s = max(end_s, *done_s) + 2 * num_bytes / 2 / 100.0
    took_s = seconds_of([(*cpu, *npu, 0.0, 0.5)] * 2, repeat=1, overlap_buckets=buckets)
    assert took_s == pytest.approx(end_s + 0.5)


@pytest.mark.parametrize("buckets", [1, 3])
def test_what_both_processors_made_of_a_part_is_merged_on_the_first_before_it_is_sent(
    buckets: int,
) -> None:
    costs = dict.fromkeys((0, 1), both((1.0, 2.0, 3.0, 6.0, 0.9, 0.1)))
    graph = unrolled_step(plan_groups(rack(2), 1), costs, EXCHANGE, overlap_buckets=buckets)

    def seconds(tasks: Iterable[Task]) -> Counter[tuple[str, str]]:
        found = Counter[tuple[str, str]]()
        for task in tasks:
            if isinstance(task, Compute):
                found[task.processor, task.activity] += task.seconds
        return found

    for soc in (0, 1):
        own = [i for i, task in enumerate(graph.tasks) if ends_of(task) == (soc,)]
        whole = {("cpu", "compute"): 3.0, ("npu", "compute"): 9.0, ("cpu", "update"): 1.0}
        assert seconds(graph.tasks[i] for i in own) == pytest.approx(whole)
        merges = [i for i in own if graph.tasks[i].name.endswith("merge")]
        assert len(merges) == buckets
        for number, merge in enumerate(merges, start=1):
            done = seconds(graph.tasks[i] for i in ancestors(graph, merge))
            part = number / buckets
            assert done["cpu", "compute"] == pytest.approx(1.0 + 2.0 * part)
            assert done["npu", "compute"] == pytest.approx(3.0 + 6.0 * part)
        sends = where(graph, from_soc(soc))
        assert all(ancestors(graph, send) & set(merges) for send in sends)
        first = [graph.tasks[i] for i in own if not graph.tasks[i].after]
        assert [task.processor for task in first] == ["cpu", "npu"]
        (update,) = [i for i in own if graph.tasks[i].name.endswith("update")]
        assert [task.after_previous for task in first] == [(update,)] * 2


def test_a_processor_without_samples_has_no_tasks() -> None:
    """All samples on the NPU: the CPU only merges and updates."""
    plan = plan_groups(rack(1), 1)
    graph = unrolled_step(plan, {0: both((0.0, 0.0, 1.0, 2.0, 0.5, 0.1))}, EXCHANGE)
    found = [(task.processor, task.seconds) for task in computes(graph)]
    assert found == [("npu", 3.0), ("cpu", 0.5), ("cpu", 0.1)]


@pytest.mark.parametrize("leaders", ["star", "tree"])
def test_models_meet_at_socs_whose_processors_have_other_names(leaders: str) -> None:
    """A Jetson has a GPU in the catalogue, and no CPU."""
    cluster = parse_cluster(
        {"boards": 1, "socs_per_board": 2, "device": "jetson-nano"}, site={"servers": 2}
    )
    graph = sync_graph(
        plan_groups(cluster, 4), EXCHANGE, cluster, models=ModelExchange(kind=leaders)
    )
    assert EventClock(cluster).run(graph).duration_s > 0.0
