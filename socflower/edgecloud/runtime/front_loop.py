"""Drives a front half: forward passes within the window, gradients as they arrive, moves of the cut, checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from socflower.edgecloud.half_protocols import FrontHalf
from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import Direction, LinkRates
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import Decider
from socflower.edgecloud.plan.timeline_actions import ActionKind, next_action
from socflower.edgecloud.runtime.back_loop import unexpected
from socflower.edgecloud.runtime.feature_path import EXACT, FeatureCoding, FeatureSender
from socflower.edgecloud.runtime.half_state import AppliedMove, HalfState
from socflower.edgecloud.runtime.in_flight_window import ReplayWindow
from socflower.edgecloud.stream.frames import (
    Features,
    Goodbye,
    GradientFrame,
    Mark,
    Message,
    Recut,
    SplitRefused,
    SplitStream,
    digest_of_ids,
)
from socflower.errors import ConfigError, require_range
from socflower.peers.resumable_stream import SentMessage
from socflower.wire.codecs.quantisation import decode

# In a report.
_MAX_TRANSFERS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionInput:
    """The inputs of a decision between two batches.

    `batch` is the next to go forward, and `split_plan` has its window. `transfers` have ended since the last decision;
    `in_flight` are begin and bytes of the message under way. Times are of the channel's clock.
    """

    batch: int
    split_plan: SplitPlan
    transfers: tuple[SentMessage, ...]
    in_flight: tuple[float, int] | None
    now_s: float


class MeasuredDecider:
    """Gives a decider the link's measured bandwidth, from completed messages and from those in transit.

    `first_batch` is the batch of the training that the loop counts as 0, `first_rates` the estimate until a message has
    crossed; by default the rate of the first message in both directions.
    """

    def __init__(
        self, decider: Decider, first_rates: LinkRates | None = None, first_batch: int = 0
    ) -> None:
        self._decider = decider
        self._first_rates = first_rates
        self._first_batch = first_batch
        self._meter: BandwidthMeter | None = None

    def __call__(self, inputs: DecisionInput) -> SplitPlan | None:
        """Return the new deployment, or None to keep the present one."""
        for transfer in inputs.transfers:
            num_bytes = transfer.num_bytes
            seconds = transfer.seconds
            if self._meter is None:
                rate = num_bytes / max(seconds, 1e-9)
                same = LinkRates(up_bytes_per_s=rate, down_bytes_per_s=rate)
                self._meter = BandwidthMeter(first=self._first_rates or same)
            direction: Direction = "up" if transfer.sent else "down"
            self._meter.add_transfer(direction, num_bytes, seconds, transfer.at_s)
        if self._meter is None:
            return None
        if inputs.in_flight is None:
            self._meter.clear_in_flight("up")
        else:
            self._meter.set_in_flight("up", *inputs.in_flight)
        batch = self._first_batch + inputs.batch
        plan = inputs.split_plan
        return self._decider.decide(batch, self._meter.rates(inputs.now_s), plan, plan.window)


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
    gives K by batch, instead of the deployment's, and `in_flight_limit` how many batches may be in flight as one goes
    forward, by default K. `checkpoint_batches` is how many batches lie between two checkpoints, counted over the whole
    training; 0: only at the ends of a span. `decide` may ask for another deployment between two batches.
    """

    split_plan: SplitPlan
    window_of: Callable[[int], int] | None = None
    in_flight_limit: Callable[[int], int] | None = None
    coding: FeatureCoding = EXACT
    checkpoint_batches: int = 0
    decide: Callable[[DecisionInput], SplitPlan | None] | None = None
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.split_plan.cut is None:
            raise ConfigError(
                "front plan: without a cut no cloud is needed; train at the edge alone"
            )
        require_range(
            "front plan",
            least=0,
            checkpoint_batches=self.checkpoint_batches,
        )


