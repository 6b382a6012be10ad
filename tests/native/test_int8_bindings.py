"""socflower._int8: every kernel path against NumPy, any number of threads, and arguments that the contract excludes."""

import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower import _int8
from tests.one_line import refused
from tests.precision import numpy_kernels as nk
from tests.precision.numpy_kernels import padded, random_tensor, stride_of, unpadded

KERNELS = _int8.available_kernels()
THREADS = (1, 2, 3)
ROUNDINGS = (nk.NEAREST, nk.PSEUDO_STOCHASTIC)

many = settings(max_examples=30)
few = settings(max_examples=15)
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def engine(kernel, num_threads=1):
    return _int8.Engine(num_threads, kernel=kernel)


def all_engines():
    return [engine(kernel, num_threads) for kernel in KERNELS for num_threads in THREADS]


def workspace_for(plan, which):
    return np.empty(plan.workspace_bytes(which), np.uint8)


def values_like(draw_extreme, rng, shape, low=-127):
    """Return random values, or all of them at an end of the range."""
    if draw_extreme == "random":
        return random_tensor(rng, shape, low)
    return np.full(shape, 127 if draw_extreme == "high" else low)


@st.composite
def convolutions(draw):
    """Return (batch, in_h, in_w, in_c, out_c, kernel, stride, padding, groups, dilation) of every kind."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 4]))
    in_c, out_c = (
        groups * draw(st.sampled_from([1, 3, 4, 5, 8, 15, 16, 17, 33])) for _ in range(2)
    )
    # Depthwise, of multiplier 1 and 2.
    if draw(st.integers(0, 5)) == 0:
        groups = in_c
        out_c = in_c * draw(st.sampled_from([1, 1, 2]))
    size = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    kernel = tuple(
        draw(st.integers(1, min(4, s + 2 * p))) for s, p in zip(size, padding, strict=True)
    )
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = tuple(
        draw(st.integers(1, min(3, (s + 2 * p - 1) // max(1, k - 1)))) if k < s + 2 * p else 1
        for s, p, k in zip(size, padding, kernel, strict=True)
    )
    return draw(st.integers(1, 9)), *size, in_c, out_c, kernel, stride, padding, groups, dilation


def assert_rounded(run, exact, channels, shape, shift, rounding):
    """Require of `run(out)` the integers in int32 and, rounded, in int8, and their largest magnitude."""
    for dtype, expected in ((np.int32, exact), (np.int8, nk.round_shift(exact, shift, rounding))):
        out = np.full(shape, 9, dtype)
        assert run(out) == nk.largest_magnitude(exact)
        np.testing.assert_array_equal(unpadded(out, channels), expected)


def check_convolution(shape, seed, batch_block, extreme, activations, algorithm="auto"):
    batch, in_h, in_w, in_c, out_c, kernel, stride, padding, groups, *dilation = shape
    dilation = dilation[0] if dilation else (1, 1)
    rng = np.random.default_rng(seed)
    geometry = {"stride": stride, "padding": padding, "groups": groups, "dilation": dilation}
    x = values_like(extreme, rng, (in_h, in_w, batch, in_c), 0 if activations else -127)
    weight = values_like(extreme, rng, (*kernel, in_c // groups, out_c))
    bias = rng.integers(-(10**6), 10**6, out_c)
    mask = random_tensor(rng, x.shape)
    rounding = int(rng.integers(2))
    relu = bool(rng.integers(2))
    acc = nk.kept(nk.convolution(x, weight, **geometry) + bias, relu=relu)
    dy = values_like(extreme, rng, acc.shape)
    dx = nk.kept(nk.input_gradient(dy, weight, x.shape, **geometry), mask=mask)
    dw = nk.weight_gradient(x, dy, kernel, **geometry)
    shift, shift_x = (nk.shift_for(nk.largest_magnitude(each)) for each in (acc, dx))
    sizes = (batch, in_h, in_w, in_c, out_c, *kernel, *stride, *padding, groups)
    plan = _int8.Convolution(*sizes, min(batch_block, batch), algorithm, *dilation)
    assert plan.weight_shape == (*kernel, in_c // groups, stride_of(out_c))
    x8 = padded(x)
    weight8 = padded(weight)
    dy8 = padded(dy)
    mask8 = padded(mask)
    bias32 = padded(bias, np.int32)
    for which in all_engines():
        workspace = workspace_for(plan, which)

        def forward(out, which=which, workspace=workspace):
            settings_ = (activations, shift, rounding, relu)
            return plan.forward(which, x8, weight8, bias32, out, workspace, *settings_)

        def backward(out, which=which, workspace=workspace):
            return plan.input_gradient(
                which, dy8, weight8, out, workspace, shift_x, rounding, mask8
            )

        assert_rounded(forward, acc, out_c, dy8.shape, shift, rounding)
        assert_rounded(backward, dx, in_c, x8.shape, shift_x, rounding)
        got = np.full(plan.weight_shape, 9, np.int32)
        largest = plan.weight_gradient(which, x8, dy8, got, workspace, activations)
        assert largest == nk.largest_magnitude(dw)
        np.testing.assert_array_equal(unpadded(got, out_c), dw)


@many
@given(
    convolutions(),
    seeds,
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from(["random", "high", "low"]),
    st.booleans(),
)
def test_convolution_equals_numpy_on_every_path_and_number_of_threads(
    shape, seed, batch_block, extreme, activations
):
    check_convolution(shape, seed, batch_block, extreme, activations)


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 1, 1, 1025, 10, (1, 1), (1, 1), (0, 0), 1),  # linear
        (5, 4, 5, 16, 84, (4, 5), (1, 1), (0, 0), 1),  # linear over an image
        (4, 9, 8, 3, 20, (5, 5), (2, 2), (2, 2), 1),  # over patches
        (17, 8, 8, 48, 64, (3, 3), (1, 1), (1, 1), 1),  # where Winograd may pay
    ],
)
def test_layers_of_real_networks_equal_numpy(shape, activations):
    check_convolution(shape, 1, 0, "random", activations)


@few
@given(
    seeds,
    st.integers(1, 9),
    st.integers(3, 9),
    st.sampled_from([1, 5, 16, 33]),
    st.sampled_from(["random", "low"]),
)
def test_every_algorithm_has_the_same_bits(seed, batch, size, channels, extreme):
    shape = (batch, size, size + 1, channels, 18, (3, 3), (1, 1), (1, 1), 1)
    for algorithm in ("direct", "winograd"):
        check_convolution(shape, seed, 0, extreme, False, algorithm)


def test_says_which_algorithm_runs():
    for kernel in KERNELS:
        for name in ("direct", "winograd"):
            plan = _int8.Convolution(2, 8, 8, 16, 16, 3, 3, algorithm=name)
            for function in ("forward", "input_gradient", "weight_gradient"):
                assert plan.algorithm(engine(kernel), function) == name


@many
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 300), st.booleans(), seeds)
def test_gemm_equals_numpy_on_every_path(rows, cols, depth, activations, seed):
    rng = np.random.default_rng(seed)
    lhs = random_tensor(rng, (rows, depth), 0 if activations else -127)
    rhs = random_tensor(rng, (cols, depth))
    expected = lhs @ rhs.T
    for which in all_engines():
        out = np.full((rows, cols), 9, np.int32)
        _int8.gemm(
            which, lhs.astype(np.int8), rhs.astype(np.int8), out, rows, cols, depth, activations
        )
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_gemm_is_exact_at_the_deepest_sum_and_refuses_a_deeper_one(sign):
    depth = _int8.MAX_EXACT_DEPTH
    assert depth == 131071 == (2**31 - 1) // 127**2 - 2073
    lhs = np.full((2, depth + 1), 127, np.int8)
    rhs = np.full((3, depth + 1), sign * 127, np.int8)
    out = np.empty((2, 3), np.int32)
    for kernel in KERNELS:
        flat = (
            lhs.reshape(-1)[: 2 * depth].reshape(2, depth),
            rhs.reshape(-1)[: 3 * depth].reshape(3, depth),
        )
        _int8.gemm(engine(kernel), *flat, out, 2, 3, depth)
        np.testing.assert_array_equal(out, sign * 127 * 127 * depth)
        with pytest.raises(ValueError, match=r"depth 131072: .* at most 131071 are exact"):
            _int8.gemm(engine(kernel), lhs, rhs, out, 2, 3, depth + 1)


def test_deep_weight_gradient_is_exact_for_small_values_and_refused_for_large_ones():
    plan = _int8.Convolution(64, 64, 33, 16, 16, 1, 1)  # 135,168 products per sum
    rng = np.random.default_rng(3)
    x = random_tensor(rng, (64, 33, 64, 16)).astype(np.int8)
    small = np.where(rng.random(x.shape) < 0.05, random_tensor(rng, x.shape, -3, 3), 0).astype(
        np.int8
    )
    expected = x.reshape(-1, 16).astype(np.int64).T @ small.reshape(-1, 16)
    for kernel in KERNELS:
        which = engine(kernel)
        out = np.empty(plan.weight_shape, np.int32)
        workspace = workspace_for(plan, which)
        plan.weight_gradient(which, x, small, out, workspace)
        np.testing.assert_array_equal(out[0, 0], expected)
        with pytest.raises(OverflowError, match=r"int32|exact"):
            plan.weight_gradient(which, x, np.full_like(x, 127), out, workspace)


@st.composite
def poolings(draw):
    """Return (batch, in_h, in_w, channels, kernel, stride, padding)."""
    size = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    kernel = tuple(draw(st.integers(1, min(5, s))) for s in size)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    return (
        draw(st.integers(1, 5)),
        *size,
        draw(st.sampled_from([1, 3, 15, 16, 17, 40])),
        kernel,
        stride,
        padding,
    )


@many
@given(poolings(), seeds, st.booleans())
def test_pooling_equals_numpy_on_every_path_and_number_of_threads(shape, seed, few_values):
    batch, in_h, in_w, channels, kernel, stride, padding = shape
    window = (kernel, stride, padding)
    rng = np.random.default_rng(seed)
    low, high = (-1, 1) if few_values else (-127, 127)  # ties
    x = random_tensor(rng, (in_h, in_w, batch, channels), low, high)
    best, chosen = nk.max_pool(x, *window)
    dy = random_tensor(rng, best.shape)
    mask = random_tensor(rng, x.shape)
    sums = nk.window_sums(x, *window) * 1820
    dx_max = nk.kept(nk.max_pool_gradient(dy, chosen, *window, in_h, in_w), mask=mask)
    dx_mean = nk.kept(nk.window_sums_gradient(dy, *window, in_h, in_w) * 911, mask=mask)
    plan = _int8.Pooling(batch, in_h, in_w, channels, *kernel, *stride, *padding)
    assert plan.overlapping == (stride[0] < kernel[0] or stride[1] < kernel[1])
    x8 = padded(x)
    dy8 = padded(dy)
    mask8 = padded(mask)
    for which in all_engines():
        rounding = int(rng.integers(2))
        out = np.full(dy8.shape, 9, np.int8)
        argmax = np.full(dy8.shape, 9, np.uint8)
        plan.max(which, x8, out, argmax)
        np.testing.assert_array_equal(unpadded(out, channels), best)
        np.testing.assert_array_equal(argmax[..., :channels], chosen)
        for into in (np.full(x8.shape, 9, np.int8), None):
            assert plan.max_gradient(
                which, dy8, argmax, into, 1, rounding, mask8
            ) == nk.largest_magnitude(dx_max)
            if into is not None:
                np.testing.assert_array_equal(
                    unpadded(into, channels), nk.round_shift(dx_max, 1, rounding)
                )
        for into in (out, None):
            assert plan.average(which, x8, 1820, into, 13, rounding) == nk.largest_magnitude(sums)
        np.testing.assert_array_equal(unpadded(out, channels), nk.round_shift(sums, 13, rounding))
        for into in (np.full(x8.shape, 9, np.int8), None):
            assert plan.average_gradient(
                which, dy8, 911, into, 12, rounding, mask8
            ) == nk.largest_magnitude(dx_mean)
            if into is not None:
                np.testing.assert_array_equal(
                    unpadded(into, channels), nk.round_shift(dx_mean, 12, rounding)
                )


sizes = st.tuples(st.sampled_from([1, 2, 31, 683, 2049]), st.sampled_from([16, 48, 64]))
shifts = st.integers(0, 30)


@many
@given(sizes, shifts, st.sampled_from(ROUNDINGS), st.booleans(), st.booleans(), seeds)
def test_elementwise_functions_equal_numpy_on_every_path(size, shift, rounding, relu, masked, seed):
    rng = np.random.default_rng(seed)
    a, b, gate = (random_tensor(rng, size).astype(np.int8) for _ in range(3))
    mask = gate if masked else None
    wide = [array.astype(np.int64) for array in (a, b)]
    bits = rng.integers(0, 32, size)
    acc = rng.integers(-(2**bits) + 1, 2**bits).astype(np.int32)
    shift_a, shift_b = (int(s) for s in rng.integers(0, 21, 2))
    scale, other = (rng.integers(-(2**22) + 1, 2**22, size[1]).astype(np.int32) for _ in range(2))
    offset = rng.integers(-(2**29) + 1, 2**29, size[1]).astype(np.int32)
    gated = np.where(gate > 0, wide[0], 0) if masked else wide[0]
    cases = {
        "requantise": (
            nk.kept(acc.astype(np.int64), relu, mask),
            lambda e, out: _int8.requantise(e, acc, out, shift, rounding, relu, mask),
        ),
        "add": (
            nk.kept((wide[0] << shift_a) + (wide[1] << shift_b), relu, mask),
            lambda e, out: _int8.add(e, a, shift_a, b, shift_b, out, shift, rounding, relu, mask),
        ),
        "affine": (
            nk.kept(scale * wide[0] + offset, relu),
            lambda e, out: _int8.affine(e, a, scale, offset, out, shift, rounding, relu),
        ),
        "affine_gradient": (
            scale * gated + other * wide[1] + offset.astype(np.int64),
            lambda e, out: _int8.affine_gradient(
                e, a, b, mask, scale, other, offset, out, shift, rounding
            ),
        ),
    }
    for which in all_engines():
        for name, (exact, run) in cases.items():
            out = np.full(size, 9, np.int8)
            assert run(which, out) == run(which, None) == nk.largest_magnitude(exact), name
            np.testing.assert_array_equal(out, nk.round_shift(exact, shift, rounding), name)
        sum_a, sum_ab = np.full((2, size[1]), 9, np.int64)
        _int8.channel_sums(which, a, b, mask, sum_a, sum_ab)
        np.testing.assert_array_equal(sum_a, gated.sum(axis=0))
        np.testing.assert_array_equal(sum_ab, (gated * wide[1]).sum(axis=0))
        weight = b.copy()
        _int8.update_weight(which, weight, acc, shift, rounding)
        np.testing.assert_array_equal(
            weight,
            np.clip(wide[1] - nk.round_shift(acc.astype(np.int64), shift, rounding), -127, 127),
        )


@few
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(-12, 6),
    seeds,
)
def test_quantise_equals_numpy_on_every_path(batch, channels, height, width, exponent, seed):
    rng = np.random.default_rng(seed)
    shape = (batch, channels, height, width)
    real = (rng.integers(-600, 600, shape) * 2.0 ** (exponent - 1)).astype(
        np.float32
    )  # half of them are ties
    real[rng.random(shape) < 0.05] = 1e30
    expected = nk.quantise(real, exponent).transpose(2, 3, 0, 1)
    kernel = (min(3, height + 2), min(3, width + 2))
    stride = (int(rng.integers(1, 3)), 1)
    patches = np.concatenate([w for _, _, w in nk.taps(expected, kernel, stride, (1, 1))], axis=-1)
    plan = _int8.Convolution(batch, height, width, channels, 8, *kernel, *stride, 1, 1)
    flat = np.resize(real, (3, 16))
    for which in all_engines():
        out = np.full((height, width, batch, stride_of(channels)), 9, np.int8)
        _int8.quantise_images(which, real, out, batch, channels, height, width, exponent)
        np.testing.assert_array_equal(unpadded(out, channels), expected)
        out = np.full((*patches.shape[:3], stride_of(patches.shape[3])), 9, np.int8)
        workspace = np.full(_int8.patch_images_bytes(plan), 9, np.uint8)
        _int8.quantise_patches(which, plan, real, out, workspace, exponent)
        np.testing.assert_array_equal(unpadded(out, patches.shape[3]), patches)
        out = np.full((3, 16), 9, np.int8)
        _int8.quantise(which, flat, out, exponent)
        np.testing.assert_array_equal(out, nk.quantise(flat, exponent))


@few
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 31), seeds)
def test_moments_and_channels_equal_numpy_on_every_path(rows, channels, bits, seed):
    rng = np.random.default_rng(seed)
    shape = (rows, stride_of(channels))
    acc = rng.integers(-(2**bits) + 1, 2**bits, shape).astype(np.int32)
    shift = max(0, bits - 20)
    exact = acc.astype(np.int64)
    kept = (exact + (1 << shift >> 1)) >> shift
    real = rng.standard_normal(shape).astype(np.float32)
    largest = np.empty(shape[1], np.float32)
    _int8.largest_by_channel(real, largest)
    np.testing.assert_array_equal(largest, np.abs(real).max(axis=0))
    inverse = np.float32(127.0) / largest
    assert _int8.sum_of_magnitudes(acc) == np.abs(exact).sum()
    assert (
        _int8.sum_of_magnitudes(acc.astype(np.int8))
        == np.abs(acc.astype(np.int8).astype(int)).sum()
    )
    for which in all_engines():
        sums = np.full((2, shape[1]), 9, np.int64)
        ends = np.full((2, shape[1]), 9, np.int32)
        _int8.channel_moments(which, acc, shift, *sums, *ends)
        np.testing.assert_array_equal(sums, [kept.sum(axis=0), (kept * kept).sum(axis=0)])
        np.testing.assert_array_equal(ends, [acc.min(axis=0), acc.max(axis=0)])
        _int8.channel_largest(which, acc, None, ends[0])
        np.testing.assert_array_equal(ends[0], np.abs(acc).max(axis=0))
        offset = np.linspace(-9, 9, shape[1], dtype=np.float32)
        made = np.full((2, *shape), 9, np.int8)
        by_channel = (inverse * 2.0**-bits, offset, inverse, offset)
        _int8.normalise(which, acc, *map(np.float32, by_channel), 0.25, *made, relu=True)
        value = acc.astype(np.float32)
        own = value * np.float32(by_channel[0]) + offset
        v = np.maximum(value * inverse + offset, 0)
        nearest = np.clip(np.rint(v * np.float32(0.25)), -127, 127)
        np.testing.assert_array_equal(made[0], np.clip(np.rint(own), -127, 127))
        np.testing.assert_array_equal(made[1], np.where((v > 0) & (nearest == 0), 1, nearest))
        out = np.full(shape, 9, np.int8)
        _int8.quantise_by_channel(which, real, inverse, out)
        np.testing.assert_array_equal(out, np.clip(np.rint(real * inverse), -127, 127))


@few
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 40), st.booleans(), seeds)
def test_rounding_by_channel_is_of_the_whole_batch_on_every_path(
    pixels, batch, channels, gated, seed
):
    rng = np.random.default_rng(seed)
    total = batch + int(rng.integers(0, 4))
    first = int(rng.integers(0, total - batch + 1))
    stride = stride_of(channels)
    acc = rng.integers(-(2**20), 2**20, (pixels, total, stride)).astype(np.int32)
    inverse = (rng.random(stride) * 2.0**-12).astype(np.float32)
    real = np.clip(acc.astype(np.float32) * inverse, -127, 127).astype(np.float64)
    down = np.floor(real)
    chance = random24(np.arange(acc.size), seed % 2**32).reshape(acc.shape) / 2.0**24
    expected = down + (chance < real - down)
    own = np.ascontiguousarray(acc[:, first : first + batch])
    a, gate = random_tensor(rng, (2, pixels, stride)).astype(np.int8)
    kept = np.where(gate > 0, a, 0) if gated else a
    for which in all_engines():
        out = np.full(own.shape, 9, np.int8)
        place = (seed % 2**32, batch, total, first)
        _int8.round_by_channel_at_random(which, own, inverse, out, *place)
        np.testing.assert_array_equal(out, expected[:, first : first + batch])
        largest = np.full(stride, 9, np.int32)
        _int8.channel_largest(which, a, gate if gated else None, largest)
        np.testing.assert_array_equal(largest, np.abs(kept.astype(int)).max(axis=0))


def test_moments_of_accumulators_beyond_the_exact_sums_are_refused():
    acc = np.full((4, 16), 1 << 22, np.int32)
    sums, ends = np.empty((2, 16), np.int64), np.empty((2, 16), np.int32)
    with pytest.raises(ValueError, match="magnitudes"):
        _int8.channel_moments(engine("portable"), acc, 1, *sums, *ends)


def random24(index, seed):
    """Return the numbers of native/int8/random24.h, in 0..2^24 - 1, from integers that cannot overflow."""
    x = (np.asarray(index, np.uint64) * np.uint64(0x9E3779B1) + np.uint64(seed)) % np.uint64(2**32)
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B) % np.uint64(2**32)
    x = (x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35) % np.uint64(2**32)
    return (x ^ (x >> np.uint64(16))) >> np.uint64(8)


def rounded_at_random(real, exponent, seed):
    """Return the int8 weight (kh, kw, in, stride) of float32 (out, kh, kw, in), in float64."""
    inside = padded(
        np.clip(real.astype(np.float64) / 2.0**exponent, -127, 127).transpose(1, 2, 3, 0),
        np.float64,
    )
    down = np.floor(inside)
    return down + (
        random24(np.arange(inside.size), seed).reshape(inside.shape) / 2.0**24 < inside - down
    )


def round_weights(which, real, exponent, seed):
    """Return what `_int8.round_weights` writes over nines."""
    out = np.full((*real.shape[1:], stride_of(len(real))), 9, np.int8)
    _int8.round_weights(which, real, out, by_channel(len(real), 2.0**-exponent), seed)
    return out


def by_channel(channels, value):
    """Return a value for each channel of a weight."""
    return np.full(stride_of(channels), value, np.float32)


weight_shapes = st.tuples(
    st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)
)


@many
@given(weight_shapes, st.integers(-60, 60), seeds)
def test_random_rounding_equals_numpy_on_every_path_and_number_of_threads(shape, exponent, seed):
    rng = np.random.default_rng(seed)
    real = np.ldexp(rng.uniform(-130, 130, shape), exponent).astype(np.float32)
    real[rng.random(shape) < 0.05] = 0.0
    expected = rounded_at_random(real, exponent, seed)
    for which in all_engines():
        np.testing.assert_array_equal(round_weights(which, real, exponent, seed), expected)


def test_random_rounding_has_the_value_as_its_expectation():
    """Over seeds, for fractions on either side of a half and of zero: within Bernstein's bound, e^-15 a value."""
    num_seeds = 3000
    fractions = np.array([2.0**-24, 0.001, 0.1, 0.25, 0.4999, 0.5, 0.75, 0.999])
    values = np.concatenate(
        [whole + sign * fractions for whole in (0, 1, -3, 125) for sign in (1, -1)]
    )
    real = np.float32(values).reshape(-1, 1, 1, 1)
    out = np.empty((1, 1, 1, stride_of(len(real))), np.int8)
    total = np.zeros(len(values))
    for seed in range(num_seeds):
        _int8.round_weights(engine("portable"), real, out, by_channel(len(real), 1.0), seed)
        total += out[0, 0, 0, : len(values)]
    variance = (real - np.floor(real)) * (1 - (real - np.floor(real)))
    bound = np.sqrt(2 * variance * 15 / num_seeds) + 2 * 15 / (3 * num_seeds)
    assert (np.abs(total / num_seeds - real.ravel()) <= bound.ravel()).all()


