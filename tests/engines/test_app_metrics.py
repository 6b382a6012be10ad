"""What `result.json` says of apps whose strategies are not as Flower's, and what it says that nobody can know."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.server import History
from flwr.server import server as flower_server
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)

from socflower.engines.app_metrics import named
from socflower.scenario.app.round_record import weights_sha256
from socflower.scenario.expectations import check_app_claims, parse_claims
from tests.engines.foreign_apps import ZERO, client_app, outcome_of

NUM_ROUNDS = 3


class OwnStart(FedAvg):
    """A strategy that trains in a loop of its own, with an argument of its own, and returns what `returned` makes."""

    returned: Callable[[Result], object] = staticmethod(lambda result: result)

    def start(
        self, grid: Grid, arrays: ArrayRecord, rounds: int, evaluate_fn: Any, patience: int = 1
    ) -> Any:
        result = Result()
        for number in range(1, rounds + 1):
            replies = grid.send_and_receive(
                [
                    Message(RecordDict({"arrays": arrays}), node, "train")
                    for node in grid.get_node_ids()
                ]
            )
            new, _ = self.aggregate_train(number, replies)
            assert new is not None
            result.arrays = arrays = new
            result.train_metrics_clientapp[number] = MetricRecord({"own_loss": 1.0 / number})
            result.evaluate_metrics_serverapp[number] = evaluate_fn(number, arrays)
        return self.returned(result)


class CallsFlowers(FedAvg):
    """A strategy whose `start` calls Flower's."""

    def start(self, *args: Any, **named_args: Any) -> Result:
        return super().start(*args, **named_args)


class StartsTwice(FedAvg):
    """A strategy that trains in two phases, each of which counts rounds from 1."""

    def start(self, grid: Grid, arrays: ArrayRecord) -> Result:
        first = super().start(grid, arrays, num_rounds=1)
        return super().start(grid, first.arrays, num_rounds=2)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": server_round / 10, "rmse": 5.0})


def server(main: Callable[[Grid], Any]) -> ServerApp:
    app = ServerApp()
    app.main()(lambda grid, context: main(grid))
    return app


def by_flower(make: Callable[[], Strategy], **settings: Any) -> ServerApp:
    return server(lambda grid: make().start(grid, ZERO, num_rounds=NUM_ROUNDS, **settings))


def values_of(outcome: dict[str, Any], *keys: str) -> list[Any]:
    return [outcome[key] for key in keys]


def final_arrays(level: float) -> str:
    return weights_sha256(ArrayRecord({"x": Array(np.full(3, level, np.float32))}))


def test_a_start_of_its_own_has_its_result() -> None:
    outcome = outcome_of(
        server(lambda grid: OwnStart().start(grid, ZERO, NUM_ROUNDS, evaluate)), client_app({})
    )
    assert [(entry["round"], entry["train"], entry["server"]) for entry in outcome["rounds"]] == [
        (number, {"own_loss": 1.0 / number}, {"accuracy": number / 10, "rmse": 5.0})
        for number in (1, 2, 3)
    ]
    assert values_of(outcome, "strategy", "final_accuracy", "weights_sha256") == [
        None,
        0.3,
        final_arrays(3.0),
    ]
    assert outcome["unknown"].keys() == {"final_loss", "strategy"}
    assert outcome["unknown"]["final_loss"].endswith("is called loss: it has accuracy, rmse")


def test_what_a_start_keeps_for_itself_is_known_too() -> None:
    class Keeps(OwnStart):  # of the app's run: defined while it is observed in other apps
        returned = staticmethod(lambda result: {"best": result})

    outcome = outcome_of(
        server(lambda grid: Keeps().start(grid, ZERO, NUM_ROUNDS, evaluate)),
        client_app({"train_loss": 2.0}),
    )
    assert [entry["train"] for entry in outcome["rounds"]] == [
        {"own_loss": 1.0 / number} for number in (1, 2, 3)
    ]
    assert values_of(outcome, "final_accuracy", "weights_sha256") == [0.3, final_arrays(3.0)]


