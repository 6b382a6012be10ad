"""What became of a run's messages: whether any client did what it was asked, and the first cause if none did."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType

from socflower.cluster.protocol import SERVER_ROUND
from socflower.errors import TrainingFailed

Answered: TypeAlias = tuple[Message, Message | None]
"""A message and its reply, or None if there was none in time."""

_SOME, _ALL, _NOTHING = "client-failed", "no-client", "no-message"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageEvent:
    """Messages of one exchange that came to nothing, as a result tells of them."""

    kind: str  # "client-failed": some of an exchange; "no-client": all of it; "no-message": none was ever sent
    text: str


@dataclass(slots=True)
class MessageLog:
    """Counts what was sent and answered, by the kind of message; strategies may drop failures without a word."""

    events: list[MessageEvent] = field(default_factory=list)
    _sent: Counter[str] = field(default_factory=Counter)
    _answered: Counter[str] = field(default_factory=Counter)  # with what can be used
    _first_cause: dict[str, str] = field(default_factory=dict)

    def note(self, exchanged: Sequence[Answered], soc_of_node: dict[int, int]) -> None:
        """Take in messages that were sent together; `soc_of_node` says where they went."""
        failures: dict[str, list[tuple[Message, str]]] = {}
        num_sent = Counter(_kind(message) for message, _ in exchanged)
        for message, reply in exchanged:
            kind = _kind(message)
            fault = _fault(reply)
            if fault is None and kind == MessageType.TRAIN and not self._answered[kind]:
                # Only until one is seen that can be used: all weights of all replies would be read for it.
                fault = _not_finite(reply)
            if fault is None:
                self._answered[kind] += 1
            else:
                failures.setdefault(kind, []).append((message, fault))
        self._sent += num_sent
        for kind, failed in failures.items():
            message, fault = failed[0]
            node = message.metadata.dst_node_id
            cause = f"SoC {soc_of_node[node]} (node {node}): {fault}"
            self._first_cause.setdefault(kind, cause)
            nobody = len(failed) == num_sent[kind]
            self.events.append(MessageEvent(kind=_ALL if nobody else _SOME, text=(
                f"{_round(message)}{len(failed)} of {num_sent[kind]} {kind} messages came to nothing; "
                f"first cause: {cause}")))

    @property
    def failure(self) -> str | None:
        """Why the run came to nothing, with the first cause; None if some client did what it was asked.

        A run that trains is judged by its TRAIN messages, any other one by all that it sent.
        """
        kinds = [MessageType.TRAIN] if self._sent[MessageType.TRAIN] else list(self._sent)
        if not kinds or any(self._answered[kind] for kind in kinds):
            return None
        num_sent = sum(self._sent[kind] for kind in kinds)
        return (f"no client succeeded: none of {num_sent} {' and '.join(kinds)} messages had a usable answer; first "
                f"cause: {self._first_cause[kinds[0]]}")

    @property
    def first_cause(self) -> str:
        """Who failed first in what `failure` tells of, and how."""
        return next(iter(self._first_cause.values()), "")

    def require_success(self) -> None:
        """Raise `TrainingFailed` if the run came to nothing; note if it sent nothing at all."""
        failure = self.failure
        if failure is not None:
            raise TrainingFailed(failure)
        if not self._sent:
            self.events.append(MessageEvent(kind=_NOTHING, text="the ServerApp sent no message to any client"))

    def documents(self) -> list[dict[str, str]]:
        """Return the events as a result has them."""
        return [{"kind": event.kind, "text": event.text} for event in self.events]


def _kind(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _round(message: Message) -> str:
    """Return "round 3: " where the message says so, as those of Flower's strategies and of ours do."""
    for record in message.content.config_records.values():
        if isinstance(server_round := record.get(SERVER_ROUND), int):
            return f"round {server_round}: "
    return ""


def _fault(reply: Message | None) -> str | None:
    if reply is None:
        return "no reply in time"
    if not reply.has_error():
        return None
    # Exceptions of torch have many lines, results have one.
    return " ".join((reply.error.reason or f"error {reply.error.code} without a reason").split())


def _not_finite(reply: Message | None) -> str | None:
    assert reply is not None
    for record in reply.content.array_records.values():
        name = _first_non_finite(record)
        if name is not None:
            return f"its weights are not finite, {name} first; a lower learning rate may help"
    return None


def _first_non_finite(record: ArrayRecord) -> str | None:
    for name, array in record.items():
        try:
            values: Any = array.numpy()
        except (TypeError, ValueError, EOFError):  # in a serialisation of the app's own
            continue
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
            return name
    return None
