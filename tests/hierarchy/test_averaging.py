"""Weighted aggregation of models (F8) against float64 NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.hierarchy.averaging import (
    average_tensors,
    first_non_finite,
    non_finite_tensors,
    weighted_average,
)
from tests.one_line import refused

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (4, 5), (2, 3, 4, 1), (8193,)]


def model(rng, dtype=np.float32):
    return {str(shape): np.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES}


@settings(max_examples=30)
@given(
    st.integers(1, 8)
    .flatmap(lambda n: st.lists(st.floats(0, 1e4), min_size=n, max_size=n))
    .filter(sum),
    st.integers(0, 2**32 - 1),
    st.sampled_from([np.float16, np.float32, np.float64, ">f4", np.complex64]),
)
def test_is_the_weighted_mean(weights, seed, dtype):
    rng = np.random.default_rng(seed)
    models = [model(rng, dtype) for _ in weights]
    result = weighted_average(models, weights)
    precision = max(1e-6, 2 * float(np.finfo(np.dtype(dtype).newbyteorder("=")).eps))
    assert list(result) == list(models[0])
    for name, tensor in result.items():
        stacked = np.stack([m[name].astype(np.complex128) for m in models])
        shares = np.array(weights) / np.sum(weights)
        expected = np.tensordot(shares, stacked, axes=1)
        assert tensor.shape == models[0][name].shape
        assert tensor.dtype == models[0][name].dtype
        scale = np.tensordot(shares, np.abs(stacked), axes=1)
        assert np.all(np.abs(tensor - expected) <= precision * scale + 1e-7 * (dtype == np.float16))


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_equal_inputs_in_equal_order_give_equal_bits(num_models, seed):
    rng = np.random.default_rng(seed)
    models = [model(rng) for _ in range(num_models)]
    weights = list(rng.integers(1, 1000, num_models))
    first = weighted_average(models, weights)
    second = weighted_average([dict(m) for m in models], weights)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.mark.parametrize(
    ("models", "weights", "others", "other_weights"),
    [
        ("a", [17], "a", [1]),
        ("abc", [1, 2, 5], "abc", [16, 32, 80]),
        ("abc", [1, 0, 1], "ac", [1, 1]),
    ],
)
def test_proportions_of_weights_above_zero_decide_every_bit(models, weights, others, other_weights):
    made = {name: model(np.random.default_rng(ord(name))) for name in "abc"}
    ours = weighted_average([made[name] for name in models], weights)
    theirs = weighted_average([made[name] for name in others], other_weights)
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes()
        assert models != "a" or np.array_equal(ours[name], made["a"][name])


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, bool])
def test_integer_tensors_keep_their_largest_value(dtype):
    models = [
        {"num_batches_tracked": np.array(n, dtype), "mask": np.array([n, 1, 0], dtype)}
        for n in (0, 1, 1)
    ]
    result = weighted_average(models, [3, 0, 1])
    assert result["num_batches_tracked"] == 1
    assert result["num_batches_tracked"].shape == ()
    assert result["mask"].dtype == dtype
    np.testing.assert_array_equal(result["mask"], np.array([1, 1, 0], dtype))


def test_large_counters_are_exact():
    models = [{"n": np.array(2**62 + k)} for k in (1, 3, 2)]
    assert weighted_average(models, [1, 1, 1])["n"] == 2**62 + 3


def test_strided_fortran_and_read_only_tensors():
    rng = np.random.default_rng(1)
    base = rng.standard_normal((6, 4)).astype(np.float32)
    frozen = base[::2].copy()
    frozen.flags.writeable = False
    models = [{"w": base[::2]}, {"w": np.asfortranarray(base[1::2])}, {"w": frozen}]
    expected = (2 * base[::2].astype(np.float64) + base[1::2]) / 3
    np.testing.assert_allclose(
        weighted_average(models, [1, 1, 1])["w"], expected, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("models", "named"),
    [
        ([{"w": 1.0, "b": 1.0}, {"w": 1.0}], ("'b'", "0", "1")),
        ([{"w": 1.0}, {"w": 1.0}, {"w": 1.0, "x": 1.0}], ("'x'", "2", "0")),
        ([{"w": [1.0, 2.0]}, {"w": [[1.0, 2.0]]}], ("'w'", "float64[1, 2]", "float64[2]")),
        ([{"w": [1.0]}, {"w": [1]}], ("'w'", "int64[1]", "float64[1]")),
    ],
)
def test_refuses_models_that_differ_and_names_the_tensor(models, named):
    arrays = [{name: np.array(value) for name, value in m.items()} for m in models]
    refused(lambda: weighted_average(arrays, [1] * len(arrays)), *named)


@pytest.mark.parametrize(
    ("num_models", "weights", "named"),
    [
        (0, [], "0"),
        (2, [1], "2"),
        (2, [1, -1], "weights[1]"),
        (2, [float("nan"), 1], "weights[0]"),
        (1, [float("inf")], "weights[0]"),
        (2, [0, 0], "weights"),
    ],
)
def test_refuses_weights_that_make_no_mean(num_models, weights, named):
    models = [{"w": np.zeros(1, np.float32)}] * num_models
    refused(lambda: weighted_average(models, weights), named)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4", np.complex64])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_names_the_first_tensor_that_is_not_finite(dtype, bad):
    tensors = {name: np.zeros(size, dtype) for name, size in (("a", (2, 2)), ("b", 9), ("c", 4))}
    tensors = {"n": np.array(3), **tensors}
    assert first_non_finite(tensors) is None
    tensors["b"][4] = bad
    tensors["c"][0] = bad
    assert first_non_finite(tensors) == "b"


def test_finds_bad_values_in_strided_views_only_where_they_are():
    base = np.zeros(6, np.float32)
    base[1] = np.nan
    assert first_non_finite({"w": base[::2]}) is None
    assert first_non_finite({"w": base[1::2]}) == "w"


def test_the_average_of_empty_tensors_is_empty():
    assert average_tensors([np.empty((0, 3), np.float32)] * 2, [0.5, 0.5]).shape == (0, 3)


def test_a_large_model_has_the_bits_of_its_tensors_alone():
    rng = np.random.default_rng(3)
    models = [
        {
            "large": rng.standard_normal(2_200_000).astype(np.float32),
            "n": np.array(k),
            "small": rng.standard_normal(5),
        }
        for k in range(3)
    ]
    result = weighted_average(models, [1, 2, 4])
    assert list(result) == ["large", "n", "small"]
    for name in result:
        alone = weighted_average([{name: model[name]} for model in models], [1, 2, 4])[name]
        np.testing.assert_array_equal(result[name], alone)


def test_constants_that_are_not_finite_do_not_count() -> None:
    """An attention mask's -inf is no fault; a value that has become infinite, or another infinity, is one."""
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    weights = np.arange(4, dtype=np.float32)
    sent, trained = {"mask": mask, "w": weights}, {"mask": mask.copy(), "w": weights + 1}
    assert first_non_finite(trained, sent) is None
    assert first_non_finite(trained, non_finite_tensors(sent)) is None
    assert first_non_finite({"mask": mask}) == "mask"
    for place, value in (((0, 1), np.inf), ((1, 0), -np.inf), ((2, 2), np.nan)):
        changed = mask.copy()
        changed[place] = value
        assert first_non_finite({"mask": changed, "w": weights}, sent) == "mask"
    assert first_non_finite({"mask": mask.astype(np.float64)}, sent) == "mask"
    diverged = {"w": np.array([np.nan, 1.0], np.float32)}
    assert first_non_finite(diverged, diverged) == "w"
    assert first_non_finite({"w": np.full(4, np.nan, np.float32), "mask": mask}, sent) == "w"
