"""Flower apps written as their authors would, and the same under SoCFlow by a few changed lines, on every engine."""

import ast
import difflib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from socflower.cluster.cluster_file import load_cluster
from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network
from socflower.engines.deployment.superlink import CONNECTION, local_flower
from socflower.engines.local.run_app import load_flower_app, run_app
from socflower.scenario.app.deployed import node_configs
from socflower.scenario.schema.file import parse_scenario
from tests.command_line import Socflower

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RACK = EXAMPLES / "pytorch_quickstart" / "rack.toml"
APPS = {"pytorch_quickstart": 0.9, "huggingface_text": 0.65, "lightning_loop": -0.46}
"""By folder, the accuracy that an app reaches under groups, or minus its loss."""

MOST_CHANGED_STATEMENTS = 15
Weights = Mapping[str, Tensor]


@pytest.fixture(autouse=True)
def modules_as_before() -> Iterator[None]:
    """An app before and after its conversion has the same module names."""
    path, names = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - names:
        if name.partition(".")[0] in ("pytorch_quickstart", "text_classifier", "forecast"):
            del sys.modules[name]


def weights_of(path: Path) -> Weights:
    return torch.load(path, weights_only=True)


def run_here(app: Path, final_model: Path, **config: object) -> Weights:
    """Return the weights after the app has run in this process."""
    loaded = load_flower_app(app)
    run_app(
        loaded.server_app,
        loaded.client_app,
        cluster=load_cluster(RACK),
        num_workers=0,
        run_config={
            **loaded.run_config,
            "final-model": str(final_model),
            **{key.replace("_", "-"): value for key, value in config.items()},
        },
    )
    return weights_of(final_model)


def flwr_run(
    app: Path,
    environment: Mapping[str, str],
    connection: str,
    final_model: Path,
    *options: str,
    network: Network = MACHINE_NETWORK,
) -> str:
    """Submit an app with Flower's own command and return what it printed."""
    command = shutil.which("flwr", path=environment["PATH"]) or "flwr"
    ran = subprocess.run(
        network.command(
            [
                command,
                "run",
                str(app),
                connection,
                "--stream",
                "--run-config",
                f'final-model="{final_model}"',
                *options,
            ]
        ),
        capture_output=True,
        text=True,
        timeout=500.0,
        cwd=final_model.parent,
        env=dict(environment),
        check=False,
    )
    assert final_model.exists(), ran.stdout[-3000:] + ran.stderr[-1000:]
    return ran.stdout


def assert_equal(ours: Weights, reference: Weights) -> None:
    assert list(ours) == list(reference)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in ours.items())


def scores(printed: str) -> list[float]:
    """Return the accuracy of each round, or minus its loss."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("round ")]
    return [float(words[-1]) * (-1 if words[-2] == "loss" else 1) for words in lines]


def statements(file: Path) -> list[str]:
    """Return a program with each statement on one line, whatever its layout; other files by lines."""
    text = file.read_text()
    return (ast.unparse(ast.parse(text)) if file.suffix == ".py" else text).splitlines()


@pytest.mark.parametrize("name", APPS)
def test_few_statements_change(name: str) -> None:
    num_changed = 0
    for before in sorted((EXAMPLES / name / "before").rglob("*.*")):
        if "__pycache__" in before.parts or not before.is_file():
            continue
        after = EXAMPLES / name / "after" / before.relative_to(EXAMPLES / name / "before")
        changes = difflib.SequenceMatcher(
            None, statements(before), statements(after), autojunk=False
        ).get_opcodes()
        num_changed += sum(
            max(end - start, new_end - new_start)
            for kind, start, end, new_start, new_end in changes
            if kind != "equal"
        )
    assert 0 < num_changed <= MOST_CHANGED_STATEMENTS


def run_by_the_command(app: Path, folder: Path, socflower: Socflower) -> Weights:
    """Return the weights after `socflower run APP`."""
    command = f"run {app} --cluster {RACK} --workers 0 --out out --set"
    assert socflower(command, f'final-model="{folder / "command.pt"}"').status == 0
    return weights_of(folder / "command.pt")


def test_it_learns_on_the_local_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(EXAMPLES / "pytorch_quickstart" / "after", tmp_path / "called.pt")
    printed = capsys.readouterr().out
    assert len(scores(printed)) == 5
    assert scores(printed)[-1] > APPS["pytorch_quickstart"]


@pytest.mark.slow
@pytest.mark.parametrize("name", APPS)
def test_the_command_ends_with_the_same_weights(
    name: str, tmp_path: Path, socflower: Socflower
) -> None:
    app = EXAMPLES / name / "after"
    assert_equal(
        run_by_the_command(app, tmp_path, socflower), run_here(app, tmp_path / "called.pt")
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", APPS)
def test_before_its_conversion_an_app_learns_too(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_here(EXAMPLES / name / "before", tmp_path / "model.pt")
    reached = scores(capsys.readouterr().out)
    assert reached[-1] > reached[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", APPS)
def test_the_simulation_ends_with_the_local_engines_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="flwr run needs socflower[simulation]")
    from socflower.engines.simulation import flower_environment, running_superlink

    app, environment = EXAMPLES / name / "after", flower_environment(tmp_path)
    with running_superlink(tmp_path, environment):
        printed = flwr_run(
            app,
            environment,
            "scenario",
            tmp_path / "simulated.pt",
            "--federation-config",
            "num-supernodes=4 client-resources-num-cpus=1",
        )
    assert scores(printed)[-1] > APPS[name]
    assert_equal(weights_of(tmp_path / "simulated.pt"), run_here(app, tmp_path / "local.pt"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", APPS)
def test_rings_of_supernodes_learn_as_well(name: str, tmp_path: Path) -> None:
    tables = {"cluster": {"boards": [2, 2]}, "strategy": {"groups": 2}}
    rack = parse_scenario(tables, name="rack", question="", where="rack")
    (tmp_path / "flower").mkdir()
    app = EXAMPLES / name / "after"
    with local_flower(tmp_path / "flower", node_configs(rack), print) as flower:
        printed = flwr_run(
            app, flower.environment, CONNECTION, tmp_path / "rings.pt", network=flower.network
        )
    assert scores(printed)[-1] > APPS[name]
    # Its dropout is drawn per member.
    if name == "huggingface_text":
        return
    local = run_here(app, tmp_path / "local.pt")
    for key, tensor in weights_of(tmp_path / "rings.pt").items():
        # Augmentation is that of the whole group; sums are the same in another order.
        torch.testing.assert_close(tensor, local[key], rtol=1e-3, atol=1e-4)
