"""Who may call, by gRPC interceptors on both sides; nothing of a call is read before its caller is known.

With TLS each call carries its caller's name and token, which the encryption hides. Without TLS (on a trusted network) a
token never travels. A call carries an HMAC made with it over method, caller, receiver and a number that is used once;
keys for this call alone are derived from the same, and every message, in both directions, carries a tag (GMAC) over
its position and its bytes. So without the token nobody can call or answer, recorded calls cannot be replayed, and no
message can be changed, left out or moved. Messages can be read: encryption needs TLS.

The receiver is a name that both sides know, or a challenge: 16 random bytes of the server's process, which clients ask
for, so that calls recorded before a restart cannot be replayed either.
"""

import hmac
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn, cast

import grpc
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from socflower.errors import SocflowerError
from socflower.wire.secure_channel import PeerNotReady, PeerRefused


class ForgedAnswer(PeerRefused):
    """An answer of somebody who does not know the token, or one that was changed."""


OVERHEAD_BYTES = 32
"""What authentication adds to a message at most."""

_CALLER_KEY, _TOKEN_KEY, _HELLO_KEY = "socflower-caller", "socflower-token", "socflower-hello-bin"
_NUM_NONCE, _NUM_RECEIVER, _NUM_MAC, _NUM_TAG = 16, 16, 32, 16
_CHALLENGE = "/socflower.Authentication/Challenge"
_CHALLENGE_TIMEOUT_S = 30.0
# Challenges on one connection without an authenticated call; a client asks once.
_FLOOD = 32
# Whose challenges are counted.
_MOST_PEERS = 10_000
# Then the challenge changes, and earlier nonces need not be kept.
_MOST_NONCES = 100_000


def caller_of(context: grpc.ServicerContext) -> str:
    """Return the authenticated caller's name."""
    return str(dict(context.invocation_metadata())[_CALLER_KEY])


class _Session:
    """The keys of one call without TLS, and the positions of its messages in both directions."""

    def __init__(self, secret: bytes, method: str, caller: str, hello: bytes) -> None:
        # Names contain no zero byte, and the rest has fixed lengths: the encoding is unambiguous.
        self._secret, self._call = secret, b"\0".join((method.encode(), caller.encode(), hello))

    def mac(self) -> bytes:
        return hmac.digest(self._secret, b"call\0" + self._call, "sha256")

    def seal(self, messages: Iterator[bytes], direction: bytes) -> Iterator[bytes]:
        """Yield messages with their tags, the first one with a nonce of this direction before it."""
        prefix = os.urandom(_NUM_NONCE)
        cipher = self._cipher(direction, prefix)
        for position, message in enumerate(messages):
            yield b"".join((prefix, cipher.encrypt(position.to_bytes(12), b"", message), message))
            prefix = b""

    def open(self, messages: Iterator[bytes], direction: bytes) -> Iterator[memoryview]:
        """Yield what was sealed; raise `PeerRefused` for a message that was not sealed so."""
        cipher: AESGCM | None = None
        for position, sealed in enumerate(messages):
            view = memoryview(sealed)
            if cipher is None:
                cipher, view = self._cipher(direction, bytes(view[:_NUM_NONCE])), view[_NUM_NONCE:]
            try:
                cipher.decrypt(position.to_bytes(12), view[:_NUM_TAG], view[_NUM_TAG:])
            except (InvalidTag, ValueError):
                # ValueError: shorter than a tag.
                raise PeerRefused("a changed message") from None
            yield view[_NUM_TAG:]

    def _cipher(self, direction: bytes, nonce: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._secret, direction + b"\0" + nonce + self._call, "sha256"))


# ------------------------------------------------------------------------------------------------------ client
# grpcio has no types, so that mypy takes its classes for Any and warns of every subclass.
@dataclass(frozen=True, slots=True)
class _Details(grpc.ClientCallDetails):  # type: ignore[misc]
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]


