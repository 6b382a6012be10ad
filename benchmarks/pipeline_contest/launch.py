"""Starts a rack of devices with CPU quotas, and gives them work.

`python -m benchmarks.pipeline_contest.launch` is the first process inside the namespaces. It reads pickles: the rack,
the folders of the devices' quotas and what to prepare for all of them, then pairs of a work and the SoCs that do it; it
writes pickles of their answers.
"""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.pipeline_contest.work import Work
from benchmarks.processes import ONE_THREAD, REPOSITORY
from tests.cpu_quota import quota
from tests.testbed.rack_process import enter_network
from tests.testbed.topology import NAMESPACES, Rack

_TIMEOUT_S = 300.0


class Devices:
    """Processes of a rack, each with a CPU quota; a context that removes all of them at its end."""

    def __init__(
        self, rack: Rack, cores: Sequence[float], prepare: Callable[[], object] | None = None
    ) -> None:
        self._rack, self._cores, self._stack = rack, tuple(cores), ExitStack()
        self._prepare = prepare
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> "Devices":
        with self._stack:
            self._said = self._stack.enter_context(tempfile.TemporaryFile())
            folders = [
                self._stack.enter_context(quota(cores=cores)).folder for cores in self._cores
            ]
            self._process = subprocess.Popen(
                [*NAMESPACES, sys.executable, "-m", "benchmarks.pipeline_contest.launch"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
                env={**os.environ, **ONE_THREAD},
            )
            self._stack.callback(self._end)
            self._send((self._rack, folders, self._prepare))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def do(self, work: Work, socs: Sequence[int] | None = None) -> dict[int, Any]:
        """Let SoCs (by default all) do a work, and return their answers. Raises `RuntimeError` if one fails."""
        members = tuple(range(len(self._cores))) if socs is None else tuple(socs)
        overdue = threading.Timer(_TIMEOUT_S, self._process.kill)
        overdue.start()
        try:
            self._send((work, members))
            assert self._process.stdout is not None
            answers, error = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            self._said.seek(0)
            answers, error = {}, self._said.read().decode("utf-8", "replace")[-4000:]
        finally:
            overdue.cancel()
        if error or not answers:
            raise RuntimeError(f"pipeline: a device failed at {type(work).__name__}\n{error}")
        return answers

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def _end(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def main() -> int:
    """Build the rack, fork the devices, and pass on work until the input ends."""
    rack, folders, prepare = pickle.load(sys.stdin.buffer)
    rack.build()
    # Imports torch before the fork, once for all devices.
    import_module("benchmarks.pipeline_contest.device")
    if prepare is not None:
        prepare()

    fork = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    for soc in range(rack.num_socs):
        here, there = fork.Pipe()
        fork.Process(target=_live, args=(soc, rack, folders[soc], there), daemon=True).start()
        there.close()
        pipes.append(here)
    number = 0
    while True:
        try:
            work, socs = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        number += 1
        for soc in socs:
            pipes[soc].send((work, number, socs))
        pickle.dump(_answers(pipes, socs), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _answers(pipes: Sequence[Connection], socs: Sequence[int]) -> tuple[dict[int, Any], str]:
    found: dict[int, Any] = {}
    while len(found) < len(socs):
        ready = wait([pipes[soc] for soc in socs if soc not in found])
        for soc in [soc for soc in socs if pipes[soc] in ready]:
            try:
                found[soc], error = pipes[soc].recv()
            except EOFError:
                error = f"SoC {soc} ended without an answer"
            if error:
                return {}, error
    return found, ""


def _live(soc: int, rack: Rack, folder: Path, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    enter_network(Path(f"/run/netns/soc{soc}"))
    from benchmarks.pipeline_contest.device import Device

    device = Device(soc, rack)
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    while True:
        try:
            work, number, socs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((device.do(work, number, socs), ""))
        except Exception:
            pipe.send((None, traceback.format_exc(limit=-8)))


if __name__ == "__main__":
    sys.exit(main())
