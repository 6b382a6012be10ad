"""Layer profiles of torch modules, from one forward pass on the meta device, which computes no values."""

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from socflower.cluster.cost_model import BACKWARD_TO_FORWARD, Gradient, LayerProfile, ModelProfile
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import (
    Batch,
    form_of,
    mapped,
    num_samples,
    output_of,
    tensors_in,
)
from socflower.model_graph.graph import (
    CAPTURE_LOCK,
    Example,
    ModelGraph,
    Operation,
    arguments_of,
    first_samples,
    module_of,
)
from socflower.model_graph.model_copy import copied, kept_results, reason
from socflower.model_graph.operation_costs import AttentionAsFused, products_of
from socflower.model_graph.random_state import forked_generators
from socflower.model_graph.tensor_arrays import tensor_bytes
from socflower.plain_numbers import plain_numbers

ExampleBatch: TypeAlias = Batch | tuple[int, ...]
"""Arguments of `forward`: a tensor, a tuple of positional or a dict of keyword arguments; or the shape of a sample."""

# Without children, a Sequential returns its input.
_IDENTITIES = (nn.Identity, nn.Sequential)


@dataclass(slots=True)
class _Tally:
    """FLOPs and outputs of one module for the whole batch, without its submodules."""

    flops: float = 0.0
    backward_flops: float = 0.0
    # FLOPs of the backward pass if all operands needed a gradient.
    both_flops: float = 0.0
    in_backward: bool = False
    # Size of the tensors that it returned.
    output_bytes: int = 0
    # Size of the tensors that it made, by the leaf module that returned last before; "" for none.
    made_bytes: Counter[str] = field(default_factory=Counter)


