"""Products of two tensors, elementwise and as matrices, and softmax: squeeze-and-excitation, scales, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array
from socflower.precision.int8.operators import (
    StepContext,
    Tensor,
    WideOperator,
    product_scale,
    times_factor,
)

_LARGEST_PRODUCT = 127 * 127

_FLOAT32_DEPTH = 2**24 // _LARGEST_PRODUCT
"""Float32 holds every partial sum of so many products exactly, in whatever order they are added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply(ir.Node):
    """The product of two tensors; along each axis a size is the other one's, or 1 and then repeated."""

    kind: ClassVar[str] = "multiply"
    keeps_sign: ClassVar[bool] = True

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return the larger size along each axis."""
        one, other = inputs
        fits = all(1 in pair or len(set(pair)) == 1 for pair in zip(one, other, strict=True))
        channels, height, width = map(max, one, other)
        return (channels, height, width) if fits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MatMul(ir.Node):
    """`batches` products of matrices in each sample: (rows, depth) times (depth, columns).

    The first input has depth as channels and (batches, rows) as pixels. The second one has columns as channels and
    (batches, depth) as pixels; if it is `transposed`, depth as channels and (batches, columns) as pixels. The output
    has columns as channels and (batches, rows) as pixels.
    """

    kind: ClassVar[str] = "matmul"
    keeps_sign: ClassVar[bool] = True
    batches: int
    transposed: bool = False

    def sizes(self, inputs: Sequence[ir.Shape]) -> tuple[int, int, int]:
        """Return rows, depth and columns."""
        depth, *pixels = inputs[0]
        rows = math.prod(pixels) // self.batches
        second_pixels = inputs[1][1] * inputs[1][2] // self.batches
        return rows, depth, second_pixels if self.transposed else inputs[1][0]

    def made_shape(self, inputs: Sequence[ir.Shape]) -> ir.Shape | None:
        """Return (columns, batches, rows)."""
        if self.batches < 1 or len(inputs) != 2:
            return None
        rows, depth, columns = self.sizes(inputs)
        second = (depth, columns) if self.transposed else (columns, depth)
        read = [(shape[0], shape[1] * shape[2]) for shape in inputs]
        if read != [(depth, self.batches * rows), (second[0], self.batches * second[1])]:
            return None
        return columns, self.batches, rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax(ir.Node):
    """softmax(scale * x) over the channels of each pixel."""

    kind: ClassVar[str] = "softmax"
    non_negative: ClassVar[bool] = True
    scale: float = 1.0

    def check(self) -> str:
        """Refuse a scale that is not positive."""
        return "" if 0.0 < self.scale < math.inf else f"scale = {self.scale}; it must be above 0"


class MultiplyOperator(WideOperator[Multiply]):
    """Elementwise product; the gradient of a repeated element is an exact sum."""

    def forward(self, step: StepContext) -> None:
        """Multiply, round."""
        a, b = self.inputs
        self.output.factor, exponent = product_scale(a, b)
        self.output.exponent = self._round_sums(
            step, "forward", exponent, self._products(), self.output.data, most=_LARGEST_PRODUCT
        )

    def evaluate(self, step: StepContext) -> None:
        """Multiply exactly, round."""
        self._store_by_image(self._products() * _scales_of_products(*self.inputs))

    def _products(self) -> npt.NDArray[np.int32]:
        a, b = self.inputs
        return np.multiply(_channels(a.data, a), _channels(b.data, b), dtype=np.int32)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Multiply the gradient by the other factor."""
        dy = _channels(self.gradient, self.output)
        exponents = [0, 0]
        for index, (x, other) in enumerate(zip(self.inputs, reversed(self.inputs), strict=True)):
            target = into[index]
            if target is None:
                continue
            products = np.multiply(dy, _channels(other.data, other), dtype=np.int32)
            height_width = zip((0, 1), x.shape[1:], self.output.shape[1:], strict=True)
            repeated = [axis for axis, own, made in height_width if own < made]
            if x.shape[0] < self.output.shape[0]:
                repeated.append(3)
            sums = products.sum(axis=tuple(repeated), keepdims=True, dtype=np.int64)
            repeats = math.prod(self.output.shape) // math.prod(x.shape)
            integers, unit, most = times_factor(other.factor, sums, _LARGEST_PRODUCT * repeats)
            exponents[index] = self._round_sums(
                step,
                f"backward {index}",
                self.output.gradient_exponent + other.exponent + unit,
                integers,
                target,
                most=most,
                mask=x.mask,
            )
        return exponents


