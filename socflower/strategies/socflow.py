"""SoCFlow: synchronous SGD inside groups, delayed synchronisation between them (SoCFlow+ section 3.1)."""

from collections.abc import Sequence
from typing import Any

from flwr.serverapp.strategy import Strategy

from socflower.cluster import Cluster, ModelProfile, Pricing, VirtualClock, sustained_rates
from socflower.errors import ConfigError, require_known, require_type
from socflower.hierarchy import (
    Exchanges,
    GroupPlan,
    IntervalCosts,
    Quorum,
    Rebalancing,
    group_steps_per_epoch,
    plan_groups,
)
from socflower.hierarchy.group_preemption import GROUPS, PREEMPTIONS, SOCS
from socflower.hierarchy.quorum import late_together
from socflower.hierarchy.spare_socs import spares_fault
from socflower.peers.ring.settings import RingSettings
from socflower.plain_numbers import plain_numbers
from socflower.precision.processor_costs import MixedPricing
from socflower.strategies import outer_momentum
from socflower.strategies.group_models import Averaging
from socflower.strategies.group_replies import SettledRound
from socflower.strategies.method import RoundReport
from socflower.strategies.methods.group_work import DataParallelWork, SyncPlan
from socflower.strategies.methods.groups import GroupsMethod
from socflower.strategies.outer_step import proximal_mu_of, takes_mean
from socflower.strategies.presets import GroupStrategy, group_strategy
from socflower.strategies.records import aggregate_records
from socflower.strategies.round import Round
from socflower.strategies.round_planner import RoundPlanner
from socflower.strategies.round_strategy import RoundStrategy
from socflower.strategies.settings import (
    Costs,
    ExchangeSettings,
    Grouping,
    TrainingSchedule,
)
from socflower.workloads.dataset import LabelledData
from socflower.workloads.dispatched import require_dispatchable


class GroupRoundStrategy(RoundStrategy[Round, SettledRound]):
    """A strategy whose method trains in groups.

    `method` has the plan's details: `sync.intervals`, and `describe()` what is to be said of the latest one.
    """

    method: GroupsMethod
    reports: list[RoundReport]

    @property
    def plan(self) -> GroupPlan:
        """The plan of the latest round."""
        return self.method.plan


