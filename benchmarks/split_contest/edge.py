"""The edge: `python -m benchmarks.split_contest.edge` does the work in each line of its input and answers.

A line is JSON: `costs` with the cloud's seconds and the link's address, `front` for the edge's costs at one cut, `echo`
for those of its messages, or `run` with a run.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.split_contest.plan import Batches, EdgeRun, EdgeTimes, measuring, program
from benchmarks.split_contest.stream_costs import FEW_BYTES, echo_s, measure_slowdown
from socflower.edgecloud.cloud.operator_calls import CloudOperator, close_session, open_session
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.runtime.measuring import measure_costs, measure_front, to_document
from socflower.edgecloud.runtime.span_training import BatchSpan, train_front

_SLOWDOWN_S = 1.5


def costs(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what a batch costs at every cut: halves and codec by processor time, messages over the link.

    One factor for all, the slowdown under the quota, turns processor time into seconds. So it does not matter which
    periods of the quota a timing contains, nor what else this machine does.
    """
    slowdown = measure_slowdown(at_least_s=_SLOWDOWN_S)
    how = replace(measuring(asked["num_repeats"]), clock=lambda: slowdown * time.process_time())
    measured = measure_costs(
        program().split, how, cloud_s=asked["cloud_s"], bits=(8,), label_bytes=8.0
    )
    few_s, many_s = (
        slowdown
        * echo_s(
            asked["address"],
            asked["token"],
            num_bytes,
            num_batches=asked["num_batches"],
            name=f"{asked['name']}-{num_bytes}",
        )
        for num_bytes in (FEW_BYTES, asked["many_bytes"])
    )
    return {"costs": to_document(measured), "few_s": few_s, "many_s": many_s, "slowdown": slowdown}


def front(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure and return the costs of a batch in front of one cut, or of a step of the edge alone."""
    split = program().split
    how = replace(
        measuring(1),
        at_least_s=asked["at_least_s"],
        clock=lambda: asked["slowdown"] * time.process_time(),
    )
    return asdict(
        measure_front(split, split.num_cuts if asked["cut"] is None else asked["cut"], how)
    )


def echo(asked: dict[str, Any]) -> float:
    """Measure and return the processor seconds of a batch's messages."""
    return echo_s(**asked)


def train(run: EdgeRun) -> EdgeTimes:
    """Do a run and return its measurements."""
    batches = Batches(run.batch_size)
    placed = program().front(0, run.cut, batches)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    done_s: list[float] = []
    spent_s: list[float] = []

    def note() -> None:
        done_s.append(time.monotonic() - began_s)
        spent_s.append(time.process_time() - began_cpu_s)

    if run.cut is None:
        losses = []
        for batch in range(run.num_batches):
            losses.append(placed.half.train_alone(batch))
            note()
        report = LoopReport(
            first_batch=0, num_batches=run.num_batches, losses=dict(enumerate(losses))
        )
    else:
        report = _train_split(run, placed.half, note)
    if run.weights:
        np.savez(run.weights, **placed.arrays())
    order = sorted(report.losses)
    return EdgeTimes(
        done_s=tuple(done_s),
        spent_s=tuple(spent_s),
        losses=tuple(report.losses[batch] for batch in order),
        staleness=tuple(report.staleness.get(batch, 0) for batch in order),
        source=batches.source,
        peak_bytes=_peak_bytes(),
    )


def _train_split(run: EdgeRun, half: Any, on_done: Any) -> LoopReport:
    operator = CloudOperator(address=run.address, token=run.token)
    fingerprint = program().fingerprint()
    edge_token = open_session(
        operator, run_id=run.name, fingerprint=fingerprint, settings={"cut": run.cut}
    )
    connection = EdgeConnection(
        run.address, run_id=run.name, token=edge_token, fingerprint=fingerprint
    )
    plan = FrontPlan(
        split_plan=run.split_plan,
        progress=lambda progress: on_done(),
        coding=FeatureCoding(gradient_bits=run.gradient_bits, feedback=run.feedback),
    )
    try:
        return train_front(
            connection, half, BatchSpan(first_batch=0, num_batches=run.num_batches), plan
        )
    finally:
        connection.close()
        # A run that saves weights is compared with the cloud's half, which is fetched from the session.
        if not run.weights:
            close_session(operator, run.name)


def _peak_bytes() -> float:
    """Return the largest resident memory that the process had so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024.0 * float(lines["VmHWM"].split()[0])


_DOES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "costs": costs,
    "front": front,
    "echo": echo,
    "run": lambda told: asdict(train(EdgeRun(**told))),
}


def main() -> int:
    """Do the works until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        ((what, told),) = asked.items()
        print(json.dumps(_DOES[what](told)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
