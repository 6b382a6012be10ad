"""The one port of a ring's member: calls and streams of those who know the group's token, and of nobody else.

A gRPC service with plain bytes. The token never travels on the ring: every call carries sender, a nonce, the digest
of its body and an HMAC over these, the method and the receiver, which is checked before the body is read; every answer
carries one over the same nonce. So a stranger can neither ask nor answer, what is recorded here cannot be played again
here or elsewhere, and a body cannot be changed. A stream is authenticated when it opens. Its chunks are not, one by
one: they come over the same connection, so that changing them takes somebody in the path; whoever must fear that needs
TLS, which guards every byte (with TLS both sides show certificates of the ring's authority, besides the token).

A connection that never becomes a call (no certificate, no HTTP/2) is closed below Python, by gRPC; `ring_strangers`
looks for those.
"""

import errno
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from socflower.errors import ConfigError
from socflower.rings.transports.security import RingTls, require_private, split_address
from socflower.rings.transports.strangers import Log, RingRefusals, StrangerWatch, warn
from socflower.rings.transports.stream import (
    OutgoingStream,
    PeerNotReady,
    PeerRefused,
    PeerSilent,
    PeerUnreachable,
    failure_of,
)

__all__ = [
    "CALL_LIMIT_BYTES", "Admission", "Caller", "Handler", "OutgoingStream", "PeerNotReady", "PeerRefused", "PeerSilent",
    "PeerUnreachable", "Reader", "RingPort", "RingTls",
]

CALL_LIMIT_BYTES = 4 << 20
"""The body of a call or of its answer, at most; what is larger goes as a stream."""

_SERVICE = "socflower.Ring"
_PASS_KEY, _OPENING_KEY, _PROOF_KEY = "ring-pass-bin", "ring-opening-bin", "ring-proof-bin"
_PASS = struct.Struct("!I16s32s32s")  # sender, nonce, digest of the body, HMAC
_BIND_RETRY_S = 0.1
_RECONNECT_MS = 100
_PARTING_S = 1.0
_GRACE_S = 0.05
_NEVER = (errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT)


@dataclass(frozen=True)
class Caller:
    """Who makes a call, as proven by the token."""

    rank: int
    address: str
    is_active: Callable[[], bool]
    """False once the caller is gone: it died, hung up, or stopped answering pings."""


Handler: TypeAlias = Callable[[Caller, bytes], bytes]


class Reader(Protocol):
    """What reads a stream."""

    def read(self, messages: Iterator[bytes]) -> None:
        """Read to the end, in a thread; `messages` raises `PeerUnreachable` where the stream breaks off."""
        ...

    def wait(self) -> None:
        """Return when the stream shall end in peace, at the latest after `read`; raise `PeerRefused` to break it."""
        ...


Admission: TypeAlias = Callable[[Caller, bytes], Reader]
"""Looks at who opens a stream with which opening words; returns what reads it, or raises `PeerRefused`, or
`PeerNotReady`."""


