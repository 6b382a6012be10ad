"""Figs. 16 and 17: recovery after one of the four devices of environment D leaves (§5.5, F33).

Lightweight recovery: the survivors plan as the runtime does (`replanning.recovered`), and send each other the missing
layers, all pairs at once. Heavy recovery: all stages are sent to
the most powerful remaining device, which plans again and sends every device its stage. A layer is sent with its
optimiser's state. Seconds count from the detection of the loss; the time of a heartbeat and a probe is not stated and
equal for both. Transfers are in virtual time; planning runs on this machine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

from socflower.cluster import Cluster
from socflower.paper.asteroid.methods import NO_FIT, SETTINGS, asteroid
from socflower.paper.asteroid.settings import ENVIRONMENTS, MICRO_BATCHES, problem_of
from socflower.pipeline.plan import Plan
from socflower.pipeline.planner.pruning import search_work, seconds_of
from socflower.pipeline.planner.selection import (
    Planned,
    fits,
    plan_pipeline,
    predict,
)
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.recovery.weight_moves import StateTransfer, backup_of, moves
from socflower.pipeline.replanning import recovered
from socflower.sim import EventClock
from socflower.sim.processes import Process, Simulation

_Made = TypeVar("_Made")

# The bandwidth is not stated.
_MODEL, _ENVIRONMENT, _MBPS = "efficientnet-b1", "D", 100
_LETTERS = "ABCD"
"""The devices of environment D in the order of Table 5; the order in Fig. 16 is only in an image."""

# To plan EfficientNet-B1 on environment C, on an NX.
_TABLE_7_S = 480.0
# The part of the throughput that §5.5 itself calls comparable.
_COMPARABLE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescheduling:
    """A recovery from the loss of a device."""

    plan: Plan
    # On this machine.
    planning_s: float
    # In virtual time.
    transfer_s: float
    moved_bytes: float
    samples_per_s: float
    # Whether the plan keeps all budgets.
    fits: bool

    @property
    def seconds(self) -> float:
        """Seconds from the detection of the loss until all devices have their new stages."""
        return self.planning_s + self.transfer_s


def figure_16() -> Mapping[str, float | bool | str]:
    """Return both recoveries' seconds and megabytes and the ratio of their throughputs, for each lost device."""
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
    faster = [light.seconds < heavy.seconds for light, heavy in pairs]
    comparable = [
        light.fits and light.samples_per_s >= _COMPARABLE * heavy.samples_per_s
        for light, heavy in pairs
    ]
    return {
        **found,
        "lightweight recovers faster, whichever leaves": all(faster),
        "comparable throughput, whichever leaves": all(comparable),
    }


def figure_17() -> Mapping[str, float | bool | str]:
    """Return the speed-up of the lightweight recovery after the loss of device B, and the ratio of throughputs."""
    light, heavy = dropped(_LETTERS.index("B"))
    light_a, heavy_a = dropped(_LETTERS.index("A"))
    over_s = (table_7_s() + heavy.transfer_s) / light.seconds
    over_a_s = (table_7_s() + heavy_a.transfer_s) / light_a.seconds
    return {
        "heavy over lightweight, planned here": heavy.seconds / light.seconds,
        "heavy over lightweight, planned as in Table 7": over_s,
        "A: heavy over lightweight, planned as in Table 7": over_a_s,
        "throughput over heavy": _throughput(light, heavy),
    }


@cache
def table_7_s() -> float:
    """Return the paper's seconds to plan environment C on an NX, scaled to D without a device by `search_work`."""
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
    """Return the lightweight recovery from the loss of a device (F33)."""
    present = [soc for soc in plan.socs if soc != lost]
    found, planning_s = _timed(lambda: recovered(plan, problem, present))
    # A plan in 2-D divides each micro-batch among its pipelines.
    size = sum(each.micro_batch_size for each in found.pipelines)
    number = found.pipelines[0].num_micro_batches
    remaining = replace(without(problem, lost), micro_batch_size=size, num_micro_batches=number)
    sent = moves(layers_of(found), held_after(plan, lost), present)
    return _rescheduling(remaining, found, planning_s, [sent])


def heavy(
    problem: PipelineProblem,
    plan: Plan,
    lost: int,
    planner: Callable[[PipelineProblem], Planned],
) -> Rescheduling:
    """Return the heavy recovery: all stages are sent to the fastest device, which plans again."""
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
    """Return the problem without a device."""
    return replace(problem, devices=tuple(each for each in problem.devices if each.soc != lost))


def layers_of(plan: Plan) -> dict[int, list[str]]:
    """Return the layers that each device of a plan trains, by their numbers."""
    return {
        soc: [str(layer) for layer in range(stage.first_layer, stage.last_layer + 1)]
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for soc in stage.devices
    }


def held_after(plan: Plan, lost: int) -> dict[int, list[str]]:
    """Return the layers of the other devices after a loss: those of their own stages and of their backups."""
    own = layers_of(plan)
    held = {soc: list(names) for soc, names in own.items() if soc != lost}
    for owner, keeper in backup_of(plan).items():
        if keeper != lost:
            held[keeper] += own[owner]
    return held


def concurrent_s(cluster: Cluster, transfers: Sequence[tuple[int, int, float]]) -> float:
    """Return the virtual seconds of simultaneous transfers (source, target, bytes)."""
    if not transfers:
        return 0.0

    def start(simulation: Simulation) -> None:
        for source, target, num_bytes in transfers:
            transfer = _one(simulation, source, target, num_bytes)
            simulation.start(transfer, f"layers from {source} to {target}")

    return EventClock(cluster).run_processes(start, socs=range(cluster.num_socs)).duration_s


def _one(
    simulation: Simulation,
    source: int,
    target: int,
    num_bytes: float,
) -> Process[None]:
    yield simulation.send(source, target, num_bytes, "layers")


def _rescheduling(
    problem: PipelineProblem,
    plan: Plan,
    planning_s: float,
    phases: Sequence[Sequence[StateTransfer]],
) -> Rescheduling:
    """Return a recovery; the transfers of a phase are concurrent and begin after those of the phase before."""
    state, layers = 1.0 + problem.optimizer_copies, problem.model.layers
    transfers: list[list[tuple[int, int, float]]] = []
    for phase in phases:
        transfers.append([])
        for move in phase:
            weight_bytes = sum(layers[int(name)].weight_bytes for name in move.names)
            transfers[-1].append((move.source, move.target, state * weight_bytes))
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
    """Return a function's result, and its seconds."""
    start_s = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start_s
