"""SoCFlow: synchronous SGD inside groups, delayed synchronisation between them (SoCFlow+ section 3.1)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from numpy.typing import NDArray

from socflower.cluster import Cluster, ModelProfile, Pricing, Usage, VirtualClock, sustained_rates
from socflower.errors import ConfigError, require_type
from socflower.hierarchy import (
    Exchanges,
    Group,
    GroupPlan,
    IntervalCosts,
    Phase,
    Rebalancing,
    SyncInterval,
    UplinkTurns,
    choose_exchanges,
    group_steps_per_epoch,
    plan_groups,
    sync_schedule,
    unpredicted_exchanges,
)
from socflower.hierarchy.leader_topology import AUTO, KINDS, NONE, STAR
from socflower.hierarchy.uplink_turns import ASKED, NO_SHARED_UPLINK, NOT_PREDICTED, PREDICTED
from socflower.peers.ring.settings import RingSettings
from socflower.plain_numbers import plain_numbers
from socflower.precision.processor_costs import MixedPricing
from socflower.quantities import counted
from socflower.strategies.group_models import GroupMean
from socflower.strategies.group_replies import settle
from socflower.strategies.leader_feedback import (
    feedback_after_round,
    from_arrays,
    lost_feedback,
    to_arrays,
)
from socflower.strategies.mixed_replies import client_events, group_id_of, mean_metric, mixed_phases
from socflower.strategies.outer_step import (
    ChosenNodes,
    OuterStep,
    refuse_integers_clipped,
    reproducible_draws,
)
from socflower.strategies.planned_rounds import PlannedRounds
from socflower.strategies.records import (
    aggregate_records,
    array_views,
    to_array_record,
    with_weights,
)
from socflower.strategies.replies import (
    NOT_EVALUATED,
    OUTER_STEP,
    ReplyEvent,
    failure_event,
    heat_events,
    outcome_of,
    with_model,
)
from socflower.strategies.round import (
    IN_PROCESS,
    GroupFeedback,
    Round,
    leader_transport,
    ring_tasks,
)
from socflower.strategies.round_planner import RoundPlanner
from socflower.strategies.settings import (
    Costs,
    ExchangeSettings,
    Grouping,
    TrainingSchedule,
    refuse_unknown,
)
from socflower.wire.message_keys import (
    ALPHA,
    ARRAYS,
    CONFIG,
    CPU_SHARE,
    EVALUATED,
    GROUP,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    PRICED,
    RESUMED,
    RING,
    SERVER_ROUND,
    GroupTask,
    RingOutcome,
    encode,
)

_CLIPPING_NORM = "clipping_norm"
"""The config key in which Flower's client-side clipping strategies send the norm."""


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReport:
    """The report of one round (one interval between synchronisations); the latest is `strategy.reports[-1]`."""

    server_round: int
    epoch: float  # epochs completed at its end
    usage: Usage  # of this round alone; zero without a clock and a profile
    events: tuple[ReplyEvent, ...]
    alpha: float | None = None  # mixed precision: mean confidence over groups (F9)
    cpu_share: float | None = (
        None  # mixed precision: share of the samples that were trained on CPUs (F11)
    )
    uplink_turns: bool = False  # whether groups that share an uplink exchanged in turn (F6)
    without_state: tuple[
        int, ...
    ] = ()  # groups whose leader has no state of this round's end to resume from


