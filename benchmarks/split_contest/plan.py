"""The training of edge and cloud, its runs and the edge's measurements, which travel as JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
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
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

MODEL = "resnet8"
BATCH_SIZE = 32
NUM_SAMPLES = 1024
_SHAPE = (3, 32, 32)
_OPTIMIZER = sgd(0.01, 0.9)


@cache
def program() -> LayeredProgram:
    """Return the model with its cuts, always with the same weights."""
    return LayeredProgram(
        model_fn=lambda: build_model(
            MODEL, in_channels=_SHAPE[0], image_size=_SHAPE[1], num_classes=10, seed=1
        ),
        example=_SHAPE,
        optimizer=_OPTIMIZER,
        seed=1,
    )


def measuring(num_repeats: int, batch_size: int = BATCH_SIZE) -> Measuring:
    """Return the settings for measuring costs, the same on both sides."""
    return Measuring(
        optimizer=_OPTIMIZER,
        batch_size=batch_size,
        num_repeats=num_repeats,
        num_warm_ups=1,
        at_least_s=0.5,
    )


class Batches:
    """Batches of CIFAR-10, or of noise if CIFAR-10 is not available; both take the same time."""

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
        """Return inputs, labels and ids of a batch; they depend on its number alone."""
        rows = (np.arange(self.batch_size) + batch * self.batch_size) % NUM_SAMPLES
        chosen = torch.from_numpy(rows)
        return (
            self.inputs.index_select(0, chosen),
            self.labels.index_select(0, chosen).numpy(),
            rows,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeRun:
    """One training; all begin with the same weights."""

    # None: the edge trains alone.
    cut: int | None
    bits: int = 32
    window: int = 0
    gradient_bits: int = 32
    feedback: Form = "none"
    # Of the link in each direction; 0 is the speed of loopback.
    mbit_per_s: float = 0.0
    batch_size: int = BATCH_SIZE
    num_batches: int = 20
    # Of the cloud, with the operator's token and a name for the session.
    address: str = ""
    token: str = ""
    name: str = ""
    # A file for the edge's final weights.
    weights: str = ""

    @property
    def split_plan(self) -> SplitPlan:
        """The plan as the cost model has it."""
        return SplitPlan(cut=self.cut, bits=self.bits, window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeTimes:
    """The edge's measurements of a run."""

    # When each batch was applied, and the processor seconds until then, since the first batch went forward.
    done_s: tuple[float, ...]
    spent_s: tuple[float, ...]
    losses: tuple[float, ...]
    staleness: tuple[int, ...]
    # Where the samples come from.
    source: str
    # The peak of resident memory.
    peak_bytes: float

    def period_s(self, window: int) -> float:
        """Return the seconds between two batches of the full pipeline; see `full_period_s`."""
        return full_period_s(self.done_s, window)

    def spent_period_s(self, window: int) -> float:
        """Return the edge's processor seconds between two batches of the full pipeline."""
        return full_period_s(self.spent_s, window)


def full_period_s(times_s: Sequence[float], window: int) -> float:
    """Return the time between two batches while the pipeline is full: neither filling nor draining.

    It is the median over stretches of K + 1 batches, in which each part of the pipeline does the same work.
    """
    full = times_s[window + 1 : len(times_s) - window]
    step = min(window + 1, len(full) - 1)
    pairs = zip(full, full[step:], strict=False)
    return statistics.median((after - before) / step for before, after in pairs)
