"""Whom a fault of a scenario strikes."""

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from socflower.clients.fault_injection import Fault, inject
from socflower.flower_adapter import begin_run
from socflower.wire.message_keys import (
    ASK,
    ASK_STATUS,
    ASKED_SOC,
    CONFIG,
    SERVER_ROUND,
    STATUS,
    NodeStatus,
    encode,
)


@pytest.mark.parametrize(
    ("asked", "preempted"), [({}, False), ({ASKED_SOC: 3}, True), ({ASKED_SOC: 5}, False)]
)
def test_a_status_query_is_for_the_soc_that_it_names_whatever_the_nodes_partition(
    asked: dict[str, int],
    preempted: bool,
) -> None:
    begin_run(1)
    query = Message(
        RecordDict({CONFIG: ConfigRecord({ASK: ASK_STATUS, SERVER_ROUND: 3, **asked})}), 7, "query"
    )
    context = Context(
        run_id=1, node_id=7, node_config={"partition-id": 5}, state=RecordDict(), run_config={}
    )

    def answer(message: Message, context: Context) -> Message:
        return Message(RecordDict({STATUS: ConfigRecord(encode(NodeStatus()))}), reply_to=message)

    reply = inject(
        [Fault(kind="preempt", soc=3, server_round=2, num_rounds=2)], query, context, answer
    )
    assert reply.content[STATUS]["preempted"] is preempted
