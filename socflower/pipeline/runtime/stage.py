"""One device's layers: forward and backward passes over its samples of micro-batches, within a memory budget."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from socflower.errors import SocflowerError
from socflower.model_graph.graph import Operation
from socflower.model_graph.parts import random_streams
from socflower.training.fp32 import LossFn
from socflower.training.int8_layers import Int8Layers


class OutOfMemory(SocflowerError):
    """A stage needs more memory than its device's budget; the text has both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """The shape of one sample and the type of a tensor that crosses a cut; both ends know them in advance."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, operation: Operation) -> "Crossing":
        """Return the form of an operation's result."""
        assert operation.shape is not None and operation.dtype is not None
        return cls(shape=operation.shape[1:], dtype=operation.dtype)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.dtype.is_floating_point

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes of so many samples."""
        return num_samples * math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class _Kept:
    """Tensors that a micro-batch keeps from its forward to its backward pass."""

    entered: tuple[Tensor, ...]
    made: tuple[Tensor, ...] = ()
    # Saved by autograd.
    num_bytes: int = 0
    # Entering and leaving tensors of a stage in int8; its engine keeps the tensors between them.
    int8_bytes: int = 0


class _Saved:
    """Counts the bytes that autograd saves in a forward pass: each storage once, without weights and buffers.

    Autograd keeps these hooks with the tensors that it saves, and garbage collection does not see its references. So
    nothing here may refer to the results of the pass; they would never be freed if no backward pass follows.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        budget_bytes: float,
        in_flight: int,
        others_bytes: float,
    ) -> None:
        self._name, self._budget_bytes, self._in_flight = name, budget_bytes, in_flight
        self._others_bytes, self.num_bytes = others_bytes, 0
        own = (*module.parameters(), *module.buffers())
        self._seen = {tensor.untyped_storage()._cdata for tensor in own}

    @property
    def total_bytes(self) -> float:
        """Saved bytes and all other bytes of the stage."""
        return self._others_bytes + self.num_bytes

    def require_budget(self) -> None:
        """Raise `OutOfMemory` beyond the budget."""
        _require_budget(self._name, self.total_bytes, self._budget_bytes, self._in_flight)

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Count a tensor that is saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.num_bytes += storage.nbytes()
            self.require_budget()
        # The detached tensor has the same version counter.
        return tensor.detach(), tensor._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """Return the saved tensor."""
        tensor, version = packed
        # With hooks, torch does not check this itself, and gradients would silently be wrong.
        if tensor._version != version:
            raise RuntimeError(
                f"{self._name}: a tensor that the backward pass needs was changed in place"
            )
        return tensor


def _require_budget(
    name: str,
    needed_bytes: float,
    budget_bytes: float,
    in_flight: int,
) -> None:
    needed, budget = needed_bytes / 1e6, budget_bytes / 1e6
    if needed > budget:
        raise OutOfMemory(
            f"{name}: needs {needed:.1f} MB or more with {in_flight} micro-batches in flight, of a budget "
            f"of {budget:.1f} MB; use smaller or fewer ones, or more devices"
        )


class Int8Passes:
    """A stage's layers in int8, with an engine's memory for each micro-batch in flight.

    A single engine would have to repeat forward passes. The choice of a free engine changes no result. Its memory stays
    allocated for later micro-batches, of each size that has occurred.
    """

    def __init__(self, layers: Int8Layers, module: nn.Module, limit: int) -> None:
        self.layers = layers
        self._buffers = dict(module.named_buffers())
        self._free, self._engine_of = list(range(limit)), dict[int, int]()

    def forward(self, micro_batch: int, entering: Tensor, draw: int) -> Tensor:
        """Return the layers' results; the module gets the running statistics of the engine."""
        number = self._engine_of[micro_batch] = self._free.pop(0)
        made = self.layers.forward(entering, draw, number=number)
        for name, seen in self.layers.statistics().items():
            self._buffers[name].copy_(seen)
        for name, buffer in self._buffers.items():
            if name.endswith("num_batches_tracked"):
                buffer += 1
        return made

    def release(self, micro_batch: int) -> None:
        """Free the engine of a micro-batch after its backward pass."""
        self._free.append(self._engine_of.pop(micro_batch))

    def round_masters(self, draw: int) -> None:
        """Round the masters at random for the micro-batches of an update; `draw` is the number of the random stream."""
        self.layers.round_masters(self._buffers, draw)


