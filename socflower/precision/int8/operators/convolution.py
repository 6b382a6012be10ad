"""Convolutions and linear layers, with bias and ReLU fused."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import (
    Int8Array,
    Int32Array,
    exponent_for,
)
from socflower.precision.int8.operators.base import (
    StepContext,
    Tensor,
    WeightedOperator,
    room_beside,
)
from socflower.precision.int8.parameters import Weight
from socflower.precision.int8.requantisation import (
    ZERO_EXPONENT,
    fit_int32,
    require_exponent,
    round_product,
)


class ConvolutionOperator(WeightedOperator[ir.Convolution]):
    """Convolution or linear layer, with bias and ReLU fused."""

    def __init__(
        self,
        node: ir.Convolution,
        inputs: Sequence[Tensor],
        output: Tensor,
        plan_of: Callable[[int], _int8.Convolution],
        engine: _int8.Engine,
    ) -> None:
        self._plan_of = plan_of
        self._plan = plan_of(output.batch)
        super().__init__(node, inputs, output, self._plan.weight_shape)
        self.workspace_bytes = self._plan.workspace_bytes(engine)
        self._room = room_beside(math.prod(self._weight_shape[:3]))

    def forward(self, step: StepContext) -> None:
        """Multiply, add the bias at the accumulator's scale, apply the ReLU, round."""
        x = self.inputs[0]
        node = self.node
        weight = self._weight(step)
        weight_data = weight.data.reshape(self._weight_shape)
        acc_exponent = x.exponent + weight.exponent
        bias = self._integer_bias(step, acc_exponent, x.factor, self._room) if node.bias else None
        rounding = step.algorithm.forward.rounding
        self.output.factor = x.factor
        accumulators = step.wide(self.output.array_shape)

        def run(destination: Int8Array | Int32Array, shift: int) -> int:
            return self._plan.forward(
                step.engine,
                x.data,
                weight_data,
                bias,
                destination,
                step.workspace,
                x.activations,
                shift,
                rounding,
                node.relu,
            )

        if step.has_real_scales:
            acc_scale = math.ldexp(x.factor, acc_exponent)
            largest = run(accumulators, 0)
            if not self.output.normalised:
                self._round_real(step, accumulators, acc_scale, largest, relu=node.relu)
                return
            self.output.accumulators = accumulators
            self.output.accumulator_scale = acc_scale
            self.output.largest_accumulator = largest
            self.output.channel_units = weight.channel_units
            return
        self.output.exponent = round_product(
            node.name,
            step.engine,
            step.share,
            step.tracker(node.name, "forward"),
            acc_exponent,
            run,
            self.output.data,
            accumulators,
            rounding,
        )

    def evaluate(self, step: StepContext) -> None:
        """Multiply; add the bias, apply the ReLU and round, unless a BatchNorm follows that does it."""
        x = self.inputs[0]
        node = self.node
        output = self.output
        weight = self._weight(step)
        accumulators = step.wide(output.array_shape)
        self._plan.forward(
            step.engine,
            x.data,
            weight.data.reshape(self._weight_shape),
            None,
            accumulators,
            step.workspace,
            x.activations,
        )
        if not output.normalised:
            self._store_products(step, accumulators, relu=node.relu)
            return
        output.accumulators = accumulators
        output.channel_units = weight.channel_units
        output.by_image = x.by_image * np.float32(2.0**weight.exponent)
        output.bias = self._bias(step)

    def _round_real(
        self,
        step: StepContext,
        accumulators: Int32Array,
        acc_scale: float,
        own_largest: int,
        *,
        relu: bool,
    ) -> None:
        """Round accumulators, in units of `acc_scale`, at the scale that fits them best."""
        if self._set_real_scale(step, step.share.most(own_largest) * acc_scale):
            channels = self.output.array_shape[3]
            scale = np.full(channels, acc_scale, dtype=np.float32)
            zeros = np.zeros(channels, dtype=np.float32)
            out, unit = self.output.data, self.output.scale
            self._affine_real(step, accumulators, scale, zeros, out, unit, relu=relu)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute the input gradient with the weights of the forward pass, then the weight gradient, then update."""
        x = self.inputs[0]
        exponent = 0 if into[0] is None else self._input_gradient(step, self._weight(step), into[0])
        if "weight" in self.node.trained and self.output.gradient_low is not None:

            def compute_half(half: Int8Array, gradient: Int32Array) -> int:
                return self._plan.weight_gradient(
                    step.engine, x.data, half, gradient, step.workspace, x.activations
                )

            self._update_weight16(step, compute_half)
        elif "weight" in self.node.trained:

            def compute(gradient: Int32Array) -> tuple[int, int]:
                try:
                    return self._plan.weight_gradient(
                        step.engine, x.data, self.gradient, gradient, step.workspace, x.activations
                    ), 0
                except OverflowError:
                    if not step.share.is_whole:
                        raise
                    return self._split_gradient(step, gradient)

            self._update_weight(step, compute)
        if "bias" in self.node.trained:
            self._update_bias(step)
        return [exponent]

    def _split_gradient(self, step: StepContext, gradient: Int32Array) -> tuple[int, int]:
        """Write a gradient that may leave int32, from exact sums over parts of the batch, rounded to 30 bits."""
        sums = self._sum_of_parts(step, 0, self.output.batch)
        drop = fit_int32(step.share, sums, 2**62, gradient)
        return max(int(gradient.max()), -int(gradient.min())), drop

    def _sum_of_parts(self, step: StepContext, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the gradient of some samples; OverflowError if that of a single one may leave int32."""
        x = self.inputs[0]
        plan = self._plan_of(end - first)
        sums = np.empty(self._weight_shape, dtype=np.int32)
        try:
            plan.weight_gradient(
                step.engine,
                np.ascontiguousarray(x.data[:, :, first:end]),
                np.ascontiguousarray(self.gradient[:, :, first:end]),
                sums,
                np.empty(plan.workspace_bytes(step.engine), np.uint8),
                x.activations,
            )
        except OverflowError:
            if end - first == 1:
                raise
            middle = (first + end) // 2
            return self._sum_of_parts(step, first, middle) + self._sum_of_parts(step, middle, end)
        return sums.astype(np.int64)

    def _input_gradient(self, step: StepContext, weight: Weight, into: Int8Array) -> int:
        """Write the gradient of the input and return its exponent."""
        x = self.inputs[0]
        node = self.node
        x.gradient_units = None
        if self.output.gradient_units is not None:
            return self._input_gradient_by_channel(step, weight, into)
        rounding = step.algorithm.backward.rounding
        weight_data = weight.data.reshape(self._weight_shape)
        acc_exponent = self.output.gradient_exponent + weight.exponent
        gradient = self.gradient

        def run(destination: Int8Array | Int32Array, shift: int) -> int:
            return self._plan.input_gradient(
                step.engine,
                gradient,
                weight_data,
                destination,
                step.workspace,
                shift,
                rounding,
                x.mask,
            )

        accumulators = step.wide(x.array_shape)
        low = self.output.gradient_low
        if low is None and not step.may_widen(x):
            return round_product(
                node.name,
                step.engine,
                step.share,
                step.tracker(node.name, "backward"),
                acc_exponent,
                run,
                into,
                accumulators,
                rounding,
            )
        run(accumulators, 0)
        if low is not None:
            sums = 256 * accumulators.astype(np.int64)
            gradient = low
            run(accumulators, 0)
            sums += accumulators
            acc_exponent += fit_int32(step.share, sums, 2**62, accumulators) - 8
        return self._round_gradient16(step, acc_exponent, accumulators, into)

    def _input_gradient_by_channel(self, step: StepContext, weight: Weight, into: Int8Array) -> int:
        """Write the gradient of a depthwise convolution's input from one with channel units; return its exponent.

        It has channel units itself if its reader takes them, and is rounded at random.
        """
        x = self.inputs[0]
        share = step.share
        assert weight.channel_units is not None
        assert self.output.gradient_units is not None
        accumulators = step.wide(x.array_shape)
        self._plan.input_gradient(
            step.engine,
            self.gradient,
            weight.data.reshape(self._weight_shape),
            accumulators,
            step.workspace,
            0,
            step.algorithm.backward.rounding,
            x.mask,
        )
        own_largest = np.empty(self._sums.shape[1], dtype=np.int32)
        _int8.channel_largest(step.engine, accumulators, None, own_largest)
        largest = share.each_most(own_largest.astype(np.float64))
        unit = weight.channel_units * self.output.gradient_units
        top = float((largest * unit).max())
        if top == 0.0:
            into[...] = 0
            return ZERO_EXPONENT
        exponent = self.output.gradient_exponent + weight.exponent
        own_exponent = exponent_for(top)
        require_exponent(self.node.name, f"{top:.3g} * 2^{exponent}", exponent + own_exponent)
        if x.takes_gradient_units:
            per_step = 127.0 / np.maximum(largest, 1.0)
            x.gradient_units = np.ldexp(unit / per_step, -own_exponent)
        else:
            per_step = np.ldexp(unit, -own_exponent)
        _int8.round_by_channel_at_random(
            step.engine,
            accumulators,
            per_step.astype(np.float32),
            into,
            zlib.crc32(largest.tobytes()),
            x.batch,
            max(share.num_samples, x.batch),
            share.first,
        )
        return exponent + own_exponent
