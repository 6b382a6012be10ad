"""A session: the cloud's half of one run, the edges that train with it, and the checkpoint they all continue from."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any, TypeAlias

from socflower.edgecloud.half_protocols import BackHalf, FrontHalf, Weights
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import (
    CheckpointStore,
    SplitCheckpoint,
    common_checkpoint,
)
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.half_state import HalfState, LoopReport
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.frames import (
    Limits,
    SplitMessages,
    SplitRefused,
    SplitStream,
    StartOver,
    check_version,
)
from socflower.errors import SocflowerError
from socflower.peers.resumable_stream import Traffic
from socflower.wire.arrays import MalformedBytes

_POLL_S = 0.5
_LARGEST_BATCH = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTerms:
    """The terms of a session, as it was opened.

    Joined parties hold different features of the same samples; otherwise parties take turns. In a `reverse` split the
    front half is in the cloud.
    """

    run_id: str
    fingerprint: str
    num_parties: int = 1
    joined: bool = False
    reverse: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedFront:
    """The cloud's half in a reverse split, and how it is driven."""

    half: FrontHalf
    plan: FrontPlan


CloudHalf: TypeAlias = BackHalf | HostedFront

SessionFactory: TypeAlias = Callable[[SessionTerms, Weights], CloudHalf]
"""Makes the cloud's half of a run, before batch 0; `ConfigError` for settings or weights that fit no model."""


@dataclass(slots=True)
class _WaitingEdge:
    """An edge whose stream waits for its span to begin."""

    hello: wire.Hello
    outcome: "AdmittedEdge | Exception | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedEdge:
    """The channel and the greeting with which an edge's stream continues."""

    channel: SplitStream
    connection: int
    welcome: wire.Welcome


@dataclass(slots=True)
class _Training:
    """The span in progress, which all parties began together."""

    epoch_id: str
    connection_ids: list[str]
    channels: list[SplitStream]


