"""`plan` of app folders: the plan is that of the run, nothing is trained, and what is missing is said."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from socflower.scenario.app_folder import AppRun, run_app_folder
from socflower.scenario.app_planning import plan_app_folder
from tests.one_line import refused

PROJECT = """
[tool.flwr.app.components]
serverapp = "{name}_server:app"
clientapp = "{name}_client:app"
[tool.flwr.app.config]
profile = true
groups = 2
then = "start"
"""
SERVER = """
    import torch
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as Private, FedAvg
    from socflower import Costs, GroupGrid, SoCFlow, TrainingSchedule, load_cluster, profile_module

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config, model = context.run_config, torch.nn.Linear(4, 2)
        strategy = SoCFlow(
            cluster=load_cluster("CLUSTER"), groups=config["groups"],
            schedule=TrainingSchedule(num_samples=64, batch_size=8, num_epochs=2, interval_epochs=0.5),
            costs=Costs(model_profile=profile_module(model, (4,), "linear")) if config["profile"] else Costs())
        rounds, arrays = strategy.num_rounds, ArrayRecord(model.state_dict())
        if config["then"] == "sends":
            grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])
        if config["then"] == "returns":
            return
        if config["then"] == "exits":
            raise SystemExit(0)
        if config["then"] == "fedavg":
            strategy = FedAvg()
        if config["then"] == "private":
            strategy = Private(strategy, 0.0, 1.0, 2)
        try:
            strategy.start(GroupGrid(grid), arrays, num_rounds=rounds + (config["then"] == "too many"))
        except Exception:
            raise
"""
CLIENT = """
    import torch
    from socflower import FP32Trainer, make_client_app, sgd

    def data(context, partition_id, num_partitions):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 4, generator=generator)[partition_id::num_partitions]
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

    app = make_client_app(lambda context: torch.nn.Linear(4, 2), data, trainer=FP32Trainer(
        optimizer=sgd(0.1)))
"""
CLUSTER = "[cluster]\nboards = 2\nsocs_per_board = 2\n"


def app(folder: Path, name: str) -> tuple[Path, Path]:
    """Write an app whose modules have names that no other test imports."""
    folder /= name
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name))
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / f"{name}_server.py").write_text(
        textwrap.dedent(SERVER).replace("CLUSTER", str(folder / "cluster.toml"))
    )
    (folder / f"{name}_client.py").write_text(textwrap.dedent(CLIENT))
    return folder, folder / "cluster.toml"


def ran(folder: Path, cluster: Path, out: Path, override: str, **settings: Any) -> list[float]:
    """Return the seconds and joules of an epoch of a run."""
    app = AppRun(
        folder=folder, cluster_file=cluster, num_workers=0, overrides=(override,), **settings
    )
    result = run_app_folder(app, out)
    return [result["virtual_s"] / 2, result["energy_j"] / 2]


def planned(document: dict[str, Any]) -> list[float]:
    return [document["predicted"][key] for key in ("epoch_s", "epoch_energy_j")]


@pytest.mark.parametrize("groups", [2, 3])
def test_the_plan_predicts_the_virtual_time_and_energy_of_the_run(
    tmp_path: Path, groups: int
) -> None:
    folder, cluster = app(tmp_path, f"planned_{groups}")
    override = f"groups={groups}"
    _, document = plan_app_folder(folder, cluster, [override])
    assert len(document["groups"]) == groups
    measured = ran(folder, cluster, tmp_path / "out", override)
    assert planned(document) == pytest.approx(measured, rel=1e-9)


@pytest.mark.slow
def test_training_flops_price_a_strategy_without_a_profile_and_a_note_says_what_is_missing(
    tmp_path: Path,
) -> None:
    folder, cluster = app(tmp_path, "flops")
    unpriced = "profile=false"
    _, without = plan_app_folder(folder, cluster, [unpriced])
    assert without["predicted"] is None and len(without["groups"]) == 2
    assert "--training-flops" in without["notes"][0]
    _, priced = plan_app_folder(folder, cluster, [unpriced], 1e6)
    assert priced["model"]["training_flops"] == pytest.approx(1e6)
    assert priced["model"]["weight_bytes"] == (4 * 2 + 2) * 4
    measured = ran(folder, cluster, tmp_path / "out", unpriced, training_flops=1e6)
    assert planned(priced) == pytest.approx(measured, rel=1e-9)
    _, dearer = plan_app_folder(folder, cluster, [unpriced], 1e9)
    assert planned(dearer)[0] > planned(priced)[0]
    _, own = plan_app_folder(folder, cluster, (), 1e9)
    assert "--training-flops was not needed" in own["notes"][0]


def test_a_strategy_inside_differential_privacy_is_planned(tmp_path: Path) -> None:
    folder, cluster = app(tmp_path, "private")
    assert (
        plan_app_folder(folder, cluster, ["then=private"])[1] == plan_app_folder(folder, cluster)[1]
    )


@pytest.mark.parametrize(
    ("then", "named"),
    [
        ("sends", "query messages"),
        ("returns", "message API"),
        ("exits", "sys.exit(0)"),
        ("fedavg", "FedAvg"),
        ("too many", "num_rounds = 5, and the plan has 4"),
    ],
)
def test_an_app_without_a_plan_is_told_why(tmp_path: Path, then: str, named: str) -> None:
    folder, cluster = app(tmp_path, "no_plan_" + then.replace(" ", "_"))
    refused(lambda: plan_app_folder(folder, cluster, [f"then={then}"]), named)
