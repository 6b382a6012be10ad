"""A model as a chain of pieces: what runs between two positions of its captured graph, for stages of a pipeline.

A cut of a `SplitModel` is crossed by one tensor. A cut of a chain is crossed by all tensors that operations behind it
read from before it, so that it may lie inside a residual block.
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
from socflower.model_graph.graph import NUM_SAMPLES, Example, ModelGraph, Operation, capture
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

    A tensor that is read further behind passes through: it enters and leaves.
    """

    # Of its first module with weights, else of its last operation.
    name: str
    # With the constants that they need, in order.
    operations: tuple[Operation, ...]
    # Of which results enter; none: the model's input.
    entering: tuple[Operation, ...]
    # Of which results leave; none: the model's output.
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
        if not 0 <= first <= last < len(self.pieces):
            raise ConfigError(
                f"model {self.graph.name}: has pieces 0 to {len(self.pieces) - 1}, not {first} to {last}"
            )
        whole = joined(self.graph, self.pieces[first : last + 1])
        return piece_of(
            model, self.graph, whole.operations, starts=whole.entering, ends=whole.leaving
        )

    def coarsened(self, is_heavy: Callable[[Operation], bool]) -> "ModelChain":
        """Return the chain with one heavy operation in each piece, as far as the model can be cut there.

        Between two heavy operations it is cut where the fewest bytes cross, and of equal places at the last.
        """
        ends: list[int] = []
        # Pieces behind which it can be cut, since the last heavy operation.
        places: list[int] = []
        seen = False
        for number, piece in enumerate(self.pieces):
            if any(is_heavy(operation) for operation in piece.operations):
                if seen and places:
                    ends.append(
                        min(reversed(places), key=lambda place: self.pieces[place].output_bytes)
                    )
                seen, places = True, []
            places.append(number)
        return self.merged(ends)

    def merged(self, ends: Sequence[int]) -> "ModelChain":
        """Return the chain with pieces joined up to each of `ends`, which rise; the last piece of all is added."""
        bounds = [-1, *ends, len(self.pieces) - 1]
        if any(after <= before for before, after in pairwise(bounds)):
            raise ConfigError(
                f"model {self.graph.name}: ends of pieces must rise from 0 and stay below "
                f"{len(self.pieces) - 1}, got {list(ends)}"
            )
        return replace(
            self,
            pieces=tuple(
                joined(self.graph, self.pieces[before + 1 : after + 1])
                for before, after in pairwise(bounds)
            ),
        )


def capture_chain(model: nn.Module, example: Example, *, name: str = "") -> ModelChain:
    """Return the finest chain of `model`: a piece ends wherever the model can be cut.

    `example` is a batch, of which the first sample is used, or the shape of one float32 sample. A cut is crossed by
    tensors only, each with the batch as first dimension, that no operation behind it overwrites (autograd refuses
    that); a weight is used on one side only, and so is a constant that is drawn.

    A module that torch.fx cannot follow, such as an adapter of PEFT, is not cut, nor are others of its type.

    Raises ConfigError where torch.fx cannot follow the model itself, and where it cannot be cut at all.
    """
    graph = _captured(model, example, name)
    running = [operation for operation in graph.operations if not operation.is_constant]
    constants = _constants_of(graph)
    ends = _ends(model, graph, running, constants)
    if not ends:
        raise NoParts(
            f"model {graph.name}: cannot be cut; behind every operation a weight or a value that is no batch "
            "of tensors would be needed on both sides"
        )
    pieces: list[Piece] = []
    before: tuple[Operation, ...] = ()
    for start, end in pairwise([0, *(end + 1 for end in ends), len(running)]):
        operations = running[start:end]
        leaving = _crossing(graph, running, end) if end < len(running) else ()
        needed = {constant for operation in operations for constant in constants[operation]}
        own = tuple(sorted((*needed, *operations), key=lambda operation: operation.position))
        pieces.append(
            Piece(name=_piece_name(graph, own), operations=own, entering=before, leaving=leaving)
        )
        before = leaving
    return ModelChain(graph=graph, pieces=tuple(pieces))


