"""An ONNX graph as a torch.fx graph: its values, constants and the operators that are translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import fx, nn
from torch.func import functional_call

from socflower.errors import ConfigError, require_known

BATCH = 1_000_003
"""The batch while a network is built. It is a prime: a length that is a multiple of it has the batch in it."""

Value: TypeAlias = "fx.Node | np.ndarray[Any, Any]"
"""Of an input or a result of an operator: a value of the network, or a constant."""

Translation: TypeAlias = "Callable[[Call], Value | list[Value]]"
"""Adds an operator to the network, or computes it from constants; returns its results."""

REARRANGING = ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")
"""Operators after which a weight is still one."""


@dataclass
class OnnxNetwork:
    """A network while it is built: values by their names in the file, and torch's graph so far."""

    file: str
    source: Any
    translations: Mapping[str, Translation]
    keep_softmax: bool
    root: nn.Module = field(default_factory=nn.Module)
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[str, Value] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    own_batch: int = 1

    def build(self) -> fx.GraphModule:
        """Translate all operators in their order."""
        from onnx import numpy_helper

        for constant in self.source.initializer:
            self.values[constant.name] = numpy_helper.to_array(constant)
            self.weights.add(constant.name)
        inputs = [each for each in self.source.input if each.name not in self.values]
        if len(inputs) != 1 or len(self.source.output) != 1:
            raise ConfigError(
                f"{self.file}: has {len(inputs)} inputs and {len(self.source.output)} outputs; "
                "a network of one input and one output is read"
            )
        self._add_input(inputs[0])
        nodes = list(self.source.node)
        output = self.source.output[0].name
        for at, node in enumerate(nodes):
            is_last = at == len(nodes) - 1 and output in node.output
            if node.op_type in ("Softmax", "LogSoftmax") and is_last and not self.keep_softmax:
                self.values[output] = self.values[node.input[0]]
                continue
            require_known(f"{self.file}: operator", node.op_type, self.translations)
            self._translate(Call(self, node))
        result = self.values[output]
        if not isinstance(result, fx.Node):
            raise ConfigError(f"{self.file}: its output does not depend on its input")
        self.graph.output(result)
        module = fx.GraphModule(self.root, self.graph, "OnnxModel")
        module.graph.eliminate_dead_code()
        module.recompile()
        module.delete_all_unused_submodules()
        self._require_separate_samples(module.eval())
        return module.train()

    def _translate(self, call: Call) -> None:
        try:
            found = self.translations[call.kind](call)
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise call.refuse(f"{why}; try a file with a free batch size") from None
        results = found if isinstance(found, list) else [found]
        self.values.update(zip(call.output_names, results, strict=False))
        # A weight that is only turned round stays one.
        if call.kind in REARRANGING and isinstance(found, np.ndarray) and call.is_weight(0):
            self.weights.update(call.output_names)

    def _require_separate_samples(self, module: fx.GraphModule) -> None:
        """Refuse a file of one batch size whose shapes were taken for those of another axis."""
        node = next(iter(self.graph.nodes))
        shape, kind = node.meta["value"].shape[1:], node.meta["value"].dtype
        generator = torch.Generator().manual_seed(0)
        if kind.is_floating_point:
            x = torch.rand((3, *shape), generator=generator)
        else:
            x = torch.randint(0, 2, (3, *shape), generator=generator)
        with torch.no_grad():
            together, alone = module(x), torch.cat([module(x[at : at + 1]) for at in range(3)])
        tolerance = 1e-4 * float(alone.abs().max())
        is_alike = together.shape == alone.shape and len(together) == 3
        if not (is_alike and torch.allclose(together, alone, rtol=1e-3, atol=tolerance)):
            raise ConfigError(
                f"{self.file}: mixes the samples of a batch; export it with a free batch size"
            )

    def _add_input(self, given: Any) -> None:
        tensor = given.type.tensor_type
        lengths = [each.dim_value for each in tensor.shape.dim]
        self.own_batch = max(1, lengths[0]) if lengths else 1
        if not lengths or not all(lengths[1:]):
            raise ConfigError(
                f"{self.file}: input {given.name!r} has shape {lengths} (0: unknown); "
                "all lengths but the first must be known"
            )
        kind = torch.int64 if tensor.elem_type in (6, 7) else torch.float32
        node = self.graph.placeholder("x")
        node.meta["value"] = torch.empty([BATCH, *lengths[1:]], dtype=kind, device="meta")
        self.values[given.name] = node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function."""
        return self._with_value(self.graph.call_function(target, args, kwargs), target)

    def call_module(self, name: str, module: nn.Module, x: fx.Node) -> fx.Node:
        """Add a module and its call."""
        unique = name.replace(".", "_").strip("/").replace("/", "_") or "layer"
        while hasattr(self.root, unique):
            unique += "_"
        # Else the call for the shape of its result would count as a batch of a BatchNorm.
        self.root.add_module(unique, module.eval())
        tensors = chain(module.named_parameters(), module.named_buffers())
        shapes = {key: _without_values(tensor) for key, tensor in tensors}
        return self._with_value(
            self.graph.call_module(unique, (x,)),
            lambda value: functional_call(module, shapes, (value,)),
        )

    def parameter(self, name: str, values: np.ndarray[Any, Any]) -> fx.Node:
        """Return a constant as a value: one of the file's weights as a parameter, another one as a buffer."""
        unique = "".join(letter if letter.isalnum() else "_" for letter in f"value_{name}")
        if not hasattr(self.root, unique):
            tensor = torch.from_numpy(np.array(values))
            if tensor.is_floating_point() and name in self.weights:
                self.root.register_parameter(unique, nn.Parameter(tensor.float()))
            else:
                self.root.register_buffer(unique, tensor, persistent=False)
        node = self.graph.get_attr(unique)
        node.meta["value"] = _without_values(getattr(self.root, unique))
        return node

    def _with_value(self, node: fx.Node, target: Callable[..., Any]) -> fx.Node:
        def value_of(argument: fx.Node) -> Any:
            return argument.meta["value"]

        with torch.no_grad():
            args = fx.map_arg(node.args, value_of)
            node.meta["value"] = target(*args, **fx.map_arg(node.kwargs, value_of))
        return node


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


