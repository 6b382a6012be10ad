"""What the loops of a split training drive: the two halves of a model, as arrays and bytes, without torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""Tensors by name: weights and buffers by their names in the whole model, optimiser state as `name::key`."""


class Half(Protocol):
    """What both halves can: hand layers over when the cut moves, and be saved."""

    @property
    def cut(self) -> int:
        """Where the model is cut now."""
        ...

    def give(self, cut: int) -> Weights:
        """Move the cut to `cut`, away from this half's layers, and return what the other half needs for them."""
        ...

    def take(self, cut: int, weights: Weights) -> None:
        """Move the cut to `cut` with the layers that the other half gave; `ConfigError` for what does not fit."""
        ...

    def weights(self) -> Weights:
        """Return this half's weights and buffers, without optimiser state."""
        ...

    def save(self) -> bytes:
        """Return everything that `restore` needs: weights, buffers, optimiser, schedule, cut."""
        ...

    def restore(self, saved: bytes) -> None:
        """Stand where `save` stood; `ConfigError` for what is not of this model."""
        ...


class FrontHalf(Half, Protocol):
    """The half with the model's input."""

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        """Return the features of a batch (samples, ...) by the present weights.

        With `keep_graph` the backward pass is that of this very forward pass (plain split learning, K = 0); without,
        only what a replay needs is remembered (F22).
        """
        ...

    def labels(self, batch: int) -> NDArray[Any]:
        """Return what the back half needs to know of a batch beside features; empty if it has its own targets."""
        ...

    def sample_ids(self, batch: int) -> NDArray[np.int64]:
        """Return which samples a batch holds (samples,): what parties join by, and delta coding goes by."""
        ...

    def apply(self, batch: int, gradient: Array | None) -> None:
        """Update the weights by the gradient with respect to a batch's features; None only forgets the batch.

        Without a kept graph the batch is replayed first: features by *current* weights, random state as it was, no
        second update of batch statistics (F22).
        """
        ...


class BackHalf(Half, Protocol):
    """The half with the loss."""

    def step(self, batch: int, features: Sequence[Array], labels: NDArray[Any]) -> tuple[list[Array | None], float]:
        """Do forward, backward and update; return the gradient for each part of the features, and the loss.

        Several parts are those of several parties that hold different features of the same samples, in party order. A
        gradient is None where no one needs it.
        """
        ...
