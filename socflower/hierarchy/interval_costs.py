"""Costs of training under a plan: intervals as task graphs on the clock, for strategies and for predictions."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import TypeAlias

from socflower.cluster import (
    FP32,
    Cluster,
    Device,
    ModelProfile,
    Pricing,
    StepCost,
    TaskGraph,
    Usage,
    VirtualClock,
    sustained_rates,
)
from socflower.cluster.device_memory import require_training_memory
from socflower.cluster.virtual_clock import Pace
from socflower.hierarchy.batch_shares import split_batch
from socflower.hierarchy.exchange.collective_tasks import BUCKETS, PER_TENSOR, Exchange
from socflower.hierarchy.exchange.gradients import EXACT_RING, GradientExchange
from socflower.hierarchy.exchange.models import RING, STAR_EXCHANGE, ModelExchange
from socflower.hierarchy.group_preemption import GROUPS, SOCS, terminated_groups
from socflower.hierarchy.plan import Group, GroupPlan
from socflower.hierarchy.rebalancing import CapacitiesInUse, Rebalancing, without_members
from socflower.hierarchy.sync_intervals import SyncInterval
from socflower.hierarchy.task_graphs import (
    deal_graph,
    dispatch_graph,
    step_graph,
    synchronisation_graph,
)

_SAME_TIME, _ROUNDING = 1e-9, 2.0**-44
"""Differences of times that are due to rounding, relative to a stretch of time and to the clock's time."""

_SYNCHRONISATION = "synchronisation"
"""How results and traces name it."""

Phase: TypeAlias = tuple[int, Mapping[int, Pricing]]
"""Steps of an interval, and the pricings of groups (by id) that differ during them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnEpochs:
    """The pricing of a member's whole interval as one step, if its batches are those of its own data."""

    pricing: Pricing
    num_steps: int
    # The mean number of samples of a batch.
    batch_size: float

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return the cost of all steps."""
        cost = self.pricing.step_cost(model, device, math.ceil(self.batch_size))
        return replace(
            cost,
            forward_s=cost.forward_s * self.num_steps,
            backward_s=cost.backward_s * self.num_steps,
            update_s=cost.update_s * self.num_steps,
        )

    def rate(self, model_name: str, device: Device) -> float:
        """Return the FLOP/s of the pricing."""
        return self.pricing.rate(model_name, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A part of the model that is synchronised while groups do the next `delay_steps`."""

    num_bytes: float
    num_tensors: int
    delay_steps: int


