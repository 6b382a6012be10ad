"""Re-balancing between intervals: shares and groups follow the SoCs' measured speeds (F4, F20)."""

from collections.abc import Mapping, Sequence
from typing import Any

from socflower.cluster import Cluster, VirtualClock
from socflower.hierarchy import CapacitiesInUse, Group, GroupPlan, Rebalancing, reordered
from socflower.hierarchy.rebalancing import slowest, with_members
from socflower.strategies.reply_events import ReplyEvent
from socflower.wire.message_keys import RingOutcome

_KIND = "re-balanced"


class Balancer:
    """The capacities that determine shares and groups: nominal rates times measured speed factors.

    Without a `rebalancing`, nothing is measured and nothing moves.
    """

    def __init__(
        self, cluster: Cluster, rates: Sequence[float], rebalancing: Rebalancing | None
    ) -> None:
        self._cluster, self._rates, self._rebalancing = cluster, tuple(rates), rebalancing
        self.in_use = CapacitiesInUse(rebalancing.tolerance if rebalancing else 1.0)
        self._measured: dict[int, float] = {}  # samples per second in the latest rings, by SoC

    @property
    def ring_steps(self) -> int:
        """Number of steps between re-balancing of shares within a ring; 0: never."""
        return (
            self._rebalancing.steps
            if self._rebalancing is not None and self._rebalancing.within_groups
            else 0
        )

    def capacities(self, group: Group) -> tuple[float, ...]:
        """Return what the group's members' shares are proportional to, in their order; any unit."""
        return tuple(self._rates[soc] * self.in_use.part(soc) for soc in group.members)

    def nominal(self, soc: int) -> float:
        """Return a SoC's nominal rate, in samples per second of the whole model."""
        return self._rates[soc]

    def update_speeds(self, clock: VirtualClock | None, socs: Sequence[int]) -> None:
        """Update the SoCs' speeds, from the clock or from what their rings have measured."""
        if self._rebalancing is None:
            return
        if clock is not None and clock.changes:
            speeds = clock.speed_factors()
            self.in_use.take({soc: speeds[soc] for soc in socs})
        elif parts := {
            soc: self._measured[soc] / self._rates[soc] for soc in socs if soc in self._measured
        }:
            # Only ratios matter: the SoC that is fastest relative to its nominal rate is taken to run at that rate.
            fastest = max(parts.values())
            self.in_use.take({soc: part / fastest for soc, part in parts.items()})

    def on_outcome(self, outcome: RingOutcome | None) -> None:
        """Record the rates that the members of a ring have measured."""
        if self._rebalancing is not None and outcome is not None:
            rates = zip(
                outcome.members, outcome.rates, strict=False
            )  # `rates` is empty if the ring did not measure
            self._measured |= {soc: rate for soc, rate in rates if rate > 0.0}

    def rebalance_groups(self, plan: GroupPlan) -> tuple[GroupPlan, list[ReplyEvent]]:
        """Return the plan with groups of about equal speed, and an event if SoCs moved."""
        if self._rebalancing is None or not self._rebalancing.across_groups:
            return plan, []
        capacities = [rate * self.in_use.part(soc) for soc, rate in enumerate(self._rates)]
        new = reordered(plan, self._cluster, capacities, self._rebalancing.tolerance)
        if new is plan:
            return plan, []
        before, after = (
            slowest(capacities, (group.members for group in each.groups)) for each in (plan, new)
        )
        moved = sorted(
            soc
            for old, group in zip(plan.groups, new.groups, strict=True)
            for soc in set(group.members) - set(old.members)
        )
        return new, [
            ReplyEvent(
                kind=_KIND,
                group_id=0,
                text=(
                    f"re-balanced: SoCs {', '.join(map(str, moved))} change groups on their "
                    f"boards; the slowest group is "
                    f"{after / before - 1.0:.0%} faster for it"
                ),
            )
        ]

    def state(self, plan: GroupPlan) -> dict[str, Any]:
        """Return the state that the next round depends on, as plain values."""
        return (
            {
                "members": [list(group.members) for group in plan.groups],
                "parts": [[soc, part] for soc, part in self.in_use.parts.items()],
                "measured": [[soc, rate] for soc, rate in self._measured.items()],
            }
            if self._rebalancing
            else {}
        )

    def restore(self, state: Mapping[str, Any], plan: GroupPlan) -> GroupPlan:
        """Restore what `state` returned; return the plan with the group members of that time."""
        if not state:
            return plan
        self.in_use.parts.update({int(soc): float(part) for soc, part in state["parts"]})
        self._measured = {int(soc): float(rate) for soc, rate in state["measured"]}
        return with_members(plan, state["members"])
