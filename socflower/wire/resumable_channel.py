"""Messages in order, each exactly once, over a succession of streams that may break at any frame.

Both ends keep sent messages until the other end has received them completely. A stream is *attached* to the channel: it
takes outgoing frames from `frames`, and passes incoming ones to `on_frame`. When it breaks, another stream is attached;
the other end reports how many messages it has, and sending continues from there. A message that was interrupted is sent
again from its beginning. The training loops do not see this.

`MessageKinds` says how messages become bytes.

Memory is bounded on both sides. A message is sent if no earlier one waits at the other end, or if all of it fits into
the other end's credit. So waiting messages take at most the credit, or are one message of any size. Kept messages are
bounded at one end by `send(..., wait_for_room=True)`, and at the other end by the protocol (in split training by the
replay window, F23). If both ends waited for room, they would deadlock.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from threading import Condition
from typing import Annotated, Any, Generic, Protocol, TypeVar

from pydantic import Field

from socflower.errors import SocflowerError
from socflower.field_rules import checked
from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import LARGEST_PART_BYTES, Assembly, body_num_bytes, parts_of
from socflower.wire.framing_pb2 import Credit, Part
from socflower.wire.framing_pb2 import Transfer as TransferReport

M = TypeVar("M")
_KEPT_TRANSFERS = 1024


class StreamLost(SocflowerError):
    """The other end was silent or unreachable for longer than the timeout."""


class MessageKinds(Protocol[M]):
    """The messages of one use of the channel, as bytes. Incoming bytes are not trusted."""

    # A protobuf message with a oneof `kind` that includes `credit` and `part` of framing.proto.
    frame: type[Any]

    def encode(self, message: M) -> tuple[bytes, Sequence[bytes | memoryview]]:
        """Return a message's head, and its body in pieces that are not copied before they are sent."""
        ...

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], M]:
        """Return a function that makes the message of its complete body, of `num_bytes`.

        Raises `MalformedBytes` for a message that is too large or invalid, before any of its body is stored; the
        function may raise it, too.
        """
        ...


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


