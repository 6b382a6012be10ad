"""Conversion of a captured torch module to a network of the integer engine.

The module is captured once. An operation without an int8 kernel becomes an *island*: the operator `Fp32`, which runs
it in torch. Neighbouring ones become one island. An operator that `fp32_operators` names, or that torch.fx cannot
follow, is an island as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import fx, nn

from socflower.errors import ConfigError
from socflower.model_graph.following import CaptureFailed
from socflower.model_graph.graph import ModelGraph, Operation, caller_of, capture, module_of
from socflower.precision.int8 import network as ir
from socflower.precision.int8.conversion import value_layout as layouts
from socflower.precision.int8.conversion.graph_builder import GraphBuilder, NoKernel, Value, form_of
from socflower.precision.int8.conversion.module_call import ModuleCall
from socflower.precision.int8.conversion.torch_functions import DROPOUTS, add_function
from socflower.precision.int8.conversion.torch_modules import add_module
from socflower.precision.int8.fixed_point import FloatArray
from socflower.precision.int8.network import UnsupportedOperator
from socflower.precision.int8.operators.embedding import Embedding

# Functions whose result is no tensor: what reads it decides what becomes of it.
_OF_NUMBERS = ("size", "dim", "numel", "getattr")


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedNetwork:
    """A module as a network, its parameters as arrays, and the modules of the operators on the FP32 side."""

    graph: ir.Graph
    state: dict[str, FloatArray]
    modules: dict[str, nn.Module]


def capture_network(
    module: nn.Module,
    input_shape: ir.Shape | tuple[int, ...],
    *,
    fp32_operators: Sequence[str] = (),
    unsupported: Literal["refuse", "fp32"] = "fp32",
) -> CapturedNetwork:
    """Return the network of `module` for (n, *input_shape) inputs, ReLUs fused into the operators before them.

    If the module takes (n, features), the network takes images of one pixel with as many channels; (n, channels,
    length) is an image of one row.

    Raises ConfigError if torch.fx cannot capture the module, and UnsupportedOperator, with module and operator, for an
    operator without an int8 kernel that `fp32_operators` does not list: with `unsupported` "fp32" only if torch cannot
    run it alone either.
    """
    leaves = set(fp32_operators)
    while True:
        try:
            captured = _captured(module, input_shape, leaves)
            conversion = _Conversion(module, captured, leaves)
            conversion.run()
            _require_untied(module, conversion)
            break
        except _NotAlone as found:
            if "" in found.modules or found.modules <= leaves:
                raise UnsupportedOperator(found.why, "", must_move=True) from None
            if unsupported == "refuse":
                paths = sorted(found.modules)
                raise UnsupportedOperator(found.why, paths[0], paths) from None
            # Whole modules become leaves: they compute something else in evaluation, or share a parameter.
            leaves |= found.modules
    refused = conversion.refused
    if unsupported == "refuse" and refused:
        what, where = refused[0]
        raise UnsupportedOperator(what, where, [path for _, path in dict.fromkeys(refused) if path])
    unknown = sorted(set(fp32_operators).difference(conversion.named_in_fp32))
    if unknown:
        called = [one.module or one.node.name for one in captured.operations if one.is_of_samples]
        raise ConfigError(
            f"fp32_operators: the network calls no {', '.join(unknown)}; it calls {', '.join(called)}"
        )
    tensors = module.state_dict().items()
    state = {name: tensor.detach().cpu().float().numpy() for name, tensor in tensors}
    graph = ir.Graph(input_shape=conversion.input_shape, nodes=tuple(conversion.nodes))
    kept = {node.name for node in graph.nodes}
    modules = {name: made for name, made in conversion.modules.items() if name in kept}
    return CapturedNetwork(graph=ir.fuse_relu(graph), state=state, modules=modules)


class _NotAlone(Exception):
    """Modules that must run in FP32 as a whole; "" is the network itself."""

    def __init__(self, why: str, modules: Set[str]) -> None:
        self.why, self.modules = why, set(modules)
        super().__init__(why)


def _captured(
    module: nn.Module, input_shape: ir.Shape | tuple[int, ...], leaves: Set[str]
) -> ModelGraph:
    has_rows = any(isinstance(part, nn.Embedding) for part in module.modules())
    try:
        try:
            captured = capture(module, input_shape, leaves=leaves, opaque=True)
        except CaptureFailed:
            raise
        except ConfigError:
            if not has_rows:
                raise
            # An embedding takes whole numbers.
            numbers = torch.zeros((1, *input_shape), dtype=torch.int64)
            captured = capture(module, numbers, leaves=leaves, opaque=True)
    except CaptureFailed as failed:
        if not failed.module:
            raise
        raise _NotAlone(f"{failed.module}: {failed.why}", {failed.module}) from None
    training = [operation.node for operation in captured.operations]
    if not all(map(_is_same_call, *_of_equal_length(training, captured.evaluation))):
        differing = _differing_callers(training, captured.evaluation)
        where = max(differing, key=lambda path: path.count(".")) or type(module).__name__
        raise _NotAlone(
            f"{where}: in int8 only dropout and BatchNorm may differ between training and evaluation",
            differing - {""} or {""},
        )
    return captured


def _of_equal_length(
    one: Sequence[fx.Node], other: Sequence[fx.Node]
) -> tuple[list[fx.Node | None], list[fx.Node | None]]:
    pairs = list(zip_longest(one, other))
    return [first for first, _ in pairs], [second for _, second in pairs]


def _is_same_call(one: fx.Node | None, other: fx.Node | None) -> bool:
    """Whether training and evaluation call the same; a function of dropout may get other arguments."""
    if one is None or other is None or (one.op, one.target) != (other.op, other.target):
        return False
    arguments = [repr((node.args, node.kwargs)) for node in (one, other)]
    return one.target in DROPOUTS or arguments[0] == arguments[1]


def _differing_callers(training: Sequence[fx.Node], evaluation: Sequence[fx.Node]) -> set[str]:
    """Return the modules whose own calls differ between training and evaluation; the network if none does."""
    calls: dict[str, tuple[list[Any], list[Any]]] = {}
    for side, nodes in enumerate((training, evaluation)):
        for node in nodes:
            arguments = () if node.target in DROPOUTS else _without_names(node)
            calls.setdefault(caller_of(node), ([], []))[side].append(
                (node.op, node.target, repr(arguments))
            )
    return {path for path, (one, other) in calls.items() if one != other} or {""}


def _without_names(node: fx.Node) -> Any:
    """Return the arguments of a call with one symbol for every value."""
    return fx.node.map_arg((node.args, node.kwargs), lambda _: "%")


def _needed(captured: ModelGraph) -> list[Operation]:
    """Return the operations that the output depends on, and those that may overwrite a value, in order."""
    needed: set[Operation] = set()
    for operation in reversed(captured.operations):
        is_end = operation.node.op in ("placeholder", "output")
        overwrites = operation.module is None and operation.writes_in_place
        if is_end or overwrites or not needed.isdisjoint(captured.readers[operation]):
            needed.add(operation)
    return [operation for operation in captured.operations if operation in needed]


def _require_untied(module: nn.Module, conversion: _Conversion) -> None:
    """Raise for operators that share a parameter, unless one FP32 operator holds them all.

    Each operator of the engine has its own weights, so tied weights would diverge.
    """
    by_address: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.numel():
            # By address, not by identity: a parameter made from another's tensor shares its memory as well.
            by_address.setdefault(parameter.data_ptr(), []).append(name)
    held = [set(names) for names in conversion.parameters_in_fp32()]
    for names in by_address.values():
        if len(names) > 1 and not any(set(names) <= island for island in held):
            raise _NotAlone(
                f"{' and '.join(names)} are one parameter, and int8 operators share no weights: give each "
                "layer its own, train with FP32Trainer, or run in FP32 what shares it",
                {_innermost_common_module(names)},
            )


def _innermost_common_module(names: Sequence[str]) -> str:
    """Return the path of the innermost module that holds all these parameters, "" for the network."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


