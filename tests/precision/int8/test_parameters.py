"""Weights from outside (F12): rounded without bias, by seed alone; gradients by the names and shapes of the module."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower import _int8
from socflower.errors import ConfigError, TrainingFailed
from socflower.precision import EngineSettings, Int8Model
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import as_channels_last, start_gradients, take_weights
from tests.precision.networks import IMAGE, NETWORKS, build

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

few = settings(max_examples=20)
seeds = st.integers(0, 2**32 - 1)


def model_of(module, **settings_):
    if isinstance(module, str):
        module = build(module)
    return Int8Model.from_module(
        module,
        input_shape=IMAGE,
        algorithm=HANDED_OUT_GRADIENTS,
        settings=EngineSettings(**settings_),
    )


def state_of(name, seed=0):
    return {key: value.numpy().copy() for key, value in build(name, seed).state_dict().items()}


def trained_of(state):
    return {key: array for key, array in state.items() if not key.endswith(STATISTICS)}


def take(model, state, seed):
    """Load and return (values, quanta) by name, as the module shapes them; a quantum of 0 is of what is not rounded."""
    take_weights(model.graph, model.parameters, model.engine, state, seed)
    quanta = {key: 2.0**weight.exponent for key, weight in model.parameters.weights.items()}
    return model.arrays(), {key: quanta.get(key, 0.0) for key in state}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_weight_is_a_quantum_away_and_vectors_are_taken_over_exactly(name):
    state = state_of(name, seed=5)
    model = model_of(name)
    for seed in (0, 1, -1, 2**40):
        got, quanta = take(model, state, seed)
        for key, array in trained_of(state).items():
            assert got[key].shape == array.shape
            distance = np.abs(got[key] - array.astype(np.float64))
            assert (distance < quanta[key]).all() if quanta[key] else not distance.any()


@pytest.mark.parametrize("name", ["plain", "separable"])
def test_the_mean_over_seeds_is_the_weight(name):
    """Within Bernstein's bound, which a value leaves by chance once in e^15; nearest rounding misses it (F12)."""
    num_seeds = 400
    state, model = state_of(name), model_of(name)
    total = {key: np.zeros(array.shape) for key, array in trained_of(state).items()}
    for seed in range(num_seeds):
        got, quanta = take(model, state, seed)
        for key in total:
            total[key] += got[key]
    nearest_misses = 0
    for key, quantum in quanta.items():
        if quantum:
            real = state[key] / quantum
            fraction = real - np.floor(real)
            bound = np.sqrt(2 * fraction * (1 - fraction) * 15 / num_seeds) + 2 * 15 / (
                3 * num_seeds
            )
            assert (np.abs(total[key] / quantum / num_seeds - real) <= bound).all(), key
            nearest_misses += int((np.abs(np.rint(real) - real) > bound).sum())
    assert nearest_misses > 100


@pytest.mark.parametrize("sign", [1, -1])
def test_what_moves_by_less_than_half_a_quantum_moves_the_mean(sign):
    """Nearest rounding would return the same weights for ever (F12)."""
    model = model_of("plain")
    state = state_of("plain")
    state["6.weight"] = np.full_like(state["6.weight"], sign * 0.01)
    state["6.weight"][0, 0] = 127 * 0.1  # a quantum of 0.125, of which 0.01 is 8 %
    got, quanta = take(model, state, 3)
    rounded = got["6.weight"].ravel()[1:]
    assert quanta["6.weight"] == 0.125
    assert set(np.unique(rounded)) == {0.0, sign * 0.125}
    assert abs(rounded.mean() - sign * 0.01) < 5 * 0.125 * np.sqrt(0.08 * 0.92 / rounded.size)


@few
@given(st.sampled_from(sorted(NETWORKS)), seeds, st.integers(-40, 40))
def test_weights_that_int8_holds_stay_as_they_are_whatever_the_seed(name, seed, exponent):
    rng = np.random.default_rng(seed)
    model, state = model_of(name), state_of(name)
    for key in model.parameters.weights:
        state[key] = np.ldexp(rng.integers(-127, 128, state[key].shape), exponent).astype(
            np.float32
        )
        state[key].flat[0] = np.ldexp(127.0, exponent)
    got, quanta = take(model, state, seed)
    for key in model.parameters.weights:
        assert quanta[key] == 2.0**exponent
        np.testing.assert_array_equal(got[key], state[key])