class RingPort:
    """A member's end of the ring's calls and streams.

    Handlers run in threads and may block, if they look at `caller.is_active()` now and then. `heartbeat_s` is how long
    a peer may leave pings unanswered, in either direction, before its calls end with `PeerSilent`; the pings are
    answered below Python, also while it computes. Binding is tried for `bind_timeout_s`, since the process of the round
    before may still hold the port. Port 0 asks for a free one. Raises `ConfigError` where the address cannot be had, a
    peer's is not private though there is no TLS (unless `trusted`), or a certificate cannot be read.
    """

    def __init__(
        self, listen: str, *, rank: int, addresses: Sequence[str], token: bytes, tls: RingTls | None,
        heartbeat_s: float, bind_timeout_s: float = 30, trusted: bool = False,
        log: Log = warn,
    ) -> None:
        host, _ = split_address(listen)
        if not tls and not trusted:
            for address in (listen, *addresses):
                require_private(address)
        self.rank = rank
        self.addresses = tuple(addresses)
        self.trusted = trusted
        self.heartbeat_s = heartbeat_s
        self._token = token
        self._refusals = RingRefusals(log)
        self._handlers: dict[str, Handler] = {}
        self._admissions: dict[str, Admission] = {}
        self._nonces: set[bytes] = set()
        self._lock = Lock()
        self._closed = False
        self._streams: list[OutgoingStream] = []
        self._channels: dict[tuple[int, bool], grpc.Channel] = {}
        pem = tls.read() if tls else None
        self._channel_credentials = grpc.ssl_channel_credentials(pem[0], pem[2], pem[1]) if pem else None
        credentials = grpc.ssl_server_credentials(
            [(pem[2], pem[1])], root_certificates=pem[0], require_client_auth=True) if pem else None
        self._server, port = self._bind(listen, credentials, time.monotonic() + bind_timeout_s)
        self.host, self.port = host, port
        self._strangers = StrangerWatch(
            port, lambda end: self.refused(end, "a connection that made no call a member could make"))
        self._server.start()

    def handle(self, method: str, handler: Handler) -> None:
        """Answer calls of `method` from now on; before, callers are told to try again."""
        self._handlers[method] = handler

    def handle_stream(self, method: str, admission: Admission) -> None:
        """Take streams of `method` from now on, instead of what took them before."""
        self._admissions[method] = admission

    def call(self, rank: int, method: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Return the answer of member `rank`; raise `PeerUnreachable`, `PeerSilent` or `PeerRefused`."""
        if len(body) > CALL_LIMIT_BYTES:
            raise ValueError(f"a call's body has at most {CALL_LIMIT_BYTES} bytes, not {len(body)}")
        nonce = os.urandom(16)
        peer = self._name(rank)
        try:
            answer, call = self._channel(rank, own=False).unary_unary(f"/{_SERVICE}/{method}").with_call(
                body, timeout=timeout_s, metadata=((_PASS_KEY, self._pass(method, rank, nonce, body)),))
        except grpc.RpcError as error:
            raise failure_of(peer, error) from None
        self._require_proof(peer, call.trailing_metadata(), method, rank, nonce, answer)
        return bytes(answer)

    def open_stream(self, rank: int, method: str, opening: bytes = b"") -> OutgoingStream:
        """Return a stream that member `rank` has agreed to read; raise as `call` does.

        It has a connection of its own, so that calls and pings do not queue behind its chunks.
        """
        nonce = os.urandom(16)
        peer = self._name(rank)
        stream = OutgoingStream(
            peer, self._channel(rank, own=True).stream_unary(f"/{_SERVICE}/{method}"),
            ((_PASS_KEY, self._pass(method, rank, nonce, opening)), (_OPENING_KEY, opening)))
        try:
            self._require_proof(peer, stream.agreement(), method, rank, nonce, b"")
        except BaseException:
            stream.cancel()
            raise
        with self._lock:
            self._streams = [open_one for open_one in self._streams if not open_one.has_ended()] + [stream]
        return stream

    def refused(self, peer: str, what: str) -> None:
        """Log that something was refused, in one line, unless this peer has had its share of lines."""
        self._refusals.report(peer, what)

    def close(self) -> None:
        """End everything at once: callers here and there see each other as gone. May be called twice.

        Only a stream that was finished in peace is given a moment for what it still holds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._strangers.close()
            channels = list(self._channels.values())
            self._channels.clear()
        deadline_s = time.monotonic() + _PARTING_S
        for stream in self._streams:
            stream.wait_finished(deadline_s - time.monotonic())
        for channel in channels:
            channel.close()
        # Without grace gRPC tells each peer's connection of an internal error, and the peer's gRPC says so on stderr.
        self._server.stop(_GRACE_S)
        self._refusals.close()

    # ------------------------------------------------------------------------------------------ as server

    def _bind(
        self, listen: str, credentials: grpc.ServerCredentials | None, deadline_s: float,
    ) -> tuple[grpc.Server, int]:
        while True:
            problem = _cannot_bind(listen)
            if problem is None:
                server = grpc.server(
                    # Held calls (joining, streams) of every member and one more of each on top.
                    ThreadPoolExecutor(max_workers=4 * len(self.addresses) + 8, thread_name_prefix="ring-port"),
                    handlers=[_Dispatch(self._serve)],
                    options=[("grpc.so_reuseport", 0), ("grpc.server_handshake_timeout_ms", 5000),
                             *_options(self.heartbeat_s)])
                with suppress(RuntimeError):  # somebody else was faster
                    port = server.add_secure_port(listen, credentials) if credentials else \
                        server.add_insecure_port(listen)
                    if port:
                        return server, port
                server.stop(None)
                problem = f"ring address {listen} is in use"
            if time.monotonic() > deadline_s:
                raise ConfigError(f"{problem}; end the process that has it, or give another port")
            time.sleep(_BIND_RETRY_S)

    def _serve(
        self, method: str, metadata: dict[str, bytes], messages: Iterator[bytes], context: grpc.ServicerContext,
    ) -> bytes:
        self._strangers.called(context.peer())
        sender, nonce, digest = self._authenticate(method, metadata, context)
        caller = Caller(rank=sender, address=context.peer(), is_active=context.is_active)
        try:
            admission = self._admissions.get(method)
            if admission is not None:
                opening = metadata.get(_OPENING_KEY, b"")
                self._require_digest(opening, digest, method, context)
                reader = admission(caller, opening)
                context.send_initial_metadata(((_PROOF_KEY, self._proof(method, sender, self.rank, nonce, b"")),))
                # A thread that waits for a message cannot end the call; this one can.
                Thread(target=reader.read, args=(_arriving(messages, context),), daemon=True).start()
                reader.wait()
                return b""
            handler = self._handlers.get(method)
            if handler is None:
                raise PeerNotReady(f"{method!r} is not taken here yet")
            try:
                body = next(messages)
            except Exception:  # what broke off or was too long for gRPC looks like an end, or raises a bare exception
                self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"an empty, truncated or too long {method!r} "
                             f"call of rank {sender} (the limit is {CALL_LIMIT_BYTES} bytes)")
            self._require_digest(body, digest, method, context)
            answer = handler(caller, body)
        except PeerRefused as refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refusal))
        except PeerNotReady as not_ready:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(not_ready))
        context.set_trailing_metadata(((_PROOF_KEY, self._proof(method, sender, self.rank, nonce, answer)),))
        return answer

    def _authenticate(
        self, method: str, metadata: dict[str, bytes], context: grpc.ServicerContext,
    ) -> tuple[int, bytes, bytes]:
        """Return sender, nonce and digest of the body; abort the call of one who does not know the token."""
        ticket = metadata.get(_PASS_KEY)
        if not isinstance(ticket, bytes) or len(ticket) != _PASS.size:
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"a {method!r} call without a token")
        sender, nonce, digest, mac = _PASS.unpack(ticket)
        if not hmac.compare_digest(mac, self._mac(b"ask", method, sender, self.rank, nonce, digest)):
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"a {method!r} call with a wrong token")
        if sender >= len(self.addresses):
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED,
                         f"a {method!r} call of rank {sender} in a ring of {len(self.addresses)}")
        # Only nonces of those who know the token are kept, so strangers cannot fill the memory.
        with self._lock:
            replayed = nonce in self._nonces
            self._nonces.add(nonce)
        if replayed:
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"a replayed {method!r} call of rank {sender}")
        return sender, nonce, digest

    def _require_digest(self, body: bytes, digest: bytes, method: str, context: grpc.ServicerContext) -> None:
        if hashlib.sha256(body).digest() != digest:
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"a {method!r} call with a changed body")

    def _refuse(self, context: grpc.ServicerContext, code: grpc.StatusCode, what: str) -> NoReturn:
        self.refused(context.peer(), what)
        context.abort(code, f"refused {what}")
        raise AssertionError("abort returned")

    # ------------------------------------------------------------------------------------------ as client

    def _channel(self, rank: int, *, own: bool) -> grpc.Channel:
        """Return the channel for calls, or the one for streams; each has a connection of its own."""
        with self._lock:
            if self._closed:
                raise PeerUnreachable("this ring port is closed")
            channel = self._channels.get((rank, own))
            if channel is None:
                options = [
                    ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0),
                    ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
                    ("grpc.max_reconnect_backoff_ms", 2 * _RECONNECT_MS),
                    # In spite of its name this is how long one attempt to connect may take.
                    ("grpc.min_reconnect_backoff_ms", round(1000 * self.heartbeat_s)),
                    *_options(self.heartbeat_s)]
                address = self.addresses[rank]
                channel = grpc.secure_channel(address, self._channel_credentials, options) \
                    if self._channel_credentials else grpc.insecure_channel(address, options)
                self._channels[rank, own] = channel
            return channel

    def _name(self, rank: int) -> str:
        return f"rank {rank} at {self.addresses[rank]}"

    def _pass(self, method: str, receiver: int, nonce: bytes, body: bytes) -> bytes:
        digest = hashlib.sha256(body).digest()
        return _PASS.pack(self.rank, nonce, digest, self._mac(b"ask", method, self.rank, receiver, nonce, digest))

    def _proof(self, method: str, sender: int, receiver: int, nonce: bytes, answer: bytes) -> bytes:
        return self._mac(b"answer", method, sender, receiver, nonce, hashlib.sha256(answer).digest())

    def _require_proof(
        self, peer: str, metadata: Any, method: str, receiver: int, nonce: bytes, answer: bytes,
    ) -> None:
        proof = dict(metadata or ()).get(_PROOF_KEY, b"")
        if not hmac.compare_digest(proof, self._proof(method, self.rank, receiver, nonce, answer)):
            self.refused(peer, f"an answer to {method!r} without the token")
            raise PeerRefused(f"{peer} answers without knowing the token")

    def _mac(self, kind: bytes, method: str, sender: int, receiver: int, nonce: bytes, digest: bytes) -> bytes:
        # Fixed lengths but for the two names, which have no zero byte: one text has one meaning.
        text = b"\0".join((kind, method.encode(), struct.pack("!II", sender, receiver) + nonce + digest))
        return hmac.digest(self._token, text, "sha256")


