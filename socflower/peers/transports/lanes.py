"""Streams between the members of one generation of a ring or pipeline, over gRPC: with TLS, all bytes are encrypted.

A *lane* leads one way, from one member to another; two members may have several. The sender dials. A connection that
breaks is dialled again: no message is lost, and none arrives twice. A member is lost if it refuses connections, does
not answer pings, or cannot be reached for a heartbeat.
"""

import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from socflower.peers.collective import PeerLost
from socflower.peers.connections import DialledCall
from socflower.peers.resumable_stream import ChannelLimits, PlainMessages, Stream
from socflower.peers.transports.port import AttachedStream, Caller, PortView
from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import LARGEST_BODY_BYTES, LARGEST_PART_BYTES
from socflower.wire.secure_channel import (
    PeerFailed,
    PeerNotConnected,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    failure_of,
)

# Generation, lane, number of ranks that follow the header, the stream's id, messages received and used.
_GREETING = struct.Struct("!III8sQQ")
_NO_GREETING = (0, 0, -1, b"", 0, 0)
_COUNTS = struct.Struct("!QQ")
_RETRY_S = 0.02
_FOREVER_S = 1e9
LIMITS = ChannelLimits(part_bytes=LARGEST_PART_BYTES, credit_bytes=8 * LARGEST_PART_BYTES)
"""Limits of a lane.

A credit is asked for at half of the room. So `all_reduce.SEND_AHEAD` chunks beyond those that were used fit into the
other half, as a ring needs to make progress.
"""

_Key = tuple[int, int]
_Lane = Stream[memoryview]


@dataclass(slots=True)
class _Incoming:
    """A lane from another member; `ident` is the id that its sender has chosen, empty before it dials."""

    stream: _Lane
    ident: bytes = b""


