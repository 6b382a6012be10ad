"""Trains a device of a pipeline on its own machine."""

from typing import cast

from socflower.clients.ring_client import MemberWork
from socflower.peers.ring.member import MemberResult
from socflower.pipeline.plan import Plan, from_json
from socflower.pipeline.problem import from_json as problem_from_json
from socflower.pipeline.recovery.session import PipelineMember
from socflower.pipeline.runtime.group import read_like, require_fp32
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.wire.codecs.error_feedback import Form
from socflower.wire.message_keys import PipelineTask


def train_stage(work: MemberWork, task: PipelineTask) -> MemberResult:
    """Train this node's stage of the task's plan."""
    plan = from_json(task.plan)
    read = read_like(
        work.model,
        work.data,
        task.cuts,
        task.layers_sha256,
        task.sample_shape,
        sample_type=task.sample_type,
    )
    trainer = require_fp32(work.trainer)
    return PipelineMember(
        model=work.model,
        has_model=work.has_model,
        data=work.data,
        read=read,
        group=work.group,
        ring=work.ring,
        plan=plan,
        trainer=trainer,
        port=work.port,
        switch=work.switch,
        state=work.state,
        coding=coding_of(task),
        budget_bytes=budgets_of(task, plan) or {},
        int8_socs=task.int8_socs,
        problem=problem_from_json(task.problem, read.model) if task.problem else None,
        backup_steps=task.backup_steps,
        departs_at=work.departs_at,
        on_step=work.on_step,
    ).train()


def reads_samples(task: PipelineTask, soc: int) -> bool:
    """Return whether a device reads data: not if another one sends the samples of each pipeline."""
    return any(each.samples_on in (None, soc) for each in from_json(task.plan).pipelines)


def coding_of(task: PipelineTask) -> ActivationCoding:
    """Return the encoding of tensors between stages."""
    return ActivationCoding(
        bits=task.bits, gradient_bits=task.gradient_bits, feedback=cast(Form, task.feedback)
    )


def budgets_of(task: PipelineTask, plan: Plan) -> dict[int, float] | None:
    """Return the memory budget of each SoC in bytes, or None if the task has none."""
    if not task.budget_bytes:
        return None
    return dict(zip(plan.socs, task.budget_bytes, strict=True))
