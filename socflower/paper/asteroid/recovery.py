"""Figs. 16 and 17: what it takes to go on when one of the four devices of environment D leaves (§5.5, F33).

Lightweight: the survivors divide the layers anew (`pipeline.replanning`), with fewer micro-batches in flight where
memory holds fewer, and send each other, all pairs at once, what they lack. Heavy: all stages are sent to the most
powerful device that is left, which plans anew and sends every device its stage. A layer is sent with its optimiser's
state. Seconds count from when the loss is known: how long a heartbeat and a probe take is not stated and the same for
both. Transfers are in virtual time, planning is on this machine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TypeVar

from socflower.cluster import Cluster
from socflower.paper.asteroid.methods import NO_FIT, SETTINGS, asteroid
from socflower.paper.asteroid.settings import ENVIRONMENTS, MICRO_BATCHES, problem_of
from socflower.pipeline.plan import PipelinePlan, Plan
from socflower.pipeline.planner.pruning import search_work, seconds_of
from socflower.pipeline.planner.selection import (
    Planned,
    fits,
    plan_pipeline,
    predict,
    with_in_flight,
)
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.recovery.backups import StateTransfer, backup_of, moves
from socflower.pipeline.replanning import replanned
from socflower.sim import EventClock
from socflower.sim.processes import Process, Simulation

_Made = TypeVar("_Made")

_MODEL, _ENVIRONMENT, _MBPS = "efficientnet-b1", "D", 100  # the bandwidth is not stated
_LETTERS = "ABCD"
"""The devices of environment D in the order of Table 5; which is which in Fig. 16 is in an image."""

_TABLE_7_S = 480.0  # to plan EfficientNet-B1 on environment C, on an NX
_COMPARABLE = 0.9  # of the throughput: what §5.5 itself calls comparable


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescheduling:
    """A way to go on without a device."""

    plan: Plan
    planning_s: float  # on this machine
    transfer_s: float  # in virtual time
    moved_bytes: float
    samples_per_s: float
    fits: bool  # whether the plan keeps all budgets

    @property
    def seconds(self) -> float:
        """Seconds from the knowledge of the loss until all devices have what the new plan needs."""
        return self.planning_s + self.transfer_s


def figure_16() -> Mapping[str, float | bool | str]:
    """Return both recoveries' seconds and megabytes and the ratio of their throughputs, for each device that leaves."""
    found: dict[str, float | bool | str] = {}
    pairs = [dropped(soc) for soc in range(len(ENVIRONMENTS[_ENVIRONMENT]))]
    for letter, (light, heavy) in zip(_LETTERS, pairs, strict=True):
        found |= {
            f"{letter}: lightweight": light.seconds,
            f"{letter}: lightweight, sent": light.moved_bytes / 1e6,
            f"{letter}: heavy, planned here": heavy.seconds,
            f"{letter}: heavy, planned as in Table 7": table_7_s() + heavy.transfer_s,
            f"{letter}: heavy, sent": heavy.moved_bytes / 1e6,
            f"{letter}: throughput over heavy": _throughput(light, heavy),
        }
    return {
        **found,
        "lightweight recovers faster, whichever leaves": all(
            light.seconds < heavy.seconds for light, heavy in pairs
        ),
        "comparable throughput, whichever leaves": all(
            light.fits and light.samples_per_s >= _COMPARABLE * heavy.samples_per_s
            for light, heavy in pairs
        ),
    }


def figure_17() -> Mapping[str, float | bool | str]:
    """Return how much faster the lightweight recovery is when device B leaves, and its part of the throughput."""
    light, heavy = dropped(_LETTERS.index("B"))
    others = dropped(_LETTERS.index("A"))
    return {
        "heavy over lightweight, planned here": heavy.seconds / light.seconds,
        "heavy over lightweight, planned as in Table 7": (table_7_s() + heavy.transfer_s)
        / light.seconds,
        "A: heavy over lightweight, planned as in Table 7": (table_7_s() + others[1].transfer_s)
        / others[0].seconds,
        "throughput over heavy": _throughput(light, heavy),
    }


@cache
def table_7_s() -> float:
    """Return the paper's seconds to plan environment C on an NX, by the work of a search over one device less than D's.

    Work is that of `search_work`.
    """
    remaining = without(problem_of(_MODEL, _ENVIRONMENT, _MBPS), 0)
    return _TABLE_7_S * search_work(remaining, 1) / search_work(problem_of(_MODEL, "C", _MBPS), 1)


