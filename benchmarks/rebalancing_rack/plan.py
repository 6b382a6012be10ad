"""What the members of a rack are told, what they measure, and what all of them train: plain values travel as JSON."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import GroupTask
from socflower.workloads import LabelledData, build_model

MODEL = "vgg-small"
LEARNING_RATE, MOMENTUM = 0.002, 0.9  # training amplifies what is rounded differently: gently here


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training from the same beginning."""

    transport: str
    addresses: tuple[str, ...]  # of the ring's members, in ring order
    batch_size: int
    num_steps: int
    rebalance_steps: int = 0

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Run":
        """Return what `dataclasses.asdict` has taken apart."""
        addresses = document["addresses"]
        assert isinstance(addresses, list)
        return cls(**{**document, "addresses": tuple(addresses)})

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
        """Return the data: noise, which takes as long to train on as anything else."""
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
class Measured:
    """What a member measured in a run."""

    step_s: tuple[
        float, ...
    ]  # from the end of the step before to the end of the step; the first is not known
    own_s: tuple[float, ...]  # of each step, what this member did itself
    samples: tuple[int, ...]  # of each step, this member's
    rates: tuple[float, ...]  # of all members, as the ring's outcome has them
    cores: float  # that its process got, on average over the run
    weights: str  # file that the weights were written to at the end, overwritten by the next run


def model() -> nn.Module:
    """Return the model, always with the same weights."""
    return build_model(MODEL, in_channels=3, image_size=32, num_classes=10, seed=1)


def trainer() -> FP32Trainer:
    """Return what all members train with."""
    return FP32Trainer(optimizer=sgd(LEARNING_RATE, MOMENTUM), channels_last=True)
