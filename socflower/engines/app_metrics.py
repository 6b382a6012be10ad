"""Metrics of any Flower app by round, with the virtual time at each round's end.

They come from the `Result` that the app's strategy fills, or from the `History` of an app of Flower's API before
messages. Metrics that neither has are the means of the replies, weighted by their number of examples. Unknown values
are None in a result, with the reason.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import RLock, get_ident
from time import perf_counter
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from socflower.cluster import FP32, Usage
from socflower.engines import legacy_api
from socflower.engines.local.message_log import MessageLog, num_examples_of, round_of
from socflower.engines.trained_devices import TrainedDevices
from socflower.flower_adapter import History, TrainingRecord
from socflower.quantities import counted
from socflower.sim import EventClock
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.planned_rounds import PlannedRounds
from socflower.strategies.socflow import GroupRoundStrategy
from socflower.wire.message_keys import INTERNAL, NUM_EXAMPLES

SERVER, EVALUATE, TRAIN = "server", "evaluate", "train"
"""Sources of metrics: the ServerApp's evaluation, the clients' evaluation, the clients' training."""

SOURCES = (SERVER, EVALUATE, TRAIN)
PRICED_KEYS = ("virtual_s", "energy_j", "bytes")
"""The keys that are None in rounds and results of an app without any price."""

Metrics: TypeAlias = dict[str, Any]
OnRound: TypeAlias = Callable[[dict[str, Any]], None]

_WORDS = {"accuracy": {"accuracy", "acc"}, "loss": {"loss"}}
_SOURCE_OF = {MessageType.TRAIN: TRAIN, MessageType.EVALUATE: EVALUATE}
_NO_START = "the app trains without Strategy.start of Flower's message API, which returns"


