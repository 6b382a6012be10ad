"""The plan of a training as SoCs come and go and get slower: what the next round is planned with, and who does what."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from socflower.cluster import Cluster, Usage, VirtualClock
from socflower.errors import InfeasiblePlan, TrainingFailed
from socflower.hierarchy import GroupPlan, Rebalancing, plan_without
from socflower.quantities import counted
from socflower.strategies.rebalancing import Balancer
from socflower.strategies.replies import ReplyEvent
from socflower.strategies.roster import Roster


class ChangingPlan:
    """The plan of the present round, and all that decides on the next one's.

    `rates` are the SoCs' nominal capacities. What SoCs are numbered by in data and rings stays, however groups are
    formed anew.
    """

    def __init__(
        self, cluster: Cluster, plan: GroupPlan, rates: Sequence[float], rebalancing: Rebalancing | None,
    ) -> None:
        self._cluster, self._rates = cluster, rates
        self.whole = self.now = plan
        self.participant_of = {soc: index for index, soc in enumerate(plan.participants)}
        self.roster = Roster(cluster, plan.participants)
        self.balancer = Balancer(cluster, rates, rebalancing)
        self.events: list[ReplyEvent] = []  # since `take_events`
        self._rest = Usage()

    @property
    def planned_without(self) -> tuple[int, ...]:
        """SoCs that the present round was planned without, ascending."""
        return tuple(sorted(set(self.whole.participants) - set(self.now.participants)))

    def for_round(self, grid: Grid, clock: VirtualClock | None) -> GroupPlan:
        """Return the next round's plan: of the SoCs that are there and free, evened out by how fast they are.

        In virtual time all rest while users have every SoC. Raises `TrainingFailed` if nobody is there.
        """
        if not self.roster.node_of:
            self.roster.first_look(getattr(grid, "inner", grid), ask=not getattr(grid, "in_one_process", False))
        self._plan_with(self._free(self.roster.present(grid), clock))
        self.balancer.look(clock, self.now.participants)
        self.now, events = self.balancer.rearranged(self.now)
        self.events += events
        return self.now

    def resume(self, *, away: Collection[int], planned_without: Collection[int], balance: Mapping[str, Any]) -> None:
        """Stand where another training stood; `balance` is its `balancer.state`."""
        plan = plan_without(self.whole, self._cluster, self._rates, planned_without)
        self.now = self.balancer.restore(balance, plan)
        self.roster.leave(away)

    def hear(self, reply: Message) -> None:
        """Take in the answer to one of the roster's questions."""
        for soc in self.roster.hear(reply):
            self.events.append(ReplyEvent(kind="returned", group_id=0, text=f"SoC {soc} is back, and takes part from "
                                                                            "the next synchronisation on"))

    def take_leave(self, socs: Collection[int]) -> None:
        """Note SoCs that left their groups within the round."""
        self.roster.leave(socs)
        for soc in sorted(socs):
            group = next(group for group in self.now.groups if soc in group.members)
            self.events.append(ReplyEvent(
                kind="preempted", group_id=group.group_id,
                text=f"group {group.group_id}: SoC {soc} has left for its user's own work"))

    def take_events(self) -> list[ReplyEvent]:
        """Return what has happened since the last call."""
        events, self.events = self.events, []
        return events

    def take_rest(self) -> Usage:
        """Return what resting has taken since the last call."""
        rest, self._rest = self._rest, Usage()
        return rest

    def _free(self, present: Sequence[int], clock: VirtualClock | None) -> Sequence[int]:
        """Return the SoCs that no user has, in virtual time after a rest if they have all."""
        if clock is None or not clock.changes:
            return present
        while True:
            taken = set(clock.taken_socs())
            free = [soc for soc in present if soc not in taken]
            if free or not present:
                return free
            self._rest += clock.rest(self.whole.participants)

    def _plan_with(self, present: Sequence[int]) -> None:
        """Plan with fewer groups where there are fewer SoCs; their data grow then, and an epoch keeps its steps."""
        if set(present) == set(self.now.participants):
            return
        away = sorted(set(self.whole.participants) - set(present))
        try:
            self.now = plan_without(self.whole, self._cluster, self._rates, away)
        except InfeasiblePlan as error:
            raise TrainingFailed(f"SoCFlow: {error}") from None
        self.events.append(ReplyEvent(
            kind="planned-anew", group_id=0,
            text=f"planned anew: {counted(len(self.now.groups), 'group')} of {counted(len(present), 'SoC')}"
                 + (f", without {', '.join(map(str, away))}" if away else "")))
