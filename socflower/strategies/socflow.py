"""SoCFlow: synchronous SGD inside groups, delayed synchronisation between them (SoCFlow+ section 3.1)."""

from collections.abc import Iterable, Sequence
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from socflower.cluster import Cluster, ModelProfile, Pricing, VirtualClock, sustained_rates
from socflower.errors import ConfigError, require_type
from socflower.hierarchy import (
    Exchanges,
    GroupPlan,
    IntervalCosts,
    Rebalancing,
    SyncInterval,
    group_steps_per_epoch,
    plan_groups,
    sync_schedule,
)
from socflower.peers.ring.settings import RingSettings
from socflower.plain_numbers import plain_numbers
from socflower.strategies.group_replies import SettledRound
from socflower.strategies.methods.group_work import DataParallelWork
from socflower.strategies.methods.groups import Averaging, GroupsMethod, RoundReport
from socflower.strategies.outer_step import ChosenNodes, OuterStep, reproducible_draws
from socflower.strategies.records import aggregate_records
from socflower.strategies.replies import NOT_EVALUATED, failure_event, with_model
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.round import Round
from socflower.strategies.round_planner import RoundPlanner
from socflower.strategies.round_strategy import RoundStrategy, with_more_events
from socflower.strategies.settings import (
    Costs,
    ExchangeSettings,
    Grouping,
    TrainingSchedule,
)
from socflower.wire.message_keys import CONFIG, EVALUATED

__all__ = ["GroupRoundStrategy", "RoundReport", "SoCFlow"]


class GroupRoundStrategy(RoundStrategy[Round, SettledRound]):
    """A strategy whose method trains in groups: star for strategies around it, evaluation by nodes.

    `method` has the plan's details: `exchanges`, `transport`, `leader_transport`, `intervals`.
    """

    method: GroupsMethod
    reports: list[RoundReport]

    def __init__(self, method: GroupsMethod, outer: OuterStep | None, seed: int) -> None:
        super().__init__(method, outer)
        self._seed = seed
        self.fraction_evaluate = (
            0.0 if outer is None else float(getattr(outer.strategy, "fraction_evaluate", 1.0))
        )

    @property
    def plan(self) -> GroupPlan:
        """The plan of the latest round."""
        return self.method.plan

    def _before_opening(self) -> None:
        if not self._is_started:
            self.method.require_each_model("the strategy around it")

    def _try_outer(
        self, outer: OuterStep, this: Round, arrays: ArrayRecord, config: ConfigRecord
    ) -> None:
        outer.refuse_unfit(
            this.server_round, arrays, config, len(this.plan.groups), in_rings=this.in_rings
        )

    def _for_outer(self, settled: SettledRound, merged: ArrayRecord) -> Sequence[Message]:
        assert self.round is not None
        if not self.round.leaders_meet:
            return settled.usable
        # A strategy that takes the mean of models takes the same of as many means.
        return [with_model(reply, merged) for reply in settled.usable]

    # ------------------------------------------------------------------------------ evaluation by nodes
    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Address nodes of the plan as the outer strategy samples them, reproducibly; none without one."""
        super().configure_evaluate(server_round, arrays, config, grid)
        if not self._nodes_evaluate(server_round):
            return []
        assert self.outer is not None
        strategy, chosen = self.outer.strategy, self.method.nodes_for_evaluation(grid)
        nodes = list(chosen.soc_of_node)
        needed = max(
            int(getattr(strategy, key, 1)) for key in ("min_evaluate_nodes", "min_available_nodes")
        )
        # Flower would wait for more.
        if len(nodes) < needed:
            self._add_events(
                [
                    f"round {server_round} is not evaluated by nodes: {self.outer.name} asks for {needed}, "
                    f"and {len(nodes)} are available"
                ]
            )
            return []
        with reproducible_draws(f"{self._seed} {server_round}"):
            messages = strategy.configure_evaluate(
                server_round, arrays, ConfigRecord(dict(config)), ChosenNodes(grid, nodes)
            )
        participant_of = chosen.participant_of
        return [
            _own_evaluation(
                message,
                participant_of[chosen.soc_of_node[message.metadata.dst_node_id]],
                len(participant_of),
            )
            for message in sorted(
                messages, key=lambda message: nodes.index(message.metadata.dst_node_id)
            )
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate as the outer strategy does, in the order of the SoCs; failures are events of the round."""
        if not self._nodes_evaluate(server_round):
            return None
        assert self.outer is not None and self.round is not None
        soc_of = {node: soc for soc, node in self.round.node_of.items()}
        ordered = sorted(replies, key=lambda reply: soc_of.get(reply.metadata.src_node_id, -1))
        self._add_events(
            [
                failure_event(reply, 0, f"evaluation, node {reply.metadata.src_node_id}").text
                for reply in ordered
                if reply.has_error()
            ]
        )
        return self.outer.strategy.aggregate_evaluate(server_round, ordered)

    def _nodes_evaluate(self, server_round: int) -> bool:
        is_asked = self.outer is not None and bool(self.fraction_evaluate)
        return is_asked and self.round is not None and not self.is_done(server_round)

    def _add_events(self, texts: Sequence[str]) -> None:
        """Add events of the evaluation to the report of the round."""
        for text in texts:
            log(WARNING, "evaluation: %s", text)
        events = [ReplyEvent(kind=NOT_EVALUATED, group_id=0, text=text) for text in texts]
        self.reports[-1] = with_more_events(self.reports[-1], events)


