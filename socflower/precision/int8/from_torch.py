"""Conversion of a captured torch module to a network of the integer engine.

A module that runs in FP32 is a leaf of the capture: torch.fx does not capture its inside, so it may compute anything
that returns one tensor for one tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import fx, nn

from socflower._int8 import MAX_EXACT_DEPTH
from socflower.errors import ConfigError
from socflower.model_graph.following import CaptureFailed
from socflower.model_graph.graph import ModelGraph, Operation, caller_of, capture
from socflower.precision.int8 import network as ir
from socflower.precision.int8.fixed_point import FloatArray
from socflower.precision.int8.network import UnsupportedOperator

MAX_WINDOW = 256
"""Pixels of a pooling window: the engine stores the position of a maximum in a byte."""

_WITHOUT_PARAMETERS = ("relu", "max-pool", "average-pool", "add", "dropout")
_RELUS = (torch.relu, nn.functional.relu, "relu")
_ADDS = (operator.add, torch.add, "add")
_FLATTENS = (torch.flatten, "flatten", "view", "reshape", torch.reshape)
_DROPOUTS = (nn.functional.dropout, nn.functional.dropout2d)
_SETTINGS: dict[type[nn.Module], dict[str, tuple[Any, ...]]] = {
    nn.Conv2d: {"dilation": (1, (1, 1)), "padding_mode": ("zeros",)},
    nn.BatchNorm2d: {"affine": (True,), "track_running_stats": (True,)},
    nn.MaxPool2d: {"dilation": (1, (1, 1)), "ceil_mode": (False,), "return_indices": (False,)},
    nn.AvgPool2d: {"ceil_mode": (False,), "divisor_override": (None,)},
}
"""The values of settings with which the int8 kernels compute the same as the module."""

# Functions that read a size for `view`: their result is no tensor, so they need no operator.
_SIZES = ("size", getattr, operator.getitem)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedNetwork:
    """A module as a network, its parameters as arrays, and the modules of the operators on the FP32 side."""

    graph: ir.Graph
    state: dict[str, FloatArray]
    modules: dict[str, nn.Module]


def capture_network(
    module: nn.Module,
    input_shape: ir.Shape | tuple[int],
    *,
    fp32_operators: Sequence[str] = (),
    unsupported: Literal["refuse", "fp32"] = "refuse",
) -> CapturedNetwork:
    """Return the network of `module` for (n, *input_shape) inputs, ReLUs fused into the operators before them.

    If the module takes (n, features), the network takes images of one pixel with as many channels.

    Raises ConfigError if torch.fx cannot capture the module. Raises UnsupportedOperator, with module and operator, for
    an operator without an int8 kernel that `fp32_operators` does not list; with `unsupported` "fp32" only if it is
    called by the network itself and not inside a submodule.
    """
    leaves = set(fp32_operators)
    image_shape = (input_shape[0], 1, 1) if len(input_shape) == 1 else input_shape
    while True:
        try:
            captured = _captured(module, input_shape, leaves)
            builder = _Builder(module, captured, image_shape, leaves, unsupported)
            for operation in _needed(captured):
                builder.add(operation)
            _require_untied(module, builder.in_fp32)
            break
        except UnsupportedOperator as error:
            if unsupported == "refuse":
                # Capture the rest as well, so that one error lists every such module.
                rest = capture_network(
                    module, input_shape, fp32_operators=fp32_operators, unsupported="fp32"
                )
                raise UnsupportedOperator(
                    error.what, error.module, _fp32_paths(rest.graph.nodes)
                ) from None
            if error.module in ("", *leaves):
                raise
            # The operator is in the `forward` of a user's module: that whole module becomes a leaf.
            leaves.add(error.module)
    unknown = sorted(set(fp32_operators).difference(builder.in_fp32))
    if unknown:
        called = [one.module for one in captured.operations if one.module is not None]
        raise ConfigError(
            f"fp32_operators: the network calls no {', '.join(unknown)}; it calls {', '.join(called)}"
        )
    tensors = module.state_dict().items()
    state = {name: tensor.detach().cpu().float().numpy() for name, tensor in tensors}
    graph = ir.fuse_relu(ir.Graph(input_shape=image_shape, nodes=tuple(builder.nodes)))
    return CapturedNetwork(graph=graph, state=state, modules=builder.modules)


def _fp32_paths(nodes: Sequence[ir.Node]) -> list[str]:
    """Return the paths of the modules that run in FP32, each once."""
    return list(dict.fromkeys(node.path for node in nodes if isinstance(node, ir.Fp32)))


def _captured(
    module: nn.Module, input_shape: ir.Shape | tuple[int], leaves: Set[str]
) -> ModelGraph:
    try:
        captured = capture(module, input_shape, leaves=leaves)
    except CaptureFailed as failed:
        if not failed.module:
            raise
        raise UnsupportedOperator(f"{failed.module}: {failed.why}", failed.module) from None
    training = [operation.node for operation in captured.operations]
    for one, other in zip_longest(training, captured.evaluation):
        if one is None or other is None or not _is_same_call(one, other):
            found = [node for node in (one, other) if node is not None]
            # The innermost of both callers.
            at = max(found, key=lambda node: caller_of(node).count("."))
            raise UnsupportedOperator(
                f"{at.name}: in int8 only dropout and BatchNorm may differ between training and evaluation",
                caller_of(at),
            )
    return captured


def _is_same_call(one: fx.Node, other: fx.Node) -> bool:
    """Whether training and evaluation call the same; a function of dropout may get other arguments."""
    if (one.op, one.target) != (other.op, other.target):
        return False
    arguments = [repr((node.args, node.kwargs)) for node in (one, other)]
    return one.target in _DROPOUTS or arguments[0] == arguments[1]


def _needed(captured: ModelGraph) -> list[Operation]:
    """Return the operations that the output depends on, and those that may overwrite a value, in order."""
    needed: set[Operation] = set()
    for operation in reversed(captured.operations):
        is_end = operation.node.op in ("placeholder", "output")
        overwrites = operation.module is None and operation.writes_in_place
        if is_end or overwrites or not needed.isdisjoint(captured.readers[operation]):
            needed.add(operation)
    return [operation for operation in captured.operations if operation in needed]


def _require_untied(module: nn.Module, in_fp32: Sequence[str]) -> None:
    """Raise UnsupportedOperator for operators that share a parameter, unless one FP32 operator holds them all.

    Each operator of the engine has its own weights, so tied weights would diverge.
    """
    by_address: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.numel():
            # By address, not by identity: a parameter made from another's tensor shares its memory as well.
            by_address.setdefault(parameter.data_ptr(), []).append(name)
    for names in by_address.values():
        around = _innermost_common_module(names)
        is_inside = any(f"{around}.".startswith(f"{path}.") for path in in_fp32)
        if len(names) > 1 and not is_inside:
            raise UnsupportedOperator(
                f"{' and '.join(names)} are one parameter, and int8 operators share no weights: give each "
                "layer its own, train with FP32Trainer, or run in FP32 what shares it",
                around,
            )


def _innermost_common_module(names: Sequence[str]) -> str:
    """Return the path of the innermost module that holds all these parameters, "" for the network."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


