"""A generator whose first layers, which have the codes, are in the cloud, and whose last ones are with the images."""

import numpy as np
import torch
from torch import nn

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.model_graph.cut_points import capture_split
from tests.edgecloud.runtime.split_training import adam, assert_same, falling, train_locally
from tests.seeded import built

NUM_BATCHES = 6


def decoder() -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Linear(5, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Unflatten(1, (2, 4, 4)),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Conv2d(3, 1, 3, padding=1),
            nn.Sigmoid(),
        ),
        4,
    )


def codes(batch: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(batch).normal(size=(4, 5)).astype(np.float32)
    return torch.from_numpy(numbers), np.empty(0, np.float32), np.arange(4) + 4 * batch


def targets(batch: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1000 + batch).random((4, 1, 8, 8), np.float32))


def with_targets(batch: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    inputs, _, ids = codes(batch)
    return inputs, targets(batch).numpy(), ids


def test_a_reverse_split_with_window_0_is_local_training() -> None:
    split = capture_split(decoder(), (5,))
    losses, expected = train_locally(
        split, NUM_BATCHES, adam, source=with_targets, loss=nn.functional.mse_loss
    )
    for cut in range(split.num_cuts):
        front = TorchFront(split.copy(), cut, codes, adam, schedule=falling)
        back = TorchBack(
            split.copy(), cut, adam, nn.functional.mse_loss, schedule=falling, targets=targets
        )
        (report,) = run_actions(constant_staleness(NUM_BATCHES, 0, cut=cut), [front], [back])
        assert [report.losses[batch] for batch in range(NUM_BATCHES)] == losses
        assert not front.labels(0).size
        assert_same({**front.weights(), **back.weights()}, expected)
