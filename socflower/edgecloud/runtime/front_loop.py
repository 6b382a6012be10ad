"""Drives a front half: forward passes within the window, gradients as they arrive, moves of the cut, checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from socflower.edgecloud.codec.error_feedback import Form
from socflower.edgecloud.codec.quantisation import Grouping, decode
from socflower.edgecloud.halves import FrontHalf
from socflower.edgecloud.plan.cuts import BITS, SplitPlan
from socflower.edgecloud.runtime.checkpoints import Checkpoint, CheckpointStore, SavedHalf
from socflower.edgecloud.runtime.feature_path import FeatureSender
from socflower.edgecloud.runtime.loop_report import LARGEST_TRANSFERS, LoopReport, Move
from socflower.edgecloud.runtime.replay_window import ReplayWindow
from socflower.edgecloud.stream.failures import SplitRefused
from socflower.edgecloud.stream.frame_channel import FrameChannel, Transfer
from socflower.edgecloud.stream.frames import Features, Goodbye, Gradient, Mark, Message, Recut, digest_of_ids
from socflower.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionInput:
    """The inputs of a decision between two batches."""

    batch: int  # the next to go forward
    split_plan: SplitPlan
    transfers: tuple[Transfer, ...]  # that have ended since the last decision
    in_flight: tuple[float, int] | None  # begin (on the channel's clock) and bytes
    now_s: float  # on that clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A completed batch."""

    batch: int
    loss: float
    staleness: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPlan:
    """How a front half is driven.

    `split_plan` is the deployment at the beginning; after a rollback its cut is that of the checkpoint. `window_of`
    gives K by batch, instead of the deployment's. `checkpoint_batches` is how many batches lie between two checkpoints,
    counted over the whole training; 0: only at the ends of a span. `decide` may ask for another deployment between two
    batches.
    """

    split_plan: SplitPlan
    window_of: Callable[[int], int] | None = None
    grouping: Grouping = "tensor"
    feedback: Form = "none"
    delta_bytes: int = 0  # memory for delta coding, on either side; 0: without
    gradient_bits: int = 32
    checkpoint_batches: int = 0
    decide: Callable[[DecisionInput], SplitPlan | None] | None = None
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
    """Trains batches `first` to `stop` − 1 with a front half, over a channel to the back half.

    Where it may do either, it alternates: after an update comes a forward pass, if the window allows; otherwise a
    gradient that has arrived is applied. Applying all arrived gradients first would bunch batches up while link and
    back half are idle, and take up to 1.7 times as long as F26 predicts (see `cost_model.training_s`). There is no
    forward pass while another batch waits for the link: it would not arrive sooner, take memory, and be staler. So the
    features of at most one batch wait here, besides those in flight. The loop never waits for room, so it always reads
    (see `frame_channel`). Errors are raised as they occur: `SplitLost`, `SplitRefused`, `StartOver`, and `ConfigError`
    of the half.

    `on_checkpoint` is called with the batch of every checkpoint that both sides have saved; `on_step` is called before
    the half changes again.
    """

    def __init__(self, half: FrontHalf, channel: FrameChannel, plan: FrontPlan, *, report: LoopReport,
                 store: CheckpointStore, epoch_id: str, split_plan: SplitPlan, sender: FeatureSender,
                 on_checkpoint: Callable[[int], None] = lambda batch: None, on_step: Callable[[], None] = lambda: None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._half, self._channel, self._plan = half, channel, plan
        self._report, self._store, self._epoch_id = report, store, epoch_id
        self._split_plan, self._sender, self._clock = split_plan, sender, clock
        self._on_checkpoint, self._on_step = on_checkpoint, on_step
        self._window = ReplayWindow(split_plan.window)
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._requested_cut: int | None = None  # the cut to move to, once nothing is in flight
        self._requested_at_s = 0.0
        self._decided_batch = -1
        self._unseen_transfers: list[Transfer] = []  # not passed to a decision yet
        self._checkpointed_batch = -1

    def run(self, first: int, stop: int) -> None:
        """Train, and return when both halves have saved the last checkpoint."""
        batch = first
        self._save_checkpoint(batch)
        if self._split_plan.cut is not None and self._split_plan.cut != self._half.cut:
            self._request_cut(self._split_plan.cut)
        updated = False  # since the last forward pass
        while batch < stop or not self._window.drained:
            allowed = batch < stop and self._may_forward(batch) and not self._must_drain(batch)
            # While another batch waits for the link, computing this one has no benefit yet.
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
            elif self._requested_cut is not None:
                self._move_cut(self._requested_cut, batch)
            else:
                self._save_checkpoint(batch)
        if self._checkpointed_batch != stop:
            self._save_checkpoint(stop)
        self._report.split_plan = self._split_plan
        self._channel.send(Goodbye())

    def _must_drain(self, batch: int) -> bool:
        self._ask_decider(batch)
        every = self._plan.checkpoint_batches
        due = bool(every and batch % every == 0 and batch != self._checkpointed_batch)
        return self._requested_cut is not None or due

    def _ask_decider(self, batch: int) -> None:
        """Call the decider, once between two batches."""
        transfers = self._channel.transfers()
        self._report.transfers.extend(transfers[:LARGEST_TRANSFERS - len(self._report.transfers)])
        if self._plan.decide is None:
            return
        self._unseen_transfers.extend(transfers)
        if self._decided_batch == batch:
            return
        self._decided_batch = batch
        seen, self._unseen_transfers = tuple(self._unseen_transfers), []
        chosen = self._plan.decide(DecisionInput(
            batch=batch, split_plan=self._split_plan, transfers=seen, in_flight=self._channel.in_flight(),
            now_s=self._clock()))
        if chosen is None:
            return
        if chosen.cut is None:
            raise ConfigError(f"batch {batch}: the decision is to train at the edge alone, which a stream cannot; "
                              "leave edge-only out while a span runs")
        self._split_plan = replace(chosen, cut=self._split_plan.cut)
        if chosen.cut != self._half.cut:
            self._request_cut(chosen.cut)

    def _request_cut(self, cut: int) -> None:
        self._requested_cut, self._requested_at_s = cut, self._clock()

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

    def _move_cut(self, cut: int, batch: int) -> None:
        """Move layers to or from the other half; nothing is in flight."""
        old = self._half.cut
        self._on_step()
        self._channel.send(Recut(cut=cut, weights=self._half.export_layers(cut) if cut < old else None))
        with self._report.waiting():
            answer = self._channel.receive(f"answer to the move of the cut to {cut}")
        if not isinstance(answer, Recut) or answer.cut != cut or (answer.weights is None) != (cut < old):
            raise self._unexpected(answer, f"its part of the move of the cut to {cut}")
        if answer.weights is not None:
            self._half.import_layers(cut, answer.weights)
        self._sender.reset()
        self._split_plan, self._requested_cut = replace(self._split_plan, cut=cut), None
        self._report.moves.append(Move(batch=batch, old=old, new=cut, gave=cut < old,
                                       seconds=self._clock() - self._requested_at_s))

    def _save_checkpoint(self, batch: int) -> None:
        """Save both halves; nothing is in flight. The back half saves first, so it has all that this one has."""
        self._channel.send(Mark(batch=batch, cut=self._half.cut))
        with self._report.waiting():
            answer = self._channel.receive(f"word that batch {batch} is saved")
        if answer != Mark(batch=batch, cut=self._half.cut):
            raise self._unexpected(answer, f"word that batch {batch} is saved")
        if self._store.keeps:
            self._store.save(Checkpoint(batch=batch, epoch_id=self._epoch_id), SavedHalf(
                half=self._half.save(), codec=self._sender.save(), split_plan=self._split_plan))
        self._checkpointed_batch = batch
        self._on_checkpoint(batch)

    def _unexpected(self, message: Message, wanted: str) -> SplitRefused:
        return SplitRefused(f"{self._channel.peer} sends a {type(message).__name__.lower()} where {wanted} is next; "
                            "see that both run the same version")


def mean_loss(report: LoopReport) -> float:
    """Return the mean over the batches of a report; NaN without any."""
    return math.fsum(report.losses.values()) / len(report.losses) if report.losses else math.nan
