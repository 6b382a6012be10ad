"""Normalisation with the statistics of a single sample: GroupNorm, InstanceNorm and LayerNorm.

In the mixed form of BatchNorm: statistics and the sums of the gradient are exact integers, the arithmetic on each
statistic is float64, and each element is a sum of int8 values times integers of 21 bits, rounded as any product (F14).
All sums over several statistics are of integers too, so results are the same on every machine and for any shares of
the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array
from socflower.precision.int8.operators import StepContext, Tensor, WideOperator
from socflower.precision.int8.updates import update_vector

Integers = npt.NDArray[np.int64]

_COEFFICIENT_BITS = 21
_OFFSET_BITS = 28
# Two products of int8 and 21 bits, and an offset.
_MOST = 2 * (127 << _COEFFICIENT_BITS) + (1 << _OFFSET_BITS)
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
        """Refuse channels that the groups do not divide."""
        divides = self.groups >= 1 and self.shape[0] % self.groups == 0
        return "" if divides else f"{self.shape[0]} channels in {self.groups} groups"


class SampleNormOperator(WideOperator[SampleNorm]):
    """y = gamma * (x - mean) / sigma + beta, with mean and sigma of a group of channels in one sample."""

    def __init__(self, node: SampleNorm, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        channels, height, width = node.shape
        # (h, w, batch, groups, channels of a group)
        self._grouped = (height, width, output.batch, node.groups, channels // node.groups)
        self._pixel_axes = () if node.per_pixel else (0, 1)
        self._count = math.prod(self._grouped[axis] for axis in (*self._pixel_axes, 4))
        self._mean: DoubleArray
        self._slope: DoubleArray

    def _values(self, array: Int8Array) -> Integers:
        values: Integers = array[..., : self.node.shape[0]].astype(np.int64)
        return values.reshape(self._grouped)

    def _vector(self, step: StepContext, part: str, default: float) -> DoubleArray:
        """Return scale or offset, (groups, channels of a group)."""
        channels = self.node.shape[0]
        name = f"{self.node.name}.{part}"
        vector = np.full(channels, default)
        if part in self.node.vectors:
            vector = step.parameters.vectors[name].data[:channels].astype(np.float64)
        return vector.reshape(self._grouped[3:])

    def forward(self, step: StepContext) -> None:
        """Normalise with the statistics of each sample."""
        x = self.inputs[0]
        values = self._values(x.data)
        mean, variance = self._statistics(values)
        deviation = np.sqrt(variance * x.scale**2 + self.node.eps)
        self._mean = mean
        self._slope = x.scale / deviation
        scale = self._vector(step, "weight", 1.0) * self._slope
        offset = self._vector(step, "bias", 0.0) - scale * mean
        exponent, (int_scale, _) = _agreed_integers(
            step.share, (scale, _COEFFICIENT_BITS), (offset, _OFFSET_BITS)
        )
        # With the rounded scale, so that values that equal the mean become the offset exactly.
        real_offset = np.ldexp(self._vector(step, "bias", 0.0), -exponent) - int_scale * mean
        int_offset = np.rint(real_offset).astype(np.int64)
        made = int_scale * values + int_offset
        self.output.factor = 1.0
        self.output.exponent = self._round_sums(
            step, "forward", exponent, self._flat(made), self.output.data, most=_MOST
        )

    def evaluate(self, step: StepContext) -> None:
        """Normalise with the statistics of each sample, which are exact sums."""
        x = self.inputs[0]
        values = self._values(x.data)
        mean, variance = self._statistics(values)
        by_image = x.by_image.astype(np.float64)[:, None, None]
        normal = (values - mean) * (by_image / np.sqrt(variance * by_image**2 + self.node.eps))
        made = self._vector(step, "weight", 1.0) * normal + self._vector(step, "bias", 0.0)
        self._store_by_image(made.reshape(*self._grouped[:3], -1))

    def _statistics(self, values: Integers) -> tuple[DoubleArray, DoubleArray]:
        """Return mean and variance of each statistic's values, in units of the input."""
        axes = (*self._pixel_axes, 4)
        sums = values.sum(axis=axes, keepdims=True)
        squares = (values * values).sum(axis=axes, keepdims=True)
        count = self._count
        # The numerator is an exact integer.
        return sums / count, (count * squares - sums * sums) / float(count) ** 2

    def _flat(self, grouped: Integers) -> Integers:
        return grouped.reshape(*self._grouped[:3], -1)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute dx = (g - mean(g) - xhat * mean(g * xhat)) / sigma for g = gamma * dy, then update the parameters."""
        dy = self._values(self.gradient)
        values = self._values(self.inputs[0].data)
        # Per channel, over the pixels that share a statistic.
        sum_dy = dy.sum(axis=self._pixel_axes, keepdims=True)
        sum_dy_x = (dy * values).sum(axis=self._pixel_axes, keepdims=True)
        exponent = 0
        if into[0] is not None:
            # With the scale of the forward pass: it is updated below.
            exponent = self._input_gradient(step, into[0], dy, values, sum_dy, sum_dy_x)
        self._update(step, sum_dy, sum_dy_x)
        return [exponent]

    def _input_gradient(
        self,
        step: StepContext,
        into: Int8Array,
        dy: Integers,
        values: Integers,
        sum_dy: Integers,
        sum_dy_x: Integers,
    ) -> int:
        x = self.inputs[0]
        dy_exponent = self.output.gradient_exponent
        gamma_exponent, (gamma,) = _agreed_integers(
            step.share, (self._vector(step, "weight", 1.0), _COEFFICIENT_BITS)
        )
        g_exponent = gamma_exponent + dy_exponent
        sum_g = np.ldexp((gamma * sum_dy).sum(axis=4, keepdims=True).astype(np.float64), g_exponent)
        sum_g_x = np.ldexp(
            (gamma * sum_dy_x).sum(axis=4, keepdims=True).astype(np.float64), g_exponent
        )
        sum_g_xhat = self._slope * (sum_g_x - self._mean * sum_g)
        # 1 / sigma
        gain = self._slope / x.scale
        scale_dy = np.ldexp(gamma * gain, g_exponent)
        scale_x = -gain * self._slope * sum_g_xhat / self._count
        offset = -gain * sum_g / self._count - scale_x * self._mean
        exponent, (int_dy, int_x, int_offset) = _agreed_integers(
            step.share,
            (scale_dy, _COEFFICIENT_BITS),
            (scale_x, _COEFFICIENT_BITS),
            (offset, _OFFSET_BITS),
        )
        made = int_dy * dy + int_x * values + int_offset
        return self._round_sums(
            step, "backward", exponent, self._flat(made), into, most=_MOST, mask=x.mask
        )

    def _update(self, step: StepContext, sum_dy: Integers, sum_dy_x: Integers) -> None:
        """Update scale and offset by exact sums over samples and statistics."""
        node = self.node
        if not node.trained:
            return
        exponent = self.output.gradient_exponent
        of_scale = self._slope * (sum_dy_x - self._mean * sum_dy)
        term_exponent, (terms,) = _agreed_integers(step.share, (of_scale, _TERM_BITS))
        sums = np.stack([terms.sum(axis=(0, 1, 2)), sum_dy.sum(axis=(0, 1, 2))]).reshape(2, -1)
        total = step.share.total(sums)
        gradients = {
            "weight": np.ldexp(total[0], exponent + term_exponent),
            "bias": np.ldexp(total[1], exponent),
        }
        for part in node.trained:
            vector = step.parameters.vectors[f"{node.name}.{part}"]
            gradient = np.zeros_like(vector.data)
            gradient[: node.shape[0]] = gradients[part]
            change = partial(update_vector, step.algorithm, vector, gradient, step.rate)
            step.share.change(change)


def _agreed_integers(
    share: BatchShare, *coefficients: tuple[DoubleArray, int]
) -> tuple[int, list[Integers]]:
    """Return an exponent e, the same for all shares of the batch, and each array as integers of 2^e.

    The integers of an array stay below 2^bits in the whole batch.
    """
    exponents = []
    for array, bits in coefficients:
        largest = share.most(float(np.abs(array).max()))
        if largest:
            exponents.append(math.frexp(largest)[1] - bits)
    exponent = max(exponents, default=0)
    made = [np.rint(np.ldexp(array, -exponent)).astype(np.int64) for array, _ in coefficients]
    return exponent, made
