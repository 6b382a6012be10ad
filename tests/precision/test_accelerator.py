"""Accelerators for mixed precision: what the native one hands out, and what little another one needs."""

import dataclasses
import inspect
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower import _int8
from socflower.errors import ConfigError, TrainingFailed
from socflower.model_graph.random_state import forked_generator
from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    NITI,
    EngineSettings,
    Int8Backend,
    Int8Model,
    NativeInt8Backend,
    RescalingPolicy,
    StepResult,
)
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS, IntegerUpdate
from socflower.precision.int8.from_torch import capture_network
from tests.precision.networks import CLASSES, CORNERS, IMAGE, NETWORKS, batches, build
from tests.precision.numpy_engine import NumpyTrainer

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
SELDOM = RescalingPolicy(adaptive=True, warm_up_batches=2)

few = settings(max_examples=20)


def built(name, algorithm=HANDED_OUT_GRADIENTS, **engine):
    backend = NativeInt8Backend(algorithm, EngineSettings(**{"rescaling": SELDOM, **engine}))
    backend.build(build(name), IMAGE)
    return backend


def exact_state(name, seed=0):
    """Return a state whose weights int8 holds, so that rounding them, at random or not, changes none."""
    module = build(name, seed)
    state = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    for key in capture_network(module, IMAGE).state:
        if key in state and state[key].ndim > 1 and state[key].any():
            quantum = 2.0 ** np.ceil(np.log2(np.abs(state[key]).max() / 127))
            state[key] = (np.rint(state[key] / quantum) * quantum).astype(np.float32)
    return state


def trained_of(state):
    return {key: array for key, array in state.items() if not key.endswith(STATISTICS)}


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
        self.weights, self.vectors = fresh.weights, fresh.vectors


def assert_close(got, expected, name):
    """Compare within float32's rounding of the largest value."""
    assert np.abs(got - expected).max() <= 4e-7 * np.abs(expected).max() + 1e-30, name


@pytest.mark.parametrize("name", [*NETWORKS, *CORNERS])
def test_gradients_equal_numpy_step_for_step(name):
    """Other weights before every step; the exponents that steps learn, and running statistics, go on."""
    backend = built(name)
    graph = capture_network(build(name), IMAGE).graph
    trainer = RecordingTrainer(graph, exact_state(name), ADAPTIVE_FIXED_POINT, SELDOM)
    for index, (images, labels) in enumerate(batches(5)):
        state = exact_state(name, seed=index)
        statistics = {
            key: trainer.vectors[key]
            for key in state
            if key.endswith(("running_mean", "running_var"))
        }
        trainer.load({**state, **statistics} if index else state)
        backend.load_weights(trained_of(state) if index else state, seed=index)
        backend.train_step(images, labels, learning_rate=0.3, progress=0.5)
        trainer.step(images, labels, learning_rate=1.0, progress=0.5)
        gradients = backend.pseudo_gradient(state, learning_rate=0.3)
        assert set(gradients) == set(trainer.gradients) == set(trained_of(state))
        for key, expected in trainer.gradients.items():
            assert gradients[key].shape == expected.shape
            assert_close(gradients[key], expected, key)
        for key in statistics:
            np.testing.assert_array_equal(backend.weights()[key], trainer.vectors[key])


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_what_adaptive_fixed_point_goes_along(name):
    """(weights before - weights after) / rate of FP32 masters, whose int8 weights are the same."""
    rate = 2.0**20  # so large that the weights before hardly round the difference
    images, labels = batches(1, size=9)[0]
    state = exact_state(name)
    model = Int8Model.from_module(
        build(name),
        input_shape=IMAGE,
        algorithm=ADAPTIVE_FIXED_POINT,
        settings=EngineSettings(rescaling=SELDOM),
    )
    model.load_state_dict(state)
    backend = built(name)
    backend.load_weights(state, seed=0)
    for key, weight in model.parameters.weights.items():
        np.testing.assert_array_equal(
            np.ldexp(weight.data.astype(float), weight.exponent)[..., : len(state[key])]
            .transpose(3, 2, 0, 1)
            .reshape(state[key].shape),
            backend.weights()[key],
        )
    expected = model.train_step(images, labels, learning_rate=rate, progress=0.0)
    assert backend.train_step(images, labels, learning_rate=1e-3, progress=0.0) == expected
    after = model.arrays()
    for key, gradient in backend.pseudo_gradient(state, learning_rate=1e-3).items():
        difference = (state[key].astype(np.float64) - after[key]) / rate
        assert_close(gradient.reshape(difference.shape), difference, key)
        assert gradient.any() == difference.any()
    for key in state:
        if key.endswith(STATISTICS):
            np.testing.assert_array_equal(backend.weights()[key], after[key])


