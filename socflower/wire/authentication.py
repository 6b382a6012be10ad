"""Authentication of callers by gRPC interceptors on both sides; no message is read before its caller is known.

With TLS each call carries its caller's name and token, which the encryption hides.

Without TLS (on a trusted network) the token is never sent. A call carries an HMAC, keyed by the token, of method,
caller, receiver and a nonce. Keys for this call alone are derived from the same values, and every message, in both
directions, carries a tag (GMAC) of its position and its bytes. So nobody without the token can call or answer, a
recorded call cannot be replayed, and no message can be changed, left out or moved. Messages are not encrypted.

The receiver is a name that both sides know, or a challenge: 16 random bytes of the server's process. Clients ask for
the challenge, so that calls that were recorded before a restart cannot be replayed either.
"""

import hmac
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn, cast

import grpc
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from socflower.errors import SocflowerError
from socflower.wire.secure_channel import PeerNotReady, PeerOfOtherVersion, PeerRefused


class ForgedAnswer(PeerRefused):
    """An answer that was made without the token, or changed."""


OVERHEAD_BYTES = 32
"""The most bytes that authentication adds to a message."""

_CALLER_KEY, _TOKEN_KEY, _HELLO_KEY = "socflower-caller", "socflower-token", "socflower-hello-bin"
_NUM_NONCE, _NUM_RECEIVER, _NUM_MAC, _NUM_TAG = 16, 16, 32, 16
_CHALLENGE = "/socflower.Authentication/Challenge"
_CHALLENGE_TIMEOUT_S = 30.0
# So many challenges on one connection without an authenticated call are an attack; a client asks once.
_FLOOD = 32
# Challenges are counted for at most so many connections.
_MOST_PEERS = 10_000
# After so many nonces the challenge changes, and earlier nonces need not be kept.
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
        """Yield messages with their tags; a nonce of this direction precedes the first one."""
        prefix = os.urandom(_NUM_NONCE)
        cipher = self._cipher(direction, prefix)
        for position, message in enumerate(messages):
            yield b"".join((prefix, cipher.encrypt(position.to_bytes(12), b"", message), message))
            prefix = b""

    def open(self, messages: Iterator[bytes], direction: bytes) -> Iterator[memoryview]:
        """Yield the messages that `seal` got; raise `PeerRefused` for one that was changed."""
        cipher: AESGCM | None = None
        for position, sealed in enumerate(messages):
            view = memoryview(sealed)
            if cipher is None:
                cipher, view = self._cipher(direction, bytes(view[:_NUM_NONCE])), view[_NUM_NONCE:]
            try:
                cipher.decrypt(position.to_bytes(12), view[:_NUM_TAG], view[_NUM_TAG:])
            except (InvalidTag, ValueError):
                # ValueError: the message is shorter than a tag.
                raise PeerRefused("a changed message") from None
            yield view[_NUM_TAG:]

    def _cipher(self, direction: bytes, nonce: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._secret, direction + b"\0" + nonce + self._call, "sha256"))


# ------------------------------------------------------------------------------------------------------ client
# grpcio has no types, so mypy takes its classes for Any and warns of every subclass.
@dataclass(frozen=True, slots=True)
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]


