"""What a trainer needs of its data."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.workloads.batch_form import Batch

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

        What is random in a sample, such as augmentation, must be a function of `key` and the sample's number.
        """

    def parts(self, indices: Sequence[Indices], key: Sequence[int] = ()) -> list[Batch]:
        """Return one batch for each of `indices`."""
        return [self.batch(each, key) for each in indices]
