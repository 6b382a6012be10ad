"""Ctrl-C ends `socflower run` with one line, which says how to go on; the same command then does."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from socflower.engines.deployment.flower_processes import processes_of
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.file import load_scenario
from socflower.wire.folders import LOCK_FILE
from tests.command_line import Socflower
from tests.engines.deployment.interrupted_runs import (
    DEADLINE_S,
    Runs,
    comparable,
    kill,
    refused_by,
    wait_for,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextmanager
def training(runs: Runs, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A run that has kept a round; it is killed at the end if it still runs."""
    run = runs.start(*options)
    try:
        wait_for(lambda: runs.newest() > 0 or run.poll() is not None, deadline_s=400.0)
        assert run.poll() is None, run.communicate()
        yield run
    finally:
        kill(run)


def ended(run: "subprocess.Popen[str]", number: signal.Signals) -> tuple[str, str]:
    """Return what a process that gets a signal has printed at its end."""
    os.kill(run.pid, number)
    return run.communicate(timeout=DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_run_changes_nothing_for_the_first_and_ctrl_c_says_how_to_go_on(
    socflower: Socflower,
    tmp_path: Path,
) -> None:
    """The first stands still while the second comes, is interrupted later, and goes on from where it was."""
    runs = Runs(tmp_path, epochs=1)
    with training(runs) as run:
        os.killpg(run.pid, signal.SIGSTOP)
        before = contents(runs.out)
        assert LOCK_FILE in before and "result.json" not in before
        for option in ("", "--fresh", "--set train.epochs=2"):
            second = socflower(f"run survive.toml --out {runs.out} --workers 0 --json {option}")
            assert refused_by(second, run.pid, f"--out {runs.out}: "), second.err
        assert contents(runs.out) == before
        os.kill(run.pid, signal.SIGINT)
        os.killpg(run.pid, signal.SIGCONT)
        out, said = run.communicate(timeout=DEADLINE_S)
    assert (run.returncode, out) == (130, "")
    (line,) = [line for line in said.splitlines() if "interrupted" in line]
    kept = runs.newest()
    assert f"round {kept} is kept in {runs.out / 'checkpoint'}: the same command" in line
    assert [path.name for path in runs.out.iterdir()] == ["checkpoint"]
    assert not list(runs.temporary.glob("socflower-*"))
    assert f"after round {kept} of 4" in runs.finish_here(socflower)
    assert runs.assert_as_uninterrupted() == [kept]


PROGRAM = """\
import sys, time
from pathlib import Path
from socflower.wire.folders import temporary_folder
from socflower.cli.process import interrupted_by_signals
with interrupted_by_signals(), temporary_folder(within=Path(sys.argv[1])):
    try:
        print("ready", flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.read()  # as long as cleaning up takes
        print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "second"), [(signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM)]
)
def test_a_signal_is_died_of_after_cleaning_up_and_a_second_one_does_not_cut_that_short(
    number: signal.Signals,
    second: signal.Signals,
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "interrupted\n"
        process.send_signal(second)
        assert process.communicate(timeout=DEADLINE_S)[0] == "cleaned up\n"
    assert process.returncode == -number
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_end_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    runs = Runs(tmp_path, epochs=3)
    with training(runs) as run:
        assert list(runs.temporary.glob("socflower-*"))
        out, said = ended(run, number)
    # Whoever sent it sees that it was obeyed; its user, how to go on.
    assert (run.returncode, out) == (-number, "")
    # Nobody had time for anything: the next run removes it.
    if number == signal.SIGKILL:
        assert "resuming" in runs.finish()
        assert not list(runs.temporary.glob("socflower-*"))
        return
    assert f"interrupted; round {runs.newest()} is kept" in said
    assert [path.name for path in runs.out.iterdir()] == ["checkpoint"]
    assert not list(runs.temporary.glob("socflower-*"))
    assert not list(runs.temporary.glob("pymp-*"))  # of the workers


STRANGER = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR'); print('in')"


def _gcs(run: "subprocess.Popen[str]") -> psutil.Process | None:
    """One of Ray's processes, in whose command line is the address that takes orders; Ray's are nobody's children."""
    (guard,) = [
        process
        for process in psutil.Process(run.pid).children()
        if "socflower.engines.deployment.flower_processes" in process.cmdline()
    ]
    mark = guard.cmdline()[
        guard.cmdline().index("socflower.engines.deployment.flower_processes") + 1
    ]
    for process in processes_of(mark):
        with suppress(psutil.Error):
            if any(word.startswith("--gcs-address=") for word in process.cmdline()):
                return process
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_of_a_simulation_takes_orders_from_its_own_run_alone(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    runs = Runs(tmp_path, epochs=200)
    with training(runs, "--engine", "simulation") as run:
        process = _gcs(run)
        assert process is not None
        (address,) = [
            word.partition("=")[2]
            for word in process.cmdline()
            if word.startswith("--gcs-address=")
        ]
        token = {"RAY_AUTH_MODE": "token"}
        own = {**token, "RAY_AUTH_TOKEN": process.environ()["RAY_AUTH_TOKEN"]}
        environment = {key: each for key, each in os.environ.items() if not key.startswith("RAY_")}
        for strangers, gets_in in (
            ({}, False),
            ({**token, "RAY_AUTH_TOKEN": "f" * 64}, False),
            (own, True),
        ):
            asked = subprocess.run(
                [sys.executable, "-c", STRANGER, address],
                env={**environment, **strangers},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert ("in\n" in asked.stdout) is gets_in, (asked.stdout, asked.stderr)
        ended(run, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_simulation_engine_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the engine simulation needs socflower[simulation]")
    runs = Runs(tmp_path, epochs=10)
    with training(runs, "--engine", "simulation") as run:
        _, said = ended(run, signal.SIGINT)  # which ends Flower's processes as well
    assert run.returncode == 130 and "the same command resumes" in said, said
    reached = runs.newest()
    assert 0 < reached <= 40  # Flower takes its time to end, and trains meanwhile
    assert f"after round {reached} of 40" in runs.finish("--engine", "simulation")
    result = json.loads((runs.out / "result.json").read_text())
    reference = run_to_folder(load_scenario(runs.scenario), tmp_path / "reference", num_workers=0)
    assert result["resumed_from"] == [reached]
    assert {**comparable(result), "engine": ""} == {**comparable(reference), "engine": ""}
