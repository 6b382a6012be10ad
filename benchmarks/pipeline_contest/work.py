"""The work for devices of a contest, their answers, and the models and data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness import peer_notes
from socflower.model_graph.batch_form import Batch, labelled
from socflower.pipeline.plan import PipelinePlan, Plan
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.member import Mini
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import LabelledData
from tests import cpu_quota
from tests.testbed import testbed
from tests.testbed.topology import Rack

CORES = (0.5, 0.35, 0.25, 0.15)
"""The devices' quotas of a core; their sum is small enough for this machine."""

MINI_BATCH = 64
SHAPE = (3, 64, 64)
SPAN = TrainingSpan(seed=(1, 0))
_NUM_SAMPLES = 512
_BURST_S, _MOST_BURST_BYTES = 0.0055, 256 * 1024
_CLASSES = 10
_WIDTHS = (32, "pool", 64, "pool", 128, 128, "pool", 256, 256, "pool", 256, 256, "pool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, its data and its trainer; its functions return the same in every process."""

    build: Callable[[], nn.Module]
    # Pairs of inputs and labels.
    data: Callable[[], DataSource]
    trainer: FP32Trainer
    # Makes once what `build` copies and `read` returns, before the devices have their quotas.
    prepared: Callable[[], tuple[nn.Module, ReadModel]] | None = None

    def read(self, module: nn.Module) -> ReadModel:
        """Return the layers of the model."""
        if self.prepared is not None:
            return self.prepared()[1]
        return read_model(module, self.example(), "model")

    def example(self) -> Batch:
        """Return the inputs of a batch of one."""
        return labelled(self.data().batch(torch.zeros(1, dtype=torch.int64)), "contest")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measure each layer's seconds, all devices at once."""

    workload: Workload
    batches: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """The seconds that a device needs under its quota; passes by [layer][batch]."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    # Of all weights.
    update_s: float
    # That the device got.
    cores: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Measure the whole model's passes, all devices that do it at once."""

    workload: Workload
    batch_size: int
    # About how long the measurement takes.
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Carry:
    """Do the model's passes while exchanging messages with another device that does the same."""

    workload: Workload
    batch_size: int
    # Of both passes without messages, by device.
    pass_s: dict[int, float]
    # Of a message.
    num_bytes: int
    # In each direction.
    num_messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train by a plan, with our runtime or, on a straight pipeline of equal micro-batches, with torch's."""

    workload: Workload
    plan: Plan
    num_updates: int
    # Of the mini-batches.
    seed: int = 2
    coding: ActivationCoding = EXACT
    by_torch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Federated:
    """Train alone, and average the models in a ring after each round."""

    # Of each device in a round.
    samples: tuple[int, ...]
    batch_size: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Do all passes of a device under a plan, without messages."""

    workload: Workload
    plan: PipelinePlan
    num_updates: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
    """Send all messages of a pipeline of two stages, without passes."""

    # Of a message.
    num_bytes: int
    # In each direction.
    num_messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A device's times by the machine's monotonic clock, and its final weights."""

    began_s: float
    # Of each update or round.
    ends_s: tuple[float, ...]
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)


Work = Profile | Speed | Carry | Train | Federated | Passes | Transfers


def build_model() -> nn.Module:
    """Return a VGG of half width with 2.3 million weights, the same in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = SHAPE[0]
    for width in _WIDTHS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(channels, _CLASSES))


def build_wide_model() -> nn.Module:
    """Return a model of equal layers with large activations, for a cut in the middle."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (SHAPE[0], *[16] * 7):
        layers += [nn.Conv2d(channels, 16, 11, padding=5), nn.Tanh()]
    return nn.Sequential(*layers, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(256, _CLASSES))


@cache
def build_data() -> LabelledData:
    """Return random images, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return LabelledData(
        torch.randn(_NUM_SAMPLES, *SHAPE, generator=generator),
        torch.randint(0, _CLASSES, (_NUM_SAMPLES,), generator=generator),
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        num_classes=_CLASSES,
    )


VGG = Workload(
    build=build_model, data=build_data, trainer=FP32Trainer(optimizer=sgd(0.01, 0.9), device="cpu")
)
WIDE = Workload(build=build_wide_model, data=build_data, trainer=VGG.trainer)


def minis(work: Train | Passes) -> list[Mini]:
    """Return the mini-batches of a training."""
    rng, num_data = np.random.default_rng(getattr(work, "seed", 2)), len(work.workload.data())
    return [
        Mini(step=step, indices=rng.integers(0, num_data, work.plan.num_samples))
        for step in range(work.num_updates)
    ]


def rack(bit_per_s: int, num_devices: int = len(CORES)) -> Rack:
    """Return the devices on one board.

    A link sends the bytes of 5.5 ms at once: whole TCP segments at 100 Mbit/s. If segments were split into frames, a
    device with a small quota would need more time for them than the link.
    """
    return Rack(
        slots_per_board=(num_devices,),
        soc_bit_per_s=bit_per_s,
        uplink_bit_per_s=bit_per_s,
        burst_bytes=min(_MOST_BURST_BYTES, int(_BURST_S * bit_per_s / 8)),
    )


def has_devices() -> bool:
    """Return whether the rack and its quotas can be made here, and tell of that."""
    reason = testbed.missing() or cpu_quota.missing()
    peer_notes["devices"] = reason or f"quotas of {', '.join(map(str, CORES))} cores"
    return reason is None