@dataclass(frozen=True, kw_only=True)
class IntervalCosts:
    """A plan and the parameters of the training that determine its costs."""

    cluster: Cluster
    plan: GroupPlan
    profile: ModelProfile
    num_samples: int
    # Of a group.
    batch_size: int
    steps_per_epoch: int
    # Whether communication groups take turns; `choose_turns` says whether they should.
    uplink_turns: bool
    reshuffle: bool = True
    overlap_buckets: int = 1
    # How members exchange gradients.
    gradients: GradientExchange = EXACT_RING
    # Of the arithmetic in which members train.
    pricing: Pricing = FP32
    rebalancing: Rebalancing | None = None
    # How groups exchange models; `choose_leaders` says how they should.
    models: ModelExchange = STAR_EXCHANGE
    # How tensors are sent.
    fusion: str = PER_TENSOR
    # What every synchronisation exchanges, if that is not the whole model.
    fragment: Fragment | None = None
    # What a user who takes a SoC ends within an interval.
    preemption: str = SOCS
    # Whether the hub sends groups their samples from the first epoch on, and not only when they get other ones.
    dispatches: bool = False

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """The sustained speed of each SoC of the cluster."""
        return sustained_rates(self.cluster, self.profile.name, self.pricing)

    @cached_property
    def shares(self) -> Mapping[int, int]:
        """Samples of a group's batch by member, in proportion to nominal capacity (F4)."""
        return self.shares_of(self.plan, {})

    def shares_of(self, plan: GroupPlan, parts: Mapping[int, float]) -> Mapping[int, int]:
        """Return the shares with fractions `parts` of nominal capacities; SoCs without an entry have all (F4)."""
        shares: dict[int, int] = {}
        for group in plan.groups:
            capacities = [self.rates[soc] * parts.get(soc, 1.0) for soc in group.members]
            own = split_batch(self.batch_size, capacities)
            shares |= zip(group.members, own, strict=True)
        return shares

    def require_memory(self, optimizer_copies: float = 0.0) -> None:
        """Raise `InfeasiblePlan` for a SoC with too little memory for its share; see `require_training_memory`."""
        require_training_memory(
            self.cluster,
            self.profile,
            self.shares,
            pricing=self.pricing,
            optimizer_copies=optimizer_copies,
            remedy="use a smaller batch or model, or fewer groups, whose members have smaller shares",
        )

    @cached_property
    def memory_bytes_per_s(self) -> Mapping[int, float]:
        """Each member's memory, by which the encoding of gradients is priced."""
        socs = self.plan.participants
        return {soc: self.cluster.device_of(soc).memory_bytes_per_s for soc in socs}

    @cached_property
    def costs(self) -> Mapping[int, StepCost]:
        """Each member's cost of a step."""
        return self._costs(self.plan, self.shares, {})

    def _costs(
        self,
        plan: GroupPlan,
        shares: Mapping[int, int],
        pricings: Mapping[int, Pricing],
    ) -> Mapping[int, StepCost]:
        """Return the members' costs; `pricings` overrides the pricing of single groups."""
        costs: dict[int, StepCost] = {}
        for group in plan.groups:
            pricing = pricings.get(group.group_id, self.pricing)
            for soc in group.members:
                device = self.cluster.device_of(soc)
                costs[soc] = pricing.step_cost(self.profile, device, shares[soc])
        return costs

    @cached_property
    def exchange(self) -> Exchange:
        """The exchanged data, gradients or weights."""
        return Exchange(
            num_bytes=self.profile.weight_bytes,
            num_tensors=self.profile.num_tensors,
            fused=self.fusion == BUCKETS,
            gradients=self.profile.gradients,
        )

    def step(
        self,
        *,
        uplink_turns: bool | None = None,
        pricings: Mapping[int, Pricing] | None = None,
        step: int | None = None,
    ) -> TaskGraph:
        """Return one step of all groups.

        `uplink_turns` overrides whether communication groups take turns, `pricings` the costs of single groups. `step`
        counts from the start of training; None is a step after all warm-up of the gradients' coding.
        """
        costs = self._costs(self.plan, self.shares, pricings) if pricings else self.costs
        return step_graph(
            self.plan,
            costs,
            self.exchange,
            gradients=self.gradients,
            step=step,
            overlap_buckets=self.overlap_buckets,
            uplink_turns=self.uplink_turns if uplink_turns is None else uplink_turns,
            memory_bytes_per_s=self.memory_bytes_per_s,
        )

    def synchronisation(
        self,
        *,
        across_servers: bool = True,
        leaders: str | None = None,
        delays_s: Mapping[int, float] | None = None,
    ) -> TaskGraph | None:
        """Return a synchronisation between all groups, or those of each server; None if no two groups take part.

        `leaders` overrides how they exchange models. `delays_s`: how long after the start each leader has its model.
        """
        exchange = self.exchange
        if self.models.in_int8:
            exchange = replace(exchange, num_bytes=self.profile.int8_bytes)
        if self.fragment is not None:
            exchange = replace(
                exchange,
                num_bytes=self.fragment.num_bytes,
                num_tensors=self.fragment.num_tensors,
            )
        alone = max(map(len, self.plan.by_server.values())) == 1
        if len(self.plan.groups) == 1 or (alone and not across_servers):
            return None
        return synchronisation_graph(
            self.plan,
            exchange,
            self.cluster,
            models=replace(self.models, kind=leaders or self.models.kind),
            across_servers=across_servers,
            delays_s=delays_s,
        )

    def synchronisation_s(self, clock: VirtualClock, leaders: str) -> float:
        """Return the predicted seconds of a synchronisation of all groups with this kind of `leaders`.

        All groups start together, so it serves to compare kinds, not to add to the time of steps.
        """
        graph = self.synchronisation(leaders=leaders)
        return 0.0 if graph is None else clock.predicted_s(graph)

    def begins_with_deal(self, interval: SyncInterval) -> bool:
        """Return whether groups get data at this interval's start.

        The first distribution is part of setup, and a single group keeps its data, unless the hub `dispatches` them.
        """
        is_new_epoch = interval.first_step == interval.deal_epoch * self.steps_per_epoch
        if self.dispatches:
            return is_new_epoch
        is_dealt = is_new_epoch and interval.index > 0
        return self.reshuffle and is_dealt and len(self.plan.groups) > 1

    def run(
        self,
        interval: SyncInterval,
        clock: VirtualClock,
        phases: Sequence[Phase] = (),
        capacities: CapacitiesInUse | None = None,
    ) -> Usage:
        """Run an interval and the synchronisation at its end on the clock; see `run_interrupted`."""
        return self.run_interrupted(interval, clock, phases, capacities)[0]

    def run_interrupted(
        self,
        interval: SyncInterval,
        clock: VirtualClock,
        phases: Sequence[Phase] = (),
        capacities: CapacitiesInUse | None = None,
    ) -> tuple[Usage, frozenset[int]]:
        """Run an interval and the synchronisation at its end on the clock; return also which groups were terminated.

        Those are ids of groups that users ended with `preemption = "groups"`; they do not synchronise.

        In a star or tree each leader sends its model as soon as its group has done its steps; in a ring all leaders
        wait for the slowest group. If speeds or users change in the interval, or a group has a ring of more than 20
        SoCs, these models do not share links with what slower groups exchange meanwhile.

        `phases` are needed if the cost of a step changed within the interval; together they have all its steps. On a
        clock with changing speeds, `capacities` are those in use at the start; they are updated to those at the end.
        """
        if self.fragment is not None:
            usage = self.run_streamed(interval, clock, self.fragment, None, capacities)
            return usage, frozenset()
        usage = self._deal(clock) if self.begins_with_deal(interval) else Usage()
        labels = (f"to epoch {interval.epoch_end:g}", _SYNCHRONISATION)
        terminated: set[int] = set()
        steps_of = (
            partial(
                ChangingSteps,
                self,
                clock,
                capacities or CapacitiesInUse(1.0),
                terminated=terminated,
            )
            if clock.changes
            else partial(_SteadySteps, self, clock)
        )
        *earlier, (num_steps, pricings, first_step) = self._stages(interval, phases)
        for before, own, first in earlier:
            usage += steps_of(own, first).run(before, labels[0])
        steps = steps_of(pricings, first_step)
        synchronisation = self.synchronisation(across_servers=interval.across_servers)
        if synchronisation is None:
            return usage + steps.run(num_steps, labels[0]), frozenset(terminated)
        graph = steps.steady_graph() if self.models.kind != RING else None
        # Simulated as a whole, so that models share links with the exchanges of slower groups.
        if graph is not None:
            waits = {group.leader: group.members for group in self.plan.groups}
            whole = clock.run_overlapped(
                graph, synchronisation, waits, repeat=num_steps, labels=labels
            )
            if whole is not None:
                return usage + whole, frozenset()
        # Otherwise the steps run first, and early leaders get a head start.
        begin_s = clock.now_s
        usage += steps.run(num_steps, labels[0])
        left, across = self._without(terminated), interval.across_servers
        usage += left._synchronise(clock, across, steps.ended_s(), begin_s)
        return usage, frozenset(terminated)

    def _synchronise(
        self,
        clock: VirtualClock,
        across_servers: bool,
        ended_s: Mapping[int, float],
        begin_s: float,
    ) -> Usage:
        """Run a synchronisation after steps that began at `begin_s`; leaders whose groups ended early began earlier."""
        head_start_s, delays_s = 0.0, dict[int, float]()
        if self.models.kind != RING:
            delays_s, head_start_s = self._delays_s(ended_s, begin_s, clock.now_s)
        synchronisation = self.synchronisation(
            across_servers=across_servers, delays_s=delays_s or None
        )
        if synchronisation is None:
            return Usage()
        return clock.run(synchronisation, label=_SYNCHRONISATION, head_start_s=head_start_s)

    def _without(self, terminated: Collection[int]) -> "IntervalCosts":
        """Return the work of the groups that are not terminated."""
        if not terminated:
            return self
        kept = [group for group in self.plan.groups if group.group_id not in terminated]
        return replace(self, plan=with_groups(self.plan, kept))

    def run_streamed(
        self,
        interval: SyncInterval,
        clock: VirtualClock,
        before: Fragment | None,
        after: Fragment | None,
        capacities: CapacitiesInUse | None = None,
    ) -> Usage:
        """Run an interval beside the synchronisation of the fragment `before` it, then that of the one `after` it.

        The first is awaited after its `delay_steps`. Messages and computing do not slow each other down.
        """
        usage = self._deal(clock) if self.begins_with_deal(interval) else Usage()
        label, num_left, first_step = (
            f"to epoch {interval.epoch_end:g}",
            interval.num_steps,
            interval.first_step,
        )

        def steps(number: int) -> Usage:
            if not number:
                return Usage()
            if clock.changes:
                own = capacities or CapacitiesInUse(1.0)
                return ChangingSteps(self, clock, own, {}, first_step).run(number, label)
            return _SteadySteps(self, clock, {}, first_step).run(number, label)

        def synchronise(fragment: Fragment, head_start_s: float) -> Usage:
            graph = replace(self, fragment=fragment).synchronisation()
            if graph is None:
                return Usage()
            head_start_s = min(head_start_s, clock.predicted_s(graph))
            return clock.run(graph, label=_SYNCHRONISATION, head_start_s=head_start_s)

        if before is not None:
            beside = min(num_left, before.delay_steps)
            begin_s = clock.now_s
            usage += steps(beside)
            usage += synchronise(before, clock.now_s - begin_s)
            num_left -= beside
        usage += steps(num_left)
        return usage if after is None else usage + synchronise(after, 0.0)

    def _stages(
        self, interval: SyncInterval, phases: Sequence[Phase]
    ) -> Iterator[tuple[int, Mapping[int, Pricing], int]]:
        """Yield runs of steps of equal cost: their number, the groups' pricings, and the first step.

        The last one is the merge of CPU and NPU weights, if they are merged at synchronisations.
        """
        first_step = interval.first_step
        for num_steps, pricings in phases or [(interval.num_steps, {})]:
            for part, first in self.gradients.stages(first_step, num_steps):
                yield part, pricings, first
            first_step += num_steps
        merging = getattr(self.pricing, "at_synchronisation", None)
        if merging is not None:
            yield 1, {group.group_id: merging for group in self.plan.groups}, first_step

    def _deal(self, clock: VirtualClock) -> Usage:
        """Distribute the training data among the SoCs again."""
        bytes_per_soc = self.num_samples / len(self.plan.participants) * self.profile.input_bytes
        return clock.run(self.distribution(self.plan, bytes_per_soc), label="deal data")

    def distribution(self, plan: GroupPlan, bytes_per_soc: float) -> TaskGraph:
        """Return how the SoCs of a plan get `bytes_per_soc` of training data: from the hub, or from each other."""
        return (dispatch_graph if self.dispatches else deal_graph)(plan, bytes_per_soc)

    def _delays_s(
        self,
        ended_s: Mapping[int, float],
        begin_s: float,
        now_s: float,
    ) -> tuple[dict[int, float], float]:
        """Return by leader how long after the first group each group ended its steps, and how long ago the first ended.

        Differences by rounding count as 0.
        """
        done_s = {
            group.leader: max(ended_s.get(soc, now_s) for soc in group.members)
            for group in self.plan.groups
        }
        first_s = min(done_s.values())
        if max(done_s.values()) - first_s <= rounding_s(begin_s, now_s):
            return {}, 0.0
        return {leader: at_s - first_s for leader, at_s in done_s.items()}, now_s - first_s


