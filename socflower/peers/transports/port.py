"""The port of a ring's member: calls and streams that are authenticated with the group's token.

A gRPC service with plain bytes, over the project's secure channel: `wire/authentication.py` says who gets in. A
connection that never becomes a call (no certificate, no HTTP/2) is closed by gRPC without notice to Python.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from socflower.errors import ConfigError
from socflower.peers.connections import DialledCall, serve
from socflower.peers.resumable_stream import Stream
from socflower.wire.arrays import MalformedBytes
from socflower.wire.authentication import (
    OVERHEAD_BYTES,
    ClientAuthentication,
    ForgedAnswer,
    ServerAuthentication,
    caller_of,
)
from socflower.wire.logs import Log, RefusalLog, warn
from socflower.wire.secure_channel import (
    Address,
    PeerNotConnected,
    PeerNotReady,
    PeerOfOtherVersion,
    PeerRefused,
    PeerUnreachable,
    Tls,
    bind_server,
    failure_of,
    open_channel,
)

CALL_LIMIT_BYTES = 4 << 20
"""The maximum size of the body of a call or of its answer; larger payloads are sent as a stream."""

PROTOCOL_VERSION = 2
"""Increased whenever an older member would misunderstand a newer one."""

_SERVICE = "socflower.Ring"
_STREAM = "-stream"
"""What a stream's method ends with."""

_CLOSE_TIMEOUT_S = 1.0
_STOP_GRACE_S = 0.05
_REFUSAL_LINES_PER_MINUTE = 3
_REMEDY = "the ring has no TLS; give ring-ca, ring-certificate and ring-key, or ring-trusted=true"


@dataclass(frozen=True)
class Caller:
    """The authenticated sender of a call."""

    rank: int
    address: str
    is_active: Callable[[], bool]
    """False once the caller died, closed the connection, or stopped answering pings."""


