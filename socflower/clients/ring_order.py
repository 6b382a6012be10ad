"""Members' gradients of one process, summed in the order of a ring of machines: the same weights, bit for bit."""

import torch
from torch import nn

from socflower.clients.gradient_exchange import make_buckets
from socflower.clients.ring_algorithm import sum_in_ring_order


class RingOrder:
    """Keeps each member's gradient of a step until all are there.

    `num_buckets` has to be the ring's: parts of each bucket are summed from another member on.
    """

    def __init__(self, model: nn.Module, num_members: int, num_buckets: int) -> None:
        self._members = [make_buckets(model, num_buckets) for _ in range(num_members)]

    def begin(self) -> None:
        """Forget the step before; a member that gives nothing has a gradient of zero."""
        for buckets in self._members:
            for bucket in buckets:
                bucket.buffer.zero_()

    def take(self, member: int) -> None:
        """Take the gradients in the parameters as those of a member, and clear them."""
        for bucket in self._members[member]:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = None

    def finish(self) -> None:
        """Put the sums into the parameters."""
        for alike in zip(*self._members, strict=True):
            total = sum_in_ring_order([bucket.buffer.numpy() for bucket in alike])
            first = alike[0]
            first.buffer.copy_(torch.from_numpy(total))
            for parameter, view in zip(first.parameters, first.views, strict=True):
                parameter.grad = view
