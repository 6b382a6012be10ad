"""What an operator says of a machine's ring and place: half of it, or the wrong kind of value, is refused."""

from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from socflower.clients.node_config import board_and_slot, ring_node
from socflower.clients.split.remote_cloud import cloud_link
from socflower.flower_adapter import begin_run
from socflower.wire.message_keys import ASK, ASK_STATUS, STATUS, NodeStatus, decode
from tests.clients.test_app import make_app, message, node
from tests.one_line import refused


def status_of(**config: Any) -> NodeStatus:
    """Return what a node answers a strategy that asks for its status."""
    begin_run(1)
    context = node()
    context.node_config.update(config)
    question = Message(
        RecordDict({"config": ConfigRecord({ASK: ASK_STATUS})}), 5, "query.socflower"
    )
    return decode(
        NodeStatus, make_app()(question, context).content.config_records[STATUS], "status"
    )


@pytest.mark.parametrize("ring", [{}, {"ring": "127.0.0.1:28200"}])
def test_a_node_tells_its_place_with_and_without_a_ring(ring: dict[str, str]) -> None:
    status = status_of(board=2, slot=3, **ring)
    assert (status.board, status.slot, status.ring) == (2, 3, ring.get("ring", ""))
    assert (status_of(**ring).board, status_of(**ring).slot) == (-1, -1)


@pytest.mark.parametrize(("given", "missing"), [("board", "slot"), ("slot", "board")])
def test_a_place_needs_board_and_slot(given: str, missing: str) -> None:
    refused(lambda: board_and_slot({given: 0}), given, missing)
    context = node()
    context.node_config[given] = 0
    refused(lambda: make_app()(message(), context), given, missing)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ring-bind", "0.0.0.0:1"),
        ("ring-trusted", True),
        ("ring-transport", "gloo"),
        ("ring-ca", "ca.pem"),
    ],
)
def test_what_belongs_to_a_ring_needs_one(key: str, value: object) -> None:
    refused(lambda: ring_node({key: value}), key)  # type: ignore[dict-item]


def test_a_text_is_no_yes() -> None:
    """In quotes, "false" would count as true, and allow plain text on public addresses."""
    refused(
        lambda: ring_node({"ring": "127.0.0.1:1", "ring-trusted": "false"}), "ring-trusted", "false"
    )
    refused(
        lambda: cloud_link(
            Context(
                run_id=1,
                node_id=1,
                node_config={"cloud-insecure": "false"},
                state=RecordDict(),
                run_config={},
            )
        ),
        "cloud-insecure",
        "false",
    )
