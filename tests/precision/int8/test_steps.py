"""Whole training steps against an independent NumPy implementation of the rules: every bit, in every setting."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower import _int8
from socflower.precision import NITI
from socflower.precision.algorithm import ADAPTIVE_INT16, REAL_SCALES, IntegerUpdate
from tests.one_line import refused
from tests.precision import numpy_kernels as nk
from tests.precision.networks import (
    ALGORITHMS,
    ALWAYS,
    CLASSES,
    CORNERS,
    FURTHER_ALGORITHMS,
    IMAGE,
    MOMENTUM,
    NETWORKS,
    REACH,
    SELDOM,
    assert_same,
    batches,
    build,
    int8,
    train,
)
from tests.precision.numpy_element_engine import NumpyElementTrainer
from tests.precision.numpy_engine import NumpyTrainer
from tests.precision.numpy_int16_engine import NumpyInt16Trainer
from tests.precision.numpy_real_engine import NumpyRealTrainer

STEPS = 5
EVERY = ALGORITHMS | FURTHER_ALGORITHMS
THREE = {"niti": NITI, "momentum": MOMENTUM, "real-scales": REAL_SCALES}


def assert_same_parameters(model, other):
    """Compare two Int8Models, padding, masters and exponents included."""
    for name, weight in model.parameters.weights.items():
        expected = other.parameters.weights[name]
        np.testing.assert_array_equal(weight.data, expected.data, name)
        np.testing.assert_array_equal(weight.master, expected.master, name)
        assert weight.exponent == expected.exponent, name
    for name, vector in model.parameters.vectors.items():
        bits, expected = (
            each.view(np.int32) for each in (vector.data, other.parameters.vectors[name].data)
        )
        np.testing.assert_array_equal(bits, expected, name)


def assert_numpys_parameters(model, trainer):
    """Compare an Int8Model with a NumpyTrainer, bit for bit; the padding is zero."""
    assert model.graph == trainer.graph
    for name, weight in model.parameters.weights.items():
        expected = trainer.weights[name]
        channels = expected.q.shape[3]
        np.testing.assert_array_equal(nk.unpadded(weight.data, channels), expected.q, name)
        if expected.master is not None:
            np.testing.assert_array_equal(weight.master[..., :channels], expected.master, name)
        assert weight.exponent == expected.exponent, name
    for name, vector in model.parameters.vectors.items():
        expected = nk.padded(trainer.vectors[name], np.float32)
        assert vector.data.dtype == np.float32
        np.testing.assert_array_equal(vector.data.view(np.int32), expected.view(np.int32), name)


BLOCKS = {"0": 2, "3": 4, "stem": 1, "b": 5}


def blocks_of(name):
    """Return the part of `BLOCKS` that a network has."""
    names = [node.name for node in int8(name).graph.nodes if node.kind == "convolution"]
    return {name: block for name, block in BLOCKS.items() if name in names}


@pytest.mark.few_cells(11)
@pytest.mark.parametrize("algorithm", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_equal_numpy_bit_for_bit(name, algorithm):
    assert_steps_equal_numpy(name, algorithm, SELDOM, batches(8))


@pytest.mark.parametrize("algorithm", [NITI, REAL_SCALES], ids=["niti", "real-scales"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_that_always_search_equal_numpy_bit_for_bit(name, algorithm):
    assert_steps_equal_numpy(name, algorithm, ALWAYS, batches(STEPS))


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", [*NETWORKS, "rectified"])
def test_gradients_that_are_always_int16_equal_numpy(name):
    """Above a threshold of 0 is almost every gradient that may be wide, at exponents that are known too."""
    backward = dataclasses.replace(ADAPTIVE_INT16.backward, wide_above=0.0)
    algorithm = dataclasses.replace(ADAPTIVE_INT16, backward=backward)
    trainer = assert_steps_equal_numpy(name, algorithm, SELDOM, batches(6))
    assert (trainer.num_wide > 0) == (name != "rectified")


@pytest.mark.parametrize("algorithm", THREE.values(), ids=THREE)
@pytest.mark.parametrize("name", CORNERS)
def test_networks_with_rectified_logits_or_branches_of_zeros_equal_numpy(name, algorithm):
    assert_steps_equal_numpy(name, algorithm, ALWAYS, batches(STEPS))


@pytest.mark.few_cells(4)
@pytest.mark.parametrize("algorithm", THREE.values(), ids=THREE)
@pytest.mark.parametrize("name", [*NETWORKS, "zero-branch"])
def test_black_images_among_others_equal_numpy(name, algorithm):
    """Zeros take the exponent that is known, or -7; either way they change none."""
    data = [
        (images * np.float32(index in (1, 2, 4)), labels)
        for index, (images, labels) in enumerate(batches(6))
    ]
    assert_steps_equal_numpy(name, algorithm, SELDOM, data)


def test_the_fewest_gradient_bits_equal_numpy():
    fewest = dataclasses.replace(
        NITI, name="fewest", update=IntegerUpdate(bits=(-8,), starts=(0.0,))
    )
    assert_steps_equal_numpy("plain", fewest, ALWAYS, batches(STEPS, size=40))


class Beside(nn.Module):
    """Layers, and an addition of what they make to their input."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return torch.relu(self.layers(x) + x)


