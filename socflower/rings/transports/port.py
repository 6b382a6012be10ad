"""The port of a ring's member: calls and streams that are authenticated with the group's token.

A gRPC service with plain bytes. The token is never sent over the ring: every call carries the sender, a nonce, the
digest of its body, and an HMAC over these, the method and the receiver, which is checked before the body is read; every
answer carries an HMAC over the same nonce. So without the token nobody can call or answer, recorded messages cannot be
replayed, and a body cannot be changed. A stream is authenticated when it opens, but its chunks are not: changing them
requires control of the network path. Where that is possible, use TLS, which protects every byte (with TLS both sides
show certificates of the ring's authority, besides the token).

A connection that never becomes a call (no certificate, no HTTP/2) is closed by gRPC without notice to Python.
"""

import hashlib
import hmac
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from threading import Lock, Thread
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from socflower.errors import ConfigError
from socflower.rings.transports.stream import OutgoingStream
from socflower.wire.logs import Log, RefusalLog, log
from socflower.wire.secure_channel import (
    Address,
    PeerNotConnected,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    Tls,
    bind_server,
    failure_of,
    open_channel,
)

CALL_LIMIT_BYTES = 4 << 20
"""The maximum size of the body of a call or of its answer; larger payloads are sent as a stream."""

_SERVICE = "socflower.Ring"
_TICKET_KEY, _OPENING_KEY, _PROOF_KEY = "ring-pass-bin", "ring-opening-bin", "ring-proof-bin"
_TICKET = struct.Struct("!I16s32s32s")  # sender, nonce, digest of the body, HMAC
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


class Reader(Protocol):
    """Reads a stream."""

    def read(self, messages: Iterator[bytes]) -> None:
        """Read to the end, in a thread; `messages` raises `PeerUnreachable` if the stream breaks."""
        ...

    def wait(self) -> None:
        """Return when the stream shall end normally, at the latest after `read`; raise `PeerRefused` to break it."""
        ...


Admission: TypeAlias = Callable[[Caller, bytes], Reader]
"""Checks a caller and the opening message of its stream; returns a reader, or raises `PeerRefused` or
`PeerNotReady`."""


def warn(line: str) -> None:
    """Log a line as Flower's warnings."""
    log(WARNING, line)


