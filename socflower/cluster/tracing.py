"""Layer profiles of torch modules, from one forward pass in which nothing is computed."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from socflower.cluster.profile import LayerProfile, ModelProfile
from socflower.cluster.torch_random import forked_generator
from socflower.errors import ConfigError

FLOAT32_BYTES = 4

_IDENTITIES = (nn.Identity, nn.Sequential)  # without children, a Sequential hands on what it gets


@dataclass(slots=True)
class _Tally:
    """What one module has been seen to do, for the whole batch."""

    flops: int = 0
    output_elements: int = 0


@dataclass(slots=True)
class _OpenCall:
    """A forward call that has not returned yet."""

    flops_before: int
    flops_of_children: int = 0


@dataclass(slots=True)
class _Trace:
    """Tallies by module name in the order in which the modules first ran."""

    counter: FlopCounterMode
    tallies: dict[str, _Tally] = field(default_factory=dict)
    stack: list[_OpenCall] = field(default_factory=list)

    def enter(self, name: str) -> None:
        self.tallies.setdefault(name, _Tally())
        self.stack.append(_OpenCall(self.counter.get_total_flops()))

    def leave(self, name: str, output: Any) -> None:
        call = self.stack.pop()
        flops = self.counter.get_total_flops() - call.flops_before
        if self.stack:
            self.stack[-1].flops_of_children += flops
        tally = self.tallies[name]
        tally.flops += flops - call.flops_of_children
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        tally.output_elements += sum(tensor.numel() for tensor in tensors)


def profile_module(module: nn.Module, example_input: torch.Tensor | tuple[int, ...], name: str) -> ModelProfile:
    """Return the layers of `module` in the order in which they first run, with their costs per sample.

    `example_input` is a batch, whose values do not matter, or the shape of one float32 sample without the batch
    dimension. A copy without values runs in evaluation mode: the module, its mode, its buffers and the random
    state stay as they are, and nothing is multiplied.

    A layer is a module without children. FLOPs are those of matrix products and convolutions, without biases, as
    `FlopCounterMode` counts them; element-wise layers have none. A module that runs twice counts twice in FLOPs
    and output bytes but once in weights; tied weights also count once, where they first run. Only weights that
    are trained count, at their own precision. A module with children becomes a layer, without output bytes, where
    it owns weights or multiplies outside its children. Weights of modules that never run follow at the end, so
    that the sum over layers is the size of a gradient exchange. Identities are no layers. What a forward function
    does outside modules, such as the addition of a residual, is unseen: it has no output bytes, and FLOPs only
    where it multiplies matrices.

    Raises ConfigError where the forward pass fails for that input, with the reason.
    """
    skeleton, inputs = _without_values(module, example_input, name)
    trace = _Trace(FlopCounterMode(display=False))
    _observe(skeleton, trace)
    try:
        # Tensors that a forward function makes for itself join the meta device, and draw no random numbers.
        with forked_generator(), torch.device("meta"), torch.no_grad(), trace.counter:
            skeleton(inputs)
    except Exception as error:  # a user's forward function may raise anything
        shape = tuple(inputs.shape)
        raise ConfigError(f"model {name}: forward pass for inputs {shape} failed: {_reason(error)}") from error
    layers = _layers(skeleton, trace.tallies, num_samples=inputs.shape[0])
    sample_elements = math.prod(inputs.shape[1:])
    return ModelProfile(name=name, layers=layers, input_bytes=float(sample_elements * FLOAT32_BYTES))


def _without_values(
    module: nn.Module, example_input: torch.Tensor | tuple[int, ...], name: str
) -> tuple[nn.Module, torch.Tensor]:
    """Return a copy of the module and its input on the meta device, which knows shapes but holds no numbers."""
    if isinstance(example_input, torch.Tensor):
        if example_input.ndim == 0 or example_input.shape[0] == 0:
            shape = tuple(example_input.shape)
            raise ConfigError(
                f"model {name}: example input needs a batch dimension of 1 or more, got shape {shape}"
            )
        inputs = torch.empty_like(example_input, device="meta", requires_grad=False)
    else:
        inputs = torch.empty((1, *example_input), device="meta")
    # Entered in the memo as already copied, the values are never copied: a model may fill half the memory.
    memo: dict[int, Any] = {}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception as error:  # attributes such as locks, files and process groups refuse in their own ways
        raise ConfigError(f"model {name}: cannot be copied: {_reason(error)}") from error
    return skeleton.eval(), inputs


def _observe(skeleton: nn.Module, trace: _Trace) -> None:
    """Report every call of every module to the trace, for as long as the skeleton lives."""

    def observe(name: str, module: nn.Module) -> None:
        # First before, and last after, the module's own hooks: their work belongs to the module.
        module.register_forward_pre_hook(lambda *_: trace.enter(name), prepend=True)
        module.register_forward_hook(lambda _module, _inputs, output: trace.leave(name, output))

    for name, module in skeleton.named_modules():
        observe(name, module)


def _layers(skeleton: nn.Module, tallies: dict[str, _Tally], num_samples: int) -> tuple[LayerProfile, ...]:
    modules = dict(skeleton.named_modules())
    never_run = [name for name in modules if name not in tallies]
    counted: set[int] = set()
    layers: list[LayerProfile] = []
    for name in [*tallies, *never_run]:
        module = modules[name]
        tally = tallies.get(name, _Tally())
        weights = [w for w in module.parameters(recurse=False) if w.requires_grad and id(w) not in counted]
        counted.update(id(weight) for weight in weights)
        is_leaf = next(module.children(), None) is None
        runs = is_leaf and name in tallies and not isinstance(module, _IDENTITIES)
        if not (runs or weights or tally.flops):
            continue
        layers.append(
            LayerProfile(
                name=name or type(module).__name__,
                kind=type(module).__name__,
                forward_flops=tally.flops / num_samples,
                output_bytes=tally.output_elements / num_samples * FLOAT32_BYTES if is_leaf else 0.0,
                weight_bytes=float(sum(weight.numel() * weight.element_size() for weight in weights)),
                num_tensors=len(weights),
            )
        )
    return tuple(layers)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