@few
@given(seeds, st.floats(-20, 20))
def test_the_exponent_is_the_smallest_that_the_largest_weight_fits(seed, magnitude):
    model, state = model_of("plain"), state_of("plain")
    rng = np.random.default_rng(seed)
    state["8.weight"] = (rng.standard_normal(state["8.weight"].shape) * 2.0**magnitude).astype(
        np.float32
    )
    _, quanta = take(model, state, seed)
    largest = float(np.abs(state["8.weight"]).max())
    assert 127 * quanta["8.weight"] / 2 < largest <= 127 * quanta["8.weight"]


def test_zeros_and_the_least_of_all_weights_are_taken():
    model, state = model_of("plain"), state_of("plain")
    state["0.weight"] = np.zeros_like(state["0.weight"])
    state["3.weight"] = np.full_like(state["3.weight"], 1e-45)
    got, quanta = take(model, state, 0)
    assert not got["0.weight"].any()
    assert quanta["3.weight"] == 2.0**-90
    assert np.abs(got["3.weight"]).max() <= 2.0**-90


# ------------------------------------------------------------------------------------- what decides a rounding


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seed_alone_decides_on_every_path_and_number_of_threads(name):
    state = state_of(name)
    expected = model_of(name)
    take(expected, state, 11)
    for kernel in _int8.available_kernels():
        for num_threads in (1, 3):
            model = model_of(name, kernel=kernel, num_threads=num_threads)
            take(model, state_of(name, seed=1), 12)  # what was there before does not matter
            take(model, state, 11)
            for key, weight in model.parameters.weights.items():
                np.testing.assert_array_equal(weight.data, expected.parameters.weights[key].data)
                outs = len(state[key])
                assert not weight.data[..., outs:].any(), "the padding of the channels"
    take(expected, state, 12)
    assert any(
        (model.parameters.weights[key].data != weight.data).any()
        for key, weight in expected.parameters.weights.items()
    )


def test_the_order_in_memory_and_the_float_type_do_not_matter():
    model, state = model_of("separable"), state_of("separable")
    expected, _ = take(model, state, 4)
    for change in (
        lambda array: array.astype(np.float64),
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
        lambda array: (
            np.moveaxis(np.moveaxis(array, 1, -1).copy(), -1, 1) if array.ndim == 4 else array
        ),
    ):
        take(model, state_of("separable", seed=2), 5)
        got, _ = take(model, {key: change(array) for key, array in state.items()}, 4)
        for key, array in expected.items():
            np.testing.assert_array_equal(got[key], array)


def test_the_arrays_are_neither_changed_nor_kept():
    model, state = model_of("normalised"), state_of("normalised")
    copies = {key: array.copy() for key, array in state.items()}
    expected, _ = take(model, state, 1)
    for key, array in state.items():
        np.testing.assert_array_equal(array, copies[key])
        array[...] = 0
    for key, array in model.arrays().items():
        np.testing.assert_array_equal(array, expected[key])


def test_channels_last_weights_are_read_where_they_lie():
    array = np.zeros((8, 3, 3, 4), np.float32)
    assert np.shares_memory(as_channels_last(array.transpose(0, 3, 1, 2), (8, 4, 3, 3)), array)
    linear = np.zeros((8, 20), np.float32)
    assert np.shares_memory(as_channels_last(linear, (8, 20, 1, 1)), linear)


