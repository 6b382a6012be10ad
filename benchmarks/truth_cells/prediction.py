"""What virtual time says of a cell, before it is measured."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.truth_cells.cell import LEADERS, TRANSPORTS, Cell, reference_cells
from benchmarks.truth_cells.models import IMAGE, build_model
from socflower.cluster import Cluster, ModelProfile
from socflower.cluster.cost_model import UPDATE_PASSES
from socflower.cluster.device import Device, Processor, StepTimings
from socflower.cluster.device_catalog import device
from socflower.hierarchy import (
    Exchanges,
    GroupPlan,
    IntervalCosts,
    SyncInterval,
    choose_exchanges,
    plan_groups,
)
from socflower.hierarchy.collectives import BUCKETS
from socflower.model_graph.layer_profile import profile_module
from socflower.sim import EventClock
from tests.testbed.topology import GOODPUT, Rack

SLEEPING_UPDATE_S = 0.005
_CELL_S = 6.0  # that a cell takes about
_NUM_STEPS = (2, 100)  # of an interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What a step takes on each SoC, measured before the cell, or known where it sleeps."""

    step_s: Mapping[int, float]  # forward and backward pass of its share, by SoC
    update_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What our runtime costs beside the bytes, by `Cell.runtime`; measured on `reference_cells`."""

    message_s: Mapping[str, float]  # of a sub-step of a ring
    step_s: Mapping[str, float]  # of a step with an exchange
    synchronisation_s: Mapping[
        str, float
    ]  # by transport and how leaders meet: new rings and, among leaders, theirs

    @classmethod
    def none(cls) -> "Constants":
        """Return those of a runtime that costs nothing."""
        nothing = dict.fromkeys((cell.runtime for cell in reference_cells()), 0.0)
        return cls(
            message_s=nothing,
            step_s=nothing,
            synchronisation_s={
                f"{transport} {leaders}": 0.0 for transport in TRANSPORTS for leaders in LEADERS
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The plan of a cell, and how long it is to take."""

    plan: GroupPlan
    exchanges: Exchanges
    interval: SyncInterval
    steps_s: float  # of each of the two intervals; of one ring, of half of the only one
    synchronisation_s: float

    @property
    def seconds(self) -> float:
        """The time of the cell."""
        return 2.0 * self.steps_s + self.synchronisation_s


def model_profile(name: str) -> ModelProfile:
    """Return the costs of a cell's model."""
    return profile_module(build_model(name), IMAGE, name)


def plan_of(cell: Cell) -> GroupPlan:
    """Return the groups of a cell, which depend on nothing that is measured."""
    return plan_groups(
        _cluster(cell, _devices(cell, None), 0.0), cell.num_groups, capacities=_speeds(cell)
    )


def shares_of(cell: Cell) -> Mapping[int, int]:
    """Return the samples of each SoC in a step."""
    return _costs(cell, plan_of(cell), _cluster(cell, _devices(cell, None), 0.0)).shares


def sleeping(cell: Cell) -> Calibration:
    """Return what a step takes in a cell that sleeps."""
    speeds, shares = _speeds(cell), shares_of(cell)
    return Calibration(
        step_s={soc: share * cell.sample_s / speeds[soc] for soc, share in shares.items()},
        update_s=SLEEPING_UPDATE_S,
    )


def predict(cell: Cell, calibration: Calibration, constants: Constants) -> Prediction:
    """Return the prediction: virtual time, and what our runtime adds to it."""
    cluster = _cluster(cell, _devices(cell, calibration), constants.message_s[cell.runtime])
    costs = _costs(cell, plan_of(cell), cluster)
    clock = EventClock(cluster)
    exchanges, costs = choose_exchanges(costs, cell.in_turn, cell.leaders, Counter(), clock)
    least, most = _NUM_STEPS
    num_steps = min(
        most, max(least, round(_CELL_S / 2 / (clock.predicted_s(costs.step(), repeat=4) / 4)))
    )
    interval = SyncInterval(index=0, first_step=0, num_steps=num_steps, epoch_end=1.0, deal_epoch=0)
    steps_s = clock.predicted_s(costs.step(), repeat=num_steps)
    exchanges_s = (
        num_steps * constants.step_s[cell.runtime] if cell.num_groups < cell.num_socs else 0.0
    )
    return Prediction(
        plan=costs.plan,
        exchanges=exchanges,
        interval=interval,
        steps_s=steps_s + exchanges_s,
        synchronisation_s=0.0
        if len(costs.plan.groups) == 1
        else costs.run(interval, clock).duration_s
        - steps_s
        + constants.synchronisation_s[f"{cell.transport} {cell.leaders}"],
    )


def _costs(cell: Cell, plan: GroupPlan, cluster: Cluster) -> IntervalCosts:
    return IntervalCosts(
        cluster=cluster,
        plan=plan,
        profile=model_profile(cell.model),
        num_samples=cell.batch_size * cell.num_groups,
        batch_size=cell.batch_size,
        steps_per_epoch=1,
        uplink_turns=cell.in_turn,
        overlap_buckets=cell.overlap_buckets,
        leaders=cell.leaders,
        fusion=BUCKETS,
    )


def _speeds(cell: Cell) -> list[float]:
    return [
        speed
        for slots, speed in zip(cell.slots_per_board, cell.speeds, strict=True)
        for _ in range(slots)
    ]


def _cluster(cell: Cell, devices: Mapping[int, Device], message_s: float) -> Cluster:
    """Return the cell's rack without the board of the hub, which is at the hub's link instead."""
    rack = Rack(
        slots_per_board=cell.slots_per_board,
        soc_bit_per_s=cell.rack.soc_bit_per_s,
        uplink_bit_per_s=cell.rack.uplink_bit_per_s,
    )
    cluster = rack.cluster()
    # A board has devices of one kind. Those that were measured differ by chance alone, and count as the slowest one.
    boards = tuple(
        replace(board, device=max((devices[soc] for soc in cluster.socs_of(index)), key=_slowness))
        for index, board in enumerate(cluster.boards)
    )
    hub = GOODPUT * min(cell.rack.soc_bit_per_s, cell.rack.uplink_bit_per_s) / 8
    return replace(cluster, boards=boards, hub_bytes_per_s=hub, message_s=message_s)


def _slowness(made: Device) -> float:
    return max(
        (timings.step_s[-1] for timings in made.processors["cpu"].timings.values()), default=0.0
    )


def _devices(cell: Cell, calibration: Calibration | None) -> dict[int, Device]:
    base, profile = device("snapdragon-865"), model_profile(cell.model)
    shares = {} if calibration is None else shares_of(cell)
    devices = {}
    for soc, speed in enumerate(_speeds(cell)):
        timings = (
            {}
            if calibration is None or not shares[soc]
            else {
                cell.model: StepTimings(batches=(shares[soc],), step_s=(calibration.step_s[soc],))
            }
        )
        cpu = Processor(name="cpu", flops_per_s=speed * 1e9, active_w=1.0, timings=timings)
        update_s = SLEEPING_UPDATE_S if calibration is None else calibration.update_s
        devices[soc] = replace(
            base,
            processors={"cpu": cpu},
            memory_bytes_per_s=UPDATE_PASSES * profile.weight_bytes / update_s,
        )
    return devices
