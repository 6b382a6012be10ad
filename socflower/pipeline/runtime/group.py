"""Training of a plan in one process through the steps of a group's interval; `train_group` is for groups."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, labelled
from socflower.model_graph.exported_module import EXAMPLE
from socflower.model_graph.model_copy import copied
from socflower.model_graph.random_state import own_random_state
from socflower.pipeline.plan import Plan
from socflower.pipeline.problem import from_json as problem_from_json
from socflower.pipeline.profiler.layers import Granularity, ReadModel, read_model
from socflower.pipeline.replanning import remaining_plan
from socflower.pipeline.runtime.member import Member, Mini, refuse_unfit
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.runtime.together import Mail, run_together
from socflower.pipeline.runtime.trained_model import TrainedModel
from socflower.training.batches import BatchSchedule, sample_key
from socflower.training.fp32 import FP32Trainer
from socflower.training.group import GroupOutcome
from socflower.training.trainer import SessionResult, Trainer, TrainingSpan, training_device
from socflower.wire.message_keys import GroupTask
from socflower.workloads.data_source import AbsentSamples, DataSource, Indices

PEAK_BYTES, PEAK_IN_FLIGHT = "pipeline-peak-bytes", "pipeline-peak-in-flight"
"""Metrics of a reply, by device in the order of the plan: memory of its stage, and micro-batches in flight."""


def train_pipeline(
    model: nn.Module,
    data: DataSource,
    task: GroupTask,
    plan: Plan,
    trainer: Trainer,
    state: bytes | None = None,
    *,
    cuts: str = "layers",
    layers_sha256: str = "",
    sample_shape: tuple[int, ...] = (),
    coding: ActivationCoding = EXACT,
    budget_bytes: Mapping[int, float] | None = None,
    departures: Mapping[int, int] | None = None,
    int8_socs: Collection[int] = (),
    problem: str = "",
) -> GroupOutcome:
    """Train `model` in place through all steps of the task; all devices of the plan run in this process.

    `data` is the whole data set. `state` is from the end of the previous interval, perhaps under another plan.
    `layers_sha256` and `sample_shape` are of the model that was planned. `departures` has the step of the interval
    (from 0) before which a SoC leaves: the others continue with `remaining_plan`, and the interval ends when all have
    left. `problem` is what that is planned from, in the form of `to_json` of `pipeline/problem.py`. Stages on
    `int8_socs` compute in int8.

    Raises `ConfigError` for another trainer than `FP32Trainer`, if the model has other layers or makes activations of
    other shapes than were planned, and for layers that int8 does not have; `OutOfMemory` if a stage exceeds its budget;
    `InfeasiblePlan` if nothing fits the devices that are left.
    """
    trainer = require_fp32(trainer)
    refuse_unfit(trainer)
    if not task.reshuffle:
        raise ConfigError("pipeline: data cannot stay at their nodes; use reshuffle=True")
    model.to(training_device(trainer))
    read = read_like(model, data, cuts, layers_sha256, sample_shape)
    if not task.first_step:
        trainer.require_divisible_loss(model, (), LabelledSource(data), task.batch_size)
    options = {"coding": coding, "int8_socs": int8_socs}
    interval = _Interval(model, data, task, read, trainer, budget_bytes or {}, options)
    known = problem_from_json(problem, read.model) if problem else None
    end_of = {soc: task.num_steps for soc in plan.socs}
    for soc, step in (departures or {}).items():
        if soc in end_of:
            end_of[soc] = min(step, task.num_steps)
    ends: list[TrainedModel] = []
    with own_random_state(task.seed, task.group_id, task.first_step):
        for first, stop in pairwise(sorted({0, task.num_steps, *end_of.values()})):
            present = {soc for soc, end in end_of.items() if end > first}
            if present:
                left = remaining_plan(
                    plan, read.model, present, problem=known, budget_bytes=budget_bytes
                )
                ends.append(interval.train(left, first, stop, ends[-1].state if ends else state))
    if not ends:
        # Without a finite loss nothing is kept of the interval.
        return GroupOutcome(mean_loss=math.nan, num_samples=0, end=SessionResult(state=b""))
    losses = [loss for end in ends for loss in end.losses]
    return outcome_of(replace(ends[-1], losses=tuple(losses)), plan, interval.num_samples)


@dataclass
class _Interval:
    """A group's interval, whose plan may change between steps."""

    model: nn.Module
    data: DataSource
    task: GroupTask
    read: ReadModel
    trainer: FP32Trainer
    budget_bytes: Mapping[int, float]
    # More arguments of `Member`.
    options: Mapping[str, Any]
    num_samples: int = 0

    def train(
        self,
        plan: Plan,
        first: int,
        stop: int,
        state: bytes | None,
    ) -> TrainedModel:
        """Train the model by a plan from step `first` to `stop` - 1 of the interval."""
        task = self.task
        span = TrainingSpan.of_group(task, first)
        mail = Mail()
        sources = [each.samples_on for each in plan.pipelines if each.samples_on is not None]
        members = {
            soc: Member(
                plan,
                soc,
                self.read,
                copied(self.model),
                self.trainer,
                span,
                data=self.data,
                send=mail.sender(soc),
                state=state,
                budget_bytes=self.budget_bytes.get(soc, math.inf),
                **self.options,
            )
            for soc in dict.fromkeys((*plan.socs, *sources))
        }
        schedule = BatchSchedule(task, [len(self.data)])
        for step in range(first, stop):
            (indices,) = schedule.batch(task.first_step + step)
            mini = Mini(step=task.first_step + step, indices=indices, key=sample_key(task, step))
            run_together({soc: member.update(mini) for soc, member in members.items()}, mail)
            self.num_samples += len(indices)
        ends = run_together({soc: member.finish() for soc, member in members.items()}, mail)
        end = next(each for each in ends.values() if each is not None)
        with torch.no_grad():
            own = self.model.state_dict()
            for name, weight in end.weights.items():
                own[name].copy_(weight)
        return end


