"""Gradients of which each member sends the largest values (DGC), with their places."""

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from socflower.errors import ConfigError, require_range
from socflower.hierarchy.exchange.coding_bytes import LargestValues
from socflower.training.exchange.compression import GradientCompression, Script
from socflower.wire.codecs.quantisation import Floats

Indices: TypeAlias = NDArray[np.uint32]


class DeepGradientCompression(GradientCompression):
    """Each member sends its largest accumulated gradients, and accumulates the others further.

    In each step, with momentum m and a member's weighted gradient g:

        u = m·u + g,  v = v + u                 (momentum correction, local accumulation)
        send v where |v| is largest; v = 0, u = 0 there   (momentum factor masking)

    (Lin et al., ICLR 2018, algorithm 4, with buckets in place of layers; its clipping is of each bucket's norm.) So the
    optimiser's own momentum must be 0. If an all-reduce of all values costs no more bytes, all are sent, and u is kept:
    with a ratio of 1 this is SGD with momentum. If a member is lost, so are its unsent values.
    """

    def __init__(self, coding: LargestValues, momentum: float = 0.0) -> None:
        super().__init__(coding)
        require_range("dgc", least=0, below=1, momentum=momentum)
        self._largest, self._momentum = coding, momentum

    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        velocity, unsent = self._residuals(bucket, gradient, 2)
        if self._largest.clip_norm:
            # A NaN stays one, so that it is seen.
            norm = torch.linalg.vector_norm(gradient) * math.sqrt(size) / self._largest.clip_norm
            gradient.div_(norm.clamp(min=1.0))
        velocity = torch.add(gradient, velocity, alpha=self._momentum)
        unsent = unsent + velocity
        num_sent = self._largest.num_sent(gradient.numel(), size, self._step)
        if num_sent == gradient.numel():
            yield unsent
            gradient.copy_(unsent)
            return velocity, torch.zeros_like(unsent)
        indices = largest(unsent.numpy(), num_sent)
        payload = encode_values(indices, unsent.numpy()[indices])
        unsent.numpy()[indices] = 0
        velocity.numpy()[indices] = 0
        payloads = yield payload
        assert payloads is not None
        lengths = {len(payload) for payload in payloads}
        if len(lengths) > 1:
            raise ConfigError(
                f"dgc: members sent {min(lengths)} to {max(lengths)} bytes for the same bucket; give all "
                "of them the same ratio and warm-up"
            )
        gradient.zero_()
        # The order of ranks gives all members the same bits.
        for payload in payloads:
            where, values = decode_values(payload)
            gradient.numpy()[where] += values
        return velocity, unsent


# A sample of so many magnitudes says which values can be among the largest, if that leaves few of them.
_SAMPLE = 4096


def largest(values: Floats, count: int) -> Indices:
    """Return the indices of the `count` largest magnitudes, in ascending order; NaN counts as larger than all."""
    magnitudes = np.abs(values)
    candidates = _candidates(magnitudes, count)
    if len(candidates) < count:
        return np.sort(_top(magnitudes, count)).astype("<u4")
    return np.sort(candidates[_top(magnitudes[candidates], count)]).astype("<u4")


def _top(magnitudes: Floats, count: int) -> NDArray[np.intp]:
    return np.argpartition(magnitudes, magnitudes.size - count)[magnitudes.size - count :]


def _candidates(magnitudes: Floats, count: int) -> NDArray[np.intp]:
    """Return the indices of all magnitudes above a limit, probably of `count` or more; none if that saves nothing.

    To search a few candidates takes a tenth of the time of a search among all values.
    """
    sample = magnitudes[:: max(1, magnitudes.size // _SAMPLE)]
    expected = sample.size * count / magnitudes.size
    # Three deviations more than the sample has of the largest values.
    rank = math.ceil(expected + 3 * math.sqrt(expected) + 3)
    if rank >= sample.size // 4:
        return np.empty(0, np.intp)
    limit = np.partition(sample, sample.size - rank)[sample.size - rank]
    # A comparison that keeps NaN.
    return np.flatnonzero(~(magnitudes < limit))


def encode_values(indices: Indices, values: Floats) -> bytes:
    """Return `values` (count,) and their indices as bytes."""
    return b"".join((indices.astype("<u4").tobytes(), values.astype("<f4").tobytes()))


def decode_values(payload: bytes) -> tuple[Indices, Floats]:
    """Return the indices and values (count,) that were encoded."""
    middle = len(payload) // 2
    return np.frombuffer(payload[:middle], "<u4"), np.frombuffer(payload[middle:], "<f4")
