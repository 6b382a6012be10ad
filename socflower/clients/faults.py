"""Faults on purpose: what a run does when one client raises, answers NaN, hangs or dies."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from socflower.cluster.protocol import ARRAYS, CONFIG, GROUP, PARTITION_ID, SERVER_ROUND, WARM_UP, GroupTask

_HANG_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to one SoC's client in one round: "raise", "nan", "hang" or "die"."""

    kind: str
    soc: int
    server_round: int


def suffer(faults: Sequence[Fault], message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer a message as a client that suffers those of `faults` that strike its SoCs in this round.

    A group in one process suffers what any of its members does, as a ring would.
    """
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    server_round = config.get(SERVER_ROUND)
    group = message.content.config_records.get(GROUP)
    socs = GroupTask.decode(group).members if group else (context.node_config[PARTITION_ID],)
    kinds = {fault.kind for fault in faults
             if fault.soc in socs and fault.server_round == server_round and WARM_UP not in config}
    if "raise" in kinds:
        raise RuntimeError(f"fault on purpose in round {server_round!r}")
    if "hang" in kinds:
        time.sleep(_HANG_S)
    if "die" in kinds:
        os._exit(1)
    reply = call_next(message, context)
    if "nan" in kinds and reply.has_content():
        arrays = reply.content.array_records[ARRAYS]
        name = next(iter(arrays))
        spoilt = np.full(arrays[name].shape, np.nan, np.float32)
        reply.content[ARRAYS] = ArrayRecord({**arrays, name: Array(spoilt)})
    return reply