Handler: TypeAlias = Callable[[Caller, bytes], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedStream:
    """A stream to which a caller's connection was attached."""

    stream: Stream[Any]
    connection: int
    # The answer to the caller's greeting.
    answer: bytes
    # Called with what is wrong if the caller sends no frames; returns the reason that it gets.
    on_malformed: Callable[[MalformedBytes], bytes]
    # Called in a thread when the connection has ended, for any reason.
    on_end: Callable[[], None]


Admission: TypeAlias = Callable[[Caller, bytes], AttachedStream]
"""Checks a caller and the greeting of its stream; raises `PeerRefused` or `PeerNotReady`."""


class PortView(Protocol):
    """What rings use of a port: `RingPort`, or a view of it with other ranks."""

    rank: int

    def address_of(self, rank: int) -> str:
        """Return the address of a member."""
        ...

    def handle(self, method: str, handler: Handler) -> None:
        """See `RingPort.handle`."""
        ...

    def handle_stream(self, method: str, admission: Admission) -> None:
        """See `RingPort.handle_stream`."""
        ...

    def call(self, rank: int, method: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """See `RingPort.call`."""
        ...

    def open_stream(self, rank: int, method: str, greeting: bytes) -> tuple[DialledCall, bytes]:
        """See `RingPort.open_stream`."""
        ...

    def report_refused(self, peer: str, what: str) -> None:
        """See `RingPort.report_refused`."""
        ...


class RingPort:
    """A member's end of the ring's calls and streams.

    Handlers run in threads and may block, if they check `caller.is_active()` regularly. `heartbeat_s` is how long a
    peer may leave pings unanswered, in either direction, before its calls end with `PeerSilent`; gRPC answers pings in
    its own threads, also while Python computes. Binding is retried for `bind_timeout_s`, since the process of the
    previous round may still hold the port. Port 0 asks for a free one. Raises `ConfigError` if the address cannot be
    used, if a peer's address is not private and there is no TLS (unless `trusted`), or if a certificate cannot be read.
    """

    version = PROTOCOL_VERSION

    def __init__(
        self,
        listen: str,
        *,
        rank: int,
        addresses: Sequence[str],
        token: bytes,
        tls: Tls | None,
        heartbeat_s: float,
        bind_timeout_s: float = 30,
        trusted: bool = False,
        log: Log = warn,
    ) -> None:
        here = Address.parse(listen, "ring address")
        if not tls and not trusted:
            for address in (here, *(Address.parse(text, "ring address") for text in addresses)):
                address.require_private(_REMEDY)
        if tls and not (tls.ca and tls.certificate):
            raise ConfigError("ring: TLS is mutual; give ring-ca, ring-certificate and ring-key")
        self.rank = rank
        self.addresses = tuple(addresses)
        self._ranks = frozenset(str(member) for member in range(len(self.addresses)))
        self.trusted = trusted
        self.heartbeat_s = heartbeat_s
        self._token = token
        self._refusals = RefusalLog(
            log, what="ring port", lines_per_period=_REFUSAL_LINES_PER_MINUTE
        )
        self._handlers: dict[str, Handler] = {}
        self._admissions: dict[str, Admission] = {}
        self._lock = Lock()
        self._closed = False
        self._streams: list[DialledCall] = []
        self._channels: dict[tuple[int, bool], grpc.Channel] = {}
        self._tls = tls
        if tls is not None:
            # Refuses files that cannot be read.
            tls.channel_credentials()
        authentication = ServerAuthentication(
            self._tokens_of, tls=tls is not None, receiver=str(rank), on_refused=self.report_refused
        )
        # Threads for blocking calls (joins, streams) of every member, and for further calls.
        self._server = bind_server(
            here,
            tls,
            [_Dispatch(self)],
            interceptors=[authentication],
            num_threads=4 * len(self.addresses) + 8,
            heartbeat_s=heartbeat_s,
            max_message_bytes=CALL_LIMIT_BYTES + OVERHEAD_BYTES,
            bind_timeout_s=bind_timeout_s,
        )
        self.host, self.port = self._server.address.host, self._server.address.port
        self._server.start()

    def address_of(self, rank: int) -> str:
        """Return the address of a member."""
        return self.addresses[rank]

    def handle(self, method: str, handler: Handler) -> None:
        """Answer calls of `method` from now on; earlier callers get `PeerNotReady`."""
        self._handlers[method] = handler

    def handle_stream(self, method: str, admission: Admission) -> None:
        """Accept streams of `method` from now on, in place of an earlier admission."""
        self._admissions[method] = admission

    def call(self, rank: int, method: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Return the answer of member `rank`; raise `PeerUnreachable`, `PeerSilent` or `PeerRefused`."""
        if len(body) > CALL_LIMIT_BYTES:
            raise ValueError(f"a call's body has at most {CALL_LIMIT_BYTES} bytes, not {len(body)}")
        try:
            return self._call_on(self._channel(rank, own=False), rank, method, body, timeout_s)
        except PeerNotConnected:
            # A channel that could not connect repeats that error until it has tried again, and the
            # member may have started meanwhile. A new channel tries at once; nothing of the call
            # has been sent.
            channel = self._new_channel(rank)
            try:
                return self._call_on(channel, rank, method, body, timeout_s)
            finally:
                channel.close()

    def _call_on(
        self, channel: grpc.Channel, rank: int, method: str, body: bytes, timeout_s: float
    ) -> bytes:
        peer = self._name(rank)
        try:
            return bytes(channel.unary_unary(self._path(method))(body, timeout=timeout_s))
        except grpc.RpcError as error:
            raise failure_of(peer, error) from None
        except ForgedAnswer:
            raise self._forged(peer) from None
        except ValueError:
            # This is how gRPC reports a channel that another thread has closed.
            raise PeerUnreachable("this ring port is closed") from None

    def open_stream(self, rank: int, method: str, greeting: bytes) -> tuple[DialledCall, bytes]:
        """Return a call that member `rank` has accepted as a stream, and its answer; raise as `call` does.

        Streams have a connection of their own, so that calls and pings do not queue behind parts of messages.
        """
        peer = self._name(rank)
        path = self._path(method + _STREAM)
        call = DialledCall(self._channel(rank, own=True).stream_stream(path), greeting)
        try:
            answer = call.answer()
        except BaseException as error:
            call.end()
            if isinstance(error, ForgedAnswer):
                raise self._forged(peer) from None
            if isinstance(error, grpc.RpcError):
                raise failure_of(peer, error) from None
            if isinstance(error, StopIteration):
                raise PeerUnreachable(f"{peer} has ended the stream") from None
            if isinstance(error, ValueError):
                # This is how gRPC reports a channel that another thread has closed.
                raise PeerUnreachable("this ring port is closed") from None
            raise
        with self._lock:
            self._streams = [*(each for each in self._streams if not each.has_ended()), call]
        return call, answer

    def report_refused(self, peer: str, what: str) -> None:
        """Log that `what` of `peer` (an address) was refused, subject to a rate limit per peer."""
        self._refusals.report(peer, f"ring port: refused {what} from {peer}; the run is unharmed")

    def close(self) -> None:
        """End all calls and streams at once, in both directions. May be called twice.

        Only a stream that was finished gracefully gets a moment to send its queued messages.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for stream in self._streams:
            stream.wait_finished(deadline_s - time.monotonic())
        for channel in channels:
            channel.close()
        # Without grace, gRPC sends an internal error to each peer, whose gRPC prints it on stderr.
        self._server.stop(_STOP_GRACE_S)
        self._refusals.flush(everything=True)

    # ------------------------------------------------------------------------------------------ as server

    def answer(self, method: str, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer an authenticated call."""
        handler = self._handlers.get(method)
        if handler is None:
            raise PeerNotReady(f"{method!r} is not taken here yet")
        return handler(self._caller(context), body)

    def read_stream(
        self, method: str, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Serve an authenticated stream."""
        admission = self._admissions.get(method)
        if admission is None:
            raise PeerNotReady(f"{method!r} is not taken here yet")
        try:
            greeting = bytes(next(messages, b""))
        except PeerRefused:
            raise
        except Exception:
            # A broken stream raises a bare Exception in gRPC.
            raise PeerRefused("a stream broke off before its greeting") from None
        admitted = admission(self._caller(context), greeting)
        context.add_callback(lambda: admitted.stream.detach(admitted.connection))
        yield admitted.answer
        yield from serve(
            admitted.stream, admitted.connection, messages, admitted.on_malformed, admitted.on_end
        )

    def refuse_version(self, version: str, context: grpc.ServicerContext) -> NoReturn:
        """Refuse an authenticated caller of another version."""
        caller = caller_of(context)
        what = f"a call of version {version} of the peers' protocol"
        self.report_refused(context.peer(), f"{what} by rank {caller}; here is {self.version}")
        raise PeerOfOtherVersion(
            f"it has version {self.version} of the peers' protocol, rank {caller} version {version}; install the "
            "same socflower on all nodes"
        )

    def _caller(self, context: grpc.ServicerContext) -> Caller:
        return Caller(
            rank=int(caller_of(context)), address=context.peer(), is_active=context.is_active
        )

    def _tokens_of(self, caller: str) -> Sequence[bytes]:
        return (self._token,) if caller in self._ranks else ()

    # ------------------------------------------------------------------------------------------ as client

    def _channel(self, rank: int, *, own: bool) -> grpc.Channel:
        """Return the channel for calls, or the one for streams; each has its own connection."""
        with self._lock:
            if self._closed:
                raise PeerUnreachable("this ring port is closed")
            channel = self._channels.get((rank, own))
            if channel is None:
                channel = self._channels[rank, own] = self._new_channel(rank)
            return channel

    def _new_channel(self, rank: int) -> grpc.Channel:
        channel = open_channel(
            self.addresses[rank],
            # The files may have been replaced.
            self._tls.channel_credentials() if self._tls else None,
            heartbeat_s=self.heartbeat_s,
            max_message_bytes=CALL_LIMIT_BYTES + OVERHEAD_BYTES,
        )
        return ClientAuthentication(
            str(self.rank), self._token, tls=self._tls is not None, receiver=str(rank)
        ).on(channel)

    def _forged(self, peer: str) -> PeerRefused:
        self.report_refused(peer, "an answer without the token")
        return PeerRefused(f"{peer} answers without knowing the token")

    def _path(self, method: str) -> str:
        return f"/{_SERVICE}.v{self.version}/{method}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} at {self.addresses[rank]}"


class _Dispatch(grpc.GenericRpcHandler):
    """Passes calls and streams of any method to a port."""

    def __init__(self, port: RingPort) -> None:
        self._port = port

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        service, _, method = details.method.rpartition("/")
        version = service.partition(f"{_SERVICE}.v")[2] or "1"
        if version != str(self._port.version):
            return grpc.stream_stream_rpc_method_handler(
                lambda messages, context: self._port.refuse_version(version, context)
            )
        if method.endswith(_STREAM):
            name = method.removesuffix(_STREAM)
            return grpc.stream_stream_rpc_method_handler(
                lambda messages, context: self._port.read_stream(name, messages, context)
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda body, context: self._port.answer(method, body, context)
        )
