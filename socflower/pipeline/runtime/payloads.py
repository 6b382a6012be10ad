"""Tensors that cross a cut as bytes: as they are, or in 16, 8 or 4 bits (F24)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Final

import numpy as np
import torch
from torch import Tensor

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, checked
from socflower.pipeline.plan import Slice
from socflower.pipeline.runtime.stage import Crossing
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


_Bits = Annotated[int, OneOf(BITS)]


@checked
class ActivationCoding:
    """The bits in which activations and their gradients cross a cut; 32 is exact. Integers are always exact.

    With `feedback` the gradient that comes back is corrected for the error of the activations' code (F25).
    """

    bits: _Bits = 32
    gradient_bits: _Bits = 32
    feedback: Annotated[Form, OneOf(FORMS)] = "none"

    def check(self) -> None:
        """Refuse feedback without an error to correct."""
        if self.feedback != "none" and self.bits == 32:
            raise ConfigError(
                f"feedback = {self.feedback!r} corrects errors of coding, and bits = 32 makes none; "
                "give bits=8, or leave it out"
            )


EXACT: Final[ActivationCoding] = ActivationCoding()


class Payloads:
    """The bytes of all tensors that cross one cut in one direction.

    If their lengths are `free`, a message begins with them.
    """

    def __init__(
        self, crossing: Sequence[Crossing], bits: int, *, what: str, free: bool = False
    ) -> None:
        for one in crossing:
            if one.dtype not in _NUMPY_TYPES:
                raise ConfigError(
                    f"pipeline: {what} of type {one.dtype} cannot be sent; convert them to float32, "
                    "or cut elsewhere"
                )
        self._crossing, self._bits, self._what = tuple(crossing), bits, what
        self._free = free

    def num_bytes(self, num_samples: int) -> int | None:
        """Return the bytes of so many samples; None if only the sender knows them, 0 if there is no message."""
        if not num_samples or not self._crossing:
            return 0
        if self._free:
            return None
        return sum(self._coded_bytes(one, num_samples) for one in self._crossing)

    def encode(self, tensors: Sequence[Tensor], first: int, stop: int) -> bytearray:
        """Return rows `first` to `stop` - 1 of the tensors."""
        parts: list[bytes | memoryview] = []
        if self._free:
            lengths = [length for tensor in tensors for length in tensor.shape[1:]]
            parts.append(np.array(lengths, "<i4").tobytes())
        for tensor, one in zip(tensors, self._crossing, strict=True):
            array = tensor[first:stop].detach().cpu().contiguous().numpy()
            if not self._quantises(one):
                parts.append(array_to_bytes(array))
                continue
            coded = encode(array, self._bits, what=self._what)
            parts += [np.array([*coded.low, *coded.high], "<f4").tobytes(), coded.payload]
        return bytearray().join(parts)

    def decode(self, body: memoryview | bytearray, num_samples: int) -> tuple[Tensor, ...]:
        """Return the tensors of so many samples, as copies."""
        view, start, tensors = memoryview(body), 0, []
        crossing = self._crossing
        if self._free:
            num_lengths = sum(len(one.shape) for one in crossing)
            lengths = iter(np.frombuffer(view[: 4 * num_lengths], "<i4").tolist())
            start = 4 * num_lengths
            crossing = tuple(
                replace(one, shape=tuple(islice(lengths, len(one.shape)))) for one in crossing
            )
        for one in crossing:
            shape, end = (num_samples, *one.shape), start + self._coded_bytes(one, num_samples)
            tensors.append(torch.from_numpy(self._array(one, shape, view[start:end])))
            start = end
        return tuple(tensors)

    def _array(self, one: Crossing, shape: tuple[int, ...], body: memoryview) -> Any:
        if not self._quantises(one):
            return np.frombuffer(body, _NUMPY_TYPES[one.dtype]).reshape(shape).copy()
        low, high = np.frombuffer(body[:8], "<f4").tolist()
        coded = EncodedTensor(
            bits=self._bits,
            shape=shape,
            low=(low,),
            high=(high,),
            payload=body[8:],
        )
        return decode(coded)

    def _quantises(self, one: Crossing) -> bool:
        return self._bits < 32 and one.dtype == torch.float32

    def _coded_bytes(self, one: Crossing, num_samples: int) -> int:
        exact = one.num_bytes(num_samples)
        return 8 + packed_bytes(exact // 4, self._bits) if self._quantises(one) else exact


class CutTensors:
    """The tensors that cross the cuts on both sides of a stage, and the errors of their code."""

    def __init__(
        self,
        stage: int,
        entering: Sequence[Crossing],
        leaving: Sequence[Crossing],
        coding: ActivationCoding,
        *,
        free: bool = False,
    ) -> None:
        into, out = f"activations into stage {stage}", f"activations out of stage {stage}"
        self.inputs = Payloads(entering, coding.bits, what=into, free=free)
        self.outputs = Payloads(leaving, coding.bits, what=out, free=free)
        gradients = [[one for one in side if one.has_gradient] for side in (entering, leaving)]
        bits = coding.gradient_bits
        self.input_gradients = Payloads(gradients[0], bits, what=f"gradients of {into}", free=free)
        self.output_gradients = Payloads(gradients[1], bits, what=f"gradients of {out}", free=free)
        self._form: Form = coding.feedback
        # The tensors out of the stage that get a gradient.
        self._numbers = [number for number, one in enumerate(leaving) if one.has_gradient]
        # By receiver and tensor.
        self._errors: dict[tuple[int, int], ErrorFeedback] = {}

    def keep_errors(
        self,
        micro_batch: int,
        piece: Slice,
        sent: Sequence[Tensor],
        body: bytearray,
    ) -> None:
        """Keep the errors of a message until its gradients come (F25)."""
        if self._form == "none":
            return
        decoded = self.outputs.decode(body, piece.num_samples)
        for number, (tensor, other) in enumerate(zip(sent, decoded, strict=True)):
            if tensor.dtype == torch.float32:
                key = (piece.receiver, number)
                feedback = self._errors.setdefault(key, ErrorFeedback(self._form))
                feedback.keep(micro_batch, tensor.detach().cpu().numpy(), other.numpy())

    def corrected(
        self, micro_batch: int, piece: Slice, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a message, corrected by its errors, which are then forgotten (F25)."""
        found = []
        for number, gradient in zip(self._numbers, gradients, strict=True):
            feedback = self._errors.get((piece.receiver, number))
            if feedback is not None:
                gradient = torch.from_numpy(feedback.correct(micro_batch, gradient.numpy()))
                feedback.forget(micro_batch)
            found.append(gradient)
        return tuple(found)


def joined(pieces: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return tensors of consecutive samples as one of each."""
    if len(pieces) == 1:
        return tuple(pieces[0])
    return tuple(map(torch.cat, zip(*pieces, strict=True)))