@plain_numbers
class SoCFlow(PlannedRounds):
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
    groups : int, Grouping or GroupPlan
        The number of logical groups N, see `profile_group_count` for choosing it (F2); with the number of SoCs that
        take part; or a plan.
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
    tolerate_client_errors : bool
        Drop and report a client that raises instead of ending the run. A client that dies or returns NaN is always
        dropped and reported.

    Attributes
    ----------
    round : Round or None
        The latest round, from its messages on.
    reports : list of RoundReport
        What came of each round.
    intervals : sequence of SyncInterval
        The interval of each round.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        schedule: TrainingSchedule | None = None,
        groups: int | Grouping | GroupPlan = 1,
        costs: Costs = Costs(),
        exchange: ExchangeSettings = ExchangeSettings(),
        rings: RingSettings = RingSettings(),
        rebalancing: Rebalancing | None = None,
        outer: Strategy | None = None,
        tolerate_client_errors: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown)
        if (
            schedule is None
        ):  # not Python's error, which would hide that of an option that is part of it now
            raise ConfigError(
                f"{type(self).__name__}: schedule=TrainingSchedule(num_samples=…, batch_size=…, "
                "num_epochs=…) is missing"
            )
        name = type(self).__name__
        require_type(name, (Cluster,), "a Cluster, as of load_cluster(…)", cluster=cluster)
        require_type(name, (TrainingSchedule,), "TrainingSchedule(…)", schedule=schedule)
        require_type(
            name,
            (int, Grouping, GroupPlan),
            "a whole number, Grouping(…) or a GroupPlan",
            groups=groups,
        )
        require_type(name, (Costs,), "Costs(…)", costs=costs)
        require_type(name, (ExchangeSettings,), "ExchangeSettings(…)", exchange=exchange)
        require_type(name, (RingSettings,), "RingSettings(…)", rings=rings)
        require_type(
            name, (Rebalancing, type(None)), "Rebalancing(…) or None", rebalancing=rebalancing
        )
        require_type(name, (bool,), "True or False", tolerate_client_errors=tolerate_client_errors)
        self._cluster, self._schedule, self._costs, self._exchange, self._rings = (
            cluster,
            schedule,
            costs,
            exchange,
            rings,
        )
        self._tolerate_client_errors = tolerate_client_errors
        if exchange.overlap_buckets > 1 and getattr(costs.pricing, "arithmetic", "") == "int8":
            raise ConfigError(
                f"{name}: overlap_buckets = {exchange.overlap_buckets}, but gradients in int8 are "
                "exchanged after the backward pass; leave it out"
            )
        rates = sustained_rates(cluster, self._model_name, costs.pricing)
        if not isinstance(groups, GroupPlan):
            counts = groups if isinstance(groups, Grouping) else Grouping(num_groups=groups)
            groups = plan_groups(cluster, counts.num_groups, counts.num_socs, rates)
        self._planner = RoundPlanner(cluster, groups, rates, rebalancing)
        self.steps_per_epoch = group_steps_per_epoch(
            schedule.num_samples, len(groups.groups), schedule.batch_size
        )
        self.intervals: Sequence[SyncInterval] = sync_schedule(
            schedule.num_epochs,
            self.steps_per_epoch,
            schedule.interval_epochs,
            server_interval=schedule.server_interval,
        )
        self._rebalancing = rebalancing
        self._outer = (
            None
            if outer is None
            else OuterStep(outer, len(groups.groups), len(groups.participants))
        )
        self._leaders = self._allowed_leaders(exchange.leaders)
        self._interval_costs = (
            None if costs.model_profile is None else self._costs_of(groups, costs.model_profile)
        )
        if outer is not None and type(self).average_models is not SoCFlow.average_models:
            raise ConfigError(
                f"{name}: it has an average_models of its own, which outer = {type(outer).__name__}(…) "
                "would replace; give one of the two"
            )
        if schedule.server_interval > 1:
            self._check_servers(groups, outer)
        self._server_models: dict[int, ArrayRecord] = {}  # after a synchronisation inside servers
        self._feedback: dict[int, GroupFeedback] = {}
        self.fraction_evaluate = (
            0.0 if outer is None else float(getattr(outer, "fraction_evaluate", 1.0))
        )
        self._clock = costs.clock
        self._is_outermost = False  # once it is started itself, and not a strategy around it
        self.round: Round | None = None
        self.reports: list[RoundReport] = []
        self._resumed_states: dict[
            int, tuple[int, bool]
        ] = {}  # leader of the round resumed after, and whether it has
        # its group's state, by group

    def _allowed_leaders(self, asked: str) -> str:
        """Return how leaders are to exchange; raise `ConfigError` for a way in which the hub lacks models it needs."""
        needing = ""
        if self._outer is not None and not self._outer.takes_mean:
            needing = f"outer = {self._outer.name}(…)"
        elif type(self).average_models is not SoCFlow.average_models:
            needing = "its own average_models"
        return self._star_for(needing, asked) if needing else asked

    def _star_for(self, needing: str, asked: str) -> str:
        if self._exchange.leader_compression != NONE:
            raise ConfigError(
                f"{type(self).__name__}: leader_compression = {self._exchange.leader_compression!r} is "
                f"for leaders in a ring or a tree, which give the hub their mean, and {needing} needs "
                "each group's model; leave the compression out"
            )
        if asked not in (AUTO, STAR):
            raise ConfigError(
                f"{type(self).__name__}: leaders = {asked!r} gives the hub the mean of the groups' "
                f"models, and {needing} needs each of them; use leaders = 'star'"
            )
        return STAR

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **named_args: Any,
    ) -> Result:
        """Train as every strategy does; see `PlannedRounds.start`."""
        self._is_outermost = True
        return super().start(grid, initial_arrays, num_rounds, *args, **named_args)

    def _check_servers(self, plan: GroupPlan, outer: Strategy | None) -> None:
        """Raise `ConfigError` where servers cannot synchronise less often than their groups."""
        asked = f"{type(self).__name__}: server_interval = {self._schedule.server_interval}"
        if len(plan.by_server) < 2:
            raise ConfigError(
                f"{asked} and {counted(len(plan.groups), 'group')} on "
                f"{counted(max(1, len(self._cluster.servers)), 'server')}: there are no servers with "
                "groups of their own; plan a group for each server, or leave server_interval out"
            )
        if self._exchange.leader_compression != NONE:
            raise ConfigError(
                f"{asked}, and leader_compression = {self._exchange.leader_compression!r} compresses "
                "changes since a model that all groups have had; leave one of the two out"
            )
        if outer is not None:
            raise ConfigError(
                f"{asked}, and outer = {type(outer).__name__}(…) makes one model of all groups' at every "
                "synchronisation; leave one of the two out"
            )

    @property
    def pricing(self) -> Pricing:
        """The cost of the clients' arithmetic."""
        return self._costs.pricing

    @property
    def _model_name(self) -> str:
        return self._costs.model_profile.name if self._costs.model_profile else ""

    def resume_from(
        self,
        server_round: int,
        *,
        without_state: Collection[int] = (),
        away: Collection[int] = (),
        planned_without: Collection[int] = (),
        balance: Mapping[str, Any] | None = None,
        outer: Mapping[str, NDArray[Any]] | None = None,
        servers: Mapping[str, NDArray[Any]] | None = None,
        feedback: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Make `start` continue after `server_round`; see `Resumable.resume_from`. The rest is the `state` then.

        Clients must have their groups' states of that round's end, or they raise: without momentum the weights would
        differ. `without_state` are ids of groups that may have none, such as those whose reply was dropped in that
        round. `away` are the SoCs to exclude from plans; `planned_without` are those that the round's plan excluded.
        A group with another leader than in that round starts with a new optimiser. `balance` is the state of
        re-balancing, `outer` the moments of the outer strategy, `servers` the models of servers that have not
        synchronised since, `feedback` what the compression of leaders' models has still to send.
        """
        for key, socs in (("away", away), ("planned_without", planned_without)):
            if unknown := [soc for soc in socs if soc not in self._planner.participant_of]:
                raise ConfigError(
                    f"resume_from: {key} has {unknown[0]!r}, which is no SoC of the plan; use the state "
                    "of the same strategy"
                )
        if outer and self._outer is None:
            raise ConfigError(
                "resume_from: outer has moments, and this SoCFlow has no outer strategy; give it the one "
                "that the training had"
            )
        super().resume_from(server_round)
        if self._outer is not None:
            self._outer.restore(outer or {})
        self._server_models = _models_of(servers or {})
        self._feedback = from_arrays(feedback or {})
        self._planner.restore(away=away, planned_without=planned_without, balance=balance or {})
        self._resumed_states = (
            {
                group.group_id: (group.leader, group.group_id not in without_state)
                for group in self.plan.groups
            }
            if server_round
            else {}
        )

    @property
    def state(self) -> dict[str, Any]:
        """The state besides the weights that the next rounds depend on, as keyword arguments for `resume_from`."""
        return {
            "without_state": list(self.reports[-1].without_state) if self.reports else [],
            "away": list(self._planner.registry.away),
            "planned_without": list(self._planner.planned_without),
            "balance": self._planner.balancer.state(self.plan),
            "outer": {} if self._outer is None else self._outer.state(),
            "servers": {
                f"{server}/{name}": array
                for server, model in self._server_models.items()
                for name, array in array_views(model).items()
            },
            "feedback": to_arrays(self._feedback),
        }

    @property
    def plan(self) -> GroupPlan:
        """The plan of the latest round."""
        return self._planner.plan

    @property
    def exchanges(self) -> Exchanges:
        """Whether the groups of the latest plan take turns on shared uplinks, how leaders meet, and the reasons."""
        if self.round is not None and self.round.plan is self.plan:
            return self.round.exchanges
        return self._exchanges_and_costs(self.plan)[0]

    @property
    def schedule(self) -> TrainingSchedule:
        """How much is trained, and how often groups synchronise."""
        return self._schedule

    def predicted(
        self,
        clock: VirtualClock,
        profile: ModelProfile | None = None,
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return how the groups of the latest plan would exchange on the clock, and what an interval would cost.

        The cost is that of its own `model_profile`, else of `profile`; None without both. The clock is not charged.
        """
        base = self._interval_costs or (
            None if profile is None else self._costs_of(self.plan, profile)
        )
        return self._chosen(self.plan, base, clock, KINDS)

    @property
    def transport(self) -> str:
        """The transport of gradients inside the groups of the latest round."""
        return IN_PROCESS if self.round is None else self.round.transport

    @property
    def leader_transport(self) -> str:
        """The transport of leaders' models in the latest round; empty where they pass the hub."""
        if self.round is None:  # as `transport`, where a training that is resumed has no round left
            return "" if self.exchanges.leaders.kind == STAR else IN_PROCESS
        if not self.round.leaders_meet:
            return ""
        return leader_transport(self.round.transport) if self.round.in_rings else IN_PROCESS

    @property
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""
        return len(self.intervals)

    def summary(self) -> None:
        """Log the plan."""
        sizes = [len(group.members) for group in self.plan.groups]
        log(
            INFO,
            "\t├──> Groups: %d of %d to %d SoCs, %d split over boards, contention %d",
            len(sizes),
            min(sizes),
            max(sizes),
            sum(group.split for group in self.plan.groups),
            self.plan.contention,
        )
        log(INFO, "\t├──> Communication groups: %d", len(self.plan.communication_groups))
        log(
            INFO,
            "\t└──> Synchronisations: %d, each after %d to %d of %d steps an epoch",
            self.num_rounds,
            min(interval.num_steps for interval in self.intervals),
            max(interval.num_steps for interval in self.intervals),
            self.steps_per_epoch,
        )

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Address every group's leader, in group order, or on real machines every member.

        `config` is copied, not changed. SoCs that are away are excluded from the plan, and their nodes are queried.
        """
        if not self._begins(server_round):
            return []
        if self._clock is None:
            self._use_clock_of(grid, arrays)
        if not self._is_outermost:
            self._leaders = self._star_for("the strategy around it", self._leaders)
        planner = self._planner
        planner.drain_events()
        planner.plan_round(grid, self._clock)
        this = self._make_round(server_round, arrays, grid)
        if this.in_rings and _CLIPPING_NORM in config:
            raise ConfigError(
                f"SoCFlow: the train config has {_CLIPPING_NORM!r}, of differential privacy with "
                "clipping at the clients, and a member of a ring has no update of its own to clip; use "
                "the wrapper that clips at the server"
            )
        if self.round is None and not this.in_rings and self._rings.compression != NONE:
            raise ConfigError(
                f"{type(self).__name__}: rings has compression = {self._rings.compression!r}, and its "
                "nodes form no rings: a node sums its group's whole gradients; leave it out"
            )
        if self.round is None:
            refuse_integers_clipped(arrays, at_clients=_CLIPPING_NORM in config)
        if self._outer is not None and self.round is None:
            self._outer.refuse_unfit(
                server_round, arrays, config, len(this.plan.groups), in_rings=this.in_rings
            )
        self._log_changes(this, grid)
        self.round = this
        planner.ask_absent(grid, server_round)
        configs = self._configs(this, config)
        rings = (
            ring_tasks(
                this,
                self._rings,
                planner.registry.ring_address_of,
                planner.participant_of,
                num_buckets=self._exchange.overlap_buckets,
                rebalance_steps=planner.balancer.ring_steps,
                tolerate_errors=self._tolerate_client_errors,
            )
            if this.in_rings
            else {}
        )
        messages = []
        for group in this.plan.groups:
            task = ConfigRecord(self._task(group, this.interval).encode())
            for soc in group.members if this.in_rings else (group.leader,):
                content = RecordDict({CONFIG: configs[group.group_id], GROUP: task})
                if soc == group.leader:
                    content[ARRAYS] = self._server_models.get(group.server, arrays)
                if this.in_rings:
                    content[RING] = ConfigRecord(encode(rings[soc]))
                messages.append(
                    Message(
                        content, this.node_of[soc], MessageType.TRAIN, group_id=str(server_round)
                    )
                )
        return messages

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the groups' models by samples, or as the outer strategy does; drop and report broken replies.

        Raises `TrainingFailed` if none is left, or if a client raised and that is not tolerated.
        """
        if not self._ends(server_round):
            return None, None
        assert self.round is not None
        this, planner, replies = self.round, self._planner, list(replies)
        settled = settle(this, replies, tolerate_errors=self._tolerate_client_errors)
        planner.hear_absent()
        planner.registry.mark_away(settled.away)
        outcomes = [
            (group, outcome)
            for reply in replies
            if (outcome := outcome_of(reply))
            and (group := this.group_of_node.get(reply.metadata.src_node_id))
        ]
        if not this.in_rings:
            planner.remove(
                {
                    soc
                    for group, outcome in outcomes
                    for soc in {*outcome.preempted} & {*group.members}
                }
            )
        for group, outcome in outcomes:
            if {*outcome.members} <= {*group.members}:
                planner.balancer.on_outcome(self._with_nominal_rates(outcome))
        self._feedback = feedback_after_round(this, settled.means, settled.usable)
        usable = settled.usable
        events = (
            *planner.drain_events(),
            *settled.events,
            *settled.lost,
            *lost_feedback(this, settled.means, self._feedback),
        )
        for reply in usable:
            group_id = group_id_of(reply)
            events = (
                *events,
                *client_events(reply, group_id, f"group {group_id}"),
                *heat_events(reply, group_id, f"group {group_id}"),
            )
        metrics = [cast(MetricRecord, reply.content[METRICS]) for reply in usable]
        samples = [float(cast(float, metric[NUM_EXAMPLES])) for metric in metrics]
        mean = _weighted_mean(metrics, samples)
        arrays: ArrayRecord | None = self._mean(settled.means)
        if self._outer is None:
            self._server_models = (
                {}
                if this.interval.across_servers
                else {**self._server_models, **self._average_in_servers(this, settled.means)}
            )
        else:
            if too_few := self._outer.too_few(len(usable)):
                events = (*events, ReplyEvent(kind=OUTER_STEP, group_id=0, text=too_few))
            # A strategy that takes the mean of models takes the same of as many means.
            given = (
                [with_model(reply, cast(ArrayRecord, arrays)) for reply in usable]
                if this.leaders_meet
                else usable
            )
            arrays, mean = self._outer.apply(server_round, this.sent, given, mean)
            if arrays is None:
                events = (
                    *events,
                    ReplyEvent(
                        kind=OUTER_STEP,
                        group_id=0,
                        text=(
                            f"{self._outer.name} made no model of "
                            f"{counted(len(usable), 'group')}; the global model stays"
                        ),
                    ),
                )
        for event in events:
            log(WARNING, "aggregate_train: %s", event.text)
        self.reports.append(
            RoundReport(
                server_round=server_round,
                epoch=this.interval.epoch_end,
                events=events,
                usage=self._price(this, usable),
                alpha=mean_metric(usable, ALPHA),
                cpu_share=mean_metric(usable, CPU_SHARE),
                uplink_turns=this.exchanges.turns.enabled,
                without_state=tuple(
                    sorted({event.group_id for event in settled.lost} | settled.leaders_replaced)
                ),
            )
        )
        return arrays, mean

    def _with_nominal_rates(self, outcome: RingOutcome) -> RingOutcome:
        """Return a ring's outcome with rates that compare with the SoCs' nominal ones."""
        return outcome

    def _average_in_servers(
        self, this: Round, means: Sequence[GroupMean]
    ) -> dict[int, ArrayRecord]:
        """Return the model of each server of the round's plan; one without usable replies keeps what it was sent."""
        server_of = {group.group_id: group.server for group in this.plan.groups}
        of_server: dict[int, list[GroupMean]] = {}
        for mean in means:
            of_server.setdefault(server_of[mean.groups[0]], []).append(mean)
        return {
            server: self._mean(of_server[server])
            if server in of_server
            else self._server_models.get(server, this.sent)
            for server in this.plan.by_server
        }

    def _mean(self, means: Sequence[GroupMean]) -> ArrayRecord:
        """Return the mean of all; a single one as it came, which nodes may have kept."""
        if len(means) == 1 and len(means[0].groups) > 1:
            return means[0].arrays
        return self.average_models(
            [mean.arrays for mean in means], [mean.samples for mean in means]
        )

    def average_models(
        self, models: Sequence[ArrayRecord], samples: Sequence[float]
    ) -> ArrayRecord:
        """Return the next global model: the groups' average by samples, in group order (F8).

        A strategy with another rule overrides this. The models have the tensors that were sent, without NaN.
        """
        return aggregate_records(models, samples)

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Address nodes of the plan as the outer strategy samples them, reproducibly; none without one."""
        super().configure_evaluate(server_round, arrays, config, grid)
        if (
            self.is_done(server_round)
            or self._outer is None
            or not self.fraction_evaluate
            or self.round is None
        ):
            return []
        present = set(self._planner.registry.present(grid))
        soc_of = {
            self.round.node_of[soc]: soc for soc in self.round.plan.participants if soc in present
        }
        nodes = list(soc_of)
        strategy = self._outer.strategy
        needed = max(
            int(getattr(strategy, key, 1)) for key in ("min_evaluate_nodes", "min_available_nodes")
        )
        if len(nodes) < needed:  # Flower would wait for more
            self._add_events(
                [
                    f"round {server_round} is not evaluated by nodes: {self._outer.name} asks for {needed}, "
                    f"and {len(nodes)} are available"
                ]
            )
            return []
        with reproducible_draws(f"{self._schedule.seed} {server_round}"):
            messages = strategy.configure_evaluate(
                server_round, arrays, ConfigRecord(dict(config)), ChosenNodes(grid, nodes)
            )
        return [
            self._own_evaluation(message, soc_of[message.metadata.dst_node_id])
            for message in sorted(
                messages, key=lambda message: nodes.index(message.metadata.dst_node_id)
            )
        ]

    def _own_evaluation(self, message: Message, soc: int) -> Message:
        """Return the message with the node's partition of the data, which is the SoC's as a member of a group."""
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        partition = [self._planner.participant_of[soc], len(self._planner.participant_of)]
        content = RecordDict(
            {**message.content, CONFIG: ConfigRecord({**config, EVALUATED: partition})}
        )
        return Message(
            content,
            message.metadata.dst_node_id,
            message.metadata.message_type,
            group_id=message.metadata.group_id,
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate as the outer strategy does, in the order of the SoCs; failures are events of the round."""
        if (
            self.is_done(server_round)
            or self._outer is None
            or not self.fraction_evaluate
            or self.round is None
        ):
            return None
        soc_of = {node: soc for soc, node in self.round.node_of.items()}
        ordered = sorted(replies, key=lambda reply: soc_of.get(reply.metadata.src_node_id, -1))
        self._add_events(
            [
                failure_event(reply, 0, f"evaluation, node {reply.metadata.src_node_id}").text
                for reply in ordered
                if reply.has_error()
            ]
        )
        return self._outer.strategy.aggregate_evaluate(server_round, ordered)

    def _add_events(self, texts: Sequence[str]) -> None:
        """Add events of the evaluation to the report of the round."""
        for text in texts:
            log(WARNING, "evaluation: %s", text)
        self.reports[-1] = replace(
            self.reports[-1],
            events=(
                *self.reports[-1].events,
                *(ReplyEvent(kind=NOT_EVALUATED, group_id=0, text=text) for text in texts),
            ),
        )

    def _use_clock_of(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Use the grid's clock, if it has one, and its profile for want of one.

        Raises `ConfigError` if the grid's cluster is another one.
        """
        self._clock = getattr(grid, "clock", None)
        if self._clock is None:
            return
        profile = getattr(grid, "model_profile", None)
        if self._interval_costs is None and profile is not None:
            self._interval_costs = self._costs_of(self.plan, with_weights(profile, arrays))
        if self._interval_costs is None:
            log(
                WARNING,
                "SoCFlow: without a model_profile this engine keeps no virtual time; pass "
                "costs=Costs(model_profile=profile_module(model, example_shape, name))",
            )
        self._require_cluster_of(grid)

    def _require_cluster_of(self, grid: Grid) -> None:
        """Raise `ConfigError` if the grid's cluster is another one."""
        cluster = getattr(grid, "cluster", self._cluster)
        if cluster.boards != self._cluster.boards:
            raise ConfigError(
                f"{type(self).__name__}: its cluster ({_hardware(self._cluster)}) is not the one the "
                f"engine was given ({_hardware(cluster)}); describe both by the same cluster file"
            )

    def _make_round(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> Round:
        """Return the round of the latest plan; what it costs is kept while the plan stays, as graphs are made of it."""
        plan, before, registry = self.plan, self.round, self._planner.registry
        same = before is not None and before.plan is plan
        exchanges, costs = (
            (before.exchanges, before.costs)
            if before is not None and same
            else self._exchanges_and_costs(plan, self._ways_of_leaders(grid))
        )
        return Round(
            server_round=server_round,
            interval=self.intervals[server_round - 1],
            plan=plan,
            exchanges=exchanges,
            costs=costs,
            node_of={soc: registry.node_of[soc] for soc in plan.participants},
            sent=arrays,
            settled_by_grid=getattr(grid, "settles_groups", False),
            transport=registry.transport(self._rings.transport)
            if registry.ring_address_of
            else IN_PROCESS,
            feedback=self._feedback,
            place_of={
                group.group_id: (
                    board := self._cluster.board_of(group.leader),
                    self._cluster.server_of(board),
                )
                for group in plan.groups
            },
        )

    def _costs_of(self, plan: GroupPlan, profile: ModelProfile) -> IntervalCosts:
        schedule = self._schedule
        costs = IntervalCosts(
            cluster=self._cluster,
            plan=plan,
            profile=profile,
            num_samples=schedule.num_samples,
            batch_size=schedule.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            reshuffle=schedule.reshuffle,
            uplink_turns=False,
            overlap_buckets=self._exchange.overlap_buckets,
            pricing=self.pricing,
            rebalancing=self._rebalancing,
            fusion=self._exchange.fusion,
            hub_decides=self._outer is not None,
            leader_compression=self._exchange.leader_compression,
        )
        costs.require_memory()
        return costs

    def _ways_of_leaders(self, grid: Grid) -> Sequence[str]:
        """Return how leaders may exchange on a grid, if nothing else is asked for."""
        # Of real machines only a `GroupGrid` asks another leader for the mean, if the one that was to send it is lost.
        lone = self._planner.registry.ring_address_of and not getattr(grid, "settles_groups", False)
        return (STAR,) if lone else KINDS

    def _exchanges_and_costs(
        self,
        plan: GroupPlan,
        leaders: Sequence[str] = KINDS,
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return how a plan's groups exchange, and what an interval of it costs."""
        return self._chosen(plan, self._interval_costs, self._clock, leaders)

    def _chosen(
        self,
        plan: GroupPlan,
        base: IntervalCosts | None,
        clock: VirtualClock | None,
        leaders: Sequence[str],
    ) -> tuple[Exchanges, IntervalCosts | None]:
        turns = self._exchange.uplink_turns
        if base is None:
            return unpredicted_exchanges(
                plan, turns, self._leaders, self._exchange.leader_compression, leaders
            ), None
        lengths = Counter(interval.num_steps for interval in self.intervals)
        return choose_exchanges(
            replace(base, plan=plan), turns, self._leaders, lengths, clock, leaders
        )

    def _log_changes(self, this: Round, grid: Grid) -> None:
        """Log how groups exchange if that is new, and at first what the grid does for them."""
        if self.round is None or self.round.exchanges != this.exchanges:
            leaders = this.exchanges.leaders
            log(
                INFO,
                "SoCFlow: exchanges of groups: %s; of leaders: %s%s",
                _describe_turns(this.exchanges.turns),
                leaders.kind,
                "" if leaders.compression == NONE else f", in {leaders.compression}",
            )
        if self.round is None and this.in_rings and not this.settled_by_grid:
            log(
                WARNING,
                "SoCFlow: its nodes form rings, and the grid is not a GroupGrid: a round ends only when every "
                "member has replied, and a group whose leader is lost loses its round; "
                "strategy.start(GroupGrid(grid), ...) ends it at each group's first reply, and asks survivors "
                "again",
            )

    def _configs(self, this: Round, config: ConfigRecord) -> dict[int, ConfigRecord]:
        """Return each group's config; in the first round after a resume, with whether a saved state is required."""
        settings = ConfigRecord({**config, SERVER_ROUND: this.server_round, PRICED: True})
        configs = {group.group_id: settings for group in this.plan.groups}
        before = self._resumed_states
        if this.server_round == self.resumed_after + 1 and len(before) == len(configs):
            for group in this.plan.groups:
                leader, has_state = before[group.group_id]
                # As without the interruption: a leader that is new to the group has no momentum for it.
                if group.leader == leader:
                    configs[group.group_id] = ConfigRecord({**settings, RESUMED: has_state})
        return configs

    def _task(self, group: Group, interval: SyncInterval) -> GroupTask:
        return GroupTask(
            group_id=group.group_id,
            num_groups=len(self.plan.groups),
            members=group.members,
            leader=group.leader,
            partitions=tuple(self._planner.participant_of[soc] for soc in group.members),
            num_partitions=len(self._planner.participant_of),
            capacities=self._planner.balancer.capacities(group),
            first_step=interval.first_step,
            num_steps=interval.num_steps,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.intervals[-1].first_step + self.intervals[-1].num_steps,
            batch_size=self._schedule.batch_size,
            reshuffle=self._schedule.reshuffle,
            deal_epoch=interval.deal_epoch,
            seed=self._schedule.seed,
            num_samples=self._schedule.num_samples,
            npu_ratios=self._npu_ratios(group),
            proximal_mu=0.0 if self._outer is None else self._outer.proximal_mu,
        )

    def _npu_ratios(self, group: Group) -> tuple[float, ...]:
        """Return each member's beta from the catalogue (F10); empty if clients measure it or do not need it."""
        pricing = self.pricing
        if self._interval_costs is None or not isinstance(pricing, MixedPricing):
            return ()
        return tuple(
            pricing.npu_ratio(self._model_name, self._cluster.device_of(soc))
            for soc in group.members
        )

    def _price(self, this: Round, replies: Sequence[Message]) -> Usage:
        if self._clock is None or this.costs is None:
            return Usage()
        phases: Sequence[Phase] = ()
        if isinstance(self.pricing, MixedPricing):
            phases = mixed_phases(replies, this.interval.num_steps, self.pricing)
        return self._planner.drain_idle() + this.costs.run(
            this.interval, self._clock, phases, self._planner.balancer.in_use
        )


def _describe_turns(turns: UplinkTurns) -> str:
    """Return how groups exchange, for the log."""
    said = "taking turns" if turns.enabled else "running freely"
    return (
        said
        + {
            ASKED: ", as asked for",
            PREDICTED: ", which is predicted to be faster",
            NO_SHARED_UPLINK: ", as no two share an uplink",
            NOT_PREDICTED: ": without a clock and a model_profile nothing predicts whether running freely is faster; "
            "uplink_turns=False runs freely",
        }[turns.decided_by]
    )


def _models_of(servers: Mapping[str, NDArray[Any]]) -> dict[int, ArrayRecord]:
    """Return the models of servers from a checkpoint."""
    models: dict[int, dict[str, NDArray[Any]]] = {}
    for key, array in servers.items():
        server, _, name = key.partition("/")
        models.setdefault(int(server), {})[name] = array
    return {server: to_array_record(model) for server, model in models.items()}


def _hardware(cluster: Cluster) -> str:
    devices = sorted({board.device.name for board in cluster.boards})
    return f"{counted(cluster.num_socs, 'SoC')} on {counted(len(cluster.boards), 'board')}, {', '.join(devices)}"


def _weighted_mean(metrics: Sequence[MetricRecord], samples: Sequence[float]) -> MetricRecord:
    """Return the mean over samples of every scalar metric that all replies have."""
    common = set.intersection(*(set(metric) for metric in metrics)) - {NUM_EXAMPLES, GROUP_ID}
    means: dict[str, int | float] = {
        key: sum(
            float(cast(float, metric[key])) * weight
            for metric, weight in zip(metrics, samples, strict=True)
        )
        / sum(samples)
        for key in sorted(common)
        if all(isinstance(metric[key], int | float) for metric in metrics)
    }
    return MetricRecord({**means, NUM_EXAMPLES: int(sum(samples))})
