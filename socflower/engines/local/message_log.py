"""The results of a run's messages: whether a client succeeded, and otherwise the first cause."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, Message, MessageType

from socflower.engines import legacy_api
from socflower.errors import TrainingFailed
from socflower.flower_adapter import reason_of
from socflower.hierarchy import first_non_finite
from socflower.wire.message_keys import NUM_EXAMPLES, PRICED, SERVER_ROUND

Answered: TypeAlias = tuple[Message, Message | None]
"""A message and its reply, or None if no reply came in time."""

_SOME, _ALL, _NOTHING = "client-failed", "no-client", "no-message"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageEvent:
    """Failed messages of one exchange, as listed in a result's events."""

    # "client-failed": some messages of an exchange failed; "no-client": all of them; "no-message":
    # none was ever sent.
    kind: str
    text: str
    # None if the messages do not name it.
    round: int | None = None


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """Results of messages of one kind that were sent together."""

    # Such as "round 3: ".
    where: str
    pulled: bool
    num_sent: int = 0
    # The SoC, and why its message failed.
    failed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def first_cause(self) -> str:
        """The cause of the lowest SoC, since strategies send messages in any order."""
        return min(self.failed)[1] if self.failed else ""


@dataclass(slots=True)
class MessageLog:
    """Counts sent and answered messages by kind, since strategies may drop failures silently."""

    events: list[MessageEvent] = field(default_factory=list)
    # True while a strategy of Flower's runs, which would continue with unchanged weights.
    ends_failed_rounds: bool = False
    _exchanges: dict[str, list[_Exchange]] = field(default_factory=dict)

    def record(
        self, exchanged: Sequence[Answered], soc_of_node: dict[int, int], *, pulled: bool = False
    ) -> None:
        """Record messages that were sent together; `soc_of_node` maps their nodes to SoCs.

        Messages that were `pulled` may be part of an exchange: they are added to the preceding ones of their round.
        Raises `TrainingFailed` if all messages of a training round failed and `ends_failed_rounds` is set.
        """
        by_kind: dict[str, list[Answered]] = {}
        for message, reply in exchanged:
            by_kind.setdefault(_kind(message), []).append((message, reply))
        for kind, answered in by_kind.items():
            where = _round(answered[0][0])
            failed = []
            for node, fault in faults(answered):
                soc = soc_of_node[node]
                failed.append((soc, f"SoC {soc} (node {node}): {fault}"))
            failed_all = len(failed) == len(answered)
            exchanges = self._exchanges.setdefault(kind, [])
            if not (pulled and exchanges and exchanges[-1].pulled and exchanges[-1].where == where):
                exchanges.append(_Exchange(where=where, pulled=pulled))
            exchanges[-1].num_sent += len(answered)
            exchanges[-1].failed += failed
            if failed:
                text = (
                    f"{where}{len(failed)} of {len(answered)} {kind} messages failed; "
                    f"first cause: {min(failed)[1]}"
                )
                number = round_of(answered[0][0])
                kind_of_event = _ALL if failed_all else _SOME
                self.events.append(MessageEvent(kind=kind_of_event, text=text, round=number))
            # Strategies of socflower's raise errors themselves.
            is_training = kind == MessageType.TRAIN and not is_priced(answered[0][0])
            if self.ends_failed_rounds and is_training and failed_all:
                raise TrainingFailed(
                    f"{where}no client succeeded: none of {len(answered)} {kind} messages had a "
                    f"usable answer; first cause: {min(failed)[1]}"
                )

    @property
    def failure(self) -> str | None:
        """Why the run failed, with the first cause; None if some client succeeded.

        A run that trains is judged by its TRAIN messages, the last of which determine its weights. Any other run is
        judged by all its messages.
        """
        kinds = self._judged_kinds
        exchanges = [exchange for kind in kinds for exchange in self._exchanges[kind]]
        if exchanges and not any(map(_any_succeeded, exchanges)):
            num_sent = sum(exchange.num_sent for exchange in exchanges)
            return (
                f"no client succeeded: none of {num_sent} {' and '.join(kinds)} messages had a usable answer; "
                f"first cause: {exchanges[0].first_cause}"
            )
        if kinds == [MessageType.TRAIN] and not _any_succeeded(last := exchanges[-1]):
            return (
                f"no client succeeded in the end: none of the last {last.num_sent} {MessageType.TRAIN} messages "
                f"had a usable answer; first cause: {last.where}{last.first_cause}"
            )
        return None

    @property
    def first_cause(self) -> str:
        """The first client that failed among the messages of `failure`, and its fault."""
        exchanges = [exchange for kind in self._judged_kinds for exchange in self._exchanges[kind]]
        judged = exchanges[-1:] if any(map(_any_succeeded, exchanges)) else exchanges[:1]
        return judged[0].first_cause if judged else ""

    @property
    def has_work(self) -> bool:
        """Whether messages of training or evaluation were exchanged."""
        return bool({MessageType.TRAIN, MessageType.EVALUATE} & set(self._exchanges))

    def require_success(self) -> None:
        """Raise `TrainingFailed` if the run failed; add an event if it sent no message."""
        failure = self.failure
        if failure is not None:
            raise TrainingFailed(failure)
        if not self._exchanges:
            self.events.append(
                MessageEvent(kind=_NOTHING, text="the ServerApp sent no message to any client")
            )

    def documents(self) -> list[dict[str, Any]]:
        """Return the events as documents of a result."""
        return [
            {"kind": event.kind, "text": event.text, "round": event.round} for event in self.events
        ]

    @property
    def _judged_kinds(self) -> list[str]:
        return (
            [MessageType.TRAIN] if MessageType.TRAIN in self._exchanges else list(self._exchanges)
        )


