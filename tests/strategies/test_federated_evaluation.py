"""Nodes evaluate the global model on their own data, by the settings of the outer strategy."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from torch import nn
from torch.utils.data import TensorDataset

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.run_app import run_app
from socflower.model_graph.layer_profile import profile_module
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.settings import Costs, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.training.fp32 import FP32Trainer, sgd
from tests.one_line import refused

CLUSTER = parse_cluster({"boards": [3, 3]})
NUM_SAMPLES = 120


def network(context: Context | None = None) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))


def samples(context: Context, partition: int, num_partitions: int) -> TensorDataset:
    """Return more samples for a node with a higher number: means must be weighted."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn((NUM_SAMPLES, 1, 3, 4), generator=generator)
    labels = (inputs.flatten(1)[:, 0] > 0).long()
    own = (
        torch.arange(NUM_SAMPLES)
        if num_partitions == 1
        else torch.arange(partition, NUM_SAMPLES, num_partitions)
    )
    return (
        TensorDataset(inputs[own][: 10 + 2 * partition], labels[own][: 10 + 2 * partition])
        if num_partitions > 1
        else TensorDataset(inputs, labels)
    )


def strategy_of(outer: Strategy | None, **settings: Any) -> SoCFlow:
    return SoCFlow(
        cluster=CLUSTER,
        groups=2,
        outer=outer,
        schedule=TrainingSchedule(
            num_samples=NUM_SAMPLES, batch_size=12, num_epochs=2, interval_epochs=1
        ),
        **settings,
    )


class Noting(ForwardingGrid):
    """Notes which nodes are asked to evaluate."""

    def __init__(self, grid: Grid, asked: list[list[int]]) -> None:
        super().__init__(grid)
        self._asked = asked

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        order = sorted(self.get_node_ids())
        if nodes := [
            order.index(each.metadata.dst_node_id)
            for each in messages
            if each.metadata.message_type == "evaluate"
        ]:
            self._asked.append(nodes)
        return self._grid.send_and_receive(messages, timeout=timeout)


def client(**settings: Any) -> ClientApp:
    return make_client_app(
        network,
        samples,
        FP32Trainer(optimizer=sgd(0.5)),
        **{"evaluate_data_fn": samples, **settings},
    )


def run(
    outer: Strategy | None, app: ClientApp | None = None, **settings: Any
) -> tuple[Any, Any, list[list[int]], float]:
    """Return result, strategy, the SoCs asked in each evaluation, and the virtual time."""
    server, asked, out = ServerApp(), list[list[int]](), list[Any]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = strategy_of(outer, **settings)
        result = strategy.start(
            Noting(grid, asked),
            ArrayRecord(network().state_dict()),
            num_rounds=strategy.num_rounds,
            evaluate_fn=lambda number, arrays: MetricRecord({"server": float(number)}),
        )
        out.extend((result, strategy))

    clock = run_app(server, app or client(), cluster=CLUSTER, num_workers=0)
    return out[0], out[1], asked, clock.now_s


def test_metrics_are_weighted_means_over_the_nodes_own_data_and_the_server_evaluates_too() -> None:
    result, _, asked, _ = run(FedAvg())
    assert asked == [[0, 1, 2, 3, 4, 5]] * 2
    model = network()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    loss, right, number = 0.0, 0, 0
    for partition in range(6):
        data = samples(None, partition, 6)  # type: ignore[arg-type]
        outputs = model(data.tensors[0])
        loss += float(nn.functional.cross_entropy(outputs, data.tensors[1], reduction="sum"))
        right, number = (
            right + int((outputs.argmax(1) == data.tensors[1]).sum()),
            number + len(data),
        )
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["accuracy"] == pytest.approx(right / number)
    assert metrics["loss"] == pytest.approx(loss / number, rel=1e-5)
    assert {key: dict(value) for key, value in result.evaluate_metrics_serverapp.items()} == {
        number: {"server": float(number)} for number in range(3)
    }


def test_the_seed_decides_which_nodes_evaluate() -> None:
    outer = partial(FedAvg, fraction_evaluate=0.3, min_evaluate_nodes=2)
    first, second = run(outer()), run(outer())
    assert first[2] == second[2] and all(
        len(each) == 2 and each == sorted(each) for each in first[2]
    )
    assert dict(first[0].evaluate_metrics_clientapp[2]) == dict(
        second[0].evaluate_metrics_clientapp[2]
    )


@pytest.mark.parametrize(
    ("settings", "number"),
    [({"fraction_evaluate": 0.5}, 3), ({"fraction_evaluate": 0.1, "min_evaluate_nodes": 4}, 4)],
)
def test_flowers_settings_say_how_many_nodes_evaluate(
    settings: dict[str, Any], number: int
) -> None:
    result, _, asked, _ = run(FedMedian(**settings))
    assert [len(each) for each in asked] == [number] * 2 and len(
        result.evaluate_metrics_clientapp
    ) == 2


def test_without_an_outer_strategy_no_node_is_asked() -> None:
    result, _, asked, _ = run(None)
    assert (
        asked == []
        and not result.evaluate_metrics_clientapp
        and len(result.evaluate_metrics_serverapp) == 3
    )


def test_evaluation_costs_the_time_of_its_messages_and_training_as_much_as_without() -> None:
    costs = Costs(model_profile=profile_module(network(), (1, 3, 4), "mine"))
    plain, none, some, all_of_them = (
        run(outer, costs=costs)[3]
        for outer in (None, FedAvg(fraction_evaluate=0.0), FedAvg(fraction_evaluate=0.5), FedAvg())
    )
    assert plain < none < some < all_of_them, "the outer strategy's model comes back"


def test_nodes_that_fail_are_events_and_the_others_count() -> None:
    def fails(context: Context, partition: int, num_partitions: int) -> TensorDataset:
        if partition == 1:
            raise ValueError("no data here")
        return samples(context, partition, num_partitions)

    result, strategy, _, _ = run(FedAvg(), client(evaluate_data_fn=fails))
    assert set(result.evaluate_metrics_clientapp) == {1, 2}
    for report in strategy.reports:
        assert [event.kind for event in report.events] == ["not-evaluated"]
        assert "no data here" in report.events[0].text and "\n" not in report.events[0].text


def test_clients_without_data_to_evaluate_on_are_told_of() -> None:
    result, strategy, _, _ = run(FedAvg(), client(evaluate_data_fn=None))
    assert not result.evaluate_metrics_clientapp
    assert [len(report.events) for report in strategy.reports] == [6, 6]


def test_settings_for_an_evaluation_that_does_not_take_place_are_refused() -> None:
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = strategy_of(FedAvg(fraction_evaluate=0.0))
        strategy.start(
            grid,
            ArrayRecord(network().state_dict()),
            num_rounds=strategy.num_rounds,
            evaluate_config=ConfigRecord({"batch-size": 4}),
        )

    refused(
        lambda: run_app(server, client(), cluster=CLUSTER, num_workers=0),
        "evaluate_config",
        "batch-size",
    )
