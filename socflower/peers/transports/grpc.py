"""A ring over gRPC streams, for any network: with TLS, all bytes are encrypted and both ends have certificates."""

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

from socflower.peers.collective import PeerLost
from socflower.peers.transports.all_reduce import MAX_CHUNK_BYTES, SEND_AHEAD
from socflower.peers.transports.links import LinkedRing
from socflower.peers.transports.port import Caller, PortView, Reader
from socflower.peers.transports.stream import OutgoingStream
from socflower.wire.secure_channel import PeerNotReady, PeerRefused, PeerSilent, PeerUnreachable

_METHOD = "exchange"
# The generation, the chunk's number and the payload's length.
_HEADER = struct.Struct("!IQI")
_RETRY_S = 0.02


class GrpcRing(LinkedRing):
    """One generation of a ring among the members `ranks` of a port's addresses, in ring order.

    Each member keeps one stream open to the next. Returns at once; the stream opens as soon as the next member is in
    the same generation. `heartbeat_s` is how long that member may be unreachable meanwhile. A neighbour that dies or
    hangs breaks the ring; a slow one does not.
    """

    def __init__(
        self, port: PortView, ranks: Sequence[int], generation: int, heartbeat_s: float
    ) -> None:
        links = _StreamLinks(port, tuple(ranks), generation, heartbeat_s)
        super().__init__(links, list(ranks).index(port.rank), len(ranks), "grpc")


class _StreamLinks:
    """The stream to the next member and the one from the previous member.

    `_broken` ends all operations at once. `_next_left` ends sending; `_previous_left` ends receiving once the queue is
    empty.
    """

    def __init__(
        self, port: PortView, ranks: tuple[int, ...], generation: int, heartbeat_s: float
    ) -> None:
        position = ranks.index(port.rank)
        self._port = port
        self._next = ranks[(position + 1) % len(ranks)]
        self._previous = ranks[position - 1]
        self._generation = generation
        self._ranks = ranks
        self._heartbeat_s = heartbeat_s
        self._num_sent = 0
        self._changed = threading.Condition()
        self._stream: OutgoingStream | None = None
        self._arrived: deque[memoryview] = deque()
        self._is_read = False
        self._broken: str | None = None
        self._next_left = False
        self._previous_left = False
        self._left = False
        port.handle_stream(_METHOD, self._admit)
        if len(ranks) > 1:
            threading.Thread(target=self._open, name="ring-open", daemon=True).start()

    def send(self, chunk: memoryview) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._next_left or self._stream)
            self._require_open(not self._next_left, f"rank {self._next} has left the ring")
            stream = self._stream
        if stream is None:
            raise PeerLost("the stream has not opened")
        message = b"".join((_HEADER.pack(self._generation, self._num_sent, chunk.nbytes), chunk))
        try:
            stream.write(message)
        except (PeerUnreachable, PeerSilent, PeerRefused) as failure:
            raise PeerLost(str(failure)) from None
        self._num_sent += 1

    def receive(self, num_bytes: int) -> memoryview:
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._arrived or self._previous_left)
            self._require_open(bool(self._arrived), f"rank {self._previous} has left the ring")
            chunk = self._arrived.popleft()
            self._changed.notify_all()
        if chunk.nbytes != num_bytes:
            self._reject_chunk(f"a chunk of {chunk.nbytes} bytes where {num_bytes} belong")
        return chunk

    def close(self, graceful: bool) -> None:
        with self._changed:
            if self._left:
                return
            self._left = True
            stream, self._stream = self._stream, None
            if not graceful:
                self._broken = self._broken or f"rank {self._port.rank} has left the ring"
            self._next_left = self._previous_left = True
            self._changed.notify_all()
        if stream is not None:
            if graceful:
                stream.finish()
            else:
                stream.cancel()

    # --------------------------------------------------------------------------------------- to the next

    def _open(self) -> None:
        opening = struct.pack(f"!{1 + len(self._ranks)}I", self._generation, *self._ranks)
        unreachable_since_s: float | None = None
        while not self._left:
            try:
                stream = self._port.open_stream(self._next, _METHOD, opening)
            except PeerNotReady:
                unreachable_since_s = None
            except PeerUnreachable as failure:
                # Its port was reachable when the members agreed on the ring; a connection may need
                # a second attempt.
                now_s = time.monotonic()
                unreachable_since_s = unreachable_since_s or now_s
                if now_s > unreachable_since_s + self._heartbeat_s:
                    return self._break(str(failure))
            except (PeerSilent, PeerRefused) as failure:
                return self._break(str(failure))
            else:
                return self._use(stream)
            time.sleep(_RETRY_S)

    def _use(self, stream: OutgoingStream) -> None:
        with self._changed:
            if not self._left:
                self._stream = stream
            self._changed.notify_all()
        if self._stream is None:
            stream.cancel()
        else:
            stream.on_end(self._on_end)

    def _on_end(self, failure: Exception | None) -> None:
        if failure is not None:
            self._break(str(failure))
        with self._changed:
            self._next_left = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------ from the one before

    def _admit(self, caller: Caller, opening: bytes) -> Reader:
        generation, *ranks = struct.unpack(
            f"!{len(opening) // 4}I", opening[: len(opening) // 4 * 4]
        ) or (0,)
        if generation > self._generation:
            raise PeerNotReady(f"generation {generation} has not begun here")
        with self._changed:
            what = None
            if generation < self._generation or self._left:
                what = f"a stream of generation {generation}, which is over"
            elif tuple(ranks) != self._ranks or len(opening) % 4:
                what = f"a stream for another ring than {list(self._ranks)}"
            elif caller.rank != self._previous or self._is_read:
                what = f"a stream that belongs to rank {self._previous} alone, and once"
            else:
                self._is_read = True
        if what is not None:
            what = f"{what} (rank {caller.rank})"
            self._port.report_refused(caller.address, what)
            raise PeerRefused(f"refused {what}")
        return self

    def read(self, messages: Iterator[bytes]) -> None:
        """Receive the previous member's chunks; a chunk out of order breaks the ring."""
        num_accepted = 0
        try:
            for message in messages:
                self._accept_chunk(message, num_accepted)
                num_accepted += 1
            with self._changed:
                self._previous_left = True
                self._changed.notify_all()
        except PeerUnreachable:
            self._break(f"rank {self._previous} is gone")
        except PeerLost as lost:
            self._break(str(lost))

    def wait(self) -> None:
        """Keep the stream open until its sender ends it or this member leaves."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._previous_left)
            if self._broken:
                raise PeerRefused(self._broken)

    def _accept_chunk(self, message: bytes, number: int) -> None:
        payload = memoryview(message)[_HEADER.size :]
        if not 0 < payload.nbytes <= MAX_CHUNK_BYTES:
            self._reject_chunk(f"a message of {len(message)} bytes")
        if _HEADER.unpack_from(message) != (self._generation, number, payload.nbytes):
            self._reject_chunk("a chunk out of order or of a wrong length")
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken or self._left or len(self._arrived) < SEND_AHEAD
            )
            self._require_open(not self._left, "the ring has been left")
            self._arrived.append(payload)
            self._changed.notify_all()

    def _reject_chunk(self, what: str) -> NoReturn:
        self._port.report_refused(
            self._port.address_of(self._previous), f"{what} of rank {self._previous}"
        )
        raise PeerLost(f"rank {self._previous} sent {what}")

    def _require_open(self, condition: bool, otherwise: str) -> None:
        if self._broken or not condition:
            raise PeerLost(self._broken or otherwise)

    def _break(self, why: str) -> None:
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()
