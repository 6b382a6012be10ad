"""Outer strategies and the evaluation by nodes on every engine: rings of processes, and Flower's simulation."""

import json
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.run_app import load_flower_app, run_app
from socflower.strategies.group_grid import GroupGrid
from socflower.training.fp32 import FP32Trainer, sgd
from tests.one_line import refused
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app
from tests.strategies.fake_messages import model
from tests.strategies.test_around import RingNodes, private, socflow

APP = {
    "pyproject.toml": """\
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "evaluating"
        version = "1.0.0"
        description = "Server momentum over groups, evaluated by nodes."
        license = "Apache-2.0"
        dependencies = ["flwr>=1.41"]

        [tool.hatch.build.targets.wheel]
        packages = ["."]

        [tool.flwr.app]
        publisher = "tests"

        [tool.flwr.app.components]
        serverapp = "evaluating.server_app:app"
        clientapp = "evaluating.client_app:app"

        [tool.flwr.app.config]
        out = ""
        """,
    "evaluating/__init__.py": "",
    "evaluating/task.py": """\
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        def network(context=None):
            torch.manual_seed(4)
            return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(12, 2))

        def samples(context, partition, num_partitions):
            inputs = torch.randn((120, 1, 3, 4), generator=torch.Generator().manual_seed(7))
            labels = (inputs.flatten(1)[:, 0] > 0).long()
            own = torch.arange(partition, 120, num_partitions)
            return TensorDataset(inputs[own], labels[own])
        """,
    "evaluating/client_app.py": """\
        from functools import partial

        import torch
        from evaluating.task import network, samples
        from socflower import FP32Trainer, make_client_app

        app = make_client_app(network, samples, FP32Trainer(optimizer=partial(torch.optim.SGD, lr=0.2)),
                              evaluate_data_fn=samples)
        """,
    "evaluating/server_app.py": """\
        import json
        from hashlib import sha256
        from pathlib import Path

        from evaluating.task import network
        from flwr.app import ArrayRecord
        from flwr.serverapp import ServerApp
        from flwr.serverapp.strategy import FedAvgM
        from socflower import GroupGrid, SoCFlow, TrainingSchedule, parse_cluster

        app = ServerApp()

        @app.main()
        def main(grid, context):
            strategy = SoCFlow(
                cluster=parse_cluster({"boards": [2, 2]}), groups=2,
                outer=FedAvgM(server_momentum=0.5, fraction_evaluate=0.5),
                schedule=TrainingSchedule(num_samples=120, batch_size=12, num_epochs=2, interval_epochs=1))
            result = strategy.start(
                GroupGrid(grid), ArrayRecord(network().state_dict()), num_rounds=strategy.num_rounds)
            Path(context.run_config["out"]).write_text(json.dumps({
                "weights": {name: sha256(array.numpy().tobytes()).hexdigest() for name, array in result.arrays.items()},
                "metrics": {number: dict(metrics) for number, metrics in result.evaluate_metrics_clientapp.items()},
                "events": [event.text for report in strategy.reports for event in report.events]}))
        """,
}


def write_app(folder: Path) -> Path:
    for name, text in APP.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_simulation_has_the_weights_and_the_metrics_of_the_local_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="flwr run needs socflower[simulation]")
    from socflower.engines.simulation import flower_environment, running_superlink

    folder = write_app(tmp_path / "app")
    loaded = load_flower_app(folder)
    run_app(
        loaded.server_app,
        loaded.client_app,
        cluster=parse_cluster({"boards": [2, 2]}),
        num_workers=0,
        run_config={"out": str(tmp_path / "local.json")},
    )
    environment = flower_environment(tmp_path)
    with running_superlink(tmp_path, environment):
        ran = subprocess.run(
            [
                shutil.which("flwr", path=environment["PATH"]) or "flwr",
                "run",
                str(folder),
                "scenario",
                "--stream",
                "--run-config",
                f'out="{tmp_path / "simulated.json"}"',
                "--federation-config",
                "num-supernodes=4 client-resources-num-cpus=1",
            ],
            capture_output=True,
            text=True,
            timeout=500.0,
            cwd=tmp_path,
            env=dict(environment),
            check=False,
        )
    assert (tmp_path / "simulated.json").exists(), ran.stdout[-3000:] + ran.stderr[-1000:]
    simulated, local = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("simulated", "local")
    )
    assert set(local["metrics"]) == {"1", "2"} and local["events"] == []
    assert simulated == local


# --------------------------------------------------------------------------------------------------- rings of processes
def evaluating() -> ClientApp:
    return make_client_app(
        lambda context: ring_app.network(norm=True),
        ring_app.part,
        FP32Trainer(optimizer=sgd(0.05)),
        evaluate_data_fn=ring_app.part,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [lambda: FedAvgM(server_momentum=0.5), lambda: FedAdam(eta=0.01)])
def test_rings_take_the_outer_step_and_evaluate_as_groups_in_one_process(make: Any) -> None:
    results = []
    for real in (False, True):
        strategy = ring_app.strategy(ring_app.cluster(), outer=make())
        nodes = ring_app.node_configs(ring_app.cluster())
        with (
            ProcessGrid(evaluating, nodes)
            if real
            else LocalGrid(evaluating(), 4, num_workers=0) as grid
        ):
            results.append(
                strategy.start(
                    GroupGrid(grid),
                    ring_app.initial(norm=True),
                    num_rounds=strategy.num_rounds,
                    timeout=120,
                )
            )
        assert [report.events for report in strategy.reports] == [(), ()]
        assert strategy.method.describe().transports()["inside groups"] == (
            "gloo" if real else "in process"
        )
    local, rings = results
    for name in local.arrays:
        np.testing.assert_allclose(
            rings.arrays[name].numpy(), local.arrays[name].numpy(), atol=2e-3
        )
    assert rings.evaluate_metrics_clientapp[2]["loss"] == pytest.approx(
        local.evaluate_metrics_clientapp[2]["loss"], abs=1e-2
    )


def test_fedprox_is_refused_in_rings_before_anything_is_trained() -> None:
    grid, strategy = RingNodes(), socflow(outer=FedProx(proximal_mu=0.1))
    refused(lambda: strategy.start(grid, model(), num_rounds=2), "FedProx")
    assert grid.trained == []
    with pytest.raises(AssertionError, match="sent"):
        socflow(outer=FedProx(proximal_mu=0.0)).start(GroupGrid(grid), model(), num_rounds=2)


def test_integers_are_refused_in_rings_under_clipping_before_anything_is_trained() -> None:
    grid = RingNodes()
    refused(
        lambda: private(socflow(outer=FedAvg())).start(
            grid, ring_app.initial(norm=True), num_rounds=2
        ),
        "1.num_batches_tracked",
    )
    assert grid.trained == []


def test_clients_name_the_buffers_of_their_model() -> None:
    seen: list[dict[str, Any]] = []

    class Noting(GroupGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)
            seen.extend(dict(reply.content.config_records) for reply in replies)
            return replies

    strategy = ring_app.strategy(ring_app.cluster(), num_epochs=1)
    with LocalGrid(evaluating(), 4, num_workers=0) as grid:
        result = strategy.start(Noting(grid), ring_app.initial(norm=True), num_rounds=1)
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [dict(records["socflower-untrained"]) for records in seen] == [{"names": names}] * 2
    assert isinstance(result.arrays, ArrayRecord) and set(names) < set(result.arrays)
