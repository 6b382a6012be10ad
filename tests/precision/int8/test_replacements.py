"""An algorithm of the user's translates the user's own modules."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from socflower.precision import Int8Model
from socflower.precision.algorithm import REAL_SCALES, TrainingAlgorithm
from tests.one_line import refused
from tests.precision.networks import IMAGE, batches
from tests.seeded import built


class Swish(nn.Module):
    """SiLU, in a form that int8 has only as a part in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.special.expit(x)


class Scaled(nn.Module):
    """A convolution with standardised weights, which int8 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, IMAGE[0], 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight / self.weight.std(), padding=1)


def network() -> nn.Module:
    return nn.Sequential(Scaled(), Swish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def translating(**classes: Any) -> TrainingAlgorithm:
    """Return the default algorithm with replacements for the classes of these names."""
    by_class = {globals()[name]: make for name, make in classes.items()}
    return replace(REAL_SCALES, forward=replace(REAL_SCALES.forward, replacements=by_class))


def plain_convolution(module: Scaled) -> nn.Module:
    return nn.Conv2d(IMAGE[0], 8, 3, padding=1, bias=False)


def test_replacements_train_in_int8_with_the_modules_weights(tmp_path) -> None:
    algorithm = translating(Swish=lambda module: nn.SiLU(), Scaled=plain_convolution)
    module = built(network, 1)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = Int8Model.from_module(
        module, input_shape=IMAGE, algorithm=algorithm, unsupported="refuse"
    )
    assert np.array_equal(model.arrays()["0.weight"], before["0.weight"].numpy())
    images, labels = batches(1)[0]
    losses = [model.train_step(images, labels, learning_rate=0.1).loss for _ in range(12)]
    assert losses[-1] < losses[0]
    assert isinstance(module[1], Swish)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    model.save(tmp_path / "model.npz")
    again = Int8Model.load(tmp_path / "model.npz")
    assert np.array_equal(again.predict(images), model.predict(images))


def test_what_cannot_take_a_modules_place_is_refused() -> None:
    def converted(**classes: Any) -> Int8Model:
        return Int8Model.from_module(
            built(network, 1), input_shape=IMAGE, algorithm=translating(**classes)
        )

    refused(lambda: converted(Swish=lambda module: torch.relu), "Swish", "Module")
    refused(lambda: converted(Swish=lambda module: nn.PReLU()), "1 (Swish)", "weight")
    refused(lambda: converted(Scaled=lambda module: nn.Conv2d(1, 1, 3)), "0 (Scaled)", "bias")
