"""The largest values and their indices: those of a sort, and as bytes what they were."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from socflower.training.exchange.largest_values import (
    decode_values,
    encode_values,
    largest,
)


@given(
    seed=st.integers(0, 999), size=st.sampled_from([1, 7, 60, 5000, 40_000]), share=st.floats(0, 1)
)
def test_the_largest_are_those_of_a_sort(seed: int, size: int, share: float) -> None:
    """Also if a sample leaves few of them, or misleads, as where large values come at the sample's interval."""
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    values[:: max(1, size // 4096)] *= (1, 1000, 0.001)[seed % 3]
    count = max(1, round(size * share**4))
    found = largest(values, count)
    assert found.tolist() == sorted(np.argsort(-np.abs(values), kind="stable")[:count].tolist())


def test_nan_is_larger_than_all() -> None:
    for size in (4, 50_000):
        values = np.zeros(size, np.float32)
        values[:4] = [1, np.nan, np.inf, 2]
        assert largest(values, 2).tolist() == [1, 2]


@given(seed=st.integers(0, 999), count=st.integers(1, 40))
def test_values_come_back_bit_for_bit_from_as_many_bytes_as_announced(
    seed: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    # NaN, infinity and subnormal numbers too.
    values = rng.integers(0, 2**32, count, np.uint32).view(np.float32)
    indices = np.sort(rng.choice(1000, count, replace=False)).astype("<u4")
    payload = encode_values(indices, values)
    assert len(payload) == 8 * count
    found, came = decode_values(payload)
    assert np.array_equal(found, indices) and came.tobytes() == values.tobytes()
