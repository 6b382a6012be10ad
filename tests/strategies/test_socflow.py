"""SoCFlow as an adapter: who gets which message, and what becomes of good, bad and missing replies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

from socflower.cluster import LayerProfile, ModelProfile, parse_cluster
from socflower.errors import (
    ConfigError,
    InfeasiblePlan,
    NodesLost,
    SocflowerError,
    TrainingFailed,
)
from socflower.hierarchy import split_batch
from socflower.precision.processor_costs import Int8Pricing
from socflower.sim import EventClock
from socflower.strategies.baselines import RingAllReduce, SingleDevice
from socflower.strategies.settings import Costs, ExchangeSettings, Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import PRICED, GroupTask
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer, answer_error, model, values
from tests.strategies.options import grouped

PROFILE = ModelProfile(
    name="toy",
    input_bytes=4.0,
    layers=(
        LayerProfile(
            name="only",
            kind="Linear",
            forward_flops=1e6,
            output_bytes=4.0,
            weight_bytes=400.0,
            num_tensors=1,
        ),
    ),
)


def socflow(**changes: Any) -> SoCFlow:
    """Two groups of two on two boards; 100 samples in batches of 10 make 5 steps an epoch."""
    settings: dict[str, Any] = {
        "cluster": parse_cluster({"boards": [2, 2]}),
        "groups": 2,
        "num_samples": 100,
        "batch_size": 10,
        "num_epochs": 2,
        "interval_epochs": 1.0,
    }
    return SoCFlow(**grouped(**(settings | changes)))


def messages(
    strategy: SoCFlow, server_round: int = 1, grid: FakeGrid | None = None
) -> list[Message]:
    return strategy.configure_train(server_round, model(), ConfigRecord({}), grid or FakeGrid())


def task_of(message: Message) -> GroupTask:
    return GroupTask.decode(message.content.config_records["group"])


def one_line(error: pytest.ExceptionInfo[SocflowerError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------------------- messages
def test_only_leaders_get_a_message_in_group_order() -> None:
    """F8. Nodes ascending are SoCs ascending: 10, 20 on board 0 and 30, 40 on board 1."""
    strategy = socflow()
    sent = messages(strategy)
    assert [message.metadata.dst_node_id for message in sent] == [10, 30]
    assert [task_of(message).group_id for message in sent] == [0, 1]
    assert [task_of(message).members for message in sent] == [
        group.members for group in strategy.plan.groups
    ]
    assert all(message.metadata.message_type == "train" for message in sent)


def test_a_message_has_the_model_the_config_and_the_interval() -> None:
    strategy = socflow(seed=9, reshuffle=False)
    arrays, config = model(7.0), ConfigRecord({"mine": 3})
    sent = strategy.configure_train(2, arrays, config, FakeGrid())
    for message in sent:
        assert values(message.content.array_records["arrays"]) == [7.0] * 3
        assert dict(message.content.config_records["config"]) == {
            "mine": 3,
            "server-round": 2,
            PRICED: True,
        }
        task = task_of(message)
        assert (task.first_step, task.num_steps, task.steps_per_epoch, task.total_steps) == (
            5,
            5,
            5,
            10,
        )
        assert (task.num_groups, task.num_partitions, task.batch_size, task.seed) == (2, 4, 10, 9)
        assert not task.reshuffle


def test_the_callers_config_is_not_changed() -> None:
    config = ConfigRecord({"mine": 3})
    socflow().configure_train(1, model(), config, FakeGrid())
    assert dict(config) == {"mine": 3}


def test_the_intervals_of_all_rounds_join_without_gap() -> None:
    strategy = socflow(interval_epochs=0.5, num_epochs=3)
    tasks = [task_of(messages(strategy, number)[0]) for number in range(1, strategy.num_rounds + 1)]
    assert strategy.num_rounds == 6
    assert [task.first_step for task in tasks[1:]] == [
        task.first_step + task.num_steps for task in tasks[:-1]
    ]
    assert tasks[-1].first_step + tasks[-1].num_steps == 15 == tasks[0].total_steps


# ------------------------------------------------------------------------------------------------- servers
def site(**changes: Any) -> SoCFlow:
    """Two servers of two boards with a SoC, each a group: SoCs 0 to 3 are nodes 10 to 40."""
    return socflow(
        cluster=parse_cluster({"boards": 2, "socs_per_board": 1}, site={"servers": 2}),
        groups=4,
        num_samples=400,
        interval_epochs=0.5,
        server_interval=3,
        **changes,
    )


def sent_values(sent: list[Message]) -> list[float]:
    return [values(message.content.array_records["arrays"])[0] for message in sent]


def test_groups_of_a_server_average_more_often_than_servers_do() -> None:
    strategy, arrays = (
        site(num_epochs=3),
        model(0.0),
    )  # synchronisations of all after rounds 3 and 6
    expected = [0.0] * 4
    for server_round in range(1, 7):
        sent = strategy.configure_train(server_round, arrays, ConfigRecord({}), FakeGrid())
        assert sent_values(sent) == expected
        trained = [server_round * 10.0 + group for group in range(4)]
        weights = [1, 3, 2, 2]
        new, _ = strategy.aggregate_train(
            server_round,
            [
                answer(message, value, weight)
                for message, value, weight in zip(sent, trained, weights, strict=True)
            ],
        )
        assert new is not None
        arrays = new
        whole = sum(value * weight for value, weight in zip(trained, weights, strict=True)) / 8
        assert values(arrays)[0] == pytest.approx(whole)  # what is evaluated is the model of all
        own = [(trained[0] + 3 * trained[1]) / 4, (trained[2] + trained[3]) / 2]
        expected = [whole] * 4 if server_round % 3 == 0 else [own[0], own[0], own[1], own[1]]


def test_a_server_without_a_usable_reply_keeps_its_model() -> None:
    strategy = site(tolerate_client_errors=True)
    first = messages(strategy)
    arrays, _ = strategy.aggregate_train(1, [answer(message, 2.0) for message in first])
    second = strategy.configure_train(2, arrays or model(), ConfigRecord({}), FakeGrid())
    arrays, _ = strategy.aggregate_train(
        2,
        [
            answer(second[0], 4.0),
            answer(second[1], 8.0),
            answer_error(second[2], 2, "it broke"),
            answer_error(second[3], 2, "it broke"),
        ],
    )
    assert values(arrays)[0] == 6.0
    assert sent_values(
        strategy.configure_train(3, arrays or model(), ConfigRecord({}), FakeGrid())
    ) == [6, 6, 2, 2]


def test_models_of_servers_are_part_of_the_state() -> None:
    strategy, again = site(), site()
    arrays, _ = strategy.aggregate_train(
        1,
        [
            answer(message, value)
            for message, value in zip(messages(strategy), (1.0, 3.0, 5.0, 9.0), strict=True)
        ],
    )
    again.resume_from(1, **strategy.state)
    assert arrays is not None
    assert sent_values(again.configure_train(2, arrays, ConfigRecord({}), FakeGrid())) == [
        2.0,
        2.0,
        7.0,
        7.0,
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"groups": 1}, "server_interval"),
        (
            {"cluster": parse_cluster({"boards": [2, 2]}), "groups": 2},
            "2 groups on 1 server: there are no servers",
        ),
        ({"outer": FedAdam()}, "server_interval"),
        ({"server_interval": 0}, "server_interval"),
    ],
)
def test_servers_that_cannot_synchronise_less_often_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    settings = {
        "cluster": parse_cluster({"boards": 2, "socs_per_board": 1}, site={"servers": 2}),
        "groups": 4,
        "server_interval": 3,
    }
    refused(lambda: socflow(**(settings | changes)), says)


@pytest.mark.parametrize("server_round", [0, 3, 99])
def test_a_round_beyond_the_plan_is_refused(server_round: int) -> None:
    with pytest.raises(ConfigError) as caught:
        messages(socflow(), server_round)
    assert f"round {server_round} of a plan of 2 rounds" in one_line(caught)


def test_a_plan_of_its_own_is_used_as_it_is() -> None:
    plan = socflow().plan
    assert socflow(groups=plan).plan is plan


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: TrainingSchedule(num_samples=0, batch_size=1, num_epochs=1), "num_samples"),
        (lambda: TrainingSchedule(num_samples=1, batch_size=2.5, num_epochs=1), "batch_size"),  # type: ignore
        (lambda: TrainingSchedule(num_samples=1, batch_size=1, num_epochs=-1), "num_epochs"),
        (lambda: ExchangeSettings(overlap_buckets=0), "overlap_buckets"),
        (lambda: ExchangeSettings(uplink_turns="maybe"), "uplink_turns"),
    ],
)
def test_settings_that_cannot_be_are_refused_where_they_are_made(
    make: Callable[[], object], fault: str
) -> None:
    refused(lambda: make(), fault)


@pytest.mark.parametrize(("key", "value"), [("overlap_buckets", 2), ("compression", "fp16")])
def test_integer_gradients_are_exchanged_exactly_and_after_the_backward_pass(
    key: str, value: Any
) -> None:
    exchange = ExchangeSettings(**{key: value})
    costs = Costs(pricing=Int8Pricing())
    refused(lambda: socflow(costs=costs, exchange=exchange), "SoCFlow", key, "int8")


def test_a_group_that_eight_bits_cannot_sum_is_refused_before_anything_is_sent() -> None:
    rack = parse_cluster({"boards": [64]})
    exchange = ExchangeSettings(compression="int8")
    refused(lambda: socflow(cluster=rack, groups=1, exchange=exchange), "64", "63", "fp16")
    socflow(cluster=rack, groups=2, exchange=exchange)


def test_too_few_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        messages(socflow(), grid=FakeGrid((1, 2, 3)))
    assert "needs 4 nodes and Flower has 3" in one_line(caught)


def test_more_nodes_than_socs_leave_the_last_ones_idle() -> None:
    assert [
        message.metadata.dst_node_id
        for message in messages(socflow(), grid=FakeGrid((9, 1, 2, 8, 3)))
    ] == [1, 3]


def test_partitions_are_numbered_over_the_socs_that_take_part() -> None:
    sent = messages(socflow(groups=Grouping(num_groups=1, num_socs=3)))
    (task,) = map(task_of, sent)
    assert len(task.members) == 3
    assert task.partitions == (0, 1, 2)
    assert task.num_partitions == 3


def test_uneven_devices_get_shares_by_capacity() -> None:
    """F4: a Snapdragon 865 is faster than a Raspberry Pi, so it gets more of a batch."""
    cluster = parse_cluster(
        {}, [{"socs": 1, "device": "snapdragon-865"}, {"socs": 1, "device": "raspberry-pi-4b"}]
    )
    rates = [
        cluster.device_of(soc).processor(cluster.device_of(soc).default_processor).rate("toy")
        for soc in (0, 1)
    ]
    strategy = socflow(cluster=cluster, groups=1, model_profile=PROFILE)
    (task,) = map(task_of, messages(strategy, grid=FakeGrid((1, 2))))
    assert task.capacities[0] / task.capacities[1] == pytest.approx(rates[0] / rates[1])
    fast, slow = split_batch(64, task.capacities)
    assert fast > slow and fast + slow == 64
    assert fast / 64 == pytest.approx(rates[0] / sum(rates), abs=1 / 64)


def test_a_group_of_unequal_devices_is_as_fast_as_its_shares_are_fair() -> None:
    """With shares by capacity, two unequal devices take less virtual time than the slower one alone at half."""
    cluster = parse_cluster(
        {}, [{"socs": 1, "device": "snapdragon-865"}, {"socs": 1, "device": "raspberry-pi-4b"}]
    )
    heavy = ModelProfile(
        name="toy",
        input_bytes=4.0,
        layers=(
            LayerProfile(
                name="only",
                kind="Linear",
                forward_flops=1e10,
                output_bytes=4.0,
                weight_bytes=400.0,
                num_tensors=1,
            ),
        ),
    )
    clock = EventClock(cluster)
    strategy = socflow(cluster=cluster, groups=1, clock=clock, model_profile=heavy)
    sent = messages(strategy, grid=FakeGrid((1, 2)))
    strategy.aggregate_train(1, [answer(message, 1.0) for message in sent])
    slow = cluster.device_of(1)
    halves_s = (
        strategy.method.sync.steps_per_epoch
        * 2
        * 5
        * heavy.training_flops
        / slow.processor("cpu").rate("toy")
    )
    assert 0.0 < strategy.reports[-1].usage.duration_s < halves_s


# -------------------------------------------------------------------------------------------------- replies
def test_models_are_averaged_by_samples_whatever_the_order_of_replies() -> None:
    for order in (1, -1):
        strategy = socflow()
        first, second = messages(strategy)
        replies = [answer(first, 1.0, 30, loss=4.0), answer(second, 5.0, 10, loss=8.0)][::order]
        arrays, metrics = strategy.aggregate_train(1, replies)
        assert values(arrays) == [2.0] * 3
        assert metrics is not None and dict(metrics) == {"loss": 5.0, "num-examples": 40}
        assert strategy.reports[-1].events == ()
        assert strategy.reports[-1].epoch == 1.0


def test_metrics_that_only_some_have_or_that_are_lists_are_left_out() -> None:
    strategy = socflow()
    first, second = messages(strategy)
    odd = answer(second, 1.0)
    group = int(odd.content["metrics"]["socflower-group"])
    odd.content["metrics"] = MetricRecord(
        {"num-examples": 1, "loss": 1.0, "curve": [1.0, 2.0], "socflower-group": group}
    )
    other = answer(first, 1.0, loss=3.0, extra=2.0)
    other.content["metrics"] = MetricRecord({**other.content["metrics"], "curve": [1.0, 2.0]})
    _, metrics = strategy.aggregate_train(1, [other, odd])
    assert metrics is not None and dict(metrics) == {"loss": 2.0, "num-examples": 2}


def broken(message: Message, kind: str) -> list[Message]:
    """Return the replies, if any, of a group that is broken in the named way."""
    good = answer(message, 5.0)
    if kind == "none":
        return []
    if kind == "died":
        return [answer_error(message, 8, "gone")]
    if kind == "no arrays":
        del good.content["arrays"]
    elif kind == "no metrics":
        del good.content["metrics"]
    elif kind == "no num-examples":
        good.content["metrics"] = MetricRecord({"loss": 1.0})
    elif kind == "NaN":
        good.content["arrays"] = model(np.nan)
    elif kind == "infinite":
        good.content["arrays"] = model(np.inf)
    elif kind == "unreadable":
        good.content["arrays"] = ArrayRecord(
            {"w": Array("float32", (3,), "numpy.ndarray", b"not a file")}
        )
    else:
        good.content["metrics"] = MetricRecord(
            {
                "num-examples": {
                    "zero examples": 0,
                    "negative examples": -3,
                    "NaN examples": np.nan,
                    "infinite examples": np.inf,
                    "list of examples": [3],
                }[kind]
            }
        )
    return [good]


KINDS = {
    "none": "no-reply",
    "died": "no-reply",
    "no arrays": "malformed",
    "no metrics": "malformed",
    "no num-examples": "malformed",
    "zero examples": "malformed",
    "negative examples": "malformed",
    "NaN examples": "malformed",
    "infinite examples": "malformed",
    "list of examples": "malformed",
    "unreadable": "malformed",
    "NaN": "not-finite",
    "infinite": "not-finite",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_reply_is_dropped_and_reported_and_the_others_are_averaged(kind: str) -> None:
    strategy = socflow()
    first, second = messages(strategy)
    arrays, metrics = strategy.aggregate_train(1, [answer(first, 2.0, 7), *broken(second, kind)])
    assert values(arrays) == [2.0] * 3
    assert metrics is not None and metrics["num-examples"] == 7
    (event,) = strategy.reports[-1].events
    assert (event.kind, event.group_id) == (KINDS[kind], 1)
    assert (
        "group 1" in event.text
        and "SoC 2" in event.text
        and "node 30" in event.text
        and "\n" not in event.text
    )


@pytest.mark.parametrize("kind", KINDS)
def test_if_no_reply_is_usable_training_fails_with_the_first_cause(kind: str) -> None:
    strategy = socflow()
    replies = [reply for message in messages(strategy) for reply in broken(message, kind)]
    with pytest.raises(TrainingFailed) as caught:
        strategy.aggregate_train(1, replies)
    assert "first cause: group 0, SoC 0 (node 10)" in one_line(caught)
    # Nodes that are lost may come back; what else is wrong would be wrong again.
    assert isinstance(caught.value, NodesLost) == (KINDS[kind] == "no-reply")


RAISED = "<class 'RuntimeError'>:<'Error(s) in loading:\n\tsize mismatch\n\n\tfor w'>"


def test_a_client_that_raised_ends_training_in_one_line_however_many_it_wrote() -> None:
    strategy = socflow()
    first, second = messages(strategy)
    with pytest.raises(TrainingFailed) as caught:
        strategy.aggregate_train(1, [answer(first, 1.0), answer_error(second, 2, RAISED)])
    assert "group 1, SoC 2 (node 30): the client raised RuntimeError: Error(s)" in one_line(caught)
    assert "size mismatch for w" in one_line(caught)


def test_a_client_that_raised_is_dropped_where_that_is_tolerated() -> None:
    strategy = socflow(tolerate_client_errors=True)
    first, second = messages(strategy)
    arrays, _ = strategy.aggregate_train(1, [answer(first, 1.0), answer_error(second, 2, RAISED)])
    assert values(arrays) == [1.0] * 3
    assert [event.kind for event in strategy.reports[-1].events] == ["client-raised"]


def test_replies_of_nodes_that_were_not_asked_are_ignored() -> None:
    strategy = socflow()
    sent = messages(strategy)
    stray = answer(Message(RecordDict(), 20, "train"), 99.0)
    arrays, _ = strategy.aggregate_train(1, [*(answer(message, 1.0) for message in sent), stray])
    assert values(arrays) == [1.0] * 3


# ----------------------------------------------------------------------------------------------------- time
def test_a_clock_needs_a_profile() -> None:
    refused(lambda: socflow(clock=EventClock(parse_cluster({"boards": [2, 2]}))), "model_profile")


def test_each_round_is_priced_on_the_clock() -> None:
    cluster = parse_cluster({"boards": [2, 2]})
    clock = EventClock(cluster)
    strategy = socflow(cluster=cluster, clock=clock, model_profile=PROFILE, reshuffle=False)
    for number in (1, 2):
        strategy.aggregate_train(
            number, [answer(message, 1.0) for message in messages(strategy, number)]
        )
    first, second = (report.usage for report in strategy.reports)
    assert first.duration_s > 0.0
    assert second.duration_s == pytest.approx(first.duration_s)
    assert clock.now_s == pytest.approx(first.duration_s + second.duration_s)
    # Two groups: two uploads and two downloads of 400 bytes at the end of each round.
    assert first.num_bytes["hub"] == 1600.0


def test_dealing_the_data_anew_is_priced_too() -> None:
    """Round 2 begins an epoch: a quarter of 100 samples of 4 bytes goes from each of four SoCs to another board."""
    cluster = parse_cluster({"boards": [2, 2]})
    strategy = socflow(cluster=cluster, clock=EventClock(cluster), model_profile=PROFILE)
    for number in (1, 2):
        strategy.aggregate_train(
            number, [answer(message, 1.0) for message in messages(strategy, number)]
        )
    first, second = (report.usage for report in strategy.reports)
    assert first.num_bytes.get("inter_board", 0.0) == 0.0
    assert second.num_bytes["inter_board"] == 400.0
    assert second.duration_s > first.duration_s


def profile(**layer: Any) -> ModelProfile:
    return ModelProfile(
        name="toy",
        input_bytes=4.0,
        layers=(LayerProfile(**{"name": "only", "kind": "Linear", "output_bytes": 4.0, **layer}),),
    )


@pytest.mark.parametrize(
    ("kind", "in_turn"),
    [
        (
            profile(forward_flops=1e9, weight_bytes=4e7, num_tensors=1),
            True,
        ),  # long passes, and bytes
        (profile(forward_flops=1e6, weight_bytes=4e5, num_tensors=40), False),  # messages
    ],
)
def test_every_new_plan_takes_turns_where_that_is_predicted_to_be_faster(
    kind: ModelProfile, in_turn: bool
) -> None:
    """Each round takes as long as the faster of both ways, with all SoCs and as they go."""
    cluster, took, turns = parse_cluster({"boards": [3, 3, 3]}), {}, []
    for asked in ("auto", True, False):
        strategy = socflow(
            cluster=cluster,
            clock=EventClock(cluster),
            model_profile=kind,
            uplink_turns=asked,
            num_epochs=4,
        )
        nodes = range(10, 100, 10)
        for server_round, gone in enumerate((None, 20, 60, 30), start=1):
            grid = FakeGrid(tuple(node for node in nodes if node != gone))
            sent = [
                message
                for message in messages(strategy, server_round, grid)
                if "group" in message.content
            ]
            strategy.aggregate_train(server_round, [answer(message, 1.0) for message in sent])
        took[asked] = [report.usage.duration_s for report in strategy.reports]
        turns.append([report.uplink_turns for report in strategy.reports])
    assert took["auto"] == [min(both) for both in zip(took[True], took[False], strict=True)]
    assert took[True] != took[False]
    assert turns[0][0] == in_turn


def test_without_a_clock_groups_that_share_an_uplink_take_turns_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = socflow(cluster=parse_cluster({"boards": [2, 2, 2]}), model_profile=PROFILE)
    with caplog.at_level("INFO", logger="flwr"):
        messages(strategy, grid=FakeGrid((1, 2, 3, 4, 5, 6)))
    assert (
        strategy.method.describe().exchanges.turns.enabled
        and "nothing predicts whether running freely is faster" in caplog.text
    )
    assert (
        not socflow(model_profile=PROFILE).method.describe().exchanges.turns.enabled
    )  # these share none
    refused(lambda: socflow(uplink_turns="maybe"), "uplink_turns", "maybe")


def test_without_a_clock_nothing_is_priced() -> None:
    strategy = socflow()
    strategy.aggregate_train(1, [answer(message, 1.0) for message in messages(strategy)])
    assert strategy.reports[-1].usage.duration_s == 0.0


def test_the_grids_clock_is_used_where_none_is_given() -> None:
    cluster = parse_cluster({"boards": [2, 2]})
    grid = FakeGrid()
    grid.clock = EventClock(cluster)
    strategy = socflow(cluster=cluster, model_profile=PROFILE)
    strategy.aggregate_train(1, [answer(message, 1.0) for message in messages(strategy, grid=grid)])
    assert grid.clock.now_s == strategy.reports[-1].usage.duration_s > 0.0


def test_a_strategy_for_another_cluster_than_the_engines_is_refused() -> None:
    grid = FakeGrid()
    grid.clock = EventClock(parse_cluster({"boards": [4]}))
    grid.cluster = parse_cluster({"boards": [4], "device": "raspberry-pi-4b"})
    strategy = socflow(cluster=parse_cluster({"boards": [2, 2]}), model_profile=PROFILE)
    refused(
        lambda: messages(strategy, grid=grid),
        "snapdragon-865",
        "raspberry-pi-4b",
        "1 board",
        "4 SoCs on 2 boards",
    )


def test_a_client_that_trained_alone_does_not_pass_for_its_group() -> None:
    strategy = socflow()
    first, second = messages(strategy)
    alone = answer(second, 9.0)
    alone.content["metrics"] = MetricRecord({"num-examples": 1})
    arrays, _ = strategy.aggregate_train(1, [answer(first, 1.0), alone])
    assert values(arrays) == [1.0, 1.0, 1.0]
    assert [event.kind for event in strategy.reports[-1].events] == ["not-a-group"]


# ------------------------------------------------------------------------------------------------ baselines
def test_a_ring_is_one_group_of_everything_and_a_round_an_epoch() -> None:
    ring = RingAllReduce(
        cluster=parse_cluster({"boards": [2, 2]}),
        schedule=TrainingSchedule(num_samples=100, batch_size=10, num_epochs=3),
    )
    assert [group.members for group in ring.plan.groups] == [(0, 1, 2, 3)]
    assert (ring.num_rounds, ring.method.sync.steps_per_epoch) == (3, 10)


def test_a_single_device_is_one_group_of_one() -> None:
    alone = SingleDevice(
        cluster=parse_cluster({"boards": [2, 2]}),
        schedule=TrainingSchedule(num_samples=100, batch_size=10, num_epochs=1),
    )
    assert [group.members for group in alone.plan.groups] == [(0,)]
    assert len(messages(alone)) == 1


def test_the_model_is_evaluated_on_the_server_only() -> None:
    strategy = socflow()
    assert strategy.configure_evaluate(1, model(), ConfigRecord({}), FakeGrid()) == []
    assert strategy.aggregate_evaluate(1, []) is None
