"""Resumed strategies: the rounds that are left, with their true numbers, and nothing evaluated or trained twice."""

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from socflower.cluster import parse_cluster
from socflower.errors import TrainingFailed
from socflower.strategies.baselines import OrderedFedAvg, RingAllReduce
from socflower.strategies.methods.local import LocalSchedule
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import RESUMED
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer, answer_error, model, values


class AnsweringGrid(FakeGrid):
    """Every client answers with the round's number in its model."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[Message]] = []
        self.rounds: list[set[int]] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        sent = list(messages)
        if sent:
            self.sent.append(sent)
            # At once: Flower's FedAvg puts the next round into the same config.
            self.rounds.append({int(message.content["config"]["server-round"]) for message in sent})
        return [
            answer(message, float(message.content["config"]["server-round"])) for message in sent
        ]


def socflow(**settings: Any) -> SoCFlow:
    return SoCFlow(
        cluster=parse_cluster({"boards": [2, 2]}),
        groups=2,
        schedule=TrainingSchedule(
            num_samples=400, batch_size=20, num_epochs=2, interval_epochs=0.5
        ),
        **settings,
    )


def fedavg() -> OrderedFedAvg:
    return OrderedFedAvg(
        schedule=LocalSchedule(num_rounds=4), num_socs=4, tolerate_client_errors=True
    )


def ring() -> RingAllReduce:
    return RingAllReduce(
        cluster=parse_cluster({"boards": [2, 2]}),
        schedule=TrainingSchedule(num_samples=400, batch_size=20, num_epochs=4),
    )


def started(
    strategy: Strategy, done: int, arrays: ArrayRecord | None = None
) -> tuple[AnsweringGrid, list[int], Any]:
    grid, evaluated = AnsweringGrid(), []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append(server_round)
        return MetricRecord({"value": values(arrays)[0]})

    if done:
        strategy.resume_from(done)  # type: ignore[attr-defined]
    return (
        grid,
        evaluated,
        strategy.start(
            grid, arrays or model(), num_rounds=4, evaluate_fn=strategy.skip_done_rounds(evaluate)
        ),
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [socflow, fedavg, ring])
@pytest.mark.parametrize("done", [0, 1, 2, 3, 4])
def test_the_rounds_that_are_left_have_their_true_numbers(make: Any, done: int) -> None:
    grid, evaluated, result = started(make(), done, model(float(done)))
    left = list(range(done + 1, 5))
    assert grid.rounds == [{server_round} for server_round in left]
    assert evaluated == (left if done else [0, *left])
    assert list(result.evaluate_metrics_serverapp) == evaluated
    assert list(result.train_metrics_clientapp) == left
    assert not result.arrays if done == 4 else values(result.arrays) == [4.0] * 3


def test_groups_get_the_steps_of_their_true_round() -> None:
    whole, _, _ = started(socflow(), 0)
    left, _, _ = started(socflow(), 2)
    assert [[dict(message.content["group"]) for message in sent] for sent in left.sent] == [
        [dict(message.content["group"]) for message in sent] for sent in whole.sent[2:]
    ]


def test_only_the_first_round_after_a_resume_asks_for_what_clients_kept() -> None:
    strategy = socflow()
    strategy.resume_from(1, without_state=[0])
    grid = AnsweringGrid()
    strategy.start(grid, model(), num_rounds=4)
    assert [[message.content["config"].get(RESUMED) for message in sent] for sent in grid.sent] == [
        [False, True],
        [None, None],
        [None, None],
    ]
    unbroken, _, _ = started(socflow(), 0)
    assert not any(
        RESUMED in message.content["config"] for sent in unbroken.sent for message in sent
    )


def test_lost_state_is_never_tolerated() -> None:
    strategy = socflow(tolerate_client_errors=True)
    first, second = strategy.configure_train(1, model(), ConfigRecord(), FakeGrid())  # type: ignore[arg-type]
    refused(
        lambda: strategy.aggregate_train(
            1,
            [
                answer(first, 1.0),
                answer_error(
                    second,
                    2,
                    "<class 'socflower.errors.ConfigError'>:<'group 1 has no trainer state for step 5'>",
                ),
            ],
        ),
        "group 1",
        error=TrainingFailed,
    )


def test_rounds_that_cannot_be_are_refused() -> None:
    refused(lambda: socflow().resume_from(-1), "counted from 1")
    refused(lambda: started(socflow(), 5), "num_rounds")
