"""The cloud's server: hosts the cloud's halves of many runs, for edges that connect to it."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from pathlib import Path
from threading import Lock, Timer
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from socflower.edgecloud.cloud.session import CloudSession, SessionFactory
from socflower.edgecloud.cloud.session_store import SessionStore
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import (
    OPERATOR,
    PLAIN_TEXT,
    Token,
    check_token,
    newest,
    run_of,
    run_token,
)
from socflower.edgecloud.stream.frames import Limits, SplitRefused, StartOver
from socflower.errors import SocflowerError
from socflower.peers.connections import serve
from socflower.peers.resumable_stream import end_frame
from socflower.wire.arrays import MalformedBytes, pack_arrays
from socflower.wire.authentication import ServerAuthentication, caller_of
from socflower.wire.framing import (
    LARGEST_FRAME_BYTES,
    LARGEST_PART_BYTES,
    Assembly,
    body_num_bytes,
    check_size,
    parts_of,
)
from socflower.wire.logs import RefusalLog
from socflower.wire.secure_channel import Address, BoundServer, PeerRefused, Tls, bind_server

SERVICE = "socflower.split.Split"
"""The gRPC service's name."""

_HELLO_S = 10.0
_BIND_TIMEOUT_S = 10.0
# Larger than a frame may be: this module refuses a frame that is too large with a reason, which gRPC would not give.
_LARGEST_MESSAGE_BYTES = 4 * LARGEST_FRAME_BYTES

_Request = TypeVar("_Request", bound=Message)


