"""Which node is which SoC: what nodes say of themselves, and what cannot be."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import parse_cluster
from socflower.errors import InfeasiblePlan, TrainingFailed
from socflower.hierarchy import plan_groups
from socflower.peers.transports.port import PROTOCOL_VERSION
from socflower.strategies import node_registry, round_planner
from socflower.strategies.node_registry import QUERY_TYPE, NodeRegistry
from socflower.strategies.round_planner import RoundPlanner
from socflower.wire.message_keys import MESSAGE_VERSION, STATUS, NodeStatus, encode
from tests.one_line import one_line, refused

CLUSTER = parse_cluster({"boards": [2, 3]})
SOCS = range(5)


class QueriedGrid:
    """Nodes that answer status_queries; None is a ClientApp that fails."""

    def __init__(self, statuses: Mapping[int, NodeStatus | None]) -> None:
        self.statuses = dict(statuses)
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.statuses)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [self.answer(message) for message in messages]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.pushed = list(messages)
        return [str(message.metadata.dst_node_id) for message in self.pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = set(message_ids)
        replies = [
            self.answer(message)
            for message in self.pushed
            if str(message.metadata.dst_node_id) in asked
        ]
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
    return NodeStatus(
        **{"ring": ring, "board": board, "slot": slot, "transports": ("gloo", "grpc"), **changes}
    )


PLACES = [at(1, 2), at(0, 1), at(1, 0), at(0, 0), at(1, 1)]


def registry_of(statuses: Iterable[NodeStatus | None]) -> tuple[NodeRegistry, QueriedGrid]:
    grid = QueriedGrid({100 + index: status for index, status in enumerate(statuses)})
    registry = NodeRegistry(CLUSTER, SOCS)
    registry.match_nodes(grid, query=True)
    return registry, grid


def test_nodes_are_matched_by_where_they_sit() -> None:
    registry, _ = registry_of(PLACES)
    assert dict(registry.node_of) == {4: 100, 1: 101, 2: 102, 0: 103, 3: 104}
    assert registry.ring_address_of[2] == "10.0.0.11:28200"


@pytest.mark.parametrize(
    "places",
    [
        PLACES,
        [replace(place, ring="") for place in PLACES],
        [replace(place, board=-1, slot=-1) for place in PLACES],
    ],
    ids=["rings and slots", "slots", "rings"],
)
def test_a_node_that_dies_during_the_first_query_is_asked_again(places: list[NodeStatus]) -> None:
    class DyingOnce(QueriedGrid):
        def answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id == 102 and 102 not in self.asked:
                self.asked.append(102)
                return Message(Error(8, "the client's process died"), reply_to=message)
            return super().answer(message)

    grid = DyingOnce({100 + index: status for index, status in enumerate(places)})
    registry = NodeRegistry(CLUSTER, SOCS)
    registry.match_nodes(grid, query=True)
    assert registry.node_of[2] == 102
    assert grid.asked.count(102) == 2 and grid.asked.count(100) == 1


def test_apps_that_do_not_answer_are_matched_in_order_and_form_no_rings() -> None:
    registry, grid = registry_of([None] * 5)
    assert dict(registry.node_of) == {soc: 100 + soc for soc in SOCS}
    assert not registry.ring_address_of
    assert registry.present(grid) == tuple(SOCS)


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        ([*PLACES[:4], at(1, 0, 1)], "102"),
        ([*PLACES[:4], at(2, 0)], "104"),
        ([*PLACES[:4], at(1, 3)], "board 1, slot 3, which the cluster does not have"),
        ([*PLACES[:4], at(-1, -1)], "104"),
        ([*PLACES[:4], None], "104"),
        ([*PLACES[:4], at(1, 1, ring="")], "104"),
        ([*PLACES[:4], at(1, 1, ring="10.0.0.1:28200")], "10.0.0.1:28200"),
    ],
)
def test_contradictions_are_named(statuses: list[NodeStatus | None], says: str) -> None:
    refused(lambda: registry_of(statuses), says)


def test_too_few_nodes_are_refused_with_both_numbers() -> None:
    refused(lambda: registry_of(PLACES[:2]), "3 nodes", "has 2", error=InfeasiblePlan)


@pytest.mark.parametrize(
    ("offered", "wanted", "chosen"),
    [
        ([("gloo", "grpc")] * 5, "auto", "gloo"),
        ([("gloo", "grpc")] * 5, "grpc", "grpc"),
        ([("grpc",)] * 4 + [("gloo", "grpc")], "auto", "grpc"),
        ([("grpc",)] * 5, "gloo", None),
        ([("grpc",)] * 4 + [("gloo",)], "auto", None),
        ([("grpc+tls",)] * 5, "grpc", "grpc+tls"),
        ([("grpc+tls",)] * 4 + [("gloo", "grpc")], "auto", None),
        ([("grpc+tls",)] * 4 + [("gloo", "grpc")], "grpc", None),
    ],
)
def test_a_transport_is_one_that_all_nodes_allow(
    offered: list[tuple[str, ...]], wanted: str, chosen: str | None
) -> None:
    registry, _ = registry_of(
        [
            at(place.board, place.slot, transports=each)
            for place, each in zip(PLACES, offered, strict=True)
        ]
    )
    if chosen is None:
        refused(lambda: registry.transport(wanted), "transport")
    else:
        assert registry.transport(wanted) == chosen


def test_who_is_away_is_asked_every_round_until_it_is_free() -> None:
    registry, grid = registry_of(PLACES)
    registry.mark_away([2])
    assert registry.present(grid) == (0, 1, 3, 4)
    grid.statuses[102] = at(1, 0, preempted=True)
    for status, back in ((at(1, 0, preempted=True), []), (at(1, 0), [2])):
        grid.statuses[102] = status
        registry.ask(grid, 3)
        registry.ask(grid, 3)  # not asked twice
        assert [message.metadata.dst_node_id for message in grid.pushed] == [102]
        assert grid.pushed[0].content["config"]["socflower-soc"] == 2
        assert registry.poll_answers(grid) == back
    assert registry.present(grid) == tuple(SOCS)
    grid.pushed = []
    registry.ask(grid, 4)
    assert grid.pushed == []


def test_a_node_that_returns_with_clients_of_another_kind_is_known_as_such() -> None:
    """Resident clients are not waited for as those are that a node starts for each message."""
    registry, grid = registry_of([replace(place, resident=True) for place in PLACES])
    assert registry.resident == set(SOCS)
    registry.mark_away([2])
    grid.statuses[102] = at(1, 0, resident=False)
    registry.ask(grid, 3)
    assert registry.poll_answers(grid) == [2] and registry.resident == {0, 1, 3, 4}


def test_a_node_that_vanished_may_come_back_under_another_id() -> None:
    registry, grid = registry_of(PLACES)
    del grid.statuses[102]
    assert registry.present(grid) == (0, 1, 3, 4)
    grid.statuses[900] = at(1, 0, 28300)
    registry.ask(grid, 3)
    assert registry.poll_answers(grid) == [2]
    assert registry.node_of[2] == 900
    assert registry.ring_address_of[2].endswith(":28300")
    grid.pushed = []
    registry.ask(grid, 4)
    assert grid.pushed == []


def test_a_node_that_is_preempted_when_training_begins_is_planned_without() -> None:
    registry, grid = registry_of([*PLACES[:4], at(1, 1, preempted=True)])
    assert registry.away == (3,)
    assert registry.present(grid) == (0, 1, 2, 4)


# ------------------------------------------------------------------------------------------------ nodes that hang
SILENT = 1e9


class TimedGrid(QueriedGrid):
    """Nodes that answer a query a number of seconds after it, on a clock of its own; `gone` are errors by node."""

    def __init__(
        self,
        statuses: Mapping[int, NodeStatus | None],
        after_s: Mapping[int, float],
        gone: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(statuses)
        self.after_s, self.gone, self.now_s = dict(after_s), dict(gone or {}), 0.0
        self._pushed_s: dict[str, tuple[Message, float]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"{len(self._pushed_s)}")
            self._pushed_s[ids[-1]] = message, self.now_s
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in message_ids:
            message, pushed_s = self._pushed_s[message_id]
            node = message.metadata.dst_node_id
            if self.now_s >= pushed_s + self.after_s.get(node, 1.0):
                replies.append(
                    self.answer(message)
                    if node not in self.gone
                    else Message(Error(self.gone[node], "Node unavailable"), reply_to=message)
                )
                replies[-1].metadata.__dict__["_reply_to_message_id"] = message_id
        return replies


@contextmanager
def clock_of(grid: TimedGrid) -> Iterator[None]:
    def sleep(seconds: float) -> None:
        grid.now_s += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            node_registry, "time", SimpleNamespace(monotonic=lambda: grid.now_s, sleep=sleep)
        )
        yield


def matched(
    statuses: Iterable[NodeStatus | None], after_s: Mapping[int, float], **settings: Any
) -> tuple[NodeRegistry, TimedGrid]:
    """Match nodes of which some answer late; the clock then shows how long that took."""
    grid = TimedGrid(
        {100 + index: status for index, status in enumerate(statuses)}, after_s, **settings
    )
    registry = NodeRegistry(CLUSTER, SOCS)
    with clock_of(grid):
        registry.match_nodes(grid, query=True)
    return registry, grid


KINDS = pytest.mark.parametrize(
    "places",
    [
        PLACES,
        [replace(place, ring="") for place in PLACES],
        [replace(place, board=-1, slot=-1) for place in PLACES],
        [NodeStatus()] * 5,
    ],
    ids=["rings and slots", "slots", "rings", "neither"],
)


@KINDS
def test_a_node_that_hangs_at_the_first_question_is_left_out_after_seconds(
    places: list[NodeStatus], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="flwr")  # engines of other tests may have left it higher
    registry, grid = matched(places, {102: SILENT})
    assert 30.0 < grid.now_s < 35.0
    assert registry.away == (2,) and registry.present(grid) == (0, 1, 3, 4)
    assert 2 not in registry.ring_address_of
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == f"SoCFlow: {registry.left_out}"
    assert (
        registry.left_out
        == "node 102 did not answer within 31 s: left out with SoC 2, until it answers"
    )


@KINDS
def test_a_node_that_hung_takes_part_once_it_answers(places: list[NodeStatus]) -> None:
    registry, grid = matched(places, {102: 100.0})
    with clock_of(grid):
        begin_s = grid.now_s
        registry.ask(grid, 1)
        assert registry.poll_answers(grid) == [] and grid.now_s == begin_s
        grid.now_s = 101.0
        assert registry.poll_answers(grid) == [2]
    assert registry.present(grid) == tuple(SOCS) and registry.node_of[2] == 102
    assert registry.ring_address_of.get(2, "") == places[2].ring


@settings(max_examples=200)
@given(st.lists(st.floats(1.0, 170.0), min_size=5, max_size=5), st.floats(0.34, 1.0))
def test_nodes_that_are_all_slow_are_waited_for(slowest: list[float], least: float) -> None:
    """Whatever the load: nodes that need at most three times as long as the slowest half before them stay."""
    top = max(slowest)
    after_s = {100 + index: max(each, least * top) for index, each in enumerate(slowest)}
    registry, grid = matched(PLACES, after_s)
    assert registry.away == () and registry.left_out == ""
    assert grid.now_s <= top + 1.0


def test_nobody_is_left_out_while_fewer_than_half_have_answered() -> None:
    registry, grid = matched(PLACES, {100: 1.0, 101: 2.0, 102: 150.0, 103: 160.0, 104: SILENT})
    assert registry.away == (3,) and 180.0 <= grid.now_s < 181.0


def test_the_limit_holds_where_all_are_slow() -> None:
    registry, grid = matched(PLACES, {100: 100.0, 101: 100.0, 102: 100.0, 103: 179.0, 104: SILENT})
    assert registry.away == (3,) and 180.0 <= grid.now_s < 181.0


def test_no_answer_at_all_ends_the_run_in_one_line() -> None:
    refused(
        lambda: matched(PLACES, dict.fromkeys(range(100, 105), SILENT)),
        "180",
        "none of 5",
        error=TrainingFailed,
    )


@pytest.mark.parametrize("code", [3, 5, 8])
def test_a_node_that_dies_twice_is_left_out_and_asked_again_later(code: int) -> None:
    registry, grid = matched(PLACES, {}, gone={102: code})
    assert registry.away == (2,) and grid.now_s < 5.0
    assert registry.left_out.startswith("node 102 is gone (Node unavailable): left out with SoC 2")
    grid.gone = {}
    with clock_of(grid):
        registry.ask(grid, 1)
        grid.now_s += 5.0
        assert registry.poll_answers(grid) == [2]


def test_rounds_are_planned_without_a_node_that_hangs_and_say_so() -> None:
    grid = TimedGrid({100 + index: place for index, place in enumerate(PLACES)}, {102: SILENT})
    rates = [1.0] * 5
    planner = RoundPlanner(CLUSTER, plan_groups(CLUSTER, 2, 5, rates), rates, None)
    with clock_of(grid):
        assert planner.plan_round(grid, None).participants == (0, 1, 3, 4)
        assert [event.kind for event in planner.drain_events()] == ["no-answer", "replanned"]
        grid.now_s, grid.after_s = 100.0, {}
        planner.ask_absent(grid, 1)
        planner.poll_absent()
        assert planner.plan_round(grid, None).participants == tuple(SOCS)
    assert [event.kind for event in planner.drain_events()] == ["returned", "replanned"]


def test_a_spare_node_that_hangs_is_named_and_nobody_is_away() -> None:
    registry, _ = matched([*PLACES, at(0, 0)], {105: SILENT})
    assert registry.away == () and registry.left_out == (
        "node 105 did not answer within 31 s: left out; the plan does not need it"
    )


def test_places_without_nodes_are_refused_if_they_are_more_than_the_nodes_that_hang() -> None:
    grid = TimedGrid({100: at(0, 0), 101: at(0, 1), 102: at(1, 0), 103: at(1, 1)}, {102: SILENT})
    registry = NodeRegistry(CLUSTER, (0, 1, 2, 4))
    with (
        clock_of(grid),
        pytest.raises(InfeasiblePlan, match="needs SoCs 2, 4 and no node says that it is there"),
    ):
        registry.match_nodes(grid, query=True)


@pytest.mark.parametrize("waits", [1, 3])
def test_a_node_that_hangs_later_is_waited_for_once(waits: int) -> None:
    """Outside rings nodes are waited for, so that no result depends on time, but not in every round again."""
    registry, grid = matched([NodeStatus()] * 5, {})
    registry.mark_away([2])
    grid.after_s[102] = SILENT
    with clock_of(grid):
        for server_round in range(waits):
            registry.ask(grid, server_round)
            assert registry.poll_answers(grid) == []
    assert 180.0 < grid.now_s < 185.0


def test_a_node_that_answers_late_with_the_place_of_a_live_one_takes_nothing() -> None:
    registry, grid = matched([*PLACES[:4], at(1, 0, ring="10.0.0.9:29000")], {104: 100.0})
    before = dict(registry.node_of)
    with clock_of(grid):
        grid.now_s = 200.0
        registry.ask(grid, 1)
        assert registry.poll_answers(grid) == []
    assert registry.node_of == before and registry.present(grid) == (0, 1, 2, 4)


def test_a_node_that_answers_late_without_a_ring_stays_out() -> None:
    registry, grid = matched([*PLACES[:4], at(1, 1, ring="", transports=())], {104: 100.0})
    with clock_of(grid):
        grid.now_s = 200.0
        registry.ask(grid, 1)
        assert registry.poll_answers(grid) == []
    assert registry.present(grid) == (0, 1, 2, 4)
    assert registry.transport("auto") == "gloo"  # the others go on


# ------------------------------------------------------------------------------------------ min_nodes, flapping
@pytest.mark.parametrize("statuses", [PLACES[:3], [NodeStatus()] * 3])
def test_a_training_starts_with_fewer_nodes_and_takes_in_the_others_when_they_come(
    statuses: list[NodeStatus],
) -> None:
    grid = QueriedGrid(dict(enumerate(statuses, start=100)))
    refused_without = NodeRegistry(CLUSTER, SOCS, min_nodes=4)
    with pytest.raises(InfeasiblePlan, match="needs 4 nodes and Flower has 3"):
        refused_without.match_nodes(grid, query=True)
    registry = NodeRegistry(CLUSTER, SOCS, min_nodes=3)
    registry.match_nodes(grid, query=True)
    assert len(registry.present(grid)) == 3 and len(registry.away) == 2
    placed = statuses[0].board >= 0
    for number, status in enumerate(PLACES[3:] if placed else [NodeStatus()] * 2):
        grid.statuses[200 + number] = status
        registry.ask(grid, number + 1)
        assert len(registry.poll_answers(grid)) == 1
    assert registry.present(grid) == tuple(SOCS) and registry.away == ()
    assert len(set(registry.node_of.values())) == len(SOCS)


def test_more_nodes_than_the_plan_has_are_refused_instead_of_awaited() -> None:
    refused(lambda: NodeRegistry(CLUSTER, SOCS, min_nodes=len(SOCS) + 1), "[ring] min_nodes = 6")
    NodeRegistry(CLUSTER, SOCS, min_nodes=len(SOCS))


@given(num_there=st.integers(0, 5), says=st.sampled_from(["place", "ring", "nothing"]))
def test_by_default_half_of_the_nodes_have_to_be_there_and_the_others_are_named(
    num_there: int, says: str
) -> None:
    """Where nodes say nothing of themselves, as in a simulation, none comes later, so all have to."""
    rings = [f"10.0.0.{number}:28200" for number in range(1, 6)]
    told = {
        "place": PLACES,
        "ring": [NodeStatus(ring=ring, transports=("gloo",)) for ring in rings],
        "nothing": [NodeStatus()] * 5,
    }[says]
    grid = QueriedGrid(dict(enumerate(told[:num_there], start=100)))
    registry = NodeRegistry(CLUSTER, SOCS)
    if num_there < (5 if says == "nothing" else 3):
        has = f"Flower has {num_there}"
        refused(lambda: registry.match_nodes(grid, query=True), has, error=InfeasiblePlan)
        return
    registry.match_nodes(grid, query=True)
    assert len(registry.present(grid)) == num_there
    assert len(registry.away) == 5 - num_there
    assert all(str(soc) in registry.left_out for soc in registry.away)
    assert bool(registry.left_out) is (num_there < 5)


@pytest.mark.parametrize("upgraded_first", [2, 3, 5])
def test_a_rack_is_upgraded_node_by_node(
    upgraded_first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At least half of the nodes, then the ServerApp, then the others, which join as they are upgraded."""
    caplog.set_level("WARNING", logger="flwr")
    old, new = PROTOCOL_VERSION - 1, PROTOCOL_VERSION
    told = [
        replace(place, protocol=new if index < upgraded_first else old)
        for index, place in enumerate(PLACES)
    ]
    registry, grid = registry_of(told)
    away = 5 - upgraded_first
    assert len(registry.away) == away and registry.left_out.count(f"version {old}") == away
    assert f"here is {new}" in registry.left_out or not away
    for server_round, index in enumerate(range(upgraded_first, 5), start=1):
        # An old one is asked in each round, and named once.
        for _ in range(2):
            registry.ask(grid, server_round)
            assert registry.poll_answers(grid) == []
        grid.statuses[100 + index] = replace(PLACES[index], protocol=new)
        registry.ask(grid, server_round)
        assert len(registry.poll_answers(grid)) == 1
    assert registry.away == ()
    lines = [record.getMessage() for record in caplog.records if "left out, until" in record.msg]
    assert len(lines) == away


