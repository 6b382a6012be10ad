"""Accelerators for mixed precision: what the native one hands out, and what little another one needs."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.errors import TrainingFailed
from socflower.model_graph.random_state import forked_generator
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    NITI,
    EngineSettings,
    Int8Backend,
    NativeInt8Backend,
    StepResult,
    int8_algorithm,
)
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS, OutsideUpdate
from socflower.precision.int8.from_torch import capture_network
from tests.one_line import refused
from tests.precision.networks import (
    CLASSES,
    CORNERS,
    IMAGE,
    NETWORKS,
    SELDOM,
    STATISTICS,
    assert_same,
    batches,
    build,
    int8,
    state_of,
    trained_of,
)
from tests.precision.numpy_engine import NumpyTrainer


def built(name, algorithm=HANDED_OUT_GRADIENTS, **engine):
    backend = NativeInt8Backend(algorithm, EngineSettings(**{"rescaling": SELDOM, **engine}))
    backend.build(build(name), IMAGE)
    return backend


def exact_state(name, seed=0):
    """Return a state whose weights int8 holds, so that rounding them, at random or not, changes none."""
    state = state_of(name, seed)
    for key, array in state.items():
        if array.ndim > 1 and array.any():
            quantum = 2.0 ** np.ceil(np.log2(np.abs(array).max() / 127))
            state[key] = (np.rint(array / quantum) * quantum).astype(np.float32)
    return state


def step(backend, state, seed, batch=None, rate=0.1):
    """Load the state, train on a batch, and return copies of the gradients."""
    backend.load_weights(state, seed=seed)
    backend.train_step(*(batch or batches(1)[0]), learning_rate=rate, progress=0.0)
    gradients = backend.pseudo_gradient(state, learning_rate=rate)
    return {key: np.array(gradient) for key, gradient in gradients.items()}


class RecordingTrainer(NumpyTrainer):
    """The NumPy engine, which notes each mean gradient in place of following it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gradients = {}

    def update_weight(self, weight, gradient, exponent):
        name = next(name for name, other in self.weights.items() if other is weight)
        self.gradients[name] = gradient.transpose(3, 2, 0, 1) * 2.0**exponent * float(self.rate)

    def update_vector(self, name, gradient):
        self.gradients[name] = gradient * float(self.rate)

    def load(self, state):
        """Take over other weights and vectors, but not the exponents that steps have learned."""
        fresh = NumpyTrainer(self.graph, state, self.algorithm, self.policy)
        self.weights = fresh.weights
        self.vectors = fresh.vectors


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", [*NETWORKS, *CORNERS])
def test_gradients_equal_numpy_step_for_step(name):
    """Other weights before every step; the exponents that steps learn, and running statistics, go on."""
    backend = built(name, replace(ADAPTIVE_FIXED_POINT, update=OutsideUpdate()))
    graph = capture_network(build(name), IMAGE).graph
    trainer = RecordingTrainer(graph, exact_state(name), ADAPTIVE_FIXED_POINT, SELDOM)
    for index, batch in enumerate(batches(5)):
        state = exact_state(name, seed=index)
        running = {key: trainer.vectors[key] for key in state if key.endswith(STATISTICS[:2])}
        trainer.load(state | running if index else state)
        gradients = step(backend, trained_of(state) if index else state, index, batch, rate=0.3)
        trainer.step(*batch, learning_rate=1.0, progress=0.0)
        assert set(gradients) == set(trainer.gradients) == set(trained_of(state))
        for key, expected in trainer.gradients.items():
            gap = np.abs(gradients[key] - expected.reshape(gradients[key].shape)).max()
            assert gap <= 4e-7 * np.abs(expected).max() + 1e-30, key  # float32's rounding
        for key in running:
            np.testing.assert_array_equal(backend.weights()[key], trainer.vectors[key])


@pytest.mark.parametrize("name", ["plain", "normalised"])
def test_the_default_pseudo_gradient_with_niti_is_loaded_minus_weights_after_over_the_rate(name):
    backend = built(name, NITI)
    state = state_of(name)
    gradients = step(backend, state, 1, rate=0.05)
    after = backend.weights()
    assert set(gradients) == set(trained_of(state))
    for key, gradient in gradients.items():
        expected = (state[key].astype(np.float64) - after[key]) / 0.05
        atol = 2e-7 * np.abs(state[key]).max() / 0.05
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=atol)


