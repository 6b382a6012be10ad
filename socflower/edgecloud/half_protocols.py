"""The interfaces of the two halves of a split model, in terms of arrays and bytes, without torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = Any
"""An array, or a dict, tuple or list of arrays: what travels with features to the half that has the loss."""
Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""Tensors by name: weights and buffers by their names in the whole model, optimiser state as `name::key`."""


def arrays_in(labels: Labels) -> list[NDArray[Any]]:
    """Return the arrays of labels that have elements."""
    if isinstance(labels, Mapping):
        labels = list(labels.values())
    if not isinstance(labels, tuple | list):
        return [labels] if labels.size else []
    arrays: list[NDArray[Any]] = []
    for part in labels:
        arrays += arrays_in(part)
    return arrays


class Half(Protocol):
    """The methods of both halves: transfer layers when the cut moves, save and restore."""

    @property
    def cut(self) -> int:
        """Where the model is cut now."""
        ...

    def export_layers(self, cut: int) -> Weights:
        """Move the cut to `cut`, so that this half loses layers, and return their tensors for the other half."""
        ...

    def import_layers(self, cut: int, weights: Weights) -> None:
        """Move the cut to `cut`, adding the layers that the other half exported; `ConfigError` if they do not fit."""
        ...

    def weights(self) -> Weights:
        """Return this half's weights and buffers, without optimiser state."""
        ...

    def save(self) -> bytes:
        """Return everything that `restore` needs: weights, buffers, optimiser, schedule, cut."""
        ...

    def restore(self, saved: bytes) -> None:
        """Restore the state that `save` returned; `ConfigError` for the state of another model."""
        ...


class FrontHalf(Half, Protocol):
    """The half with the model's input."""

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        """Return the features of a batch (samples, ...), computed with the current weights.

        With `keep_graph` the autograd graph is kept for the backward pass (plain split learning, K = 0); without it,
        only the state for a replay is stored (F22).
        """
        ...

    @property
    def feature_quantum(self) -> float | None:
        """A power of two: the last features are its multiples, at most 254 apart; None for any floats."""
        ...

    def labels(self, batch: int) -> Labels:
        """Return a batch's labels for the back half; empty if the back half has its own targets."""
        ...

    def sample_ids(self, batch: int) -> NDArray[np.int64]:
        """Return the sample ids of a batch (samples,), by which parties are joined and features delta-coded."""
        ...

    def apply(self, batch: int, gradient: Array | None) -> None:
        """Update the weights by the gradient with respect to a batch's features; None only discards the batch.

        Without a kept graph the batch is replayed first: features by *current* weights, random state as it was, no
        second update of batch statistics (F22).
        """
        ...


class BackHalf(Half, Protocol):
    """The half with the loss."""

    def step(
        self, batch: int, features: Sequence[Array], labels: Labels
    ) -> tuple[list[Array | None], float]:
        """Do forward, backward and update; return the gradient for each part of the features, and the loss.

        Several parts are those of several parties that hold different features of the same samples, in party order. A
        gradient is None if it is not needed.
        """
        ...
