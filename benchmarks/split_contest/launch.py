"""Starts edge, cloud and the link between them, holds the edge to its CPU quota, and passes on work."""

import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import psutil

from benchmarks.harness import from_json
from benchmarks.processes import LineProcess
from benchmarks.split_contest.plan import EdgeRun, EdgeTimes
from benchmarks.split_contest.stream_costs import FEW_BYTES, MOST_BYTES, StreamCosts, with_streams
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.runtime.measuring import from_document
from tests.cpu_quota import quota

_FRONT_S = 1.5
# How long an echo may occupy the link in each direction, and how many echoes `as_of_now` measures.
_ECHO_S, _ECHO_BATCHES = 0.25, 12


class Pair:
    """An edge with a quota of `cores`, a cloud, and their link; a context.

    Edge and cloud have different processors if there are two. All threads of the edge have the same processor:
    otherwise one thread would use up the quota, and the others would wait for its next period. The link runs on the
    cloud's processor with a higher priority, so that its bytes do not pass through the caches of the edge's. With
    None for `cores` the edge has no quota and has not trained yet.
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
            said = json.loads(self._cloud.read())
            self._link = self._start("relay", processors[-1:], said["address"], str(processors[0]))
            self.address, self.token = self._link.read().strip(), said["token"]
            if self._cores is not None:
                # Before the quota applies: importing torch with a tenth of a core takes a minute.
                self.train(EdgeRun(cut=0, num_batches=2))
                self.train(EdgeRun(cut=None, num_batches=2))
                # A quota of a whole core only gives the cloud precedence over other processes.
                self._stack.enter_context(quota(self._cloud.pid, cores=1.0))
                self._stack.enter_context(quota(self._edge.pid, cores=self._cores))
            self._stack = self._stack.pop_all()
        return self

    def renew_edge(self) -> None:
        """Start a fresh edge in place of the one before."""
        processors = psutil.Process(self._edge.pid).cpu_affinity()
        self._edge.end()
        self._edge = self._start("edge", processors)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_rate(self, mbit_per_s: float) -> None:
        """Set the link's rate in each direction; 0 is the speed of loopback."""
        self._link.ask(f"rate {mbit_per_s * 1e6 / 8}")

    def costs(self, *, mbit_per_s: float, num_repeats: int, num_batches: int) -> SplitCosts:
        """Measure and return the costs of a batch at both ends, with its messages over the link at this rate."""
        self.set_rate(mbit_per_s)
        many_bytes = self._most_bytes = (
            MOST_BYTES if not mbit_per_s else round(min(MOST_BYTES, _ECHO_S * mbit_per_s * 1e6 / 8))
        )
        at_edge = self._ask_edge(
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
                json.loads(self._cloud.ask("echoes")),
            )
        )
        return with_streams(from_document(at_edge["costs"]), edge, cloud)

    def as_of_now(self, costs: SplitCosts, split_plan: SplitPlan) -> SplitCosts:
        """Return the costs with the edge's part measured again: its half and its messages, or the edge alone."""
        cut = split_plan.cut
        front = self._ask_edge(
            {"front": {"cut": cut, "slowdown": self.slowdown, "at_least_s": _FRONT_S}}
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
        batch_s: float = self.slowdown * self._ask_edge(
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
        seconds: list[float] = json.loads(self._cloud.ask(f"measure {num_repeats}"))
        return seconds

    def train(self, run: EdgeRun) -> EdgeTimes:
        """Do a run and return the edge's measurements. Raises `RuntimeError` if it fails."""
        self.set_rate(run.mbit_per_s)
        named = replace(
            run,
            address=self.address,
            token=self.token,
            name=run.name or f"run-{next(self._numbers)}",
        )
        answer = self._ask_edge({"run": asdict(named)})
        return from_json(EdgeTimes, answer)

    def _ask_edge(self, what: dict[str, Any]) -> Any:
        return json.loads(self._edge.ask(json.dumps(what)))

    def _start(self, name: str, processors: Sequence[int], *arguments: str) -> LineProcess:
        process = LineProcess(f"benchmarks.split_contest.{name}", *arguments)
        psutil.Process(process.pid).cpu_affinity(list(processors))
        self._stack.callback(process.end)
        return process
