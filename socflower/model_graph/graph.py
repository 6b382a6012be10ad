"""A torch model captured once: its operations in the order of execution, as observed in a forward pass.

Cut points, the parts that run alone, and the networks of the integer engine are all made from this graph.

torch.fx changes `nn.Module` for the whole process while it captures a model. A forward pass of another thread would
then be captured too, so forward passes hold `CAPTURE_LOCK` shared, and a capture holds it exclusively.
"""

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from threading import Condition
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, form_of, mapped, num_samples, tensors_in
from socflower.model_graph.following import (
    CaptureFailed,
    NoParts,
    constants_of,
    follow,
    follow_repeatable,
    same_value,
)
from socflower.model_graph.model_copy import copied, reason
from socflower.model_graph.random_state import forked_generators
from socflower.model_graph.tensor_arrays import layout_of, spec_of

Example: TypeAlias = Batch | tuple[int, ...]
"""A batch, whose first sample is used, or the shape of one float32 sample; several inputs are a tuple or a dict."""

# Batch size of the observed pass: a leading dimension of 7 is rarely a coincidence. One of 3 is where a transformer
# stacks queries, keys and values.
NUM_SAMPLES = 7


class CaptureLock:
    """A readers-writer lock: forward passes share it, a capture holds it alone and precedes passes that come later."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_readers = 0
        self._num_waiting = 0
        self._is_capturing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other forward passes. Not reentrant."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_capturing and not self._num_waiting)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone, for a capture. Not reentrant."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_capturing and not self._num_readers)
                self._is_capturing = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_capturing = False
                self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()
"""One lock per process, since torch.fx changes `nn.Module` for the whole process."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    """One operation as torch.fx captured it, with observations of a forward pass in training mode.

    `shape` and `dtype` are those of its result for `NUM_SAMPLES` samples, None if the result is not a tensor.
    """

    node: fx.Node
    # Its number in the order of execution.
    position: int
    # Not in its repr, which would show every path to it.
    inputs: tuple["Operation", ...] = field(repr=False)
    # Path of the module that it calls, None for a function and for inputs and outputs.
    module: str | None
    # Path of the module whose `forward` calls it, "" for the model itself.
    caller: str
    # Name of the torch function or tensor method that it calls, without underscores; "" for others.
    function: str
    # Names of the parameters and buffers that it uses; a shared tensor has one name.
    tensors: frozenset[str]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    # Dimensions from the outermost in memory to the innermost.
    layout: tuple[int, ...]
    # Whether it changed the random state.
    draws: bool
    # Whether it depends on no input, such as a weight that is read by name.
    is_constant: bool
    # Whether it may overwrite its input, such as `nn.ReLU(inplace=True)`.
    writes_in_place: bool

    @property
    def layer(self) -> str:
        """Path of the module that computes it."""
        return self.caller if self.module is None else self.module

    @property
    def is_of_samples(self) -> bool:
        """Whether its result is a tensor with an entry for each sample."""
        return self.shape is not None and self.shape[:1] == (NUM_SAMPLES,)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelGraph:
    """The operations of a model in the order of execution, and so of side effects.

    It has names and paths only, so it describes every copy of the model. `evaluation` is the graph in evaluation mode;
    it is empty if torch.fx cannot follow the model there.
    """

    name: str
    operations: tuple[Operation, ...]
    evaluation: tuple[fx.Node, ...]
    # Values that `forward` makes without its input, by the names that operations read.
    constants: Mapping[str, Any]

    @cached_property
    def by_node(self) -> dict[fx.Node, Operation]:
        """The operations by their nodes."""
        return {operation.node: operation for operation in self.operations}

    @cached_property
    def readers(self) -> dict[Operation, tuple[Operation, ...]]:
        """By operation, the operations that read its result."""
        return {
            one: tuple(self.by_node[user] for user in one.node.users) for one in self.operations
        }

    @property
    def inputs(self) -> tuple[Operation, ...]:
        """The model's inputs, of which some may have defaults."""
        return tuple(one for one in self.operations if one.node.op == "placeholder")

    @property
    def results(self) -> tuple[Operation, ...]:
        """The operations that make the tensors which the model returns."""
        return tuple(one for one in self.operations[-1].inputs if one.shape)

    def name_of(self, operation: Operation) -> str:
        """Return the module's path (with `@n` for its n-th call, n > 1), or fx's name of a function call.

        A value out of a module's tuple, such as the outputs of an LSTM, has the module's name.
        """
        if operation.function == "getitem" and operation.inputs[0].module is not None:
            return self.name_of(operation.inputs[0])
        if operation.module is None:
            return operation.node.name
        earlier = self.operations[: operation.position + 1]
        number = sum(other.module == operation.module for other in earlier)
        return f"{operation.module}@{number}" if number > 1 else operation.module


