"""The plan of a scenario with groups, without training, and what the clock predicts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from socflower.cluster import Activity, Cluster, ModelProfile, Usage, sustained_rates
from socflower.errors import InfeasiblePlan
from socflower.hierarchy import (
    Exchanges,
    Fragment,
    GroupPlan,
    IntervalCosts,
    Rebalancing,
    SyncInterval,
    choose_exchanges,
    group_steps_per_epoch,
    plan_groups,
    step_times,
    sync_shapes,
)
from socflower.hierarchy.exchange.collective_tasks import FUSIONS
from socflower.hierarchy.exchange.gradients import exchange_in_groups
from socflower.hierarchy.exchange.models import KINDS
from socflower.hierarchy.plan import plan_of_socs
from socflower.hierarchy.quorum import late_together, training_usage
from socflower.precision.cpu_share import RULES_BY_THROUGHPUT
from socflower.precision.processor_costs import MixedPricing
from socflower.quantities import counted, human_joules, human_ratio, human_seconds, percent
from socflower.scenario.costs import (
    mixing_note,
    model_profile,
    num_samples,
    num_training_samples,
    optimizer_copies,
    pricing,
)
from socflower.scenario.priced_processors import gpu_notes, priced_processors
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.sim import EventClock
from socflower.sim.event_clock import at_start
from socflower.strategies.presets import group_strategy
from socflower.strategies.settings import (
    Streaming,
    TrainingSchedule,
    interval_costs,
    require_few_fragments,
    streamed_interval,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTraining:
    """The predicted cost of a whole training without heat and background load."""

    duration_s: float
    energy_j: float
    # The SoCs that take part.
    socs: tuple[int, ...]
    # Of the SoC that needs most.
    memory_bytes: float
    # The part of the time in which a SoC computes, on average.
    compute_part: float

    @classmethod
    def of(cls, usage: Usage, socs: Sequence[int], memory_bytes: float) -> "PlannedTraining":
        """Return the cost from the usage of the whole training."""
        computing_s = usage.soc_seconds.get(Activity.COMPUTE, 0.0)
        return cls(
            duration_s=usage.duration_s,
            energy_j=usage.total_energy_j,
            socs=tuple(socs),
            memory_bytes=memory_bytes,
            compute_part=computing_s / (usage.duration_s * len(socs)),
        )


def planned_training(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the prediction for a strategy with groups; with `groups = "auto"`, for one group per board."""
    clock = EventClock(cluster)
    work, _ = planned_work(scenario, cluster, clock)
    usage = _usage_of(scenario, work, clock)
    memory_bytes = _memory_bytes(work, optimizer_copies(scenario))
    return PlannedTraining.of(usage, work.plan.participants, memory_bytes)


def _memory_bytes(work: IntervalCosts, copies: float) -> float:
    """Return the memory of the SoC with the largest share of a batch."""
    return work.profile.training_memory_bytes(max(work.shares.values()), optimizer_copies=copies)


def plan_scenario(scenario: Scenario) -> dict[str, Any]:
    """Return the plan document of `socflower plan`: groups on boards, communication groups, predictions.

    `model` has the bytes of the weights, of those that train and so travel, and of a sample's activations, and a
    sample's FLOPs. `predicted` has the seconds of a step (with `uplink_turns` as configured, in turns,
    free-running, F7), of a synchronisation, and of one inside servers; the fraction of a step in which the slowest SoC
    neither computes nor updates; and the seconds and joules of an epoch, the mean over the whole training with all its
    synchronisations. `one_soc` has the epoch of one SoC alone (None where only one takes part), and `verdict` says
    which of both is quicker. With `groups = "auto"`, which only training can decide (F2), the plan is that of one group
    per board, and `notes` says so.
    """
    cluster = scenario_cluster(scenario)
    clock = EventClock(cluster)
    work, exchanges = planned_work(scenario, cluster, clock)
    notes = [*_notes(scenario, cluster, work), *gpu_notes(priced_processors(scenario), None)]
    predicted, one_soc = _predict(scenario, work, clock), None
    if len(work.plan.participants) > 1:
        try:
            one_soc = _predict_one_soc(scenario, cluster)
        except InfeasiblePlan as error:
            notes.append(f"one SoC alone cannot train: {error}")
    train = scenario.train
    return {
        "schema": 1,
        "work": f"{scenario.model.name} on {scenario.data.name}, {counted(train.epochs, 'epoch')} of "
        f"{counted(work.steps_per_epoch, 'step')}, batches of {train.batch_size} a group",
        "model": model_document(work.profile),
        **work.plan.to_document(),
        **exchanges.to_document(),
        "predicted": predicted,
        "one_soc": one_soc,
        "slow_because": _cost_of_company(predicted)[0],
        "verdict": _verdict(predicted, one_soc),
        "notes": notes,
    }


