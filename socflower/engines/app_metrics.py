"""Metrics of any Flower app by round, with the virtual time at each round's end.

They are those of the `Result` of the app's strategy. An app that exchanges messages without `Strategy.start` has the
mean metrics of its replies instead, weighted by their number of examples.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from socflower.cluster import FP32, Usage
from socflower.engines.local.message_log import MessageLog, round_of
from socflower.engines.trained_devices import TrainedDevices
from socflower.sim import EventClock
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.resuming import PlannedRounds, innermost, refuse_too_many_rounds
from socflower.wire.message_keys import NUM_EXAMPLES

SERVER, EVALUATE, TRAIN = "server", "evaluate", "train"
"""Where metrics come from: the ServerApp's evaluation, the clients' evaluation, the clients' training."""

Metrics: TypeAlias = dict[str, Any]
OnRound: TypeAlias = Callable[[dict[str, Any]], None]

_WORDS = {"accuracy": {"accuracy", "acc"}, "loss": {"loss"}}


class RoundLog:
    """The rounds of one app: metrics, and clock, energy and bytes at the end of each."""

    def __init__(self, clock: EventClock, on_round: OnRound = lambda entry: None) -> None:
        self.strategy = ""  # name of the class that was started last
        self.arrays: ArrayRecord | None = None  # of the last result
        self.devices: TrainedDevices | None = None  # of the clients that trained
        self.priced_in = FP32.arithmetic  # the arithmetic that the strategy prices, as of `DeviceReport`
        self._clock, self._on_round, self._started_s = clock, on_round, perf_counter()
        self._rounds: dict[int, dict[str, Any]] = {}
        self._replies: dict[tuple[str, int], list[Metrics]] = {}
        self._open: int | None = None

    def enter(self, number: int) -> None:
        """Begin a round, or go on with it; the end of the one before is now."""
        if number != self._open:
            self.close()
            self._open = number
            self._rounds.setdefault(number, {"round": number})

    def close(self) -> None:
        """End the open round, if any."""
        if self._open is None:
            return
        usage = self._clock.usage
        entry = self._rounds[self._open]
        entry |= {"virtual_s": self._clock.now_s, "wall_s": perf_counter() - self._started_s,
                  "energy_j": usage.total_energy_j, "bytes": usage.bytes_by_tier}
        self._on_round({**self._document(entry), "events": []})
        self._open = None

    def add(self, source: str, number: int, metrics: Mapping[str, Any]) -> None:
        """Set the metrics of a round from one source."""
        self._rounds.setdefault(number, {"round": number})[source] = dict(metrics)

    def add_replies(self, message_type: str, number: int, replies: Sequence[Message]) -> None:
        """Set a round's metrics to the replies' means; metrics that not all of them have are left out."""
        kind = message_type.partition(".")[0]
        source = {MessageType.TRAIN: TRAIN, MessageType.EVALUATE: EVALUATE}.get(kind)
        answered = [_figures(reply) for reply in replies if reply.has_content() and reply.content.metric_records]
        if source and answered:
            known = self._replies.setdefault((source, number), [])
            known += answered
            self.add(source, number, _means(known))

    def add_result(self, strategy: Strategy, result: Result) -> None:
        """Set all rounds' metrics to those of a strategy's result."""
        self.strategy, self.arrays = type(strategy).__name__, result.arrays
        for source, by_round in ((TRAIN, result.train_metrics_clientapp), (EVALUATE, result.evaluate_metrics_clientapp),
                                 (SERVER, result.evaluate_metrics_serverapp)):
            for number, metrics in by_round.items():
                self.add(source, number, metrics)

    @property
    def next_number(self) -> int:
        """The number of a round whose messages have none."""
        return max(self._rounds, default=0) + 1

    def documents(self, events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rounds for a result; `accuracy` and `loss` are None where a round has no such metric.

        The loss is that of the training only in an app that evaluates none in any round.
        """
        self.close()
        by_round: dict[int, list[Mapping[str, Any]]] = {}
        for event in events:
            by_round.setdefault(int(event.get("round") or 0), []).append(event)
        last: dict[str, Any] = {"virtual_s": 0.0, "wall_s": 0.0, "energy_j": 0.0, "bytes": Usage().bytes_by_tier}
        documents = []
        has_evaluated_loss = any(named("loss", entry, (SERVER, EVALUATE)) is not None
                                 for entry in self._rounds.values())
        for number, entry in sorted(self._rounds.items()):
            last = {key: entry.get(key, value) for key, value in last.items()}  # of a round without messages
            documents.append({**self._document(entry), **last, "events": by_round.pop(number, [])})
            if has_evaluated_loss:
                documents[-1]["loss"] = named("loss", entry, (SERVER, EVALUATE))
        return documents

    def _document(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "accuracy": named("accuracy", entry, (SERVER, EVALUATE)),
                "loss": named("loss", entry, (SERVER, EVALUATE, TRAIN))}


def named(word: str, entry: Mapping[str, Any], sources: Sequence[str]) -> float | None:
    """Return the first number of a round that is called by the word, as `eval_acc` and `accuracy` are for accuracy."""
    for source in sources:
        for name, value in entry.get(source, {}).items():
            if isinstance(value, int | float) and _WORDS[word] & set(re.split(r"[^a-z]+", name.lower())):
                return float(value)
    return None


def _figures(reply: Message) -> Metrics:
    """Return the numbers of a reply's metric records."""
    return {name: value for record in reply.content.metric_records.values() for name, value in record.items()
            if isinstance(value, int | float)}


def _means(replies: Sequence[Metrics]) -> Metrics:
    """Return the means of the numbers that all replies have, weighted by examples where all of them say how many."""
    weighted = all(NUM_EXAMPLES in each for each in replies)
    weights = [float(each[NUM_EXAMPLES]) if weighted else 1.0 for each in replies]
    total = sum(weights) or 1.0
    return {name: sum(weight * each[name] for weight, each in zip(weights, replies, strict=True)) / total
            for name in replies[0] if name != NUM_EXAMPLES and all(name in each for each in replies)}


class MeteredGrid(ForwardingGrid):
    """A grid that keeps a round log of its exchanges, and a message log if the inner grid keeps none."""

    def __init__(self, grid: Grid, rounds: RoundLog, messages: MessageLog | None = None) -> None:
        super().__init__(devices := TrainedDevices(grid))
        rounds.devices = devices
        self._rounds, self._messages = rounds, messages
        self._pushed: dict[str, Message] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Exchange messages through the inner grid."""
        sent = list(messages)
        number = self._enter(sent)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        if sent:
            self._rounds.add_replies(sent[0].metadata.message_type, number, replies)
        if self._messages is not None:
            by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
            self._record([(message, by_id.get(message.metadata.message_id)) for message in sent])
        return replies

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push through the inner grid."""
        sent = list(messages)
        self._enter(sent)
        ids = list(self._grid.push_messages(sent))
        self._pushed |= dict(zip(ids, sent, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull through the inner grid."""
        replies = list(self._grid.pull_messages(message_ids))
        answered = [(message, reply) for reply in replies
                    if (message := self._pushed.pop(reply.metadata.reply_to_message_id, None)) is not None]
        for message, reply in answered:
            self._rounds.add_replies(message.metadata.message_type, round_of(message) or self._rounds.next_number - 1,
                                     [reply])
        if self._messages is not None and answered:
            self._record(answered, pulled=True)
        return replies

    def _enter(self, sent: Sequence[Message]) -> int:
        """Return the round of messages, which begins now if its training is sent."""
        number = next((found for message in sent if (found := round_of(message)) is not None), None)
        if number is None:
            is_training = any(message.metadata.message_type.startswith(MessageType.TRAIN) for message in sent)
            number = self._rounds.next_number if is_training else max(1, self._rounds.next_number - 1)
        if any(message.metadata.message_type.partition(".")[0] in (MessageType.TRAIN, MessageType.EVALUATE)
               for message in sent):
            self._rounds.enter(number)
        return number

    def _record(self, answered: Sequence[tuple[Message, Message | None]], *, pulled: bool = False) -> None:
        assert self._messages is not None
        nodes = {*self._grid.get_node_ids(), *(message.metadata.dst_node_id for message, _ in answered)}
        self._messages.record(answered, {node: soc for soc, node in enumerate(sorted(nodes))}, pulled=pulled)


@contextmanager
def observed_strategies(rounds: RoundLog, messages: MessageLog) -> Iterator[None]:
    """Log the results of the strategies that are started in the context, by a wrapper around `Strategy.start`.

    A round of training in which no client succeeded ends them: strategies of Flower's would keep their weights and go
    on. Ours of groups raise themselves.
    """
    original = Strategy.start
    signature = inspect.signature(original)

    @wraps(original)
    def start(*args: Any, **named_args: Any) -> Result:
        bound = signature.bind(*args, **named_args)
        bound.apply_defaults()
        inner = innermost(bound.arguments["self"])
        refuse_too_many_rounds(inner, bound.arguments["num_rounds"])
        rounds.priced_in = getattr(getattr(inner, "pricing", FP32), "arithmetic", FP32.arithmetic)
        evaluate_fn = bound.arguments.get("evaluate_fn")

        def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            found: MetricRecord | None = evaluate_fn(server_round, arrays)
            if server_round == 0:
                rounds.enter(0)
            if found is not None:
                rounds.add(SERVER, server_round, found)
            return found

        if evaluate_fn is not None:
            bound.arguments["evaluate_fn"] = evaluated
        messages.ends_failed_rounds = not isinstance(inner, PlannedRounds)
        try:
            result = original(*bound.args, **bound.kwargs)
        finally:
            messages.ends_failed_rounds = False
        rounds.add_result(bound.arguments["self"], result)
        return result

    # Flower tells nobody but the app of a strategy's Result.
    Strategy.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        Strategy.start = original  # type: ignore[method-assign]
