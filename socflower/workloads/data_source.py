"""The data of a training, as trainers read it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch

Indices: TypeAlias = torch.Tensor | NDArray[np.integer[Any]] | Sequence[int]


class DataSource(ABC):
    """Samples that a schedule addresses by their numbers, 0 <= number < len."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        """Return the samples at `indices`, in that order, as a pair (inputs, labels) or in another form; see `Batch`.

        Random changes of a sample, such as augmentation, must be a function of `key` and the sample's number.
        """

    @property
    def targets(self) -> Any:
        """The class of each sample, for partitions by class; None if it is not known without reading the samples."""
        return None

    def parts(self, indices: Sequence[Indices], key: Sequence[int] = ()) -> list[Batch]:
        """Return one batch for each of `indices`."""
        return [self.batch(each, key) for each in indices]

    def select(self, indices: Indices) -> "DataSource":
        """Return the samples at `indices`, in that order; their random changes still follow from their numbers here."""
        return _Selection(self, torch.as_tensor(indices, dtype=torch.int64))


class AbsentSamples(DataSource):
    """The data of a node that gets its samples from another one: only their number is known."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        """Raise `ConfigError`."""
        raise ConfigError("data: this node has no samples; samples_on names another one")


class _Selection(DataSource):
    """Some samples of a data source."""

    def __init__(self, source: DataSource, rows: torch.Tensor) -> None:
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def targets(self) -> Any:
        """The class of each sample of the selection, if the source knows them."""
        targets = self._source.targets
        return None if targets is None else torch.as_tensor(targets)[self._rows]

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        """Return the samples at `indices` of the selection; see `DataSource.batch`."""
        return self._source.batch(self._rows[torch.as_tensor(indices, dtype=torch.int64)], key)
