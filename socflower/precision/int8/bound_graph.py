"""A graph bound to a batch size: the order of its operators and their memory.

Memory comes from a `RegionCache`, one region per operator, output and gradient. Regions are acquired in the order of
the step and released as soon as the backward pass no longer needs them.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import ConfigError
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import FloatArray, Int8Array
from socflower.precision.int8.operators.base import Operator, StepContext, Tensor, image_scales
from socflower.precision.int8.operators.batch_norm import BatchNormOperator
from socflower.precision.int8.operators.convolution import ConvolutionOperator
from socflower.precision.int8.operators.elementwise import (
    AddOperator,
    DropoutOperator,
    ReluOperator,
    add_tensors,
)
from socflower.precision.int8.operators.embedding import Embedding, EmbeddingOperator
from socflower.precision.int8.operators.layout import (
    Concat,
    ConcatOperator,
    Rearrange,
    RearrangeOperator,
    Select,
    SelectOperator,
)
from socflower.precision.int8.operators.parameter_value import (
    ParameterValue,
    ParameterValueOperator,
)
from socflower.precision.int8.operators.pooling import AveragePoolOperator, MaxPoolOperator
from socflower.precision.int8.operators.products import (
    MatMul,
    MatMulOperator,
    Multiply,
    MultiplyOperator,
    Softmax,
    SoftmaxOperator,
)
from socflower.precision.int8.operators.region_mean import RegionMean, RegionMeanOperator
from socflower.precision.int8.operators.sample_norm import SampleNorm, sample_norm_operator
from socflower.precision.int8.operators.tables import LookupTable, TableOperator
from socflower.precision.int8.operators.weighted import (
    TransposedConvolutionOperator,
    WideLinearOperator,
    convolution_plan,
    is_depthwise,
    is_wide,
    read_by_batch_norm,
)
from socflower.precision.int8.region_cache import RegionCache

Fp32Factory = Callable[[ir.Fp32, Sequence[Tensor], Tensor], Operator[ir.Fp32]]

_OPERATORS: dict[type[ir.Node], Callable[[Any, Sequence[Tensor], Tensor], Operator[Any]]] = {
    ir.BatchNorm: BatchNormOperator,
    ir.Relu: ReluOperator,
    ir.Add: AddOperator,
    LookupTable: TableOperator,
    Rearrange: RearrangeOperator,
    Select: SelectOperator,
    Concat: ConcatOperator,
    RegionMean: RegionMeanOperator,
    SampleNorm: sample_norm_operator,
    Multiply: MultiplyOperator,
    MatMul: MatMulOperator,
    Softmax: SoftmaxOperator,
    ParameterValue: ParameterValueOperator,
    Embedding: EmbeddingOperator,
}
"""The operators that a node, its inputs and its output are enough to build."""

_MAX_PATCH_CHANNELS = 4
"""A first convolution with at most this many input channels runs over patches, which are gathered once per step."""


@dataclass(frozen=True, slots=True)
class _Array:
    """Key, shape and size of an int8 array in the region cache."""

    key: tuple[int, str, str]
    shape: tuple[int, ...]
    num_bytes: int

    def build(self) -> Int8Array:
        return np.empty(self.shape, np.int8)


@dataclass(frozen=True, slots=True)
class _Place:
    """A node in the order of the step, with the keys and arrays that running it needs.

    `into` has the array for the gradient of each input; None if it is not needed, or if the input takes over the array
    of the output's gradient. `sums` has a role and an array for each further gradient of the output.
    """

    node: ir.Node
    key: tuple[int, str, str]
    num_bytes: int
    output: _Array
    into: tuple[_Array | None, ...]
    sums: tuple[tuple[str, _Array], ...]


@dataclass(slots=True)
class _Gradient:
    """A gradient of a value, from one of its readers to the operator that computed the value."""

    data: Int8Array
    exponent: int


class BoundGraph:
    """The operators of a graph for one batch size."""

    def __init__(
        self,
        graph: ir.Graph,
        batch: int,
        engine: _int8.Engine,
        regions: RegionCache,
        *,
        batch_blocks: Mapping[str, int],
        fp32_factory: Fp32Factory | None = None,
        input_gradient: bool = False,
    ) -> None:
        self.graph = graph
        self.batch = batch
        self._engine = engine
        self._regions = regions
        self._batch_blocks = batch_blocks
        self._fp32_factory = fp32_factory
        # Over patches, the gradient of the input would have to be summed from that of its patches.
        self._patched = None if input_gradient else _patched_convolution(graph)
        self._differentiated = self._every_value() if input_gradient else graph.differentiated
        self.tensors = _tensors(graph, batch, self._patched)
        # If a value has several readers, the sum of their gradients is masked instead of each gradient.
        self._mask_of_sum: dict[str, bool] = {}
        for name, tensor in self.tensors.items():
            self._mask_of_sum[name] = tensor.masked and len(graph.consumers(name)) > 1
            tensor.masked = tensor.masked and not self._mask_of_sum[name]
        self._input = self._array(ir.INPUT, "output")
        self._logits_gradient = self._array(graph.output, "gradient")
        self._input_sums = self._sums_of(ir.INPUT) if input_gradient else ()
        self._places = [self._place(node) for node in graph.nodes]
        self._gradient_keys: dict[str, list[tuple[int, str, str]]] = {
            name: [] for name in self.tensors
        }
        for place in self._places:
            for target in place.into:
                if target is not None:
                    self._gradient_keys[target.key[1]].append(target.key)
        self.workspace_bytes = 64
        self.accumulator_size = 16
        if self._patched is not None:
            block = self._batch_block(self._patched)
            self._images = convolution_plan(graph, self._patched, batch, block)
            self.workspace_bytes = _int8.patch_images_bytes(self._images)
        for place in self._places:
            operator = self._operator(place)
            self.workspace_bytes = max(self.workspace_bytes, operator.workspace_bytes)
            self.accumulator_size = max(self.accumulator_size, operator.accumulator_size)
            regions.release(place.key)

    def take_input(
        self, images: FloatArray, exponent: int, workspace: npt.NDArray[np.uint8]
    ) -> None:
        """Round (batch, channels, h, w) float32 images to the input tensor, or to the patches of the first layer."""
        tensor = self.tensors[ir.INPUT]
        tensor.data = self._acquire(self._input)
        tensor.factor = 1.0
        tensor.exponent = exponent
        tensor.images = images
        if self._patched is not None:
            _int8.quantise_patches(
                self._engine, self._images, images, tensor.data, workspace, exponent
            )
            return
        channels, height, width = tensor.shape
        _int8.quantise_images(
            self._engine, images, tensor.data, self.batch, channels, height, width, exponent
        )

    def forward(self, step: StepContext) -> Tensor:
        """Run every operator in training and return the logits."""
        for place in self._places:
            operator = self._operator(place)
            operator.output.data = self._acquire(place.output)
            started_s = time.perf_counter()
            operator.forward(step)
            _round_value(step, operator.output)
            _record_time(step, place, started_s)
        return self.tensors[self.graph.output]

    def evaluate(self, step: StepContext, images: FloatArray) -> FloatArray:
        """Run every operator in evaluation and return its real values, (batch, c, h, w)."""
        largest = np.abs(images).max(axis=(1, 2, 3))
        by_image, inverse = image_scales(ir.INPUT, largest)
        self.take_input(images * inverse[:, None, None, None], 0, step.workspace)
        self.tensors[ir.INPUT].by_image = by_image
        self.tensors[ir.INPUT].images = images
        for place in self._places:
            operator = self._operator(place)
            operator.output.data = self._acquire(place.output)
            operator.evaluate(step)
            _round_value(step, operator.output)
        result = self.tensors[self.graph.output].evaluated()
        self.tensors[self.graph.output].exact = None
        return result

    def logits_gradient(self) -> Int8Array:
        """Return memory for the gradient of the logits, which `backward` starts from."""
        return self._acquire(self._logits_gradient)

    def backward(
        self, step: StepContext, logits_gradient: Int8Array, exponent: int
    ) -> tuple[Int8Array, int] | None:
        """Run backward for values that depend on a trained parameter, update, and release memory after its last use.

        Returns the gradient of the input and its exponent if the program has one; valid until the next pass.
        """
        logits = self.tensors[self.graph.output]
        if logits.masked:
            # Logits have no reader that would apply the mask.
            np.multiply(logits_gradient, logits.data > 0, out=logits_gradient)
        self._round_gradient(step, self._logits_gradient, logits_gradient)
        gradients: dict[str, list[_Gradient]] = {name: [] for name in self.tensors}
        gradients[self.graph.output].append(_Gradient(logits_gradient, exponent))
        for place in reversed(self._places):
            reuses_gradient = False
            if place.node.name in self._differentiated:
                reuses_gradient = self._backward(step, place, gradients)
            self._release(place, reuses_gradient=reuses_gradient)
        self._regions.release(self._input.key)
        if ir.INPUT not in self._differentiated:
            return None
        of_input = self._sum(step, ir.INPUT, self._input_sums, gradients[ir.INPUT])
        return of_input.data, of_input.exponent

    def _backward(
        self, step: StepContext, place: _Place, gradients: dict[str, list[_Gradient]]
    ) -> bool:
        """Run one operator backward; return whether an input takes over the array of the output's gradient."""
        operator = self._operator(place)
        name = place.node.name
        output = operator.output
        total = self._sum(step, name, place.sums, gradients[name])
        output.gradient = total.data
        output.gradient_exponent = total.exponent
        into = [None if target is None else self._acquire(target) for target in place.into]
        started_s = time.perf_counter()
        exponents = operator.backward(step, into)
        for array, data in zip(place.into, into, strict=True):
            if array is not None and data is not None:
                self._round_gradient(step, array, data)
        _record_time(step, place, started_s)
        reuses_gradient = False
        for value, target, exponent in zip(place.node.inputs, into, exponents, strict=True):
            if value not in self._differentiated:
                continue
            if target is None:
                # An addition without a mask passes on the array of its output's gradient.
                target = total.data
                reuses_gradient = True
            gradients[value].append(_Gradient(target, exponent))
        return reuses_gradient

    def _sum(
        self,
        step: StepContext,
        name: str,
        sums: tuple[tuple[str, _Array], ...],
        gradients: list[_Gradient],
    ) -> _Gradient:
        total = gradients[0]
        for index, (role, array) in enumerate(sums, start=1):
            part = gradients[index]
            out = self._acquire(array)
            last = index == len(sums)
            exponent = add_tensors(
                f"{name} ({role})",
                step,
                step.tracker(name, role),
                (total.data, total.exponent),
                (part.data, part.exponent),
                out,
                rounding=step.algorithm.backward.rounding,
                mask=self.tensors[name].data if last and self._mask_of_sum[name] else None,
            )
            self._round_gradient(step, array, out)
            total = _Gradient(out, exponent)
        return total

    def _round_gradient(self, step: StepContext, array: _Array, data: Int8Array) -> None:
        """Round a gradient to the mantissa bits that the algorithm has, at random by value and role."""
        bits = step.algorithm.backward.mantissa_bits
        if bits is None:
            return
        _, value, role = array.key
        seed = zlib.crc32(f"{value} {role}".encode(), step.seed % 2**32)
        num_samples = max(step.share.num_samples, self.batch)
        _int8.round_elements_at_random(step.engine, data, bits, seed, num_samples, step.share.first)

    def _release(self, place: _Place, *, reuses_gradient: bool) -> None:
        """Release tensors that no earlier operator reads; a reused gradient array is kept until the step's end."""
        release = self._regions.release
        release(place.key)
        release(place.output.key)
        if reuses_gradient:
            return
        name = place.node.name
        if name == self.graph.output:
            release(self._logits_gradient.key)
        for _, array in place.sums:
            release(array.key)
        for key in self._gradient_keys[name]:
            release(key)

    def _acquire(self, array: _Array) -> Int8Array:
        taken: Int8Array = self._regions.acquire(array.key, array.num_bytes, array.build)
        return taken

    def _operator(self, place: _Place) -> Operator[Any]:
        operator: Operator[Any] = self._regions.acquire(
            place.key, place.num_bytes, lambda: self._build(place.node)
        )
        return operator

    def _array(self, name: str, role: str) -> _Array:
        shape = self.tensors[name].array_shape
        return _Array((self.batch, name, role), shape, int(np.prod(shape)))

    def _place(self, node: ir.Node) -> _Place:
        into: list[_Array | None] = []
        for index, value in enumerate(node.inputs):
            reuses_gradient = isinstance(node, ir.Add) and not self.tensors[value].masked
            if value in self._differentiated and not reuses_gradient:
                into.append(self._array(value, f"gradient from {node.name}.{index}"))
            else:
                into.append(None)
        return _Place(
            node=node,
            key=(self.batch, node.name, "operator"),
            num_bytes=self._operator_bytes(node),
            output=self._array(node.name, "output"),
            into=tuple(into),
            sums=self._sums_of(node.name),
        )

    def _sums_of(self, value: str) -> tuple[tuple[str, _Array], ...]:
        num_gradients = len(self.graph.consumers(value))
        roles = [f"gradient sum {index}" for index in range(1, num_gradients)]
        return tuple((role, self._array(value, role)) for role in roles)

    def _every_value(self) -> frozenset[str]:
        """Return all values: each depends on the input."""
        return frozenset((ir.INPUT, *(node.name for node in self.graph.nodes)))

    def _operator_bytes(self, node: ir.Node) -> int:
        """Return the bytes of an operator's index tables, argmax and gate."""
        output = int(np.prod(self.tensors[node.name].array_shape))
        if isinstance(node, ir.Weighted | ir.MaxPool | ir.AveragePool):
            pairs = math.prod((*node.kernel, *node.shape[1:]))
            return 24 * pairs + (output if isinstance(node, ir.MaxPool) else 0)
        return output if isinstance(node, ir.Dropout) else 0

    def _plan(self, node: ir.Weighted, batch: int) -> _int8.Convolution:
        """Return the kernels of a convolution for so many samples."""
        block = min(self._batch_block(node), batch)
        if node is self._patched:
            # Pointwise over patches, which are the channels.
            channels, height, width = self.tensors[ir.INPUT].shape
            sizes = (batch, height, width, channels, node.shape[0])
            return _int8.Convolution(*sizes, 1, 1, batch_block=block)
        return convolution_plan(self.graph, node, batch, block)

    def _batch_block(self, node: ir.Weighted) -> int:
        return min(self._batch_blocks.get(node.name, 0), self.batch)

    def _build(self, node: ir.Node) -> Operator[Any]:
        inputs = [self.tensors[value] for value in node.inputs]
        output = self.tensors[node.name]
        if (made := _OPERATORS.get(type(node))) is not None:
            return made(node, inputs, output)
        match node:
            case ir.Convolution() if is_wide(self.graph, node):
                return WideLinearOperator(node, inputs, output)
            case ir.Convolution():
                plan_of = partial(self._plan, node)
                return ConvolutionOperator(node, inputs, output, plan_of, self._engine)
            case ir.TransposedConvolution():
                plan = self._plan(node, self.batch)
                return TransposedConvolutionOperator(
                    node, inputs, output, plan, plan.workspace_bytes(self._engine)
                )
            case ir.MaxPool():
                return MaxPoolOperator(node, inputs, output, self._pooling(node))
            case ir.AveragePool():
                return AveragePoolOperator(node, inputs, output, self._pooling(node))
            case ir.Dropout():
                return DropoutOperator(node, inputs, output, self.graph.nodes.index(node))
            case ir.Fp32() if self._fp32_factory is not None:
                return self._fp32_factory(node, inputs, output)
        raise ConfigError(
            f"{node.name}: int8 training has no operator {getattr(node, 'operator', node.kind)!r}"
        )

    def _pooling(self, node: ir.MaxPool | ir.AveragePool) -> _int8.Pooling:
        channels, height, width = self.tensors[node.inputs[0]].shape
        return _int8.Pooling(
            self.batch, height, width, channels, *node.kernel, *node.stride, *node.padding
        )