@cache
def dropped(soc: int) -> tuple[Rescheduling, Rescheduling]:
    """Return the lightweight and the heavy recovery from the loss of a device of environment D, cached."""
    planned = asteroid(_MODEL, _ENVIRONMENT, _MBPS)
    settings = replace(SETTINGS, micro_batch_sizes=MICRO_BATCHES[_MODEL])
    return (
        lightweight(planned.problem, planned.plan, soc),
        heavy(planned.problem, planned.plan, soc, partial(plan_pipeline, settings=settings)),
    )


def lightweight(problem: PipelineProblem, plan: Plan, lost: int) -> Rescheduling:
    """Return what the lightweight recovery from the loss of a device takes."""
    present = [soc for soc in plan.socs if soc != lost]
    remaining = without(problem, lost)

    def planner() -> Plan:
        found = replanned(plan, problem.model, present)
        return (
            with_in_flight(remaining, found, [stage.in_flight for stage in found.stages])
            if isinstance(found, PipelinePlan)
            else found
        )

    found, planning_s = _timed(planner)
    sent = moves(layers_of(found), held_after(plan, lost), present)
    return _rescheduling(remaining, found, planning_s, [sent])


def heavy(
    problem: PipelineProblem,
    plan: Plan,
    lost: int,
    planner: Callable[[PipelineProblem], Planned],
) -> Rescheduling:
    """Return what rescheduling takes that brings all stages to one device, the fastest, and plans anew there."""
    remaining = without(problem, lost)
    coordinator = min(remaining.devices, key=seconds_of).soc
    everything = {coordinator: [str(layer) for layer in range(problem.model.num_layers)]}
    gathered = moves(everything, held_after(plan, lost), [soc for soc in plan.socs if soc != lost])
    found, planning_s = _timed(lambda: planner(remaining))
    spread = [
        StateTransfer(coordinator, soc, tuple(names))
        for soc, names in layers_of(found.plan).items()
        if soc != coordinator
    ]
    return _rescheduling(found.problem, found.plan, planning_s, [gathered, spread])


def without(problem: PipelineProblem, lost: int) -> PipelineProblem:
    """Return the problem on the devices that are left."""
    return replace(
        problem, devices=tuple(device for device in problem.devices if device.soc != lost)
    )


def layers_of(plan: Plan) -> dict[int, list[str]]:
    """Return the layers that each device of a plan trains, by their numbers."""
    return {
        soc: [str(layer) for layer in range(stage.first_layer, stage.last_layer + 1)]
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for soc in stage.devices
    }


def held_after(plan: Plan, lost: int) -> dict[int, list[str]]:
    """Return the layers that the others have when a device is lost: their own stages' and those they keep copies of."""
    own, kept = layers_of(plan), backup_of(plan)
    return {
        soc: list(chain(names, *(own[owner] for owner, keeper in kept.items() if keeper == soc)))
        for soc, names in own.items()
        if soc != lost
    }


def concurrent_s(cluster: Cluster, transfers: Sequence[tuple[int, int, float]]) -> float:
    """Return the virtual seconds of transfers (source, target, bytes) that begin at once."""
    if not transfers:
        return 0.0

    def start(simulation: Simulation) -> None:
        for source, target, num_bytes in transfers:
            simulation.start(
                _one(simulation, source, target, num_bytes), f"layers from {source} to {target}"
            )

    return EventClock(cluster).run_processes(start, socs=range(cluster.num_socs)).duration_s


def _one(simulation: Simulation, source: int, target: int, num_bytes: float) -> Process[None]:
    yield simulation.send(source, target, num_bytes, "layers")


def _rescheduling(
    problem: PipelineProblem,
    plan: Plan,
    planning_s: float,
    phases: Sequence[Sequence[StateTransfer]],
) -> Rescheduling:
    """Return a recovery; transfers of a phase are concurrent, and begin when those of the one before have ended."""
    state = 1.0 + problem.optimizer_copies
    transfers = [
        [
            (
                move.source,
                move.target,
                state * sum(problem.model.layers[int(name)].weight_bytes for name in move.names),
            )
            for move in phase
        ]
        for phase in phases
    ]
    return Rescheduling(
        plan=plan,
        planning_s=planning_s,
        transfer_s=sum(concurrent_s(problem.cluster, phase) for phase in transfers),
        moved_bytes=sum(num_bytes for phase in transfers for _, _, num_bytes in phase),
        samples_per_s=predict(problem, plan, within_memory=False).samples_per_s,
        fits=fits(problem, plan),
    )


def _throughput(light: Rescheduling, heavy: Rescheduling) -> float | str:
    return light.samples_per_s / heavy.samples_per_s if light.fits and heavy.fits else NO_FIT


def _timed(make: Callable[[], _Made]) -> tuple[_Made, float]:
    """Return what a function makes, and the seconds that it took."""
    start_s = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start_s
