"""Shares of a batch (F4)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.hierarchy import split_batch
from tests.one_line import refused

CAPACITIES = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e300)), min_size=1, max_size=40
).filter(any)


@given(batch_size=st.integers(0, 5000), capacities=CAPACITIES)
def test_shares_sum_to_the_batch_and_are_quotas_rounded(
    batch_size: int, capacities: list[float]
) -> None:
    shares = split_batch(batch_size, capacities)
    assert sum(shares) == batch_size
    largest = max(capacities)
    total = math.fsum(capacity / largest for capacity in capacities)
    for share, capacity in zip(shares, capacities, strict=True):
        assert capacity > 0.0 or share == 0
        assert abs(share - batch_size * capacity / largest / total) < 1.0 + 1e-6


@given(batch_size=st.integers(0, 500), size=st.integers(1, 30))
def test_equal_members_differ_by_one_sample_at_most_earlier_ones_first(
    batch_size: int, size: int
) -> None:
    shares = split_batch(batch_size, [0.3] * size)
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


def test_largest_remainders_get_what_is_left() -> None:
    assert split_batch(10, [1.0, 1.0, 1.0]) == (4, 3, 3)
    assert split_batch(7, [5.0, 3.0, 0.0, 2.0]) == (4, 2, 0, 1)


@pytest.mark.parametrize(
    ("batch_size", "capacities", "named"),
    [
        (-1, [1.0], "batch_size"),
        (4, [1.0, -1.0], "-1.0"),
        (4, [math.nan], "nan"),
        (4, [math.inf], "inf"),
        (4, [0.0, 0.0], "[0.0, 0.0]"),
        (4, [], "[]"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    batch_size: int, capacities: list[float], named: str
) -> None:
    refused(lambda: split_batch(batch_size, capacities), named)
