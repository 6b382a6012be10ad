"""A record of the exchanges of an app, from which its interrupted run resumes.

A ServerApp is determined by its inputs, the answers to its messages and the global random generators. After each
exchange the record saves the answers, the changes of the nodes' states, and the generators. A resumed run starts the
ServerApp again and takes the answers from the record as far as it goes, so no client trains twice.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import Error, Message, RecordDict

from socflower.engines.checkpoint import RunStore, require_equal
from socflower.engines.local.message_log import faults
from socflower.errors import ConfigError
from socflower.flower_adapter import record_dict_from_bytes, record_dict_to_bytes
from socflower.model_graph.random_state import generator_states, restore_generators
from socflower.quantities import human_bytes
from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays
from socflower.wire.saved_state import DamagedFile, StateKind, StateStore

_EXCHANGE = StateKind(name="exchange of messages", schema=1, remedy="start again with --fresh")
# The entry with this number identifies the run.
_START = 0
MOST_BYTES = 20 << 30


Exchange: TypeAlias = tuple[Sequence[Message | None], Mapping[int, RecordDict]]
"""The replies to messages, or None, and the states of the nodes afterwards; those that did not change may be missing.
"""


class ExchangeRecord(RunStore):
    """The exchanges of one run in a folder, numbered from 1; see `StateStore` for its errors.

    Parameters
    ----------
    folder : Path
        For this record alone.
    run : Mapping
        Everything that determines the run, as plain values; the record of another run is an error.
    on_notice : Callable
        Gets a line when the run resumes, and when the record ends before the run.
    most_bytes : int
        The size of a record, at which it ends: later exchanges are not saved.
    """

    unit = "exchange"

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        *,
        on_notice: Callable[[str], None] = lambda line: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        kept = StateStore(folder, _EXCHANGE, prefix="exchange-", suffix=".messages")
        super().__init__(folder, kept)
        # The last recorded exchange at each resumption.
        self.resumed_from: list[int] = []
        self._run, self._on_notice, self._most_bytes = run, on_notice, most_bytes
        # Exchanges of this process, and of the record at its start.
        self._num_past = self._num_recorded = 0
        self._is_saving = True
        self._num_bytes = 0
        # The digests of exchanges.
        self._saved_states: dict[int, bytes] = {}
        self._failed: set[int] = set()

    def numbers(self) -> list[int]:
        """Return the numbers of the exchanges, newest first."""
        return [number for number in super().numbers() if number > _START]

    def begin(self) -> None:
        """Start or resume the run and restore the generators; `ConfigError` if the folder holds another run."""
        numbers = set(self._states.numbers())
        if not numbers:
            self._states.write(_START, {"run": dict(self._run)}, pack_arrays(generator_states()))
            return
        state, generators = self._states.read(_START)
        require_equal(self.path, state["run"], self._run)
        self._restore(generators)
        while self._num_recorded + 1 in numbers:
            self._num_recorded += 1
        self._states.remove(after=self._num_recorded)
        if self._num_recorded:
            self.resumed_from = [self._num_recorded]
            self._on_notice(
                f"resuming {self.path.parent} after exchange {self._num_recorded} of messages; --fresh "
                "starts again"
            )
        self._num_bytes = sum(
            self._states.path(1 + index).stat().st_size for index in range(self._num_recorded)
        )

    def replay(self, messages: Sequence[Message]) -> Exchange | None:
        """Return the recorded result of the next exchange, which has these messages; None beyond the end of the record.

        Raises `ConfigError` if the record has other messages.
        """
        if self._num_past == self._num_recorded:
            return None
        number = self._num_past + 1
        try:
            state, payload = self._states.read(number)
            parts = _Parts(payload)
            answers = [_answer_of(answer, parts) for answer in state["replies"]]
            saved = {node: parts.take(num_bytes) for node, num_bytes in state["states"]}
            self._require_same(number, state["sent"], messages)
            self._restore(parts.rest())
        except DamagedFile as error:
            self._on_notice(f"{error.cause}; continuing from the one before it")
            self._states.remove(after=self._num_past)
            self._num_recorded = self._num_past
            self.resumed_from = [self._num_past] if self._num_past else []
            return None
        self._num_past = number
        self.resumed_from = [*state["resumed_from"], self._num_recorded]
        self._saved_states |= {node: hashlib.sha256(each).digest() for node, each in saved.items()}
        replies = [
            None if answer is None else Message(answer, reply_to=message)
            for message, answer in zip(messages, answers, strict=True)
        ]
        self._note_failures(messages, replies)
        return replies, {node: record_dict_from_bytes(each) for node, each in saved.items()}

    def add(
        self,
        messages: Sequence[Message],
        replies: Sequence[Message | None],
        states: Mapping[int, RecordDict],
    ) -> None:
        """Save an exchange with the states of its nodes.

        A record that cannot be written or has reached its full size ends here, and the run continues.
        """
        self._num_past += 1
        self._num_recorded = self._num_past
        self._note_failures(messages, replies)
        if not self._is_saving:
            return
        answers: list[dict[str, Any] | None] = []
        changed, pieces = [], []
        for reply in replies:
            if reply is None:
                answers.append(None)
            elif reply.has_error():
                answers.append({"error": [reply.error.code, reply.error.reason]})
            else:
                pieces.append(record_dict_to_bytes(reply.content))
                answers.append({"bytes": len(pieces[-1])})
        for node, state in states.items():
            saved = record_dict_to_bytes(state)
            digest = hashlib.sha256(saved).digest()
            if self._saved_states.get(node) != digest:
                self._saved_states[node] = digest
                changed.append((node, len(saved)))
                pieces.append(saved)
        generators = pack_arrays(generator_states())
        self._num_bytes += sum(map(len, pieces)) + sum(each.nbytes for each in generators)
        if self._num_bytes > self._most_bytes:
            self._end(f"it would have more than {human_bytes(self._most_bytes)}")
            return
        header = {
            "sent": _digest(messages),
            "replies": answers,
            "states": changed,
            "resumed_from": self.resumed_from,
        }
        try:
            self._states.write(self._num_past, header, [*pieces, *generators])
        except ConfigError as error:
            self._end(str(error).partition(";")[0])

    def forget_failures(self) -> None:
        """Remove the newest exchanges that had failures, so that a resumed run tries them again."""
        last = self._num_past
        while last in self._failed:
            last -= 1
        self._states.remove(after=last)

    def _note_failures(
        self, messages: Sequence[Message], replies: Sequence[Message | None]
    ) -> None:
        if faults([*zip(messages, replies, strict=True)]):
            self._failed.add(self._num_past)

    def _end(self, reason: str) -> None:
        """End the record before the current exchange."""
        self._is_saving = False
        self._on_notice(
            f"the record of exchanges in {self.path} ends: {reason}; the run continues, and resumes after "
            f"exchange {self._num_past - 1} if it is interrupted"
        )

    def _require_same(self, number: int, sent: str, messages: Sequence[Message]) -> None:
        if _digest(messages) != sent:
            raise ConfigError(
                f"{self._states.path(number)}: before its interruption the ServerApp sent other messages "
                "in this exchange, so its run cannot be resumed; let it send neither times nor random "
                "numbers of its own generators, or start again with --fresh"
            )

    def _restore(self, generators: memoryview) -> None:
        try:
            restore_generators(unpack_arrays(generators))
        except (MalformedBytes, KeyError) as error:
            # The file is forged: its digest is not a signature.
            raise DamagedFile(
                f"{self.path} has no state of random generators ({error})", _EXCHANGE.remedy
            ) from None


def _answer_of(answer: Mapping[str, Any] | None, parts: "_Parts") -> Error | RecordDict | None:
    """Return the error or the records of a recorded reply; None if there was no reply."""
    if answer is None:
        return None
    if "error" in answer:
        return Error(*answer["error"])
    return record_dict_from_bytes(parts.take(answer["bytes"]))


class _Parts:
    """Takes parts of known sizes off bytes."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload

    def take(self, num_bytes: int) -> bytes:
        part, self._payload = bytes(self._payload[:num_bytes]), self._payload[num_bytes:]
        return part

    def rest(self) -> memoryview:
        return self._payload


def _digest(messages: Sequence[Message]) -> str:
    """Return a digest of messages and their receivers, without ids and times."""
    digest = hashlib.sha256()
    for piece in _pieces(messages):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _pieces(messages: Sequence[Message]) -> Iterator[bytes]:
    for message in messages:
        metadata = message.metadata
        yield f"{metadata.dst_node_id} {metadata.message_type} {metadata.group_id}".encode()
        yield record_dict_to_bytes(message.content)