class ClientAuthentication(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Shows `token` as `caller` in all calls of a channel; `receiver` names the server, by default its challenge.

    Answers that were made without the token raise `ForgedAnswer`.
    """

    def __init__(
        self, caller: str, token: bytes, *, tls: bool, receiver: str | None = None
    ) -> None:
        self._caller, self._token, self._tls = caller, token, tls
        self._receiver = None if receiver is None else _padded(receiver)

    def on(self, channel: grpc.Channel) -> grpc.Channel:
        """Return the channel whose calls are authenticated."""
        self._channel = channel
        return grpc.intercept_channel(channel, self)

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Authenticate a call; called by gRPC, as the next three are."""
        return self._intercept(continuation, client_call_details, request, False, False)

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Authenticate a call with a stream of answers."""
        return self._intercept(continuation, client_call_details, request, False, True)

    def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Authenticate a call with a stream of requests."""
        return self._intercept(continuation, client_call_details, request_iterator, True, False)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Authenticate a call with both."""
        return self._intercept(continuation, client_call_details, request_iterator, True, True)

    def _intercept(
        self, continuation: Any, details: Any, request: Any, requests: bool, answers: bool
    ) -> Any:
        metadata = (*(details.metadata or ()), (_CALLER_KEY, self._caller))
        if self._tls:
            metadata = (*metadata, (_TOKEN_KEY, self._token.hex()))
            return continuation(_Details(details.method, details.timeout, metadata), request)
        if self._receiver is None:
            self._receiver = self._channel.unary_unary(_CHALLENGE)(
                b"", timeout=details.timeout or _CHALLENGE_TIMEOUT_S
            )
        hello = os.urandom(_NUM_NONCE) + self._receiver
        session = _Session(self._token, details.method, self._caller, hello)
        sealed = session.seal(iter(request) if requests else iter((request,)), b"request")
        call = continuation(
            _Details(
                details.method, details.timeout, (*metadata, (_HELLO_KEY, hello + session.mac()))
            ),
            sealed if requests else next(sealed),
        )
        return _Opened(call, session, answers)


class _Opened:
    """A call whose answers are checked; otherwise as gRPC made it."""

    def __init__(self, call: Any, session: _Session, streaming: bool) -> None:
        self._call = call
        self._answers = session.open(iter(call) if streaming else self._result(), b"answer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> "_Opened":
        return self

    def __next__(self) -> bytes:
        try:
            return bytes(next(self._answers))
        except PeerRefused:
            self._call.cancel()
            raise ForgedAnswer("an answer that was made without the token") from None

    def result(self, timeout: float | None = None) -> bytes:
        # GRPC asks a call of one answer for it.
        return next(self)

    def _result(self) -> Iterator[bytes]:
        yield self._call.result()


# ------------------------------------------------------------------------------------------------------ server
class ServerAuthentication(grpc.ServerInterceptor):  # type: ignore[misc]
    """Admits calls whose caller shows the token that `token_of` returns for its name (None: nobody of that name).

    `on_refused(peer, what)` is called for each call that is refused. Handlers may raise `PeerRefused` or any
    `SocflowerError` to refuse a call, and `PeerNotReady`; they return or yield bytes. At most `most_challenges` callers
    without a token may hold a thread, each until it has read its challenge.
    """

    def __init__(
        self,
        token_of: Callable[[str], bytes | None],
        *,
        tls: bool,
        receiver: str | None = None,
        on_refused: Callable[[str, str], object],
        most_challenges: int = 8,
    ) -> None:
        self._token_of, self._tls, self._on_refused = token_of, tls, on_refused
        self._most_challenges = most_challenges
        self._receiver = os.urandom(_NUM_RECEIVER) if receiver is None else _padded(receiver)
        self._is_challenge = receiver is None
        self._nonces: set[bytes] = set()
        # In progress.
        self._num_challenges = 0
        # By connection, since its last authenticated call.
        self._challenges_of: dict[str, int] = {}
        self._lock = Lock()

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return a handler that authenticates before it calls the one of the service; called by gRPC."""
        method: str = handler_call_details.method
        if method == _CHALLENGE and self._is_challenge:
            # Not a handler of one message: it would hold a thread until the message comes, perhaps never.
            return grpc.stream_stream_rpc_method_handler(self._challenge)
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        answer = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            session = self._authenticate(method, context)
            requests = (
                messages if session is None else self._opened(session, messages, method, context)
            )
            answers = self._answers(answer, handler, requests, method, context)
            yield from answers if session is None else session.seal(answers, b"answer")

        # A handler of one message would be called after that message was read; this one is called before.
        return grpc.stream_stream_rpc_method_handler(serve)

    def _challenge(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Answer with the receiver's name; the caller has shown no token yet."""
        peer = context.peer()
        with self._lock:
            self._num_challenges += 1
            too_many = self._num_challenges > self._most_challenges
            self._challenges_of[peer] = self._challenges_of.get(peer, 0) + 1
            is_flood = self._challenges_of[peer] == _FLOOD
            if len(self._challenges_of) > _MOST_PEERS:
                self._challenges_of.clear()
        if not context.add_callback(self._end_challenge):
            self._end_challenge()
            return
        if is_flood:
            self._on_refused(
                peer,
                f"{_FLOOD} challenges on one connection, without an authenticated call after them",
            )
        if too_many:
            # Callers that do not read the answers hold the others; this one may call again.
            self.refuse(
                context,
                f"a challenge beyond {self._most_challenges} at a time",
                grpc.StatusCode.UNAVAILABLE,
            )
        yield self._receiver

    def _end_challenge(self) -> None:
        with self._lock:
            self._num_challenges -= 1

    def _answers(
        self,
        answer: Any,
        handler: Any,
        requests: Iterator[bytes],
        method: str,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        try:
            request = (
                requests if handler.request_streaming else self._only(requests, method, context)
            )
            if handler.response_streaming:
                yield from answer(request, context)
            else:
                yield answer(request, context)
        except PeerNotReady as not_ready:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(not_ready))
        except (PeerRefused, SocflowerError) as refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, " ".join(str(refusal).split()))

    def _only(self, requests: Iterator[bytes], method: str, context: grpc.ServicerContext) -> bytes:
        try:
            return next(requests)
        except PeerRefused:
            raise
        except Exception:
            # For a truncated or too long message, gRPC ends the iterator or raises a bare Exception.
            self.refuse(
                context,
                f"an empty, truncated or too long {_short(method)!r} call",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )

    def _opened(
        self,
        session: _Session,
        messages: Iterator[bytes],
        method: str,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        try:
            for message in session.open(messages, b"request"):
                yield bytes(message)
        except PeerRefused as refused:
            what = f"a {_short(method)!r} call with {refused}"
            self._on_refused(context.peer(), what)
            raise PeerRefused(f"refused {what}") from None

    def _authenticate(self, method: str, context: grpc.ServicerContext) -> _Session | None:
        """Return the session of an authenticated call, None with TLS; abort any other."""
        metadata = cast(dict[str, Any], dict(context.invocation_metadata()))
        caller, what = str(metadata.get(_CALLER_KEY, "")), f"a {_short(method)!r} call"
        hello, shown = metadata.get(_HELLO_KEY, b""), metadata.get(_TOKEN_KEY, "")
        if not shown if self._tls else len(hello) != _NUM_NONCE + _NUM_RECEIVER + _NUM_MAC:
            self.refuse(context, f"{what} without a token")
        token = self._token_of(caller)
        # Of an unknown caller: nothing fits.
        secret = token or os.urandom(32)
        if self._tls:
            if not hmac.compare_digest(shown.encode(), secret.hex().encode()):
                self.refuse(
                    context,
                    f"{what} with a wrong token",
                    remedy="; give the one that was agreed on",
                )
            return None
        nonce, receiver, mac = hello[:_NUM_NONCE], hello[_NUM_NONCE:-_NUM_MAC], hello[-_NUM_MAC:]
        session = _Session(secret, method, caller, nonce + receiver)
        if not hmac.compare_digest(mac, session.mac()):
            self.refuse(
                context, f"{what} with a wrong token", remedy="; give the one that was agreed on"
            )
        with self._lock:
            self._challenges_of.pop(context.peer(), None)
        # Only nonces of authenticated calls are kept, so that others cannot fill the memory.
        with self._lock:
            is_current, replayed = receiver == self._receiver, nonce in self._nonces
            if is_current:
                self._nonces.add(nonce)
            if self._is_challenge and len(self._nonces) > _MOST_NONCES:
                self._receiver = os.urandom(_NUM_RECEIVER)
                self._nonces.clear()
        if not is_current:
            # Recorded elsewhere; or made just before a restart, and its caller calls again.
            self.refuse(context, f"{what} for another receiver", grpc.StatusCode.UNAVAILABLE)
        if replayed:
            self.refuse(context, f"a replayed {_short(method)!r} call")
        return session

    def refuse(
        self,
        context: grpc.ServicerContext,
        what: str,
        code: grpc.StatusCode = grpc.StatusCode.UNAUTHENTICATED,
        remedy: str = "",
    ) -> NoReturn:
        """Report and abort a call."""
        self._on_refused(context.peer(), what)
        context.abort(code, f"refused {what}{remedy}")
        raise AssertionError("abort returned")


def _short(method: str) -> str:
    return method.rpartition("/")[2]


def _padded(receiver: str) -> bytes:
    return receiver.encode().ljust(_NUM_RECEIVER, b"\0")
