"""A member's stream of messages to another member, in order and with flow control."""

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition

import grpc

from socflower.wire.secure_channel import PeerUnreachable, failure_of

# Without the message that is being sent.
_QUEUED_MESSAGES = 2


class OutgoingStream:
    """A stream of messages to one member, in order; `write` blocks while the member does not read."""

    def __init__(self, peer: str, method: grpc.StreamStreamMultiCallable, opening: bytes) -> None:
        self._peer = peer
        self._waiting: deque[bytes] = deque([opening])
        self._changed = Condition()
        self._ended: Exception | None = None
        self._finishing = False
        self._call = method(self._messages())
        self._call.add_done_callback(self._end)

    def wait_accepted(self) -> None:
        """Wait until the peer has accepted the stream; raise what `RingPort.call` raises, and `ForgedAnswer`."""
        try:
            next(self._call)
        except StopIteration:
            raise PeerUnreachable(f"{self._peer} has ended the stream") from None
        except grpc.RpcError as error:
            raise failure_of(self._peer, error) from None
        except ValueError:
            # This is how gRPC reports a channel that another thread has closed.
            raise PeerUnreachable("this ring port is closed") from None

    def write(self, message: bytes) -> None:
        """Queue a message; wait while the queue is full; raise `PeerUnreachable`, `PeerSilent` or `PeerRefused`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._waiting) < _QUEUED_MESSAGES)
            if self._ended:
                raise self._ended
            self._waiting.append(message)
            self._changed.notify_all()

    def finish(self) -> None:
        """End the stream after the messages that were written."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def wait_finished(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until a finished stream has been read to its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._finishing, max(0.0, timeout_s))

    def has_ended(self) -> bool:
        """Whether the stream has ended, for any reason."""
        return self._ended is not None

    def on_end(self, callback: Callable[[Exception | None], None]) -> None:
        """Call `callback` once when the stream has ended, with its failure, or None if it ended normally."""
        self._call.add_done_callback(
            lambda _: callback(
                None
                if self._call.code() == grpc.StatusCode.OK
                else failure_of(self._peer, self._call)
            )
        )

    def cancel(self) -> None:
        """End the stream at once."""
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
        failure = (
            PeerUnreachable(f"{self._peer} has ended the stream")
            if self._call.code() == grpc.StatusCode.OK
            else failure_of(self._peer, self._call)
        )
        with self._changed:
            self._ended = failure
            self._changed.notify_all()
