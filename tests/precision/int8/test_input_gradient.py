"""The gradient of the images, for layers before: close to autograd's, and bit for bit that inside one engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from socflower.precision.algorithm import (
    ADAPTIVE_FIXED_POINT,
    HANDED_OUT_GRADIENTS,
    OutsideUpdate,
)
from socflower.precision.int8.parameters import start_gradients
from tests.one_line import refused
from tests.precision.int8.test_gradients import cosine
from tests.precision.networks import IMAGE, NETWORKS, REACH, assert_same, batches, build, int8
from tests.seeded import built

POWERS_OF_TWO = replace(ADAPTIVE_FIXED_POINT, update=OutsideUpdate())


def engine(module, shape=IMAGE, algorithm=HANDED_OUT_GRADIENTS, **options):
    """Return a model that hands its gradients out, and those gradients."""
    made = int8(module, algorithm, shape=shape, options={"head": False, **options})
    return made, start_gradients(made.graph, made.parameters)


def passes(model, gradients, images, gradient_of, **settings):
    """Return output, gradient of the images, and copies of the gradients handed out."""
    out, _ = model.forward(images)
    of_images = model.backward(gradient_of(out), **({"summed": True} | settings))
    return out, of_images, {name: np.array(own) for name, own in gradients.items()}


def at_random(out):
    return np.random.default_rng(2).normal(size=out.shape).astype(np.float32)


def rounded(module, model):
    """Return the module with the weights that int8 stands for."""
    module.load_state_dict(model.state_dict())
    return module.train()


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_the_gradient_of_the_images_points_where_autograd_does(name):
    """And with it, no bit of the rest is another one."""
    images = batches(1, size=48, seed=3)[0][0]
    module = build(name, seed=1)
    model, gradients = engine(module, input_gradient=True)
    out, got, own = passes(model, gradients, images, at_random)
    without, of_nothing, same = passes(*engine(module), images, at_random)
    assert of_nothing is None
    np.testing.assert_array_equal(out, without)
    assert_same(own, same)
    inputs = torch.from_numpy(images).requires_grad_()
    made = rounded(module, model)(inputs)
    made.backward(torch.from_numpy(at_random(out)).reshape(made.shape))
    assert got.shape == images.shape
    # Of each image by itself, so rounding does not average out; where a maximum is another one, its place is wrong.
    assert cosine(got, inputs.grad.numpy()) > 0.9
    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(inputs.grad.numpy()), rel=0.15)


class Branches(nn.Module):
    """Layers whose input several operators read."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return torch.relu(x + self.norm(self.a(x)) + self.b(x))


def tail():
    return [nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)]


def first(bias=True):
    return nn.Conv2d(3, 8, 3, bias=bias)


CUTS = {
    "convolution": lambda: ([first()], tail()),
    "BatchNorm and ReLU": lambda: ([first(False), nn.BatchNorm2d(8), nn.ReLU()], tail()),
    "average": lambda: ([first(), nn.ReLU(), nn.AvgPool2d(2)], tail()),
    "residual block": lambda: ([first()], [Branches(), *tail()]),
    "pool": lambda: ([first()], [nn.MaxPool2d(3, stride=2), *tail()]),
    "ReLU": lambda: ([first(False), nn.BatchNorm2d(8)], [nn.Dropout(0.0), *tail()]),
    "features": lambda: (
        [first(), nn.Flatten(), nn.LazyLinear(24)],
        [nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 5)],
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [8, 11])
def test_two_engines_in_a_row_compute_the_bits_of_one(cut, size):
    """Where a rounded product crosses the cut, whose exponent the second engine finds again in its largest value.

    Of a real scale the second engine would find another one.
    """
    images = batches(1, size=size, seed=4)[0][0]

    def parts():
        front, back = (nn.Sequential(*layers) for layers in CUTS[cut]())
        back(front(torch.from_numpy(images)))
        return front, back

    front, back = built(parts, 0)
    logits, _, of_one = passes(
        *engine(nn.Sequential(*front, *back), algorithm=POWERS_OF_TWO), images, at_random
    )
    shape = tuple(front(torch.from_numpy(images)).shape)
    (first_engine, of_first), (second_engine, of_second) = (
        engine(front, algorithm=POWERS_OF_TWO),
        engine(back, shape[1:], POWERS_OF_TWO, input_gradient=True),
    )
    crossing, _ = first_engine.forward(images)
    inputs = crossing.reshape(*shape, *(1,) * (4 - len(shape)))
    again, returned, _ = passes(second_engine, of_second, inputs, at_random)
    np.testing.assert_array_equal(again, logits)
    assert np.abs(returned).max() > 0
    assert first_engine.backward(returned.reshape(crossing.shape), summed=True) is None
    own = {
        **of_first,
        **{f"{len(front) + int(name[0])}{name[1:]}": of_second[name] for name in of_second},
    }
    assert_same(own, of_one)


def test_the_gradient_of_a_mean_is_that_of_its_sum_by_the_samples():
    images = batches(1, size=8, seed=3)[0][0]  # eight is a power of two
    (_, of_mean, own_of_mean), (_, of_sum, own_of_sum) = (
        passes(
            *engine(build("plain", seed=1), input_gradient=True), images, at_random, summed=summed
        )
        for summed in (False, True)
    )
    np.testing.assert_array_equal(of_mean, of_sum)
    assert_same(own_of_mean, own_of_sum)


def test_twins_keep_a_pass_each_and_compute_the_same_as_one_after_another():
    many = [images for images, _ in batches(3, size=6, seed=3)]
    model, gradients = engine(build("normalised", seed=1), input_gradient=True)
    models = [model, model.twin(), model.twin()]
    outs = [each.forward(images)[0] for each, images in zip(models, many, strict=True)]
    alone, of_alone = engine(build("normalised", seed=1), input_gradient=True)
    for each, images, out in zip(models, many, outs, strict=True):
        of_images = each.backward(np.sign(out), summed=True)
        expected_out, expected, own = passes(alone, of_alone, images, np.sign)
        np.testing.assert_array_equal(out, expected_out)
        np.testing.assert_array_equal(of_images, expected)
        assert_same(gradients, own)
    assert_same(model.arrays(), alone.arrays())


def test_frozen_layers_and_those_without_weights_pass_the_gradient_on():
    images = batches(1, size=6, seed=3)[0][0]
    frozen = nn.Sequential(nn.Conv2d(3, 4, 3)).requires_grad_(False)
    for module in (frozen, nn.Sequential(nn.MaxPool2d(2), nn.ReLU())):
        _, of_images, _ = passes(*engine(module, input_gradient=True), images, np.ones_like)
        assert np.abs(of_images).max() > 0


def test_what_does_not_fit_is_refused():
    model, _ = engine(nn.Sequential(nn.Linear(9, 4)), (9,))
    refused(lambda: model.forward(np.zeros((2, 9), np.float32)), "(n, 9, 1, 1)")
    out, _ = model.forward(np.ones((2, 9, 1, 1), np.float32))
    refused(lambda: model.backward(out[:1]), "(2, 4, 1, 1)", "(1, 4, 1, 1)")
    refused(lambda: model.backward(out), "forward")
    refused(lambda: int8(nn.Sequential(nn.Conv2d(3, 8, 3))), "(8, 8, 8)", "logits")