def _any_succeeded(exchange: _Exchange) -> bool:
    return len(exchange.failed) < exchange.num_sent


def faults(answered: Sequence[Answered]) -> list[tuple[int, str]]:
    """Return node and fault of each message without a usable reply."""
    found = []
    for message, reply in answered:
        fault = _fault(reply)
        if fault is None and reply is not None and _kind(message) == MessageType.TRAIN:
            fault = _not_finite(reply, message) or fault_of_num_examples(reply)
        if fault is not None:
            found.append((message.metadata.dst_node_id, fault))
    return found


def _kind(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def round_of(message: Message) -> int | None:
    """Return the round that a message names, if any; strategies of Flower and of socflower name it."""
    for record in message.content.config_records.values():
        if isinstance(server_round := record.get(SERVER_ROUND), int):
            return server_round
    return legacy_api.round_of(message)


def is_priced(message: Message) -> bool:
    """Return whether a strategy of socflower's sent the message, and charges the clock for it itself."""
    return any(PRICED in record for record in message.content.config_records.values())


def _round(message: Message) -> str:
    """Return "round 3: " if the message names its round."""
    number = round_of(message)
    return "" if number is None else f"round {number}: "


def _fault(reply: Message | None) -> str | None:
    if reply is None:
        return "no reply in time"
    if not reply.has_error():
        return legacy_api.fault_of(reply)
    return reason_of(reply)


def _not_finite(reply: Message, message: Message) -> str | None:
    for key, record in reply.content.array_records.items():
        name = _first_non_finite(record, message.content.array_records.get(key, ArrayRecord()))
        if name is not None:
            return f"its weights are not finite, {name} first; a lower learning rate may help"
    return None


def _first_non_finite(record: ArrayRecord, sent: ArrayRecord) -> str | None:
    """Return the first array with values that are not finite although the sent ones were."""
    for name, array in record.items():
        # The app's own serialisation may raise.
        with suppress(TypeError, ValueError, EOFError):
            own = {name: array.numpy()}
            if first_non_finite(own) and first_non_finite(
                own, {name: sent[name].numpy()} if name in sent else {}
            ):
                return name
    return None


def metric(reply: Message, key: str) -> float | None:
    """Return a number from the first metric record with this key, or None."""
    for record in reply.content.metric_records.values():
        value = record.get(key)
        if isinstance(value, int | float):
            return value
    return None


def num_examples_of(reply: Message) -> float | None:
    """Return the number of examples that a client reports, or None."""
    value = metric(reply, NUM_EXAMPLES)
    return legacy_api.num_examples_of(reply) if value is None else value


def fault_of_num_examples(reply: Message) -> str | None:
    """Return the fault of the client's number of examples, or None; a missing number is no fault."""
    value = num_examples_of(reply)
    if value is None or (math.isfinite(value) and value >= 0):
        return None
    return f"its {NUM_EXAMPLES} is {value:g}, which is no number of examples"
