"""Layers with weights that the convolution kernels do not compute by themselves: transposed and very wide ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.precision.algorithm import TrainingAlgorithm
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import DoubleArray, Int8Array, Int32Array
from socflower.precision.int8.operators.base import (
    StepContext,
    Tensor,
    WeightedOperator,
    room_beside,
)
from socflower.precision.int8.requantisation import round_elementwise, round_product


def convolution_plan(
    graph: ir.Graph, node: ir.Weighted, batch: int, batch_block: int = 0
) -> _int8.Convolution:
    """Return the kernels of a convolution, or those of the one that a transposed convolution undoes."""
    geometry = ir.convolution_geometry(graph, node, batch)
    height, width = node.dilation
    return _int8.Convolution(
        *geometry, batch_block=batch_block, dilation_h=height, dilation_w=width
    )


def sum_depths(node: ir.Weighted, read: ir.Shape) -> tuple[int, int]:
    """Return the most products in a sum of the output and in one of the gradient of an input of shape `read`.

    A kernel that covers its input meets each input pixel with one tap.
    """
    made = node.shape
    if isinstance(node, ir.TransposedConvolution):
        backward, forward = _depths(node, made, read)
    else:
        forward, backward = _depths(node, read, made)
    return forward, backward


def _depths(node: ir.Weighted, read: ir.Shape, made: ir.Shape) -> tuple[int, int]:
    forward = read[0] // node.groups
    backward = made[0] // node.groups
    dimensions = zip(node.kernel, node.stride, node.dilation, read[1:], made[1:], strict=True)
    for kernel, stride, dilation, in_size, out_size in dimensions:
        forward *= min(kernel, in_size)
        # Output pixels that read one input pixel do so with taps that differ by multiples of this.
        apart = stride // math.gcd(stride, dilation)
        backward *= min(-(-kernel // apart), out_size)
    return forward, backward


def covers(node: ir.Weighted, read: ir.Shape) -> bool:
    """Return whether the kernel is a convolution's that covers the image, as that of a linear layer does."""
    is_whole = node.kernel == read[1:] and node.padding == (0, 0) and node.groups == 1
    return isinstance(node, ir.Convolution) and is_whole and node.dilation == (1, 1)


def is_wide(graph: ir.Graph, node: ir.Convolution) -> bool:
    """Return whether a layer over the whole image adds more products than int32 can hold."""
    read = graph.shape_of(node.inputs[0])
    return covers(node, read) and max(sum_depths(node, read)) > _int8.MAX_EXACT_DEPTH


def read_by_batch_norm(graph: ir.Graph) -> frozenset[str]:
    """Return the convolutions whose accumulators a BatchNorm reads next, and nothing else."""
    found = set()
    for node, after in itertools.pairwise(graph.nodes):
        reads = isinstance(after, ir.BatchNorm) and after.inputs == (node.name,)
        if not reads or not isinstance(node, ir.Convolution) or node.relu:
            continue
        if len(graph.consumers(node.name)) == 1 and not is_wide(graph, node):
            found.add(node.name)
    return frozenset(found)


def scaled_by_channel(graph: ir.Graph, algorithm: TrainingAlgorithm) -> frozenset[str]:
    """Return the convolutions whose weights and gradients have channel units.

    These are the depthwise convolutions that a BatchNorm reads. Their channels never mix, so any unit of a channel
    costs nothing; and they have few weights, whose magnitudes differ from channel to channel.
    """
    # The step of an int8 weight is one shift for all channels.
    if algorithm.forward.scales != "real" or algorithm.weight == "int8":
        return frozenset()
    return frozenset(name for name in read_by_batch_norm(graph) if is_depthwise(graph, name))


def is_depthwise(graph: ir.Graph, name: str) -> bool:
    """Return whether the node is a convolution that makes each of its channels from one input channel."""
    node = next((node for node in graph.nodes if node.name == name), None)
    if not isinstance(node, ir.Convolution):
        return False
    return node.groups == graph.shape_of(node.inputs[0])[0] == node.shape[0] > 1


