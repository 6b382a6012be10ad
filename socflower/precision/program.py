"""A graph bound to a batch size: which operator runs when, on which memory.

Memory comes from a `RegionCache`, one region per operator, output and gradient, taken in the order of the step and
given back as soon as the backward pass is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from socflower import _int8
from socflower.errors import ConfigError
from socflower.precision import graph as ir
from socflower.precision.operators import (
    AddOperator,
    AveragePoolOperator,
    BatchNormOperator,
    ConvolutionOperator,
    MaxPoolOperator,
    Operator,
    ReluOperator,
    Step,
    Tensor,
    add_tensors,
)
from socflower.precision.region_cache import RegionCache
from socflower.precision.rounding_out import Int8Array

Fp32Factory = Callable[[ir.Fp32, Tensor, Tensor], Operator]


@dataclass(slots=True)
class _Gradients:
    """Gradients of one value, from each of its readers, until they are added up."""

    wanted: int
    parts: list[tuple[Int8Array, int]] = field(default_factory=list)


class Program:
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
    ) -> None:
        self.graph, self.batch = graph, batch
        self._engine, self._regions = engine, regions
        self._batch_blocks = batch_blocks
        self._fp32_factory = fp32_factory
        self.tensors = _tensors(graph, batch)
        self._num_readers = {name: len(graph.consumers(name)) for name in self.tensors}
        # Readers of a value with several leave its mask to the sum of their gradients.
        self._mask_of_sum = {
            name: tensor.masked and self._num_readers[name] > 1 for name, tensor in self.tensors.items()
        }
        for name, tensor in self.tensors.items():
            tensor.masked = tensor.masked and not self._mask_of_sum[name]
        self.workspace_bytes, self.accumulator_size = 64, 16
        for node in graph.nodes:
            operator = self._operator(node)
            self.workspace_bytes = max(self.workspace_bytes, operator.workspace_bytes)
            self.accumulator_size = max(self.accumulator_size, operator.accumulator_size())
            regions.release((batch, node.name, "operator"))

    def take_input(self, images: npt.NDArray[np.float32], exponent: int) -> None:
        """Round (batch, channels, h, w) float32 images to the input tensor."""
        tensor = self.tensors[ir.INPUT]
        tensor.data = self._array(ir.INPUT, "output", tensor)
        tensor.exponent = exponent
        channels, height, width = tensor.shape
        _int8.quantise_images(self._engine, images, tensor.data, self.batch, channels, height, width, exponent)

    def forward(self, step: Step) -> Tensor:
        """Run every operator and return the logits."""
        for node in self.graph.nodes:
            operator = self._operator(node)
            operator.output.data = self._array(node.name, "output", operator.output)
            operator.forward(step)
        return self.tensors[self.graph.output]

    def logits_gradient(self) -> Int8Array:
        """Return memory for the gradient of the logits, which `backward` starts from."""
        name = self.graph.output
        return self._array(name, "gradient", self.tensors[name])

    def backward(self, step: Step, logits_gradient: Int8Array, exponent: int) -> None:
        """Run every operator backward, updating its parameters, and give back what is no longer needed."""
        gradients = {name: _Gradients(wanted=count) for name, count in self._num_readers.items()}
        gradients[self.graph.output] = _Gradients(wanted=1, parts=[(logits_gradient, exponent)])
        for node in reversed(self.graph.nodes):
            operator = self._operator(node)
            output = operator.output
            output.gradient, output.gradient_exponent = self._sum(step, node.name, gradients[node.name])
            into: list[Int8Array | None] = []
            for place, (value, x) in enumerate(zip(node.inputs, operator.inputs, strict=True)):
                passes = isinstance(operator, AddOperator) and x.mask is None
                wanted = value != ir.INPUT and not passes
                into.append(self._array(value, f"gradient from {node.name}.{place}", x) if wanted else None)
            exponents = operator.backward(step, into)
            for value, target, target_exponent in zip(node.inputs, into, exponents, strict=True):
                # An addition without a mask hands on the very array that it was given.
                part = (output.gradient if target is None else target, target_exponent)
                if value != ir.INPUT:
                    gradients[value].parts.append(part)
            self._give_back(node, handed_on=any(target is None for target in into))
        self._regions.release((self.batch, ir.INPUT, "output"))

    def _sum(self, step: Step, name: str, gradients: _Gradients) -> tuple[Int8Array, int]:
        total = gradients.parts[0]
        for index, part in enumerate(gradients.parts[1:], start=1):
            tensor = self.tensors[name]
            out = self._array(name, f"gradient sum {index}", tensor)
            last = index == len(gradients.parts) - 1
            role = f"gradient sum {index}"
            exponent = add_tensors(
                f"{name} ({role})",
                step,
                step.tracker(name, role),
                total,
                part,
                out,
                rounding=step.algorithm.backward.rounding,
                mask=tensor.data if last and self._mask_of_sum[name] else None,
            )
            total = (out, exponent)
        return total

    def _give_back(self, node: ir.Node, *, handed_on: bool) -> None:
        self._regions.release((self.batch, node.name, "operator"))
        self._regions.release((self.batch, node.name, "output"))
        if handed_on:
            return  # its gradient is still read by the operators before an addition; the end of the step frees it
        self._regions.release((self.batch, node.name, "gradient"))
        for reader in self.graph.consumers(node.name):
            for place in range(len(reader.inputs)):
                self._regions.release((self.batch, node.name, f"gradient from {reader.name}.{place}"))
        for index in range(1, self._num_readers[node.name]):
            self._regions.release((self.batch, node.name, f"gradient sum {index}"))

    def _array(self, name: str, role: str, tensor: Tensor) -> Int8Array:
        shape = tensor.array_shape
        return self._regions.acquire((self.batch, name, role), int(np.prod(shape)), lambda: np.empty(shape, np.int8))

    def _operator(self, node: ir.Node) -> Operator:
        key = (self.batch, node.name, "operator")
        return self._regions.acquire(key, self._operator_bytes(node), lambda: self._build(node))

    def _operator_bytes(self, node: ir.Node) -> int:
        """Return the bytes of an operator's index tables and argmax."""
        output = int(np.prod(self.tensors[node.name].array_shape))
        if isinstance(node, ir.Convolution | ir.MaxPool | ir.AveragePool):
            pairs = node.kernel[0] * node.kernel[1] * node.shape[1] * node.shape[2]
            return 24 * pairs + (output if isinstance(node, ir.MaxPool) else 0)
        return 0

    def _build(self, node: ir.Node) -> Operator:
        inputs = [self.tensors[value] for value in node.inputs]
        output, x = self.tensors[node.name], inputs[0]
        match node:
            case ir.Convolution():
                channels, height, width = x.shape
                plan = _int8.Convolution(
                    self.batch, height, width, channels, node.shape[0], *node.kernel, *node.stride, *node.padding,
                    node.groups, min(self._batch_blocks.get(node.name, 0), self.batch),
                )  # fmt: skip
                return ConvolutionOperator(node, x, output, plan, plan.workspace_bytes(self._engine))
            case ir.BatchNorm():
                return BatchNormOperator(node, x, output)
            case ir.Relu():
                return ReluOperator(node, x, output)
            case ir.MaxPool():
                argmax = np.empty(output.array_shape, np.uint8)
                return MaxPoolOperator(node, x, output, self._pooling(node, x), argmax)
            case ir.AveragePool():
                return AveragePoolOperator(node, x, output, self._pooling(node, x))
            case ir.Add():
                return AddOperator(node, x, inputs[1], output)
            case ir.Fp32() if self._fp32_factory is not None:
                return self._fp32_factory(node, x, output)
        raise ConfigError(f"{node.name}: int8 training has no operator {getattr(node, 'operator', node.kind)!r}")

    def _pooling(self, node: ir.MaxPool | ir.AveragePool, x: Tensor) -> _int8.Pooling:
        channels, height, width = x.shape
        return _int8.Pooling(
            self.batch, height, width, channels, *node.kernel, *node.stride, *node.padding
        )


def _tensors(graph: ir.Graph, batch: int) -> dict[str, Tensor]:
    """Return the tensors of all values, with what is known of their signs and masks.

    A max-pool over a rectified value takes over its mask: a window's maximum is positive exactly where the chosen
    element is, and there are fewer maxima.
    """
    tensors = {ir.INPUT: Tensor(shape=graph.input_shape, batch=batch)}
    for node in graph.nodes:
        tensor = tensors[node.name] = Tensor(shape=node.shape, batch=batch)
        x = tensors[node.inputs[0]]
        match node:
            case ir.Convolution(relu=True) | ir.Add(relu=True) | ir.Relu():
                tensor.activations = tensor.masked = True
            case ir.BatchNorm(relu=True):
                tensor.activations = True  # it masks its gradient itself
            case ir.MaxPool():
                tensor.activations = x.activations
                if x.masked and len(graph.consumers(node.inputs[0])) == 1:
                    tensor.masked, x.masked = True, False
            case ir.AveragePool():
                tensor.activations = x.activations
    return tensors
