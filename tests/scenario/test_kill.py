"""`socflower run` killed at random moments and run again ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from socflower.scenario.runner import run_to_folder
from socflower.scenario.scenario_file import load_scenario

SCENARIO = """\
# Does it survive?
[cluster]
boards = [2, 2]
[train]
epochs = {epochs}
batch_size = 128
learning_rate = 0.05
[strategy]
groups = 2
sync_interval_epochs = 0.25
"""
COMMAND = Path(sysconfig.get_path("scripts")) / "socflower"
DEADLINE_S = 100.0


class Runs:
    """`socflower run` again and again into one folder, each process with its own process group."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder = folder
        self.scenario = folder / "survive.toml"
        self.scenario.write_text(SCENARIO.format(epochs=epochs))
        self.out = folder / "out"
        # What a killed process leaves in its temporary folder goes with this one. Sockets in it need a short path.
        self._temporary = tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        temporary = {} if "simulation" in options else {"TMPDIR": self._temporary.name}
        return subprocess.Popen(
            [COMMAND, "run", self.scenario, "--out", self.out, "--workers", "2", *options], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, **temporary, "TERM": "dumb", "COLUMNS": "80"})

    def newest(self) -> int:
        return max((int(path.stem.partition("-")[2]) for path in self.out.glob("checkpoint/round-*.ckpt")), default=0)

    def kill_when(self, moment: Callable[[], bool]) -> bool:
        """Start and kill at a moment; whether there still was something to kill."""
        run = self.start()
        try:
            wait_for(lambda: moment() or run.poll() is not None)
            return run.poll() is None
        finally:
            kill(run)

    def finish(self, *options: str) -> str:
        """Run to the end; return what was said on the way."""
        run = self.start(*options)
        try:
            _, said = run.communicate(timeout=DEADLINE_S)
        finally:
            kill(run)
        assert run.returncode == 0, said
        return said

    def assert_as_uninterrupted(self) -> list[int]:
        """Compare with a run of this process; return the rounds it was resumed from."""
        reference = self.folder / "reference"
        run_to_folder(load_scenario(self.scenario), reference, num_workers=0)
        assert sorted(path.name for path in self.out.iterdir()) == ["report.html", "result.json", "trace.json"]
        ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (self.out, reference))
        assert comparable(ours) == comparable(theirs)
        assert (self.out / "trace.json").read_bytes() == (reference / "trace.json").read_bytes()
        return list(ours["resumed_from"])


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("wall_s", "resumed_from")}


def kill(run: "subprocess.Popen[str]") -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)  # its workers too; it leads a group of its own
    run.wait()
    for stream in (run.stdout, run.stderr):
        if stream is not None:
            stream.close()


def wait_for(happened: Callable[[], bool], pause_s: float = 0.0005) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(pause_s)


def some_rounds_later(runs: Runs, rng: random.Random) -> Callable[[], bool]:
    """Return a moment after the next checkpoint, anywhere in a round."""
    before, delay_s, since_s = runs.newest(), rng.uniform(0.0, 0.4), [0.0]

    def moment() -> bool:
        if runs.newest() <= before:
            return False
        since_s[0] = since_s[0] or time.monotonic()
        return time.monotonic() >= since_s[0] + delay_s

    return moment


def anywhere(rng: random.Random) -> Callable[[], bool]:
    """Return a moment that may come before training begins."""
    end_s = time.monotonic() + rng.uniform(0.0, 9.0)
    return lambda: time.monotonic() >= end_s


def while_writing(runs: Runs) -> Callable[[], bool]:
    """Return a moment at which a checkpoint of the server's is being written."""
    return lambda: any(runs.out.glob("checkpoint/.*.part"))


@pytest.mark.timeout(300)
def test_two_kills_change_nothing(tmp_path: Path) -> None:
    """One of them while a checkpoint is being written."""
    runs, rng = Runs(tmp_path, epochs=5), random.Random(3)
    assert runs.kill_when(some_rounds_later(runs, rng))
    assert not (runs.out / "result.json").exists()
    assert runs.kill_when(while_writing(runs))
    said = runs.finish()
    assert f"resuming {runs.out} after round " in said and " of 20; --fresh starts anew" in said
    resumed = runs.assert_as_uninterrupted()
    assert 1 <= len(resumed) <= 2 and resumed == sorted(resumed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    runs, rng = Runs(tmp_path, epochs=16), random.Random(20)
    num_killed = 0
    for attempt in range(20):
        moments = (some_rounds_later(runs, rng), anywhere(rng), while_writing(runs))
        num_killed += runs.kill_when(moments[attempt % 3])
    assert num_killed == 20
    runs.finish()
    runs.assert_as_uninterrupted()


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
