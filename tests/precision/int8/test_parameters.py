"""Weights from outside (F12): rounded without bias, by seed alone; gradients by the names and shapes of the module."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import as_channels_last, start_gradients, take_weights
from tests.one_line import refused
from tests.precision.networks import NETWORKS, REACH, assert_same, int8, state_of, trained_of

few = settings(max_examples=10)
seeds = st.integers(0, 2**32 - 1)


def take(model, state, seed):
    """Load and return (values, quanta) by name, as the module shapes them; a quantum of 0 is of what is not rounded."""
    take_weights(model.graph, model.parameters, model.engine, state, seed)
    quanta = {key: 2.0**weight.exponent for key, weight in model.parameters.weights.items()}
    return model.arrays(), {key: quanta.get(key, 0.0) for key in state}


def model_of(name, **settings_):
    return int8(name, HANDED_OUT_GRADIENTS, **settings_)


@pytest.mark.parametrize("name", [*NETWORKS, "squeezed", "decoded", "sequence"])
def test_no_weight_is_a_quantum_away_and_vectors_are_taken_over_exactly(name):
    state = state_of(name, seed=5)
    model = model_of(name)
    for seed in (0, -1, 2**40):
        got, quanta = take(model, state, seed)
        for key, array in trained_of(state).items():
            assert got[key].shape == array.shape
            distance = np.abs(got[key] - array.astype(np.float64))
            assert (distance < quanta[key]).all() if quanta[key] else not distance.any()


@pytest.mark.parametrize("name", ["plain", "separable"])
def test_the_mean_over_seeds_is_the_weight(name):
    """Within Bernstein's bound, which a value leaves by chance once in e^15; nearest rounding misses it (F12)."""
    num_seeds = 400
    nearest_misses = 0
    state = state_of(name)
    model = model_of(name)
    total = {key: np.zeros(array.shape) for key, array in trained_of(state).items()}
    for seed in range(num_seeds):
        got, quanta = take(model, state, seed)
        for key in total:
            total[key] += got[key]
    for key in model.parameters.weights:
        real = state[key] / quanta[key]
        part = real - np.floor(real)
        bound = np.sqrt(2 * part * (1 - part) * 15 / num_seeds) + 2 * 15 / (3 * num_seeds)
        assert (np.abs(total[key] / quanta[key] / num_seeds - real) <= bound).all(), key
        nearest_misses += int((np.abs(np.rint(real) - real) > bound).sum())
    assert nearest_misses > 100


@few
@given(st.sampled_from(sorted(NETWORKS)), seeds, st.integers(-40, 40))
def test_weights_that_int8_holds_stay_as_they_are_whatever_the_seed(name, seed, exponent):
    rng = np.random.default_rng(seed)
    model = model_of(name)
    state = state_of(name)
    for key in model.parameters.weights:
        integers = rng.integers(-127, 128, state[key].shape)
        # In every channel, since a channel may have a unit of its own.
        integers.reshape(len(integers), -1)[:, 0] = 127
        state[key] = np.ldexp(integers, exponent).astype(np.float32)
    got, quanta = take(model, state, seed)
    for key in model.parameters.weights:
        assert quanta[key] == 2.0**exponent
        np.testing.assert_array_equal(got[key], state[key])


@few
@given(seeds, st.floats(-20, 20))
def test_the_exponent_is_the_smallest_that_the_largest_weight_fits(seed, magnitude):
    model = model_of("plain")
    state = state_of("plain")
    state["8.weight"] *= np.float32(2.0**magnitude)
    _, quanta = take(model, state, seed)
    largest = float(np.abs(state["8.weight"]).max())
    assert 127 * quanta["8.weight"] / 2 < largest <= 127 * quanta["8.weight"]


def test_zeros_and_the_least_of_all_weights_are_taken():
    model = model_of("plain")
    state = state_of("plain")
    state["0.weight"] = np.zeros_like(state["0.weight"])
    state["3.weight"] = np.full_like(state["3.weight"], 1e-45)
    got, quanta = take(model, state, 0)
    assert not got["0.weight"].any()
    assert quanta["3.weight"] == 2.0**-90
    assert np.abs(got["3.weight"]).max() <= 2.0**-90


# ------------------------------------------------------------------------------------- what decides a rounding


@pytest.mark.parametrize("name", [*NETWORKS, "squeezed", "decoded", "sequence"])
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
                assert not weight.data[..., len(state[key]) :].any(), "the padding of the channels"
    take(expected, state, 12)
    for key, weight in expected.parameters.weights.items():
        if weight.data.size > 500:
            assert (model.parameters.weights[key].data != weight.data).any()


