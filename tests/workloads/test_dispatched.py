"""Samples that travel to nodes: the same bits as where all data are held, and no others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.hierarchy import group_steps_per_epoch
from socflower.training.batches import group_batches, interval_rows
from socflower.wire.message_keys import GroupTask, SentSamples, decode, encode
from socflower.workloads.dataset import LabelledData
from socflower.workloads.dispatched import (
    received_samples,
    require_dispatchable,
    sent_samples,
)
from socflower.workloads.map_dataset import as_data_source
from tests.one_line import refused


def some_data(num_samples: int, *, floats: bool = False, seed: int = 0) -> LabelledData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 256, (num_samples, 2, 3, 4), generator=generator, dtype=torch.uint8)
    if floats:
        inputs = inputs.float() / 255
    labels = torch.randint(0, 5, (num_samples,), generator=generator)
    return LabelledData(inputs, labels, (0.1, 0.5), (0.3, 0.2), 5)


def travelled(sent: SentSamples) -> SentSamples:
    return decode(SentSamples, encode(sent), "samples")


@settings(max_examples=40)
@given(
    num_samples=st.integers(1, 60),
    num_groups=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    first_step=st.integers(0, 12),
    num_steps=st.integers(1, 12),
    floats=st.booleans(),
)
def test_an_interval_reads_the_same_bits_from_the_samples_that_were_sent(
    num_samples: int,
    num_groups: int,
    batch_size: int,
    first_step: int,
    num_steps: int,
    floats: bool,
) -> None:
    """Every batch of every group, within an epoch or over several."""
    data = some_data(num_samples, floats=floats)
    steps_per_epoch = group_steps_per_epoch(num_samples, num_groups, batch_size)
    sent_rows = set[int]()
    for group_id in range(num_groups):
        task = GroupTask(
            group_id=group_id,
            num_groups=num_groups,
            members=(0,),
            leader=0,
            partitions=(0,),
            num_partitions=num_groups,
            capacities=(1.0,),
            first_step=first_step,
            num_steps=num_steps,
            steps_per_epoch=steps_per_epoch,
            total_steps=100,
            batch_size=batch_size,
            reshuffle=True,
            deal_epoch=first_step // steps_per_epoch,
            seed=3,
            num_samples=num_samples,
        )
        rows = interval_rows(task)
        received = received_samples(travelled(sent_samples(data, rows)), num_samples)
        assert len(received) == num_samples
        for indices in group_batches(task, num_samples):
            for here, there in zip(data.batch(indices), received.batch(indices), strict=True):
                assert torch.equal(here, there)
            halves = np.array_split(indices, 2)
            for here, there in zip(data.parts(halves), received.parts(halves), strict=True):
                assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])
        # No group is sent what another one reads in this epoch.
        assert sent_rows.isdisjoint(rows)
        sent_rows |= set(rows.tolist())


def test_a_sample_that_was_not_sent_is_named() -> None:
    received = received_samples(sent_samples(some_data(9), np.array([1, 4, 7])), 9)
    for asked in ([0], [4, 5], [8]):
        refused(lambda asked=asked: received.batch(asked), f"sample {asked[-1]}", "3 of 9")


def test_what_cannot_be_sent_is_one_line() -> None:
    data = some_data(6)
    doubles = LabelledData(data.inputs.double() / 255, data.labels, data.mean, data.std, 5)
    pairs = as_data_source([(torch.zeros(3), 0)] * 6)
    refused(lambda: require_dispatchable(doubles, 6), "float64", "uint8")
    refused(lambda: require_dispatchable(pairs, 6), "LabelledData")
    refused(lambda: require_dispatchable(data, 7), "6 samples", "num_samples = 7")
    assert require_dispatchable(data, 6) is data


@pytest.mark.parametrize("changes", [{"inputs": b"12345"}, {"pixels": "unknown"}])
def test_damaged_samples_are_one_line(changes: dict[str, object]) -> None:
    sent = replace(sent_samples(some_data(4), np.arange(4)), **changes)
    refused(lambda: received_samples(sent, 4), "dispatch", "damaged")
