"""Int8 weights with scales: exact for what is int8 already, without bias for what is not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from socflower.wire.codecs.int8_weights import coded, decoded, to_int8

SHAPES = arrays.array_shapes(min_dims=2, max_dims=4, max_side=5)
INT8 = arrays.arrays(np.int8, SHAPES, elements=st.integers(-127, 127))
REAL = arrays.arrays(
    np.float32, SHAPES, elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False)
)


@given(INT8, st.integers(-60, 60), st.booleans())
def test_int8_values_with_a_power_of_two_come_back_bit_for_bit(
    values: np.ndarray, exponent: int, is_random: bool
) -> None:
    """The weights of NITI, also by the rounding that is random for others."""
    real = values.astype(np.float32) * np.float32(2.0**exponent)
    sent, scale = to_int8(real, np.random.default_rng(0) if is_random else None)
    assert sent.dtype == np.int8 and sent.nbytes * 4 == real.nbytes
    assert np.array_equal(sent.astype(np.float32) * np.float32(scale), real)


@given(REAL)
def test_the_nearest_values_differ_by_half_a_step_of_a_power_of_two(real: np.ndarray) -> None:
    """A step is less than a 63rd of the largest magnitude."""
    sent, scale = to_int8(real)
    largest = float(np.abs(real).max())
    assert np.log2(scale) == int(np.log2(scale))
    assert scale * 127 >= largest * (1 - 1e-6)
    assert largest < 2.0**-110 or scale * 63.5 <= largest * (1 + 1e-6)
    error = np.abs(sent * np.float64(scale) - real)
    assert error.max() <= scale / 2 * (1 + 1e-6)


def test_random_rounding_has_no_bias_and_is_repeatable() -> None:
    real = np.linspace(-1.0, 1.0, 254, dtype=np.float32).reshape(2, 127)
    draws = []
    for seed in range(400):
        sent, scale = to_int8(real, np.random.default_rng(seed))
        assert np.array_equal(sent, to_int8(real, np.random.default_rng(seed))[0])
        draws.append(sent * scale)
    # The mean of 400 errors of at most a step; 5 standard deviations of half a step each.
    assert np.abs(np.mean(draws, axis=0) - real).max() <= 5 * 0.5 / 127 / 20
    assert np.abs(np.mean(draws) - real.mean()) <= 5 * 0.5 / 127 / 20 / 254**0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_small_whole_or_not_finite_stays_as_it_is(value: float) -> None:
    spoilt = np.ones((2, 3), np.float32)
    spoilt[1, 1] = value
    others = {
        "bias": np.ones(3, np.float32),
        "count": np.ones((2, 2), np.int64),
        "spoilt": spoilt,
        "empty": np.ones((0, 3), np.float32),
    }
    sent, scales = coded({**others, "weight": np.ones((2, 2), np.float32)})
    assert list(scales) == ["weight"]
    assert all(sent[name] is others[name] for name in others)
    assert np.array_equal(decoded(sent, scales)["weight"], np.ones((2, 2)))
    # An array of another type than its scale announces is its sender's fault, and is not touched.
    assert decoded({"weight": spoilt}, scales)["weight"] is spoilt