def require_fp32(trainer: Trainer) -> FP32Trainer:
    """Return the trainer; `ConfigError` for another than `FP32Trainer`."""
    if not isinstance(trainer, FP32Trainer):
        name = type(trainer).__name__
        raise ConfigError(
            f"pipeline: {name} cannot train stages; give an FP32Trainer and int8_socs"
        )
    return trainer


def read_like(
    model: nn.Module,
    data: DataSource,
    cuts: str,
    layers_sha256: str,
    sample_shape: tuple[int, ...] = (),
    *,
    sample_type: str = "float32",
) -> ReadModel:
    """Return the layers of a node's model for samples of the planned shape, or else of the data's first sample.

    A node without samples has those of the planned shape and type, or of the model's own example. Raises `ConfigError`
    if they are not the planned layers.
    """
    inputs = getattr(model, "meta", {}).get(EXAMPLE)
    if inputs is None and isinstance(data, AbsentSamples) and sample_shape:
        inputs = torch.zeros(1, *sample_shape, dtype=getattr(torch, sample_type))
    if inputs is None:
        inputs = _first_sample(data, sample_shape)
    read = read_model(model, inputs, type(model).__name__, granularity=Granularity(cuts))
    if layers_sha256 and read.model.sha256 != layers_sha256:
        raise ConfigError(
            f"pipeline: {read.model.name} has other layers here than were planned; make model_fn return "
            "that model, with the same torch and socflower"
        )
    return read


def _first_sample(data: DataSource, planned: tuple[int, ...]) -> Batch:
    """Return a sample of the planned shape, or else the first one; `ConfigError` for other dimensions."""
    inputs, _ = labelled(data.batch(torch.zeros(1, dtype=torch.int64)), "pipeline")
    if not planned or not isinstance(inputs, Tensor):
        return inputs
    own = tuple(inputs.shape[1:])
    if len(own) != len(planned):
        raise ConfigError(
            f"pipeline: samples have shape {own}, and {planned} was planned; plan for these"
        )
    # The first sample may be shorter than others.
    return inputs if own == planned else inputs.new_zeros(1, *planned)


class LabelledSource(DataSource):
    """Data whose batches are pairs (inputs, labels), also if those of `source` are dicts with labels."""

    def __init__(self, source: DataSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        """Return the samples at `indices`; see `DataSource.batch`."""
        return labelled(self._source.batch(indices, key), "pipeline")


def outcome_of(end: TrainedModel, plan: Plan, num_samples: int) -> GroupOutcome:
    """Return a plan's result as that of a group."""
    metrics = {
        PEAK_BYTES: [end.peak_bytes.get(soc, 0.0) for soc in plan.socs],
        PEAK_IN_FLIGHT: [float(end.peak_in_flight.get(soc, 0)) for soc in plan.socs],
    }
    return GroupOutcome(
        mean_loss=math.fsum(end.losses) / len(end.losses) if end.losses else 0.0,
        num_samples=num_samples,
        end=SessionResult(state=end.state, metrics=metrics),
    )