@pytest.mark.parametrize("name", ["plain", "normalised"])
def test_the_default_pseudo_gradient_with_niti_is_loaded_minus_weights_after_over_the_rate(name):
    backend, state = built(name, NITI), build(name).state_dict()
    state = {key: value.numpy() for key, value in state.items()}
    (images, labels), rate = batches(1, size=9)[0], 0.05
    backend.load_weights(state, seed=1)
    rounded = backend.weights()
    backend.train_step(images, labels, learning_rate=rate, progress=0.0)
    after = backend.weights()
    gradients = backend.pseudo_gradient(state, learning_rate=rate)
    assert set(gradients) == set(trained_of(state))
    for key, gradient in gradients.items():
        expected = (state[key].astype(np.float64) - after[key]) / rate
        np.testing.assert_allclose(
            gradient, expected, rtol=1e-6, atol=2e-7 * np.abs(state[key]).max() / rate
        )
    assert any((after[key] != rounded[key]).any() for key in gradients)


def test_nitis_step_is_that_of_an_int8_model_on_the_rounded_weights():
    state = exact_state("plain")
    model = Int8Model.from_module(
        build("plain"), input_shape=IMAGE, settings=EngineSettings(rescaling=SELDOM)
    )
    model.load_state_dict(state)
    backend = built("plain", NITI)
    backend.load_weights(state, seed=0)
    for images, labels in batches(3):
        expected = model.train_step(images, labels, learning_rate=0.02, progress=0.6)
        assert backend.train_step(images, labels, learning_rate=0.02, progress=0.6) == expected
    for key, array in model.arrays().items():
        np.testing.assert_array_equal(backend.weights()[key], array)


@pytest.mark.parametrize("settings_", [
    *({"kernel": kernel} for kernel in _int8.available_kernels()), {"num_threads": 3}, {"reuse_graph": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["normalised", "separable"])
def test_no_setting_of_the_machine_changes_a_bit_of_a_gradient(name, settings_):
    state = {key: value.numpy() for key, value in build(name).state_dict().items()}
    one, other = built(name), built(name, **settings_)
    for index, (images, labels) in enumerate(batches(3, size=7)):
        for backend in (one, other):
            backend.load_weights(state, seed=index)
            backend.train_step(images, labels, learning_rate=0.1, progress=0.0)
        for key, gradient in one.pseudo_gradient(state, learning_rate=0.1).items():
            np.testing.assert_array_equal(
                other.pseudo_gradient(state, learning_rate=0.1)[key], gradient
            )


@few
@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 10.0))
def test_the_gradient_is_a_mean_over_the_batch_and_has_no_learning_rate(seed, rate):
    """A batch twice over has the gradient of the batch: it is divided by the samples."""
    images, labels = batches(1, size=4, seed=seed)[0]
    state = exact_state("plain")
    once, twice = built("plain"), built("plain")
    for backend, times, own_rate in ((once, 1, rate), (twice, 2, 1.0)):
        backend.load_weights(state, seed=0)
        backend.train_step(
            np.tile(images, (times, 1, 1, 1)),
            np.tile(labels, times),
            learning_rate=own_rate,
            progress=0.0,
        )
    for key, gradient in once.pseudo_gradient(state, learning_rate=rate).items():
        np.testing.assert_array_equal(
            gradient, twice.pseudo_gradient(state, learning_rate=1.0)[key]
        )


# -------------------------------------------------------------------------------------------------- loading


def moved(state):
    return {
        key: array * 1.5 if array.dtype == np.float32 else array for key, array in state.items()
    }


def test_one_seed_gives_one_rounding_and_steps_do_not_move_it():
    state = {key: value.numpy() for key, value in build("normalised").state_dict().items()}
    backend, other = built("normalised"), built("normalised")
    backend.load_weights(state, seed=5)
    before = trained_of(backend.weights())
    backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0)
    backend.load_weights(state, seed=5)
    other.load_weights(moved(state), seed=6)
    other.load_weights(state, seed=5)
    for key, array in before.items():
        np.testing.assert_array_equal(backend.weights()[key], array)
        np.testing.assert_array_equal(other.weights()[key], array)
    backend.load_weights(state, seed=6)
    assert any((backend.weights()[key] != array).any() for key, array in before.items())


def test_with_niti_the_weights_of_a_seed_are_loaded_anew_after_a_step_has_moved_them():
    state = {key: value.numpy() for key, value in build("plain").state_dict().items()}
    backend = built("plain", NITI)
    backend.load_weights(state, seed=5)
    before = backend.weights()
    backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0)
    assert any((backend.weights()[key] != array).any() for key, array in before.items())
    backend.load_weights(state, seed=5)
    for key, array in before.items():
        np.testing.assert_array_equal(backend.weights()[key], array)


