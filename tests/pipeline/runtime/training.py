"""Small models, data and plans for pipelines that train."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from socflower.pipeline.plan import PipelinePlan, Plan, Stage
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.channels import QueueChannels, run_script
from socflower.pipeline.runtime.member import Member, Mini, Send, TrainedModel
from socflower.pipeline.runtime.together import Mail, run_together
from socflower.pipeline.schedule.order import ASTEROID, InFlight
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.workloads import LabelledData

NUM_SAMPLES = 64
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


def plan_of(
    cuts: Sequence[int],
    shares: Sequence[Sequence[int]],
    num_micro_batches: int,
    *,
    rule: InFlight = ASTEROID,
    first_soc: int = 0,
    samples_on: int | None = None,
) -> PipelinePlan:
    """Return a plan whose stages end with the layers `cuts`."""
    stages, first, soc = [], 0, first_soc
    for last, own, in_flight in zip(
        cuts, shares, rule.counts(len(cuts), num_micro_batches), strict=True
    ):
        stages.append(
            Stage(
                first_layer=first,
                last_layer=last,
                devices=tuple(range(soc, soc + len(own))),
                shares=tuple(own),
                in_flight=in_flight,
            )
        )
        first, soc = last + 1, soc + len(own)
    return PipelinePlan(
        stages=tuple(stages),
        micro_batch_size=sum(shares[0]),
        num_micro_batches=num_micro_batches,
        samples_on=samples_on,
    )


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


def members(
    module: nn.Module,
    plan: Plan,
    sender: Callable[[int], Send],
    trainer: FP32Trainer | None = None,
    **options: Any,
) -> list[Member]:
    """Return all members of a plan, each with a copy of the model."""
    reading = read(module)
    return [
        Member(
            plan,
            soc,
            reading,
            copy.deepcopy(module),
            trainer or TRAINER,
            SPAN,
            data=data(),
            send=sender(soc),
            **options,
        )
        for soc in socs_of(plan)
    ]


def train_together(
    module: nn.Module,
    plan: Plan,
    steps: Sequence[Mini],
    trainer: FP32Trainer | None = None,
    **options: Any,
) -> TrainedModel:
    """Train a copy of a model in one process, and return what the plan's first device has at the end."""
    mail = Mail()
    own = members(module, plan, mail.sender, trainer, **options)
    for mini in steps:
        run_together({member.soc: member.update(mini) for member in own}, mail)
    ends = run_together({member.soc: member.finish() for member in own}, mail)
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
    socs = socs_of(plan)
    channels = QueueChannels.of(socs)
    ends: list[TrainedModel | None] = []

    def run(member: Member) -> None:
        own = channels[member.soc]
        for mini in steps:
            run_script(member.update(mini), own)
        ends.append(run_script(member.finish(), own))
        own.flush()

    threads = [
        threading.Thread(target=run, args=(member,), daemon=True)
        for member in members(module, plan, lambda soc: channels[soc].send, **options)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for own in channels.values():
        own.close()
    return next(end for end in ends if end is not None)
