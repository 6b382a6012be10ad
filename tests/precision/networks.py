"""Small networks that hold every operator and every way in which operators meet, and how tests train them."""

import copy
import functools
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
from socflower.precision.algorithm import (
    ADAPTIVE_INT16,
    MLS_FORMAT,
    OCTO,
    REAL_SCALES,
    RELATIVE_NITI,
    WAGEUBN,
    Fp32Update,
)
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
    "wageubn": WAGEUBN,
}


FURTHER_ALGORITHMS = {
    "adaptive-int16": ADAPTIVE_INT16,
    "niti-relative": RELATIVE_NITI,
    "octo": OCTO,
    "mls-format": MLS_FORMAT,
}
"""Algorithms whose elements are those of others, but for one; their steps and files are tested."""


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


class Squeezed(nn.Module):
    """A mobile block: dilation, functions by table, squeeze-and-excitation, and a learned scale and offset."""

    def __init__(self):
        super().__init__()
        self.stem, self.deep = (
            nn.Conv2d(3, 12, 3),
            nn.Conv2d(12, 12, 3, dilation=2, padding=2, groups=12),
        )
        self.norm = nn.BatchNorm2d(12)
        self.down, self.up = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.gain, self.shift = (
            nn.Parameter(torch.ones(12, 1, 1)),
            nn.Parameter(torch.zeros(1, 12, 8, 8)),
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.deep(nn.functional.hardswish(self.stem(x)))))
        gate = torch.sigmoid(self.up(nn.functional.relu6(self.down(x.mean((2, 3), keepdim=True)))))
        return self.head((x * gate * self.gain + self.shift).mean((2, 3)))


class Decoded(nn.Module):
    """An encoder and a decoder: concatenation, transposed convolution, upsampling, padding, norms of a sample."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 16, 2, stride=2)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)])
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.c = nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect")
        self.pool, self.head = nn.AdaptiveAvgPool2d(3), nn.Linear(72, CLASSES)

    def forward(self, x):
        x = torch.relu(self.norms[0](self.a(x)))
        y = self.up(nn.functional.leaky_relu(self.b(x), 0.1))
        y = torch.relu(self.norms[1](self.c(torch.cat([x, y], 1))))
        return self.head(self.pool(nn.functional.interpolate(y, scale_factor=2)).flatten(1))


class Attentive(nn.Module):
    """A small vision transformer with a class token."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 5, 5), nn.Parameter(torch.ones(1, 16, 1, 1))
        self.positions = nn.Parameter(torch.randn(1, 4, 16) * 0.5)
        layer = nn.TransformerEncoderLayer(
            16, 2, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = (self.patch(x) * self.token).flatten(2).transpose(1, 2)
        return self.head(self.encoder(x + self.positions)[:, 0])


def sequence():
    """Return layers over one dimension: the pixels as a sequence."""
    return nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 12, 5, stride=3), nn.BatchNorm1d(12), nn.GELU(), nn.MaxPool1d(2, ceil_mode=True),
        nn.Conv1d(12, 12, 3, padding=1, groups=3, bias=False), nn.LayerNorm(16), nn.Tanh(),
        nn.AdaptiveAvgPool1d(5), nn.Flatten(),
        nn.Linear(60, 24), nn.LayerNorm(24), nn.ELU(), nn.Linear(24, CLASSES), nn.Softmax(1),
    )  # fmt: skip


REACH = {"squeezed": Squeezed, "decoded": Decoded, "attentive": Attentive, "sequence": sequence}
"""Networks of the operators that the engine computes in NumPy, or by tables."""


NETWORKS = {
    "plain": plain, "normalised": normalised, "separable": separable, "overlapping": overlapping, "residual": Residual,
}  # fmt: skip


CORNERS = {"zero-branch": ZeroBranch, "rectified": rectified, "rectified-and-pooled": rectified_and_pooled,
           "dropped": dropped}  # fmt: skip
"""Networks that hold what few networks do, for the tests of just that."""


def build(name, seed=0):
    """Return a network of `NETWORKS`, `CORNERS` or `REACH`; torch's global generator is as it was."""
    return built((NETWORKS | CORNERS | REACH)[name], seed)


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
    engine = EngineSettings(rescaling=rescaling, **settings)
    if isinstance(module, str) and not options:
        captured = _captured(module, algorithm, shape)
        parameters = copy.deepcopy(captured.parameters)
        return Int8Model(captured.graph, parameters, algorithm=algorithm, settings=engine)
    return Int8Model.from_module(
        build(module) if isinstance(module, str) else module,
        input_shape=shape,
        algorithm=algorithm,
        settings=engine,
        **(options or {}),
    )


@functools.cache
def _captured(name, algorithm, shape):
    """Return an int8 model of a network that nobody trains: capturing takes longer than a few steps."""
    model = Int8Model.from_module(build(name), input_shape=shape, algorithm=algorithm)
    assert not model.islands, f"{name} would share modules of torch"
    return model


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