def _captured(model: nn.Module, example: Example, name: str) -> ModelGraph:
    whole: set[str] = set()
    while True:
        try:
            return capture(model, example, name=name, leaves=whole)
        except CaptureFailed as failed:
            if not failed.module and isinstance(
                getattr(getattr(model, "base_model", None), "model", None), nn.Module
            ):
                raise NoParts(
                    f"{failed}; give its .base_model.model, which has the same adapters"
                ) from None
            kind = type(model.get_submodule(failed.module))
            # A piece gets the samples of a batch in several calls, so what is kept between calls would be another.
            if failed.module in ("", *whole) or isinstance(failed, KeepsState):
                raise
            whole.update(
                path for path, module in model.named_modules() if path and type(module) is kind
            )


def joined(graph: ModelGraph, pieces: Sequence[Piece]) -> Piece:
    """Return consecutive pieces as one."""
    operations = tuple(
        sorted(
            {operation for piece in pieces for operation in piece.operations},
            key=lambda operation: operation.position,
        )
    )
    return Piece(
        name=_piece_name(graph, operations),
        operations=operations,
        entering=pieces[0].entering,
        leaving=pieces[-1].leaving,
    )


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
    """Return the positions among the running operations behind which the model can be cut."""
    numbers = {operation: number for number, operation in enumerate(running)}
    refused: set[int] = set()
    users: dict[str, list[int]] = {}
    for number, operation in enumerate(running):
        for own in (operation, *constants[operation]):
            drawn = [f"drawn {own.node.name}"] if own.is_constant and own.draws else []
            for key in (*own.tensors, *drawn):
                users.setdefault(key, []).append(number)
        if operation.writes_in_place:
            # The tensor that it overwrites must have been made on its own side.
            made = [
                numbers[_origin(model, other)]
                for other in operation.inputs
                if not other.is_constant
            ]
            refused.update(range(min(made, default=number), number))
    for positions in users.values():
        refused.update(range(positions[0], positions[-1]))
    first = next(
        number for number, operation in enumerate(running) if operation.node.op != "placeholder"
    )
    return [
        number
        for number in range(first, len(running) - 2)
        if number not in refused and all(map(_can_cross, _crossing(graph, running, number + 1)))
    ]


def _origin(model: nn.Module, operation: Operation) -> Operation:
    """Return the operation that made the memory of a result, which may be a view of another's."""
    while (
        operation.inputs and not operation.inputs[0].is_constant and _may_be_view(model, operation)
    ):
        operation = operation.inputs[0]
    return operation


def _may_be_view(model: nn.Module, operation: Operation) -> bool:
    if operation.module is not None and isinstance(
        model.get_submodule(operation.module), _VIEW_MODULES
    ):
        return True
    return operation.writes_in_place or operation.function in _VIEWS


def _crossing(graph: ModelGraph, running: Sequence[Operation], end: int) -> tuple[Operation, ...]:
    """Return the operations before number `end` whose results are read from there on, in order."""
    behind = set(running[end:])
    return tuple(
        operation for operation in running[:end] if not behind.isdisjoint(graph.readers[operation])
    )


def _can_cross(operation: Operation) -> bool:
    return (
        bool(operation.shape) and operation.shape is not None and operation.shape[0] == NUM_SAMPLES
    )


def _piece_name(graph: ModelGraph, operations: Sequence[Operation]) -> str:
    named = [
        operation for operation in operations if operation.module is not None and operation.tensors
    ]
    return graph.name_of((named or operations)[0 if named else -1])


def result_bytes(operations: Sequence[Operation]) -> float:
    """Return the bytes of one sample of several results."""
    return float(
        sum(
            math.prod(operation.shape[1:]) * _item_bytes(operation.dtype)
            for operation in operations
            if operation.shape is not None and operation.dtype is not None
        )
    )


def _item_bytes(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype, device="meta").element_size()
