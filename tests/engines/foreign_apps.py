"""Runs apps that know nothing of socflower in this process, and returns the app's part of `result.json`."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from socflower.cluster import parse_cluster
from socflower.engines.app_metrics import OnRound, RoundLog
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.run_app import run_app
from socflower.scenario.app.own_app import app_outcome, training_profile
from socflower.sim import EventClock

CLUSTER = parse_cluster({"boards": 1, "socs_per_board": 4, "device": "raspberry-pi-4b"})
ZERO = ArrayRecord({"x": Array(np.zeros(3, np.float32))})


def outcome_of(
    server_app: ServerApp,
    client_app: ClientApp,
    *,
    training_flops: float | None = 1e9,
    on_round: OnRound = lambda entry: None,
) -> dict[str, Any]:
    clock, messages = EventClock(CLUSTER), MessageLog()
    rounds = RoundLog(clock, on_round)
    run_app(
        server_app,
        client_app,
        cluster=CLUSTER,
        num_workers=0,
        clock=clock,
        messages=messages,
        rounds=rounds,
        model_profile=training_profile(training_flops),
    )
    return app_outcome(clock, messages, rounds)


def client_app(train: dict[str, float], evaluate: dict[str, float] | None = None) -> ClientApp:
    """Return a ClientApp that adds 1 to the model, and answers with these metrics."""
    app = ClientApp()

    @app.train()
    def on_train(message: Message, context: Any) -> Message:
        (record,) = message.content.array_records.values()
        arrays = ArrayRecord({name: Array(array.numpy() + 1) for name, array in record.items()})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 8, **train})}),
            reply_to=message,
        )

    @app.evaluate()
    def on_evaluate(message: Message, context: Any) -> Message:
        return Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 8, **(evaluate or {})})}),
            reply_to=message,
        )

    return app
