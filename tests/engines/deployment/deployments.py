"""`socflower run --engine deployment` as a process of which a test can find and kill every part."""

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SCENARIO = """\
# Does it survive?
[cluster]
boards = [1, 1]
[train]
epochs = {epochs}
batch_size = 128
learning_rate = 0.05
[strategy]
groups = 2
sync_interval_epochs = 1
"""
COMMAND = Path(sysconfig.get_path("scripts")) / "socflower"
DEADLINE_S = 240.0


class DeployedRun:
    """One run of a small scenario, on two SuperNodes or what `scenario` says; used as a context, it leaves nothing
    running.
    """

    def __init__(
        self, folder: Path, *options: str, epochs: int = 3, scenario: str = SCENARIO
    ) -> None:
        self.folder = folder
        self.scenario = folder / "survive.toml"
        self.scenario.write_text(scenario.format(epochs=epochs))
        self.out = folder / "out"
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self._said = folder / "said"
        with self._said.open("wb") as stream:
            self.process = subprocess.Popen(
                [
                    COMMAND,
                    "run",
                    self.scenario,
                    "--out",
                    self.out,
                    "--engine",
                    "deployment",
                    *options,
                ],
                cwd=folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(temporary), "TERM": "dumb", "COLUMNS": "80"},
            )
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> "DeployedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.processes("")
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for process in [*self._seen.values(), self.process]:
            with suppress(psutil.Error, ProcessLookupError):
                process.kill()
        self.process.wait()

    def processes(self, command: str) -> list[psutil.Process]:
        """The run's processes of a command, also forks that run it, as far as they descend from the run's own."""
        found = []
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    self._seen[process.pid] = process
                    words = process.cmdline()[:6]
                    names = {process.name(), *(Path(word).name for word in words)}
                    if process.status() != psutil.STATUS_ZOMBIE and command in names:
                        found.append(process)
        return found

    def one(self, command: str) -> psutil.Process:
        """The first process of a command, as soon as there is one."""
        self.wait_for(lambda: bool(self.processes(command)))
        return self.processes(command)[0]

    def newest(self) -> int:
        return max(
            (int(path.stem.partition("-")[2]) for path in self.out.glob("checkpoint/round-*.ckpt")),
            default=0,
        )

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait for a moment before the end of the run."""
        end_s = time.monotonic() + DEADLINE_S
        while not happened():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end_s, f"nothing happened: {self.said()}"
            time.sleep(0.1)

    def wait_until_gone(self, pattern: str) -> None:
        """Wait until no temporary file or folder of a name is left, also after the end of the run."""
        end_s = time.monotonic() + DEADLINE_S
        while left := list((self.folder / "tmp").glob(pattern)):
            assert time.monotonic() < end_s, left
            time.sleep(0.1)

    def said(self) -> str:
        return self._said.read_text("utf-8")

    def finish(self) -> dict[str, Any]:
        """The result of a run that ends well."""
        assert self.process.wait(DEADLINE_S) == 0, self.said()
        return json.loads((self.out / "result.json").read_text())

    def left_over(self) -> list[psutil.Process]:
        """What still runs of all that was ever seen of it, a minute later at most."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=60)
        return alive