def capture(
    model: nn.Module,
    example: Example,
    *,
    name: str = "",
    leaves: Set[str] = frozenset(),
    opaque: bool = False,
    several: bool = False,
) -> ModelGraph:
    """Return the graph of `model` in training mode, down to torch's own layers and the modules named by `leaves`.

    With `opaque`, a submodule that torch.fx cannot follow is one operation, as a leaf is. Copies of the model are
    followed and run; the model itself and the random state are unchanged. Raises CaptureFailed if torch.fx cannot
    follow `forward`, or its next call would have another graph, and ConfigError if the model fails for the example, or
    without `several` takes several inputs.
    """
    name = name or type(model).__name__
    samples = first_samples(model, example, name)
    with CAPTURE_LOCK.exclusive(), forked_generators(), torch.no_grad():
        evaluation, in_evaluation = _in_evaluation(model, name, leaves, opaque)
        own = copied(model, name).train()
        root, followed = followed_part(own)
        nodes = follow_repeatable(followed, name, leaves, opaque=opaque)
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        if len(inputs) != 1 and not several:
            raise NoParts(
                f"model {name}: takes {len(inputs)} inputs ({', '.join(inputs)}); it must take one tensor"
            )
        constants = constants_of(followed_part(model)[1], followed, nodes)
        _move_to(root, nodes, constants)
        operations = _observed(own, nodes, samples, name)
    shared = in_evaluation.keys() & constants.keys()
    if not all(same_value(in_evaluation[key], constants[key]) for key in shared):
        # The two graphs give one name to different constants.
        evaluation, in_evaluation = (), {}
    constants = in_evaluation | constants
    return ModelGraph(name=name, operations=operations, evaluation=evaluation, constants=constants)


def _in_evaluation(
    model: nn.Module, name: str, leaves: Set[str], opaque: bool
) -> tuple[tuple[fx.Node, ...], dict[str, Any]]:
    """Return the operations in evaluation mode, and their constants; nothing if torch.fx cannot follow them.

    This follows a copy of its own, since following may store values in a copy.
    """
    root, followed = followed_part(copied(model, name).eval())
    with suppress(CaptureFailed):
        nodes = follow(followed, name, leaves, opaque=opaque)
        constants = constants_of(followed_part(model)[1], followed, nodes)
        _move_to(root, nodes, constants)
        return nodes, constants
    return (), {}


def followed_part(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the path and the part of a model that has all its operations: inside PEFT's wrapper, else itself.

    Raises `ConfigError` for prompts of PEFT, which the wrapper adds.
    """
    base = getattr(model, "get_base_model", None)
    if not (hasattr(model, "peft_config") and callable(base)):
        return "", model
    inner: nn.Module = base()
    # Without prompts it is inside the tuner's wrapper, too.
    if dict(model.named_modules()).get("base_model.model") is not inner:
        raise NoParts(
            f"model {type(model).__name__}: adds prompts to its input, which torch.fx cannot follow; use LoRA"
        )
    return "base_model.model", inner


def _move_to(root: str, nodes: Iterable[fx.Node], constants: Mapping[str, Any]) -> None:
    """Let operations of a part name modules and weights as the model does; `root` is the part's path."""
    for node in nodes:
        if root and node.op in ("get_attr", "call_module") and node.target not in constants:
            node.target = f"{root}.{node.target}"


def module_of(model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any]) -> fx.GraphModule:
    """Return a module that runs operations with the layers of `model`, which it shares."""
    # torch.fx reads constants from a module; this one is another than the model, to which nothing is added.
    root = nn.Module()
    root.__dict__.update({**model.__dict__, **constants})
    made = fx.GraphModule(root, graph)
    # torch.fx makes buffers of its own of them, which would be saved and sent although the model's are not.
    saved = model.state_dict(keep_vars=True).keys()
    for name, buffer in [*made.named_buffers(remove_duplicate=False)]:
        if name not in saved:
            owner, _, own_name = name.rpartition(".")
            made.get_submodule(owner).register_buffer(own_name, buffer, persistent=False)
    return made


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model themselves, in the order of its state_dict."""
    return {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def first_samples(
    model: nn.Module, example: Example, name: str, num_samples: int = NUM_SAMPLES
) -> Batch:
    """Return a batch on the model's device: the first sample of the example repeatedly, or zeros of its shape."""
    device = next((tensor.device for tensor in tensors_of(model).values()), torch.device("cpu"))
    if isinstance(example, tuple | list) and all(isinstance(each, Integral) for each in example):
        return torch.zeros(num_samples, *example, device=device)
    if not tensors_in(example):
        raise ConfigError(
            f"model {name}: its example must be a batch of inputs, or the shape of one sample, got "
            f"{form_of(example)}"
        )

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        require_batch(tensor, name)
        return tensor[:1].detach().expand(num_samples, *tensor.shape[1:]).clone().to(device)

    return mapped(example, repeated)


