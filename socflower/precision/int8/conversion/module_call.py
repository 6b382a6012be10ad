"""A captured call of a torch module, and what every rule for modules asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from socflower.model_graph.graph import Operation
from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import GraphBuilder, NoKernel, Value, form_of
from socflower.precision.int8.conversion.value_layout import ValueLayout
from socflower.precision.int8.operators.sample_norm import SampleNorm


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module on one value. `name` is the module's path, or the name of a function that does the same."""

    builder: GraphBuilder
    module: Any
    name: str
    operation: Operation
    x: Value
    in_evaluation: bool = False

    def require(self, fits: bool, how: str = "") -> None:
        """Raise NoKernel, with `how` the module is set, unless it fits."""
        if not fits:
            raise NoKernel(f"{type(self.module).__name__} {how}".rstrip())

    def require_settings(self, **fitting: Sequence[Any]) -> None:
        """Raise NoKernel for a setting with another value than those that fit."""
        for name, values in fitting.items():
            value = getattr(self.module, name)
            self.require(value in values, f"with {name} = {value!r}")

    def require_plain_parameters(self) -> None:
        """Raise NoKernel for a layer whose weight or bias torch computes from other parameters before each call."""
        own = dict(self.module.named_parameters(recurse=False))
        for name in ("weight", "bias"):
            is_plain = name in own or getattr(self.module, name, None) is None
            self.require(
                is_plain,
                f"whose {name} is computed from other parameters, as by weight_norm or pruning; take that off",
            )

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that are not trained."""
        parameters = self.module.named_parameters()
        return tuple(name for name, part in parameters if not part.requires_grad)

    def image(self) -> Value:
        """Return the input as (channels, height, width), (channels, length) or (features,)."""
        self.require(len(self.x.form) in (1, 2, 3), f"of {len(self.x.form) + 1} dimensions")
        return self.builder.arranged(self.x, layouts.images(self.x.form))

    def put(self, kind: type[ir.Node], x: Value, layout: ValueLayout, **settings: Any) -> Value:
        """Add a node of the module's name, with its parameters."""
        if not issubclass(kind, ir.Weighted | ir.BatchNorm | SampleNorm):
            # A ReLU or a pool may run in several places.
            name = self.builder.first_free_name(self.name, self.operation.node.name)
            return self.builder.put(kind, name, [x], layout, **settings)
        return self.builder.put(kind, self.name, [x], layout, frozen=self.frozen, **settings)

    def made(self) -> ValueLayout:
        """Return the layout of an image of the shape that torch makes."""
        return layouts.images(form_of(self.operation))

    def on(self, x: Value, module: nn.Module, name: str) -> ModuleCall:
        """Return the call of another module, a part of this one, on a value."""
        return replace(self, x=x, module=module, name=name)


def pair(value: Any, rank: int, of_row: int = 1) -> ir.Pair:
    """Return a setting of one number a dimension as (height, width); an image of one row has `of_row` there."""
    if isinstance(value, int):
        value = (value,) * rank
    return image_pair(tuple(value) if len(value) == rank else tuple(value) * rank, of_row)


def image_pair(value: Sequence[int], of_row: int = 1) -> ir.Pair:
    """Return one or two numbers as (height, width); an image of one row has `of_row` as height."""
    return (int(value[0]), int(value[1])) if len(value) == 2 else (of_row, int(value[0]))