def test_progress_has_what_the_result_of_the_round_has() -> None:
    seen: list[dict[str, Any]] = []
    outcome = outcome_of(
        by_flower(FedAvg, evaluate_fn=evaluate),
        client_app({"train_loss": 2.0}, {"eval_loss": 3.0}),
        on_round=seen.append,
    )
    keys = ("round", "train", "evaluate", "server", "virtual_s")
    assert [{key: entry.get(key) for key in keys} for entry in seen] == [
        {key: entry.get(key) for key in keys} for entry in outcome["rounds"]
    ]


def test_a_class_that_the_app_makes_while_it_runs_is_observed_and_flower_is_as_before() -> None:
    def main(grid: Grid) -> None:
        class Late(OwnStart):
            def start(self, grid: Grid, arrays: ArrayRecord) -> Any:
                return super().start(grid, arrays, 1, evaluate)

        Late().start(grid, ZERO)

    parts = {part: dict(vars(part)) for part in (Strategy, FedAvg, Result, History, flower_server)}
    outcome = outcome_of(server(main), client_app({}))
    assert outcome["final_accuracy"] == 0.1
    assert parts == {part: dict(vars(part)) for part in parts}


@pytest.mark.parametrize(
    "make",
    [
        FedAvg,
        CallsFlowers,
        lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 100.0, 4),
    ],
)
def test_wrapped_starts_have_the_rounds_of_flowers(make: Callable[[], Strategy]) -> None:
    outcome = outcome_of(
        by_flower(make, evaluate_fn=evaluate), client_app({"train_loss": 2.0}, {"eval_loss": 3.0})
    )
    assert [entry["round"] for entry in outcome["rounds"]] == [0, 1, 2, 3]
    assert values_of(outcome, "final_accuracy", "final_loss") == [0.3, 3.0]
    assert outcome["weights_sha256"] == final_arrays(3.0) and outcome["unknown"] == {}


def test_phases_inside_a_start_are_one_training() -> None:
    outcome = outcome_of(server(lambda grid: StartsTwice().start(grid, ZERO)), client_app({}))
    assert outcome["weights_sha256"] == final_arrays(3.0)
    assert [entry["round"] for entry in outcome["rounds"]] == [1, 2]


def test_regression_metrics_are_no_accuracy_and_the_reason_names_them() -> None:
    outcome = outcome_of(by_flower(FedAvg), client_app({"mse": 4.0}, {"rmse": 2.0, "mae": 1.0}))
    assert values_of(outcome, "final_accuracy", "final_loss") == [None, None]
    assert outcome["unknown"]["final_accuracy"].endswith(
        "is called acc or accuracy: it has rmse, mae"
    )
    assert outcome["unknown"]["final_loss"].endswith("is called loss: it has rmse, mae")


def test_an_app_that_skips_evaluation_says_so() -> None:
    outcome = outcome_of(
        by_flower(lambda: FedAvg(fraction_evaluate=0.0)), client_app({"loss": 4.0})
    )
    assert outcome["unknown"] == dict.fromkeys(
        ("final_accuracy", "final_loss"), "the app evaluates nothing, on the server or at clients"
    )
    assert [entry["loss"] for entry in outcome["rounds"]] == [4.0] * 3
    ((claim,), _) = check_app_claims(parse_claims(["loss<=4"]), {**outcome, "wall_s": 1.0})
    assert claim["holds"]


