"""A session: the cloud's half of one run, who trains with it, and where all of them go on."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TypeAlias

from socflower.edgecloud.halves import BackHalf, FrontHalf, Weights
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import Barrier, BarrierStore, common_barrier
from socflower.edgecloud.runtime.feature_path import FeatureReceiver, FeatureSender
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.loop_report import LoopReport
from socflower.edgecloud.stream.failures import FrameRefused, SplitRefused, StartOver
from socflower.edgecloud.stream.frame_channel import FrameChannel
from socflower.edgecloud.stream.frames import PROTOCOL_VERSION, Limits
from socflower.edgecloud.stream.messages import split_pb2 as wire
from socflower.errors import SocflowerError

_LOOK_S = 0.5
_LARGEST_BATCH = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTerms:
    """What a session was opened with."""

    run_id: str
    token_digest: bytes
    fingerprint: str
    num_parties: int = 1
    joined: bool = False  # parties hold different features of the same samples; otherwise they take turns
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
class _Ticket:
    """An edge that waits for its session to begin."""

    hello: wire.Hello
    outcome: "Admitted | Exception | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """An edge's stream may go on with this."""

    channel: FrameChannel
    attachment: int
    welcome: wire.Welcome


@dataclass(slots=True)
class _Training:
    """What all parties began together."""

    lineage: str
    incarnations: list[str]
    channels: list[FrameChannel]