@dataclass(slots=True)
class _Island:
    """An operator on the FP32 side: its operations (the last one makes its value) and those that it reads."""

    node: str
    operations: list[Operation]
    reads: list[Operation]


class _Conversion:
    """The conversion of captured operations, one by one."""

    def __init__(self, module: nn.Module, captured: ModelGraph, leaves: Set[str]) -> None:
        self._captured = captured
        self._leaves = leaves
        self._module = module
        source = next(one for one in captured.operations if one.node.op == "placeholder")
        self._input = Value(ir.INPUT, layouts.images(form_of(source)))
        self._reads_numbers = source.dtype == torch.int64
        self.input_shape = self._input.layout.shape
        self._builder = GraphBuilder(module, captured, self.input_shape)
        self._islands: dict[Operation, _Island] = {}
        # In a model in training mode, layers in evaluation mode are so on purpose.
        self._in_evaluation = {
            path
            for path, part in self._builder.submodules.items()
            if module.training and not part.training
        }
        self._storage: dict[Operation, int] = {}
        self._is_view: dict[Operation, bool] = {}
        self.modules: dict[str, nn.Module] = {}
        # Of the operations without a kernel: what is missing, and the module around it.
        self.refused: list[tuple[str, str]] = []
        self.nodes: list[ir.Node] = []
        # Paths of the modules, and names of the functions, that are called in FP32.
        self.named_in_fp32: set[str] = set()

    def parameters_in_fp32(self) -> list[list[str]]:
        """Return for each island the names of its parameters in the module, all names of a shared one included."""
        found = []
        for node in self.nodes:
            if isinstance(node, ir.Fp32):
                names = self.modules[node.name].named_parameters(remove_duplicate=False)
                prefix = f"{node.path}." if node.path else ""
                found.append([prefix + name for name, _ in names])
        return found

    def run(self) -> None:
        """Convert all operations."""
        for operation in _needed(self._captured):
            node = operation.node
            if node.op == "placeholder":
                self._builder.values[operation] = self._input
            elif node.op == "output":
                self._end(operation)
            elif node.op != "get_attr":
                self._add(operation)
            self._note_overwriting(operation)

    def _add(self, operation: Operation) -> None:
        """Add an operation in int8, or in FP32 if it is named or has no kernel.

        What has no entry for each sample (sizes, tuples, functions of parameters) is left to the operation that reads
        it: it runs in FP32 together with that one.
        """
        path = operation.module
        if operation.is_constant:
            return
        if path is not None and (
            path in self._leaves or not _is_torchs(self._builder.submodules[path])
        ):
            if path not in self._leaves:
                self.refused.append((f"{path}: torch.fx cannot follow it", path))
            self._add_island(operation, NoKernel(f"module {path}"))
            return
        if path is None and operation.node.name in self._leaves:
            self._add_island(operation, NoKernel(operation.node.name))
            return
        try:
            with self._builder.attempt():
                value = self._in_int8(operation)
                if value is not None:
                    self._builder.values[operation] = value
        except NoKernel as missing:
            name = operation.node.name if path is None else path
            if not operation.is_of_samples:
                return
            self.refused.append((f"{name}: int8 training has no {missing}", operation.layer))
            self._add_island(operation, missing)

    def _in_int8(self, operation: Operation) -> Value | None:
        """Add the nodes of an operation and return its value, None for one that is no tensor."""
        if operation.module is not None:
            called = self._builder.submodules[operation.module]
            if len(operation.node.args) != 1 or operation.node.kwargs:
                raise NoKernel(f"{type(called).__name__} of several inputs")
            call = ModuleCall(
                self._builder,
                called,
                operation.module,
                operation,
                self._builder.value_of(operation.node.args[0]),
                operation.module in self._in_evaluation,
            )
            return add_module(call)
        if operation.function in _OF_NUMBERS and operation.shape is None:
            return None
        return add_function(self._builder, operation)

    # ------------------------------------------------------------------------------------------------ overwriting

    def _note_overwriting(self, operation: Operation) -> None:
        """Let later readers of an overwritten value read the new one.

        Raises ConfigError if what is overwritten is a view of a value that is read later in another form.
        """
        if not operation.inputs or operation.node.op == "output":
            return
        source = operation.inputs[0]
        if operation.writes_in_place:
            storage = self._storage.setdefault(source, source.position)
            self._storage[operation] = storage
            self._is_view[operation] = self._is_view.get(source, False)
            value = self._builder.values.get(operation)
            for other, other_storage in list(self._storage.items()):
                is_read = any(
                    reader.position > operation.position for reader in self._captured.readers[other]
                )
                if other_storage != storage or other is operation or not is_read:
                    continue
                if self._is_view.get(other, False) or self._is_view[operation] or value is None:
                    raise ConfigError(
                        f"{operation.node.name}: overwrites {other.node.name}, which is read later in another "
                        "form; write the result to a new tensor"
                    )
                self._builder.values[other] = value
        elif _is_view(operation):
            self._storage[operation] = self._storage.setdefault(source, source.position)
            self._is_view[operation] = True

    # ---------------------------------------------------------------------------------------------------- islands

    def _add_island(self, operation: Operation, missing: NoKernel) -> None:
        """Add an operation in FP32, together with the islands that only it reads."""
        if operation.node.target in DROPOUTS:
            # Its arguments say whether it drops, in training and in evaluation, and an island has one graph.
            raise ConfigError(f"{operation.node.name}: int8 training has no {missing}")
        self.named_in_fp32.add(operation.module or operation.node.name)
        included: list[Operation] = []
        reads: list[Operation] = []
        self._collect(operation, included, reads)
        included.sort(key=lambda one: one.position)
        for one in included:
            island = self._islands.pop(one, None)
            if island is not None:
                self._builder.nodes = [
                    node for node in self._builder.nodes if node.name != island.node
                ]
                self.modules.pop(island.node)
                self._builder.values.pop(one)
        try:
            form = form_of(operation)
            values = [self._builder.in_torch_order(self._builder.value_of(one)) for one in reads]
        except NoKernel:
            name = operation.module or operation.node.name
            raise ConfigError(
                f"{name}: int8 training has no {missing}, and torch cannot run it alone, because it does not make one "
                "tensor with an entry for each sample; let a module make one, and name it in fp32_operators"
            ) from None
        layout = layouts.images(form)
        alone = operation.module if len(included) == 1 and len(reads) == 1 else None
        plain = alone is not None and len(operation.node.args) == 1 and not operation.node.kwargs
        if plain and alone is not None:
            made = self._builder.submodules[alone]
            # A module without state shares nothing, so it may run in several places.
            name = alone if list(made.state_dict()) else self._builder.free_name(alone)
            outside: tuple[ir.OutsideName, ...] = ()
        else:
            made = self._graph_module(operation, included, reads)
            name = self._builder.free_name(operation.node.name)
            outside = tuple(
                (key, key, tuple(tensor.shape)) for key, tensor in made.state_dict().items()
            )
        parameters = dict(made.named_parameters())
        value = self._builder.put(
            ir.Fp32,
            name,
            values,
            layout,
            operator=_described(self._builder, included),
            path=alone if plain and alone is not None else "",
            own=tuple(parameters),
            frozen=tuple(key for key, part in parameters.items() if not part.requires_grad),
            outside=outside,
            forms=tuple(value.form for value in values),
        )
        self.modules[name] = made
        self._builder.values[operation] = value
        self._islands[operation] = _Island(name, included, reads)

    def _collect(
        self, operation: Operation, included: list[Operation], reads: list[Operation]
    ) -> None:
        """Add an operation to an island: inputs that have no value in int8, or are islands that only it reads, too."""
        if operation in included:
            return
        included.append(operation)
        for one in operation.inputs:
            island = self._islands.get(one)
            only_reader = set(self._captured.readers[one]) <= set(included)
            if island is not None and only_reader and not self._is_named(island):
                self._collect(one, included, reads)
            elif one in self._builder.values and one.node.op != "get_attr":
                if one not in reads:
                    reads.append(one)
            else:
                self._collect(one, included, reads)

    def _is_named(self, island: _Island) -> bool:
        """Whether the user has named an operation of the island."""
        return any((one.module or one.node.name) in self._leaves for one in island.operations)

    def _graph_module(
        self, operation: Operation, included: Sequence[Operation], reads: Sequence[Operation]
    ) -> nn.Module:
        """Return a module that computes the operations, with the layers and parameters of the model."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {
            one.node: graph.placeholder(f"read_{index}") for index, one in enumerate(reads)
        }
        for one in included:
            made[one.node] = graph.node_copy(one.node, made.__getitem__)
        graph.output(made[operation.node])
        return module_of(self._module, graph, self._captured.constants)

    # ---------------------------------------------------------------------------------------------------- the end

    def _end(self, operation: Operation) -> None:
        returned = operation.node.args[0]
        if not isinstance(returned, fx.Node):
            raise ConfigError("the network returns several values; return the logits alone")
        source = operation.inputs[0]
        if source not in self._builder.values and source.shape is None:
            raise ConfigError(
                f"the network returns {source.node.name}, which is no tensor; return the logits"
            )
        try:
            value = self._builder.in_torch_order(self._builder.value_of(source))
        except NoKernel as missing:
            raise ConfigError(
                f"{source.node.name}: int8 training has no {missing}; the network must return logits (n, classes)"
            ) from None
        if value.name == ir.INPUT:
            raise ConfigError("the network returns its input; there is nothing to train")
        self.nodes = self._builder.pruned(value.name)
        for node in self.nodes:
            if self._reads_numbers and ir.INPUT in node.inputs and not isinstance(node, Embedding):
                raise ConfigError(
                    f"{node.name}: reads whole numbers, and int8 training has only embeddings for them"
                )
        _require_called_once(self.nodes)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn")


def _is_view(operation: Operation) -> bool:
    views = ("view", "reshape", "flatten", "permute", "transpose", "getitem", "chunk", "split", "squeeze",
             "unsqueeze", "t", "narrow", "unbind", "expand", "detach", "swapaxes", "movedim")  # fmt: skip
    return operation.function in views


def _described(builder: GraphBuilder, operations: Sequence[Operation]) -> str:
    """Return what the operations of an island call, each once."""
    names = [
        type(builder.submodules[one.module]).__name__
        if one.module
        else one.function or str(one.node.target)
        for one in operations
        if one.node.op != "get_attr"
    ]
    return ", ".join(dict.fromkeys(names))


def _require_called_once(nodes: Sequence[ir.Node]) -> None:
    """Raise ConfigError for parameters that two operators read, such as those of a module that is called twice."""
    owners: dict[str, str] = {}
    for node in nodes:
        outside = {part: name for part, name, _ in node.outside}
        for part in dict.fromkeys((*node.parameters, *node.vectors)):
            name = outside.get(part, f"{node.name}.{part}")
            if name in owners:
                raise ConfigError(
                    f"{owners[name]}: runs twice, and int8 operators share no weights; make a module for each call, "
                    "or list the module around them in fp32_operators"
                )
            owners[name] = node.name