def test_nitis_step_is_that_of_an_int8_model_on_the_rounded_weights():
    """And so are predictions, also from running statistics that were loaded."""
    state = exact_state("normalised")
    state["1.running_mean"] += 0.25
    model = int8("normalised", rescaling=SELDOM)
    backend = built("normalised", NITI)
    model.load_state_dict(state)
    backend.load_weights(state, seed=0)
    images, _ = batches(1)[0]
    np.testing.assert_array_equal(backend.predict(images), model.predict(images))
    for batch in batches(3):
        expected = model.train_step(*batch, learning_rate=0.02, progress=0.6)
        assert backend.train_step(*batch, learning_rate=0.02, progress=0.6) == expected
    assert_same(backend.weights(), model.arrays())


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 10.0))
def test_the_gradient_is_a_mean_over_the_batch_and_has_no_learning_rate(seed, rate):
    """A batch twice over has the gradient of the batch: it is divided by the samples."""
    batch = batches(1, size=4, seed=seed)[0]
    state = exact_state("plain")
    twice = tuple(np.concatenate([each, each]) for each in batch)
    once = step(built("plain"), state, 0, batch, rate)
    assert_same(once, step(built("plain"), state, 0, twice, 1.0))


# -------------------------------------------------------------------------------------------------- loading


def test_one_seed_gives_one_rounding_and_steps_do_not_move_it():
    state = state_of("normalised")
    backend = built("normalised")
    other = built("normalised")
    backend.load_weights(state, seed=5)
    before = trained_of(backend.weights())
    step(backend, state, 5)
    other.load_weights(state_of("normalised", seed=1), seed=6)
    for each in (backend, other):
        each.load_weights(state, seed=5)
        assert_same(trained_of(each.weights()), before)
    backend.load_weights(state, seed=6)
    assert any((backend.weights()[key] != array).any() for key, array in before.items())


def test_with_niti_the_weights_of_a_seed_are_loaded_anew_after_a_step_has_moved_them():
    state = state_of("plain")
    backend = built("plain", NITI)
    backend.load_weights(state, seed=5)
    before = backend.weights()
    step(backend, state, 5)
    assert any((backend.weights()[key] != array).any() for key, array in before.items())
    backend.load_weights(state, seed=5)
    assert_same(backend.weights(), before)


@pytest.mark.parametrize("algorithm", [HANDED_OUT_GRADIENTS, NITI], ids=["handed-out", "niti"])
def test_running_statistics_go_on_until_others_are_given(algorithm):
    state = exact_state("normalised")
    backend = built("normalised", algorithm)
    step(backend, state, 0)
    seen = backend.weights()["1.running_mean"]
    assert (seen != state["1.running_mean"]).any()
    for weights, expected in ((trained_of(state), seen), (state, state["1.running_mean"])):
        backend.load_weights(weights, seed=len(weights))
        np.testing.assert_array_equal(backend.weights()["1.running_mean"], expected)


def test_weights_of_the_last_seed_are_loaded_anew_after_a_failed_load_and_after_build():
    backend = built("plain")
    state = exact_state("plain")
    backend.load_weights(state, seed=1)
    bad = state_of("plain", seed=1) | {"8.weight": state["8.weight"] * np.inf}
    refused(lambda: backend.load_weights(bad, seed=2), "8.weight", error=TrainingFailed)
    backend.load_weights(state, seed=1)
    assert_same(backend.weights(), state)
    backend.build(build("plain", seed=9), IMAGE)
    backend.load_weights(state, seed=1)
    assert_same(backend.weights(), state)


@pytest.mark.parametrize("call", [
    lambda backend: backend.load_weights({}, seed=0), lambda backend: backend.weights(),
    lambda backend: backend.predict(np.zeros((1, *IMAGE), np.float32)),
    lambda backend: backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0),
])  # fmt: skip
def test_nothing_goes_before_build(call):
    refused(lambda: call(NativeInt8Backend()), "build")


def test_the_kernel_is_named_once_the_network_is_built():
    assert NativeInt8Backend().name == "CPU int8"
    assert built("plain", kernel="portable").name == "CPU int8, portable"
    assert isinstance(pickle.loads(pickle.dumps(NativeInt8Backend())), NativeInt8Backend)


