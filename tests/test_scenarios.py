"""Every scenario's claim, checked as a user would check it: by the command line."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from socflower.cli import main as cli

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


def socflower(*arguments: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SOCFLOWER, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, "SOCFLOWER_DATA": str(DATA)},
        check=False,
    )


def socflower_here(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
) -> tuple[int, str, str]:
    """Return status, output and errors of the command, without a new interpreter."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["socflower", *arguments])
    capsys.readouterr()
    try:
        cli.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])
        for path in SMALL
        if path.stem != "digits_demo"
    ],
)
def test_the_claim_of_each_scenario_holds(
    scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("run", str(scenario), "--out", str(tmp_path), "--json")
    if scenario.stem in NEED_PROCESSES:
        ran = socflower(*command, timeout_s=240.0)
        status, out, err = ran.returncode, ran.stdout, ran.stderr
    else:
        status, out, err = socflower_here(monkeypatch, capsys, *command, "--workers", "0")
    assert status == 0, err[-2000:]
    result = json.loads(out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["expectations"]
    assert all(claim["holds"] is not False for claim in result["expectations"])
    assert any(claim["holds"] for claim in result["expectations"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "result.json",
        "trace.json",
        "report.html",
    }


@pytest.mark.parametrize("scenario", [*SMALL, *FULL], ids=lambda path: path.stem)
def test_each_scenario_opens_with_a_question_and_ends_with_a_claim(scenario: Path) -> None:
    lines = scenario.read_text().splitlines()
    comment = [line for line in lines if line.startswith("#")]
    assert lines[0].startswith("# ")
    assert any("?" in line for line in comment)
    tables = [line for line in lines if line.startswith("[")]
    assert tables[-1].startswith("[expect]")


@pytest.mark.timeout(900)
def test_local_and_simulation_give_equal_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two Snapdragon groups with a split batch, on our engine and on Flower's with Ray."""
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    command = [
        "run",
        "scenarios/digits_demo.toml",
        "--set",
        "train.epochs=1",
        "--set",
        "train.batch_size=64",
        "--set",
        "model.name=lenet5",
        "--set",
        "cluster.boards=[2, 2]",
        "--set",
        "strategy.groups=2",
        "--set",
        "expect={}",
        "--json",
    ]
    ran = socflower(
        *command, "--engine", "simulation", "--out", str(tmp_path / "simulation"), timeout_s=280.0
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    status, out, err = socflower_here(
        monkeypatch, capsys, *command, "--workers", "0", "--out", str(tmp_path / "local")
    )
    assert status == 0, err[-2000:]
    simulation, local = (
        (
            result["weights_sha256"],
            result["virtual_s"],
            result["energy_j"],
            result["final_accuracy"],
        )
        for result in map(json.loads, (ran.stdout, out))
    )
    assert local == simulation


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", FULL, ids=lambda path: path.stem)
def test_the_claim_of_each_full_scenario_holds_on_both_engines(
    scenario: Path, tmp_path: Path
) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA}; set SOCFLOWER_DATA")
    hashes, settings = set(), []
    if scenario.stem == "byte_gpt_lora":
        base = tmp_path / "base.npz"
        made = socflower(
            "run",
            "byte_gpt",
            "--save-model",
            str(base),
            "--out",
            str(tmp_path / "base"),
            timeout_s=900.0,
        )
        assert made.returncode == 0, made.stderr[-2000:]
        settings = ["--set", f"model.arguments.base={base}"]
    for engine in ("local", "simulation"):
        ran = socflower(
            "run",
            str(scenario),
            *settings,
            "--engine",
            engine,
            "--out",
            str(tmp_path / engine),
            "--json",
            timeout_s=1700.0,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        hashes.add(json.loads(ran.stdout)["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_compares_all_strategies_and_its_claims_hold(tmp_path: Path) -> None:
    ran = socflower(
        "compare", "scenarios/digits_demo.toml", "--out", str(tmp_path), "--json", timeout_s=800.0
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    document = json.loads(ran.stdout)
    assert [row["strategy"] for row in document["rows"]] == ["socflow", "sgd", "ring", "fedavg"]
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
