"""Messages in order, each exactly once, over a succession of connections that may break at any frame.

Rings over gRPC, leaders, stages of a pipeline and split training use it. Both ends keep sent messages until the other
end has received them completely. A connection is *attached* to the stream: it takes outgoing frames from `frames`, and
passes incoming ones to `on_frame`. When it breaks, another connection is attached; the other end reports how many
messages it has, and sending continues from there. A message that was interrupted is sent again from its beginning. The
training loops do not see this.

Memory is bounded on both sides. A message is sent if no earlier one waits at the other end, or if all of it fits into
the other end's credit. So waiting messages take at most the credit, or are one message of any size. Kept messages are
bounded at one end by `send(..., wait_for_room=True)`, and at the other end by the protocol (in split training by the
replay window, F23). If both ends waited for room, they would deadlock.

A frame begins with its kind, a byte; numbers are big-endian:

    part    the message's number (from 1, in each direction), the part's index, bytes of the head (0 after part 0),
            bytes of the body over all parts, the head, a piece of the body
    credit  how many messages were received and how many of them used, and timings of received transfers
    ask     a credit is needed once the messages before it are used
    end     no message follows; the rest is the reason, empty for a stream that is complete
"""

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from threading import Condition, RLock
from typing import Annotated, Generic, Protocol, TypeVar

from pydantic import Field

from socflower.errors import SocflowerError
from socflower.field_rules import checked
from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import (
    LARGEST_BODY_BYTES,
    LARGEST_FRAME_BYTES,
    LARGEST_PART_BYTES,
    Assembly,
    body_num_bytes,
    check_size,
    parts_of,
)

M = TypeVar("M")

PART, CREDIT, ASK, END = 1, 2, 3, 4
# Of 32 bytes, so that arrays in a body without a head are aligned.
PART_HEADER = struct.Struct("!B7xQIIQ")
CREDIT_HEADER = struct.Struct("!BQQ")
TRANSFER = struct.Struct("!Qd")
_KEPT_TRANSFERS = 1024


class StreamLost(SocflowerError):
    """The other end was silent or unreachable for longer than the timeout."""


class MessageKinds(Protocol[M]):
    """The messages of one use of the stream, as bytes. Incoming bytes are not trusted."""

    def encode(self, message: M) -> tuple[bytes, Sequence[bytes | memoryview]]:
        """Return a message's head, and its body in pieces that are not copied before they are sent."""
        ...

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], M]:
        """Return a function that makes the message of its complete body, of `num_bytes`.

        Raises `MalformedBytes` for a message that is too large or invalid, before any of its body is stored; the
        function may raise it, too.
        """
        ...


class PlainMessages:
    """Messages that are bytes without a head, up to a size."""

    def __init__(self, most_bytes: int = LARGEST_BODY_BYTES) -> None:
        self._most_bytes = most_bytes

    def encode(self, message: memoryview) -> tuple[bytes, list[memoryview]]:
        """Return the bytes as a body."""
        return b"", [message]

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], memoryview]:
        """Return a function that returns the body; `MalformedBytes` for a head or too many bytes."""
        if head:
            raise MalformedBytes(f"a message with a head of {len(head)} bytes")
        check_size(num_bytes, "a message", self._most_bytes)
        return lambda body: body


@checked
class ChannelLimits:
    """Limits of one end, in bytes."""

    # The size of one part of a message that it sends.
    part_bytes: Annotated[int, Field(ge=1, le=LARGEST_PART_BYTES)] = 256 << 10
    # The size of received messages that it has not processed.
    credit_bytes: Annotated[int, Field(ge=1)] = 64 << 20


def cost_bytes(head: bytes, num_bytes: int) -> int:
    """Return the bytes that a message takes of its receiver's credit."""
    # The constant bounds the number of small messages.
    return len(head) + num_bytes + 1024


