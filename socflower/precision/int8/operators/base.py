"""The operators of a graph, bound to their buffers for one batch size: forward, backward and update.

`backward` reads the gradient of the operator's output and writes the gradients of its inputs. The gradient of a ReLU's
output is masked: the operator that reads the output applies the mask while it rounds, at no extra cost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.precision.algorithm import TrainingAlgorithm
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import (
    DoubleArray,
    FloatArray,
    Int8Array,
    Int32Array,
    channel_stride,
    to_real,
)
from socflower.precision.int8.parameters import Parameters, Weight
from socflower.precision.int8.requantisation import (
    ZERO_EXPONENT,
    ScaleTracker,
    ScaleTrackers,
    fit_int32,
    require_exponent,
    round_elementwise,
    round_gradient16,
)
from socflower.precision.int8.updates import Rate, update_vector, update_weight


@dataclass(slots=True)
class Tensor:
    """An int8 tensor of a step, (h, w, batch, channel stride), and its gradient once it is computed.

    A value is `factor` * 2^`exponent` times its int8; a gradient has an exponent only. The values of `activations` are
    all in 0..127. The only reader of a `masked` tensor sets the gradient of elements that are not positive to 0. A
    tensor is `normalised` if a BatchNorm reads it next, and nothing else does. Under real scales it then has
    `accumulators`, which are valid until the next operator has run, in place of data and scale: in training the
    BatchNorm writes the normalised values to `data`, for its backward pass.

    Around a depthwise convolution (`scaled_by_channel`) accumulators and gradients have `channel_units` and
    `gradient_units`, by which a channel's values are multiplied. A gradient gets them if its reader is a BatchNorm that
    only such a convolution follows (`takes_gradient_units`), or such a convolution itself.

    The gradient of one that `reads_int16` may be int16: `gradient` + `gradient_low` / 256.

    In evaluation a value is `by_image` times its int8, one float32 for each image, so that no image depends on the
    others; accumulators are in the same units, without `bias`. The last value of a pass has `exact` real values
    (h, w, batch, channel stride) if its operator knows them.
    """

    shape: ir.Shape
    batch: int
    data: Int8Array = field(init=False)
    exponent: int = 0
    factor: float = 1.0
    activations: bool = False
    masked: bool = False
    normalised: bool = False
    accumulators: Int32Array | None = None
    accumulator_scale: float = 1.0
    largest_accumulator: int = 0
    channel_units: FloatArray | None = None
    takes_gradient_units: bool = False
    gradient_units: DoubleArray | None = None
    by_image: FloatArray = field(init=False)
    bias: FloatArray | None = None
    is_result: bool = False
    reads_int16: bool = False
    exact: FloatArray | None = None
    gradient: Int8Array | None = None
    gradient_exponent: int = 0
    gradient_low: Int8Array | None = None
    # Of the input only, (batch, channels, h, w): what an embedding reads.
    images: FloatArray | None = None

    @property
    def array_shape(self) -> tuple[int, int, int, int]:
        """Shape of `data` and `gradient`."""
        channels, height, width = self.shape
        return height, width, self.batch, channel_stride(channels)

    @property
    def scale(self) -> float:
        """The real value of 1."""
        return math.ldexp(self.factor, self.exponent)

    def real(self) -> FloatArray:
        """Return (batch, c, h, w) real values."""
        real = to_real(self.data, self.exponent, self.shape)
        return real if self.factor == 1.0 else real * np.float32(self.factor)

    def evaluated(self) -> FloatArray:
        """Return (batch, c, h, w) real values of an evaluation pass."""
        real = self.exact
        if real is None:
            real = self.data * self.by_image[:, None]
        return np.ascontiguousarray(real[..., : self.shape[0]].transpose(2, 3, 0, 1))

    def each_image(self) -> DoubleArray:
        """Return (h, w, batch, channels) real values of an evaluation pass, in float64."""
        return self.data[..., : self.shape[0]] * self.by_image.astype(np.float64)[:, None]

    @property
    def mask(self) -> Int8Array | None:
        """The array with which a reader masks the gradient, or None."""
        return self.data if self.masked else None


@dataclass(kw_only=True, slots=True)
class StepContext:
    """Settings and shared buffers of the current step.

    `share` is the part of the batch that the operators compute, and `largest_input` the largest magnitude in the whole
    batch. `accumulators`, a flat buffer, is as large as the largest product or weight gradient. The trackers count only
    `differentiated` passes, which a backward pass follows. A `replay` is of a batch that has updated the running
    statistics already. `seed` is that of the random numbers in the step. `timings`, if given, collects seconds per
    operator. `reached` collects the operators whose weights have had a gradient other than zero, once all shares of the
    batch are summed.
    """

    engine: _int8.Engine
    algorithm: TrainingAlgorithm
    parameters: Parameters
    trackers: ScaleTrackers
    share: BatchShare
    largest_input: float
    workspace: npt.NDArray[np.uint8]
    accumulators: Int32Array
    differentiated: bool = True
    replay: bool = False
    learning_rate: float = 0.0
    progress: float = 0.0
    seed: int = 0
    timings: dict[str, float] | None = None
    reached: set[str] = field(default_factory=set)

    def tracker(self, name: str, role: str) -> ScaleTracker | None:
        """Return the tracker of a tensor's exponent; None in a pass that always searches the maximum."""
        if not self.differentiated:
            return None
        tracker = self.trackers.tracker(name, role)
        is_forward = role.startswith("forward")
        tracker.reach = (self.algorithm.forward if is_forward else self.algorithm.backward).reach
        return tracker

    def wide(self, shape: Sequence[int]) -> Int32Array:
        """Return accumulators of that shape."""
        return self.accumulators[: math.prod(shape)].reshape(shape)

    def may_widen(self, tensor: Tensor) -> bool:
        """Return whether the gradient of a tensor may be int16."""
        return tensor.reads_int16 and self.algorithm.backward.wide_above is not None

    @property
    def has_real_scales(self) -> bool:
        """Whether results of BatchNorm and additions have real scales."""
        return self.algorithm.forward.scales == "real"

    @property
    def rate(self) -> Rate:
        """Learning rate, and the samples over which gradients are summed."""
        return Rate(self.learning_rate, self.share.num_samples)


