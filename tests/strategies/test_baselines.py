"""Flower's FedAvg in the order of the nodes: the same sum however Flower draws and however replies arrive."""

import itertools
import random

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from socflower.strategies.baselines import OrderedFedAvg
from tests.strategies.fake_messages import FakeGrid, answer, answer_error, model, values


def fedavg() -> OrderedFedAvg:
    return OrderedFedAvg(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4)


def messages(strategy: OrderedFedAvg) -> list[Message]:
    return strategy.configure_train(1, model(), ConfigRecord({}), FakeGrid())


def test_nodes_are_addressed_in_ascending_order_however_they_are_drawn() -> None:
    for seed in range(5):
        random.seed(seed)
        assert [message.metadata.dst_node_id for message in messages(fedavg())] == [10, 20, 30, 40]


def test_the_sum_does_not_depend_on_the_order_of_replies() -> None:
    strategy = fedavg()
    numbers = np.random.default_rng(1).standard_normal((4, 50)).astype(np.float32)
    replies = [
        Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({"w": Array(row)}),
                    "metrics": MetricRecord({"num-examples": 3 + k}),
                }
            ),
            reply_to=message,
        )
        for k, (message, row) in enumerate(zip(messages(strategy), numbers, strict=True))
    ]
    sums = set()
    for order in itertools.permutations(replies):
        arrays, _ = strategy.aggregate_train(1, order)
        assert arrays is not None
        sums.add(arrays["w"].data)
    assert len(sums) == 1


def test_what_flower_leaves_out_is_told_for_the_newest_round_only() -> None:
    strategy = fedavg()
    first, second, third, fourth = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1,
        [answer(first, 1.0), answer_error(second, 2, "two\nlines"), answer_error(third, 8, "gone")],
    )
    assert values(arrays) == [1.0] * 3
    assert [(event.kind, event.group_id) for event in strategy.events] == [
        ("client-raised", 1),
        ("no-reply", 2),
        ("no-reply", 3),
    ]
    assert strategy.events[0].text == "SoC 1 (node 20): the client raised two lines"
    strategy.aggregate_train(
        2, [answer(message, 1.0) for message in (first, second, third, fourth)]
    )
    assert strategy.events == ()


def test_evaluation_that_fails_at_a_client_is_told_and_the_others_are_averaged() -> None:
    strategy = fedavg()
    first, second, *_ = messages(strategy)
    metrics = strategy.aggregate_evaluate(
        1,
        [
            Message(
                RecordDict({"metrics": MetricRecord({"num-examples": 2, "accuracy": 0.5})}),
                reply_to=first,
            ),
            answer_error(second, 2, "no test data"),
        ],
    )
    assert metrics is not None and dict(metrics) == {"accuracy": 0.5}
    assert [(event.kind, event.group_id) for event in strategy.events] == [("client-raised", 1)]
    assert strategy.events[0].text == "evaluation, node 20: the client raised no test data"