class _Recorder(TorchDispatchMode):
    """Counts the work of each module, without that of the modules that it calls, in the order of the first calls."""

    def __init__(self, skeleton: nn.Module) -> None:
        TorchDispatchMode.__init__(self)
        self.tallies: dict[str, _Tally] = {}
        self._first_to_multiply: _Tally | None = None
        # Tallies of calls that have not returned yet.
        self._open: list[_Tally] = []
        self._last_leaf = ""
        self._is_fused = False
        for name, module in skeleton.named_modules():
            # Outermost hooks, so that the work of the module's own hooks is counted with the module.
            module.register_forward_pre_hook(partial(self._begin_call, name), prepend=True)
            module.register_forward_hook(partial(self._end_call, name))

    def attention_as_fused(self) -> AttentionAsFused:
        """Return a mode in which attention makes what the fused kernels keep."""
        return AttentionAsFused(self._fused, self._make)

    def finish(self) -> None:
        """Count both gradients of the first layer that multiplies, if it trains; F1 counts them in every layer."""
        first = self._first_to_multiply
        if first is not None and first.backward_flops:
            first.backward_flops = first.both_flops

    def _begin_call(self, name: str, *_: Any) -> None:
        self._open.append(self.tallies.setdefault(name, _Tally()))

    def _end_call(self, name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        tally, returned = self._open.pop(), _tensors_in(output)
        tally.output_bytes += tensor_bytes(returned)
        if _is_leaf(module):
            tally.in_backward |= any(tensor.requires_grad for tensor in returned)
            self._last_leaf = name

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._open:
            # Inputs are being prepared.
            return result
        tally, given = self._open[-1], _tensors_in((args, kwargs))
        tally.in_backward |= any(tensor.requires_grad for tensor in given)
        for product in products_of(func, args, kwargs or {}, result):
            self._first_to_multiply = self._first_to_multiply or tally
            tally.flops += product.flops
            tally.backward_flops += product.backward_flops
            tally.both_flops += product.flops * BACKWARD_TO_FORWARD
        if not self._is_fused:
            self._make(tensor_bytes(_new_tensors(result, given)))
        return result

    def _make(self, num_bytes: int) -> None:
        if self._open and num_bytes:
            self._open[-1].made_bytes[self._last_leaf] += num_bytes

    @contextmanager
    def _fused(self) -> Iterator[None]:
        self._is_fused = True
        try:
            yield
        finally:
            self._is_fused = False


def _new_tensors(result: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the floating-point results with memory of their own: no views, and no operations in place."""
    storages = [tensor.untyped_storage() for tensor in given]
    new = []
    for tensor in _tensors_in(result):
        own = tensor.untyped_storage()
        if tensor.is_floating_point() and not any(own is storage for storage in storages):
            new.append(tensor)
    return new


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a module returned, alone or inside a container, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def collect(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        elif id(one) not in seen:
            seen.add(id(one))
            for part in _parts(one):
                collect(part)

    collect(value)
    return list(found.values())


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (Sequence, AbstractSet)):
        if not isinstance(value, (str, bytes)):
            yield from value
    elif not isinstance(value, (type, nn.Module)):
        # Without a __dict__, a dataclass has slots.
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__dataclass_fields__", ())]
        yield from (getattr(value, name, None) for name in dict.fromkeys(names))


@plain_numbers
def profile_module(module: nn.Module, example_input: ExampleBatch, name: str) -> ModelProfile:
    """Return the layers of `module` in the order in which they first run, with their costs per sample (F1).

    `example_input` is a batch of what `forward` takes, a tensor, a tuple of positional or a dict of keyword arguments
    (with labels only if `forward` takes them), or the shape of one float32 sample without the batch dimension. A copy
    without values runs in evaluation mode: the module, its mode, its buffers and the random state are unchanged, and
    no values are computed. If `forward` reads values, for instance to skip padding, a copy runs once on the CPU with
    the example instead, and `ran_on` of the profile says so.

    A layer is a module without children. FLOPs are those of matrix products, convolutions and attention, without
    biases, as torch's `FlopCounterMode` counts them; element-wise layers, normalisation and embeddings have none. The
    backward pass multiplies once for the gradient of each operand that needs one: twice in a layer that trains, once
    behind trained layers, not at all before the first. A module that runs twice counts twice in FLOPs and output bytes
    but once in weights; tied weights also count once, where they first run. Weights count at their own precision;
    frozen ones are counted apart. A module with children is a layer, too, if it owns weights or multiplies outside its
    children. Weights of modules that never run follow at the end, so that the sum over layers is the size of a gradient
    exchange. Identities do not count as layers.

    Output bytes of torch's own layers are those of the tensors that they return, in any container. For other modules,
    and those with children such as `nn.MultiheadAttention`, they are those of all floating-point tensors that the
    module's own operations make: attention scores, residual sums, results of functions. If such a module is not a
    layer itself, they count with the layer that ran before them. `scaled_dot_product_attention` makes what its fused
    kernels keep: the output and one value for each query and head.

    Raises ConfigError, with the reason, if the forward pass fails for that input, and for what is no module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model {name}: is {type(module).__name__}, not a torch module; return it"
        )
    batch = _example_batch(example_input, name)
    ran_on, size = "meta", num_samples(batch)
    try:
        skeleton = _without_values(module, name)
        recorder = _recorded(skeleton, mapped(batch, _empty), ran_on, name)
    except _ForwardFailed as without_values:
        ran_on = "cpu"
        skeleton, recorder = _recorded_with_values(module, batch, name, without_values)
    layers = _layers(skeleton, recorder.tallies, size)
    return ModelProfile(
        name=name,
        layers=layers,
        input_bytes=tensor_bytes(tensors_in(batch)) / size,
        ran_on=ran_on,
        gradients=_gradients(skeleton, layers, recorder.tallies),
    )


def _recorded_with_values(
    module: nn.Module, batch: Batch, name: str, without_values: "_ForwardFailed"
) -> tuple[nn.Module, _Recorder]:
    """Run a copy on the CPU; `ConfigError` if that fails, too, or if model or batch have no values."""
    failure = without_values
    tensors = [*module.parameters(), *module.buffers(), *tensors_in(batch)]
    if not any(tensor.is_meta for tensor in tensors):
        skeleton = copied(module, name).cpu().eval()
        try:
            return skeleton, _recorded(skeleton, mapped(batch, _on_cpu), "cpu", name)
        except _ForwardFailed as with_values:
            failure = with_values
    form = tuple(batch.shape) if isinstance(batch, torch.Tensor) else f"({form_of(batch)})"
    raise ConfigError(
        f"model {name}: forward pass for inputs {form} failed: {reason(failure.error)}"
    ) from failure.error


def profile_operations(
    model: nn.Module, graph: ModelGraph, example: Example
) -> dict[Operation, LayerProfile]:
    """Return each operation of a model's graph as a layer without weights, by the rules of `profile_module`.

    Sums over all operations are those of its layers. No values are computed.
    """
    samples = first_samples(model, example, graph.name)
    constants = dict(graph.constants)
    for key, value in constants.items():
        if isinstance(value, torch.Tensor):
            constants[key] = _empty(value)
    own_graph = copy.deepcopy(graph.operations[0].node.graph)
    skeleton = module_of(_without_values(model, graph.name), own_graph, constants)
    runner = _OperationRunner(skeleton)
    try:
        with _recording(runner.recorder, "meta"):
            runner.run(*arguments_of(own_graph, mapped(samples, _empty)))
    except Exception as error:
        raise ConfigError(
            f"model {graph.name}: cannot be profiled without values: {reason(error)}"
        ) from error
    costs = {}
    for operation in graph.operations:
        tally = runner.recorder.tallies[operation.node.name]
        returns = operation.module is not None and _is_leaf(model.get_submodule(operation.module))
        num_bytes = tally.output_bytes if returns else tally.made_bytes.total()
        layer = _layer(graph.name_of(operation), "", tally, (), num_samples(samples))
        costs[operation] = replace(layer, output_bytes=num_bytes / num_samples(samples))
    return costs


class _OperationRunner(fx.Interpreter):
    """Runs a graph and counts the work of each of its operations."""

    def __init__(self, skeleton: fx.GraphModule) -> None:
        super().__init__(skeleton)
        self.extra_traceback = False
        self._leaf = nn.Module()
        self.recorder = _Recorder(self._leaf)

    def run_node(self, n: fx.Node) -> Any:
        self.recorder._begin_call(n.name)
        result = super().run_node(n)
        self.recorder._end_call(n.name, self._leaf, (), result if n.op == "call_module" else None)
        return result


class _ForwardFailed(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _recorded(skeleton: nn.Module, batch: Batch, device: str, name: str) -> _Recorder:
    """Return the records of a module's forward pass."""
    try:
        recorder = _Recorder(skeleton)
    except Exception as error:
        # A ScriptModule takes no hooks.
        raise ConfigError(
            f"model {name}: cannot be profiled: {reason(error)}; give the module that it was made of"
        ) from error
    try:
        with _recording(recorder, device):
            output_of(skeleton, batch)
    except Exception as error:
        # A user's forward function may raise anything.
        raise _ForwardFailed(error) from error
    return recorder


@contextmanager
def _recording(recorder: _Recorder, device: str) -> Iterator[None]:
    """Record a forward pass with its autograd graph, which decides what the backward pass multiplies."""
    # Tensors made inside a forward function are on the device too; on the meta device they draw no numbers.
    with (
        CAPTURE_LOCK.shared(),
        forked_generators(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device(device),
        recorder.attention_as_fused(),
        recorder,
    ):
        yield
    recorder.finish()


def _example_batch(example: ExampleBatch, name: str) -> Batch:
    """Return the example, or for a shape a batch of one sample."""
    if isinstance(example, tuple | list) and all(isinstance(size, int) for size in example):
        return torch.zeros(1).expand(1, *example)
    if not num_samples(example):
        raise ConfigError(
            f"model {name}: example input needs a batch dimension of 1 or more, got {form_of(example)}"
        )
    return example


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu")


def _without_values(module: nn.Module, name: str) -> nn.Module:
    """Return a copy of the module on the meta device, which keeps shapes but no values."""
    # Tensors in the memo are not copied: a model may fill half the memory.
    memo: dict[int, Any] = {}
    for weight in module.parameters():
        own = torch.empty_like(weight, device="meta")
        memo[id(weight)] = nn.Parameter(own, weight.requires_grad)
    for tensor in [*module.buffers(), *kept_results(module)]:
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    return copied(module, name, memo).eval()


def _layers(skeleton: nn.Module, tallies: dict[str, _Tally], size: int) -> tuple[LayerProfile, ...]:
    modules = dict(skeleton.named_modules())
    never_run = [name for name in modules if name not in tallies]
    counted: set[int] = set()
    layers: dict[str, LayerProfile] = {}
    output_bytes: Counter[str] = Counter()
    # The output of modules that are not layers, by the leaf before them.
    unclaimed: Counter[str] = Counter()
    for name in [*tallies, *never_run]:
        module, tally = modules[name], tallies.get(name, _Tally())
        own = module.parameters(recurse=False)
        weights = [weight for weight in own if id(weight) not in counted]
        counted.update(map(id, weights))
        is_leaf = _is_leaf(module)
        runs = is_leaf and name in tallies and not isinstance(module, _IDENTITIES)
        if not (runs or weights or tally.flops):
            unclaimed += tally.made_bytes
            continue
        kind = type(module).__name__
        layers[name] = _layer(name or kind, kind, tally, weights, size)
        output_bytes[name] = made = tally.made_bytes.total()
        if is_leaf:
            # A layer of torch keeps what it returns; any other leaf may keep intermediate results.
            is_torch = type(module).__module__.startswith("torch.")
            output_bytes[name] = tally.output_bytes if is_torch else max(made, tally.output_bytes)
    for leaf, num_bytes in unclaimed.items():
        # Identities, and operations before the first layer, count with the first layer.
        output_bytes[leaf if leaf in layers else next(iter(layers))] += num_bytes
    return tuple(
        replace(layer, output_bytes=output_bytes[name] / size) for name, layer in layers.items()
    )


def _layer(
    name: str, kind: str, tally: _Tally, weights: Sequence[nn.Parameter], size: int
) -> LayerProfile:
    """Return a layer whose output bytes are not known yet."""
    trained = [weight for weight in weights if weight.requires_grad]
    ratio = tally.backward_flops / tally.flops if tally.flops else BACKWARD_TO_FORWARD
    return LayerProfile(
        name=name,
        kind=kind,
        num_tensors=len(trained),
        forward_flops=tally.flops / size,
        output_bytes=0.0,
        weight_bytes=float(tensor_bytes(trained)),
        frozen_bytes=float(tensor_bytes(weights) - tensor_bytes(trained)),
        in_backward=tally.in_backward,
        backward_to_forward=ratio,
    )


def _gradients(
    skeleton: nn.Module, layers: Sequence[LayerProfile], ran: Collection[str]
) -> tuple[Gradient, ...]:
    """Return the trained tensors' gradients in the order of buckets, the reverse of the module's own (F8a).

    A gradient is complete when the backward pass has done all layers that use the tensor. For a module with weights
    that never ran by itself, this is the layer around it; without one, rings send zeros after the pass.
    """
    done: dict[str, float] = {}
    backward = {layer.name: layer.backward_flops for layer in layers}
    total, so_far = sum(backward.values()), 0.0
    for number, layer in enumerate(reversed(layers), start=1):
        so_far += backward[layer.name]
        done[layer.name] = so_far / total if total else number / len(layers)
    completed: dict[nn.Parameter, float] = {}
    for name, weight in skeleton.named_parameters(remove_duplicate=False):
        if weight.requires_grad:
            owner = name.rpartition(".")[0]
            while owner and not (owner in ran and owner in done):
                owner = owner.rpartition(".")[0]
            key = owner or type(skeleton).__name__
            completed[weight] = max(completed.get(weight, 0.0), done.get(key, 1.0))
    return tuple(
        Gradient(num_bytes=float(tensor_bytes([weight])), done=share, shape=tuple(weight.shape))
        for weight, share in reversed(completed.items())
    )
