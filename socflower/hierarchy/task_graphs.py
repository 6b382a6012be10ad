"""Task graphs of a plan: a training step of all groups, and a synchronisation between them.

The graphs define dependencies and costs; the clock determines the times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from socflower.cluster import HUB, Activity, Cluster, GraphBuilder, StepCost, TaskGraph
from socflower.errors import ConfigError, require_range
from socflower.hierarchy.communication_groups import conflicts
from socflower.hierarchy.exchange.collectives import (
    Bucket,
    Dependencies,
    Exchange,
    broadcast,
    gather,
    scatter,
)
from socflower.hierarchy.exchange.gradients import EXACT_RING, ExchangeTasks, GradientExchange
from socflower.hierarchy.leader_topology import NONE, RING, STAR, exchanged_bytes, tree_levels
from socflower.hierarchy.plan import Group, GroupPlan


def step_graph(
    plan: GroupPlan,
    costs: Mapping[int, StepCost],
    exchange: Exchange,
    *,
    gradients: GradientExchange = EXACT_RING,
    step: int | None = None,
    uplink_turns: bool = True,
    overlap_buckets: int = 1,
) -> TaskGraph:
    """Return one training step of all groups: compute, exchange of gradients inside the group, update (F4).

    When the graph is repeated, a member starts its next step as soon as it has updated its weights. Groups do not wait
    for each other, except that with `uplink_turns` conflicting groups exchange in turn (F6, F7): a split group's
    exchange waits for those of its conflicting groups in earlier communication groups, and for those in later ones of
    the previous step.

    With `overlap_buckets` > 1 gradients are exchanged in at most that many buckets, each as soon as the backward pass
    has completed it and the bucket before has been exchanged.

    `costs` has the seconds and processor of each member. `step` counts from the start of training, for a coding that
    changes during it; None is a step after its warm-up. Raises `ConfigError` if a member has no entry, or for fewer
    than one bucket.
    """
    require_range("step", least=1, overlap_buckets=overlap_buckets)
    missing = [soc for soc in plan.participants if soc not in costs]
    if missing:
        raise ConfigError(f"step: members {missing} have no cost")
    builder = GraphBuilder()
    turn_of = {
        group_id: turn for turn, ids in enumerate(plan.communication_groups) for group_id in ids
    }
    neighbours = conflicts(plan.groups) if uplink_turns else {}
    # The transfers that begin and end a group's exchange.
    first: dict[int, tuple[int, ...]] = {}
    last: dict[int, tuple[int, ...]] = {}
    for group in sorted(plan.groups, key=lambda group: (turn_of[group.group_id], group.group_id)):
        before = [
            task
            for other in sorted(neighbours.get(group.group_id, ()))
            for task in last.get(other, ())
        ]
        first[group.group_id], last[group.group_id] = _group_step(
            builder,
            group,
            costs,
            exchange.buckets(overlap_buckets),
            before,
            partial(gradients.lower, builder, group.members, step=step),
        )
    for group_id, others in neighbours.items():
        later = [
            task
            for other in sorted(others)
            if turn_of[other] > turn_of[group_id]
            for task in last[other]
        ]
        for task in first[group_id] if later else ():
            builder.follow_previous(task, later)
    return builder.build(plan.participants)


def _group_step(
    builder: GraphBuilder,
    group: Group,
    costs: Mapping[int, StepCost],
    buckets: Sequence[Bucket],
    before: Sequence[int],
    lower: Callable[[Exchange, Dependencies, str], ExchangeTasks],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Add a group's step; return the transfers that begin its exchange and those that end it."""
    name = f"group {group.group_id}"
    begins, parts = {}, {}
    for soc in group.members:
        begins[soc], parts[soc] = _compute(builder, name, soc, costs[soc], buckets)
    begun = {soc: tuple(before) for soc in group.members}
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    for number, bucket in enumerate(buckets):
        tasks = lower(
            bucket.exchange,
            {soc: (*parts[soc][number], *begun[soc]) for soc in group.members},
            name,
        )
        first, last = first or tasks.first, tasks.last
        begun = dict(tasks.done)
    for soc in group.members:
        update = builder.compute(
            f"{name} update",
            soc,
            costs[soc].update_s,
            processor=costs[soc].processor,
            activity=Activity.UPDATE,
            after=begun[soc],
        )
        for task in begins[soc]:
            builder.follow_previous(task, (update,))
    return first, last