def test_no_two_layers_round_alike_nor_one_a_few_elements_after_another():
    layers = [nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(6)]
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model = model_of(module)
    state = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    names = [f"{2 + index}.weight" for index in range(len(layers))]
    for key in names:
        state[key] = np.full_like(state[key], 0.5)
        state[key].flat[0] = 127.0
    take(model, state, 0)
    noise = [model.parameters.weights[key].data.ravel()[16:] - 0.5 for key in names]
    size = noise[0].size
    for index, one in enumerate(noise):
        for other in noise[index + 1 :]:
            for lag in range(-20, 21):
                low, high = max(0, lag), size + min(0, lag)
                correlation = (one[low:high] * other[low - lag : high - lag]).mean() / 0.25
                assert abs(correlation) < 6 / np.sqrt(size), lag


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", NETWORKS)
def test_running_statistics_are_taken_over_only_where_they_are_given(name):
    model, others = model_of(name), state_of(name)
    for key in others:
        if key.endswith(("running_mean", "running_var")):
            others[key] += 1.5
    before = model.arrays()
    got, _ = take(model, trained_of(others), 0)
    for key in got:
        if key.endswith(STATISTICS):
            np.testing.assert_array_equal(got[key], before[key])
    got, _ = take(model, others, 0)
    for key in got:
        if key.endswith(STATISTICS):
            np.testing.assert_array_equal(got[key], others[key])


@pytest.mark.parametrize("name", NETWORKS)
def test_every_trained_array_must_be_there(name):
    state, model = state_of(name), model_of(name)
    for key in trained_of(state):
        with pytest.raises(ConfigError, match=rf"weights: {key} of shape \(.*\) is missing"):
            take(model, {other: array for other, array in state.items() if other != key}, 0)


def misshapen(array):
    """Yield arrays of other shapes, those of as many elements first."""
    yield array.reshape(-1, 1)
    yield array[None]
    if len(set(array.shape)) > 1:
        yield np.moveaxis(array, 0, -1)
    yield np.concatenate([array, array])
    yield array[:0]
    yield np.float32(1.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_an_array_of_another_shape_is_refused_with_both_shapes(name):
    state, model = state_of(name), model_of(name)
    for key, array in state.items():
        if not key.endswith("num_batches_tracked"):
            for other in misshapen(array):
                with pytest.raises(
                    ConfigError, match=rf"weights: {key} has shape \(.*\), the network needs \(.*\)"
                ):
                    take(model, {**state, key: np.asarray(other)}, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", ["normalised", "separable"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_value_that_is_not_finite_fails_training_by_name(name, value):
    state, model = state_of(name), model_of(name)
    for key, array in state.items():
        if not key.endswith("num_batches_tracked"):
            spoilt = array.astype(np.float64)
            spoilt.flat[-1] = value
            with pytest.raises(TrainingFailed, match=rf"{key}: .*; lower the learning rate"):
                take(model, {**state, key: spoilt}, 0)


def test_weights_beyond_2_to_90_fail_training():
    state, model = state_of("plain"), model_of("plain")
    state["3.weight"][1, 2, 0, 0] = -(2.0**90)
    take(model, state, 0)
    state["3.weight"][1, 2, 0, 0] = -1.01 * 2.0**90
    with pytest.raises(TrainingFailed, match=r"3\.weight: a weight has reached 1\.25e\+27"):
        take(model, state, 0)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", NETWORKS)
def test_every_trained_parameter_and_nothing_else_gets_a_gradient_of_zeros(name):
    model, module = model_of(name), build(name)
    gradients = start_gradients(model.graph, model.parameters)
    assert set(gradients) == {key for key, _ in module.named_parameters()}
    for key, parameter in module.named_parameters():
        assert gradients[key].dtype == np.float32
        assert len(gradients[key]) == len(parameter)
        assert gradients[key].reshape(parameter.shape).shape == tuple(parameter.shape)
        assert not gradients[key].any()


def test_the_gradients_are_views_of_what_the_engine_writes():
    model = model_of("plain")
    gradients = start_gradients(model.graph, model.parameters)
    for key, weight in model.parameters.weights.items():
        weight.gradient[...] = np.arange(weight.gradient.size).reshape(weight.gradient.shape)
        np.testing.assert_array_equal(gradients[key], weight.gradient.transpose(0, 3, 1, 2))
    for key, vector in model.parameters.vectors.items():
        vector.gradient[0] = 7.0
        assert gradients[key][0] == 7.0
