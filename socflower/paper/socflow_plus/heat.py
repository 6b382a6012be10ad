"""A rack under constant load in simulated heat: Table 2, Fig. 2d and Fig. 7 (F21).

No figure is looked up in a table: temperatures and slowdowns are those of an RC network with a governor that steps the
clocks and with fans that follow a curve. `benchmarks/heat_calibration.py` fits the curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from socflower.thermal.fans.fan_curve import FanCurve
from socflower.thermal.fans.policies import FixedSpeed
from socflower.thermal.model.constants import constant
from socflower.thermal.model.dynamics import RackDynamics
from socflower.thermal.model.rack import Rack

START_C = 28.0
"""Where SoCFlow+ Fig. 2d begins."""

_SETTLED_S = 3.0 * 3600.0
# After that: several cycles of the slowest governor.
_AVERAGED_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A rack under constant load: a number of busy SoCs, the others idle, boards filled one after the other."""

    num_busy: int
    # Of one SoC at full clock.
    busy_w: float
    idle_w: float
    # The part of `busy_w` that does not depend on the clock: another processor's.
    unthrottled_w: float = 0.0
    num_boards: int = 12
    socs_per_board: int = 5
    ambient_c: float = 25.0

    @property
    def rack(self) -> Rack:
        """Return the rack."""
        return Rack(slots_per_board=(self.socs_per_board,) * self.num_boards)

    def power_w(self, power_factors: Sequence[float]) -> list[float]:
        """Return watts by SoC at the present clocks."""
        clocked_w = self.busy_w - self.idle_w - self.unthrottled_w
        return [
            self.idle_w + self.unthrottled_w + factor * clocked_w
            if soc < self.num_busy
            else self.idle_w
            for soc, factor in enumerate(power_factors)
        ]


def fan_table_experiment() -> Experiment:
    """Return the experiment of SoCFlow+ Table 2."""
    return Experiment(
        num_busy=int(constant("experiment", "num_busy")),
        busy_w=constant("experiment", "busy_w"),
        idle_w=constant("experiment", "idle_w"),
        num_boards=int(constant("experiment", "num_boards")),
        socs_per_board=int(constant("experiment", "socs_per_board")),
        ambient_c=constant("experiment", "ambient_c"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanHeat:
    """The steady state of an experiment: means over the busy SoCs and an hour of governor cycles."""

    soc_c: float
    # Of the clocks, 0 to 1.
    decline: float


def settled(experiment: Experiment, rpm: float, fans: FanCurve | None = None) -> MeanHeat:
    """Return the simulated steady state under constant load at a fixed fan speed."""
    rack = RackDynamics(experiment.rack, FixedSpeed(fixed_rpm=rpm), fans=fans, start_c=START_C)
    _run(rack, experiment, _SETTLED_S)
    temperatures, speeds, passed_s = 0.0, 0.0, 0.0
    while passed_s < _AVERAGED_S:
        factors = rack.speed_factors()[: experiment.num_busy]
        rack.advance(10.0, experiment.power_w(rack.power_factors()))
        temperatures += float(rack.temperatures_c[: experiment.num_busy].mean()) * 10.0
        speeds += sum(factors) / experiment.num_busy * 10.0
        passed_s += 10.0
    return MeanHeat(soc_c=temperatures / passed_s, decline=1.0 - speeds / passed_s)


def onset_s(
    experiment: Experiment,
    rpm: float,
    fans: FanCurve | None = None,
    *,
    rack: Rack | None = None,
    tick_s: float = 5.0,
) -> float:
    """Return the time from `START_C` until constant load first lowers a SoC's clock; infinity if it never does."""
    dynamics = RackDynamics(
        rack or experiment.rack,
        FixedSpeed(fixed_rpm=rpm),
        fans=fans,
        start_c=START_C,
        tick_s=tick_s,
    )
    power_w = experiment.power_w(dynamics.power_factors())
    passed_s = 0.0
    while min(dynamics.speed_factors()) == 1.0:
        step_s = dynamics.steady_s(power_w)
        dynamics.advance(step_s, power_w)
        passed_s += step_s
        if passed_s > _SETTLED_S:
            return math.inf
    return passed_s


def cooling_s(experiment: Experiment, rpm: float) -> float:
    """Return how long fans at `rpm` take to restore all clocks after the first trip at low fan speed."""
    begin = RackDynamics(
        experiment.rack, FixedSpeed(fixed_rpm=constant("fan", "low_rpm")), start_c=START_C
    )
    begin.advance(
        onset_s(experiment, constant("fan", "low_rpm")), experiment.power_w(begin.power_factors())
    )
    rack = RackDynamics(experiment.rack, FixedSpeed(fixed_rpm=rpm))
    rack.restore(begin.state() | {"rpm": rpm, "time_s": 0.0})
    passed_s = 0.0
    while min(rack.speed_factors()) < 1.0 and passed_s < _SETTLED_S:
        rack.advance(5.0, experiment.power_w(rack.power_factors()))
        passed_s += 5.0
    return passed_s


def temperature_after(experiment: Experiment, rpm: float, duration_s: float) -> tuple[float, float]:
    """Return the hottest SoC's temperature after a time of constant load from `START_C`, and the slowest clock."""
    rack = RackDynamics(experiment.rack, FixedSpeed(fixed_rpm=rpm), start_c=START_C)
    _run(rack, experiment, duration_s)
    return float(rack.temperatures_c.max()), min(rack.speed_factors())


def _run(rack: RackDynamics, experiment: Experiment, duration_s: float) -> None:
    passed_s = 0.0
    while passed_s < duration_s:
        power_w = experiment.power_w(rack.power_factors())
        step_s = min(rack.steady_s(power_w), duration_s - passed_s)
        rack.advance(step_s, power_w)
        passed_s += step_s
