"""Conversion of a torch module to a graph of the integer engine, through torch.fx.

A module is captured in training mode. A module that runs in FP32 is a leaf: torch.fx does not capture its inside, so
it may compute anything that returns one tensor for one tensor.
"""

from __future__ import annotations

import contextlib
import io
import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from socflower._int8 import MAX_EXACT_DEPTH
from socflower.capture.random_state import forked_generator
from socflower.errors import ConfigError
from socflower.precision.int8 import network as ir
from socflower.precision.int8.network import UnsupportedOperator

MAX_WINDOW = 256
"""Pixels of a pooling window: the engine stores the position of a maximum in a byte."""

_WITHOUT_PARAMETERS = ("relu", "max-pool", "average-pool", "add", "dropout")
_RELUS = (torch.relu, nn.functional.relu, "relu")
_ADDS = (operator.add, torch.add, "add")
_FLATTENS = (torch.flatten, "flatten", "view", "reshape", torch.reshape)
_DROPOUTS = (nn.functional.dropout, nn.functional.dropout2d)
_SIZES = ("size", getattr, operator.getitem)
"""Functions that read a size for `view`: their result is no tensor, so they need no operator."""


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

    Raises ConfigError if torch.fx cannot capture the module. Raises UnsupportedOperator, with module and operator, for
    an operator without an int8 kernel that `fp32_operators` does not list; with `unsupported` "fp32" only if it is
    called by the network itself and not inside a submodule.
    """
    leaves = set(fp32_operators)
    modes = [(part, part.training) for part in module.modules()]
    while True:
        try:
            captured = _capture_with_shapes(module, input_shape, leaves)
            # In a model in training mode, layers in evaluation mode are so on purpose.
            in_evaluation = {id(part) for part, training in modes if modes[0][1] and not training}
            builder = _Builder(captured, input_shape, leaves, unsupported, in_evaluation)
            for node in captured.graph.nodes:
                builder.add(node)
            _require_untied(module, builder.nodes)
            break
        except UnsupportedOperator as error:
            # The operator is in the `forward` of a user's module: that whole module becomes a leaf.
            if unsupported == "refuse":
                # Capture the rest as well, so that one error lists every such module.
                rest = trace(module, input_shape, fp32_operators=fp32_operators, unsupported="fp32").graph
                modules = [node.path for node in rest.nodes if isinstance(node, ir.Fp32)]
                raise UnsupportedOperator(error.what, error.module, list(dict.fromkeys(modules))) from None
            if error.module in ("", *leaves):
                raise
            leaves.add(error.module)
        finally:
            for part, training in modes:
                part.training = training
    unknown = set(fp32_operators) - {node.path for node in builder.nodes if isinstance(node, ir.Fp32)}
    if unknown:
        raise ConfigError(f"fp32_operators: the network calls no {', '.join(sorted(unknown))}; it calls "
                          + ", ".join(str(node.target) for node in captured.graph.nodes if node.op == "call_module"))
    state = {name: value.detach().cpu().float().numpy() for name, value in module.state_dict().items()}
    graph = ir.fuse_relu(ir.Graph(input_shape=input_shape, nodes=tuple(builder.nodes)))
    return Traced(graph=graph, state=state, modules=builder.modules)


def _require_untied(module: nn.Module, nodes: Sequence[ir.Node]) -> None:
    """Raise UnsupportedOperator for operators that share a parameter, unless one FP32 operator holds them all.

    Each operator of the engine has its own weights, so tied weights would diverge.
    """
    in_fp32 = [node.path for node in nodes if isinstance(node, ir.Fp32)]
    by_address: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.numel():
            # By address, not by identity: a parameter made from another's tensor shares its memory as well.
            by_address.setdefault(parameter.data_ptr(), []).append(name)
    for names in by_address.values():
        if len(names) < 2 or any(all(name.startswith(f"{path}.") for name in names) for path in in_fp32):
            continue
        around = _innermost_common_module(names)
        raise UnsupportedOperator(f"{' and '.join(names)} are one parameter, and int8 training has no operators that "
                                  "share their weights: give each layer its own, train with FP32Trainer, or run what "
                                  "shares it in FP32", around)


def _innermost_common_module(names: Sequence[str]) -> str:
    """Return the path of the innermost module that holds all these parameters, "" for the network."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


class _Tracer(fx.Tracer):
    """Captures a module down to torch's own layers and to `leaves`."""

    def __init__(self, leaves: Set[str]) -> None:
        super().__init__()
        self._leaves = leaves
        self.failed_in = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or self.path_of_module(m)  # the innermost module fails first
            raise


def _capture_with_shapes(module: nn.Module, input_shape: ir.Shape, leaves: Set[str]) -> fx.GraphModule:
    """Return the module's graph in training mode, with the shapes of one image; changes the modules' modes."""
    with forked_generator():  # random draws in `forward` must not change the caller's random state
        return _capture_in_both_modes(module, input_shape, leaves)


