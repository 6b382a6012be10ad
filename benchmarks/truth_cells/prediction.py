"""The prediction of a cell in virtual time, before it is measured."""

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
from socflower.hierarchy.exchange.collective_tasks import BUCKETS
from socflower.hierarchy.exchange.models import ModelExchange
from socflower.model_graph.layer_profile import profile_module
from socflower.sim import EventClock
from tests.testbed.topology import GOODPUT, Rack

SLEEPING_UPDATE_S = 0.005
# About how long a cell takes.
_CELL_S = 6.0
# The least and the largest number of an interval's steps.
_NUM_STEPS = (2, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The seconds of a step on each SoC, measured before the cell, or known if SoCs sleep."""

    # Forward and backward pass of each SoC's share.
    step_s: Mapping[int, float]
    update_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The overhead of our runtime beside the bytes, measured on `reference_cells`."""

    # Of a sub-step of a ring, by `Cell.runtime`.
    message_s: Mapping[str, float]
    # Of a step with an exchange, by `Cell.runtime`.
    step_s: Mapping[str, float]
    # Of new rings among members and leaders, by transport and topology of leaders.
    synchronisation_s: Mapping[str, float]

    @classmethod
    def none(cls) -> "Constants":
        """Return the constants of a runtime without overhead."""
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
    """The plan of a cell and its predicted seconds."""

    plan: GroupPlan
    exchanges: Exchanges
    interval: SyncInterval
    # Of each of the two intervals, or of half of the only one.
    steps_s: float
    synchronisation_s: float

    @property
    def seconds(self) -> float:
        """The time of the cell."""
        return 2.0 * self.steps_s + self.synchronisation_s


def model_profile(name: str) -> ModelProfile:
    """Return the costs of a cell's model."""
    return profile_module(build_model(name), IMAGE, name)


def plan_of(cell: Cell) -> GroupPlan:
    """Return the groups of a cell; they do not depend on measurements."""
    return plan_groups(
        _cluster(cell, _devices(cell, None), 0.0), cell.num_groups, capacities=speeds_of(cell)
    )


def shares_of(cell: Cell) -> Mapping[int, int]:
    """Return the samples of each SoC in a step."""
    return _costs(cell, plan_of(cell), _cluster(cell, _devices(cell, None), 0.0)).shares


def sleeping(cell: Cell) -> Calibration:
    """Return the calibration of a cell that sleeps."""
    speeds, shares = speeds_of(cell), shares_of(cell)
    return Calibration(
        step_s={soc: share * cell.sample_s / speeds[soc] for soc, share in shares.items()},
        update_s=SLEEPING_UPDATE_S,
    )


def predict(cell: Cell, calibration: Calibration, constants: Constants) -> Prediction:
    """Return the prediction: virtual time plus our runtime's overhead."""
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
        models=ModelExchange(kind=cell.leaders),
        fusion=BUCKETS,
    )


def speeds_of(cell: Cell) -> list[float]:
    """Return the speed of each SoC."""
    return [
        speed
        for slots, speed in zip(cell.slots_per_board, cell.speeds, strict=True)
        for _ in range(slots)
    ]


def _cluster(cell: Cell, devices: Mapping[int, Device], message_s: float) -> Cluster:
    """Return the cell's rack; the hub is at the hub's link, not on a board of its own."""
    rack = Rack(
        slots_per_board=cell.slots_per_board,
        soc_bit_per_s=cell.rack.soc_bit_per_s,
        uplink_bit_per_s=cell.rack.uplink_bit_per_s,
    )
    cluster = rack.cluster()
    # A board has devices of one kind. Measured devices differ by chance alone, so the slowest one
    # stands for its board.
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
    for soc, speed in enumerate(speeds_of(cell)):
        timings = {}
        if calibration is not None and shares[soc]:
            timings[cell.model] = StepTimings(
                batches=(shares[soc],), step_s=(calibration.step_s[soc],)
            )
        cpu = Processor(name="cpu", flops_per_s=speed * 1e9, active_w=1.0, timings=timings)
        update_s = SLEEPING_UPDATE_S if calibration is None else calibration.update_s
        devices[soc] = replace(
            base,
            processors={"cpu": cpu},
            memory_bytes_per_s=UPDATE_PASSES * profile.weight_bytes / update_s,
        )
    return devices
