"""What edge and cloud train, what they are told, and what the edge measures: plain values travel as JSON."""

import statistics
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.measuring import Measuring
from socflower.edgecloud.split_program import LayeredProgram
from socflower.errors import DataUnavailable
from socflower.training.fp32 import sgd
from socflower.wire.codecs.error_feedback import Form
from socflower.workloads import build_model, load_data

MODEL = "resnet8"
BATCH_SIZE = 32
NUM_SAMPLES = 1024
_SHAPE = (3, 32, 32)
_OPTIMIZER = sgd(0.01, 0.9)


@cache
def program() -> LayeredProgram:
    """Return the model, always with the same weights, and where it can be cut."""
    return LayeredProgram(
        model_fn=lambda: build_model(
            MODEL, in_channels=_SHAPE[0], image_size=_SHAPE[1], num_classes=10, seed=1
        ),
        example=_SHAPE,
        optimizer=_OPTIMIZER,
        seed=1,
    )


def measuring(num_repeats: int, batch_size: int = BATCH_SIZE) -> Measuring:
    """Return how costs are measured, on either side."""
    return Measuring(
        optimizer=_OPTIMIZER,
        batch_size=batch_size,
        num_repeats=num_repeats,
        num_warm_ups=1,
        at_least_s=0.5,
    )


class Batches:
    """Batches of CIFAR-10, or of noise where that is not at hand, which takes as long to train on."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        try:
            data = load_data("cifar10")
            self.inputs, self.labels = data.train.batch(range(NUM_SAMPLES))
            self.source = "CIFAR-10"
        except DataUnavailable:
            generator = torch.Generator().manual_seed(1)
            self.inputs = torch.randn(NUM_SAMPLES, *_SHAPE, generator=generator)
            self.labels = torch.randint(0, 10, (NUM_SAMPLES,), generator=generator)
            self.source = "noise: CIFAR-10 is not in SOCFLOWER_DATA"

    def __call__(self, batch: int) -> tuple[torch.Tensor, NDArray[Any], NDArray[np.int64]]:
        """Return inputs, labels and ids of a batch: the same for the same number."""
        rows = (np.arange(self.batch_size) + batch * self.batch_size) % NUM_SAMPLES
        chosen = torch.from_numpy(rows)
        return (
            self.inputs.index_select(0, chosen),
            self.labels.index_select(0, chosen).numpy(),
            rows,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training from the same beginning."""

    cut: int | None  # None: the edge trains alone
    bits: int = 32
    window: int = 0
    gradient_bits: int = 32
    feedback: Form = "none"
    mbit_per_s: float = 0.0  # of the link, each way; 0: as fast as loopback is
    batch_size: int = BATCH_SIZE
    num_batches: int = 20
    address: str = ""  # of the cloud, with the operator's token and a name for the session
    token: str = ""
    name: str = ""
    weights: str = ""  # a file for the edge's weights at the end

    @property
    def split_plan(self) -> SplitPlan:
        """What the cost model calls it."""
        return SplitPlan(cut=self.cut, bits=self.bits, window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the edge measured in a run."""

    done_s: tuple[float, ...]  # when each batch was applied, since the first went forward
    losses: tuple[float, ...]
    staleness: tuple[int, ...] = ()
    sent_bytes: int = 0
    received_bytes: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    spent_s: tuple[float, ...] = ()  # of the processor, likewise
    source: str = ""  # of the samples
    memory: dict[str, float] = field(default_factory=dict)  # bytes

    def period_s(self, window: int) -> float:
        """Return the seconds between two batches of the full pipeline.

        The median over stretches of K + 1 batches, in which each part of the pipeline has done as much; without the
        beginning, and without the end, when no batch goes forward any more.
        """
        return _period(self.done_s, window)

    def spent_period_s(self, window: int) -> float:
        """Return the same of the edge's processor seconds."""
        return _period(self.spent_s, window)


def _period(times_s: tuple[float, ...], window: int) -> float:
    full = times_s[window + 1 : len(times_s) - window]
    step = min(window + 1, len(full) - 1)
    return statistics.median(
        (after - before) / step for before, after in zip(full, full[step:], strict=False)
    )