def end_frame(reason: bytes = b"") -> bytes:
    """Return the frame that ends a stream."""
    return bytes([END]) + reason


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessage:
    """A message that has crossed the link, as its sender measured it."""

    # Whether this end sent it.
    sent: bool
    # The size with framing.
    num_bytes: int
    # The time from its first byte, or from the end of the transfer before it, until its acknowledgement.
    seconds: float
    # The time of the acknowledgement, on the stream's clock.
    at_s: float


@dataclass(slots=True)
class Traffic:
    """The traffic of a stream over all its connections."""

    # The size of all frames, also of repeated ones.
    sent_bytes: int = 0
    received_bytes: int = 0
    # 1 if no connection broke.
    num_streams: int = 0
    peak_inbox_bytes: int = 0
    peak_kept_bytes: int = 0
    peak_kept_messages: int = 0

    def add(self, other: "Traffic") -> None:
        """Add the traffic of another stream; peaks are the higher of both."""
        for entry in fields(Traffic):
            own, more = getattr(self, entry.name), getattr(other, entry.name)
            total = max(own, more) if entry.name.startswith("peak_") else own + more
            setattr(self, entry.name, total)


@dataclass(slots=True)
class _Kept:
    """A sent message that the other end has not acknowledged."""

    number: int
    cost_bytes: int
    # The frames of its parts; a list if there is one part, so that the message may change.
    frames: Iterable[bytes]
    # The time at which its first part was sent on the present connection.
    began_s: float = math.nan
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Parts:
    """The frames of a message of several parts, which are made when they are needed."""

    number: int
    head: bytes
    body: Sequence[bytes | memoryview]
    num_bytes: int
    part_bytes: int

    def __iter__(self) -> Iterator[bytes]:
        head = self.head
        for index, piece in enumerate(parts_of(self.body, self.part_bytes)):
            header = PART_HEADER.pack(PART, self.number, index, len(head), self.num_bytes)
            yield b"".join((header, head, piece))
            head = b""


