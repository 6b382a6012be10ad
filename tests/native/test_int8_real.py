"""Rounding with real scales and with random numbers: every kernel path and thread count against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower import _int8

ENGINES = [
    *(_int8.Engine(1, [], name) for name in _int8.available_kernels()),
    _int8.Engine(3),
]
UINT32 = np.uint64(2**32)


def mix(index, seed):
    """Return the 32-bit random numbers of positions (random24.h)."""
    x = (np.asarray(index, np.uint64) * np.uint64(0x9E3779B1) + np.uint64(seed)) % UINT32
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) % UINT32
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) % UINT32
    return x ^ (x >> np.uint64(16))


def noise(pixels, batch, channels, seed, total, first):
    """Return the random numbers of a share's elements, (pixels, batch, channels)."""
    pixel, image, channel = np.meshgrid(
        np.arange(pixels), np.arange(batch), np.arange(channels), indexing="ij"
    )
    index = (pixel * total + first + image) * channels + channel
    lane = index % 16
    return (mix(index - lane, seed) + lane.astype(np.uint64) * np.uint64(0x9E3779B9)) % UINT32


def dithered(acc, shift, numbers):
    magnitude = np.abs(acc)
    added = magnitude + (numbers >> np.uint64(32 - shift)).astype(np.int64)
    return np.sign(acc) * np.minimum(added >> shift, 127)


@st.composite
def gradients(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 7)), draw(st.integers(1, 9)), draw(st.sampled_from([16, 48])))
    operands = [random.integers(-127, 128, shape).astype(np.int8) for _ in range(3)]
    bits = draw(st.integers(1, 21))
    coefficients = [random.integers(-(2**bits), 2**bits, shape[2]) for _ in range(2)]
    offset = random.integers(-(2 ** (bits + 7)), 2 ** (bits + 7), shape[2])
    return operands, [*coefficients, offset], draw(st.booleans())


def number_grid(mantissa_bits, scale):
    """Return the numbers with 2 exponent bits that are not negative: subnormal ones, and three octaves."""
    steps = 2**mantissa_bits
    octaves = [np.arange(steps, 2 * steps) * 2**exponent for exponent in range(3)]
    return np.concatenate([np.arange(steps), *octaves]) * 2**scale


