"""Trains a whole group in one process: the client half of `strategies/methods/groups.py` in simulation."""

import math
from collections.abc import Mapping
from typing import cast

from flwr.app import ConfigRecord, Message, RecordDict

from socflower.clients.node_training import Metrics, NodeTraining, unchecked
from socflower.clients.pipeline_client import budgets_of, coding_of
from socflower.pipeline.plan import from_json
from socflower.pipeline.runtime.group import train_pipeline
from socflower.training.batches import own_steps
from socflower.training.group import GroupOutcome, train_group
from socflower.wire.message_keys import (
    COMPLETED,
    DEPARTURES,
    GROUP,
    GROUP_ID,
    HANDED,
    NUM_EXAMPLES,
    OUTCOME,
    PIPELINE,
    PREEMPTED,
    TRAIN_LOSS,
    GroupTask,
    PipelineTask,
    RingOutcome,
    decode,
    encode,
)
from socflower.workloads.data_source import DataSource


def train_whole_group(training: NodeTraining) -> Message:
    """Train all members of a group, on shares of each batch or as stages of a pipeline."""
    training.load()
    records = training.records
    task = GroupTask.decode(records[GROUP])
    if task.reshuffle:
        data = [training.group_data(task, 0)]
    else:
        data = [training.group_data(task, part) for part in task.partitions]
    state = training.state(task)
    task = own_steps(task, data[0])
    departures = departures_of(training.message, task)
    if PIPELINE in records:
        pipeline = decode(PipelineTask, records[PIPELINE], "pipeline")
        outcome = _train_stages(training, pipeline, task, data[0], state.read(), departures)
    else:
        outcome = train_group(
            training.model, data, task, training.trainer, state.read(), departures=departures
        )
    state.save(outcome.end.state, outcome.mean_loss)
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
    return training.reply(metrics, outcome.end, content)


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
    )


def departures_of(message: Message, task: GroupTask) -> dict[int, int]:
    """Return the step before which a member leaves because of a scenario's event, by the member's position."""
    leaving = message.content.config_records.get(DEPARTURES, ConfigRecord())
    return {
        position: math.floor(cast(float, leaving[str(soc)]) * task.num_steps)
        for position, soc in enumerate(task.members)
        if str(soc) in leaving
    }
