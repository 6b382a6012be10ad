"""Conversion of a captured torch module to a network of the integer engine.

A module that runs in FP32 is a leaf of the capture: torch.fx does not capture its inside, so it may compute anything
that returns one tensor for one tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from socflower._int8 import MAX_EXACT_DEPTH
from socflower.errors import ConfigError
from socflower.model_graph.following import CaptureFailed
from socflower.model_graph.graph import ModelGraph, Operation, caller_of, capture
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
class CapturedNetwork:
    """A module as a network, its parameters as arrays, and the modules of the operators on the FP32 side."""

    graph: ir.Graph
    state: dict[str, npt.NDArray[np.float32]]
    modules: dict[str, nn.Module]


def capture_network(
    module: nn.Module,
    input_shape: ir.Shape | tuple[int],
    *,
    fp32_operators: Sequence[str] = (),
    unsupported: Literal["refuse", "fp32"] = "refuse",
) -> CapturedNetwork:
    """Return the network of `module` for (n, *input_shape) inputs, ReLUs fused into the operators before them.

    Of a module that takes (n, features), the network takes images of a pixel with so many channels.

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
            _require_untied(module, builder.nodes)
            break
        except UnsupportedOperator as error:
            # The operator is in the `forward` of a user's module: that whole module becomes a leaf.
            if unsupported == "refuse":
                # Capture the rest as well, so that one error lists every such module.
                rest = capture_network(
                    module, input_shape, fp32_operators=fp32_operators, unsupported="fp32"
                ).graph
                modules = [node.path for node in rest.nodes if isinstance(node, ir.Fp32)]
                raise UnsupportedOperator(
                    error.what, error.module, list(dict.fromkeys(modules))
                ) from None
            if error.module in ("", *leaves):
                raise
            leaves.add(error.module)
    unknown = set(fp32_operators) - {
        node.path for node in builder.nodes if isinstance(node, ir.Fp32)
    }
    if unknown:
        raise ConfigError(
            f"fp32_operators: the network calls no {', '.join(sorted(unknown))}; it calls "
            + ", ".join(one.module for one in captured.operations if one.module is not None)
        )
    state = {
        name: value.detach().cpu().float().numpy() for name, value in module.state_dict().items()
    }
    graph = ir.fuse_relu(ir.Graph(input_shape=image_shape, nodes=tuple(builder.nodes)))
    return CapturedNetwork(graph=graph, state=state, modules=builder.modules)


def _captured(
    module: nn.Module, input_shape: ir.Shape | tuple[int], leaves: Set[str]
) -> ModelGraph:
    try:
        captured = capture(module, input_shape, leaves=leaves)
    except CaptureFailed as failed:
        if failed.module:
            raise UnsupportedOperator(f"{failed.module}: {failed.why}", failed.module) from None
        raise
    for one, other in zip_longest(
        [operation.node for operation in captured.operations], captured.evaluation
    ):
        if (
            one is None
            or other is None
            or (one.op, one.target) != (other.op, other.target)
            or (
                one.target not in _DROPOUTS
                and repr((one.args, one.kwargs)) != repr((other.args, other.kwargs))
            )
        ):
            at = max(
                (node for node in (one, other) if node is not None),
                key=lambda node: caller_of(node).count("."),
            )
            raise UnsupportedOperator(
                f"{at.name}: the network computes something else in evaluation than in training, "
                "where in int8 only dropout and BatchNorm may differ",
                caller_of(at),
            )
    return captured


