"""The half with the model's input: it computes features, and replays batches whose gradients arrive late (F22)."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.edgecloud.half_protocols import Array, Labels
from socflower.edgecloud.runtime.torch_half import Passes, TorchHalf, targets_from
from socflower.model_graph.batch_form import Batch, form_of, output_of
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.model_copy import reason
from socflower.model_graph.tensor_arrays import layout_of, to_array, to_tensor
from socflower.model_graph.torch_device import on_device
from socflower.training.schedules import Schedule, constant_rate
from socflower.training.session import LossFn, OptimizerFn

Samples: TypeAlias = tuple[Batch, Labels, NDArray[np.int64]]
"""Inputs, labels for the back half, and sample ids."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A batch whose forward pass is done and whose gradient has not arrived."""

    # Of its features, with their layout in memory.
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    # Whether its pass was kept for the update, which needs no replay then.
    is_kept: bool
    # Before its forward pass.
    num_updates: int


class TorchFront(TorchHalf):
    """The layers up to the cut, with a source of batches.

    `batches(batch)` returns inputs, labels and sample ids (int64) of a batch, by its number over the whole training. It
    is called again for a replay, so that a batch in flight takes no memory; it must return the same, including any
    random augmentation. Random numbers in layers depend on `seed`, batch and layer only, so a replay draws the same;
    parties that should differ need different seeds.

    With a `cut` after the last one, all layers are in this half, and `train_alone` needs `loss`.
    """

    # Whether a pass can be kept for its update.
    _keeps_passes = True

    def __init__(
        self,
        split: SplitModel,
        cut: int,
        batches: Callable[[int], Samples],
        optimizer: OptimizerFn,
        *,
        schedule: Schedule = constant_rate,
        seed: int = 0,
        device: torch.device | str = "cpu",
        loss: LossFn | None = None,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(
            "front",
            split,
            cut,
            optimizer=optimizer,
            schedule=schedule,
            seed=seed,
            device=device,
            passes=passes or Passes(loss=loss),
        )
        self._batches = batches
        self._in_flight: dict[int, _InFlight] = {}
        self._num_updates = 0
        self._latest: tuple[int, Samples] | None = None

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        """Return the features (samples, ...) of a batch, computed with the current weights."""
        inputs, _, _ = self._samples(batch)
        keep = keep_graph and self._keeps_passes and self.split.front_trains(self._cut)
        features = self._forward(batch, inputs, keep=keep)
        self._in_flight[batch] = _InFlight(
            tuple(features.shape), layout_of(features), keep, self._num_updates
        )
        # A copy: the graph may need its result unchanged, and the half may return its inputs.
        return to_array(features)

    @property
    def feature_quantum(self) -> float | None:
        """None: features are any floats; see `FrontHalf`."""
        return None

    def labels(self, batch: int) -> Labels:
        """Return the labels of a batch from its source."""
        return self._samples(batch)[1]

    def sample_ids(self, batch: int) -> NDArray[np.int64]:
        """Return the ids (samples,) of a batch."""
        return self._samples(batch)[2]

    def apply(self, batch: int, gradient: Array | None) -> None:
        """Update the weights by the gradient with respect to a batch's features (F22); None only discards the batch.

        Raises `ConfigError`, without any change, for a gradient of another shape than the features, for a gradient if
        nothing is trained, and for a kept graph whose weights were updated since.
        """
        waiting = self._in_flight[batch]
        if gradient is not None:
            self._check_gradient(batch, waiting, gradient)
            if self._session.keeps(batch):
                self._update(batch, gradient, waiting.layout)
            else:
                self._replay(batch, waiting.shape, gradient)
            self._num_updates += 1
        self._session.discard(batch)
        del self._in_flight[batch]

    def _check_gradient(
        self,
        batch: int,
        waiting: _InFlight,
        gradient: Array,
    ) -> None:
        if not self.split.front_trains(self._cut):
            raise self._error(
                f"a gradient for batch {batch}, but all before cut {self._cut} is frozen"
            )
        if tuple(gradient.shape) != waiting.shape:
            raise self._error(
                f"a gradient of shape {tuple(gradient.shape)} for batch {batch} with features {waiting.shape}"
            )
        # Autograd would apply it to weights that are no longer those of its forward pass.
        if waiting.is_kept and waiting.num_updates != self._num_updates:
            raise self._error(
                f"weights were updated since the graph of batch {batch} was kept; keep graphs only at window 0"
            )

    def train_alone(self, batch: int) -> float:
        """Do a whole training step with all layers, which must be in this half, and return the loss."""
        inputs, labels, _ = self._samples(batch)
        _, loss = self._train(batch, inputs, targets_from(labels, self._device))
        self._num_updates += 1
        return loss

    def _run(self, batch: int, *inputs: Any) -> torch.Tensor:
        """Return the features of a batch, or with labels its loss."""
        if len(inputs) == 1:
            return self._features(batch, inputs[0])
        return self._loss_of(batch, *inputs)

    def _replay(self, batch: int, shape: tuple[int, ...], gradient: Array) -> None:
        """Repeat the pass of a batch with the present weights, and update them."""
        with self._repeating():
            features = self._forward(batch, self._samples(batch)[0])
            if tuple(features.shape) != shape:
                self._session.discard(batch)
                raise self._error(
                    f"batch {batch} has features {shape}, but {tuple(features.shape)} in its replay; its source "
                    "must repeat itself"
                )
            self._update(batch, gradient, layout_of(features))

    def _repeating(self) -> AbstractContextManager[None]:
        """Return a context for the passes of a batch after its first one, which do not count in running statistics."""
        return _preserve_buffers(self._layers())

    def _update(self, batch: int, gradient: Array, layout: Sequence[int]) -> None:
        """Update the weights by a gradient with respect to the features of a pass that was kept."""
        self._session.begin()
        self._session.backward(batch, [to_tensor(gradient, self._device, layout)])
        self._session.step(batch)
        # Frees the gradients' memory between batches.
        self._session.begin()

    def _features(self, batch: int, inputs: Batch) -> torch.Tensor:
        """Return the features of a batch, which cross in float32 also under autocast."""
        layers = self._layers()
        with self._autocast():
            self._require_taken(layers, inputs)
            try:
                features = output_of(layers, on_device(inputs, self._device))
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                # Layers raise various types for inputs of another form or number.
                raise self._error(
                    f"does not take {form_of(inputs)}: {reason(error)}; give the data a collate_fn that makes what the "
                    "example of the program is"
                ) from error
        return cast(torch.Tensor, features).float()

    def _require_taken(self, layers: torch.nn.Module, inputs: Batch) -> None:
        """Raise `ConfigError` for entries of a dict that `forward` does not take."""
        if not isinstance(inputs, Mapping):
            return
        taken = inspect.signature(layers.forward).parameters
        strange = [key for key in inputs if key not in taken]
        if strange and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            raise self._error(
                f"takes {', '.join(taken)}, not {strange[0]!r}; leave it out of the data, in a collate_fn"
            )

    def _samples(self, batch: int) -> Samples:
        # Cached, since forward pass, labels and ids request the same batch one after the other.
        if self._latest is None or self._latest[0] != batch:
            self._latest = (batch, self._batches(batch))
        return self._latest[1]

    def _require_idle(self) -> None:
        if self._in_flight:
            raise self._error(
                f"the cut cannot move while batches {sorted(self._in_flight)} are in flight"
            )

    def _progress(self) -> list[list[int]]:
        kept = [batch for batch, waiting in self._in_flight.items() if waiting.is_kept]
        if kept:
            raise self._error(f"cannot be saved while the graphs of batches {kept} are kept")
        return [[batch, *waiting.shape] for batch, waiting in self._in_flight.items()]

    def _resume(self, progress: Sequence[Sequence[int]]) -> None:
        self._latest = None
        self._in_flight = {
            batch: _InFlight(tuple(shape), (), False, self._num_updates)
            for batch, *shape in progress
        }


@contextmanager
def _preserve_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers of layers in training mode afterwards: they were updated by this batch already."""
    trained = [part for part in module.modules() if part.training]
    buffers = {
        buffer: buffer.detach().clone()
        for part in trained
        for buffer in part.buffers(recurse=False)
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
