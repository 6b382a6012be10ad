"""Training in groups: synchronous inside them, with delayed synchronisation between them (SoCFlow+ section 3.1)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from socflower.cluster import Usage
from socflower.errors import ConfigError
from socflower.flower_adapter import log
from socflower.hierarchy import (
    Exchanges,
    GroupPlan,
    Quorum,
    run_to_quorum,
)
from socflower.hierarchy.exchange.models import AUTO, KINDS, NONE, STAR
from socflower.hierarchy.group_preemption import GROUPS, terminated_groups
from socflower.peers.ring.settings import RingSettings
from socflower.quantities import counted
from socflower.strategies.group_models import Averaging, ServerModels
from socflower.strategies.group_replies import SettledRound, settle
from socflower.strategies.leader_feedback import (
    feedback_after_round,
    from_arrays,
    lost_feedback,
    to_arrays,
)
from socflower.strategies.method import (
    Description,
    Method,
    NodesForEvaluation,
    OuterClients,
    OuterModels,
    RoundReport,
)
from socflower.strategies.methods.group_messages import GroupMessages
from socflower.strategies.methods.group_work import GroupWork, SyncPlan
from socflower.strategies.methods.late_groups import LateGroups
from socflower.strategies.mixed_replies import client_events, group_id_of, mixed_figures
from socflower.strategies.outer_step import refuse_integers_clipped
from socflower.strategies.records import (
    SentInt8,
    aggregate_records,
    array_views,
    to_array_record,
    with_model,
)
from socflower.strategies.replies import heat_events, outcome_of
from socflower.strategies.reply_events import LATE, LATE_DROPPED, ReplyEvent, terminated_event
from socflower.strategies.round import (
    IN_PROCESS,
    GroupFeedback,
    Round,
)
from socflower.strategies.round_planner import RoundPlanner
from socflower.wire.message_keys import (
    INT8_WIRE,
)
from socflower.workloads.dataset import LabelledData

_CLIPPING_NORM = "clipping_norm"
"""The config key in which Flower's client-side clipping strategies send the norm."""


