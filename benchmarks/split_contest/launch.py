"""Starts edge, cloud and the link between them, holds the edge to its part of a core, and has them do what is asked."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.split_contest.plan import Measured, Run
from benchmarks.split_contest.stream_costs import FEW_BYTES, MOST_BYTES, StreamCosts, with_streams
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.runtime.measuring import from_document
from tests.cpu_quota import quota

REPOSITORY = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TIMEOUT_S = 900.0
_FRONT_S = 1.5
_ECHO_S, _ECHO_BATCHES = 0.25, 12
"""For which an echo may occupy the link, each way; and how many are measured as of now."""


class Pair:
    """A cloud and an edge of `cores`, each on a processor of its own where there are two, and their link; a context.

    An edge of None is held to nothing, and has done nothing yet. One processor for all of an edge's threads: otherwise
    one of them would hold what the quota leaves, and the others would wait for the next period. The link is beside the
    cloud and goes before it, so that its bytes do not pass through the caches of the edge's processor.
    """

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._stack = ExitStack()
        self._numbers = itertools.count()
        self.address = self.token = self.folder = ""
        self.slowdown = 1.0
        self._most_bytes = MOST_BYTES

    def __enter__(self) -> "Pair":
        with self._stack:
            self.folder = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="split-contest-")
            )
            processors = sorted(os.sched_getaffinity(0))
            self._cloud = self._start("cloud", processors[-1:])
            self._edge = self._start("edge", processors[:1])
            said = json.loads(self._line(self._cloud))
            self._link = self._start("relay", processors[-1:], said["address"], str(processors[0]))
            self.address, self.token = self._line(self._link).strip(), said["token"]
            if self._cores is not None:
                # Before it is held: to import torch with a tenth of a core takes a minute.
                self.train(Run(cut=0, num_batches=2))
                self.train(Run(cut=None, num_batches=2))
                self._stack.enter_context(
                    quota(self._cloud.pid, cores=1.0)
                )  # only so that it goes before others
                self._stack.enter_context(quota(self._edge.pid, cores=self._cores))
            self._stack = self._stack.pop_all()
        return self

    def renew_edge(self) -> None:
        """Start a fresh edge in place of the one before."""
        processors = psutil.Process(self._edge.pid).cpu_affinity()
        _end(self._edge)
        self._edge = self._start("edge", processors)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_rate(self, mbit_per_s: float) -> None:
        """Set the link's rate, each way; 0: as fast as loopback is."""
        self._tell(self._link, f"rate {mbit_per_s * 1e6 / 8}")

    def costs(self, *, mbit_per_s: float, num_repeats: int, num_batches: int) -> SplitCosts:
        """Return what a batch costs at either end, and its messages over the link at this rate, as of now."""
        self.set_rate(mbit_per_s)
        many_bytes = self._most_bytes = (
            MOST_BYTES if not mbit_per_s else round(min(MOST_BYTES, _ECHO_S * mbit_per_s * 1e6 / 8))
        )
        at_edge = self._ask(
            self._edge,
            {
                "costs": {
                    "cloud_s": self.cloud_s(num_repeats),
                    "num_repeats": num_repeats,
                    "num_batches": num_batches,
                    "many_bytes": many_bytes,
                    "address": self.address,
                    "token": self.token,
                    "name": f"echo-{next(self._numbers)}",
                }
            },
        )
        self.slowdown = at_edge["slowdown"]
        edge, cloud = (
            StreamCosts.of(few_s, many_s, many_bytes)
            for few_s, many_s in (
                (at_edge["few_s"], at_edge["many_s"]),
                json.loads(self._tell(self._cloud, "echoes")),
            )
        )
        return with_streams(from_document(at_edge["costs"]), edge, cloud)

    def as_of_now(self, costs: SplitCosts, split_plan: SplitPlan) -> SplitCosts:
        """Return the costs with the edge's measured again: of its half and its messages, or of the edge alone."""
        cut = split_plan.cut
        front = self._ask(
            self._edge, {"front": {"cut": cut, "slowdown": self.slowdown, "at_least_s": _FRONT_S}}
        )
        if cut is None:
            return replace(costs, edge_only_s=front["training_s"])
        renewed = replace(
            costs.cuts[cut],
            edge_forward_s=front["forward_s"],
            edge_backward_s=max(0.0, front["training_s"] - front["forward_s"]),
        )
        message_bytes = (costs.feature_bytes(cut, split_plan.bits) + costs.gradient_bytes(cut)) / 2
        num_bytes = 4 * round(min(self._most_bytes, max(FEW_BYTES, message_bytes)) / 4)
        batch_s: float = self.slowdown * self._ask(
            self._edge,
            {
                "echo": {
                    "address": self.address,
                    "token": self.token,
                    "num_bytes": num_bytes,
                    "num_batches": _ECHO_BATCHES,
                    "window": split_plan.window,
                    "name": f"echo-{next(self._numbers)}",
                }
            },
        )
        fixed_s = min(batch_s, costs.edge_s_per_batch)
        return replace(
            costs,
            cuts=(*costs.cuts[:cut], renewed, *costs.cuts[cut + 1 :]),
            edge_s_per_batch=fixed_s,
            edge_s_per_byte=(batch_s - fixed_s) / (2 * num_bytes),
        )

    def cloud_s(self, num_repeats: int) -> Sequence[float]:
        """Return the cloud's seconds for a batch at every cut."""
        seconds: list[float] = json.loads(self._tell(self._cloud, f"measure {num_repeats}"))
        return seconds

    def train(self, run: Run) -> Measured:
        """Do a run and return what the edge measured. Raises `RuntimeError` if it fails."""
        self.set_rate(run.mbit_per_s)
        named = replace(
            run,
            address=self.address,
            token=self.token,
            name=run.name or f"run-{next(self._numbers)}",
        )
        answer = self._ask(self._edge, {"run": asdict(named)})
        return Measured(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in answer.items()
            }
        )

    def _ask(self, process: "subprocess.Popen[str]", what: dict[str, Any]) -> Any:
        answer: Any = json.loads(self._tell(process, json.dumps(what)))
        return answer

    def _tell(self, process: "subprocess.Popen[str]", line: str) -> str:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return self._line(process)

    def _line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        overdue = threading.Timer(_TIMEOUT_S, process.kill)
        overdue.start()
        try:
            if line := process.stdout.readline():
                return line
        finally:
            overdue.cancel()
        raise RuntimeError(f"split: a process ended with {process.wait()}")

    def _start(
        self, name: str, processors: Sequence[int], *arguments: str
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.split_contest.{name}", *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        psutil.Process(process.pid).cpu_affinity(list(processors))
        self._stack.callback(_end, process)
        return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()
