"""Building a network of the integer engine operation by operation, from the values that operations read and make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from socflower.model_graph.graph import ModelGraph, Operation
from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.operators.layout import ZERO, Rearrange, Select
from socflower.precision.int8.operators.parameter_value import ParameterValue
from socflower.precision.int8.operators.tables import LookupTable


class NoKernel(Exception):
    """Int8 training has no operator for a call. The text says what is missing."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the network: the node that makes it, and how the dimensions of the torch tensor lie in it."""

    name: str
    layout: ValueLayout

    @property
    def form(self) -> tuple[int, ...]:
        """Shape of the torch tensor, without the batch."""
        return self.layout.form


def form_of(operation: Operation) -> tuple[int, ...]:
    """Return the shape of a result without the batch. Raises NoKernel for one that has no sample in each row."""
    if operation.shape is None or not operation.is_of_samples:
        raise NoKernel("operator whose result has no entry for each sample")
    return operation.shape[1:]


class GraphBuilder:
    """The nodes made so far, and the value of each operation.

    Operations without a value here (numbers, sizes, tuples, parameters) are read by those that need them.
    """

    def __init__(self, module: nn.Module, captured: ModelGraph, input_shape: ir.Shape) -> None:
        self.module = module
        self.captured = captured
        self.submodules = dict(module.named_modules())
        self.nodes: list[ir.Node] = []
        self.values: dict[Operation, Value] = {}
        self._input_shape = input_shape
        # Parameters and buffers that `forward` reads by name.
        self._by_target: dict[str, Value] = {}
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._buffers = {
            name: buffer
            for name, buffer in module.state_dict(keep_vars=True).items()
            if name not in self._parameters and isinstance(buffer, torch.Tensor)
        }
        # Paths whose parameters have these names; no other node may have them.
        self._with_parameters = {name.rpartition(".")[0] for name in self._parameters}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Remove the nodes that were made inside if it ends with NoKernel."""
        count = len(self.nodes)
        try:
            yield
        except NoKernel:
            del self.nodes[count:]
            raise

    # ------------------------------------------------------------------------------------------------- values

    def value_of(self, read: Any) -> Value:
        """Return the value of an argument: an operation's result, a parameter or a buffer."""
        operation = self.captured.by_node[read] if isinstance(read, fx.Node) else read
        if not isinstance(operation, Operation):
            raise NoKernel(f"operator that reads {read!r}")
        found = self.values.get(operation)
        if found is None and operation.node.op == "get_attr":
            target = str(operation.node.target)
            found = self._by_target.get(target)
            if found is None or not any(node.name == found.name for node in self.nodes):
                found = self._by_target[target] = self._parameter_value(target)
        if found is None:
            raise NoKernel(f"operator that reads the value {operation.node.name}")
        return found

    def _parameter_value(self, target: str) -> Value:
        """Add a parameter or buffer of the module; its leading dimension of 1, if any, is repeated over the batch."""
        held = self._parameters.get(target, self._buffers.get(target))
        if held is None or not held.is_floating_point() or held.numel() == 0:
            raise NoKernel(f"operator that reads the tensor {target} of the module")
        shape = tuple(held.shape)
        is_trained = target in self._parameters and held.requires_grad
        value = self.put(
            ParameterValue,
            self.free_name(target),
            [],
            layouts.flat((held.numel(),)),
            outside=(("value", target, shape),),
            buffer=target not in self._parameters,
            frozen=() if is_trained else ("value",),
        )
        # Of any rank: the reader aligns the dimensions with those of its other operand.
        return Value(value.name, layouts.flat(shape))

    def aligned(self, value: Value, read: Any, rank: int) -> Value:
        """Return a value with as many dimensions as an operand of `rank` dimensions, the batch not counted.

        A parameter has no batch; where it has a dimension for it, that is 1.
        """
        form = list(value.form)
        operation = self.captured.by_node[read] if isinstance(read, fx.Node) else read
        has_batch = operation.node.op != "get_attr"
        if not has_batch and len(form) == rank + 1:
            if form[0] != 1:
                raise NoKernel(f"operator over the samples of {value.name}")
            form = form[1:]
        if len(form) > rank or (has_batch and len(form) < rank):
            raise NoKernel(f"broadcast of {value.name} of shape {tuple(form)}")
        form = [1] * (rank - len(form)) + form
        viewed = value.layout.viewed(form)
        assert viewed is not None
        return Value(value.name, viewed)

    def arranged(self, value: Value, layout: ValueLayout) -> Value:
        """Return the value in another layout of the same dimensions, with a `Rearrange` if values have to move."""
        if layouts.same_places(value.layout, layout):
            return Value(value.name, layout)
        settings = layouts.rearrangement(value.layout, layout)
        if settings is None:
            raise NoKernel(f"operator over {value.form} in this order of its elements")
        # An earlier reader may have needed the same.
        wanted = (value.name, layout.shape, settings)
        for node in self.nodes:
            if isinstance(node, Rearrange):
                found = {key: getattr(node, key) for key in settings}
                if (node.inputs[0], node.shape, found) == wanted:
                    return Value(node.name, layout)
        return self.put(
            Rearrange, self.free_name(f"{value.name}.layout"), [value], layout, **settings
        )

    def viewed(self, value: Value, form: Sequence[int]) -> Value:
        """Return the value after torch's `reshape`."""
        layout = value.layout.viewed(form)
        if layout is None:
            value = self.arranged(value, layouts.flat(value.form))
            whole = value.layout.viewed((math.prod(value.form),))
            assert whole is not None
            # One factor in the order of torch, which any shape divides.
            merged = ValueLayout(((math.prod(value.form),),), (), (), (0,))
            layout = merged.viewed(form)
        if layout is None:
            raise NoKernel(f"view of {value.form} as {tuple(form)}")
        return Value(value.name, layout)

    def in_torch_order(self, value: Value) -> Value:
        """Return the value such that its elements (channels, height, width) are in the order of the torch tensor."""
        channels, height, width = value.layout.shape
        order = value.layout.order().reshape(height * width, channels)
        if np.array_equal(order.T.reshape(-1), np.arange(order.size)):
            return value
        return self.arranged(value, layouts.images(value.form))

    # -------------------------------------------------------------------------------------------------- nodes

    def _is_taken(self, name: str) -> bool:
        is_used = any(node.name == name for node in self.nodes)
        return is_used or name in self._with_parameters or name in (ir.INPUT, "")

    def free_name(self, name: str) -> str:
        """Return a name that no node and no other module's parameters have."""
        while self._is_taken(name):
            name += "_"
        return name

    def first_free_name(self, name: str, other: str) -> str:
        """Return the name if it is free, and a name made of the other one if not."""
        return self.free_name(other) if self._is_taken(name) else name

    def put(
        self,
        kind: type[ir.Node],
        name: str,
        inputs: Sequence[Value],
        layout: ValueLayout,
        **settings: Any,
    ) -> Value:
        """Add a node and return its value."""
        node = kind(
            name=name,
            inputs=tuple(value.name for value in inputs),
            shape=layout.shape,
            **settings,
        )
        read = [self.shape_of(value.name) for value in inputs]
        if node.made_shape(read) != node.shape:
            raise NoKernel(f"{kind.__name__} from {read} to {node.shape}")
        self.nodes.append(node)
        return Value(name, layout)

    def shape_of(self, name: str) -> ir.Shape:
        """Return the shape of the value of that name."""
        for node in reversed(self.nodes):
            if node.name == name:
                return node.shape
        return self._input_shape

    def table(self, name: str, value: Value, function: str, *arguments: float) -> Value:
        """Add a function of each element."""
        return self.put(
            LookupTable,
            self.free_name(name),
            [value],
            value.layout,
            function=function,
            arguments=tuple(float(argument) for argument in arguments),
        )

    def select(self, name: str, value: Value, dims: Mapping[int, Sequence[int]]) -> Value:
        """Return the value with the elements chosen by index along some dimensions; -1 makes zeros."""
        if all(list(chosen) == list(range(value.form[dim])) for dim, chosen in dims.items()):
            return value
        value = self._with_whole_dimensions(value, dims)
        layout = value.layout
        sizes = list(layout.dims)
        # Every factor keeps its elements, but the single factor of a chosen dimension.
        chosen_of = {factor: range(size) for factor, size in enumerate(layout.sizes)}
        indices: dict[int, Sequence[int]] = dict(chosen_of)
        for dim, chosen in dims.items():
            sizes[dim] = (len(chosen),)
            indices[layout.factors_of(dim)[0]] = chosen
        made = ValueLayout(tuple(sizes), layout.rows, layout.columns, layout.channels)
        axes = {
            axis: _combined(
                [(layout.sizes[factor], indices[factor]) for factor in getattr(layout, axis)]
            )
            for axis in ("channels", "rows", "columns")
        }
        return self.put(Select, self.free_name(name), [value], made, **axes)

    def _with_whole_dimensions(self, value: Value, dims: Mapping[int, Sequence[int]]) -> Value:
        """Return the value such that each of the dimensions is one factor."""
        if all(len(value.layout.dims[dim]) == 1 for dim in dims):
            return value
        # A dimension of size 1 may have no factor, one of adjacent factors can be merged by an arrangement.
        return self.arranged(value, layouts.tokens(value.form))

    def expanded(self, name: str, value: Value, layout: ValueLayout) -> Value:
        """Return the value, whose sizes are those of `layout` or 1, repeated to its shape and in its arrangement."""
        wanted = layouts.like(layout, value.form)
        if wanted is None:
            raise NoKernel(f"broadcast from {value.form} to {layout.form}")
        value = self.arranged(value, wanted)
        if value.form == layout.form:
            return value
        indices: list[Sequence[int]] = []
        for own, size in zip(wanted.sizes, layout.sizes, strict=True):
            indices.append([0] * size if own < size else range(size))
        axes = {
            axis: _combined(
                [(wanted.sizes[factor], indices[factor]) for factor in getattr(layout, axis)]
            )
            for axis in ("channels", "rows", "columns")
        }
        return self.put(Select, self.free_name(name), [value], layout, **axes)

    # ------------------------------------------------------------------------------------------------- the end

    def pruned(self, output: str) -> list[ir.Node]:
        """Return the nodes that the output depends on."""
        needed = {output}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(node.inputs)
        return [node for node in self.nodes if node.name in needed]


def _combined(factors: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
    """Return indices into an axis of several factors, of the indices into each: (size, chosen)."""
    combined = [0]
    for size, chosen in factors:
        grown: list[int] = []
        for outer in combined:
            for index in chosen:
                is_zero = outer == ZERO or index == ZERO
                grown.append(ZERO if is_zero else outer * size + index)
        combined = grown
    return tuple(combined)
