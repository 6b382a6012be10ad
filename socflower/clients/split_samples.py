"""What parties of a split training hold, made of data sets: images with labels, a part of the features, codes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from socflower.clients.split_batches import NO_LABELS
from socflower.workloads import GeneratorSamples, LabelledData, VerticalSamples


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
