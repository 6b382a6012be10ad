"""Drives a front half: forward passes within the window, gradients as they arrive, moves of the cut, checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from socflower.edgecloud.half_protocols import FrontHalf
from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import Decider
from socflower.edgecloud.runtime.feature_path import EXACT, FeatureCoding, FeatureSender
from socflower.edgecloud.runtime.half_state import AppliedMove, HalfState
from socflower.edgecloud.runtime.replay_window import ReplayWindow
from socflower.edgecloud.stream.frames import (
    Features,
    Goodbye,
    GradientFrame,
    Mark,
    Message,
    Recut,
    SplitChannel,
    SplitRefused,
    digest_of_ids,
)
from socflower.errors import ConfigError, require_range
from socflower.wire.codecs.quantisation import decode
from socflower.wire.frame_channel import SentMessage

_MAX_TRANSFERS = 100_000  # in a report


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionInput:
    """The inputs of a decision between two batches."""

    batch: int  # the next to go forward
    split_plan: SplitPlan  # with the window of this batch
    transfers: tuple[SentMessage, ...]  # that have ended since the last decision
    in_flight: tuple[float, int] | None  # begin (on the channel's clock) and bytes
    now_s: float  # on that clock


class MeasuredDecider:
    """Gives a decider the link's measured bandwidth, from completed messages and from those in transit.

    `first_batch` is the batch of the training that the loop counts as 0, `first_rates` the estimate until a message has
    crossed; by default the rate of the first message in both directions.
    """

    def __init__(
        self, decider: Decider, first_rates: LinkRates | None = None, first_batch: int = 0
    ) -> None:
        self._decider, self._first_rates, self._first_batch = decider, first_rates, first_batch
        self._meter: BandwidthMeter | None = None

    def __call__(self, inputs: DecisionInput) -> SplitPlan | None:
        """Return the new deployment, or None to keep the present one."""
        for transfer in inputs.transfers:
            if self._meter is None:
                rate = transfer.num_bytes / max(transfer.seconds, 1e-9)
                self._meter = BandwidthMeter(
                    first=self._first_rates or LinkRates(up_bytes_per_s=rate, down_bytes_per_s=rate)
                )
            self._meter.add_transfer(
                "up" if transfer.sent else "down",
                transfer.num_bytes,
                transfer.seconds,
                transfer.at_s,
            )
        if self._meter is None:
            return None
        if inputs.in_flight is None:
            self._meter.clear_in_flight("up")
        else:
            self._meter.set_in_flight("up", *inputs.in_flight)
        return self._decider.decide(
            self._first_batch + inputs.batch,
            self._meter.rates(inputs.now_s),
            inputs.split_plan,
            inputs.split_plan.window,
        )


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
    coding: FeatureCoding = EXACT
    checkpoint_batches: int = 0
    decide: Callable[[DecisionInput], SplitPlan | None] | None = None
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.split_plan.cut is None:
            raise ConfigError(
                "front plan: a deployment without a cut needs no cloud; train at the edge alone instead"
            )
        require_range("front plan", least=0, checkpoint_batches=self.checkpoint_batches)


class FrontLoop:
    """Trains batches `first` to `stop` − 1 with a front half, over a channel to the back half.

    Where it may do either, it alternates: after an update comes a forward pass, if the window allows; otherwise a
    gradient that has arrived is applied. Applying all arrived gradients first would bunch batches up while link and
    back half are idle, and take up to 1.7 times as long as F26 predicts (see `cost_model.training_s`). There is no
    forward pass while another batch waits for the link: it would not arrive sooner, take memory, and be staler. So the
    features of at most one batch wait here, besides those in flight. The loop never waits for room, so it always reads
    (see `frame_channel`). Errors are raised as they occur: `StreamLost`, `SplitRefused`, `StartOver`, and `ConfigError`
    of the half.
    """

    def __init__(self, state: HalfState[FrontHalf], channel: SplitChannel, plan: FrontPlan) -> None:
        self._state, self._half, self._report = state, state.half, state.report
        self._channel, self._plan = channel, plan
        self._split_plan = state.split_plan or plan.split_plan
        self._sender = FeatureSender(plan.coding)
        self._sender.restore(state.codec)
        self._window = ReplayWindow(self._split_plan.window)
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._requested_cut: int | None = None  # the cut to move to, once nothing is in flight
        self._requested_at_s = 0.0
        self._decided_batch = -1
        self._unseen_transfers: list[SentMessage] = []  # not passed to a decision yet
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
                with self._report.timed("wait_s"):
                    message = (
                        self._channel.receive_or_idle(what)
                        if allowed
                        else self._channel.receive(what)
                    )
                if message is not None:
                    self._apply(message)
                    updated = True
            elif self._requested_cut is not None:
                self._move_cut(self._requested_cut, batch)
            else:
                self._save_checkpoint(batch)
        if self._checkpointed_batch != stop:
            self._save_checkpoint(stop)
        self._report.split_plan = self._state.split_plan = self._split_plan
        self._channel.send(Goodbye())

    def _must_drain(self, batch: int) -> bool:
        self._ask_decider(batch)
        every = self._plan.checkpoint_batches
        due = bool(every and batch % every == 0 and batch != self._checkpointed_batch)
        return self._requested_cut is not None or due

    def _ask_decider(self, batch: int) -> None:
        """Call the decider, once between two batches."""
        transfers = self._channel.transfers()
        self._report.transfers.extend(transfers[: _MAX_TRANSFERS - len(self._report.transfers)])
        if self._plan.decide is None:
            return
        self._unseen_transfers.extend(transfers)
        if self._decided_batch == batch:
            return
        self._decided_batch = batch
        seen, self._unseen_transfers = tuple(self._unseen_transfers), []
        chosen = self._plan.decide(
            DecisionInput(
                batch=batch,
                split_plan=replace(self._split_plan, window=self._window_of(batch)),
                transfers=seen,
                in_flight=self._channel.in_flight(),
                now_s=time.monotonic(),
            )
        )
        if chosen is None:
            return
        if chosen.cut is None:
            raise ConfigError(
                f"batch {batch}: the decision is to train at the edge alone, which a stream cannot; "
                "leave edge-only out while a span runs"
            )
        self._split_plan = replace(chosen, cut=self._split_plan.cut)
        if chosen.cut != self._half.cut:
            self._request_cut(chosen.cut)

    def _request_cut(self, cut: int) -> None:
        self._requested_cut, self._requested_at_s = cut, time.monotonic()

    def _window_of(self, batch: int) -> int:
        return (
            self._split_plan.window if self._plan.window_of is None else self._plan.window_of(batch)
        )

    def _may_forward(self, batch: int) -> bool:
        self._window.resize(self._window_of(batch))
        return self._window.may_forward()

    def _forward(self, batch: int) -> None:
        self._state.begin_change()
        with self._report.timed("compute_s"):
            features = self._half.forward(batch, keep_graph=self._window.limit == 0)
            sample_ids = self._half.sample_ids(batch)
            encoded = self._sender.encode(
                batch, features, sample_ids, self._split_plan.bits, self._half.feature_quantum
            )
        self._window.forward(batch)
        self._shapes[batch], self._report.feature_bytes[batch] = features.shape, encoded.num_bytes
        self._channel.send(
            Features(
                batch=batch,
                cut=self._half.cut,
                encoded=encoded,
                labels=self._half.labels(batch),
                ids_digest=digest_of_ids(sample_ids),
                answer_bits=self._plan.coding.gradient_bits,
            )
        )

    def _apply(self, message: Message) -> None:
        if not isinstance(message, GradientFrame):
            raise self._unexpected(message, f"the gradient of batch {self._window.oldest}")
        staleness = self._window.close(message.batch)
        shape = self._shapes.pop(message.batch)
        gradient = None
        with self._report.timed("compute_s"):
            if message.encoded is not None:
                if message.encoded.shape != shape:
                    raise SplitRefused(
                        f"batch {message.batch}: {self._channel.peer} sends a gradient of shape "
                        f"{message.encoded.shape} for features of shape {shape}; see that both have the "
                        "same model"
                    )
                gradient = self._sender.correct(message.batch, decode(message.encoded))
            else:
                self._sender.forget(message.batch)
            self._half.apply(message.batch, gradient)
        self._report.staleness[message.batch] = staleness
        self._report.losses[message.batch] = message.loss
        if self._plan.progress is not None:
            self._plan.progress(
                Progress(batch=message.batch, loss=message.loss, staleness=staleness)
            )

    def _move_cut(self, cut: int, batch: int) -> None:
        """Move layers to or from the other half; nothing is in flight."""
        old = self._half.cut
        self._state.begin_change()
        self._channel.send(
            Recut(cut=cut, weights=self._half.export_layers(cut) if cut < old else None)
        )
        with self._report.timed("wait_s"):
            answer = self._channel.receive(f"answer to the move of the cut to {cut}")
        if (
            not isinstance(answer, Recut)
            or answer.cut != cut
            or (answer.weights is None) != (cut < old)
        ):
            raise self._unexpected(answer, f"its part of the move of the cut to {cut}")
        if answer.weights is not None:
            self._half.import_layers(cut, answer.weights)
        self._sender.reset()
        self._split_plan, self._requested_cut = replace(self._split_plan, cut=cut), None
        self._report.moves.append(
            AppliedMove(
                batch=batch,
                old=old,
                new=cut,
                gave=cut < old,
                seconds=time.monotonic() - self._requested_at_s,
            )
        )

    def _save_checkpoint(self, batch: int) -> None:
        """Save both halves; nothing is in flight. The back half saves first, so it has all that this one has."""
        self._channel.send(Mark(batch=batch, cut=self._half.cut))
        with self._report.timed("wait_s"):
            answer = self._channel.receive(f"word that batch {batch} is saved")
        if answer != Mark(batch=batch, cut=self._half.cut):
            raise self._unexpected(answer, f"word that batch {batch} is saved")
        self._state.save_checkpoint(batch, self._sender.save, self._split_plan)
        self._checkpointed_batch = batch

    def _unexpected(self, message: Message, wanted: str) -> SplitRefused:
        return SplitRefused(
            f"{self._channel.peer} sends a {type(message).__name__.lower()} where {wanted} is next; "
            "see that both run the same version"
        )
