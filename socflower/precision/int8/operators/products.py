"""Products of two tensors, elementwise and as matrices, and softmax: squeeze-and-excitation, scales, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array, Int32Array
from socflower.precision.int8.operators.base import (
    FACTOR_BITS,
    Operator,
    StepContext,
    Tensor,
    WideOperator,
    integer_factor,
    product_scale,
    times_factor,
)

_LARGEST_PRODUCT = 127 * 127
# Of accumulators: rounding may carry to one more.
_KEPT_BITS = 30


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
        self._store_by_image(step, self._products() * _scales_of_products(*self.inputs))

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
        rows, depth, columns = node.sizes([x.shape for x in self.inputs])
        self._rows, self._depth, self._columns = rows, depth, columns

        def products(
            made: tuple[int, int], summed: int, transposed: Literal["neither", "right", "left"]
        ) -> _int8.MatrixProducts:
            return _int8.MatrixProducts(node.batches, output.batch, *made, summed, transposed)

        self._forward = products((rows, columns), depth, "right" if node.transposed else "neither")
        self._of_first = products((rows, depth), columns, "neither" if node.transposed else "right")
        second = (columns, depth) if node.transposed else (depth, columns)
        self._of_second = products(second, rows, "left")
        # Of the engine's own threads and kernels, which are known when it first runs.
        self._workspace = np.empty(0, dtype=np.uint8)

    def _multiply(
        self,
        step: StepContext,
        products: _int8.MatrixProducts,
        left: Int8Array,
        right: Int8Array,
        like: Int8Array,
    ) -> tuple[Int32Array, int]:
        """Return the accumulators of the products, laid out as `like`, and their largest magnitude."""
        needed = products.workspace_bytes(step.engine)
        if len(self._workspace) < needed:
            self._workspace = np.empty(needed, dtype=np.uint8)
        made = step.wide(like.shape)
        return made, products.multiply(step.engine, left, right, made, self._workspace)

    def forward(self, step: StepContext) -> None:
        """Multiply, round."""
        first, second = self.inputs
        output = self.output
        output.factor, exponent = product_scale(first, second)
        made, _ = self._multiply(step, self._forward, first.data, second.data, output.data)
        output.exponent = self._round_wide(step, "forward", exponent, made, output.data, None)

    def evaluate(self, step: StepContext) -> None:
        """Multiply exactly, round."""
        first, second = self.inputs
        made, _ = self._multiply(step, self._forward, first.data, second.data, self.output.data)
        own = made[..., : self.output.shape[0]]
        self._store_by_image(step, own * _scales_of_products(first, second))

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Multiply the gradient by the other matrix, transposed."""
        dy = self.gradient
        first, second = self.inputs
        exponents = [0, 0]
        if into[0] is not None:
            made = self._multiply(step, self._of_first, dy, second.data, into[0])
            exponents[0] = self._store_gradient(step, "backward 0", second, made, into[0], first)
        if into[1] is not None:
            # A second matrix that is stored transposed has the transposed gradient, too.
            factors = (dy, first.data) if self.node.transposed else (first.data, dy)
            made = self._multiply(step, self._of_second, *factors, into[1])
            exponents[1] = self._store_gradient(step, "backward 1", first, made, into[1], second)
        return exponents

    def _store_gradient(
        self,
        step: StepContext,
        role: str,
        other: Tensor,
        made: tuple[Int32Array, int],
        out: Int8Array,
        x: Tensor,
    ) -> int:
        """Round products with `other`, times its factor, to the gradient of `x`; return its exponent."""
        sums, own_largest = made
        exponent = self.output.gradient_exponent + other.exponent
        if other.factor != 1.0:
            integer = integer_factor(other.factor)
            most = int(step.share.most(own_largest)) * integer
            drop = max(0, most.bit_length() - _KEPT_BITS)
            _int8.scale_sums(step.engine, sums, integer, drop)
            exponent += drop - FACTOR_BITS
        return self._round_wide(step, role, exponent, sums, out, x.mask)


_POWER_BITS = 20
_PROBABILITY_BITS = 14
_SCALE_BITS = 15


class SoftmaxOperator(Operator[Softmax]):
    """Probabilities of 14 bits, rounded as any accumulator.

    The powers are a table of 255 integers of 20 bits, one for each difference of two int8 values; their sum and the
    quotients are integers, as are the products of the gradient, of up to 44 bits.
    """

    def forward(self, step: StepContext) -> None:
        """Look the powers up, divide by their sum, round."""
        x = self.inputs[0]
        self.output.factor = 1.0
        powers = _powers(self.node.scale * x.scale)
        rounding = step.algorithm.forward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.softmax(step.engine, x.data, powers, x.shape[0], out, shift, rounding)

        self.output.exponent = self._round(
            step, "forward", -_PROBABILITY_BITS, run, self.output.data
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
        self._store_by_image(step, made)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute dx = scale * p * (dy - sum(p * dy)) with the rounded probabilities p."""
        x = self.inputs[0]
        target = into[0]
        if target is None:
            return [0]
        exponent = self.output.exponent
        mantissa, scale_exponent = math.frexp(self.node.scale)
        factor = round(math.ldexp(mantissa, _SCALE_BITS))
        # The exponent of probabilities is 0 or less: shifted by it, dy has the unit of p * dy.
        operands = (step.engine, self.output.data, self.gradient, x.shape[0], -exponent, factor)
        own_largest = _int8.softmax_input_gradient_largest(*operands)
        drop = max(0, int(step.share.most(own_largest)).bit_length() - _KEPT_BITS)
        rounding = step.algorithm.backward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.softmax_input_gradient(*operands, drop, out, shift, rounding, x.mask)

        made_exponent = 2 * exponent + self.output.gradient_exponent + scale_exponent - _SCALE_BITS
        return [self._round(step, "backward", made_exponent + drop, run, target)]


def _powers(scale: float) -> Int32Array:
    """Return 2^20 * exp(-d * scale) for d = 0..254, rounded."""
    powers: DoubleArray = np.array([math.exp(-min(d * scale, 700.0)) for d in range(255)])
    return np.rint(np.ldexp(powers, _POWER_BITS)).astype(np.int32)