@pytest.mark.parametrize("algorithm", [HANDED_OUT_GRADIENTS, NITI], ids=["handed-out", "niti"])
def test_running_statistics_go_on_until_others_are_given(algorithm):
    state = exact_state("normalised")
    backend = built("normalised", algorithm)
    backend.load_weights(state, seed=0)
    backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0)
    seen = backend.weights()
    assert (seen["1.running_mean"] != state["1.running_mean"]).any()
    backend.load_weights(trained_of(state), seed=1)
    np.testing.assert_array_equal(backend.weights()["1.running_mean"], seen["1.running_mean"])
    backend.load_weights(state, seed=2)
    np.testing.assert_array_equal(backend.weights()["1.running_mean"], state["1.running_mean"])


def test_predictions_are_those_of_an_int8_model_of_the_same_weights_and_statistics():
    state = exact_state("normalised")
    state["1.running_mean"] += 0.25
    model = Int8Model.from_module(build("normalised"), input_shape=IMAGE)
    model.load_state_dict(state)
    backend = built("normalised")
    backend.load_weights(state, seed=3)
    images, _ = batches(1)[0]
    np.testing.assert_array_equal(backend.predict(images), model.predict(images))


def test_what_cannot_be_loaded_is_refused():
    backend, state = built("plain"), exact_state("plain")
    with pytest.raises(ConfigError, match=r"0\.weight of shape \(8, 3, 3, 3\) is missing"):
        backend.load_weights({}, seed=0)
    with pytest.raises(ConfigError, match=r"3\.bias has shape \(17,\), the network needs \(18,\)"):
        backend.load_weights({**state, "3.bias": state["3.bias"][:17]}, seed=0)
    with pytest.raises(TrainingFailed, match=r"3\.bias: a value is not finite"):
        backend.load_weights({**state, "3.bias": state["3.bias"] * np.nan}, seed=0)


def test_after_a_load_that_failed_halfway_the_weights_of_the_last_seed_are_loaded_anew():
    backend, state = built("plain"), exact_state("plain")
    backend.load_weights(state, seed=1)
    with pytest.raises(TrainingFailed, match=r"8\.weight"):
        backend.load_weights({**moved(state), "8.weight": state["8.weight"] * np.inf}, seed=2)
    backend.load_weights(state, seed=1)
    for key, array in backend.weights().items():
        np.testing.assert_array_equal(array, state[key])


def test_a_backend_built_anew_has_loaded_nothing():
    backend, state = built("plain"), exact_state("plain")
    backend.load_weights(state, seed=1)
    backend.build(build("plain", seed=9), IMAGE)
    backend.load_weights(state, seed=1)
    for key, array in backend.weights().items():
        np.testing.assert_array_equal(array, state[key])


def test_such_a_model_is_not_saved(tmp_path):
    """Its weights are rounded copies of masters elsewhere: a file of them would go on with less than there is."""
    model = Int8Model.from_module(build("plain"), input_shape=IMAGE, algorithm=HANDED_OUT_GRADIENTS)
    with pytest.raises(ConfigError, match="these weights belong to the trainer that hands them in"):
        model.save(tmp_path / "model.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [
    lambda backend: backend.load_weights({}, seed=0), lambda backend: backend.weights(),
    lambda backend: backend.predict(np.zeros((1, *IMAGE), np.float32)),
    lambda backend: backend.train_step(*batches(1)[0], learning_rate=0.1, progress=0.0),
])  # fmt: skip
def test_nothing_goes_before_build(call):
    with pytest.raises(ConfigError, match="call build before anything else"):
        call(NativeInt8Backend())


def test_masters_of_its_own_are_refused_and_the_kernel_is_named():
    with pytest.raises(
        ConfigError, match="the FP32 masters of adaptive-fixed-point live in the trainer; use niti"
    ):
        NativeInt8Backend(ADAPTIVE_FIXED_POINT)
    assert NativeInt8Backend().name == "CPU int8"
    assert built("plain", kernel="portable").name == "CPU int8, portable"
    assert isinstance(pickle.loads(pickle.dumps(NativeInt8Backend())), NativeInt8Backend)
    coarse = dataclasses.replace(
        NITI, name="coarse", update=IntegerUpdate(bits=(2,), starts=(0.0,))
    )
    assert NativeInt8Backend(coarse).name == "CPU int8"


# ------------------------------------------------------------------------------------- another accelerator


