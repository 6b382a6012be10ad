"""`socflower run` as a process that a test can kill, and run again, and compare with a run that nothing befell."""

import json
import os
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from socflower.scenario.schema.file import load_scenario
from tests.command_line import Ran, Socflower
from tests.scenario.small_runs import without_drawing

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
DEADLINE_S = 250.0  # beside other work Ray alone may take a minute


class Runs:
    """`socflower run` again and again into one folder, each process with its own process group."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder = folder
        self.scenario = folder / "survive.toml"
        self.scenario.write_text(SCENARIO.format(epochs=epochs))
        self.out = folder / "out"
        # What a killed process leaves in its temporary folder goes with this one. Sockets in it need a short path.
        self._temporary = tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True)

    @property
    def temporary(self) -> Path:
        """Where its processes keep temporary files."""
        return Path(self._temporary.name)

    def start(self, *options: str) -> "subprocess.Popen[str]":
        temporary, workers = (
            ({}, [])
            if "simulation" in options
            else ({"TMPDIR": self._temporary.name}, ["--workers", "2"])
        )
        return subprocess.Popen(
            [COMMAND, "run", self.scenario, "--out", self.out, *workers, *options],
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **temporary, "TERM": "dumb", "COLUMNS": "80"},
        )

    def newest(self) -> int:
        return max(
            (int(path.stem.partition("-")[2]) for path in self.out.glob("checkpoint/round-*.ckpt")),
            default=0,
        )

    def kill_when(self, moment: Callable[[], bool]) -> bool:
        """Start and kill at a moment; whether there still was something to kill."""
        run = self.start()
        try:
            wait_for(lambda: moment() or run.poll() is not None)
            return run.poll() is None
        finally:
            kill(run)

    def finish_here(self, socflower: Socflower, *options: str) -> str:
        """Run to the end in this process, without workers; return what was said on the way."""
        ran = socflower("run", self.scenario, "--out", self.out, "--workers", "0", *options)
        assert ran.status == 0, ran.err
        return ran.err

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
        without_drawing(load_scenario(self.scenario), reference)
        assert sorted(path.name for path in self.out.iterdir()) == [
            "report.html",
            "result.json",
            "trace.json",
        ]
        ours, theirs = (
            json.loads((folder / "result.json").read_text()) for folder in (self.out, reference)
        )
        assert comparable(ours) == comparable(theirs)
        assert (self.out / "trace.json").read_bytes() == (reference / "trace.json").read_bytes()
        return list(ours["resumed_from"])


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("wall_s", "resumed_from")}


def refused_by(ran: Ran, process_id: int, begins: str) -> bool:
    """Whether a command was refused in one line because of another process."""
    ends = f"process {process_id} is at work there; wait until it ends, or name another one\n"
    line = (
        ran.err.startswith(f"error: {begins}")
        and ran.err.endswith(ends)
        and ran.err.count("\n") == 1
    )
    return ran.status == 2 and ran.out == "" and line


def kill(run: "subprocess.Popen[str]") -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)  # its workers too; it leads a group of its own
    run.wait()
    for stream in (run.stdout, run.stderr):
        if stream is not None:
            stream.close()


def wait_for(
    happened: Callable[[], bool], pause_s: float = 0.0005, deadline_s: float = DEADLINE_S
) -> None:
    end_s = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(pause_s)
