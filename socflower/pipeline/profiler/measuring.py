"""Seconds of each layer's forward and backward pass, measured on this machine (paper §3.3, Asteroid Profiler)."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain as chained
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from socflower.errors import ConfigError, require_range
from socflower.model_graph.chain import ModelChain
from socflower.model_graph.graph import CAPTURE_LOCK, Example, first_samples
from socflower.model_graph.model_copy import copied
from socflower.model_graph.random_state import forked_generators
from socflower.model_graph.torch_device import device_of, settle
from socflower.pipeline.problem import LayerSeconds
from socflower.pipeline.profiler.int8_parts import Int8Part, int8_part
from socflower.pipeline.profiler.layers import read_model

Tensors = tuple[torch.Tensor, ...]

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32)


def measure_layers(
    module: nn.Module,
    example: Example,
    batches: Sequence[int] = DEFAULT_BATCHES,
    *,
    chain: ModelChain | None = None,
    device: str = "this-machine",
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    in_int8: bool = False,
) -> LayerSeconds:
    """Return the median seconds of each layer's passes at several batch sizes, on the device of the module's weights.

    Layers are the pieces of `chain`, by default those of `read_model`. Each runs alone in training mode, on what the
    layer before made of the example's first sample, or of a random one of its shape, so memory holds the activations of
    one layer at a time; its backward pass starts from ones. A first pass of each is not counted. `in_int8` measures
    what a stage in int8 computes, without the rounding of its masters, which is a part of its update. A copy of the
    module runs; the module itself and the random state are unchanged.

    Raises ConfigError for batch sizes that do not rise from 1 or more, for a model that cannot be cut, and for layers
    that int8 does not have.
    """
    sizes = tuple(batches)
    if not sizes or sizes[0] < 1 or any(after <= before for before, after in pairwise(sizes)):
        raise ConfigError(f"measuring layers: batches must rise from 1 or more, got {list(sizes)}")
    require_range("measuring layers", least=1, repeats=repeats)
    if not isinstance(example, torch.Tensor):
        # Not zeros: pooling takes a third of its time on equal values, whose comparisons processors predict.
        example = torch.randn(1, *example, generator=torch.Generator().manual_seed(0))
    layers = read_model(module, example, type(module).__name__).chain if chain is None else chain
    own = copied(module, layers.graph.name).train()
    pieces = [
        _Int8Piece(int8_part(own, layers, number, number), input_gradient=number > 0)
        if in_int8
        else layers.module(own, number, number)
        for number in range(len(layers.pieces))
    ]
    forward_s, backward_s = (np.zeros((len(pieces), len(sizes))) for _ in range(2))
    with CAPTURE_LOCK.shared(), forked_generators(), torch.enable_grad():
        for column, size in enumerate(sizes):
            entering: Tensors = (first_samples(own, example, layers.graph.name, size),)
            for row, piece in enumerate(pieces):
                entering, times = _measured(
                    piece, entering, repeats, clock, device_of(own), is_first=row == 0
                )
                forward_s[row, column], backward_s[row, column] = times
    return LayerSeconds(device=device, batches=sizes, forward_s=forward_s, backward_s=backward_s)


class _Int8Piece(nn.Module):
    """A layer in int8 with the weights of the model's."""

    def __init__(self, part: Int8Part, *, input_gradient: bool) -> None:
        super().__init__()
        self.part = part.module
        self._layers = part.layers(input_gradient=input_gradient)

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes."""
        return self._layers.forward(entering, 0)


def _measured(
    piece: nn.Module,
    entering: Tensors,
    repeats: int,
    clock: Callable[[], float],
    device: torch.device,
    *,
    is_first: bool,
) -> tuple[Tensors, tuple[float, float]]:
    """Return what a piece makes, and the medians of its forward and backward seconds.

    The first piece computes no gradient of its input, since none is sent to anybody.
    """
    leaves = tuple(
        tensor.detach().requires_grad_(tensor.is_floating_point() and not is_first)
        for tensor in entering
    )
    weights = [weight for weight in piece.parameters() if weight.requires_grad]
    times: list[tuple[float, float]] = []
    results: Tensors = ()
    for _ in range(repeats + 1):
        settle(device)
        start_s = clock()
        made = piece(*leaves)
        settle(device)
        middle_s = clock()
        results = made if isinstance(made, tuple) else (made,)
        # What passes through has no backward pass here.
        roots = [result for result in results if result.grad_fn is not None]
        if roots:
            wanted = [leaf for leaf in chained(leaves, weights) if leaf.requires_grad]
            torch.autograd.grad(
                roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True
            )
        settle(device)
        times.append((middle_s - start_s, clock() - middle_s if roots else 0.0))
    forward_s, backward_s = zip(*times[1:], strict=True)
    return tuple(result.detach() for result in results), (
        statistics.median(forward_s),
        statistics.median(backward_s),
    )
