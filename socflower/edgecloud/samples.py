"""The samples of a party in a split training, and their order in batches, which depends on the seed alone."""

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
"""Inputs, labels and sample ids of a batch by its number; repeated calls return the same."""


class Samples(Protocol):
    """What one side holds of each sample. Repeated calls return the same values: replays rely on it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def inputs(self, rows: Tensor) -> Tensor:
        """Return the front half's inputs (rows, ...)."""
        ...

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return the targets of the loss (rows, ...); empty where this side does not have them."""
        ...


@dataclass
class BatchOrder:
    """The order of samples: each epoch permutes them and divides them into batches whose sizes differ by at most one.

    All parties of a training have the same number of batches, whatever they hold. Where parties hold different features
    of the same samples, `key` is the same for all, and so is the order.
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
    """A party's batches by number, as the halves request them; only the order of one epoch is stored.

    `first` is the batch of the training that the halves count as batch 0.
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
        """Return the labels only, for a back half with its own targets."""
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
    """One party's features of samples of which other parties hold other features; party 0 holds the labels."""

    samples: VerticalSamples
    party: int

    def __len__(self) -> int:
        return len(self.samples)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return this party's features."""
        return self.samples.batch(rows)[0][self.party]

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return the labels if this is party 0, otherwise nothing."""
        return np.asarray(self.samples.labels.index_select(0, rows).numpy()) if self.party == 0 else NO_LABELS


@dataclass(frozen=True)
class CodeSamples:
    """The input codes of a generator: what the cloud holds in a reverse split."""

    samples: GeneratorSamples

    def __len__(self) -> int:
        return len(self.samples)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return codes."""
        return self.samples.codes(rows)

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return nothing: the target images are at the edge only."""
        return NO_LABELS


class ImageTargets(CodeSamples):
    """The codes with their target images: what the edge holds in a reverse split.

    An edge that has all layers needs the codes too.
    """

    def labels(self, rows: Tensor) -> NDArray[Any]:
        """Return images, in 0..1."""
        return np.asarray(self.samples.targets(rows).numpy())
