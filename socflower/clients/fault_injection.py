"""Fault injection: makes a client raise, return NaN, hang, die, or leave its group because it is preempted."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from socflower.wire.message_keys import (
    ARRAYS,
    ASK,
    ASK_STATUS,
    ASKED_SOC,
    CONFIG,
    DEPARTURES,
    GROUP,
    PARTITION_ID,
    RING,
    SERVER_ROUND,
    STATUS,
    GroupTask,
    RingTask,
    decode,
)

_HANG_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault of one SoC's client: "raise", "nan", "hang" or "die" in one round, or "preempt".

    "preempt" makes the SoC leave in that round, after the part `at` of its steps, and stay away for `num_rounds`
    rounds, that one included.
    """

    kind: str
    soc: int
    server_round: int
    num_rounds: int = 1
    at: float = 0.5


def inject(
    faults: Sequence[Fault], message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Answer a message, with those of `faults` injected that concern its SoCs in this round.

    A group in one process has the faults of all its members, as a ring would; in a ring each member has its own.
    """
    records = message.content.config_records
    config = records.get(CONFIG, ConfigRecord())
    server_round = config.get(SERVER_ROUND)
    socs = _socs(message, context)
    if config.get(ASK) == ASK_STATUS:
        return _status(faults, socs, cast(int, server_round), call_next(message, context))
    leaving = {
        str(fault.soc): fault.at
        for fault in faults
        if fault.kind == "preempt" and fault.soc in socs and fault.server_round == server_round
    }
    if leaving and GROUP in records:
        message.content[DEPARTURES] = ConfigRecord({**leaving})
    kinds = {
        fault.kind for fault in faults if fault.soc in socs and fault.server_round == server_round
    }
    if "raise" in kinds:
        raise RuntimeError(f"fault on purpose in round {server_round!r}")
    if "hang" in kinds:
        time.sleep(_HANG_S)
    if "die" in kinds:
        os._exit(1)
    reply = call_next(message, context)
    if "nan" in kinds and reply.has_content() and ARRAYS in reply.content.array_records:
        arrays = reply.content.array_records[ARRAYS]
        name = next(iter(arrays))
        spoilt = np.full(arrays[name].shape, np.nan, np.float32)
        reply.content[ARRAYS] = ArrayRecord({**arrays, name: Array(spoilt)})
    return reply


def _socs(message: Message, context: Context) -> Sequence[int]:
    """Return the SoCs that a message addresses."""
    records = message.content.config_records
    if GROUP not in records:
        # Flower's simulation numbers partitions in another order than the nodes that are matched with SoCs.
        asked = records.get(CONFIG, ConfigRecord()).get(ASKED_SOC)
        return (int(cast(int, context.node_config[PARTITION_ID] if asked is None else asked)),)
    task = GroupTask.decode(records[GROUP])
    if RING not in records:
        return task.members
    return (
        task.members[task.partitions.index(decode(RingTask, records[RING], "ring").participant)],
    )


def _status(
    faults: Sequence[Fault], socs: Sequence[int], server_round: int, reply: Message
) -> Message:
    """Mark the node as preempted in its status reply during the rounds of a "preempt" fault."""
    away = any(
        fault.kind == "preempt"
        and fault.soc in socs
        and fault.server_round <= server_round < fault.server_round + fault.num_rounds
        for fault in faults
    )
    if away and reply.has_content():
        reply.content.config_records[STATUS]["preempted"] = True
    return reply
