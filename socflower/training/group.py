"""Trains a whole group in one process: every member's share of every step, with the weights of a real ring."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from socflower.hierarchy.exchange.coding_bytes import gradient_coding
from socflower.hierarchy.exchange.gradients import GradientExchange
from socflower.model_graph import batch_form
from socflower.model_graph.batch_form import NOTHING
from socflower.model_graph.random_state import own_random_state
from socflower.plain_numbers import plain_numbers
from socflower.training.batches import BatchSchedule, sample_key
from socflower.training.exchange.group_sum import GroupSum, exchanging, split_state
from socflower.training.trainer import (
    ExchangingSession,
    Part,
    SessionResult,
    Trainer,
    TrainingSpan,
    mean_loss,
    try_loss,
)
from socflower.wire.message_keys import GroupTask
from socflower.workloads.data_source import DataSource


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutcome:
    """The result of a group's training."""

    mean_loss: float
    num_samples: int
    end: SessionResult


@plain_numbers
def train_group(
    model: nn.Module,
    data: DataSource | Sequence[DataSource],
    task: GroupTask,
    trainer: Trainer,
    state: bytes | None = None,
    *,
    departures: Mapping[int, int] | None = None,
    before_step: Callable[[int], None] | None = None,
) -> GroupOutcome:
    """Train `model` in place through all steps of the task, synchronously over the group's members (F4).

    `data` is the whole data set if the task reshuffles, else each member's own. `state` is from the end of the previous
    interval (momentum stays local, F3). Random layers are seeded by the task's seed, group and first step, so that an
    interval is reproducible. `departures` maps a member's position to the interval's step (from 0) before which it
    leaves; when all have left, the interval ends. `before_step` is called with the number of steps that are done.
    """
    span = TrainingSpan.of_group(task, num_members=len(task.members), npu_ratios=task.npu_ratios)
    coding = gradient_coding(task.compression, steps_per_epoch=task.steps_per_epoch)
    residuals: Mapping[int, bytes] = {}
    if state is not None and not coding.is_exact:
        state, residuals = split_state(state)
    with own_random_state(task.seed, task.group_id, task.first_step):
        session = trainer.start(model, span, state)
        members: GroupSum | None = None
        in_order = isinstance(session, ExchangingSession) and session.in_ring_order
        if in_order or not coding.is_exact:
            exchange = GradientExchange(kind=task.exchange, coding=coding)
            members = GroupSum(
                exchanging(session, coding, type(trainer).__name__),
                model,
                exchange,
                task.members,
                num_buckets=task.num_buckets,
                seed=task.seed,
                residuals=residuals,
            )
        own = [data] if isinstance(data, DataSource) else list(data)
        losses: list[torch.Tensor] = []
        num_samples = 0
        for step, present, parts in _step_parts(own, task, departures or {}):
            if before_step is not None:
                before_step(step - task.first_step)
            if not task.first_step and not losses:
                try_loss(session, parts, own[0], task.batch_size, divided=len(task.members) > 1)
            losses.append(
                session.step(parts) if members is None else members.step(parts, present, step)
            )
            num_samples += sum(map(batch_form.num_samples, parts))
        end = session.finish()
        if not coding.is_exact:
            assert members is not None
            end = replace(end, state=members.state(end.state))
        return GroupOutcome(mean_loss=mean_loss(losses), num_samples=num_samples, end=end)


def _step_parts(
    own: Sequence[DataSource],
    task: GroupTask,
    departures: Mapping[int, int],
) -> Iterator[tuple[int, list[int], list[Part]]]:
    """Yield each step with samples, its members' positions, and the parts of all; those that have left have none."""
    schedule = BatchSchedule(task, [len(each) for each in own])
    for step in range(task.num_steps):
        present = [
            member for member in range(len(task.members)) if departures.get(member, step + 1) > step
        ]
        if not present:
            return
        indices = schedule.shares(task.first_step + step, present)
        if not any(map(len, indices)):
            continue
        if task.reshuffle:
            parts = own[0].parts(
                [torch.from_numpy(each) for each in indices], sample_key(task, step)
            )
        else:
            parts = [
                own[member].batch(torch.from_numpy(each), sample_key(task, step, member))
                for member, each in zip(present, indices, strict=True)
            ]
        of_present = dict(zip(present, parts, strict=True))
        everyone = [of_present.get(member, NOTHING) for member in range(len(task.members))]
        yield task.first_step + step, present, everyone