class ClientAuthentication(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Authenticates all calls of a channel as `caller` by `token`.

    `receiver` names the server; by default its challenge does. Answers made without the token raise
    `ForgedAnswer`.
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
        """Authenticate a call. gRPC calls this method and the next three."""
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
        metadata = (*metadata, (_HELLO_KEY, hello + session.mac()))
        own = _Details(details.method, details.timeout, metadata)
        if requests:
            call = continuation(own, session.seal(iter(request), b"request"))
        else:
            call = continuation(own, next(session.seal(iter((request,)), b"request")))
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

    def __next__(self) -> bytes | memoryview:
        try:
            return next(self._answers)
        except PeerRefused:
            self._call.cancel()
            raise ForgedAnswer("an answer that was made without the token") from None

    def result(self, timeout: float | None = None) -> bytes:
        # gRPC calls this for a call with one answer.
        return bytes(next(self))

    def _result(self) -> Iterator[bytes]:
        yield self._call.result()


# ------------------------------------------------------------------------------------------------------ server
class ServerAuthentication(grpc.ServerInterceptor):
    """Admits calls with a token that `tokens_of` returns for the caller's name (none: no such caller).

    `on_refused(peer, what)` is called for each refused call. Handlers may raise `PeerRefused` or any `SocflowerError`
    to refuse a call, and `PeerNotReady`; they return or yield bytes. Handlers of streams get memoryviews, so
    that messages are not copied. At most `most_challenges` callers without a token may hold a thread, each until it has
    read its challenge.
    """

    def __init__(
        self,
        tokens_of: Callable[[str], Sequence[bytes]],
        *,
        tls: bool,
        receiver: str | None = None,
        on_refused: Callable[[str, str], object],
        most_challenges: int = 8,
    ) -> None:
        self._tokens_of, self._tls, self._on_refused = tokens_of, tls, on_refused
        self._most_challenges = most_challenges
        self._receiver = os.urandom(_NUM_RECEIVER) if receiver is None else _padded(receiver)
        self._is_challenge = receiver is None
        self._nonces: set[bytes] = set()
        # Challenges in progress.
        self._num_challenges = 0
        # Challenges by connection, since its last authenticated call.
        self._challenges_of: dict[str, int] = {}
        self._lock = Lock()

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return a handler that authenticates, and then calls the service's handler. gRPC calls this method."""
        method: str = handler_call_details.method
        if method == _CHALLENGE and self._is_challenge:
            # A handler of one message would hold a thread until the message comes, perhaps never.
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
            if session is None:
                yield from self._answers(answer, handler, messages, method, context)
                return
            requests = self._opened(session, messages, method, context)
            answers = self._answers(answer, handler, requests, method, context)
            yield from session.seal(answers, b"answer")

        # gRPC calls a handler of one message after it has read the message; it calls this handler before.
        return grpc.stream_stream_rpc_method_handler(serve)

    def _challenge(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Answer with the receiver's name; the caller is not authenticated yet."""
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
            what = (
                f"{_FLOOD} challenges on one connection, without an authenticated call after them"
            )
            self._on_refused(peer, what)
        if too_many:
            # Other callers have not read their challenges; this caller may try again.
            what = f"a challenge beyond {self._most_challenges} at a time"
            self.refuse(context, what, grpc.StatusCode.UNAVAILABLE)
        yield self._receiver

    def _end_challenge(self) -> None:
        with self._lock:
            self._num_challenges -= 1

    def _answers(
        self,
        answer: Any,
        handler: Any,
        requests: Iterator[bytes] | Iterator[memoryview],
        method: str,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        try:
            request: Any = requests
            if not handler.request_streaming:
                request = self._only(requests, method, context)
            if handler.response_streaming:
                yield from answer(request, context)
            else:
                yield answer(request, context)
        except PeerNotReady as not_ready:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(not_ready))
        except PeerOfOtherVersion as other:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, str(other))
        except (PeerRefused, SocflowerError) as refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, " ".join(str(refusal).split()))

    def _only(
        self,
        requests: Iterator[bytes] | Iterator[memoryview],
        method: str,
        context: grpc.ServicerContext,
    ) -> bytes:
        try:
            return bytes(next(requests))
        except PeerRefused:
            raise
        except Exception:
            # For a truncated or too long message, gRPC ends the iterator or raises a bare Exception.
            what = f"an empty, truncated or too long {_short(method)!r} call"
            self.refuse(context, what, grpc.StatusCode.RESOURCE_EXHAUSTED)

    def _opened(
        self,
        session: _Session,
        messages: Iterator[bytes],
        method: str,
        context: grpc.ServicerContext,
    ) -> Iterator[memoryview]:
        try:
            yield from session.open(messages, b"request")
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
        # For an unknown caller no token is right; the comparison takes as long as any.
        secrets = self._tokens_of(caller) or (os.urandom(32),)
        if self._tls:
            tokens = [secret.hex().encode() for secret in secrets]
            self._require_one(context, what, shown.encode(), tokens)
            return None
        nonce, receiver, mac = hello[:_NUM_NONCE], hello[_NUM_NONCE:-_NUM_MAC], hello[-_NUM_MAC:]
        sessions = [_Session(secret, method, caller, nonce + receiver) for secret in secrets]
        session = sessions[
            self._require_one(context, what, mac, [session.mac() for session in sessions])
        ]
        with self._lock:
            self._challenges_of.pop(context.peer(), None)
            is_current, replayed = receiver == self._receiver, nonce in self._nonces
            # Only nonces of authenticated calls are kept, so that others cannot fill the memory.
            if is_current:
                self._nonces.add(nonce)
            if self._is_challenge and len(self._nonces) > _MOST_NONCES:
                self._receiver = os.urandom(_NUM_RECEIVER)
                self._nonces.clear()
        if not is_current:
            # The call was recorded elsewhere; or it was made just before a restart, and its caller tries again.
            self.refuse(context, f"{what} for another receiver", grpc.StatusCode.UNAVAILABLE)
        if replayed:
            self.refuse(context, f"a replayed {_short(method)!r} call")
        return session

    def _require_one(
        self, context: grpc.ServicerContext, what: str, shown: bytes, secrets: Sequence[bytes]
    ) -> int:
        """Return which of the secrets was shown; abort the call if it is none."""
        are_equal = [hmac.compare_digest(shown, secret) for secret in secrets]
        if not any(are_equal):
            remedy = "; give the one that was agreed on"
            self.refuse(context, f"{what} with a wrong token", remedy=remedy)
        return are_equal.index(True)

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
