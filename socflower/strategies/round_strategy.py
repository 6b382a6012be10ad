"""The Flower strategy that is common to all methods: hooks, the outer step, events, reports and resuming.

A round reads from top to bottom in `configure_train` and `aggregate_train`: the method opens it, settles its
replies and merges them into one model; the outer step may make another model of them; the round is priced
and reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Generic, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.flower_adapter import log
from socflower.plain_numbers import plain_numbers
from socflower.quantities import counted
from socflower.strategies.method import Method, NodesForEvaluation, OuterModels, RoundT, SettledT
from socflower.strategies.outer_step import (
    ChosenNodes,
    OuterStep,
    refuse_integers_clipped,
    reproducible_draws,
)
from socflower.strategies.planned_rounds import PlannedRounds
from socflower.strategies.replies import (
    NOT_EVALUATED,
    OUTER_STEP,
    failure_event,
    num_examples_of,
)
from socflower.strategies.reply_events import ReplyEvent
from socflower.wire.message_keys import CONFIG, EVALUATED, GROUP_ID, METRICS, NUM_EXAMPLES


class RoundStrategy(PlannedRounds, Generic[RoundT, SettledT]):
    """A strategy whose rounds are those of a method.

    It and its presets have more than fifteen public members, since Flower calls seven of them.

    Parameters
    ----------
    method : Method
        What a round is.
    outer : Strategy, optional
        A strategy of Flower's that makes the next model of the models that replies bring; by default the method's own
        rule does. Its settings of federated evaluation hold for nodes.
    num_models : int
        How many models a round brings; `outer` makes one of them.

    Attributes
    ----------
    round : OpenRound or None
        The latest round, from its messages on.
    reports : list
        What came of each round.
    """

    def __init__(
        self,
        method: Method[RoundT, SettledT],
        outer: Strategy | None = None,
        num_models: int = 1,
    ) -> None:
        if outer is not None and method.outer_models is None:
            raise ConfigError(f"{type(self).__name__} takes no outer strategy; leave outer out")
        self.method = method
        # None only without an outer strategy.
        self._outer_models = cast(OuterModels[RoundT, SettledT], method.outer_models)
        self.outer = None if outer is None else OuterStep(outer, num_models, len(method.socs))
        self.fraction_evaluate = (
            0.0 if outer is None else float(getattr(outer, "fraction_evaluate", 1.0))
        )
        self.round: RoundT | None = None
        self.reports: list[Any] = []
        self._evaluating: NodesForEvaluation | None = None

    @property
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""
        return self.method.num_rounds

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **named_args: Any,
    ) -> Result:
        """Train as every strategy does; see `PlannedRounds.start`."""
        self._is_started = True
        return super().start(grid, initial_arrays, num_rounds, *args, **named_args)

    def train_round(
        self,
        server_round: int,
        grid: Grid,
        arrays: ArrayRecord,
        *,
        timeout_s: float,
        train_config: ConfigRecord,
    ) -> ArrayRecord:
        """Train one round and return the next model; `start` then continues after this round.

        For a training that is watched round by round, as a warm-up is; nodes do not evaluate.
        """
        self._is_started = True
        config = ConfigRecord(dict(train_config))
        messages = self.configure_train(server_round, arrays, config, grid)
        replies = grid.send_and_receive(messages, timeout=timeout_s)
        merged, _ = self.aggregate_train(server_round, replies)
        self.resumed_after = server_round
        return merged or arrays

    _is_started = False
    """Whether it is started itself, and not a strategy around it."""

    def summary(self) -> None:
        """Log the plan."""
        *lines, last = self.method.describe().lines
        for line in lines:
            log(INFO, "\t├──> %s", line)
        log(INFO, "\t└──> %s", last)

    # ------------------------------------------------------------------------------------------- a round
    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Return the messages of the method's next round; none in a round that was done before a resume."""
        self._announce(grid, arrays)
        if not self._begins(server_round):
            return []
        is_first = self.round is None
        if not self._is_started:
            # Nothing tells what a strategy around this one does with the models; Flower's own clip them.
            self.method.require_each_model("the strategy around it")
            refuse_integers_clipped(arrays)
        self.round, messages = self.method.open(server_round, arrays, config, grid)
        if is_first and self.outer is not None:
            clients = self._outer_models.clients(self.round)
            self.outer.refuse_unfit(server_round, arrays, config, *clients)
        return messages

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model and the mean of the metrics; broken replies are dropped and reported.

        Raises `TrainingFailed` if no reply is left, or if a client raised and that is not tolerated.
        """
        if not self._ends(server_round):
            return None, None
        assert self.round is not None
        this = self.round
        settled = self.method.settle(this, list(replies))
        arrays: ArrayRecord | None = self.method.merge(this, settled)
        metrics, events = mean_of_metrics(settled.usable), [*settled.events]
        if self.outer is not None:
            given = self._outer_models.models(this, settled, cast(ArrayRecord, arrays))
            arrays, metrics, more = _next_model(self.outer, server_round, this.sent, given, metrics)
            events += more
        if arrays is not None:
            arrays = self.method.complete(this, arrays)
        for event in events:
            log(WARNING, "aggregate_train: %s", event.text)
        usage = self.method.price(this, settled)
        self.reports.append(self.method.report(this, settled, usage, tuple(events)))
        return arrays, metrics

    # ------------------------------------------------------------------------------ evaluation by nodes
    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Address nodes of the round as the outer strategy samples them, reproducibly; none without one."""
        super().configure_evaluate(server_round, arrays, config, grid)
        if not self._nodes_evaluate(server_round):
            return []
        assert self.outer is not None and self.round is not None
        self._evaluating = chosen = self._outer_models.nodes(self.round, grid)
        strategy, nodes = self.outer.strategy, list(chosen.soc_of_node)
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
        with reproducible_draws(f"{self.method.seed} {server_round}"):
            messages = strategy.configure_evaluate(
                server_round, arrays, ConfigRecord(dict(config)), ChosenNodes(grid, nodes)
            )
        ordered = sorted(messages, key=lambda message: nodes.index(message.metadata.dst_node_id))
        return [_own_evaluation(message, chosen) for message in ordered]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate as the outer strategy does, in the order of the SoCs; failures are events of the round."""
        if not self._nodes_evaluate(server_round):
            return None
        assert self.outer is not None and self._evaluating is not None
        soc_of = self._evaluating.soc_of_node
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
        report = self.reports[-1]
        self.reports[-1] = replace(report, events=(*report.events, *events))

    # ------------------------------------------------------------------------------------------ resuming
    @property
    def state(self) -> dict[str, Any]:
        """The state besides the weights that the next rounds depend on, as keyword arguments for `resume_from`."""
        moments: Mapping[str, NDArray[Any]] = {} if self.outer is None else self.outer.state()
        return {**self.method.save(), "outer": moments}

    @plain_numbers
    def resume_from(
        self,
        server_round: int,
        *,
        outer: Mapping[str, NDArray[Any]] | None = None,
        **state: Any,
    ) -> None:
        """Make `start` continue after `server_round`; see `Resumable.resume_from`. The rest is the `state` then.

        `outer` are the moments of the outer strategy, `state` is that of the method.
        """
        if outer and self.outer is None:
            raise ConfigError(
                f"resume_from: outer has moments, and this {type(self).__name__} has no outer strategy; "
                "give it the one that the training had"
            )
        self._require_round(server_round)
        self.method.restore(server_round, state)
        if self.outer is not None:
            self.outer.restore(outer or {})
        super().resume_from(server_round)


def _next_model(
    outer: OuterStep,
    server_round: int,
    sent: ArrayRecord,
    replies: Sequence[Message],
    metrics: MetricRecord,
) -> tuple[ArrayRecord | None, MetricRecord, list[ReplyEvent]]:
    """Return the outer strategy's model and metrics, and what it could not do."""
    texts = [too_few] if (too_few := outer.too_few(len(replies))) else []
    arrays, metrics = outer.apply(server_round, sent, replies, metrics)
    if arrays is None:
        texts.append(
            f"{outer.name} made no model of {counted(len(replies), 'group')}; the global model stays"
        )
    return arrays, metrics, [ReplyEvent(kind=OUTER_STEP, group_id=0, text=text) for text in texts]


