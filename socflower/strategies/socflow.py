"""SoCFlow: synchronous SGD inside groups, delayed synchronisation between them (SoCFlow+ section 3.1)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log

from socflower.cluster import FP32, Cluster, ModelProfile, Pricing, Usage, VirtualClock, sustained_rates
from socflower.errors import ConfigError
from socflower.hierarchy import (
    Group,
    GroupPlan,
    IntervalCosts,
    Phase,
    Rebalancing,
    SyncInterval,
    Turns,
    choose_turns,
    group_steps_per_epoch,
    plan_groups,
    step_times,
    sync_schedule,
)
from socflower.hierarchy.uplink_turns import ASKED, AUTO, NO_SHARED_UPLINK, NOT_PREDICTED, PREDICTED
from socflower.precision.processor_costs import MixedPricing
from socflower.quantities import counted
from socflower.strategies.mixed_replies import client_events, group_id_of, mean_metric, mixed_phases
from socflower.strategies.node_registry import is_query
from socflower.strategies.records import aggregate_records
from socflower.strategies.replies import ReplyEvent, heat_events, sort_replies
from socflower.strategies.resuming import EvaluateFn, Resumable
from socflower.strategies.rings import MemberLocations, RingRound, RingSettings, outcome_of
from socflower.strategies.round_grid import OpenRound, RoundGrid, require_exchange
from socflower.strategies.round_planner import RoundPlanner
from socflower.wire.message_keys import (
    ALPHA,
    ARRAYS,
    CONFIG,
    CPU_SHARE,
    GROUP,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    PRICED,
    RESUMED,
    SERVER_ROUND,
    GroupTask,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReport:
    """The report of one round (one interval between synchronisations); the latest is `strategy.reports[-1]`."""

    server_round: int
    epoch: float  # epochs completed at its end
    usage: Usage  # of this round alone; zero without a clock and a profile
    events: tuple[ReplyEvent, ...]
    alpha: float | None = None  # mixed precision: mean confidence over groups (F9)
    cpu_share: float | None = None  # mixed precision: share of the samples that were trained on CPUs (F11)
    in_turn: bool = False  # whether groups that share an uplink exchanged in turn (F6)


class SoCFlow(Resumable):
    """Group-wise parallelism with delayed aggregation.

    One Flower round is one interval between synchronisations of the groups (F3), so `num_rounds` of `start` must
    be `strategy.num_rounds`. Only group leaders get a message (F8): in simulation a leader's client runs its whole
    group. Nodes are matched with the plan's SoCs in ascending order of their ids.

    Parameters
    ----------
    cluster : Cluster
        The SoCs and their links.
    num_groups : int
        Logical groups N; see `profile_group_count` for choosing it (F2). Not allowed with a `plan`, which has its own.
    num_samples, batch_size, num_epochs : int
        Size of the training set, batch of a group, and passes over the data.
    num_socs : int, optional
        How many of the cluster's slots take part; default all.
    interval_epochs : float or "decay"
        Epochs between synchronisations, or the paper's schedule 0.25, 0.5, 1, 2 (F3).
    reshuffle : bool
        Redistribute all data to the groups at the synchronisations that end an epoch; off where data must not leave
        their node.
    seed : int
        Seed of the order of the data.
    plan : GroupPlan, optional
        A plan to use instead of the one made from `num_groups`.
    model_profile, clock : ModelProfile and VirtualClock, optional
        Both are needed for virtual time and energy. Without a clock, that of the grid is used if it has one (the
        `local` engine's has), so that the same app runs on every engine.
    pricing : Pricing
        The cost of the clients' arithmetic: by default FP32 on each device's default processor; `Int8Pricing()` or
        `MixedPricing(rule=…)` of `socflower.precision.processor_costs` for clients that train this way. With mixed
        precision and a profile, clients split batches by the catalogue's throughputs instead of measured ones.
    serialize_uplinks : bool or "auto"
        Whether communication groups take turns (F6). "auto" chooses for every new plan what the clock predicts to take
        less time, at the devices' nominal speeds (F7); without a clock or a profile groups take turns. See `turns`.
    overlap_buckets : int
        Gradient buckets that overlap with the backward pass (F7).
    rings : RingSettings
        How groups exchange gradients on real machines, if nodes have a ring address in their node config.
    rebalancing : Rebalancing, optional
        Set shares of a batch by the members' measured speeds (F4), and move SoCs between groups of a board so that
        groups are about equally fast (F20). In virtual time, speeds are the clock's; in rings, members measure them.
    tolerate_client_errors : bool
        Drop and report a client that raises instead of ending the run. A client that dies or returns NaN is always
        dropped and reported.
    """

    def __init__(
        self, *, cluster: Cluster, num_groups: int = 1, num_samples: int, batch_size: int, num_epochs: int,
        num_socs: int | None = None, interval_epochs: float | str = "decay", reshuffle: bool = True, seed: int = 1,
        plan: GroupPlan | None = None, clock: VirtualClock | None = None, model_profile: ModelProfile | None = None,
        serialize_uplinks: bool | str = AUTO, overlap_buckets: int = 1, tolerate_client_errors: bool = False,
        pricing: Pricing = FP32, rings: RingSettings = RingSettings(),  # noqa: B008 - a frozen value
        rebalancing: Rebalancing | None = None,
    ) -> None:
        if clock is not None and model_profile is None:
            raise ConfigError("SoCFlow: a clock needs a model_profile to price; make one with profile_module(model, …)")
        if plan is not None and (num_socs is not None or num_groups not in (1, len(plan.groups))):
            raise ConfigError(f"SoCFlow: num_groups = {num_groups}, num_socs = {num_socs} are not used with a plan, "
                              f"which has {counted(len(plan.groups), 'group')} of "
                              f"{counted(len(plan.participants), 'SoC')}; leave them out")
        self._model_name = model_profile.name if model_profile else ""
        rates = sustained_rates(cluster, self._model_name, pricing)
        self._planner = RoundPlanner(
            cluster, plan or plan_groups(cluster, num_groups, num_socs, rates), rates, rebalancing)
        self.steps_per_epoch = group_steps_per_epoch(num_samples, len(self.plan.groups), batch_size)
        self.intervals: Sequence[SyncInterval] = sync_schedule(num_epochs, self.steps_per_epoch, interval_epochs)
        self.reports: list[RoundReport] = []
        self._cluster = cluster
        self._interval_costs = None if model_profile is None else IntervalCosts(
            cluster=cluster, plan=self.plan, profile=model_profile, num_samples=num_samples, batch_size=batch_size,
            steps_per_epoch=self.steps_per_epoch, reshuffle=reshuffle, serialize_uplinks=False,
            overlap_buckets=overlap_buckets, pricing=pricing, rebalancing=rebalancing)
        self._pricing = pricing
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._reshuffle = reshuffle
        self._seed = seed
        self._clock = clock
        self._serialize_uplinks = serialize_uplinks
        self._turns: tuple[GroupPlan, Turns] | None = None  # with the plan for which they were chosen
        choose_turns(self.plan, serialize_uplinks, None)  # validates the argument early
        self._tolerate_client_errors = tolerate_client_errors
        self._group_of_node: dict[int, Group] = {}
        self._without_state: frozenset[int] = frozenset()
        self._resumed_leaders: tuple[int, ...] = ()  # by group, in the round that the training is resumed after
        self._rings = rings
        self._overlap_buckets = overlap_buckets
        self._ring_round: RingRound | None = None
        self._pending_queries: dict[str, int] = {}  # node ids of unanswered status queries, by message id
        self._error_replies: list[Message] = []  # error replies of this round
        self._round = OpenRound(
            "SoCFlow", "; start it with round_grid(grid) of its SoCFlow, and clients that fail are named")
        self._leader_replaced: frozenset[int] = frozenset()
        self.transport = "in process"

    def resume_from(
        self, server_round: int, *, without_state: Collection[int] = (), away: Collection[int] = (),
        planned_without: Collection[int] = (), balance: Mapping[str, Any] | None = None,
    ) -> None:
        """Make `start` continue after `server_round`; see `Resumable.resume_from`.

        Clients must have their groups' states of that round's end, or they raise: without momentum the weights would
        differ. `without_state` are ids of groups that may have none, such as those whose reply was dropped in that
        round. `away` are the SoCs to exclude from plans; `planned_without` are those that the round's plan excluded.
        A group with another leader than in that round starts with a new optimiser. `balance` is the `balance_state`
        of that round.
        """
        super().resume_from(server_round)
        self._planner.restore(away=away, planned_without=planned_without, balance=balance or {})
        self._resumed_leaders = tuple(group.leader for group in self.plan.groups)
        self._without_state = frozenset(without_state)

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run all rounds, as Flower does; see `Strategy.start`."""
        if self._clock is None:
            self._use_clock_of(grid)
        return super().start(self.round_grid(grid), initial_arrays, num_rounds, timeout, train_config,
                             evaluate_config, evaluate_fn)

    def round_grid(self, grid: Grid) -> RoundGrid:
        """Return the grid with which to start a strategy that wraps this one, in place of `grid`.

        `DifferentialPrivacyServerSideFixedClipping(strategy, …).start(strategy.round_grid(grid), …)`: its `start`
        replaces this one's, and would wait for a reply of every node. Through this grid it gets one reply per group.
        """
        if isinstance(grid, RoundGrid) and grid.uses(self._exchange):
            return grid
        return RoundGrid(grid, self._exchange)

    @property
    def asks_clients_to_evaluate(self) -> bool:
        """Never; see `configure_evaluate`."""
        return False

    @property
    def plan(self) -> GroupPlan:
        """The plan of the latest round."""
        return self._planner.plan

    @property
    def turns(self) -> Turns:
        """Whether the groups of the latest plan take turns on shared uplinks, and the reason."""
        return self._choose_turns()

    @property
    def planned_without(self) -> tuple[int, ...]:
        """SoCs that the latest round was planned without, ascending."""
        return self._planner.planned_without

    @property
    def balance_state(self) -> Mapping[str, Any]:
        """The state of re-balancing, as plain values for `resume_from`."""
        return self._planner.balancer.state(self.plan)

    @property
    def leader_replaced(self) -> frozenset[int]:
        """Groups of the latest round for which another member than their leader answered: no state to resume from."""
        return self._leader_replaced

    @property
    def away(self) -> tuple[int, ...]:
        """SoCs excluded from plans: preempted by their users, or dropped by their rings."""
        return self._planner.registry.away

    @property
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""
        return len(self.intervals)

    def summary(self) -> None:
        """Log the plan."""
        sizes = [len(group.members) for group in self.plan.groups]
        log(INFO, "\t├──> Groups: %d of %d to %d SoCs, %d split over boards, contention %d", len(sizes),
            min(sizes), max(sizes), sum(group.split for group in self.plan.groups), self.plan.contention)
        log(INFO, "\t├──> Communication groups: %d, %s", len(self.plan.communication_groups),
            _describe_turns(self.turns))
        log(INFO, "\t└──> Synchronisations: %d, each after %d to %d of %d steps an epoch", self.num_rounds,
            min(interval.num_steps for interval in self.intervals),
            max(interval.num_steps for interval in self.intervals), self.steps_per_epoch)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> list[Message]:
        """Address every group's leader, in group order, or on real machines every member.

        `config` is copied, not changed. SoCs that are away are excluded from the plan, and their nodes are queried.
        """
        self.require_not_done(server_round)
        if self._clock is None:
            self._use_clock_of(grid)
        planner, registry = self._planner, self._planner.registry
        planner.drain_events()
        planner.plan_round(grid, self._clock)
        nodes = registry.node_of
        self._group_of_node = {nodes[soc]: group for group in self.plan.groups for soc in group.members}
        interval = self._interval(server_round)
        configs = self._configs(server_round, config)
        self._round.begin(server_round)
        queries = registry.status_queries(grid, server_round, self._pending_queries.values())
        addresses = registry.ring_address_of
        if addresses:
            require_exchange(grid, config)
            self.transport = registry.transport(self._rings.transport)
            self._ring_round = RingRound(
                self.plan.groups, self.plan.communication_groups,
                MemberLocations(node_of=nodes, address_of=addresses, participant_of=planner.participant_of),
                self._rings,
                self.transport, lambda group: self._task(group, interval), configs, arrays,
                serialize_uplinks=self.turns.taken, num_buckets=self._overlap_buckets, group_id=str(server_round),
                tolerate_errors=self._tolerate_client_errors, rebalance_steps=planner.balancer.ring_steps)
            return [*self._ring_round.messages(), *queries]
        self._group_of_node = {nodes[group.leader]: group for group in self.plan.groups}
        return [
            *(Message(RecordDict({ARRAYS: arrays, CONFIG: configs[group.group_id],
                                  GROUP: ConfigRecord(self._task(group, interval).encode())}),
                      nodes[group.leader], MessageType.TRAIN, group_id=str(server_round))
              for group in self.plan.groups),
            *queries,
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the groups' models by samples, in group order; broken replies are dropped and reported.

        Raises `TrainingFailed` if none is left, or if a client raised and that is not tolerated.
        """
        self._round.end()
        replies, planner = [*self._work_replies(replies), *self._error_replies], self._planner
        self._error_replies = []
        if self._ring_round is not None:
            planner.events += self._ring_round.events
            planner.registry.mark_away(self._ring_round.away)
            self._leader_replaced = frozenset(self._ring_round.leader_replaced)
            self._ring_round = None
        else:
            planner.remove({soc for reply in replies if (outcome := outcome_of(reply))
                            for soc in outcome.preempted})
        for reply in replies:
            planner.balancer.on_outcome(outcome_of(reply))
        usable, dropped = sort_replies(replies, self._group_of_node, tolerate_errors=self._tolerate_client_errors)
        events = (*planner.drain_events(), *dropped)
        for reply in usable:
            group_id = group_id_of(reply)
            events = (*events, *client_events(reply, group_id, f"group {group_id}"),
                      *heat_events(reply, group_id, f"group {group_id}"))
        for event in events:
            log(WARNING, "aggregate_train: %s", event.text)
        interval = self._interval(server_round)
        self.reports.append(RoundReport(
            server_round=server_round, epoch=interval.epoch_end, events=events, usage=self._price(interval, usable),
            alpha=mean_metric(usable, ALPHA), cpu_share=mean_metric(usable, CPU_SHARE), in_turn=self.turns.taken))
        metrics = [cast(MetricRecord, reply.content[METRICS]) for reply in usable]
        samples = [float(cast(float, metric[NUM_EXAMPLES])) for metric in metrics]
        arrays = aggregate_records([cast(ArrayRecord, reply.content[ARRAYS]) for reply in usable], samples)
        return arrays, _weighted_mean(metrics, samples)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> list[Message]:
        """Send nothing: the global model is evaluated by `evaluate_fn` on the server."""
        self.require_no_unused_settings(config)  # a wrapping strategy may have replaced `start`
        self._round.require_ended(server_round)
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing; see `configure_evaluate`."""
        return None

    def _use_clock_of(self, grid: Grid) -> None:
        """Use the grid's clock, if it has one; raise `ConfigError` if the grid's cluster is another one."""
        self._clock = getattr(grid, "clock", None)
        if self._clock is None:
            return
        self._turns = None  # the clock can predict them
        if self._interval_costs is None:
            log(WARNING, "SoCFlow: without model_profile this engine keeps no virtual time; pass "
                         "model_profile=profile_module(model, example_shape, name)")
        cluster = getattr(grid, "cluster", self._cluster)
        if cluster.boards != self._cluster.boards:
            raise ConfigError(f"SoCFlow: its cluster ({_hardware(self._cluster)}) is not the one the engine was "
                              f"given ({_hardware(cluster)}); describe both by the same cluster file")

    def _choose_turns(self) -> Turns:
        """Return how the latest plan's groups exchange, and price that plan from now on."""
        plan = self.plan
        if self._turns is None or self._turns[0] is not plan:
            predict = None
            if self._interval_costs is not None:
                self._interval_costs = replace(self._interval_costs, plan=plan)
                if self._clock is not None:
                    lengths = Counter(interval.num_steps for interval in self.intervals)
                    predict = partial(step_times, self._interval_costs, lengths, self._clock)
            turns = choose_turns(plan, self._serialize_uplinks, predict)
            if self._interval_costs is not None:
                self._interval_costs = replace(self._interval_costs, serialize_uplinks=turns.taken)
            self._turns = plan, turns
        return self._turns[1]

    def _interval(self, server_round: int) -> SyncInterval:
        if not 1 <= server_round <= self.num_rounds:
            raise ConfigError(f"SoCFlow: round {server_round} of a plan of {self.num_rounds} rounds; call start with "
                              "num_rounds=strategy.num_rounds")
        return self.intervals[server_round - 1]

    def _configs(self, server_round: int, config: ConfigRecord) -> dict[int, ConfigRecord]:
        """Return each group's config; in the first round after a resume, with whether a saved state is required."""
        settings = ConfigRecord({**config, SERVER_ROUND: server_round, PRICED: True})
        configs = {group.group_id: settings for group in self.plan.groups}
        before = self._resumed_leaders
        if self.resumed_after and server_round == self.resumed_after + 1 and len(before) == len(configs):
            for group in self.plan.groups:
                # As without the interruption: a leader that is new to the group has no momentum for it.
                if group.leader == before[group.group_id]:
                    configs[group.group_id] = ConfigRecord(
                        {**settings, RESUMED: group.group_id not in self._without_state})
        return configs

    def _exchange(self, grid: Grid, messages: Iterable[Message], timeout_s: float | None) -> Iterable[Message]:
        """Send a round's messages and return the replies to its work that have content.

        Replies to queries are processed here. Error replies are kept for `aggregate_train`, since a wrapping strategy
        may drop the whole round because of one. Raises `TrainingFailed` if all replies are errors.
        """
        sent = list(messages)
        if self._ring_round is not None:
            usable = self._ring_round.exchange(grid, sent, timeout_s, self._planner.on_reply, self._pending_queries)
        else:
            replies = self._work_replies(grid.send_and_receive(sent, timeout=timeout_s))
            if not any(message.metadata.message_type == MessageType.TRAIN for message in sent):
                return replies  # an evaluation
            self._error_replies = [reply for reply in replies if reply.has_error()]
            usable = [reply for reply in replies if reply.has_content()]
        if not usable:
            self.aggregate_train(self._round.number, [])  # raises `TrainingFailed` with the cause
        return usable

    def _work_replies(self, replies: Iterable[Message]) -> list[Message]:
        """Return the replies to a round's work; process those to queries."""
        work = []
        for reply in replies:
            if is_query(reply):
                self._planner.on_reply(reply)
            else:
                work.append(reply)
        return work

    def _task(self, group: Group, interval: SyncInterval) -> GroupTask:
        return GroupTask(
            group_id=group.group_id, num_groups=len(self.plan.groups), members=group.members,
            partitions=tuple(self._planner.participant_of[soc] for soc in group.members),
            num_partitions=len(self._planner.participant_of),
            capacities=self._planner.balancer.capacities(group), first_step=interval.first_step,
            num_steps=interval.num_steps, steps_per_epoch=self.steps_per_epoch,
            total_steps=self.intervals[-1].first_step + self.intervals[-1].num_steps,
            batch_size=self._batch_size, reshuffle=self._reshuffle,
            deal_epoch=interval.deal_epoch, seed=self._seed, num_samples=self._num_samples,
            npu_ratios=self._npu_ratios(group),
        )

    def _npu_ratios(self, group: Group) -> tuple[float, ...]:
        """Return each member's beta from the catalogue (F10); empty if clients measure it or do not need it."""
        if self._interval_costs is None or not isinstance(self._pricing, MixedPricing):
            return ()
        return tuple(self._pricing.npu_ratio(self._model_name, self._cluster.device_of(soc)) for soc in group.members)

    def _price(self, interval: SyncInterval, replies: Sequence[Message]) -> Usage:
        self._choose_turns()
        if self._clock is None or self._interval_costs is None:
            return Usage()
        phases: Sequence[Phase] = ()
        if isinstance(self._pricing, MixedPricing):
            phases = mixed_phases(replies, interval.num_steps, self._pricing)
        return self._planner.drain_idle() + self._interval_costs.run(interval, self._clock, phases,
                                                           self._planner.balancer.in_use)


def _describe_turns(turns: Turns) -> str:
    """Return how groups exchange, for the log."""
    said = "taking turns" if turns.taken else "running freely"
    return said + {
        ASKED: ", as asked for", PREDICTED: ", which is predicted to be faster",
        NO_SHARED_UPLINK: ", as no two share an uplink",
        NOT_PREDICTED: ": without a clock and a model_profile nothing predicts whether running freely is faster; "
                       "serialize_uplinks=False runs freely"}[turns.decided_by]


def _hardware(cluster: Cluster) -> str:
    devices = sorted({board.device.name for board in cluster.boards})
    return f"{counted(cluster.num_socs, 'SoC')} on {counted(len(cluster.boards), 'board')}, {', '.join(devices)}"


def _weighted_mean(metrics: Sequence[MetricRecord], samples: Sequence[float]) -> MetricRecord:
    """Return the mean over samples of every scalar metric that all replies have."""
    common = set.intersection(*(set(metric) for metric in metrics)) - {NUM_EXAMPLES, GROUP_ID}
    means: dict[str, int | float] = {
        key: sum(float(cast(float, metric[key])) * weight for metric, weight in zip(metrics, samples, strict=True))
        / sum(samples)
        for key in sorted(common) if all(isinstance(metric[key], int | float) for metric in metrics)
    }
    return MetricRecord({**means, NUM_EXAMPLES: int(sum(samples))})
