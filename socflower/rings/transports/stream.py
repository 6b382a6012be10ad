"""A member's stream to another: messages go in order, and wait while the other side does not read.

Also the three ways in which a call can fail: the other member is dead, hangs, or refuses.
"""

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition
from typing import Any

import grpc


class PeerUnreachable(Exception):
    """Nobody listens there, or the connection broke: it has not begun yet, or it is dead."""


class PeerNotReady(PeerUnreachable):
    """It listens but does not take this call yet; try again."""


class PeerSilent(Exception):
    """It does not answer: the time was up, or its machine or process hangs."""


class PeerRefused(Exception):
    """It answered that it does not want this; the text says why. Handlers raise it to say so."""


def failure_of(peer: str, error: Any) -> Exception:
    """Return what the status of an ended gRPC call means."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.INVALID_ARGUMENT):
        return PeerRefused(f"{peer}: {details}")
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return PeerNotReady(f"{peer}: {details}")
    if code == grpc.StatusCode.UNKNOWN:  # its handler raised
        return PeerRefused(f"{peer} failed: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerSilent(f"{peer} did not answer in time")
    # gRPC has one code for "refused", "broken" and "hangs"; only its words tell them apart.
    if any(word in details.lower() for word in ("keepalive", "ping timeout", "timeout", "timed out")):
        return PeerSilent(f"{peer} hangs ({details})")
    return PeerUnreachable(f"{peer} cannot be reached ({details})")


_QUEUED_MESSAGES = 2  # besides the one on its way
_STATUS_S = 1.0


class OutgoingStream:
    """A stream of messages to one member, in order; what is written waits while the member does not read."""

    def __init__(self, peer: str, method: grpc.StreamUnaryMultiCallable, metadata: Any) -> None:
        self._peer = peer
        self._waiting: deque[bytes] = deque()
        self._changed = Condition()
        self._ended: Exception | None = None
        self._finishing = False
        self._call = method.future(self._messages(), metadata=metadata)
        self._call.add_done_callback(self._end)

    def agreement(self) -> Any:
        """Wait for the other side's answer to the opening and return its metadata; raise what `call` raises."""
        metadata = self._call.initial_metadata()
        if not metadata:  # gRPC reports this a little before it reports that, and why, the call has failed
            with self._changed:
                self._changed.wait_for(lambda: self._ended, _STATUS_S)
        if self._ended:
            raise self._ended
        return metadata

    def write(self, message: bytes) -> None:
        """Queue a message; wait while the queue is full; raise `PeerUnreachable`, `PeerSilent` or `PeerRefused`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._waiting) < _QUEUED_MESSAGES)
            if self._ended:
                raise self._ended
            self._waiting.append(message)
            self._changed.notify_all()

    def finish(self) -> None:
        """Write no more: the other side reads what was written, and then the end."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def wait_finished(self, timeout_s: float) -> None:
        """Wait, but not long, until a stream that was finished has been read to its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._finishing, max(0.0, timeout_s))

    def has_ended(self) -> bool:
        """Whether it is over, for whatever reason."""
        return self._ended is not None

    def on_end(self, look: Callable[[Exception | None], None]) -> None:
        """Have `look` called, once, when the stream has ended: with what broke it, None if that was in peace."""
        self._call.add_done_callback(
            lambda _: look(None if self._call.code() == grpc.StatusCode.OK else failure_of(self._peer, self._call)))

    def cancel(self) -> None:
        """End it at once."""
        self._call.cancel()

    def _messages(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._waiting or self._finishing)
                if self._ended or not self._waiting:
                    return
                message = self._waiting.popleft()
                self._changed.notify_all()
            yield message

    def _end(self, _: object) -> None:
        failure = PeerUnreachable(f"{self._peer} has ended the stream") if self._call.code() == grpc.StatusCode.OK \
            else failure_of(self._peer, self._call)
        with self._changed:
            self._ended = failure
            self._changed.notify_all()