class CloudSession:
    """Serves the edges of one run; its half is driven by a thread of its own, span after span.

    A span begins when all parties have joined: then the highest place at which everyone can stand is chosen, and who
    stands elsewhere restores its barrier. Whoever joins while a span runs ends it for all, since it would only join
    anew if it had lost its place; the others are told to start over and do so by themselves. A stream that merely broke
    is resumed instead, and nobody notices.
    """

    def __init__(self, terms: SessionTerms, half: CloudHalf, *, folder: Path | None, limits: Limits,
                 patience_s: float, gather_s: float, log: Callable[[str], None]) -> None:
        self.terms = terms
        self._work = half
        self._half: BackHalf | FrontHalf = half.half if isinstance(half, HostedFront) else half
        # Of a front half; a span that begins where another ended goes on with its deployment.
        self._split_plan = half.plan.split_plan if isinstance(half, HostedFront) else None
        self._limits, self._patience_s, self._gather_s, self._log = limits, patience_s, gather_s, log
        self._store = BarrierStore(folder, f"{terms.run_id}, cloud")
        self._half_lock = Lock()  # around what changes the half or where it stands
        self._stands_at: int | None = 0
        self._is_new = True  # no span has begun, here
        self._changed = Condition()
        self._waiting: dict[int, _Ticket] = {}
        self._training: _Training | None = None
        self._report = LoopReport(first_batch=0, num_batches=0)
        self._error = ""
        self._closed: Exception | None = None
        self._thread = Thread(target=self._serve, name=f"split-session-{terms.run_id}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for the edges

    def admit(self, hello: wire.Hello, is_alive: Callable[[], bool]) -> Admitted:
        """Return what an edge's stream goes on with, when all parties are there.

        Raises `SplitRefused` for one that does not belong here, and `StartOver` where there is nothing to resume.
        """
        self._check(hello)
        if hello.lineage:
            return self._resume(hello)
        ticket = _Ticket(hello)
        with self._changed:
            self._require_open()
            for party, other in self._waiting.items():
                theirs, ours = _span(other.hello), _span(hello)
                if party != hello.party and theirs != ours:
                    raise SplitRefused(f"run {self.terms.run_id}: party {hello.party} wants batches {ours}, party "
                                       f"{party} {theirs}; give all parties the same span")
            former = self._waiting.get(hello.party)
            if former is not None:
                former.outcome = SplitRefused(self._replaced(hello.party))
            self._waiting[hello.party] = ticket
            self._end_training(hello)
            self._changed.notify_all()
            deadline_s = time.monotonic() + self._gather_s
            while ticket.outcome is None and is_alive() and time.monotonic() < deadline_s:
                self._changed.wait(_LOOK_S)
            if self._waiting.get(hello.party) is ticket:
                del self._waiting[hello.party]
            outcome = ticket.outcome
        if isinstance(outcome, Admitted):
            return outcome
        raise outcome or SplitRefused(f"run {self.terms.run_id}: not all of its {self.terms.num_parties} parties have "
                                      f"come in {self._gather_s:g} s; start them again")

    def _check(self, hello: wire.Hello) -> None:
        terms = self.terms
        if hello.version != PROTOCOL_VERSION:
            raise SplitRefused(f"the cloud speaks version {PROTOCOL_VERSION} of the split protocol, the edge "
                               f"{hello.version}; install the same socflower on both")
        if hello.fingerprint != terms.fingerprint:
            raise SplitRefused(f"run {terms.run_id}: the edge's model ({hello.fingerprint[:16]}) is not the cloud's "
                               f"({terms.fingerprint[:16]}); build both from the same code and settings")
        if hello.party >= terms.num_parties:
            raise SplitRefused(f"run {terms.run_id}: there is no party {hello.party} among {terms.num_parties}; "
                               "parties count from 0")
        if hello.front == terms.reverse:
            there, here = ("front", "front") if hello.front else ("back", "back")
            raise SplitRefused(f"run {terms.run_id}: the edge has the {there} half, and so has the cloud, whose "
                               f"session was opened {'reversed' if here == 'front' else 'as an ordinary split'}; give "
                               "them one each")
        if hello.first_batch + hello.num_batches > _LARGEST_BATCH:
            raise SplitRefused(f"run {terms.run_id}: a span up to batch {hello.first_batch + hello.num_batches}")

    def _resume(self, hello: wire.Hello) -> Admitted:
        with self._changed:
            self._require_open()
            training = self._training
            if training is None or training.lineage != hello.lineage:
                raise StartOver
            if training.incarnations[hello.party] != hello.incarnation:
                raise SplitRefused(self._replaced(hello.party))
            channel = training.channels[hello.party]
        if channel.failure is not None:
            raise channel.failure
        try:
            attachment = channel.attach(received=hello.received, used=hello.used, credit_bytes=hello.credit_bytes)
        except FrameRefused as refused:
            raise SplitRefused(f"run {self.terms.run_id}: party {hello.party} opens {refused}") from None
        received, used = channel.standing()
        return Admitted(channel=channel, attachment=attachment, welcome=wire.Welcome(
            lineage=training.lineage, received=received, used=used, credit_bytes=self._limits.credit_bytes,
            cut=self._half.cut))

    def _end_training(self, newcomer: wire.Hello) -> None:
        """Make all who train start over, but an edge whose place is taken, which must not come back for it."""
        if self._training is None:
            return
        for party, channel in enumerate(self._training.channels):
            replaced = party == newcomer.party and self._training.incarnations[party] != newcomer.incarnation
            channel.fail(SplitRefused(self._replaced(party)) if replaced else StartOver())

    def _replaced(self, party: int) -> str:
        return (f"run {self.terms.run_id}: another edge has taken the place of party {party}; give each a party of its "
                "own")

    def _require_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    # ---------------------------------------------------------------------------------------------- for the manager

    def weights(self) -> tuple[int, Weights]:
        """Return how many batches the half was trained on, and its weights; `SplitRefused` while a span runs."""
        with self._half_lock:
            self._wake_up()
            return self._standing(), {name: array.copy() for name, array in self._half.weights().items()}

    def state(self) -> tuple[int, bytes]:
        """Return how many batches the half was trained on, and what `Half.restore` needs; else as `weights`."""
        with self._half_lock:
            self._wake_up()
            return self._standing(), self._half.save()

    def _wake_up(self) -> None:
        """Stand at the newest barrier, if the service was started anew since that was saved and no edge has come."""
        saved = self._store.barriers() if self._is_new else ()
        self._is_new = False
        if saved:
            newest = self._store.load(saved[-1])
            self._half.restore(newest.half)
            self._stands_at, self._split_plan = saved[-1].batch, newest.split_plan or self._split_plan

    def _standing(self) -> int:
        if self._stands_at is None:
            raise SplitRefused(f"run {self.terms.run_id}: is between two barriers; ask when its span is over"
                               + (f" (it has failed: {self._error})" if self._error else ""))
        return self._stands_at

    def status(self) -> dict[str, Any]:
        """Return what there is to know, as a JSON object."""
        with self._changed:
            training, report = self._training, self._report
            channels = training.channels if training else []
            return {
                "run_id": self.terms.run_id, "num_parties": self.terms.num_parties, "reverse": self.terms.reverse,
                "stands_at": self._stands_at, "error": self._error, "waiting": sorted(self._waiting),
                "barriers": [barrier.batch for barrier in self._store.barriers()],
                "num_batches_done": len(report.losses), "last_batch": max(report.losses.copy(), default=None),
                "compute_s": report.compute_s, "wait_s": report.wait_s,
                "sent_bytes": sum(channel.traffic.sent_bytes for channel in channels),
                "received_bytes": sum(channel.traffic.received_bytes for channel in channels),
                "num_streams": sum(channel.traffic.streams for channel in channels),
                "peak_inbox_bytes": max((channel.traffic.peak_inbox_bytes for channel in channels), default=0),
                "peak_kept_bytes": max((channel.traffic.peak_kept_bytes for channel in channels), default=0),
            }

    def close(self, why: Exception, timeout_s: float = 10.0) -> None:
        """End it: edges get `why`. Returns when its thread has ended, or still computes after `timeout_s`."""
        with self._changed:
            self._closed = self._closed or why
            for ticket in self._waiting.values():
                ticket.outcome = why
            for channel in self._training.channels if self._training else []:
                channel.fail(why)
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------------------- inside

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._waiting) == self.terms.num_parties)
                if self._closed:
                    return
                tickets = [self._waiting.pop(party) for party in range(self.terms.num_parties)]
                self._error = ""
            try:
                self._train(tickets)
            except StartOver:
                pass
            except Exception as error:
                known = isinstance(error, SocflowerError)
                text = str(error) if known else f"the cloud's half failed: {type(error).__name__}: {error}"
                text = " ".join(text.split())
                failure = error if isinstance(error, SplitRefused) else SplitRefused(f"run {self.terms.run_id}: {text}")
                with self._changed:
                    self._error = text
                    for ticket in tickets:
                        ticket.outcome = ticket.outcome or failure
                    for channel in self._training.channels if self._training else []:
                        channel.fail(failure)
                    self._changed.notify_all()
                    begun = self._training is not None
                # What is refused before anything began is said where the streams are refused.
                if begun and self._closed is None:
                    self._log(f"split cloud: a span of run {self.terms.run_id} ended: {text}")

    def _train(self, tickets: list[_Ticket]) -> None:
        terms, hellos = self.terms, [ticket.hello for ticket in tickets]
        with self._changed:
            self._training = None
        with self._half_lock:
            self._is_new = False
        first, num_batches = hellos[0].first_batch, hellos[0].num_batches
        stop = first + num_batches
        offers = [[Barrier(batch=barrier.batch, lineage=barrier.lineage) for barrier in hello.barriers]
                  for hello in hellos]
        ours = list(self._store.barriers())
        if self._stands_at is not None:
            ours.append(Barrier(batch=self._stands_at))
        place = common_barrier([ours, *offers], stop)
        if place is None:
            raise SplitRefused(
                f"run {terms.run_id}: edge and cloud have no barrier in common up to batch {stop} "
                f"(cloud: {_batches(ours)}"
                + "".join(f"; party {party}: {_batches(offer)}" for party, offer in enumerate(offers))
                + "); give both a folder for barriers, or open the run anew with the weights of its last round")
        restore_codec = all(Barrier(batch=place.batch) not in offer for offer in [ours, *offers])
        codec = b""
        if Barrier(batch=place.batch) not in ours:
            saved = self._store.load(place)
            with self._half_lock:
                self._stands_at = None
                self._half.restore(saved.half)
                self._stands_at = place.batch
            codec, self._split_plan = saved.codec if restore_codec else b"", saved.split_plan
        training = _Training(
            lineage=secrets.token_hex(8), incarnations=[hello.incarnation for hello in hellos],
            channels=[FrameChannel(f"party {party}" if terms.num_parties > 1 else "the edge", limits=self._limits,
                                   patience_s=self._patience_s) for party in range(terms.num_parties)])
        report = LoopReport(first_batch=place.batch, num_batches=stop - place.batch)
        with self._changed:
            self._training, self._report = training, report
            for ticket, channel in zip(tickets, training.channels, strict=True):
                attachment = channel.attach(received=0, used=0, credit_bytes=max(1, ticket.hello.credit_bytes))
                ticket.outcome = Admitted(channel=channel, attachment=attachment, welcome=wire.Welcome(
                    lineage=training.lineage, start=wire.Barrier(batch=place.batch, lineage=place.lineage),
                    restore_codec=restore_codec, credit_bytes=self._limits.credit_bytes, cut=self._half.cut))
            if self._closed is not None or self._waiting:
                # Somebody has come since: what begins now would be over at once.
                for channel in training.channels:
                    channel.fail(self._closed or StartOver())
            self._changed.notify_all()
        self._drive(training, place.batch, stop, codec, report)

    def _drive(self, training: _Training, first: int, stop: int, codec: bytes, report: LoopReport) -> None:
        if isinstance(self._work, HostedFront):
            plan = self._work.plan
            assert self._split_plan is not None
            sender = FeatureSender(grouping=plan.grouping, feedback=plan.feedback, delta_bytes=plan.delta_bytes)
            sender.restore(codec)
            FrontLoop(self._work.half, training.channels[0], plan, report=report, store=self._store,
                      lineage=training.lineage, split_plan=self._split_plan, sender=sender,
                      on_barrier=self._stand_at, on_step=self._leave).run(first, stop)
            self._split_plan = report.split_plan
            return
        receivers = [FeatureReceiver(channel.peer) for channel in training.channels]
        if codec:
            FeatureReceiver.restore_all(receivers, codec)
        BackLoop(self._work, training.channels, joined=self.terms.joined, report=report, store=self._store,
                 lineage=training.lineage, receivers=receivers, on_barrier=self._stand_at,
                 on_step=self._leave).run(first)

    def _stand_at(self, batch: int) -> None:
        with self._half_lock:
            self._stands_at = batch

    def _leave(self) -> None:
        with self._half_lock:
            self._stands_at = None


def _span(hello: wire.Hello) -> str:
    return f"{hello.first_batch} to {hello.first_batch + hello.num_batches - 1}"


def _batches(barriers: list[Barrier]) -> str:
    return ", ".join(str(batch) for batch in sorted({barrier.batch for barrier in barriers})) or "none"


def terms_to_document(terms: SessionTerms) -> dict[str, Any]:
    """Return the terms as a JSON object; `terms_from_document` reads it."""
    return {"run_id": terms.run_id, "token_digest": terms.token_digest.hex(), "fingerprint": terms.fingerprint,
            "num_parties": terms.num_parties, "joined": terms.joined, "reverse": terms.reverse,
            "settings": json.loads(json.dumps(dict(terms.settings)))}


def terms_from_document(document: Mapping[str, Any]) -> SessionTerms:
    """Return what `terms_to_document` was given."""
    return SessionTerms(**{**document, "token_digest": bytes.fromhex(document["token_digest"])})