@dataclass(frozen=True, slots=True)
class _Call:
    """A captured call of a module that int8 may run: the name of its node and of the value it reads."""

    operation: Operation
    module: Any
    name: str
    x: str

    def require(self, fits: bool, how: str = "") -> None:
        """Raise UnsupportedOperator, with `how` the module is set, unless it fits."""
        if not fits:
            what = f"{type(self.module).__name__} {how}".rstrip()
            operation = self.operation
            where = operation.layer if _fits_fp32(operation) else operation.caller
            raise UnsupportedOperator(f"{operation.module}: int8 training has no {what}", where)

    def require_settings(self) -> None:
        """Raise UnsupportedOperator for a setting that the int8 kernels do not have."""
        for kind, needed in _SETTINGS.items():
            for name, fitting in needed.items() if isinstance(self.module, kind) else ():
                value = getattr(self.module, name)
                self.require(value in fitting, f"with {name} = {value!r}")

    def require_window(self, window: ir.Pair) -> None:
        """Raise UnsupportedOperator for a window whose positions do not fit a byte."""
        small = window[0] * window[1] <= MAX_WINDOW
        self.require(
            small, f"with windows of {window[0]}x{window[1]}, more than {MAX_WINDOW} pixels"
        )


class _Builder:
    """Turns captured operations into nodes, one by one."""

    def __init__(
        self,
        module: nn.Module,
        captured: ModelGraph,
        input_shape: ir.Shape,
        fp32_operators: Set[str],
        unsupported: str,
    ) -> None:
        self._modules = dict(module.named_modules())
        self._captured = captured
        self._values: dict[Operation, str] = {}
        self._shapes: dict[str, ir.Shape] = {ir.INPUT: input_shape}
        self._fp32_operators = fp32_operators
        self._unsupported = unsupported
        # In a model in training mode, layers in evaluation mode are so on purpose.
        self._in_evaluation = {
            path for path, part in self._modules.items() if module.training and not part.training
        }
        self._with_parameters = {
            name for name, part in self._modules.items() if list(part.parameters(recurse=False))
        }
        self.nodes: list[ir.Node] = []
        self.modules: dict[str, nn.Module] = {}

    @property
    def in_fp32(self) -> list[str]:
        """Paths of the modules that run in FP32."""
        return _fp32_paths(self.nodes)

    def add(self, operation: Operation) -> None:
        """Add the operators of a captured operation."""
        node = operation.node
        if node.op == "placeholder":
            self._values[operation] = ir.INPUT
        elif operation.module is not None:
            self._add_called(operation, operation.module)
        elif node.op in ("call_function", "call_method"):
            self._add_function(operation)
        elif node.op == "output":
            self._require_logits_at_end(operation)
        else:
            # A submodule may read a tensor of its parent, so the error names the module that reads the value.
            readers = {reader.caller for reader in self._captured.readers[operation]}
            where = readers.pop() if len(readers) == 1 else ""
            raise UnsupportedOperator(
                f"{node.name}: int8 training cannot read the tensor {node.target} of the module",
                where,
            )

    def _require_logits_at_end(self, operation: Operation) -> None:
        if not isinstance(operation.node.args[0], fx.Node):
            raise ConfigError("the network returns several values; return the logits alone")
        last = self.nodes[-1].name if self.nodes else "nothing"
        if self._values[operation.inputs[0]] != last:
            raise ConfigError(f"the network computes {last} after its logits")

    def _add_called(self, operation: Operation, name: str) -> None:
        """Add the call of a module: in int8, or in FP32 if it is listed there or has no kernel."""
        module = self._modules[name]
        if name in self._fp32_operators:
            self._add_fp32(operation, module, name)
            return
        try:
            self._add_module(_Call(operation, module, name, self._values[operation.inputs[0]]))
        except UnsupportedOperator as error:
            if self._unsupported == "refuse" or error.module != name:
                raise
            self._add_fp32(operation, module, name)

    def _add_module(self, call: _Call) -> None:
        call.require_settings()
        match call.module:
            case nn.Conv2d():
                self._add_convolution(call)
            case nn.Linear():
                self._add_linear(call)
            case nn.BatchNorm2d():
                self._add_batch_norm(call)
            case nn.ReLU():
                self._put(call.operation, ir.Relu, call.name, [call.x])
            case nn.MaxPool2d() | nn.AvgPool2d():
                self._add_pool(call)
            case nn.AdaptiveAvgPool2d():
                self._add_adaptive_average(call)
            case nn.Flatten():
                self._flatten(call.operation, call.x)
            case nn.Identity():
                self._values[call.operation] = call.x
            case nn.Dropout() | nn.Dropout2d():
                self._add_dropout_module(call)
            case _:
                call.require(False)

    def _add_convolution(self, call: _Call) -> None:
        module = call.module
        shape = _output_shape(call.operation)
        _require_plain_parameters(call)
        call.require(not isinstance(module.padding, str), "with padding by name")
        kernel = _pair(module.kernel_size)
        self._require_exact(call, shape, kernel, module.groups)
        self._put(
            call.operation,
            ir.Convolution,
            call.name,
            [call.x],
            shape,
            kernel=kernel,
            stride=_pair(module.stride),
            padding=_pair(module.padding),
            groups=module.groups,
            bias=module.bias is not None,
        )

    def _add_linear(self, call: _Call) -> None:
        """Add a linear layer as a convolution whose kernel covers the image."""
        module = call.module
        _require_plain_parameters(call)
        kernel = self._shapes[call.x][1:]
        covers = module.in_features == math.prod(self._shapes[call.x])
        call.require(covers, "over the last dimension of an image")
        shape = (module.out_features, 1, 1)
        self._require_exact(call, shape, kernel, 1)
        self._put(
            call.operation,
            ir.Convolution,
            call.name,
            [call.x],
            shape,
            kernel=kernel,
            bias=module.bias is not None,
            linear=True,
        )

    def _add_batch_norm(self, call: _Call) -> None:
        module = call.module
        call.require(module.momentum is not None, "without momentum")
        _require_plain_parameters(call)
        self._put(
            call.operation,
            ir.BatchNorm,
            call.name,
            [call.x],
            eps=module.eps,
            momentum=module.momentum,
        )

    def _add_pool(self, call: _Call) -> None:
        module = call.module
        kind = ir.MaxPool if isinstance(module, nn.MaxPool2d) else ir.AveragePool
        padding = _pair(module.padding)
        counts = padding == (0, 0) or getattr(module, "count_include_pad", True)
        call.require(counts, "with padding that does not count")
        window = _pair(module.kernel_size)
        call.require_window(window)
        self._put(
            call.operation,
            kind,
            call.name,
            [call.x],
            _output_shape(call.operation),
            kernel=window,
            stride=_pair(module.stride),
            padding=padding,
        )

    def _add_adaptive_average(self, call: _Call) -> None:
        _, height, width = self._shapes[call.x]
        _, out_h, out_w = shape = _output_shape(call.operation)
        even = height % out_h == 0 and width % out_w == 0
        call.require(even, f"from {height}x{width} to {out_h}x{out_w}, in windows of two sizes")
        window = (height // out_h, width // out_w)
        call.require_window(window)
        self._put(
            call.operation, ir.AveragePool, call.name, [call.x], shape, kernel=window, stride=window
        )

    def _add_dropout_module(self, call: _Call) -> None:
        p = 0.0 if call.name in self._in_evaluation else call.module.p
        channelwise = isinstance(call.module, nn.Dropout2d)
        fits = p == 0.0 or not channelwise or _rank(call.operation) == 4
        call.require(fits, "of anything but (n, c, h, w)")
        self._add_dropout(call.operation, call.name, call.x, p, channelwise=channelwise)

    def _add_function(self, operation: Operation) -> None:
        node = operation.node
        arguments = [
            each for each in (*node.args, *node.kwargs.values()) if isinstance(each, fx.Node)
        ]
        read = [self._values.get(self._captured.by_node[each], "") for each in arguments]
        if node.target in _RELUS and len(read) == 1:
            self._put(operation, ir.Relu, node.name, read)
        elif node.target in _DROPOUTS and len(read) == 1:
            self._add_functional_dropout(operation, read[0])
        elif node.target in _ADDS and len(read) == 2 and len(node.args) == 2 and not node.kwargs:
            first, second = (self._shapes[value] for value in read)
            if first != second:
                raise _refused_function(operation, f"adds equal shapes, got {first} and {second}")
            self._put(operation, ir.Add, node.name, read)
        elif node.target in _FLATTENS and read:
            self._flatten(operation, read[0])
        elif node.target not in _SIZES or operation.shape is not None:
            target = getattr(node.target, "__name__", str(node.target))
            raise _refused_function(operation, f"has no operator {target!r}")

    def _add_functional_dropout(self, operation: Operation, x: str) -> None:
        node = operation.node
        p, drops = _dropout_settings(node)
        channelwise = node.target is nn.functional.dropout2d
        if not drops:
            p = 0.0
        elif _dropout_settings(self._captured.evaluation[operation.position])[1]:
            raise _refused_function(
                operation, "has no dropout in evaluation: give it training=self.training"
            )
        elif channelwise and _rank(operation) != 4:
            raise _refused_function(operation, "has no dropout2d of anything but (n, c, h, w)")
        self._add_dropout(operation, node.name, x, p, channelwise=channelwise)

    def _add_dropout(
        self, operation: Operation, name: str, x: str, p: float, *, channelwise: bool
    ) -> None:
        if p == 0.0:
            self._values[operation] = x
        else:
            self._put(operation, ir.Dropout, name, [x], p=p, channelwise=channelwise)

    def _require_exact(self, call: _Call, shape: ir.Shape, kernel: ir.Pair, groups: int) -> None:
        """Raise UnsupportedOperator for a sum, forward or backward, that may leave int32."""
        channels = max(self._shapes[call.x][0], shape[0])
        depth = math.prod(kernel) * channels // groups
        how = f"with sums of {depth} products, more than the {MAX_EXACT_DEPTH} that fit int32"
        call.require(depth <= MAX_EXACT_DEPTH, how)

    def _add_fp32(self, operation: Operation, module: nn.Module, name: str) -> None:
        if not _fits_fp32(operation):
            around = operation.caller
            raise ConfigError(
                f"{name}: {type(module).__name__} does not make one tensor (n, c, h, w) or (n, features) of "
                f"one; put it into a module that does, and list that: fp32_operators=[{around or '...'!r}]"
            )
        if not list(module.state_dict()):
            # Without state it shares nothing, so it may run in several places.
            name = self._free_name(name)
        self.modules[name] = module
        self._put(
            operation,
            ir.Fp32,
            name,
            [self._values[operation.inputs[0]]],
            _output_shape(operation),
            operator=type(module).__name__,
            path=str(operation.module),
            flat=_rank(operation.inputs[0]) == 2,
            own=tuple(name for name, _ in module.named_parameters()),
        )

    def _flatten(self, operation: Operation, x: str) -> None:
        """Add nothing for a flatten to (n, c*h*w): the linear layer that follows covers the image."""
        flat = (math.prod(self._shapes[x]),)
        if operation.shape is None or operation.shape[1:] != flat:
            raise _refused_function(operation, "flattens (n, c, h, w) to (n, c*h*w) only")
        self._values[operation] = x

    def _free_name(self, name: str) -> str:
        while name in self._shapes or name in self._with_parameters:
            name += "_"
        return name

    def _put(
        self,
        operation: Operation,
        kind: type[ir.Node],
        name: str,
        inputs: Sequence[str],
        shape: ir.Shape | None = None,
        **settings: Any,
    ) -> None:
        """Add a node; it has the shape of its first input unless `shape` is given."""
        is_taken = name in self._shapes or name in self._with_parameters
        if is_taken and kind.kind in _WITHOUT_PARAMETERS:
            # A ReLU or a pool may run in several places.
            name = self._free_name(operation.node.name)
        if operation.module is not None:
            parameters = self._modules[operation.module].named_parameters()
            settings["frozen"] = tuple(part for part, each in parameters if not each.requires_grad)
        made = kind(
            name=name, inputs=tuple(inputs), shape=shape or self._shapes[inputs[0]], **settings
        )
        self.nodes.append(made)
        self._values[operation] = made.name
        self._shapes[made.name] = made.shape


def _require_plain_parameters(call: _Call) -> None:
    """Raise for a layer whose weight or bias torch computes from other parameters before each call."""
    own = dict(call.module.named_parameters(recurse=False))
    for name in ("weight", "bias"):
        is_plain = name in own or getattr(call.module, name) is None
        call.require(
            is_plain,
            f"whose {name} is computed from other parameters, as by weight_norm or pruning; take that off",
        )


def _refused_function(operation: Operation, how: str) -> UnsupportedOperator:
    return UnsupportedOperator(f"{operation.node.name}: int8 training {how}", operation.caller)


def _rank(operation: Operation) -> int:
    return len(operation.shape or ())


def _fits_fp32(operation: Operation) -> bool:
    """Return whether a called module maps one image or feature tensor to one such tensor."""
    node = operation.node
    one_tensor = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
    return one_tensor and {_rank(operation.inputs[0]), _rank(operation)} <= {2, 4}


def _dropout_settings(node: fx.Node) -> tuple[float, bool]:
    """Return the probability of a functional dropout and whether it is on."""
    given: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False))
    given.update(node.kwargs)
    return float(given.get("p", 0.5)), bool(given.get("training", True))


def _pair(value: Any) -> ir.Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _output_shape(operation: Operation) -> ir.Shape:
    if operation.shape is None:
        raise ConfigError(
            f"{operation.node.name}: yields several values, and int8 training passes one tensor on; wrap "
            "it in a module that returns one of them"
        )
    channels, height, width = (*operation.shape[1:], 1, 1)[:3]
    return channels, height, width
