"""ReLU, dropout and addition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from socflower import _int8
from socflower.precision.algorithm import Rounding
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import (
    Int8Array,
    scaled_integers,
)
from socflower.precision.int8.operators.base import (
    Operator,
    StepContext,
    Tensor,
    copy_masked,
)
from socflower.precision.int8.requantisation import (
    ScaleTracker,
    round_elementwise,
)

MAX_ADD_SHIFT = 20


class ReluOperator(Operator[ir.Relu]):
    """A ReLU that is not fused; the exponent does not change."""

    def forward(self, step: StepContext) -> None:
        """Replace negative values by 0."""
        np.maximum(self.inputs[0].data, 0, out=self.output.data)
        self.output.exponent = self.inputs[0].exponent
        self.output.factor = self.inputs[0].factor

    def evaluate(self, step: StepContext) -> None:
        """Replace negative values by 0."""
        np.maximum(self.inputs[0].data, 0, out=self.output.data)
        self.output.by_image = self.inputs[0].by_image

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Copy the gradient, which the readers of the output have already masked."""
        if into[0] is not None:
            x = self.inputs[0]
            copy_masked(self.gradient, x.mask, into[0])
        return [self.output.gradient_exponent]


class DropoutOperator(Operator[ir.Dropout]):
    """Zeros at random positions; kept values are multiplied by 1 / (1 - p) and rounded like any product.

    The factor is an integer of 21 bits times a power of two, so if 1 - p is a power of two it only changes the
    exponent. p is rounded to a multiple of 2^-32. Element i, in the order of (height, width, batch, channels) or of
    (batch, channels), is kept if the i-th 32-bit number of Philox is at least 2^32 p. Philox is seeded with the step's
    seed and the operator's index in the graph.
    """

    def __init__(
        self, node: ir.Dropout, inputs: Sequence[Tensor], output: Tensor, node_index: int
    ) -> None:
        super().__init__(node, inputs, output)
        # Positive for values that are kept; 0 in the padding.
        self._gate = np.zeros(output.array_shape, np.int8)
        self._node_index = node_index
        self._threshold = round(node.p * 2**32)
        num_kept = 2**32 - self._threshold
        factor = 2.0**32 / num_kept if num_kept else 0.0
        channels = self._gate.shape[3]
        self._exponent, (self._factor,) = scaled_integers(21, (np.full(channels, factor), 0))
        self._zeros = np.zeros(channels, dtype=np.int32)

    def forward(self, step: StepContext) -> None:
        """Draw the mask, multiply, round."""
        x = self.inputs[0]
        self.output.factor = x.factor
        self._draw(step)
        if x.masked:
            # Zeros of the ReLU before it pass no gradient.
            np.multiply(self._gate, x.data > 0, out=self._gate)
        rounding = step.algorithm.forward.rounding
        self.output.exponent = self._scale(
            step, "forward", x.data, x.exponent, self.output.data, rounding
        )

    def evaluate(self, step: StepContext) -> None:
        """Copy the values."""
        np.copyto(self.output.data, self.inputs[0].data)
        self.output.by_image = self.inputs[0].by_image

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Multiply the gradient of kept values by the same factor; the others get 0."""
        if into[0] is None:
            return [0]
        exponent = self.output.gradient_exponent
        rounding = step.algorithm.backward.rounding
        return [self._scale(step, "backward", self.gradient, exponent, into[0], rounding)]

    def _scale(
        self,
        step: StepContext,
        role: str,
        values: Int8Array,
        exponent: int,
        into: Int8Array,
        rounding: Rounding,
    ) -> int:
        """Write the kept values times the factor, and return their exponent."""

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.affine_gradient(
                step.engine,
                values,
                values,
                self._gate,
                self._factor,
                self._zeros,
                self._zeros,
                out,
                shift,
                rounding,
            )

        return self._round(step, role, exponent + self._exponent, run, into)

    def _draw(self, step: StepContext) -> None:
        """Draw the numbers of the whole batch, and use those of its share."""
        height, width, num_own, _ = self._gate.shape
        channels = self.node.shape[0]
        batch = step.share.num_samples
        shape = (batch,) if self.node.channelwise else (height, width, batch)
        count = math.prod(shape) * channels
        bits = np.random.Philox(np.random.SeedSequence([step.seed, self._node_index]))
        # The lower half of each 64-bit number comes first, on any machine.
        pairs = bits.random_raw(-(-count // 2)).astype("<u8", copy=False)
        numbers = pairs.view("<u4")[:count]
        own = slice(step.share.first, step.share.first + num_own)
        self._gate[..., :channels] = (
            numbers.reshape(*shape, channels)[..., own, :] >= self._threshold
        )


def aligned(share: BatchShare, *tensors: tuple[Int8Array, int]) -> tuple[int, list[int]]:
    """Return a common exponent of (int8, exponent) tensors, and how far each is shifted left to get there.

    If the exponents differ by more than 20, nothing of the smaller values remains in 8 bits; a shift is at most 20.
    """
    exponents = [exponent for _, exponent in tensors]
    if max(exponents) - min(exponents) > MAX_ADD_SHIFT:
        # Rare. The exponent of an all-zero tensor is arbitrary, so it must not hide the other ones.
        found = [e for data, e in tensors if share.most(float(data.any()))]
        # Zeros keep any exponent within those of the others.
        exponents = [min(max(e, min(found)), max(found)) for e in exponents] if found else exponents
    low = max(min(exponents), max(exponents) - MAX_ADD_SHIFT)
    return low, [max(exponent - low, 0) for exponent in exponents]


def add_tensors(
    name: str,
    step: StepContext,
    tracker: ScaleTracker | None,
    a: tuple[Int8Array, int],
    b: tuple[Int8Array, int],
    out: Int8Array,
    *,
    rounding: int,
    relu: bool = False,
    mask: Int8Array | None = None,
) -> int:
    """Write a + b, two (int8, exponent) tensors, and return the exponent of the sum; see `aligned`."""
    low, (shift_a, shift_b) = aligned(step.share, a, b)

    def run(into: Int8Array | None, shift: int) -> int:
        return _int8.add(
            step.engine, a[0], shift_a, b[0], shift_b, into, shift, rounding, relu, mask
        )

    return round_elementwise(name, step.share, tracker, low, run, out)


class AddOperator(Operator[ir.Add]):
    """Residual addition of tensors of different exponents."""

    def forward(self, step: StepContext) -> None:
        """Align the exponents, add, apply the ReLU, round."""
        a, b = self.inputs
        if step.has_real_scales:
            self._add_real(step)
            return
        self.output.exponent = add_tensors(
            self.node.name,
            step,
            step.tracker(self.node.name, "forward"),
            (a.data, a.exponent),
            (b.data, b.exponent),
            self.output.data,
            rounding=step.algorithm.forward.rounding,
            relu=self.node.relu,
        )

    def evaluate(self, step: StepContext) -> None:
        """Add, apply the ReLU, round."""
        a, b = self.inputs
        channels = a.array_shape[3]
        ones = np.ones(channels, dtype=np.float32)
        zeros = np.zeros(channels, dtype=np.float32)
        self._round_by_image(step, a.data, a.by_image, ones, zeros, b, relu=self.node.relu)

    def _add_real(self, step: StepContext) -> None:
        """Add in float32, and give the sum the scale that fits it best."""
        a, b = self.inputs
        channels = a.array_shape[3]
        scale_a, scale_b = (np.full(a.batch, x.scale, dtype=np.float32) for x in (a, b))
        ones = np.ones(channels, dtype=np.float32)
        zeros = np.zeros(channels, dtype=np.float32)
        operands = (step.engine, a.data, scale_a, ones, zeros, b.data, scale_b)
        largest = np.empty(a.batch, dtype=np.float32)
        _int8.affine_real(*operands, None, None, largest, self.node.relu)
        if self._set_real_scale(step, step.share.most(float(largest.max()))):
            inverse = np.full(a.batch, 1.0 / self.output.scale, dtype=np.float32)
            _int8.affine_real(*operands, self.output.data, inverse, None, self.node.relu)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Copy the gradient to both inputs."""
        for x, target in zip(self.inputs, into, strict=True):
            if target is not None:
                copy_masked(self.gradient, x.mask, target)
        return [self.output.gradient_exponent] * 2
