"""A whole group in one process: every member's share of every step, and the weights a real ring would have."""

from collections.abc import Iterator

import torch
from torch import nn

from socflower.clients.batches import group_batches
from socflower.clients.trainer import Part, Trainer
from socflower.cluster.protocol import GroupTask
from socflower.hierarchy import split_batch
from socflower.workloads import LabelledData


def train_group(
    model: nn.Module, data: LabelledData, task: GroupTask, trainer: Trainer, state: bytes | None = None,
) -> tuple[float, int, bytes]:
    """Train `model` in place through all steps of the task, synchronously over the group's members (F4).

    `data` is the whole data set if the task reshuffles, else the group's own. Returns the mean loss, the number of
    samples trained on, and the trainer's state (momentum stays local, F3).
    """
    session = trainer.start(model, num_members=len(task.members), first_step=task.first_step,
                            total_steps=task.total_steps, state=state)
    losses, num_samples = [], 0
    for parts in _shares(data, task):
        losses.append(session.step(parts))
        num_samples += sum(len(labels) for _, labels in parts)
    # One look at the end instead of one a step: reading a tensor's value waits for it.
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    return mean_loss, num_samples, session.finish()


def _shares(data: LabelledData, task: GroupTask) -> Iterator[list[Part]]:
    for indices in group_batches(task, len(data)):
        if not len(indices):
            continue
        inputs, labels = data.batch(torch.from_numpy(indices))
        sizes = list(split_batch(len(indices), task.capacities))
        yield list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
