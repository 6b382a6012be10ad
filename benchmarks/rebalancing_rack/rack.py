"""Starts the members, holds each to its CPU quota, and lets them do runs."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import from_json
from benchmarks.processes import LineProcess
from benchmarks.rebalancing_rack.plan import MemberTimes, RingRun
from tests.cpu_quota import Quota, quota
from tests.peers.peers import free_addresses

_TIMEOUT_S = 600.0


class ThrottledRack:
    """Member processes with CPU quotas of `cores`; a context that ends them and removes the quotas."""

    def __init__(self, cores: Sequence[float]) -> None:
        self._cores = tuple(cores)
        self._stack = ExitStack()
        self._processes: list[LineProcess] = []
        self._quotas: list[Quota] = []

    def __enter__(self) -> "ThrottledRack":
        with self._stack:
            folder = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="throttled-rack-")
            )
            for number, cores in enumerate(self._cores):
                own = Path(folder) / str(number)
                own.mkdir()
                self._quotas.append(self._stack.enter_context(quota(cores=cores)))
                process = LineProcess(
                    "benchmarks.rebalancing_rack.member", str(own), timeout_s=_TIMEOUT_S
                )
                self._stack.callback(process.end)
                self._processes.append(process)
            self._stack = self._stack.pop_all()
        # The quotas apply after a first run: importing torch with a tenth of a core takes a minute.
        addresses = tuple(free_addresses(len(self._cores)))
        self.train(RingRun(transport="grpc", addresses=addresses, batch_size=8, num_steps=2))
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
        run: RingRun,
        members: Sequence[int] | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> list[MemberTimes]:
        """Let `members` (by default all) do a run, and return their measurements.

        `on_step` is called with the number of each step of the first of them. Raises `RuntimeError` if a member fails.
        """
        processes = [self._processes[member] for member in members or range(len(self._processes))]
        for rank, process in enumerate(processes):
            process.write(json.dumps({"run": asdict(run), "rank": rank}))
        with ThreadPoolExecutor(len(processes)) as threads:
            heard = [
                threads.submit(_listen, process, on_step if rank == 0 else lambda step: None)
                for rank, process in enumerate(processes)
            ]
            try:
                return [each.result() for each in heard]
            except BaseException:
                # Otherwise threads would wait for members that wait for the failed one.
                for process in processes:
                    process.kill()
                raise


def _listen(process: LineProcess, on_step: Callable[[int], None]) -> MemberTimes:
    while True:
        said = json.loads(process.read())
        if isinstance(said, Mapping):
            return from_json(MemberTimes, said)
        on_step(said)