def arguments_of(graph: ModelGraph | fx.Graph, inputs: Batch) -> tuple[Any, ...]:
    """Return inputs in the order of a graph's: a dict by their names, a tuple or list by their places.

    Raises `ConfigError` for an input that is missing, or that the graph does not have.
    """
    nodes = graph.nodes if isinstance(graph, fx.Graph) else [one.node for one in graph.inputs]
    named = {str(node.target): node.args for node in nodes if node.op == "placeholder"}
    if not isinstance(inputs, Mapping):
        given = inputs if isinstance(inputs, tuple | list) else (inputs,)
        inputs = dict(zip(named, given, strict=False)) if len(given) <= len(named) else {}
    missing = [name for name, default in named.items() if name not in inputs and not default]
    if missing or inputs.keys() - named.keys():
        raise ConfigError(
            f"the model takes inputs {', '.join(named)}, and a batch has {', '.join(inputs) or 'others'}"
        )
    return tuple(inputs[name] if name in inputs else default[0] for name, default in named.items())


def require_batch(example: torch.Tensor, name: str) -> None:
    """Raise ConfigError for an example without samples."""
    if example.ndim == 0 or example.shape[0] == 0:
        raise ConfigError(
            f"model {name}: example input needs a batch dimension of 1 or more, got {form_of(example)}"
        )


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Context in which a model is in training or evaluation mode; the mode of every submodule is restored at exit.

    Of every submodule, because a frozen BatchNorm stays in evaluation mode inside a model that trains.
    """
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def refused_samples(name: str, samples: Batch, error: Exception) -> ConfigError:
    """Return the error of a model whose forward pass failed for a batch."""
    shapes = " and ".join(str(tuple(tensor.shape[1:])) for tensor in tensors_in(samples))
    return ConfigError(
        f"model {name}: does not take {num_samples(samples)} samples of shape {shapes}: {reason(error)}"
    )


class _Observer(fx.Interpreter):
    """Runs a graph and records the result of each operation, without its values, and whether it draws."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.results: dict[str, torch.Tensor | None] = {}
        self.drawing: set[str] = set()
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        before = self._random_state()
        result = super().run_node(n)
        self.results[n.name] = spec_of(result) if isinstance(result, torch.Tensor) else None
        if not all(map(torch.equal, before, self._random_state())):
            self.drawing.add(n.name)
        return result

    def _random_state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states


def _observed(
    model: nn.Module, nodes: Iterable[fx.Node], samples: Batch, name: str
) -> tuple[Operation, ...]:
    graph = next(iter(nodes)).graph
    observer = _Observer(module_of(model, graph, {}), tensors_in(samples)[0].device)
    # Otherwise the graph would keep the weights of the copy.
    graph.owning_module = None
    try:
        observer.run(*arguments_of(graph, samples))
    except Exception as error:
        # Layers raise various types for a wrong shape.
        raise refused_samples(name, samples, error) from error
    names = {id(tensor): key for key, tensor in [*model.named_buffers(), *model.named_parameters()]}
    made: dict[fx.Node, Operation] = {}
    for node in nodes:
        result = observer.results[node.name]
        inputs = tuple(made[other] for other in node.all_input_nodes)
        # A module call has effects and weights of its own.
        may_be_constant = node.op not in ("placeholder", "output", "call_module")
        made[node] = Operation(
            node=node,
            position=len(made),
            inputs=inputs,
            module=str(node.target) if node.op == "call_module" else None,
            caller=caller_of(node),
            function=_function_name(node),
            tensors=_own_tensors(model, node, names),
            shape=None if result is None else tuple(result.shape),
            dtype=None if result is None else result.dtype,
            layout=() if result is None else layout_of(result),
            draws=node.name in observer.drawing,
            is_constant=may_be_constant and all(other.is_constant for other in inputs),
            writes_in_place=_writes_in_place(model, node),
        )
    return tuple(made.values())


def caller_of(node: fx.Node) -> str:
    """Return the path of the innermost module whose `forward` makes this call, "" for the model itself."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    if node.op == "call_module":
        stack = stack[:-1]
    return stack[-1] if stack else ""


def _function_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target).strip("_")
    if node.op != "call_function":
        return ""
    module = inspect.getmodule(node.target)
    home = "_operator" if module is None else module.__name__
    is_known = home == "operator" or home.startswith(("torch", "_operator"))
    if is_known or node.target in vars(functional).values():
        return getattr(node.target, "__name__", "").strip("_")
    return ""


def _writes_in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        parts = model.get_submodule(str(node.target)).modules()
        return any(getattr(part, "inplace", False) for part in parts)
    if node.op not in ("call_method", "call_function"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    # Augmented assignments are functions such as `operator.iadd`.
    is_operator = getattr(node.target, "__module__", "") == "_operator" and name in vars(operator)
    is_augmented = is_operator and name[0] == "i"
    is_inplace = bool(node.kwargs.get("inplace"))
    return name.endswith("_") or is_augmented or is_inplace or name == "setitem"


def _own_tensors(model: nn.Module, node: fx.Node, names: dict[int, str]) -> frozenset[str]:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return frozenset(names[id(tensor)] for tensor in [*module.parameters(), *module.buffers()])
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model)
        if isinstance(value, torch.Tensor):
            return frozenset({names.get(id(value), str(node.target))})
    return frozenset()