def test_a_loop_of_its_own_has_no_weights_and_no_strategy() -> None:
    def main(grid: Grid) -> None:
        for _ in range(2):
            grid.send_and_receive(
                [
                    Message(RecordDict({"arrays": ZERO}), node, "train")
                    for node in grid.get_node_ids()
                ]
            )

    outcome = outcome_of(server(main), client_app({"train_loss": 1.0, "socflower-group": 3.0}))
    assert values_of(outcome, "strategy", "weights_sha256") == [None, None]
    assert {"strategy", "weights_sha256"} <= set(outcome["unknown"])
    assert [entry["train"] for entry in outcome["rounds"]] == [
        {"train_loss": 1.0}
    ] * 2  # and no key of ours


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "in round 3 its accuracy is nan"),
        (float("inf"), "in round 3 its accuracy is inf"),
        (95.5, "in round 3 its accuracy is 95.5, which is no share from 0 to 1"),
    ],
)
def test_an_accuracy_that_cannot_be_one_is_unknown(value: float, reason: str) -> None:
    outcome = outcome_of(
        by_flower(
            lambda: FedAvg(fraction_evaluate=0.0),
            evaluate_fn=lambda number, _: MetricRecord({"accuracy": 0.5 if number < 3 else value}),
        ),
        client_app({}),
    )
    assert outcome["final_accuracy"] is None and outcome["unknown"]["final_accuracy"] == reason
    assert [entry["accuracy"] for entry in outcome["rounds"]] == [0.5, 0.5, 0.5, None]
    json.dumps(outcome, allow_nan=False)
    finite = abs(value) < 1e9
    assert outcome["rounds"][-1]["server"]["accuracy"] == (value if finite else None)
    assert outcome["notes"] == (
        []
        if finite
        else [
            f"1 metric not finite, and null in the rounds; first server/accuracy in round 3: {value}"
        ]
    )
    for claim in ("accuracy>=0.1", "accuracy<=100"):
        ((checked,), (note,)) = check_app_claims(parse_claims([claim]), {**outcome, "wall_s": 1.0})
        assert not checked["holds"] and note == f"--expect accuracy: {reason}"


def test_a_metric_is_named_by_the_fewest_words() -> None:
    entry = {
        "server": {
            "top5_accuracy": 0.9,
            "accuracy": 0.5,
            "loss_scale": 8.0,
            "eval_loss": 1.0,
            "l1_loss_x": 2.0,
        }
    }
    assert named("accuracy", entry, ("server",)) == 0.5
    assert (
        named("loss", {"train": {"my_cross_loss": 3.0, "train_loss": 2.0}}, ("server", "train"))
        == 2.0
    )


def test_messages_without_a_price_are_no_zeros() -> None:
    def main(grid: Grid) -> None:
        ids = grid.push_messages(
            [Message(RecordDict({"arrays": ZERO}), node, "train") for node in grid.get_node_ids()]
        )
        assert len(list(grid.pull_messages(ids))) == 4

    outcome = outcome_of(server(main), client_app({"train_loss": 1.0}))
    assert values_of(outcome, "virtual_s", "energy_j", "bytes") == [None] * 3
    assert values_of(outcome["rounds"][0], "virtual_s", "energy_j", "bytes") == [None] * 3
    assert (
        outcome["unknown"]["virtual_s"]
        == outcome["unknown"]["bytes"]
        == (
            "the app pushes its messages and pulls the replies, which has no price: call send_and_receive"
        )
    )
    for claim in ("virtual_s<=1", "hub_bytes<=1", "energy_j<=1"):
        ((checked,), _) = check_app_claims(parse_claims([claim]), {**outcome, "wall_s": 1.0})
        assert (checked["observed"], checked["holds"]) == (None, False)


def test_threads_take_turns_and_a_note_says_so() -> None:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    def main(grid: Grid) -> None:
        nodes = list(grid.get_node_ids())
        together = Barrier(len(nodes))

        def ask(node: int) -> int:
            together.wait(timeout=30.0)
            return len(
                list(grid.send_and_receive([Message(RecordDict({"arrays": ZERO}), node, "train")]))
            )

        with ThreadPoolExecutor(len(nodes)) as pool:
            assert list(pool.map(ask, nodes)) == [1, 1, 1, 1]

    outcome = outcome_of(server(main), client_app({"train_loss": 1.0}))
    assert outcome["notes"] == [
        "the app exchanges messages in 4 threads; virtual time is that of one exchange after "
        "the other"
    ]


def test_events_that_name_no_round_are_in_the_last_one() -> None:
    def main(grid: Grid) -> None:
        first, *_ = grid.get_node_ids()
        for kind in ("train", "query"):
            grid.send_and_receive([Message(RecordDict({"arrays": ZERO}), first, kind)])

    outcome = outcome_of(server(main), client_app({}))
    assert outcome["rounds"][-1]["events"] == outcome["events"]
    assert [event["kind"] for event in outcome["events"]] == ["no-client"]
