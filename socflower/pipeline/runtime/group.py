"""Trains a plan in one process through the steps of a group's interval, as `train_group` does without a pipeline."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import nn

from socflower.capture.batch_form import pair_of
from socflower.capture.random_state import own_random_state
from socflower.errors import ConfigError
from socflower.pipeline.plan import Plan
from socflower.pipeline.profiler.layers import Granularity, ReadModel, read_model
from socflower.pipeline.runtime.member import Member, Mini, TrainedModel
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.runtime.together import Mail, run_together
from socflower.training.batches import BatchSchedule, sample_key
from socflower.training.fp32 import FP32Trainer
from socflower.training.group import GroupOutcome
from socflower.training.trainer import SessionResult, Trainer, TrainingSpan
from socflower.wire.message_keys import GroupTask
from socflower.workloads import DataSource

PEAK_BYTES, PEAK_IN_FLIGHT = "pipeline-peak-bytes", "pipeline-peak-in-flight"
"""Metrics of a reply, by device in the order of the plan: what its stage needed, and micro-batches in flight."""


def train_pipeline(
    model: nn.Module, data: DataSource, task: GroupTask, plan: Plan, trainer: Trainer, state: bytes | None = None, *,
    cuts: str = "layers", layers_sha256: str = "", coding: ActivationCoding = EXACT,
    budget_bytes: Mapping[int, float] | None = None,
) -> GroupOutcome:
    """Train `model` in place through all steps of the task; all devices of the plan run in this process.

    `data` is the whole data set. `state` is from the end of the previous interval, perhaps under another plan.
    `layers_sha256` is of the model that was planned. Raises `ConfigError` if this one has other layers, for a trainer
    other than `FP32Trainer`, and `OutOfMemory` if a stage exceeds its budget.
    """
    trainer = require_fp32(trainer)
    if not task.reshuffle:
        raise ConfigError("pipeline: all samples of a mini-batch come from one place, so data cannot stay at their "
                          "nodes; use reshuffle=True")
    read = read_like(model, data, cuts, layers_sha256)
    span = TrainingSpan(first_step=task.first_step, total_steps=task.total_steps, steps_per_epoch=task.steps_per_epoch,
                        proximal_mu=task.proximal_mu, seed=(task.seed, task.group_id))
    schedule, mail = BatchSchedule(task, [len(data)]), Mail()
    budgets = budget_bytes or {}
    sources = {pipeline.samples_on for pipeline in plan.pipelines} - {None, *plan.socs}
    with own_random_state(task.seed, task.group_id, task.first_step):
        members = [Member(plan, soc, read, copy.deepcopy(model), trainer, span, data=data, send=mail.sender(soc),
                          state=state, coding=coding, budget_bytes=budgets.get(soc, math.inf))
                   for soc in (*plan.socs, *sources) if soc is not None]
        num_samples = 0
        for step in range(task.num_steps):
            (indices,) = schedule.batch(task.first_step + step)
            mini = Mini(step=task.first_step + step, indices=indices, key=sample_key(task, step))
            run_together({member.soc: member.update(mini) for member in members}, mail)
            num_samples += len(indices)
        ends = run_together({member.soc: member.finish() for member in members}, mail)
    end = next(each for each in ends.values() if each is not None)
    with torch.no_grad():
        own = model.state_dict()
        for name, weight in end.weights.items():
            own[name].copy_(weight)
    return outcome_of(end, plan, num_samples)


def require_fp32(trainer: Trainer) -> FP32Trainer:
    """Return the trainer; `ConfigError` for another than `FP32Trainer`."""
    if not isinstance(trainer, FP32Trainer):
        raise ConfigError(f"pipeline: stages train with FP32Trainer, and this client has {type(trainer).__name__}; "
                          "give it one, or use groups, which train in int8 and mixed precision")
    return trainer


def read_like(model: nn.Module, data: DataSource, cuts: str, layers_sha256: str) -> ReadModel:
    """Return the layers of a node's model; `ConfigError` if they are not those that were planned."""
    inputs, _ = pair_of(data.batch(torch.zeros(1, dtype=torch.int64)), "pipeline")
    read = read_model(model, inputs, type(model).__name__, granularity=Granularity(cuts))
    if layers_sha256 and read.model.sha256 != layers_sha256:
        raise ConfigError(f"pipeline: {type(model).__name__} has other layers here than the model that was planned, "
                          f"{read.model.num_layers} in {cuts}; make model_fn return the planned model, with the same "
                          "versions of torch and socflower")
    return read


def outcome_of(end: TrainedModel, plan: Plan, num_samples: int) -> GroupOutcome:
    """Return a plan's result as that of a group."""
    return GroupOutcome(
        mean_loss=math.fsum(end.losses) / len(end.losses) if end.losses else 0.0, num_samples=num_samples,
        end=SessionResult(state=end.state, metrics={
            PEAK_BYTES: [end.peak_bytes[soc] for soc in plan.socs],
            PEAK_IN_FLIGHT: [float(end.peak_in_flight[soc]) for soc in plan.socs]}))
