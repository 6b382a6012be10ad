"""The edge's end of the stream: connects to the cloud, and reconnects when the connection breaks."""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Event, Thread, Timer
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from socflower.edgecloud.runtime.checkpoints import SplitCheckpoint
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import PLAIN_TEXT, check_token, run_caller
from socflower.edgecloud.stream.frames import (
    PROTOCOL_VERSION,
    Limits,
    SplitMessages,
    SplitRefused,
    SplitStream,
    StartOver,
)
from socflower.errors import ConfigError
from socflower.peers.connections import DialledCall, always
from socflower.peers.resumable_stream import StreamLost
from socflower.wire.arrays import MalformedBytes
from socflower.wire.authentication import ClientAuthentication
from socflower.wire.framing import LARGEST_FRAME_BYTES
from socflower.wire.secure_channel import (
    Address,
    HandlerFailed,
    PeerNotTrusted,
    PeerRefused,
    Tls,
    failure_of,
    open_channel,
)

_METHOD = "/socflower.split.Split/Train"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_FLUSH_TIMEOUT_S = 5.0


class Shaper(Protocol):
    """Limits the rate of a connection, for example to a bandwidth profile."""

    def wait(self, num_bytes: int) -> bool:
        """Block until `num_bytes` may have passed; False if it was closed meanwhile."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTerms:
    """Where a span begins, as agreed by all sides.

    If `start` has an epoch, sides in another state restore this checkpoint; `cut` is that of the cloud's half there.
    """

    epoch_id: str
    start: SplitCheckpoint
    restore_codec: bool
    cut: int


class EdgeConnection:
    """A connection to one run in one cloud, for any number of spans.

    The edge dials `address` ("host:port"), never the cloud. `party` counts the run's edges from 0. `up` and `down`
    limit the rate. A peer that does not answer pings for `heartbeat_s` is dead; a broken connection is dialled again
    for `give_up_s`; a cloud that answers pings but makes no progress is waited for `patience_s`. Raises `ConfigError`
    for an invalid address, plain text beyond private addresses (unless `insecure`), and an invalid token.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        token: str,
        fingerprint: str,
        party: int = 0,
        tls: Tls | None = None,
        insecure: bool = False,
        up: Shaper | None = None,
        down: Shaper | None = None,
        limits: Limits | None = None,
        heartbeat_s: float = 5.0,
        give_up_s: float = 300.0,
        patience_s: float = 900.0,
    ) -> None:
        dialled = Address.parse(address, "cloud address")
        if tls is None and not insecure:
            dialled.require_private(PLAIN_TEXT)
        if not run_id.isascii() or not run_id.isprintable() or not run_id:
            raise ConfigError(
                f"run {run_id!r}: a name has up to 64 letters, digits, '.', '_' and '-'"
            )
        self.address = address
        self.run_id = run_id
        self.party = party
        self._cloud = f"the cloud at {address}"
        self.give_up_s = give_up_s
        self._token = check_token(token, f"token of run {run_id}").encode()
        self._fingerprint = fingerprint
        self._limits = limits or Limits()
        self._tls = tls
        if tls is not None:
            # Refuses files that cannot be read.
            tls.channel_credentials()
        self._up = up
        self._down = down
        self._heartbeat_s = heartbeat_s
        self._patience_s = patience_s
        self._connection_id = secrets.token_hex(8)
        self._closed = Event()
        self._channel: SplitStream | None = None
        # Not part of the training: it only keeps many edges from dialling at the same time after an outage.
        self._jitter = random.Random()

    def join(
        self,
        *,
        front: bool,
        first_batch: int,
        num_batches: int,
        checkpoints: Sequence[SplitCheckpoint],
    ) -> tuple[SplitStream, JoinTerms]:
        """Wait for all parties; return a channel to the cloud's half and where the span begins.

        `checkpoints` are those from which this side can start. The channel reconnects until it is ended by
        `end_channel`. Raises `SplitRefused` and `StreamLost`.
        """
        hello = wire.Hello(
            version=PROTOCOL_VERSION,
            fingerprint=self._fingerprint,
            party=self.party,
            connection_id=self._connection_id,
            front=front,
            first_batch=first_batch,
            num_batches=num_batches,
            credit_bytes=self._limits.credit_bytes,
            checkpoints=[wire.Checkpoint(**asdict(place)) for place in checkpoints],
        )
        call, welcome = self._dial_until(hello, lambda: False)
        channel = SplitStream(
            self._cloud,
            SplitMessages(self._limits),
            limits=self._limits,
            patience_s=self._patience_s,
            end_error=self._end_error,
        )
        connection = _attach(call, channel, welcome)
        self._channel = channel
        if self._closed.is_set():
            self.close()
        resuming = wire.Hello()
        resuming.CopyFrom(hello)
        resuming.ClearField("checkpoints")
        resuming.epoch_id = welcome.epoch_id
        reader = (call, channel, connection, resuming)
        Thread(
            target=self._maintain,
            args=reader,
            name="split-edge",
            daemon=True,
        ).start()
        start = SplitCheckpoint(batch=welcome.start.batch, epoch_id=welcome.start.epoch_id)
        return channel, JoinTerms(
            epoch_id=welcome.epoch_id,
            cut=welcome.cut,
            restore_codec=welcome.restore_codec,
            start=start,
        )

    def end_channel(self, channel: SplitStream) -> None:
        """End a channel, after waiting a moment for sent messages to arrive if nothing has failed."""
        if channel.failure is None:
            channel.sent.flush(_FLUSH_TIMEOUT_S)
        channel.fail(StreamLost("this channel was left"))

    def close(self) -> None:
        """Stop dialling and end the channel: loops get `StreamLost`. Shapers are closed by their owner."""
        self._closed.set()
        channel = self._channel
        if channel is not None:
            channel.fail(
                StreamLost(f"run {self.run_id}: the connection to {self._cloud} was closed here")
            )

    # ------------------------------------------------------------------------------------------------------- inside

    def _maintain(
        self, call: DialledCall, channel: SplitStream, connection: int, resuming: wire.Hello
    ) -> None:
        """Read a channel's connections, one after the other, until it fails or is ended."""
        while True:
            failure = self._read(call, channel, connection)
            channel.detach(connection)
            call.end()
            if failure is not None:
                channel.fail(failure)
            if channel.failure is not None:
                return
            try:
                resuming.received, resuming.used = channel.received_and_used()
                call, welcome = self._dial_until(resuming, lambda: channel.failure is not None)
                connection = _attach(call, channel, welcome)
            except (SplitRefused, StreamLost, StartOver) as error:
                channel.fail(error)
                return
            except MalformedBytes as error:
                call.end()
                channel.fail(SplitRefused(f"{self._cloud} resumes with {error}"))
                return

    def _read(self, call: DialledCall, channel: SplitStream, connection: int) -> Exception | None:
        """Read a connection to its end; return the error if dialling again would not help, or None."""
        try:
            call.read(channel, connection)
            return None if channel.peer_end is None else self._end_error(channel.peer_end)
        except grpc.RpcError as error:
            return self._fatal_error(error)
        except MalformedBytes as refused:
            return SplitRefused(f"{self._cloud} sends {refused}")
        except PeerRefused as refused:
            return SplitRefused(f"{self._cloud}: {refused}")
        except SplitRefused as refused:
            return refused

    def _dial_until(
        self, hello: wire.Hello, is_over: Callable[[], bool]
    ) -> tuple[DialledCall, wire.Welcome]:
        """Dial until the cloud answers, and return its welcome; `StreamLost` after `give_up_s` without."""
        began_s = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        why = "it was not dialled: the connection was closed here"
        while not self._closed.is_set():
            call = self._dial(hello)
            try:
                return call, self._welcome(call)
            except StreamLost as lost:
                call.end()
                why = str(lost)
            except BaseException:
                call.end()
                raise
            if is_over() or time.monotonic() + pause_s > began_s + self.give_up_s:
                break
            self._closed.wait(pause_s * self._jitter.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        tried_s = time.monotonic() - began_s
        raise StreamLost(
            f"run {self.run_id}: {self._cloud} is out of reach, after trying for {tried_s:.0f} s ({why})"
        )

    def _dial(self, hello: wire.Hello) -> DialledCall:
        channel = open_channel(
            self.address,
            self._tls.channel_credentials() if self._tls is not None else None,
            heartbeat_s=self._heartbeat_s,
            max_message_bytes=4 * LARGEST_FRAME_BYTES,
        )
        tls = self._tls is not None
        authentication = ClientAuthentication(run_caller(self.run_id), self._token, tls=tls)
        return DialledCall(
            authentication.on(channel).stream_stream(_METHOD),
            wire.Frame(hello=hello).SerializeToString(),
            up=self._up.wait if self._up is not None else always,
            down=self._down.wait if self._down is not None else always,
            and_then=channel.close,
        )

    def _welcome(self, call: DialledCall) -> wire.Welcome:
        # The cloud limits the wait for other parties; this timer is for a peer that does not answer at all.
        timer = Timer(self._patience_s, call.end)
        timer.daemon = True
        timer.start()
        try:
            frame = self._parse(call.answer())
        except StopIteration:
            raise StreamLost("it hung up") from None
        except grpc.RpcError as error:
            raise self._fatal_error(error) or StreamLost(str(failure_of("it", error))) from None
        except PeerRefused as refused:
            raise SplitRefused(f"{self._cloud}: {refused}") from None
        finally:
            timer.cancel()
        kind = frame.WhichOneof("kind")
        if kind == "refusal":
            raise self._refusal_error(frame.refusal)
        if kind != "welcome":
            raise SplitRefused(
                f"{self._cloud} answers a greeting with a {kind}; is it a split cloud?"
            )
        return frame.welcome

    def _parse(self, content: bytes) -> wire.Frame:
        try:
            return wire.Frame.FromString(content)
        except DecodeError:
            raise SplitRefused(f"{self._cloud} sends bytes that are no frame") from None

    def _end_error(self, reason: bytes) -> Exception:
        """Return the error for the reason with which the cloud has ended a channel."""
        try:
            return self._refusal_error(wire.Frame.FromString(reason).refusal)
        except DecodeError:
            return SplitRefused(f"{self._cloud} ends a stream with bytes that are no frame")

    def _refusal_error(self, refusal: wire.Refusal) -> Exception:
        if refusal.code == wire.Refusal.START_OVER:
            return StartOver()
        return SplitRefused(f"{self._cloud}: {refusal.text}")

    def _fatal_error(self, error: Any) -> Exception | None:
        """Return the error that ended a call if dialling again would not help, else None."""
        failure = failure_of(self._cloud, error)
        if isinstance(failure, HandlerFailed):
            return None
        is_final = isinstance(failure, PeerRefused | PeerNotTrusted)
        return SplitRefused(str(failure)) if is_final else None


def _attach(call: DialledCall, channel: SplitStream, welcome: wire.Welcome) -> int:
    """Let a channel send and receive over a call; return the id of the connection."""
    return call.attach(
        channel,
        received=welcome.received,
        used=welcome.used,
        credit_bytes=max(1, welcome.credit_bytes),
    )
