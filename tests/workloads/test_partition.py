from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from socflower.workloads.partition import dirichlet_partition, iid_partition, partition
from tests.one_line import refused

Indices = np.ndarray[Any, np.dtype[np.int64]]
LABELS = st.lists(st.integers(0, 9), min_size=1, max_size=200).map(np.array)
SEEDS = st.integers(0, 2**32 - 1)


def assert_every_sample_once(partitions: list[Indices], num_samples: int) -> None:
    assert sorted(np.concatenate(partitions).tolist()) == list(range(num_samples))
    assert all(np.issubdtype(part.dtype, np.integer) for part in partitions)


def assert_equal(left: list[Indices], right: list[Indices]) -> None:
    assert [part.tolist() for part in left] == [part.tolist() for part in right]


@given(num_samples=st.integers(1, 300), num_partitions=st.integers(1, 300), seed=SEEDS)
def test_iid_holds_every_sample_once_in_sizes_that_differ_by_at_most_one(
    num_samples: int, num_partitions: int, seed: int
) -> None:
    assume(num_partitions <= num_samples)
    partitions = iid_partition(num_samples, num_partitions, seed)
    assert len(partitions) == num_partitions
    assert_every_sample_once(partitions, num_samples)
    sizes = [len(part) for part in partitions]
    assert max(sizes) - min(sizes) <= 1
    assert_equal(partitions, iid_partition(num_samples, num_partitions, seed))


@given(
    labels=LABELS,
    num_partitions=st.integers(1, 20),
    alpha=st.floats(1e-6, 1e6),
    seed=SEEDS,
    filling=st.floats(0, 1),
)
def test_dirichlet_holds_every_sample_once_and_keeps_the_minimum(
    labels: Indices, num_partitions: int, alpha: float, seed: int, filling: float
) -> None:
    min_size = min(10, int(filling * len(labels) / num_partitions))
    partitions = dirichlet_partition(labels, num_partitions, alpha, seed, min_size)
    assert len(partitions) == num_partitions
    assert_every_sample_once(partitions, len(labels))
    assert min(len(part) for part in partitions) >= min_size
    assert_equal(partitions, dirichlet_partition(labels, num_partitions, alpha, seed, min_size))


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e12, 1e300])
def test_extreme_alphas_still_partition(alpha: float) -> None:
    labels = np.arange(300) % 10
    assert_every_sample_once(dirichlet_partition(labels, 7, alpha, seed=1), 300)


def label_skew(partitions: list[Indices], labels: Indices) -> float:
    """Mean over partitions of the largest class's share."""
    return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in partitions]))


def test_smaller_alpha_skews_more() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    skews = [
        label_skew(dirichlet_partition(labels, 10, alpha, seed=3), labels)
        for alpha in (0.05, 1.0, 1000.0)
    ]
    assert skews[0] > skews[1] > skews[2]
    assert skews[0] > 0.5 and skews[2] < 0.15


def test_one_dominant_label_is_shared_out_to_the_minimum() -> None:
    labels = np.zeros(10, dtype=np.int64)
    partitions = dirichlet_partition(labels, 10, 1e-6, seed=0, min_size=1)
    assert [len(part) for part in partitions] == [1] * 10


def test_scheme_is_chosen_by_name() -> None:
    labels = np.arange(50) % 5
    assert_equal(partition(labels, 4, "iid", 0.0, 7), iid_partition(50, 4, 7))
    assert_equal(partition(labels, 4, "dirichlet", 0.5, 7), dirichlet_partition(labels, 4, 0.5, 7))


def test_impossible_partitions_are_refused_with_numbers() -> None:
    labels = np.arange(50) % 5
    refused(lambda: iid_partition(50, 51, 0), "51", "50")
    refused(lambda: dirichlet_partition(labels, 6, 1.0, 0, min_size=10), "6", "60", "50")
    refused(lambda: iid_partition(50, 0, 0), "num_partitions = 0")
    refused(lambda: dirichlet_partition(labels[:0], 2, 1.0, 0, min_size=0), "num_samples = 0")
    refused(lambda: dirichlet_partition(labels, 2, 1.0, 0, min_size=-1), "min_size = -1")
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        refused(lambda alpha=alpha: dirichlet_partition(labels, 2, alpha, 0), "alpha", alpha)
    refused(
        lambda: partition(labels, 4, "pathological", 0.5, 7), "'pathological'", "iid, dirichlet"
    )