def _own_evaluation(message: Message, participant: int, num_participants: int) -> Message:
    """Return the message with the node's partition of the data, which is its SoC's as a member of a group."""
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    own = ConfigRecord({**config, EVALUATED: [participant, num_participants]})
    metadata = message.metadata
    return Message(
        RecordDict({**message.content, CONFIG: own}),
        metadata.dst_node_id,
        metadata.message_type,
        group_id=metadata.group_id,
    )


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
    average : function, optional
        Another rule than the average by samples: `(models, samples)` of the groups, in their order, to the next model.
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

    def __init__(
        self,
        *,
        cluster: Cluster,
        schedule: TrainingSchedule,
        groups: int | Grouping | GroupPlan = 1,
        costs: Costs = Costs(),
        exchange: ExchangeSettings = ExchangeSettings(),
        rings: RingSettings = RingSettings(),
        rebalancing: Rebalancing | None = None,
        outer: Strategy | None = None,
        average: Averaging | None = None,
        tolerate_client_errors: bool = False,
    ) -> None:
        name = type(self).__name__
        _require_types(
            name,
            cluster=cluster,
            schedule=schedule,
            groups=groups,
            costs=costs,
            exchange=exchange,
            rings=rings,
            rebalancing=rebalancing,
            tolerate_client_errors=tolerate_client_errors,
        )
        model_name = costs.model_profile.name if costs.model_profile else ""
        rates = sustained_rates(cluster, model_name, costs.pricing)
        if not isinstance(groups, GroupPlan):
            counts = groups if isinstance(groups, Grouping) else Grouping(num_groups=groups)
            groups = plan_groups(cluster, counts.num_groups, counts.num_socs, rates)
        steps_per_epoch, intervals = intervals_of(schedule, len(groups.groups))
        step = None
        if outer is not None:
            step = OuterStep(outer, len(groups.groups), len(groups.participants))
            _refuse_beside_outer(name, step, average, schedule)
        self._work = DataParallelWork(
            cluster=cluster,
            schedule=schedule,
            plan=groups,
            costs=costs,
            exchange=exchange,
            rebalancing=rebalancing,
            intervals=intervals,
            steps_per_epoch=steps_per_epoch,
            hub_decides=outer is not None,
        )
        method = GroupsMethod(
            cluster=cluster,
            schedule=schedule,
            planner=RoundPlanner(cluster, groups, rates, rebalancing),
            intervals=intervals,
            steps_per_epoch=steps_per_epoch,
            work=self._work,
            exchange=exchange,
            rings=rings,
            average=average or aggregate_records,
            needs_each_model=_needs_each_model(step, average),
            proximal_mu=0.0 if step is None else step.proximal_mu,
            tolerate_client_errors=tolerate_client_errors,
        )
        super().__init__(method, step, schedule.seed)

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
    "groups": ((int, Grouping, GroupPlan), "a whole number, Grouping(…) or a GroupPlan"),
    "costs": ((Costs,), "Costs(…)"),
    "exchange": ((ExchangeSettings,), "ExchangeSettings(…)"),
    "rings": ((RingSettings,), "RingSettings(…)"),
    "rebalancing": ((Rebalancing, type(None)), "Rebalancing(…) or None"),
    "tolerate_client_errors": ((bool,), "True or False"),
}


def intervals_of(schedule: TrainingSchedule, num_groups: int) -> tuple[int, Sequence[SyncInterval]]:
    """Return the steps of an epoch and the interval of each round (F3)."""
    steps_per_epoch = group_steps_per_epoch(schedule.num_samples, num_groups, schedule.batch_size)
    intervals = sync_schedule(
        schedule.num_epochs,
        steps_per_epoch,
        schedule.interval_epochs,
        server_interval=schedule.server_interval,
    )
    return steps_per_epoch, intervals


def _require_types(name: str, **settings: object) -> None:
    for key, value in settings.items():
        kinds, expected = _TYPES[key]
        require_type(name, kinds, expected, **{key: value})


def _refuse_beside_outer(
    name: str, outer: OuterStep, average: Averaging | None, schedule: TrainingSchedule
) -> None:
    """Raise `ConfigError` for settings that an outer strategy would replace."""
    if average is not None:
        raise ConfigError(
            f"{name}: average is a rule of its own, which outer = {outer.name}(…) would replace; give "
            "one of the two"
        )
    if schedule.server_interval > 1:
        raise ConfigError(
            f"{name}: server_interval = {schedule.server_interval}, and outer = {outer.name}(…) makes "
            "one model of all groups' at every synchronisation; leave one of the two out"
        )


def _needs_each_model(outer: OuterStep | None, average: Averaging | None) -> str:
    """Return what needs each group's model at the hub; empty if their mean is enough."""
    if outer is not None and not outer.takes_mean:
        return f"outer = {outer.name}(…)"
    return "average, a rule of its own," if average is not None else ""
