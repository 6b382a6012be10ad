"""A session: the cloud's half of one run, the edges that train with it, and the checkpoint they all continue from."""

import secrets
import time
from collections.abc import Callable, Mapping
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
    PROTOCOL_VERSION,
    Limits,
    SplitChannel,
    SplitMessages,
    SplitRefused,
    StartOver,
)
from socflower.errors import SocflowerError
from socflower.wire.arrays import MalformedBytes
from socflower.wire.frame_channel import Traffic

_POLL_S = 0.5
_LARGEST_BATCH = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTerms:
    """What a session was opened with."""

    run_id: str
    fingerprint: str
    num_parties: int = 1
    joined: bool = (
        False  # parties hold different features of the same samples; otherwise they take turns
    )
    reverse: bool = False  # the front half is in the cloud
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
    outcome: "Admitted | Exception | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """What an edge's stream needs to continue."""

    channel: SplitChannel
    stream_id: int
    welcome: wire.Welcome


@dataclass(slots=True)
class _Training:
    """The span in progress, which all parties began together."""

    epoch_id: str
    connection_ids: list[str]
    channels: list[SplitChannel]


class CloudSession:
    """Serves the edges of one run; a thread drives its half, span after span.

    A span begins when all parties have joined. The latest checkpoint that every side has is chosen, and sides in
    another state restore it. An edge that joins while a span runs ends the span for all: it only joins if it has lost
    its state. The others are told to start over and do so automatically. A stream that merely broke is resumed, without
    any effect on the training.
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
        self._plan = half.plan if isinstance(half, HostedFront) else None
        self._state: HalfState[Any] = HalfState(
            half.half if isinstance(half, HostedFront) else half,
            CheckpointStore(folder, f"{terms.run_id}, cloud"),
        )
        self._limits, self._patience_s, self._gather_s, self._log = (
            limits,
            patience_s,
            gather_s,
            log,
        )
        self._is_new = True  # no span has begun in this process
        self._changed = Condition()
        self._waiting: dict[int, _WaitingEdge] = {}
        self._training: _Training | None = None
        self._error = ""
        self._closed: Exception | None = None
        self._thread = Thread(target=self._serve, name=f"split-session-{terms.run_id}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for the edges

    def admit(self, hello: wire.Hello, is_alive: Callable[[], bool]) -> Admitted:
        """Wait until all parties have joined, and return the edge's channel and welcome.

        Raises `SplitRefused` for an edge that does not fit this run, and `StartOver` where there is nothing to resume.
        """
        self._check(hello)
        if hello.epoch_id:
            return self._resume(hello)
        edge = _WaitingEdge(hello)
        with self._changed:
            self._require_open()
            for party, other in self._waiting.items():
                theirs, ours = _span(other.hello), _span(hello)
                if party != hello.party and theirs != ours:
                    raise SplitRefused(
                        f"run {self.terms.run_id}: party {hello.party} wants batches {ours}, party "
                        f"{party} {theirs}; give all parties the same span"
                    )
            former = self._waiting.get(hello.party)
            if former is not None:
                former.outcome = SplitRefused(self._replaced(hello.party))
            self._waiting[hello.party] = edge
            self._end_training(hello)
            self._changed.notify_all()
            deadline_s = time.monotonic() + self._gather_s
            while edge.outcome is None and is_alive() and time.monotonic() < deadline_s:
                self._changed.wait(_POLL_S)
            if self._waiting.get(hello.party) is edge:
                del self._waiting[hello.party]
            outcome = edge.outcome
        if isinstance(outcome, Admitted):
            return outcome
        raise outcome or SplitRefused(
            f"run {self.terms.run_id}: not all of its {self.terms.num_parties} parties have "
            f"come in {self._gather_s:g} s; start them again"
        )

    def _check(self, hello: wire.Hello) -> None:
        terms = self.terms
        if hello.version != PROTOCOL_VERSION:
            raise SplitRefused(
                f"the cloud speaks version {PROTOCOL_VERSION} of the split protocol, the edge "
                f"{hello.version}; install the same socflower on both"
            )
        if hello.fingerprint != terms.fingerprint:
            raise SplitRefused(
                f"run {terms.run_id}: the edge's model ({hello.fingerprint[:16]}) is not the cloud's "
                f"({terms.fingerprint[:16]}); build both from the same code and settings"
            )
        if hello.party >= terms.num_parties:
            raise SplitRefused(
                f"run {terms.run_id}: there is no party {hello.party} among {terms.num_parties}; "
                "parties count from 0"
            )
        if hello.front == terms.reverse:
            side, opened = (
                ("front", "reversed") if hello.front else ("back", "as an ordinary split")
            )
            raise SplitRefused(
                f"run {terms.run_id}: the edge has the {side} half, and so has the cloud, whose session "
                f"was opened {opened}; give them one each"
            )
        if hello.first_batch + hello.num_batches > _LARGEST_BATCH:
            raise SplitRefused(
                f"run {terms.run_id}: a span up to batch {hello.first_batch + hello.num_batches}"
            )

    def _resume(self, hello: wire.Hello) -> Admitted:
        with self._changed:
            self._require_open()
            training = self._training
            if training is None or training.epoch_id != hello.epoch_id:
                raise StartOver
            if training.connection_ids[hello.party] != hello.connection_id:
                raise SplitRefused(self._replaced(hello.party))
            channel = training.channels[hello.party]
        if channel.failure is not None:
            raise channel.failure
        try:
            stream_id = channel.attach(
                received=hello.received, used=hello.used, credit_bytes=hello.credit_bytes
            )
        except MalformedBytes as refused:
            raise SplitRefused(
                f"run {self.terms.run_id}: party {hello.party} opens {refused}"
            ) from None
        received, used = channel.received_and_used()
        return Admitted(
            channel=channel,
            stream_id=stream_id,
            welcome=wire.Welcome(
                epoch_id=training.epoch_id,
                received=received,
                used=used,
                credit_bytes=self._limits.credit_bytes,
                cut=self._state.half.cut,
            ),
        )

    def _end_training(self, newcomer: wire.Hello) -> None:
        """Make all training edges start over, except an edge that was replaced, which must not reconnect."""
        if self._training is None:
            return
        for party, channel in enumerate(self._training.channels):
            replaced = (
                party == newcomer.party
                and self._training.connection_ids[party] != newcomer.connection_id
            )
            channel.fail(SplitRefused(self._replaced(party)) if replaced else StartOver())

    def _replaced(self, party: int) -> str:
        return (
            f"run {self.terms.run_id}: another edge has taken the place of party {party}; give each a party of its "
            "own"
        )

    def _require_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    # ---------------------------------------------------------------------------------------------- for the manager

    def weights(self) -> tuple[int, Weights]:
        """Return how many batches the half was trained on, and its weights; `SplitRefused` while a span runs."""
        with self._state.lock:
            self._restore_newest()
            return self._require_batch(), {
                name: array.copy() for name, array in self._state.half.weights().items()
            }

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
            raise SplitRefused(
                f"run {self.terms.run_id}: is between two checkpoints; ask when its span is over"
                + (f" (it has failed: {self._error})" if self._error else "")
            )
        return self._state.batch

    def status(self) -> dict[str, Any]:
        """Return the session's state as a JSON object."""
        with self._changed:
            report, traffic = self._state.report, Traffic()
            for channel in self._training.channels if self._training else []:
                traffic.add(channel.traffic)
            return {
                "run_id": self.terms.run_id,
                "num_parties": self.terms.num_parties,
                "reverse": self.terms.reverse,
                "batch": self._state.batch,
                "error": self._error,
                "waiting": sorted(self._waiting),
                "checkpoints": [checkpoint.batch for checkpoint in self._state.store.checkpoints()],
                "num_batches_done": len(report.losses),
                "last_batch": max(report.losses.copy(), default=None),
                "compute_s": report.compute_s,
                "wait_s": report.wait_s,
                **asdict(traffic),
            }

    def close(self, why: Exception, timeout_s: float = 10.0) -> None:
        """End the session: edges get `why`. Returns when the thread has ended, or after `timeout_s`."""
        with self._changed:
            self._closed = self._closed or why
            for edge in self._waiting.values():
                edge.outcome = why
            for channel in self._training.channels if self._training else []:
                channel.fail(why)
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------------- inside

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or len(self._waiting) == self.terms.num_parties
                )
                if self._closed:
                    return
                edges = [self._waiting.pop(party) for party in range(self.terms.num_parties)]
                self._error = ""
            try:
                self._train(edges)
            except StartOver:
                pass
            except Exception as error:
                known = isinstance(error, SocflowerError)
                text = (
                    str(error)
                    if known
                    else f"the cloud's half failed: {type(error).__name__}: {error}"
                )
                text = " ".join(text.split())
                failure = (
                    error
                    if isinstance(error, SplitRefused)
                    else SplitRefused(f"run {self.terms.run_id}: {text}")
                )
                with self._changed:
                    self._error = text
                    for edge in edges:
                        edge.outcome = edge.outcome or failure
                    for channel in self._training.channels if self._training else []:
                        channel.fail(failure)
                    self._changed.notify_all()
                    begun = self._training is not None
                # A refusal before a span has begun is logged with the stream that is refused.
                if begun and self._closed is None:
                    self._log(f"split cloud: a span of run {self.terms.run_id} ended: {text}")

    def _train(self, edges: list[_WaitingEdge]) -> None:
        terms, hellos = self.terms, [edge.hello for edge in edges]
        with self._changed:
            self._training = None
        with self._state.lock:
            self._is_new = False
        stop = hellos[0].first_batch + hellos[0].num_batches
        offers = [
            [
                SplitCheckpoint(batch=offer.batch, epoch_id=offer.epoch_id)
                for offer in hello.checkpoints
            ]
            for hello in hellos
        ]
        ours = self._state.checkpoints()
        place = common_checkpoint([ours, *offers], stop)
        if place is None:
            raise SplitRefused(
                f"run {terms.run_id}: edge and cloud have no checkpoint in common up to batch {stop} "
                f"(cloud: {_batches(ours)}"
                + "".join(
                    f"; party {party}: {_batches(offer)}" for party, offer in enumerate(offers)
                )
                + "); give both a folder for checkpoints, or open the run anew with the weights of its last round"
            )
        restore_codec = all(
            SplitCheckpoint(batch=place.batch) not in offer for offer in [ours, *offers]
        )
        self._state.restore(place, restore_codec=restore_codec)
        training = _Training(
            epoch_id=secrets.token_hex(8),
            connection_ids=[hello.connection_id for hello in hellos],
            channels=[
                SplitChannel(
                    f"party {party}" if terms.num_parties > 1 else "the edge",
                    SplitMessages(self._limits),
                    limits=self._limits,
                    patience_s=self._patience_s,
                )
                for party in range(terms.num_parties)
            ],
        )
        with self._changed:
            self._training = training
            self._state.epoch_id = training.epoch_id
            self._state.report = LoopReport(first_batch=place.batch, num_batches=stop - place.batch)
            for edge, channel in zip(edges, training.channels, strict=True):
                stream_id = channel.attach(
                    received=0, used=0, credit_bytes=max(1, edge.hello.credit_bytes)
                )
                edge.outcome = Admitted(
                    channel=channel,
                    stream_id=stream_id,
                    welcome=wire.Welcome(
                        epoch_id=training.epoch_id,
                        start=wire.Checkpoint(batch=place.batch, epoch_id=place.epoch_id),
                        restore_codec=restore_codec,
                        credit_bytes=self._limits.credit_bytes,
                        cut=self._state.half.cut,
                    ),
                )
            if self._closed is not None or self._waiting:
                # Another edge has joined in the meantime, so this span would end at once.
                for channel in training.channels:
                    channel.fail(self._closed or StartOver())
            self._changed.notify_all()
        if self._plan is not None:
            FrontLoop(self._state, training.channels[0], self._plan).run(place.batch, stop)
        else:
            BackLoop(self._state, training.channels, joined=self.terms.joined).run(place.batch)


def _span(hello: wire.Hello) -> str:
    return f"{hello.first_batch} to {hello.first_batch + hello.num_batches - 1}"


def _batches(checkpoints: list[SplitCheckpoint]) -> str:
    return (
        ", ".join(str(batch) for batch in sorted({checkpoint.batch for checkpoint in checkpoints}))
        or "none"
    )


def terms_to_document(terms: SessionTerms) -> dict[str, Any]:
    """Return the terms as a JSON object; `terms_from_document` reads it."""
    return {**asdict(terms), "settings": dict(terms.settings)}


def terms_from_document(document: Mapping[str, Any]) -> SessionTerms:
    """Return what `terms_to_document` was given."""
    return SessionTerms(**document)
