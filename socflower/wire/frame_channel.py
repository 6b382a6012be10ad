"""Messages in order, each exactly once, over a succession of streams that may break at any frame.

Both ends keep sent messages until the other end has received them completely. A stream is *attached* to the channel: it
takes outgoing frames from `frames`, and passes incoming ones to `on_frame`. When it breaks, another stream is attached;
the other end reports how many messages it has, and sending continues from there. A message that was interrupted is sent
again from its beginning. The training loops do not see this.

What the messages are is a parameter, `MessageKinds`.

Memory is bounded on both sides. Received messages that are not processed yet take at most the credit that this end
gave, or are one single message of any size: a message is sent if no earlier one waits at the other end, or if all of it
fits into the credit. Sent messages kept here are bounded by `send(..., wait_for_room=True)` at one end, and at the
other by what uses the channel (in split training by the replay window, F23): two ends that wait for each other to read
would deadlock.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

from socflower.errors import ConfigError, SocflowerError
from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import LARGEST_PART_BYTES, Assembly, body_num_bytes, parts_of
from socflower.wire.framing_pb2 import Credit, Part
from socflower.wire.framing_pb2 import Transfer as TransferReport

M = TypeVar("M")
_KEPT_TRANSFERS = 1024


class StreamLost(SocflowerError):
    """The other end was gone, silent or unreachable for longer than the timeout."""


class MessageKinds(Protocol[M]):
    """The messages of one use of the channel, as bytes. What comes in is not trusted."""

    # A protobuf message with a oneof `kind`, of which `credit` and `part` are those of framing.proto.
    frame: type[Any]

    def encode(self, message: M) -> tuple[bytes, Sequence[bytes | memoryview]]:
        """Return a message's head, and its body in pieces that are not copied before they are sent."""
        ...

    def begin(self, head: bytes, num_bytes: int) -> Callable[[memoryview], M]:
        """Return what makes the message of its complete body, of `num_bytes`; it may raise `MalformedBytes`.

        Raises it here for a message that is too large or invalid, before any of its body is stored.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelLimits:
    """Limits on what a side sends in one part and accepts, in bytes."""

    # Of the messages that it sends.
    part_bytes: int = 256 << 10
    # Of messages that it has not worked off.
    credit_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, most = (
                getattr(self, entry.name),
                LARGEST_PART_BYTES if entry.name == "part_bytes" else math.inf,
            )
            if not 1 <= value <= most:
                raise ConfigError(
                    f"stream: {entry.name} = {value} must be "
                    f"{'1 or more' if most == math.inf else f'from 1 to {most}'}"
                )


def cost_bytes(head: bytes, num_bytes: int) -> int:
    """Return the bytes that a message takes of its receiver's credit; many small ones are bounded too."""
    return len(head) + num_bytes + 1024


