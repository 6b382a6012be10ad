"""Following a model's `forward` with torch.fx: the graph of one call, if every call computes the same.

torch.fx calls `forward` once, with symbols in place of tensors. What does not depend on the input happens at that call
and is not in the graph: a buffer that counts, a random number, a value that is stored for the next call.
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
    """torch.fx cannot follow a model: `why` says so without the model's name, `module` is the path of the module."""

    def __init__(self, name: str, module: str, why: str) -> None:
        self.module, self.why = module, why
        super().__init__(f"model {name}: {why}")


class KeepsState(CaptureFailed):
    """A module changes with each call what is not in a graph: a buffer, or an attribute that the next call reads."""


def follow(own: nn.Module, name: str, leaves: Set[str]) -> tuple[fx.Node, ...]:
    """Return the operations of one call of a model, down to torch's own layers and `leaves`, in order.

    The model may be left with symbols in its attributes, so it must be a copy. Raises CaptureFailed.
    """
    return _followed(own, name, _Tracer(leaves))


def follow_repeatable(own: nn.Module, name: str, leaves: Set[str]) -> tuple[fx.Node, ...]:
    """Return the operations like `follow`, where each call performs the same.

    Raises CaptureFailed for a model that draws random numbers without its input, and KeepsState.
    """
    before, tensors = (
        {path: dict(vars(module)) for path, module in own.named_modules()},
        list(_held_tensors(own)),
    )
    tracer, states = _Tracer(leaves), generator_states()
    nodes = _followed(own, name, tracer)
    tracer.note_draws(states, "")
    if tracer.draws_in is not None:
        raise CaptureFailed(
            name,
            tracer.draws_in,
            f"forward of {_type_name(own, tracer.draws_in)} draws random "
            "numbers that do not depend on its input, of which torch.fx keeps the first; draw them "
            "with torch.rand_like or .bernoulli() of a tensor that does",
        )
    for path, tensor, version in tensors:
        module, _, key = path.rpartition(".")
        if tensor._version != version or (
            key in dict(own.get_submodule(module).named_buffers(recurse=False))
            and operator.attrgetter(path)(own) is not tensor
        ):
            raise KeepsState(
                name,
                module,
                f"forward of {_type_name(own, module)} changes {path!r} by something that "
                f"does not depend on its input, which torch.fx leaves out; {_AS_IT_IS}",
            )
    form, num_nodes = _form(own, nodes), len(nodes)
    try:
        repeats = _form(own, _followed(own, name, _Tracer(leaves))) == form
    except CaptureFailed:
        repeats = False
    # A call that reads a symbol of the first one adds to the graph of the first one.
    if not repeats or len(nodes[0].graph.nodes) != num_nodes:
        stored = [
            (path, key)
            for path, module in own.named_modules()
            for key, value in vars(module).items()
            if before[path].get(key, before) is not value and not key.startswith("_tensor_constant")
        ]
        module, key = stored[0] if stored else ("", "")
        what = (
            f"stores {f'{module}.{key}'.strip('.')!r}, and its next call reads that"
            if stored
            else "computes something else at its second call"
        )
        raise KeepsState(
            name,
            module,
            f"forward of {_type_name(own, module)} {what}, which is not in the graph of "
            f"torch.fx; pass it as input and output. {_AS_IT_IS}",
        )
    return nodes


_AS_IT_IS = "SoCFlow with FP32Trainer runs a model as it is"


def constants_of(model: nn.Module, own: nn.Module, nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """Return what operations read of the copy `own`, by name, that torch.fx has added to it."""
    names = dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr")
    return {
        name: getattr(own, name) for name in names if "." not in name and not hasattr(model, name)
    }


def same_value(one: Any, other: Any) -> bool:
    """Return whether two constants are the same object, or tensors with the same values; NaN equals NaN."""
    if one is other:
        return True
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device) and bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


class _Tracer(fx.Tracer):
    """Stops at torch's own layers and at `leaves`, and remembers in which module it failed, and which one draws."""

    def __init__(self, leaves: Set[str]) -> None:
        super().__init__()
        self._leaves = leaves
        self.failed_in = ""
        # The innermost module that drew while it was followed.
        self.draws_in: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        states = generator_states()
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:
            # The innermost module fails first.
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise
        self.note_draws(states, self.path_of_module(m))
        return result

    def note_draws(self, before: Mapping[str, Any], path: str) -> None:
        """Remember the first module after which the generators are no longer in the states `before`."""
        if self.draws_in is None and not same_states(before, generator_states()):
            self.draws_in = path


def _followed(own: nn.Module, name: str, tracer: _Tracer) -> tuple[fx.Node, ...]:
    try:
        return tuple(tracer.trace(own).nodes)
    except Exception as error:
        # Fx raises many types, and a forward function may raise anything.
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not Path(frame.filename).is_relative_to(_TORCH) and frame.filename != __file__
        ]
        where = (
            f", {frames[-1].name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
            if frames
            else ""
        )
        raise CaptureFailed(
            name,
            tracer.failed_in,
            f"torch.fx cannot follow {_type_name(own, tracer.failed_in)}{where}: {reason(error)}",
        ) from error


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
    """Return what two graphs of the same operations have in common: operations refer to others by their position."""
    places = {node: f"%{place}" for place, node in enumerate(nodes)}
    form: list[Any] = []
    for node in nodes:
        read = operator.attrgetter(str(node.target))(own) if node.op == "get_attr" else None
        target = _Constant(read) if isinstance(read, torch.Tensor) else node.target
        arguments = fx.node.map_arg(
            (node.args, node.kwargs), lambda other: places.get(other, "of the call before")
        )
        form.append((node.op, target, repr(arguments)))
    return form