class GroupsMethod(Method[Round, SettledRound]):
    """Rounds of groups: each trains an interval, then their models are averaged (F8).

    Only leaders get a message, and in simulation a leader's client runs its whole group. On real machines
    every member gets one, and the model only the leader.

    Parameters
    ----------
    sync : SyncPlan
        What is trained between which synchronisations (F3).
    planner : RoundPlanner
        Plans each round over the SoCs that are available.
    work : GroupWork
        What members do in an interval, and its cost.
    average : Averaging
        How models of groups, and of servers, become one.
    needs_each_model : str
        What needs each group's model at the hub, so that leaders cannot exchange among themselves; may be empty.
    proximal_mu : float
        Weight of FedProx's term in the loss of groups.
    quorum : Quorum
        When a synchronisation ends without groups that are late.
    dispatch : LabelledData, optional
        All training data. Each group is sent the samples of its interval.
    """

    def __init__(
        self,
        *,
        sync: SyncPlan,
        planner: RoundPlanner,
        work: GroupWork,
        rings: RingSettings,
        average: Averaging = aggregate_records,
        needs_each_model: str = "",
        proximal_mu: float = 0.0,
        tolerate_client_errors: bool = False,
        quorum: Quorum = Quorum(),
        dispatch: LabelledData | None = None,
    ) -> None:
        self.sync, self.seed = sync, sync.schedule.seed
        self.planner, self.work = planner, work
        self.latest: Round | None = None
        self._tolerates = tolerate_client_errors
        # How leaders are to exchange models, as asked for or as the method needs.
        self.leaders = sync.exchange.leaders
        self.late = LateGroups(quorum) if quorum.fraction < 1 else None
        if sync.exchange.wire == INT8_WIRE:
            needing = f"wire = {INT8_WIRE!r}"
            self.require_each_model(needing)
            if sync.schedule.server_interval > 1:
                raise ConfigError(
                    f"SoCFlow: server_interval = {sync.schedule.server_interval} keeps models of servers, and "
                    f"{needing} knows one model; leave one of the two out"
                )
        if needs_each_model:
            self._use_star(needs_each_model)
        if sync.schedule.server_interval > 1:
            self._check_servers(planner.plan)
        self._servers = ServerModels(average)
        self.outer_models = OuterGroups(planner, self.late)
        self.messages = GroupMessages(
            sync=sync,
            planner=planner,
            work=work,
            rings=rings,
            servers=self._servers,
            late=self.late,
            dispatch=dispatch,
            proximal_mu=proximal_mu,
            tolerate_errors=tolerate_client_errors,
        )
        self._feedback: dict[int, GroupFeedback] = {}
        self._without_state: tuple[int, ...] = ()

    # ------------------------------------------------------------------------------------------ the plan
    @property
    def num_rounds(self) -> int:
        """One for each interval."""
        return len(self.sync.intervals)

    @property
    def socs(self) -> Sequence[int]:
        """The SoCs of the latest round's groups."""
        return self.plan.participants

    @property
    def plan(self) -> GroupPlan:
        """The plan of the latest round."""
        return self.planner.plan

    def require_each_model(self, needing: str) -> None:
        """Let leaders send their models to the hub; `ConfigError` if another way was asked, or groups may be late."""
        self._use_star(needing)
        if self.late is not None:
            raise ConfigError(
                f"SoCFlow: quorum = {self.late.quorum.fraction} lets late groups count in a later round, "
                f"which {needing} does not know; leave one of the two out"
            )

    def _use_star(self, needing: str) -> None:
        compression = self.sync.exchange.leader_compression
        if compression != NONE:
            raise ConfigError(
                f"SoCFlow: leader_compression = {compression!r} is for leaders in a ring or a tree, which "
                f"give the hub their mean, and {needing} needs each group's model; leave the "
                "compression out"
            )
        if self.leaders not in (AUTO, STAR):
            raise ConfigError(
                f"SoCFlow: leaders = {self.leaders!r} gives the hub the mean of the groups' models, and "
                f"{needing} needs each of them; use leaders = 'star'"
            )
        self.leaders = STAR

    def _check_servers(self, plan: GroupPlan) -> None:
        asked = f"SoCFlow: server_interval = {self.sync.schedule.server_interval}"
        if len(plan.by_server) < 2:
            groups = counted(len(plan.groups), "group")
            servers = counted(max(1, len(self.planner.cluster.servers)), "server")
            raise ConfigError(
                f"{asked} and {groups} on {servers}: there are no servers with groups of their own; "
                "plan a group for each server, or leave server_interval out"
            )
        if self.sync.exchange.leader_compression != NONE:
            raise ConfigError(
                f"{asked}, and leader_compression = {self.sync.exchange.leader_compression!r} compresses "
                "changes since a model that all groups have had; leave one of the two out"
            )

    def describe(self) -> "GroupsDescription":
        """Return what the work says of the plan, and the synchronisations."""
        steps = [interval.num_steps for interval in self.sync.intervals]
        return GroupsDescription(
            lines=[
                *self.work.describe(self.plan),
                f"Synchronisations: {self.num_rounds}, each after {min(steps)} to {max(steps)} of "
                f"{self.sync.steps_per_epoch} steps an epoch",
            ],
            work=self.work,
            plan=self.plan,
            leaders=self.leaders,
            latest=self.latest,
        )

    # ------------------------------------------------------------------------------------- opening a round
    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[Round, list[Message]]:
        """Address every group's leader, in group order, or on real machines every member.

        SoCs that are away are excluded from the plan, and their nodes are asked whether they are back.
        """
        if self.work.clock is None:
            self.work.use_grid(grid, self.plan, arrays)
        self.planner.drain_events()
        keep_groups = self.late is not None and bool(self.late.held)
        self.planner.plan_round(grid, self.work.clock, keep_groups=keep_groups)
        if self.late is not None:
            self.planner.events += self.late.follow(self.plan)
        this = self._make_round(server_round, arrays, grid)
        self._refuse_unfit(this, arrays, config)
        self.work.log_changes(self.latest, this)
        self.latest = this
        self.planner.ask_absent(grid, server_round)
        return this, self.messages.of_round(this, config)

    def _make_round(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> Round:
        """Return the round of the latest plan."""
        plan, before, registry = self.plan, self.latest, self.planner.registry
        # Costs are kept while the plan stays, since graphs are made of them.
        if before is not None and before.plan is plan:
            exchanges, costs = before.exchanges, before.costs
        else:
            ways = self._ways_of_leaders(grid)
            exchanges, costs = self.work.exchanges_of(plan, self.leaders, ways)
        in_rings = bool(registry.ring_address_of)
        place_of = {}
        for group in plan.groups:
            board = self.planner.cluster.board_of(group.leader)
            place_of[group.group_id] = (board, self.planner.cluster.server_of(board))
        return Round(
            server_round=server_round,
            interval=self.sync.intervals[server_round - 1],
            plan=plan,
            exchanges=exchanges,
            costs=costs,
            node_of={soc: registry.node_of[soc] for soc in plan.participants},
            sent=arrays,
            settled_by_grid=getattr(grid, "settles_groups", False),
            transport=registry.transport(self.messages.rings.transport) if in_rings else IN_PROCESS,
            feedback=self._feedback,
            place_of=place_of,
            late=() if self.late is None else frozenset(self.late.held),
            in_int8=SentInt8.of(arrays) if self.sync.exchange.wire == INT8_WIRE else None,
        )

    def _ways_of_leaders(self, grid: Grid) -> Sequence[str]:
        """Return how leaders may exchange on a grid, if nothing else is asked for."""
        # Of real machines only a `GroupGrid` asks another leader for the mean, if the one that was to send it is lost.
        in_rings = self.planner.registry.ring_address_of
        return (STAR,) if in_rings and not getattr(grid, "settles_groups", False) else KINDS

    def _refuse_unfit(self, this: Round, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Raise `ConfigError` for settings that do not fit the nodes that are there."""
        if this.in_rings and _CLIPPING_NORM in config:
            raise ConfigError(
                f"SoCFlow: the train config has {_CLIPPING_NORM!r}, of differential privacy with "
                "clipping at the clients, and a member of a ring has no update of its own to clip; use "
                "the wrapper that clips at the server"
            )
        if self.latest is not None:
            return
        if _CLIPPING_NORM in config:
            refuse_integers_clipped(arrays)
        if this.in_rings and not this.settled_by_grid:
            log(
                WARNING,
                "SoCFlow: its nodes form rings, and the grid is not a GroupGrid: a round ends only when "
                "every member has replied, and a group whose leader is lost loses its round; "
                "strategy.start(GroupGrid(grid), ...) ends it at each group's first reply, and asks "
                "survivors again",
            )
        can_be_late = this.settled_by_grid if this.in_rings else this.costs is not None
        if self.late is not None and not can_be_late:
            log(
                WARNING,
                "SoCFlow: quorum = %s has no effect: every group is waited for without virtual time "
                "(a clock and a model_profile), or nodes with a ring address and a GroupGrid",
                self.late.quorum.fraction,
            )

    # ------------------------------------------------------------------------------------ settling a round
    def settle(self, this: Round, replies: Sequence[Message]) -> SettledRound:
        """Read the groups' replies, who left and who is back, measured speeds, and what clients report."""
        if this.in_int8 is not None:
            replies = [*map(this.in_int8.in_float32, replies)]
        # A grid that settles groups of real machines brings replies of earlier rounds.
        arrived = {} if self.late is None or not this.in_rings else self.late.answers(this, replies)
        settled = settle(this, replies, tolerate_errors=self._tolerates, arrived=arrived)
        self.planner.poll_absent()
        preempted = {soc for reply in settled.usable for soc in _preempted_of(reply)}
        preempted |= settled.preempted
        self.planner.registry.mark_away(settled.away & preempted)
        self.planner.lose(settled.away - preempted)
        self._read_outcomes(this, replies)
        # Rings of real machines have ended such groups themselves.
        if self.planner.preemption == GROUPS and not this.in_rings:
            settled = self._without_terminated(this, settled, replies)
        self._feedback = feedback_after_round(this, settled.means, settled.usable)
        lost_groups = {event.group_id for event in settled.lost}
        kept = {ident for ident in self._without_state if ident in this.late}
        self._without_state = tuple(sorted(lost_groups | settled.leaders_replaced | kept))
        reported = []
        for reply in settled.usable:
            group_id = group_id_of(reply)
            where = f"group {group_id}"
            reported += client_events(reply, group_id, where) + heat_events(reply, group_id, where)
        settled = settled.with_events(
            *self.planner.drain_events(),
            *settled.events,
            *settled.lost,
            *lost_feedback(this, settled.means, self._feedback),
            *reported,
        )
        if self.late is None:
            return settled
        return self._without_late(this, settled, self.late, arrived)

    def _without_terminated(
        self, this: Round, settled: SettledRound, replies: Sequence[Message]
    ) -> SettledRound:
        """Run the clock, and return the round without the groups that users ended in it, whose work is lost."""
        usage, ended = self.work.price(this, settled.usable, self.planner.balancer.in_use)
        answered = {group_id_of(reply) for reply in settled.usable}
        groups = [group for group in this.addressed if group.group_id in answered - ended]
        reported = {soc for reply in settled.usable for soc in _preempted_of(reply)}
        others = terminated_groups(groups, reported, one_stays=True)
        ended |= {group.group_id for group in others}
        if ended:
            kept = [
                reply
                for reply in replies
                if reply.metadata.src_node_id not in this.group_of_node
                or this.group_of_node[reply.metadata.src_node_id].group_id not in ended
            ]
            lost = [terminated_event(ident) for ident in sorted(ended)]
            settled = settle(this, kept, tolerate_errors=self._tolerates, lost=lost)
        return replace(settled, usage=usage)

    def _without_late(
        self,
        this: Round,
        settled: SettledRound,
        late: LateGroups,
        arrived: Mapping[int, Message],
    ) -> SettledRound:
        """Run the clock until the synchronisation ends, and return the groups that have arrived by then.

        Real machines have their own time, and the clock predicts theirs.
        """
        usage, behind, clock = Usage(), frozenset[int](), self.work.clock
        if clock is not None and this.costs is not None:
            answered = {group_id_of(reply) for reply in settled.usable}
            lost = [each.group_id for each in this.addressed if each.group_id not in answered]
            usage, behind = run_to_quorum(
                this.costs,
                this.interval,
                clock,
                late.quorum,
                late.pace,
                late=late.predicted if this.in_rings else this.late,
                lost=[] if this.in_rings else lost,
                capacities=self.planner.balancer.in_use,
            )
        if this.in_rings:
            late.predicted = behind
            noted = {kind: set[int]() for kind in (LATE, LATE_DROPPED)}
            for event in settled.events:
                noted.get(event.kind, set()).add(event.group_id)
            at_work = late.held.keys() - arrived.keys() - noted[LATE_DROPPED]
            behind = frozenset(noted[LATE] | at_work)
        is_last = this.server_round == self.num_rounds
        settled = late.settle(this, settled, usage, behind, arrived, is_last=is_last)
        if this.in_rings:
            self.planner.registry.mark_away(late.overdue)
        return settled

    def _read_outcomes(self, this: Round, replies: Sequence[Message]) -> None:
        """Take from the replies who was preempted, and what members measured."""
        planner = self.planner
        outcomes = []
        for reply in replies:
            outcome, group = outcome_of(reply), this.group_of_node.get(reply.metadata.src_node_id)
            if outcome is not None and group is not None:
                outcomes.append((outcome, {*group.members}))
        # Members of rings report departures themselves; here one client ran the whole group.
        if not this.in_rings:
            left = [{*outcome.preempted} & members for outcome, members in outcomes]
            planner.remove(set().union(*left))
        for outcome, members in outcomes:
            if {*outcome.members} <= members:
                comparable = self.work.comparable(outcome, planner.balancer.nominal)
                planner.balancer.on_outcome(comparable)

    def merge(self, this: Round, settled: SettledRound) -> ArrayRecord:
        """Return the mean over groups; keep those of servers after a synchronisation inside servers."""
        return self._servers.merged(this, settled.means)

    def price(self, this: Round, settled: SettledRound) -> Usage:
        """Return the usage of idle waiting before the round, and of the round."""
        idle = self.planner.drain_idle()
        if settled.usage is not None:
            return idle + settled.usage
        usage, _ = self.work.price(this, settled.usable, self.planner.balancer.in_use)
        return idle + usage

    def report(
        self, this: Round, settled: SettledRound, usage: Usage, events: tuple[ReplyEvent, ...]
    ) -> RoundReport:
        """Return the round's report."""
        return RoundReport(
            server_round=this.server_round,
            epoch=this.interval.epoch_end,
            events=events,
            usage=usage,
            **mixed_figures(settled.usable),
            uplink_turns=this.exchanges.turns.enabled,
            without_state=self._without_state,
        )

    # ------------------------------------------------------------------------------------------- resuming
    def save(self) -> dict[str, Any]:
        """Return who has no state or is away, re-balancing, models of servers, and what compression still owes."""
        return {
            "without_state": list(self._without_state),
            "away": list(self.planner.registry.away),
            "planned_without": list(self.planner.planned_without),
            "balance": self.planner.balancer.state(self.plan),
            "servers": {
                f"{server}/{name}": array
                for server, model in self._servers.models.items()
                for name, array in array_views(model).items()
            },
            "feedback": to_arrays(self._feedback),
            **({} if self.late is None else {"late": self.late.save()}),
        }

    def restore(self, server_round: int, state: Mapping[str, Any]) -> None:
        """Restore the state at the end of a round; `ConfigError` for the state of another plan.

        Clients must have their groups' states of that round's end, or they raise: without momentum the
        weights would differ. A group with another leader than in that round starts with a new optimiser.
        """
        away: Collection[int] = state.get("away", ())
        planned_without: Collection[int] = state.get(
            "planned_without", self.planner.planned_without
        )
        for key, socs in (("away", away), ("planned_without", planned_without)):
            for soc in socs:
                if soc not in self.planner.participant_of:
                    raise ConfigError(
                        f"resume_from: {key} has {soc!r}, which is no SoC of the plan; use the state "
                        "of the same strategy"
                    )
        self._servers.models = _models_of(state.get("servers") or {})
        self._feedback = from_arrays(state.get("feedback") or {})
        self.planner.restore(
            away=away, planned_without=planned_without, balance=state.get("balance") or {}
        )
        if self.late is not None and state.get("late"):
            self.late.restore(state["late"], self.plan)
        without_state = state.get("without_state", ())
        states = {}
        if server_round:
            states = {
                group.group_id: (group.leader, group.group_id not in without_state)
                for group in self.plan.groups
            }
        self.messages.resume(server_round, states)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsDescription(Description):
    """The plan of the latest round, and how its groups exchange."""

    work: GroupWork
    plan: GroupPlan
    leaders: str
    latest: Round | None

    @property
    def exchanges(self) -> Exchanges:
        """Whether the plan's groups take turns on shared uplinks, how leaders meet, and the reasons."""
        if self.latest is not None and self.latest.plan is self.plan:
            return self.latest.exchanges
        return self.work.exchanges_of(self.plan, self.leaders, KINDS)[0]

    def document(self) -> dict[str, Any]:
        """Return the plan of the work, and how groups and leaders exchange."""
        return self.work.document(self.plan, self.exchanges)

    def transports(self) -> dict[str, str]:
        """Return those inside groups and, if they do not pass the hub, between leaders."""
        # A training that is resumed may have no round left.
        if self.latest is None:
            inside = IN_PROCESS
            between = "" if self.exchanges.leaders.kind == STAR else IN_PROCESS
        else:
            inside, between = self.latest.transport, self.latest.leader_transport
        return {"inside groups": inside, **({"between leaders": between} if between else {})}


class OuterGroups(OuterModels[Round, SettledRound]):
    """Groups as clients of an outer strategy."""

    def __init__(self, planner: RoundPlanner, late: LateGroups | None) -> None:
        self._planner, self._late = planner, late

    def clients(self, this: Round) -> OuterClients:
        """Return the number of groups, and whether they are rings."""
        return OuterClients(num_models=len(this.plan.groups), in_rings=this.in_rings)

    def models(self, this: Round, settled: SettledRound, merged: ArrayRecord) -> Sequence[Message]:
        """Return the groups' models; of leaders that have met, as often the mean."""
        if not this.leaders_meet:
            return settled.usable
        # A strategy that takes the mean of models takes the same of as many means.
        return [with_model(reply, merged) for reply in settled.usable]

    def nodes(self, this: Round, grid: Grid) -> NodesForEvaluation:
        """Return the nodes of a round that are still present, and not at work for late groups."""
        present = set(self._planner.registry.present(grid))
        if self._late is not None:
            present -= {soc for work in self._late.held.values() for soc in work.members}
        socs = [soc for soc in this.plan.participants if soc in present]
        return NodesForEvaluation(
            soc_of_node={this.node_of[soc]: soc for soc in socs},
            participant_of=self._planner.participant_of,
        )


def _preempted_of(reply: Message) -> Collection[int]:
    """Return the SoCs that left a group within its interval, as its client reports it."""
    outcome = outcome_of(reply)
    return () if outcome is None else outcome.preempted


def _models_of(servers: Mapping[str, NDArray[Any]]) -> dict[int, ArrayRecord]:
    """Return the models of servers from a checkpoint."""
    models: dict[int, dict[str, NDArray[Any]]] = {}
    for key, array in servers.items():
        server, _, name = key.partition("/")
        models.setdefault(int(server), {})[name] = array
    return {server: to_array_record(model) for server, model in models.items()}
