"""The aggregation kernels against float64 NumPy, at awkward sizes, alignments and values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower import _native
from tests.one_line import refused

AROUND_POWERS_OF_TWO = sorted({max(0, 2**k + d) for k in range(15) for d in (-1, 0, 1)})
FLOAT32_MAX = np.finfo(np.float32).max
SMALLEST_DENORMAL = np.float32(1e-45)


def unaligned(array, offset):
    """Return a read-only copy of `array` whose first byte lies at `offset` in a bytes object."""
    return np.frombuffer(b"\x7f" * offset + array.tobytes(), array.dtype, array.size, offset)


def reference(inputs, weights):
    """The header's contract, one IEEE double operation at a time."""
    total = np.zeros(inputs[0].shape, np.float64)
    for x, weight in zip(inputs, weights, strict=True):
        total = total + np.float64(weight) * x.astype(np.float64)
    return total


@pytest.mark.parametrize("length", AROUND_POWERS_OF_TWO)
def test_has_the_bits_of_the_reference_at_every_length(length):
    rng = np.random.default_rng(length)
    for num_inputs in (1, 2, 3, 6):
        inputs = [rng.standard_normal(length).astype(np.float32) for _ in range(num_inputs)]
        weights = list(rng.random(num_inputs))
        out = np.full(length, np.nan, np.float32)
        _native.weighted_sum_into(out, inputs, weights)
        np.testing.assert_array_equal(out, reference(inputs, weights).astype(np.float32))


@settings(max_examples=40)
@given(st.data())
def test_close_to_float64_for_any_finite_values_weights_and_alignment(data):
    length = data.draw(st.integers(0, 40))
    num_inputs = data.draw(st.integers(1, 6))

    def drawn(count, values):
        return data.draw(st.lists(values, min_size=count, max_size=count))

    value = st.floats(-(2.0**100), 2.0**100, width=32)
    offset = st.integers(0, 9)
    arrays = [np.array(drawn(length, value), np.float32) for _ in range(num_inputs)]
    inputs = [unaligned(*pair) for pair in zip(arrays, drawn(num_inputs, offset), strict=True)]
    weights = drawn(num_inputs, st.floats(0, 1))
    out = np.empty(length, np.float32)
    _native.weighted_sum_into(out, inputs, weights)
    exact = reference(inputs, weights)
    magnitude = reference([np.abs(x) for x in inputs], weights)
    assert np.all(np.abs(out - exact) <= 1e-6 * magnitude + SMALLEST_DENORMAL)
    assert _native.weighted_sum_bytes(b"header", inputs, weights) == b"header" + out.tobytes()


@settings(max_examples=30)
@given(st.integers(0, 20_000), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_same_bits_again_and_in_any_partition(length, num_inputs, seed):
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-6, 6, num_inputs)
    inputs = [(scale * rng.standard_normal(length)).astype(np.float32) for scale in scales]
    weights = list(rng.random(num_inputs))
    whole, again, parts = (np.empty(length, np.float32) for _ in range(3))
    _native.weighted_sum_into(whole, inputs, weights)
    _native.weighted_sum_into(again, inputs, weights)
    cut = int(rng.integers(0, length + 1))
    _native.weighted_sum_into(parts[:cut], [x[:cut] for x in inputs], weights)
    _native.weighted_sum_into(parts[cut:], [x[cut:] for x in inputs], weights)
    assert whole.tobytes() == again.tobytes() == parts.tobytes()


def test_writes_exactly_out_and_nothing_beside_it():
    frame = np.full(4 * 8194 + 8, 0x55, np.uint8)
    out = frame[3 : 3 + 4 * 8194].view(np.float32)  # unaligned and longer than one block
    _native.weighted_sum_into(out, [np.ones(8194, np.float32)], [2.0])
    assert np.all(out == 2.0)
    assert np.all(frame[:3] == 0x55)
    assert np.all(frame[3 + 4 * 8194 :] == 0x55)


def test_weight_zero_drops_finite_values_but_not_nan():
    x = np.array([1.0, np.nan, np.inf], np.float32)
    out = np.empty(3, np.float32)
    _native.weighted_sum_into(out, [x, np.ones(3, np.float32)], [0.0, 1.0])
    assert out[0] == 1.0
    assert np.isnan(out[1:]).all()


