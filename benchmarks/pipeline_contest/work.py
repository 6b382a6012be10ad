"""What the devices of a contest are told to do, and what they answer; the model and the data of all."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from socflower.pipeline.plan import PipelinePlan, Plan
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.member import Mini
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.workloads import LabelledData
from tests.testbed.topology import Rack

CORES = (0.5, 0.35, 0.25, 0.15)
"""The devices: parts of a core, together little enough for this machine to give."""

MINI_BATCH = 64
SHAPE = (3, 64, 64)
TRAINER = FP32Trainer(optimizer=sgd(0.01, 0.9), device="cpu")
SPAN = TrainingSpan(seed=(1, 0))
_NUM_SAMPLES = 512
_BURST_S, _MOST_BURST_BYTES = 0.0055, 256 * 1024
_CLASSES = 10
_WIDTHS = (32, "pool", 64, "pool", 128, 128, "pool", 256, 256, "pool", 256, 256, "pool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measure each layer's seconds, all devices at once."""

    batches: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """What a device takes, as long as it gets its part of a core."""

    forward_s: NDArray[np.float64]  # [layer][batch]
    backward_s: NDArray[np.float64]
    update_s: float  # of all weights
    cores: float  # that it got


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train by a plan, with our runtime or, on a straight pipeline of equal micro-batches, with torch's."""

    plan: Plan
    num_updates: int
    coding: ActivationCoding = EXACT
    by_torch: bool = False
    wide: bool = False  # whether it is the plan of the wide model


@dataclass(frozen=True, kw_only=True, slots=True)
class Federated:
    """Train alone, and average the models in a ring after each round."""

    samples: tuple[int, ...]  # of each device in a round
    batch_size: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Do all passes of a plan that a device does, without any message."""

    plan: PipelinePlan
    num_updates: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
    """Send all messages that a pipeline of two stages sends, without any pass."""

    num_bytes: int  # of one message
    num_messages: int  # each way


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a device answers."""

    ends_s: tuple[float, ...] = ()  # of each update or round, by the machine's monotonic clock
    began_s: float = 0.0
    sent_bytes: int = 0  # in all updates
    cpu_s: float = 0.0  # of all threads of the device, in all updates
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)  # that the device has at the end


Work = Profile | Train | Federated | Passes | Transfers


def build_model() -> nn.Module:
    """Return a VGG of half width, with the same weights in every process: 2.3 million of them."""
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
    """Return a model of equal layers with large activations, to be cut in the middle."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (SHAPE[0], *[16] * 7):
        layers += [nn.Conv2d(channels, 16, 11, padding=5), nn.Tanh()]
    return nn.Sequential(*layers, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(256, _CLASSES))


def read(module: nn.Module) -> ReadModel:
    """Return the layers of one of these models."""
    return read_model(module, SHAPE, "model")


def build_data() -> LabelledData:
    """Return random images, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return LabelledData(torch.randn(_NUM_SAMPLES, *SHAPE, generator=generator),
                        torch.randint(0, _CLASSES, (_NUM_SAMPLES,), generator=generator),
                        mean=(0.0,) * 3, std=(1.0,) * 3, num_classes=_CLASSES)


def minis(num_updates: int, num_samples: int) -> list[Mini]:
    """Return the mini-batches of a training."""
    rng = np.random.default_rng(2)
    return [Mini(step=step, indices=rng.integers(0, _NUM_SAMPLES, num_samples)) for step in range(num_updates)]


def rack(bit_per_s: int, num_devices: int = len(CORES)) -> Rack:
    """Return the devices on one board.

    A link sends at once what it may in 5.5 ms: whole segments of TCP at 100 Mbit/s. Where they are split into frames,
    a device with a small part of a core needs more time for them than the link.
    """
    return Rack(slots_per_board=(num_devices,), soc_bit_per_s=bit_per_s, uplink_bit_per_s=bit_per_s,
                burst_bytes=min(_MOST_BURST_BYTES, int(_BURST_S * bit_per_s / 8)))
