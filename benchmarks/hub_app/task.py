"""The models: LeNet-5, whose messages are mostly wrapping, and a perceptron thirty times its size."""

import torch
from torch import nn

from socflower.workloads import build_model

WIDTH = 1024


def load_model(name: str) -> nn.Module:
    """Return a model for the digits; equal weights each time."""
    if name != "perceptron":
        return build_model(name, in_channels=1, image_size=28, num_classes=10, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                             nn.Linear(WIDTH, 10))
