"""Torch's map-style data sets: read by number, with augmentation that is a function of seed, epoch and sample."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from socflower.errors import ConfigError
from socflower.workloads import DataSource, LabelledData, MapDataset, as_data_source


class Noisy(Dataset[Any]):
    """Samples that draw from all three generators."""

    def __init__(self, num_samples: int = 12) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(
            [float(index), random.random(), np.random.rand(), float(torch.rand(()))]
        ), index % 3


@settings(max_examples=30)
@given(
    order=st.permutations(range(12)),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    key=st.tuples(st.integers(0, 1 << 40), st.integers(0, 100)),
)
def test_a_sample_is_a_function_of_key_and_number_whatever_is_read_with_it(
    order: list[int],
    sizes: list[int],
    key: tuple[int, int],
) -> None:
    data, whole = MapDataset(Noisy()), MapDataset(Noisy()).batch(range(12), key)
    for first in np.cumsum([0, *sizes]):
        if part := order[first : first + sizes[0]]:
            inputs, labels = data.batch(part, key)
            assert torch.equal(inputs, whole[0][part]) and torch.equal(labels, whole[1][part])


def test_epochs_and_seeds_draw_anew() -> None:
    data = MapDataset(Noisy())
    drawn = {
        tuple(data.batch([5], key)[0].flatten().tolist())
        for key in ((1, 0), (1, 1), (2, 0), (1, 0, 3))
    }
    assert len(drawn) == 4


def test_the_callers_generators_are_left_as_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    undisturbed = draw()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    MapDataset(Noisy()).batch([1, 2], (7,))
    assert draw() == undisturbed


def test_worker_processes_read_the_same_samples_in_the_same_order() -> None:
    here, there = MapDataset(Noisy(40)), MapDataset(Noisy(40), num_workers=2)
    for step, part in enumerate(([4, 39, 0], [7], list(range(40)))):
        for mine, theirs in zip(
            here.batch(part, (1, step)), there.batch(part, (1, step)), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_a_loader_gives_its_dataset_collate_function_and_workers() -> None:
    def doubled(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([2 * inputs for inputs, _ in samples]), torch.tensor(
            [label for _, label in samples]
        )

    source = as_data_source(DataLoader(Noisy(), batch_size=5, shuffle=True, collate_fn=doubled))
    assert len(source) == 12
    assert torch.equal(source.batch([3], (1,))[0], 2 * MapDataset(Noisy()).batch([3], (1,))[0])


def test_what_is_a_source_stays_and_a_dataset_becomes_one() -> None:
    data = LabelledData(
        torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64), (0.0,), (1.0,), 1
    )
    assert as_data_source(data) is data
    rows = as_data_source(TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3)))
    assert isinstance(rows, DataSource) and rows.batch([2, 0])[1].tolist() == [2, 0]
    pairs = as_data_source(
        [(torch.ones(2), 1), (torch.zeros(2), 0)]
    )  # anything with a length and numbers
    assert pairs.batch([1])[0].tolist() == [[0.0, 0.0]]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Backwards(SequentialSampler):
    def __iter__(self) -> Any:
        return reversed(range(len(self)))


class Cycling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def test_how_a_loaders_processes_start_and_how_long_they_may_take_is_kept() -> None:
    loader = DataLoader(
        Noisy(),
        num_workers=1,
        timeout=7.0,
        multiprocessing_context="spawn",
        pin_memory=False,
        prefetch_factor=3,
        persistent_workers=True,
        generator=torch.Generator(),
    )
    source = as_data_source(loader)
    assert isinstance(source, MapDataset)
    assert (source._loader.timeout, source._loader.multiprocessing_context) == (
        7.0,
        loader.multiprocessing_context,
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Endless(), "Endless cannot be read by number of the sample; give a map-style Dataset"),
        (
            DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] * 12, 12)),
            "the DataLoader has a WeightedRandomSampler, but which samples a step uses is the strategy's choice",
        ),
        (
            DataLoader(Noisy(), batch_sampler=[[0, 1], [1, 2]]),
            "the DataLoader has a batch_sampler (list), but which",
        ),
        (
            DataLoader(Noisy(), sampler=RandomSampler(Noisy(), replacement=True)),
            "a RandomSampler with replacement, but",
        ),
        (
            DataLoader(Noisy(), sampler=RandomSampler(Noisy(), num_samples=10)),
            "a RandomSampler of 10 of 12 samples, but",
        ),
        (
            DataLoader(Noisy(), sampler=SequentialSampler(range(5))),
            "a SequentialSampler of 5 of 12 samples, but",
        ),
        (DataLoader(Noisy(), sampler=Backwards(Noisy())), "the DataLoader has a Backwards, but"),
        (
            DataLoader(Noisy(), batch_size=5, drop_last=True),
            "has drop_last=True, but the strategy trains on all samples",
        ),
        (
            DataLoader(Noisy(), batch_size=None),
            "has batch_size=None, but the strategy forms batches",
        ),
        (
            DataLoader(Noisy(), num_workers=1, worker_init_fn=print),
            "has a worker_init_fn, but the processes",
        ),
        (Cycling(Noisy()), "has an __iter__ of its own (Cycling), but which samples"),
        (DataLoader(Endless()), "Endless cannot be read by number of the sample"),
        (7, "int cannot be read by number"),
    ],
)
def test_what_cannot_be_read_by_number_or_would_be_ignored_is_one_line(
    data: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        as_data_source(data)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_batches_are_of_the_form_that_the_collate_function_makes() -> None:
    batch = MapDataset(
        [{"text": torch.ones(2), "label": 1}, {"text": torch.zeros(2), "label": 0}]
    ).batch([1])
    assert batch["text"].tolist() == [[0.0, 0.0]] and batch["label"].tolist() == [0]


@pytest.mark.parametrize(
    ("collate_fn", "says"),
    [
        (
            lambda samples: samples[0],
            "the collate function made a tensor of shape (3,) of 2 samples of list",
        ),
        (lambda samples: {"x": torch.ones(1, 3)}, "made a dict of x of 2 samples"),
        (lambda samples: "cat", "made str of 2 samples"),
    ],
)
def test_a_batch_that_does_not_count_its_samples_is_one_line(collate_fn: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MapDataset([torch.ones(3)] * 4, collate_fn).batch([0, 1])
    assert says in str(caught.value) and "\n" not in str(caught.value)
