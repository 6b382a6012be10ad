"""Converts a model's weights and statistics to bytes for a ring, and restores those from before a failed step."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State other than gradients and weights that a pass changes; it is restored before a pass is repeated."""

    buffers: list[Tensor]
    random: Tensor


def take_snapshot(model: nn.Module) -> Snapshot:
    """Return a copy of the model's statistics and of torch's random state."""
    return Snapshot([buffer.clone() for buffer in model.buffers()], torch.get_rng_state())


def restore(model: nn.Module, snapshot: Snapshot) -> None:
    """Restore statistics and random state."""
    for buffer, saved in zip(model.buffers(), snapshot.buffers, strict=True):
        buffer.copy_(saved)
    torch.set_rng_state(snapshot.random)


def split_buffers(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the floating-point buffers, which are averaged, and the integer counters."""
    buffers = list(model.buffers())
    return ([buffer for buffer in buffers if buffer.is_floating_point()],
            [buffer for buffer in buffers if not buffer.is_floating_point()])


def weights_digest(model: nn.Module) -> str:
    """Return a digest of all weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: nn.Module, *, with_buffers: bool) -> list[Tensor]:
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [*parameters, *model.buffers()] if with_buffers else parameters


def weights_to_bytes(model: nn.Module, *, with_buffers: bool) -> bytes:
    """Return the weights, and optionally the buffers, in the order of the model."""
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in _tensors(model, with_buffers=with_buffers))


def weights_from_bytes(model: nn.Module, payload: bytes, *, with_buffers: bool) -> None:
    """Load weights, and optionally buffers: these are common at the begin of an interval, and local later."""
    start = 0
    for tensor in _tensors(model, with_buffers=with_buffers):
        dtype = tensor.numpy().dtype
        array = np.frombuffer(payload, dtype, tensor.numel(), start).reshape(tensor.shape)
        tensor.copy_(torch.from_numpy(array.copy()))
        start += array.nbytes