def test_seeds_that_follow_one_another_round_independently():
    real = np.full((64, 1, 1, 500), 0.5, np.float32)
    which = engine(KERNELS[-1])
    rounds = np.array(
        [round_weights(which, real, 0, seed).ravel() for seed in range(20)], np.float64
    )
    assert abs(rounds.mean() - 0.5) < 5 * np.sqrt(0.25 / rounds.size)
    correlations = np.corrcoef(rounds)[np.triu_indices(len(rounds), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(real.size)
    one = rounds[0] - rounds[0].mean()
    # Nor do neighbours.
    for lag in range(1, 65):
        assert abs((one[lag:] * one[:-lag]).mean()) < 0.25 * 5 / np.sqrt(real.size)


def test_random_rounding_saturates_and_takes_a_nan_for_zero():
    real = np.array(
        [1e30, -1e30, np.inf, -np.inf, np.nan, 127.5, -127.5, 200, 1e-45], np.float32
    ).reshape(-1, 1, 1, 1)
    for kernel in KERNELS:
        out = round_weights(engine(kernel), real, 0, 3)
        assert out[0, 0, 0].tolist() == [127, -127, 127, -127, 0, 127, -127, 127, *[0] * 8]


@many
@given(weight_shapes, seeds)
def test_an_exported_gradient_is_the_transposed_one_times_the_scale(shape, seed):
    """Bit for bit in float32, whatever the padding of the channels holds."""
    rng = np.random.default_rng(seed)
    gradient = rng.integers(-(2**31), 2**31, (*shape[1:], stride_of(shape[0]))).astype(np.int32)
    stride = stride_of(shape[0])
    scale = rng.choice([2.0**-30, 1e-6, -0.3, 0.0, 1e28], stride).astype(np.float32)
    real = gradient.astype(np.float32) * scale
    expected = real[..., : shape[0]].transpose(3, 0, 1, 2)
    for which in all_engines():
        outside = np.full(shape, 9, np.float32)
        _int8.export_gradient(which, gradient, outside, scale)
        np.testing.assert_array_equal(outside, expected)


def test_a_convolution_over_patches_is_the_convolution():
    rng = np.random.default_rng(5)
    images = rng.standard_normal((4, 3, 9, 8)).astype(np.float32)
    weight = random_tensor(rng, (5, 5, 3, 20))
    plan = _int8.Convolution(4, 9, 8, 3, 20, 5, 5, 2, 1, 2, 2)
    inner = _int8.Convolution(4, 5, 8, 75, 20, 1, 1)
    expected = nk.convolution(
        nk.quantise(images, -5).transpose(2, 3, 0, 1), weight, stride=(2, 1), padding=(2, 2)
    )
    for kernel in KERNELS:
        which = engine(kernel)
        patches = np.empty((5, 8, 4, 80), np.int8)
        out = np.empty((5, 8, 4, 32), np.int32)
        workspace = np.empty(
            max(_int8.patch_images_bytes(plan), inner.workspace_bytes(which)), np.uint8
        )
        _int8.quantise_patches(which, plan, images, patches, workspace, -5)
        inner.forward(which, patches, padded(weight).reshape(1, 1, 75, 32), None, out, workspace)
        np.testing.assert_array_equal(unpadded(out, 20), expected)


@many
@given(
    st.integers(1, 6), st.integers(1, 20), st.integers(-45, 30), st.sampled_from(ROUNDINGS), seeds
)
def test_softmax_gradient_equals_integer_python(batch, classes, exponent, rounding, seed):
    rng = np.random.default_rng(seed)
    logits = random_tensor(rng, (batch, classes))
    labels = rng.integers(0, classes, batch).astype(np.int32)
    out = np.full((1, 1, batch, stride_of(classes)), 9, np.int8)
    _int8.softmax_gradient(padded(logits)[None, None], exponent, labels, out, classes, rounding)
    np.testing.assert_array_equal(
        unpadded(out, classes)[0, 0], nk.softmax_gradient(logits, exponent, labels, rounding)
    )


def test_softmax_gradient_is_close_to_softmax_minus_one_hot():
    rng = np.random.default_rng(8)
    logits = random_tensor(rng, (200, 10))
    labels = rng.integers(0, 10, 200).astype(np.int32)
    out = np.empty((1, 1, 200, 16), np.int8)
    _int8.softmax_gradient(padded(logits)[None, None], -4, labels, out, 10)
    powers = np.exp(logits / 16.0)
    real = powers / powers.sum(axis=1, keepdims=True) - np.eye(10)[labels]
    assert np.abs(out[0, 0, :, :10] - real * 128).max() < 2.5  # the table of powers has 64 entries


def test_max_magnitude_of_numbers_and_of_what_is_none():
    assert _int8.max_magnitude(np.array([1.0, -3.5, 0.0], np.float32)) == 3.5
    assert _int8.max_magnitude(np.array([], np.float32)) == 0.0
    assert _int8.max_magnitude(np.array([1e-45, -0.0], np.float32)) == np.float32(1e-45)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        assert _int8.max_magnitude(np.array([1.0, bad, 2.0], np.float32)) == np.inf


# ------------------------------------------------------------------------------------------------- rounding


def uniform_accumulators(sign):
    """Return 2^20 neighbouring accumulators of one sign: every pattern of the bits that fall off, equally often."""
    return sign * np.arange(2**18, 2**18 + 2**20, dtype=np.int32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shift", [14, 15, 16])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_is_nearly_unbiased_on_either_side_of_zero(kernel, shift, sign, rounding):
    acc = uniform_accumulators(sign)
    out = np.empty(acc.shape, np.int8)
    _int8.requantise(engine(kernel), acc, out, shift, rounding)
    real = acc / 2.0**shift
    bias = float(np.mean(out - real))
    half_bits = 2.0 ** -(shift // 2 + 1)  # NITI's carry compares half the bits with the other half
    assert abs(bias) <= (half_bits if rounding == nk.PSEUDO_STOCHASTIC else 2.0**-shift)
    assert float(np.mean(np.floor(real) - real)) == pytest.approx(
        -0.5, abs=0.01
    )  # what F14 warns of
    assert np.abs(out - real).max() <= (1.0 if rounding == nk.PSEUDO_STOCHASTIC else 0.5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_is_symmetric_under_negation_and_saturates_at_127(kernel, rounding):
    rng = np.random.default_rng(1)
    acc = rng.integers(-(2**31) + 1, 2**31, 4096).astype(np.int32)
    acc[:8] = [255, -255, 254, 127, 128, 0, 2**31 - 1, 65535]
    for shift in range(31):
        plus, minus = np.empty((2, *acc.shape), np.int8)
        _int8.requantise(engine(kernel), acc, plus, shift, rounding)
        _int8.requantise(engine(kernel), -acc, minus, shift, rounding)
        np.testing.assert_array_equal(plus, -minus)
        assert plus.min() >= -127
        if shift == 1:
            assert list(plus[:2]) == [127, -127]  # 127.5 would round to 128


# ------------------------------------------------------------------------------------------------- threads


def test_the_interpreters_lock_is_released_while_computing():
    plan = _int8.Convolution(32, 32, 32, 64, 64, 3, 3, 1, 1, 1, 1)
    which = engine("portable")
    x = np.zeros((32, 32, 32, 64), np.int8)
    weight = np.zeros((3, 3, 64, 64), np.int8)
    out = np.empty_like(x)
    workspace = workspace_for(plan, which)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # the lock then changes hands only where it is given up

    def other_thread_runs_during_a_call():
        gate = threading.Lock()
        progress = []

        def work():
            with gate:
                progress.append(True)

        gate.acquire()
        thread = threading.Thread(target=work)
        thread.start()
        gate.release()
        plan.forward(which, x, weight, None, out, workspace)
        ran = bool(progress)
        thread.join()
        return ran

    try:
        assert any(other_thread_runs_during_a_call() for _ in range(100))
    finally:
        sys.setswitchinterval(interval)


def test_two_python_threads_may_share_an_engine():
    which = _int8.Engine(2)
    rng = np.random.default_rng(2)
    inputs = [random_tensor(rng, (64, 64)).astype(np.int8) for _ in range(3)]

    def is_right(x):
        expected = x.astype(np.int64).sum(axis=0)
        sums = np.empty((2, 64), np.int64)
        for _ in range(1500):
            _int8.channel_sums(which, x, x, None, sums[0], sums[1])
            if not np.array_equal(sums[0], expected):
                return False
        return True

    with ThreadPoolExecutor(len(inputs)) as threads:
        assert all(threads.map(is_right, inputs))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_threads": 0}, ("num_threads", "1 to 1024", "0")),
        ({"num_threads": 1025}, ("num_threads", "1025")),
        ({"num_threads": 2, "cores": [0]}, ("1 cores for 2 threads",)),
        ({"num_threads": 1, "cores": [-1]}, ("core -1",)),
        ({"num_threads": 1, "cores": [10**6]}, ("core 1000000",)),
        ({"kernel": "abacus"}, ("'abacus'", "portable")),
    ],
)
def test_engine_refuses_threads_and_paths_that_are_not_there(arguments, named):
    refused(lambda: _int8.Engine(**arguments), *named, error=(ValueError, RuntimeError))


def test_pinned_threads_compute_the_same():
    cores = sorted(os.sched_getaffinity(0))[:2]
    which = _int8.Engine(len(cores), cores)
    acc = np.arange(-800, 800, dtype=np.int32)
    out = np.empty((2, 1600), np.int8)
    _int8.requantise(which, acc, out[0], 4)
    _int8.requantise(engine("portable"), acc, out[1], 4)
    expected = nk.round_shift(acc.astype(np.int64), 4, 0)
    np.testing.assert_array_equal(out, [expected, expected])


def test_the_environment_chooses_the_path(monkeypatch):
    for kernel in KERNELS:
        monkeypatch.setenv("SOCFLOWER_KERNEL", kernel)
        assert _int8.Engine().kernel == kernel
    monkeypatch.setenv("SOCFLOWER_KERNEL", "abacus")
    with pytest.raises(ValueError, match=r"SOCFLOWER_KERNEL: .* 'abacus'"):
        _int8.Engine()
    assert _int8.Engine(kernel="portable").kernel == "portable"
    assert set(KERNELS) <= set(_int8.compiled_kernels())
