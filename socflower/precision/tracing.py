"""From a torch module to a graph of the integer engine, through torch.fx."""

from __future__ import annotations

import contextlib
import io
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from socflower._int8 import MAX_EXACT_DEPTH
from socflower.errors import ConfigError
from socflower.precision import graph as ir

MAX_WINDOW = 256
"""Pixels of a pooling window: the engine keeps the place of a maximum in a byte."""

_WITHOUT_PARAMETERS = ("relu", "max-pool", "average-pool", "add")
_RELUS = (torch.relu, nn.functional.relu, "relu")
_ADDS = (operator.add, torch.add, "add")
_FLATTENS = (torch.flatten, "flatten", "view", "reshape", torch.reshape)
_SIZES = ("size", getattr, operator.getitem)
"""What a `view` is told the batch with: no tensor, so no operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A module as a graph, its parameters as arrays, and the modules of the operators on the FP32 side."""

    graph: ir.Graph
    state: dict[str, npt.NDArray[np.float32]]
    modules: dict[str, nn.Module]


def trace(
    module: nn.Module,
    input_shape: ir.Shape,
    *,
    fp32_operators: Sequence[str] = (),
    unsupported: Literal["refuse", "fp32"] = "refuse",
) -> Traced:
    """Return the graph of `module` for (n, *input_shape) inputs, ReLUs fused into the operators before them.

    Raises ConfigError for a module that torch.fx cannot follow and, naming module and operator, for what int8 cannot
    do and `fp32_operators` does not list; with `unsupported` "fp32" only for what is no module of its own.
    """
    try:
        traced = fx.symbolic_trace(module)
    except Exception as error:  # fx raises many types, TraceError and TypeError among them
        raise ConfigError(f"torch.fx cannot follow {type(module).__name__}: {error}") from None
    placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != 1:
        raise ConfigError(f"the network reads {', '.join(placeholders)}; int8 training takes one tensor of images")
    traced.graph.eliminate_dead_code()
    modes = [(part, part.training) for part in module.modules()]
    traced.eval()  # so that the shapes of one zero image leave running statistics alone
    try:
        # fx prints the trace of an error that it also raises, and hangs its own report on the message.
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            ShapeProp(traced).propagate(torch.zeros(1, *input_shape))
    except Exception as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(f"{type(module).__name__} does not take images of shape {input_shape}: {reason}") from None
    finally:
        for part, training in modes:
            part.training = training
    builder = _Builder(traced, input_shape, set(fp32_operators), unsupported)
    for node in traced.graph.nodes:
        builder.add(node)
    unknown = set(fp32_operators) - set(builder.modules)
    if unknown:
        raise ConfigError(f"fp32_operators: the network has no {', '.join(sorted(unknown))}")
    state = {name: value.detach().cpu().float().numpy() for name, value in module.state_dict().items()}
    graph = ir.fuse_relu(ir.Graph(input_shape=input_shape, nodes=tuple(builder.nodes)))
    return Traced(graph=graph, state=state, modules=builder.modules)


class UnsupportedOperator(ConfigError):
    """A module that only the FP32 side can run."""


