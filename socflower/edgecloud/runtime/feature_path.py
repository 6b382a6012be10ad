"""The processing of features on either side of the link: codec, error feedback, delta coding."""

import struct
from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.plan.cuts import Bits
from socflower.edgecloud.stream.frames import DeltaFeatures, Features, SplitRefused
from socflower.errors import ConfigError
from socflower.field_rules import checked
from socflower.wire.codecs.delta_coding import DeltaReceiver, DeltaSender
from socflower.wire.codecs.error_feedback import ErrorFeedback, Form
from socflower.wire.codecs.quantisation import EncodedTensor, Grouping, decode, encode

_LENGTH = struct.Struct("<Q")
_SETTINGS = struct.Struct("<Q?")


@checked
class FeatureCoding:
    """How features and gradients are coded for the link; the bits of features are the deployment's.

    With `delta_bytes` each sample's features are coded as the change since they were last sent, which takes that much
    memory at either end; 0: without delta coding.
    """

    grouping: Grouping = "tensor"
    feedback: Form = "none"
    delta_bytes: Annotated[int, Field(ge=0)] = 0
    gradient_bits: Bits = 32


EXACT: Final[FeatureCoding] = FeatureCoding()
"""Without error feedback and delta coding; gradients are sent as they are."""


class FeatureSender:
    """A front half's side: encodes features, and corrects gradients by the error of the encoding."""

    def __init__(self, coding: FeatureCoding) -> None:
        self._coding = coding
        self._feedback = ErrorFeedback(coding.feedback)
        self._delta: DeltaSender | None = None
        self.reset()

    def encode(
        self,
        batch: int,
        features: Array,
        sample_ids: NDArray[np.int64],
        bits: int,
        quantum: float | None = None,
    ) -> EncodedTensor | DeltaFeatures:
        """Return the encoded features, and store the error of the encoding; for `quantum` see `encode`."""
        grouping = self._coding.grouping
        if self._delta is not None:
            message, decoded = self._delta.encode(sample_ids, features, bits)
            self._feedback.keep(batch, features, decoded)
            return DeltaFeatures(
                message=message,
                sample_ids=sample_ids,
                memory_bytes=self._coding.delta_bytes,
                grouping=grouping,
            )
        what = f"features of batch {batch}"
        encoded = encode(
            features,
            bits,
            grouping=grouping,
            what=what,
            quantum=quantum,
        )
        if self._feedback.form != "none":
            # At 32 bits nothing is lost, so decoding is not needed.
            self._feedback.keep(batch, features, features if bits == 32 else decode(encoded))
        return encoded

    def correct(self, batch: int, gradient: Array) -> Array:
        """Return a gradient corrected by the error of its batch, which is then discarded (F25)."""
        corrected = self._feedback.correct(batch, gradient)
        self._feedback.forget(batch)
        return corrected

    def forget(self, batch: int) -> None:
        """Discard the error of a batch for which no gradient comes."""
        self._feedback.forget(batch)

    def reset(self) -> None:
        """Discard every sample's features: they are another layer's now."""
        size = self._coding.delta_bytes
        if size:
            self._delta = DeltaSender(max_bytes=size, grouping=self._coding.grouping)

    def save(self) -> bytes:
        """Return what `restore` needs; to be called while nothing is in flight."""
        return self._delta.save() if self._delta is not None else b""

    def restore(self, saved: bytes) -> None:
        """Restore the state of a checkpoint; `ConfigError` if it was saved with other settings."""
        if self._delta is not None and saved:
            self._delta.restore(saved)


class FeatureReceiver:
    """A back half's side, one for each party. Its delta coding takes at most `largest_delta_bytes` of memory."""

    def __init__(self, peer: str, *, largest_delta_bytes: int = 1 << 30) -> None:
        self._peer = peer
        self._largest = largest_delta_bytes
        self._settings: tuple[int, Grouping] | None = None
        self._delta: DeltaReceiver | None = None

    def decode(self, message: Features) -> Array:
        """Return the features of a message in a new array; `SplitRefused` if the states of the two sides differ."""
        encoded = message.encoded
        if isinstance(encoded, EncodedTensor):
            return decode(encoded)
        try:
            receiver = self._delta_receiver(encoded.memory_bytes, encoded.grouping)
            return receiver.decode(encoded.sample_ids, encoded.message)
        except ConfigError as error:
            raise SplitRefused(f"batch {message.batch} of {self._peer}: {error}") from None

    def _delta_receiver(self, memory_bytes: int, grouping: Grouping) -> DeltaReceiver:
        settings = (memory_bytes, grouping)
        if self._delta is None:
            if memory_bytes > self._largest:
                raise ConfigError(
                    f"delta coding of {memory_bytes} bytes exceeds {self._largest}; lower delta_bytes"
                )
            self._delta = DeltaReceiver(max_bytes=memory_bytes, grouping=grouping)
            self._settings = settings
        if self._settings != settings:
            raise ConfigError("delta coding: its settings have changed; start the span again")
        return self._delta

    def reset(self) -> None:
        """Discard every sample's features: they are another layer's now."""
        self._settings = self._delta = None

    def save(self) -> bytes:
        """Return what `restore` needs."""
        if self._delta is None or self._settings is None:
            return b""
        return _SETTINGS.pack(self._settings[0], self._settings[1] == "sample") + self._delta.save()

    def restore(self, saved: bytes) -> None:
        """Restore the state of a checkpoint; `ConfigError` if it is damaged."""
        if saved:
            memory_bytes, by_sample = _SETTINGS.unpack_from(saved)
            receiver = self._delta_receiver(memory_bytes, "sample" if by_sample else "tensor")
            receiver.restore(saved[_SETTINGS.size :])

    @staticmethod
    def save_all(receivers: Sequence["FeatureReceiver"]) -> bytes:
        """Return the concatenated states of all parties."""
        states = [receiver.save() for receiver in receivers]
        return b"".join(_LENGTH.pack(len(state)) + state for state in states)

    @staticmethod
    def restore_all(receivers: Sequence["FeatureReceiver"], saved: bytes) -> None:
        """Restore the states of all parties; does nothing for empty bytes."""
        for receiver in receivers if saved else ():
            size = _LENGTH.unpack_from(saved)[0]
            receiver.restore(saved[_LENGTH.size : _LENGTH.size + size])
            saved = saved[_LENGTH.size + size :]
