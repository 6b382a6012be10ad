"""What the members of a group do in an interval, and what it costs: synchronous SGD on shares of a batch.

`GroupWork` is what differs between training that members share by samples (here) and by layers
(`socflower.strategies.methods.pipeline`); `GroupsMethod` has the rest of a round.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.cluster import Cluster, ModelProfile, Pricing, Usage, VirtualClock
from socflower.errors import ConfigError
from socflower.flower_adapter import log
from socflower.hierarchy import (
    CapacitiesInUse,
    Exchanges,
    GradientExchange,
    Group,
    GroupPlan,
    IntervalCosts,
    Phase,
    Rebalancing,
    SyncInterval,
    UplinkTurns,
    choose_exchanges,
    unpredicted_exchanges,
)
from socflower.hierarchy.exchange.gradients import exchange_in_groups
from socflower.hierarchy.exchange.models import KINDS, NONE
from socflower.hierarchy.group_preemption import SOCS
from socflower.hierarchy.interval_costs import OwnEpochs
from socflower.hierarchy.uplink_turns import ASKED, NO_SHARED_UPLINK, NOT_PREDICTED, PREDICTED
from socflower.precision.processor_costs import MixedPricing
from socflower.quantities import counted
from socflower.strategies.mixed_replies import group_id_of, mixed_phases
from socflower.strategies.records import with_weights
from socflower.strategies.replies import num_examples_of
from socflower.strategies.round import Round
from socflower.strategies.settings import Costs, ExchangeSettings, TrainingSchedule, interval_costs
from socflower.wire.message_keys import RingOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlan:
    """What groups train between which synchronisations, and how they exchange."""

    schedule: TrainingSchedule
    # One for each round.
    intervals: Sequence[SyncInterval]
    steps_per_epoch: int
    exchange: ExchangeSettings
    # If above 0, each group is a SoC that passes so often over its own data in a round, with a new optimiser.
    local_epochs: int = 0


class GroupWork(Protocol):
    """What members do in an interval."""

    clock: VirtualClock | None
    gradients: GradientExchange

    def use_grid(self, grid: Grid, plan: GroupPlan, arrays: ArrayRecord) -> None:
        """Take clock and model profile from the grid, before the first round, if it has them."""

    def exchanges_of(
        self, plan: GroupPlan, leaders: str, ways: Sequence[str]
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return how a plan's groups and their leaders exchange, and what an interval of it costs.

        `leaders` is what was asked for, `ways` are those that the grid allows.
        """

    def records(self, plan: GroupPlan) -> Mapping[str, ConfigRecord]:
        """Return the records of this work in every message; `TrainingFailed` if the plan is impossible."""

    def npu_ratios(self, group: Group) -> tuple[float, ...]:
        """Return the members' shares of an accelerator (F10); empty if clients measure it or have none."""

    def comparable(self, outcome: RingOutcome, nominal: Callable[[int], float]) -> RingOutcome:
        """Return a ring's outcome with measured rates that compare with the SoCs' nominal ones."""

    def price(
        self, this: Round, usable: Sequence[Message], in_use: CapacitiesInUse
    ) -> tuple[Usage, frozenset[int]]:
        """Return what the interval cost, and the ids of groups that users ended in it; advance the clock by it."""

    def log_changes(self, before: Round | None, this: Round) -> None:
        """Log what is new in a round's plan."""

    def describe(self, plan: GroupPlan) -> list[str]:
        """Return the plan in lines, for the log."""

    def document(self, plan: GroupPlan, exchanges: Exchanges) -> dict[str, Any]:
        """Return the plan as plain values, for a result."""


