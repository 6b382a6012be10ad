"""Replies of clients that are hostile or broken: none ends the training of the others, nor excludes them."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from socflower.errors import TrainingFailed
from socflower.strategies.baselines import OrderedFedAvg
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.group_replies import GroupProgress
from socflower.strategies.methods.local import LocalSchedule
from socflower.wire.message_keys import (
    COMPLETED,
    NOTES,
    OUTCOME,
    PREEMPTED,
    RingOutcome,
    decode,
    encode,
)
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer, model, values
from tests.strategies.test_socflow import messages, socflow

EVIL_NOTES = {
    "kinds": ["client-raised"],
    "groups": [0],
    "texts": ["group 0: what I say"],
    "away": [0, 1, 99],
    "leaders-replaced": [0],
}


class AnsweringGrid(FakeGrid):
    """Answers each message by a function."""

    def __init__(self, reply: Callable[[Message], Message]) -> None:
        super().__init__()
        self._reply = reply

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [self._reply(message) for message in messages]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return ["" for _ in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return []


def with_notes(message: Message, record: dict[str, Any]) -> Message:
    reply = answer(message, 1.0)
    # Of group 1.
    if message.metadata.dst_node_id == 30:
        reply.content[NOTES] = ConfigRecord(record)
    return reply


@pytest.mark.parametrize(
    "wrap", [lambda grid: grid, GroupGrid, lambda grid: GroupGrid(GroupGrid(grid))]
)
@pytest.mark.parametrize("record", [EVIL_NOTES, {"what": 1}])
def test_notes_of_a_client_are_not_those_of_a_grid(
    wrap: Callable[[Any], Any], record: dict[str, Any]
) -> None:
    grid, strategy = wrap(AnsweringGrid(lambda message: with_notes(message, record))), socflow()
    replies = grid.send_and_receive(messages(strategy, grid=grid))
    assert strategy.aggregate_train(1, replies)[0] is not None
    assert (
        strategy.reports[-1].events == ()
        and strategy.state["away"] == [] == strategy.state["without_state"]
    )
    assert len(messages(strategy, 2, grid)) == 2


def outcome(**changes: Any) -> dict[str, Any]:
    return (
        encode(RingOutcome(outcome=COMPLETED, members=(0, 1), num_steps=5, answers=True)) | changes
    )


def train_with_outcome(record: dict[str, Any]) -> Any:
    strategy = socflow()
    first, second = messages(strategy)
    odd = answer(second, 9.0)
    odd.content[OUTCOME] = ConfigRecord(record)
    arrays, _ = strategy.aggregate_train(1, [answer(first, 1.0), odd])
    return strategy, values(arrays)


BAD_OUTCOMES = [
    {"what": 1},
    {},
    outcome(outcome="won"),
    outcome(members=3),
    outcome(preempted=["a"]),
    outcome(rates=["fast"]),
    outcome(log=[1]),
    outcome(**{"recoveries-s": ["long"]}),
]


@pytest.mark.parametrize("record", BAD_OUTCOMES)
def test_an_outcome_that_cannot_be_read_is_a_malformed_reply(record: dict[str, Any]) -> None:
    strategy, average = train_with_outcome(record)
    assert average == [1.0] * 3
    (event,) = strategy.reports[-1].events
    assert (event.kind, event.group_id) == ("malformed", 1)
    assert "SoC 2 (node 30): outcome record" in event.text and "\n" not in event.text


@pytest.mark.parametrize("record", BAD_OUTCOMES)
def test_a_record_that_is_no_outcome_is_refused_in_one_line(record: dict[str, Any]) -> None:
    refused(
        lambda: decode(
            RingOutcome, {key: value for key, value in ConfigRecord(record).items()}, "outcome"
        ),
        "outcome record: ",
    )


def test_a_client_cannot_make_socs_of_other_groups_leave() -> None:
    strategy, _ = train_with_outcome(outcome(outcome=PREEMPTED, preempted=[0, 3, 99]))
    assert strategy.state["away"] == [3]  # of its own group


def test_if_no_outcome_can_be_read_the_error_names_the_first_node() -> None:
    strategy = socflow()
    replies = [answer(message, 1.0) for message in messages(strategy)]
    for reply in replies:
        reply.content[OUTCOME] = ConfigRecord({"what": 1})
    refused(
        lambda: strategy.aggregate_train(1, replies),
        "10",
        "group 0, SoC 0",
        "outcome record",
        "SoC 0",
        error=TrainingFailed,
    )


def test_members_of_a_ring_with_odd_outcomes_are_told_and_exclude_only_their_own() -> None:
    first, second = messages(socflow())
    group = GroupProgress(
        group_id=0, leader=0, node_of={0: 10, 1: 30}, members=(0, 1), tolerate_errors=False
    )
    odd, good = answer(second, 9.0), answer(first, 1.0)
    odd.content[OUTCOME] = ConfigRecord({"what": 1})
    good.content[OUTCOME] = ConfigRecord(outcome(preempted=[1, 3, 99]))
    group.on_reply(1, odd)
    group.on_reply(0, good)
    assert group.model is good and group.away == {1}
    assert [event.kind for event in group.events] == ["malformed", "preempted"]


OTHER_LAYOUTS = [
    ({}, "it has no tensor 'w'"),
    (
        {"w": np.zeros(3, np.float32), "x": np.zeros(1, np.float32)},
        "tensor 'x' was not sent",
    ),
    (
        {"w": np.zeros(2, np.float32)},
        r"tensor 'w' is float32 of shape \(2,\) and was sent as float32 of shape \(3,\)",
    ),
    (
        {"w": np.zeros(3, np.float64)},
        r"tensor 'w' is float64 of shape \(3,\) and was sent as float32 of shape \(3,\)",
    ),
]


def with_layout(message: Message, arrays: dict[str, Any]) -> Message:
    reply = answer(message, 9.0)
    reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return reply


@pytest.mark.parametrize(("arrays", "fault"), OTHER_LAYOUTS)
@pytest.mark.parametrize("odd", [0, 1])
def test_a_model_with_other_tensors_than_the_one_sent_is_dropped(
    odd: int, arrays: dict[str, Any], fault: str
) -> None:
    strategy = socflow()
    sent = messages(strategy)
    replies = [answer(message, 1.0) for message in sent]
    replies[odd] = with_layout(sent[odd], arrays)
    average, _ = strategy.aggregate_train(1, replies)
    assert values(average) == [1.0] * 3
    (event,) = strategy.reports[-1].events
    assert (event.kind, event.group_id) == ("malformed", odd)
    assert re.fullmatch(
        rf"group {odd}, SoC {2 * odd} \(node {10 + 20 * odd}\): {fault}, dropped", event.text
    )


@pytest.mark.parametrize(("arrays", "fault"), OTHER_LAYOUTS)
def test_fedavg_in_order_drops_it_too(arrays: dict[str, Any], fault: str) -> None:
    strategy = OrderedFedAvg(
        schedule=LocalSchedule(num_rounds=4), num_socs=4, tolerate_client_errors=True
    )
    first, *others = strategy.configure_train(1, model(), ConfigRecord({}), FakeGrid())
    average, _ = strategy.aggregate_train(
        1, [with_layout(first, arrays), *(answer(each, 1.0) for each in others)]
    )
    assert values(average) == [1.0] * 3
    (event,) = strategy.reports[-1].events
    assert (event.kind, event.group_id) == ("malformed", 0)
    assert re.fullmatch(rf"SoC 0 \(node 10\): {fault}, dropped", event.text)


def test_replies_that_agree_with_each_other_are_averaged_whatever_was_sent() -> None:
    strategy = socflow()
    average, _ = strategy.aggregate_train(
        1,
        [
            with_layout(message, {"v": np.full(3, 2.0, np.float32)})
            for message in messages(strategy)
        ],
    )
    assert average is not None and list(average) == ["v"] and strategy.reports[-1].events == ()


def test_if_no_model_is_like_the_one_sent_the_error_names_the_first() -> None:
    strategy = socflow()
    replies = [
        with_layout(message, {"w": np.zeros(4 + k, np.float32)})
        for k, message in enumerate(messages(strategy))
    ]
    refused(
        lambda: strategy.aggregate_train(1, replies),
        "10",
        "float32",
        "SoC 0",
        "'w'",
        error=TrainingFailed,
    )
