"""Tensors that cross a cut as bytes: as they are, or in 16, 8 or 4 bits (F24)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from socflower.errors import ConfigError
from socflower.pipeline.runtime.stage import Crossing
from socflower.plain_numbers import plain_numbers
from socflower.wire.arrays import array_to_bytes
from socflower.wire.codecs.error_feedback import FORMS, ErrorFeedback, Form
from socflower.wire.codecs.quantisation import BITS, EncodedTensor, decode, encode, packed_bytes

_NUMPY_TYPES = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.float16: "<f2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCoding:
    """In how many bits activations and their gradients cross a cut; 32 is exact. Integers always are.

    With `feedback` the gradient that comes back is corrected for the error of the activations' code (F25).
    """

    bits: int = 32
    gradient_bits: int = 32
    feedback: Form = "none"

    def __post_init__(self) -> None:
        for key in ("bits", "gradient_bits"):
            if getattr(self, key) not in BITS:
                raise ConfigError(
                    f"activation coding: {key} = {getattr(self, key)} is unknown; use one of "
                    f"{', '.join(map(str, BITS))}"
                )
        if self.feedback not in FORMS:
            raise ConfigError(
                f"activation coding: feedback = {self.feedback!r} is unknown; use {', '.join(FORMS)}"
            )
        if self.feedback != "none" and self.bits == 32:
            raise ConfigError(
                f"activation coding: feedback = {self.feedback!r} corrects for what fewer bits lose, and "
                "bits = 32 loses nothing; leave it out, or give bits=8"
            )


EXACT: Final[ActivationCoding] = ActivationCoding()


class Payloads:
    """The bytes of all tensors that cross one cut in one direction."""

    def __init__(self, crossing: Sequence[Crossing], bits: int, *, what: str) -> None:
        for one in crossing:
            if one.dtype not in _NUMPY_TYPES:
                raise ConfigError(
                    f"pipeline: {what} of type {one.dtype} cannot be sent; convert them to float32 "
                    "before the cut, or cut elsewhere"
                )
        self._crossing, self._bits, self._what = tuple(crossing), bits, what

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes of so many samples."""
        return (
            sum(self._coded_bytes(one, num_samples) for one in self._crossing) if num_samples else 0
        )

    def encode(self, tensors: Sequence[Tensor], first: int, stop: int) -> bytearray:
        """Return rows `first` up to, without, `stop` of the tensors."""
        parts: list[bytes | memoryview] = []
        for tensor, one in zip(tensors, self._crossing, strict=True):
            array = tensor[first:stop].detach().cpu().contiguous().numpy()
            if not self._quantises(one):
                parts.append(array_to_bytes(array))
                continue
            coded = encode(array, self._bits, what=self._what)
            parts += [np.array([*coded.low, *coded.high], "<f4").tobytes(), coded.payload]
        return bytearray().join(parts)

    def decode(self, body: memoryview | bytearray, num_samples: int) -> tuple[Tensor, ...]:
        """Return the tensors of so many samples, in memory of their own."""
        view, start, tensors = memoryview(body), 0, []
        for one in self._crossing:
            shape, end = (num_samples, *one.shape), start + self._coded_bytes(one, num_samples)
            tensors.append(torch.from_numpy(self._array(one, shape, view[start:end])))
            start = end
        return tuple(tensors)

    def _array(self, one: Crossing, shape: tuple[int, ...], body: memoryview) -> Any:
        if not self._quantises(one):
            return np.frombuffer(body, _NUMPY_TYPES[one.dtype]).reshape(shape).copy()
        low, high = np.frombuffer(body[:8], "<f4").tolist()
        return decode(
            EncodedTensor(bits=self._bits, shape=shape, low=(low,), high=(high,), payload=body[8:])
        )

    def _quantises(self, one: Crossing) -> bool:
        return self._bits < 32 and one.dtype == torch.float32

    def _coded_bytes(self, one: Crossing, num_samples: int) -> int:
        exact = one.num_bytes(num_samples)
        return 8 + packed_bytes(exact // 4, self._bits) if self._quantises(one) else exact


class CutFeedback:
    """Error feedback of what a device sends to those of the next stage, by receiver and tensor."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._kept: dict[tuple[int, int], ErrorFeedback] = {}

    def keep(
        self, micro_batch: int, receiver: int, sent: Sequence[Tensor], decoded: Sequence[Tensor]
    ) -> None:
        """Keep the errors of one message until its gradients come."""
        for number, (tensor, other) in enumerate(zip(sent, decoded, strict=True)):
            if self._form != "none" and tensor.dtype == torch.float32:
                self._kept.setdefault((receiver, number), ErrorFeedback(self._form)).keep(
                    micro_batch, tensor.detach().cpu().numpy(), other.numpy()
                )

    def correct(
        self,
        micro_batch: int,
        receiver: int,
        gradients: Sequence[Tensor],
        numbers: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors with these numbers, corrected; their errors are let go."""
        if self._form == "none":
            return tuple(gradients)
        corrected = []
        for number, gradient in zip(numbers, gradients, strict=True):
            feedback = self._kept.get((receiver, number))
            if feedback is not None:
                gradient = torch.from_numpy(feedback.correct(micro_batch, gradient.numpy()))
                feedback.forget(micro_batch)
            corrected.append(gradient)
        return tuple(corrected)


def joined(pieces: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return tensors of consecutive samples as one of each."""
    return (
        tuple(pieces[0]) if len(pieces) == 1 else tuple(map(torch.cat, zip(*pieces, strict=True)))
    )
