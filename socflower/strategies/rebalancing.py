"""Between intervals: how fast SoCs have been, and what of the plan moves for it (F4, F20)."""

from collections.abc import Mapping, Sequence
from typing import Any

from socflower.cluster import Cluster, VirtualClock
from socflower.hierarchy import CapacitiesInUse, Group, GroupPlan, Rebalancing, reordered
from socflower.hierarchy.rebalancing import slowest, with_members
from socflower.strategies.replies import ReplyEvent
from socflower.wire.message_keys import RingOutcome

_KIND = "re-balanced"


class Balancer:
    """The capacities that shares and groups go by: nominal rates, times what was measured of them.

    Without a `rebalancing` it measures nothing, and moves nothing.
    """

    def __init__(self, cluster: Cluster, rates: Sequence[float], rebalancing: Rebalancing | None) -> None:
        self._cluster, self._rates, self._rebalancing = cluster, tuple(rates), rebalancing
        self.in_use = CapacitiesInUse(rebalancing.tolerance if rebalancing else 1.0)
        self._measured: dict[int, float] = {}  # samples per second of the newest rings, by SoC

    @property
    def ring_steps(self) -> int:
        """After how many steps the members of a ring shall look at their shares; 0: never."""
        return self._rebalancing.steps if self._rebalancing is not None and self._rebalancing.within_groups else 0

    def capacities(self, group: Group) -> tuple[float, ...]:
        """Return what the group's members' shares are proportional to, in their order; any unit."""
        return tuple(self._rates[soc] * self.in_use.part(soc) for soc in group.members)

    def look(self, clock: VirtualClock | None, socs: Sequence[int]) -> None:
        """Take in how fast the SoCs are now: by the clock, or by what their rings have measured."""
        if self._rebalancing is None:
            return
        if clock is not None and clock.changes:
            speeds = clock.speed_factors()
            self.in_use.take({soc: speeds[soc] for soc in socs})
        elif parts := {soc: self._measured[soc] / self._rates[soc] for soc in socs if soc in self._measured}:
            # Only ratios count; the fastest, for its kind of device, is taken to be as fast as it should.
            fastest = max(parts.values())
            self.in_use.take({soc: part / fastest for soc, part in parts.items()})

    def hear(self, outcome: RingOutcome | None) -> None:
        """Take in what the members of a ring have measured of themselves."""
        if self._rebalancing is not None and outcome is not None:
            rates = zip(outcome.members, outcome.rates, strict=False)  # of rings that measured nothing there are none
            self._measured |= {soc: rate for soc, rate in rates if rate > 0.0}

    def rearranged(self, plan: GroupPlan) -> tuple[GroupPlan, list[ReplyEvent]]:
        """Return the plan with groups evened out, and what there is to tell of that."""
        if self._rebalancing is None or not self._rebalancing.across_groups:
            return plan, []
        capacities = [rate * self.in_use.part(soc) for soc, rate in enumerate(self._rates)]
        new = reordered(plan, self._cluster, capacities, self._rebalancing.tolerance)
        if new is plan:
            return plan, []
        before, after = (slowest(capacities, (group.members for group in each.groups)) for each in (plan, new))
        moved = sorted(soc for old, group in zip(plan.groups, new.groups, strict=True)
                       for soc in set(group.members) - set(old.members))
        return new, [ReplyEvent(kind=_KIND, group_id=0, text=(
            f"re-balanced: SoCs {', '.join(map(str, moved))} change groups on their boards; the slowest group is "
            f"{after / before - 1.0:.0%} faster for it"))]

    def state(self, plan: GroupPlan) -> dict[str, Any]:
        """Return what the next round depends on, as plain values."""
        return {"members": [list(group.members) for group in plan.groups],
                "parts": [[soc, part] for soc, part in self.in_use.parts.items()],
                "measured": [[soc, rate] for soc, rate in self._measured.items()]} if self._rebalancing else {}

    def restore(self, state: Mapping[str, Any], plan: GroupPlan) -> GroupPlan:
        """Take up what `state` returned; return the plan with the members that its groups had."""
        if not state:
            return plan
        self.in_use.parts.update({int(soc): float(part) for soc, part in state["parts"]})
        self._measured = {int(soc): float(rate) for soc, rate in state["measured"]}
        return with_members(plan, state["members"])
