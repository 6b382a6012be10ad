"""Small networks that hold every operator and every way in which operators meet, and how tests train them."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from socflower.precision import (
    ADAPTIVE_FIXED_POINT,
    NITI,
    EngineSettings,
    Int8Model,
    RescalingPolicy,
)
from socflower.precision.algorithm import REAL_SCALES, Fp32Update
from tests.seeded import built

IMAGE = (3, 10, 10)
CLASSES = 5
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

ALWAYS = RescalingPolicy(adaptive=False)
SELDOM = RescalingPolicy(warm_up_batches=2)
MOMENTUM = replace(ADAPTIVE_FIXED_POINT, update=Fp32Update(momentum=0.9))
ALGORITHMS = {
    "niti": NITI,
    "adaptive-fixed-point": ADAPTIVE_FIXED_POINT,
    "momentum": MOMENTUM,
    "real-scales": REAL_SCALES,
}
# Those that the NumPy trainer has.
POWERS_OF_TWO = {name: each for name, each in ALGORITHMS.items() if each is not REAL_SCALES}


def plain():
    """Return convolutions with bias, ReLU, max-pool and linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 18, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(18 * 3 * 3, 24), nn.ReLU(), nn.Linear(24, CLASSES),
    )  # fmt: skip


def normalised():
    """Return BatchNorm with and without a ReLU behind it, and average pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.AvgPool2d(3, stride=1, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def separable():
    """Return depthwise and grouped convolutions, with a multiplier of 2."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=16), nn.ReLU(),
        nn.Conv2d(32, 20, (1, 1), groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, CLASSES),
    )  # fmt: skip


def overlapping():
    """Return max-pools with overlapping and padded windows, over rectified values and others."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(10, 12, 3, padding=1), nn.MaxPool2d(3, stride=1, padding=1), nn.ReLU(),
        nn.MaxPool2d((2, 3), stride=(2, 1)), nn.Flatten(), nn.Linear(12 * 2 * 3, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    """Two residual blocks, one with a 1x1 projection, with values that two and three operators read."""

    def __init__(self):
        super().__init__()
        self.stem, self.a = (nn.Conv2d(c, 12, 3, padding=1, bias=c == 3) for c in (3, 12))
        self.norm = nn.BatchNorm2d(12)
        self.b = nn.Conv2d(12, 20, 3, stride=2, padding=1)
        self.project = nn.Conv2d(12, 20, 1, stride=2)
        self.c = nn.Conv2d(20, 20, 1)
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(20, CLASSES)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = nn.functional.relu(x + self.norm(self.a(x)))
        y = self.b(x) + self.project(x)
        z = torch.relu(y)
        y = torch.add(y, self.c(z)) + z
        return self.head(self.mean(y.relu()).flatten(1))


class ZeroBranch(nn.Module):
    """A residual branch whose BatchNorm starts at scale 0, as residual networks often do, and tiny gradients."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)
        nn.init.zeros_(self.norm.weight)
        nn.init.normal_(self.head.weight, std=1e-5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(self.mean(x + self.norm(x)).flatten(1))


def rectified():
    """Return a linear layer whose ReLU makes the logits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(300, CLASSES), nn.ReLU())


def rectified_and_pooled():
    """Return a max-pool over rectified values that makes the logits."""
    return nn.Sequential(nn.Conv2d(3, CLASSES, 9), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


def dropped():
    """Return dropout of elements and channels: of the images, of rectified values and others, of features."""
    return nn.Sequential(
        nn.Dropout(0.1), nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(10, 12, 3),
        nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(12 * 4 * 4, 24),
        nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, CLASSES),
    )  # fmt: skip


NETWORKS = {
    "plain": plain, "normalised": normalised, "separable": separable, "overlapping": overlapping, "residual": Residual,
}  # fmt: skip


CORNERS = {"zero-branch": ZeroBranch, "rectified": rectified, "rectified-and-pooled": rectified_and_pooled,
           "dropped": dropped}  # fmt: skip
"""Networks that hold what few networks do, for the tests of just that."""


def build(name, seed=0):
    """Return a network of `NETWORKS` or `CORNERS`; torch's global generator is as it was."""
    return built((NETWORKS | CORNERS)[name], seed)


def batches(count, size=6, seed=0, image=IMAGE, classes=CLASSES):
    """Return (images, labels) that can be learned: the label moves the mean of a patch."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        labels = rng.integers(0, classes, size).astype(np.int32)
        images = rng.standard_normal((size, *image)).astype(np.float32) * 0.5
        for image_of_label, label in zip(images, labels, strict=True):
            image_of_label[:, label : label + 4, 2:6] += 1.5
        made.append((images, labels))
    return made


def state_of(name, seed=0):
    """Return the state of a network as arrays."""
    return {key: value.numpy().copy() for key, value in build(name, seed).state_dict().items()}


def trained_of(state):
    """Return a state without running statistics."""
    return {key: array for key, array in state.items() if not key.endswith(STATISTICS)}


def int8(module, algorithm=NITI, *, shape=IMAGE, options=None, rescaling=ALWAYS, **settings):
    """Return the int8 model of a module, or of a network by its name."""
    return Int8Model.from_module(
        build(module) if isinstance(module, str) else module,
        input_shape=shape,
        algorithm=algorithm,
        settings=EngineSettings(rescaling=rescaling, **settings),
        **(options or {}),
    )


def train(model, data, rate=0.05):
    """Train on each batch; return the losses."""
    return [
        model.train_step(*batch, learning_rate=rate, progress=index / len(data)).loss
        for index, batch in enumerate(data)
    ]


def assert_same(arrays, expected):
    """Compare arrays by name, bit for bit."""
    assert set(arrays) == set(expected)
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array, name)
