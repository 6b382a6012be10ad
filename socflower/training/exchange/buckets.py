"""Gradient buckets, and the order in which a ring sums the members' gradients.

A ring all-reduce sums part p of a buffer in the order of the ranks p, p + 1, ..., p - 1. One process that sums in the
same order gets the weights of a ring of machines, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.cluster.cost_model import bucket_starts
from socflower.model_graph.torch_device import host_buffer


@dataclass(slots=True)
class GradientBucket:
    """Parameters whose gradients are exchanged together, with their buffer.

    `buffer` is flat and on the CPU, and separate from the gradients, so that a failed reduction does not corrupt them.
    `gradients` is the same on the parameters' device; on the CPU it is the buffer itself. `views` has one view of it
    like each parameter, `strides` those of the parameters when the views were made. `stored` tells for each parameter
    whether its gradient is in the buffer.
    """

    parameters: list[nn.Parameter]
    buffer: Tensor
    gradients: Tensor
    views: list[Tensor]
    strides: list[tuple[int, ...]]
    stored: list[bool] = field(default_factory=list)
    num_missing: int = 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The parameters' shapes, the dimension first that is outermost in memory."""
        orders = (sorted(zip(view.stride(), view.shape, strict=True))[::-1] for view in self.views)
        return tuple(tuple(size for _, size in order) for order in orders)

    def has_current_layout(self) -> bool:
        """Whether the parameters still have the layout of the views, and are on their device."""
        if any(parameter.device != self.gradients.device for parameter in self.parameters):
            return False
        return [parameter.stride() for parameter in self.parameters] == self.strides

    def clear(self) -> None:
        """Mark all gradients as missing."""
        self.stored = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)

    def to_host(self) -> None:
        """Bring the gradients to the buffer."""
        if self.gradients is not self.buffer:
            self.buffer.copy_(self.gradients)

    def from_host(self) -> None:
        """Bring the buffer back to the gradients."""
        if self.gradients is not self.buffer:
            self.gradients.copy_(self.buffer)

    def take_gradients(self) -> None:
        """Move the parameters' gradients to the buffer; those of parameters without one are zeros."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = None
        self.to_host()

    def store_gradient(self, position: int) -> None:
        """Move a gradient to the buffer; without a gradient, as for a member without samples, zeros."""
        parameter = self.parameters[position]
        view = self.views[position]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        # The backward pass's tensor is freed at once, and its memory reused for the next layer.
        parameter.grad = view
        self.stored[position] = True
        self.num_missing -= 1


def sum_at_server(buffers: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of the members' buffers in their order, as a parameter server's, bit for bit."""
    total = buffers[0].copy()
    for buffer in buffers[1:]:
        total += buffer
    return total


def sum_in_ring_order(buffers: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the result of `all_reduce` over these buffers of all members, bit for bit."""
    total = np.empty_like(buffers[0])
    size = len(buffers)
    bounds = [len(total) * part // size for part in range(size + 1)]
    for part in range(size):
        within = slice(bounds[part], bounds[part + 1])
        total[within] = buffers[part][within]
        for step in range(1, size):
            total[within] += buffers[(part + step) % size][within]
    return total


def make_buckets(model: nn.Module, num_buckets: int) -> list[GradientBucket]:
    """Return a model's trainable parameters in buckets, the last layers first."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
    return [make_bucket(part) for part in _parts(parameters, num_buckets)]


def make_bucket(parameters: Sequence[nn.Parameter]) -> GradientBucket:
    """Return a bucket of parameters of one type on one device, with an empty buffer."""
    size = sum(parameter.numel() for parameter in parameters)
    like = parameters[0]
    buffer = gradients = host_buffer(size, like.dtype, like.device)
    if like.device.type != "cpu":
        gradients = torch.zeros(size, dtype=like.dtype, device=like.device)
    views = []
    start = 0
    for parameter in parameters:
        # In the parameter's own layout, copying and reading the gradient is one contiguous pass.
        views.append(torch.as_strided(gradients, parameter.size(), _strides(parameter), start))
        start += parameter.numel()
    strides = [parameter.stride() for parameter in parameters]
    return GradientBucket(list(parameters), buffer, gradients, views, strides)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter, or contiguous ones if it has gaps or overlaps itself."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.size(), device="meta").stride()
            expected *= size
    return parameter.stride()


def _parts(parameters: Sequence[nn.Parameter], num_parts: int) -> list[list[nn.Parameter]]:
    """Split a sequence of parameters into non-empty runs of about equal bytes, each of one type on one device."""
    starts = set(bucket_starts([parameter.nbytes for parameter in parameters], num_parts))
    for index, (before, after) in enumerate(pairwise(parameters), start=1):
        if (before.dtype, before.device) != (after.dtype, after.device):
            starts.add(index)
    bounds = [*sorted(starts), len(parameters)]
    return [list(parameters[start:end]) for start, end in pairwise(bounds)]