NodeT = TypeVar("NodeT", bound=ir.Node)


class Operator(ABC, Generic[NodeT]):
    """An operator of one batch size: the tensors it reads and the one that it computes."""

    # What it needs of `StepContext.workspace` and of `StepContext.accumulators`.
    workspace_bytes = 0
    accumulator_size = 0

    def __init__(self, node: NodeT, inputs: Sequence[Tensor], output: Tensor) -> None:
        self.node, self.inputs, self.output = node, tuple(inputs), output

    @property
    def gradient(self) -> Int8Array:
        """The gradient of its output, which `backward` reads."""
        assert self.output.gradient is not None
        return self.output.gradient

    @abstractmethod
    def forward(self, step: StepContext) -> None:
        """Compute the output's data and scale in training."""

    @abstractmethod
    def evaluate(self, step: StepContext) -> None:
        """Compute the output's data and scales in evaluation, each image by itself; the weights are int8 as well."""

    @abstractmethod
    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Write the gradient of each input into its array (None: not needed) and return their exponents."""

    def _round(
        self,
        step: StepContext,
        role: str,
        acc_exponent: int,
        run: Callable[[Int8Array | None, int], int],
        out: Int8Array,
    ) -> int:
        """Store the result of `run(out, shift)`, rounded to int8, and return its exponent (F14)."""
        name = self.node.name
        return round_elementwise(name, step.share, step.tracker(name, role), acc_exponent, run, out)

    def _round_gradient16(
        self, step: StepContext, acc_exponent: int, accumulators: Int32Array, into: Int8Array
    ) -> int:
        """Store the gradient of the input, as int16 if it may be and has to; return its exponent."""
        name = self.node.name
        x = self.inputs[0]
        tracker = step.tracker(name, "backward")
        wide_above = step.algorithm.backward.wide_above
        assert wide_above is not None
        # Nothing is above infinity.
        threshold = wide_above if x.reads_int16 else math.inf
        exponent, x.gradient_low = round_gradient16(
            name, step.engine, step.share, tracker, acc_exponent, accumulators, into, threshold
        )
        return exponent

    def _affine_real(
        self,
        step: StepContext,
        accumulators: Int32Array,
        scale: FloatArray,
        offset: FloatArray,
        out: Int8Array,
        unit: float,
        *,
        relu: bool,
    ) -> None:
        """Write scale * accumulator + offset in the given unit to `out`."""
        batch = self.output.batch
        by_image = np.ones(batch, dtype=np.float32)
        inverse = np.full(batch, 1.0 / unit, dtype=np.float32)
        _int8.affine_real(
            step.engine, accumulators, by_image, scale, offset, None, None, out, inverse, None, relu
        )

    def _round_by_image(
        self,
        step: StepContext,
        values: Int8Array | Int32Array,
        by_image: FloatArray,
        scale: FloatArray,
        offset: FloatArray,
        other: Tensor | None = None,
        *,
        relu: bool = False,
    ) -> None:
        """Write values * by_image * scale + offset + other, each image at the scale that fits it best."""
        output = self.output

        def run(out: Int8Array | None, inverse: FloatArray | None, most: FloatArray | None) -> None:
            _int8.affine_real(
                step.engine,
                values,
                by_image,
                scale,
                offset,
                None if other is None else other.data,
                None if other is None else other.by_image,
                out,
                inverse,
                most,
                relu,
            )

        largest = np.empty(output.batch, dtype=np.float32)
        run(None, None, largest)
        output.by_image, inverse = image_scales(self.node.name, largest)
        run(output.data, inverse, None)

    def _set_real_scale(self, step: StepContext, largest: float) -> bool:
        """Give the output the scale that fits this magnitude; return False for 0, and set the output to zeros."""
        output = self.output
        if largest == 0.0:
            output.data[...] = 0
            output.factor = 1.0
            output.exponent = ZERO_EXPONENT
            return False
        reach = step.algorithm.forward.reach
        output.factor, output.exponent = math.frexp(reach * largest / 127.0)
        require_exponent(self.node.name, f"{largest:.3g}", output.exponent)
        return True

    def _store_by_image(self, step: StepContext, values: DoubleArray) -> None:
        """Write (h, w, batch, channels) real values, each image rounded at the scale that fits it best."""
        output = self.output
        values = np.ascontiguousarray(values)
        largest = np.empty(output.batch, dtype=np.float32)
        _int8.largest_by_image(values, largest)
        output.by_image, inverse = image_scales(self.node.name, largest)
        _int8.round_by_image(step.engine, values, inverse, output.data)
        if output.is_result:
            output.exact = values.astype(np.float32)

    def _round_sums(
        self,
        step: StepContext,
        role: str,
        acc_exponent: int,
        sums: npt.NDArray[np.integer[Any]],
        out: Int8Array,
        *,
        most: int,
        mask: Int8Array | None = None,
    ) -> int:
        """Store exact integers (h, w, batch, channels), rounded to int8 (F14), and return the exponent.

        `most` is a bound of their magnitudes. The rounding is that of the pass, "forward" or "backward", that the role
        begins with.
        """
        wide = step.wide(out.shape)
        acc_exponent += fit_int32(step.share, sums, most, wide)
        return self._round_wide(step, role, acc_exponent, wide, out, mask)

    def _round_wide(
        self,
        step: StepContext,
        role: str,
        acc_exponent: int,
        wide: Int32Array,
        out: Int8Array,
        mask: Int8Array | None,
    ) -> int:
        """Store accumulators, rounded to int8 (F14), and return the exponent; see `_round_sums`."""
        is_forward = role.startswith("forward")
        algorithm = step.algorithm
        rounding = (algorithm.forward if is_forward else algorithm.backward).rounding

        def run(into: Int8Array | None, shift: int) -> int:
            return _int8.requantise(step.engine, wide, into, shift, rounding, False, mask)

        return self._round(step, role, acc_exponent, run, out)


class WideOperator(Operator[NodeT]):
    """An operator whose NumPy code makes int32 accumulators of an output or of an input's gradient.

    In evaluation sums of int8 values are exact integers; what follows is float64, element by element, and is rounded
    for each image. So no result depends on the other images.
    """

    def __init__(self, node: NodeT, inputs: Sequence[Tensor], output: Tensor) -> None:
        super().__init__(node, inputs, output)
        tensors = (*self.inputs, output)
        self.accumulator_size = max(math.prod(tensor.array_shape) for tensor in tensors)


WeightedT = TypeVar("WeightedT", bound=ir.Weighted)


class WeightedOperator(Operator[WeightedT]):
    """An operator with a weight and a bias, and what their updates have in common.

    `weight_shape` is that of the weight in memory: over patches (bound_graph.py) that of a pointwise convolution.
    """

    def __init__(
        self,
        node: WeightedT,
        inputs: Sequence[Tensor],
        output: Tensor,
        weight_shape: tuple[int, int, int, int],
    ) -> None:
        super().__init__(node, inputs, output)
        self._weight_shape = weight_shape
        self._sums = np.zeros((2, output.array_shape[3]), dtype=np.int64)
        shapes = (self.inputs[0].array_shape, self.output.array_shape, weight_shape)
        self.accumulator_size = max(math.prod(shape) for shape in shapes)

    def _weight(self, step: StepContext) -> Weight:
        return step.parameters.weights[f"{self.node.name}.weight"]

    def _input_scale(self) -> float:
        """Return the scale of what the output's gradient is multiplied by in the weight's gradient."""
        return self.inputs[0].scale

    def _integer_bias(
        self, step: StepContext, acc_exponent: int, factor: float, room: int
    ) -> Int32Array:
        """Return the bias at the accumulator's scale; TrainingFailed if its magnitude is above `room`."""
        real = step.parameters.vectors[f"{self.node.name}.bias"].data.astype(np.float64)
        units = self._weight(step).channel_units
        if units is not None:
            real = real / units
        scaled = np.rint(np.ldexp(real, -acc_exponent) / factor)
        if not np.abs(scaled).max() <= room:
            worst = float(np.abs(real).max())
            raise TrainingFailed(
                f"{self.node.name}: a bias of {worst:.4g} in units of 2^{acc_exponent} leaves int32; lower "
                "the learning rate"
            )
        return scaled.astype(np.int32)

    def _bias(self, step: StepContext) -> FloatArray:
        """Return the bias in float32, zeros if it has none."""
        if not self.node.bias:
            return np.zeros(self.output.array_shape[3], dtype=np.float32)
        return step.parameters.vectors[f"{self.node.name}.bias"].data

    def _store_products(self, step: StepContext, accumulators: Int32Array, *, relu: bool) -> None:
        """Write accumulators, in units of input and weight, plus the bias, each image at its own scale."""
        output = self.output
        by_image = self.inputs[0].by_image * np.float32(2.0 ** self._weight(step).exponent)
        bias = self._bias(step)
        self._round_by_image(step, accumulators, by_image, np.ones_like(bias), bias, relu=relu)
        if output.is_result:
            exact = accumulators * by_image[:, None] + bias
            output.exact = np.maximum(exact, np.float32(0.0)) if relu else exact

    def _update_bias(self, step: StepContext) -> None:
        dy = self.gradient
        exponent = self.output.gradient_exponent
        units = self.output.gradient_units
        _int8.channel_sums(step.engine, dy, dy, None, self._sums[0], self._sums[1])
        own = self._sums[0].astype(np.float64)
        if (low := self.output.gradient_low) is not None:
            _int8.channel_sums(step.engine, low, low, None, self._sums[0], self._sums[1])
            own += self._sums[0] / 256.0
        bias = step.parameters.vectors[f"{self.node.name}.bias"]

        def update(sums: DoubleArray) -> None:
            gradient = np.ldexp(sums if units is None else sums * units, exponent)
            update_vector(step.algorithm, bias, gradient.astype(np.float32), step.rate)

        step.share.add(own, update)

    def _update_weight(
        self, step: StepContext, compute: Callable[[Int32Array], tuple[int, int]]
    ) -> None:
        """Update by the gradient that `compute` writes, in units of x times dy.

        It returns the largest magnitude and how far the gradient was shifted right, or raises OverflowError.
        """
        weight = self._weight(step)
        gradient = step.wide(self._weight_shape)
        drop = 0
        try:
            own_largest, drop = compute(gradient)
        except OverflowError as error:
            own_largest = step.share.overflowed(error)
        scale = math.ldexp(self._input_scale(), self.output.gradient_exponent + drop)
        scales = np.full(self._weight_shape[-1], scale)
        if self.output.gradient_units is not None:
            scales *= self.output.gradient_units

        def update(total: Int32Array, largest: int) -> None:
            if largest:
                step.reached.add(self.node.name)
            update_weight(
                self.node.name,
                step.engine,
                step.algorithm,
                weight,
                total.reshape(weight.data.shape),
                largest=largest,
                gradient_scale=scales.astype(np.float32),
                rate=step.rate,
                progress=step.progress,
                stalls=step.parameters.stalls,
            )

        step.share.add_integers(gradient, own_largest, update)

    def _update_weight16(
        self, step: StepContext, compute: Callable[[Int8Array, Int32Array], int]
    ) -> None:
        """Update by the gradient of an int16 gradient of the output; `compute` writes that of an int8 one.

        It returns the largest magnitude. The shares are summed by halves, so that their sums are exact.
        """
        halves: list[npt.NDArray[np.int64]] = []

        def update(total: Int32Array, _: int) -> None:
            halves.append(total.astype(np.int64))
            if len(halves) < 2:
                return
            fitted = np.empty_like(total)
            whole = BatchShare(step.share.num_samples)
            drop = fit_int32(whole, 256 * halves[0] + halves[1], 2**62, fitted)

            def write(gradient: Int32Array) -> tuple[int, int]:
                gradient[...] = fitted
                return int(np.abs(fitted).max(initial=0)), drop - 8

            self._update_weight(replace(step, share=whole), write)

        assert self.output.gradient is not None
        assert self.output.gradient_low is not None
        for half in (self.output.gradient, self.output.gradient_low):
            gradient = np.empty(self._weight_shape, dtype=np.int32)
            try:
                own_largest = compute(half, gradient)
            except OverflowError as error:
                own_largest = step.share.overflowed(error)
            step.share.add_integers(gradient, own_largest, update)


