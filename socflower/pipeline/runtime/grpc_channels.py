"""A pipeline's messages over gRPC streams, for any network: with TLS all bytes are encrypted."""

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from socflower.peers.collective import PeerLost
from socflower.peers.transports.all_reduce import MAX_CHUNK_BYTES, SEND_AHEAD
from socflower.peers.transports.port import Caller, PortView, Reader
from socflower.peers.transports.stream import OutgoingStream
from socflower.pipeline.runtime.channels import Channels, Fetched
from socflower.pipeline.runtime.messages import LANES
from socflower.wire.framing import Assembly
from socflower.wire.secure_channel import PeerNotReady, PeerRefused, PeerSilent, PeerUnreachable

_METHOD = "pipeline"
# Generation and lane.
_OPENING = struct.Struct("!II")
# Length of the message that follows.
_LENGTH = struct.Struct("!Q")
_RETRY_S = 0.02

_Key = tuple[int, str]


class GrpcChannels(Channels):
    """The lanes of one device among `socs`, whose ranks in `port` are `ranks`, in the same order.

    Each lane is a stream of its own, which opens with its first message. `heartbeat_s` is how long a device may be
    unreachable at that time. A device that dies or hangs ends all lanes of the devices that it has lanes with.
    """

    def __init__(
        self,
        port: PortView,
        socs: Sequence[int],
        ranks: Sequence[int],
        generation: int,
        heartbeat_s: float,
    ) -> None:
        super().__init__(socs[list(ranks).index(port.rank)])
        self._port, self._generation, self._heartbeat_s = port, generation, heartbeat_s
        self._rank_of = dict(zip(socs, ranks, strict=True))
        self._soc_of = dict(zip(ranks, socs, strict=True))
        self._streams: dict[_Key, OutgoingStream] = {}
        self._parts: dict[_Key, deque[bytes]] = {}
        self._ended: set[_Key] = set()
        # Lanes whose streams were admitted.
        self._read: set[_Key] = set()
        self._moved = threading.Condition()
        self._is_shut = self._is_graceful = False
        port.handle_stream(_METHOD, self._admit)

    def close(self) -> None:
        """Leave the pipeline; messages that were sent before are still delivered unless the pipeline has failed."""
        self._is_graceful = self._failure is None
        super().close()

    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        try:
            stream = self._stream(target, lane)
            stream.write(_LENGTH.pack(len(body)))
            for start in range(0, len(body), MAX_CHUNK_BYTES):
                stream.write(bytes(body[start : start + MAX_CHUNK_BYTES]))
        except (PeerUnreachable, PeerSilent, PeerRefused) as failure:
            raise PeerLost(str(failure)) from None

    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> Fetched:
        # A stream delivers its messages without a request.
        return lambda: self._next(source, lane, num_bytes)

    def _next(self, source: int, lane: str, num_bytes: int | None) -> memoryview:
        key = (source, lane)
        head = self._take(key)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        if length < 0 or num_bytes not in (None, length):
            raise self._malformed(source, f"a message of {lane} that is not of {num_bytes} bytes")
        arriving = Assembly(length, f"a message of {lane}")
        while arriving.missing_bytes:
            part = self._take(key)
            if not 0 < len(part) <= arriving.missing_bytes:
                raise self._malformed(source, f"a part of {lane} of {len(part)} bytes")
            arriving.add(part)
        return arriving.whole()

    def _shut_down(self) -> None:
        with self._moved:
            self._is_shut = True
            streams = list(self._streams.values())
            self._moved.notify_all()
        for stream in streams:
            if self._is_graceful:
                stream.finish()
            else:
                stream.cancel()

    def _take(self, key: _Key) -> bytes:
        with self._moved:
            parts = self._parts.setdefault(key, deque())
            self._moved.wait_for(lambda: self._is_shut or parts or key in self._ended)
            if not parts:
                left = self.soc if self._is_shut else key[0]
                raise PeerLost(f"SoC {left} has left the pipeline")
            part = parts.popleft()
            self._moved.notify_all()
            return part

    def _malformed(self, source: int, what: str) -> PeerLost:
        rank = self._rank_of[source]
        self._port.report_refused(self._port.address_of(rank), f"{what} of rank {rank}")
        return PeerLost(f"rank {rank} sent {what}")

    # ------------------------------------------------------------------------------------------------- outgoing

    def _stream(self, target: int, lane: str) -> OutgoingStream:
        """Return the stream of a lane; open it at its first use."""
        if (target, lane) in self._streams:
            return self._streams[target, lane]
        opening = _OPENING.pack(self._generation, LANES.index(lane))
        unreachable_since_s: float | None = None
        while not self._is_shut:
            try:
                stream = self._port.open_stream(self._rank_of[target], _METHOD, opening)
            except PeerNotReady:
                unreachable_since_s = None
            except PeerUnreachable:
                # The port was reachable when the members agreed on the pipeline; a connection may need another try.
                now_s = time.monotonic()
                unreachable_since_s = unreachable_since_s or now_s
                if now_s > unreachable_since_s + self._heartbeat_s:
                    raise
            else:
                stream.on_end(self._on_end)
                with self._moved:
                    self._streams[target, lane] = stream
                return stream
            time.sleep(_RETRY_S)
        raise PeerLost(f"SoC {self.soc} has left the pipeline")

    def _on_end(self, failure: Exception | None) -> None:
        if failure is not None and not self._is_shut:
            self._fail(str(failure))

    # ------------------------------------------------------------------------------------------------- incoming

    def _admit(self, caller: Caller, opening: bytes) -> Reader:
        generation, lane = _OPENING.unpack(opening) if len(opening) == _OPENING.size else (-1, 0)
        if generation > self._generation:
            raise PeerNotReady(f"generation {generation} has not begun here")
        what = None
        with self._moved:
            if generation < self._generation or self._is_shut:
                what = f"a stream of generation {generation}, which is over"
            elif caller.rank not in self._soc_of or lane >= len(LANES):
                what = "a stream of no lane of this pipeline"
            else:
                key = (self._soc_of[caller.rank], LANES[lane])
                if key in self._read:
                    what = f"a second stream of {LANES[lane]}"
                self._read.add(key)
        if what is not None:
            what = f"{what} (rank {caller.rank})"
            self._port.report_refused(caller.address, what)
            raise PeerRefused(f"refused {what}")
        return _LaneReader(self, key)

    def on_part(self, key: _Key, part: bytes) -> None:
        """Queue a part of a message, after waiting while many are queued.

        Raises `PeerUnreachable` once this device has left.
        """
        with self._moved:
            parts = self._parts.setdefault(key, deque())
            self._moved.wait_for(lambda: self._is_shut or len(parts) < SEND_AHEAD)
            if self._is_shut:
                raise PeerUnreachable("the pipeline has been left")
            parts.append(part)
            self._moved.notify_all()

    def on_lane_end(self, key: _Key, lost: str) -> None:
        """Record the end of a lane; `lost` is the reason if the stream broke."""
        with self._moved:
            self._ended.add(key)
            self._moved.notify_all()
        if lost and not self._is_shut:
            self._fail(lost)

    def await_end(self, key: _Key) -> None:
        """Wait until a lane has ended or this device has left; raise `PeerRefused` if this device has failed."""
        with self._moved:
            self._moved.wait_for(lambda: self._is_shut or key in self._ended)
            if self._is_shut and not self._is_graceful:
                raise PeerRefused(self._failure or "the pipeline has been left")


class _LaneReader:
    """Reads one lane's stream."""

    def __init__(self, channels: GrpcChannels, key: _Key) -> None:
        self._channels, self._key = channels, key

    def read(self, messages: Iterator[bytes]) -> None:
        """Read to the end."""
        lost = ""
        try:
            for message in messages:
                self._channels.on_part(self._key, message)
        except PeerUnreachable:
            lost = f"SoC {self._key[0]} is lost"
        self._channels.on_lane_end(self._key, lost)

    def wait(self) -> None:
        """Keep the stream open until its sender ends it or this device leaves."""
        self._channels.await_end(self._key)
