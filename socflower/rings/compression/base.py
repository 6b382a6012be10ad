"""The interface of gradient compressions for a ring's member."""

import io
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from socflower.errors import ConfigError
from socflower.rings.collective import Collective, Poll, no_poll

_STATE_SCHEMA = 1


class GradientCompression(ABC):
    """One member's side of compressed exchanges, for one training.

    Some compressions keep residuals of each bucket, which are sent later. A step may fail and be repeated, so residuals
    change only at its end: call `start_step`, then `exchange` for each bucket, then `finish_step`; `start_step`
    discards the residuals of an unfinished step.
    """

    name: ClassVar[str]
    applies_momentum: ClassVar[bool] = False
    """Whether the compression applies momentum, so that the optimiser's must be 0."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self._pending: dict[int, tuple[Tensor, ...]] = {}

    def start_step(self, step: int) -> None:
        """Begin or repeat step `step` of the whole training (0, 1, …), the same on all members."""
        self._step = step
        # A new dictionary: an exchange that was cancelled may still write to the old one.
        self._pending = {}

    def finish_step(self) -> None:
        """Store the residuals of the step's exchanges, now that all members have applied it."""
        self._kept.update(self._pending)
        self._pending = {}

    def exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll = no_poll) -> None:
        """Replace `gradient`, which is weighted with the member's share, by the sum over all members.

        Members call it for the same buckets in the same order. `gradient` is float32, contiguous, one-dimensional and
        on the CPU. Raises what the ring and `poll` raise, and `ConfigError` for other types.
        """
        assert self._step is not None, "start_step comes first"
        assert gradient.dim() == 1 and gradient.is_contiguous() and gradient.device.type == "cpu"
        if gradient.dtype != torch.float32:
            raise ConfigError(f"gradient compression {self.name!r}: takes float32 gradients, not "
                              f"{str(gradient.dtype).removeprefix('torch.')}; use 'none'")
        if not gradient.numel():
            return
        pending = self._pending
        residuals = self._exchange(ring, bucket, gradient, poll)
        if residuals:
            pending[bucket] = residuals

    @abstractmethod
    def _exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll) -> tuple[Tensor, ...]:
        """Do `exchange`, and return the bucket's residuals, which must not be changed afterwards."""

    @abstractmethod
    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return how many bytes a member sends for a bucket, the mean over members, in a ring of `size`.

        A ring all-reduce sends 2(n-1)/n of the buffer, an all-gather n-1 payloads; headers are not counted.
        """

    def state(self) -> bytes:
        """Return the residuals, to be restored later."""
        stream = io.BytesIO()
        torch.save({"schema": _STATE_SCHEMA, "name": self.name, "kept": self._kept}, stream)
        return stream.getvalue()

    def restore(self, state: bytes) -> None:
        """Restore what `state` returned; `ConfigError` if it is from another compression."""
        saved: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
        if (saved["schema"], saved["name"]) != (_STATE_SCHEMA, self.name):
            raise ConfigError(f"gradient compression: the saved state is of {saved['name']!r}, not of {self.name!r}; "
                              "continue with the same compression, or start a new training")
        self._kept = saved["kept"]
        self._pending = {}

    def _residuals(self, bucket: int, gradient: Tensor, num_tensors: int) -> tuple[Tensor, ...]:
        """Return a bucket's residuals of earlier steps; zeros at first. They must not be changed."""
        kept = self._kept.get(bucket)
        if kept is None:
            return tuple(torch.zeros_like(gradient) for _ in range(num_tensors))
        if len(kept) != num_tensors or kept[0].shape != gradient.shape:
            raise ConfigError(f"gradient compression {self.name!r}: bucket {bucket} had {kept[0].numel()} elements and "
                              f"has {gradient.numel()}; keep model and number of buckets, or start a "
                              "new training")
        return kept


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """Return the bytes that a member sends in a ring all-reduce of `num_bytes`, the mean over members, rounded up."""
    return -(-2 * (size - 1) * num_bytes // size)
