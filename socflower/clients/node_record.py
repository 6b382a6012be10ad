"""What the processes of a node's clients tell `socflower node`, and how it drains the node.

Flower may start a process for each message, so both are files in a folder that an environment variable names.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable

from socflower.peers.owner_preemption import PreemptionSwitch, preempt_switch
from socflower.wire.message_keys import CONFIG, HEAT, METRICS, SERVER_ROUND, TRAIN_LOSS
from socflower.wire.node_files import NodeRecord, drain_file, read_record, write_record


def record_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer as the client does, and record that for `socflower node`, if it started the node."""
    before = read_record()
    if before is None:
        return call_next(message, context)
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    now_s = time.time()
    working = replace(
        before,
        began_at_s=now_s,
        run=str(context.run_id),
        server_round=int(cast(int, config.get(SERVER_ROUND, before.server_round))),
        kind=message.metadata.message_type.partition(".")[0],
        working_since_s=now_s,
        pid=os.getpid(),
    )
    write_record(working)
    reply: Message | None = None
    try:
        reply = call_next(message, context)
    finally:
        write_record(_after(working, reply))
    return reply


def _after(working: NodeRecord, reply: Message | None) -> NodeRecord:
    now_s = time.time()
    found = replace(
        working,
        messages=working.messages + 1,
        failed=working.failed + (reply is None or reply.has_error()),
        busy_s=working.busy_s + now_s - cast(float, working.working_since_s),
        working_since_s=None,
        answered_at_s=now_s,
    )
    if reply is None or not reply.has_content():
        return found
    metrics = reply.content.metric_records.get(METRICS, MetricRecord())
    heat = reply.content.config_records.get(HEAT, ConfigRecord())
    loss, heat_c = metrics.get(TRAIN_LOSS), heat.get("temperature-c")
    return replace(
        found,
        loss=loss if isinstance(loss, float) else found.loss,
        temperature_c=float(heat_c) if isinstance(heat_c, int | float) else found.temperature_c,
    )


def is_drained() -> bool:
    """Return whether `socflower node` was told to end: the node takes no more work."""
    file = drain_file()
    return file is not None and file.exists()


def switch_of(node_config: Mapping[str, Any]) -> PreemptionSwitch:
    """Return the switch for an interval's preemption; on a node that was drained before, it is active from the start.

    A node that is drained within an interval completes it.
    """
    return PreemptionSwitch(file=drain_file()) if is_drained() else preempt_switch(node_config)
