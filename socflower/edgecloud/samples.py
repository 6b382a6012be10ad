"""The samples of a party in a split training: their order in batches, and the part of a batch for each half."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from socflower.edgecloud.half_protocols import Labels
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, form_of
from socflower.model_graph.tensor_arrays import to_array
from socflower.plain_numbers import plain_numbers
from socflower.workloads.data_source import DataSource, Indices
from socflower.workloads.sample_tensors import GeneratorSamples, VerticalSamples

Rows = NDArray[np.int64]
NO_LABELS: NDArray[np.int64] = np.empty(0, np.int64)
LABELS = "labels"
"""The entry of a batch in a dict that holds its labels, as models of Hugging Face name it."""

BatchSource: TypeAlias = Callable[[int], tuple[Batch, Labels, Rows]]
"""Inputs, labels and sample ids of a batch by its number; repeated calls return the same."""

Divide: TypeAlias = Callable[[Batch], tuple[Batch, Batch]]
"""The part of a batch for the front half, and the part that travels to the back half."""


def inputs_and_labels(batch: Batch) -> tuple[Batch, Batch]:
    """Return a pair as it is, and a dict as its other entries and its labels.

    Raises `ConfigError` for a batch of another form.
    """
    if isinstance(batch, Mapping) and LABELS in batch:
        return {key: part for key, part in batch.items() if key != LABELS}, batch[LABELS]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"split training: batches must be a pair (inputs, labels) or a dict with {LABELS!r}, not {form_of(batch)}; "
        "give the data a collate_fn"
    )


def label_arrays(labels: Batch) -> Labels:
    """Return labels as arrays in dicts and lists, as they travel; `ConfigError` for anything but tensors in them."""
    if isinstance(labels, Tensor):
        return to_array(labels, copy=False)
    if isinstance(labels, Mapping):
        return {str(key): label_arrays(part) for key, part in labels.items()}
    if isinstance(labels, tuple | list):
        return [label_arrays(part) for part in labels]
    raise ConfigError(
        f"split training: labels must be tensors, not {type(labels).__name__}; give the data a collate_fn"
    )


@dataclass
class BatchOrder:
    """The order of samples: each epoch permutes them and divides them into batches whose sizes differ by at most one.

    All parties of a training have the same number of batches, however many samples they hold. Parties that hold
    different features of the same samples have the same `key`, and so the same order.
    """

    num_samples: int
    batches_per_epoch: int
    seed: int
    key: int = 0
    _epoch: int = field(default=-1, init=False, repr=False)
    _batches: list[Rows] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.batches_per_epoch <= self.num_samples:
            raise ConfigError(
                f"split training: {self.num_samples} samples cannot make {self.batches_per_epoch} batches an epoch; "
                "use a larger batch size or fewer edges"
            )

    def rows(self, batch: int) -> Rows:
        """Return the samples of a batch, counted from the start of training."""
        epoch, within = divmod(batch, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch, self.key])
            order = generator.permutation(self.num_samples)
            self._epoch = epoch
            self._batches = np.array_split(order, self.batches_per_epoch)
        return self._batches[within]


@dataclass(frozen=True)
class PartyBatches:
    """A party's batches by number, as the halves request them; only the order of one epoch is stored.

    Augmentation and other random parts of a sample are a function of seed, epoch, party and sample: a batch that is
    requested again is the same. `first` is the batch of the training that the halves count as batch 0; the training has
    `total` batches.
    """

    data: DataSource
    order: BatchOrder
    first: int = 0
    divide: Divide = inputs_and_labels
    total: int = 0

    def progress(self, batch: int) -> float:
        """Return the fraction of the training before a batch, in [0, 1]."""
        return min(1.0, (self.first + batch) / max(1, self.total))

    def __call__(self, batch: int) -> tuple[Batch, Labels, Rows]:
        """Return inputs, labels and ids of the samples of a batch."""
        number = self.first + batch
        rows = self.order.rows(number)
        key = (self.order.seed, number // self.order.batches_per_epoch, self.order.key)
        inputs, labels = self.divide(self.data.batch(rows, key))
        return inputs, label_arrays(labels), rows

    def targets(self, batch: int) -> Labels:
        """Return the labels only, for a back half with its own targets."""
        return self(batch)[1]


_NOTHING = torch.empty(0, dtype=torch.int64)


@plain_numbers
@dataclass(frozen=True)
class FeatureSamples(DataSource):
    """One party's features of samples whose other features are at other parties; party 0 holds the labels."""

    samples: VerticalSamples
    party: int

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return this party's features, and the labels if this is party 0, otherwise nothing."""
        parts, labels = self.samples.batch(indices)
        return parts[self.party], labels if self.party == 0 else _NOTHING


@dataclass(frozen=True)
class CodeSamples(DataSource):
    """The input codes of a generator, which the cloud holds in a reverse split."""

    samples: GeneratorSamples

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return codes without targets: those are at the edge only."""
        return self.samples.codes(indices), _NOTHING


class ImageTargets(CodeSamples):
    """The codes with their target images, which the edge holds in a reverse split.

    An edge that has all layers needs the codes too.
    """

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return codes, and images in 0..1."""
        return self.samples.codes(indices), self.samples.targets(indices)
