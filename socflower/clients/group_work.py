"""Trains a whole group in one process: the client half of `strategies/methods/groups.py` in simulation."""

import math
from collections.abc import Mapping
from typing import cast

from flwr.app import ConfigRecord, Message, RecordDict

from socflower.clients.node_training import Metrics, NodeTraining, unchecked
from socflower.clients.pipeline_client import budgets_of, coding_of
from socflower.clients.streamed_model import StreamedModel
from socflower.pipeline.plan import from_json
from socflower.pipeline.runtime.group import train_pipeline
from socflower.training.batches import own_steps
from socflower.training.group import GroupOutcome, train_group
from socflower.wire.message_keys import (
    ARRAYS,
    COMPLETED,
    DEPARTURES,
    GROUP,
    GROUP_ID,
    HANDED,
    NUM_EXAMPLES,
    OUTCOME,
    PIPELINE,
    PREEMPTED,
    STREAM,
    TRAIN_LOSS,
    GroupTask,
    PipelineTask,
    RingOutcome,
    StreamTask,
    decode,
    encode,
)
from socflower.workloads.data_source import DataSource


def train_whole_group(training: NodeTraining) -> Message:
    """Train all members of a group, on shares of each batch or as stages of a pipeline."""
    records = training.records
    task = GroupTask.decode(records[GROUP])
    if task.reshuffle:
        data = [training.group_data(task, 0)]
    else:
        data = [training.group_data(task, part) for part in task.partitions]
    state = training.state(task)
    saved, streamed = state.read(), None
    if STREAM in records:
        streamed = StreamedModel(training, decode(StreamTask, records[STREAM], "stream"), saved)
        saved = streamed.optimizer
    else:
        training.load()
    task = own_steps(task, data[0])
    departures = departures_of(training.message, task)
    if PIPELINE in records:
        pipeline = decode(PipelineTask, records[PIPELINE], "pipeline")
        outcome = _train_stages(training, pipeline, task, data[0], saved, departures)
    else:
        outcome = train_group(
            training.model,
            data,
            task,
            training.trainer,
            saved,
            departures=departures,
            before_step=None if streamed is None else streamed.mix,
        )
    end_state = outcome.end.state
    state.save(end_state if streamed is None else streamed.state(end_state), outcome.mean_loss)
    content = RecordDict()
    if task.hands_over:
        content[HANDED] = ConfigRecord({"state": outcome.end.state})
    stayed = [soc for position, soc in enumerate(task.members) if position not in departures]
    if departures:
        ended = RingOutcome(
            outcome=COMPLETED if stayed else PREEMPTED,
            members=tuple(stayed),
            num_steps=task.num_steps,
            answers=bool(stayed),
            preempted=tuple(task.members[position] for position in departures),
        )
        content[OUTCOME] = ConfigRecord(encode(ended))
    if not stayed:
        return Message(content, reply_to=training.message)
    training.name_untrained(content)
    metrics: Metrics = {
        TRAIN_LOSS: outcome.mean_loss,
        NUM_EXAMPLES: outcome.num_samples,
        GROUP_ID: task.group_id,
    }
    reply = training.reply(metrics, outcome.end, content)
    if streamed is not None:
        reply.content[ARRAYS] = streamed.fragment(reply.content.array_records[ARRAYS])
    return reply


def _train_stages(
    training: NodeTraining,
    pipeline: PipelineTask,
    task: GroupTask,
    data: DataSource,
    state: bytes | None,
    departures: Mapping[int, int],
) -> GroupOutcome:
    plan = from_json(pipeline.plan)
    return train_pipeline(
        training.model,
        data,
        task,
        plan,
        unchecked(training.trainer),
        state,
        cuts=pipeline.cuts,
        layers_sha256=pipeline.layers_sha256,
        sample_shape=pipeline.sample_shape,
        coding=coding_of(pipeline),
        departures={task.members[position]: step for position, step in departures.items()},
        int8_socs=pipeline.int8_socs,
        budget_bytes=budgets_of(pipeline, plan),
        problem=pipeline.problem,
    )


def departures_of(message: Message, task: GroupTask) -> dict[int, int]:
    """Return the step before which a member leaves because of a scenario's event, by the member's position."""
    leaving = message.content.config_records.get(DEPARTURES, ConfigRecord())
    return {
        position: math.floor(cast(float, leaving[str(soc)]) * task.num_steps)
        for position, soc in enumerate(task.members)
        if str(soc) in leaving
    }