class RoundLog:
    """The rounds of one app: metrics, and clock, energy and bytes at the end of each."""

    def __init__(self, clock: EventClock, on_round: OnRound = lambda entry: None) -> None:
        # The class of the strategy that was started last.
        self.strategy: str | None = None
        # The strategy's groups in the first round.
        self.plan: dict[str, Any] | None = None
        # The devices of the clients that trained.
        self.devices: TrainedDevices | None = None
        # The arithmetic that the strategy prices, as of `DeviceReport`.
        self.priced_in = FP32.arithmetic
        # Messages of training and evaluation that were pushed, which have no price.
        self.num_pushed = 0
        # The threads that exchanged messages.
        self.threads: set[int] = set()
        self._clock, self._on_round, self._started_s = clock, on_round, perf_counter()
        self._rounds: dict[int, dict[str, Any]] = {}
        self._replies: dict[tuple[str, int], list[Metrics]] = {}
        self._open: int | None = None
        self._groups: GroupRoundStrategy | None = None
        # In the order in which the app's trainings began.
        self._records: list[TrainingRecord] = []

    @property
    def has_groups(self) -> bool:
        """Whether the strategy that was started last has groups."""
        return self._groups is not None

    def begin(self, name: str) -> None:
        """Record that a strategy of this class starts."""
        self.strategy, self._groups, self.priced_in = name, None, FP32.arithmetic

    def announce(self, strategy: PlannedRounds) -> None:
        """Record what a strategy of socflower's says of itself; another one around it may have been started."""
        self.strategy = self.strategy or type(strategy).__name__
        self.priced_in = getattr(getattr(strategy, "pricing", FP32), "arithmetic", FP32.arithmetic)
        self._groups = strategy if isinstance(strategy, GroupRoundStrategy) else None

    def follow(self, record: TrainingRecord) -> None:
        """Take metrics from a record that a training of the app fills; later records count more."""
        self._records.append(record)

    def enter(self, number: int) -> None:
        """Begin or continue a round; the previous round ends now."""
        if number != self._open:
            self.close()
            if number and 0 not in self._rounds and self._recorded(0):
                # The app has evaluated its first model, before any message.
                self.enter(0)
                self.close()
            self._open = number
            self._rounds.setdefault(number, {"round": number})
        if number and self.plan is None and self._groups is not None:
            self.plan = self._groups.method.describe().document()

    def close(self) -> None:
        """End the open round, if any."""
        if self._open is None:
            return
        self._read(self._open)
        usage = self._clock.usage
        entry = self._rounds[self._open]
        entry |= {
            "virtual_s": self._clock.now_s,
            "wall_s": perf_counter() - self._started_s,
            "energy_j": usage.total_energy_j,
            "bytes": usage.bytes_by_tier,
        }
        if self._open and not self._clock.now_s:
            # Nothing has had a price yet; zeros would mean that the cluster needs no time.
            entry |= dict.fromkeys(PRICED_KEYS)
        self._on_round({**self._document(entry), "events": []})
        self._open = None

    def _add(self, source: str, number: int, metrics: Mapping[str, Any]) -> None:
        """Set the metrics of a round from one source."""
        self._rounds.setdefault(number, {"round": number})[source] = {
            name: value for name, value in metrics.items() if _is_shown(name, value)
        }

    def _recorded(self, number: int | None) -> list[tuple[TrainingRecord, str, int, Metrics]]:
        """Return what records have of one round, or of all."""
        return [
            (record, source, found, metrics)
            for record in self._records
            for source, found, metrics in _entries_of(record)
            if number in (None, found)
        ]

    def _read(self, number: int | None = None) -> None:
        """Set the metrics of one round, or of all, to those of the records; metrics that they lack are kept."""
        for record, source, found, metrics in self._recorded(number):
            # A history has what the app aggregates, and nothing of what it does not.
            known = (
                self._rounds.get(found, {}).get(source, {}) if isinstance(record, History) else {}
            )
            self._add(source, found, {**known, **metrics})

    def add_replies(self, message_type: str, number: int, replies: Sequence[Message]) -> None:
        """Set a round's metrics to the replies' means; metrics that not all of them have are left out."""
        source = _SOURCE_OF.get(message_type.partition(".")[0])
        answered = [
            figures
            for reply in replies
            if reply.has_content()
            and legacy_api.fault_of(reply) is None
            and (figures := _figures(reply))
        ]
        if source and answered:
            known = self._replies.setdefault((source, number), [])
            known += answered
            self._add(source, number, _means(known))

    @property
    def next_number(self) -> int:
        """The number of a round whose messages have none."""
        return max(self._rounds, default=0) + 1

    def documents(self, events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rounds for a result; `accuracy` and `loss` are None if a round has no such metric.

        The training loss is used only if the app evaluates no loss in any round. Metrics that are not finite are None,
        since JSON has no such numbers; events without a round are in the last round.
        """
        self.close()
        self._read()
        last_number = max(self._rounds, default=0)
        by_round: dict[int, list[Mapping[str, Any]]] = {}
        for event in events:
            number = event.get("round")
            by_round.setdefault(last_number if number is None else int(number), []).append(event)
        last: dict[str, Any] = {
            "virtual_s": 0.0,
            "wall_s": 0.0,
            "energy_j": 0.0,
            "bytes": Usage().bytes_by_tier,
        }
        documents = []
        evaluates_loss = any(
            named("loss", entry, (SERVER, EVALUATE)) is not None for entry in self._rounds.values()
        )
        for number, entry in sorted(self._rounds.items()):
            # A round without messages has no metrics.
            last = {key: entry.get(key, value) for key, value in last.items()}
            document = {**self._document(entry), **last, "events": by_round.pop(number, [])}
            if evaluates_loss:
                document["loss"] = _judged("loss", entry)[0]
            documents.append(
                {
                    key: _finite(value) if key in SOURCES else value
                    for key, value in document.items()
                }
            )
        return documents

    def final_scores(self) -> tuple[dict[str, float | None], dict[str, str]]:
        """Return accuracy and loss of the last round that evaluates them, and the reasons of unknown ones.

        A metric that no round evaluates is missing.
        """
        scores: dict[str, float | None] = {}
        reasons: dict[str, str] = {}
        evaluated = dict.fromkeys(
            name
            for entry in self._rounds.values()
            for source in (SERVER, EVALUATE)
            for name in entry.get(source, ())
        )
        for word, words in _WORDS.items():
            having = [
                entry
                for _, entry in sorted(self._rounds.items())
                if named(word, entry, (SERVER, EVALUATE)) is not None
            ]
            if having:
                scores[word], fault = _judged(word, having[-1])
                if fault:
                    reasons[word] = f"in round {having[-1]['round']} {fault}"
            elif evaluated:
                reasons[word] = (
                    f"no metric that the app evaluates is called {' or '.join(sorted(words))}: it has "
                    f"{', '.join(evaluated)}"
                )
            else:
                reasons[word] = "the app evaluates nothing, on the server or at clients"
        return scores, reasons

    @property
    def arrays(self) -> ArrayRecord | None:
        """The final arrays, of the last Result; None without, or if no round made a model."""
        results = self._results
        return results[-1].arrays or None if results else None

    @property
    def without_weights(self) -> str | None:
        """Why the final weights are unknown; None if they are known."""
        if self.arrays:
            return None
        if not self._results:
            return f"{_NO_START} the final arrays"
        return (
            f"the Result of {self.strategy or 'its strategy'} has no arrays: no round made a model"
        )

    @property
    def without_strategy(self) -> str | None:
        """Why the strategy is unknown; None if it is known."""
        if self.strategy is not None:
            return None
        if self._results:
            return "the app's strategy has a start of its own, which does not call Flower's"
        return "the app starts none by Strategy.start of Flower's message API"

    @property
    def _results(self) -> list[Result]:
        return [record for record in self._records if isinstance(record, Result)]

    @property
    def notes(self) -> list[str]:
        """Notes on metrics that are missing or changed in the rounds."""
        notes = []
        odd = [
            f"{source}/{name} in round {number}: {value}"
            for number, entry in sorted(self._rounds.items())
            for source in SOURCES
            for name, value in entry.get(source, {}).items()
            if _finite(value) != value
        ]
        if odd:
            notes.append(
                f"{counted(len(odd), 'metric')} not finite, and null in the rounds; first {odd[0]}"
            )
        # The strategy charges the clock for the work of groups itself.
        if self.num_pushed and not self.has_groups:
            notes.append(
                f"{counted(self.num_pushed, 'message')} took no virtual time, since the app pushes and pulls "
                "them; send_and_receive has a price"
            )
        if len(self.threads) > 1:
            notes.append(
                f"the app exchanges messages in {len(self.threads)} threads; virtual time is that of one "
                "exchange after the other"
            )
        return notes

    def _document(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        loss = named("loss", entry, SOURCES)
        return {
            **entry,
            "accuracy": _judged("accuracy", entry)[0],
            "loss": loss if loss is None or math.isfinite(loss) else None,
        }


def _entries_of(record: TrainingRecord) -> Iterable[tuple[str, int, Metrics]]:
    """Yield source, round and metrics of what a record of a training has so far."""
    if isinstance(record, Result):
        for source, by_round in (
            (TRAIN, record.train_metrics_clientapp),
            (EVALUATE, record.evaluate_metrics_clientapp),
            (SERVER, record.evaluate_metrics_serverapp),
        ):
            for number, metrics in by_round.items():
                yield source, number, dict(metrics)
        return
    for source, by_name in (
        (TRAIN, record.metrics_distributed_fit),
        (EVALUATE, {"loss": record.losses_distributed}),
        (EVALUATE, record.metrics_distributed),
        (SERVER, {"loss": record.losses_centralized}),
        (SERVER, record.metrics_centralized),
    ):
        for name, values in by_name.items():
            for number, value in values:
                yield source, number, {name: value}


def named(word: str, entry: Mapping[str, Any], sources: Sequence[str]) -> float | None:
    """Return the metric of a round whose name has the word, as `eval_acc` and `accuracy` have for accuracy.

    If a source has several, the name with the fewest words counts: `accuracy` before `top5_accuracy`.
    """
    for source in sources:
        found = []
        for name, value in entry.get(source, {}).items():
            words = [each for each in re.split(r"[^a-z0-9]+", name.lower()) if each]
            if isinstance(value, int | float) and _WORDS[word] & set(words):
                found.append((len(words), float(value)))
        if found:
            return min(found, key=lambda each: each[0])[1]
    return None


def _judged(word: str, entry: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the evaluated accuracy or loss of a round, or None and, for an impossible value, the fault."""
    value = named(word, entry, (SERVER, EVALUATE))
    if value is None:
        return None, ""
    if not math.isfinite(value):
        return None, f"its {word} is {value:g}"
    if word == "accuracy" and not 0.0 <= value <= 1.0:
        return None, f"its accuracy is {value:g}, which is no share from 0 to 1"
    return value, ""


def _is_shown(name: str, value: object) -> bool:
    """Return whether a metric is the app's own and consists of numbers."""
    values = value if isinstance(value, list) else [value]
    return (
        name != NUM_EXAMPLES
        and not name.startswith(INTERNAL)
        and all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    )


def _finite(value: Any) -> Any:
    """Return metrics, or values of one, with None for each that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _figures(reply: Message) -> Metrics:
    """Return the numbers that a reply has as metrics, and its number of examples."""
    metrics = legacy_api.metrics_of(reply)
    if metrics is None:
        metrics = {
            name: value
            for record in reply.content.metric_records.values()
            for name, value in record.items()
        }
    figures = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    num_examples = num_examples_of(reply)
    return figures | ({} if num_examples is None else {NUM_EXAMPLES: num_examples})


def _means(replies: Sequence[Metrics]) -> Metrics:
    """Return the means of the numbers that all replies have, weighted by examples if all replies report them."""
    weighted = all(NUM_EXAMPLES in each for each in replies)
    weights = [float(each[NUM_EXAMPLES]) if weighted else 1.0 for each in replies]
    total = sum(weights) or 1.0
    means = {}
    for name in replies[0]:
        if name != NUM_EXAMPLES and all(name in each for each in replies):
            values = [each[name] for each in replies]
            weighed = [weight * value for weight, value in zip(weights, values, strict=True)]
            means[name] = sum(weighed) / total
    return means


class MeteredGrid(ForwardingGrid):
    """A grid that keeps a round log of its exchanges, and a message log if the inner grid keeps none."""

    def __init__(self, grid: Grid, rounds: RoundLog, messages: MessageLog | None = None) -> None:
        super().__init__(devices := TrainedDevices(grid))
        rounds.devices = devices
        self._rounds, self._messages = rounds, messages
        self._pushed: dict[str, Message] = {}
        # An app may exchange messages in several threads.
        self._lock = RLock()

    def on_strategy(self, strategy: PlannedRounds, arrays: ArrayRecord) -> None:
        """Record a strategy of socflower's, which calls this in each round."""
        self._rounds.announce(strategy)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Exchange messages through the inner grid."""
        sent = list(messages)
        with self._lock:
            if any(map(_is_work, sent)):
                self._rounds.threads.add(get_ident())
            number = self._enter(sent)
            replies = list(self._grid.send_and_receive(sent, timeout=timeout))
            if sent:
                self._rounds.add_replies(sent[0].metadata.message_type, number, replies)
            if self._messages is not None:
                by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
                self._record(
                    [(message, by_id.get(message.metadata.message_id)) for message in sent]
                )
            return replies

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push through the inner grid."""
        sent = list(messages)
        self._enter(sent)
        self._rounds.num_pushed += sum(map(_is_work, sent))
        ids = list(self._grid.push_messages(sent))
        self._pushed |= dict(zip(ids, sent, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull through the inner grid."""
        replies = list(self._grid.pull_messages(message_ids))
        answered = [
            (message, reply)
            for reply in replies
            if (message := self._pushed.pop(reply.metadata.reply_to_message_id, None)) is not None
        ]
        for message, reply in answered:
            self._rounds.add_replies(
                message.metadata.message_type,
                round_of(message) or self._rounds.next_number - 1,
                [reply],
            )
        if self._messages is not None and answered:
            self._record(answered, pulled=True)
        return replies

    def _enter(self, sent: Sequence[Message]) -> int:
        """Return the round of messages, which begins now if its training is sent."""
        number = next((found for message in sent if (found := round_of(message)) is not None), None)
        if number is None:
            is_training = any(
                message.metadata.message_type.startswith(MessageType.TRAIN) for message in sent
            )
            number = (
                self._rounds.next_number if is_training else max(1, self._rounds.next_number - 1)
            )
        if any(map(_is_work, sent)):
            self._rounds.enter(number)
        return number

    def _record(
        self, answered: Sequence[tuple[Message, Message | None]], *, pulled: bool = False
    ) -> None:
        assert self._messages is not None
        nodes = {
            *self._grid.get_node_ids(),
            *(message.metadata.dst_node_id for message, _ in answered),
        }
        self._messages.record(
            answered, {node: soc for soc, node in enumerate(sorted(nodes))}, pulled=pulled
        )


def _is_work(message: Message) -> bool:
    """Return whether a message asks for training or evaluation."""
    return message.metadata.message_type.partition(".")[0] in _SOURCE_OF
