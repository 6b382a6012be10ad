"""Every scenario's claim, checked as a user would check it: by the command line."""

import json
import os
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

from socflower import load_data
from socflower.errors import DataUnavailable
from socflower.scenario.runner import run_scenario
from tests.command_line import Ran, Socflower
from tests.sampled_cells import sampled
from tests.scenario.small_runs import small

ROOT = Path(__file__).parents[1]
SOCFLOWER = Path(sysconfig.get_path("scripts")) / "socflower"
SMALL = sorted((ROOT / "scenarios").glob("*.toml"))
FULL = sorted((ROOT / "scenarios" / "full").glob("*.toml"))
QUICK = {"broken_reply"}
"""Whose claims `make test` checks. Other tests run what the others are about on less data, and
scenario/schema/test_corpus.py tries that each file begins to train."""
NEED_PROCESSES = {"dead_client"}
"""Run by a process of their own with its workers. All others run in this one, as fast as they train; that worker
processes change nothing is tested elsewhere."""

DATA = Path(os.environ.get("SOCFLOWER_DATA", ROOT.parent / "shared" / "data"))


def in_a_process(*words: str, timeout_s: float) -> Ran:
    """Run the command in a process of its own, in the repository."""
    ran = subprocess.run(
        [SOCFLOWER, *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, "SOCFLOWER_DATA": str(DATA)},
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def document_of(ran: Ran) -> dict[str, Any]:
    assert ran.status == 0, ran.err[-2000:]
    return dict(json.loads(ran.out))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(path, id=path.stem) for path in SMALL if path.stem in QUICK),
        *(
            pytest.param(path, id=path.stem, marks=pytest.mark.slow)
            for path in sampled(path for path in SMALL if path.stem not in QUICK | {"digits_demo"})
        ),
    ],
)
def test_the_claim_of_each_scenario_holds(
    scenario: Path, tmp_path: Path, socflower: Socflower
) -> None:
    command = f"run {scenario} --out {tmp_path}/out --json"
    if scenario.stem in NEED_PROCESSES:
        ran = in_a_process(*command.split(), timeout_s=240.0)
    else:
        ran = socflower(f"{command} --workers 0")
    result = document_of(ran)
    assert result == json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["expectations"]
    assert all(claim["holds"] is not False for claim in result["expectations"])
    assert any(claim["holds"] for claim in result["expectations"])
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"result.json", "trace.json", "report.html"}


@pytest.mark.parametrize("scenario", [*SMALL, *FULL], ids=lambda path: path.stem)
def test_each_scenario_opens_with_a_question_and_ends_with_a_claim(scenario: Path) -> None:
    lines = scenario.read_text().splitlines()
    comment = [line for line in lines if line.startswith("#")]
    assert lines[0].startswith("# ")
    assert any("?" in line for line in comment)
    tables = [line for line in lines if line.startswith("[")]
    assert tables[-1].startswith("[expect]")


@pytest.mark.timeout(900)
def test_local_and_simulation_give_equal_weights() -> None:
    """Two groups of two, on our engine and on Flower's with Ray and one process for clients."""
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    scenario = small(batch_size=64)
    there, here = (
        run_scenario(scenario, "simulation", num_workers=1),
        run_scenario(scenario, num_workers=0),
    )
    for key in ("weights_sha256", "virtual_s", "energy_j", "final_accuracy"):
        assert here[key] == there[key]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", sampled(FULL, 3), ids=lambda path: path.stem)
def test_the_claim_of_each_full_scenario_holds_on_both_engines(
    scenario: Path, tmp_path: Path
) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA}; set SOCFLOWER_DATA")
    name = tomllib.loads(scenario.read_text("utf-8"))["data"].get("name")
    if name is not None:
        try:
            load_data(name, DATA)
        except DataUnavailable as error:
            pytest.skip(str(error))
    hashes, settings = set(), ""
    if scenario.stem == "byte_gpt_lora":
        base = tmp_path / "base.npz"
        command = f"run byte_gpt --save-model {base} --out {tmp_path}/base"
        assert in_a_process(*command.split(), timeout_s=900.0).status == 0
        settings = f"--set model.arguments.base={base}"
    for engine in ("local", "simulation"):
        command = f"run {scenario} {settings} --engine {engine} --out {tmp_path}/{engine} --json"
        result = document_of(in_a_process(*command.split(), timeout_s=1700.0))
        hashes.add(result["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_the_scenario_of_the_demo_compares_all_strategies_and_its_claims_hold(
    tmp_path: Path,
) -> None:
    command = f"compare digits_demo --out {tmp_path} --json"
    document = document_of(in_a_process(*command.split(), timeout_s=2600.0))
    assert [row["strategy"] for row in document["rows"]] == [
        "socflow",
        "sgd",
        "ring",
        "local-sgd",
        "fedavg",
    ]
    assert document["headline"].startswith("socflow reaches 95.0%")
    assert {(row["model"], row["arithmetic"]) for row in document["predictions"]} == {
        (model, arithmetic) for model in ("vgg11", "resnet18") for arithmetic in ("fp32", "mixed")
    }
    assert all(claim["holds"] for claim in document["expectations"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_app_runs_with_flwr_run(tmp_path: Path) -> None:
    """An ordinary Flower app, on Flower's own runtime, by the command of the README."""
    pytest.importorskip("ray", reason="flwr run needs socflower[simulation]")
    from socflower.engines.simulation import flower_environment, running_superlink

    environment = flower_environment(tmp_path)
    with running_superlink(tmp_path, environment):
        ran = subprocess.run(
            [
                shutil.which("flwr", path=environment["PATH"]) or "flwr",
                "run",
                "scenarios/quickstart_app",
                "scenario",
                "--stream",
                "--run-config",
                "num-epochs=1",
                "--federation-config",
                "num-supernodes=8 client-resources-num-cpus=1",
            ],
            capture_output=True,
            text=True,
            timeout=280.0,
            cwd=ROOT,
            env=environment,
            check=False,
        )
    assert "round 4: accuracy 0.891" in ran.stdout, ran.stdout[-2000:]
