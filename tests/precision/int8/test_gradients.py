"""Int8 gradients against torch autograd: what the engine descends is close to what FP32 would."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from socflower.precision import ADAPTIVE_FIXED_POINT
from socflower.precision.algorithm import BackwardRule
from tests.precision.networks import CLASSES, NETWORKS, REACH, batches, build, int8
from tests.seeded import built

FP32_LOSS = dataclasses.replace(ADAPTIVE_FIXED_POINT, backward=BackwardRule(loss="fp32"))


def gradients(module, reference=None, algorithm=ADAPTIVE_FIXED_POINT, *, seed=3, rate=1e-3, **more):
    """Return {name: (int8 engine's gradient, torch's)} on one batch, torch at the weights that int8 stands for.

    `reference` shares the layers of `module`; torch runs it instead.
    """
    images, labels = batches(1, size=48, seed=seed)[0]
    model = int8(module, algorithm, options=more)
    for weight in model.parameters.weights.values():
        weight.master[...] = np.ldexp(weight.data.astype(np.float32), weight.exponent)
    before = model.state_dict()
    module.load_state_dict(before)
    module.zero_grad()
    logits = (reference or module).train()(torch.from_numpy(images))
    nn.functional.cross_entropy(logits, torch.from_numpy(labels).long()).backward()
    model.train_step(images, labels, learning_rate=rate, seed=seed)
    after = model.state_dict()
    return {
        name: (
            (before[name].double() - after[name].double()).numpy() / rate,
            parameter.grad.double().numpy(),
        )
        for name, parameter in module.named_parameters()
    }


def cosine(a, b):
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


SWALLOWED = {"separable": {"1.weight", "1.bias"}}
"""Scale and offset of a BatchNorm that the next one takes back: their gradients cancel but for rounding."""


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [*((name, ADAPTIVE_FIXED_POINT) for name in [*NETWORKS, *REACH]), ("plain", FP32_LOSS)],
)
def test_the_mean_gradient_of_some_batches_points_where_autograd_does(name, algorithm):
    assert_means_agree(name, algorithm, 0.95 if name in SWALLOWED or name in REACH else 0.98)


def assert_means_agree(name, algorithm, least_cosine):
    """Compare sums over batches: rounding errors are unbiased, so what remains of them is small."""
    sums = {}
    for seed in range(6):
        pairs = gradients(build(name, seed=1), algorithm=algorithm, seed=seed)
        for parameter, pair in pairs.items():
            sums[parameter] = sums.get(parameter, 0.0) + np.stack(pair)
    for parameter, (got, expected) in sums.items():
        if np.abs(expected).max() < 1e-5 or parameter in SWALLOWED.get(name, ()):
            continue
        assert cosine(got, expected) > least_cosine, parameter
        # The gradients of a gate are small, and so is what averages out of their rounding.
        close = pytest.approx(np.linalg.norm(expected), rel=0.3 if name in REACH else 0.15)
        assert np.linalg.norm(got) == close, parameter


@pytest.mark.parametrize("name", ["rectified", "rectified-and-pooled"])
def test_rectified_logits_pass_no_gradient_where_they_are_zero(name):
    assert_means_agree(name, ADAPTIVE_FIXED_POINT, 0.98)


def test_a_residual_branch_of_zeros_leaves_the_gradient_as_it_is():
    got, expected = gradients(build("zero-branch"), rate=1e3)["stem.weight"]
    assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(expected), rel=0.2)


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.GroupNorm(2, 8), lambda: nn.Conv2d(8, 8, 1)])
def test_an_fp32_operator_in_the_middle_passes_the_gradient_of_autograd(make):
    def network():
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), make(), nn.AvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8 * 16, CLASSES))

    module = built(network, 2)
    for parameter, (got, expected) in gradients(module, fp32_operators=["2"]).items():
        assert cosine(got, expected) > 0.98, parameter
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(expected), rel=0.1), parameter
