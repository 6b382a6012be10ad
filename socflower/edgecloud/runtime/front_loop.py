"""Drives a front half: forward while the window allows, apply gradients as they come back, move the cut, save."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from socflower.edgecloud.codec.error_feedback import Form
from socflower.edgecloud.codec.quantisation import Grouping, decode
from socflower.edgecloud.halves import FrontHalf
from socflower.edgecloud.plan.cuts import BITS, SplitPlan
from socflower.edgecloud.runtime.checkpoints import Barrier, BarrierStore, Saved
from socflower.edgecloud.runtime.feature_path import FeatureSender
from socflower.edgecloud.runtime.loop_report import LARGEST_TRANSFERS, LoopReport, Move
from socflower.edgecloud.runtime.replay_window import ReplayWindow
from socflower.edgecloud.stream.failures import SplitRefused
from socflower.edgecloud.stream.frame_channel import FrameChannel, Transfer
from socflower.edgecloud.stream.frames import Features, Goodbye, Gradient, Mark, Message, Recut, digest_of_ids
from socflower.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a decision goes by, between two batches."""

    batch: int  # the next to go forward
    split_plan: SplitPlan
    transfers: tuple[Transfer, ...]  # that have ended since the last look
    under_way: tuple[float, int] | None  # since when (on the channel's clock) how many bytes have been on their way
    now_s: float  # on that clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A batch is done."""

    batch: int
    loss: float
    staleness: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPlan:
    """How a front half is to be driven.

    `deployment` holds where a training begins; after a rollback its cut is that of the barrier. `window_of` gives K by
    batch, instead of the deployment's. `checkpoint_batches` is how many batches lie between two barriers, counted over
    the whole training; 0: only at the ends of a span. `decide` may ask for another deployment between two batches.
    """

    split_plan: SplitPlan
    window_of: Callable[[int], int] | None = None
    grouping: Grouping = "tensor"
    feedback: Form = "none"
    delta_bytes: int = 0  # memory for delta coding, on either side; 0: without
    gradient_bits: int = 32
    checkpoint_batches: int = 0
    decide: Callable[[Situation], SplitPlan | None] | None = None
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.split_plan.cut is None:
            raise ConfigError("front plan: a deployment without a cut needs no cloud; train at the edge alone instead")
        if self.gradient_bits not in BITS:
            raise ConfigError(f"front plan: gradient_bits = {self.gradient_bits} is unknown; use one of "
                              f"{', '.join(map(str, BITS))}")
        for key in ("checkpoint_batches", "delta_bytes"):
            if getattr(self, key) < 0:
                raise ConfigError(f"front plan: {key} = {getattr(self, key)} must be 0 or more")


