"""Following a model's `forward` with torch.fx: the graph of one call, if every call computes the same.

torch.fx calls `forward` once, with symbols in place of tensors. Work that does not depend on the input is done during
that call, and is not in the graph: a buffer that counts, a random number, a value that is stored for the next call.
"""

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from socflower.errors import ConfigError
from socflower.model_graph.model_copy import reason
from socflower.model_graph.random_state import generator_states, same_states

_TORCH = Path(torch.__file__).parent


class NoParts(ConfigError):
    """A model cannot be divided into parts by its graph."""


class CaptureFailed(NoParts):
    """torch.fx cannot follow a model. `module` is the path of the module that it failed in, `why` the reason."""

    def __init__(self, name: str, module: str, why: str) -> None:
        self.module, self.why = module, why
        super().__init__(f"model {name}: {why}")


class KeepsState(CaptureFailed):
    """A call of a module changes a buffer, or an attribute that the next call reads, outside of the graph."""


def follow(
    own: nn.Module, name: str, leaves: Set[str], *, opaque: bool = False
) -> tuple[fx.Node, ...]:
    """Return the operations of one call of a model, down to torch's own layers and `leaves`, in order.

    With `opaque`, a submodule that torch.fx cannot follow is one operation, as a leaf is. The model may be left with
    symbols in its attributes, so it must be a copy. Raises CaptureFailed.
    """
    return _followed(own, name, _Tracer(leaves, opaque=opaque))


def follow_repeatable(
    own: nn.Module, name: str, leaves: Set[str], *, opaque: bool = False
) -> tuple[fx.Node, ...]:
    """Return the operations of a model as `follow` does, if each call performs the same ones.

    Raises CaptureFailed for a model that draws random numbers without its input, and KeepsState.
    """
    attributes = {path: dict(vars(module)) for path, module in own.named_modules()}
    tensors = list(_held_tensors(own))
    tracer, states = _Tracer(leaves, opaque=opaque), generator_states()
    nodes = _followed(own, name, tracer)
    tracer.note_draws(states, "")
    if tracer.draws_in is not None:
        raise CaptureFailed(
            name,
            tracer.draws_in,
            f"forward of {_type_name(own, tracer.draws_in)} draws random numbers that do not depend on "
            "its input; draw them with torch.rand_like of a tensor that does",
        )
    again = _Tracer(leaves, opaque=opaque)
    kept = _written(own, tensors) or _remembered(own, name, nodes, again, attributes)
    if kept is not None:
        module, what = kept
        raise KeepsState(name, module, f"forward of {_type_name(own, module)} {what}; {_AS_IT_IS}")
    return nodes


_AS_IT_IS = "SoCFlow with FP32Trainer runs a model as it is"


def _written(
    own: nn.Module, tensors: Sequence[tuple[str, torch.Tensor, int]]
) -> tuple[str, str] | None:
    """Return the module and the change if a call has written to a tensor, or replaced a buffer."""
    for path, tensor, version in tensors:
        module, _, key = path.rpartition(".")
        is_buffer = key in dict(own.get_submodule(module).named_buffers(recurse=False))
        is_replaced = is_buffer and operator.attrgetter(path)(own) is not tensor
        if is_replaced or tensor._version != version:
            return module, f"changes {path!r} by something that does not depend on its input"
    return None


def _remembered(
    own: nn.Module,
    name: str,
    nodes: Sequence[fx.Node],
    tracer: "_Tracer",
    before: Mapping[str, Mapping[str, Any]],
) -> tuple[str, str] | None:
    """Follow a second call; return the module and the reason if it has another graph than the first one."""
    form, num_nodes = _form(own, nodes), len(nodes)
    try:
        is_same = _form(own, _followed(own, name, tracer)) == form
    except CaptureFailed:
        is_same = False
    # A call that reads a symbol of the first one adds to the graph of the first one.
    if is_same and len(nodes[0].graph.nodes) == num_nodes:
        return None
    for path, module in own.named_modules():
        for key, value in vars(module).items():
            # torch.fx itself stores constants.
            is_new = before[path].get(key, before) is not value
            if is_new and not key.startswith("_tensor_constant"):
                full = f"{path}.{key}".strip(".")
                return path, f"stores {full!r}, and its next call reads that"
    return "", "computes something else at its second call"


