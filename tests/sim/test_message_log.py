"""A run in which no client succeeded ends with the first cause, whatever its strategy makes of failed replies."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError, TrainingFailed
from socflower.sim.engine import run_app
from socflower.sim.message_log import MessageLog

CLUSTER = parse_cluster({"boards": 1, "socs_per_board": 2})


def client(fails: Callable[[int, int], bool], *, weights: float = 1.0, evaluates: bool = True) -> ClientApp:
    """Return a client that raises where `fails(server_round, partition)`, else answers with `weights`."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        server_round, partition = int(message.content["config"]["server-round"]), context.node_config["partition-id"]
        if fails(server_round, int(partition)):
            raise ValueError(f"round {server_round}\nat {partition}")
        metrics = MetricRecord({"num-examples": 1, "train-loss": 0.5})
        return Message(RecordDict({"arrays": record(weights), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if not evaluates:
            raise LookupError("no test data")
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=message)

    return app


def record(value: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(3, value, np.float32))})


def fedavg(num_rounds: int = 2, after: Callable[[ArrayRecord], object] = lambda arrays: None, **settings: float,
           ) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        after(FedAvg(**{"fraction_evaluate": 0.0, **settings}).start(grid, record(0.0), num_rounds=num_rounds).arrays)

    return app


def run(server: ServerApp, app: ClientApp) -> MessageLog:
    messages = MessageLog()
    run_app(server, app, cluster=CLUSTER, num_workers=0, messages=messages)
    return messages


def test_a_run_fails_if_and_only_if_no_client_ever_succeeded() -> None:
    """Every way in which two clients can fail in two rounds, under Flower's FedAvg, which keeps its weights then."""
    for pattern in product([False, True], repeat=4):
        failing = {(1 + index // 2, index % 2) for index, fails in enumerate(pattern) if fails}
        app = client(lambda server_round, partition, failing=failing: (server_round, partition) in failing)
        if len(failing) == 4:
            with pytest.raises(TrainingFailed) as caught:
                run(fedavg(), app)
            assert "no client succeeded: none of 4 train messages had a usable answer" in str(caught.value)
            assert "(node 100" in str(caught.value) and "<class 'ValueError'>:<'round 1 at " in str(caught.value)
            continue
        events = run(fedavg(), app).events
        kinds = {1: "client-failed", 2: "no-client"}
        counts = [sum(server_round == number for number, _ in failing) for server_round in (1, 2)]
        assert [event.kind for event in events] == [kinds[count] for count in counts if count]
        told = [f"round {number}: {count} of 2 train messages came to nothing" for number, count in
                enumerate(counts, start=1) if count]
        assert all(event.text.startswith(text) for event, text in zip(events, told, strict=True))


def test_a_server_app_that_stumbles_over_what_its_clients_failed_to_send_names_their_first_cause() -> None:
    def use(arrays: ArrayRecord) -> None:
        arrays["w"].numpy()

    with pytest.raises(TrainingFailed) as caught:
        run(fedavg(after=use), client(lambda server_round, partition: True))
    assert "<class 'ValueError'>:<'round 1 at " in str(caught.value)
    assert "then the ServerApp raised KeyError: 'w'" in str(caught.value)

    def fail(arrays: ArrayRecord) -> None:
        raise LookupError("its own fault")

    with pytest.raises(LookupError, match="its own fault"):
        run(fedavg(after=fail), client(lambda server_round, partition: partition == 0))

    def mistake(arrays: ArrayRecord) -> None:
        raise ConfigError("a mistake")

    with pytest.raises(ConfigError, match="a mistake"):
        run(fedavg(after=mistake), client(lambda server_round, partition: True))


def test_weights_that_are_never_finite_are_no_success() -> None:
    with pytest.raises(TrainingFailed, match="its weights are not finite, w first; a lower learning rate may help"):
        run(fedavg(), client(lambda server_round, partition: False, weights=float("nan")))


def test_evaluation_that_always_fails_is_told_and_training_counts() -> None:
    events = run(fedavg(fraction_evaluate=1.0), client(lambda server_round, partition: False, evaluates=False)).events
    assert [event.kind for event in events] == ["no-client", "no-client"]
    assert "2 of 2 evaluate messages came to nothing" in events[0].text and "no test data" in events[0].text


def test_a_run_that_only_evaluates_is_judged_by_that() -> None:
    server = fedavg(fraction_train=0.0, fraction_evaluate=1.0)
    assert run(server, client(lambda server_round, partition: True)).events == []
    with pytest.raises(TrainingFailed, match="none of 4 evaluate messages had a usable answer"):
        run(server, client(lambda server_round, partition: True, evaluates=False))


def test_a_server_app_that_asks_nobody_is_told_of() -> None:
    assert [event.kind for event in run(fedavg(0), client(lambda server_round, partition: False)).events] == [
        "no-message"]


def test_messages_that_are_pushed_and_pulled_count_as_well() -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        message = Message(RecordDict({"config": ConfigRecord({"server-round": 1})}), 1000, "train")
        list(grid.pull_messages(list(grid.push_messages([message]))))

    with pytest.raises(TrainingFailed, match="round 1 at 0"):
        run(app, client(lambda server_round, partition: True))