def _round_value(step: StepContext, tensor: Tensor) -> None:
    """Round a value that products read to the mantissa bits that the algorithm has; a BatchNorm reads exact sums."""
    bits = step.algorithm.forward.mantissa_bits
    if bits is not None and not (tensor.normalised or tensor.is_result):
        _int8.round_elements(step.engine, tensor.data, bits)


def _record_time(step: StepContext, place: _Place, started_s: float) -> None:
    if step.timings is not None:
        name = place.node.name
        step.timings[name] = step.timings.get(name, 0.0) + time.perf_counter() - started_s


def _patched_convolution(graph: ir.Graph) -> ir.Convolution | None:
    """Return the first convolution if it is the only reader of images with few channels."""
    readers = graph.consumers(ir.INPUT)
    if len(readers) != 1 or not isinstance(readers[0], ir.Convolution):
        return None
    node = readers[0]
    few = graph.input_shape[0] <= _MAX_PATCH_CHANNELS
    plain = node.groups == 1 and node.kernel != (1, 1) and node.dilation == (1, 1)
    return node if few and plain and not is_wide(graph, node) else None


def _tensors(graph: ir.Graph, batch: int, patched: ir.Convolution | None) -> dict[str, Tensor]:
    """Return the tensors of all values, with their known signs and masks.

    The mask of a rectified value moves to the output of a max-pool over it: a window's maximum is positive exactly if
    the chosen element is, and there are fewer maxima.
    """
    input_shape = graph.input_shape
    if patched is not None:
        taps = patched.kernel[0] * patched.kernel[1]
        input_shape = (taps * input_shape[0], *patched.shape[1:])
    tensors = {ir.INPUT: Tensor(shape=input_shape, batch=batch)}
    normalised = read_by_batch_norm(graph)
    for node in graph.nodes:
        tensor = tensors[node.name] = Tensor(shape=node.shape, batch=batch)
        read = [tensors[value] for value in node.inputs]
        keeps_sign = node.keeps_sign and all(x.activations for x in read)
        tensor.activations = node.non_negative or keeps_sign
        tensor.normalised = node.name in normalised
        readers = [reader.name for reader in graph.consumers(node.name)]
        tensor.takes_gradient_units = (
            isinstance(node, ir.BatchNorm)
            and len(readers) == 1
            and readers[0] in normalised
            and is_depthwise(graph, readers[0])
        )
        match node:
            case ir.Convolution(relu=True) | ir.Add(relu=True) | ir.Relu():
                tensor.activations = tensor.masked = True
            case ir.BatchNorm(relu=True):
                # BatchNorm masks its gradient itself.
                tensor.activations = True
            case LookupTable():
                tensor.activations = node.is_non_negative
            case ir.MaxPool():
                x = read[0]
                if x.masked and len(graph.consumers(node.inputs[0])) == 1:
                    tensor.masked = True
                    x.masked = False
    tensors[graph.output].is_result = True
    for node in graph.nodes:
        tensors[node.name].reads_int16 = _reads_int16(graph, node, tensors)
    return tensors


def _reads_int16(graph: ir.Graph, node: ir.Node, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether an operator takes an int16 gradient: a convolution, or a max-pool without overlap behind one."""
    is_rectified_result = node.name == graph.output and tensors[node.name].masked
    if len(graph.consumers(node.name)) > 1 or is_rectified_result:
        return False
    match node:
        case ir.Convolution():
            return not is_wide(graph, node)
        case ir.MaxPool():
            is_disjoint = all(s >= k for s, k in zip(node.stride, node.kernel, strict=True))
            return is_disjoint and node.inputs[0] in tensors and tensors[node.inputs[0]].reads_int16
    return False
