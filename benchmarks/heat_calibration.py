"""Fitting the fan curve and the chassis's heat capacity to SoCFlow+, and predicting its other rows (F21)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from socflower.errors import ConfigError
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.fans.policies import FixedSpeed
from socflower.thermal.model.constants import FanTableRow, constant, fan_table
from socflower.thermal.model.dynamics import RackDynamics
from socflower.thermal.model.governor import ClockGovernor, snapdragon_governor
from socflower.thermal.model.rack import Rack

FITTED_RPM = (3250.0, 8300.0, 14000.0)
"""The rows of the fan table that the curve is fitted on; the other three are predicted.

One slow row (all three are equally good) gives the conductance without flow. 8,300 rpm is needed: without it the
threshold may lie anywhere above 5,700 rpm. Any slow row with 8,300 and 11,000 or 14,000 predicts the others within
0.4 C and half a point of slowdown; without 8,300 the worst is 4.7 C and 20 points, or there is no such curve. A curve
without a threshold misses by up to 17 C.
"""

ONSET_S = 660.0
"""SoCFlow+ 3.3: at low fan speed 40 SoCs underclock after 10 to 12 minutes."""

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
class Settled:
    """The steady state of an experiment: means over the busy SoCs and an hour of governor cycles."""

    soc_c: float
    # Of the clocks, 0 to 1.
    decline: float


def settled(experiment: Experiment, rpm: float, fans: FanCurve | None = None) -> Settled:
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
    return Settled(soc_c=temperatures / passed_s, decline=1.0 - speeds / passed_s)


def fit_fans(rows: Sequence[FanTableRow] | None = None) -> FanCurve:
    """Return the fan curve through three rows of the fan table, slow to fast.

    A row's decline gives the SoCs' power (the governor alternates between two of its clocks); power and temperature
    give the conductance in W/K. The first row is assumed to lie below the threshold; the others determine the threshold
    and the flow. `ConfigError` for rows that no such curve fits.
    """
    rows = rows or [row for row in fan_table() if row.rpm in FITTED_RPM]
    if len(rows) != 3 or not rows[0].rpm < rows[1].rpm < rows[2].rpm:
        raise ConfigError(
            f"calibration: need three rows with rising rpm, got {[row.rpm for row in rows]}"
        )
    still, middle, fast = (conductance_of(row) for row in rows)
    slow_flow, fast_flow = middle - still, fast - still
    if not 0.0 < slow_flow < fast_flow:
        raise ConfigError(
            f"calibration: the rows' conductances {still:.2f}, {middle:.2f}, {fast:.2f} W/K do not rise; "
            "no fan curve goes through them"
        )
    ratio = (slow_flow / fast_flow) ** 2
    threshold_squared = (rows[1].rpm ** 2 - ratio * rows[2].rpm ** 2) / (1.0 - ratio)
    if threshold_squared < 0.0:
        raise ConfigError(
            f"calibration: {rows[1].rpm:g} rpm cools more than a flow that starts at rest; choose other rows"
        )
    drag, air = _fit_power(rows)
    return FanCurve(
        still_w_per_k=still,
        threshold_rpm=math.sqrt(threshold_squared),
        flow_w_per_k_rpm=fast_flow / math.sqrt(rows[2].rpm ** 2 - threshold_squared),
        drag_w_per_rpm=drag,
        air_w_per_rpm3=air,
        min_rpm=constant("fan", "min_rpm"),
        max_rpm=constant("fan", "max_rpm"),
    )


def conductance_of(row: FanTableRow) -> float:
    """Return W/K from the chassis's air to the ambient air that a row of the fan table implies."""
    experiment, rack = fan_table_experiment(), fan_table_experiment().rack
    soc_w = _mean_power_w(experiment, snapdragon_governor(), row.decline)
    heat_w = experiment.num_busy * soc_w + (rack.num_socs - experiment.num_busy) * experiment.idle_w
    air_rise_c = (
        row.soc_c - experiment.ambient_c - rack.local_rise_c(soc_w, experiment.socs_per_board)
    )
    return heat_w / air_rise_c


def fit_chassis_j_per_k(fans: FanCurve) -> float:
    """Return the chassis's heat capacity for which the first trip at low fan speed occurs after `ONSET_S`."""
    experiment = fan_table_experiment()
    low, high = 1e3, 1e6
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        rack = replace(experiment.rack, chassis_j_per_k=middle)
        reached_s = onset_s(experiment, constant("fan", "low_rpm"), fans, rack=rack, tick_s=0.5)
        low, high = (middle, high) if reached_s < ONSET_S else (low, middle)
    return math.sqrt(low * high)


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


def worst_errors(fans: FanCurve, fitted: Sequence[float]) -> tuple[float, float]:
    """Return the largest errors of the rows that were not fitted: degrees and points of decline."""
    others = [row for row in fan_table() if row.rpm not in fitted]
    found = [(row, settled(fan_table_experiment(), row.rpm, fans)) for row in others]
    return (
        max(abs(one.soc_c - row.soc_c) for row, one in found),
        100.0 * max(abs(one.decline - row.decline) for row, one in found),
    )


def _run(rack: RackDynamics, experiment: Experiment, duration_s: float) -> None:
    passed_s = 0.0
    while passed_s < duration_s:
        power_w = experiment.power_w(rack.power_factors())
        step_s = min(rack.steady_s(power_w), duration_s - passed_s)
        rack.advance(step_s, power_w)
        passed_s += step_s


def _mean_power_w(experiment: Experiment, governor: ClockGovernor, decline: float) -> float:
    """Return a busy SoC's mean watts if the governor alternates between the two clocks around a mean decline."""
    speeds, powers = governor.clock_factors, governor.power_factors
    speed = 1.0 - decline
    if speed < speeds[-1]:
        raise ConfigError(
            f"calibration: a decline of {decline:.0%} is more than the lowest clock's "
            f"{1.0 - speeds[-1]:.0%}"
        )
    upper = max(level for level in range(len(speeds)) if speeds[level] >= speed)
    lower = min(upper + 1, len(speeds) - 1)
    part = (speed - speeds[lower]) / (speeds[upper] - speeds[lower]) if lower != upper else 1.0
    factor = part * powers[upper] + (1.0 - part) * powers[lower]
    return experiment.idle_w + factor * (experiment.busy_w - experiment.idle_w)


def _fit_power(rows: Sequence[FanTableRow]) -> tuple[float, float]:
    """Return drag (W/rpm) and air (W/rpm^3) by least squares."""
    a = sum(row.rpm**2 for row in rows)
    b = sum(row.rpm**4 for row in rows)
    c = sum(row.rpm**6 for row in rows)
    d = sum(row.rpm * row.fan_w for row in rows)
    e = sum(row.rpm**3 * row.fan_w for row in rows)
    determinant = a * c - b * b
    return (d * c - e * b) / determinant, (a * e - b * d) / determinant


def fitted_constants() -> dict[str, float]:
    """Fit the fitted constants of `constants.toml` again and return them by key."""
    fans = fit_fans()
    return {
        "still_w_per_k": fans.still_w_per_k,
        "threshold_rpm": fans.threshold_rpm,
        "flow_w_per_k_rpm": fans.flow_w_per_k_rpm,
        "drag_w_per_rpm": fans.drag_w_per_rpm,
        "air_w_per_rpm3": fans.air_w_per_rpm3,
        "chassis_j_per_k": fit_chassis_j_per_k(rack_fans()),
    }