def constants_of(model: nn.Module, own: nn.Module, nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the constants that torch.fx has added to the copy `own` for its operations, by name."""
    names = dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr")
    added = [name for name in names if "." not in name and not hasattr(model, name)]
    return {name: getattr(own, name) for name in added}


def same_value(one: Any, other: Any) -> bool:
    """Return whether two constants are the same object, or tensors with the same values; NaN equals NaN."""
    if one is other:
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    are_nan = (one != one) & (other != other)
    return bool(((one == other) | are_nan).all())


class _Tracer(fx.Tracer):
    """Stops at torch's own layers and at `leaves`; it keeps the module in which it failed, and the one that drew."""

    def __init__(self, leaves: Set[str], *, opaque: bool = False) -> None:
        super().__init__()
        self._leaves = set(leaves)
        self._opaque = opaque
        self.failed_in = ""
        # The innermost module that drew while it was followed.
        self.draws_in: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # A leaf is not run, so it draws nothing; most modules are leaves, and reading the states takes longer.
        is_run = not self.is_leaf_module(m, self.path_of_module(m))
        states = generator_states() if is_run else {}
        last, stack = next(reversed(self.graph.nodes), None), self.module_stack.copy()
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:
            # The innermost module fails first.
            path = self.path_of_module(m)
            if not self._opaque or path in self._leaves:
                self.failed_in = self.failed_in or path
                raise
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            self.module_stack = stack
            self._leaves.add(path)
            result = super().call_module(m, forward, args, kwargs)
        if is_run:
            self.note_draws(states, self.path_of_module(m))
        return result

    def note_draws(self, before: Mapping[str, Any], path: str) -> None:
        """Remember the first module after which the generators are no longer in the states `before`."""
        if self.draws_in is None and not same_states(before, generator_states()):
            self.draws_in = path


def _followed(own: nn.Module, name: str, tracer: _Tracer) -> tuple[fx.Node, ...]:
    try:
        graph = tracer.trace(own)
        for node in reversed(graph.nodes):
            # `outputs, _ = lstm(inputs)` also takes what it does not use, which would cross every cut behind it.
            if node.target is operator.getitem and not node.users:
                graph.erase_node(node)
        return tuple(graph.nodes)
    except Exception as error:
        # torch.fx raises many types, and a forward function may raise anything.
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            file = Path(frame.filename)
            if not file.is_relative_to(_TORCH) and frame.filename != __file__:
                where = f", {frame.name} at {file.name}:{frame.lineno}"
        kind = _type_name(own, tracer.failed_in)
        why = f"torch.fx cannot follow {kind}{where}: {reason(error)}"
        raise CaptureFailed(name, tracer.failed_in, why) from error


def _type_name(own: nn.Module, path: str) -> str:
    return type(own.get_submodule(path)).__name__


def _held_tensors(own: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield buffers, and tensors that are plain attributes of modules, with the number of writes to each."""
    for path, module in own.named_modules():
        held = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for key, value in held.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}".lstrip("."), value, value._version


class _Constant:
    """A value that an operation reads by name; it equals another one by value, whatever their names."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and same_value(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]


def _form(own: nn.Module, nodes: Sequence[fx.Node]) -> list[Any]:
    """Return a form that is equal for graphs of the same operations: they refer to each other by position."""
    places = {node: f"%{place}" for place, node in enumerate(nodes)}
    form: list[Any] = []
    for node in nodes:
        read = operator.attrgetter(str(node.target))(own) if node.op == "get_attr" else None
        target = _Constant(read) if isinstance(read, torch.Tensor) else node.target
        own_arguments = (node.args, node.kwargs)
        # An operation of the first call has no place here.
        arguments = fx.node.map_arg(own_arguments, lambda other: places.get(other, "earlier"))
        form.append((node.op, target, repr(arguments)))
    return form
