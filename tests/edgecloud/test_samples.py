import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import LayeredProgram
from socflower.workloads.data_source import DataSource, Indices
from socflower.workloads.map_dataset import as_data_source
from tests.one_line import refused


@given(
    num_samples=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
    key=st.integers(0, 5),
    draw=st.data(),
)
def test_an_epoch_has_every_sample_once_in_batches_that_differ_by_one_at_most(
    num_samples: int,
    seed: int,
    key: int,
    draw: st.DataObject,
) -> None:
    per_epoch = draw.draw(st.integers(1, num_samples))
    order = BatchOrder(num_samples, per_epoch, seed, key)
    epoch = draw.draw(st.integers(0, 3))
    batches = [order.rows(epoch * per_epoch + within) for within in range(per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(num_samples))
    sizes = {len(batch) for batch in batches}
    assert max(sizes) - min(sizes) <= 1


@given(asked=st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_a_batch_is_the_same_whenever_it_is_asked_for(asked: list[int]) -> None:
    order = BatchOrder(30, 4, seed=3)
    for batch in asked:
        assert (order.rows(batch) == BatchOrder(30, 4, seed=3).rows(batch)).all()


def test_parties_of_one_key_have_one_order_and_others_another() -> None:
    assert (BatchOrder(50, 5, 1, key=0).rows(7) == BatchOrder(50, 5, 1, key=0).rows(7)).all()
    assert (BatchOrder(50, 5, 1, key=0).rows(7) != BatchOrder(50, 5, 1, key=1).rows(7)).any()


@pytest.mark.parametrize("per_epoch", [0, 11])
def test_batches_without_samples_are_refused(per_epoch: int) -> None:
    refused(lambda: BatchOrder(10, per_epoch, seed=1), "10 samples", f"{per_epoch}")


class Flipping(Dataset):  # type: ignore[type-arg]
    """Twelve rows that are flipped and shifted at random, each time they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.arange(4.0) + 10 * index
        return (
            row.flip(0) if torch.rand(()) < 0.5 else row
        ) + np.random.normal() + random.random(), index % 3


def party(key: int, seed: int = 3, **options: Any) -> PartyBatches:
    data = as_data_source(DataLoader(Flipping(), **options))
    return PartyBatches(data, BatchOrder(12, 4, seed, key))


def epoch_of(batches: PartyBatches, number: int) -> dict[int, torch.Tensor]:
    """Return the inputs by sample of the epoch of a batch."""
    found = {}
    for at in range(number // 4 * 4, number // 4 * 4 + 4):
        inputs, _, rows = batches(at)
        found |= dict(zip(rows.tolist(), inputs, strict=True))
    return found


@given(asked=st.lists(st.integers(0, 11), min_size=1, max_size=3))
@settings(max_examples=4)
def test_augmentation_is_a_function_of_seed_epoch_party_and_sample(asked: list[int]) -> None:
    first, again = party(0), party(0, collate_fn=default_collate)
    for batch in asked:
        inputs, labels, rows = first(batch)
        assert torch.equal(inputs, again(batch)[0]) and labels.tolist() == (rows % 3).tolist()
        # In another epoch, party or training each sample is another one.
        others = ((first, (batch + 4) % 12), (party(1), batch), (party(0, seed=4), batch))
        for found in (epoch_of(*other) for other in others):
            for row, value in zip(rows.tolist(), inputs, strict=True):
                assert not torch.equal(found[row], value)


def test_a_batch_of_another_form_is_refused() -> None:
    three = PartyBatches(as_data_source([(1.0, 2.0, 3)] * 4), BatchOrder(4, 2, 1))
    refused(lambda: three(0), "list of", "collate_fn")


def test_a_dict_is_divided_into_its_labels_and_the_rest() -> None:
    rows = [{"input_ids": torch.tensor([at, 1]), "labels": at} for at in range(4)]
    inputs, labels, ids = PartyBatches(as_data_source(rows), BatchOrder(4, 2, 1))(1)
    assert set(inputs) == {"input_ids"}
    assert inputs["input_ids"][:, 0].tolist() == labels.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.zeros(8, 5), "(8, 5)"),
        (torch.zeros(8, 4, dtype=torch.float64), "Double"),
        ((torch.zeros(8, 4), torch.zeros(8, 4)), "tuple of"),
        (np.zeros((8, 4), np.float32), "ndarray"),
    ],
)
def test_inputs_that_the_front_half_does_not_take_are_refused_in_one_line(
    inputs: Any, said: str
) -> None:
    """Own data with another form than the example's: layers raise TypeErrors and RuntimeErrors for it."""

    class Own(DataSource):
        def __len__(self) -> int:
            return 16

        def batch(self, indices: Indices, key: Sequence[int] = ()) -> Any:
            return inputs, torch.zeros(8, dtype=torch.int64)

    program = LayeredProgram(
        model_fn=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), example=(4,)
    )
    placed = program.front(0, 0, PartyBatches(Own(), BatchOrder(16, 2, 1)))
    refused(lambda: placed.half.forward(0), "does not take", said, "collate_fn")
