"""Ctrl-C ends `socflower run` with one line, which says how to go on; the same command then does."""

import json
import os
import signal
from pathlib import Path

import pytest

from socflower.scenario.runner import run_to_folder
from socflower.scenario.scenario_file import load_scenario
from tests.scenario.interrupted_runs import DEADLINE_S, Runs, comparable, kill, wait_for


@pytest.mark.timeout(300)
def test_ctrl_c_says_how_to_go_on_and_fresh_does_not(tmp_path: Path) -> None:
    runs = Runs(tmp_path, epochs=3)
    run = runs.start()
    try:
        wait_for(lambda: runs.newest() > 0 or run.poll() is not None)
        os.kill(run.pid, signal.SIGINT)
        out, said = run.communicate(timeout=DEADLINE_S)
    finally:
        kill(run)
    assert (run.returncode, out) == (130, "")
    (line,) = [line for line in said.splitlines() if "interrupted" in line]
    assert f"round {runs.newest()} is kept in {runs.out / 'checkpoint'}: the same command goes on after it" in line
    assert [path.name for path in runs.out.iterdir()] == ["checkpoint"]
    assert not list((tmp_path / "tmp").glob("socflower-*"))
    assert "resuming" not in runs.finish("--fresh")
    assert runs.assert_as_uninterrupted() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_simulation_engine_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    runs = Runs(tmp_path, epochs=10)
    run = runs.start("--engine", "simulation")
    try:
        wait_for(lambda: runs.newest() > 0 or run.poll() is not None)
        assert run.poll() is None, run.communicate()
        os.kill(run.pid, signal.SIGINT)  # which ends Flower's processes as well
        _, said = run.communicate(timeout=DEADLINE_S)
    finally:
        kill(run)
    assert run.returncode == 130 and "the same command goes on" in said, said
    reached = runs.newest()
    assert 0 < reached <= 40  # Flower takes its time to end, and trains meanwhile
    assert f"after round {reached} of 40" in runs.finish("--engine", "simulation")
    result = json.loads((runs.out / "result.json").read_text())
    reference = run_to_folder(load_scenario(runs.scenario), tmp_path / "reference", num_workers=0)
    assert result["resumed_from"] == [reached]
    assert {**comparable(result), "engine": ""} == {**comparable(reference), "engine": ""}