class CloudService:
    """Listens at `listen` ("host:port"; port 0 asks for a free one) until `close`.

    `factory` makes the cloud's half of each run that a manager opens with `operator_token`; one in a file may be
    replaced, and a run that is open keeps its own. With a `folder`, sessions, their edges' tokens
    and their checkpoints are restored when the process is restarted. Without `tls`, only loopback and private addresses
    are allowed, unless `insecure`. Memory of a session is bounded by `limits` and its half. Refusals are rate-limited
    to a few log lines per peer and minute, by `clock`; messages about the cloud's own runs are always logged. Raises
    `ConfigError` for an address, token, certificate or folder that cannot be used.
    """

    def __init__(
        self,
        listen: str,
        factory: SessionFactory,
        *,
        operator_token: Token,
        tls: Tls | None = None,
        insecure: bool = False,
        folder: Path | None = None,
        limits: Limits | None = None,
        heartbeat_s: float = 5.0,
        patience_s: float = 900.0,
        gather_s: float = 300.0,
        max_streams: int = 64,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        here = Address.parse(listen, "cloud address")
        if tls is None and not insecure:
            here.require_private(PLAIN_TEXT)
        check_token(newest(operator_token), "operator token")
        self._operator_token = operator_token
        self._lock = Lock()
        self._max_streams = max_streams
        self._num_streams = 0
        log_line = log or getLogger(__name__).warning
        self._refusals = RefusalLog(log_line, what="split cloud", clock=clock)
        self._sessions = SessionStore(
            factory,
            folder=folder,
            limits=limits or Limits(),
            patience_s=patience_s,
            gather_s=gather_s,
            most_parties=max_streams,
            log=log_line,
        )
        try:
            self._server = self._bind(here, tls, heartbeat_s)
        except BaseException:
            # Otherwise the folder stays locked while this process lives.
            self._sessions.close()
            raise
        self.address = str(self._server.address)
        self.port = self._server.address.port
        self._server.start()

    def _bind(
        self,
        here: Address,
        tls: Tls | None,
        heartbeat_s: float,
    ) -> BoundServer:
        # Every stream occupies a thread; the manager's calls get their own in addition.
        num_threads = self._max_streams + 16
        self._authentication = ServerAuthentication(
            self._tokens_of,
            tls=tls is not None,
            on_refused=self._log_refusal,
            most_challenges=num_threads // 2,
        )
        return bind_server(
            here,
            tls,
            [self._handlers()],
            interceptors=[self._authentication],
            num_threads=num_threads,
            heartbeat_s=heartbeat_s,
            max_message_bytes=_LARGEST_MESSAGE_BYTES,
            bind_timeout_s=_BIND_TIMEOUT_S,
        )

    def status(self, run_id: str = "") -> list[dict[str, Any]]:
        """Return `CloudSession.status` of one run, or of all."""
        sessions = [self._sessions.get(run_id)] if run_id else self._sessions.all()
        return [session.status() for session in sessions]

    def close(self) -> None:
        """End all streams and sessions; edges reconnect if this service is restarted."""
        self._sessions.close()
        self._server.stop(0.2)
        self._refusals.flush(everything=True)

    # ------------------------------------------------------------------------------------------ the manager's calls

    def _open(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self._require_operator(context)
        opening: wire.Opening | None = None
        try:
            for message in messages:
                part = self._parse(wire.OpenPart, message)
                if opening is None:
                    opening = part.opening
                    # Refuses before its weights are waited for.
                    self._sessions.check(opening)
                    packed = Assembly(
                        opening.num_bytes,
                        "weights",
                        most_bytes=opening.num_bytes,
                    )
                else:
                    packed.add(part.part)
            if opening is None:
                raise MalformedBytes("no opening")
            weights = packed.whole()
        except MalformedBytes as refused:
            raise SplitRefused(f"a run was opened with {refused}") from None
        self._sessions.open(opening, weights, self._run_tokens(opening.run_id))
        return wire.Opened().SerializeToString()

    def _fetch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._require_operator(context)
        request = self._parse(wire.FetchRequest, message)
        session = self._sessions.get(request.run_id)
        pieces: list[bytes | memoryview]
        if request.whole_state:
            batch, state = session.state()
            pieces = [state]
        else:
            batch, weights = session.weights()
            pieces = [*pack_arrays(weights)]
        num_bytes = body_num_bytes(pieces)
        for piece in parts_of(pieces, LARGEST_PART_BYTES):
            yield wire.FetchPart(
                batch=batch,
                num_bytes=num_bytes,
                part=piece,
            ).SerializeToString()

    def _close(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        self._require_operator(context)
        request = self._parse(wire.CloseRequest, message)
        self._sessions.end(request.run_id, forget=request.forget)
        return wire.Closed().SerializeToString()

    def _status(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        self._require_operator(context)
        run_id = self._parse(wire.StatusRequest, message).run_id
        return wire.StatusReply(sessions=json.dumps(self.status(run_id))).SerializeToString()

    def _tokens_of(self, caller: str) -> Sequence[bytes]:
        if caller == OPERATOR:
            return [token.encode() for token in self._accepted()]
        run_id = run_of(caller)
        # With the token of a run that is not open, an edge learns that it is not.
        tokens = self._sessions.tokens_of(run_id) or (self._run_tokens(run_id) if run_id else ())
        return [token.encode() for token in tokens]

    def _accepted(self) -> tuple[str, ...]:
        token = self._operator_token
        return (token,) if isinstance(token, str) else token.accepted()

    def _run_tokens(self, run_id: str) -> tuple[str, ...]:
        return tuple(run_token(token, run_id) for token in self._accepted())

    def _require_operator(self, context: grpc.ServicerContext) -> None:
        if caller_of(context) != OPERATOR:
            self._authentication.refuse(
                context, "a manager's call by an edge", grpc.StatusCode.PERMISSION_DENIED
            )

    # ------------------------------------------------------------------------------------------- an edge's stream

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        run_id = run_of(caller_of(context))
        peer = context.peer()
        session = self._sessions.find(run_id)
        if session is None:
            self._log_refusal(peer, f"a stream for a run that is not open ({run_id[:80]!r})")
            raise PeerRefused(f"run {run_id[:80]} is not open at this cloud; its manager opens it")
        with self._lock:
            self._num_streams += 1
            full = self._num_streams > self._max_streams
        try:
            if full:
                most = f"the cloud has {self._max_streams} streams already"
                self._log_refusal(peer, f"a stream for run {run_id}", most)
                context.abort(grpc.StatusCode.UNAVAILABLE, most)
            yield from self._serve_stream(session, messages, context)
        finally:
            with self._lock:
                self._num_streams -= 1

    def _serve_stream(
        self,
        session: CloudSession,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        sends = f"run {session.terms.run_id}: the edge sent"
        try:
            admitted = session.admit(self._read_hello(messages, context), context.is_active)
        except (MalformedBytes, SocflowerError) as refused:
            known = isinstance(refused, SocflowerError)
            text = str(refused) if known else f"{sends} {refused}"
            self._log_refusal(context.peer(), "a stream", text)
            yield _refusal(wire.Refusal.REFUSED, text)
            return
        except StartOver:
            yield _refusal(wire.Refusal.START_OVER, "join again")
            return
        channel, connection = admitted.channel, admitted.connection
        context.add_callback(lambda: channel.detach(connection))

        def on_malformed(malformed: MalformedBytes) -> bytes:
            text = f"{sends} {malformed}"
            self._log_refusal(context.peer(), "a stream", f"{text}; the run is unharmed")
            return _refusal(wire.Refusal.REFUSED, text)

        yield wire.Frame(welcome=admitted.welcome).SerializeToString()
        yield from serve(channel, connection, messages, on_malformed)
        if isinstance(channel.failure, StartOver):
            yield end_frame(_refusal(wire.Refusal.START_OVER, "join again"))
        elif channel.failure is not None:
            yield end_frame(_refusal(wire.Refusal.REFUSED, str(channel.failure)))

    def _read_hello(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> wire.Hello:
        timer = Timer(_HELLO_S, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            frame = self._parse_frame(next(messages))
        except MalformedBytes:
            raise
        # gRPC raises a bare exception if the stream breaks off.
        except Exception:
            raise MalformedBytes(f"no greeting within {_HELLO_S:g} s") from None
        finally:
            timer.cancel()
        kind = frame.WhichOneof("kind") or "frame of an unknown kind"
        if kind != "hello":
            raise MalformedBytes(f"a {kind} instead of a greeting")
        return frame.hello

    def _parse_frame(self, message: bytes) -> wire.Frame:
        check_size(len(message), "a frame", LARGEST_FRAME_BYTES)
        try:
            return wire.Frame.FromString(message)
        except DecodeError:
            raise MalformedBytes(f"{len(message)} bytes that are no frame") from None

    # -------------------------------------------------------------------------------------------------------- gRPC

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Bodies are parsed here and not by gRPC, which would log a traceback for each that cannot be parsed.
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Open": grpc.stream_unary_rpc_method_handler(self._open),
                "Close": grpc.unary_unary_rpc_method_handler(self._close),
                "Status": grpc.unary_unary_rpc_method_handler(self._status),
                "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
                "Train": grpc.stream_stream_rpc_method_handler(self._stream),
            },
        )

    def _parse(self, kind: type[_Request], message: bytes) -> _Request:
        try:
            return kind.FromString(message)
        except DecodeError:
            raise SplitRefused(f"{len(message)} bytes that are no {kind.DESCRIPTOR.name}") from None

    def _log_refusal(self, peer: str, what: str, why: str = "") -> None:
        reason = f": {why}" if why else ""
        self._refusals.report(peer, f"split cloud: refused {what} from {peer}{reason}")


def _refusal(code: "wire.Refusal.Code", text: str) -> bytes:
    frame = wire.Frame(refusal=wire.Refusal(code=code, text=" ".join(text.split())[:2000]))
    return frame.SerializeToString()