@st.composite
def networks(draw):
    """Draw layers of any shape for images (3, size, size), and the size."""
    size = draw(st.integers(5, 10))
    channels = 3
    side = size
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        kernel = draw(st.integers(1, min(3, side)))
        stride = draw(st.integers(1, 2))
        padding = draw(st.integers(0, kernel // 2))
        groups = draw(st.sampled_from([1, channels]))
        outs = groups * draw(st.integers(1, 19 // groups))
        bias = draw(st.booleans())
        layers.append(nn.Conv2d(channels, outs, kernel, stride, padding, groups=groups, bias=bias))
        channels = outs
        side = (side + 2 * padding - kernel) // stride + 1
        layers += [nn.BatchNorm2d(channels)] if draw(st.booleans()) else []
        layers += [nn.ReLU()] if draw(st.booleans()) else []
        if draw(st.booleans()):
            inner = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            layers.append(Beside(nn.Sequential(inner, nn.BatchNorm2d(channels))))
        if side > 2 and draw(st.booleans()):
            pool = draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))
            window = draw(st.integers(2, 3))
            apart = draw(st.integers(1, 2))
            layers.append(pool(window, apart))
            side = (side - window) // apart + 1
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, CLASSES)), size


@pytest.mark.parametrize("algorithm", THREE.values(), ids=THREE)
@given(st.data())
@settings(max_examples=10)
def test_networks_of_any_shape_equal_numpy(algorithm, draw):
    module, size = draw.draw(networks())
    initialise(module, draw.draw(st.integers(0, 99)))
    image = (3, size, size)
    data = batches(4, size=draw.draw(st.integers(1, 5)), image=image)
    assert_steps_equal_numpy(module, algorithm, SELDOM, data, image)


def initialise(module, seed):
    """Draw the parameters of a module from a seed, whatever torch's generator has made of them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 1.0 / math.sqrt(parameter[0].numel())
            parameter.uniform_(-spread, spread, generator=generator)


def numpy_trainer_of(algorithm):
    if algorithm.backward.wide_above is not None:
        return NumpyInt16Trainer
    if algorithm.forward.mantissa_bits is not None:
        return NumpyElementTrainer
    return NumpyRealTrainer if algorithm.forward.scales == "real" else NumpyTrainer


def assert_steps_equal_numpy(module, algorithm, policy, data, image=IMAGE):
    """Train a module, or a network by its name, both ways; return NumPy's trainer."""
    model = int8(module, algorithm, rescaling=policy, shape=image)
    module = build(module) if isinstance(module, str) else module
    state = {name: array.numpy().copy() for name, array in module.state_dict().items()}
    trainer = numpy_trainer_of(algorithm)(model.graph, state, algorithm, policy)
    for index, (images, labels) in enumerate(data):
        progress = index / len(data)
        result = model.train_step(images, labels, learning_rate=0.05, progress=progress)
        logits, exponent, *factor = trainer.step(
            images, labels, learning_rate=0.05, progress=progress, seed=index
        )
        real = logits * 2.0**exponent * math.prod(factor)
        expected = np.mean(np.log(np.exp(real).sum(axis=1)) - real[np.arange(len(labels)), labels])
        assert result.loss == pytest.approx(expected, rel=1e-12)
        assert result.num_correct == int((real.argmax(axis=1) == labels).sum())
        assert_numpys_parameters(model, trainer)
    return trainer


