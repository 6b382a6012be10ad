"""Maximum and average pooling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import (
    Int8Array,
    Int32Array,
)
from socflower.precision.int8.operators.base import (
    Operator,
    StepContext,
    Tensor,
)

AVERAGE_BITS = 14
"""An average is a sum times round(2^14 / window): exact for windows of a power of two."""


class MaxPoolOperator(Operator[ir.MaxPool]):
    """Maximum over windows; the first maximum of a window receives its gradient."""

    def __init__(
        self, node: ir.MaxPool, inputs: Sequence[Tensor], output: Tensor, plan: _int8.Pooling
    ) -> None:
        super().__init__(node, inputs, output)
        self._plan, self._argmax = plan, np.empty(output.array_shape, np.uint8)

    def forward(self, step: StepContext) -> None:
        """Compute the maxima; the exponent does not change."""
        self._plan.max(step.engine, self.inputs[0].data, self.output.data, self._argmax)
        self.output.exponent = self.inputs[0].exponent
        self.output.factor = self.inputs[0].factor

    def evaluate(self, step: StepContext) -> None:
        """Compute the maxima."""
        self._plan.max(step.engine, self.inputs[0].data, self.output.data, self._argmax)
        self.output.by_image = self.inputs[0].by_image

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Scatter every gradient to the position of its maximum; sum them if windows overlap."""
        x = self.inputs[0]
        exponent = self.output.gradient_exponent
        target = into[0]
        if target is None:
            return [0]
        rounding = step.algorithm.backward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return self._plan.max_gradient(
                step.engine, self.gradient, self._argmax, out, shift, rounding, x.mask
            )

        if not self._plan.overlapping:
            run(target, 0)
            x.gradient_low = None
            if (low := self.output.gradient_low) is not None:
                x.gradient_low = np.empty_like(target)
                self._plan.max_gradient(
                    step.engine, low, self._argmax, x.gradient_low, 0, rounding, x.mask
                )
            return [exponent]
        return [self._round(step, "backward", exponent, run, target)]


class AveragePoolOperator(Operator[ir.AveragePool]):
    """Mean over windows."""

    def __init__(
        self, node: ir.AveragePool, inputs: Sequence[Tensor], output: Tensor, plan: _int8.Pooling
    ) -> None:
        super().__init__(node, inputs, output)
        self._plan = plan
        window = node.kernel[0] * node.kernel[1]
        self._multiplier = (2**AVERAGE_BITS + window // 2) // window

    def forward(self, step: StepContext) -> None:
        """Sum, multiply by 2^14 / window, round."""
        x = self.inputs[0]
        rounding = step.algorithm.forward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return self._plan.average(step.engine, x.data, self._multiplier, out, shift, rounding)

        acc_exponent = x.exponent - AVERAGE_BITS
        self.output.factor = x.factor
        self.output.exponent = self._round(step, "forward", acc_exponent, run, self.output.data)

    def evaluate(self, step: StepContext) -> None:
        """Sum the windows exactly, divide, round."""
        x = self.inputs[0]
        channels = x.array_shape[3]
        zeros = np.zeros(channels, dtype=np.float32)
        height, width = self.node.kernel
        mean = np.full(channels, 1.0 / (height * width), dtype=np.float32)
        self._round_by_image(step, self._window_sums(x.data), x.by_image, mean, zeros)

    def _window_sums(self, values: Int8Array) -> Int32Array:
        """Return the sums over the windows, with zeros in the padding."""
        (pad_h, pad_w), (stride_h, stride_w) = self.node.padding, self.node.stride
        out_h, out_w, *_ = self.output.array_shape
        padded = np.pad(values, ((pad_h, pad_h), (pad_w, pad_w), (0, 0), (0, 0)))
        sums = np.zeros(self.output.array_shape, dtype=np.int32)
        for h in range(self.node.kernel[0]):
            for w in range(self.node.kernel[1]):
                sums += padded[
                    h : h + stride_h * out_h : stride_h, w : w + stride_w * out_w : stride_w
                ]
        return sums

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Distribute every gradient over its window."""
        x = self.inputs[0]
        target = into[0]
        rounding = step.algorithm.backward.rounding
        if target is None:
            return [0]

        def run(out: Int8Array | None, shift: int) -> int:
            return self._plan.average_gradient(
                step.engine, self.gradient, self._multiplier, out, shift, rounding, x.mask
            )

        acc_exponent = self.output.gradient_exponent - AVERAGE_BITS
        return [self._round(step, "backward", acc_exponent, run, target)]