class RingPort:
    """A member's end of the ring's calls and streams.

    Handlers run in threads and may block, if they check `caller.is_active()` regularly. `heartbeat_s` is how long a
    peer may leave pings unanswered, in either direction, before its calls end with `PeerSilent`; gRPC answers pings in
    its own threads, also while Python computes. Binding is retried for `bind_timeout_s`, since the process of the
    previous round may still hold the port. Port 0 asks for a free one. Raises `ConfigError` if the address cannot be
    used, if a peer's address is not private and there is no TLS (unless `trusted`), or if a certificate cannot be read.
    """

    def __init__(
        self, listen: str, *, rank: int, addresses: Sequence[str], token: bytes, tls: Tls | None,
        heartbeat_s: float, bind_timeout_s: float = 30, trusted: bool = False,
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
        self.trusted = trusted
        self.heartbeat_s = heartbeat_s
        self._token = token
        self._refusals = RefusalLog(log, what="ring port", lines_per_period=_REFUSAL_LINES_PER_MINUTE)
        self._handlers: dict[str, Handler] = {}
        self._admissions: dict[str, Admission] = {}
        self._nonces: set[bytes] = set()
        self._lock = Lock()
        self._closed = False
        self._streams: list[OutgoingStream] = []
        self._channels: dict[tuple[int, bool], grpc.Channel] = {}
        self._credentials = tls.channel_credentials() if tls else None
        # Threads for blocking calls (joins, streams) of every member, and for further calls.
        self._server, bound = bind_server(
            here, tls, [_Dispatch(self._serve)], num_threads=4 * len(self.addresses) + 8, heartbeat_s=heartbeat_s,
            max_message_bytes=CALL_LIMIT_BYTES, bind_timeout_s=bind_timeout_s)
        self.host, self.port = bound.host, bound.port
        self._server.start()

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
            # A channel that could not connect repeats that error until it has tried again, and the member may have
            # started meanwhile. A new channel tries at once; nothing of the call has been sent.
            channel = self._new_channel(rank)
            try:
                return self._call_on(channel, rank, method, body, timeout_s)
            finally:
                channel.close()

    def _call_on(self, channel: grpc.Channel, rank: int, method: str, body: bytes, timeout_s: float) -> bytes:
        nonce = os.urandom(16)
        peer = self._name(rank)
        try:
            answer, call = channel.unary_unary(f"/{_SERVICE}/{method}").with_call(
                body, timeout=timeout_s, metadata=((_TICKET_KEY, self._make_ticket(method, rank, nonce, body)),))
        except grpc.RpcError as error:
            raise failure_of(peer, error) from None
        except ValueError:  # gRPC's word for a channel that another thread has closed
            raise PeerUnreachable("this ring port is closed") from None
        self._require_proof(peer, call.trailing_metadata(), method, rank, nonce, answer)
        return bytes(answer)

    def open_stream(self, rank: int, method: str, opening: bytes = b"") -> OutgoingStream:
        """Return a stream that member `rank` has accepted; raise as `call` does.

        Streams have a connection of their own, so that calls and pings do not queue behind chunks.
        """
        nonce = os.urandom(16)
        peer = self._name(rank)
        stream = OutgoingStream(
            peer, self._channel(rank, own=True).stream_unary(f"/{_SERVICE}/{method}"),
            ((_TICKET_KEY, self._make_ticket(method, rank, nonce, opening)), (_OPENING_KEY, opening)))
        try:
            self._require_proof(peer, stream.wait_accepted(), method, rank, nonce, b"")
        except BaseException:
            stream.cancel()
            raise
        with self._lock:
            self._streams = [open_one for open_one in self._streams if not open_one.has_ended()] + [stream]
        return stream

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

    def _serve(
        self, method: str, metadata: dict[str, bytes], messages: Iterator[bytes], context: grpc.ServicerContext,
    ) -> bytes:
        sender, nonce, digest = self._authenticate(method, metadata, context)
        caller = Caller(rank=sender, address=context.peer(), is_active=context.is_active)
        try:
            admission = self._admissions.get(method)
            if admission is not None:
                opening = metadata.get(_OPENING_KEY, b"")
                self._require_digest(opening, digest, method, context)
                reader = admission(caller, opening)
                context.send_initial_metadata(((_PROOF_KEY, self._proof(method, sender, self.rank, nonce, b"")),))
                # The thread that waits for a message cannot end the call; this one can.
                Thread(target=reader.read, args=(_checked_messages(messages, context),), daemon=True).start()
                reader.wait()
                return b""
            handler = self._handlers.get(method)
            if handler is None:
                raise PeerNotReady(f"{method!r} is not taken here yet")
            try:
                body = next(messages)
            except Exception:  # for a truncated or too long message, gRPC ends the iterator or raises a bare Exception
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
        """Return sender, nonce and digest of the body; abort a call without a valid token."""
        ticket = metadata.get(_TICKET_KEY)
        if not isinstance(ticket, bytes) or len(ticket) != _TICKET.size:
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"a {method!r} call without a token")
        sender, nonce, digest, mac = _TICKET.unpack(ticket)
        if not hmac.compare_digest(mac, self._mac(b"ask", method, sender, self.rank, nonce, digest)):
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"a {method!r} call with a wrong token")
        if sender >= len(self.addresses):
            self._refuse(context, grpc.StatusCode.UNAUTHENTICATED,
                         f"a {method!r} call of rank {sender} in a ring of {len(self.addresses)}")
        # Only nonces of authenticated calls are kept, so that others cannot fill the memory.
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
        self.report_refused(context.peer(), what)
        context.abort(code, f"refused {what}")
        raise AssertionError("abort returned")

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
        return open_channel(self.addresses[rank], self._credentials, heartbeat_s=self.heartbeat_s,
                            max_message_bytes=CALL_LIMIT_BYTES)

    def _name(self, rank: int) -> str:
        return f"rank {rank} at {self.addresses[rank]}"

    def _make_ticket(self, method: str, receiver: int, nonce: bytes, body: bytes) -> bytes:
        digest = hashlib.sha256(body).digest()
        return _TICKET.pack(self.rank, nonce, digest, self._mac(b"ask", method, self.rank, receiver, nonce, digest))

    def _proof(self, method: str, sender: int, receiver: int, nonce: bytes, answer: bytes) -> bytes:
        return self._mac(b"answer", method, sender, receiver, nonce, hashlib.sha256(answer).digest())

    def _require_proof(
        self, peer: str, metadata: Any, method: str, receiver: int, nonce: bytes, answer: bytes,
    ) -> None:
        proof = dict(metadata or ()).get(_PROOF_KEY, b"")
        if not hmac.compare_digest(proof, self._proof(method, self.rank, receiver, nonce, answer)):
            self.report_refused(peer, f"an answer to {method!r} without the token")
            raise PeerRefused(f"{peer} answers without knowing the token")

    def _mac(self, kind: bytes, method: str, sender: int, receiver: int, nonce: bytes, digest: bytes) -> bytes:
        # All fields have fixed lengths, except the two names, which contain no zero byte: the encoding is unambiguous.
        text = b"\0".join((kind, method.encode(), struct.pack("!II", sender, receiver) + nonce + digest))
        return hmac.digest(self._token, text, "sha256")


class _Dispatch(grpc.GenericRpcHandler):
    """Passes every call of any method to one function, which gets the metadata before the body."""

    def __init__(self, serve: Callable[[str, dict[str, bytes], Iterator[bytes], grpc.ServicerContext], bytes]) -> None:
        self._serve = serve

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        metadata = dict(details.invocation_metadata)
        return grpc.stream_unary_rpc_method_handler(partial(self._serve, method, metadata))


def _checked_messages(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """Yield a stream's messages; raise `PeerUnreachable` if it breaks instead of ending."""
    try:
        yield from messages
    except Exception:  # gRPC raises a bare Exception
        raise PeerUnreachable("the stream broke off") from None
    if not context.is_active():
        raise PeerUnreachable("the stream broke off")