def _capture_in_both_modes(module: nn.Module, input_shape: ir.Shape, leaves: Set[str]) -> fx.GraphModule:
    module.train()
    captured = _capture_symbolically(module, leaves)
    placeholders = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != 1:
        raise ConfigError(f"the network reads {', '.join(placeholders)}; int8 training takes one tensor of images")
    module.eval()  # also keeps shape propagation from changing running statistics
    _require_same_in_evaluation(captured, _capture_symbolically(module, leaves))
    captured.graph.eliminate_dead_code()
    try:
        # fx prints the traceback of an error that it also raises, and appends its own report to the message.
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            ShapeProp(captured).propagate(torch.zeros(1, *input_shape))
    except Exception as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(f"{type(module).__name__} does not take images of shape {input_shape}: {reason}") from None
    return captured


def _require_same_in_evaluation(training: fx.GraphModule, evaluation: fx.GraphModule) -> None:
    """Record for each functional dropout whether it is off in evaluation; raise if anything else differs."""
    pairs = list(zip_longest(training.graph.nodes, evaluation.graph.nodes))
    for one, other in pairs:
        alike = one is not None and other is not None and (one.op, one.target) == (other.op, other.target)
        if alike and one.target in _DROPOUTS:
            one.meta["off_in_evaluation"] = not _dropout_settings(other)[1]
        elif not alike or repr((one.args, one.kwargs)) != repr((other.args, other.kwargs)):
            at = max((node for node in (one, other) if node is not None), key=lambda node: _enclosing(node).count("."))
            raise UnsupportedOperator(f"{at.name}: the network computes something else in evaluation than in training, "
                                      "where in int8 only dropout and BatchNorm may differ", _enclosing(at))


def _capture_symbolically(module: nn.Module, leaves: Set[str]) -> fx.GraphModule:
    tracer = _Tracer(leaves)
    try:
        graph = tracer.trace(module)
        return fx.GraphModule(tracer.root, graph)
    except Exception as error:  # fx raises many types, TraceError and TypeError among them
        failed = module.get_submodule(tracer.failed_in) if tracer.failed_in else module
        reason = str(error).strip().partition("\n")[0]
        what = f"torch.fx cannot follow {type(failed).__name__}: {reason}"
        if tracer.failed_in:
            raise UnsupportedOperator(f"{tracer.failed_in}: {what}", tracer.failed_in) from None
        raise ConfigError(what) from None