class Lanes:
    """One member's lanes to and from the members `ranks` of a port, in generation `generation`.

    `accepts` says whether a lane from a rank belongs to this generation, and `kind` names lanes in errors. Messages
    have at most `most_bytes`. `on_lost` is called once, with the reason, when a member is lost or has left in the
    middle; all lanes end then. All methods raise `PeerLost` afterwards.
    """

    def __init__(
        self,
        port: PortView,
        method: str,
        ranks: Sequence[int],
        generation: int,
        heartbeat_s: float,
        *,
        accepts: Callable[[int, int], bool],
        on_lost: Callable[[str], None] = lambda why: None,
        most_bytes: int = LARGEST_BODY_BYTES,
    ) -> None:
        self._port, self._method, self._ranks = port, method, tuple(ranks)
        self._generation, self._heartbeat_s = generation, heartbeat_s
        self._accepts, self._on_lost, self._most_bytes = accepts, on_lost, most_bytes
        self._lock = threading.Lock()
        self._outgoing: dict[_Key, _Lane] = {}
        self._incoming: dict[_Key, _Incoming] = {}
        self._lost: str | None = None
        self._left = False
        port.handle_stream(method, self._admit)

    def send(self, rank: int, lane: int, message: memoryview) -> None:
        """Send a message; wait while much is on its way. A message of at most 1 MiB may change afterwards."""
        stream = self.open(rank, lane)
        # Before the lane has opened, a member that leaves could not deliver the message.
        stream.wait_replaced(0)
        stream.send(message, wait_for_room=True)

    def receive(self, rank: int, lane: int) -> memoryview:
        """Wait for the next message."""
        with self._lock:
            stream = self._incoming_lane((rank, lane)).stream
        return stream.receive()

    def open(self, rank: int, lane: int) -> _Lane:
        """Begin to dial, unless that was done before, and return the lane."""
        with self._lock:
            stream = self._outgoing.get((rank, lane))
            if stream is None:
                stream = self._outgoing[rank, lane] = self._new_stream(rank)
                keeping = (rank, lane, stream)
                threading.Thread(
                    target=self._keep_open, args=keeping, name="peer-lane", daemon=True
                ).start()
        return stream

    def reject(self, rank: int, what: str) -> PeerLost:
        """Report what is wrong with a message of a member, end all lanes, and return the error."""
        self._port.report_refused(self._port.address_of(rank), f"{what} of rank {rank}")
        self._lose(f"rank {rank} sent {what}")
        return PeerLost(f"rank {rank} sent {what}")

    def close(self, *, graceful: bool) -> None:
        """Leave; may be called twice. What was sent is delivered if it is `graceful`; else all members fail at once."""
        with self._lock:
            if self._left:
                return
            self._left = True
            outgoing = list(self._outgoing.values())
            incoming = [lane.stream for lane in self._incoming.values()]
        why = self._lost or f"rank {self._port.rank} has left"
        for stream in outgoing if graceful else ():
            stream.finish()
        for stream in incoming if graceful else (*outgoing, *incoming):
            stream.fail(PeerLost(why), farewell=b"" if graceful else why.encode())

    def _lose(self, why: str) -> None:
        with self._lock:
            first = self._lost is None and not self._left
            self._lost = self._lost or why
        if first:
            self.close(graceful=False)
            self._on_lost(why)

    def _new_stream(self, rank: int) -> _Lane:
        """Return a stream of messages to or from a member; the lock is held."""
        stream = Stream(
            f"rank {rank}",
            PlainMessages(self._most_bytes),
            limits=LIMITS,
            patience_s=_FOREVER_S,
            measured=False,
            end_error=lambda reason: PeerLost(_text(reason) or f"rank {rank} has left"),
        )
        if self._left:
            stream.fail(PeerLost(self._lost or f"rank {self._port.rank} has left"))
        return stream

    # --------------------------------------------------------------------------------------------------- outgoing

    def _keep_open(self, rank: int, lane: int, stream: _Lane) -> None:
        """Dial, and dial again when a connection breaks, until the lane has ended."""
        ident, was_open = secrets.token_bytes(8), False
        ranks = struct.pack(f"!{len(self._ranks)}I", *self._ranks)
        try:
            while not self._is_over(stream):
                header = (self._generation, lane, len(self._ranks), ident)
                greeting = _GREETING.pack(*header, *stream.received_and_used()) + ranks
                call, answer = self._dial(rank, greeting, stream, was_open=was_open)
                received, used = _COUNTS.unpack(answer)
                connection = call.attach(
                    stream, received=received, used=used, credit_bytes=LIMITS.credit_bytes
                )
                was_open = True
                self._read(call, rank, stream, connection)
                stream.detach(connection)
        except (PeerFailed, PeerLost) as failure:
            self._lose(str(failure))
        except (MalformedBytes, struct.error) as malformed:
            self.reject(rank, str(malformed))
        if stream.peer_end:
            self._lose(_text(stream.peer_end))
        stream.fail(PeerLost(self._lost or f"rank {rank} has left"))

    def _is_over(self, stream: _Lane) -> bool:
        return stream.failure is not None or stream.is_finishing or stream.peer_end is not None

    def _dial(
        self, rank: int, greeting: bytes, stream: _Lane, *, was_open: bool
    ) -> tuple[DialledCall, bytes]:
        """Return a call that the other end has accepted, and its answer."""
        unreachable_since_s: float | None = None
        while not self._is_over(stream):
            try:
                return self._port.open_stream(rank, self._method, greeting)
            except PeerNotReady:
                unreachable_since_s = None
            except PeerUnreachable as failure:
                # The port was reachable when the members agreed on the generation; a connection may need another
                # attempt. A process that was reachable here and refuses connections now is dead.
                now_s = time.monotonic()
                unreachable_since_s = unreachable_since_s or now_s
                is_dead = was_open and isinstance(failure, PeerNotConnected)
                if is_dead or now_s > unreachable_since_s + self._heartbeat_s:
                    raise
            time.sleep(_RETRY_S)
        raise PeerLost(f"rank {rank} has left")

    def _read(self, call: DialledCall, rank: int, stream: _Lane, connection: int) -> None:
        """Read credits until the call ends; return if dialling again may help, else raise `PeerFailed`."""
        try:
            call.read(stream, connection)
        except grpc.RpcError as error:
            failure = failure_of(f"rank {rank}", error)
            if not isinstance(failure, PeerUnreachable):
                raise failure from None

    # --------------------------------------------------------------------------------------------------- incoming

    def _incoming_lane(self, key: _Key) -> _Incoming:
        """Return a lane from another member; the lock is held."""
        if key not in self._incoming:
            self._incoming[key] = _Incoming(self._new_stream(key[0]))
        return self._incoming[key]

    def _admit(self, caller: Caller, greeting: bytes) -> AttachedStream:
        generation, lane, num_ranks, ident, received, used = (
            _GREETING.unpack_from(greeting) if len(greeting) >= _GREETING.size else _NO_GREETING
        )
        if generation > self._generation:
            raise PeerNotReady(f"generation {generation} has not begun here")
        ranks, what = greeting[_GREETING.size :], ""
        with self._lock:
            if generation < self._generation or self._left or len(ranks) != 4 * num_ranks:
                what = f"a stream of generation {generation}, which is over"
            elif struct.unpack(f"!{num_ranks}I", ranks) != self._ranks:
                what = f"a stream for other members than {list(self._ranks)}"
            elif not self._accepts(caller.rank, lane):
                what = f"a stream of lane {lane}, which belongs to another rank"
            else:
                incoming = self._incoming_lane((caller.rank, lane))
                if incoming.ident not in (b"", ident):
                    what = f"a second stream of lane {lane}"
                incoming.ident = incoming.ident or ident
        if not what:
            try:
                return self._attach(incoming.stream, caller.rank, received, used)
            except MalformedBytes as malformed:
                what = str(malformed)
        what = f"{what} (rank {caller.rank})"
        self._port.report_refused(caller.address, what)
        raise PeerRefused(f"refused {what}")

    def _attach(self, stream: _Lane, rank: int, received: int, used: int) -> AttachedStream:
        connection = stream.attach(received=received, used=used, credit_bytes=LIMITS.credit_bytes)

        def on_malformed(malformed: MalformedBytes) -> bytes:
            self.reject(rank, str(malformed))
            return str(malformed).encode()

        def on_end() -> None:
            if stream.peer_end:
                self._lose(_text(stream.peer_end))
            elif stream.peer_end is None and not stream.wait_replaced(
                connection, self._heartbeat_s
            ):
                self._lose(f"rank {rank} is lost")

        return AttachedStream(
            stream=stream,
            connection=connection,
            answer=_COUNTS.pack(*stream.received_and_used()),
            on_malformed=on_malformed,
            on_end=on_end,
        )


def _text(reason: bytes) -> str:
    """Return another member's reason as a short line."""
    return " ".join(reason[:500].decode(errors="replace").split())