class _Dispatch(grpc.GenericRpcHandler):
    """Hands every call, whatever its method, to one function that sees its metadata before its body."""

    def __init__(self, serve: Callable[[str, dict[str, bytes], Iterator[bytes], grpc.ServicerContext], bytes]) -> None:
        self._serve = serve

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        metadata = dict(details.invocation_metadata)
        return grpc.stream_unary_rpc_method_handler(partial(self._serve, method, metadata))


def _options(heartbeat_s: float) -> list[tuple[str, int]]:
    """Pings in both directions, also between calls, half a heartbeat apart with half a heartbeat to answer."""
    half_ms = max(1, round(500 * heartbeat_s))
    return [
        ("grpc.keepalive_time_ms", half_ms), ("grpc.keepalive_timeout_ms", half_ms),
        # Without this one a ping in answer to which nothing comes ends a connection after a minute only.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1), ("grpc.http2.max_ping_strikes", 0),
        # A window of its own would grow with the line's speed, to dozens of MiB on their way to one who does not read.
        ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.max_receive_message_length", CALL_LIMIT_BYTES), ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 << 10),
    ]


def _arriving(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """Yield a stream's messages; raise `PeerUnreachable` where it breaks off instead of ending."""
    try:
        yield from messages
    except Exception:  # gRPC raises a bare one
        raise PeerUnreachable("the stream broke off") from None
    if not context.is_active():
        raise PeerUnreachable("the stream broke off")


def _cannot_bind(listen: str) -> str | None:
    """Return why an address cannot be had now, `ConfigError` if never; gRPC's own words are long and go to stderr."""
    host, port = split_address(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise ConfigError(f"ring address {listen} cannot be resolved ({error.strerror})") from None
    except OSError as error:
        if error.errno in _NEVER:
            raise ConfigError(f"ring address {listen} cannot be listened on ({error.strerror}); give an address of "
                              "this machine") from None
        return f"ring address {listen} is in use"
    return None