def _channels(array: Int8Array, tensor: Tensor) -> Int8Array:
    return array[..., : tensor.shape[0]]


def _scales_of_products(one: Tensor, other: Tensor) -> DoubleArray:
    """Return for each image of an evaluation the scale of products of two tensors' values, (batch, 1)."""
    scales: DoubleArray = one.by_image.astype(np.float64) * other.by_image
    return scales[:, None]


class MatMulOperator(WideOperator[MatMul]):
    """Exact products of matrices."""

    def __init__(self, node: MatMul, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        self._rows, self._depth, self._columns = node.sizes([x.shape for x in self.inputs])

    def _first(self) -> npt.NDArray[Any]:
        """Return the first input, (batches, samples, rows, depth)."""
        return self._matrices(self.inputs[0].data, self.inputs[0], self._rows)

    def _second(self) -> npt.NDArray[Any]:
        """Return the second input, (batches, samples, depth, columns)."""
        pixels = self._columns if self.node.transposed else self._depth
        found = self._matrices(self.inputs[1].data, self.inputs[1], pixels)
        return found.swapaxes(2, 3) if self.node.transposed else found

    def _matrices(self, array: Int8Array, tensor: Tensor, pixels: int) -> npt.NDArray[Any]:
        channels = tensor.shape[0]
        shape = (self.node.batches, pixels, tensor.batch, channels)
        return array[..., :channels].reshape(shape).swapaxes(1, 2)

    def forward(self, step: StepContext) -> None:
        """Multiply, round."""
        self.output.factor, exponent = product_scale(*self.inputs)
        made = _exact_product(self._first(), self._second())
        self.output.exponent = self._store(
            step, "forward", exponent, 1.0, made, self._depth, self.output.data, None
        )

    def evaluate(self, step: StepContext) -> None:
        """Multiply exactly, round."""
        sums = self._as_pixels(_exact_product(self._first(), self._second()), self.output.data)
        self._store_by_image(sums * _scales_of_products(*self.inputs))

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Multiply the gradient by the other matrix, transposed."""
        dy = self._matrices(self.gradient, self.output, self._rows)
        first, second = self.inputs
        exponents = [0, 0]
        if into[0] is not None:
            made = _exact_product(dy, self._second().swapaxes(2, 3))
            exponent = self.output.gradient_exponent + second.exponent
            exponents[0] = self._store(
                step,
                "backward 0",
                exponent,
                second.factor,
                made,
                self._columns,
                into[0],
                first.mask,
            )
        if into[1] is not None:
            made = _exact_product(self._first().swapaxes(2, 3), dy)
            if self.node.transposed:
                made = made.swapaxes(2, 3)
            exponent = self.output.gradient_exponent + first.exponent
            exponents[1] = self._store(
                step, "backward 1", exponent, first.factor, made, self._rows, into[1], second.mask
            )
        return exponents

    def _store(
        self,
        step: StepContext,
        role: str,
        exponent: int,
        factor: float,
        matrices: npt.NDArray[np.int64],
        depth: int,
        out: Int8Array,
        mask: Int8Array | None,
    ) -> int:
        """Round factor * matrices to the array of a tensor, and return the exponent."""
        sums = self._as_pixels(matrices, out)
        integers, unit, most = times_factor(factor, sums, depth * _LARGEST_PRODUCT)
        return self._round_sums(step, role, exponent + unit, integers, out, most=most, mask=mask)

    @staticmethod
    def _as_pixels(matrices: npt.NDArray[np.int64], out: Int8Array) -> npt.NDArray[np.int64]:
        """Return matrices (batches, samples, pixels, channels) as the pixels of `out`."""
        height, width, samples, _ = out.shape
        return matrices.swapaxes(1, 2).reshape(height, width, samples, -1)


def _exact_product(lhs: npt.NDArray[np.int8], rhs: npt.NDArray[np.int8]) -> npt.NDArray[np.int64]:
    """Return lhs @ rhs. Floating-point sums of integers are exact while they fit the mantissa, in any order."""
    dtype = np.float32 if lhs.shape[-1] <= _FLOAT32_DEPTH else np.float64
    made: npt.NDArray[np.int64] = (lhs.astype(dtype) @ rhs.astype(dtype)).astype(np.int64)
    return made


_POWER_BITS = 20
_PROBABILITY_BITS = 14
_SCALE_BITS = 15


class SoftmaxOperator(WideOperator[Softmax]):
    """Probabilities of 14 bits, rounded as any accumulator.

    The powers are a table of 255 integers of 20 bits, one for each difference of two int8 values; their sum and the
    quotients are integers.
    """

    def forward(self, step: StepContext) -> None:
        """Look the powers up, divide by their sum, round."""
        x = self.inputs[0]
        values = _channels(x.data, x).astype(np.int16)
        below = values.max(axis=3, keepdims=True) - values
        powers = _powers(self.node.scale * x.scale)[below]
        sums = powers.sum(axis=3, keepdims=True)
        self.output.factor = 1.0
        quotients = ((powers << (_PROBABILITY_BITS + 1)) + sums) // (2 * sums)
        self.output.exponent = self._round_sums(
            step,
            "forward",
            -_PROBABILITY_BITS,
            quotients,
            self.output.data,
            most=1 << _PROBABILITY_BITS,
        )

    def evaluate(self, step: StepContext) -> None:
        """Divide each image's powers by their exact sum, round."""
        x = self.inputs[0]
        values = _channels(x.data, x).astype(np.int16)
        below = values.max(axis=3, keepdims=True) - values
        made = np.empty(values.shape)
        for image, scale in enumerate(x.by_image.tolist()):
            powers = _powers(self.node.scale * scale)[below[:, :, image]]
            made[:, :, image] = powers / powers.sum(axis=2, keepdims=True)
        self._store_by_image(made)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute dx = scale * p * (dy - sum(p * dy)) with the rounded probabilities p."""
        x = self.inputs[0]
        target = into[0]
        if target is None:
            return [0]
        exponent = self.output.exponent
        p = _channels(self.output.data, self.output).astype(np.int64)
        dy = _channels(self.gradient, self.output).astype(np.int64)
        # The exponent of probabilities is 0 or less: with it, dy has the unit of p * dy.
        centred = (dy << -exponent) - (p * dy).sum(axis=3, keepdims=True)
        mantissa, scale_exponent = math.frexp(self.node.scale)
        factor = round(math.ldexp(mantissa, _SCALE_BITS))
        made = p * centred * factor
        made_exponent = 2 * exponent + self.output.gradient_exponent + scale_exponent - _SCALE_BITS
        # p <= 127, and both terms of `centred` are at most 127 * 2^14.
        most = 127 * (127 << (_PROBABILITY_BITS + 1)) << _SCALE_BITS
        return [
            self._round_sums(step, "backward", made_exponent, made, target, most=most, mask=x.mask)
        ]


def _powers(scale: float) -> npt.NDArray[np.int64]:
    """Return 2^20 * exp(-d * scale) for d = 0..254, rounded."""
    powers: DoubleArray = np.array([math.exp(-min(d * scale, 700.0)) for d in range(255)])
    return np.rint(np.ldexp(powers, _POWER_BITS)).astype(np.int64)
