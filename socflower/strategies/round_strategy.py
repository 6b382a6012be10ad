"""The Flower strategy that is common to all methods: hooks, the outer step, events, reports and resuming.

A round reads from top to bottom in `configure_train` and `aggregate_train`: the method opens it, settles its
replies and merges them into one model; the outer step may make another model of them; the round is priced
and reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Generic, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.quantities import counted
from socflower.strategies.method import Method, RoundT, SettledT
from socflower.strategies.outer_step import OuterStep
from socflower.strategies.planned_rounds import PlannedRounds
from socflower.strategies.replies import OUTER_STEP
from socflower.strategies.reply_events import ReplyEvent
from socflower.wire.message_keys import GROUP_ID, METRICS, NUM_EXAMPLES


class RoundStrategy(PlannedRounds, Generic[RoundT, SettledT]):
    """A strategy whose rounds are those of a method.

    Parameters
    ----------
    method : Method
        What a round is.
    outer : OuterStep, optional
        Makes the next model of the models that replies bring; by default the method's own rule does.

    Attributes
    ----------
    round : OpenRound or None
        The latest round, from its messages on.
    reports : list
        What came of each round.
    """

    def __init__(self, method: Method[RoundT, SettledT], outer: OuterStep | None = None) -> None:
        self.method, self.outer = method, outer
        self.round: RoundT | None = None
        self.reports: list[Any] = []

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

    _is_started = False
    """Whether it is started itself, and not a strategy around it."""

    def summary(self) -> None:
        """Log the plan."""
        *lines, last = self.method.describe()
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
        if not self._begins(server_round):
            return []
        is_first = self.round is None
        self._before_opening()
        self.round, messages = self.method.open(server_round, arrays, config, grid)
        if is_first and self.outer is not None:
            self._try_outer(self.outer, self.round, arrays, config)
        return messages

    def _before_opening(self) -> None:
        """Prepare the method for a round."""

    def _try_outer(
        self, outer: OuterStep, this: RoundT, arrays: ArrayRecord, config: ConfigRecord
    ) -> None:
        """Raise `ConfigError` if the outer strategy cannot take this round's models."""

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
            given = self._for_outer(settled, cast(ArrayRecord, arrays))
            arrays, metrics, more = _next_model(self.outer, server_round, this.sent, given, metrics)
            events += more
        for event in events:
            log(WARNING, "aggregate_train: %s", event.text)
        usage = self.method.price(this, settled)
        self.reports.append(self.method.report(this, settled, usage, tuple(events)))
        return arrays, metrics

    def _for_outer(self, settled: SettledT, merged: ArrayRecord) -> Sequence[Message]:
        """Return the replies that the outer strategy is given."""
        return settled.usable

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
    samples = [float(cast(float, metric[NUM_EXAMPLES])) for metric in metrics]
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


def with_more_events(report: Any, events: Sequence[ReplyEvent]) -> Any:
    """Return a report with events that came after it was made."""
    return replace(report, events=(*report.events, *events))