def _notes(scenario: Scenario, cluster: Cluster, work: IntervalCosts) -> Iterator[str]:
    """Yield what a run may do otherwise than the plan, and how it is priced."""
    cost, settings = work.pricing, scenario.strategy
    if settings.num_groups(cluster.num_socs) == "auto":
        yield (
            "groups = 'auto' is decided by training the first rounds with several numbers; planned with "
            f"{len(work.plan.groups)}, one group per board"
        )
    if isinstance(cost, MixedPricing):
        if cost.rule in RULES_BY_THROUGHPUT:
            yield "planned at alpha = 1, the most that int8 can be trusted; a run measures alpha"
        yield mixing_note(cost.rule)
    elif scenario.precision.arithmetic == "int8":
        devices = {board.device.name: board.device.int8_processor for board in cluster.boards}
        sides = [
            f"{name}: {devices[name] or 'none known, FP32 instead'}" for name in sorted(devices)
        ]
        yield f"int8 on each device's fastest int8 processor, {', '.join(sides)}"
    if work.profile.ran_on != "meta":
        yield (
            f"the forward pass of {scenario.model.name} reads values: its operations are those of a pass on "
            f"the {work.profile.ran_on.upper()} with the first sample"
        )


def model_document(profile: ModelProfile) -> dict[str, float]:
    """Return the bytes of the weights, all and those that train and travel, and a sample's operations."""
    return {
        "weight_bytes": profile.parameter_bytes,
        "trained_bytes": profile.weight_bytes,
        "activation_bytes_per_sample": profile.activation_bytes,
        "forward_flops": profile.forward_flops,
        "training_flops": profile.training_flops,
    }


def _predict_one_soc(scenario: Scenario, cluster: Cluster) -> dict[str, float]:
    """Return the seconds and joules of an epoch on the SoC that strategy `sgd` trains on, with the same batches."""
    # Nobody is sent weights.
    precision = scenario.precision.replaced(wire="float32")
    alone = scenario.replaced(
        strategy=scenario.strategy.under("sgd"), precision=precision, edgecloud=None
    )
    clock = EventClock(cluster)
    work, _ = planned_work(alone, cluster, clock)
    predicted = _predict(alone, work, clock)
    return {key: predicted[key] for key in ("epoch_s", "epoch_energy_j")}


def _verdict(predicted: Mapping[str, float], one_soc: Mapping[str, float] | None) -> str | None:
    """Return whether it pays to train on several SoCs: an epoch of the plan against an epoch of one SoC."""
    if one_soc is None:
        return None
    ours, alone = predicted["epoch_s"], one_soc["epoch_s"]
    exchange, advice = _cost_of_company(predicted)
    if alone <= ours:
        return (
            f"one SoC is quicker: {human_seconds(alone)} an epoch instead of {human_seconds(ours)}, with "
            f"{human_joules(one_soc['epoch_energy_j'])} instead of {human_joules(predicted['epoch_energy_j'])}; "
            f"{exchange}. {advice}"
        )
    return f"{human_ratio(alone / ours)} as fast as one SoC, which takes {human_seconds(alone)} an epoch; {exchange}"