class _Builder:
    """Turns fx nodes into graph nodes, one by one."""

    def __init__(
        self, captured: fx.GraphModule, input_shape: ir.Shape, fp32_operators: Set[str], unsupported: str,
        in_evaluation: Set[int],
    ) -> None:  # fmt: skip
        self._modules = dict(captured.named_modules())
        self._values: dict[fx.Node, str] = {}
        self._shapes: dict[str, ir.Shape] = {ir.INPUT: input_shape}
        self._fp32_operators = fp32_operators
        self._unsupported = unsupported
        self._in_evaluation = in_evaluation
        self._with_parameters = {name for name, part in self._modules.items() if list(part.parameters(recurse=False))}
        self.nodes: list[ir.Node] = []
        self.modules: dict[str, nn.Module] = {}

    def add(self, node: fx.Node) -> None:
        """Add the operators of an fx node."""
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
            except UnsupportedOperator as error:
                if self._unsupported == "refuse" or error.module != name:
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
            # A submodule may read a tensor of its parent, so the error names the module that reads the value.
            readers = {_enclosing(user) for user in node.users}
            where = readers.pop() if len(readers) == 1 else ""
            raise UnsupportedOperator(f"{node.name}: int8 training cannot read the tensor {node.target} of the module",
                                      where)

    def _add_module(self, node: fx.Node, module: nn.Module, name: str) -> None:
        x = self._values[_tensor_argument(node)]
        _require_plain_parameters(node, module)
        match module:
            case nn.Conv2d():
                self._add_convolution(node, module, name, x)
            case nn.Linear():
                channels, height, width = self._shapes[x]
                if module.in_features != channels * height * width:
                    raise _refusal(node, module, "over the last dimension of an image")
                self._require_exact(node, module, (module.out_features, 1, 1), x, (height, width), 1)
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
                    raise _refusal(node, module, "without running statistics, affine parameters or momentum")
                shape = self._shapes[x]
                self._put(node, ir.BatchNorm(name=name, inputs=(x,), shape=shape, eps=module.eps, momentum=momentum))
            case nn.ReLU():
                self._put(node, ir.Relu(name=name, inputs=(x,), shape=self._shapes[x]))
            case nn.MaxPool2d():
                if _pair(module.dilation) != (1, 1) or module.ceil_mode or module.return_indices:
                    raise _refusal(node, module, "with dilation, ceil_mode or return_indices")
                self._add_pool(ir.MaxPool, node, module, name, x)
            case nn.AvgPool2d():
                odd = module.divisor_override is not None or not module.count_include_pad
                if module.ceil_mode or (odd and _pair(module.padding) != (0, 0)) or module.divisor_override is not None:
                    raise _refusal(node, module, "with ceil_mode, a divisor or padding that does not count")
                self._add_pool(ir.AveragePool, node, module, name, x)
            case nn.AdaptiveAvgPool2d():
                self._add_adaptive_average(node, module, name, x)
            case nn.Flatten():
                self._require_flat(node, name, x)
            case nn.Identity():
                self._values[node] = x
            case nn.Dropout() | nn.Dropout2d():
                p = 0.0 if id(module) in self._in_evaluation else module.p
                self._add_dropout(node, name, x, p, channelwise=isinstance(module, nn.Dropout2d))
            case _:
                raise _refusal(node, module)

    def _add_function(self, node: fx.Node) -> None:
        tensors = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, fx.Node)]
        if node.target in _RELUS and len(tensors) == 1:
            x = self._values[tensors[0]]
            self._put(node, ir.Relu(name=node.name, inputs=(x,), shape=self._shapes[x]))
        elif node.target in _DROPOUTS and len(tensors) == 1:
            self._add_functional_dropout(node, self._values[tensors[0]])
        elif node.target in _ADDS and len(tensors) == 2 and len(node.args) == 2 and not node.kwargs:
            a, b = (self._values[tensor] for tensor in tensors)
            if self._shapes[a] != self._shapes[b]:
                raise _refused_function(node, f"adds equal shapes, got {self._shapes[a]} and {self._shapes[b]}")
            self._put(node, ir.Add(name=node.name, inputs=(a, b), shape=self._shapes[a]))
        elif node.target in _FLATTENS and tensors:
            self._require_flat(node, node.name, self._values[tensors[0]])
        elif node.target in _SIZES and "tensor_meta" not in node.meta:
            return
        else:
            target = getattr(node.target, "__name__", str(node.target))
            raise _refused_function(node, f"has no operator {target!r}")

    def _add_convolution(self, node: fx.Node, module: nn.Conv2d, name: str, x: str) -> None:
        if _pair(module.dilation) != (1, 1) or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise _refusal(node, module, "with dilation, padding by name or other padding than zeros")
        self._require_exact(node, module, _output_shape(node), x, _pair(module.kernel_size), module.groups)
        self._put(
            node,
            ir.Convolution(
                name=name, inputs=(x,), shape=_output_shape(node), kernel=_pair(module.kernel_size),
                stride=_pair(module.stride), padding=_pair(module.padding), groups=module.groups,
                bias=module.bias is not None,
            ),
        )  # fmt: skip

    def _add_functional_dropout(self, node: fx.Node, x: str) -> None:
        p, training = _dropout_settings(node)
        if not training:
            self._values[node] = x
        elif not node.meta["off_in_evaluation"]:
            raise _refused_function(node, "has no dropout that goes on in evaluation: give it training=self.training")
        else:
            self._add_dropout(node, node.name, x, p, channelwise=node.target is nn.functional.dropout2d)

    def _add_dropout(self, node: fx.Node, name: str, x: str, p: float, *, channelwise: bool) -> None:
        if p == 0.0:
            self._values[node] = x
            return
        if channelwise and len(node.meta["tensor_meta"].shape) != 4:
            where = name if node.op == "call_module" else _enclosing(node)
            raise UnsupportedOperator(f"{name}: int8 training has no Dropout2d of anything but (n, c, h, w)", where)
        self._put(node, ir.Dropout(name=name, inputs=(x,), shape=self._shapes[x], p=p, channelwise=channelwise))

    def _require_exact(
        self, node: fx.Node, module: nn.Module, shape: ir.Shape, x: str, kernel: ir.Pair, groups: int
    ) -> None:
        depth = kernel[0] * kernel[1] * max(self._shapes[x][0], shape[0]) // groups
        if depth > MAX_EXACT_DEPTH:
            raise _refusal(node, module, f"with sums of {depth} products, where int32 surely holds {MAX_EXACT_DEPTH}")

    def _add_pool(
        self, kind: type[ir.MaxPool] | type[ir.AveragePool], node: fx.Node, module: Any, name: str, x: str
    ) -> None:
        _require_small_window(node, module, _pair(module.kernel_size))
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
            raise _refusal(node, module, f"from {height}x{width} to {out_h}x{out_w}, whose windows differ in size,")
        window = (height // out_h, width // out_w)
        _require_small_window(node, module, window)
        self._put(node, ir.AveragePool(name=name, inputs=(x,), shape=shape, kernel=window, stride=window))

    def _add_fp32(self, node: fx.Node, module: nn.Module, name: str) -> None:
        if not _fits_fp32(node):
            around = _enclosing(node)
            remedy = f"say fp32_operators=[{around!r}]" if around else "put it into a module that does, and list that"
            raise ConfigError(f"{name}: in FP32 runs what makes one tensor (n, c, h, w) or (n, features) of one such "
                              f"tensor, which {type(module).__name__} does not; {remedy}")
        x = self._values[_tensor_argument(node)]
        if not list(module.state_dict()):  # without state it shares nothing, so it may run in several places
            name = self._free_name(name)
        own = tuple(dict(module.named_parameters()))
        made = ir.Fp32(name=name, inputs=(x,), shape=_output_shape(node), operator=type(module).__name__,
                       path=str(node.target), flat=_rank(_tensor_argument(node)) == 2, own=own)  # fmt: skip
        self.modules[name] = module
        self._put(node, made)

    def _require_flat(self, node: fx.Node, name: str, x: str) -> None:
        if tuple(node.meta["tensor_meta"].shape[1:]) != (int(np.prod(self._shapes[x])),):
            raise _refused_function(node, "flattens (n, c, h, w) to (n, c*h*w) only")
        self._values[node] = x  # the linear layer that follows covers the image

    def _free_name(self, name: str) -> str:
        while name in self._shapes or name in self._with_parameters:
            name += "_"
        return name

    def _put(self, node: fx.Node, made: ir.Node) -> None:
        if made.kind in _WITHOUT_PARAMETERS and (made.name in self._shapes or made.name in self._with_parameters):
            made = replace(made, name=self._free_name(node.name))  # a ReLU or pool may run in several places
        if node.op == "call_module":
            parameters = self._modules[str(node.target)].named_parameters()
            made = replace(made, frozen=tuple(name for name, part in parameters if not part.requires_grad))
        self.nodes.append(made)
        self._values[node] = made.name
        self._shapes[made.name] = made.shape


def _require_small_window(node: fx.Node, module: nn.Module, window: ir.Pair) -> None:
    if window[0] * window[1] > MAX_WINDOW:
        raise _refusal(node, module, f"with windows of {window[0]}x{window[1]}, more than {MAX_WINDOW} pixels")


def _require_plain_parameters(node: fx.Node, module: nn.Module) -> None:
    """Raise for a layer whose weight or bias torch computes from other parameters before each call."""
    if not isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
        return
    own = dict(module.named_parameters(recurse=False))
    for name in ("weight", "bias"):
        if name not in own and getattr(module, name) is not None:
            raise _refusal(node, module, f"whose {name} is computed from other parameters, as weight_norm and other "
                                         "parametrisations or pruning do; take that off")


def _refusal(node: fx.Node, module: nn.Module, how: str = "") -> UnsupportedOperator:
    what = type(module).__name__ + (f" {how}" if how else "")
    where = str(node.target) if _fits_fp32(node) else _enclosing(node)
    return UnsupportedOperator(f"{node.target}: int8 training has no {what}", where)


def _refused_function(node: fx.Node, how: str) -> UnsupportedOperator:
    return UnsupportedOperator(f"{node.name}: int8 training {how}", _enclosing(node))


def _enclosing(node: fx.Node) -> str:
    """Return the path of the innermost module whose `forward` makes this call, "" for the network itself."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    if node.op == "call_module":
        stack = stack[:-1]
    return stack[-1] if stack else ""


def _rank(node: fx.Node) -> int:
    return len(getattr(node.meta.get("tensor_meta"), "shape", ()))


def _fits_fp32(node: fx.Node) -> bool:
    """Return whether a called module maps one image or feature tensor to one such tensor."""
    one_tensor = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
    return one_tensor and {_rank(_tensor_argument(node)), _rank(node)} <= {2, 4}


def _dropout_settings(node: fx.Node) -> tuple[float, bool]:
    """Return the probability of a functional dropout and whether it is on."""
    given: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    return float(given.get("p", 0.5)), bool(given.get("training", True))


def _tensor_argument(node: fx.Node) -> fx.Node:
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def _pair(value: Any) -> ir.Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _output_shape(node: fx.Node) -> ir.Shape:
    seen = node.meta.get("tensor_meta")
    if not isinstance(seen, TensorMetadata):
        raise ConfigError(f"{node.name}: int8 training passes one tensor on, and this yields several values; wrap "
                          "it in a module that returns one of them")
    shape = tuple(seen.shape[1:])
    channels, height, width = shape if len(shape) == 3 else (shape[0], 1, 1)
    return channels, height, width