@dataclass(slots=True)
class _Unacknowledged:
    """A sent message that the other end has not acknowledged."""

    number: int
    head: bytes
    body: Sequence[bytes | memoryview]
    num_bytes: int
    # When its first part went out on the present stream.
    began_s: float = math.nan
    sent_bytes: int = 0

    @property
    def cost_bytes(self) -> int:
        return cost_bytes(self.head, self.num_bytes)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Yield the message in parts."""
        for index, piece in enumerate(parts_of(self.body, part_bytes)):
            yield (
                Part(number=self.number, index=index, body=piece)
                if index
                else Part(number=self.number, head=self.head, num_bytes=self.num_bytes, body=piece)
            )


@dataclass(slots=True)
class _Arriving(Generic[M]):
    """A message of which not all parts have been received."""

    decode: Callable[[memoryview], M]
    body: Assembly
    cost_bytes: int
    next_index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessage:
    """A message that has crossed the link, as its sender saw it."""

    # By this end; otherwise by the other.
    sent: bool
    # With framing.
    num_bytes: int
    # From its first byte, or from when the link was free of the one before, until all was known there.
    seconds: float
    # When this end knew, on the channel's clock.
    at_s: float


@dataclass(slots=True)
class Traffic:
    """What has gone through a channel, all streams together."""

    # Frames, those sent again too.
    sent_bytes: int = 0
    received_bytes: int = 0
    # 1 if the link held.
    num_streams: int = 0
    peak_inbox_bytes: int = 0
    peak_kept_bytes: int = 0
    peak_kept_messages: int = 0

    def add(self, other: "Traffic") -> None:
        """Add what went through another channel; peaks are the higher of both."""
        for entry in fields(Traffic):
            own, more = getattr(self, entry.name), getattr(other, entry.name)
            setattr(
                self, entry.name, max(own, more) if entry.name.startswith("peak_") else own + more
            )


class FrameChannel(Generic[M]):
    """One end of the channel, safe between threads. Loops call `send`, `receive`, `poll` and `flush`, streams the rest.

    `kinds` are the messages. `patience_s` is how long `receive`, and `send` where it waits for room, wait without
    progress; then they raise `StreamLost`. `peer` names the other end in such messages.
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
        # Number of the present stream; even one that was detached keeps its number.
        self._stream_id = 0
        self._attached = False
        self._progress_s = clock()
        # As sender.
        self._next_number = 1
        self._unacknowledged: deque[_Unacknowledged] = deque()
        self._unacknowledged_bytes = 0
        # Number of the last message of which anything went out on the present stream.
        self._started = 0
        self._peer_used = 0
        self._peer_credit_bytes = 0
        # Numbers and costs of what the peer has not worked off.
        self._unused_by_peer: deque[tuple[int, int]] = deque()
        # When the link was last seen free of what was sent.
        self._free_s = -math.inf
        # As receiver.
        # Costs.
        self._inbox: deque[tuple[int, M]] = deque()
        self._inbox_bytes = 0
        self._received = 0
        self._used = 0
        self._arriving: _Arriving[M] | None = None
        # Bytes of the message that is arriving, on whichever stream most of it came.
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
            while (
                wait_for_room
                and self._unacknowledged
                and self._unacknowledged_bytes + cost_bytes(head, num_bytes)
                > self.limits.credit_bytes
            ):
                self._wait(began_s, "takes nothing of what it is sent")
            self._raise_failure()
            kept = _Unacknowledged(self._next_number, head, body, num_bytes)
            self._next_number += 1
            self._unacknowledged.append(kept)
            self._unacknowledged_bytes += kept.cost_bytes
            self.traffic.peak_kept_bytes = max(
                self.traffic.peak_kept_bytes, self._unacknowledged_bytes
            )
            self.traffic.peak_kept_messages = max(
                self.traffic.peak_kept_messages, len(self._unacknowledged)
            )
            self._changed.notify_all()

    def poll(self) -> M | None:
        """Return the next message if there is one. Raises what `fail` was given."""
        with self._changed:
            self._raise_failure()
            return self._pop() if self._inbox else None

    def receive(self, what: str = "message") -> M:
        """Return the next message, waiting for it. Raises what `fail` was given, and `StreamLost`."""
        message = self._wait_for_message(what, lambda: False)
        assert message is not None
        return message

    def receive_or_idle(self, what: str = "message") -> M | None:
        """Return the next message, or None as soon as `is_idle`, waiting for either. Raises as `receive` does."""
        return self._wait_for_message(what, self._all_started)

    @property
    def is_idle(self) -> bool:
        """Whether no message waits for the link: the sending of each has at least begun."""
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
        """Return the begin (on the channel's clock) and the bytes of what is in flight; None if nothing is."""
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
            if (
                not oldest - 1 <= received < self._next_number
                or not self._peer_used <= used <= received
                or credit_bytes < 1
            ):
                raise MalformedBytes(
                    f"a stream that says it has {received} messages and used {used}, with "
                    f"{credit_bytes} bytes of credit, where {oldest - 1} to {self._next_number - 1} can "
                    f"be and {self._peer_used} are used"
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
                        parts = (
                            sending.parts(self.limits.part_bytes) if sending is not None else None
                        )
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
                raise MalformedBytes(
                    f"a {kind or 'frame of an unknown kind'} in the middle of a stream"
                )
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- inside

    def _wait(self, began_s: float, complaint: str) -> None:
        self._raise_failure()
        left_s = max(began_s, self._progress_s) + self._patience_s - self._clock()
        if left_s <= 0:
            state = "" if self._attached else " and has no stream"
            raise StreamLost(
                f"{self.peer} {complaint}{state} for {self._patience_s:g} s; see whether it still works, "
                "and start the span again"
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
        if (
            not oldest - 1 <= credit.received <= self._started
            or not self._peer_used <= credit.used <= credit.received
        ):
            raise MalformedBytes(
                f"a credit for {credit.received} messages received and {credit.used} used, where "
                f"{self._started} were sent"
            )
        now_s = self._clock()
        if credit.received >= oldest or credit.used > self._peer_used:
            self._progress_s = now_s
        self._forget_received(credit.received, measure=True)
        self._note_used(credit.used)
        for transfer in credit.transfers:
            if transfer.seconds > 0 and transfer.num_bytes:
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
                f"a part of {len(part.body)} bytes, where {LARGEST_PART_BYTES} are the limit"
            )
        arriving = self._arriving
        if arriving is None:
            if part.index != 0 or not part.HasField("head"):
                raise MalformedBytes(
                    f"part {part.index} of message {part.number} before its beginning"
                )
            arriving = self._arriving = self._begin(part)
        if part.index != arriving.next_index or (part.index and part.HasField("head")):
            raise MalformedBytes(
                f"part {part.index} of message {part.number}, where part {arriving.next_index} is "
                "next"
            )
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
                f"a message of {cost} bytes beyond the credit: {self._inbox_bytes} of "
                f"{self.limits.credit_bytes} are waiting"
            )
        self.traffic.peak_inbox_bytes = max(self.traffic.peak_inbox_bytes, self._inbox_bytes + cost)
        # `begin` has seen to the limit.
        return _Arriving(
            decode,
            Assembly(part.num_bytes, f"message {part.number}", most_bytes=part.num_bytes),
            cost,
        )
