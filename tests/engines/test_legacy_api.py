"""Apps of Flower's API before messages: `NumPyClient`, `ServerAppComponents`, workflows, `History`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg as NewFedAvg

from socflower.errors import TrainingFailed
from tests.engines.foreign_apps import CLUSTER, ZERO, client_app, outcome_of
from tests.one_line import refused

NUM_ROUNDS = 3
Outcome = dict[str, Any]


class Numbers(NumPyClient):
    """A client whose model is a list of arrays, and whose metrics are those of its partition."""

    def __init__(self, own: int) -> None:
        self.own = own

    def fit(self, parameters: Any, config: Any) -> Any:
        return (
            [array + self.own + 1 for array in parameters],
            self.own + 1,
            {"own": float(self.own), "name": "text"},
        )

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(self.own), self.own + 1, {"accuracy": self.own / 10}


class OnlyEvaluates(NumPyClient):
    """A client without `fit`."""

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 1.0, 1, {"accuracy": 0.5}


def numpy_app(kind: type = Numbers, **settings: Any) -> ClientApp:
    return ClientApp(
        lambda context: (
            kind(context.node_config["partition-id"]) if kind is Numbers else kind()
        ).to_client(),
        **settings,
    )


def strategy(**settings: Any) -> FedAvg:
    return FedAvg(initial_parameters=ndarrays_to_parameters([np.zeros(3, np.float32)]), **settings)


def largest(metrics: Any) -> dict[str, float]:
    return {"accuracy": max(each["accuracy"] for _, each in metrics)}


def on_server(server_round: int, parameters: Any, config: Any) -> Any:
    return float(server_round), {"level": float(parameters[0][0])}


def components(**settings: Any) -> ServerApp:
    return ServerApp(
        server_fn=lambda context: ServerAppComponents(
            strategy=strategy(**settings), config=ServerConfig(num_rounds=NUM_ROUNDS)
        )
    )


def workflow(fit: Callable[[], Any] | None = None, **settings: Any) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Context) -> None:
        legacy = LegacyContext(
            context=context,
            config=ServerConfig(num_rounds=NUM_ROUNDS),
            strategy=strategy(**settings),
        )
        DefaultWorkflow(fit_workflow=None if fit is None else fit())(grid, legacy)

    return app


def secure() -> Any:
    return SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)


@pytest.mark.parametrize(
    ("server_app", "mods"),
    [
        (components, []),
        (workflow, []),
        (lambda **settings: workflow(secure, **settings), [secaggplus_mod]),
    ],
)
def test_rounds_and_metrics_are_those_of_the_apps_history(
    server_app: Callable[..., ServerApp], mods: Any
) -> None:
    outcome = outcome_of(
        server_app(evaluate_metrics_aggregation_fn=largest, evaluate_fn=on_server),
        numpy_app(mods=mods),
    )
    assert [entry["round"] for entry in outcome["rounds"]] == [0, 1, 2, 3]
    first, *others = outcome["rounds"]
    assert first["server"] == {"loss": 0.0, "level": 0.0} and "train" not in first
    weights = np.arange(1, 5)
    for entry in others:
        assert entry["evaluate"] == {
            "loss": pytest.approx(np.average(range(4), weights=weights)),
            "accuracy": 0.3,
        }
        assert entry["server"]["loss"] == entry["round"] == entry["loss"]
        # Flower's FedAvg has no aggregate of these, so that they are the replies' means.
        assert entry["train"] == {"own": pytest.approx(np.average(range(4), weights=weights))}
    assert outcome["final_accuracy"] == 0.3 and outcome["final_loss"] == NUM_ROUNDS
    assert set(outcome["unknown"]) == {"strategy", "weights_sha256"}
    assert all("Flower's message API" in reason for reason in outcome["unknown"].values())
    assert outcome["trained_on"] == {"unknown": [0, 1, 2, 3]}
    assert outcome["events"] == outcome["notes"] == []


def test_a_round_takes_as_long_as_that_of_the_same_app_on_messages() -> None:
    """All clients train at the same time, though Flower's server sends each message from a thread of its own."""

    class Eight(Numbers):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [array + 1 for array in parameters], 8, {}

    def numbers(context: Context) -> Any:
        return Eight(0).to_client()

    new = ServerApp()

    @new.main()
    def main(grid: Any, context: Context) -> None:
        NewFedAvg().start(grid, ZERO, num_rounds=NUM_ROUNDS)

    legacy = outcome_of(components(fraction_evaluate=1.0), ClientApp(numbers))
    messages = outcome_of(new, client_app({}, {"loss": 1.0}))
    busy = {kind: messages["breakdown"]["soc_seconds"][kind] for kind in ("compute",)}
    assert busy["compute"] > 0
    assert {kind: legacy["breakdown"]["soc_seconds"][kind] for kind in busy} == pytest.approx(busy)
    # Its arrays have a header each, which takes some more bytes.
    assert legacy["virtual_s"] == pytest.approx(messages["virtual_s"], rel=0.02)
    assert CLUSTER.num_socs == 4


def test_an_app_behaves_as_without_being_observed() -> None:
    """The history and the model are Flower's own."""
    seen: list[Any] = []

    class Kept(FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            found = super().aggregate_fit(server_round, results, failures)
            assert found[0] is not None and not failures
            seen.append(
                (parameters_to_ndarrays(found[0])[0][0], [proxy.node_id for proxy, _ in results])
            )
            return found

    app = ServerApp(
        server_fn=lambda context: ServerAppComponents(
            strategy=Kept(initial_parameters=ndarrays_to_parameters([np.zeros(3)])),
            config=ServerConfig(num_rounds=2),
        )
    )
    outcome_of(app, numpy_app())
    assert [level for level, _ in seen] == pytest.approx([3.0, 6.0])
    assert all(sorted(nodes) == [1000, 1001, 1002, 1003] for _, nodes in seen)


def test_a_client_without_fit_is_the_first_cause() -> None:
    refused(
        lambda: outcome_of(components(), numpy_app(OnlyEvaluates)),
        "no client succeeded",
        "fit",
        error=TrainingFailed,
    )


def test_differential_privacy_around_a_strategy_changes_no_round() -> None:
    app = ServerApp(
        server_fn=lambda context: ServerAppComponents(
            strategy=DifferentialPrivacyServerSideFixedClipping(strategy(), 0.0, 10.0, 4),
            config=ServerConfig(num_rounds=NUM_ROUNDS),
        )
    )
    outcome = outcome_of(app, numpy_app())
    assert [entry["round"] for entry in outcome["rounds"]] == [1, 2, 3]


@pytest.mark.parametrize("made", [components, workflow])
def test_a_strategy_that_would_wait_for_clients_without_end_is_refused(
    made: Callable[..., ServerApp],
) -> None:
    refused(lambda: outcome_of(made(min_available_clients=5), numpy_app()), "min_available_clients")