# ------------------------------------------------------------------------------------- another accelerator


class LinearBackend(Int8Backend):
    """One linear layer in NumPy, float arithmetic: the abstract methods and nothing else."""

    name = "NumPy"

    def build(self, module, input_shape):
        self.values = {key: value.numpy() for key, value in module.state_dict().items()}

    def load_weights(self, weights, *, seed):
        self.values = {key: np.array(value, np.float64) for key, value in weights.items()}

    def train_step(self, images, labels, *, learning_rate, progress):
        powers = np.exp(self.predict(images))
        softmax = powers / powers.sum(axis=1, keepdims=True)
        error = (softmax - np.eye(CLASSES)[labels]) / len(labels)
        self.values["1.weight"] -= learning_rate * error.T @ images.reshape(len(images), -1)
        self.values["1.bias"] -= learning_rate * error.sum(axis=0)
        return StepResult(loss=1.0, num_correct=0, num_samples=len(labels))

    def weights(self):
        return {**self.values, "1.num_batches_tracked": np.array(3), "1.running_mean": np.ones(2)}

    def predict(self, images):
        return images.reshape(len(images), -1) @ self.values["1.weight"].T + self.values["1.bias"]


def test_a_vendors_backend_needs_the_abstract_methods_and_no_more():
    """Its pseudo-gradient is the gradient of the loss, as torch sees it, whatever the learning rate."""
    own = {"name", "build", "load_weights", "train_step", "weights", "predict"}
    assert Int8Backend.__abstractmethods__ == own
    module = nn.Sequential(nn.Flatten(), nn.Linear(300, CLASSES))
    images, labels = batches(1, size=8)[0]
    logits = module(torch.from_numpy(images))
    nn.functional.cross_entropy(logits, torch.from_numpy(labels).long()).backward()
    loaded = {key: value.detach().numpy() for key, value in module.named_parameters()}
    backend = LinearBackend()
    backend.build(module, IMAGE)
    for rate in (0.01, 1.0, 100.0):
        gradients = step(backend, loaded, 0, (images, labels), rate)
        assert set(gradients) == set(loaded)
        for key, parameter in module.named_parameters():
            assert gradients[key].dtype == np.float32
            expected = parameter.grad.numpy()
            atol = 2e-8 + 2e-7 / rate
            np.testing.assert_allclose(gradients[key], expected, atol=atol, rtol=1e-4)
    assert backend.samples_per_s(32) is None
    assert backend.energy_j() is None
    assert backend.hands_out_gradients and not backend.draws


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.BatchNorm2d(8)])
def test_gradients_of_operators_in_fp32_are_those_of_autograd_between_the_same_int8_ones(make):
    """Handed out as they come: an int8 model that follows them by plain SGD comes to the same weights."""
    with forked_generator(2):
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), make(), nn.Flatten(), nn.Linear(8 * 64, CLASSES)]
    module = nn.Sequential(*layers)
    batch = batches(1)[0]
    backend = NativeInt8Backend(fp32_operators=["2"])
    backend.build(module, IMAGE)
    backend.load_weights({key: value.numpy() for key, value in module.state_dict().items()}, seed=1)
    loaded = {key: np.array(value) for key, value in backend.weights().items()}
    backend.train_step(*batch, learning_rate=0.1, progress=0.0)
    handed_out = backend.pseudo_gradient(loaded, learning_rate=0.1)
    assert set(handed_out) == {name for name, _ in module.named_parameters()}
    # The very int8 weights that were rounded at random, as those of a model with masters.
    plain = int8_algorithm("real-scales", momentum=0.0)
    model = int8(module, plain, options={"fp32_operators": ["2"]})
    model.load_state_dict(loaded)
    for name, weight in model.parameters.weights.items():
        weight.data[...] = backend._model.parameters.weights[name].data
        weight.exponent = backend._model.parameters.weights[name].exponent
        weight.master[...] = np.ldexp(weight.data.astype(np.float32), weight.exponent)
    before = model.arrays()
    model.train_step(*batch, learning_rate=1.0)
    for name, value in model.arrays().items():
        if name in handed_out:
            gradient = handed_out[name].reshape(value.shape)
            np.testing.assert_allclose(before[name] - value, gradient, atol=1e-6, err_msg=name)
        else:  # running statistics move alike
            np.testing.assert_array_equal(value, backend.weights()[name])
