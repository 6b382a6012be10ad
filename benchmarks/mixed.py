"""A training step on CPU and NPU at once, on two real cores: one in FP32 (torch), one in int8 (native engine).

    socflower bench mixed --json

Peers are torch FP32 on one core and on both, and the same two parts one after the other (the gain of the overlap
alone), in the same run, step by step in turn. Batch 64, SGD with momentum. The answer that is checked is the accuracy:
each of them trains the network on the embedded digits (padded to the network's image size), from the same weights in
the same order, and mixed precision may lose at most 3 points against FP32. These trainings have one to four epochs;
benchmarks/mixed_accuracy.py has whole trainings. On one core the two workers take turns, so the gain is smaller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import Row, less_is_better, measure_interleaved, repeated
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.schedules import cosine_annealing
from socflower.training.trainer import Trainer, TrainingSpan
from socflower.workloads.dataset import LabelledData
from socflower.workloads.evaluation import evaluate
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

BATCH = 64
RULES = ("paper", "normalised")
TOLERANCE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """A network, the shape of its images, and how it is trained for the check."""

    model: str
    channels: int
    size: int
    learning_rate: float
    epochs: int


CASES = (
    StepCase(model="lenet5", channels=1, size=28, learning_rate=0.02, epochs=4),
    StepCase(model="vgg11", channels=3, size=32, learning_rate=0.005, epochs=3),
    StepCase(model="resnet18", channels=3, size=32, learning_rate=0.02, epochs=1),
)


def run(quick: bool = False) -> list[Row]:
    """Return, for each network and rule, the step's seconds against FP32 on one core and on two."""
    found: list[Row] = []
    for case in CASES[:1] if quick else CASES:
        found += _rows_of(case, repeats=5 if quick else 15, epochs=1 if quick else case.epochs)
    return found


def _rows_of(case: StepCase, repeats: int, epochs: int) -> list[Row]:
    single = case.model == "lenet5"
    fp32 = FP32Trainer(optimizer=sgd(case.learning_rate), channels_last=True)
    steps = [_stepper(case, fp32, num_threads=1), _stepper(case, fp32, num_threads=2)]
    for parallel in (True, False):
        for rule in RULES:
            trainer = MixedPrecisionTrainer(fp32=fp32, rule=rule, parallel=parallel)
            steps.append(_stepper(case, trainer, num_threads=1))
    # A step of a small network is shorter than a time slice of the system, so a turn has many steps.
    turn = 20 if single else 1
    functions = [repeated(step, turn) for step in steps]
    one, two, *both = (
        timing.median_s / turn
        for timing in measure_interleaved(functions, repeats=repeats, warmup=2)
    )
    reference = _accuracy(case, None, epochs)
    found = []
    mixed, in_turn = both[: len(RULES)], both[len(RULES) :]
    for rule, seconds, in_turn_s in zip(RULES, mixed, in_turn, strict=True):
        accuracy = _accuracy(case, rule, epochs)
        ok = accuracy >= reference - TOLERANCE
        name = (
            f"{case.model}, {rule} ({100 * accuracy:.1f} % after {epochs} epochs of digits, FP32 "
            f"{100 * reference:.1f} %)"
        )
        peers = {
            "torch fp32, one core": one,
            "torch fp32, two cores": two,
            "the same parts, one after the other": in_turn_s,
        }
        for peer, peer_s in peers.items():
            found.append(less_is_better(name, seconds, peer, peer_s, "s per step", ok=ok))
    return found


def _stepper(case: StepCase, trainer: Trainer, num_threads: int) -> Callable[[], None]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH, case.channels, case.size, case.size, generator=random)
    labels = torch.randint(0, 10, (BATCH,), generator=random)
    session = trainer.start(_model(case), TrainingSpan(total_steps=1000, steps_per_epoch=1000))

    def step() -> None:
        torch.set_num_threads(num_threads)
        session.step([(inputs, labels)])

    return step


def _accuracy(case: StepCase, rule: str | None, epochs: int) -> float:
    """Return the test accuracy after training on the digits, with two FP32 threads or one of each kind."""
    train, test = _digits(case)
    torch.set_num_threads(2 if rule is None else 1)
    fp32 = FP32Trainer(
        optimizer=sgd(case.learning_rate), scheduler=cosine_annealing, channels_last=True
    )
    trainer: Trainer = fp32 if rule is None else MixedPrecisionTrainer(fp32=fp32, rule=rule)
    model, steps = _model(case), -(-len(train) // BATCH)
    session = trainer.start(model, TrainingSpan(total_steps=epochs * steps, steps_per_epoch=steps))
    for epoch in range(epochs):
        order = np.random.default_rng([1, epoch]).permutation(len(train))
        for indices in np.array_split(order, steps):
            session.step([train.batch(indices)])
    session.finish()
    return evaluate(model, test).accuracy


@cache
def _digits(case: StepCase) -> tuple[LabelledData, LabelledData]:
    """Return the embedded digits as images of the network's shape."""
    digits = load_data("digits")

    def shaped(data: LabelledData) -> LabelledData:
        margin = (case.size - data.inputs.shape[-1]) // 2
        inputs = functional.pad(data.inputs, (margin, margin, margin, margin)).expand(
            -1, case.channels, -1, -1
        )
        return LabelledData(
            inputs.contiguous(),
            data.labels,
            data.mean * case.channels,
            data.std * case.channels,
            data.num_classes,
        )

    return shaped(digits.train), shaped(digits.test)


def _model(case: StepCase) -> nn.Module:
    return build_model(
        case.model, in_channels=case.channels, image_size=case.size, num_classes=10, seed=1
    )