def _cost_of_company(predicted: Mapping[str, float]) -> tuple[str, str]:
    """Return what several SoCs lose most by, and how to lose less."""
    fraction, epoch_s = predicted["exchange_fraction"], predicted["epoch_s"]
    synchronising = predicted["sync_s"] * predicted["syncs_per_epoch"] / epoch_s if epoch_s else 0.0
    if synchronising > fraction:
        return (
            f"synchronising takes {percent(synchronising, 0)} of an epoch",
            "Use strategy.name = 'sgd', or raise strategy.sync_interval_epochs",
        )
    return (
        f"exchanging gradients takes {percent(fraction, 0 if fraction < 0.99 else 1)} of a step",
        "Use strategy.name = 'sgd', or larger batches or a larger model",
    )


def rebalancing(scenario: Scenario) -> Rebalancing | None:
    """Return the scenario's re-balancing settings; None if it is off."""
    settings = scenario.strategy
    if settings.rebalance == "off":
        return None
    return Rebalancing(
        within_groups=settings.rebalance != "groups",
        across_groups=settings.rebalance != "shares",
        steps=settings.rebalance_steps,
    )


def planned_work(
    scenario: Scenario, cluster: Cluster, clock: EventClock
) -> tuple[IntervalCosts, Exchanges]:
    """Return the work of a strategy with groups, and how they exchange in it, as `clock` predicts it.

    With `groups = "auto"` it is the work of one group per board.
    """
    work = group_work(scenario, cluster)
    return with_plan(scenario, work, work.plan, clock)


def group_work(scenario: Scenario, cluster: Cluster) -> IntervalCosts:
    """Return the work of a strategy with groups, before it is known how they exchange.

    With `groups = "auto"` it has one group per board, or fewer if their members have too little memory. Raises
    `InfeasiblePlan` for a device with too little memory for its share of a batch.
    """
    settings = scenario.strategy
    num_socs = group_strategy(settings.name).num_socs or settings.socs
    num_groups = settings.num_groups(cluster.num_socs)
    if isinstance(num_groups, str):
        least, most = 1, min(len(cluster.boards), num_socs or cluster.num_socs)
    else:
        least = most = num_groups
    # Fewer groups have smaller shares of a batch, so that they may fit where more do not.
    for number in range(most, least - 1, -1):
        work = _work_of(scenario, cluster, number, num_socs)
        try:
            work.require_memory(optimizer_copies(scenario))
        except InfeasiblePlan:
            if number == least:
                raise
        else:
            break
    return work


def groups_of(
    scenario: Scenario, cluster: Cluster, num_groups: int, num_socs: int | None
) -> GroupPlan:
    """Return the plan of so many groups and SoCs, by the sustained speeds of the scenario's training."""
    rates = sustained_rates(cluster, scenario.model.name, pricing(scenario))
    return plan_groups(cluster, num_groups, num_socs, rates)


def _work_of(
    scenario: Scenario, cluster: Cluster, num_groups: int, num_socs: int | None
) -> IntervalCosts:
    settings, cost, exchange = scenario.strategy, pricing(scenario), scenario.exchange
    plan = groups_of(scenario, cluster, num_groups, num_socs)
    least_together = min(map(len, late_together(plan)))
    if fault := settings.waits_for.fault(len(plan.groups), least_together):
        raise scenario.mistake("strategy", "quorum", fault)
    num_left = num_training_samples(scenario, num_samples(scenario))
    steps_per_epoch = group_steps_per_epoch(num_left, len(plan.groups), scenario.train.batch_size)
    gradients = exchange_in_groups(
        exchange.exchange,
        exchange.compression,
        cluster,
        [group.members for group in plan.groups],
        steps_per_epoch,
    )
    profile, fragments = model_profile(scenario), settings.fragments
    if fragments is not None:
        require_few_fragments(fragments, scenario.interval_epochs, steps_per_epoch)
    return interval_costs(
        scenario.schedule(num_left),
        exchange,
        cluster=cluster,
        plan=plan,
        profile=profile,
        fragment=None if fragments is None else _fragment(fragments, profile),
        gradients=gradients,
        pricing=cost,
        rebalancing=rebalancing(scenario),
        hub_decides=settings.outer_step is not None
        or group_strategy(settings.name).needs_each_model,
        steps_per_epoch=steps_per_epoch,
        preemption=settings.preemption,
        dispatches=settings.dispatch,
    )