class TransposedConvolutionOperator(WeightedOperator[ir.TransposedConvolution]):
    """A transposed convolution: the input gradient of the convolution of `plan`, and the other way round."""

    def __init__(
        self,
        node: ir.TransposedConvolution,
        inputs: Sequence[Tensor],
        output: Tensor,
        plan: _int8.Convolution,
        workspace_bytes: int,
    ) -> None:
        super().__init__(node, inputs, output, plan.weight_shape)
        self.workspace_bytes = workspace_bytes
        self._plan = plan
        channels = self.inputs[0].shape[0] // node.groups
        self._room = room_beside(math.prod(node.kernel) * channels)

    def forward(self, step: StepContext) -> None:
        """Multiply, add the bias at the accumulator's scale, round."""
        x = self.inputs[0]
        node = self.node
        weight = self._weight(step)
        acc_exponent = x.exponent + weight.exponent
        rounding = step.algorithm.forward.rounding
        accumulators = step.wide(self.output.array_shape)
        self.output.factor = x.factor

        def product(destination: Int8Array | Int32Array, shift: int) -> int:
            return self._plan.input_gradient(
                step.engine, x.data, weight.data, destination, step.workspace, shift, rounding
            )

        tracker = step.tracker(node.name, "forward")
        out = self.output.data
        if not node.bias:
            self.output.exponent = round_product(
                node.name,
                step.engine,
                step.share,
                tracker,
                acc_exponent,
                product,
                out,
                accumulators,
                rounding,
            )
            return
        bias = self._integer_bias(step, acc_exponent, x.factor, self._room)
        product(accumulators, 0)
        accumulators += bias

        def run(into: Int8Array | None, shift: int) -> int:
            return _int8.requantise(step.engine, accumulators, into, shift, rounding)

        self.output.exponent = round_elementwise(
            node.name, step.share, tracker, acc_exponent, run, out
        )

    def evaluate(self, step: StepContext) -> None:
        """Multiply exactly, add the bias, round."""
        weight = self._weight(step)
        accumulators = step.wide(self.output.array_shape)
        self._plan.input_gradient(
            step.engine,
            self.inputs[0].data,
            weight.data,
            accumulators,
            step.workspace,
            0,
            step.algorithm.forward.rounding,
        )
        self._store_products(step, accumulators, relu=False)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute the input gradient by the convolution, then the weight gradient, then update."""
        x = self.inputs[0]
        dy = self.gradient
        exponent = 0
        if into[0] is not None:
            exponent = self._input_gradient(step, into[0])
        if "weight" in self.node.trained:

            def compute(gradient: Int32Array) -> tuple[int, int]:
                largest = self._plan.weight_gradient(
                    step.engine, dy, x.data, gradient, step.workspace
                )
                return largest, 0

            self._update_weight(step, compute)
        if "bias" in self.node.trained:
            self._update_bias(step)
        return [exponent]

    def _input_gradient(self, step: StepContext, into: Int8Array) -> int:
        x = self.inputs[0]
        weight = self._weight(step)
        rounding = step.algorithm.backward.rounding
        accumulators = step.wide(x.array_shape)
        self._plan.forward(
            step.engine, self.gradient, weight.data, None, accumulators, step.workspace
        )

        def run(out: Int8Array | None, shift: int) -> int:
            return _int8.requantise(step.engine, accumulators, out, shift, rounding, False, x.mask)

        acc_exponent = self.output.gradient_exponent + weight.exponent
        return self._round(step, "backward", acc_exponent, run, into)


_BLOCK = 2**24 // (127 * 127)
"""Products that float32 adds exactly, in any order."""


class WideLinearOperator(WeightedOperator[ir.Convolution]):
    """A linear layer whose sums may leave int32: they are split into blocks that float32 adds exactly.

    The blocks' sums are added in float64, which is exact below 2^53. Sums of more than 31 bits are rounded to 30
    before they are rounded to int8.
    """

    def __init__(self, node: ir.Convolution, inputs: Sequence[Tensor], output: Tensor) -> None:
        channels, height, width = inputs[0].shape
        stride = output.array_shape[3]
        super().__init__(node, inputs, output, (height, width, channels, stride))
        self._depth = height * width * channels
        self._outs = node.shape[0]

    def _matrix(self, step: StepContext) -> npt.NDArray[np.int8]:
        """Return the weight, (depth, out channels)."""
        return self._weight(step).data.reshape(self._depth, -1)[:, : self._outs]

    def _images(self) -> npt.NDArray[np.int8]:
        """Return the input, (samples, depth)."""
        x = self.inputs[0]
        values = x.data[..., : x.shape[0]].transpose(2, 0, 1, 3)
        return values.reshape(x.batch, self._depth)

    def forward(self, step: StepContext) -> None:
        """Multiply, add the bias, apply the ReLU, round."""
        node = self.node
        x = self.inputs[0]
        exponent = x.exponent + self._weight(step).exponent
        self.output.factor = x.factor
        sums = _blockwise_product(self._images(), self._matrix(step))
        if node.bias:
            sums[:, :] += self._integer_bias(step, exponent, x.factor, 2**31 - 1)[: self._outs]
        if node.relu:
            np.maximum(sums, 0.0, out=sums)
        integers = sums.astype(np.int64)[None, None]
        most = self._depth * 127 * 127 + 2**31
        self.output.exponent = self._round_sums(
            step, "forward", exponent, integers, self.output.data, most=most
        )

    def evaluate(self, step: StepContext) -> None:
        """Multiply exactly, add the bias, apply the ReLU, round."""
        scales = self.inputs[0].by_image * 2.0 ** self._weight(step).exponent
        made = _blockwise_product(self._images(), self._matrix(step)) * scales[:, None]
        made += self._bias(step)[: self._outs]
        if self.node.relu:
            np.maximum(made, 0.0, out=made)
        self._store_by_image(step, made[None, None])

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Compute the input gradient with the weights of the forward pass, then update."""
        x = self.inputs[0]
        dy = self.gradient[0, 0, :, : self._outs]
        exponent = 0
        if into[0] is not None:
            sums = _blockwise_product(dy, self._matrix(step).T)
            channels, height, width = x.shape
            integers = sums.astype(np.int64).reshape(x.batch, height, width, channels)
            exponent = self._round_sums(
                step,
                "backward",
                self.output.gradient_exponent + self._weight(step).exponent,
                integers.transpose(1, 2, 0, 3),
                into[0],
                most=self._outs * 127 * 127,
                mask=x.mask,
            )
        if "weight" in self.node.trained:

            def compute(gradient: Int32Array) -> tuple[int, int]:
                return self._weight_gradient(dy, gradient), 0

            self._update_weight(step, compute)
        if "bias" in self.node.trained:
            self._update_bias(step)
        return [exponent]

    def _weight_gradient(self, dy: npt.NDArray[np.int8], gradient: Int32Array) -> int:
        """Write the gradient, block by block; its sums are over the samples alone, so int32 holds them."""
        rows = gradient.reshape(self._depth, -1)
        rows[:, self._outs :] = 0
        images = self._images().T
        largest = 0
        for first in range(0, self._depth, _BLOCK):
            part = slice(first, first + _BLOCK)
            sums = _blockwise_product(images[part], dy)
            largest = max(largest, int(np.abs(sums).max()))
            rows[part, : self._outs] = sums
        return largest


def _blockwise_product(lhs: npt.NDArray[np.int8], rhs: npt.NDArray[np.int8]) -> DoubleArray:
    """Return lhs @ rhs exactly, as float64."""
    sums = np.zeros((lhs.shape[0], rhs.shape[1]))
    for first in range(0, lhs.shape[1], _BLOCK):
        part = slice(first, first + _BLOCK)
        sums += lhs[:, part].astype(np.float32) @ rhs[part].astype(np.float32)
    return sums
