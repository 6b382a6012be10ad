"""Normalisation with the statistics of a single sample: GroupNorm, InstanceNorm and LayerNorm.

In the mixed form of BatchNorm: statistics and the sums of the gradient are exact integers, the arithmetic on each
statistic is float64, and each element is a sum of int8 values times integers of 21 bits, rounded as any product (F14).
All sums over several statistics are of integers too, so results are the same on every machine and for any shares of
the batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array, Int32Array
from socflower.precision.int8.operators.base import Operator, StepContext, Tensor
from socflower.precision.int8.updates import update_vector

Integers = npt.NDArray[np.int64]
Run = Callable[[Int8Array | None, int], int]
"""What `Operator._round` calls with a destination and a shift."""

_COEFFICIENT_BITS = 21
_OFFSET_BITS = 28
_TERM_BITS = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleNorm(ir.Node):
    """Normalisation of each sample over `groups` of channels, and over all pixels or, if `per_pixel`, over none.

    With a `scale` and an `offset` per channel, where the module has them.
    """

    kind: ClassVar[str] = "sample-norm"
    eps: float
    groups: int = 1
    per_pixel: bool = False
    scale: bool = True
    offset: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        """Scale and offset, if it has them."""
        return self.vectors

    @property
    def vectors(self) -> tuple[str, ...]:
        """Scale and offset, if it has them."""
        return ("weight",) * self.scale + ("bias",) * self.offset

    def check(self) -> str:
        """Refuse channels that the groups do not divide, and several groups in a pixel."""
        divides = self.groups >= 1 and self.shape[0] % self.groups == 0
        if not divides:
            return f"{self.shape[0]} channels in {self.groups} groups"
        return "groups within each pixel" if self.per_pixel and self.groups > 1 else ""


class SampleNormOperator(Operator[SampleNorm]):
    """y = gamma * (x - mean) / sigma + beta, with a mean and a sigma for each statistic of each sample.

    `backward` computes dx = (g - mean(g) - xhat * mean(g * xhat)) / sigma for g = gamma * dy. Arrays of statistics have
    whatever shape the subclass gives them.
    """

    # How many elements share a statistic.
    _count: int
    _mean: DoubleArray
    _slope: DoubleArray

    def _vector(self, step: StepContext, part: str, default: float) -> DoubleArray:
        """Return scale or offset, (channels,)."""
        channels = self.node.shape[0]
        if part not in self.node.vectors:
            return np.full(channels, default)
        name = f"{self.node.name}.{part}"
        return step.parameters.vectors[name].data[:channels].astype(np.float64)

    @abstractmethod
    def _sums(
        self, step: StepContext, a: Int8Array, b: Int8Array, weight: Integers | None
    ) -> tuple[DoubleArray, DoubleArray]:
        """Return for each statistic the exact sums of weight * a and weight * a * b; a weight for each channel."""

    @abstractmethod
    def _affine(self, step: StepContext) -> tuple[int, Run]:
        """Return how gamma * slope * x + (beta - gamma * slope * mean) is rounded, and its exponent."""

    @abstractmethod
    def _affine_gradient(
        self,
        step: StepContext,
        gamma: Integers,
        gain: DoubleArray,
        scale_x: DoubleArray,
        offset: DoubleArray,
    ) -> tuple[int, Run]:
        """Return how gamma * gain * dy + scale_x * x + offset is rounded, and its exponent."""

    @abstractmethod
    def _parameter_gradients(self, step: StepContext) -> tuple[DoubleArray, DoubleArray]:
        """Return the gradients of scale and offset, (channels,) each, of the whole batch."""

    def forward(self, step: StepContext) -> None:
        """Normalise with the statistics of each sample."""
        x = self.inputs[0]
        mean, variance = self._statistics(step)
        self._mean = mean
        self._slope = x.scale / np.sqrt(variance * x.scale**2 + self.node.eps)
        self.output.factor = 1.0
        exponent, run = self._affine(step)
        self.output.exponent = self._round(step, "forward", exponent, run, self.output.data)

    def _statistics(self, step: StepContext) -> tuple[DoubleArray, DoubleArray]:
        """Return mean and variance of each statistic's values, in units of the input."""
        x = self.inputs[0]
        sums, squares = self._sums(step, x.data, x.data, None)
        # The numerator is a whole number.
        return sums / self._count, (self._count * squares - sums * sums) / float(self._count) ** 2

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute the input's gradient with the scale of the forward pass, then update the parameters."""
        exponent = 0
        if into[0] is not None:
            acc_exponent, run = self._input_gradient(step)
            exponent = self._round(step, "backward", acc_exponent, run, into[0])
        if self.node.trained:
            self._update(step)
        return [exponent]

    def _input_gradient(self, step: StepContext) -> tuple[int, Run]:
        x = self.inputs[0]
        gamma_exponent, (gamma,) = _agreed_integers(
            step.share, (self._vector(step, "weight", 1.0), _COEFFICIENT_BITS)
        )
        unit = gamma_exponent + self.output.gradient_exponent
        sums, products = self._sums(step, self.gradient, x.data, gamma)
        sum_g = np.ldexp(sums, unit)
        sum_g_xhat = self._slope * (np.ldexp(products, unit) - self._mean * sum_g)
        # 1 / sigma
        gain = self._slope / x.scale
        scale_x = -gain * self._slope * sum_g_xhat / self._count
        offset = -gain * sum_g / self._count - scale_x * self._mean
        return self._affine_gradient(step, gamma, np.ldexp(gain, unit), scale_x, offset)

    def _update(self, step: StepContext) -> None:
        node = self.node
        of_scale, of_offset = self._parameter_gradients(step)
        gradients = {"weight": of_scale, "bias": of_offset}
        for part in node.trained:
            vector = step.parameters.vectors[f"{node.name}.{part}"]
            gradient = np.zeros_like(vector.data)
            gradient[: node.shape[0]] = gradients[part]
            change = partial(update_vector, step.algorithm, vector, gradient, step.rate)
            step.share.change(change)

    def _total_gradients(
        self, step: StepContext, term_exponent: int, terms: Integers, sum_dy: Integers
    ) -> tuple[DoubleArray, DoubleArray]:
        """Return the gradients of scale and offset from this share's sums, (channels,) each."""
        exponent = self.output.gradient_exponent
        total = step.share.total(np.stack([terms, sum_dy]))
        return np.ldexp(total[0], exponent + term_exponent), np.ldexp(total[1], exponent)


