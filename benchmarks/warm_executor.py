"""Seconds of a round whose ClientApps are forked from a process with torch loaded, against fresh processes.

Two deployments of four real SuperNodes train LeNet-5 on the digits in turn, so that other work on the machine slows
both. Each round has a message for each node. The first round of a run, in which nodes may fetch the app, is not timed.
Processor seconds of all SuperNodes in a round are given as well, since wall-clock time says less on a machine with
fewer cores than nodes. The answer is right if all runs end with the same weights, bit for bit.
"""

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from benchmarks.harness import Row, less_is_better
from benchmarks.hub_traffic import Deployment, deployed

NUM_NODES, NUM_ROUNDS = 4, 4


class DeploymentTimes:
    """The times of one deployment's runs so far."""

    def __init__(self, cluster: Deployment) -> None:
        cluster.wait_until_idle()
        self._cluster = cluster
        # Of each round but the first of a run.
        self.round_s: list[float] = []
        # Of all SuperNodes and the processes that they started, for a round, by run.
        self.cpu_s: list[float] = []
        self.weights: set[str] = set()

    def run(self) -> None:
        """Train once."""
        before_s = _cpu_s(self._cluster.node_pids)
        marks = self._cluster.run(strategy="socflow", num_groups=NUM_NODES, num_rounds=NUM_ROUNDS)
        self._cluster.wait_until_idle()
        self.cpu_s.append((_cpu_s(self._cluster.node_pids) - before_s) / NUM_ROUNDS)
        self.round_s += [
            after["time_s"] - before["time_s"] for before, after in pairwise(marks[1:])
        ]
        self.weights.add(marks[-1]["sha256"])

    def memory_bytes(self) -> float:
        """Return the memory of a SuperNode and its processes between rounds; shared pages count once."""
        return median(_memory_bytes(pid) for pid in self._cluster.node_pids)


def run(quick: bool = False) -> list[Row]:
    """Return rows for time, processor time and memory."""
    with ExitStack() as stack:
        warm, cold = (
            DeploymentTimes(stack.enter_context(deployed(NUM_NODES, warm=warm)))
            for warm in (True, False)
        )
        for _ in range(1 if quick else 2):
            warm.run()
            cold.run()
        memory_bytes = [each.memory_bytes() for each in (warm, cold)]
    case, ok = f"LeNet-5, {NUM_NODES} SuperNodes: ", len(warm.weights | cold.weights) == 1
    return [
        less_is_better(case + what, ours, "a fresh process for each message", peer, unit, ok=ok)
        for what, ours, peer, unit in (
            ("a round, median", median(warm.round_s), median(cold.round_s), "s"),
            ("a round, fastest", min(warm.round_s), min(cold.round_s), "s"),
            (
                "processor time of all nodes in a round, median",
                median(warm.cpu_s),
                median(cold.cpu_s),
                "s",
            ),
            ("memory of a node between rounds", *memory_bytes, "B"),
        )
    ]


def _family(pid: int) -> list[psutil.Process]:
    node = psutil.Process(pid)
    return [node, *node.children(recursive=True)]


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return user and system seconds of processes and of their children that have ended."""
    return sum(sum(process.cpu_times()[:4]) for pid in pids for process in _family(pid))


def _memory_bytes(pid: int) -> float:
    return float(
        sum(
            process.memory_full_info().pss
            for process in _family(pid)
            if process.status() != psutil.STATUS_ZOMBIE
            and Path(f"/proc/{process.pid}/smaps").exists()
        )
    )
