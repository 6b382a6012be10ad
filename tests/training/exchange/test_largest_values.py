"""The largest values and their indices: those of a sort, and as bytes what they were."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from socflower.training.exchange.largest_values import (
    decode_values,
    encode_values,
    largest,
)


@given(seed=st.integers(0, 999), size=st.integers(1, 60), data=st.data())
def test_the_largest_are_those_of_a_sort(seed: int, size: int, data: st.DataObject) -> None:
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    count = data.draw(st.integers(1, size))
    found = largest(values, count)
    assert found.tolist() == sorted(np.argsort(-np.abs(values), kind="stable")[:count].tolist())


def test_nan_is_larger_than_all() -> None:
    assert largest(np.array([1, np.nan, np.inf, 2], np.float32), 2).tolist() == [1, 2]


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
