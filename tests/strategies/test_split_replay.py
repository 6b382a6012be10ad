"""SplitReplay as an adapter: who gets which message with which arrays, and what becomes of the replies."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from socflower import __version__
from socflower.cluster import Tier, parse_cluster
from socflower.edgecloud.links.bandwidth_profile import constant, segments
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.timeline_actions import decode_actions
from socflower.errors import ConfigError, InfeasiblePlan, SocflowerError, TrainingFailed
from socflower.flower_adapter import begin_run
from socflower.sim import EventClock
from socflower.strategies import node_registry
from socflower.strategies.split_replay import SplitReplay
from socflower.wire.message_keys import (
    EVENTS,
    MESSAGE_VERSION,
    PRICED,
    STATUS,
    NodeStatus,
    encode,
)
from socflower.wire.split_message_keys import (
    EDGE_ALONE,
    SPLIT,
    SPLIT_REPORT,
    SplitReport,
    SplitTask,
)
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer_error

NAMES = ("first", "second", "third")  # one tensor each; cut i is after the i-th
CUTS = tuple(
    CutCost(
        name=name,
        edge_forward_s=0.01 * (index + 1),
        edge_backward_s=0.01,
        cloud_s=0.01,
        feature_elements=1000 // (index + 1),
        front_weight_bytes=1000.0 * (index + 1),
    )
    for index, name in enumerate(NAMES)
)
COSTS = SplitCosts(model="toy", batch_size=10, cuts=CUTS, edge_only_s=0.1, model_weight_bytes=1e5)
BATCHES = 6


def edge_names(party: int, cut: int | None) -> list[str]:
    return list(NAMES[: None if cut is None else cut + 1])


def part_of_party(party: int, cut: int | None) -> list[str]:
    return [NAMES[party]]


def whole(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(np.full(2, value + index, np.float32)) for index, name in enumerate(NAMES)}
    )


def party(cut: int | None = 0, **changes: Any) -> Party:
    return Party(
        **{
            "costs": COSTS,
            "bandwidth_profile": constant(1e6, 1e6),
            "split_plan": SplitPlan(cut=cut, window=1),
            **changes,
        }
    )


def replay(num_edges: int = 1, **changes: Any) -> SplitReplay:
    settings: dict[str, Any] = {
        "cluster": parse_cluster({"boards": [2, 2]}),
        "parties": [party() for _ in range(num_edges)],
        "edge_names": edge_names,
        "batches_per_epoch": BATCHES,
        "num_epochs": 2,
        "seed": 3,
    }
    return SplitReplay(**(settings | changes))


class FakeCloud:
    """Remembers what it is asked; its halves are full of `value`."""

    def __init__(self, value: float = 50.0) -> None:
        self.opened: list[tuple[SplitTask, dict[str, NDArray[Any]]]] = []
        self.value, self.closed = value, False

    def open(self, task: SplitTask, weights: Mapping[str, NDArray[Any]]) -> SplitTask:
        self.opened.append((task, dict(weights)))
        shared = task.mode in ("turns", "joined")
        return replace(
            task,
            address="cloud:1",
            run="shared" if shared else f"of-{task.parties[0]}",
            token="ab" * 16,
        )

    def fetch(self, run: str) -> dict[str, NDArray[Any]]:
        held = (
            self.opened[-1][1]
            if run == "shared"
            else next(
                weights for task, weights in reversed(self.opened) if run == f"of-{task.parties[0]}"
            )
        )
        return {name: np.full(2, self.value, np.float32) for name in held}

    def close(self) -> None:
        self.closed = True


def messages(strategy: SplitReplay, server_round: int = 1, grid: Any = None) -> list[Message]:
    return strategy.configure_train(
        server_round, whole(), ConfigRecord({"mine": 7}), grid or CloudGrid()
    )


class CloudGrid(FakeGrid):
    """Nodes do not say where they are: they are SoCs in ascending order of their ids."""

    def send_and_receive(self, sent: Any, *, timeout: float | None = None) -> list[Message]:
        return [
            Message(RecordDict({STATUS: ConfigRecord(encode(NodeStatus()))}), reply_to=each)
            for each in sent
        ]


def task_of(message: Message) -> SplitTask:
    return SplitTask.decode(message.content.config_records[SPLIT])


def names_in(message: Message) -> set[str]:
    return set(message.content.array_records["arrays"])


def answer(
    message: Message,
    value: float,
    *,
    num_examples: int = 10,
    names: Any = None,
    loss: float = 1.0,
    report: dict[str, Any] | None = None,
    texts: tuple[str, ...] = (),
) -> Message:
    content = RecordDict(
        {
            "arrays": ArrayRecord(
                {name: Array(np.full(2, value, np.float32)) for name in names or names_in(message)}
            ),
            "metrics": MetricRecord({"num-examples": num_examples, "train-loss": loss}),
        }
    )
    if report is not None:
        content[SPLIT_REPORT] = ConfigRecord(
            SplitReport(
                **{
                    "cut": 0,
                    "bits": 32,
                    "duration_s": 1.0,
                    "compute_s": 0.5,
                    "up_bytes": 10,
                    "down_bytes": 20,
                    "staleness": (6,),
                    **report,
                }
            ).encode()
        )
    if texts:
        content[EVENTS] = ConfigRecord({"texts": list(texts)})
    return Message(content, reply_to=message)


def values(arrays: ArrayRecord | None) -> dict[str, float]:
    assert arrays is not None
    return {name: float(array.numpy()[0]) for name, array in arrays.items()}


def one_line(error: pytest.ExceptionInfo[SocflowerError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------------------- who gets what
def test_one_edge_without_a_cloud_gets_the_whole_model_and_the_order_of_all_actions() -> None:
    (message,) = messages(replay())
    task = task_of(message)
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (10, "train")
    assert names_in(message) == set(NAMES)
    assert (task.parties, task.cuts, task.windows, task.address) == ((0,), (0,), (1,), "")
    assert (task.first_batch, task.num_batches, task.total_batches) == (0, BATCHES, 2 * BATCHES)
    assert {action.batch for action in decode_actions(task.actions)} == set(range(BATCHES))
    assert dict(message.content.config_records["config"]) == {
        "mine": 7,
        "server-round": 1,
        PRICED: True,
    }


def test_edges_with_cloud_halves_of_their_own_get_a_message_each_with_their_own_actions() -> None:
    sent = messages(replay(3))
    assert [message.metadata.dst_node_id for message in sent] == [10, 20, 30]
    assert [task_of(message).parties for message in sent] == [(0,), (1,), (2,)]
    for index, message in enumerate(sent):
        assert {action.party for action in decode_actions(task_of(message).actions)} == {index}
        assert names_in(message) == set(NAMES)


@pytest.mark.parametrize("mode", ["turns", "joined"])
def test_edges_that_share_a_cloud_half_train_in_one_process_where_there_is_no_cloud(
    mode: Any,
) -> None:
    (message,) = messages(replay(3, mode=mode))
    task = task_of(message)
    assert (message.metadata.dst_node_id, task.parties, task.num_parties, task.mode) == (
        10,
        (0, 1, 2),
        3,
        mode,
    )
    assert {action.party for action in decode_actions(task.actions)} == {0, 1, 2}


def test_with_a_cloud_an_edge_gets_its_own_half_and_the_cloud_the_rest() -> None:
    cloud = FakeCloud()
    sent = messages(replay(2, parties=[party(0), party(1)], cloud=cloud))
    assert [names_in(message) for message in sent] == [{"first"}, {"first", "second"}]
    assert [set(weights) for _, weights in cloud.opened] == [{"second", "third"}, {"third"}]
    for message, index in zip(sent, (0, 1), strict=True):
        task = task_of(message)
        assert (task.parties, task.address, task.run, task.actions) == (
            (index,),
            "cloud:1",
            f"of-{index}",
            b"",
        )


def test_joined_parties_get_nothing_of_each_others_and_the_cloud_nothing_of_either() -> None:
    cloud = FakeCloud()
    sent = messages(replay(2, mode="joined", edge_names=part_of_party, cloud=cloud))
    assert [names_in(message) for message in sent] == [{"first"}, {"second"}]
    assert [set(weights) for _, weights in cloud.opened] == [{"third"}, {"third"}]


def test_in_a_reverse_split_the_last_layers_stand_at_the_edge() -> None:
    cloud = FakeCloud()
    (message,) = messages(
        replay(reverse=True, cloud=cloud, edge_names=lambda party, cut: NAMES[cut + 1 :])
    )
    assert names_in(message) == {"second", "third"} and task_of(message).reverse
    assert [set(weights) for _, weights in cloud.opened] == [{"first"}]


def test_edges_that_train_alone_leave_the_cloud_alone() -> None:
    cloud = FakeCloud()
    (message,) = messages(replay(parties=[party(None)], cloud=cloud))
    assert task_of(message).cuts == (EDGE_ALONE,) and names_in(message) == set(NAMES)
    assert task_of(message).address == "" and task_of(message).actions and not cloud.opened


def test_one_edge_alone_beside_others_with_a_cloud_has_the_whole_model_and_counts() -> None:
    cloud = FakeCloud(value=8.0)
    strategy = replay(2, parties=[party(0), party(None)], cloud=cloud)
    sent = messages(strategy)
    assert [names_in(message) for message in sent] == [{"first"}, set(NAMES)]
    assert [task_of(message).address for message in sent] == ["cloud:1", ""] and len(
        cloud.opened
    ) == 1
    arrays, _ = strategy.aggregate_train(1, [answer(sent[0], 2.0, report={}), answer(sent[1], 4.0)])
    assert values(arrays) == {"first": 3.0, "second": 6.0, "third": 6.0}
    assert [edge.split_plan.cut for edge in strategy.parties] == [0, None]


@given(st.integers(1, 30), st.integers(1, 4), st.floats(0.05, 3.0))
def test_the_rounds_cover_every_batch_once_and_in_order(
    batches: int, epochs: int, round_epochs: float
) -> None:
    begin_run(1)
    strategy = replay(batches_per_epoch=batches, num_epochs=epochs, round_epochs=round_epochs)
    at = 0
    for server_round in range(1, strategy.num_rounds + 1):
        (message,) = messages(strategy, server_round)
        task = task_of(message)
        assert task.first_batch == at
        at += task.num_batches
    assert at == batches * epochs


def test_the_callers_config_is_not_changed() -> None:
    config = ConfigRecord({"mine": 3})
    replay().configure_train(1, whole(), config, CloudGrid())
    assert dict(config) == {"mine": 3}


# ------------------------------------------------------------------------------------------------------ aggregation
def test_own_halves_are_averaged_by_samples_in_any_order_of_replies() -> None:
    for order in (1, -1):
        strategy = replay(2)
        sent = messages(strategy)
        replies = [answer(sent[0], 1.0, num_examples=30, loss=4.0), answer(sent[1], 5.0, loss=8.0)][
            ::order
        ]
        arrays, metrics = strategy.aggregate_train(1, replies)
        assert values(arrays) == dict.fromkeys(NAMES, 2.0)
        assert metrics is not None and dict(metrics) == {"train-loss": 5.0, "num-examples": 40}
        assert strategy.reports[-1].events == () and strategy.reports[-1].epoch == 1.0


def test_own_cloud_halves_are_averaged_with_their_edges() -> None:
    cloud = FakeCloud()
    strategy = replay(2, cloud=cloud)
    sent = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer(sent[0], 1.0, report={}), answer(sent[1], 5.0, num_examples=30, report={})]
    )
    assert values(arrays) == {"first": 4.0, "second": 50.0, "third": 50.0}


def test_edges_that_take_turns_are_averaged_and_the_cloud_half_they_share_is_taken_as_it_is() -> (
    None
):
    strategy = replay(2, mode="turns", cloud=FakeCloud())
    sent = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer(sent[0], 1.0, report={}), answer(sent[1], 5.0, num_examples=30, report={})]
    )
    assert values(arrays) == {"first": 4.0, "second": 50.0, "third": 50.0}


def test_joined_halves_are_put_together_and_nothing_is_averaged() -> None:
    strategy = replay(2, mode="joined", edge_names=part_of_party, cloud=FakeCloud())
    sent = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer(sent[1], 5.0, report={}), answer(sent[0], 1.0, report={})]
    )
    assert values(arrays) == {"first": 1.0, "second": 5.0, "third": 50.0}


def test_the_next_round_begins_where_the_edges_have_moved_their_cuts() -> None:
    strategy = replay(2, cloud=FakeCloud())
    sent = messages(strategy)
    strategy.aggregate_train(
        1,
        [
            answer(
                sent[0],
                1.0,
                names=["first", "second"],
                report={"cut": 1, "bits": 8, "events": ("moved the cut",)},
            ),
            answer(sent[1], 1.0, report={}),
        ],
    )
    assert [(edge.split_plan.cut, edge.split_plan.bits) for edge in strategy.parties] == [
        (1, 8),
        (0, 32),
    ]
    (event,) = strategy.reports[-1].events
    assert (event.kind, event.group_id, event.text) == ("link", 0, "edge 0: moved the cut")
    assert [report.cut for report in strategy.reports[-1].measured] == [1, 0]
    assert [task_of(message).cuts for message in messages(strategy, 2)] == [(1,), (0,)]


def test_where_one_edge_is_dropped_the_others_reports_stay_their_own() -> None:
    strategy = replay(3, cloud=FakeCloud(), tolerate_client_errors=True)
    sent = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1,
        [
            answer(sent[0], 2.0, report={}),
            answer_error(sent[1], 2, "it broke"),
            answer(
                sent[2], 4.0, names=["first", "second"], report={"cut": 1, "events": ("a line",)}
            ),
        ],
    )
    assert [edge.split_plan.cut for edge in strategy.parties] == [0, 0, 1]
    assert values(arrays)["first"] == 3.0
    assert [(event.kind, event.group_id) for event in strategy.reports[-1].events] == [
        ("client-raised", 1),
        ("link", 2),
    ]


def test_in_virtual_time_cuts_move_as_predicted_and_the_next_round_begins_there() -> None:
    engine = DecisionEngine(COSTS, (32,), rest_batches=1)
    trace = segments([(0.2, 1e7, 1e7), (1000.0, 2e4, 2e4)], latency_s=0.001)
    strategy = replay(
        parties=[party(2, bandwidth_profile=trace, decider=engine)],
        batches_per_epoch=40,
        num_epochs=2,
    )
    (message,) = messages(strategy)
    strategy.aggregate_train(1, [answer(message, 1.0)])
    moves = strategy.reports[-1].timeline.parties[0].moves
    assert moves
    assert strategy.parties[0].split_plan.cut == moves[-1].new.cut
    state = strategy.state
    assert state["deployments"][0][0] == moves[-1].new.cut
    again = replay(
        parties=[
            party(2, bandwidth_profile=trace, decider=DecisionEngine(COSTS, (32,), rest_batches=1))
        ],
        batches_per_epoch=40,
        num_epochs=2,
    )
    again.resume_from(1, **state)
    assert again.state == state and again.resumed_after == 1


def test_a_clock_goes_on_by_what_a_round_takes_and_counts_bytes_on_the_way_to_the_cloud() -> None:
    cluster = parse_cluster({"boards": [2, 2]})
    clock = EventClock(cluster)
    strategy = replay(cluster=cluster, clock=clock)
    (message,) = messages(strategy)
    strategy.aggregate_train(1, [answer(message, 1.0)])
    report = strategy.reports[-1]
    assert clock.now_s == report.usage.duration_s == report.timeline.duration_s > 0
    per_batch = COSTS.feature_bytes(0, 32) + COSTS.gradient_bytes(0)
    assert report.usage.num_bytes[Tier.WAN] == pytest.approx(BATCHES * per_batch)
    assert sum(report.usage.num_bytes.values()) == report.usage.num_bytes[Tier.WAN]
    messages(strategy, 2)  # a round's virtual time is known, and passes, when its messages are made
    assert clock.now_s == pytest.approx(2 * report.usage.duration_s)


# ------------------------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize("num_edges", [0, 5])
def test_more_edges_than_the_cluster_has_are_refused_with_both_numbers(num_edges: int) -> None:
    with pytest.raises(ConfigError) as caught:
        replay(num_edges)
    assert f"{num_edges} edges on a cluster of 4 SoCs" in one_line(caught)


@pytest.mark.parametrize("server_round", [0, 3])
def test_a_round_beyond_the_plan_is_refused(server_round: int) -> None:
    with pytest.raises(ConfigError) as caught:
        messages(replay(), server_round)
    assert f"round {server_round} of a plan of 2 rounds" in one_line(caught)


def test_too_few_nodes_are_refused_with_both_numbers() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        messages(replay(3), grid=CloudGrid((1, 2)))
    assert "needs 3 nodes and Flower has 2" in one_line(caught)


def test_an_edge_that_raises_ends_the_training_with_its_line() -> None:
    strategy = replay(2)
    sent = messages(strategy)
    with pytest.raises(TrainingFailed) as caught:
        strategy.aggregate_train(1, [answer(sent[0], 1.0), answer_error(sent[1], 2, "it\nbroke")])
    assert "edge 1 (node 20): the client raised it broke" in one_line(caught)


def test_own_halves_of_edges_that_fail_are_left_out_and_said_to_be() -> None:
    strategy = replay(3, tolerate_client_errors=True)
    sent = messages(strategy)
    arrays, _ = strategy.aggregate_train(
        1, [answer_error(sent[0], 2, "it broke"), answer(sent[2], 3.0)]
    )
    assert values(arrays) == dict.fromkeys(NAMES, 3.0)
    assert [(event.kind, event.group_id) for event in strategy.reports[-1].events] == [
        ("client-raised", 0),
        ("no-reply", 1),
    ]


@pytest.mark.parametrize("mode", ["turns", "joined"])
def test_where_edges_share_a_cloud_half_none_may_be_missing(mode: Any) -> None:
    strategy = replay(
        2,
        mode=mode,
        edge_names=part_of_party if mode == "joined" else edge_names,
        cloud=FakeCloud(),
        tolerate_client_errors=True,
    )
    sent = messages(strategy)
    with pytest.raises(TrainingFailed) as caught:
        strategy.aggregate_train(1, [answer(sent[0], 1.0, report={})])
    assert "a part of the model is missing; first cause: edge 1 (node 20): no reply" in one_line(
        caught
    )


def test_without_any_usable_reply_the_training_ends() -> None:
    strategy = replay(2, tolerate_client_errors=True)
    sent = messages(strategy)
    with pytest.raises(TrainingFailed) as caught:
        strategy.aggregate_train(1, [answer(sent[0], float("nan")), answer_error(sent[1], 2, "x")])
    assert "a part of the model is missing" in one_line(caught)


def test_what_a_client_made_good_itself_is_told() -> None:
    strategy = replay()
    (message,) = messages(strategy)
    strategy.aggregate_train(
        1, [answer(message, 1.0, texts=("nothing is left of the optimisers",))]
    )
    (event,) = strategy.reports[-1].events
    assert (event.group_id, event.text) == (0, "edge 0: nothing is left of the optimisers")


def test_a_report_of_another_version_is_refused() -> None:
    strategy = replay(cloud=FakeCloud())
    (message,) = messages(strategy)
    reply = answer(message, 1.0, report={})
    reply.content[SPLIT_REPORT] = ConfigRecord({"cut": 0})
    wanted = ("missing", f"version {MESSAGE_VERSION}", __version__)
    refused(lambda: strategy.aggregate_train(1, [reply]), *wanted)


def test_nothing_is_evaluated_at_the_edges() -> None:
    strategy = replay()
    assert strategy.configure_evaluate(1, whole(), ConfigRecord({}), CloudGrid()) == []
    assert strategy.aggregate_evaluate(1, []) is None


def test_an_edge_with_too_little_memory_for_its_half_is_refused_with_the_numbers() -> None:
    """The catalogue's device has 12 GB, of which 10.5 GB are for training."""
    for needed, fits in ((10.5e9, True), (10.6e9, False)):
        cuts = tuple(replace(cut, edge_memory_bytes=needed) for cut in CUTS)
        costs = replace(COSTS, cuts=cuts, edge_only_memory_bytes=needed)
        for plan in (SplitPlan(cut=0), SplitPlan(cut=None)):
            edges = [party(), party(costs=costs, split_plan=plan)]
            if fits:
                replay(parties=edges)
                continue
            with pytest.raises(
                InfeasiblePlan,
                match=r"^edge 1: .* 10.6 GB .* snapdragon-865 has 10.5 GB of 12.0 GB",
            ):
                replay(parties=edges)


