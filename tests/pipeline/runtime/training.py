"""Small models, data and plans for pipelines that train."""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from socflower.pipeline.plan import PipelinePlan, Plan, TwoDPlan
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.channels import QueueChannels, run_script
from socflower.pipeline.runtime.member import Member, Mini
from socflower.pipeline.runtime.messages import Send
from socflower.pipeline.runtime.together import Mail, run_together
from socflower.pipeline.runtime.trained_model import TrainedModel
from socflower.pipeline.schedule.order import RULES
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.workloads.dataset import LabelledData
from tests.pipeline import problems

NUM_SAMPLES = 64
NUM_LAYERS = 6
TRAINER = FP32Trainer(optimizer=sgd(0.1), device="cpu")
SPAN = TrainingSpan(seed=(1, 0))


class Residual(nn.Module):
    """Layers with residual blocks, so that several tensors cross some cuts."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 4, 3, padding=1),
                nn.BatchNorm2d(4) if norm else nn.Identity(),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Conv2d(4, 4, 3, padding=1),
            )
            for _ in range(2)
        )
        self.last = nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.last(x.flatten(1))


def data(seed: int = 0) -> LabelledData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator)
    labels = torch.randint(0, 5, (NUM_SAMPLES,), generator=generator)
    return LabelledData(inputs, labels, mean=(0.0,), std=(1.0,), num_classes=5)


def model(seed: int = 0, **options: Any) -> Residual:
    torch.manual_seed(seed)
    return Residual(**options)


def read(module: nn.Module) -> ReadModel:
    return read_model(module, (1, 6, 6), "residual")


def minis(num_steps: int, batch_size: int, seed: int = 0) -> list[Mini]:
    rng = np.random.default_rng(seed)
    return [
        Mini(step=step, indices=rng.permutation(NUM_SAMPLES)[:batch_size])
        for step in range(num_steps)
    ]


def socs_of(plan: Plan) -> list[int]:
    """Return all SoCs that take part: those of stages, and those that have samples."""
    return sorted(
        {*plan.socs, *(each.samples_on for each in plan.pipelines if each.samples_on is not None)}
    )


def member(
    module: nn.Module,
    plan: Plan,
    soc: int,
    send: Send,
    trainer: FP32Trainer | None = None,
    reading: ReadModel | None = None,
    **options: Any,
) -> Member:
    """Return a member of a plan with a copy of the model."""
    reading, given = reading or read(module), {"data": data(), "send": send, **options}
    return Member(plan, soc, reading, copy.deepcopy(module), trainer or TRAINER, SPAN, **given)


def train_together(
    module: nn.Module,
    plan: Plan,
    steps: Sequence[Mini],
    trainer: FP32Trainer | None = None,
    reading: ReadModel | None = None,
    **options: Any,
) -> TrainedModel:
    """Train a copy of a model in one process, and return what the plan's first device has at the end."""
    mail, reading = Mail(), reading or read(module)
    own = {
        soc: member(module, plan, soc, mail.sender(soc), trainer, reading, **options)
        for soc in socs_of(plan)
    }
    for mini in steps:
        run_together({soc: each.update(mini) for soc, each in own.items()}, mail)
    ends = run_together({soc: each.finish() for soc, each in own.items()}, mail)
    return next(end for end in ends.values() if end is not None)


def train_alone(
    module: nn.Module,
    steps: Sequence[Mini],
    trainer: FP32Trainer | None = None,
    micro_batches: int = 1,
) -> dict[str, Tensor]:
    """Return the weights of plain torch on one device."""
    own, samples = copy.deepcopy(module).train(), data()
    trainer = trainer or TRAINER
    optimizer = trainer.optimizer(own.parameters())
    for mini in steps:
        optimizer.zero_grad()
        for rows in np.array_split(mini.indices, micro_batches):
            inputs, labels = samples.batch(torch.from_numpy(rows))
            (trainer.loss(own(inputs), labels) * (len(rows) / len(mini.indices))).backward()
        optimizer.step()
    return dict(own.state_dict())


def train_in_threads(
    module: nn.Module, plan: Plan, steps: Sequence[Mini], **options: Any
) -> TrainedModel:
    """Train with each device in a thread of its own."""
    channels = QueueChannels.of(socs_of(plan))
    ends: list[TrainedModel | None] = []

    def run(one: Member, own: QueueChannels) -> None:
        for mini in steps:
            run_script(one.update(mini), own)
        ends.append(run_script(one.finish(), own))
        own.flush()

    threads = [
        threading.Thread(
            target=run, args=(member(module, plan, soc, own.send, **options), own), daemon=True
        )
        for soc, own in channels.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for own in channels.values():
        own.close()
    return next(end for end in ends if end is not None)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float) -> None:
    """Assert that weights or gradients are as expected, by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=atol, msg=name)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """Return the differences of weights of the same names, as a vector."""
    return torch.cat([(one[name].detach() - other[name].detach()).flatten() for name in other])


def assert_same(one: TrainedModel, other: TrainedModel) -> None:
    """Assert that two trainings computed the same bits; weights may be arrays."""
    assert (one.losses, one.state) == (other.losses, other.state)
    assert (one.peak_in_flight, one.devices) == (other.peak_in_flight, other.devices)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        np.testing.assert_array_equal(weight, other.weights[name], err_msg=name)


# --------------------------------------------------------------------------------------------------- any plan


@st.composite
def pipelines(draw: st.DrawFn, first_soc: int = 0) -> PipelinePlan:
    """Draw a pipeline of `Residual`; samples may be on any of its devices, or on one without a stage."""
    size, number = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rules = st.sampled_from(list(RULES.values()))
    plan = draw(problems.pipelines(NUM_LAYERS, 6, size, number, rules, first_soc=first_soc))
    samples_on = draw(st.none() | st.integers(first_soc, first_soc + len(plan.socs)))
    return replace(plan, samples_on=samples_on)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw one pipeline or two side by side."""
    first = draw(pipelines())
    if draw(st.booleans()):
        return first
    return TwoDPlan(groups=(first, draw(pipelines(first_soc=len(first.socs) + 1))))
