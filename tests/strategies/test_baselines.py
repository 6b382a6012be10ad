"""FedAvg in the order of the SoCs: the same sum however nodes are listed and however replies arrive."""

import itertools
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg, FedProx
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import parse_cluster
from socflower.errors import InfeasiblePlan, TrainingFailed
from socflower.strategies.baselines import (
    HiPress,
    OrderedFedAvg,
    ParameterServer,
    PowerSGDAllReduce,
    RingAllReduce,
)
from socflower.strategies.methods.local import LocalSchedule
from socflower.strategies.settings import TrainingSchedule
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer, answer_error, model, values


def fedavg(**settings: Any) -> OrderedFedAvg:
    schedule = LocalSchedule(num_rounds=3, local_epochs=2, batch_size=8, seed=5)
    return OrderedFedAvg(schedule=schedule, num_socs=4, **settings)


def messages(
    strategy: OrderedFedAvg, server_round: int = 1, nodes: tuple[int, ...] = (40, 10, 30, 20)
) -> list[Message]:
    return strategy.configure_train(server_round, model(), ConfigRecord({}), FakeGrid(nodes))


def test_nodes_are_addressed_in_ascending_order_however_they_are_listed() -> None:
    for nodes in itertools.permutations((10, 20, 30, 40)):
        asked = [message.metadata.dst_node_id for message in messages(fedavg(), nodes=nodes)]
        assert asked == [10, 20, 30, 40]


def test_each_message_has_the_schedule() -> None:
    strategy = fedavg()
    config, *others = [dict(message.content["config"]) for message in messages(strategy)]
    assert config == {
        "batch-size": 8,
        "local-epochs": 2,
        "num-rounds": 3,
        "seed": 5,
        "server-round": 1,
    }
    assert all(other == config for other in others)
    assert (
        messages(fedavg(outer=FedProx(proximal_mu=0.25)))[0].content["config"]["proximal-mu"]
        == 0.25
    )


def test_a_key_of_the_schedule_in_the_train_config_is_refused() -> None:
    config = ConfigRecord({"local-epochs": 9})
    refused(lambda: fedavg().configure_train(1, model(), config, FakeGrid()), "local-epochs")


def test_fewer_nodes_than_socs_are_refused_and_later_losses_are_reported() -> None:
    refused(lambda: messages(fedavg(), nodes=(1, 2)), "4 SoCs", "2 nodes", error=InfeasiblePlan)
    strategy = fedavg()
    strategy.aggregate_train(1, [answer(message, 1.0) for message in messages(strategy)])
    asked = messages(strategy, 2, nodes=(10, 40))
    assert [message.metadata.dst_node_id for message in asked] == [10, 40]
    arrays, _ = strategy.aggregate_train(2, [answer(message, 1.0) for message in asked])
    assert values(arrays) == [1.0] * 3
    lost = [(event.kind, event.group_id) for event in strategy.reports[-1].events]
    assert lost == [("no-reply", 1), ("no-reply", 2)]
    refused(lambda: messages(strategy, 3, nodes=()), "round 3", "no node", error=TrainingFailed)


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
    weights = np.arange(3, 7) / 18
    expected = np.einsum("k,kn->n", weights, numbers.astype(np.float64))
    np.testing.assert_allclose(arrays["w"].numpy(), expected, rtol=1e-6, atol=1e-7)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_examples=st.lists(st.integers(1, 10_000), min_size=4, max_size=4),
)
def test_the_mean_is_that_of_flowers_fedavg(seed: int, num_examples: list[int]) -> None:
    strategy, theirs = fedavg(), FedAvg(min_available_nodes=1)
    rng = np.random.default_rng(seed)
    replies = []
    for message, num in zip(messages(strategy), num_examples, strict=True):
        arrays = {
            "w": Array(rng.standard_normal((3, 7)).astype(np.float32)),
            "b": Array(rng.standard_normal(5).astype(np.float32)),
        }
        metrics = MetricRecord({"num-examples": num, "train-loss": float(rng.random())})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    ours, our_metrics = strategy.aggregate_train(1, replies)
    expected, their_metrics = theirs.aggregate_train(1, replies)
    assert ours is not None and expected is not None
    for name in ("w", "b"):
        np.testing.assert_allclose(ours[name].numpy(), expected[name].numpy(), rtol=1e-5, atol=1e-6)
    assert our_metrics is not None and their_metrics is not None
    assert our_metrics["train-loss"] == pytest.approx(their_metrics["train-loss"])


def test_counters_of_batch_norm_stay_integers() -> None:
    strategy = fedavg()
    replies = []
    for count, message in enumerate(messages(strategy)):
        arrays = ArrayRecord(
            {"count": Array(np.array(count)), "w": Array(np.array([count], np.float32))}
        )
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    made, _ = strategy.aggregate_train(1, replies)
    assert made is not None
    assert made["count"].numpy().dtype == np.int64 and made["count"].numpy() == 3
    assert made["w"].numpy() == 1.5


def test_a_client_that_raises_ends_the_run_unless_that_is_tolerated() -> None:
    strategy = fedavg()
    first, second, *_ = messages(strategy)
    replies = [answer(first, 1.0), answer_error(second, 2, "two\nlines")]
    refused(lambda: strategy.aggregate_train(1, replies), "SoC 1", "two", error=TrainingFailed)