def mean_of_metrics(replies: Sequence[Message]) -> MetricRecord:
    """Return the mean over samples of every scalar metric that all replies have, and the sum of their samples."""
    metrics = [cast(MetricRecord, reply.content[METRICS]) for reply in replies]
    samples = [num_examples_of(reply) for reply in replies]
    common = set.intersection(*(set(metric) for metric in metrics)) - {NUM_EXAMPLES, GROUP_ID}
    means: dict[str, int | float] = {}
    for key in sorted(common):
        values = [metric[key] for metric in metrics]
        if all(isinstance(value, int | float) for value in values):
            weighted = [
                float(cast(float, value)) * weight
                for value, weight in zip(values, samples, strict=True)
            ]
            means[key] = sum(weighted) / sum(samples)
    return MetricRecord({**means, NUM_EXAMPLES: int(sum(samples))})


def _own_evaluation(message: Message, chosen: NodesForEvaluation) -> Message:
    """Return the message with the node's part of the data, if that is another than its own."""
    if chosen.participant_of is None:
        return message
    metadata = message.metadata
    participant = chosen.participant_of[chosen.soc_of_node[metadata.dst_node_id]]
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    own = ConfigRecord({**config, EVALUATED: [participant, len(chosen.participant_of)]})
    return Message(
        RecordDict({**message.content, CONFIG: own}),
        metadata.dst_node_id,
        metadata.message_type,
        group_id=metadata.group_id,
    )