@dataclass(kw_only=True)
class StageWork:
    """A device's layers as a module, and the micro-batches whose activations it keeps.

    `limit` is K_p; the caller never exceeds it. `budget_bytes` bounds weights, gradients, optimiser state
    (`state_bytes`) and all tensors that autograd has saved; in int8 it bounds the engines' memory, and the entering and
    leaving tensors in FP32.
    """

    # For messages, such as "stage 1 on SoC 3".
    name: str
    module: nn.Module
    # (): the model's input.
    entering: tuple[Crossing, ...]
    # (): the model's output.
    leaving: tuple[Crossing, ...]
    limit: int
    # Of random layers; None: the stage has none.
    seed: int | None = None
    # Of the last stage, computed in FP32.
    loss: LossFn | None = None
    # Computes the passes; None: torch.
    int8: Int8Passes | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    state_bytes: float = 0.0
    budget_bytes: float = math.inf
    peak_in_flight: int = field(default=0, init=False)
    peak_bytes: float = field(default=0.0, init=False)
    _kept: dict[int, _Kept] = field(default_factory=dict, init=False)

    def forward(
        self,
        micro_batch: int,
        entering: Sequence[Tensor],
        *,
        stream: int,
        labels: Any = None,
        weight: float = 1.0,
    ) -> tuple[Tensor, ...]:
        """Return the tensors that leave the stage; the last stage returns its weighted loss, a 0-d tensor.

        `stream` is the number of the pass's random stream. `weight` is the factor of the samples' loss in the loss of
        the mini-batch: 0 if none of their labels counts.
        """
        assert len(self._kept) < self.limit, (
            f"{self.name}: {self.limit} micro-batches are in flight"
        )
        if self.entering:
            pairs = zip(entering, self.entering, strict=True)
            entered = tuple(self._entered(tensor, one) for tensor, one in pairs)
        else:
            entered = tuple(tensor.to(self.device) for tensor in entering)
        kept = self._kept[micro_batch] = _Kept(entered)
        with self._counted(kept), self._streams(stream):
            made: Any
            if self.int8 is None:
                made = self.module(*entered)
            else:
                made = self.int8.forward(micro_batch, entered[0], stream)
                kept.int8_bytes = entered[0].nbytes + made.nbytes
                made = (made,) if self.loss is None else made
            if self.loss is not None:
                made = (self._loss_of(self.loss, made, labels, weight),)
        kept.made = tuple(made)
        self.peak_in_flight = max(self.peak_in_flight, len(self._kept))
        return tuple(tensor.detach() for tensor in kept.made)

    def _loss_of(
        self,
        loss: LossFn,
        made: Any,
        labels: Any,
        weight: float,
    ) -> Tensor:
        mean = loss(made, labels)
        if not isinstance(mean, Tensor) or mean.dim():
            raise SocflowerError(
                f"{self.name}: the loss must be a tensor without dimensions, the mean over the samples"
            )
        if not weight:
            # The mean is 0 / 0, and its gradient 0.
            return torch.zeros((), device=self.device)
        return mean if weight == 1.0 else mean * weight

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Add the parameters' gradients; return those of the entering tensors, None for integers.

        `gradients` are those of the leaving tensors, in their order; the last stage has none.
        """
        kept = self._kept.pop(micro_batch)
        if self.loss is not None:
            if kept.made[0].requires_grad:
                kept.made[0].backward()
        else:
            roots, of_roots = [], []
            for made, gradient in zip(kept.made, gradients, strict=True):
                if made.requires_grad and gradient is not None:
                    roots.append(made)
                    of_roots.append(gradient.to(self.device))
            if roots:
                torch.autograd.backward(roots, of_roots)
        # Frees the graph.
        kept.made = ()
        if self.int8 is not None:
            self.int8.release(micro_batch)
            self._count_engines(len(self._kept) + 1, kept.int8_bytes)
        found: list[Tensor | None] = []
        for tensor, one in zip(kept.entered, self.entering, strict=bool(self.entering)):
            if not one.has_gradient:
                found.append(None)
            else:
                found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        return tuple(found)

    def _entered(self, tensor: Tensor, crossing: Crossing) -> Tensor:
        tensor = tensor.to(self.device)
        return tensor.detach().requires_grad_() if crossing.has_gradient else tensor

    def _streams(self, stream: int) -> AbstractContextManager[None]:
        return nullcontext() if self.seed is None else random_streams(self.seed, stream)

    @contextmanager
    def _counted(self, kept: _Kept) -> Iterator[None]:
        """Count the bytes that autograd saves in the block."""
        in_flight = len(self._kept)
        saved = _Saved(self.name, self.module, self.budget_bytes, in_flight, self.held_bytes)
        try:
            saved.require_budget()
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                yield
        finally:
            kept.num_bytes = saved.num_bytes
            self.peak_bytes = max(self.peak_bytes, saved.total_bytes)
        if self.int8 is not None:
            self._count_engines(len(self._kept))

    @property
    def held_bytes(self) -> float:
        """Bytes that the stage has now."""
        held = self.state_bytes
        if self.int8 is not None:
            held += self.int8.layers.pass_bytes
        return held + sum(kept.num_bytes + kept.int8_bytes for kept in self._kept.values())

    def _count_engines(self, in_flight: int, ended_bytes: float = 0.0) -> None:
        """Count the engines' memory, which is known at the end of a pass."""
        needed_bytes = self.held_bytes + ended_bytes
        self.peak_bytes = max(self.peak_bytes, needed_bytes)
        _require_budget(self.name, needed_bytes, self.budget_bytes, in_flight)
