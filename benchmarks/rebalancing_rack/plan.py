"""The runs and the measurements of a rack's members, which travel as JSON, and the training of all members."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import GroupTask
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model

MODEL = "vgg-small"
# A low rate, since training amplifies differences of rounding.
LEARNING_RATE, MOMENTUM = 0.002, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRun:
    """One training; all begin with the same weights."""

    transport: str
    # Of the ring's members, in ring order.
    addresses: tuple[str, ...]
    batch_size: int
    num_steps: int
    rebalance_steps: int = 0

    def task(self) -> GroupTask:
        """Return the group's work: one epoch of different batches."""
        size = len(self.addresses)
        return GroupTask(
            group_id=0,
            num_groups=1,
            members=tuple(range(size)),
            leader=0,
            partitions=tuple(range(size)),
            num_partitions=size,
            capacities=(1.0,) * size,
            first_step=0,
            num_steps=self.num_steps,
            steps_per_epoch=self.num_steps,
            total_steps=self.num_steps,
            batch_size=self.batch_size,
            reshuffle=True,
            deal_epoch=0,
            seed=3,
            num_samples=self.batch_size * self.num_steps,
        )

    def samples(self) -> LabelledData:
        """Return the data: noise, which takes as long to train on as images."""
        generator = torch.Generator().manual_seed(1)
        num_samples = self.batch_size * self.num_steps
        return LabelledData(
            inputs=torch.randint(
                0, 256, (num_samples, 3, 32, 32), generator=generator, dtype=torch.uint8
            ),
            labels=torch.randint(0, 10, (num_samples,), generator=generator),
            mean=(0.5,) * 3,
            std=(0.25,) * 3,
            num_classes=10,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberTimes:
    """A member's measurements of a run."""

    # From the end of a step to the end of the next; the first step has no value.
    step_s: tuple[float, ...]
    # This member's own work in each step.
    own_s: tuple[float, ...]
    # This member's samples in each step.
    samples: tuple[int, ...]
    # Of all members, as in the ring's outcome.
    rates: tuple[float, ...]
    # The cores that the process got, on average over the run.
    cores: float
    # A file with the final weights; the next run overwrites it.
    weights: str


def model() -> nn.Module:
    """Return the model, always with the same weights."""
    return build_model(MODEL, in_channels=3, image_size=32, num_classes=10, seed=1)


def flat_weights(trained: nn.Module) -> NDArray[np.float32]:
    """Return all parameters in one row."""
    parts = [each.detach().contiguous().numpy().ravel() for each in trained.parameters()]
    return np.concatenate(parts)


def trainer() -> FP32Trainer:
    """Return the trainer of all members."""
    return FP32Trainer(optimizer=sgd(LEARNING_RATE, MOMENTUM), channels_last=True)
