"""Trains a member of a ring, and answers a strategy's queries."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from socflower.clients.node_config import RingNode, board_and_slot, ring_node
from socflower.clients.node_record import is_drained, switch_of
from socflower.clients.saved_training import FeedbackState, ResidualState
from socflower.errors import ConfigError
from socflower.peers.owner_preemption import PreemptionSwitch, preempt_switch
from socflower.peers.ring.member import AppliedStep, MemberResult, RingMember
from socflower.peers.transports.port import RingPort
from socflower.training.hang_watch import end_process, watch_hangs
from socflower.training.trainer import Trainer
from socflower.wire.arrays import digest_of
from socflower.wire.message_keys import (
    ARRAYS,
    ASK,
    ASK_MODEL,
    COMPLETED,
    CONFIG,
    EVENTS,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    OUTCOME,
    SERVER_ROUND,
    STATUS,
    TRAIN_LOSS,
    TRAINED_ON,
    GroupTask,
    NodeStatus,
    RingTask,
    encode,
)
from socflower.wire.node_files import RESIDENT
from socflower.workloads.data_source import DataSource

_KEPT_MODEL = "socflower-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberWork:
    """An interval of one member of a ring; the fields are arguments of `RingMember` and `PipelineMember`."""

    context: Context
    group: GroupTask
    ring: RingTask
    model: nn.Module
    has_model: bool
    data: DataSource
    trainer: Trainer
    state: bytes | None
    departs_at: int | None
    on_step: Callable[[AppliedStep], None]
    port: RingPort
    switch: PreemptionSwitch


@contextmanager
def port_and_switch(
    context: Context, group: GroupTask, ring: RingTask
) -> Iterator[tuple[RingPort, PreemptionSwitch]]:
    """Open this node's ring port and its switch for preemption."""
    node = ring_node(context.node_config)
    if node is None:
        raise ConfigError(
            f"node {context.node_id}: its node config lacks ring; start the SuperNode with "
            "--node-config 'ring=\"host:port\"'"
        )
    # Others notice the end of this process at once, and its hang never.
    watch_hangs(end_process)
    with (
        switch_of(context.node_config) as switch,
        closing(open_port(node, group, ring)) as port,
    ):
        yield port, switch


def train_member(
    work: MemberWork, feedback: FeedbackState, residuals: ResidualState
) -> MemberResult:
    """Train as one member; compression and feedback continue from their states."""
    end = RingMember(
        model=work.model,
        has_model=work.has_model,
        data=work.data,
        group=work.group,
        ring=work.ring,
        trainer=work.trainer,
        port=work.port,
        switch=work.switch,
        state=work.state,
        compression_state=residuals.read(),
        feedback=feedback.read(work.ring.feedback_sha256),
        departs_at=work.departs_at,
        on_step=work.on_step,
    ).train()
    if end.compression:
        residuals.save(end.compression, end.mean_loss)
    if end.feedback is not None and end.outcome.feedback_sha256:
        feedback.save(end.outcome.feedback_sha256, end.feedback)
    return end


def open_port(node: RingNode, group: GroupTask, ring: RingTask) -> RingPort:
    """Return this member's ring port, open to the group, to groups that share its uplink, and to other leaders."""
    addresses = dict(zip(group.partitions, ring.addresses, strict=True))
    for text in (*ring.neighbours, *ring.leaders):
        _, participant, address = text.split(" ")
        addresses[int(participant)] = address
    own = addresses[ring.participant]
    # Ranks of the port are participants. This member never calls those without an address.
    by_rank = [addresses.get(rank, own) for rank in range(max(addresses) + 1)]
    return RingPort(
        node.listen,
        rank=ring.participant,
        addresses=by_rank,
        token=bytes.fromhex(ring.token),
        tls=node.tls,
        heartbeat_s=ring.heartbeat_s,
        bind_timeout_s=ring.rendezvous_s,
        trusted=node.trusted,
    )


def member_reply(
    message: Message,
    context: Context,
    group: GroupTask,
    end: MemberResult,
    weights: ArrayRecord | None,
) -> Message:
    """Return a member's reply: with the model if it answers for its group, else with metrics only (F8, F33).

    The other members keep the model until the next interval, in case the answering one is lost. If leaders have met,
    the first group in the mean answers with it, and all keep it for the next interval.
    """
    outcome = end.outcome
    context.state.pop(_KEPT_MODEL, None)
    if outcome.met:
        assert weights is not None
        outcome = replace(outcome, holds=model_digest(weights))
    content = RecordDict({OUTCOME: ConfigRecord(encode(outcome))})
    if outcome.outcome == COMPLETED and end.end is not None:
        assert weights is not None
        metrics = MetricRecord(
            {
                TRAIN_LOSS: end.mean_loss,
                NUM_EXAMPLES: end.num_samples,
                GROUP_ID: group.group_id,
                **end.end.metrics,
            }
        )
        content[METRICS] = metrics
        if end.devices is not None:
            content[TRAINED_ON] = ConfigRecord(encode(end.devices))
        sends = outcome.answers and (not outcome.met or outcome.met[0] == group.group_id)
        if sends:
            content[ARRAYS] = weights
        if outcome.met or not sends:
            context.state[_KEPT_MODEL] = weights
        if end.end.events:
            content[EVENTS] = ConfigRecord({"texts": list(end.end.events)})
    return Message(content, reply_to=message)


def kept_model(context: Context, sha256: str) -> ArrayRecord | None:
    """Return the model that this node has kept since the last interval, if it has this digest."""
    kept = context.state.array_records.get(_KEPT_MODEL)
    return kept if sha256 and kept is not None and model_digest(kept) == sha256 else None


def model_digest(arrays: ArrayRecord) -> str:
    """Return the digest of a model's names and bytes."""
    return digest_of({name: array.data for name, array in arrays.items()})


def answer_query(message: Message, context: Context) -> Message:
    """Answer a strategy's query: the node's status, or the model that its ring ended with."""
    asked = message.content.config_records[CONFIG].get(ASK)
    if asked == ASK_MODEL:
        kept = context.state.array_records.get(_KEPT_MODEL)
        return Message(RecordDict({ARRAYS: kept} if kept else {}), reply_to=message)
    node = ring_node(context.node_config)
    board, slot = board_and_slot(context.node_config)
    status = NodeStatus(board=board, slot=slot) if node is None else node.status
    status = replace(status, resident=RESIDENT in os.environ)
    with preempt_switch(context.node_config) as switch:
        status = replace(status, preempted=switch.active or is_drained())
    return Message(RecordDict({STATUS: ConfigRecord(encode(status))}), reply_to=message)


def step_ledger(path: Path | None, message: Message) -> Callable[[AppliedStep], None]:
    """Return a function that appends a step to a file as a line of JSON, or does nothing without a file."""
    if path is None:
        return lambda step: None
    path.parent.mkdir(parents=True, exist_ok=True)
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    server_round = int(cast(int, config.get(SERVER_ROUND, 0)))

    def note(step: AppliedStep) -> None:
        line = {
            "round": server_round,
            "step": step.step,
            "members": step.members,
            "samples": step.samples,
            "adopted": step.adopted,
            "at_s": time.time(),
        }
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    return note
