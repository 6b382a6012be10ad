"""What a command needs before it answers: plans and refusals load neither torch nor Flower, Ray or matplotlib."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from socflower.scenario.schema.pipeline import PipelineConfig

HEAVY = ("torch", "flwr", "ray", "matplotlib")

PROGRAM = f"""
import contextlib, io, json, sys
from socflower.cli.main import main
from socflower.scenario import choices

loaded = {{}}
for command in json.loads(sys.argv[1]):
    if len(loaded) == 1:
        # The other choices of one plan are of all methods; they take most of the time of each plan.
        choices.with_choices = lambda scenario, cluster, planned: planned
    sys.argv = ["socflower", *command]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    found = [name for name in {HEAVY!r} if name in sys.modules]
    loaded[" ".join(command)] = [status or 0, said.getvalue(), found]
print(json.dumps(loaded))
"""


def statuses(commands: list[list[str]], folder: Path) -> dict[str, int]:
    """Return each command's exit status after requiring that none of them has loaded what is heavy."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(ran.stdout)
    assert not {command: heavy for command, (_, _, heavy) in found.items() if heavy}
    for command, (status, said, _) in found.items():
        assert status == 0 or len(said.splitlines()) == 1 or "Usage" in said, (command, said)
    return {command: status for command, (status, _, _) in found.items()}


def reads_model(pipeline: PipelineConfig | None) -> bool:
    """Return whether a plan needs the model itself: other samples than the data's, or int8 kernels for its layers."""
    return pipeline is not None and bool(pipeline.sample or pipeline.int8_socs)


@pytest.mark.parametrize(
    "each_method", ["once", pytest.param("with every file", marks=pytest.mark.slow)]
)
def test_a_plan_of_a_built_in_model_loads_no_torch(each_method: str, tmp_path: Path) -> None:
    from socflower.scenario.schema.file import load_scenario
    from socflower.scenario.shipped import scenario_files
    from socflower.scenario.split_costs import is_built_in

    loaded = {name: load_scenario(path) for name, path in scenario_files().items()}
    planned = {
        name: scenario.strategy.name
        for name, scenario in loaded.items()
        if (scenario.kind.has_groups and not scenario.factories)
        or (scenario.kind.uses_cloud and is_built_in(scenario))
        or (scenario.kind.is_pipeline and not reads_model(scenario.pipeline))
    }
    assert len(planned) > 38
    names = planned.keys()
    if each_method == "once":
        names = {method: name for name, method in reversed(planned.items())}.values()
    commands = [["plan", name, "--json"] for name in names]
    assert set(statuses(commands, tmp_path).values()) == {0}


def test_a_refusal_loads_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do data that cannot be read."""
    changes = (
        "nothing=1",
        "train.epochs=0",
        "train.epochs=many",
        "strategy.groups=99",
        "strategy.name=none",
        "model.name=lenet",
        "data.name=digit",
        "precision.held_out=4000",
        "ring.compression=top-k",
    )
    (tmp_path / "broken.toml").write_text("[cluster\n")
    (tmp_path / "empty").mkdir()
    commands = [
        [command, "digits_demo", "--set", change]
        for command in ("plan", "run", "compare")
        for change in changes
        if (command, change) != ("plan", "ring.compression=top-k")
    ]
    commands += [
        [command, name]
        for command in ("plan", "run", "compare")
        for name in ("none", "broken.toml")
    ]
    commands += [
        ["run", "digits_demo", "--engine", "none"],
        ["run", "digits_demo", "--workers", "-1"],
        ["run", "digits_demo", "--restarts", "2"],
        ["run", "digits_demo", "--save-model", "none/model.npz"],
        ["run", "digits_demo", "--log", "none"],
        ["run", "digits_demo", "--unknown"],
        ["run", "split_on_a_tram", "--set", "edgecloud.nothing=1"],
        ["run", "split_on_a_tram", "--set", "edgecloud.cut=none"],
        ["run", "pipeline_of_pis", "--set", "pipeline.nothing=1"],
        ["run", "empty"],
        ["plan", "empty"],
        ["compare", "empty"],
        ["plan", "digits_demo", "--cluster", "none.toml"],
        ["plan", "sgd", "--groups", "2"],
        ["compare", "digits_demo", "--strategies", "none"],
        ["compare", "digits_demo", "--strategies", "socflow", "--seeds", "x"],
        ["compare", "auto_groups", "--front"],
        ["compare", "split_against_edge", "--front"],
        ["compare", "digits_demo", "--front", "--search", "2"],
        ["compare", "digits_demo", "--front", "--strategies", "none"],
        ["new"],
        ["new", "app", "--template", "none"],
        ["paper", "none"],
        ["bench", "none"],
        ["nothing"],
    ]
    for name in ("cifar10", "mnist"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.parquet").write_bytes(b"no parquet")
        commands.append(["run", "digits_demo", "--set", f"data.name={name}"])
    monkeypatch.setenv("SOCFLOWER_DATA", str(tmp_path))
    assert set(statuses(commands, tmp_path).values()) == {2}
