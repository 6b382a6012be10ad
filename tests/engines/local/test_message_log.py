"""A run in which no client succeeded ends with the first cause, whatever its strategy makes of failed replies."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from socflower.cluster import parse_cluster
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.run_app import run_app
from socflower.errors import ConfigError, TrainingFailed
from tests.one_line import refused

CLUSTER = parse_cluster({"boards": 1, "socs_per_board": 2})
LINE = next(  # where its client raises
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.strip().startswith("raise ValueError(")
)


def client(
    fails: Callable[[int, int], bool],
    *,
    weights: Callable[[int, int], float | Array] = lambda *_: 1.0,
    num_examples: Callable[[int, int], float] = lambda *_: 1,
    evaluates: bool = True,
) -> ClientApp:
    """Return a client that raises where `fails(server_round, partition)`, else answers with its `weights`."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        server_round = int(message.content["config"]["server-round"])
        partition = int(context.node_config["partition-id"])
        if fails(server_round, partition):
            raise ValueError(f"round {server_round}\nat {partition}")
        metrics = MetricRecord(
            {"num-examples": num_examples(server_round, partition), "train-loss": 0.5}
        )
        arrays = record(weights(server_round, partition))
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if not evaluates:
            raise LookupError("no test data")
        return Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}),
            reply_to=message,
        )

    return app


def record(value: float | Array) -> ArrayRecord:
    return ArrayRecord(
        {"w": value if isinstance(value, Array) else Array(np.full(3, value, np.float32))}
    )


def fedavg(
    num_rounds: int = 2,
    after: Callable[[ArrayRecord], object] = lambda arrays: None,
    **settings: float,
) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        after(
            FedAvg(**{"fraction_evaluate": 0.0, **settings})
            .start(grid, record(0.0), num_rounds=num_rounds)
            .arrays
        )

    return app


def run(server: ServerApp, app: ClientApp) -> MessageLog:
    messages = MessageLog()
    run_app(server, app, cluster=CLUSTER, num_workers=0, messages=messages)
    return messages


