"""A whole group in one process: every member's share of every step, and the weights a real ring would have."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from socflower.clients.batches import group_batches
from socflower.clients.random_state import own_random_state
from socflower.clients.trainer import Part, SessionEnd, Trainer, TrainingSpan
from socflower.cluster.protocol import GroupTask
from socflower.hierarchy import split_batch
from socflower.workloads import LabelledData


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutcome:
    """What a group's training came to."""

    mean_loss: float
    num_samples: int
    end: SessionEnd


def train_group(
    model: nn.Module, data: LabelledData, task: GroupTask, trainer: Trainer, state: bytes | None = None,
) -> GroupOutcome:
    """Train `model` in place through all steps of the task, synchronously over the group's members (F4).

    `data` is the whole data set if the task reshuffles, else the group's own. `state` is that of the end of the
    interval before (momentum stays local, F3). Random layers draw from the task's seed, group and first step, so that
    an interval repeats.
    """
    span = TrainingSpan(num_members=len(task.members), first_step=task.first_step, total_steps=task.total_steps,
                        steps_per_epoch=task.steps_per_epoch, npu_ratios=task.npu_ratios)
    with own_random_state(task.seed, task.group_id, task.first_step):
        session = trainer.start(model, span, state)
        losses, num_samples = [], 0
        for parts in _shares(data, task):
            losses.append(session.step(parts))
            num_samples += sum(len(labels) for _, labels in parts)
        # One look at the end instead of one a step: reading a tensor's value waits for it.
        mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
        return GroupOutcome(mean_loss=mean_loss, num_samples=num_samples, end=session.finish())


def _shares(data: LabelledData, task: GroupTask) -> Iterator[list[Part]]:
    for indices in group_batches(task, len(data)):
        if not len(indices):
            continue
        inputs, labels = data.batch(torch.from_numpy(indices))
        sizes = list(split_batch(len(indices), task.capacities))
        yield list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
