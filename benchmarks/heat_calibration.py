"""Fitting the fan curve and the chassis's heat capacity to SoCFlow+, and predicting its other rows (F21)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from socflower.errors import ConfigError
from socflower.paper.socflow_plus.heat import Experiment, fan_table_experiment, onset_s, settled
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.model.constants import FanTableRow, constant, fan_table
from socflower.thermal.model.governor import ClockGovernor, snapdragon_governor

FITTED_RPM = (3250.0, 8300.0, 14000.0)
"""The rows of the fan table that the curve is fitted on; the other three are predicted.

One slow row (all three are equally good) gives the conductance without flow. 8,300 rpm is needed: without it the
threshold may lie anywhere above 5,700 rpm. Any slow row with 8,300 and 11,000 or 14,000 predicts the others within
0.4 C and half a point of slowdown; without 8,300 the worst is 4.7 C and 20 points, or there is no such curve. A curve
without a threshold misses by up to 17 C.
"""

ONSET_S = 660.0
"""SoCFlow+ 3.3: at low fan speed 40 SoCs underclock after 10 to 12 minutes."""


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


def worst_errors(fans: FanCurve, fitted: Sequence[float]) -> tuple[float, float]:
    """Return the largest errors of the rows that were not fitted: degrees and points of decline."""
    others = [row for row in fan_table() if row.rpm not in fitted]
    found = [(row, settled(fan_table_experiment(), row.rpm, fans)) for row in others]
    return (
        max(abs(one.soc_c - row.soc_c) for row, one in found),
        100.0 * max(abs(one.decline - row.decline) for row, one in found),
    )


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