def test_a_run_of_a_strategy_fails_if_and_only_if_no_client_succeeded_in_some_round() -> None:
    """Every way in which two clients can do in two rounds, under Flower's FedAvg, which keeps its weights then."""
    for pattern in product(["good", "raises", "nan"], repeat=4):
        does = {(1 + index // 2, index % 2): what for index, what in enumerate(pattern)}
        app = client(
            lambda server_round, partition, does=does: does[server_round, partition] == "raises",
            weights=lambda server_round, partition, does=does: {"nan": math.nan}.get(
                does[server_round, partition], 1.0
            ),
        )
        failing = {
            number: [soc for soc in (0, 1) if does[number, soc] != "good"] for number in (1, 2)
        }
        cause = {
            number: f"SoC {socs[0]} (node {1000 + socs[0]}): "
            + (
                f"ValueError: round {number} at {socs[0]} (test_message_log.py, line {LINE})"
                if does[number, socs[0]] == "raises"
                else "its weights are not finite, w first; a lower learning rate may help"
            )
            for number, socs in failing.items()
            if socs
        }
        if lost := [number for number in (1, 2) if len(failing[number]) == 2]:
            refused(
                lambda app=app: run(fedavg(), app),
                *(f"round {lost[0]}", "none of 2", cause[lost[0]]),
                error=TrainingFailed,
            )
            continue
        assert [(event.kind, event.text) for event in run(fedavg(), app).events] == [
            (
                "client-failed",
                f"round {number}: 1 of 2 train messages failed; first cause: {cause[number]}",
            )
            for number, socs in failing.items()
            if socs
        ]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(dtype: str) -> None:
    for value, index in product([math.nan, math.inf, -math.inf], [0, 7, 14]):

        def weights(
            server_round: int, partition: int, value: float = value, index: int = index
        ) -> Array:
            array = np.ones((3, 5), dtype)
            if (server_round, partition) == (2, 1):
                array.flat[index] = value
            return Array(array)

        (event,) = run(
            fedavg(), client(lambda server_round, partition: False, weights=weights)
        ).events
        assert event.text == (
            "round 2: 1 of 2 train messages failed; first cause: SoC 1 (node 1001): its "
            "weights are not finite, w first; a lower learning rate may help"
        )


def test_a_server_app_that_stumbles_over_what_its_clients_failed_to_send_names_their_first_cause() -> (
    None
):
    def without_strategy(use: Callable[[list[Message]], object]) -> ServerApp:
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            content = RecordDict(
                {"arrays": record(0.0), "config": ConfigRecord({"server-round": 1})}
            )
            use(
                list(
                    grid.send_and_receive(
                        [Message(content, node, "train") for node in grid.get_node_ids()]
                    )
                )
            )

        return app

    def first_weights(replies: list[Message]) -> object:
        return {
            name: reply.content[name]
            for reply in replies
            if reply.has_content()
            for name in reply.content
        }["w"]

    refused(
        lambda: run(without_strategy(first_weights), client(lambda server_round, partition: True)),
        "ValueError: round 1 at ",
        "then the ServerApp raised KeyError: 'w'",
        error=TrainingFailed,
    )

    def fail(arrays: ArrayRecord) -> None:
        raise LookupError("its own fault")

    with pytest.raises(LookupError, match="its own fault"):
        run(fedavg(after=fail), client(lambda server_round, partition: partition == 0))

    def mistake(replies: list[Message]) -> None:
        raise ConfigError("a mistake")

    refused(
        lambda: run(without_strategy(mistake), client(lambda server_round, partition: True)),
        "a mistake",
    )


def test_weights_that_are_never_finite_are_no_success() -> None:
    refused(
        lambda: run(
            fedavg(), client(lambda server_round, partition: False, weights=lambda *_: math.nan)
        ),
        "not finite",
        error=TrainingFailed,
    )


def test_evaluation_that_always_fails_is_told_and_training_counts() -> None:
    events = run(
        fedavg(fraction_evaluate=1.0),
        client(lambda server_round, partition: False, evaluates=False),
    ).events
    assert [event.kind for event in events] == ["no-client", "no-client"]
    assert "2 of 2 evaluate messages failed" in events[0].text and "no test data" in events[0].text


def test_a_run_that_only_evaluates_is_judged_by_that() -> None:
    server = fedavg(fraction_train=0.0, fraction_evaluate=1.0)
    assert run(server, client(lambda server_round, partition: True)).events == []
    refused(
        lambda: run(server, client(lambda server_round, partition: True, evaluates=False)),
        "none of 4 evaluate",
        error=TrainingFailed,
    )


def test_a_server_app_that_asks_nobody_is_told_of() -> None:
    assert [
        event.kind for event in run(fedavg(0), client(lambda server_round, partition: False)).events
    ] == ["no-message"]


def test_messages_that_are_pushed_and_pulled_count_as_well() -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        message = Message(RecordDict({"config": ConfigRecord({"server-round": 1})}), 1000, "train")
        list(grid.pull_messages(list(grid.push_messages([message]))))

    refused(
        lambda: run(app, client(lambda server_round, partition: True)),
        "round 1 at 0",
        "round 1",
        error=TrainingFailed,
    )


@pytest.mark.parametrize("count", [-5, -0.5, math.nan, math.inf])
def test_a_reply_with_no_number_of_examples_is_a_failure(count: float) -> None:
    """Flower's FedAvg would weigh the average with it."""
    cause = f"SoC 1 (node 1001): its num-examples is {count:g}, which is no number of examples"
    (event,) = run(
        fedavg(),
        client(
            lambda server_round, partition: False,
            num_examples=lambda server_round, partition: (
                count if (server_round, partition) == (1, 1) else 2.5
            ),
        ),
    ).events
    assert event.kind == "client-failed" and event.text.endswith(f"first cause: {cause}")
    refused(
        lambda: run(
            fedavg(), client(lambda server_round, partition: False, num_examples=lambda *_: count)
        ),
        "num-examples",
        "SoC 0",
        error=TrainingFailed,
    )


@pytest.mark.parametrize(
    ("failing", "fails"), [((3,), False), ((0, 1), False), ((2, 3), True), ((0, 1, 2, 3), True)]
)
def test_messages_of_one_round_that_are_pulled_one_by_one_are_judged_together(
    failing: tuple[int, ...], fails: bool
) -> None:
    app, kind = ServerApp(), "no client succeeded" + (" in the end" if len(failing) < 4 else "")

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for server_round in (1, 2):
            config = RecordDict({"config": ConfigRecord({"server-round": server_round})})
            for message_id in grid.push_messages(
                [Message(config, node, "train") for node in (1001, 1000)]
            ):
                list(grid.pull_messages([message_id]))

    asked = client(lambda server_round, partition: 2 * (server_round - 1) + partition in failing)
    if not fails:
        run(app, asked)
        return
    with pytest.raises(TrainingFailed, match=kind + r": .* first cause: .*SoC 0 \(node 1000\)"):
        run(app, asked)
