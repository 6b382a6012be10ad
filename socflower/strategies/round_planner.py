"""Plans each round for the SoCs that are available, and for their measured speeds."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from socflower.cluster import Cluster, Usage, VirtualClock
from socflower.errors import InfeasiblePlan, NodesLost, TrainingFailed
from socflower.hierarchy import GroupPlan, Rebalancing, plan_over
from socflower.hierarchy.group_preemption import GROUPS, SOCS, plan_of_whole_groups
from socflower.hierarchy.spare_socs import with_stand_ins
from socflower.quantities import counted
from socflower.strategies.balancer import Balancer
from socflower.strategies.node_registry import NodeRegistry
from socflower.strategies.reply_events import ReplyEvent

_ENOUGH_TIMEOUT_S = 600.0
_ENOUGH_POLL_S = 1.0


class RoundPlanner:
    """Holds the plan of the current round, and makes the plan of the next one.

    `rates` are the SoCs' nominal capacities. A SoC keeps its participant number, by which data and rings identify it,
    when groups are re-formed. With `preemption = "groups"` a SoC that is away takes its group with it, as long as there
    is another one; the SoCs of such a group are left in peace until the group is whole again.

    `spares` are SoCs beyond those of the plan: they stand in for participants that are away and, if speeds are
    measured, for slower ones. Without `min_nodes` all nodes have to be there at the start, and any one later.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: GroupPlan,
        rates: Sequence[float],
        rebalancing: Rebalancing | None,
        preemption: str = SOCS,
        spares: Sequence[int] = (),
        min_nodes: int | None = None,
    ) -> None:
        self.preemption = preemption
        self.cluster, self.rates = cluster, rates
        self.full_plan = self.plan = plan
        self._has_spares = bool(spares)
        everyone = (*plan.participants, *spares)
        self.participant_of = {soc: index for index, soc in enumerate(everyone)}
        self.registry = NodeRegistry(cluster, sorted(everyone), min_nodes)
        self._min_nodes = min_nodes or 0
        self.balancer = Balancer(cluster, rates, rebalancing)
        self.events: list[ReplyEvent] = []  # since the last `drain_events`
        self._idle_usage = Usage()
        self._asked_through: Grid | None = None

    @property
    def planned_without(self) -> tuple[int, ...]:
        """SoCs that the current round was planned without, ascending, be they away or spare."""
        return tuple(sorted(self.participant_of.keys() - set(self.plan.participants)))

    def plan_round(
        self, grid: Grid, clock: VirtualClock | None, *, keep_groups: bool = False
    ) -> GroupPlan:
        """Return the next round's plan, for the SoCs that are available, with groups re-balanced by measured speed.

        With `keep_groups`, as some are at work, SoCs change groups only if one is gone or back.
        In virtual time, waits idle while users occupy every SoC. Raises `TrainingFailed` if no SoC is available.
        """
        if not self.registry.node_of:
            self.registry.match_nodes(grid, query=not getattr(grid, "in_one_process", False))
            self.registry.require_group_clients(grid)
            if self.registry.left_out:
                self.events.append(
                    ReplyEvent(kind="no-answer", group_id=0, text=self.registry.left_out)
                )
        free = self._wait_for_free_socs(self._await_enough(grid), clock)
        if self._has_spares:
            self.balancer.update_speeds(clock, free)
            whole, training = self.full_plan.participants, self.plan.participants
            free = with_stand_ins(self.cluster, whole, training, free, self._rate)
        self._replan(free)
        self.balancer.update_speeds(clock, self.plan.participants)
        if not keep_groups:
            self.plan, events = self.balancer.rebalance_groups(self.plan)
            self.events += events
        return self.plan

    def change_plan(self, plan: GroupPlan) -> None:
        """Plan from now on by another plan over the same participants."""
        without = self.planned_without
        self.full_plan = plan
        self.plan = self._plan_without(without)

    def restore(
        self, *, away: Collection[int], planned_without: Collection[int], balance: Mapping[str, Any]
    ) -> None:
        """Restore the planning state of an interrupted training; `balance` is its `balancer.state`."""
        plan = self._plan_without(planned_without)
        self.plan = self.balancer.restore(balance, plan)
        self.registry.mark_away(away)

    def ask_absent(self, grid: Grid, server_round: int) -> None:
        """Ask nodes that are away, and new ones, whether they are available; they answer beside the round's work."""
        self.registry.ask(grid, server_round)
        self._asked_through = grid

    def poll_absent(self) -> None:
        """Record which nodes have answered that they are available again."""
        back = (
            self.registry.poll_answers(self._asked_through)
            if self._asked_through is not None
            else []
        )
        self.events += [
            ReplyEvent(
                kind="returned",
                group_id=0,
                text=f"SoC {soc} is available again from the next synchronisation on",
            )
            for soc in back
        ]

    def remove(self, socs: Collection[int]) -> None:
        """Record SoCs that left their groups within the round."""
        self.registry.mark_away(socs)
        for soc in sorted(socs):
            group = next(group for group in self.plan.groups if soc in group.members)
            self.events.append(
                ReplyEvent(
                    kind="preempted",
                    group_id=group.group_id,
                    text=f"group {group.group_id}: SoC {soc} was preempted by its user",
                )
            )

    def drain_events(self) -> list[ReplyEvent]:
        """Return and clear the events since the last call."""
        events, self.events = self.events, []
        return events

    def drain_idle(self) -> Usage:
        """Return and clear the usage of idle waiting since the last call."""
        usage, self._idle_usage = self._idle_usage, Usage()
        return usage

    def _await_enough(self, grid: Grid) -> Sequence[int]:
        """Return the SoCs that are present; on real machines wait until they are `min_nodes`.

        Raises `NodesLost` if they are not within `_ENOUGH_TIMEOUT_S`.
        """
        present = self.registry.present(grid)
        deadline_s = time.monotonic() + _ENOUGH_TIMEOUT_S
        while len(present) < self._min_nodes:
            if time.monotonic() > deadline_s:
                raise NodesLost(
                    f"SoCFlow: {counted(len(present), 'node')} left of min_nodes = {self._min_nodes}, and "
                    f"no other came within {_ENOUGH_TIMEOUT_S:g} s; start SuperNodes, and resume"
                )
            self.ask_absent(grid, self.registry.server_round)
            time.sleep(_ENOUGH_POLL_S)
            self.poll_absent()
            present = self.registry.present(grid)
        return present

    def lose(self, socs: Collection[int]) -> None:
        """Record SoCs that their rings have lost, and those that are not planned with for a while."""
        for soc in self.registry.mark_lost(socs):
            rounds = counted(self.registry.rest_rounds(soc), "round")
            text = (
                f"SoC {soc} is lost again and again, and is left out for {rounds} though it answers"
            )
            self.events.append(ReplyEvent(kind="resting", group_id=0, text=text))

    def _wait_for_free_socs(
        self, present: Sequence[int], clock: VirtualClock | None
    ) -> Sequence[int]:
        """Return the SoCs that no user occupies; in virtual time, wait idle until there is one."""
        if clock is None or not clock.changes:
            return present
        while True:
            taken = set(clock.taken_socs())
            free = [soc for soc in present if soc not in taken]
            if free or not present:
                return free
            self._idle_usage += clock.idle(self.full_plan.participants)

    def _rate(self, soc: int) -> float:
        """Return the rate of a SoC at the speed that was measured last; without re-balancing, the nominal one."""
        return self.rates[soc] * self.balancer.in_use.part(soc)

    def _replan(self, present: Sequence[int]) -> None:
        """Plan for the SoCs that are present: fewer SoCs form fewer groups, each with more data and as many steps."""
        if set(present) == set(self.plan.participants):
            return
        try:
            plan = self._plan_without(self.participant_of.keys() - set(present))
        except InfeasiblePlan as error:
            raise TrainingFailed(f"SoCFlow: {error}") from None
        if plan.participants == self.plan.participants:
            return
        before, self.plan = self.plan, plan
        num_groups, num_socs = len(self.plan.groups), len(plan.participants)
        planned = f"new plan: {counted(num_groups, 'group')} of {counted(num_socs, 'SoC')}"
        self.events.append(
            ReplyEvent(kind="replanned", group_id=0, text=planned + self._left_out(before))
        )

    def _left_out(self, before: GroupPlan) -> str:
        """Return, for the event of a new plan, which SoCs it is without, and which ones stand in."""
        used = set(self.plan.participants)
        without = sorted(set(self.full_plan.participants) - used)
        new = sorted(used.difference(before.participants, self.full_plan.participants))
        text = f", without {', '.join(map(str, without))}" if without else ""
        return text + (f", with {', '.join(map(str, new))} instead" if new else "")

    def _plan_without(self, away: Collection[int]) -> GroupPlan:
        """Return the plan without SoCs that are away, or without their groups; `InfeasiblePlan` if none is left."""
        if self.preemption == GROUPS:
            whole = plan_of_whole_groups(self.full_plan, away)
            if whole is not None:
                return whole
        left = self.participant_of.keys() - set(away)
        return plan_over(self.full_plan, self.cluster, self.rates, left)
