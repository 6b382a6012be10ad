"""Starts the members, holds each to its part of a core, and has them do runs."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.rebalancing_rack.plan import Measured, Run
from tests.cpu_quota import Quota, quota
from tests.peers.peers import free_addresses

REPOSITORY = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TIMEOUT_S = 600.0


class ThrottledRack:
    """Member processes, one for each of `cores`; a context, at whose end no process and no group of them is left."""

    def __init__(self, cores: Sequence[float]) -> None:
        self._cores = tuple(cores)
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._quotas: list[Quota] = []

    def __enter__(self) -> "ThrottledRack":
        with self._stack:
            folder = Path(
                self._stack.enter_context(tempfile.TemporaryDirectory(prefix="throttled-rack-"))
            )
            command = [sys.executable, "-m", "benchmarks.rebalancing_rack.member", str(folder)]
            for number, cores in enumerate(self._cores):
                (folder / str(number)).mkdir()
                self._quotas.append(self._stack.enter_context(quota(cores=cores)))
                self._processes.append(
                    subprocess.Popen(
                        [*command[:-1], str(folder / str(number))],
                        cwd=REPOSITORY,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        env={**os.environ, **_ENVIRONMENT},
                    )
                )
                self._stack.callback(self._end, self._processes[-1])
            self._stack = self._stack.pop_all()
        # Only now: importing torch with a tenth of a core takes a minute.
        self.train(
            Run(
                transport="grpc",
                addresses=tuple(free_addresses(len(self._cores))),
                batch_size=8,
                num_steps=2,
            )
        )
        for held, process in zip(self._quotas, self._processes, strict=True):
            held.add(process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hold(self, cores: Sequence[float]) -> None:
        """Change the quotas."""
        for held, each in zip(self._quotas, cores, strict=True):
            held.set(each)

    def train(
        self,
        run: Run,
        members: Sequence[int] | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> list[Measured]:
        """Have `members`, all if not given, do a run; return what each measured.

        `on_step` is called with the number of each step that the first of them has done. Raises `RuntimeError` if a
        member fails.
        """
        processes = [self._processes[member] for member in members or range(len(self._processes))]
        for rank, process in enumerate(processes):
            assert process.stdin is not None
            process.stdin.write(json.dumps({"run": asdict(run), "rank": rank}) + "\n")
            process.stdin.flush()
        overdue = threading.Timer(_TIMEOUT_S, lambda: [process.kill() for process in processes])
        overdue.start()
        try:
            with ThreadPoolExecutor(len(processes)) as threads:
                heard = [
                    threads.submit(_listen, process, on_step if rank == 0 else lambda step: None)
                    for rank, process in enumerate(processes)
                ]
                try:
                    return [each.result() for each in heard]
                except BaseException:
                    for process in processes:  # those that listen would wait for the others
                        process.kill()
                    raise
        finally:
            overdue.cancel()

    @staticmethod
    def _end(process: "subprocess.Popen[str]") -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _listen(process: "subprocess.Popen[str]", on_step: Callable[[int], None]) -> Measured:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        if isinstance(said, Mapping):
            return Measured(
                **{
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in said.items()
                }
            )
        on_step(said)
    raise RuntimeError(f"rebalancing: a member ended with {process.wait()}")
