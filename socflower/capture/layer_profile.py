"""Layer profiles of torch modules, from one forward pass on the meta device, which computes no values."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from socflower.capture.graph import CAPTURE_LOCK, Example, reason, require_batch
from socflower.capture.random_state import forked_generator
from socflower.cluster.cost_model import LayerProfile, ModelProfile
from socflower.errors import ConfigError

FLOAT32_BYTES = 4

_IDENTITIES = (nn.Identity, nn.Sequential)  # without children, a Sequential returns its input


@dataclass(slots=True)
class _Tally:
    """FLOPs and outputs of one module, for the whole batch, its submodules not included."""

    flops: int = 0
    output_elements: int = 0  # of its returned tensors
    made_elements: Counter[str] = field(default_factory=Counter)
    """Of tensors that it makes, by the leaf module that returned last before; "" for none."""


class _Recorder(TorchDispatchMode):
    """Counts the work of each module by the innermost call in which it is done, in the order of the first calls."""

    def __init__(self, skeleton: nn.Module, counter: FlopCounterMode) -> None:
        TorchDispatchMode.__init__(self)
        self.tallies: dict[str, _Tally] = {}
        self._counter = counter  # the mode around this one
        self._open: list[_Tally] = []  # of calls that have not returned yet
        self._last_leaf = ""
        for name, module in skeleton.named_modules():
            # Outermost hooks, so that the work of the module's own hooks is counted with the module.
            module.register_forward_pre_hook(partial(self._begin_call, name), prepend=True)
            module.register_forward_hook(partial(self._end_call, name))

    def _begin_call(self, name: str, *_: Any) -> None:
        self._open.append(self.tallies.setdefault(name, _Tally()))

    def _end_call(self, name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._open.pop().output_elements += sum(tensor.numel() for tensor in _tensors_in(output))
        if _is_leaf(module):
            self._last_leaf = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        if not self._open:  # inputs are being prepared
            return result
        self._open[-1].flops += self._counter.get_total_flops() - before
        # Neither views nor results in place are new tensors.
        given = [tensor.untyped_storage() for tensor in _tensors_in((args, kwargs))]
        for tensor in _tensors_in(result):
            if tensor.is_floating_point() and not any(tensor.untyped_storage() is storage for storage in given):
                self._open[-1].made_elements[self._last_leaf] += tensor.numel()
        return result


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
    elif isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (str, bytes)):
        yield from value
    elif not isinstance(value, (type, nn.Module)) and (is_dataclass(value) or hasattr(value, "__dict__")):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__dataclass_fields__", ())]
        yield from (getattr(value, name, None) for name in dict.fromkeys(names))


def profile_module(module: nn.Module, example_input: Example, name: str) -> ModelProfile:
    """Return the layers of `module` in the order in which they first run, with their costs per sample.

    `example_input` is a batch, whose values do not matter, or the shape of one float32 sample without the batch
    dimension. A copy without values runs in evaluation mode: the module, its mode, its buffers and the random
    state are unchanged, and no values are computed.

    A layer is a module without children. FLOPs are those of matrix products and convolutions, without biases, as
    `FlopCounterMode` counts them; element-wise layers have none. A module that runs twice counts twice in FLOPs
    and output bytes but once in weights; tied weights also count once, where they first run. Only weights that
    are trained count, at their own precision. A module with children becomes a layer where it owns weights or
    multiplies outside its children. Weights of modules that never run follow at the end, so that the sum over
    layers is the size of a gradient exchange. Identities do not count as layers.

    Output bytes of torch's own layers are those of the tensors that they return, in any container. For other modules,
    and those with children such as `nn.MultiheadAttention`, they are those of all floating-point tensors that the
    module's own operations make: attention scores, residual sums, results of functions. Where such a module is not a
    layer itself, they count with the layer that ran before them.

    Raises ConfigError where the forward pass fails for that input, with the reason.
    """
    skeleton, inputs = _without_values(module, example_input, name)
    counter = FlopCounterMode(display=False)
    recorder = _Recorder(skeleton, counter)
    try:
        # Tensors made inside a forward function are on the meta device too, and draw no random numbers.
        with CAPTURE_LOCK.shared(), forked_generator(), torch.device("meta"), torch.no_grad(), counter, recorder:
            skeleton(inputs)
    except Exception as error:  # a user's forward function may raise anything
        shape = tuple(inputs.shape)
        raise ConfigError(f"model {name}: forward pass for inputs {shape} failed: {reason(error)}") from error
    layers = _layers(skeleton, recorder.tallies, num_samples=inputs.shape[0])
    sample_elements = math.prod(inputs.shape[1:])
    return ModelProfile(name=name, layers=layers, input_bytes=float(sample_elements * FLOAT32_BYTES))


def _without_values(module: nn.Module, example_input: Example, name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a copy of the module and its input on the meta device, which keeps shapes but no values."""
    if isinstance(example_input, torch.Tensor):
        require_batch(example_input, name)
        inputs = torch.empty_like(example_input, device="meta", requires_grad=False)
    else:
        inputs = torch.empty((1, *example_input), device="meta")
    # Tensors entered in the memo are not copied: a model may fill half the memory.
    memo: dict[int, Any] = {}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception as error:  # locks, files, process groups and others raise various types
        raise ConfigError(f"model {name}: cannot be copied: {reason(error)}") from error
    return skeleton.eval(), inputs


def _layers(skeleton: nn.Module, tallies: dict[str, _Tally], num_samples: int) -> tuple[LayerProfile, ...]:
    modules = dict(skeleton.named_modules())
    never_run = [name for name in modules if name not in tallies]
    counted: set[int] = set()
    names: list[str] = []
    layers: list[LayerProfile] = []
    output_elements: Counter[str] = Counter()
    unclaimed: Counter[str] = Counter()  # made by modules that are not layers, by the leaf before
    for name in [*tallies, *never_run]:
        module = modules[name]
        tally = tallies.get(name, _Tally())
        weights = [w for w in module.parameters(recurse=False) if w.requires_grad and id(w) not in counted]
        counted.update(id(weight) for weight in weights)
        is_leaf = _is_leaf(module)
        runs = is_leaf and name in tallies and not isinstance(module, _IDENTITIES)
        if not (runs or weights or tally.flops):
            unclaimed += tally.made_elements
            continue
        made = tally.made_elements.total()
        output_elements[name] = made if not is_leaf else tally.output_elements
        if is_leaf and not type(module).__module__.startswith("torch."):
            output_elements[name] = max(made, tally.output_elements)
        layers.append(LayerProfile(
            name=name or type(module).__name__, kind=type(module).__name__, num_tensors=len(weights),
            forward_flops=tally.flops / num_samples, output_bytes=0.0,
            weight_bytes=float(sum(weight.numel() * weight.element_size() for weight in weights))))
        names.append(name)
    for leaf, num_elements in unclaimed.items():
        # Neither identities nor operations before the first layer have a layer to be counted with.
        output_elements[leaf if leaf in output_elements else names[0]] += num_elements
    return tuple(replace(layer, output_bytes=output_elements[name] / num_samples * FLOAT32_BYTES)
                 for name, layer in zip(names, layers, strict=True))