@plain_numbers
class SoCFlow(GroupRoundStrategy):
    """Group-wise parallelism with delayed aggregation.

    One Flower round is one interval between synchronisations of the groups (F3), so `num_rounds` of `start` must
    be `strategy.num_rounds`. Only group leaders get a message (F8): in simulation a leader's client runs its whole
    group. Nodes are matched with the plan's SoCs in ascending order of their ids.

    Parameters
    ----------
    cluster : Cluster
        The SoCs and their links.
    schedule : TrainingSchedule
        How much is trained, and how often groups synchronise.
    groups : int, Grouping or GroupPlan, optional
        The number of logical groups N, see `profile_group_count` for choosing it (F2); with the number of SoCs that
        take part; or a plan. By default one group, or those of the preset.
    costs : Costs
        What virtual time and energy are made of.
    exchange : ExchangeSettings
        Turns on shared uplinks (F6), and overlap (F7). See `turns`.
    rings : RingSettings
        How groups exchange gradients on real machines, if nodes have a ring address in their node config.
    rebalancing : Rebalancing, optional
        Set shares of a batch by the members' measured speeds (F4), and move SoCs between groups of a board so that
        groups are about equally fast (F20). In virtual time, speeds are the clock's; in rings, members measure them.
    outer : Strategy, optional
        A strategy of Flower's that makes the next model of the groups' models, as of FedAvg's clients: `FedAdam(…)`.
        Its settings of federated evaluation hold for nodes. By default models are averaged by samples (F8), and the
        model is evaluated on the server only.
    average : function, optional
        Another rule than the average by samples: `(models, samples)` of the groups, in their order, to the next model.
    quorum : Quorum
        Whether a synchronisation ends without groups that are late: by default it waits for all. The leaders then have
        the star.
    preemption : "socs" or "groups"
        What ends if a user takes a SoC: its own work, or that of its whole group, until none of its SoCs is taken. One
        group always stays.
    dispatch : LabelledData, optional
        All training data: the hub sends each group the samples of its interval, and nodes need no data of their own.
        By default every node holds all data.
    preset : GroupStrategy, optional
        What a baseline fixes of these settings, as an entry of `STRATEGIES`; by default that of the class.
    tolerate_client_errors : bool
        Drop and report a client that raises instead of ending the run. A client that dies or returns NaN is always
        dropped and reported.

    Attributes
    ----------
    round : Round or None
        The latest round, from its messages on.
    reports : list of RoundReport
        What came of each round.
    """

    preset = group_strategy("socflow")

    def __init__(
        self,
        *,
        cluster: Cluster,
        schedule: TrainingSchedule,
        groups: int | Grouping | GroupPlan | None = None,
        costs: Costs = Costs(),
        exchange: ExchangeSettings = ExchangeSettings(),
        rings: RingSettings = RingSettings(),
        rebalancing: Rebalancing | None = None,
        outer: Strategy | None = None,
        average: Averaging | None = None,
        quorum: Quorum = Quorum(),
        preemption: str = SOCS,
        dispatch: LabelledData | None = None,
        preset: GroupStrategy | None = None,
        tolerate_client_errors: bool = False,
    ) -> None:
        name, arguments = type(self).__name__, locals()
        for key, (kinds, expected) in _TYPES.items():
            require_type(name, kinds, expected, **{key: arguments[key]})
        preset = preset or self.preset
        schedule = preset.scheduled(schedule, self._local_epochs)
        exchange = preset.exchanged(exchange)
        if outer is None and preset.outer:
            outer = getattr(outer_momentum, preset.outer)(fraction_evaluate=0.0)
        model_name = costs.model_profile.name if costs.model_profile else ""
        rates = sustained_rates(cluster, model_name, costs.pricing)
        plan, spares = _planned(name, cluster, preset, groups, rates, schedule, preemption)
        preset.require_fitting(name, plan, quorum)
        sync = self._with_rounds(
            sync_plan_of(schedule, exchange, len(plan.groups), self._local_epochs)
        )
        _refuse_beside_outer(name, outer, average, schedule)
        _refuse_beside_quorum(name, quorum, plan, schedule, costs)
        _check_preemption(name, preemption, quorum, rebalancing)
        _check_dispatch(name, dispatch, schedule, costs)
        self._work = DataParallelWork(
            cluster=cluster,
            sync=sync,
            plan=plan,
            costs=costs,
            rebalancing=rebalancing,
            hub_decides=outer is not None,
            preemption=preemption,
            dispatches=dispatch is not None,
        )
        method = self._method(
            sync=sync,
            planner=RoundPlanner(
                cluster, plan, rates, rebalancing, preemption, spares, rings.min_nodes
            ),
            work=self._work,
            rings=rings,
            average=average or aggregate_records,
            needs_each_model=_needs_each_model(outer, average, quorum),
            proximal_mu=proximal_mu_of(outer),
            tolerate_client_errors=tolerate_client_errors,
            quorum=quorum,
            dispatch=dispatch,
        )
        super().__init__(method, outer, len(plan.groups))

    _local_epochs = 0
    """If above 0, each SoC passes so often over its own data in a round, with a new optimiser."""

    def _with_rounds(self, sync: SyncPlan) -> SyncPlan:
        """Return the plan with other intervals than those of its schedule."""
        return sync

    def _method(self, **settings: Any) -> GroupsMethod:
        """Return what a round is."""
        return GroupsMethod(**settings)

    @property
    def pricing(self) -> Pricing:
        """The cost of the clients' arithmetic."""
        return self._work.pricing

    def predicted(
        self, clock: VirtualClock, profile: ModelProfile | None = None
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return how the groups of the latest plan would exchange on the clock, and what an interval would cost.

        The cost is that of its own `model_profile`, else of `profile`; None without both. The clock is not charged.
        """
        return self._work.predicted(self.plan, self.method.leaders, clock, profile)


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "cluster": ((Cluster,), "a Cluster, as of load_cluster(…)"),
    "schedule": ((TrainingSchedule,), "TrainingSchedule(…)"),
    "groups": (
        (int, Grouping, GroupPlan, type(None)),
        "a whole number, Grouping(…), a GroupPlan or None",
    ),
    "costs": ((Costs,), "Costs(…)"),
    "exchange": ((ExchangeSettings,), "ExchangeSettings(…)"),
    "rings": ((RingSettings,), "RingSettings(…)"),
    "rebalancing": ((Rebalancing, type(None)), "Rebalancing(…) or None"),
    "quorum": ((Quorum,), "Quorum(…)"),
    "tolerate_client_errors": ((bool,), "True or False"),
}


def sync_plan_of(
    schedule: TrainingSchedule, exchange: ExchangeSettings, num_groups: int, local_epochs: int = 0
) -> SyncPlan:
    """Return the intervals of a schedule (F3), for so many groups."""
    steps_per_epoch = group_steps_per_epoch(schedule.num_samples, num_groups, schedule.batch_size)
    return SyncPlan(
        schedule=schedule,
        intervals=schedule.intervals(steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        exchange=exchange,
        local_epochs=local_epochs,
    )


def _planned(
    name: str,
    cluster: Cluster,
    preset: GroupStrategy,
    groups: int | Grouping | GroupPlan | None,
    rates: Sequence[float],
    schedule: TrainingSchedule,
    preemption: str,
) -> tuple[GroupPlan, tuple[int, ...]]:
    """Return the first plan and the SoCs that stand in for lost ones."""
    if isinstance(groups, GroupPlan):
        return groups, ()
    counts = preset.grouping(groups, cluster.num_socs)
    plan = plan_groups(cluster, counts.num_groups, counts.num_socs, rates)
    spares = _spares(name, cluster, plan, schedule, preemption) if counts.use_spares else ()
    return plan, spares


def _refuse_beside_outer(
    name: str, outer: Strategy | None, average: Averaging | None, schedule: TrainingSchedule
) -> None:
    """Raise `ConfigError` for settings that an outer strategy would replace."""
    if outer is None:
        return
    if average is not None:
        raise ConfigError(
            f"{name}: average is a rule of its own, which outer = {type(outer).__name__}(…) would replace; give "
            "one of the two"
        )
    if schedule.server_interval > 1:
        raise ConfigError(
            f"{name}: server_interval = {schedule.server_interval}, and outer = {type(outer).__name__}(…) makes "
            "one model of all groups' at every synchronisation; leave one of the two out"
        )


def _refuse_beside_quorum(
    name: str,
    quorum: Quorum,
    plan: GroupPlan,
    schedule: TrainingSchedule,
    costs: Costs,
) -> None:
    """Raise `ConfigError` for settings with which a group cannot be late."""
    if quorum.fraction == 1:
        return
    if fault := quorum.fault(len(plan.groups), min(map(len, late_together(plan)))):
        raise ConfigError(f"{name}: quorum = {quorum.fraction}: {fault}")
    arithmetic = "mixed precision" if isinstance(costs.pricing, MixedPricing) else ""
    if getattr(costs.pricing, "arithmetic", "") == "int8":
        arithmetic = "int8"
    _refuse(
        f"{name}: quorum = {quorum.fraction}",
        (schedule.server_interval > 1, f"server_interval = {schedule.server_interval}"),
        (arithmetic, f"{arithmetic}, whose changes of a model are not added in FP32"),
    )


def _refuse(setting: str, *others: tuple[object, str]) -> None:
    """Raise `ConfigError` for the first other setting that is broken beside one."""
    for is_broken, why in others:
        if is_broken:
            raise ConfigError(f"{setting} does not go with {why}; leave one of the two out")


def _spares(
    name: str, cluster: Cluster, plan: GroupPlan, schedule: TrainingSchedule, preemption: str
) -> tuple[int, ...]:
    """Return the SoCs that are not in the plan; raise `ConfigError` if they cannot stand in."""
    spares = tuple(sorted(set(range(cluster.num_socs)).difference(plan.participants)))
    fault = spares_fault(len(spares), reshuffle=schedule.reshuffle, preemption=preemption)
    if fault:
        raise ConfigError(f"{name}: use_spares = True: {fault}")
    return spares


def _check_dispatch(
    name: str, data: LabelledData | None, schedule: TrainingSchedule, costs: Costs
) -> None:
    """Raise `ConfigError` for data that cannot be sent, and settings under which nodes need data of their own."""
    if data is None:
        return
    _refuse(
        f"{name}: dispatch",
        (not schedule.reshuffle, "reshuffle = False, which leaves data where they are"),
        (
            isinstance(costs.pricing, MixedPricing),
            "mixed precision, whose nodes hold samples to measure alpha on",
        ),
    )
    require_dispatchable(data, schedule.num_samples)


def _check_preemption(
    name: str, preemption: str, quorum: Quorum, rebalancing: Rebalancing | None
) -> None:
    """Raise `ConfigError` for settings under which groups do not keep their members, or their rounds."""
    require_known(f"{name}: preemption", preemption, PREEMPTIONS)
    if preemption != GROUPS:
        return
    _refuse(
        f"{name}: preemption = {GROUPS!r}",
        (quorum.fraction < 1, f"quorum = {quorum.fraction}, whose late groups keep their work"),
        (rebalancing and rebalancing.across_groups, "rebalancing across groups, which moves SoCs"),
    )


def _needs_each_model(outer: Strategy | None, average: Averaging | None, quorum: Quorum) -> str:
    """Return what needs each group's model at the hub; empty if their mean is enough."""
    if quorum.fraction < 1:
        return f"quorum = {quorum.fraction}"
    if outer is not None and not takes_mean(outer):
        return f"outer = {type(outer).__name__}(…)"
    return "average, a rule of its own," if average is not None else ""
