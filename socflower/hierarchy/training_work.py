"""What a plan's training takes: the one place where strategies and predictions lower an interval to task graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from socflower.cluster import (
    FP32,
    Cluster,
    ModelProfile,
    Pricing,
    StepCost,
    TaskGraph,
    Usage,
    VirtualClock,
    sustained_rates,
)
from socflower.hierarchy.collectives import Exchange
from socflower.hierarchy.delayed_sync import SyncInterval
from socflower.hierarchy.lowering import deal_graph, step_graph, synchronisation_graph
from socflower.hierarchy.plan import GroupPlan
from socflower.hierarchy.shares import split_batch

Phase: TypeAlias = tuple[int, Mapping[int, Pricing]]
"""Steps of an interval, and the pricings of the groups (by id) that have their own during them."""


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """A plan, and what is trained under it."""

    cluster: Cluster
    plan: GroupPlan
    profile: ModelProfile
    num_samples: int
    batch_size: int  # of a group
    steps_per_epoch: int
    reshuffle: bool = True
    sequenced: bool = True
    overlap_buckets: int = 1
    pricing: Pricing = FP32  # of the arithmetic that members train in

    @cached_property
    def shares(self) -> Mapping[int, int]:
        """Samples of a group's batch by member, in proportion to capacity (F4)."""
        rates = sustained_rates(self.cluster, self.profile.name, self.pricing)
        return {soc: share for group in self.plan.groups for soc, share in zip(
            group.members, split_batch(self.batch_size, [rates[soc] for soc in group.members]), strict=True)}

    @cached_property
    def costs(self) -> Mapping[int, StepCost]:
        """What a step takes each member."""
        return self._costs({})

    def _costs(self, pricings: Mapping[int, Pricing]) -> Mapping[int, StepCost]:
        """Return the members' costs where some groups have a pricing of their own."""
        return {
            soc: pricings.get(group.group_id, self.pricing).step_cost(
                self.profile, self.cluster.device_of(soc), self.shares[soc])
            for group in self.plan.groups for soc in group.members
        }

    @cached_property
    def exchange(self) -> Exchange:
        """What is exchanged, be it gradients or weights."""
        return Exchange(num_bytes=self.profile.weight_bytes, num_tensors=self.profile.num_tensors)

    def step(self, *, sequenced: bool | None = None, pricings: Mapping[int, Pricing] | None = None) -> TaskGraph:
        """Return one step of all groups.

        `sequenced` overrides whether communication groups take turns, `pricings` what the groups that it names cost.
        """
        costs = self._costs(pricings) if pricings else self.costs
        return step_graph(self.plan, costs, self.exchange, overlap_buckets=self.overlap_buckets,
                          sequenced=self.sequenced if sequenced is None else sequenced)

    def synchronisation(self) -> TaskGraph | None:
        """Return a synchronisation between groups, or None where there is but one."""
        return synchronisation_graph(self.plan, self.exchange) if len(self.plan.groups) > 1 else None

    def begins_with_deal(self, interval: SyncInterval) -> bool:
        """Return whether data change groups at this interval's start. The first deal is part of setting up."""
        is_new = interval.index > 0 and interval.first_step == interval.deal_epoch * self.steps_per_epoch
        return self.reshuffle and is_new and len(self.plan.groups) > 1

    def run(self, interval: SyncInterval, clock: VirtualClock, phases: Sequence[Phase] = ()) -> Usage:
        """Let an interval and the synchronisation that ends it pass on the clock.

        `phases` say what steps cost where that changed within the interval; together they have all its steps.
        """
        usage = Usage()
        if self.begins_with_deal(interval):
            bytes_per_soc = self.num_samples / len(self.plan.participants) * self.profile.input_bytes
            usage += clock.run(deal_graph(self.plan, bytes_per_soc), label="deal data")
        for num_steps, pricings in phases or [(interval.num_steps, {})]:
            usage += clock.run(self.step(pricings=pricings), repeat=num_steps, label=f"to epoch {interval.epoch_end:g}")
        synchronisation = self.synchronisation()
        if synchronisation is not None:
            usage += clock.run(synchronisation, label="synchronisation")
        return usage
