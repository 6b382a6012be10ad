"""Handles TRAIN messages for devices of a pipeline on machines of their own."""

from collections.abc import Callable
from contextlib import closing
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from socflower.clients.node_config import ring_node
from socflower.clients.ring_client import KEPT_MODEL, open_port
from socflower.errors import ConfigError
from socflower.peers.preemption import preempt_switch
from socflower.peers.ring.member import AppliedStep, MemberResult
from socflower.pipeline.plan import from_json
from socflower.pipeline.recovery.session import PipelineMember
from socflower.pipeline.runtime.group import read_like, require_fp32
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.training.trainer import Trainer
from socflower.wire.codecs.error_feedback import Form
from socflower.wire.message_keys import (
    ARRAYS,
    COMPLETED,
    EVENTS,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    OUTCOME,
    TRAIN_LOSS,
    TRAINED_ON,
    GroupTask,
    PipelineTask,
    RingTask,
    encode,
)
from socflower.workloads import DataSource


def train_stage(
    context: Context,
    group: GroupTask,
    ring: RingTask,
    task: PipelineTask,
    *,
    model: nn.Module,
    has_model: bool,
    data: DataSource,
    trainer: Trainer,
    state: bytes | None,
    departs_at: int | None,
    on_step: Callable[[AppliedStep], None],
) -> MemberResult:
    """Open this node's ring port and train its stage, with the arguments of `PipelineMember`."""
    node = ring_node(context.node_config)
    if node is None:
        raise ConfigError(
            f"node {context.node_id}: its node config lacks ring; start the SuperNode with "
            "--node-config 'ring=\"host:port\"'"
        )
    plan = from_json(task.plan)
    with (
        preempt_switch(context.node_config) as switch,
        closing(open_port(node, group, ring)) as port,
    ):
        return PipelineMember(
            model=model,
            has_model=has_model,
            data=data,
            read=read_like(model, data, task.cuts, task.layers_sha256, task.sample_shape),
            group=group,
            ring=ring,
            plan=plan,
            trainer=require_fp32(trainer),
            port=port,
            switch=switch,
            state=state,
            coding=coding_of(task),
            budget_bytes=dict(zip(plan.socs, task.budget_bytes, strict=True))
            if task.budget_bytes
            else {},
            int8_socs=task.int8_socs,
            backup_steps=task.backup_steps,
            departs_at=departs_at,
            on_step=on_step,
        ).train()


def coding_of(task: PipelineTask) -> ActivationCoding:
    """Return how tensors are sent that cross cuts."""
    return ActivationCoding(
        bits=task.bits, gradient_bits=task.gradient_bits, feedback=cast(Form, task.feedback)
    )


def stage_reply(
    message: Message,
    context: Context,
    group: GroupTask,
    end: MemberResult,
    weights: ArrayRecord | None,
) -> Message:
    """Return a device's reply: with the model if it answers for the pipeline; its deputy keeps the model (F33)."""
    context.state.pop(KEPT_MODEL, None)
    content = RecordDict({OUTCOME: ConfigRecord(encode(end.outcome))})
    if end.outcome.outcome == COMPLETED and end.end is not None:
        assert weights is not None and end.devices is not None
        content[METRICS] = MetricRecord(
            {
                TRAIN_LOSS: end.mean_loss,
                NUM_EXAMPLES: end.num_samples,
                GROUP_ID: group.group_id,
                **end.end.metrics,
            }
        )
        content[TRAINED_ON] = ConfigRecord(encode(end.devices))
        if end.outcome.answers:
            content[ARRAYS] = weights
        else:
            context.state[KEPT_MODEL] = weights
        if end.end.events:
            content[EVENTS] = ConfigRecord({"texts": list(end.end.events)})
    return Message(content, reply_to=message)
