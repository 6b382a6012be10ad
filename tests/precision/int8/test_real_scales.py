"""Operators under real scales: each follows torch when its inputs have a factor, and evaluates each image by itself."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower.precision.algorithm import REAL_SCALES
from socflower.training.int8_module import int8_
from tests.precision.networks import CORNERS, IMAGE, NETWORKS, REACH, batches, int8, train
from tests.seeded import built

# The rounding is unbiased; a scale that is left out multiplies results by 0.5 to 1, by the seed.
GAIN_TOLERANCE = 0.025
TOLERANCE = 0.1
SEEDS = range(3)


class After(nn.Module):
    """A convolution, whose result has a real scale, and a function of a module and of that result."""

    def __init__(self, make, function=lambda inner, one: inner(one)):
        super().__init__()
        self.one, self.inner, self.function = nn.Conv2d(3, 8, 3), make(), function

    def forward(self, x):
        return self.function(self.inner, self.one(x))


class AfterTwo(After):
    """Two convolutions, and a function of their results."""

    def __init__(self, function):
        super().__init__(nn.Identity, function)
        self.other = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.function(self.one(x), self.other(x) * 0.3)


class Shifted(nn.Module):
    """A learned offset and scale."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.gain = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        return x * self.gain + self.shift


def wide_after_scale():
    """Return a linear layer with more products than int32 holds, behind another one."""
    return nn.Sequential(nn.Conv2d(3, 33, 1), nn.Flatten(), nn.Linear(33 * 64 * 64, 4))


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def attend(one, other):
    weights = torch.softmax(tokens(one) @ tokens(other).transpose(1, 2) * 0.5, -1)
    return weights @ tokens(one)


KINDS = {
    "concat": lambda: AfterTwo(lambda one, other: torch.cat([one, other], 1)),
    "concat-rows": lambda: AfterTwo(lambda one, other: torch.cat([one, other], 2)),
    "multiply": lambda: AfterTwo(lambda one, other: one * other),
    "multiply-channels": lambda: AfterTwo(
        lambda one, other: one * other.mean((2, 3), keepdim=True)
    ),
    "add": lambda: AfterTwo(lambda one, other: one + other),
    "attention": lambda: AfterTwo(attend),
    "softmax": lambda: After(nn.Identity, lambda inner, one: torch.softmax(one, 1)),
    "slices": lambda: After(nn.Identity, lambda inner, one: functional.pad(one[:, 2:6], (1, 1))),
    "upsampling": lambda: After(
        nn.Identity, lambda inner, one: functional.interpolate(one, scale_factor=2)
    ),
    "rearranged": lambda: After(lambda: nn.Linear(8, 5), lambda inner, one: inner(tokens(one))),
    "parameters": lambda: After(Shifted),
    "gelu": lambda: After(nn.GELU),
    "silu": lambda: After(nn.SiLU),
    "hardswish": lambda: After(nn.Hardswish),
    "sigmoid": lambda: After(nn.Sigmoid),
    "group-norm": lambda: After(lambda: nn.GroupNorm(2, 8)),
    "instance-norm": lambda: After(lambda: nn.InstanceNorm2d(8, affine=True)),
    "layer-norm": lambda: After(lambda: nn.LayerNorm(8), lambda inner, one: inner(tokens(one))),
    "region-mean": lambda: After(lambda: nn.AdaptiveAvgPool2d(3)),
    "transposed": lambda: After(lambda: nn.ConvTranspose2d(8, 6, 2, stride=2)),
    "dilated": lambda: After(lambda: nn.Conv2d(8, 6, 3, dilation=2)),
    "fp32": lambda: After(nn.Tanhshrink),
    "wide": wide_after_scale,
}


def assert_near(made, expected, name=""):
    """Compare direction and length of two tensors; errors of few numbers average out less."""
    size = float((expected * expected).sum())
    tolerance = GAIN_TOLERANCE * (1.0 if expected.numel() >= 16 else 2.0)
    assert abs(float((made * expected).sum()) / size - 1.0) < tolerance, name
    assert float((made - expected).norm()) < TOLERANCE * size**0.5, name


@pytest.mark.few_cells(5)
@pytest.mark.filterwarnings("ignore:int8 training has no kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_all_gradients_are_those_of_torch_within_the_rounding(kind):
    for seed in SEEDS if kind != "wide" else range(1):
        module = built(KINDS[kind], seed)
        peer = copy.deepcopy(module)
        int8_(module, unsupported="fp32")
        torch.manual_seed(seed)
        size = 64 if kind == "wide" else 8
        # No two seeds have the same mantissa of the scales.
        images = torch.randn(4, 3, size, size) * (1.0 + 0.31 * seed)
        passes = []
        slope = None
        for each in (module, peer):
            x = images.clone().requires_grad_()
            made = each(x)
            slope = torch.randn_like(made) if slope is None else slope
            (made * slope).sum().backward()
            gradients = {name: part.grad for name, part in each.named_parameters()}
            passes.append((made.detach(), x.grad, gradients))
        (made, of_input, gradients), (made_peer, of_input_peer, gradients_peer) = passes
        assert_near(made, made_peer)
        assert_near(of_input, of_input_peer)
        for name, gradient in gradients_peer.items():
            # A bias before a norm has a gradient of 0 but for the rounding.
            if gradient is not None and gradient.norm() > 1e-3:
                assert_near(gradients[name], gradient, name)


@pytest.mark.filterwarnings("ignore:int8 training has no kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_that_of_torch_within_the_rounding_and_each_image_has_its_own(kind):
    module = built(KINDS[kind], 0)
    peer = copy.deepcopy(module).eval()
    int8_(module, unsupported="fp32").eval()
    size = 64 if kind == "wide" else 8
    torch.manual_seed(1)
    # Scales that one scale for the batch could not hold.
    images = torch.randn(5, 3, size, size) * torch.tensor([1.0, 37.0, 0.02, 3.0, 0.7]).reshape(
        -1, 1, 1, 1
    )
    with torch.no_grad():
        made, expected = module(images), peer(images)
        for index, image in enumerate(images):
            assert torch.equal(module(image[None])[0], made[index])
            assert_near(made[index], expected[index])


@pytest.mark.parametrize("name", NETWORKS | CORNERS | REACH)
def test_a_prediction_depends_on_its_image_alone(name):
    model = int8(name, REAL_SCALES)
    train(model, batches(3))
    images = np.concatenate([batches(1, seed=5)[0][0], 40.0 * batches(1, seed=6)[0][0]])
    together = model.predict(images)
    for index in range(len(images)):
        np.testing.assert_array_equal(model.predict(images[index : index + 1])[0], together[index])
    np.testing.assert_array_equal(model.predict(images, batch_size=5), together)


def test_an_embedding_evaluates_each_sequence_by_itself():
    module = built(
        lambda: nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3)),
        0,
    )
    model = int8(module, REAL_SCALES, shape=(5,))
    numbers = np.random.default_rng(0).integers(0, 10, (6, 5, 1, 1)).astype(np.float32)
    together = model.predict(numbers)
    with torch.no_grad():
        expected = module(torch.from_numpy(numbers[..., 0, 0]).long())
    assert_near(torch.from_numpy(together).float(), expected)
    for index in range(6):
        np.testing.assert_array_equal(model.predict(numbers[index : index + 1])[0], together[index])


def test_an_image_of_zeros_is_evaluated():
    model = int8("decoded", REAL_SCALES)
    assert np.isfinite(model.predict(np.zeros((2, *IMAGE), np.float32))).all()
