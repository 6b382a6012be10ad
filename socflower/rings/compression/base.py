"""What every gradient compression offers a ring's member."""

import io
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from socflower.errors import ConfigError
from socflower.rings.collective import Collective, Poll, never

_STATE_SCHEMA = 1


class GradientCompression(ABC):
    """One member's side of compressed exchanges, for one training.

    Some keep what they have not sent yet, bucket by bucket. A step may fail half-way and be done again, so what they
    keep changes only at its end: call `start_step`, then `exchange` for each bucket, then `finish_step`; starting
    again drops what an unfinished step has done.
    """

    name: ClassVar[str]
    owns_momentum: ClassVar[bool] = False
    """Whether momentum is applied here, so that the optimiser's must be 0."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self._pending: dict[int, tuple[Tensor, ...]] = {}

    def start_step(self, step: int) -> None:
        """Begin step `step` of the whole training (0, 1, …), the same on all members; or begin it again."""
        self._step = step
        # A new one: an exchange that was abandoned, and has not noticed yet, writes into the old one.
        self._pending = {}

    def finish_step(self) -> None:
        """Keep what the step's exchanges have left behind, now that all members have applied it."""
        self._kept.update(self._pending)
        self._pending = {}

    def exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll = never) -> None:
        """Put the sum over all members into `gradient`, in place; it comes weighted with the member's share.

        Members call it for the same buckets in the same order. `gradient` is float32, contiguous, one-dimensional and
        on the CPU. Raises what the ring and `poll` raise, and `ConfigError` for what cannot be exchanged so.
        """
        assert self._step is not None, "start_step comes first"
        assert gradient.dim() == 1 and gradient.is_contiguous() and gradient.device.type == "cpu"
        if gradient.dtype != torch.float32:
            raise ConfigError(f"gradient compression {self.name!r}: takes float32 gradients, not "
                              f"{str(gradient.dtype).removeprefix('torch.')}; use 'none'")
        if not gradient.numel():
            return
        pending = self._pending
        left_behind = self._exchange(ring, bucket, gradient, poll)
        if left_behind:
            pending[bucket] = left_behind

    @abstractmethod
    def _exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll) -> tuple[Tensor, ...]:
        """Do `exchange`, and return what of the bucket is to be kept; it must not be changed afterwards."""

    @abstractmethod
    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return how many bytes a member sends for a bucket, the mean over members, in a ring of `size`.

        A ring all-reduce sends 2(n-1)/n of the buffer, an all-gather n-1 payloads; headers are the transport's.
        """

    def state(self) -> bytes:
        """Return what is kept between steps."""
        stream = io.BytesIO()
        torch.save({"schema": _STATE_SCHEMA, "name": self.name, "kept": self._kept}, stream)
        return stream.getvalue()

    def restore(self, state: bytes) -> None:
        """Go on from what `state` returned; `ConfigError` if another compression did."""
        saved: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
        if (saved["schema"], saved["name"]) != (_STATE_SCHEMA, self.name):
            raise ConfigError(f"gradient compression: the saved state is of {saved['name']!r}, not of {self.name!r}; "
                              "go on with the same compression, or start anew")
        self._kept = saved["kept"]
        self._pending = {}

    def _left_behind(self, bucket: int, gradient: Tensor, num_tensors: int) -> tuple[Tensor, ...]:
        """Return what the steps before have left of a bucket; zeros at first. It must not be changed."""
        kept = self._kept.get(bucket)
        if kept is None:
            return tuple(torch.zeros_like(gradient) for _ in range(num_tensors))
        if len(kept) != num_tensors or kept[0].shape != gradient.shape:
            raise ConfigError(f"gradient compression {self.name!r}: bucket {bucket} had {kept[0].numel()} elements and "
                              f"has {gradient.numel()}; keep model and number of buckets, or start anew")
        return kept


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """Return what a ring all-reduce of `num_bytes` makes a member send, in the mean over members, rounded up."""
    return -(-2 * (size - 1) * num_bytes // size)
