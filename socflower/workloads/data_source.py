"""What a trainer needs of its data."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Indices: TypeAlias = torch.Tensor | NDArray[np.integer[Any]] | Sequence[int]


class DataSource(ABC):
    """Samples that a schedule addresses by their numbers, 0 <= number < len."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (b, ...) and labels (b, ...) of the samples at `indices`, in that order.

        What is random in a sample, such as augmentation, must be a function of `key` and the sample's number.
        """