class _Builder:
    """Turns fx nodes into graph nodes, one by one."""

    def __init__(
        self, traced: fx.GraphModule, input_shape: ir.Shape, fp32_operators: set[str], unsupported: str
    ) -> None:
        self._modules = dict(traced.named_modules())
        self._values: dict[fx.Node, str] = {}
        self._shapes: dict[str, ir.Shape] = {ir.INPUT: input_shape}
        self._fp32_operators = fp32_operators
        self._unsupported = unsupported
        self._with_parameters = {name for name, part in self._modules.items() if list(part.parameters(recurse=False))}
        self.nodes: list[ir.Node] = []
        self.modules: dict[str, nn.Module] = {}

    def add(self, node: fx.Node) -> None:
        """Add what an fx node computes."""
        if node.op == "placeholder":
            self._values[node] = ir.INPUT
        elif node.op == "call_module":
            name = str(node.target)
            module = self._modules[name]
            try:
                if name in self._fp32_operators:
                    self._add_fp32(node, module, name)
                else:
                    self._add_module(node, module, name)
            except UnsupportedOperator:
                if self._unsupported == "refuse":
                    raise
                self._add_fp32(node, module, name)
        elif node.op in ("call_function", "call_method"):
            self._add_function(node)
        elif node.op == "output":
            value = node.args[0]
            if not isinstance(value, fx.Node):
                raise ConfigError("the network returns several values; int8 training needs the logits alone")
            if not self.nodes or self._values[value] != self.nodes[-1].name:
                raise ConfigError(f"the network computes {self.nodes[-1].name if self.nodes else 'nothing'} after its "
                                  "logits")  # fmt: skip
        else:
            raise ConfigError(f"{node.name}: int8 training cannot read the tensor {node.target} of the module")

    def _add_module(self, node: fx.Node, module: nn.Module, name: str) -> None:
        x = self._values[_tensor_argument(node)]
        match module:
            case nn.Conv2d():
                self._add_convolution(node, module, name, x)
            case nn.Linear():
                channels, height, width = self._shapes[x]
                if module.in_features != channels * height * width:
                    raise _refusal(name, module, "over the last dimension of an image")
                self._require_exact(name, module, (module.out_features, 1, 1), x, (height, width), 1)
                self._put(
                    node,
                    ir.Convolution(
                        name=name, inputs=(x,), shape=(module.out_features, 1, 1), kernel=(height, width),
                        bias=module.bias is not None, linear=True,
                    ),
                )  # fmt: skip
            case nn.BatchNorm2d():
                momentum = module.momentum
                if module.running_mean is None or not module.affine or momentum is None:
                    raise _refusal(name, module, "without running statistics, affine parameters or momentum")
                shape = self._shapes[x]
                self._put(node, ir.BatchNorm(name=name, inputs=(x,), shape=shape, eps=module.eps, momentum=momentum))
            case nn.ReLU():
                self._put(node, ir.Relu(name=name, inputs=(x,), shape=self._shapes[x]))
            case nn.MaxPool2d():
                if _pair(module.dilation) != (1, 1) or module.ceil_mode or module.return_indices:
                    raise _refusal(name, module, "with dilation, ceil_mode or return_indices")
                self._add_pool(ir.MaxPool, node, module, name, x)
            case nn.AvgPool2d():
                odd = module.divisor_override is not None or not module.count_include_pad
                if module.ceil_mode or (odd and _pair(module.padding) != (0, 0)) or module.divisor_override is not None:
                    raise _refusal(name, module, "with ceil_mode, a divisor or padding that does not count")
                self._add_pool(ir.AveragePool, node, module, name, x)
            case nn.AdaptiveAvgPool2d():
                self._add_adaptive_average(node, module, name, x)
            case nn.Flatten():
                self._require_flat(node, name, x)
            case nn.Identity():
                self._values[node] = x
            case nn.Dropout() if module.p == 0.0:
                self._values[node] = x
            case _:
                raise _refusal(name, module)

    def _add_function(self, node: fx.Node) -> None:
        tensors = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, fx.Node)]
        if node.target in _RELUS and len(tensors) == 1:
            x = self._values[tensors[0]]
            self._put(node, ir.Relu(name=node.name, inputs=(x,), shape=self._shapes[x]))
        elif node.target in _ADDS and len(tensors) == 2 and len(node.args) == 2 and not node.kwargs:
            a, b = (self._values[tensor] for tensor in tensors)
            if self._shapes[a] != self._shapes[b]:
                raise ConfigError(f"{node.name}: int8 training adds equal shapes, got {self._shapes[a]} and "
                                  f"{self._shapes[b]}")  # fmt: skip
            self._put(node, ir.Add(name=node.name, inputs=(a, b), shape=self._shapes[a]))
        elif node.target in _FLATTENS and tensors:
            self._require_flat(node, node.name, self._values[tensors[0]])
        elif node.target in _SIZES and "tensor_meta" not in node.meta:
            return
        else:
            target = getattr(node.target, "__name__", str(node.target))
            raise ConfigError(
                f"{node.name}: int8 training has no operator {target!r}; make it a module and list it in "
                "fp32_operators to run it in FP32"
            )

    def _add_convolution(self, node: fx.Node, module: nn.Conv2d, name: str, x: str) -> None:
        if _pair(module.dilation) != (1, 1) or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise _refusal(name, module, "with dilation, padding by name or other padding than zeros")
        self._require_exact(name, module, _output_shape(node), x, _pair(module.kernel_size), module.groups)
        self._put(
            node,
            ir.Convolution(
                name=name, inputs=(x,), shape=_output_shape(node), kernel=_pair(module.kernel_size),
                stride=_pair(module.stride), padding=_pair(module.padding), groups=module.groups,
                bias=module.bias is not None,
            ),
        )  # fmt: skip

    def _require_exact(
        self, name: str, module: nn.Module, shape: ir.Shape, x: str, kernel: ir.Pair, groups: int
    ) -> None:
        depth = kernel[0] * kernel[1] * max(self._shapes[x][0], shape[0]) // groups
        if depth > MAX_EXACT_DEPTH:
            raise _refusal(name, module, f"with sums of {depth} products, where int32 surely holds {MAX_EXACT_DEPTH}")

    def _add_pool(
        self, kind: type[ir.MaxPool] | type[ir.AveragePool], node: fx.Node, module: Any, name: str, x: str
    ) -> None:
        _require_small_window(name, module, _pair(module.kernel_size))
        self._put(
            node,
            kind(
                name=name, inputs=(x,), shape=_output_shape(node), kernel=_pair(module.kernel_size),
                stride=_pair(module.stride), padding=_pair(module.padding),
            ),
        )  # fmt: skip

    def _add_adaptive_average(self, node: fx.Node, module: nn.AdaptiveAvgPool2d, name: str, x: str) -> None:
        _, height, width = self._shapes[x]
        _, out_h, out_w = shape = _output_shape(node)
        if height % out_h or width % out_w:
            raise _refusal(name, module, f"from {height}x{width} to {out_h}x{out_w}, whose windows differ in size,")
        window = (height // out_h, width // out_w)
        _require_small_window(name, module, window)
        self._put(node, ir.AveragePool(name=name, inputs=(x,), shape=shape, kernel=window, stride=window))

    def _add_fp32(self, node: fx.Node, module: nn.Module, name: str) -> None:
        x = self._values[_tensor_argument(node)]
        shape = _output_shape(node)
        flat = len(_tensor_argument(node).meta["tensor_meta"].shape) == 2
        self._put(node, ir.Fp32(name=name, inputs=(x,), shape=shape, operator=type(module).__name__, flat=flat))
        self.modules[name] = module

    def _require_flat(self, node: fx.Node, name: str, x: str) -> None:
        if tuple(node.meta["tensor_meta"].shape[1:]) != (int(np.prod(self._shapes[x])),):
            raise ConfigError(f"{name}: int8 training flattens (n, c, h, w) to (n, c*h*w) only")
        self._values[node] = x  # the linear layer that follows covers the image

    def _free_name(self, name: str) -> str:
        while name in self._shapes or name in self._with_parameters:
            name += "_"
        return name

    def _put(self, node: fx.Node, made: ir.Node) -> None:
        if made.kind in _WITHOUT_PARAMETERS and (made.name in self._shapes or made.name in self._with_parameters):
            made = replace(made, name=self._free_name(node.name))  # a ReLU or pool that runs in several places
        self.nodes.append(made)
        self._values[node] = made.name
        self._shapes[made.name] = made.shape


def _require_small_window(name: str, module: nn.Module, window: ir.Pair) -> None:
    if window[0] * window[1] > MAX_WINDOW:
        raise _refusal(name, module, f"with windows of {window[0]}x{window[1]}, more than {MAX_WINDOW} pixels")


def _refusal(name: str, module: nn.Module, how: str = "") -> UnsupportedOperator:
    what = type(module).__name__ + (f" {how}" if how else "")
    remedy = f"list {name!r} in fp32_operators to run it in FP32"
    return UnsupportedOperator(f"{name}: int8 training has no {what}; {remedy}")


def _tensor_argument(node: fx.Node) -> fx.Node:
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def _pair(value: Any) -> ir.Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _output_shape(node: fx.Node) -> ir.Shape:
    shape = tuple(node.meta["tensor_meta"].shape[1:])
    channels, height, width = shape if len(shape) == 3 else (shape[0], 1, 1)
    return channels, height, width