def with_plan(
    scenario: Scenario, work: IntervalCosts, plan: GroupPlan, clock: EventClock
) -> tuple[IntervalCosts, Exchanges]:
    """Return the work under a plan, with the exchanges that a run would choose."""
    work, settings = replace(work, plan=plan), scenario.strategy
    exchanges, work = choose_exchanges(
        work,
        settings.uplink_turns,
        scenario.exchange.leaders,
        _planned_lengths(scenario, work),
        clock,
    )
    return work, exchanges


def planned_intervals(scenario: Scenario, work: IntervalCosts) -> Sequence[SyncInterval]:
    """Return the intervals of the whole training."""
    return _schedule_in_groups(scenario, work).intervals(work.steps_per_epoch)


def _schedule_in_groups(scenario: Scenario, work: IntervalCosts) -> TrainingSchedule:
    """Return the schedule after the epochs of one group, with the interval between synchronisations of fragments."""
    schedule, fragments = scenario.schedule(work.num_samples), scenario.strategy.fragments
    interval = schedule.interval_epochs
    if fragments is not None:
        interval = streamed_interval(interval, fragments.fragments)
    epochs = schedule.num_epochs - scenario.synchronous_epochs
    return replace(schedule, num_epochs=epochs, interval_epochs=interval)


def _planned_shapes(scenario: Scenario, work: IntervalCosts) -> Sequence[tuple[SyncInterval, int]]:
    """Return the distinct intervals in groups and their counts."""
    schedule, coding = _schedule_in_groups(scenario, work), work.gradients.coding
    shapes = schedule.shapes(work.steps_per_epoch, coding.changes)
    if not scenario.synchronous_epochs:
        return shapes
    # Data are dealt at the switch, as at the start of any epoch but the first.
    return [(replace(each, index=max(1, each.index)), count) for each, count in shapes]


def _planned_lengths(scenario: Scenario, work: IntervalCosts) -> Mapping[int, int]:
    """Return the number of intervals by their number of steps, in order of occurrence."""
    return _lengths(_planned_shapes(scenario, work))


