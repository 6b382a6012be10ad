"""What a party of a split training holds, and which samples it has in which batch: a function of the seed alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from socflower.errors import ConfigError
from socflower.workloads import GeneratorSamples, LabelledData, VerticalSamples

Rows = NDArray[np.int64]
NO_LABELS: NDArray[np.int64] = np.empty(0, np.int64)


BatchSource: TypeAlias = Callable[[int], tuple[Tensor, NDArray[Any], Rows]]
"""Inputs, labels and sample ids of a batch by its number; asked again, it answers the same."""


class Samples(Protocol):
    """What one side has of each sample. Asked again for the same rows it answers the same: replays rely on it."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def inputs(self, rows: Tensor) -> Tensor:
        """Return the front half's inputs (rows, ...)."""
        ...

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return what the loss compares with (rows, ...); empty where this side does not know it."""
        ...


@dataclass
class BatchOrder:
    """An epoch permutes the samples and divides them into batches whose sizes differ by at most one.

    Parties of one training have equally many batches, whatever they hold. Where parties hold different features of the
    same samples, `key` is the same for all, and so is the order.
    """

    num_samples: int
    batches_per_epoch: int
    seed: int
    key: int = 0
    _epoch: int = field(default=-1, init=False, repr=False)
    _batches: list[Rows] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.batches_per_epoch <= self.num_samples:
            raise ConfigError(f"split training: {self.num_samples} samples cannot make {self.batches_per_epoch} "
                              "batches an epoch; use a larger batch size, fewer edges or more even partitions")

    def rows(self, batch: int) -> Rows:
        """Return the samples of a batch, counted from the start of training."""
        epoch, within = divmod(batch, self.batches_per_epoch)
        if epoch != self._epoch:
            order = np.random.default_rng([self.seed, epoch, self.key]).permutation(self.num_samples)
            self._epoch, self._batches = epoch, np.array_split(order, self.batches_per_epoch)
        return self._batches[within]


@dataclass(frozen=True)
class PartyBatches:
    """A party's batches by number, as the halves ask for them; nothing is kept but one epoch's order.

    `first` is what halves that began later in the training call their batch 0.
    """

    samples: Samples
    order: BatchOrder
    first: int = 0

    def __call__(self, batch: int) -> tuple[Tensor, NDArray[Any], Rows]:
        """Return inputs, labels and ids of the samples of a batch."""
        rows = self.order.rows(self.first + batch)
        chosen = torch.from_numpy(rows)
        return self.samples.inputs(chosen), self.samples.labels(chosen), rows

    def targets(self, batch: int) -> NDArray[Any]:
        """Return the labels alone: for a back half that has its own."""
        return self.samples.labels(torch.from_numpy(self.order.rows(self.first + batch)))


@dataclass(frozen=True)
class LabelledSamples:
    """Images at the edge; their labels travel with the features."""

    data: LabelledData

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return normalised images."""
        return self.data.batch(rows)[0]

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return classes."""
        return np.asarray(self.data.labels.index_select(0, rows).numpy())


@dataclass(frozen=True)
class FeatureSamples:
    """One party's features of samples that others know other things of; party 0 knows the labels."""

    samples: VerticalSamples
    party: int

    def __len__(self) -> int:
        return len(self.samples)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return this party's features."""
        return self.samples.batch(rows)[0][self.party]

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return the labels, if it is this party that knows them."""
        return np.asarray(self.samples.labels.index_select(0, rows).numpy()) if self.party == 0 else NO_LABELS


@dataclass(frozen=True)
class CodeSamples:
    """The codes that a generator makes images of: what the cloud has of a reverse split."""

    samples: GeneratorSamples

    def __len__(self) -> int:
        return len(self.samples)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return codes."""
        return self.samples.codes(rows)

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return nothing: what images should look like is known at the edge alone."""
        return NO_LABELS


class ImageTargets(CodeSamples):
    """The same with the images that a generator should make of them: what the edge has of a reverse split.

    Codes are needed by an edge that has all layers.
    """

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return images, in 0..1."""
        return np.asarray(self.samples.targets(rows).numpy())