def _compute(
    builder: GraphBuilder,
    name: str,
    soc: int,
    cost: StepCost,
    buckets: Sequence[Bucket],
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Add a member's forward and backward passes on all its processors in parallel, in parts that complete a bucket.

    Returns the tasks that begin the passes, and for each bucket the tasks that complete it. The gradients of several
    processors for a bucket are merged as soon as all processors have them (SoCFlow+ 3.2).
    """
    shares = [
        after - before for before, after in pairwise([0.0, *(bucket.done for bucket in buckets)])
    ]
    by_processor = []
    for work in cost.processors:
        seconds = [work.backward_s * share for share in shares]
        tasks = [
            builder.compute(
                f"{name} compute", soc, work.forward_s + seconds[0], processor=work.processor
            )
        ]
        for part_s in seconds[1:]:
            tasks.append(
                builder.compute(
                    f"{name} backward", soc, part_s, processor=work.processor, after=tasks[-1:]
                )
            )
        by_processor.append(tasks)
    parts = list(zip(*by_processor, strict=True))
    if cost.merge_s:
        whole = sum(bucket.exchange.num_bytes for bucket in buckets)
        parts = [
            (
                builder.compute(
                    f"{name} merge",
                    soc,
                    cost.merge_s * bucket.exchange.num_bytes / whole,
                    processor=cost.processor,
                    activity=Activity.UPDATE,
                    after=part,
                ),
            )
            for part, bucket in zip(parts, buckets, strict=True)
        ]
    return [tasks[0] for tasks in by_processor], parts


def synchronisation_graph(
    plan: GroupPlan,
    exchange: Exchange,
    cluster: Cluster,
    *,
    leaders: str = STAR,
    across_servers: bool = True,
    hub_decides: bool = False,
    compression: str = NONE,
    delays_s: Mapping[int, float] | None = None,
) -> TaskGraph:
    """Return a synchronisation between groups (F8): leaders exchange models, then each sends the mean to its group.

    `leaders` is the kind of exchange. "ring": an all-reduce in the order of the plan. "tree": uploads to the first
    leader of each board, of each server and of all, and downloads the same way back. "star": at the hub; if groups are
    in several servers, the leader of each server's first group replaces the hub for its server.

    With `across_servers` servers exchange too, and the hub gets one model from a ring or tree. With `hub_decides` the
    hub makes the next model of it, as an outer strategy does, and sends it back to all leaders. `compression` applies
    to what leaders exchange among themselves, not to models to or from the hub or in groups.

    A leader has its model `delays_s` after the start; without an entry, and in a ring, it has it at once.
    """
    builder = GraphBuilder()
    # Delays are tasks of the hub, where they cost no energy, each on a processor of its own.
    ready: Arrivals = {
        leader: (builder.compute("steps", HUB, delay_s, processor=f"waits for SoC {leader}"),)
        for leader, delay_s in (delays_s or {}).items()
        if leaders != RING and delay_s > 0.0
    }
    by_server = [[group.leader for group in groups] for groups in plan.by_server.values()]
    whole = across_servers or len(by_server) == 1
    if leaders == STAR:
        arrived = _star(builder, by_server, exchange, cluster, ready, across_servers=across_servers)
    else:
        each = _ring if leaders == RING else _tree
        parts = [[leader for own in by_server for leader in own]] if whole else by_server
        arrived = {}
        between = replace(exchange, num_bytes=exchanged_bytes(exchange.num_bytes, compression))
        for own in parts:
            arrived |= each(builder, own, between, cluster, ready)
        if whole:
            arrived = _through_hub(builder, parts[0], exchange, arrived, hub_decides=hub_decides)
    for group in plan.groups:
        start = group.members.index(group.leader)
        # From the leader along the ring, so that the tree stays on the leader's board as long as possible.
        broadcast(
            builder,
            group.members[start:] + group.members[:start],
            exchange,
            arrived[group.leader],
            f"group {group.group_id}",
        )
    return builder.build(plan.participants)


Arrivals: TypeAlias = dict[int, tuple[int, ...]]
"""The tasks after which a leader has the mean of all models, by leader."""


def _star(
    builder: GraphBuilder,
    by_server: Sequence[Sequence[int]],
    exchange: Exchange,
    cluster: Cluster,
    ready: Arrivals,
    *,
    across_servers: bool,
) -> Arrivals:
    if len(by_server) == 1:
        uploaded = gather(builder, HUB, by_server[0], exchange, ready, "sync")
        return _ends(scatter(builder, HUB, by_server[0], exchange, uploaded, "sync"))
    centers = [leaders[0] for leaders in by_server]
    averaged = {
        leaders[0]: gather(
            builder, leaders[0], leaders, exchange, ready, "sync", _processor(cluster, leaders[0])
        )
        for leaders in by_server
    }
    if across_servers:
        uploaded = gather(
            builder,
            HUB,
            centers,
            exchange,
            {center: (averaged[center],) for center in centers},
            "sync of servers",
        )
        averaged = scatter(builder, HUB, centers, exchange, uploaded, "sync of servers")
    arrived: Arrivals = {}
    for leaders in by_server:
        arrived |= _ends(
            scatter(builder, leaders[0], leaders, exchange, averaged[leaders[0]], "sync")
        )
    return arrived


def _ring(
    builder: GraphBuilder,
    leaders: Sequence[int],
    exchange: Exchange,
    cluster: Cluster,
    ready: Arrivals,
) -> Arrivals:
    return dict(
        GradientExchange()
        .lower(builder, leaders, exchange, dict.fromkeys(leaders, ()), "sync")
        .done
    )


def _tree(
    builder: GraphBuilder,
    leaders: Sequence[int],
    exchange: Exchange,
    cluster: Cluster,
    ready: Arrivals,
) -> Arrivals:
    boards = [cluster.board_of(leader) for leader in leaders]
    climbed = [
        [[leaders[position] for position in own] for own in level]
        for level in tree_levels([(board, cluster.server_of(board)) for board in boards])
    ]
    sums = dict(ready)
    for level in climbed:
        sums |= {
            own[0]: (
                gather(builder, own[0], own, exchange, sums, "sync", _processor(cluster, own[0])),
            )
            for own in level
            if len(own) > 1
        }
    arrived: Arrivals = {leaders[0]: sums.get(leaders[0], ())}
    for meeting in reversed(climbed):
        for own in meeting:
            if len(own) > 1:
                (after,) = arrived[own[0]]
                arrived |= _ends(scatter(builder, own[0], own, exchange, after, "sync"))
    return arrived


def _processor(cluster: Cluster, soc: int) -> str:
    return next(iter(cluster.device_of(soc).processors))


def _through_hub(
    builder: GraphBuilder,
    leaders: Sequence[int],
    exchange: Exchange,
    arrived: Arrivals,
    *,
    hub_decides: bool,
) -> Arrivals:
    """Add the upload of the mean by the first leader and, if the hub decides, the download of the next model to all."""
    first = leaders[0]
    uploaded = builder.transfer(
        "model to the hub",
        first,
        HUB,
        exchange.num_bytes,
        num_messages=exchange.num_messages,
        after=arrived[first],
    )
    if not hub_decides:
        return arrived
    back = builder.transfer(
        "model of the hub",
        HUB,
        first,
        exchange.num_bytes,
        num_messages=exchange.num_messages,
        after=(uploaded,),
    )
    return broadcast(builder, leaders, exchange, (back,), "sync")


def _ends(tasks: Mapping[int, int]) -> Arrivals:
    return {leader: (task,) for leader, task in tasks.items()}


def deal_graph(plan: GroupPlan, bytes_per_soc: float) -> TaskGraph:
    """Return a redistribution of the training data: every SoC gets a share of `bytes_per_soc` from another one (F3).

    A random redistribution sends some samples from each SoC to every other one. Here each SoC sends a whole share to
    the SoC half-way round, which loads every port and (up to rounding) every uplink equally, with far fewer transfers.
    """
    builder = GraphBuilder()
    socs = plan.participants
    for index, soc in enumerate(socs if len(socs) > 1 else ()):
        builder.transfer(
            "deal data", soc, socs[(index + len(socs) // 2) % len(socs)], bytes_per_soc
        )
    return builder.build(socs)


def exchange_graph(
    socs: Sequence[int],
    bucket: Exchange,
    gradients: GradientExchange = EXACT_RING,
    step: int | None = None,
) -> TaskGraph:
    """Return a single exchange of a bucket of gradients; the first SoC is the parameter server, if there is one."""
    if len(socs) < 2:
        raise ConfigError(f"exchange: {len(socs)} SoCs; use 2 or more")
    builder = GraphBuilder()
    gradients.lower(builder, socs, bucket, {soc: () for soc in socs}, gradients.kind, step)
    return builder.build(sorted(socs))
