"""App folders with a mistake in their data, loss, model or arithmetic: one line each, or a note in the result."""

import json
import logging
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.command_line import Ran, Socflower

PROJECT = """
    [tool.flwr.app]
    publisher = "somebody"
    [tool.flwr.app.components]
    serverapp = "points_server:app"
    clientapp = "points_client:app"
    [tool.flwr.app.config]
    mistake = "none"
    strategy = "groups"
    priced = "fp32"
    trainer = "fp32"
"""
CLIENT = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, default_collate
    from socflower import FP32Trainer, Int8Trainer, MixedPrecisionTrainer, make_client_app

    def model(context):
        own_base = context.run_config["mistake"] == "base" and context.node_config.get("partition-id", 0)
        torch.manual_seed(2 if own_base else 1)
        base = nn.Linear(8, 8).requires_grad_(context.run_config["mistake"] != "base")
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), base, nn.ReLU(), nn.Linear(8, 3))

    def data(context, partition_id, num_partitions):
        mistake = context.run_config["mistake"]
        length = 24 - 4 * context.node_config["partition-id"] if mistake == "length" else 24
        inputs = torch.randn(24, 1, 2, 4, generator=torch.Generator().manual_seed(3))[:length]
        mine = slice(partition_id, None, num_partitions)

        def collate(samples):
            if mistake == "collate":
                raise ValueError("no mask token")
            return default_collate(samples)

        return DataLoader(TensorDataset(inputs[mine], (torch.arange(length) % 3)[mine]), collate_fn=collate)

    def trainer(context):
        def loss(outputs, labels):
            found = nn.functional.cross_entropy(outputs, labels)
            return found * float("nan") if context.run_config["mistake"] == "nan" else found
        return {"int8": Int8Trainer, "mixed": MixedPrecisionTrainer}.get(
            context.run_config["trainer"], lambda: FP32Trainer(loss=loss))()

    app = make_client_app(model, data, trainer)
"""
SERVER = """
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from points_client import model
    from socflower import (Costs, GroupGrid, Int8Pricing, MixedPricing, SoCFlow, TrainingSchedule, load_cluster,
                           frozen_digest, profile_module, trainable_state)

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config, server_model = context.run_config, model(context)
        arrays = ArrayRecord(trainable_state(server_model))
        frozen = ConfigRecord({"frozen-sha256": frozen_digest(server_model)} if config["mistake"] == "base" else {})
        if config["strategy"] == "fedavg":
            FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=2, train_config=frozen)
            return
        pricing = {"int8": Int8Pricing(), "mixed": MixedPricing()}.get(config["priced"])
        costs = Costs(model_profile=profile_module(server_model, (1, 2, 4), "points"),
                      **({} if pricing is None else {"pricing": pricing}))
        strategy = SoCFlow(cluster=load_cluster(CLUSTER), groups=2, costs=costs,
                           schedule=TrainingSchedule(num_samples=24, batch_size=4, num_epochs=1, interval_epochs=1))
        strategy.start(GroupGrid(grid), arrays, num_rounds=strategy.num_rounds, train_config=frozen)
"""
Run: TypeAlias = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, socflower: Socflower, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the app with these values of its run config."""
    monkeypatch.setattr(
        logging, "raiseExceptions", False
    )  # Flower's handler writes to a stream of an earlier test
    app, rack = tmp_path / "points", tmp_path / "rack.toml"
    app.mkdir()
    rack.write_text("[cluster]\nboards = [2, 2]\n", "utf-8")
    for name, text in (
        ("pyproject.toml", PROJECT),
        ("points_client.py", CLIENT),
        ("points_server.py", SERVER),
    ):
        (app / name).write_text(textwrap.dedent(text).replace("CLUSTER", repr(str(rack))), "utf-8")

    def run_with(**config: str) -> Ran:
        settings = [
            option for key, value in config.items() for option in ("--set", f"{key}={value}")
        ]
        command = f"run points --cluster {rack} --out out --workers 0 --json --training-flops 1e6"
        return socflower(command, *settings)

    return run_with


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("strategy", "mistake", "named"),
    [
        ("groups", "length", "16 samples, but the strategy was told num_samples = 24"),
        ("groups", "collate", "no mask token (points_client.py, line 22)"),
        ("fedavg", "collate", "no mask token (points_client.py, line 22)"),
        ("groups", "nan", "learning rate"),
        ("fedavg", "nan", "1.weight first"),
        ("groups", "base", "frozen parameters"),
    ],
)
def test_a_mistake_of_clients_is_one_line(
    run: Run, tmp_path: Path, strategy: str, mistake: str, named: str
) -> None:
    ended = run(mistake=mistake, strategy=strategy)
    *_, last = ended.err.splitlines()
    assert ended.status == 1 and last.startswith("error: ") and named in last, ended.err
    assert ended.out == "" and not (tmp_path / "out").exists()


def test_a_mistake_of_some_clients_is_an_event_where_the_strategy_goes_on(run: Run) -> None:
    """FedAvg averages the models of those that are left."""
    ended = run(mistake="base", strategy="fedavg")
    events = json.loads(ended.out)["events"]
    assert ended.status == 0 and [event["kind"] for event in events] == ["client-failed"] * 2
    assert "3 of 4 train messages failed; first cause: SoC 1" in events[0]["text"]
    assert "the frozen parameters of this node are not the server's" in events[0]["text"]


@pytest.mark.parametrize(
    ("strategy", "trainer", "priced"),
    [
        pytest.param("groups", "fp32", "fp32", marks=pytest.mark.slow),
        ("groups", "int8", "int8"),
        ("fedavg", "int8", "fp32"),
        pytest.param("groups", "mixed", "fp32", marks=pytest.mark.slow),
        ("groups", "fp32", "int8"),
    ],
)
def test_training_in_another_arithmetic_than_the_priced_one_is_a_note(
    run: Run, strategy: str, trainer: str, priced: str
) -> None:
    ended = run(strategy=strategy, trainer=trainer, priced=priced)
    assert ended.status == 0, ended.err
    result = json.loads(ended.out)
    assert (result["trained_in"], result["priced_in"]) == ([trainer], priced)
    notes = [each for each in result["notes"] if "trained in" in each]
    difference = f"trained in {trainer}, but time and energy are those of {priced}"
    assert [difference in each for each in notes] == [True] * (trainer != priced)
