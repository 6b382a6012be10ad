"""Losses that are no means over samples: a split training has the loss of whole batches, and trains as one device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.edgecloud.runtime.in_process import run_actions
from tests.edgecloud.runtime.split_training import (
    BATCH_SIZE,
    Source,
    assert_same,
    chain_split,
    falling,
    sgd,
    train_locally,
)


@dataclass(frozen=True)
class SomeIgnored(Source):
    """Batches in which one label does not count."""

    def __call__(self, batch: int) -> Samples:
        inputs, labels, rows = super().__call__(batch)
        assert isinstance(labels, np.ndarray)
        return inputs, np.where(np.arange(BATCH_SIZE) == batch % BATCH_SIZE, -100, labels), rows


def contrast(made: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(made @ made.T, torch.arange(len(made)))


@pytest.mark.parametrize(
    ("loss", "source"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 0.0])), Source()),
        (functional.cross_entropy, SomeIgnored()),
        (nn.CrossEntropyLoss(reduction="sum"), SomeIgnored()),
        (contrast, Source()),
    ],
    ids=["class weights", "ignored", "sum", "contrast"],
)
def test_a_split_trains_as_one_device_with_any_loss(
    loss: Callable[..., Tensor], source: Source
) -> None:
    split, num_batches = chain_split(), 4
    front = TorchFront(split.copy(), 2, source, sgd, schedule=falling, loss=loss)
    back = TorchBack(split.copy(), 2, sgd, loss, schedule=falling)
    (report,) = run_actions(constant_staleness(num_batches, 0, cut=2), [front], [back])
    losses, weights = train_locally(split, num_batches, sgd, source=source, loss=loss)
    assert list(report.losses.values()) == pytest.approx(losses, rel=1e-6)
    assert_same({**front.weights(), **back.weights()}, weights)
