"""The training loop of a back half: steps batches in order, each exactly once, and returns gradients to the senders."""

import math
from collections.abc import Sequence

from socflower.edgecloud.half_protocols import Array, BackHalf, Labels, arrays_in
from socflower.edgecloud.runtime.feature_path import FeatureReceiver
from socflower.edgecloud.runtime.half_state import HalfState
from socflower.edgecloud.stream.frames import (
    Features,
    Goodbye,
    GradientFrame,
    Mark,
    Message,
    Recut,
    SplitRefused,
    SplitStream,
)
from socflower.wire.codecs.quantisation import EncodedTensor, encode


class BackLoop:
    """Trains a back half with the messages of the channels, one per party, until all have sent `Goodbye`.

    Several parties are *joined* if they hold different features of the same samples: the half is stepped once with all
    of them. Otherwise they take turns: batch b of the first, then b of the second, and so on. Every party's next
    message is handled before any party's message after that, so a slow party delays the others, and none falls behind.

    The loop waits for credit before it sends a gradient, so a peer that does not read cannot fill the memory.
    """

    def __init__(
        self, state: HalfState[BackHalf], channels: Sequence[SplitStream], *, joined: bool = False
    ) -> None:
        self._state = state
        self._half = state.half
        self._report = state.report
        self._channels = tuple(channels)
        self._joined = joined
        self._receivers = tuple(FeatureReceiver(channel.peer) for channel in channels)
        FeatureReceiver.restore_all(self._receivers, state.codec)

    def run(self, first: int) -> None:
        """Train from batch `first` on, and return after all `Goodbye` messages."""
        batch = first
        while True:
            message = self._receive(0, batch)
            match message:
                case Features():
                    self._step_all(batch, message)
                    batch += 1
                case Mark():
                    self._save_checkpoint(batch, message)
                case Recut():
                    self._move_cut(message)
                case Goodbye():
                    for party in range(1, len(self._channels)):
                        self._require_message(party, batch, Goodbye())
                    return
                case _:
                    raise unexpected(self._channels[0], message, f"features of batch {batch}")

    def _receive(self, party: int, batch: int) -> Message:
        with self._report.timed("wait_s"):
            return self._channels[party].receive(f"features of batch {batch}")

    def _step_all(self, batch: int, first: Features) -> None:
        others = range(1, len(self._channels))
        losses: list[float] = []
        if self._joined:
            messages = [first, *(self._features(party, batch) for party in others)]
            losses.append(self._step(batch, range(len(messages)), messages))
        else:
            losses.append(self._step(batch, [0], [first]))
            for party in others:
                losses.append(self._step(batch, [party], [self._features(party, batch)]))
        self._report.losses[batch] = math.fsum(losses) / len(losses)

    def _features(self, party: int, batch: int) -> Features:
        message = self._receive(party, batch)
        if not isinstance(message, Features):
            raise unexpected(self._channels[party], message, f"features of batch {batch}")
        return message

    def _step(
        self,
        batch: int,
        parties: Sequence[int],
        messages: Sequence[Features],
    ) -> float:
        """Step once with a batch of one party, or of all joined parties; send each its gradient."""
        pairs = list(zip(parties, messages, strict=True))
        for party, message in pairs:
            self._check(party, batch, message, messages[0])
        with self._report.timed("compute_s"):
            parts = [self._receivers[party].decode(message) for party, message in pairs]
            self._state.begin_change()
            gradients, loss = self._half.step(batch, parts, _labels(messages))
            answers: list[GradientFrame] = []
            for message, part, gradient in zip(
                messages,
                parts,
                gradients,
                strict=True,
            ):
                encoded = self._encoded(batch, message, part, gradient)
                answers.append(
                    GradientFrame(
                        batch=batch,
                        encoded=encoded,
                        loss=loss,
                    )
                )
        for party, answer in zip(parties, answers, strict=True):
            self._channels[party].send(answer, wait_for_room=True)
        return loss

    def _check(
        self,
        party: int,
        batch: int,
        message: Features,
        first: Features,
    ) -> None:
        peer = self._channels[party].peer
        cut = self._half.cut
        if (message.batch, message.cut) != (batch, cut):
            raise SplitRefused(
                f"{peer} sends batch {message.batch} at cut {message.cut}, but batch {batch} at cut {cut} is next"
            )
        if message.ids_digest != first.ids_digest:
            raise SplitRefused(
                f"batch {batch}: {peer} has other samples than {self._channels[0].peer}, or in another order"
            )

    def _encoded(
        self, batch: int, message: Features, part: Array, gradient: Array | None
    ) -> EncodedTensor | None:
        if gradient is None:
            return None
        assert gradient.shape == part.shape, "a gradient has the shape of its features"
        return encode(
            gradient,
            message.answer_bits,
            what=f"gradient of batch {batch}",
        )

    def _save_checkpoint(self, batch: int, mark: Mark) -> None:
        wanted = Mark(batch=batch, cut=self._half.cut)
        if mark != wanted:
            raise SplitRefused(f"{self._channels[0].peer} sends {mark}, but {wanted} is next")
        for party in range(1, len(self._channels)):
            self._require_message(party, batch, mark)
        self._state.save_checkpoint(batch, lambda: FeatureReceiver.save_all(self._receivers))
        for channel in self._channels:
            channel.send(mark, wait_for_room=True)

    def _move_cut(self, recut: Recut) -> None:
        old = self._half.cut
        channel = self._channels[0]
        if len(self._channels) > 1:
            raise SplitRefused(f"{channel.peer} moves the cut of a half that parties share")
        if recut.cut == old or (recut.weights is None) != (recut.cut > old):
            layers = "without" if recut.weights is None else "with"
            raise SplitRefused(
                f"{channel.peer} moves the cut from {old} to {recut.cut} {layers} layers"
            )
        self._state.begin_change()
        if recut.weights is not None:
            self._half.import_layers(recut.cut, recut.weights)
            answer = Recut(cut=recut.cut)
        else:
            answer = Recut(cut=recut.cut, weights=self._half.export_layers(recut.cut))
        for receiver in self._receivers:
            receiver.reset()
        channel.send(answer, wait_for_room=True)

    def _require_message(self, party: int, batch: int, wanted: Message) -> None:
        message = self._receive(party, batch)
        if message != wanted:
            raise unexpected(self._channels[party], message, f"{_name(wanted)}, as of party 0,")


def _labels(messages: Sequence[Features]) -> Labels:
    """Return the labels of the first party that has any."""
    labels = [message.labels for message in messages]
    return next((each for each in labels if arrays_in(each)), labels[0])


def _name(message: Message) -> str:
    return f"a {type(message).__name__.lower()}"


def unexpected(channel: SplitStream, message: Message, wanted: str) -> SplitRefused:
    """Return the error for a message other than the next one."""
    return SplitRefused(f"{channel.peer} sends {_name(message)}, but {wanted} is next")
