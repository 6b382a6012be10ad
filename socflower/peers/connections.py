"""gRPC calls that carry a stream: the end that dials, and the end that serves.

The first message of each direction is a greeting; the others are frames of the stream.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import grpc

from socflower.peers.resumable_stream import Stream, end_frame
from socflower.wire.arrays import MalformedBytes

Passes = Callable[[int], bool]
"""Blocks until that many bytes may pass; False if the line was closed meanwhile."""


def always(num_bytes: int) -> bool:
    """Let everything pass."""
    return True


class DialledCall:
    """One call with a greeting; once a stream is attached to it, it carries the stream's frames.

    `up` limits the rate of outgoing frames, `down` that of incoming ones. `and_then` is called when the call is ended
    at this end.
    """

    def __init__(
        self,
        method: grpc.StreamStreamMultiCallable,
        greeting: bytes,
        *,
        up: Passes = always,
        down: Passes = always,
        and_then: Callable[[], object] = lambda: None,
    ) -> None:
        self._up, self._down, self._and_then = up, down, and_then
        self._attached: SimpleQueue[Iterator[bytes]] = SimpleQueue()
        self._stream: Stream[Any] | None = None
        self._ended = Event()
        self._call = method(self._messages(greeting))
        self._call.add_done_callback(lambda _: self._ended.set())

    def answer(self) -> bytes:
        """Wait for the answer to the greeting; raise `StopIteration` if there is none, and what gRPC raises."""
        return bytes(next(self._call))

    def attach(self, stream: Stream[Any], *, received: int, used: int, credit_bytes: int) -> int:
        """Let a stream send and receive over this call, and return the id of the connection.

        The counts are those of the other end; raises `MalformedBytes` for impossible ones.
        """
        connection = stream.attach(
            received=received, used=used, credit_bytes=credit_bytes, on_detach=self.end
        )
        self._stream = stream
        self._attached.put(stream.frames(connection))
        return connection

    def read(self, stream: Stream[Any], connection: int) -> None:
        """Pass incoming frames to the stream until the call ends; raise what gRPC raises, and `MalformedBytes`."""
        for frame in self._call:
            if not self._down(len(frame)):
                return
            stream.on_frame(connection, frame)

    def end(self) -> None:
        """End the call and what belongs to it."""
        self._attached.put(iter(()))
        self._call.cancel()
        self._and_then()

    def has_ended(self) -> bool:
        """Whether the call has ended, for any reason."""
        return self._ended.is_set()

    def wait_finished(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until a stream that this end has finished was read to its end."""
        if self._stream is not None and self._stream.is_finishing:
            self._ended.wait(max(0.0, timeout_s))

    def _messages(self, greeting: bytes) -> Iterator[bytes]:
        yield greeting
        for frame in self._attached.get():
            if not self._up(len(frame)):
                return
            yield frame


def serve(
    stream: Stream[Any],
    connection: int,
    messages: Iterator[bytes],
    on_malformed: Callable[[MalformedBytes], bytes],
    on_end: Callable[[], None] = lambda: None,
) -> Iterator[bytes]:
    """Pass incoming messages to a stream, and yield its frames until the connection ends; then `on_end` is called.

    After a message that is no frame, the connection ends with the reason that `on_malformed` returns.
    """
    reasons: list[bytes] = []

    def read() -> None:
        # A broken call raises a bare Exception in gRPC.
        with suppress(Exception):
            try:
                for message in messages:
                    stream.on_frame(connection, message)
            except MalformedBytes as malformed:
                reasons.append(on_malformed(malformed))
        stream.detach(connection)
        on_end()

    # The thread that waits for a message cannot end the call; this one can.
    Thread(target=read, daemon=True).start()
    yield from stream.frames(connection)
    yield from map(end_frame, reasons)
