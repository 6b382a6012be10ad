"""One member: `python -m benchmarks.rebalancing_rack.member FOLDER` does the runs of its input.

A line of input is JSON with `run` and `rank`. The answer is a line with the number of every step that was applied, and
then one line of JSON with the measurements.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import from_json
from benchmarks.rebalancing_rack.plan import MemberTimes, RingRun, flat_weights, model, trainer
from socflower.peers.owner_preemption import PreemptionSwitch
from socflower.peers.ring.member import AppliedStep, RingMember
from socflower.peers.transports.port import RingPort
from socflower.wire.message_keys import COMPLETED, RingTask

_TOKEN = b"for benchmarks, everybody's key."
_PATIENCE_S = 120.0


def measure(run: RingRun, rank: int, folder: Path) -> MemberTimes:
    """Train as a member of the run's ring."""
    ring = RingTask(
        participant=rank,
        leader=0,
        addresses=run.addresses,
        token=_TOKEN.hex(),
        transport=run.transport,
        heartbeat_s=_PATIENCE_S,
        rendezvous_s=_PATIENCE_S,
        rebalance_steps=run.rebalance_steps,
    )
    port = RingPort(
        run.addresses[rank],
        rank=rank,
        addresses=run.addresses,
        token=_TOKEN,
        tls=None,
        heartbeat_s=_PATIENCE_S,
    )
    ended_s: list[float] = []
    own_s: list[float] = []
    samples: list[int] = []

    def on_step(step: AppliedStep) -> None:
        ended_s.append(time.perf_counter())
        own_s.append(step.own_s)
        samples.append(len(step.samples))
        print(step.step, flush=True)

    trained = model()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        end = RingMember(
            model=trained,
            has_model=rank == 0,
            data=run.samples(),
            group=run.task(),
            ring=ring,
            trainer=trainer(),
            port=port,
            switch=PreemptionSwitch(),
            on_step=on_step,
        ).train()
    finally:
        port.close()
    if end.outcome.outcome != COMPLETED or end.outcome.recoveries_s:
        raise RuntimeError(f"the ring did not stay whole: {end.outcome}")
    cores = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    file = folder / f"weights-{rank}.npy"
    np.save(file, flat_weights(trained))
    return MemberTimes(
        step_s=tuple(np.diff(ended_s).tolist()),
        own_s=tuple(own_s),
        samples=tuple(samples),
        rates=end.outcome.rates,
        cores=cores,
        weights=str(file),
    )


def main(folder: str) -> int:
    """Do runs until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        measured = measure(from_json(RingRun, asked["run"]), asked["rank"], Path(folder))
        print(json.dumps(asdict(measured)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
