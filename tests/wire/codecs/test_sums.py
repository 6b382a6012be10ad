"""What several senders' values are sent as, so that they can be added: integers in lanes, halves in a unit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.wire.codecs.quantisation import half_exponent, pack_lanes, unpack_lanes


@settings(max_examples=60)
@given(size=st.integers(1, 63), num_words=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_packed_lanes_add_without_running_into_each_other(
    size: int, num_words: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # Each member has a part of the 127 levels; all use theirs in full, up or down.
    cuts = np.sort(random.integers(0, 128, size - 1))
    share = np.diff([0, *cuts, 127])
    signs = (
        random.choice([-1, 1], (size, 4 * num_words))
        if seed % 2
        else np.full((size, 4 * num_words), 1 - seed % 4)
    )
    levels = (signs * share[:, None]).astype(np.float32)
    words = np.stack([pack_lanes(one) for one in levels])
    total = words.astype(np.int64).sum(0)
    # No overflow.
    assert np.array_equal(total, total.astype(np.int32))
    assert np.array_equal(unpack_lanes(total.astype(np.int32)), levels.sum(0))


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_halves_of_the_largest_value_use_their_range_and_do_not_overflow(largest: float) -> None:
    exponent = half_exponent(largest)
    half = np.float16(np.float32(largest) * np.float32(2.0**exponent))
    assert np.isfinite(half) and (half >= 2**14 or abs(exponent) == 126)


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_what_has_no_exponent_is_in_units_of_one(largest: float) -> None:
    assert half_exponent(largest) == 0