class LinearBackend(Int8Backend):
    """One linear layer in NumPy, float arithmetic: the abstract methods and nothing else."""

    name = "NumPy"

    def build(self, module, input_shape):
        self.values = {
            key: value.numpy().astype(np.float64) for key, value in module.state_dict().items()
        }

    def load_weights(self, weights, *, seed):
        self.values = {key: np.array(weights[key], np.float64) for key in self.values}

    def train_step(self, images, labels, *, learning_rate, progress):
        logits = self.predict(images)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        softmax = powers / powers.sum(axis=1, keepdims=True)
        loss = -np.log(softmax[np.arange(len(labels)), labels]).mean()
        error = (softmax - np.eye(CLASSES)[labels]) / len(labels)
        self.values["1.weight"] -= learning_rate * error.T @ images.reshape(len(images), -1)
        self.values["1.bias"] -= learning_rate * error.sum(axis=0)
        right = int((logits.argmax(axis=1) == labels).sum())
        return StepResult(loss=float(loss), num_correct=right, num_samples=len(labels))

    def weights(self):
        return {**self.values, "1.num_batches_tracked": np.array(3), "1.running_mean": np.ones(2)}

    def predict(self, images):
        return images.reshape(len(images), -1) @ self.values["1.weight"].T + self.values["1.bias"]


def test_a_vendors_backend_needs_the_abstract_methods_and_no_more():
    """Its pseudo-gradient is the gradient of the loss, as torch sees it, whatever the learning rate."""
    import torch
    from torch import nn
    from torch.nn import functional

    assert Int8Backend.__abstractmethods__ == {
        "name",
        "build",
        "load_weights",
        "train_step",
        "weights",
        "predict",
    }
    module = nn.Sequential(nn.Flatten(), nn.Linear(300, CLASSES))
    images, labels = batches(1, size=8)[0]
    functional.cross_entropy(
        module(torch.from_numpy(images)), torch.from_numpy(labels).long()
    ).backward()
    loaded = {key: value.detach().numpy() for key, value in module.named_parameters()}
    backend = LinearBackend()
    backend.build(module, IMAGE)
    for rate in (0.01, 1.0, 100.0):
        backend.load_weights(loaded, seed=0)
        backend.train_step(images, labels, learning_rate=rate, progress=0.0)
        gradients = backend.pseudo_gradient(loaded, learning_rate=rate)
        assert set(gradients) == set(loaded)
        for key, parameter in module.named_parameters():
            assert gradients[key].dtype == np.float32
            np.testing.assert_allclose(
                gradients[key], parameter.grad.numpy(), atol=2e-8 + 2e-7 / rate, rtol=1e-4
            )
    assert backend.samples_per_s(32) is None
    assert backend.energy_j() is None


@pytest.mark.parametrize("missing", sorted(Int8Backend.__abstractmethods__))
def test_a_backend_without_one_of_them_cannot_be_made(missing):
    members = {
        key: value
        for key, value in vars(LinearBackend).items()
        if key in Int8Backend.__abstractmethods__ and key != missing
    }
    with pytest.raises(TypeError, match=missing):
        type("Lacking", (Int8Backend,), members)()
    assert inspect.isabstract(Int8Backend)


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.GroupNorm(2, 8), lambda: nn.BatchNorm2d(8)])
def test_gradients_of_operators_in_fp32_are_those_of_autograd_between_the_same_int8_ones(make):
    """Handed out as they come: an int8 model that follows them by plain SGD comes to the same weights."""
    with forked_generator(2):
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), make(), nn.Flatten(), nn.Linear(8 * 64, CLASSES)
        )
    images, labels = batches(1)[0]
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    backend = NativeInt8Backend(fp32_operators=["2"])
    backend.build(module, IMAGE)
    backend.load_weights(weights, seed=1)
    loaded = {name: np.array(value) for name, value in backend.weights().items()}
    backend.train_step(images, labels, learning_rate=0.1, progress=0.0)
    handed_out = {
        name: np.array(value)
        for name, value in backend.pseudo_gradient(loaded, learning_rate=0.1).items()
    }
    assert set(handed_out) == {name for name, _ in module.named_parameters()}
    # The very int8 weights that were rounded at random, as those of a model with masters.
    model = Int8Model.from_module(
        module,
        input_shape=IMAGE,
        algorithm=ADAPTIVE_FIXED_POINT,
        settings=EngineSettings(),
        fp32_operators=["2"],
    )
    model.load_state_dict(loaded)
    for name, weight in model.parameters.weights.items():
        weight.data[...] = backend._model.parameters.weights[name].data
        weight.exponent = backend._model.parameters.weights[name].exponent
        weight.master[...] = np.ldexp(weight.data.astype(np.float32), weight.exponent)
    before = model.arrays()
    model.train_step(images, labels, learning_rate=1.0)
    for name, value in model.arrays().items():
        if name in handed_out:
            gradient = handed_out[name].reshape(value.shape)
            np.testing.assert_allclose(before[name] - value, gradient, atol=1e-6, err_msg=name)
        else:  # running statistics move alike
            np.testing.assert_array_equal(value, backend.weights()[name])
