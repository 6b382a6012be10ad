"""What the devices of a contest are told to do, and what they answer; the models and their data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.model_graph.batch_form import pair_of
from socflower.pipeline.plan import PipelinePlan, Plan
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.member import Mini
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.workloads import DataSource, LabelledData
from tests.testbed.topology import Rack

CORES = (0.5, 0.35, 0.25, 0.15)
"""The devices: parts of a core, together little enough for this machine to give."""

MINI_BATCH = 64
SHAPE = (3, 64, 64)
SPAN = TrainingSpan(seed=(1, 0))
_NUM_SAMPLES = 512
_BURST_S, _MOST_BURST_BYTES = 0.0055, 256 * 1024
_CLASSES = 10
_WIDTHS = (32, "pool", 64, "pool", 128, 128, "pool", 256, 256, "pool", 256, 256, "pool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and what it is trained on; what its functions return is the same in every process."""

    build: Callable[[], nn.Module]
    data: Callable[[], DataSource]  # pairs of inputs and labels
    trainer: FP32Trainer

    def read(self, module: nn.Module) -> ReadModel:
        """Return the layers of the model."""
        return read_model(module, self.example(), "model")

    def example(self) -> Tensor:
        """Return the inputs of a batch of one."""
        return pair_of(self.data().batch(torch.zeros(1, dtype=torch.int64)), "contest")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measure each layer's seconds, all devices at once."""

    workload: Workload
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
class Speed:
    """Measure the whole model's passes, all devices that do it at once."""

    workload: Workload
    batch_size: int
    seconds: float  # that it takes about


@dataclass(frozen=True, kw_only=True, slots=True)
class Carry:
    """Do the model's passes while messages go to another device and come from it, which does the same."""

    workload: Workload
    batch_size: int
    pass_s: dict[int, float]  # of both passes without messages, by device
    num_bytes: int  # of a message
    num_messages: int  # each way


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train by a plan, with our runtime or, on a straight pipeline of equal micro-batches, with torch's."""

    workload: Workload
    plan: Plan
    num_updates: int
    seed: int = 2  # of the mini-batches
    coding: ActivationCoding = EXACT
    by_torch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Federated:
    """Train alone, and average the models in a ring after each round."""

    samples: tuple[int, ...]  # of each device in a round
    batch_size: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Do all passes of a plan that a device does, without any message."""

    workload: Workload
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


Work = Profile | Speed | Carry | Train | Federated | Passes | Transfers


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

    A link sends at once what it may in 5.5 ms: whole segments of TCP at 100 Mbit/s. Where they are split into frames,
    a device with a small part of a core needs more time for them than the link.
    """
    return Rack(
        slots_per_board=(num_devices,),
        soc_bit_per_s=bit_per_s,
        uplink_bit_per_s=bit_per_s,
        burst_bytes=min(_MOST_BURST_BYTES, int(_BURST_S * bit_per_s / 8)),
    )
