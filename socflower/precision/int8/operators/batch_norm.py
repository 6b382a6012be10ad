"""BatchNorm in mixed form."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
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
from socflower.precision.int8.updates import update_vector


class BatchNormOperator(Operator[ir.BatchNorm]):
    """BatchNorm in mixed form: exact integer sums, float64 per channel, integer per element.

    Forward and input gradient are, element by element, sums of int8 values times per-channel integers of 21 bits,
    so they round like any product. The statistics are exact sums; the per-channel arithmetic on them is IEEE and the
    same on every machine. Under real scales the forward pass is instead float32 per element, on the accumulators of
    the convolution; statistics and backward pass read the int8 that they were rounded to.
    """

    def __init__(self, node: ir.BatchNorm, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        self._sums = np.zeros((2, output.array_shape[3]), dtype=np.int64)
        # The mean of the batch in units of 2^exponent, and d(normalised) / d(x.data).
        self._mean: DoubleArray
        self._slope: DoubleArray

    def forward(self, step: StepContext) -> None:
        """Normalise with the statistics of the batch."""
        x = self.inputs[0]
        node = self.node
        vectors = step.parameters.vectors
        mean, variance = self._batch_statistics(step)
        deviation = np.sqrt(variance * x.scale**2 + node.eps)
        slope: DoubleArray = x.scale / deviation
        self._mean = mean
        self._slope = slope
        scale = vectors[f"{node.name}.weight"].data * slope
        offset = vectors[f"{node.name}.bias"].data - scale * mean
        if x.accumulators is not None:
            self._from_accumulators(step, x.accumulators, scale, offset)
            x.accumulators = None
            return
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
        self._round_by_image(
            step,
            values,
            x.by_image,
            gain.astype(np.float32),
            offset.astype(np.float32),
            relu=self.node.relu,
        )

    def _from_accumulators(
        self,
        step: StepContext,
        accumulators: Int32Array,
        scale: DoubleArray,
        offset: DoubleArray,
    ) -> None:
        """Normalise accumulators; `scale` and `offset` are those of the int8 that they were rounded to."""
        x = self.inputs[0]
        relu = self.node.relu
        # An accumulator is within half a quantum of its int8, so the ends of a channel bound the results.
        by_pixel = x.data.reshape(-1, x.batch * len(scale))
        highest = by_pixel.max(axis=0).reshape(x.batch, -1).max(axis=0) + 0.5
        lowest = by_pixel.min(axis=0).reshape(x.batch, -1).min(axis=0) - 0.5
        ends = np.array([scale * highest + offset, scale * lowest + offset])
        own_largest = float((np.maximum(ends, 0.0) if relu else np.abs(ends)).max())
        if not self._set_real_scale(step.share.most(own_largest)):
            return
        of_accumulator = (scale * (x.accumulator_scale / x.scale)).astype(np.float32)
        self._affine_real(step, accumulators, of_accumulator, offset.astype(np.float32), relu=relu)

    def _batch_statistics(self, step: StepContext) -> tuple[DoubleArray, DoubleArray]:
        """Return mean and variance of the batch, in units of the input; update the running statistics."""
        x = self.inputs[0]
        rows = self._rows(step)
        _int8.channel_sums(step.engine, x.data, x.data, None, self._sums[0], self._sums[1])
        sums = step.share.total(self._sums)
        mean = sums[0] / rows
        variance = np.maximum(sums[1] / rows - mean * mean, 0.0)
        if not step.replay:
            real_mean = mean * x.scale
            real_variance = variance * x.scale**2
            step.share.change(lambda: self._track(step, rows, real_mean, real_variance))
        return mean, variance

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
        dy = self.gradient
        rows = self._rows(step)
        gamma = step.parameters.vectors[f"{self.node.name}.weight"].data
        # gamma / sigma
        gain = gamma * (self._slope / x.scale)
        scale_dy = np.ldexp(gain, self.output.gradient_exponent)
        scale_x = -gain * self._slope * sum_dy_xhat / rows
        offset = -gain * sum_dy / rows - scale_x * self._mean
        acc_exponent, integers = scaled_integers(21, (scale_dy, 0), (scale_x, 0), (offset, 7))
        int_dy, int_x, int_offset = integers
        rounding = step.algorithm.backward.rounding
        operands = (step.engine, dy, x.data, gate, int_dy, int_x, int_offset)

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.affine_gradient(*operands, out, shift, rounding)

        def run_dithered(out: Int8Array | None, shift: int) -> int:
            if out is None:
                return run(out, shift)
            share = step.share
            return _int8.affine_gradient_at_random(
                *operands, out, shift, seed, x.batch, max(share.num_samples, x.batch), share.first
            )

        dithered = step.algorithm.backward.dithered
        return self._round(step, "backward", acc_exponent, run_dithered if dithered else run, into)
