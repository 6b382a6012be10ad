"""Flower's PyTorch quickstart, written afresh and converted as docs/guides/groups.md says, on every engine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from socflower.cli import main as cli
from socflower.cluster.cluster_file import load_cluster
from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network
from socflower.engines.deployment.superlink import CONNECTION, local_flower
from socflower.engines.local.run_app import load_flower_app, run_app
from socflower.scenario.app.deployed import node_configs
from socflower.scenario.schema.file import parse_scenario

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "docs" / "examples" / "pytorch_quickstart"
RACK, BEFORE, AFTER = QUICKSTART / "rack.toml", QUICKSTART / "before", QUICKSTART / "after"
DATA = Path(os.environ.get("SOCFLOWER_DATA", ROOT.parent / "shared" / "data"))
Weights = Mapping[str, Tensor]


def weights_of(path: Path) -> Weights:
    return torch.load(path, weights_only=True)


def run_here(app: Path, final_model: Path, **config: object) -> Weights:
    """Return the weights after the app has run in this process."""
    loaded = load_flower_app(app)
    run_app(loaded.server_app, loaded.client_app, cluster=load_cluster(RACK), num_workers=0,
            run_config={**loaded.run_config, "final-model": str(final_model),
                        **{key.replace("_", "-"): value for key, value in config.items()}})
    return weights_of(final_model)


def flwr_run(
    environment: Mapping[str, str], connection: str, final_model: Path, *options: str,
    network: Network = MACHINE_NETWORK,
) -> str:
    """Submit the converted app with Flower's own command and return what it printed."""
    command = shutil.which("flwr", path=environment["PATH"]) or "flwr"
    ran = subprocess.run(
        network.command([command, "run", str(AFTER), connection, "--stream", "--run-config",
                         f'final-model="{final_model}"', *options]),
        capture_output=True, text=True, timeout=500.0, cwd=final_model.parent, env=dict(environment), check=False)
    assert final_model.exists(), ran.stdout[-3000:] + ran.stderr[-1000:]
    return ran.stdout


def assert_equal(ours: Weights, reference: Weights) -> None:
    assert list(ours) == list(reference)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in ours.items())


def accuracies(printed: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("round ")]


def test_it_learns_on_the_local_engine_by_a_call_and_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    called = run_here(AFTER, tmp_path / "called.pt")
    printed = capsys.readouterr().out
    assert len(accuracies(printed)) == 4
    assert accuracies(printed)[-1] > 0.9
    assert "gradients inside groups: in process" in printed
    monkeypatch.setattr(sys, "argv", [
        "socflower", "run", str(AFTER), "--cluster", str(RACK), "--workers", "0", "--out", str(tmp_path / "out"),
        "--set", f'final-model="{tmp_path / "command.pt"}"'])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert_equal(weights_of(tmp_path / "command.pt"), called)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_before_its_conversion_it_learns_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(BEFORE, tmp_path / "model.pt", num_server_rounds=8)
    assert accuracies(capsys.readouterr().out)[-1] > 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_simulation_ends_with_the_local_engines_weights(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="flwr run needs socflower[simulation]")
    from socflower.engines.simulation import flower_environment, running_superlink

    environment = flower_environment(tmp_path)
    with running_superlink(tmp_path, environment):
        printed = flwr_run(environment, "scenario", tmp_path / "simulated.pt", "--federation-config",
                           "num-supernodes=4 client-resources-num-cpus=1")
    assert accuracies(printed)[-1] > 0.9
    assert_equal(weights_of(tmp_path / "simulated.pt"), run_here(AFTER, tmp_path / "local.pt"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rings_of_supernodes_end_with_nearly_the_same_weights(tmp_path: Path) -> None:
    """They sum the same gradients, in another order."""
    tables = {"cluster": {"boards": [2, 2]}, "strategy": {"groups": 2}}
    rack = parse_scenario(tables, name="rack", question="", where="rack")
    (tmp_path / "flower").mkdir()
    with local_flower(tmp_path / "flower", node_configs(rack), print) as flower:
        printed = flwr_run(flower.environment, CONNECTION, tmp_path / "rings.pt", network=flower.network)
    assert accuracies(printed)[-1] > 0.9
    assert "gradients inside groups: gloo" in printed
    local = run_here(AFTER, tmp_path / "local.pt")
    for name, tensor in weights_of(tmp_path / "rings.pt").items():
        torch.testing.assert_close(tensor, local[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_real_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    if not (DATA / "cifar10").is_dir():
        pytest.skip(f"no CIFAR-10 in {DATA}; set SOCFLOWER_DATA")
    monkeypatch.setenv("SOCFLOWER_DATA", str(DATA))
    run_here(AFTER, tmp_path / "model.pt", data="cifar10", num_epochs=1, learning_rate=0.01)
    assert accuracies(capsys.readouterr().out)[-1] > 0.3
