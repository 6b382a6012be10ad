"""Seconds of each layer's forward and backward pass, measured on this machine (paper §3.3, Asteroid Profiler)."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain as chained

import numpy as np
import torch
from torch import nn

from socflower.errors import require_range
from socflower.model_graph.batch_form import tensors_in
from socflower.model_graph.chain import ModelChain
from socflower.model_graph.graph import CAPTURE_LOCK, Example, arguments_of, first_samples
from socflower.model_graph.model_copy import copied
from socflower.model_graph.random_state import forked_generators
from socflower.model_graph.torch_device import device_of, settle
from socflower.pipeline.problem import LayerSeconds, require_rising
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

    Layers are the pieces of `chain`, by default those of `read_model`. Each runs alone in training mode, on the result
    of the layer before it for the example's first sample, or for a random sample of its shape. So memory holds the
    activations of one layer at a time. Backward passes start from ones. The first pass of each layer is not counted.
    `in_int8` measures the passes of a stage in int8; the rounding of its masters is a part of its update instead.
    A copy of the module runs; the module itself and the random state are unchanged.

    Raises `ConfigError` for batch sizes that do not rise from 1 or more, for a model that cannot be cut, and for layers
    that int8 does not have.
    """
    sizes = tuple(batches)
    require_rising("measuring layers", sizes)
    require_range("measuring layers", least=1, repeats=repeats)
    if not tensors_in(example):
        # Not zeros: processors predict comparisons of equal values, and pooling would take a third of its time.
        example = torch.randn(1, *example, generator=torch.Generator().manual_seed(0))
    layers = read_model(module, example, type(module).__name__).chain if chain is None else chain
    own = copied(module, layers.graph.name).train()
    pieces: list[nn.Module] = []
    for number in range(len(layers.pieces)):
        if in_int8:
            part = int8_part(own, layers, number, number)
            pieces.append(_Int8Piece(part, input_gradient=number > 0))
        else:
            pieces.append(layers.module(own, number, number))
    seconds = np.zeros((2, len(pieces), len(sizes)))
    with CAPTURE_LOCK.shared(), forked_generators(), torch.enable_grad():
        for column, size in enumerate(sizes):
            samples = first_samples(own, example, layers.graph.name, size)
            entering: Tensors = arguments_of(layers.graph, samples)
            for row, piece in enumerate(pieces):
                entering, seconds[:, row, column] = _measured(
                    piece, entering, repeats, clock, device_of(own), is_first=row == 0
                )
    return LayerSeconds(
        device=device,
        batches=sizes,
        forward_s=seconds[0],
        backward_s=seconds[1],
    )


class _Int8Piece(nn.Module):
    """A layer in int8 that shares the model's weights."""

    def __init__(self, part: Int8Part, *, input_gradient: bool) -> None:
        super().__init__()
        self.part = part.module
        self._layers = part.layers(input_gradient=input_gradient)

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        """Return the layer's result."""
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
    """Return a piece's results, and the medians of its forward and backward seconds.

    The first piece computes no gradient of its input, since no device needs it.
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
        # A tensor that only passes through the layer has no backward pass here.
        roots = [result for result in results if result.grad_fn is not None]
        if roots:
            wanted = [leaf for leaf in chained(leaves, weights) if leaf.requires_grad]
            ones = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        settle(device)
        times.append((middle_s - start_s, clock() - middle_s if roots else 0.0))
    forward_s, backward_s = map(statistics.median, zip(*times[1:], strict=True))
    return tuple(result.detach() for result in results), (forward_s, backward_s)
