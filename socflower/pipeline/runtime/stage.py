"""One device's layers: forward and backward passes over its samples of micro-batches, within a memory budget."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from socflower.errors import SocflowerError
from socflower.model_graph.graph import Operation
from socflower.training.int8_layers import Int8Layers
from socflower.training.session import (
    LossFn,
    TorchSession,
    loss_between,
    part_of_loss,
    require_loss,
)


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
        # Of entering and leaving tensors, which are in FP32, by micro-batch; the engine keeps those between them.
        self._bytes_of: dict[int, int] = {}

    def forward(self, micro_batch: int, entering: Tensor, draw: int) -> Tensor:
        """Return the layers' results; the module gets the running statistics of the engine."""
        number = self._engine_of[micro_batch] = self._free.pop(0)
        made = self.layers.forward(entering, draw, number=number)
        self._bytes_of[micro_batch] = entering.nbytes + made.nbytes
        for name, seen in self.layers.statistics().items():
            self._buffers[name].copy_(seen)
        for name, buffer in self._buffers.items():
            if name.endswith("num_batches_tracked"):
                buffer += 1
        return made

    def release(self, micro_batch: int) -> None:
        """Free the engine of a micro-batch after its backward pass."""
        self._free.append(self._engine_of.pop(micro_batch))
        del self._bytes_of[micro_batch]

    @property
    def held_bytes(self) -> int:
        """Bytes of the engines and of the tensors that enter and leave in micro-batches in flight."""
        return self.layers.pass_bytes + sum(self._bytes_of.values())

    def round_masters(self, draw: int) -> None:
        """Round the masters at random for the micro-batches of an update; `draw` is the number of the random stream."""
        self.layers.round_masters(self._buffers, draw)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePasses:
    """The passes of a stage's layers: with a `loss` their result is the weighted loss of the samples."""

    name: str
    module: nn.Module
    # Of the last stage, computed in FP32.
    loss: LossFn | None
    # Computes the passes; None: torch.
    int8: Int8Passes | None

    def __call__(
        self, micro_batch: int, stream: int, labels: Any, weight: float, *entered: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tensors that leave; `weight` is the factor of the loss, 0 if none of the labels counts."""
        made: Any
        if self.int8 is None:
            made = self.module(*entered)
        else:
            made = self.int8.forward(micro_batch, entered[0], stream)
            made = (made,) if self.loss is None else made
        if self.loss is None:
            return tuple(made)
        loss = loss_between(self.loss, made, labels, self.name)
        # All layers of the last stage may be frozen.
        require_loss(loss, self.name, has_gradient=False)
        return (part_of_loss(loss, weight),)


def _untrained(run: StagePasses) -> TorchSession:
    return TorchSession(run, {}, torch.optim.SGD, where=run.name)


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
    # See `StagePasses`.
    loss: LossFn | None = None
    int8: Int8Passes | None = None
    # Starts the session that trains the layers.
    start: InitVar[Callable[[StagePasses], TorchSession]] = _untrained
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    state_bytes: float = 0.0
    budget_bytes: float = math.inf
    session: TorchSession = field(init=False)
    peak_in_flight: int = field(default=0, init=False)
    peak_bytes: float = field(default=0.0, init=False)
    # Bytes that autograd has saved, by micro-batch.
    _saved_bytes: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self, start: Callable[[StagePasses], TorchSession]) -> None:
        self.session = start(
            StagePasses(name=self.name, module=self.module, loss=self.loss, int8=self.int8)
        )

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
        assert len(self._saved_bytes) < self.limit, (
            f"{self.name}: {self.limit} micro-batches are in flight"
        )
        if self.entering:
            pairs = zip(entering, self.entering, strict=True)
            entered = tuple(self._entered(tensor, one) for tensor, one in pairs)
        else:
            # An input that the batch leaves out has the value of its default.
            entered = tuple(
                one.to(self.device) if isinstance(one, Tensor) else one for one in entering
            )
        self._saved_bytes[micro_batch] = 0
        with self._counted(micro_batch):
            made = self.session.forward(
                micro_batch, stream, labels, weight, *entered, stream=stream
            )
        self.peak_in_flight = max(self.peak_in_flight, len(self._saved_bytes))
        return made

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Add the parameters' gradients; return those of the entering tensors, None for integers.

        `gradients` are those of the leaving tensors, in their order; the last stage has none.
        """
        given = [None if one is None else one.to(self.device) for one in gradients]
        returned = self.session.backward(micro_batch, None if self.loss is not None else given)
        del self._saved_bytes[micro_batch]
        if self.int8 is not None:
            self._count_engines(len(self._saved_bytes) + 1)
            self.int8.release(micro_batch)
        return returned[-len(self.entering) :] if self.entering else ()

    def _entered(self, tensor: Tensor, crossing: Crossing) -> Tensor:
        tensor = tensor.to(self.device)
        return tensor.detach().requires_grad_() if crossing.has_gradient else tensor

    @contextmanager
    def _counted(self, micro_batch: int) -> Iterator[None]:
        """Count the bytes that autograd saves in the block."""
        in_flight = len(self._saved_bytes)
        saved = _Saved(self.name, self.module, self.budget_bytes, in_flight, self.held_bytes)
        try:
            saved.require_budget()
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                yield
        finally:
            self._saved_bytes[micro_batch] = saved.num_bytes
            self.peak_bytes = max(self.peak_bytes, saved.total_bytes)
        if self.int8 is not None:
            self._count_engines(len(self._saved_bytes))

    @property
    def held_bytes(self) -> float:
        """Bytes that the stage has now."""
        in_int8 = 0 if self.int8 is None else self.int8.held_bytes
        return self.state_bytes + in_int8 + sum(self._saved_bytes.values())

    def _count_engines(self, in_flight: int) -> None:
        """Count the engines' memory, which is known at the end of a pass."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        _require_budget(self.name, self.held_bytes, self.budget_bytes, in_flight)
