"""A few of the embedded digits, so that an interval takes seconds."""

from itertools import pairwise

import numpy as np
from torch import nn

from socflower.workloads.dataset import LabelledData
from socflower.workloads.sources import load_data


def few_digits() -> tuple[LabelledData, LabelledData]:
    """Return every eighth image of the training data, and all of the test data."""
    digits = load_data("digits")
    return digits.train.select(np.arange(0, len(digits.train), 8)), digits.test


def convolutions() -> nn.Module:
    """Return a model whose gradients of a batch do not depend on how it is divided: without batch normalisation."""
    widths = (1, 16, 32, 64, 64)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4, 10))
