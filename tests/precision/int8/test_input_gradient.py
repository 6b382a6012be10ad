"""The gradient of the images, for layers before: close to autograd's, and bit for bit that inside one engine."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.precision import EngineSettings, Int8Model, RescalingPolicy
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.int8.parameters import start_gradients
from tests.precision.networks import IMAGE, NETWORKS, batches, build
from tests.seeded import built

ALWAYS = EngineSettings(rescaling=RescalingPolicy(adaptive=False))


def int8(module, input_shape=IMAGE, **options):
    """Return a model that hands its gradients out, and those gradients."""
    model = Int8Model.from_module(
        module,
        input_shape=input_shape,
        algorithm=HANDED_OUT_GRADIENTS,
        settings=ALWAYS,
        head=False,
        **options,
    )
    return model, start_gradients(model.graph, model.parameters)


def rounded(module, model):
    """Return the module with the weights that int8 stands for."""
    own = copy.deepcopy(module)
    state = own.state_dict()
    for name, weight in model.parameters.weights.items():
        real = np.ldexp(weight.data.astype(np.float32), weight.exponent)
        node = model.graph.node(name.rpartition(".")[0])
        state[name] = torch.from_numpy(
            np.ascontiguousarray(real[..., : node.shape[0]].transpose(3, 2, 0, 1))
        ).reshape(state[name].shape)
    own.load_state_dict(state)
    return own.train()


def cosine(a, b):
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_of_the_images_points_where_autograd_does(name):
    images = batches(1, size=48, seed=3)[0][0]
    module = build(name, seed=1)
    model, _ = int8(module, input_gradient=True)
    out, _ = model.forward(images)
    direction = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
    got = model.backward(direction, summed=True)
    inputs = torch.from_numpy(images).requires_grad_()
    made = rounded(module, model)(inputs)
    made.backward(torch.from_numpy(direction).reshape(made.shape))
    assert got.shape == images.shape
    # Of each image by itself, so rounding does not average out; where a maximum is another one, its place is wrong.
    assert cosine(got, inputs.grad.numpy()) > 0.9
    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(inputs.grad.numpy()), rel=0.15)


@pytest.mark.parametrize("name", NETWORKS)
def test_without_being_asked_for_it_changes_no_bit_of_the_rest(name):
    images = batches(1, size=12, seed=3)[0][0]
    results = []
    for wanted in (False, True):
        model, gradients = int8(build(name, seed=1), input_gradient=wanted)
        out, exponent = model.forward(images)
        of_images = model.backward(np.ones_like(out) / 7, summed=True)
        assert (of_images is not None) == wanted
        results.append((out, exponent, {key: np.array(value) for key, value in gradients.items()}))
    assert results[0][1] == results[1][1] and np.array_equal(results[0][0], results[1][0])
    for key, value in results[0][2].items():
        assert np.array_equal(value, results[1][2][key]), key


class Branches(nn.Module):
    """Layers whose input several operators read."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 1),
        )

    def forward(self, x):
        return torch.relu(x + self.norm(self.a(x)) + self.b(x))


def tail():
    return [nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)]