def product_scale(one: Tensor, other: Tensor) -> tuple[float, int]:
    """Return factor and exponent of the scale of products of two tensors' values."""
    exponent = one.exponent + other.exponent
    factor = one.factor * other.factor
    if factor == 1.0:
        return factor, exponent
    # Between 0.5 and 1, so that it does not shrink from product to product.
    factor, own_exponent = math.frexp(factor)
    return factor, exponent + own_exponent


FACTOR_BITS = 20


def times_factor(
    factor: float, sums: npt.NDArray[np.integer[Any]], most: int
) -> tuple[npt.NDArray[np.integer[Any]], int, int]:
    """Return factor * sums as integers, the exponent of their unit, and the bound that `most` becomes.

    Gradients have an exponent alone, so the factor of a real scale becomes an integer of 20 bits. `most` is below 2^42.
    """
    if factor == 1.0:
        return sums, 0, most
    integer = integer_factor(factor)
    return sums.astype(np.int64) * integer, -FACTOR_BITS, most * integer


def integer_factor(factor: float) -> int:
    """Return a factor of a real scale in units of 2^-20."""
    return round(math.ldexp(factor, FACTOR_BITS))


def room_beside(depth: int) -> int:
    """Return how large an integer may be that is added to a sum of `depth` products, so that int32 holds the result."""
    return 2**31 - 1 - min(depth, _int8.MAX_EXACT_DEPTH) * 127 * 127


def image_scales(name: str, largest: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return for each image the scale at which its largest magnitude is 127, and its inverse.

    Raises TrainingFailed, with `name`, if values left float32.
    """
    if not np.isfinite(largest).all():
        raise TrainingFailed(f"{name}: values have left float32; lower the learning rate")
    # Any scale is right for zeros. Below 2^-90 the inverse would leave float32.
    bounded = np.where(largest < 2.0**-90, np.float32(127.0), largest).astype(np.float32)
    return bounded / np.float32(127.0), np.float32(127.0) / bounded


def copy_masked(gradient: Int8Array, mask: Int8Array | None, into: Int8Array) -> None:
    """Copy a gradient, which may be `into` itself, with 0 for elements whose mask is not positive."""
    if mask is None:
        if gradient is not into:
            np.copyto(into, gradient)
    else:
        np.multiply(gradient, mask > 0, out=into)
