"""The operations of a model as torch.fx captures them: their order, their results, and where the model may be cut.

torch.fx changes `nn.Module` for the whole process while it captures a model. A forward pass of another thread would
then be captured too, so forward passes hold `CAPTURE_LOCK` shared, and a capture holds it exclusively.
"""

import copy
import inspect
import operator
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules import activation, normalization, pooling

from socflower.capture.random_state import forked_generator
from socflower.errors import ConfigError


class CaptureLock:
    """A readers-writer lock: forward passes share it, a capture holds it alone and has precedence over later passes."""

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


NUM_SAMPLES = 3  # batch size of the pass that observes shapes: a leading dimension of 3 is rarely a coincidence

_MODULES: tuple[type[nn.Module], ...] = (
    # torch lists attention under activations, but it returns two values.
    *(getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention"),
    # Unpooling takes a second input, the indices of the maxima.
    *(getattr(pooling, name) for name in pooling.__all__ if not name.startswith("MaxUnpool")),
    *(getattr(normalization, name) for name in normalization.__all__),
    nn.modules.batchnorm._NormBase,
)
_NAMES = frozenset({
    "relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish",
    "hardtanh", "hardsigmoid", "tanh", "sigmoid", "logsigmoid", "softplus", "softsign", "tanhshrink", "softshrink",
    "hardshrink", "threshold", "glu", "softmax", "log_softmax", "softmin",
    "batch_norm", "instance_norm", "layer_norm", "group_norm", "local_response_norm", "rms_norm",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "lp_pool1d", "lp_pool2d",
    "lp_pool3d", "fractional_max_pool2d", "fractional_max_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "mean", "amax",  # global pooling without a module
})
_SUMS = frozenset({"add", "iadd"})
_TORCH = Path(torch.__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The observed behaviour of one operation of the graph in a forward pass."""

    shape: tuple[int, ...] | None  # None: the result is not a tensor
    dtype: torch.dtype | None
    layout: tuple[int, ...]  # dimensions from the outermost in memory to the innermost
    draws: bool  # it changed the random state
    is_constant: bool  # it depends on no input: a weight read by name, a constant tensor


class CapturedGraph:
    """A model's graph with its observations; nodes keep their order of execution, and so the order of side effects."""

    def __init__(self, model: nn.Module, name: str, example: torch.Tensor | tuple[int, ...]) -> None:
        self.model = model
        self.name = name
        self.graph = _capture_graph(model, name, training=True)
        self.nodes = tuple(self.graph.nodes)
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self.observations = _observe(model, self.graph, first_samples(model, example, name), name)
        self._owned = {node: frozenset(map(id, _own_tensors(model, node))) for node in self.nodes}

    def places(self) -> list[fx.Node]:
        """Return the operations behind which the model can be cut, in order."""
        return [node for node in self.nodes
                if (_is_place(self.model, node) or self._ends_block(node)) and self._can_cut(node)]

    def front(self, place: fx.Node) -> list[fx.Node]:
        """Return the operations up to and including a node, and the constants that they need, in order."""
        position = self.position[place]
        return self._with_constants(n for n in self.nodes if self.position[n] <= position)

    def back(self, place: fx.Node) -> list[fx.Node]:
        """Return the operations after a node, and the constants that they need, in order."""
        position = self.position[place]
        return self._with_constants(n for n in self.nodes if self.position[n] > position)

    def tensor_ids(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return `id` of every parameter and buffer that these operations use."""
        return set().union(*(self._owned[node] for node in nodes))

    def layer(self, node: fx.Node) -> str:
        """Return the path of the module that performs this operation."""
        if node.op == "call_module":
            return str(node.target)
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return str(stack[-1][0]) if stack else ""

    def cut_name(self, node: fx.Node) -> str:
        """Return the module's path (with `@n` for its n-th call, n > 1), or fx's name of a function call."""
        if node.op != "call_module":
            return node.name
        calls = [other for other in self.nodes if other.op == "call_module" and other.target == node.target]
        number = calls.index(node) + 1
        return f"{node.target}@{number}" if number > 1 else str(node.target)

    @property
    def writes_in_place(self) -> bool:
        """Whether any operation may overwrite its input, such as `nn.ReLU(inplace=True)`."""
        return any(_writes_in_place(self.model, node) for node in self.nodes)

    def evaluating(self) -> dict[fx.Node, fx.Node]:
        """Return each operation's counterpart in evaluation mode, where functions such as dropout draw nothing."""
        other = tuple(_capture_graph(self.model, self.name, training=False).nodes)
        if [(n.op, n.target) for n in other] != [(n.op, n.target) for n in self.nodes]:
            raise ConfigError(f"model {self.name}: runs other operations in training than in evaluation, so no part of "
                              "it can be frozen; use modules such as nn.Dropout in place of `if self.training`")
        return dict(zip(self.nodes, other, strict=True))

    def _with_constants(self, chosen: Iterable[fx.Node]) -> list[fx.Node]:
        nodes = {node for node in chosen if not self.observations[node].is_constant}
        # In reverse order, so that the inputs of a constant are visited after the constant.
        for node in reversed(self.nodes):
            if self.observations[node].is_constant and any(user in nodes for user in node.users):
                nodes.add(node)
        return [node for node in self.nodes if node in nodes]

    def _ends_block(self, node: fx.Node) -> bool:
        """Return whether a residual block ends with this sum; a block's activation or norm is its end instead."""
        parts = [other for other in node.all_input_nodes
                 if self.observations[other].shape is not None and not self.observations[other].is_constant]
        followed = any(_is_place(self.model, user) and self.observations[user].shape == self.observations[node].shape
                       for user in node.users) and len(node.users) == 1
        return _function_name(node) in _SUMS and len(parts) > 1 and not followed

    def _can_cut(self, place: fx.Node) -> bool:
        observed = self.observations[place]
        if (observed.is_constant or observed.dtype is not torch.float32 or not observed.shape
                or observed.shape[0] != NUM_SAMPLES):
            return False
        front, back = self.front(place), self.back(place)
        before, behind = set(front), set(back)
        crossing = {node for node in before - behind if any(user in behind for user in node.users)}
        if crossing != {place} or any(self.observations[node].draws for node in before & behind):
            return False
        front_ids, back_ids = self.tensor_ids(front), self.tensor_ids(back)
        weights = {id(weight) for weight in self.model.parameters()}
        return bool(front_ids & weights and back_ids & weights) and not front_ids & back_ids


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model themselves, in the order of its state_dict."""
    return {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def first_samples(
    model: nn.Module, example: torch.Tensor | tuple[int, ...], name: str, num_samples: int = NUM_SAMPLES,
) -> torch.Tensor:
    """Return a batch on the model's device; `example` is a batch or the shape of one float32 sample."""
    device = next((tensor.device for tensor in tensors_of(model).values()), torch.device("cpu"))
    if not isinstance(example, torch.Tensor):
        return torch.zeros(num_samples, *example, device=device)
    if example.ndim == 0 or example.shape[0] == 0:
        raise ConfigError(f"model {name}: example input needs a batch dimension of 1 or more, got shape "
                          f"{tuple(example.shape)}")
    return example[:1].detach().expand(num_samples, *example.shape[1:]).clone().to(device)


@contextmanager
def training_mode_pass(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in training mode; modes, buffers and random state are restored at exit."""
    modes = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    cuda = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    model.train()
    try:
        with forked_generator(cuda=cuda), torch.no_grad():
            yield
            for buffer, value in buffers.items():
                buffer.copy_(value)
    finally:
        for module, mode in modes.items():
            module.training = mode


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


def reason(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _capture_graph(model: nn.Module, name: str, *, training: bool) -> fx.Graph:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # fx raises many types, and a forward function may raise anything
        raise ConfigError(f"model {name}: torch.fx cannot follow {_where(error)}: {reason(error)}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ConfigError(f"model {name}: takes {len(inputs)} inputs ({', '.join(inputs)}); a model to cut takes one "
                          "tensor")
    return graph


def _where(error: BaseException) -> str:
    """Return the innermost traceback line outside torch."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not Path(frame.filename).is_relative_to(_TORCH) and frame.filename != __file__]
    return f"{frames[-1].name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "it"


class _Observer(fx.Interpreter):
    """Runs a graph and records an `Observation` of each operation."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.observations: dict[str, Observation] = {}
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        before = self._random_state()
        result = super().run_node(n)
        tensor = result if isinstance(result, torch.Tensor) else None
        self.observations[n.name] = Observation(
            shape=None if tensor is None else tuple(tensor.shape),
            dtype=None if tensor is None else tensor.dtype,
            layout=() if tensor is None else layout_of(tensor),
            draws=not all(map(torch.equal, before, self._random_state())),
            is_constant=n.op not in ("placeholder", "output")
            and all(self.observations[other.name].is_constant for other in n.all_input_nodes)
            # A module call is never constant: it has effects and weights of its own.
            and n.op != "call_module",
        )
        return result

    def _random_state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states


def _observe(model: nn.Module, graph: fx.Graph, samples: torch.Tensor, name: str) -> dict[fx.Node, Observation]:
    observer = _Observer(fx.GraphModule(model, graph), samples.device)
    try:
        with training_mode_pass(model):
            observer.run(samples)
    except Exception as error:  # layers raise various types for a wrong shape
        shape = tuple(samples.shape[1:])
        raise ConfigError(f"model {name}: does not take samples of shape {shape}: {reason(error)}") from error
    return {node: observer.observations[node.name] for node in graph.nodes}


def _is_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _MODULES)
    return _function_name(node) in _NAMES


def _function_name(node: fx.Node) -> str:
    """Return the name of the function or tensor method that is called, without underscores; "" for others."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    if node.op != "call_function":
        return ""
    module = inspect.getmodule(node.target)
    known = node.target in vars(functional).values() or module is None or module is operator \
        or module.__name__.startswith(("torch", "_operator"))
    return getattr(node.target, "__name__", "").strip("_") if known else ""


def _writes_in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(getattr(part, "inplace", False) for part in model.get_submodule(str(node.target)).modules())
    name = str(getattr(node.target, "__name__", node.target))
    augmented = getattr(node.target, "__module__", "") == "_operator" and name in vars(operator) and name[0] == "i"
    return (node.op in ("call_method", "call_function")
            and (name.endswith("_") or augmented or bool(node.kwargs.get("inplace")) or name == "setitem"))


def _own_tensors(model: nn.Module, node: fx.Node) -> list[torch.Tensor]:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        value: Any = model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return [value] if isinstance(value, torch.Tensor) else []
    return []


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model, with its own weights."""
    return copy.deepcopy(model)
