"""Trains one member of a ring or a stage on its own machine: the client half of groups in deployments."""

from dataclasses import replace

from flwr.app import ArrayRecord, Message
from torch import nn

from socflower.clients.group_work import departures_of
from socflower.clients.node_training import (
    NodeTraining,
    ResumingTrainer,
    load_sent,
    require_base_of,
    unchecked,
)
from socflower.clients.pipeline_client import reads_samples, train_stage
from socflower.clients.ring_client import (
    MemberWork,
    kept_model,
    member_reply,
    port_and_switch,
    step_ledger,
    train_member,
)
from socflower.clients.saved_training import FeedbackState, ResidualState
from socflower.errors import ConfigError
from socflower.peers.owner_preemption import PreemptionSwitch
from socflower.peers.transports.port import RingPort
from socflower.training.batches import own_steps
from socflower.training.model_state import frozen_parameters, load_trainable_state
from socflower.wire.message_keys import (
    ARRAYS,
    GROUP,
    PIPELINE,
    RING,
    GroupTask,
    PipelineTask,
    RingTask,
    decode,
)
from socflower.workloads.data_source import AbsentSamples

_NUM_KEEPERS = 2


def train_as_member(training: NodeTraining) -> Message:
    """Train as one member; only the leader's message and the answering member's reply have the model (F8)."""
    records = training.records
    task, ring = GroupTask.decode(records[GROUP]), decode(RingTask, records[RING], "ring")
    # First of all: while this node loads model and data, the others see that it comes.
    with port_and_switch(training.context, task, ring) as (port, switch):
        return _train(training, task, ring, port, switch)


def _train(
    training: NodeTraining,
    task: GroupTask,
    ring: RingTask,
    port: RingPort,
    switch: PreemptionSwitch,
) -> Message:
    message, context, records = training.message, training.context, training.records
    has_model = _load_as_member(training.model, message, kept_model(context, ring.model_sha256))
    is_leader = ring.leader == ring.participant
    state = training.state(task, is_leader=is_leader)
    is_ring = len(task.members) > 1 and PIPELINE not in records
    saved, trainer = state.read(others_may_have_it=is_ring), training.trainer
    if state.missing is not None:
        trainer = ResumingTrainer(trainer, state.missing)
    ledger = None if training.ring_ledger is None else training.ring_ledger(context)
    position = task.partitions.index(ring.participant)
    pipeline = decode(PipelineTask, records[PIPELINE], "pipeline") if PIPELINE in records else None
    if pipeline is None or reads_samples(pipeline, task.members[position]):
        data = training.group_data(task, ring.participant)
    else:
        data = AbsentSamples(task.num_samples)
    own = own_steps(task, data)
    work = MemberWork(
        context=context,
        group=own,
        ring=ring,
        model=training.model,
        has_model=has_model,
        data=data,
        trainer=trainer,
        state=saved,
        departs_at=departures_of(message, own).get(position),
        on_step=step_ledger(ledger, message),
        port=port,
        switch=switch,
    )
    if pipeline is not None:
        end = train_stage(replace(work, trainer=unchecked(training.trainer)), pipeline)
    else:
        files = training.state_files
        residuals = ResidualState(task, ring.participant, message, context, files)
        feedback = FeedbackState(task, message, context, files)
        end = train_member(work, feedback, residuals)
    if end.end is None:
        return member_reply(message, context, task, end, None)
    # All members of a ring have the same optimiser. Two of them keep it on disk, besides the one that answers.
    is_keeper = ring.participant in [
        task.partitions[task.members.index(soc)] for soc in end.outcome.members[:_NUM_KEEPERS]
    ]
    in_file = end.outcome.answers or (is_ring and is_keeper)
    state.save(end.end.state, end.mean_loss, in_file=in_file)
    reply = member_reply(message, context, task, end, training.weights())
    training.to_wire(reply.content)
    if PIPELINE not in records:
        training.name_untrained(reply.content)
    return reply


def _load_as_member(model: nn.Module, message: Message, kept: ArrayRecord | None) -> bool:
    """Load the model that was sent, or else the one that this node kept; return whether there was one."""
    sent = message.content.array_records.get(ARRAYS)
    if sent is None:
        require_base_of(model, message)
        if kept is not None:
            load_trainable_state(model, kept.to_torch_state_dict())
        return kept is not None
    load_sent(model, message)
    frozen = [name for name in frozen_parameters(model) if name in sent]
    if frozen:
        raise ConfigError(
            f"{frozen[0]} is frozen and was sent, but only to the ring's leader; start the strategy with "
            "ArrayRecord(trainable_state(model)), and load frozen parameters in model_fn"
        )
    return True