class CloudSession:
    """Serves the edges of one run; a thread drives its half, span after span.

    A span begins when all parties have joined. The latest checkpoint that every side has is chosen, and sides in
    another state restore it. An edge joins while a span runs only if it has lost its state; this ends the span for all,
    and the others start over automatically. A stream that merely broke is resumed, without any effect on the training.
    """

    def __init__(
        self,
        terms: SessionTerms,
        half: CloudHalf,
        *,
        folder: Path | None,
        limits: Limits,
        patience_s: float,
        gather_s: float,
        log: Callable[[str], None],
    ) -> None:
        self.terms = terms
        self._name = f"run {terms.run_id}"
        self._plan: FrontPlan | None = None
        driven: BackHalf | FrontHalf
        if isinstance(half, HostedFront):
            self._plan = half.plan
            driven = half.half
        else:
            driven = half
        store = CheckpointStore(folder, f"{terms.run_id}, cloud")
        self._state: HalfState[Any] = HalfState(driven, store)
        self._limits = limits
        self._log = log
        self._patience_s = patience_s
        self._gather_s = gather_s
        # Whether no span has begun in this process.
        self._is_new = True
        self._changed = Condition()
        self._waiting: dict[int, _WaitingEdge] = {}
        self._training: _Training | None = None
        self._error = ""
        self._closed: Exception | None = None
        self._thread = Thread(
            target=self._serve,
            name=f"split-session-{terms.run_id}",
            daemon=True,
        )
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for the edges

    def admit(self, hello: wire.Hello, is_alive: Callable[[], bool]) -> AdmittedEdge:
        """Wait until all parties have joined, and return the edge's channel and welcome.

        Raises `SplitRefused` for an edge that does not fit this run, and `StartOver` if there is nothing to resume.
        """
        self._check(hello)
        if hello.epoch_id:
            return self._resume(hello)
        edge = _WaitingEdge(hello)
        with self._changed:
            self._require_open()
            self._enqueue(edge)
            deadline_s = time.monotonic() + self._gather_s
            while edge.outcome is None and is_alive() and time.monotonic() < deadline_s:
                self._changed.wait(_POLL_S)
            if self._waiting.get(hello.party) is edge:
                del self._waiting[hello.party]
            outcome = edge.outcome
        if isinstance(outcome, AdmittedEdge):
            return outcome
        raise outcome or self._refused(
            f"not all {self.terms.num_parties} parties have come in {self._gather_s:g} s; start them again"
        )

    def _enqueue(self, edge: _WaitingEdge) -> None:
        """Let an edge wait for its span, in place of an earlier edge of its party."""
        hello = edge.hello
        for party, other in self._waiting.items():
            theirs = _span(other.hello)
            ours = _span(hello)
            if party != hello.party and theirs != ours:
                raise self._refused(
                    f"party {hello.party} wants batches {ours}, party {party} {theirs}; give all the same span"
                )
        former = self._waiting.get(hello.party)
        if former is not None:
            former.outcome = self._replaced(hello.party)
        self._waiting[hello.party] = edge
        self._end_training(hello)
        self._changed.notify_all()

    def _refused(self, text: str) -> SplitRefused:
        return SplitRefused(f"{self._name}: {text}")

    def _check(self, hello: wire.Hello) -> None:
        terms = self.terms
        end = hello.first_batch + hello.num_batches
        check_version(hello.version, "edge")
        if hello.fingerprint != terms.fingerprint:
            raise self._refused(
                f"the edge's model ({hello.fingerprint[:16]}) is not the cloud's ({terms.fingerprint[:16]}); build "
                "both from the same code and settings"
            )
        if hello.party >= terms.num_parties:
            raise self._refused(
                f"no party {hello.party} among {terms.num_parties}; they count from 0"
            )
        if hello.front == terms.reverse:
            side = "front" if hello.front else "back"
            raise self._refused(
                f"both edge and cloud have the {side} half; open it with another reverse"
            )
        if end > _LARGEST_BATCH:
            raise self._refused(f"a span up to batch {end}")

    def _resume(self, hello: wire.Hello) -> AdmittedEdge:
        with self._changed:
            self._require_open()
            training = self._training
            if training is None or training.epoch_id != hello.epoch_id:
                raise StartOver
            if training.connection_ids[hello.party] != hello.connection_id:
                raise self._replaced(hello.party)
            channel = training.channels[hello.party]
        if channel.failure is not None:
            raise channel.failure
        try:
            connection = channel.attach(
                received=hello.received, used=hello.used, credit_bytes=hello.credit_bytes
            )
        except MalformedBytes as refused:
            raise self._refused(f"party {hello.party} opens {refused}") from None
        received, used = channel.received_and_used()
        welcome = wire.Welcome(
            epoch_id=training.epoch_id,
            received=received,
            used=used,
            credit_bytes=self._limits.credit_bytes,
            cut=self._state.half.cut,
        )
        return AdmittedEdge(channel=channel, connection=connection, welcome=welcome)

    def _end_training(self, newcomer: wire.Hello) -> None:
        """Make all training edges start over, except an edge that was replaced, which must not reconnect."""
        if self._training is None:
            return
        for party, channel in enumerate(self._training.channels):
            known = self._training.connection_ids[party]
            replaced = party == newcomer.party and known != newcomer.connection_id
            channel.fail(self._replaced(party) if replaced else StartOver())

    def _replaced(self, party: int) -> SplitRefused:
        return self._refused(f"another edge has replaced party {party}; give each its own number")

    def _require_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    # ---------------------------------------------------------------------------------------------- for the manager

    def weights(self) -> tuple[int, Weights]:
        """Return how many batches the half was trained on, and its weights; `SplitRefused` while a span runs."""
        with self._state.lock:
            self._restore_newest()
            batch = self._require_batch()
            weights = self._state.half.weights()
            return batch, {name: array.copy() for name, array in weights.items()}

    def state(self) -> tuple[int, bytes]:
        """Return how many batches the half was trained on, and what `Half.restore` needs; else as `weights`."""
        with self._state.lock:
            self._restore_newest()
            return self._require_batch(), self._state.half.save()

    def _restore_newest(self) -> None:
        """Restore the newest checkpoint, if the service was restarted and no edge has joined since."""
        stored = self._state.store.checkpoints() if self._is_new else ()
        self._is_new = False
        if stored:
            self._state.restore(stored[-1], restore_codec=False)

    def _require_batch(self) -> int:
        if self._state.batch is None:
            failed = f" (it has failed: {self._error})" if self._error else ""
            raise self._refused(f"is between two checkpoints; ask when its span is over{failed}")
        return self._state.batch

    def status(self) -> dict[str, Any]:
        """Return the session's state as a JSON object; `batch` is the one before its half's state, or None."""
        with self._changed:
            report = self._state.report
            traffic = Traffic()
            for channel in self._channels():
                traffic.add(channel.traffic)
            return {
                "run_id": self.terms.run_id,
                "num_parties": self.terms.num_parties,
                "reverse": self.terms.reverse,
                "batch": self._state.batch,
                "error": self._error,
                "waiting": sorted(self._waiting),
                "checkpoints": [place.batch for place in self._state.store.checkpoints()],
                "num_batches_done": len(report.losses),
                "last_batch": max(report.losses.copy(), default=None),
                "compute_s": report.compute_s,
                "wait_s": report.wait_s,
                **asdict(traffic),
            }

    def _channels(self) -> list[SplitStream]:
        return self._training.channels if self._training else []

    def close(self, why: Exception, timeout_s: float = 10.0) -> None:
        """End the session: edges get `why`. Returns when the thread has ended, or after `timeout_s`."""
        with self._changed:
            self._closed = self._closed or why
            self._fail(list(self._waiting.values()), why)
        self._thread.join(timeout_s)

    def _fail(self, edges: Sequence[_WaitingEdge], why: Exception) -> None:
        for edge in edges:
            edge.outcome = edge.outcome or why
        for channel in self._channels():
            channel.fail(why)
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- inside

    def _serve(self) -> None:
        num_parties = self.terms.num_parties
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._waiting) == num_parties)
                if self._closed:
                    return
                edges = [self._waiting.pop(party) for party in range(num_parties)]
                self._error = ""
            try:
                self._train(edges)
            except StartOver:
                pass
            except Exception as error:
                self._on_failure(edges, error)

    def _on_failure(self, edges: list[_WaitingEdge], error: Exception) -> None:
        text = str(error)
        if not isinstance(error, SocflowerError):
            text = f"the cloud's half failed: {type(error).__name__}: {error}"
        text = " ".join(text.split())
        failure = error if isinstance(error, SplitRefused) else self._refused(text)
        with self._changed:
            self._error = text
            self._fail(edges, failure)
            begun = self._training is not None
        # A refusal before a span has begun is logged with the stream that is refused.
        if begun and self._closed is None:
            self._log(f"split cloud: a span of {self._name} ended: {text}")

    def _train(self, edges: list[_WaitingEdge]) -> None:
        """Agree on a checkpoint, restore it, welcome the edges, and drive the half to the end of the span."""
        with self._changed:
            self._training = None
        with self._state.lock:
            self._is_new = False
        hello = edges[0].hello
        stop = hello.first_batch + hello.num_batches
        place, restore_codec = self._agreed_place(edges, stop)
        self._state.restore(place, restore_codec=restore_codec)
        training = self._new_training(edges)
        with self._changed:
            self._training = training
            self._state.epoch_id = training.epoch_id
            self._state.report = LoopReport(first_batch=place.batch, num_batches=stop - place.batch)
            for edge, channel in zip(edges, training.channels, strict=True):
                edge.outcome = self._welcome(edge.hello, channel, place, restore_codec)
            if self._closed is not None or self._waiting:
                # Another edge has joined in the meantime, so this span would end at once.
                for channel in training.channels:
                    channel.fail(self._closed or StartOver())
            self._changed.notify_all()
        if self._plan is not None:
            FrontLoop(self._state, training.channels[0], self._plan).run(place.batch, stop)
        else:
            BackLoop(
                self._state,
                training.channels,
                joined=self.terms.joined,
            ).run(place.batch)

    def _agreed_place(
        self, edges: Sequence[_WaitingEdge], stop: int
    ) -> tuple[SplitCheckpoint, bool]:
        """Return the latest checkpoint that all sides have, and whether all of them load it, codec included."""
        offers = {"cloud": self._state.checkpoints()}
        for party, edge in enumerate(edges):
            offers[f"party {party}"] = [
                SplitCheckpoint(batch=each.batch, epoch_id=each.epoch_id)
                for each in edge.hello.checkpoints
            ]
        place = common_checkpoint(list(offers.values()), stop)
        if place is None:
            has = "; ".join(f"{side}: {_batches(offer)}" for side, offer in offers.items())
            raise self._refused(
                f"no checkpoint in common up to batch {stop} ({has}); give cloud and edge a folder for checkpoints, "
                "or open the run again with the weights of its last round"
            )
        current = SplitCheckpoint(batch=place.batch)
        return place, not any(current in offer for offer in offers.values())

    def _new_training(self, edges: Sequence[_WaitingEdge]) -> _Training:
        names = (
            [f"party {party}" for party in range(len(edges))] if len(edges) > 1 else ["the edge"]
        )
        channels = [
            SplitStream(
                name,
                SplitMessages(self._limits),
                limits=self._limits,
                patience_s=self._patience_s,
            )
            for name in names
        ]
        connection_ids = [edge.hello.connection_id for edge in edges]
        return _Training(secrets.token_hex(8), connection_ids, channels)

    def _welcome(
        self, hello: wire.Hello, channel: SplitStream, place: SplitCheckpoint, restore_codec: bool
    ) -> AdmittedEdge:
        assert self._training is not None
        credit_bytes = max(1, hello.credit_bytes)
        connection = channel.attach(received=0, used=0, credit_bytes=credit_bytes)
        welcome = wire.Welcome(
            epoch_id=self._training.epoch_id,
            start=wire.Checkpoint(**asdict(place)),
            restore_codec=restore_codec,
            credit_bytes=self._limits.credit_bytes,
            cut=self._state.half.cut,
        )
        return AdmittedEdge(channel=channel, connection=connection, welcome=welcome)


def _span(hello: wire.Hello) -> str:
    return f"{hello.first_batch} to {hello.first_batch + hello.num_batches - 1}"


def _batches(checkpoints: list[SplitCheckpoint]) -> str:
    batches = sorted({checkpoint.batch for checkpoint in checkpoints})
    return ", ".join(map(str, batches)) or "none"