def _lengths(shapes: Sequence[tuple[SyncInterval, int]]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    # Intervals of equal length have equal costs, so that only their number counts.
    for interval, count in shapes:
        lengths[interval.num_steps] = lengths.get(interval.num_steps, 0) + count
    return lengths


def _fragment(streaming: Streaming, profile: ModelProfile) -> Fragment:
    """Return what a synchronisation of fragments exchanges: their mean."""
    return Fragment(
        num_bytes=profile.weight_bytes / streaming.fragments,
        num_tensors=max(1, round(profile.num_tensors / streaming.fragments)),
        delay_steps=streaming.delay_steps,
    )


def _usage_of(scenario: Scenario, work: IntervalCosts, clock: EventClock) -> Usage:
    """Return the usage of the whole training."""
    if scenario.strategy.waits_for.fraction < 1:
        intervals = planned_intervals(scenario, work)
        return training_usage(work, intervals, at_start(clock), scenario.strategy.waits_for)
    usage = _usage_of_all(work, _planned_shapes(scenario, work), clock)
    return usage + _opening_usage(scenario, work, clock)


def _usage_of_all(
    work: IntervalCosts, shapes: Sequence[tuple[SyncInterval, int]], clock: EventClock
) -> Usage:
    """Return the usage of all intervals; equal intervals are priced once."""
    return sum(
        (work.run(interval, at_start(clock)) * count for interval, count in shapes),
        Usage(),
    )


def _opening_usage(scenario: Scenario, work: IntervalCosts, clock: EventClock) -> Usage:
    """Return the usage of the synchronous epochs before those of groups, in one group with the batch of all."""
    if not scenario.synchronous_epochs:
        return Usage()
    one = plan_of_socs(work.cluster, 1, work.rates, work.plan.participants)
    batch_size = work.batch_size * len(work.plan.groups)
    shapes = sync_shapes(scenario.synchronous_epochs, work.steps_per_epoch, 1.0)
    _, opening = choose_exchanges(
        replace(work, plan=one, batch_size=batch_size),
        scenario.strategy.uplink_turns,
        scenario.exchange.leaders,
        _lengths(shapes),
        clock,
    )
    return _usage_of_all(opening, shapes, clock)


def _predict(scenario: Scenario, work: IntervalCosts, clock: EventClock) -> dict[str, Any]:
    return predicted_costs(
        work,
        clock,
        _planned_shapes(scenario, work),
        scenario.train.epochs,
        in_servers=scenario.schedule(work.num_samples).server_interval > 1,
        optimizer_copies=optimizer_copies(scenario),
        training=_usage_of(scenario, work, clock),
    )


def predicted_costs(
    work: IntervalCosts,
    clock: EventClock,
    shapes: Sequence[tuple[SyncInterval, int]],
    epochs: int,
    *,
    in_servers: bool,
    optimizer_copies: float = 1.0,
    training: Usage | None = None,
) -> dict[str, Any]:
    """Return `predicted` of a plan document: see `plan_scenario`; `shapes` are all intervals of `epochs` epochs.

    `clock` is the one that chose the exchanges, which knows the cost of most graphs. `training` is the usage of the
    whole training where it is not that of all intervals one by one.
    """
    training = training or _usage_of_all(work, shapes, clock)
    synchronisation = work.synchronisation()
    inside = work.synchronisation(across_servers=False) if in_servers else None
    busy = sum(training.soc_seconds.values())
    times = step_times(work, _lengths(shapes), clock)
    step_s = times.with_turns_s if work.uplink_turns else times.without_turns_s
    sync_s, leaders_s, syncs_per_epoch = 0.0, {}, 0.0
    if synchronisation is not None:
        sync_s = at_start(clock).run(synchronisation).duration_s
        leaders_s = {kind: work.synchronisation_s(clock, kind) for kind in KINDS}
        syncs_per_epoch = sum(count for _, count in shapes) / epochs
    fusions = {
        fusion: _step_and_sync(replace(work, fusion=fusion), shapes, clock)
        for fusion in FUSIONS
        if fusion != work.fusion
    }
    fusions[work.fusion] = {"step_s": step_s, "sync_s": sync_s}
    # The exchange takes what the slowest SoC does not need for computing and updating.
    own_s = max(cost.compute_s + cost.merge_s + cost.update_s for cost in work.costs.values())
    return {
        "step_s": step_s,
        "exchange_fraction": max(0.0, 1.0 - own_s / step_s),
        "step_with_turns_s": times.with_turns_s,
        "step_without_turns_s": times.without_turns_s,
        "steps_per_epoch": float(work.steps_per_epoch),
        "sync_s": sync_s,
        "leaders_s": leaders_s,
        "fusion": work.fusion,
        "fusions": {fusion: fusions[fusion] for fusion in FUSIONS},
        "server_sync_s": 0.0 if inside is None else at_start(clock).run(inside).duration_s,
        "syncs_per_epoch": syncs_per_epoch,
        "epoch_s": training.duration_s / epochs,
        "epoch_energy_j": training.total_energy_j / epochs,
        "memory_bytes": _memory_bytes(work, optimizer_copies),
        "compute_fraction": training.soc_seconds.get(Activity.COMPUTE, 0.0) / busy if busy else 0.0,
    }


def _step_and_sync(
    work: IntervalCosts, shapes: Sequence[tuple[SyncInterval, int]], clock: EventClock
) -> dict[str, float]:
    """Return the seconds of a step, in turns or not as is quicker, and of a synchronisation."""
    times, synchronisation = (
        step_times(work, _lengths(shapes), clock),
        work.synchronisation(),
    )
    return {
        "step_s": min(times.with_turns_s, times.without_turns_s),
        "sync_s": 0.0
        if synchronisation is None
        else at_start(clock).run(synchronisation).duration_s,
    }
