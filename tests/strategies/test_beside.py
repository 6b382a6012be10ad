"""Groups and edges side by side: who gets which message, the next model, virtual time, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from socflower.cluster import ModelProfile, parse_cluster
from socflower.cluster.cost_model import LayerProfile
from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.split_pipeline import simulate
from socflower.errors import ConfigError, InfeasiblePlan, TrainingFailed
from socflower.sim import EventClock
from socflower.strategies.beside import Beside
from socflower.strategies.settings import Costs, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.strategies.split_replay import SplitReplay
from socflower.wire.message_keys import GROUP
from socflower.wire.split_message_keys import SPLIT, SplitTask
from tests.strategies.fake_messages import FakeGrid, answer, answer_error, model, values

CLUSTER = parse_cluster({"boards": [2, 2]})
SERVERS = parse_cluster({"boards": [1]}, servers=({"count": 2, "boards": 1, "socs_per_board": 2},))
EDGES = parse_cluster({"boards": [1], "device": "raspberry-pi-4b"})
PROFILE = ModelProfile(name="toy", input_bytes=4.0, layers=(LayerProfile(
    name="only", kind="Linear", forward_flops=1e8, output_bytes=4.0, weight_bytes=12.0, num_tensors=1),))
NODES = (40, 10, 30, 20, 50)  # 10 to 40 are the groups' SoCs 0 to 3, 50 is the edge


def socflow(cluster: Any = CLUSTER, *, clock: EventClock | None = None, **changes: Any) -> SoCFlow:
    schedule = {"num_samples": 200, "batch_size": 10, "num_epochs": 2, "interval_epochs": 0.5,
                **changes.pop("schedule", {})}
    return SoCFlow(cluster=cluster, groups=changes.pop("groups", 2), schedule=TrainingSchedule(**schedule),
                   costs=Costs(model_profile=PROFILE, clock=clock) if clock else Costs(), **changes)


def replay(groups: SoCFlow, *, forward_s: float = 0.01, **changes: Any) -> SplitReplay:
    costs = SplitCosts(model="toy", batch_size=10, edge_only_s=0.1, model_weight_bytes=12.0, cuts=(CutCost(
        name="w", edge_forward_s=forward_s, edge_backward_s=0.01, cloud_s=0.01, feature_elements=100,
        front_weight_bytes=12.0),))
    return SplitReplay(**{
        "cluster": EDGES, "parties": [Party(costs=costs, bandwidth_profile=constant(1e6, 1e6),
                                            split_plan=SplitPlan(cut=0, window=1))],
        "edge_names": lambda party, cut: ["w"], "batches_per_epoch": 10, "num_epochs": 2,
        "round_epochs": [interval.epoch_end for interval in groups.intervals], **changes})


def beside(**changes: Any) -> Beside:
    groups = socflow(**changes)
    return Beside(groups=groups, edges=replay(groups))


def messages(strategy: Beside, server_round: int = 1, value: float = 0.0, grid: Any = None) -> list[Message]:
    return strategy.configure_train(server_round, model(value), ConfigRecord(), grid or FakeGrid(NODES))


def of_edge(message: Message) -> bool:
    return SPLIT in message.content.config_records


def answered(sent: Sequence[Message], groups: Sequence[tuple[float, int]], edge: tuple[float, int]) -> list[Message]:
    """Return replies full of a value, with a number of samples; the groups' in order of their ids."""
    given = dict(zip(sorted(int(each.content.config_records[GROUP]["group-id"]) for each in sent if not of_edge(each)),
                     groups, strict=True))
    return [answer(each, *(edge if of_edge(each) else given[int(each.content.config_records[GROUP]["group-id"])]),
                   **{"train-loss": 1.0}) for each in sent]


def test_the_first_nodes_are_the_groups_and_the_next_the_edges() -> None:
    sent = messages(beside())
    assert [(each.metadata.dst_node_id, of_edge(each)) for each in sent] == [(10, False), (30, False), (50, True)]
    assert [values(each.content.array_records["arrays"]) for each in sent] == [[0.0] * 3] * 3


