"""Task graphs of a plan: a training step of all groups, and a synchronisation between them.

The graphs define dependencies and costs; the clock determines the times.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from socflower.cluster import HUB, Activity, Cluster, StepCost, TaskGraph, TaskGraphBuilder
from socflower.errors import ConfigError, require_range
from socflower.hierarchy.communication_groups import conflicts
from socflower.hierarchy.exchange.coding_bytes import Compute
from socflower.hierarchy.exchange.collective_tasks import (
    Bucket,
    Dependencies,
    Exchange,
    broadcast,
)
from socflower.hierarchy.exchange.gradients import EXACT_RING, ExchangeTasks, GradientExchange
from socflower.hierarchy.exchange.models import RING, STAR_EXCHANGE, Arrivals, ModelExchange
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
    memory_bytes_per_s: Mapping[int, float] | None = None,
) -> TaskGraph:
    """Return one training step of all groups: compute, exchange of gradients inside the group, update (F4).

    When the graph is repeated, a member starts its next step as soon as it has updated its weights. Groups do not wait
    for each other, except that with `uplink_turns` conflicting groups exchange in turn (F6, F7): a split group's
    exchange waits for those of its conflicting groups in earlier communication groups, and for those in later ones of
    the previous step.

    With `overlap_buckets` > 1 gradients are exchanged in at most that many buckets, each as soon as the backward pass
    has completed it and the bucket before has been exchanged.

    `costs` has the seconds and processor of each member. `step` counts from the start of training, for a coding that
    changes during it; None is a step after its warm-up. `memory_bytes_per_s` has each member's rate, by which encoding
    is priced; without it, that takes no time. Raises `ConfigError` if a member has no entry, or for fewer
    than one bucket.
    """
    require_range("step", least=1, overlap_buckets=overlap_buckets)
    missing = [soc for soc in plan.participants if soc not in costs]
    if missing:
        raise ConfigError(f"step: members {missing} have no cost")
    builder = TaskGraphBuilder()
    compute: Compute | None = None
    if memory_bytes_per_s is not None:
        compute = partial(_encode, builder, costs, memory_bytes_per_s)
    turn_of = {
        group_id: turn for turn, ids in enumerate(plan.communication_groups) for group_id in ids
    }
    neighbours = conflicts(plan.groups) if uplink_turns else {}
    # The transfers that begin and end a group's exchange.
    first: dict[int, tuple[int, ...]] = {}
    last: dict[int, tuple[int, ...]] = {}
    for group in sorted(plan.groups, key=lambda group: (turn_of[group.group_id], group.group_id)):
        others = sorted(neighbours.get(group.group_id, ()))
        before = [task for other in others for task in last.get(other, ())]
        lower = partial(gradients.lower, builder, group.members, step=step, compute=compute)
        first[group.group_id], last[group.group_id] = _group_step(
            builder, group, costs, exchange.buckets(overlap_buckets), before, lower
        )
    for group_id, neighbour_ids in neighbours.items():
        turn = turn_of[group_id]
        later = [last[other] for other in sorted(neighbour_ids) if turn_of[other] > turn]
        for task in first[group_id] if later else ():
            builder.follow_previous(task, [task for tasks in later for task in tasks])
    return builder.build(plan.participants)


def _group_step(
    builder: TaskGraphBuilder,
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


def _encode(
    builder: TaskGraphBuilder,
    costs: Mapping[int, StepCost],
    memory_bytes_per_s: Mapping[int, float],
    name: str,
    soc: int,
    memory_bytes: float,
    after: Sequence[int],
) -> int:
    """Add work of so much memory traffic."""
    seconds = memory_bytes / memory_bytes_per_s[soc]
    return builder.compute(name, soc, seconds, processor=costs[soc].processor, after=after)


def _compute(
    builder: TaskGraphBuilder,
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
    models: ModelExchange = STAR_EXCHANGE,
    across_servers: bool = True,
    delays_s: Mapping[int, float] | None = None,
) -> TaskGraph:
    """Return a synchronisation between groups (F8): leaders exchange models, then each sends the mean to its group.

    With `across_servers` servers exchange too. A leader has its model `delays_s` after the start; without an entry, and
    in a ring, it has it at once.
    """
    builder = TaskGraphBuilder()
    # Delays are tasks of the hub, where they cost no energy, each on a processor of its own.
    ready: Arrivals = {
        leader: (builder.compute("steps", HUB, delay_s, processor=f"waits for SoC {leader}"),)
        for leader, delay_s in (delays_s or {}).items()
        if models.kind != RING and delay_s > 0.0
    }
    by_server = [[group.leader for group in groups] for groups in plan.by_server.values()]
    arrived = models.lower(
        builder, by_server, exchange, cluster, ready, across_servers=across_servers
    )
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


def deal_graph(plan: GroupPlan, bytes_per_soc: float) -> TaskGraph:
    """Return a redistribution of the training data: every SoC gets a share of `bytes_per_soc` from another one (F3).

    A random redistribution sends some samples from each SoC to every other one. Here each SoC sends a whole share to
    the SoC half-way round, which loads every port and (up to rounding) every uplink equally, with far fewer transfers.
    """
    builder = TaskGraphBuilder()
    socs = plan.participants
    for index, soc in enumerate(socs if len(socs) > 1 else ()):
        builder.transfer(
            "deal data", soc, socs[(index + len(socs) // 2) % len(socs)], bytes_per_soc
        )
    return builder.build(socs)


def dispatch_graph(plan: GroupPlan, bytes_per_soc: float) -> TaskGraph:
    """Return a distribution of the training data by the hub: it sends every SoC a share of `bytes_per_soc`.

    "The scheduler dispatches the training data to each SoC, which loads only a partial data set" (SoCFlow+ section 3).
    """
    builder = TaskGraphBuilder()
    for soc in plan.participants:
        builder.transfer("dispatch data", HUB, soc, bytes_per_soc)
    return builder.build(plan.participants)


def exchange_graph(
    socs: Sequence[int],
    bucket: Exchange,
    gradients: GradientExchange = EXACT_RING,
    step: int | None = None,
) -> TaskGraph:
    """Return a single exchange of a bucket of gradients; the first SoC is the parameter server, if there is one."""
    if len(socs) < 2:
        raise ConfigError(f"exchange: {len(socs)} SoCs; use 2 or more")
    builder = TaskGraphBuilder()
    gradients.lower(builder, socs, bucket, {soc: () for soc in socs}, gradients.kind, step)
    return builder.build(sorted(socs))