# ------------------------------------------------------------------------------------------- an edge that hangs
class SilentEdge(CloudGrid):
    """The node of edge 1 does not answer before it is let."""

    in_one_process, silent = False, True

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages(
            [
                each
                for each in message_ids
                if not (self.silent and self._pushed[each].metadata.dst_node_id == 20)
            ]
        )


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(
        node_registry,
        "time",
        SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None),
    )


@pytest.mark.usefixtures("at_once")
def test_an_edge_that_hangs_is_left_out_until_it_answers() -> None:
    strategy, grid = replay(3, cloud=FakeCloud()), SilentEdge()
    for server_round, nodes, kinds in (
        (1, [10, 30], ["no-reply"]),
        (2, [10, 20, 30], ["returned"]),
    ):
        sent = messages(strategy, server_round, grid)
        assert [message.metadata.dst_node_id for message in sent] == nodes
        strategy.aggregate_train(
            server_round, [answer(message, 1.0, report={}) for message in sent]
        )
        assert [event.kind for event in strategy.reports[-1].events] == kinds
        assert strategy.reports[-1].events[0].text.startswith("edge 1")
        grid.silent = False
    assert "node 20 did not answer within" in strategy.reports[0].events[0].text


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("mode", ["turns", "joined"])
def test_edges_that_share_a_cloud_half_do_not_wait_for_one_that_hangs(mode: Any) -> None:
    cloud = FakeCloud()
    strategy = replay(
        3, mode=mode, cloud=cloud, edge_names=part_of_party if mode == "joined" else edge_names
    )
    refused(lambda: messages(strategy, 1, SilentEdge()), "20", "node 20", error=TrainingFailed)
    assert not cloud.opened


class DyingEdge(CloudGrid):
    """The client process of edge 1's node dies at each of the first two questions."""

    in_one_process, num_deaths = False, 2

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = dict(self._pushed)
        replies = list(super().pull_messages(message_ids))
        for place, reply in enumerate(replies):
            if reply.metadata.src_node_id == 20 and self.num_deaths:
                self.num_deaths -= 1
                replies[place] = answer_error(asked[reply.metadata.reply_to_message_id], 8, "died")
        return replies


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("num_deaths", "first"), [(1, [10, 20, 30]), (2, [10, 30])])
def test_an_edge_whose_process_died_is_asked_again(num_deaths: int, first: list[int]) -> None:
    strategy, grid = replay(3, cloud=FakeCloud()), DyingEdge()
    grid.num_deaths = num_deaths
    seen = []
    for server_round in (1, 2):
        sent = messages(strategy, server_round, grid)
        seen.append([message.metadata.dst_node_id for message in sent])
        strategy.aggregate_train(
            server_round, [answer(message, 1.0, report={}) for message in sent]
        )
    assert seen == [first, [10, 20, 30]]
