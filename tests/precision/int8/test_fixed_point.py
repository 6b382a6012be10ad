"""(int8, exponent) numbers: F13 and the shift of F14."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.precision.int8.fixed_point import (
    channel_stride,
    exponent_for,
    quantise,
    require_finite,
    scaled_integers,
    shift_for,
)
from tests.one_line import refused

magnitudes = st.floats(min_value=2.0**-149, max_value=2.0**127, width=32)


@given(magnitudes)
def test_the_exponent_is_the_smallest_at_which_a_magnitude_fits_127(magnitude):
    exponent = exponent_for(magnitude)
    assert Fraction(magnitude) <= 127 * Fraction(2) ** exponent
    assert Fraction(magnitude) > 127 * Fraction(2) ** (exponent - 1)


@pytest.mark.parametrize("power", [-30, 0, 29])
def test_the_exponent_at_the_ends(power):
    assert exponent_for(0.0) == 0
    assert exponent_for(127.0 * 2.0**power) == power
    assert exponent_for(math.nextafter(127.0 * 2.0**power, math.inf)) == power + 1


@given(st.integers(0, 2**31), st.integers(1, 7))
def test_the_shift_is_the_smallest_that_leaves_so_many_bits(largest, bits):
    shift = shift_for(largest, bits)
    assert largest >> shift < 2**bits
    assert shift == 0 or largest >> (shift - 1) >= 2**bits


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_quantised_values_lie_within_half_a_step(values):
    real = np.array(values, np.float32)
    exponent = exponent_for(float(np.abs(real).max()))
    if exponent < -100:
        return
    out = np.empty(real.shape, np.int8)
    quantise(real, exponent, out)
    assert np.abs(out).max() <= 127
    assert np.abs(np.ldexp(out.astype(np.float64), exponent) - real).max() <= 2.0 ** (exponent - 1)


def test_quantise_rounds_ties_to_even_and_saturates():
    out = np.empty(8, np.int8)
    quantise(np.array([0.5, 1.5, -0.5, -1.5, 126.5, 127.5, 1e30, -1e30], np.float32), 0, out)
    assert out.tolist() == [0, 2, 0, -2, 126, 127, 127, -127]


def test_denormal_weights_are_quantised_like_any_others():
    real = np.array([1e-42, -1e-42, 0.0, 5e-43], np.float32)
    out = np.empty(4, np.int8)
    exponent = exponent_for(float(real.max()))
    quantise(real, exponent, out)
    np.testing.assert_allclose(np.ldexp(out.astype(np.float64), exponent), real, atol=1e-44)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9),
)
def test_scaled_integers_share_the_finest_exponent_that_their_bits_allow(first, second):
    arrays = np.array(first), np.array(second)
    exponent, integers = scaled_integers(21, (arrays[0], 0), (arrays[1], 7))
    filled = []
    for array, made, bits in zip(arrays, integers, (21, 28), strict=True):
        assert made.dtype == np.int32
        assert np.abs(made.astype(np.int64)).max() <= 2**bits
        assert np.abs(np.ldexp(made.astype(np.float64), exponent) - array).max() <= 2.0 ** (
            exponent - 1
        )
        filled.append(np.abs(made.astype(np.int64)).max() >= 2 ** (bits - 1))
    assert any(filled) or not (arrays[0].any() or arrays[1].any())


@given(st.integers(1, 5000))
def test_the_channel_stride_is_the_next_multiple_of_16(channels):
    stride = channel_stride(channels)
    assert stride % 16 == 0
    assert channels <= stride < channels + 16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_with_its_place(bad):
    weight = np.zeros((2, 3, 3), np.float32)
    require_finite(weight, "conv.weight")
    weight[1, 0, 2] = bad
    refused(lambda: require_finite(weight, "conv.weight"), "conv.weight", (1, 0, 2), bad)