class FrontLoop:
    """Trains batches `first` to `stop` − 1 with a front half, over a channel to whoever has the back half.

    Where it may do either, it takes turns: right after an update a batch goes forward, if the window allows; else a
    gradient that has come is applied. To apply all that has come first would bunch batches up, while link and back half
    stand idle, and take up to 1.7 times as long as F26 says (see `cost.training_s`). No batch goes forward while
    another waits for the link: it would come no sooner, take memory, and be staler. So features wait here of one batch,
    besides those that are on their way. The loop never waits for room, so it always reads (see `frame_channel`). All
    that goes wrong on the way is raised as it comes: `SplitLost`, `SplitRefused`, `StartOver`, `ConfigError` of the
    half.

    `on_barrier` is told every barrier that both sides have saved, where the half stands for whoever comes next;
    `on_step` that it stands there no longer.
    """

    def __init__(self, half: FrontHalf, channel: FrameChannel, plan: FrontPlan, *, report: LoopReport,
                 store: BarrierStore, lineage: str, split_plan: SplitPlan, sender: FeatureSender,
                 on_barrier: Callable[[int], None] = lambda batch: None, on_step: Callable[[], None] = lambda: None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._half, self._channel, self._plan = half, channel, plan
        self._report, self._store, self._lineage = report, store, lineage
        self._split_plan, self._sender, self._clock = split_plan, sender, clock
        self._on_barrier, self._on_step = on_barrier, on_step
        self._window = ReplayWindow(split_plan.window)
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._wanted: int | None = None  # the cut to move to, once nothing is out
        self._wanted_since_s = 0.0
        self._looked_at = -1
        self._undecided: list[Transfer] = []  # which no decision has seen
        self._marked = -1

    def run(self, first: int, stop: int) -> None:
        """Train, and return when the back half has saved the last barrier and so has this one."""
        batch = first
        self._mark(batch)
        if self._split_plan.cut is not None and self._split_plan.cut != self._half.cut:
            self._want(self._split_plan.cut)
        updated = False  # since a batch went forward last
        while batch < stop or not self._window.drained:
            allowed = batch < stop and self._may_forward(batch) and not self._must_drain(batch)
            # What would only wait behind another batch for the link may as well wait to be computed.
            ready = allowed and self._channel.is_idle
            message = None if ready and updated else self._channel.poll()
            if message is not None:
                self._apply(message)
                updated = True
            elif ready:
                self._forward(batch)
                batch += 1
                updated = False
            elif allowed or not self._window.drained:
                what = f"gradient of batch {self._window.oldest}"
                with self._report.waiting():
                    message = self._channel.receive_or_idle(what) if allowed else self._channel.receive(what)
                if message is not None:
                    self._apply(message)
                    updated = True
            elif self._wanted is not None:
                self._recut(self._wanted, batch)
            else:
                self._mark(batch)
        if self._marked != stop:
            self._mark(stop)
        self._report.split_plan = self._split_plan
        self._channel.send(Goodbye())

    def _must_drain(self, batch: int) -> bool:
        self._look(batch)
        every = self._plan.checkpoint_batches
        return self._wanted is not None or bool(every and batch % every == 0 and batch != self._marked)

    def _look(self, batch: int) -> None:
        """Ask for a decision, once between two batches."""
        transfers = self._channel.transfers()
        self._report.transfers.extend(transfers[:LARGEST_TRANSFERS - len(self._report.transfers)])
        if self._plan.decide is None:
            return
        self._undecided.extend(transfers)
        if self._looked_at == batch:
            return
        self._looked_at = batch
        seen, self._undecided = tuple(self._undecided), []
        chosen = self._plan.decide(Situation(
            batch=batch, split_plan=self._split_plan, transfers=seen, under_way=self._channel.under_way(),
            now_s=self._clock()))
        if chosen is None:
            return
        if chosen.cut is None:
            raise ConfigError(f"batch {batch}: the decision is to train at the edge alone, which a stream cannot; "
                              "leave edge-only out while a span runs")
        self._split_plan = replace(chosen, cut=self._split_plan.cut)
        if chosen.cut != self._half.cut:
            self._want(chosen.cut)

    def _want(self, cut: int) -> None:
        self._wanted, self._wanted_since_s = cut, self._clock()

    def _may_forward(self, batch: int) -> bool:
        window = self._plan.window_of(batch) if self._plan.window_of is not None else self._split_plan.window
        self._window.resize(window)
        return self._window.may_forward()

    def _forward(self, batch: int) -> None:
        self._on_step()
        with self._report.computing():
            features = self._half.forward(batch, keep_graph=self._window.limit == 0)
            sample_ids = self._half.sample_ids(batch)
            encoded = self._sender.encode(batch, features, sample_ids, self._split_plan.bits)
        self._window.forward(batch)
        self._shapes[batch] = features.shape
        self._channel.send(Features(
            batch=batch, cut=self._half.cut, encoded=encoded, labels=self._half.labels(batch),
            ids_digest=digest_of_ids(sample_ids), answer_bits=self._plan.gradient_bits))

    def _apply(self, message: Message) -> None:
        if not isinstance(message, Gradient):
            raise self._unexpected(message, f"the gradient of batch {self._window.oldest}")
        staleness = self._window.close(message.batch)
        shape = self._shapes.pop(message.batch)
        gradient = None
        with self._report.computing():
            if message.encoded is not None:
                if message.encoded.shape != shape:
                    raise SplitRefused(f"batch {message.batch}: {self._channel.peer} sends a gradient of shape "
                                       f"{message.encoded.shape} for features of shape {shape}; see that both have the "
                                       "same model")
                gradient = self._sender.correct(message.batch, decode(message.encoded))
            else:
                self._sender.forget(message.batch)
            self._half.apply(message.batch, gradient)
        self._report.staleness[message.batch] = staleness
        self._report.losses[message.batch] = message.loss
        if self._plan.progress is not None:
            self._plan.progress(Progress(batch=message.batch, loss=message.loss, staleness=staleness))

    def _recut(self, cut: int, batch: int) -> None:
        """Move layers to or from the other half; nothing is out."""
        old = self._half.cut
        self._on_step()
        self._channel.send(Recut(cut=cut, weights=self._half.give(cut) if cut < old else None))
        with self._report.waiting():
            answer = self._channel.receive(f"answer to the move of the cut to {cut}")
        if not isinstance(answer, Recut) or answer.cut != cut or (answer.weights is None) != (cut < old):
            raise self._unexpected(answer, f"its part of the move of the cut to {cut}")
        if answer.weights is not None:
            self._half.take(cut, answer.weights)
        self._sender.reset()
        self._split_plan, self._wanted = replace(self._split_plan, cut=cut), None
        self._report.moves.append(Move(batch=batch, old=old, new=cut, gave=cut < old,
                                       seconds=self._clock() - self._wanted_since_s))

    def _mark(self, batch: int) -> None:
        """Save both halves; nothing is out. The back half saves first: what this one has saved, that one has too."""
        self._channel.send(Mark(batch=batch, cut=self._half.cut))
        with self._report.waiting():
            answer = self._channel.receive(f"word that batch {batch} is saved")
        if answer != Mark(batch=batch, cut=self._half.cut):
            raise self._unexpected(answer, f"word that batch {batch} is saved")
        if self._store.keeps:
            self._store.save(Barrier(batch=batch, lineage=self._lineage), Saved(
                half=self._half.save(), codec=self._sender.save(), split_plan=self._split_plan))
        self._marked = batch
        self._on_barrier(batch)

    def _unexpected(self, message: Message, wanted: str) -> SplitRefused:
        return SplitRefused(f"{self._channel.peer} sends a {type(message).__name__.lower()} where {wanted} is next; "
                            "see that both run the same version")


def mean_loss(report: LoopReport) -> float:
    """Return the mean over the batches of a report; NaN without any."""
    return math.fsum(report.losses.values()) / len(report.losses) if report.losses else math.nan
