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
    sample's number, so that augmentation is the same on every engine and with any number of workers. The states of this
    process's generators are restored.

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
        For an iterable-style dataset, and when a batch is read that has not one entry per sample.
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
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
        ):
            raise ConfigError(
                f"data: {type(dataset).__name__} cannot be read by number of the sample; give a "
                "map-style Dataset, with len(dataset) and dataset[i]"
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
        """The samples' classes, if the dataset has them by this name, as those of torchvision do; else None."""
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
                f"data: the collate function made {form_of(made)} of {len(places)} samples of "
                f"{type(self._dataset).__name__}; the first dimension of every tensor must count samples"
            )
        return made


def as_data_source(data: Any) -> DataSource:
    """Return what a user's `data_fn` returned as a data source: itself, or a `MapDataset` of its samples.

    Of a `DataLoader` its dataset, collate function, number of workers, their time-out and how they start are used;
    batch size, order and the order's generator are those of the training, and what only makes reading faster has no
    effect. `ConfigError` names any other setting, which would be ignored, and what cannot be read by number.
    """
    if not isinstance(data, DataLoader):
        return data if isinstance(data, DataSource) else MapDataset(data)
    ignored = _ignored(data)
    if ignored is not None:
        what, why = ignored
        raise ConfigError(
            f"data: the DataLoader has {what}, but {why}; leave that out, or return its dataset"
        )
    return MapDataset(
        data.dataset,
        data.collate_fn,
        data.num_workers,
        timeout_s=data.timeout,
        multiprocessing_context=data.multiprocessing_context,
    )


_STRATEGYS_CHOICE = "which samples a step uses is the strategy's choice"


def _ignored(loader: DataLoader[Any]) -> tuple[str, str] | None:
    """Return a setting of a loader that a training by number of the sample cannot follow, and why; None for none."""
    sampler: Any = loader.sampler
    kind = type(sampler).__name__
    if isinstance(loader.dataset, IterableDataset):
        # No map-style data set, which `MapDataset` says.
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"an __iter__ of its own ({type(loader).__name__})", _STRATEGYS_CHOICE
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return f"a {kind}", _STRATEGYS_CHOICE
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return "a RandomSampler with replacement", _STRATEGYS_CHOICE
    if isinstance(loader.dataset, Sized) and len(sampler) != len(loader.dataset):
        return f"a {kind} of {len(sampler)} of {len(loader.dataset)} samples", _STRATEGYS_CHOICE
    if loader.batch_sampler is None:
        return "batch_size=None", "the strategy forms batches of single samples"
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return f"a batch_sampler ({type(loader.batch_sampler).__name__})", _STRATEGYS_CHOICE
    if loader.drop_last:
        return (
            "drop_last=True",
            "the strategy trains on all samples, in batches of a size of its own",
        )
    if loader.worker_init_fn is not None:
        return (
            "a worker_init_fn",
            "the processes that read samples are started otherwise, and seeded for each sample",
        )
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