def test_the_next_model_is_the_average_of_all_by_samples_in_any_order_of_replies() -> None:
    groups, edge = [(1.0, 30), (4.0, 10)], (9.0, 60)
    expected = (1.0 * 30 + 4.0 * 10 + 9.0 * 60) / 100
    for flip in (1, -1):
        strategy = beside()
        arrays, metrics = strategy.aggregate_train(1, answered(messages(strategy), groups, edge)[::flip])
        assert values(arrays) == pytest.approx([expected] * 3) and dict(metrics or {})["num-examples"] == 100
        assert [values(each.content.array_records["arrays"]) for each in messages(strategy, 2, 7.0)] == [[7.0] * 3] * 3


def test_the_edges_rounds_end_with_the_groups() -> None:
    strategy = beside()
    spans = []
    for server_round in range(1, strategy.num_rounds + 1):
        sent = messages(strategy, server_round)
        task = SplitTask.decode(sent[-1].content.config_records[SPLIT])
        spans.append((task.first_batch, task.num_batches))
        strategy.aggregate_train(server_round, answered(sent, [(1.0, 1), (1.0, 1)], (1.0, 1)))
    assert spans == [(0, 5), (5, 5), (10, 5), (15, 5)]
    assert [report.epoch for report in strategy.reports] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("forward_s", [0.001, 5.0])  # the edge is the faster one, the slower one
def test_a_round_takes_as_long_as_the_slower_part_alone(forward_s: float) -> None:
    clock, alone, ends = EventClock(CLUSTER), EventClock(CLUSTER), []
    groups = socflow(clock=clock)
    edges = replay(groups, forward_s=forward_s, clock=EventClock(EDGES))
    strategy, apart, edge_alone = Beside(groups=groups, edges=edges), socflow(clock=alone), EventClock(EDGES)
    parties = edges.parties
    for server_round in range(1, strategy.num_rounds + 1):
        sent = messages(strategy, server_round)
        strategy.aggregate_train(server_round, answered(sent, [(1.0, 1), (1.0, 1)], (1.0, 1)))
        theirs = apart.configure_train(server_round, model(), ConfigRecord(), FakeGrid(NODES[:4]))
        apart.aggregate_train(server_round, [answer(each, 1.0, **{"train-loss": 1.0}) for each in theirs])
        timeline = simulate(parties, 5, 5 * (server_round - 1), clock=edge_alone, cluster=EDGES)
        took = apart.reports[-1].usage, timeline.usage
        longest_s = max(usage.duration_s for usage in took)
        ends.append(longest_s)
        report = strategy.reports[-1]
        assert report.usage.duration_s == pytest.approx(longest_s, rel=1e-12)
        assert clock.now_s == pytest.approx(sum(ends), rel=1e-12) == edges.clock.now_s  # type: ignore[union-attr]
        idle_w = [sum(where.device_of(soc).idle_w for soc in range(where.num_socs)) for where in (CLUSTER, EDGES)]
        expected_j = sum(usage.total_energy_j + (longest_s - usage.duration_s) * watts
                         for usage, watts in zip(took, idle_w, strict=True))
        assert report.usage.total_energy_j == pytest.approx(expected_j, rel=1e-9)