class _SteadySteps:
    """Steps of an interval at constant speeds."""

    def __init__(
        self,
        work: IntervalCosts,
        clock: VirtualClock,
        pricings: Mapping[int, Pricing],
        first_step: int,
    ) -> None:
        self._clock, self._graph = clock, work.step(pricings=pricings, step=first_step)
        self._begin_s, self._num_steps = 0.0, 0

    def steady_graph(self) -> TaskGraph | None:
        """Return the graph of all steps."""
        return self._graph

    def run(self, num_steps: int, label: str) -> Usage:
        """Run the steps."""
        self._begin_s, self._num_steps = self._clock.now_s, num_steps
        return self._clock.run(self._graph, repeat=num_steps, label=label)

    def ended_s(self) -> Mapping[int, float]:
        """Return the clock time at which each SoC ended its last step."""
        ends_s = self._clock.predicted_ends_s(self._graph, repeat=self._num_steps)
        return {soc: self._begin_s + end_s for soc, end_s in ends_s.items()}


class ChangingSteps:
    """Steps of an interval with changing speeds and preempted SoCs.

    When a member is preempted, its group divides the batch among the remaining members; a group without members waits
    until one returns. With `preemption = "groups"` the group is terminated instead, and its id added to `terminated`,
    which the stages of an interval share; its SoCs cost nothing more, as those that users have. With re-balancing
    inside groups, shares are adapted to a new speed after as many steps as there are between two checks in a real ring.
    """

    def __init__(
        self,
        work: IntervalCosts,
        clock: VirtualClock,
        capacities: CapacitiesInUse,
        pricings: Mapping[int, Pricing],
        first_step: int,
        terminated: set[int] | None = None,
    ) -> None:
        self._work, self._clock, self._pricings = work, clock, pricings
        self._terminated = set[int]() if terminated is None else terminated
        self._first_step = first_step
        self._capacities = capacities
        # If data are not redistributed, shares are fixed by each member's data.
        balancing = work.rebalancing if work.reshuffle else None
        is_balanced = balancing is not None and balancing.within_groups
        self._check_interval_steps = balancing.steps if balancing and is_balanced else 0
        self._graphs: dict[tuple[object, ...], TaskGraph] = {}
        self._ended_s: dict[int, float] = {}

    def steady_graph(self) -> TaskGraph | None:
        """Return the graph of all steps if nothing changes; None if a SoC is preempted or shares are to change."""
        plan = self._work.plan
        measured, is_off = self._measured(plan)
        is_taken = not measured.keys().isdisjoint(self._clock.taken_socs())
        if is_off or is_taken or self._terminated:
            return None
        return self._graph(plan, plan.participants)

    def _measured(self, plan: GroupPlan) -> tuple[dict[int, float], bool]:
        """Return the speeds of a plan's SoCs, and whether shares should be adapted to them."""
        speeds = self._clock.speed_factors()
        measured = {soc: speeds[soc] for soc in plan.participants}
        return measured, self._check_interval_steps > 0 and self._capacities.is_off(measured)

    def run(self, num_steps: int, label: str) -> Usage:
        """Run the steps."""
        plan = self._work._without(self._terminated).plan
        pace = Pace(dict.fromkeys(plan.participants, num_steps))
        usage = self.advance(pace, label)
        self._ended_s = pace.ended_s
        return usage

    def advance(
        self,
        pace: Pace,
        label: str,
        end_s: Callable[[Mapping[int, float]], float] | None = None,
    ) -> Usage:
        """Run the steps that are left in `pace`, until `end_s` at most.

        `end_s` maps when each SoC at work would end its steps at present speeds to a time on the clock.
        """
        work, clock, usage = self._work, self._clock, Usage()
        # Steps since the measured speeds deviated from those in use.
        num_behind = 0
        while not pace.done:
            taken = clock.taken_socs()
            if work.preemption == GROUPS and self._terminate(pace, taken):
                continue
            present = without_members(work._without(self._terminated).plan, taken)
            plan = _unfinished(present, pace)
            if not plan.groups:
                if end_s is not None and end_s({}) < inf:
                    break
                usage += clock.idle(work.plan.participants)
                continue
            measured, is_off = self._measured(plan)
            # A real ring notices a new speed only at its next check.
            if is_off and num_behind >= self._check_interval_steps:
                self._capacities.take(measured)
                is_off, num_behind = False, 0
            graph = self._graph(plan, present.participants)
            left_s = inf
            if end_s is not None:
                left_s = end_s(clock.ends_while_steady(graph, pace)) - clock.now_s
            if left_s <= _ROUNDING * clock.now_s:
                break
            before = dict(pace.remaining)
            usage += clock.run_while_steady(
                graph,
                pace,
                label=label,
                at_most=self._check_interval_steps - num_behind if is_off else None,
                at_most_s=left_s,
            )
            self._align_members(pace, plan)
            done = max(before[soc] - left for soc, left in pace.remaining.items())
            num_behind = num_behind + done if is_off else 0
        return usage

    def ended_s(self) -> Mapping[int, float]:
        """Return the clock time at which each SoC ended its last step."""
        return self._ended_s

    def _terminate(self, pace: Pace, taken: Collection[int]) -> bool:
        """Terminate groups whose SoCs are taken before they have done their steps; return whether there were any.

        One group always stays.
        """
        groups = self._work._without(self._terminated).plan.groups
        at_work = [group for group in groups if _is_unfinished(group, pace)]
        # A group that is done has its model.
        one_stays = len(at_work) == len(groups)
        ended = terminated_groups(at_work, taken, one_stays=one_stays)
        self._terminated.update(group.group_id for group in ended)
        pace.clear(soc for group in ended for soc in group.members)
        return bool(ended)

    def _align_members(self, pace: Pace, worked: GroupPlan) -> None:
        """Set the progress of preempted members to that of their groups."""
        members_of = {group.group_id: group.members for group in self._work.plan.groups}
        for group in worked.groups:
            # All present members have equal progress.
            present = group.members[0]
            for soc in members_of[group.group_id]:
                pace.remaining[soc] = pace.remaining[present]
                pace.ahead_s[soc] = pace.ahead_s.get(present, 0.0)
                if present in pace.ended_s:
                    pace.ended_s[soc] = pace.ended_s[present]

    def _graph(self, plan: GroupPlan, present: tuple[int, ...]) -> TaskGraph:
        """Return a step of the plan's groups; `present` SoCs without remaining work are idle in it."""
        work = self._work
        shares = work.shares_of(plan, self._capacities.parts if work.reshuffle else {})
        key = (tuple(shares.items()), present)
        if key not in self._graphs:
            graph = step_graph(
                plan,
                work._costs(plan, shares, self._pricings),
                work.exchange,
                gradients=work.gradients,
                step=self._first_step,
                uplink_turns=work.uplink_turns,
                overlap_buckets=work.overlap_buckets,
                memory_bytes_per_s=work.memory_bytes_per_s,
            )
            self._graphs[key] = replace(graph, participants=present)
        return self._graphs[key]


def _unfinished(plan: GroupPlan, pace: Pace) -> GroupPlan:
    """Return the plan of the groups whose members have steps left or in progress."""
    return with_groups(plan, [group for group in plan.groups if _is_unfinished(group, pace)])


def _is_unfinished(group: Group, pace: Pace) -> bool:
    return any(pace.remaining[soc] or pace.ahead_s.get(soc, 0.0) > 0.0 for soc in group.members)


def with_groups(plan: GroupPlan, groups: Sequence[Group]) -> GroupPlan:
    """Return the plan of only some of its groups."""
    members = sorted(soc for group in groups for soc in group.members)
    return replace(plan, groups=tuple(groups), participants=tuple(members))


def rounding_s(begin_s: float, now_s: float) -> float:
    """Return how far apart two times of a stretch that ends now may be because of rounding."""
    return _SAME_TIME * (now_s - begin_s) + _ROUNDING * now_s