@pytest.mark.few_cells(5)
@pytest.mark.parametrize("algorithm", [NITI, REAL_SCALES], ids=["niti", "real-scales"])
@pytest.mark.parametrize("name", [*NETWORKS, *REACH, "dropped"])
def test_no_setting_of_the_machine_changes_a_bit(name, algorithm):
    data = batches(2, size=7)
    expected = int8(name, algorithm, rescaling=SELDOM)
    losses = train(expected, data)
    for options in (
        *({"kernel": kernel} for kernel in _int8.available_kernels()),
        {"num_threads": 2},
        {"num_threads": 3, "kernel": "portable"},
        {"reuse_graph": False},
        {"batch_blocks": blocks_of(name)},
    ):
        model = int8(name, algorithm, rescaling=SELDOM, **options)
        assert train(model, data) == losses, options
        assert_same_parameters(model, expected)


@pytest.mark.parametrize("algorithm", [NITI, MOMENTUM], ids=["niti", "momentum"])
@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_a_tight_memory_budget_evicts_and_changes_no_bit(name, algorithm):
    data = batches(4)
    expected = int8(name, algorithm)
    losses = train(expected, data)
    # The least that a step can do with: what is held when nothing outlives its use.
    least = int8(name, algorithm, reuse_graph=False)
    train(least, data)
    budget = least.regions.peak_bytes
    model = int8(name, algorithm, memory_budget_bytes=budget)
    assert train(model, data) == losses
    assert_same_parameters(model, expected)
    assert model.regions.peak_bytes <= budget < expected.regions.peak_bytes
    assert model.regions.num_evicted > 0
    assert expected.regions.num_evicted == 0


def test_a_budget_that_is_too_small_says_how_much_is_needed():
    model = int8("plain", NITI, memory_budget_bytes=20_000)
    refused(lambda: train(model, batches(1)), "20000 bytes", "at least")


@pytest.mark.parametrize("algorithm", [NITI, MOMENTUM], ids=["niti", "momentum"])
def test_evaluation_between_steps_and_other_batch_sizes_change_nothing(algorithm):
    data = batches(4)
    expected, model = (int8("normalised", algorithm, rescaling=SELDOM) for _ in range(2))
    for images, labels in data:
        train(expected, [(images, labels)])
        model.predict(images)
        train(model, [(images, labels)])
        before = model.arrays()
        model.evaluate(images[:3], labels[:3], batch_size=2)
        assert_same(model.arrays(), before)
    assert_same_parameters(model, expected)


def test_batches_of_changing_size_equal_numpy():
    data = [batches(1, size=size, seed=size)[0] for size in (6, 1, 17, 6, 3, 1)]
    assert_steps_equal_numpy("residual", NITI, SELDOM, data)


def test_predictions_do_not_depend_on_the_batch_they_are_in_but_for_its_exponents():
    model = int8("plain", NITI)
    images, labels = batches(1, size=12)[0]
    one_by_one = np.concatenate([model.predict(image[None]) for image in images])
    together = model.predict(images)
    assert together.shape == (12, CLASSES)
    assert np.abs(one_by_one - together).max() < 0.1 * np.abs(together).max()
    result = model.evaluate(images, labels)
    assert result.num_samples == 12
    assert result.accuracy == result.num_correct / 12
