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

from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import LabelledData
from socflower.workloads.map_dataset import MapDataset, as_data_source
from tests.one_line import refused


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
        batches = here.batch(part, (1, step)), there.batch(part, (1, step))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*batches, strict=True))


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
    # Anything with a length and numbers.
    pairs = as_data_source([(torch.ones(2), 1), (torch.zeros(2), 0)])
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
    loader = DataLoader(Noisy(), num_workers=1, timeout=7.0, multiprocessing_context="spawn")
    source = as_data_source(loader)
    assert isinstance(source, MapDataset)
    assert source._loader.timeout == 7.0
    assert source._loader.multiprocessing_context is loader.multiprocessing_context


SAMPLERS = {
    "WeightedRandomSampler": WeightedRandomSampler([1.0] * 12, 12),
    "RandomSampler with replacement": RandomSampler(Noisy(), replacement=True),
    "RandomSampler of 10 of 12": RandomSampler(Noisy(), num_samples=10),
    "SequentialSampler of 5 of 12": SequentialSampler(range(5)),
    "Backwards": Backwards(Noisy()),
}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Endless(), "Endless"),
        *((DataLoader(Noisy(), sampler=sampler), name) for name, sampler in SAMPLERS.items()),
        (DataLoader(Noisy(), batch_sampler=[[0, 1], [1, 2]]), "batch_sampler (list)"),
        (DataLoader(Noisy(), batch_size=5, drop_last=True), "drop_last=True"),
        (DataLoader(Noisy(), batch_size=None), "batch_size=None"),
        (DataLoader(Noisy(), num_workers=1, worker_init_fn=print), "worker_init_fn"),
        (Cycling(Noisy()), "Cycling"),
        (DataLoader(Endless()), "Endless"),
        (7, "int"),
    ],
)
def test_what_cannot_be_read_by_number_or_would_be_ignored_is_refused(
    data: Any, named: str
) -> None:
    refused(lambda: as_data_source(data), named)


def test_batches_are_of_the_form_that_the_collate_function_makes() -> None:
    data = MapDataset([{"text": torch.ones(2), "label": 1}, {"text": torch.zeros(2), "label": 0}])
    batch = data.batch([1])
    assert batch["text"].tolist() == [[0.0, 0.0]] and batch["label"].tolist() == [0]


@pytest.mark.parametrize(
    ("collate_fn", "form"),
    [
        (lambda samples: samples[0], "a tensor of shape (3,)"),
        (lambda samples: {"x": torch.ones(1, 3)}, "a dict of x"),
        (lambda samples: "cat", "str"),
    ],
)
def test_a_batch_that_does_not_count_its_samples_is_refused(collate_fn: Any, form: str) -> None:
    data = MapDataset([torch.ones(3)] * 4, collate_fn)
    refused(lambda: data.batch([0, 1]), form, "2 samples")