@dataclass(slots=True)
class _Outbox:
    """What one end has sent and the other end has not acknowledged; the stream's lock is held."""

    credit_bytes: int
    kept: deque[_Kept] = field(default_factory=deque)
    kept_bytes: int = 0
    next_number: int = 1
    # Number of the last message whose sending began on the present connection.
    started: int = 0
    # Number of the last message before the latest request for a credit.
    asked: int = 0
    # Whether a thread waits for an acknowledgement.
    is_waited_for: bool = False
    peer_used: int = 0
    peer_credit_bytes: int = 0
    # Numbers and costs of messages that the peer has not processed.
    unused: deque[tuple[int, int]] = field(default_factory=deque)
    # The last time at which everything sent was acknowledged.
    free_s: float = -math.inf
    unreported: deque[SentMessage] = field(default_factory=lambda: deque(maxlen=_KEPT_TRANSFERS))
    transfers: deque[SentMessage] = field(default_factory=lambda: deque(maxlen=_KEPT_TRANSFERS))

    @property
    def oldest(self) -> int:
        """Number of the first message that may still be acknowledged."""
        return self.kept[0].number if self.kept else self.next_number

    @property
    def all_started(self) -> bool:
        return not self.kept or self.kept[-1].number <= self.started

    def keep(
        self, head: bytes, body: Sequence[bytes | memoryview], num_bytes: int, part_bytes: int
    ) -> None:
        number = self.next_number
        frames: Iterable[bytes] = _Parts(number, head, body, num_bytes, part_bytes)
        if num_bytes <= part_bytes:
            header = PART_HEADER.pack(PART, number, 0, len(head), num_bytes)
            frames = [b"".join((header, head, *body))]
        self.kept.append(_Kept(number, cost_bytes(head, num_bytes), frames))
        self.kept_bytes += self.kept[-1].cost_bytes
        self.next_number += 1

    def restart(self, received: int, used: int, credit_bytes: int, now_s: float) -> None:
        """Begin to send on a new connection, after the messages that the peer has."""
        self.peer_credit_bytes, self.free_s = credit_bytes, now_s
        self.forget(received, now_s, measure=False)
        self.started, self.asked = received, used
        for kept in self.kept:
            kept.began_s, kept.sent_bytes = math.nan, 0
        self.unused = deque((number, cost) for number, cost in self.unused if number <= received)
        self.note_used(used)

    def start_next(self, now_s: float) -> _Kept | None:
        """Return the next message if the other end's credit allows it."""
        if self.all_started:
            return None
        kept = self.kept[self.started + 1 - self.kept[0].number]
        ahead_bytes = sum(cost for _, cost in self.unused)
        if ahead_bytes and ahead_bytes + kept.cost_bytes > self.peer_credit_bytes:
            return None
        self.started = kept.number
        self.unused.append((kept.number, kept.cost_bytes))
        kept.began_s = now_s
        return kept

    def ask_due(self, *, waits: bool) -> bool:
        """Return whether to request a credit now: something waits for it, or half of the room is in use."""
        needs = waits or self.kept_bytes > self.credit_bytes // 2
        # One request at a time: the answer to a later one would come later.
        if not needs or self.asked > self.peer_used or self.asked == self.started:
            return False
        self.asked = self.started
        return True

    def forget(self, received: int, now_s: float, *, measure: bool) -> None:
        """Drop the messages that the peer has received."""
        crossed = []
        while self.kept and self.kept[0].number <= received:
            kept = self.kept.popleft()
            self.kept_bytes -= kept.cost_bytes
            crossed.append(kept)
        if crossed and measure:
            # Several messages acknowledged together count as one transfer: single durations are not known.
            seconds = now_s - max(crossed[0].began_s, self.free_s)
            num_bytes = sum(kept.sent_bytes for kept in crossed)
            transfer = SentMessage(sent=True, num_bytes=num_bytes, seconds=seconds, at_s=now_s)
            if seconds > 0:
                self.transfers.append(transfer)
                self.unreported.append(transfer)
        if crossed:
            self.free_s = now_s

    def note_used(self, used: int) -> None:
        self.peer_used = used
        while self.unused and self.unused[0][0] <= used:
            self.unused.popleft()


@dataclass(slots=True)
class _Arriving(Generic[M]):
    """A message whose last part has not been received yet."""

    decode: Callable[[memoryview], M]
    body: Assembly
    cost_bytes: int
    next_index: int = 0


@dataclass(slots=True)
class _Inbox(Generic[M]):
    """What one end has received; the stream's lock is held."""

    # Costs and messages.
    waiting: deque[tuple[int, M]] = field(default_factory=deque)
    num_bytes: int = 0
    received: int = 0
    used: int = 0
    arriving: _Arriving[M] | None = None
    # The most bytes of the next message that arrived on one connection.
    most_received: int = 0
    # The counts of the latest credit.
    reported: tuple[int, int] = (0, 0)
    # The number of messages after whose use the peer needs a credit.
    asked: int | None = None

    def pop(self) -> M:
        cost, message = self.waiting.popleft()
        self.num_bytes -= cost
        self.used += 1
        return message

    def add(self, message: M, cost: int) -> None:
        self.received += 1
        self.waiting.append((cost, message))
        self.num_bytes += cost
        self.arriving, self.most_received = None, 0


