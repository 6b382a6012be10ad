"""The local engine's grid: state, order, parallelism, and what a strategy sees when clients fail."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import AppReference
from tests.engines.local import apps_for_tests
from tests.one_line import refused

APP = AppReference(target="tests.engines.local.apps_for_tests:app")


def message(node_id: int, **config: object) -> Message:
    return Message(RecordDict({"config": ConfigRecord(config)}), node_id, "train")


def calls(replies: list[Message]) -> list[int]:
    return [reply.content["metrics"]["calls"] for reply in replies]


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalGrid]:
    with LocalGrid(APP, 5, num_workers=2) as grid:
        yield grid


@pytest.fixture()
def in_process() -> LocalGrid:
    return LocalGrid(apps_for_tests.app, 3, num_workers=0)


def test_nodes_are_numbered_like_partitions(in_process: LocalGrid) -> None:
    nodes = in_process.get_node_ids()
    assert nodes == sorted(nodes)
    replies = in_process.send_and_receive([message(node) for node in reversed(nodes)])
    assert [reply.content["metrics"]["partition"] for reply in replies] == [2, 1, 0]
    assert [reply.metadata.src_node_id for reply in replies] == nodes[::-1]


def test_state_stays_with_its_node(in_process: LocalGrid) -> None:
    first, second, _ = in_process.get_node_ids()
    assert calls(in_process.send_and_receive([message(first), message(second)])) == [1, 1]
    assert calls(in_process.send_and_receive([message(first)])) == [2]


def test_two_messages_to_a_node_are_handled_in_order(in_process: LocalGrid) -> None:
    node = in_process.get_node_ids()[0]
    assert calls(in_process.send_and_receive([message(node), message(node), message(node)])) == [
        1,
        2,
        3,
    ]


def test_push_and_pull_are_the_halves_of_send_and_receive(in_process: LocalGrid) -> None:
    message_ids = in_process.push_messages([message(node) for node in in_process.get_node_ids()])
    assert len(set(message_ids)) == 3
    replies = in_process.pull_messages(message_ids)
    assert [reply.metadata.reply_to_message_id for reply in replies] == message_ids
    assert in_process.pull_messages(message_ids) == []


def test_state_survives_worker_processes_whoever_handles_the_message(processes: LocalGrid) -> None:
    nodes = processes.get_node_ids()
    before = calls(processes.send_and_receive([message(node) for node in nodes]))
    after = processes.send_and_receive([message(node) for node in nodes])
    assert calls(after) == [count + 1 for count in before]
    assert os.getpid() not in {reply.content["metrics"]["pid"] for reply in after}


def test_replies_come_in_the_order_of_messages_not_of_finishing(processes: LocalGrid) -> None:
    first, second, third, *_ = processes.get_node_ids()
    replies = processes.send_and_receive(
        [message(first, **{"sleep-s": 0.5}), message(second), message(third)]
    )
    assert [reply.metadata.src_node_id for reply in replies] == [first, second, third]


def test_an_exception_is_an_error_reply_with_its_text(processes: LocalGrid) -> None:
    nodes = processes.get_node_ids()
    replies = processes.send_and_receive([message(nodes[0], **{"raise": True}), message(nodes[1])])
    assert replies[0].error.code == 2
    assert (
        replies[0].error.reason
        == "<class 'ValueError'>:<'on purpose'> (apps_for_tests.py, line 25)"
    )
    assert replies[1].has_content()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_client_that_exits_or_returns_no_message_is_a_failed_client(
    num_workers: int, request: pytest.FixtureRequest
) -> None:
    """In this process and in one of its own alike, whatever the exit status."""
    grid: LocalGrid = request.getfixturevalue("processes" if num_workers else "in_process")
    first, second, third, *_ = grid.get_node_ids()
    replies = grid.send_and_receive(
        [message(first, exit=0), message(second, exit=3), message(third)]
    )
    assert [reply.error.reason for reply in replies[:2]] == [
        f"<class 'SystemExit'>:<'{status}'> (apps_for_tests.py, line 27)" for status in (0, 3)
    ]
    assert [reply.error.code for reply in replies[:2]] == [2, 2]
    assert replies[2].has_content()
    (reply,) = grid.send_and_receive([message(first, **{"say-nothing": True})])
    assert reply.error.code == 2
    assert reply.error.reason == "the ClientApp returned a NoneType, not a flwr.app.Message"
    assert reply.metadata.src_node_id == first


def test_an_interruption_in_a_client_stays_one(in_process: LocalGrid) -> None:
    with pytest.raises(KeyboardInterrupt):
        in_process.send_and_receive([message(in_process.get_node_ids()[0], interrupt=True)])


def test_an_app_whose_module_exits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    reference = AppReference(target="exits_at_import:app", folder=tmp_path)
    refused(lambda: LocalGrid(reference, 1, num_workers=0), "exits_at_import:app", "sys.exit")
    with LocalGrid(reference, 1, num_workers=1) as grid:
        (reply,) = grid.send_and_receive([message(grid.get_node_ids()[0])])
        assert "sys.exit(0)" in reply.error.reason


def test_a_process_that_dies_costs_its_message_and_no_other(processes: LocalGrid) -> None:
    nodes = processes.get_node_ids()
    replies = processes.send_and_receive(
        [message(nodes[0], die=True), *(message(node) for node in nodes[1:])]
    )
    assert replies[0].error.code == 8
    assert all(reply.has_content() for reply in replies[1:])
    assert processes.send_and_receive([message(nodes[0])])[0].has_content()


def test_a_node_that_never_answers_is_given_up_on_and_the_next_round_is_whole(
    processes: LocalGrid,
) -> None:
    nodes = processes.get_node_ids()
    processes.send_and_receive([message(node) for node in nodes])  # both workers are up
    started = time.monotonic()
    replies = processes.send_and_receive(
        [message(nodes[0], **{"sleep-s": 600.0}), *(message(node) for node in nodes[1:])],
        timeout=2.0,
    )
    assert time.monotonic() - started < 60.0
    assert [reply.metadata.src_node_id for reply in replies] == nodes[1:]
    assert len(processes.send_and_receive([message(node) for node in nodes])) == 5


def test_unknown_nodes_and_impossible_sizes_are_refused(in_process: LocalGrid) -> None:
    refused(lambda: in_process.push_messages([message(7)]), "node 7")
    refused(lambda: LocalGrid(apps_for_tests.app, 0, num_workers=0), "num_nodes")
    refused(lambda: LocalGrid(apps_for_tests.app, 2, num_workers=1), "num_workers")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("tests.engines.local.apps_for_tests:nothing", "cannot be loaded"),
        ("no.such.module:app", "cannot be loaded"),
        ("tests.engines.local.apps_for_tests:not_an_app", "is a int"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_named(target: str, says: str) -> None:
    refused(lambda: LocalGrid(AppReference(target=target), 1, num_workers=0), says)