def neighbours(values, mantissa_bits):
    """Return for each of (pixels, lanes) integers the numbers of its lane's group at its ends; equal ones saturate."""
    below, above = np.empty_like(values), np.empty_like(values)
    for lane, group in enumerate(np.abs(values).T):
        bits = int(group.max()).bit_length()
        scale = min(max(bits - mantissa_bits - 3, 0), 4 - mantissa_bits)
        numbers = number_grid(mantissa_bits, scale)
        below[:, lane] = numbers[np.searchsorted(numbers, group, "right") - 1]
        above[:, lane] = numbers[np.searchsorted(numbers, group).clip(max=len(numbers) - 1)]
    return below, above


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    channels=st.sampled_from([16, 48]),
    mantissa_bits=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    place=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_elements_are_the_numbers_of_their_group_on_either_side(
    shape, channels, mantissa_bits, seed, place
):
    """At random, a number follows from its place in the batch; either rounding leaves its results as they are."""
    height, width, batch = shape
    first, total = place[0], sum(place) + batch
    random = np.random.default_rng(seed)
    ends = random.integers(1, 128, (batch, channels))
    values = random.integers(-ends, ends + 1, (*shape, channels))
    magnitude = np.abs(values).reshape(height * width, -1)
    below, above = neighbours(values.reshape(height * width, -1), mantissa_bits)
    gap = np.maximum(above - below, 1)
    numbers = noise(height * width, batch, channels, seed, total, first) / 2.0**32
    part = (magnitude - below) / gap
    up = np.floor(part + numbers.reshape(part.shape)).astype(bool)
    half = np.where(below // gap % 2 == 0, part > 0.5, part >= 0.5)
    sign = np.sign(values)
    for engine in ENGINES:
        for rounds_up, place_of in ((half, ()), (up, (seed, total, first))):
            name = "round_elements_at_random" if place_of else "round_elements"
            out = values.astype(np.int8)
            getattr(_int8, name)(engine, out, mantissa_bits, *place_of)
            expected = np.where(rounds_up, above, below).reshape(values.shape)
            np.testing.assert_array_equal(out, sign * expected)
            again = out.copy()
            getattr(_int8, name)(engine, again, mantissa_bits, *place_of)
            np.testing.assert_array_equal(again, out)


def test_elements_at_random_have_no_bias():
    for value, mantissa_bits in ((65, 4), (-93, 4), (61, 2), (3, 1)):
        out = np.full((2, 1, 1001, 16), value, np.int8)
        # Otherwise the largest number of a group would be an end.
        out[1] = 127
        _int8.round_elements_at_random(ENGINES[0], out, mantissa_bits, 5, 1001, 0)
        out = out[0]
        # Four standard deviations of a mean over 16,016 elements at two ends.
        gap = np.ptp(out.astype(int))
        assert abs(out.mean() - value) <= 4 * gap / 2 / np.sqrt(out.size)


@given(
    case=gradients(),
    shift=st.integers(0, 30),
    seed=st.integers(0, 2**32 - 1),
    before=st.integers(0, 5),
    behind=st.integers(0, 5),
)
def test_a_dithered_gradient_is_its_magnitude_plus_a_random_number_shifted(
    case, shift, seed, before, behind
):
    (dy, x, gate), (scale_dy, scale_x, offset), gated = case
    pixels, batch, channels = dy.shape
    total = before + batch + behind
    own = np.where(gate > 0, dy, 0) if gated else dy
    acc = scale_dy * own.astype(np.int64) + scale_x * x.astype(np.int64) + offset
    expected = dithered(acc, shift, noise(pixels, batch, channels, seed, total, before))
    integers = [each.astype(np.int32) for each in (scale_dy, scale_x, offset)]
    for engine in ENGINES:
        out = np.empty_like(dy)
        largest = _int8.affine_gradient_at_random(
            engine,
            dy,
            x,
            gate if gated else None,
            *integers,
            out,
            shift,
            seed,
            batch,
            total,
            before,
        )
        assert largest == np.abs(acc).max()
        np.testing.assert_array_equal(out, expected, err_msg=engine.kernel)


def test_dithering_is_unbiased_and_independent_of_the_division_of_a_batch():
    """The mean over many elements of one value is that value; shares of a batch give the rows of the whole."""
    pixels, batch, channels, shift = 64, 12, 16, 12
    scale = np.full(channels, 37 * 2**shift // 100, np.int32)
    scale[1::2] = 99 * 2**shift // 100
    zeros = np.zeros(channels, np.int32)
    dy = np.ones((pixels, batch, channels), np.int8)
    dy[:, ::2] = -1
    engine = ENGINES[-1]

    def rounded(first, last):
        own = np.ascontiguousarray(dy[:, first:last])
        out = np.empty_like(own)
        _int8.affine_gradient_at_random(
            engine, own, own, None, scale, zeros, zeros, out, shift, 5, last - first, batch, first
        )
        return out

    whole = rounded(0, batch)
    np.testing.assert_array_equal(
        whole, np.concatenate([rounded(0, 5), rounded(5, 6), rounded(6, 12)], axis=1)
    )
    for sign, images in ((-1, whole[:, ::2]), (1, whole[:, 1::2])):
        # 3072 elements: the standard error of the mean is below 0.009.
        assert sign * images[..., ::2].mean() == pytest.approx(0.37, abs=0.035)
        assert sign * images[..., 1::2].mean() == pytest.approx(0.99, abs=0.02)


@st.composite
def accumulators(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.sampled_from([16, 48])))
    wide = draw(st.booleans())
    limit = draw(st.sampled_from([100, 2**20, 2**30])) if wide else 127
    acc = random.integers(-limit, limit + 1, shape).astype(np.int32 if wide else np.int8)
    by_image = random.uniform(0.0, 2.0, shape[1])
    scale = random.normal(size=shape[2]) / limit
    offset = random.normal(size=shape[2])
    other = random.integers(-127, 128, shape).astype(np.int8) if draw(st.booleans()) else None
    inverse = 127.0 / random.uniform(0.05, 4.0, shape[1])
    floats = [each.astype(np.float32) for each in (by_image, scale, offset, inverse)]
    return acc, floats, other, draw(st.booleans())


@given(accumulators())
def test_real_scales_are_float32_operations_in_one_order(case):
    acc, (by_image, scale, offset, inverse), other, relu = case
    rows = by_image[:, None]
    other_by_image = (by_image * np.float32(0.3)).astype(np.float32)
    value = (acc.astype(np.float32) * rows) * scale + offset
    if other is not None:
        value = value + other.astype(np.float32) * other_by_image[:, None]
    if relu:
        value = np.maximum(value, np.float32(0.0))
    expected = np.clip(np.rint(value * inverse[:, None]), -127, 127).astype(np.int8)
    if relu:
        expected = np.where((value > 0) & (expected == 0), 1, expected)
    added = (None, None) if other is None else (other, other_by_image)
    for engine in ENGINES:
        out, largest = np.empty(acc.shape, np.int8), np.empty(len(by_image), np.float32)
        _int8.affine_real(engine, acc, by_image, scale, offset, *added, out, inverse, largest, relu)
        np.testing.assert_array_equal(out, expected, err_msg=engine.kernel)
        np.testing.assert_array_equal(largest, np.abs(value).max(axis=(0, 2)))
        # The search alone writes nothing else.
        again = np.empty_like(largest)
        _int8.affine_real(engine, acc, by_image, scale, offset, *added, None, None, again, relu)
        np.testing.assert_array_equal(again, largest)


def test_a_convolution_writes_its_accumulators_beside_the_rounded_result():
    random = np.random.default_rng(0)
    for engine in ENGINES:
        for size, kernel in ((12, 3), (5, 1), (2, 2)):
            plan = _int8.Convolution(4, size, size, 16, 24, kernel, kernel)
            x, weight = (
                random.integers(-9, 10, shape).astype(np.int8)
                for shape in (plan.input_shape, plan.weight_shape)
            )
            weight[..., 24:] = 0
            workspace = np.empty(plan.workspace_bytes(engine), np.uint8)
            alone = np.empty(plan.output_shape, np.int32)
            beside = np.empty_like(alone)
            rounded, again = (np.empty(plan.output_shape, np.int8) for _ in range(2))
            plan.forward(engine, x, weight, None, alone, workspace)
            plan.forward(engine, x, weight, None, rounded, workspace, False, 4)
            largest = plan.forward(
                engine, x, weight, None, again, workspace, False, 4, 0, False, beside
            )
            assert largest == np.abs(alone).max()
            np.testing.assert_array_equal(beside, alone)
            np.testing.assert_array_equal(again, rounded)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shift": 31}, "shift"),
        ({"batch": 5}, "batch"),
        ({"first": 1}, "first"),
        ({"first": -1}, "first"),
        ({"scale_x": np.full(16, 2**22, np.int32)}, "scale_x"),
        ({"x": np.zeros((2, 3, 16), np.int8)}, "x"),
    ],
)
def test_arguments_of_a_dithered_gradient_are_checked(change, named):
    zeros = np.zeros(16, np.int32)
    tensor = np.zeros((4, 3, 16), np.int8)
    arguments = {
        "dy": tensor, "x": tensor, "gate": None, "scale_dy": zeros, "scale_x": zeros,
        "offset": zeros, "out": np.empty_like(tensor), "shift": 3, "seed": 1, "batch": 3,
        "total": 3, "first": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        _int8.affine_gradient_at_random(ENGINES[0], **(arguments | change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale": np.zeros(8, np.float32)}, "scale"),
        ({"offset": np.zeros(32, np.float32)}, "offset"),
        (
            {
                "by_image": np.zeros(5, np.float32),
                "inverse": np.ones(5, np.float32),
                "largest": None,
            },
            "by_image",
        ),
        ({"inverse": None}, "inverse"),
        ({"other": np.zeros((4, 3, 16), np.int8)}, "other"),
        ({"largest": np.zeros(2, np.float32)}, "largest"),
        ({"out": np.zeros((2, 3, 16), np.int8)}, "out"),
        ({"acc": np.zeros((4, 3, 16), np.int64)}, "acc"),
    ],
)
def test_arguments_of_real_scales_are_checked(change, named):
    arguments = {
        "acc": np.zeros((4, 3, 16), np.int32), "by_image": np.ones(3, np.float32),
        "scale": np.ones(16, np.float32), "offset": np.zeros(16, np.float32), "other": None,
        "other_by_image": None, "out": np.empty((4, 3, 16), np.int8),
        "inverse": np.ones(3, np.float32), "largest": np.empty(3, np.float32),
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        _int8.affine_real(ENGINES[0], **(arguments | change))