class FrontLoop:
    """Trains batches `first` to `stop` − 1 with a front half, over a channel to the back half.

    The order is that of `next_action`. There is no forward pass while another batch waits for the link: its
    features would take memory and become stale without arriving sooner. So the features of at most one batch wait
    here, besides those in flight. The loop never waits for room, so it always reads (see `frame_channel`). Errors
    are raised as they occur: `StreamLost`, `SplitRefused`, `StartOver`, and `ConfigError` of the half.
    """

    def __init__(
        self,
        state: HalfState[FrontHalf],
        channel: SplitStream,
        plan: FrontPlan,
    ) -> None:
        self._state = state
        self._half = state.half
        self._report = state.report
        self._channel = channel
        self._plan = plan
        self._split_plan = state.split_plan or plan.split_plan
        self._sender = FeatureSender(plan.coding)
        self._sender.restore(state.codec)
        self._window = ReplayWindow(self._split_plan.window)
        self._shapes: dict[int, tuple[int, ...]] = {}
        # The cut to move to, once nothing is in flight.
        self._requested_cut: int | None = None
        self._requested_at_s = 0.0
        self._decided_batch = -1
        # Not passed to a decision yet.
        self._unseen_transfers: list[SentMessage] = []
        self._checkpointed_batch = -1

    def run(self, first: int, stop: int) -> None:
        """Train, and return when both halves have saved the last checkpoint."""
        batch = first
        self._save_checkpoint(batch)
        if self._split_plan.cut is not None and self._split_plan.cut != self._half.cut:
            self._request_cut(self._split_plan.cut)
        message: Message | None = None
        just_applied = False
        while batch < stop or not self._window.drained:
            allowed = batch < stop and self._may_forward(batch) and not self._must_drain(batch)
            message = message or self._channel.poll()
            action = next_action(
                allowed=allowed,
                link_is_idle=self._channel.sent.is_idle,
                has_gradient=message is not None,
                just_applied=just_applied,
                is_drained=self._window.drained,
            )
            if message is not None and action is ActionKind.APPLY:
                self._apply(message)
                message = None
                just_applied = True
            elif action is ActionKind.FORWARD:
                self._forward(batch)
                batch += 1
                just_applied = False
            elif action is None:
                message = self._wait(allowed)
            elif self._requested_cut is not None:
                self._move_cut(self._requested_cut, batch)
            else:
                self._save_checkpoint(batch)
        if self._checkpointed_batch != stop:
            self._save_checkpoint(stop)
        self._report.split_plan = self._state.split_plan = self._split_plan
        self._channel.send(Goodbye())

    def _wait(self, allowed: bool) -> Message | None:
        """Return the next message; None if a forward pass is allowed and the link is idle before one comes."""
        what = f"gradient of batch {self._window.oldest}"
        with self._report.timed("wait_s"):
            return self._channel.receive_or_idle(what) if allowed else self._channel.receive(what)

    def _must_drain(self, batch: int) -> bool:
        self._ask_decider(batch)
        every = self._plan.checkpoint_batches
        due = bool(every and batch % every == 0 and batch != self._checkpointed_batch)
        return self._requested_cut is not None or due

    def _ask_decider(self, batch: int) -> None:
        """Call the decider, once between two batches."""
        transfers = self._channel.sent.transfers()
        self._report.transfers.extend(transfers[: _MAX_TRANSFERS - len(self._report.transfers)])
        if self._plan.decide is None:
            return
        self._unseen_transfers.extend(transfers)
        if self._decided_batch == batch:
            return
        self._decided_batch = batch
        seen = tuple(self._unseen_transfers)
        self._unseen_transfers = []
        inputs = DecisionInput(
            batch=batch,
            split_plan=replace(self._split_plan, window=self._window_of(batch)),
            transfers=seen,
            in_flight=self._channel.sent.in_flight(),
            now_s=time.monotonic(),
        )
        chosen = self._plan.decide(inputs)
        if chosen is None:
            return
        if chosen.cut is None:
            raise ConfigError(
                f"batch {batch}: within a span the decision cannot be edge-only training"
            )
        self._split_plan = replace(chosen, cut=self._split_plan.cut)
        if chosen.cut != self._half.cut:
            self._request_cut(chosen.cut)

    def _request_cut(self, cut: int) -> None:
        self._requested_cut = cut
        self._requested_at_s = time.monotonic()

    def _window_of(self, batch: int) -> int:
        window_of = self._plan.window_of
        return self._split_plan.window if window_of is None else window_of(batch)

    def _may_forward(self, batch: int) -> bool:
        limit_of = self._plan.in_flight_limit or self._window_of
        self._window.resize(limit_of(batch))
        return self._window.may_forward()

    def _forward(self, batch: int) -> None:
        half = self._half
        self._state.begin_change()
        with self._report.timed("compute_s"):
            features = half.forward(batch, keep_graph=self._window_of(batch) == 0)
            sample_ids = half.sample_ids(batch)
            bits = self._split_plan.bits
            quantum = half.feature_quantum
            encoded = self._sender.encode(batch, features, sample_ids, bits, quantum)
        self._window.forward(batch)
        self._shapes[batch] = features.shape
        self._report.feature_bytes[batch] = encoded.num_bytes
        message = Features(
            batch=batch,
            cut=half.cut,
            encoded=encoded,
            labels=half.labels(batch),
            ids_digest=digest_of_ids(sample_ids),
            answer_bits=self._plan.coding.gradient_bits,
        )
        self._channel.send(message)

    def _apply(self, message: Message) -> None:
        if not isinstance(message, GradientFrame):
            raise self._unexpected(message, f"the gradient of batch {self._window.oldest}")
        batch = message.batch
        encoded = message.encoded
        staleness = self._window.close(batch)
        shape = self._shapes.pop(batch)
        if encoded is not None and encoded.shape != shape:
            raise SplitRefused(
                f"batch {batch}: {self._channel.peer} sends a gradient of shape {encoded.shape} for features {shape}"
            )
        with self._report.timed("compute_s"):
            gradient = None
            if encoded is not None:
                gradient = self._sender.correct(batch, decode(encoded))
            else:
                self._sender.forget(batch)
            self._half.apply(batch, gradient)
        self._report.staleness[batch] = staleness
        self._report.losses[batch] = message.loss
        if self._plan.progress is not None:
            self._plan.progress(
                Progress(
                    batch=batch,
                    loss=message.loss,
                    staleness=staleness,
                )
            )

    def _move_cut(self, cut: int, batch: int) -> None:
        """Move layers to or from the other half; nothing is in flight."""
        old = self._half.cut
        what = f"answer to the move of the cut to {cut}"
        gives = cut < old
        self._state.begin_change()
        weights = self._half.export_layers(cut) if gives else None
        self._channel.send(Recut(cut=cut, weights=weights))
        with self._report.timed("wait_s"):
            answer = self._channel.receive(what)
        fits = isinstance(answer, Recut) and answer.cut == cut
        if not isinstance(answer, Recut) or not fits or (answer.weights is None) != gives:
            raise self._unexpected(answer, f"its {what}")
        if answer.weights is not None:
            self._half.import_layers(cut, answer.weights)
        self._sender.reset()
        self._split_plan = replace(self._split_plan, cut=cut)
        self._requested_cut = None
        seconds = time.monotonic() - self._requested_at_s
        move = AppliedMove(
            batch=batch,
            old=old,
            new=cut,
            gave=gives,
            seconds=seconds,
        )
        self._report.moves.append(move)

    def _save_checkpoint(self, batch: int) -> None:
        """Save both halves; nothing is in flight. The back half saves first, so it has all checkpoints of this half."""
        mark = Mark(batch=batch, cut=self._half.cut)
        what = f"word that batch {batch} is saved"
        self._channel.send(mark)
        with self._report.timed("wait_s"):
            answer = self._channel.receive(what)
        if answer != mark:
            raise self._unexpected(answer, what)
        self._state.save_checkpoint(batch, self._sender.save, self._split_plan)
        self._checkpointed_batch = batch

    def _unexpected(self, message: Message, wanted: str) -> SplitRefused:
        return unexpected(self._channel, message, wanted)