class DataParallelWork:
    """Members train on shares of each batch and average their gradients (F4, F6, F7).

    Raises `ConfigError` for settings that do not go together.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        sync: SyncPlan,
        plan: GroupPlan,
        costs: Costs,
        rebalancing: Rebalancing | None,
        hub_decides: bool,
        preemption: str = SOCS,
        dispatches: bool = False,
    ) -> None:
        exchange = sync.exchange
        in_int8 = getattr(costs.pricing, "arithmetic", "") == "int8"
        if in_int8 and exchange.overlap_buckets > 1:
            raise ConfigError(
                f"SoCFlow: overlap_buckets = {exchange.overlap_buckets}, but gradients in int8 are "
                "exchanged after the backward pass; leave it out"
            )
        if in_int8 and exchange.compression != NONE:
            raise ConfigError(
                f"SoCFlow: compression = {exchange.compression!r}, but gradients in int8 are summed "
                "exactly; leave it out"
            )
        self.gradients = exchange_in_groups(
            exchange.exchange,
            exchange.compression,
            cluster,
            [group.members for group in plan.groups],
            sync.steps_per_epoch,
        )
        self.clock = costs.clock
        self.pricing = costs.pricing
        self._cluster, self._sync = cluster, sync
        self._rebalancing, self._hub_decides = rebalancing, hub_decides
        self._preemption, self._dispatches = preemption, dispatches
        self._model_name = costs.model_profile.name if costs.model_profile else ""
        self._costs = (
            None if costs.model_profile is None else self._costs_of(plan, costs.model_profile)
        )

    def use_grid(self, grid: Grid, plan: GroupPlan, arrays: ArrayRecord) -> None:
        """Take the grid's clock, and its profile for want of one; `ConfigError` for another cluster."""
        self.clock = getattr(grid, "clock", None)
        if self.clock is None:
            return
        profile = getattr(grid, "model_profile", None)
        if self._costs is None and profile is not None:
            self._costs = self._costs_of(plan, with_weights(profile, arrays))
        if self._costs is None:
            log(
                WARNING,
                "SoCFlow: without a model_profile this engine keeps no virtual time; pass "
                "costs=Costs(model_profile=profile_module(model, example_shape, name))",
            )
        require_cluster_of(grid, self._cluster)

    def use(self, sync: SyncPlan) -> None:
        """Price from now on what another plan trains, with batches of another size."""
        self._sync = sync
        if self._costs is not None:
            self._costs = replace(self._costs, batch_size=sync.schedule.batch_size)

    def exchanges_of(
        self, plan: GroupPlan, leaders: str, ways: Sequence[str]
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return the exchanges that the clock predicts to be quickest, or those that were asked for."""
        return self._chosen(plan, self._costs, self.clock, leaders, ways)

    def predicted(
        self, plan: GroupPlan, leaders: str, clock: VirtualClock, profile: ModelProfile | None
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return the same by another clock and, without a profile of its own, by `profile`."""
        costs = self._costs
        if costs is None and profile is not None:
            costs = self._costs_of(plan, profile)
        return self._chosen(plan, costs, clock, leaders, KINDS)

    def _chosen(
        self,
        plan: GroupPlan,
        costs: IntervalCosts | None,
        clock: VirtualClock | None,
        leaders: str,
        ways: Sequence[str],
    ) -> tuple[Exchanges, IntervalCosts | None]:
        turns = self._sync.exchange.uplink_turns
        if costs is None:
            compression = self._sync.exchange.leader_compression
            return unpredicted_exchanges(plan, turns, leaders, compression, ways), None
        lengths = Counter(interval.num_steps for interval in self._sync.intervals)
        return choose_exchanges(replace(costs, plan=plan), turns, leaders, lengths, clock, ways)

    def _costs_of(self, plan: GroupPlan, profile: ModelProfile) -> IntervalCosts:
        costs = interval_costs(
            self._sync.schedule,
            self._sync.exchange,
            cluster=self._cluster,
            plan=plan,
            profile=profile,
            steps_per_epoch=self._sync.steps_per_epoch,
            gradients=self.gradients,
            pricing=self.pricing,
            rebalancing=self._rebalancing,
            hub_decides=self._hub_decides,
            preemption=self._preemption,
            dispatches=self._dispatches,
        )
        costs.require_memory()
        return costs

    def records(self, plan: GroupPlan) -> Mapping[str, ConfigRecord]:
        """Return none: a group's task says all."""
        return {}

    def npu_ratios(self, group: Group) -> tuple[float, ...]:
        """Return each member's beta from the catalogue (F10); empty if clients measure it or do not need it."""
        pricing = self.pricing
        if self._costs is None or not isinstance(pricing, MixedPricing):
            return ()
        return tuple(
            pricing.npu_ratio(self._model_name, self._cluster.device_of(soc))
            for soc in group.members
        )

    def comparable(self, outcome: RingOutcome, nominal: Callable[[int], float]) -> RingOutcome:
        """Return the outcome as it is: members measure samples per second of the whole model."""
        return outcome

    def price(
        self, this: Round, usable: Sequence[Message], in_use: CapacitiesInUse
    ) -> tuple[Usage, frozenset[int]]:
        """Return the usage of the interval's steps and the synchronisation after it, and what groups users ended."""
        if self.clock is None or this.costs is None:
            return Usage(), frozenset()
        phases: Sequence[Phase] = ()
        if self._sync.local_epochs:
            phases = [(1, self._own_epochs(this, usable))]
        elif isinstance(self.pricing, MixedPricing):
            phases = mixed_phases(usable, this.interval.num_steps, self.pricing)
        return this.costs.run_interrupted(this.interval, self.clock, phases, in_use)

    def _own_epochs(self, this: Round, usable: Sequence[Message]) -> dict[int, Pricing]:
        """Return what each group's own data cost; a group without a reply counts as one with an equal part."""
        batch_size, epochs = self._sync.schedule.batch_size, self._sync.local_epochs
        samples = {group_id_of(reply): num_examples_of(reply) for reply in usable}
        usual = this.interval.num_steps * batch_size
        found: dict[int, Pricing] = {}
        for group in this.plan.groups:
            own = int(samples.get(group.group_id, usual))
            num_steps = max(1, epochs * -(-own // (epochs * batch_size)))
            found[group.group_id] = OwnEpochs(
                pricing=self.pricing, num_steps=num_steps, batch_size=own / num_steps
            )
        return found

    def log_changes(self, before: Round | None, this: Round) -> None:
        """Log how groups exchange if that is new."""
        if before is not None and before.exchanges == this.exchanges:
            return
        leaders = this.exchanges.leaders
        log(
            INFO,
            "SoCFlow: exchanges of groups: %s; of leaders: %s%s",
            _describe_turns(this.exchanges.turns),
            leaders.kind,
            "" if leaders.compression == NONE else f", in {leaders.compression}",
        )

    def describe(self, plan: GroupPlan) -> list[str]:
        """Return groups and communication groups in lines."""
        sizes = [len(group.members) for group in plan.groups]
        split = sum(group.split for group in plan.groups)
        return [
            f"Groups: {len(sizes)} of {min(sizes)} to {max(sizes)} SoCs, {split} split over boards, "
            f"contention {plan.contention}",
            f"Communication groups: {len(plan.communication_groups)}",
        ]

    def document(self, plan: GroupPlan, exchanges: Exchanges) -> dict[str, Any]:
        """Return groups, their exchanges and those of their leaders."""
        return {**plan.to_document(), **exchanges.to_document()}


def require_cluster_of(grid: Grid, cluster: Cluster) -> None:
    """Raise `ConfigError` if the grid's cluster is another one."""
    given = getattr(grid, "cluster", cluster)
    if given.boards != cluster.boards:
        raise ConfigError(
            f"the strategy's cluster ({_hardware(cluster)}) is not the one the engine was given "
            f"({_hardware(given)}); describe both by the same cluster file"
        )


def _hardware(cluster: Cluster) -> str:
    devices = sorted({board.device.name for board in cluster.boards})
    boards = counted(len(cluster.boards), "board")
    return f"{counted(cluster.num_socs, 'SoC')} on {boards}, {', '.join(devices)}"


def _describe_turns(turns: UplinkTurns) -> str:
    """Return how groups exchange, for the log."""
    reasons = {
        ASKED: ", as asked for",
        PREDICTED: ", which is predicted to be faster",
        NO_SHARED_UPLINK: ", as no two share an uplink",
        NOT_PREDICTED: ": without a clock and a model_profile nothing predicts whether running freely "
        "is faster; uplink_turns=False runs freely",
    }
    said = "taking turns" if turns.enabled else "running freely"
    return said + reasons[turns.decided_by]
