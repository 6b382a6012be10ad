"""BatchNorm in mixed form."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import (
    DoubleArray,
    Int8Array,
    Int32Array,
    scaled_integers,
)
from socflower.precision.int8.operators.base import (
    Operator,
    StepContext,
    Tensor,
)
from socflower.precision.int8.requantisation import ZERO_EXPONENT, require_exponent
from socflower.precision.int8.updates import update_vector


class BatchNormOperator(Operator[ir.BatchNorm]):
    """BatchNorm in mixed form: exact integer sums, float64 per channel, integer per element.

    Forward and input gradient are, element by element, sums of int8 values times per-channel integers of 21 bits,
    so they round like any product. The statistics are exact sums; the per-channel arithmetic on them is IEEE and the
    same on every machine. Under real scales statistics and forward pass read the accumulators of the convolution
    instead, and the forward pass is float32 per element. The backward pass reads the normalised values as int8, each
    channel in its own unit: a channel of small deviation or of a large mean is as precise as any other.
    """

    def __init__(self, node: ir.BatchNorm, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        self._sums = np.zeros((2, output.array_shape[3]), dtype=np.int64)
        # What the backward pass needs of each channel: the mean of x.data, d(normalised) / d(x.data), and 1 / sigma.
        self._mean: DoubleArray
        self._slope: DoubleArray
        self._inverse_deviation: DoubleArray

    def forward(self, step: StepContext) -> None:
        """Normalise with the statistics of the batch."""
        x = self.inputs[0]
        node = self.node
        vectors = step.parameters.vectors
        if x.accumulators is not None:
            self._from_accumulators(step, x.accumulators)
            x.accumulators = None
            return
        mean, variance = self._batch_statistics(step)
        deviation = np.sqrt(variance * x.scale**2 + node.eps)
        slope: DoubleArray = x.scale / deviation
        self._mean = mean
        self._slope = slope
        self._inverse_deviation = 1.0 / deviation
        scale = vectors[f"{node.name}.weight"].data * slope
        offset = vectors[f"{node.name}.bias"].data - scale * mean
        self.output.factor = 1.0
        acc_exponent, (int_scale, int_offset) = scaled_integers(21, (scale, 0), (offset, 7))
        rounding = step.algorithm.forward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.affine(
                step.engine, x.data, int_scale, int_offset, out, shift, rounding, node.relu
            )

        self.output.exponent = self._round(step, "forward", acc_exponent, run, self.output.data)

    def evaluate(self, step: StepContext) -> None:
        """Normalise with the running statistics."""
        x = self.inputs[0]
        vectors = step.parameters.vectors
        weight, bias, mean, variance = (
            vectors[f"{self.node.name}.{part}"].data.astype(np.float64)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        gain = weight / np.sqrt(variance + self.node.eps)
        values: Int8Array | Int32Array = x.data
        if x.accumulators is not None:
            assert x.bias is not None
            values = x.accumulators
            mean = mean - x.bias
            x.accumulators = None
        offset = bias - gain * mean
        if x.channel_units is not None:
            gain = gain * x.channel_units
        self._round_by_image(
            step,
            values,
            x.by_image,
            gain.astype(np.float32),
            offset.astype(np.float32),
            relu=self.node.relu,
        )

    def _from_accumulators(self, step: StepContext, accumulators: Int32Array) -> None:
        """Normalise accumulators, and store the normalised values in the input's data for the backward pass."""
        x = self.inputs[0]
        relu = self.node.relu
        mean, variance, least, most = self._accumulator_statistics(step, accumulators)
        unit = np.full(self._sums.shape[1], x.accumulator_scale)
        if x.channel_units is not None:
            unit *= x.channel_units
        self._update_running(step, mean * unit, variance * unit**2)
        inverse_deviation = 1.0 / np.sqrt(variance * unit**2 + self.node.eps)
        # Normalised values are slope * (accumulator - mean).
        slope = unit * inverse_deviation
        # A channel that is constant has no unit; its values are 0 in any.
        per_step = 127.0 / np.maximum(np.maximum(most - mean, mean - least), 0.5)
        own = per_step.astype(np.float32), (-mean * per_step).astype(np.float32)
        self._mean = np.zeros_like(mean)
        self._slope = slope / per_step
        self._inverse_deviation = inverse_deviation
        vectors = step.parameters.vectors
        scale = vectors[f"{self.node.name}.weight"].data * slope
        offset = vectors[f"{self.node.name}.bias"].data - scale * mean
        ends = np.array([scale * most + offset, scale * least + offset])
        largest = float((np.maximum(ends, 0.0) if relu else np.abs(ends)).max())
        if self._set_real_scale(step, largest):
            made = scale.astype(np.float32), offset.astype(np.float32)
            inverse = 1.0 / self.output.scale
            _int8.normalise(
                step.engine, accumulators, *own, *made, inverse, x.data, self.output.data, relu
            )
        else:
            self._affine_real(step, accumulators, *own, x.data, 1.0, relu=False)

    def _accumulator_statistics(
        self, step: StepContext, accumulators: Int32Array
    ) -> tuple[DoubleArray, DoubleArray, DoubleArray, DoubleArray]:
        """Return mean, variance, least and largest accumulator of each channel of the batch.

        Mean and variance are of accumulators that have lost low bits where sums of squares could leave 2^53.
        """
        share = step.share
        rows = self._rows(step)
        bits = min(20, (53 - rows.bit_length()) // 2)
        largest = int(share.most(self.inputs[0].largest_accumulator))
        shift = max(0, largest.bit_length() - bits)
        ends = np.empty((2, self._sums.shape[1]), dtype=np.int32)
        _int8.channel_moments(step.engine, accumulators, shift, *self._sums, *ends)
        sums = share.total(self._sums)
        mean = sums[0] / rows
        variance = np.maximum(sums[1] / rows - mean * mean, 0.0)
        # The largest of the negatives is the least.
        ends_of_batch = share.each_most(np.array([-ends[0].astype(np.float64), ends[1]]))
        unit = math.ldexp(1.0, shift)
        return mean * unit, variance * unit**2, -ends_of_batch[0], ends_of_batch[1]

    def _batch_statistics(self, step: StepContext) -> tuple[DoubleArray, DoubleArray]:
        """Return mean and variance of the batch, in units of the input; update the running statistics."""
        x = self.inputs[0]
        rows = self._rows(step)
        _int8.channel_sums(step.engine, x.data, x.data, None, self._sums[0], self._sums[1])
        sums = step.share.total(self._sums)
        mean = sums[0] / rows
        variance = np.maximum(sums[1] / rows - mean * mean, 0.0)
        self._update_running(step, mean * x.scale, variance * x.scale**2)
        return mean, variance

    def _update_running(self, step: StepContext, mean: DoubleArray, variance: DoubleArray) -> None:
        """Update the running statistics with real ones of the batch, once for each batch."""
        if not step.replay:
            rows = self._rows(step)
            step.share.change(lambda: self._track(step, rows, mean, variance))

    def _rows(self, step: StepContext) -> int:
        """Return the number of values of a channel in the whole batch."""
        height, width, _, _ = self.output.array_shape
        return height * width * step.share.num_samples

    def _track(
        self,
        step: StepContext,
        rows: int,
        mean: DoubleArray,
        variance: DoubleArray,
    ) -> None:
        keep = 1.0 - self.node.momentum
        unbiased = variance * (rows / max(rows - 1, 1))
        for part, new in (("running_mean", mean), ("running_var", unbiased)):
            running = step.parameters.vectors[f"{self.node.name}.{part}"]
            running.data = (keep * running.data + self.node.momentum * new).astype(np.float32)
            if not np.isfinite(running.data).all():
                name = f"{self.node.name}.{part}"
                raise TrainingFailed(f"{name}: has left float32; lower the learning rate")
        step.parameters.num_batches_tracked[self.node.name] += 1

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute dx = gamma/sigma * (dy - mean(dy) - xhat * mean(dy * xhat)), then update scale and offset."""
        x = self.inputs[0]
        node = self.node
        dy = self.gradient
        dy_exponent = self.output.gradient_exponent
        gate = self.output.data if node.relu else None
        _int8.channel_sums(step.engine, dy, x.data, gate, self._sums[0], self._sums[1])
        sums = step.share.total(self._sums)
        if self.output.gradient_units is not None:
            sums *= self.output.gradient_units
        sum_dy = np.ldexp(sums[0], dy_exponent)
        sum_dy_x = np.ldexp(sums[1], dy_exponent)
        sum_dy_xhat = self._slope * (sum_dy_x - self._mean * sum_dy)
        exponents = [0]
        if into[0] is not None:
            # With the scale of the forward pass: it is updated below.
            seed = zlib.crc32(sums.tobytes())
            exponents[0] = self._input_gradient(step, into[0], gate, sum_dy, sum_dy_xhat, seed)
        for part, gradient in (("weight", sum_dy_xhat), ("bias", sum_dy)):
            if part in node.trained:
                vector = step.parameters.vectors[f"{node.name}.{part}"]
                settings = (gradient.astype(np.float32), step.rate)
                step.share.change(partial(update_vector, step.algorithm, vector, *settings))
        return exponents

    def _input_gradient(
        self,
        step: StepContext,
        into: Int8Array,
        gate: Int8Array | None,
        sum_dy: DoubleArray,
        sum_dy_xhat: DoubleArray,
        seed: int,
    ) -> int:
        """Write the gradient of the input and return its exponent; `seed` is that of dithering."""
        x = self.inputs[0]
        rows = self._rows(step)
        gamma = step.parameters.vectors[f"{self.node.name}.weight"].data
        # gamma / sigma
        gain = gamma * self._inverse_deviation
        scale_dy = np.ldexp(gain, self.output.gradient_exponent)
        if self.output.gradient_units is not None:
            scale_dy *= self.output.gradient_units
        scale_x = -gain * self._slope * sum_dy_xhat / rows
        offset = -gain * sum_dy / rows - scale_x * self._mean
        coefficients = scale_dy, scale_x, offset
        x.gradient_units = None
        if x.channel_units is not None:
            return self._input_gradient_by_channel(step, into, gate, coefficients, seed)
        if step.may_widen(x):
            acc_exponent, sums = self._gradient_sums(gate, coefficients)
            return self._round_gradient16(step, acc_exponent, sums, into)
        acc_exponent, run = self._rounded_gradient(step, gate, coefficients, seed)
        return self._round(step, "backward", acc_exponent, run, into)

    def _gradient_sums(
        self, gate: Int8Array | None, coefficients: tuple[DoubleArray, DoubleArray, DoubleArray]
    ) -> tuple[int, Int32Array]:
        """Return the exponent of scale_dy * dy + scale_x * x + offset, and these integers."""
        scale_dy, scale_x, offset = coefficients
        exponent, integers = scaled_integers(21, (scale_dy, 0), (scale_x, 0), (offset, 7))
        int_dy, int_x, int_offset = integers
        dy = self.gradient if gate is None else self.gradient * (gate > 0)
        sums: Int32Array = int_dy * dy + int_x * self.inputs[0].data
        sums += int_offset
        return exponent, sums

    def _rounded_gradient(
        self,
        step: StepContext,
        gate: Int8Array | None,
        coefficients: tuple[DoubleArray, DoubleArray, DoubleArray],
        seed: int,
    ) -> tuple[int, Callable[[Int8Array | None, int], int]]:
        """Return the exponent of scale_dy * dy + scale_x * x + offset, and how it is rounded."""
        x = self.inputs[0]
        scale_dy, scale_x, offset = coefficients
        acc_exponent, integers = scaled_integers(21, (scale_dy, 0), (scale_x, 0), (offset, 7))
        int_dy, int_x, int_offset = integers
        operands = (step.engine, self.gradient, x.data, gate, int_dy, int_x, int_offset)
        rounding = step.algorithm.backward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.affine_gradient(*operands, out, shift, rounding)

        def run_dithered(out: Int8Array | None, shift: int) -> int:
            if out is None:
                return run(out, shift)
            share = step.share
            return _int8.affine_gradient_at_random(
                *operands, out, shift, seed, x.batch, max(share.num_samples, x.batch), share.first
            )

        return acc_exponent, run_dithered if step.algorithm.backward.dithered else run

    def _input_gradient_by_channel(
        self,
        step: StepContext,
        into: Int8Array,
        gate: Int8Array | None,
        coefficients: tuple[DoubleArray, DoubleArray, DoubleArray],
        seed: int,
    ) -> int:
        """Write the gradient of a depthwise convolution's result, each channel in a unit that its bound fits."""
        x = self.inputs[0]
        scale_dy, scale_x, offset = coefficients
        own_largest = np.empty(len(offset), dtype=np.int32)
        _int8.channel_largest(step.engine, self.gradient, gate, own_largest)
        largest = step.share.each_most(own_largest.astype(np.float64))
        # The sums of the batch are small beside a single element, so the bound is close.
        bound = np.abs(scale_dy) * largest + np.abs(scale_x) * 127.0 + np.abs(offset)
        top = float(bound.max())
        if top == 0.0:
            into[...] = 0
            return ZERO_EXPONENT
        units = np.maximum(bound, top * 2.0**-20) / 127.0
        # The coefficient of a channel of zeros has no bound.
        in_units = scale_dy * (largest > 0.0) / units, scale_x / units, offset / units
        acc_exponent, run = self._rounded_gradient(step, gate, in_units, seed)
        run(into, -acc_exponent)
        exponent = math.frexp(top / 127.0)[1]
        require_exponent(self.node.name, f"{top:.3g}", exponent)
        x.gradient_units = np.ldexp(units, -exponent)
        return exponent