@dataclass(slots=True)
class _Unacknowledged:
    """A sent message that the other end has not acknowledged."""

    number: int
    head: bytes
    body: Sequence[bytes | memoryview]
    num_bytes: int
    # The time at which its first part was sent on the present stream.
    began_s: float = math.nan
    sent_bytes: int = 0

    @property
    def cost_bytes(self) -> int:
        return cost_bytes(self.head, self.num_bytes)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Yield the message in parts."""
        for index, piece in enumerate(parts_of(self.body, part_bytes)):
            part = Part(number=self.number, index=index, body=piece)
            if index == 0:
                part.head, part.num_bytes = self.head, self.num_bytes
            yield part


@dataclass(slots=True)
class _Arriving(Generic[M]):
    """A message whose last part has not been received yet."""

    decode: Callable[[memoryview], M]
    body: Assembly
    cost_bytes: int
    next_index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessage:
    """A message that has crossed the link, as its sender measured it."""

    # Whether this end sent it.
    sent: bool
    # The size with framing.
    num_bytes: int
    # The time from its first byte, or from the end of the transfer before it, until its acknowledgement.
    seconds: float
    # The time of the acknowledgement, on the channel's clock.
    at_s: float


@dataclass(slots=True)
class Traffic:
    """The traffic of a channel over all its streams."""

    # The size of all frames, also of repeated ones.
    sent_bytes: int = 0
    received_bytes: int = 0
    # 1 if no stream broke.
    num_streams: int = 0
    peak_inbox_bytes: int = 0
    peak_kept_bytes: int = 0
    peak_kept_messages: int = 0

    def add(self, other: "Traffic") -> None:
        """Add the traffic of another channel; peaks are the higher of both."""
        for entry in fields(Traffic):
            own, more = getattr(self, entry.name), getattr(other, entry.name)
            total = max(own, more) if entry.name.startswith("peak_") else own + more
            setattr(self, entry.name, total)


class FrameChannel(Generic[M]):
    """One end of the channel, safe between threads. Loops call `send`, `receive`, `poll` and `flush`, streams the rest.

    `kinds` converts messages. `receive`, and `send` with `wait_for_room`, raise `StreamLost` after `patience_s` without
    progress. `peer` names the other end in errors.
    """

    def __init__(
        self,
        peer: str,
        kinds: MessageKinds[M],
        *,
        limits: ChannelLimits,
        patience_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.limits = limits
        self.traffic = Traffic()
        self._kinds = kinds
        self._patience_s = patience_s
        self._clock = clock
        self._changed = Condition()
        self._failure: Exception | None = None
        # The present stream, also after it was detached.
        self._stream_id = 0
        self._attached = False
        self._progress_s = clock()
        # The state of a sender.
        self._next_number = 1
        self._unacknowledged: deque[_Unacknowledged] = deque()
        self._unacknowledged_bytes = 0
        # Number of the last message whose sending began on the present stream.
        self._started = 0
        self._peer_used = 0
        self._peer_credit_bytes = 0
        # Numbers and costs of messages that the peer has not processed.
        self._unused_by_peer: deque[tuple[int, int]] = deque()
        # The last time at which everything sent was acknowledged.
        self._free_s = -math.inf
        # The state of a receiver.
        # Costs and messages.
        self._inbox: deque[tuple[int, M]] = deque()
        self._inbox_bytes = 0
        self._received = 0
        self._used = 0
        self._arriving: _Arriving[M] | None = None
        # The most bytes of the next message that arrived on one stream.
        self._most_received = 0
        self._last_credit = (0, 0)
        self._unreported_transfers: deque[SentMessage] = deque(maxlen=_KEPT_TRANSFERS)
        self._transfers: deque[SentMessage] = deque(maxlen=_KEPT_TRANSFERS)

    # ------------------------------------------------------------------------------------------------- for the loops

    def send(self, message: M, *, wait_for_room: bool = False) -> None:
        """Queue a message; `wait_for_room` until the unacknowledged messages fit into the credit.

        The arrays in the message must not change any more. Raises what `fail` was given, and `StreamLost`.
        """
        head, body = self._kinds.encode(message)
        num_bytes = body_num_bytes(body)
        with self._changed:
            began_s = self._clock()
            most_bytes = self.limits.credit_bytes - cost_bytes(head, num_bytes)
            while (
                wait_for_room and self._unacknowledged and self._unacknowledged_bytes > most_bytes
            ):
                self._wait(began_s, "takes nothing of what it is sent")
            self._raise_failure()
            kept = _Unacknowledged(self._next_number, head, body, num_bytes)
            self._next_number += 1
            self._unacknowledged.append(kept)
            self._unacknowledged_bytes += kept.cost_bytes
            traffic, num_kept = self.traffic, len(self._unacknowledged)
            traffic.peak_kept_bytes = max(traffic.peak_kept_bytes, self._unacknowledged_bytes)
            traffic.peak_kept_messages = max(traffic.peak_kept_messages, num_kept)
            self._changed.notify_all()

    def poll(self) -> M | None:
        """Return the next message, or None if there is none. Raises the exception that `fail` was given."""
        with self._changed:
            self._raise_failure()
            return self._pop() if self._inbox else None

    def receive(self, what: str = "message") -> M:
        """Wait for the next message. Raises the exception that `fail` was given, and `StreamLost`."""
        message = self._wait_for_message(what, lambda: False)
        assert message is not None
        return message

    def receive_or_idle(self, what: str = "message") -> M | None:
        """Wait for the next message, or for `is_idle`, and then return None. Raises as `receive` does."""
        return self._wait_for_message(what, self._all_started)

    @property
    def is_idle(self) -> bool:
        """Whether the sending of all messages has at least begun."""
        with self._changed:
            return self._all_started()

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until everything is acknowledged, and return whether it is."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._unacknowledged or self._failure is not None, timeout_s
            )
            return not self._unacknowledged

    def transfers(self) -> tuple[SentMessage, ...]:
        """Return the transfers since the last call; only the newest ones if there are many."""
        with self._changed:
            transfers = tuple(self._transfers)
            self._transfers.clear()
            return transfers

    def in_flight(self) -> tuple[float, int] | None:
        """Return since when (on the channel's clock) how many bytes are in flight; None if none are."""
        with self._changed:
            going = [kept for kept in self._unacknowledged if kept.number <= self._started]
            if not going:
                return None
            return max(going[0].began_s, self._free_s), sum(kept.cost_bytes for kept in going)

    def fail(self, failure: Exception) -> None:
        """End the channel: loops get the first `failure` that was given, and streams end."""
        with self._changed:
            self._failure = self._failure or failure
            self._attached = False
            self._stream_id += 1
            self._changed.notify_all()

    @property
    def failure(self) -> Exception | None:
        """The exception that ended the channel, or None."""
        return self._failure

    # ----------------------------------------------------------------------------------------------- for the streams

    def received_and_used(self) -> tuple[int, int]:
        """Return how many messages this end has received completely, and how many of them it has processed."""
        with self._changed:
            return self._received, self._used

    def detach(self, stream_id: int | None = None) -> None:
        """End a stream, by default the current one; its frames are ignored from now on."""
        with self._changed:
            if stream_id is None or stream_id == self._stream_id:
                self._stream_id += 1
                self._attached = False
                self._arriving = None
                self._changed.notify_all()

    def wait_detached(self, stream_id: int) -> None:
        """Return when a stream is no longer the current one."""
        with self._changed:
            self._changed.wait_for(lambda: stream_id != self._stream_id)

    def attach(self, *, received: int, used: int, credit_bytes: int) -> int:
        """Replace the current stream by a new one and return its id; the arguments are those of the other end.

        Raises `MalformedBytes` for impossible counts.
        """
        with self._changed:
            oldest = self._unacknowledged[0].number if self._unacknowledged else self._next_number
            can_be = oldest - 1 <= received < self._next_number
            if not (can_be and self._peer_used <= used <= received and credit_bytes >= 1):
                raise MalformedBytes(
                    f"a stream that claims {received} messages received, {used} used and {credit_bytes} "
                    "bytes of credit"
                )
            self._stream_id += 1
            self._attached = True
            self._arriving = None
            self._peer_credit_bytes = credit_bytes
            self._free_s = self._clock()
            self._forget_received(received, measure=False)
            self._started = received
            for kept in self._unacknowledged:
                kept.began_s, kept.sent_bytes = math.nan, 0
            self._unused_by_peer = deque(
                (number, cost) for number, cost in self._unused_by_peer if number <= received
            )
            self._note_used(used)
            self._last_credit = (self._received, self._used)
            self.traffic.num_streams += 1
            self._changed.notify_all()
            return self._stream_id

    def frames(self, stream_id: int) -> Iterator[Any]:
        """Yield outgoing frames until another stream is attached or this one is detached."""
        parts: Iterator[Part] | None = None
        sending: _Unacknowledged | None = None
        while True:
            with self._changed:
                frame: Any = None
                while frame is None:
                    if stream_id != self._stream_id:
                        return
                    credit = self._credit_due()
                    if credit is None and parts is None:
                        sending = self._start_next()
                        if sending is not None:
                            parts = sending.parts(self.limits.part_bytes)
                    if credit is not None:
                        frame = self._kinds.frame(credit=credit)
                    elif parts is not None and sending is not None:
                        part = next(parts, None)
                        if part is None:
                            parts = sending = None
                            continue
                        frame = self._kinds.frame(part=part)
                        sending.sent_bytes += frame.ByteSize()
                    else:
                        # Notified on every change; without one there is nothing to send.
                        self._changed.wait()
                self.traffic.sent_bytes += frame.ByteSize()
            yield frame

    def on_frame(self, stream_id: int, frame: Any) -> None:
        """Process an incoming frame. Raises `MalformedBytes` for an invalid one."""
        with self._changed:
            if stream_id != self._stream_id:
                return
            self.traffic.received_bytes += frame.ByteSize()
            kind = frame.WhichOneof("kind")
            if kind == "credit":
                self._take_credit(frame.credit)
            elif kind == "part":
                self._take_part(frame.part)
            else:
                what = kind or "frame of an unknown kind"
                raise MalformedBytes(f"a {what} in the middle of a stream")
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- inside

    def _wait(self, began_s: float, complaint: str) -> None:
        self._raise_failure()
        left_s = max(began_s, self._progress_s) + self._patience_s - self._clock()
        if left_s <= 0:
            state = "" if self._attached else " and has no stream"
            raise StreamLost(
                f"{self.peer} {complaint}{state} for {self._patience_s:g} s; see whether it still works"
            )
        self._changed.wait(left_s)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_for_message(self, what: str, enough: Callable[[], bool]) -> M | None:
        with self._changed:
            began_s = self._clock()
            while not self._inbox and not enough():
                self._wait(began_s, f"sends no {what}")
            self._raise_failure()
            return self._pop() if self._inbox else None

    def _all_started(self) -> bool:
        return not self._unacknowledged or self._unacknowledged[-1].number <= self._started

    def _pop(self) -> M:
        cost, message = self._inbox.popleft()
        self._inbox_bytes -= cost
        self._used += 1
        self._changed.notify_all()
        return message

    def _start_next(self) -> _Unacknowledged | None:
        """Return the next message if the other end's credit allows it."""
        for kept in self._unacknowledged:
            if kept.number <= self._started:
                continue
            ahead_bytes = sum(cost for _, cost in self._unused_by_peer)
            if ahead_bytes and ahead_bytes + kept.cost_bytes > self._peer_credit_bytes:
                return None
            self._started = kept.number
            self._unused_by_peer.append((kept.number, kept.cost_bytes))
            kept.began_s = self._clock()
            self._changed.notify_all()
            return kept
        return None

    def _credit_due(self) -> Credit | None:
        counts = (self._received, self._used)
        if counts == self._last_credit and not self._unreported_transfers:
            return None
        self._last_credit = counts
        transfers = [
            TransferReport(num_bytes=transfer.num_bytes, seconds=transfer.seconds)
            for transfer in self._unreported_transfers
        ]
        self._unreported_transfers.clear()
        return Credit(received=counts[0], used=counts[1], transfers=transfers)

    def _take_credit(self, credit: Credit) -> None:
        oldest = self._unacknowledged[0].number if self._unacknowledged else self._next_number
        can_be = oldest - 1 <= credit.received <= self._started
        if not (can_be and self._peer_used <= credit.used <= credit.received):
            raise MalformedBytes(
                f"a credit for {credit.received} messages received and {credit.used} used; "
                f"{self._started} were sent"
            )
        now_s = self._clock()
        if credit.received >= oldest or credit.used > self._peer_used:
            self._progress_s = now_s
        self._forget_received(credit.received, measure=True)
        self._note_used(credit.used)
        for transfer in credit.transfers:
            # Infinite seconds would make every later estimate of the bandwidth NaN.
            if 0 < transfer.seconds < math.inf and transfer.num_bytes:
                self._transfers.append(
                    SentMessage(
                        sent=False,
                        num_bytes=transfer.num_bytes,
                        seconds=transfer.seconds,
                        at_s=now_s,
                    )
                )

    def _forget_received(self, received: int, *, measure: bool) -> None:
        now_s = self._clock()
        crossed = []
        while self._unacknowledged and self._unacknowledged[0].number <= received:
            kept = self._unacknowledged.popleft()
            self._unacknowledged_bytes -= kept.cost_bytes
            crossed.append(kept)
        if crossed and measure:
            # Several messages acknowledged together count as one transfer: single durations are not known.
            seconds = now_s - max(crossed[0].began_s, self._free_s)
            transfer = SentMessage(
                sent=True,
                num_bytes=sum(kept.sent_bytes for kept in crossed),
                seconds=seconds,
                at_s=now_s,
            )
            if seconds > 0:
                self._transfers.append(transfer)
                self._unreported_transfers.append(transfer)
        if crossed:
            self._free_s = now_s

    def _note_used(self, used: int) -> None:
        self._peer_used = used
        while self._unused_by_peer and self._unused_by_peer[0][0] <= used:
            self._unused_by_peer.popleft()

    def _take_part(self, part: Part) -> None:
        if part.number != self._received + 1:
            raise MalformedBytes(
                f"a part of message {part.number}, where {self._received + 1} is next"
            )
        if len(part.body) > LARGEST_PART_BYTES:
            raise MalformedBytes(
                f"a part of {len(part.body)} bytes, where {LARGEST_PART_BYTES} is the limit"
            )
        arriving, is_first = self._arriving, part.HasField("head")
        next_index = 0 if arriving is None else arriving.next_index
        # Each stream sends a message from its beginning, which has the head.
        if part.index != next_index or is_first != (arriving is None):
            place = f", where part {next_index} is next" if arriving else " before its beginning"
            raise MalformedBytes(f"part {part.index} of message {part.number}{place}")
        if arriving is None:
            arriving = self._arriving = self._begin(part)
        arriving.body.add(part.body)
        arriving.next_index += 1
        arrived_bytes = arriving.body.num_bytes - arriving.body.missing_bytes
        if arrived_bytes > self._most_received or not arriving.body.num_bytes:
            # A connection that repeatedly breaks at the same byte makes no progress.
            self._most_received, self._progress_s = arrived_bytes, self._clock()
        if not arriving.body.missing_bytes:
            self._arriving, self._most_received = None, 0
            message = arriving.decode(arriving.body.whole())
            self._received += 1
            self._inbox.append((arriving.cost_bytes, message))
            self._inbox_bytes += arriving.cost_bytes

    def _begin(self, part: Part) -> _Arriving[M]:
        decode = self._kinds.begin(part.head, part.num_bytes)
        cost = cost_bytes(part.head, part.num_bytes)
        if self._inbox_bytes and self._inbox_bytes + cost > self.limits.credit_bytes:
            raise MalformedBytes(
                f"a message of {cost} bytes beyond the credit of {self.limits.credit_bytes}"
            )
        self.traffic.peak_inbox_bytes = max(self.traffic.peak_inbox_bytes, self._inbox_bytes + cost)
        # `begin` has checked the size.
        body = Assembly(part.num_bytes, f"message {part.number}", most_bytes=part.num_bytes)
        return _Arriving(decode, body, cost)