class Sending:
    """What is known of the messages that an end has sent, safe between threads; of its `Stream`."""

    def __init__(self, changed: Condition, out: _Outbox, is_lost: Callable[[], bool]) -> None:
        self._changed, self._out, self._is_lost = changed, out, is_lost

    @property
    def is_idle(self) -> bool:
        """Whether the sending of all messages has at least begun."""
        with self._changed:
            return self._out.all_started

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until everything is acknowledged, and return whether it is."""
        out = self._out
        with self._changed:
            self._changed.wait_for(lambda: not out.kept or self._is_lost(), timeout_s)
            return not out.kept

    def transfers(self) -> tuple[SentMessage, ...]:
        """Return the transfers since the last call; only the newest ones if there are many."""
        with self._changed:
            transfers = tuple(self._out.transfers)
            self._out.transfers.clear()
            return transfers

    def in_flight(self) -> tuple[float, int] | None:
        """Return since when (on the stream's clock) how many bytes are in flight; None if none are."""
        out = self._out
        with self._changed:
            going = [kept for kept in out.kept if kept.number <= out.started]
            if not going:
                return None
            return max(going[0].began_s, out.free_s), sum(kept.cost_bytes for kept in going)


class Stream(Generic[M]):
    """One end, safe between threads. Loops call `send`, `receive` and `poll`, connections the rest.

    `kinds` converts messages. `receive`, and `send` with `wait_for_room`, raise `StreamLost` after `patience_s` without
    progress. `peer` names the other end in errors. `measured`, at both ends, acknowledges every message, so that
    `sent.transfers()` show the link's bandwidth; else acknowledgements come when a sender needs room. When the other
    end has ended the stream, loops get what `end_error` makes of its reason.
    """

    def __init__(
        self,
        peer: str,
        kinds: MessageKinds[M],
        *,
        limits: ChannelLimits,
        patience_s: float = 900.0,
        measured: bool = True,
        end_error: Callable[[bytes], Exception] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.limits = limits
        self.traffic = Traffic()
        self._kinds = kinds
        self._patience_s = patience_s
        self._measured = measured
        self._end_error = end_error or (lambda reason: StreamLost(f"{peer} has ended the stream"))
        self._clock = clock
        # Loops wait for the one, threads of connections for the other; both have one lock.
        lock = RLock()
        self._changed, self._sendable = Condition(lock), Condition(lock)
        self._failure: Exception | None = None
        # The present connection, also after it was detached.
        self._connection = 0
        self._is_attached = False
        self._on_detach: Callable[[], None] | None = None
        self._progress_s = clock()
        self._out = _Outbox(limits.credit_bytes)
        self._in = _Inbox[M]()
        self.sent = Sending(self._changed, self._out, lambda: self._failure is not None)
        # The reasons with which this end and the other one have ended the stream.
        self._own_end: bytes | None = None
        self._peer_end: bytes | None = None

    # ------------------------------------------------------------------------------------------------- for the loops

    def send(self, message: M, *, wait_for_room: bool = False) -> None:
        """Queue a message; `wait_for_room` until the unacknowledged messages fit into the credit.

        The arrays in the message must not change any more, unless it fits into one part. Raises what `fail` was given,
        `StreamLost`, and the end's error.
        """
        head, body = self._kinds.encode(message)
        num_bytes = body_num_bytes(body)
        out = self._out
        with self._changed:
            began_s = self._clock()
            most_bytes = self.limits.credit_bytes - cost_bytes(head, num_bytes)
            while wait_for_room and out.kept and out.kept_bytes > most_bytes:
                self._require_open()
                if not self._measured and not out.is_waited_for:
                    out.is_waited_for = True
                    self._sendable.notify_all()
                self._wait(began_s, "takes nothing of what it is sent")
            out.is_waited_for = False
            self._require_open()
            out.keep(head, body, num_bytes, self.limits.part_bytes)
            traffic = self.traffic
            traffic.peak_kept_bytes = max(traffic.peak_kept_bytes, out.kept_bytes)
            traffic.peak_kept_messages = max(traffic.peak_kept_messages, len(out.kept))
            self._sendable.notify_all()

    def poll(self) -> M | None:
        """Return the next message, or None if there is none. Raises the exception that `fail` was given."""
        with self._changed:
            self._raise_failure()
            return self._pop() if self._in.waiting else None

    def receive(self, what: str = "message") -> M:
        """Wait for the next message. Raises what `fail` was given, `StreamLost`, and after the last the end's error."""
        message = self._wait_for_message(what, lambda: False)
        assert message is not None
        return message

    def receive_or_idle(self, what: str = "message") -> M | None:
        """Wait for the next message, or for `sent.is_idle`, and then return None. Raises as `receive` does."""
        return self._wait_for_message(what, lambda: self._out.all_started)

    def fail(self, failure: Exception, *, farewell: bytes | None = None) -> None:
        """End the stream: loops get the first `failure` that was given, and connections end.

        With a `farewell` the other end gets it as the reason, if a connection is attached.
        """
        with self._changed:
            self._failure = self._failure or failure
            if farewell is not None and self._own_end is None:
                self._own_end = farewell
            elif farewell is None:
                self._end_connection()
            self._notify()

    def finish(self) -> None:
        """End the stream after all messages that were sent."""
        with self._changed:
            self._own_end = b"" if self._own_end is None else self._own_end
            self._notify()

    @property
    def failure(self) -> Exception | None:
        """The exception that ended the stream, or None."""
        return self._failure

    @property
    def is_finishing(self) -> bool:
        """Whether this end has ended the stream."""
        return self._own_end is not None

    @property
    def peer_end(self) -> bytes | None:
        """The reason with which the other end has ended the stream, or None."""
        return self._peer_end

    # ------------------------------------------------------------------------------------------- for the connections

    def received_and_used(self) -> tuple[int, int]:
        """Return how many messages this end has received completely, and how many of them it has processed."""
        with self._changed:
            return self._in.received, self._in.used

    def detach(self, connection: int | None = None) -> None:
        """End a connection, by default the current one; its frames are ignored from now on."""
        with self._changed:
            if connection is None or connection == self._connection:
                self._end_connection()
                self._notify()

    def wait_replaced(self, connection: int, timeout_s: float | None = None) -> bool:
        """Wait for a connection after this one (0: the first) or the stream's end; return whether it came in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._connection != connection or self._failure is not None, timeout_s
            )

    def attach(
        self,
        *,
        received: int,
        used: int,
        credit_bytes: int,
        on_detach: Callable[[], None] | None = None,
    ) -> int:
        """Replace the current connection by a new one and return its id; the counts are those of the other end.

        `on_detach` is called when the connection is ended at this end. Raises `MalformedBytes` for impossible counts.
        """
        out = self._out
        with self._changed:
            can_be = out.oldest - 1 <= received < out.next_number
            if not (can_be and out.peer_used <= used <= received and credit_bytes >= 1):
                raise MalformedBytes(
                    f"a stream that claims {received} messages received, {used} used and {credit_bytes} "
                    "bytes of credit"
                )
            self._end_connection()
            self._connection += 1
            self._is_attached, self._on_detach = True, on_detach
            self._in.asked = None
            self._in.reported = (self._in.received, self._in.used)
            out.restart(received, used, credit_bytes, self._clock())
            self.traffic.num_streams += 1
            self._notify()
            return self._connection

    def frames(self, connection: int) -> Iterator[bytes]:
        """Yield outgoing frames until another connection is attached, this one is detached, or the stream ends."""
        parts: Iterator[bytes] = iter(())
        kept: _Kept | None = None
        while True:
            with self._changed:
                frame = None
                while frame is None:
                    if not self._is_current(connection) or self._peer_end is not None:
                        return
                    frame = self._control_frame()
                    if frame is None and kept is not None:
                        frame = next(parts, None)
                        if frame is None:
                            kept = None
                        else:
                            kept.sent_bytes += len(frame)
                    if frame is None and (frame := self._ask(waits=False)) is None:
                        kept = self._out.start_next(self._clock())
                        if kept is not None:
                            parts = iter(kept.frames)
                            # Who waits for room has none yet.
                            if not self._out.is_waited_for:
                                self._changed.notify_all()
                            continue
                        frame = self._last_frame()
                    if frame is None:
                        # Notified on every change; without one there is nothing to send.
                        self._sendable.wait()
                self.traffic.sent_bytes += len(frame)
            yield frame
            if frame[0] == END:
                return

    def on_frame(self, connection: int, frame: bytes | memoryview) -> None:
        """Process an incoming frame. Raises `MalformedBytes` for an invalid one."""
        with self._changed:
            if not self._is_current(connection) or self._failure is not None:
                return
            self.traffic.received_bytes += len(frame)
            check_size(len(frame), "a frame", LARGEST_FRAME_BYTES)
            kind = frame[0] if frame else None
            if kind == CREDIT:
                self._take_credit(frame)
            elif kind == PART:
                self._take_part(frame)
            elif kind == ASK:
                self._in.asked = self._in.received
            elif kind == END:
                self._peer_end = bytes(frame[1:])
            else:
                raise MalformedBytes(
                    f"a frame of the unknown kind {kind} in the middle of a stream"
                )
            self._changed.notify_all()
            if self._measured or kind != PART:
                self._sendable.notify_all()

    # ------------------------------------------------------------------------------------------------------- inside

    def _notify(self) -> None:
        self._changed.notify_all()
        self._sendable.notify_all()

    def _is_current(self, connection: int) -> bool:
        return self._is_attached and connection == self._connection

    def _end_connection(self) -> None:
        """End the present connection; the lock is held."""
        on_detach, self._on_detach = self._on_detach, None
        self._is_attached = False
        self._in.arriving = None
        if on_detach is not None:
            on_detach()

    def _require_open(self) -> None:
        """Raise what prevents this end from sending."""
        self._raise_failure()
        if self._peer_end is not None:
            raise self._end_error(self._peer_end)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, began_s: float, complaint: str) -> None:
        left_s = max(began_s, self._progress_s) + self._patience_s - self._clock()
        if left_s <= 0:
            state = "" if self._is_attached else " and has no stream"
            raise StreamLost(
                f"{self.peer} {complaint}{state} for {self._patience_s:g} s; see whether it still works"
            )
        self._changed.wait(left_s)

    def _wait_for_message(self, what: str, enough: Callable[[], bool]) -> M | None:
        with self._changed:
            began_s = self._clock()
            while not self._in.waiting and not enough():
                self._require_open()
                self._wait(began_s, f"sends no {what}")
            self._raise_failure()
            return self._pop() if self._in.waiting else None

    def _pop(self) -> M:
        message = self._in.pop()
        if self._measured or self._in.asked is not None:
            self._sendable.notify_all()
        return message

    # ---------------------------------------------------------------------------------------------- outgoing frames

    def _control_frame(self) -> bytes | None:
        """Return a frame that goes before any part: this end's farewell, or a credit that is due."""
        if self._failure is not None:
            return end_frame(self._own_end or b"")
        own, reports = self._in, self._out.unreported
        counts = (own.received, own.used)
        if self._measured:
            is_due = counts != own.reported or bool(reports)
        else:
            is_due = own.asked is not None and own.used >= own.asked
        if not is_due:
            return None
        own.reported, own.asked = counts, None
        transfers = [TRANSFER.pack(report.num_bytes, report.seconds) for report in reports]
        reports.clear()
        return b"".join((CREDIT_HEADER.pack(CREDIT, *counts), *transfers))

    def _ask(self, *, waits: bool) -> bytes | None:
        """Return a request for a credit if it is due."""
        return bytes([ASK]) if not self._measured and self._out.ask_due(waits=waits) else None

    def _last_frame(self) -> bytes | None:
        """Return what is sent if no message can be."""
        if self._own_end is not None and self._out.all_started:
            return end_frame(self._own_end)
        return self._ask(waits=self._out.is_waited_for or not self._out.all_started)

    # ---------------------------------------------------------------------------------------------- incoming frames

    def _take_credit(self, frame: bytes | memoryview) -> None:
        transfers_bytes = len(frame) - CREDIT_HEADER.size
        if transfers_bytes < 0 or transfers_bytes % TRANSFER.size:
            raise MalformedBytes(f"a credit of {len(frame)} bytes")
        out = self._out
        _, received, used = CREDIT_HEADER.unpack_from(frame)
        if not (out.oldest - 1 <= received <= out.started and out.peer_used <= used <= received):
            raise MalformedBytes(
                f"a credit for {received} messages received and {used} used; {out.started} were sent"
            )
        now_s = self._clock()
        if received >= out.oldest or used > out.peer_used:
            self._progress_s = now_s
        out.forget(received, now_s, measure=self._measured)
        out.note_used(used)
        for num_bytes, seconds in TRANSFER.iter_unpack(memoryview(frame)[CREDIT_HEADER.size :]):
            # Infinite seconds would make every later estimate of the bandwidth NaN.
            if 0 < seconds < math.inf and num_bytes:
                out.transfers.append(
                    SentMessage(sent=False, num_bytes=num_bytes, seconds=seconds, at_s=now_s)
                )

    def _take_part(self, frame: bytes | memoryview) -> None:
        header = (0, 0, 0, 0, 0)
        if len(frame) >= PART_HEADER.size:
            header = PART_HEADER.unpack_from(frame)
        _, number, index, head_bytes, num_bytes = header
        begin = PART_HEADER.size + head_bytes
        if len(frame) < begin:
            raise MalformedBytes(f"a part of {len(frame)} bytes")
        body = memoryview(frame)[begin:]
        own, arriving = self._in, self._in.arriving
        if number != own.received + 1:
            raise MalformedBytes(f"a part of message {number}, where {own.received + 1} is next")
        if body.nbytes > LARGEST_PART_BYTES:
            raise MalformedBytes(
                f"a part of {body.nbytes} bytes, where {LARGEST_PART_BYTES} is the limit"
            )
        # Each connection sends a message from its beginning, which has the head.
        next_index = 0 if arriving is None else arriving.next_index
        if index != next_index or (index and head_bytes):
            place = f", where part {next_index} is next" if arriving else " before its beginning"
            raise MalformedBytes(f"part {index} of message {number}{place}")
        if arriving is None:
            arriving = self._begin(bytes(frame[PART_HEADER.size : begin]), num_bytes, number)
        whole: memoryview | None = None
        if not (index or head_bytes) and body.nbytes == num_bytes:
            # A message in one part needs no copy, and its arrays are aligned.
            whole, missing_bytes = body, 0
        else:
            arriving.body.add(body)
            arriving.next_index += 1
            missing_bytes = arriving.body.missing_bytes
        if num_bytes - missing_bytes > own.most_received or not num_bytes:
            # A connection that repeatedly breaks at the same byte makes no progress.
            own.most_received, self._progress_s = num_bytes - missing_bytes, self._clock()
        if not missing_bytes:
            message = arriving.decode(arriving.body.whole() if whole is None else whole)
            own.add(message, arriving.cost_bytes)

    def _begin(self, head: bytes, num_bytes: int, number: int) -> _Arriving[M]:
        own = self._in
        decode = self._kinds.begin(head, num_bytes)
        cost = cost_bytes(head, num_bytes)
        if own.num_bytes and own.num_bytes + cost > self.limits.credit_bytes:
            raise MalformedBytes(
                f"a message of {cost} bytes beyond the credit of {self.limits.credit_bytes}"
            )
        self.traffic.peak_inbox_bytes = max(self.traffic.peak_inbox_bytes, own.num_bytes + cost)
        # `begin` has checked the size.
        body = Assembly(num_bytes, f"message {number}", most_bytes=num_bytes)
        own.arriving = _Arriving(decode, body, cost)
        return own.arriving
