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
from socflower.strategies.changing_plan import ChangingPlan
from socflower.strategies.mixed_replies import client_events, group_id_of, mean_metric, mixed_phases
from socflower.strategies.records import aggregate_records
from socflower.strategies.replies import ReplyEvent, heat_events, sort_replies
from socflower.strategies.resuming import EvaluateFn, Resumable
from socflower.strategies.rings import Places, RingRound, RingSettings, outcome_of
from socflower.strategies.roster import is_question
from socflower.strategies.round_grid import OpenRound, RoundGrid, require_exchange
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
    """What one round (one interval between synchronisations) did; the newest is `strategy.reports[-1]`."""

    server_round: int
    epoch: float  # epochs done at its end
    usage: Usage  # of this round alone; zero without a clock and a profile
    events: tuple[ReplyEvent, ...]
    alpha: float | None = None  # of mixed precision: mean confidence over groups (F9)
    cpu_share: float | None = None  # and the share of the samples that CPUs had (F11)
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
        Logical groups N; see `profile_group_count` for choosing it (F2). Not beside a `plan`, which has its own.
    num_samples, batch_size, num_epochs : int
        Size of the training set, batch of a group, and passes over the data.
    num_socs : int, optional
        How many of the cluster's slots take part; default all.
    interval_epochs : float or "decay"
        Epochs between synchronisations, or the paper's schedule 0.25, 0.5, 1, 2 (F3).
    reshuffle : bool
        Deal all data anew to the groups at synchronisations, those that end an epoch; off where data must stay where
        they are.
    seed : int
        Of the order of the data.
    plan : GroupPlan, optional
        A plan made elsewhere.
    model_profile, clock : ModelProfile and VirtualClock, optional
        Together they make virtual time and energy. Without a clock the grid's is used, if it has one (the `local`
        engine's has), so that the same app runs on every engine.
    pricing : Pricing
        What the clients' arithmetic costs: default FP32 on each device's default processor; `Int8Pricing()` or
        `MixedPricing(rule=…)` of `socflower.precision.processor_costs` for clients that train so. With mixed precision
        and a profile, clients split batches by the catalogue's throughputs instead of measuring their own machine's.
    sequenced : bool or "auto"
        Whether communication groups take turns (F6). "auto" chooses for every new plan what the clock predicts to take
        less time, at the devices' nominal speeds (F7); without a clock or a profile groups take turns. See `turns`.
    overlap_buckets : int
        Gradient buckets that overlap with the backward pass (F7).
    rings : RingSettings
        How groups exchange gradients on real machines, where nodes have a ring address in their node config.
    rebalancing : Rebalancing, optional
        Let shares of a batch follow the members' measured speeds (F4), and SoCs change groups within their boards so
        that groups are about equally fast (F20). In virtual time speeds are the clock's, in rings what members measure.
    tolerate_client_errors : bool
        Drop and report a client that raises, as one that dies or answers NaN always is, instead of ending the run.
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
            raise ConfigError(f"SoCFlow: nobody reads num_groups = {num_groups}, num_socs = {num_socs} beside a plan, "
                              f"which has {counted(len(plan.groups), 'group')} of "
                              f"{counted(len(plan.participants), 'SoC')}; leave them out")
        self._model_name = model_profile.name if model_profile else ""
        rates = sustained_rates(cluster, self._model_name, pricing)
        self._planning = ChangingPlan(
            cluster, plan or plan_groups(cluster, num_groups, num_socs, rates), rates, rebalancing)
        self.steps_per_epoch = group_steps_per_epoch(num_samples, len(self.plan.groups), batch_size)
        self.intervals: Sequence[SyncInterval] = sync_schedule(num_epochs, self.steps_per_epoch, interval_epochs)
        self.reports: list[RoundReport] = []
        self._cluster = cluster
        self._work = None if model_profile is None else IntervalCosts(
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
        self._turns: tuple[GroupPlan, Turns] | None = None  # and the plan that they were chosen for
        choose_turns(self.plan, serialize_uplinks, None)  # a mistake in it is known now
        self._tolerate_client_errors = tolerate_client_errors
        self._group_of_node: dict[int, Group] = {}
        self._without_state: frozenset[int] = frozenset()
        self._leaders_before: tuple[int, ...] = ()  # of a training that is resumed, by group
        self._rings = rings
        self._overlap_buckets = overlap_buckets
        self._ring_round: RingRound | None = None
        self._open_questions: dict[str, int] = {}  # to nodes that have not answered yet, by message id
        self._failed: list[Message] = []  # replies of this round that say no more than why there is none
        self._round = OpenRound(
            "SoCFlow", "; start it with round_grid(grid) of its SoCFlow, and clients that fail are named")
        self._led_by_others: frozenset[int] = frozenset()
        self.transport = "in process"

    def resume_from(
        self, server_round: int, *, without_state: Collection[int] = (), away: Collection[int] = (),
        planned_without: Collection[int] = (), balance: Mapping[str, Any] | None = None,
    ) -> None:
        """Let `start` go on after `server_round`; see `Resumable.resume_from`.

        Clients must have their groups' states of that round's end, or they raise: without momentum the weights would
        be others. `without_state` are ids of groups that may have none, as those whose reply that round dropped;
        `away` are the SoCs that are not to be planned with, `planned_without` those that the round had not: a group
        with another leader than in that round begins with a new optimiser. `balance` is `balance_state` of then.
        """
        super().resume_from(server_round)
        self._planning.resume(away=away, planned_without=planned_without, balance=balance or {})
        self._leaders_before = tuple(group.leader for group in self.plan.groups)
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
        """Return the grid that a strategy around this one is started with, in place of `grid`.

        `DifferentialPrivacyServerSideFixedClipping(strategy, …).start(strategy.round_grid(grid), …)`: its `start`
        replaces this one's, and would wait for a reply of every node. Through this grid it gets one of each group.
        """
        if isinstance(grid, RoundGrid) and grid.is_of(self._exchange):
            return grid
        return RoundGrid(grid, self._exchange)

    @property
    def asks_clients_to_evaluate(self) -> bool:
        """Never; see `configure_evaluate`."""
        return False

    @property
    def plan(self) -> GroupPlan:
        """The plan of the newest round."""
        return self._planning.now

    @property
    def turns(self) -> Turns:
        """Whether the groups of the newest round's plan take turns, and what decided that."""
        return self._choose_turns()

    @property
    def planned_without(self) -> tuple[int, ...]:
        """SoCs that the newest round was planned without, ascending."""
        return self._planning.planned_without

    @property
    def balance_state(self) -> Mapping[str, Any]:
        """What re-balancing has come to, as plain values for `resume_from`."""
        return self._planning.balancer.state(self.plan)

    @property
    def led_by_others(self) -> frozenset[int]:
        """Groups of the newest round for which not their leader answered: it has no state to resume from."""
        return self._led_by_others

    @property
    def away(self) -> tuple[int, ...]:
        """SoCs that no work is planned for: users have them, or their rings went on without them."""
        return self._planning.roster.away

    @property
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""
        return len(self.intervals)

    def summary(self) -> None:
        """Log the plan."""
        sizes = [len(group.members) for group in self.plan.groups]
        log(INFO, "\t├──> Groups: %d of %d to %d SoCs, %d split over boards, contention %d", len(sizes),
            min(sizes), max(sizes), sum(group.split for group in self.plan.groups), self.plan.contention)
        log(INFO, "\t├──> Communication groups: %d, %s", len(self.plan.communication_groups), _described(self.turns))
        log(INFO, "\t└──> Synchronisations: %d, each after %d to %d of %d steps an epoch", self.num_rounds,
            min(interval.num_steps for interval in self.intervals),
            max(interval.num_steps for interval in self.intervals), self.steps_per_epoch)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> list[Message]:
        """Address every group's leader, in group order, or on real machines every member.

        `config` is the caller's, so it is copied. SoCs that are away are planned without, and asked whether they are
        back.
        """
        self.require_left(server_round)
        if self._clock is None:
            self._use_clock_of(grid)
        planning, roster = self._planning, self._planning.roster
        planning.take_events()
        planning.for_round(grid, self._clock)
        nodes = roster.node_of
        self._group_of_node = {nodes[soc]: group for group in self.plan.groups for soc in group.members}
        interval = self._interval(server_round)
        configs = self._configs(server_round, config)
        self._round.begin(server_round)
        questions = roster.questions(grid, server_round, self._open_questions.values())
        addresses = roster.ring_address_of
        if addresses:
            require_exchange(grid, config)
            self.transport = roster.transport(self._rings.transport)
            self._ring_round = RingRound(
                self.plan.groups, self.plan.communication_groups,
                Places(node_of=nodes, address_of=addresses, participant_of=planning.participant_of), self._rings,
                self.transport, lambda group: self._task(group, interval), configs, arrays,
                serialize_uplinks=self.turns.taken, num_buckets=self._overlap_buckets, group_id=str(server_round),
                tolerate_errors=self._tolerate_client_errors, rebalance_steps=planning.balancer.ring_steps)
            return [*self._ring_round.messages(), *questions]
        self._group_of_node = {nodes[group.leader]: group for group in self.plan.groups}
        return [
            *(Message(RecordDict({ARRAYS: arrays, CONFIG: configs[group.group_id],
                                  GROUP: ConfigRecord(self._task(group, interval).encode())}),
                      nodes[group.leader], MessageType.TRAIN, group_id=str(server_round))
              for group in self.plan.groups),
            *questions,
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the groups' models by samples, in group order; broken replies are dropped and reported.

        Raises `TrainingFailed` if none is left, or if a client raised and that is not tolerated.
        """
        self._round.end()
        replies, planning = [*self._without_answers(replies), *self._failed], self._planning
        self._failed = []
        if self._ring_round is not None:
            planning.events += self._ring_round.events
            planning.roster.leave(self._ring_round.away)
            self._led_by_others = frozenset(self._ring_round.led_by_others)
            self._ring_round = None
        else:
            planning.take_leave({soc for reply in replies if (outcome := outcome_of(reply))
                                 for soc in outcome.preempted})
        for reply in replies:
            planning.balancer.hear(outcome_of(reply))
        usable, dropped = sort_replies(replies, self._group_of_node, tolerate_errors=self._tolerate_client_errors)
        events = (*planning.take_events(), *dropped)
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
        self.require_read(config)  # a strategy around this one may have a start of its own
        self._round.require_ended(server_round)
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing; see `configure_evaluate`."""
        return None

    def _use_clock_of(self, grid: Grid) -> None:
        """Take the grid's clock, if it has one; refuse to price a cluster that is not the grid's."""
        self._clock = getattr(grid, "clock", None)
        if self._clock is None:
            return
        self._turns = None  # now they can be predicted
        if self._work is None:
            log(WARNING, "SoCFlow: without model_profile this engine keeps no virtual time; pass "
                         "model_profile=profile_module(model, example_shape, name)")
        cluster = getattr(grid, "cluster", self._cluster)
        if cluster.boards != self._cluster.boards:
            raise ConfigError(f"SoCFlow: its cluster ({_rack(self._cluster)}) is not the one the engine was given "
                              f"({_rack(cluster)}); describe both by the same cluster file")

    def _choose_turns(self) -> Turns:
        """Return how the newest plan's groups exchange; from now on its work is what is priced."""
        plan = self.plan
        if self._turns is None or self._turns[0] is not plan:
            predict = None
            if self._work is not None:
                self._work = replace(self._work, plan=plan)
                if self._clock is not None:
                    lengths = Counter(interval.num_steps for interval in self.intervals)
                    predict = partial(step_times, self._work, lengths, self._clock)
            turns = choose_turns(plan, self._serialize_uplinks, predict)
            if self._work is not None:
                self._work = replace(self._work, serialize_uplinks=turns.taken)
            self._turns = plan, turns
        return self._turns[1]

    def _interval(self, server_round: int) -> SyncInterval:
        if not 1 <= server_round <= self.num_rounds:
            raise ConfigError(f"SoCFlow: round {server_round} of a plan of {self.num_rounds} rounds; call start with "
                              "num_rounds=strategy.num_rounds")
        return self.intervals[server_round - 1]

    def _configs(self, server_round: int, config: ConfigRecord) -> dict[int, ConfigRecord]:
        """Return each group's settings; those that must have a state to resume from are told so."""
        settings = ConfigRecord({**config, SERVER_ROUND: server_round, PRICED: True})
        configs = {group.group_id: settings for group in self.plan.groups}
        before = self._leaders_before
        if self.resumed_after and server_round == self.resumed_after + 1 and len(before) == len(configs):
            for group in self.plan.groups:
                # As without the interruption: whoever led another group, or none, has no momentum for this one.
                if group.leader == before[group.group_id]:
                    configs[group.group_id] = ConfigRecord(
                        {**settings, RESUMED: group.group_id not in self._without_state})
        return configs

    def _exchange(self, grid: Grid, messages: Iterable[Message], timeout_s: float | None) -> Iterable[Message]:
        """Send a round's messages and return the replies to its work that have content.

        Those to questions are heard here. Errors wait for `aggregate_train`: a strategy around this one may drop the
        whole round for one of them. Raises `TrainingFailed` if nothing else came.
        """
        sent = list(messages)
        if self._ring_round is not None:
            usable = self._ring_round.exchange(grid, sent, timeout_s, self._planning.hear, self._open_questions)
        else:
            replies = self._without_answers(grid.send_and_receive(sent, timeout=timeout_s))
            if not any(message.metadata.message_type == MessageType.TRAIN for message in sent):
                return replies  # of an evaluation
            self._failed = [reply for reply in replies if reply.has_error()]
            usable = [reply for reply in replies if reply.has_content()]
        if not usable:
            self.aggregate_train(self._round.number, [])  # raises the cause, whatever is around this strategy
        return usable

    def _without_answers(self, replies: Iterable[Message]) -> list[Message]:
        """Return the replies to a round's work, and hear those to questions."""
        work = []
        for reply in replies:
            if is_question(reply):
                self._planning.hear(reply)
            else:
                work.append(reply)
        return work

    def _task(self, group: Group, interval: SyncInterval) -> GroupTask:
        return GroupTask(
            group_id=group.group_id, num_groups=len(self.plan.groups), members=group.members,
            partitions=tuple(self._planning.participant_of[soc] for soc in group.members),
            num_partitions=len(self._planning.participant_of),
            capacities=self._planning.balancer.capacities(group), first_step=interval.first_step,
            num_steps=interval.num_steps, steps_per_epoch=self.steps_per_epoch,
            total_steps=self.intervals[-1].first_step + self.intervals[-1].num_steps,
            batch_size=self._batch_size, reshuffle=self._reshuffle,
            deal_epoch=interval.deal_epoch, seed=self._seed, num_samples=self._num_samples,
            npu_ratios=self._npu_ratios(group),
        )

    def _npu_ratios(self, group: Group) -> tuple[float, ...]:
        """Return each member's beta by the catalogue (F10); none where clients should measure, or need none."""
        if self._work is None or not isinstance(self._pricing, MixedPricing):
            return ()
        return tuple(self._pricing.npu_ratio(self._model_name, self._cluster.device_of(soc)) for soc in group.members)

    def _price(self, interval: SyncInterval, replies: Sequence[Message]) -> Usage:
        self._choose_turns()
        if self._clock is None or self._work is None:
            return Usage()
        phases: Sequence[Phase] = ()
        if isinstance(self._pricing, MixedPricing):
            phases = mixed_phases(replies, interval.num_steps, self._pricing)
        return self._planning.take_rest() + self._work.run(interval, self._clock, phases,
                                                           self._planning.balancer.in_use)


def _described(turns: Turns) -> str:
    """Return how groups exchange, for the log."""
    said = "taking turns" if turns.taken else "running freely"
    return said + {
        ASKED: ", as asked for", PREDICTED: ", which is predicted to be faster",
        NO_SHARED_UPLINK: ", as no two share an uplink",
        NOT_PREDICTED: ": without a clock and a model_profile nothing predicts whether running freely is faster; "
                       "serialize_uplinks=False runs freely"}[turns.decided_by]


def _rack(cluster: Cluster) -> str:
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