class Call:
    """An operator of the file that is being translated."""

    def __init__(self, network: OnnxNetwork, node: Any) -> None:
        from onnx import helper

        self.network = network
        self.name = node.name or node.output[0]
        self.kind = node.op_type
        self.output_names = list(node.output)
        self.input_names = list(node.input)
        self.inputs: list[Value | None] = [
            network.values[name] if name else None for name in node.input
        ]
        self.attributes: dict[str, Any] = {
            each.name: helper.get_attribute_value(each) for each in node.attribute
        }

    def refuse(self, what: str) -> ConfigError:
        """Return the error for something that has no translation."""
        return ConfigError(f"{self.network.file}: {self.kind} {self.name!r}: {what}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute; text as str."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def is_weight(self, at: int) -> bool:
        """Whether an input is a weight of the file, and no constant that its graph computes."""
        return self.input_names[at] in self.network.weights

    @property
    def x(self) -> fx.Node:
        """The first input, as a value of the network."""
        return self.value(0)

    def value(self, at: int) -> fx.Node:
        """Return an input as a value of the network."""
        found = self.inputs[at]
        if found is None:
            raise self.refuse(f"input {at} is missing")
        if isinstance(found, fx.Node):
            return found
        return self.network.parameter(self.input_names[at], found)

    def constant(self, at: int) -> np.ndarray[Any, Any] | None:
        """Return an input that must be a constant, or None if there is none."""
        found = self.inputs[at] if at < len(self.inputs) else None
        if isinstance(found, fx.Node):
            raise self.refuse(f"input {at} depends on the network's input; a constant is read")
        return found

    def required(self, at: int) -> np.ndarray[Any, Any]:
        """Return an input that must be a constant."""
        found = self.constant(at)
        if found is None:
            raise self.refuse(f"input {at} is missing")
        return found

    def integers(self, at: int, attribute: str) -> list[int] | None:
        """Return whole numbers that older files have as an attribute and newer ones as an input."""
        if attribute in self.attributes:
            return [int(each) for each in self.attributes[attribute]]
        found = self.constant(at)
        return None if found is None else [int(each) for each in found.reshape(-1)]

    def shape(self, at: int = 0) -> torch.Size:
        """Return the shape of an input, with `BATCH` as the batch."""
        found = self.inputs[at]
        if isinstance(found, fx.Node):
            shape: torch.Size = found.meta["value"].shape
            return shape
        return torch.Size(self.required(at).shape)

    def module(self, module: nn.Module, x: fx.Node | None = None) -> fx.Node:
        """Add a module that reads the first input, or `x`."""
        return self.network.call_module(self.name, module, x or self.x)

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call."""
        return self.network.call(target, *args, **kwargs)