class ImageNormOperator(SampleNormOperator):
    """Statistics of a group of channels over all pixels, (batch, groups, 1): GroupNorm and InstanceNorm.

    The batch lies inside a pixel, so the channels of all images are those of one wide row to the kernels.
    """

    def __init__(self, node: SampleNorm, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        channels, height, width = node.shape
        self._grouped = (output.batch, node.groups, channels // node.groups)
        self._count = height * width * self._grouped[2]
        self._wide = (output.batch, output.array_shape[3])

    def _by_channel(
        self, step: StepContext, a: Int8Array, b: Int8Array
    ) -> tuple[Integers, Integers]:
        """Return the sums over the pixels of a and of a * b, (batch, groups, channels of a group)."""
        sums = np.empty((2, *self._wide), dtype=np.int64)
        _int8.channel_sums(step.engine, a, b, None, sums[0].reshape(-1), sums[1].reshape(-1))
        own = sums[..., : self.node.shape[0]].reshape(2, *self._grouped)
        return own[0], own[1]

    def _sums(
        self, step: StepContext, a: Int8Array, b: Int8Array, weight: Integers | None
    ) -> tuple[DoubleArray, DoubleArray]:
        weights = 1 if weight is None else weight.reshape(self._grouped[1:])
        plain, products = self._by_channel(step, a, b)
        return tuple(
            (weights * sums).sum(axis=2, keepdims=True).astype(np.float64)
            for sums in (plain, products)
        )

    def _coefficients(self, integers: Integers) -> Int32Array:
        """Return (batch, groups, channels of a group or 1) as one number for each channel of the wide row."""
        wide = np.zeros(self._wide, dtype=np.int32)
        every = np.broadcast_to(integers, self._grouped)
        wide[:, : self.node.shape[0]] = every.reshape(self._grouped[0], -1)
        return wide.reshape(-1)

    def _affine(self, step: StepContext) -> tuple[int, Run]:
        gamma = self._vector(step, "weight", 1.0).reshape(self._grouped[1:])
        beta = self._vector(step, "bias", 0.0).reshape(self._grouped[1:])
        scale = gamma * self._slope
        exponent, (int_scale, _) = _agreed_integers(
            step.share, (scale, _COEFFICIENT_BITS), (beta - scale * self._mean, _OFFSET_BITS)
        )
        # With the rounded scale, so that values that equal the mean become the offset exactly.
        real_offset = np.ldexp(beta, -exponent) - int_scale * self._mean
        most = float(1 << _OFFSET_BITS)
        int_offset = np.rint(np.clip(real_offset, -most, most)).astype(np.int64)
        operands = (step.engine, self.inputs[0].data)
        coefficients = (self._coefficients(int_scale), self._coefficients(int_offset))
        rounding = step.algorithm.forward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.affine(*operands, *coefficients, out, shift, rounding)

        return exponent, run

    def _affine_gradient(
        self,
        step: StepContext,
        gamma: Integers,
        gain: DoubleArray,
        scale_x: DoubleArray,
        offset: DoubleArray,
    ) -> tuple[int, Run]:
        x = self.inputs[0]
        exponent, integers = _agreed_integers(
            step.share,
            (gamma.reshape(self._grouped[1:]) * gain, _COEFFICIENT_BITS),
            (scale_x, _COEFFICIENT_BITS),
            (offset, _OFFSET_BITS),
        )
        int_dy, int_x, int_offset = map(self._coefficients, integers)
        operands = (step.engine, self.gradient, x.data, None, int_dy, int_x, int_offset)
        rounding = step.algorithm.backward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.affine_gradient(*operands, out, shift, rounding, mask=x.mask)

        return exponent, run

    def _parameter_gradients(self, step: StepContext) -> tuple[DoubleArray, DoubleArray]:
        sum_dy, sum_dy_x = self._by_channel(step, self.gradient, self.inputs[0].data)
        of_scale = self._slope * (sum_dy_x - self._mean * sum_dy)
        exponent, (terms,) = _agreed_integers(step.share, (of_scale, _TERM_BITS))
        channels = self.node.shape[0]
        own = (terms.sum(axis=0).reshape(channels), sum_dy.sum(axis=0).reshape(channels))
        return self._total_gradients(step, exponent, *own)

    def evaluate(self, step: StepContext) -> None:
        """Normalise with the statistics of each sample, which are exact sums."""
        x = self.inputs[0]
        mean, variance = self._statistics(step)
        by_image = x.by_image.astype(np.float64)[:, None, None]
        slope = by_image / np.sqrt(variance * by_image**2 + self.node.eps)
        gamma = self._vector(step, "weight", 1.0).reshape(self._grouped[1:])
        beta = self._vector(step, "bias", 0.0).reshape(self._grouped[1:])
        values = x.data[..., : self.node.shape[0]].reshape(*x.data.shape[:2], *self._grouped)
        made = gamma * ((values - mean) * slope) + beta
        self._store_by_image(step, made.reshape(*x.data.shape[:3], -1))


class PixelNormOperator(SampleNormOperator):
    """Statistics of all channels of each pixel, (pixels * batch,): the usual LayerNorm.

    Bounds of products of a channel's and a pixel's number are products of bounds, so that no pass over all elements is
    needed to find the exponents.
    """

    def __init__(self, node: SampleNorm, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        height, width, batch, stride = output.array_shape
        self._rows, self._stride, self._count = height * width * batch, stride, node.shape[0]
        self._counted = self._padded(np.ones(node.shape[0]))

    def _padded(self, by_channel: npt.NDArray[np.number]) -> DoubleArray:
        """Return a number for each channel of the stride, 0 for those of padding."""
        padded = np.zeros(self._stride)
        padded[: len(by_channel)] = by_channel
        return padded

    def _sums(
        self, step: StepContext, a: Int8Array, b: Int8Array, weight: Integers | None
    ) -> tuple[DoubleArray, DoubleArray]:
        weights = self._counted if weight is None else self._padded(weight)
        sums = np.empty((2, self._rows))
        _int8.row_sums(step.engine, a, b, weights, sums[0], sums[1])
        return sums[0], sums[1]

    def _affine(self, step: StepContext) -> tuple[int, Run]:
        share = step.share
        gamma = self._vector(step, "weight", 1.0)
        beta = self._vector(step, "bias", 0.0)
        slope, most_slope = _bounded(share, self._slope)
        mean, most_mean = _bounded(share, self._mean)
        most_scale = float(np.abs(gamma).max()) * most_slope
        most_offset = float(np.abs(beta).max()) + most_scale * most_mean
        exponent = _exponent_for((most_scale, _COEFFICIENT_BITS), (most_offset, _OFFSET_BITS))
        operands = (
            step.engine,
            self.inputs[0].data,
            self._padded(gamma),
            self._padded(np.ldexp(beta, -exponent)),
            np.ldexp(slope, -exponent),
            mean,
        )
        rounding = step.algorithm.forward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.row_affine(*operands, out, shift, rounding)

        return exponent, run

    def _affine_gradient(
        self,
        step: StepContext,
        gamma: Integers,
        gain: DoubleArray,
        scale_x: DoubleArray,
        offset: DoubleArray,
    ) -> tuple[int, Run]:
        x = self.inputs[0]
        share = step.share
        gain, most_gain = _bounded(share, gain)
        scale_x, most_scale_x = _bounded(share, scale_x)
        offset, most_offset = _bounded(share, offset)
        exponent = _exponent_for(
            (float(np.abs(gamma).max()) * most_gain, _COEFFICIENT_BITS),
            (most_scale_x, _COEFFICIENT_BITS),
            (most_offset, _OFFSET_BITS),
        )
        operands = (
            step.engine,
            self.gradient,
            x.data,
            self._padded(gamma),
            self._counted,
            np.ldexp(gain, -exponent),
            np.rint(np.ldexp(scale_x, -exponent)),
            np.rint(np.ldexp(offset, -exponent)),
        )
        rounding = step.algorithm.backward.rounding

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.row_affine_gradient(*operands, out, shift, rounding, x.mask)

        return exponent, run

    def _parameter_gradients(self, step: StepContext) -> tuple[DoubleArray, DoubleArray]:
        share = step.share
        slope, most_slope = _bounded(share, self._slope)
        mean, most_mean = _bounded(share, self._mean)
        exponent = _exponent_for((most_slope * 127.0 * (127.0 + most_mean), _TERM_BITS))
        sums = np.empty((2, self._stride), dtype=np.int64)
        operands = (self.gradient, self.inputs[0].data, np.ldexp(slope, -exponent), mean)
        _int8.row_scale_gradient(step.engine, *operands, sums[0], sums[1])
        own = sums[:, : self.node.shape[0]]
        return self._total_gradients(step, exponent, own[0], own[1])

    def evaluate(self, step: StepContext) -> None:
        """Normalise with the statistics of each pixel, which are exact sums."""
        x = self.inputs[0]
        pixels = x.data.shape[:3]
        mean, variance = (part.reshape(pixels) for part in self._statistics(step))
        by_image = x.by_image.astype(np.float64)
        slope = by_image / np.sqrt(variance * by_image**2 + self.node.eps)
        normal = (x.data[..., : self.node.shape[0]] - mean[..., None]) * slope[..., None]
        gamma = self._vector(step, "weight", 1.0)
        self._store_by_image(step, gamma * normal + self._vector(step, "bias", 0.0))


def sample_norm_operator(
    node: SampleNorm, inputs: Sequence[Tensor], output: Tensor
) -> SampleNormOperator:
    """Return the operator of a node."""
    kind = PixelNormOperator if node.per_pixel else ImageNormOperator
    return kind(node, inputs, output)


def _bounded(share: BatchShare, array: DoubleArray) -> tuple[DoubleArray, float]:
    """Return an array and the largest magnitude in the whole batch.

    A share without samples computes with values that no bound counts; they are clipped, since nothing reads its
    results.
    """
    most = share.most(float(np.abs(array).max()))
    return np.clip(array, -most, most), most


def _exponent_for(*bounds: tuple[float, int]) -> int:
    """Return the smallest exponent at which each magnitude of a pair (magnitude, bits) fits so many bits."""
    found = [math.frexp(largest)[1] - bits for largest, bits in bounds if largest]
    return max(found, default=0)


def _agreed_integers(
    share: BatchShare, *coefficients: tuple[DoubleArray, int]
) -> tuple[int, list[Integers]]:
    """Return an exponent e, the same for all shares of the batch, and each array as integers of 2^e.

    The integers of an array stay below 2^bits in the whole batch.
    """
    bounded = [(*_bounded(share, array), bits) for array, bits in coefficients]
    exponent = _exponent_for(*((most, bits) for _, most, bits in bounded))
    made = [np.rint(np.ldexp(array, -exponent)).astype(np.int64) for array, _, _ in bounded]
    return exponent, made