def test_the_order_in_memory_and_the_float_type_do_not_matter():
    model = model_of("separable")
    state = state_of("separable")
    expected, _ = take(model, state, 4)
    for change in (
        lambda array: array.astype(np.float64),
        np.asfortranarray,
        lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    ):
        take(model, state_of("separable", seed=2), 5)
        got, _ = take(model, {key: change(array) for key, array in state.items()}, 4)
        assert_same(got, expected)


def test_the_arrays_are_neither_changed_nor_kept():
    model = model_of("normalised")
    state = state_of("normalised")
    expected, _ = take(model, state, 1)
    assert_same(state, state_of("normalised"))
    for array in state.values():
        array[...] = 0
    assert_same(model.arrays(), expected)


def test_channels_last_weights_are_read_where_they_lie():
    array = np.zeros((8, 3, 3, 4), np.float32)
    assert np.shares_memory(as_channels_last(array.transpose(0, 3, 1, 2), (8, 4, 3, 3)), array)
    linear = np.zeros((8, 20), np.float32)
    assert np.shares_memory(as_channels_last(linear, (8, 20, 1, 1)), linear)


def test_no_two_layers_round_alike_nor_one_a_few_elements_after_another():
    layers = [nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(6)]
    model = model_of(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), shape=(16, 4, 4)
    )
    state = {f"{index}.weight": np.full((16, 16, 3, 3), 0.5, np.float32) for index in range(6)}
    for array in state.values():
        array.flat[0] = 127.0
    take(model, state, 0)
    noise = [weight.data.ravel()[16:] - 0.5 for weight in model.parameters.weights.values()]
    size = noise[0].size
    for one, other in combinations(noise, 2):
        for lag in range(-20, 21):
            low = max(0, lag)
            high = size + min(0, lag)
            correlation = (one[low:high] * other[low - lag : high - lag]).mean() / 0.25
            assert abs(correlation) < 6 / np.sqrt(size), lag


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_running_statistics_are_taken_over_only_where_they_are_given(name):
    model = model_of(name)
    others = state_of(name)
    running = [key for key in others if key.endswith(("running_mean", "running_var"))]
    for key in running:
        others[key] += 1.5
    for state, expected in ((trained_of(others), model.arrays()), (others, others)):
        got, _ = take(model, state, 0)
        for key in running:
            np.testing.assert_array_equal(got[key], expected[key])


@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_an_array_that_is_missing_or_of_another_shape_is_refused(name):
    state = state_of(name)
    model = model_of(name)
    for key, array in state.items():
        without = {other: each for other, each in state.items() if other != key}
        if key in trained_of(state):
            refused(lambda without=without: take(model, without, 0), key, "missing")
        if not key.endswith("num_batches_tracked"):
            for other in (array[None], np.concatenate([array, array]), np.float32(1.0)):
                changed = {**state, key: np.asarray(other)}
                shapes = np.shape(other), array.shape
                refused(lambda changed=changed: take(model, changed, 0), key, *shapes)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e300])
@pytest.mark.parametrize("name", ["normalised", "separable"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_value_that_is_not_finite_fails_training_by_name(name, value):
    state = state_of(name)
    model = model_of(name)
    for key, array in state.items():
        if not key.endswith("num_batches_tracked"):
            spoilt = {**state, key: array.astype(np.float64)}
            spoilt[key].flat[-1] = value
            call = partial(take, model, spoilt, 0)
            refused(call, key, "lower the learning rate", error=TrainingFailed)


def test_weights_beyond_2_to_90_fail_training():
    state = state_of("plain")
    model = model_of("plain")
    state["3.weight"][1, 2, 0, 0] = -(2.0**90)
    take(model, state, 0)
    state["3.weight"][1, 2, 0, 0] = -1.01 * 2.0**90
    refused(lambda: take(model, state, 0), "3.weight", "1.25e+27", error=TrainingFailed)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_every_trained_parameter_and_nothing_else_gets_a_gradient_of_zeros(name):
    model = model_of(name)
    state = trained_of(state_of(name))
    gradients = start_gradients(model.graph, model.parameters)
    zeros = {key: np.zeros_like(array) for key, array in state.items()}
    assert_same({key: each.reshape(zeros[key].shape) for key, each in gradients.items()}, zeros)


def test_the_gradients_are_views_of_what_the_engine_writes():
    model = model_of("plain")
    gradients = start_gradients(model.graph, model.parameters)
    for key, weight in model.parameters.weights.items():
        weight.gradient[...] = np.arange(weight.gradient.size).reshape(weight.gradient.shape)
        np.testing.assert_array_equal(gradients[key], weight.gradient.transpose(0, 3, 1, 2))
    for key, vector in model.parameters.vectors.items():
        vector.gradient[0] = 7.0
        assert gradients[key][0] == 7.0
