"""Kernels over rows and small matrices against NumPy's integers; the native tests have every path and rounding."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower import _int8
from socflower.precision.int8.fixed_point import channel_stride

ENGINE = _int8.Engine()
PARALLEL = _int8.Engine(num_threads=3)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def tensor(random: np.random.Generator, rows: int, channels: int, low: int = -127) -> np.ndarray:
    made = np.zeros((rows, channel_stride(channels)), dtype=np.int8)
    made[:, :channels] = random.integers(low, 128, (rows, channels))
    return made


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    batches=st.integers(1, 3),
    samples=st.integers(1, 4),
    rows=sizes,
    cols=sizes,
    depth=sizes,
    transposed=st.sampled_from(["neither", "right", "left"]),
)
def test_products_of_small_matrices_are_exact(
    seed: int, batches: int, samples: int, rows: int, cols: int, depth: int, transposed: str
) -> None:
    random = np.random.default_rng(seed)
    left = (depth, rows) if transposed == "left" else (rows, depth)
    right = (cols, depth) if transposed == "right" else (depth, cols)
    arrays = [tensor(random, batches * r * samples, c) for r, c in (left, right)]

    def matrices(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        cut = array[:, : shape[1]].reshape(batches, shape[0], samples, shape[1])
        return cut.transpose(0, 2, 1, 3).astype(np.int64)

    one, other = (
        matrices(array, shape) for array, shape in zip(arrays, (left, right), strict=True)
    )
    if transposed == "left":
        one = one.swapaxes(2, 3)
    if transposed == "right":
        other = other.swapaxes(2, 3)
    expected = np.zeros((batches * rows * samples, channel_stride(cols)), dtype=np.int32)
    expected[:, :cols] = (one @ other).transpose(0, 2, 1, 3).reshape(-1, cols)
    products = _int8.MatrixProducts(batches, samples, rows, cols, depth, transposed)  # type: ignore[arg-type]
    for engine in (ENGINE, PARALLEL):
        got = np.full_like(expected, 99)
        workspace = np.empty(products.workspace_bytes(engine), dtype=np.uint8)
        largest = products.multiply(engine, *arrays, got, workspace)
        np.testing.assert_array_equal(got, expected)
        assert largest == np.abs(expected).max()


@settings(max_examples=40, deadline=None)
@given(seed=seeds, rows=sizes, channels=sizes, slope=st.floats(0.0, 0.5))
def test_softmax_is_within_its_rounding_of_the_real_one(
    seed: int, rows: int, channels: int, slope: float
) -> None:
    x = tensor(np.random.default_rng(seed), rows, channels)
    powers = np.array([round(2**20 * math.exp(-slope * d)) for d in range(255)], dtype=np.int32)
    out = np.full_like(x, 99)
    _int8.softmax(ENGINE, x, powers, channels, out, 7)
    logits = slope * x[:, :channels].astype(np.float64)
    real = np.exp(logits - logits.max(axis=1, keepdims=True))
    real *= 2**7 / real.sum(axis=1, keepdims=True)
    # Half a unit of int8, that of 14 bits, and those of the powers.
    np.testing.assert_allclose(np.minimum(out[:, :channels], 127), np.minimum(real, 127), atol=0.52)
    assert not out[:, channels:].any()


@settings(max_examples=40, deadline=None)
@given(seed=seeds, rows=sizes, channels=sizes)
def test_the_gradient_of_a_row_s_scale_is_an_exact_sum(seed: int, rows: int, channels: int) -> None:
    random = np.random.default_rng(seed)
    dy, x = tensor(random, rows, channels), tensor(random, rows, channels)
    slope, mean = random.normal(0.0, 1e4, rows), random.normal(0.0, 40.0, rows)
    sums = np.empty((2, dy.shape[1]), dtype=np.int64)
    _int8.row_scale_gradient(PARALLEL, dy, x, slope, mean, sums[0], sums[1])
    wide = dy.astype(np.float64)
    terms = np.rint((wide * x - wide * mean[:, None]) * slope[:, None])
    np.testing.assert_array_equal(sums[0], terms.astype(np.int64).sum(axis=0))
    np.testing.assert_array_equal(sums[1], dy.astype(np.int64).sum(axis=0))


ROW = np.zeros((2, 16), dtype=np.int8)
ONES = np.ones(16)
TWO = np.ones(2)
REFUSED: dict[str, Callable[[], object]] = {
    "gamma * slope": lambda: _int8.row_affine(ENGINE, ROW, ONES, ONES, 1e8 * TWO, TWO, None),
    "slope": lambda: _int8.row_affine(ENGINE, ROW, ONES, ONES, np.ones(3), TWO, None),
    "offset": lambda: _int8.row_affine_gradient(
        ENGINE, ROW, ROW, ONES, ONES, TWO, TWO, 1e10 * TWO, None
    ),
    "powers": lambda: _int8.softmax(ENGINE, ROW, np.zeros(255, np.int32), 16, None),
    "channels": lambda: _int8.softmax(ENGINE, ROW, np.ones(255, np.int32), 0, None),
    "up, factor and drop": lambda: _int8.softmax_input_gradient_largest(
        ENGINE, ROW, ROW, 16, 15, 1
    ),
    "table": lambda: _int8.table_gradient(
        ENGINE, ROW, ROW, np.full(256, 2**24, dtype=np.int32), None
    ),
    "transposed": lambda: _int8.MatrixProducts(1, 1, 1, 1, 1, "both"),  # type: ignore[arg-type]
    "depth": lambda: _int8.MatrixProducts(1, 1, 1, 1, 2**20),
    "acc": lambda: _int8.scale_sums(ENGINE, np.zeros(3, dtype=np.int32), 1, 0),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_argument_that_would_leave_int32_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name.replace('*', '[*]')}"):
        REFUSED[name]()