def _needed(captured: ModelGraph) -> list[Operation]:
    """Return the operations that the output depends on, and those that may overwrite a value, in order."""
    needed: set[Operation] = set()
    for operation in reversed(captured.operations):
        is_end = operation.node.op in ("placeholder", "output")
        overwrites = operation.module is None and operation.writes_in_place
        if is_end or overwrites or not needed.isdisjoint(captured.readers[operation]):
            needed.add(operation)
    return [operation for operation in captured.operations if operation in needed]


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
        if len(names) < 2 or any(
            all(name.startswith(f"{path}.") for name in names) for path in in_fp32
        ):
            continue
        around = _innermost_common_module(names)
        raise UnsupportedOperator(
            f"{' and '.join(names)} are one parameter, and int8 training has no operators that "
            "share their weights: give each layer its own, train with FP32Trainer, or run what "
            "shares it in FP32",
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

    def add(self, operation: Operation) -> None:
        """Add the operators of a captured operation."""
        node, name = operation.node, operation.module
        if node.op == "placeholder":
            self._values[operation] = ir.INPUT
        elif name is not None:
            module = self._modules[name]
            try:
                if name in self._fp32_operators:
                    self._add_fp32(operation, module, name)
                else:
                    self._add_module(operation, module, name)
            except UnsupportedOperator as error:
                if self._unsupported == "refuse" or error.module != name:
                    raise
                self._add_fp32(operation, module, name)
        elif node.op in ("call_function", "call_method"):
            self._add_function(operation)
        elif node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                raise ConfigError(
                    "the network returns several values; int8 training needs the logits alone"
                )
            if not self.nodes or self._values[operation.inputs[0]] != self.nodes[-1].name:
                raise ConfigError(
                    f"the network computes {self.nodes[-1].name if self.nodes else 'nothing'} after its "
                    "logits"
                )
        else:
            # A submodule may read a tensor of its parent, so the error names the module that reads the value.
            readers = {reader.caller for reader in self._captured.readers[operation]}
            where = readers.pop() if len(readers) == 1 else ""
            raise UnsupportedOperator(
                f"{node.name}: int8 training cannot read the tensor {node.target} of the module",
                where,
            )

    def _add_module(self, operation: Operation, module: nn.Module, name: str) -> None:
        x = self._values[operation.inputs[0]]
        _require_plain_parameters(operation, module)
        match module:
            case nn.Conv2d():
                self._add_convolution(operation, module, name, x)
            case nn.Linear():
                channels, height, width = self._shapes[x]
                if module.in_features != channels * height * width:
                    raise _refusal(operation, module, "over the last dimension of an image")
                self._require_exact(
                    operation, module, (module.out_features, 1, 1), x, (height, width), 1
                )
                self._put(
                    operation,
                    ir.Convolution(
                        name=name,
                        inputs=(x,),
                        shape=(module.out_features, 1, 1),
                        kernel=(height, width),
                        bias=module.bias is not None,
                        linear=True,
                    ),
                )
            case nn.BatchNorm2d():
                momentum = module.momentum
                if module.running_mean is None or not module.affine or momentum is None:
                    raise _refusal(
                        operation,
                        module,
                        "without running statistics, affine parameters or momentum",
                    )
                self._put(
                    operation,
                    ir.BatchNorm(
                        name=name,
                        inputs=(x,),
                        shape=self._shapes[x],
                        eps=module.eps,
                        momentum=momentum,
                    ),
                )
            case nn.ReLU():
                self._put(operation, ir.Relu(name=name, inputs=(x,), shape=self._shapes[x]))
            case nn.MaxPool2d():
                if _pair(module.dilation) != (1, 1) or module.ceil_mode or module.return_indices:
                    raise _refusal(operation, module, "with dilation, ceil_mode or return_indices")
                self._add_pool(ir.MaxPool, operation, module, name, x)
            case nn.AvgPool2d():
                odd = module.divisor_override is not None or not module.count_include_pad
                if (
                    module.ceil_mode
                    or (odd and _pair(module.padding) != (0, 0))
                    or module.divisor_override is not None
                ):
                    raise _refusal(
                        operation,
                        module,
                        "with ceil_mode, a divisor or padding that does not count",
                    )
                self._add_pool(ir.AveragePool, operation, module, name, x)
            case nn.AdaptiveAvgPool2d():
                self._add_adaptive_average(operation, module, name, x)
            case nn.Flatten():
                self._require_flat(operation, name, x)
            case nn.Identity():
                self._values[operation] = x
            case nn.Dropout() | nn.Dropout2d():
                p = 0.0 if name in self._in_evaluation else module.p
                self._add_dropout(
                    operation, name, x, p, channelwise=isinstance(module, nn.Dropout2d)
                )
            case _:
                raise _refusal(operation, module)

    def _add_function(self, operation: Operation) -> None:
        node = operation.node
        read = [
            self._captured.by_node[argument]
            for argument in (*node.args, *node.kwargs.values())
            if isinstance(argument, fx.Node)
        ]
        if node.target in _RELUS and len(read) == 1:
            x = self._values[read[0]]
            self._put(operation, ir.Relu(name=node.name, inputs=(x,), shape=self._shapes[x]))
        elif node.target in _DROPOUTS and len(read) == 1:
            self._add_functional_dropout(operation, self._values[read[0]])
        elif node.target in _ADDS and len(read) == 2 and len(node.args) == 2 and not node.kwargs:
            a, b = (self._values[tensor] for tensor in read)
            if self._shapes[a] != self._shapes[b]:
                raise _refused_function(
                    operation, f"adds equal shapes, got {self._shapes[a]} and {self._shapes[b]}"
                )
            self._put(operation, ir.Add(name=node.name, inputs=(a, b), shape=self._shapes[a]))
        elif node.target in _FLATTENS and read:
            self._require_flat(operation, node.name, self._values[read[0]])
        elif node.target in _SIZES and operation.shape is None:
            return
        else:
            target = getattr(node.target, "__name__", str(node.target))
            raise _refused_function(operation, f"has no operator {target!r}")

    def _add_convolution(self, operation: Operation, module: nn.Conv2d, name: str, x: str) -> None:
        if (
            _pair(module.dilation) != (1, 1)
            or module.padding_mode != "zeros"
            or isinstance(module.padding, str)
        ):
            raise _refusal(
                operation, module, "with dilation, padding by name or other padding than zeros"
            )
        self._require_exact(
            operation, module, _output_shape(operation), x, _pair(module.kernel_size), module.groups
        )
        self._put(
            operation,
            ir.Convolution(
                name=name,
                inputs=(x,),
                shape=_output_shape(operation),
                kernel=_pair(module.kernel_size),
                stride=_pair(module.stride),
                padding=_pair(module.padding),
                groups=module.groups,
                bias=module.bias is not None,
            ),
        )

    def _add_functional_dropout(self, operation: Operation, x: str) -> None:
        node = operation.node
        p, training = _dropout_settings(node)
        if not training:
            self._values[operation] = x
        elif _dropout_settings(self._captured.evaluation[operation.position])[1]:
            raise _refused_function(
                operation,
                "has no dropout that goes on in evaluation: give it training=self.training",
            )
        else:
            self._add_dropout(
                operation, node.name, x, p, channelwise=node.target is nn.functional.dropout2d
            )

    def _add_dropout(
        self, operation: Operation, name: str, x: str, p: float, *, channelwise: bool
    ) -> None:
        if p == 0.0:
            self._values[operation] = x
            return
        if channelwise and _rank(operation) != 4:
            where = name if operation.module is not None else operation.caller
            raise UnsupportedOperator(
                f"{name}: int8 training has no Dropout2d of anything but (n, c, h, w)", where
            )
        self._put(
            operation,
            ir.Dropout(name=name, inputs=(x,), shape=self._shapes[x], p=p, channelwise=channelwise),
        )

    def _require_exact(
        self,
        operation: Operation,
        module: nn.Module,
        shape: ir.Shape,
        x: str,
        kernel: ir.Pair,
        groups: int,
    ) -> None:
        depth = kernel[0] * kernel[1] * max(self._shapes[x][0], shape[0]) // groups
        if depth > MAX_EXACT_DEPTH:
            raise _refusal(
                operation,
                module,
                f"with sums of {depth} products, where int32 surely holds {MAX_EXACT_DEPTH}",
            )

    def _add_pool(
        self,
        kind: type[ir.MaxPool] | type[ir.AveragePool],
        operation: Operation,
        module: Any,
        name: str,
        x: str,
    ) -> None:
        _require_small_window(operation, module, _pair(module.kernel_size))
        self._put(
            operation,
            kind(
                name=name,
                inputs=(x,),
                shape=_output_shape(operation),
                kernel=_pair(module.kernel_size),
                stride=_pair(module.stride),
                padding=_pair(module.padding),
            ),
        )

    def _add_adaptive_average(
        self, operation: Operation, module: nn.AdaptiveAvgPool2d, name: str, x: str
    ) -> None:
        _, height, width = self._shapes[x]
        _, out_h, out_w = shape = _output_shape(operation)
        if height % out_h or width % out_w:
            raise _refusal(
                operation,
                module,
                f"from {height}x{width} to {out_h}x{out_w}, whose windows differ in size,",
            )
        window = (height // out_h, width // out_w)
        _require_small_window(operation, module, window)
        self._put(
            operation,
            ir.AveragePool(name=name, inputs=(x,), shape=shape, kernel=window, stride=window),
        )

    def _add_fp32(self, operation: Operation, module: nn.Module, name: str) -> None:
        if not _fits_fp32(operation):
            around = operation.caller
            remedy = (
                f"say fp32_operators=[{around!r}]"
                if around
                else "put it into a module that does, and list that"
            )
            raise ConfigError(
                f"{name}: in FP32 runs what makes one tensor (n, c, h, w) or (n, features) of one such "
                f"tensor, which {type(module).__name__} does not; {remedy}"
            )
        x = self._values[operation.inputs[0]]
        if not list(
            module.state_dict()
        ):  # without state it shares nothing, so it may run in several places
            name = self._free_name(name)
        own = tuple(dict(module.named_parameters()))
        made = ir.Fp32(
            name=name,
            inputs=(x,),
            shape=_output_shape(operation),
            operator=type(module).__name__,
            path=str(operation.module),
            flat=_rank(operation.inputs[0]) == 2,
            own=own,
        )
        self.modules[name] = module
        self._put(operation, made)

    def _require_flat(self, operation: Operation, name: str, x: str) -> None:
        if (operation.shape or ())[1:] != (int(np.prod(self._shapes[x])),):
            raise _refused_function(operation, "flattens (n, c, h, w) to (n, c*h*w) only")
        self._values[operation] = x  # the linear layer that follows covers the image

    def _free_name(self, name: str) -> str:
        while name in self._shapes or name in self._with_parameters:
            name += "_"
        return name

    def _put(self, operation: Operation, made: ir.Node) -> None:
        if made.kind in _WITHOUT_PARAMETERS and (
            made.name in self._shapes or made.name in self._with_parameters
        ):
            made = replace(
                made, name=self._free_name(operation.node.name)
            )  # a ReLU or pool may run in several places
        if operation.module is not None:
            parameters = self._modules[operation.module].named_parameters()
            made = replace(
                made, frozen=tuple(name for name, part in parameters if not part.requires_grad)
            )
        self.nodes.append(made)
        self._values[operation] = made.name
        self._shapes[made.name] = made.shape


def _require_small_window(operation: Operation, module: nn.Module, window: ir.Pair) -> None:
    if window[0] * window[1] > MAX_WINDOW:
        raise _refusal(
            operation,
            module,
            f"with windows of {window[0]}x{window[1]}, more than {MAX_WINDOW} pixels",
        )


def _require_plain_parameters(operation: Operation, module: nn.Module) -> None:
    """Raise for a layer whose weight or bias torch computes from other parameters before each call."""
    if not isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
        return
    own = dict(module.named_parameters(recurse=False))
    for name in ("weight", "bias"):
        if name not in own and getattr(module, name) is not None:
            raise _refusal(
                operation,
                module,
                f"whose {name} is computed from other parameters, as weight_norm and "
                "other parametrisations or pruning do; take that off",
            )


def _refusal(operation: Operation, module: nn.Module, how: str = "") -> UnsupportedOperator:
    what = type(module).__name__ + (f" {how}" if how else "")
    where = operation.layer if _fits_fp32(operation) else operation.caller
    return UnsupportedOperator(f"{operation.module}: int8 training has no {what}", where)


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
    given: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(
        node.kwargs
    )
    return float(given.get("p", 0.5)), bool(given.get("training", True))


def _pair(value: Any) -> ir.Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _output_shape(operation: Operation) -> ir.Shape:
    if operation.shape is None:
        raise ConfigError(
            f"{operation.node.name}: int8 training passes one tensor on, and this yields several values; "
            "wrap it in a module that returns one of them"
        )
    shape = operation.shape[1:]
    channels, height, width = shape if len(shape) == 3 else (shape[0], 1, 1)
    return channels, height, width