def test_edges_average_with_the_groups_only_where_all_servers_do() -> None:
    groups = socflow(SERVERS, schedule={"server_interval": 2, "interval_epochs": 0.5})
    strategy = Beside(groups=groups, edges=replay(groups))
    sent = messages(strategy, 1)
    arrays, _ = strategy.aggregate_train(1, answered(sent, [(1.0, 10), (3.0, 10)], (8.0, 20)))
    assert values(arrays) == pytest.approx([5.0] * 3)  # what is evaluated
    sent = messages(strategy, 2, 5.0)
    assert [values(each.content.array_records["arrays"])[0] for each in sent] == pytest.approx([1.0, 3.0, 8.0])
    resumed = Beside(groups=(again := socflow(SERVERS, schedule={"server_interval": 2, "interval_epochs": 0.5})),
                     edges=replay(again))
    resumed.resume_from(1, **strategy.state)
    assert [values(each.content.array_records["arrays"])[0] for each in messages(resumed, 2, 5.0)] == [1.0, 3.0, 8.0]
    arrays, _ = strategy.aggregate_train(2, answered(sent, [(1.0, 10), (3.0, 10)], (8.0, 20)))
    assert [values(each.content.array_records["arrays"])[0] for each in messages(strategy, 3, 5.0)] == [5.0] * 3


def failing(strategy: Beside, server_round: int, groups: bool, edge: bool) -> list[Message]:
    return [answer_error(each, 2, "broken") if (edge if of_edge(each) else groups) else
            answer(each, 2.0, **{"train-loss": 1.0}) for each in messages(strategy, server_round)]


@pytest.mark.parametrize("edge", [True, False])
def test_a_part_without_a_reply_is_left_out_where_that_is_tolerated(edge: bool) -> None:
    groups = socflow(clock=EventClock(CLUSTER), tolerate_client_errors=True)
    strategy = Beside(groups=groups, edges=replay(groups, clock=EventClock(EDGES), tolerate_client_errors=True))
    arrays, _ = strategy.aggregate_train(1, failing(strategy, 1, not edge, edge))
    assert values(arrays) == [2.0] * 3 and "broken" in strategy.reports[-1].events[-1].text
    assert strategy.state["groups"]["without_state"] == ([] if edge else [0, 1])
    strategy.aggregate_train(2, failing(strategy, 2, False, False))
    assert len(strategy.reports) == len(groups.reports) == 2 and not strategy.reports[-1].events
    with pytest.raises(TrainingFailed, match="broken"):
        strategy.aggregate_train(3, failing(strategy, 3, True, True))


@pytest.mark.parametrize("edge", [True, False])
def test_a_part_without_a_reply_ends_the_training_where_it_is_not_tolerated(edge: bool) -> None:
    strategy = beside()
    with pytest.raises(TrainingFailed, match="broken"):
        strategy.aggregate_train(1, failing(strategy, 1, not edge, edge))


def shared_clock() -> Mapping[str, Any]:
    groups = socflow(clock=(clock := EventClock(CLUSTER)))
    return {"groups": groups, "edges": replay(groups, clock=clock)}


@pytest.mark.parametrize(("given", "line"), [
    (lambda: {"groups": socflow(), "edges": replay(socflow(), round_epochs=1.0)},
     "the groups have 4 rounds and the edges 2; give SplitReplay"),
    (lambda: {"groups": (groups := socflow(outer=FedAvg())), "edges": replay(groups)}, "leave outer out"),
    (lambda: {"groups": (groups := socflow()), "edges": replay(groups, cloud=object())}, "leave cloud out"),
    (shared_clock, "the same clock"),
    (lambda: {"groups": 3, "edges": replay(socflow())}, "groups = 3 must be SoCFlow"),
    (lambda: {"groups": socflow(), "edges": replay(socflow(), round_epochs=[0.01, 1.0, 1.5, 2.0])},
     "round 1, to epoch 0.01, would have no batch of the edges' 10 an epoch"),
    (lambda: {"groups": socflow(), "edges": replay(socflow(), round_epochs=[0.5, 1.0])}, "end at 1 of 2 epochs"),
])
def test_what_cannot_go_together_is_refused(given: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Beside(**given())


def test_too_few_nodes_are_refused_before_round_1() -> None:
    with pytest.raises(InfeasiblePlan, match="4 SoCs of groups and 1 edges need as many nodes, and Flower has 4"):
        messages(beside(), grid=FakeGrid(NODES[:4]))
