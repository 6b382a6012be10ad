"""Torch's map-style data sets as data of a training."""

import random
from collections.abc import Callable, Sequence, Sized
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from socflower.errors import ConfigError, require_range
from socflower.model_graph.batch_form import NOTHING, Batch, form_of, num_samples
from socflower.model_graph.random_state import forked_generators, seed_generators
from socflower.plain_numbers import plain_numbers
from socflower.workloads.data_source import DataSource, Indices

CollateFn: TypeAlias = Callable[[list[Any]], Any]


@plain_numbers
class MapDataset(DataSource):
    """A map-style `torch.utils.data.Dataset` as a data source, without a copy of it.

    Before each sample is read, the generators of torch, NumPy and `random` are seeded with the batch's key and the
    sample's number, so that augmentation is the same on every engine and with any number of workers. Afterwards this
    process's generators have their former states.

    Parameters
    ----------
    dataset : map-style Dataset
        Anything with `len()` and `dataset[i]`, 0 <= i < len.
    collate_fn : (list of samples) -> batch
        Makes a batch of any form; by default torch's `default_collate`.
    num_workers : int
        Processes that read samples; 0 reads in this one. They live as long as this object.
    timeout_s : float
        Seconds to wait for samples from a process; 0 waits without end.
    multiprocessing_context : str or context, optional
        How the processes start, as in `DataLoader`.

    Raises
    ------
    ConfigError
        For an iterable-style dataset, and for a batch whose tensors do not have one entry per sample.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: CollateFn = default_collate,
        num_workers: int = 0,
        *,
        timeout_s: float = 0.0,
        multiprocessing_context: Any = None,
    ) -> None:
        require_range("MapDataset", least=0, num_workers=num_workers)
        is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not is_map or isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"data: {type(dataset).__name__} cannot be read by number of the sample; give a map-style "
                "Dataset"
            )
        self._dataset = dataset
        self._collate = collate_fn
        self._wanted: list[list[_Place]] = []
        self._num_workers = num_workers
        self._loader = DataLoader(
            _Seeded(dataset),
            batch_sampler=self._wanted,
            collate_fn=_as_read,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            timeout=timeout_s,
            multiprocessing_context=multiprocessing_context,
        )

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def targets(self) -> Any:
        """The samples' classes, if the dataset has an attribute of this name, as torchvision's have; else None."""
        return getattr(self._dataset, "targets", None)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        """Return the collated samples at `indices`; see `DataSource.batch`."""
        if not len(indices):
            return NOTHING
        places = [(tuple(key), int(index)) for index in indices]
        # The workers divide the batch; the loader returns their parts in this order.
        bounds = np.linspace(0, len(places), max(1, self._num_workers) + 1).astype(int)
        self._wanted[:] = [places[first:end] for first, end in pairwise(bounds) if end > first]
        with forked_generators():
            made = self._collate([sample for part in self._loader for sample in part])
        if num_samples(made) != len(places):
            raise ConfigError(
                f"data: the collate function made {form_of(made)} of {len(places)} samples; the first "
                "dimension of every tensor must count samples"
            )
        return made


def as_data_source(data: Any) -> DataSource:
    """Return the result of a user's `data_fn` as a data source: itself, or a `MapDataset` of its samples.

    A `DataLoader` gives its dataset, its collate function, and the number, the time-out and the start method of its
    workers. The training sets batch size and order, and settings that only make reading faster have no effect.
    `ConfigError` names any other setting, which would be ignored, and data that cannot be read by number.
    """
    if not isinstance(data, DataLoader):
        return data if isinstance(data, DataSource) else MapDataset(data)
    ignored = _ignored(data)
    if ignored is not None:
        raise ConfigError(
            f"data: the DataLoader has {ignored}; leave that out, or return its dataset"
        )
    return MapDataset(
        data.dataset,
        data.collate_fn,
        data.num_workers,
        timeout_s=data.timeout,
        multiprocessing_context=data.multiprocessing_context,
    )


def _ignored(loader: DataLoader[Any]) -> str | None:
    """Return a setting of a loader that a training by number of the sample cannot follow, and why; None for none."""
    if isinstance(loader.dataset, IterableDataset):
        # `MapDataset` refuses it.
        return None
    choice = _own_choice(loader)
    if choice is not None:
        return f"{choice}, but the strategy chooses the samples of a step"
    if loader.batch_sampler is None:
        return "batch_size=None, but the strategy forms batches of single samples"
    if loader.drop_last:
        return "drop_last=True, but the strategy trains on all samples"
    if loader.worker_init_fn is not None:
        return "a worker_init_fn, but generators are seeded for each sample"
    return None


def _own_choice(loader: DataLoader[Any]) -> str | None:
    """Return what makes a loader choose samples other than each one once, in order or at random."""
    sampler: Any = loader.sampler
    kind = type(sampler).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"an __iter__ of its own ({type(loader).__name__})"
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return f"a {kind}"
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return "a RandomSampler with replacement"
    if isinstance(loader.dataset, Sized) and len(sampler) != len(loader.dataset):
        return f"a {kind} of {len(sampler)} of {len(loader.dataset)} samples"
    batches = loader.batch_sampler
    if batches is not None and (type(batches) is not BatchSampler or loader.batch_size is None):
        return f"a batch_sampler ({type(batches).__name__})"
    return None


_Place: TypeAlias = tuple[tuple[int, ...], int]


class _Seeded(Dataset[Any]):
    """Samples of a dataset by key and number, each read with generators seeded from both."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, place: _Place) -> Any:
        key, index = place
        seeds = np.random.SeedSequence([*key, index]).generate_state(4, np.uint32)
        seed_generators(int(seeds[0]) << 32 | int(seeds[1]))
        np.random.seed(seeds[2])
        random.seed(int(seeds[3]))
        return self._dataset[index]


def _as_read(samples: list[Any]) -> list[Any]:
    return samples