def test_no_overflow_and_no_loss_on_the_way():
    large = np.full(5, FLOAT32_MAX, np.float32)
    out = np.empty(5, np.float32)
    _native.weighted_sum_into(out, [large] * 4, [0.25] * 4)
    np.testing.assert_array_equal(out, large)
    tiny = np.full(5, SMALLEST_DENORMAL, np.float32)
    _native.weighted_sum_into(out, [tiny, -large, large], [1.0, 1.0, 1.0])
    assert not out.any()  # 1e-45 vanishes beside 3e38 even in double ...
    _native.weighted_sum_into(out, [-large, large, tiny], [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(out, tiny)  # ... but survives after it: the order is the inputs'


def test_no_inputs_give_zeros():
    out = np.full(9, np.nan, np.float32)
    _native.weighted_sum_into(out, [], [])
    np.testing.assert_array_equal(out, np.zeros(9, np.float32))


def test_any_shape_counts_as_its_elements():
    out = np.empty((2, 3), np.float32)
    _native.weighted_sum_into(out, [np.arange(6, dtype=np.float32).reshape(3, 2)], [1.0])
    np.testing.assert_array_equal(out.reshape(-1), np.arange(6))
    scalar = np.empty((), np.float32)
    _native.weighted_sum_into(scalar, [np.array(3.0, np.float32)], [0.5])
    assert scalar == 1.5


def f32(length=3):
    return np.zeros(length, np.float32)


SHARED = f32(8)


@pytest.mark.parametrize(
    ("out", "inputs", "named"),
    [
        (f32(), [f32(), f32(4)], ("inputs[1]", "4", "3")),
        (f32(), [np.zeros(3)], ("inputs[0]", "float32", "'d'")),
        (f32(), [np.zeros(3, ">f4")], ("inputs[0]", "byte order")),
        (f32(), [bytes(12)], ("inputs[0]", "'B'")),
        (f32(), [[0.0, 0.0, 0.0]], ("inputs[0]", "list")),
        (f32(), [f32(6)[::2]], ("inputs[0]", "C-contiguous")),
        (f32()[::-1], [f32()], ("out", "C-contiguous")),
        (np.frombuffer(bytes(12), np.float32), [f32()], ("out", "writable")),
        (SHARED[:4], [f32(4), SHARED[3:7]], ("out", "inputs[1]", "shares memory")),
    ],
)
def test_refuses_what_the_contract_excludes(out, inputs, named):
    weights = [1.0] * len(inputs)
    refused(lambda: _native.weighted_sum_into(out, inputs, weights), *named, error=ValueError)


@pytest.mark.parametrize(("inputs", "weights"), [([f32()], [1, 2]), ([], [1])])
def test_refuses_another_number_of_weights(inputs, weights):
    named = f"{len(weights)} weights for {len(inputs)} inputs"
    refused(lambda: _native.weighted_sum_into(f32(), inputs, weights), named, error=ValueError)


def test_neighbours_in_one_buffer_are_no_aliases():
    both = np.arange(8, dtype=np.float32)
    _native.weighted_sum_into(both[:4], [both[4:]], [1.0])
    np.testing.assert_array_equal(both[:4], [4, 5, 6, 7])


@pytest.mark.parametrize(
    ("inputs", "named"), [([], "got 0"), ([f32(3), f32(2)], "inputs[1] has 2")]
)
def test_bytes_variant_refuses_no_inputs_and_unequal_ones(inputs, named):
    weights = [1] * len(inputs)
    refused(lambda: _native.weighted_sum_bytes(b"", inputs, weights), named, error=ValueError)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_finds_a_bad_value_at_every_position_and_alignment(bad):
    for length in (1, 2, 7, 8, 9, 31, 33):
        for position in range(length):
            x = np.ones(length, np.float32)
            x[position] = bad
            view = unaligned(x, position % 5)
            assert not _native.all_finite(view)
            assert _native.first_non_finite(view) == position


@pytest.mark.parametrize("position", [0, 8191, 8192, 8193, 16383, 16384, 17000])
def test_finds_the_first_bad_value_across_blocks(position):
    x = np.zeros(17001, np.float32)
    x[position:] = np.nan
    assert _native.first_non_finite(x) == position


def test_extreme_but_finite_values_are_finite():
    smallest_normal = np.finfo(np.float32).tiny
    values = np.array([0.0, -0.0, SMALLEST_DENORMAL, smallest_normal, FLOAT32_MAX], np.float32)
    assert _native.all_finite(np.concatenate([values, -values]))
    assert _native.all_finite(f32(0))
    assert _native.first_non_finite(f32(0)) == -1


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_agrees_with_numpy_on_any_bit_pattern(patterns):
    x = np.array(patterns, np.uint32).view(np.float32)
    assert _native.all_finite(x) == bool(np.isfinite(x).all())
