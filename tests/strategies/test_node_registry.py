"""Which node is which SoC: what nodes say of themselves, and what cannot be."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.strategies.node_registry import QUERY_TYPE, NodeRegistry
from socflower.wire.message_keys import STATUS, NodeStatus, encode

CLUSTER = parse_cluster({"boards": [2, 3]})
SOCS = range(5)


class QueriedGrid:
    """Nodes that answer status_queries; None is a ClientApp that fails."""

    def __init__(self, statuses: Mapping[int, NodeStatus | None]) -> None:
        self.statuses = dict(statuses)
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.statuses)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self.answer(message) for message in messages]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.pushed = list(messages)
        return [str(message.metadata.dst_node_id) for message in self.pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = set(message_ids)
        replies = [self.answer(message) for message in self.pushed if str(message.metadata.dst_node_id) in asked]
        for reply in replies:
            reply.metadata.__dict__["_reply_to_message_id"] = str(reply.metadata.src_node_id)
        return replies

    def answer(self, message: Message) -> Message:
        assert message.metadata.message_type == QUERY_TYPE
        node = message.metadata.dst_node_id
        self.asked.append(node)
        status = self.statuses[node]
        if status is None:
            return Message(Error(1, "no such module"), reply_to=message)
        return Message(RecordDict({STATUS: ConfigRecord(encode(status))}), reply_to=message)


def at(board: int, slot: int, port: int = 0, **changes: Any) -> NodeStatus:
    ring = f"10.0.0.{board * 10 + slot + 1}:{port or 28200}"
    return NodeStatus(**{"ring": ring, "board": board, "slot": slot, "transports": ("gloo", "grpc"), **changes})


PLACES = [at(1, 2), at(0, 1), at(1, 0), at(0, 0), at(1, 1)]


def registry_of(statuses: Iterable[NodeStatus | None]) -> tuple[NodeRegistry, QueriedGrid]:
    grid = QueriedGrid({100 + index: status for index, status in enumerate(statuses)})
    registry = NodeRegistry(CLUSTER, SOCS)
    registry.match_nodes(grid, query=True)  # type: ignore[arg-type]
    return registry, grid


def test_nodes_are_matched_by_where_they_sit() -> None:
    registry, _ = registry_of(PLACES)
    assert dict(registry.node_of) == {4: 100, 1: 101, 2: 102, 0: 103, 3: 104}
    assert registry.ring_address_of[2] == "10.0.0.11:28200"


@pytest.mark.parametrize("places", [PLACES, [replace(place, ring="") for place in PLACES],
                                    [replace(place, board=-1, slot=-1) for place in PLACES]],
                         ids=["rings and slots", "slots", "rings"])
def test_a_node_that_dies_during_the_first_query_is_asked_again(places: list[NodeStatus]) -> None:
    class DyingOnce(QueriedGrid):
        def answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id == 102 and 102 not in self.asked:
                self.asked.append(102)
                return Message(Error(8, "the client's process died"), reply_to=message)
            return super().answer(message)

    grid = DyingOnce({100 + index: status for index, status in enumerate(places)})
    registry = NodeRegistry(CLUSTER, SOCS)
    registry.match_nodes(grid, query=True)  # type: ignore[arg-type]
    assert registry.node_of[2] == 102
    assert grid.asked.count(102) == 2 and grid.asked.count(100) == 1


def test_apps_that_do_not_answer_are_matched_in_order_and_form_no_rings() -> None:
    registry, grid = registry_of([None] * 5)
    assert dict(registry.node_of) == {soc: 100 + soc for soc in SOCS}
    assert not registry.ring_address_of
    assert registry.present(grid) == tuple(SOCS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("statuses", "says"), [
    ([*PLACES[:4], at(1, 0, 1)], "nodes 102 and 104 both say that they are at board 1, slot 0"),
    ([*PLACES[:4], at(2, 0)], "node 104 says that it is at board 2, slot 0, which the cluster does not have"),
    ([*PLACES[:4], at(1, 3)], "board 1, slot 3, which the cluster does not have"),
    ([*PLACES[:4], at(-1, -1)], "nodes 104 have no board and slot"),
    ([*PLACES[:4], None], "nodes 104 failed or did not answer within 180 s, twice, and others say where they are"),
    ([*PLACES[:4], at(1, 1, ring="")], "nodes 104 have no ring in their node config"),
    ([*PLACES[:4], at(1, 1, ring="10.0.0.1:28200")], "several nodes have the ring address 10.0.0.1:28200"),
])
def test_contradictions_are_named(statuses: list[NodeStatus | None], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry_of(statuses)


def test_too_few_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(InfeasiblePlan, match="needs 5 nodes and Flower has 4"):
        registry_of(PLACES[:4])


def test_what_a_node_says_of_its_gpu_is_known_of_its_soc() -> None:
    registry, _ = registry_of([at(place.board, place.slot, gpu=gpu) for place, gpu in zip(
        PLACES, ("GPU-1", "", "GPU-2", "GPU-2", ""), strict=True)])
    assert list(registry.gpu_of.values()) == ["GPU-1", "GPU-2", "GPU-2"] and len(registry.gpu_of) == 3


@pytest.mark.parametrize(("offered", "wanted", "chosen"), [
    ([("gloo", "grpc")] * 5, "auto", "gloo"), ([("gloo", "grpc")] * 5, "grpc", "grpc"),
    ([("grpc",)] * 4 + [("gloo", "grpc")], "auto", "grpc"), ([("grpc",)] * 5, "gloo", None),
    ([("grpc",)] * 4 + [("gloo",)], "auto", None), ([("grpc+tls",)] * 5, "grpc", "grpc+tls"),
    ([("grpc+tls",)] * 4 + [("gloo", "grpc")], "auto", None), ([("grpc+tls",)] * 4 + [("gloo", "grpc")], "grpc", None),
])
def test_a_transport_is_one_that_all_nodes_allow(
    offered: list[tuple[str, ...]], wanted: str, chosen: str | None,
) -> None:
    registry, _ = registry_of([at(place.board, place.slot, transports=each)
                               for place, each in zip(PLACES, offered, strict=True)])
    if chosen is None:
        with pytest.raises(ConfigError, match="no common ring transport"):
            registry.transport(wanted)
    else:
        assert registry.transport(wanted) == chosen


def test_who_is_away_is_asked_every_round_until_it_is_free() -> None:
    registry, grid = registry_of(PLACES)
    registry.mark_away([2])
    assert registry.present(grid) == (0, 1, 3, 4)  # type: ignore[arg-type]
    grid.statuses[102] = at(1, 0, preempted=True)
    for status, back in ((at(1, 0, preempted=True), []), (at(1, 0), [2])):
        grid.statuses[102] = status
        registry.ask(grid, 3)  # type: ignore[arg-type]
        registry.ask(grid, 3)  # type: ignore[arg-type] # not asked twice
        assert [message.metadata.dst_node_id for message in grid.pushed] == [102]
        assert grid.pushed[0].content["config"]["socflower-soc"] == 2
        assert registry.hear(grid) == back  # type: ignore[arg-type]
    assert registry.present(grid) == tuple(SOCS)  # type: ignore[arg-type]
    grid.pushed = []
    registry.ask(grid, 4)  # type: ignore[arg-type]
    assert grid.pushed == []


def test_a_node_that_vanished_may_come_back_under_another_id() -> None:
    registry, grid = registry_of(PLACES)
    del grid.statuses[102]
    assert registry.present(grid) == (0, 1, 3, 4)  # type: ignore[arg-type]
    grid.statuses[900] = at(1, 0, 28300)
    registry.ask(grid, 3)  # type: ignore[arg-type]
    assert registry.hear(grid) == [2]  # type: ignore[arg-type]
    assert registry.node_of[2] == 900
    assert registry.ring_address_of[2].endswith(":28300")
    grid.pushed = []
    registry.ask(grid, 4)  # type: ignore[arg-type]
    assert grid.pushed == []


def test_a_node_that_is_preempted_when_training_begins_is_planned_without() -> None:
    registry, grid = registry_of([*PLACES[:4], at(1, 1, preempted=True)])
    assert registry.away == (3,)
    assert registry.present(grid) == (0, 1, 2, 4)  # type: ignore[arg-type]