CUTS = {
    "convolution": ([nn.Conv2d(3, 8, 3)], tail),
    "BatchNorm and ReLU": ([nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()], tail),
    "average": ([nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2)], tail),
    "residual block": ([nn.Conv2d(3, 8, 3)], lambda: [Branches(), *tail()]),
    "pool": ([nn.Conv2d(3, 8, 3)], lambda: [nn.MaxPool2d(3, stride=2), *tail()]),
    "ReLU": (
        [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)],
        lambda: [nn.Dropout(0.0), *tail()],
    ),
    "features": (
        [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(24)],
        lambda: [nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 5)],
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [8, 11])
def test_two_engines_in_a_row_compute_the_bits_of_one(cut, size):
    """Where a rounded product crosses the cut, whose exponent the second engine finds again in its largest value."""

    def whole():
        module = nn.Sequential(*CUTS[cut][0], *CUTS[cut][1]())
        module(torch.zeros(2, *IMAGE))
        return module

    module = built(whole, 0)
    front, back = module[: len(CUTS[cut][0])], module[len(CUTS[cut][0]) :]
    images = batches(1, size=size, seed=4)[0][0]
    one, of_one = int8(module)
    logits, _ = one.forward(images)
    gradient = np.random.default_rng(5).normal(size=logits.shape).astype(np.float32)
    one.backward(gradient, learning_rate=1.0, summed=True)

    features = front(torch.from_numpy(images))
    first, of_first = int8(front)
    second, of_second = int8(back, tuple(features.shape[1:]), input_gradient=True)
    crossing, _ = first.forward(images)
    again, _ = second.forward(crossing if features.ndim == 4 else crossing.reshape(size, -1, 1, 1))
    assert np.array_equal(again, logits)
    returned = second.backward(gradient, learning_rate=1.0, summed=True)
    assert np.abs(returned).max() > 0
    assert first.backward(returned.reshape(crossing.shape), learning_rate=1.0, summed=True) is None
    assert {**of_first, **of_second}.keys() == of_one.keys()
    for name, array in {**of_first, **of_second}.items():
        assert np.array_equal(array, of_one[name]), name


def test_the_gradient_of_a_mean_is_that_of_its_sum_by_the_samples():
    images = batches(1, size=8, seed=3)[0][0]
    results = []
    for summed in (False, True):
        model, gradients = int8(build("plain", seed=1), input_gradient=True)
        out, _ = model.forward(images)
        direction = np.random.default_rng(2).normal(size=out.shape).astype(np.float32)
        results.append(
            (model.backward(direction, learning_rate=1.0, summed=summed), dict(gradients))
        )
    assert np.array_equal(results[0][0], results[1][0])  # eight is a power of two
    assert all(np.array_equal(results[0][1][name], array) for name, array in results[1][1].items())


def test_twins_keep_a_pass_each_and_compute_the_same_as_one_after_another():
    many = batches(3, size=6, seed=3)
    model, gradients = int8(build("normalised", seed=1), input_gradient=True)
    models = [model, model.twin(), model.twin()]
    outs = [each.forward(images)[0] for each, (images, _) in zip(models, many, strict=True)]
    apart = []
    for each, out in zip(models, outs, strict=True):
        apart.append(
            (
                each.backward(np.sign(out), summed=True),
                {key: np.array(own) for key, own in gradients.items()},
            )
        )
    alone, of_alone = int8(build("normalised", seed=1), input_gradient=True)
    for (images, _), out, (of_images, own) in zip(many, outs, apart, strict=True):
        assert np.array_equal(alone.forward(images)[0], out)
        assert np.array_equal(alone.backward(np.sign(out), summed=True), of_images)
        assert all(np.array_equal(own[name], array) for name, array in of_alone.items())
    assert all(
        np.array_equal(alone.parameters.vectors[name].data, vector.data)
        for name, vector in model.parameters.vectors.items()
    )


def test_frozen_layers_and_those_without_weights_pass_the_gradient_on():
    images = batches(1, size=6, seed=3)[0][0]
    for module in (
        nn.Sequential(nn.Conv2d(3, 4, 3)).requires_grad_(False),
        nn.Sequential(nn.MaxPool2d(2), nn.ReLU()),
    ):
        model, _ = int8(module, input_gradient=True)
        out, _ = model.forward(images)
        assert np.abs(model.backward(np.ones_like(out), summed=True)).max() > 0


def test_vectors_of_another_length_are_refused():
    model, _ = int8(nn.Sequential(nn.Linear(9, 4)), (9,))
    with pytest.raises(ConfigError, match=r"need shape \(n, 9, 1, 1\)"):
        model.forward(np.zeros((2, 9), np.float32))
