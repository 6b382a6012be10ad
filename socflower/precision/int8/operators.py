"""The operators of a graph, bound to their buffers for one batch size: forward, backward and update.

`backward` reads the gradient of the operator's output and writes the gradients of its inputs. The gradient of a ReLU's
output is masked: the operator that reads the output applies the mask while it rounds, at no extra cost.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.precision.algorithm import Rounding, TrainingAlgorithm
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.fixed_point import (
    DoubleArray,
    FloatArray,
    Int8Array,
    Int32Array,
    channel_stride,
    scaled_integers,
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
    round_product,
)
from socflower.precision.int8.updates import Rate, update_vector, update_weight

MAX_ADD_SHIFT = 20
AVERAGE_BITS = 14
"""An average is a sum times round(2^14 / window): exact for windows of a power of two."""


@dataclass(slots=True)
class Tensor:
    """An int8 tensor of a step, (h, w, batch, channel stride), and its gradient once it is computed.

    A value is `factor` * 2^`exponent` times its int8; a gradient has an exponent only. The values of `activations` are
    all in 0..127. The only reader of a `masked` tensor sets the gradient of elements that are not positive to 0. A
    tensor is `normalised` if a BatchNorm reads it next, and nothing else does: under real scales it then also has
    `accumulators`, which are valid until the next operator has run.

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
    by_image: FloatArray = field(init=False)
    bias: FloatArray | None = None
    is_result: bool = False
    exact: FloatArray | None = None
    gradient: Int8Array | None = None
    gradient_exponent: int = 0
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
        return self.trackers.tracker(name, role) if self.differentiated else None

    def wide(self, shape: Sequence[int]) -> Int32Array:
        """Return accumulators of that shape."""
        return self.accumulators[: math.prod(shape)].reshape(shape)

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

    def _affine_real(
        self,
        step: StepContext,
        accumulators: Int32Array,
        scale: FloatArray,
        offset: FloatArray,
        *,
        relu: bool,
    ) -> None:
        """Round scale * accumulator + offset to the output, at the output's scale."""
        batch = self.output.batch
        by_image = np.ones(batch, dtype=np.float32)
        inverse = np.full(batch, 1.0 / self.output.scale, dtype=np.float32)
        out = self.output.data
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

    def _set_real_scale(self, largest: float) -> bool:
        """Give the output the scale at which this magnitude is 127; return False for 0, and set the output to zeros."""
        output = self.output
        if largest == 0.0:
            output.data[...] = 0
            output.factor = 1.0
            output.exponent = ZERO_EXPONENT
            return False
        output.factor, output.exponent = math.frexp(largest / 127.0)
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
        _int8.channel_sums(step.engine, dy, dy, None, self._sums[0], self._sums[1])
        bias = step.parameters.vectors[f"{self.node.name}.bias"]

        def update(sums: DoubleArray) -> None:
            gradient = np.ldexp(sums, exponent).astype(np.float32)
            update_vector(step.algorithm, bias, gradient, step.rate)

        step.share.add(self._sums[0].astype(np.float64), update)

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
                gradient_scale=scale,
                rate=step.rate,
                progress=step.progress,
                stalls=step.parameters.stalls,
            )

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
        tracker = step.tracker(node.name, "forward")
        accumulators = step.wide(self.output.array_shape)

        def run(
            destination: Int8Array | Int32Array, shift: int, wide: Int32Array | None = None
        ) -> int:
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
                wide,
            )

        if step.has_real_scales:
            acc_scale = math.ldexp(x.factor, acc_exponent)
            if not self.output.normalised:
                largest = run(accumulators, 0)
                self._round_real(step, accumulators, acc_scale, largest, relu=node.relu)
                return
            self.output.accumulators = accumulators
            self.output.accumulator_scale = acc_scale
            self.output.exponent = round_product(
                node.name,
                step.engine,
                step.share,
                tracker,
                acc_exponent,
                lambda destination, shift: run(
                    destination, shift, None if destination is accumulators else accumulators
                ),
                self.output.data,
                accumulators,
                rounding,
                keeps_accumulators=True,
            )
            return
        self.output.exponent = round_product(
            node.name,
            step.engine,
            step.share,
            tracker,
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
        if self._set_real_scale(step.share.most(own_largest) * acc_scale):
            channels = self.output.array_shape[3]
            scale = np.full(channels, acc_scale, dtype=np.float32)
            zeros = np.zeros(channels, dtype=np.float32)
            self._affine_real(step, accumulators, scale, zeros, relu=relu)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute the input gradient with the weights of the forward pass, then the weight gradient, then update."""
        x = self.inputs[0]
        exponent = 0 if into[0] is None else self._input_gradient(step, self._weight(step), into[0])
        if "weight" in self.node.trained:

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
        rounding = step.algorithm.backward.rounding
        weight_data = weight.data.reshape(self._weight_shape)

        def run(destination: Int8Array | Int32Array, shift: int) -> int:
            return self._plan.input_gradient(
                step.engine,
                self.gradient,
                weight_data,
                destination,
                step.workspace,
                shift,
                rounding,
                x.mask,
            )

        return round_product(
            node.name,
            step.engine,
            step.share,
            step.tracker(node.name, "backward"),
            self.output.gradient_exponent + weight.exponent,
            run,
            into,
            step.wide(x.array_shape),
            rounding,
        )


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
        if self._set_real_scale(step.share.most(float(largest.max()))):
            inverse = np.full(a.batch, 1.0 / self.output.scale, dtype=np.float32)
            _int8.affine_real(*operands, self.output.data, inverse, None, self.node.relu)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Copy the gradient to both inputs."""
        for x, target in zip(self.inputs, into, strict=True):
            if target is not None:
                copy_masked(self.gradient, x.mask, target)
        return [self.output.gradient_exponent] * 2