def test_what_is_left_out_is_reported_for_its_round_only() -> None:
    strategy = fedavg(tolerate_client_errors=True)
    first, second, third, _ = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1,
        [answer(first, 1.0), answer_error(second, 2, "two\nlines"), answer_error(third, 8, "gone")],
    )
    assert values(arrays) == [1.0] * 3
    assert [(event.kind, event.group_id) for event in strategy.reports[-1].events] == [
        ("client-raised", 1),
        ("no-reply", 2),
        ("no-reply", 3),
    ]
    assert strategy.reports[-1].events[0].text == "SoC 1 (node 20): the client raised two lines"
    assert strategy.reports[-1].epoch == 2.0
    strategy.aggregate_train(2, [answer(message, 1.0) for message in messages(strategy, 2)])
    assert strategy.reports[-1].events == ()


def test_evaluation_that_fails_at_a_client_is_reported_and_the_others_are_averaged() -> None:
    strategy = fedavg(outer=FedAvg(fraction_evaluate=1.0))
    strategy.aggregate_train(1, [answer(message, 1.0) for message in messages(strategy)])
    asked = strategy.configure_evaluate(1, model(), ConfigRecord(), FakeGrid())
    assert [message.metadata.dst_node_id for message in asked] == [10, 20, 30, 40]
    metrics = strategy.aggregate_evaluate(
        1,
        [
            Message(
                RecordDict({"metrics": MetricRecord({"num-examples": 2, "accuracy": 0.5})}),
                reply_to=asked[0],
            ),
            answer_error(asked[1], 2, "no test data"),
        ],
    )
    assert metrics is not None and dict(metrics) == {"accuracy": 0.5}
    (event,) = strategy.reports[-1].events
    assert event.kind == "not-evaluated"
    assert event.text == "evaluation, node 20: the client raised no test data"


@pytest.mark.parametrize(
    ("preset", "options", "exchange", "compression"),
    [
        (ParameterServer, {}, "server", "none"),
        (HiPress, {"options": {"ratio": 0.01}}, "ring", "hipress ratio=0.01 warm_up_steps=40"),
        (
            PowerSGDAllReduce,
            {"options": {"rank": 3}},
            "ring",
            "powersgd rank=3 start_step=0 min_rate=2.0",
        ),
    ],
)
def test_all_socs_are_one_group_that_is_told_how_to_exchange(
    preset: type[RingAllReduce], options: dict[str, Any], exchange: str, compression: str
) -> None:
    schedule = TrainingSchedule(num_samples=80, batch_size=8, num_epochs=2)
    strategy = preset(cluster=parse_cluster({"boards": [2, 2]}), schedule=schedule, **options)
    (group,) = strategy.plan.groups
    task = strategy.method.messages.task(group, strategy.method.sync.intervals[0])
    assert (task.exchange, task.members) == (exchange, (0, 1, 2, 3))
    assert task.compression.startswith(compression)
    # The choice of buckets goes with the task.
    links = f"bytes_per_s={129.5e6!r} message_s={0.000485!r}"
    assert (links in task.compression) == (preset is HiPress)


# ------------------------------------------------------------------------------------------ int8 on the wire
def int8_round(
    strategy: OrderedFedAvg, server_round: int, arrays: ArrayRecord, change: float
) -> ArrayRecord:
    """Return the mean after each client has added `change` to the weights that it got."""
    asked = strategy.configure_train(
        server_round, arrays, ConfigRecord({}), FakeGrid((10, 20, 30, 40))
    )
    replies = []
    for message in asked:
        sent = message.content.array_records["arrays"]
        scales = message.content.config_records["socflower-scales"]
        assert sent["w"].numpy().dtype == np.int8 and sent["b"].numpy().dtype == np.float32
        assert list(scales) == ["w"]
        given = sent["w"].numpy() * np.float32(scales["w"]) + np.float32(change)
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(given), "b": sent["b"]}),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        replies.append(Message(content, reply_to=message))
    made, _ = strategy.aggregate_train(server_round, replies)
    assert made is not None
    return made


def test_what_int8_leaves_out_of_the_mean_is_added_to_the_next_one() -> None:
    """Clients that change nothing change nothing, and changes of a 20th of a step add up."""
    weights = np.linspace(-1.0, 0.9, 12, dtype=np.float32).reshape(3, 4)
    step = 2.0**-6  # of the power of two with which 1.0 is at most 127
    for change in (0.0, step / 20):
        arrays = ArrayRecord({"w": Array(weights), "b": Array(np.ones(2, np.float32))})
        strategy = fedavg(wire="int8")
        for server_round in (1, 2, 3):
            arrays = int8_round(strategy, server_round, arrays, change)
        np.testing.assert_allclose(arrays["w"].numpy(), weights + 3 * change, atol=3e-7)
        assert np.array_equal(arrays["b"].numpy(), np.ones(2))


def test_a_reply_in_int8_without_scales_is_dropped_and_a_wire_that_is_unknown_is_refused() -> None:
    strategy = fedavg(wire="int8")
    arrays = ArrayRecord({"w": Array(np.ones((2, 2), np.float32))})
    asked = strategy.configure_train(1, arrays, ConfigRecord({}), FakeGrid((10, 20, 30, 40)))
    replies = []
    for number, message in enumerate(asked):
        dtype = np.int8 if number == 1 else np.float32
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(np.full((2, 2), 2, dtype))}),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        replies.append(Message(content, reply_to=message))
    made, _ = strategy.aggregate_train(1, replies)
    assert made is not None and np.array_equal(made["w"].numpy(), np.full((2, 2), 2.0))
    (event,) = strategy.reports[-1].events
    assert event.kind == "malformed" and "int8" in event.text
    refused(lambda: fedavg(wire="int4"), "wire", "'int4'")
