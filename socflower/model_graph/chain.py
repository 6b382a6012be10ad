"""A model as a chain of pieces, each between two positions of its captured graph, for stages of a pipeline.

One tensor crosses a cut of a `SplitModel`. A cut of a chain may lie inside a residual block: all tensors cross it that
operations behind the cut read from before it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.following import CaptureFailed, KeepsState, NoParts
from socflower.model_graph.graph import (
    NUM_SAMPLES,
    Example,
    ModelGraph,
    Operation,
    capture,
    followed_part,
)
from socflower.model_graph.parts import piece_of

_VIEWS = frozenset(
    {
        "chunk",
        "contiguous",
        "dropout",
        "expand",
        "expand_as",
        "flatten",
        "getitem",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "split",
        "squeeze",
        "swapaxes",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)
_VIEW_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Consecutive operations of a graph, and the tensors that enter and leave them.

    A tensor for a later piece passes through: it enters and leaves.
    """

    # The name of its first module with weights, else of its last operation.
    name: str
    # The operations with the constants that they need, in order.
    operations: tuple[Operation, ...]
    # The operations whose results enter; empty: the model's input enters.
    entering: tuple[Operation, ...]
    # The operations whose results leave; empty: the model's output leaves.
    leaving: tuple[Operation, ...]

    @property
    def output_bytes(self) -> float:
        """Bytes per sample of all tensors that leave it; 0 for the last piece."""
        return result_bytes(self.leaving)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelChain:
    """A model's graph, and its pieces in the order in which they run. It describes every copy of the model."""

    graph: ModelGraph
    pieces: tuple[Piece, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the pieces."""
        return tuple(piece.name for piece in self.pieces)

    def module(self, model: nn.Module, first: int, last: int) -> nn.Module:
        """Return pieces `first` to `last` of `model` as a module, which shares the model's parameters and buffers.

        It takes the entering tensors one by one, or the model's input, and returns a tuple of the leaving ones, or the
        model's output. Only the modules that it runs are in it, under their paths in the model. Raises ConfigError for
        pieces that do not exist.
        """
        most = len(self.pieces) - 1
        if not 0 <= first <= last <= most:
            raise ConfigError(
                f"model {self.graph.name}: has pieces 0 to {most}, not {first} to {last}"
            )
        whole = joined(self.graph, self.pieces[first : last + 1])
        operations, starts, ends = whole.operations, whole.entering, whole.leaving
        return piece_of(model, self.graph, operations, starts=starts, ends=ends)

    def coarsened(self, is_heavy: Callable[[Operation], bool]) -> "ModelChain":
        """Return the chain with one heavy operation in each piece, as far as the model can be cut there.

        Between two heavy operations it is cut where the fewest bytes cross; among equal places, at the last one.
        """
        ends: list[int] = []
        # Pieces behind which it can be cut, since the last heavy operation.
        places: list[int] = []
        seen = False
        for number, piece in enumerate(self.pieces):
            if any(is_heavy(operation) for operation in piece.operations):
                if seen and places:
                    end = min(reversed(places), key=lambda place: self.pieces[place].output_bytes)
                    ends.append(end)
                seen, places = True, []
            places.append(number)
        return self.merged(ends)

    def merged(self, ends: Sequence[int]) -> "ModelChain":
        """Return the chain with pieces joined up to each of `ends`, which rise, and to the last piece."""
        last = len(self.pieces) - 1
        bounds = [*pairwise([-1, *ends, last])]
        if any(after <= before for before, after in bounds):
            raise ConfigError(
                f"model {self.graph.name}: ends of pieces must rise from 0 to below {last}, got {ends}"
            )
        groups = [self.pieces[before + 1 : after + 1] for before, after in bounds]
        return replace(self, pieces=tuple(joined(self.graph, group) for group in groups))


def capture_chain(model: nn.Module, example: Example, *, name: str = "") -> ModelChain:
    """Return the finest chain of `model`: a piece ends wherever the model can be cut.

    `example` is a batch, whose first sample is used, or the shape of one float32 sample. Only tensors cross a cut, each
    with the batch as first dimension. No operation behind the cut overwrites them, which autograd would refuse. A
    parameter may be used on both sides, each of which has a copy; a buffer that a module may change is used on one
    side only, and so is a constant that is drawn.

    If torch.fx cannot follow a module, such as an adapter of PEFT, no module of its type is cut.

    Raises ConfigError if torch.fx cannot follow the model itself, and if it cannot be cut at all, with the operation
    that prevents it.
    """
    graph = _captured(model, example, name)
    running = [operation for operation in graph.operations if not operation.is_constant]
    constants = _constants_of(graph)
    ends = _ends(model, graph, running, constants)
    pieces: list[Piece] = []
    before: tuple[Operation, ...] = ()
    for start, end in pairwise([0, *(end + 1 for end in ends), len(running)]):
        operations = running[start:end]
        leaving = _crossing(graph, running, end) if end < len(running) else ()
        needed = {constant for operation in operations for constant in constants[operation]}
        own = _in_order({*needed, *operations})
        name = _piece_name(graph, own)
        pieces.append(Piece(name=name, operations=own, entering=before, leaving=leaving))
        before = leaving
    return ModelChain(graph=graph, pieces=tuple(pieces))


def _captured(model: nn.Module, example: Example, name: str) -> ModelGraph:
    """Capture a model, with modules that torch.fx cannot follow as leaves."""
    whole: set[str] = set()
    _, followed = followed_part(model)
    while True:
        try:
            return capture(model, example, name=name, leaves=whole, several=True)
        except CaptureFailed as failed:
            # Pieces are called once for each micro-batch, so a module that keeps state would compute something else.
            if failed.module in ("", *whole) or isinstance(failed, KeepsState):
                if failed.module or "cannot follow" not in failed.why:
                    raise
                raise CaptureFailed(
                    name, "", f"{failed.why}; perhaps exported_module can"
                ) from None
            kind = type(followed.get_submodule(failed.module))
            for path, module in followed.named_modules():
                if path and type(module) is kind:
                    whole.add(path)


def joined(graph: ModelGraph, pieces: Sequence[Piece]) -> Piece:
    """Return consecutive pieces as one."""
    chosen = {operation for piece in pieces for operation in piece.operations}
    operations = _in_order(chosen)
    return Piece(
        name=_piece_name(graph, operations),
        operations=operations,
        entering=pieces[0].entering,
        leaving=pieces[-1].leaving,
    )


def _in_order(operations: Collection[Operation]) -> tuple[Operation, ...]:
    return tuple(sorted(operations, key=lambda operation: operation.position))


def _constants_of(graph: ModelGraph) -> Mapping[Operation, Collection[Operation]]:
    """Return the constants that each operation needs, directly or through other constants."""
    found: dict[Operation, set[Operation]] = {}
    for operation in graph.operations:
        direct = {other for other in operation.inputs if other.is_constant}
        found[operation] = direct.union(*(found[other] for other in direct))
    return found


def _ends(
    model: nn.Module,
    graph: ModelGraph,
    running: Sequence[Operation],
    constants: Mapping[Operation, Collection[Operation]],
) -> list[int]:
    """Return the positions among the running operations behind which the model can be cut; NoParts for none."""
    refused = _separating_users(graph, model, running, constants)
    refused |= _separating_writers(graph, model, running)
    last = len(running) - 2
    first = next(
        number for number, operation in enumerate(running) if operation.node.op != "placeholder"
    )
    ends, reasons = [], list[str]()
    for number in range(first, last):
        crossing = _crossing(graph, running, number + 1)
        why = [_why_stays(graph, each) for each in crossing if not each.is_of_samples]
        why += [refused[number]] if number in refused else []
        reasons += why[:1]
        if not why:
            ends.append(number)
    if not ends:
        # The reason of most places.
        why_whole = max(reasons, key=reasons.count, default="it has a single operation")
        raise NoParts(f"model {graph.name}: cannot be cut: {why_whole}")
    return ends


def _why_stays(graph: ModelGraph, operation: Operation) -> str:
    """Return why a result cannot cross a cut, and what to change."""
    name = graph.name_of(operation)
    if operation.shape is None:
        return f"{name!r} makes a value that is no tensor, and later operations read it; compute it where it is read"
    return (
        f"{name!r} makes a tensor of shape {operation.shape} for {NUM_SAMPLES} samples, and later operations read it; "
        "make samples its first dimension, as with batch_first=True"
    )


def _separating_users(
    graph: ModelGraph,
    model: nn.Module,
    running: Sequence[Operation],
    constants: Mapping[Operation, Collection[Operation]],
) -> dict[int, str]:
    """Return why not to cut between the first and the last use of a buffer that may change, or of a drawn constant."""
    parameters = dict(model.named_parameters())
    users: dict[str, list[int]] = {}
    # Buffers that no module has, only operations that read them.
    changing: set[str] = set()
    for number, operation in enumerate(running):
        for own in (operation, *constants[operation]):
            drawn = [f"drawn {own.node.name}"] if own.is_constant and own.draws else []
            writers = [own, *graph.readers[own]]
            if own.module is not None or any(each.writes_in_place for each in writers):
                changing |= own.tensors - parameters.keys()
            changing.update(drawn)
            for key in (*own.tensors, *drawn):
                users.setdefault(key, []).append(number)
    refused: dict[int, str] = {}
    for key in sorted(changing):
        first, last = users[key][0], users[key][-1]
        names = " and ".join(graph.name_of(running[number]) for number in (first, last))
        why = f"{key!r}, which is no parameter, is used by {names}; give each of them its own"
        refused |= dict.fromkeys(range(first, last), why)
    return refused


def _separating_writers(
    graph: ModelGraph, model: nn.Module, running: Sequence[Operation]
) -> dict[int, str]:
    """Return why not to cut between the operation that makes a tensor and one that overwrites it."""
    numbers = {operation: number for number, operation in enumerate(running)}
    refused: dict[int, str] = {}
    for number, operation in enumerate(running):
        if operation.writes_in_place:
            inputs = [other for other in operation.inputs if not other.is_constant]
            made = [numbers[_origin(model, other)] for other in inputs]
            name = graph.name_of(operation)
            why = f"{name!r} overwrites its input, which is made before; use the operation that returns a new tensor"
            refused |= dict.fromkeys(range(min(made, default=number), number), why)
    return refused


def _origin(model: nn.Module, operation: Operation) -> Operation:
    """Return the operation that allocated the memory of a result, which may be a view."""
    while operation.inputs and _may_be_view(model, operation):
        if operation.inputs[0].is_constant:
            break
        operation = operation.inputs[0]
    return operation


def _may_be_view(model: nn.Module, operation: Operation) -> bool:
    if operation.module is not None:
        module = model.get_submodule(operation.module)
        return operation.writes_in_place or isinstance(module, _VIEW_MODULES)
    return operation.writes_in_place or operation.function in _VIEWS


def _crossing(graph: ModelGraph, running: Sequence[Operation], end: int) -> tuple[Operation, ...]:
    """Return the operations before number `end` whose results are read from there on, in order."""
    behind = set(running[end:])
    return tuple(
        operation for operation in running[:end] if not behind.isdisjoint(graph.readers[operation])
    )


def _piece_name(graph: ModelGraph, operations: Sequence[Operation]) -> str:
    for operation in operations:
        if operation.module is not None and operation.tensors:
            return graph.name_of(operation)
    return graph.name_of(operations[-1])


def result_bytes(operations: Sequence[Operation]) -> float:
    """Return the bytes of one sample of several results."""
    num_bytes = 0
    for operation in operations:
        if operation.shape is not None and operation.dtype is not None:
            num_bytes += math.prod(operation.shape[1:]) * _item_bytes(operation.dtype)
    return float(num_bytes)


def _item_bytes(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype, device="meta").element_size()