def test_a_server_app_that_no_node_fits_is_refused_with_both_versions() -> None:
    told = [replace(place, protocol=PROTOCOL_VERSION + 1) for place in PLACES]
    refused(lambda: registry_of(told), f"version {PROTOCOL_VERSION + 1}", PROTOCOL_VERSION)


@pytest.mark.parametrize("messages", [0, MESSAGE_VERSION + 1])
def test_a_node_of_other_messages_is_left_out_with_both_versions(messages: int) -> None:
    told = [replace(place, messages=MESSAGE_VERSION) for place in PLACES]
    registry, _ = registry_of([*told[:-1], replace(told[-1], messages=messages)])
    one_line(registry.left_out, f"version {messages}", f"here is {MESSAGE_VERSION}")
    assert len(registry.away) == 1


def test_a_node_that_flaps_is_asked_but_not_planned_with_for_a_growing_time() -> None:
    registry, grid = registry_of(PLACES)
    out_of: list[int] = []
    server_round = 0
    for _ in range(8):
        lost_in = server_round
        registry.mark_lost([2])
        while 2 in registry.away:
            server_round += 1
            grid.asked.clear()
            registry.ask(grid, server_round)
            registry.poll_answers(grid)
            assert grid.asked, "it is asked in every round"
        out_of.append(server_round - lost_in)
    assert out_of == [1, 2, 3, 5, 9, 17, 33, 33]


def test_a_node_that_was_steady_for_long_is_forgiven() -> None:
    registry, grid = registry_of(PLACES)
    for server_round in (1, 50, 100):
        registry.ask(grid, server_round)
        assert registry.mark_lost([2]) == [] and 2 in registry.away
        registry.ask(grid, server_round + 1)
        assert registry.poll_answers(grid) == [2]


def test_a_round_waits_for_min_nodes_and_says_which_number_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_planner, "_ENOUGH_TIMEOUT_S", 0.0)
    rates = [1.0] * 5
    plan = plan_groups(CLUSTER, 2, 5, rates)
    planner = RoundPlanner(CLUSTER, plan, rates, None, min_nodes=4)
    grid = QueriedGrid(dict(enumerate(PLACES)))
    assert len(planner.plan_round(grid, None).participants) == 5
    gone = [grid.statuses.pop(node) for node in (0, 1)]
    with pytest.raises(TrainingFailed, match=r"3 nodes left of min_nodes = 4"):
        planner.plan_round(grid, None)
    grid.statuses[0] = gone[0]
    assert len(planner.plan_round(grid, None).participants) == 4
