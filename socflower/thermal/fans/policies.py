"""Fan policies: fixed speed, the paper's passive cooling (F19), and predictive cooling for a planned load."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from socflower.errors import require_order
from socflower.field_rules import NotNegative, Positive, checked
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.model.constants import constant

_FASTER = 1.005
"""Factor by which fans speed up per step while the planned speed is not enough; a step takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FanObservation:
    """The input of a policy's decision."""

    # On any monotonic clock.
    at_s: float
    # The hottest SoC with an accepted temperature; None if it is unknown.
    hottest_c: float | None
    # The present speed.
    rpm: float
    # SoCs without an accepted temperature, all SoCs, and SoCs that report throttling by heat.
    num_unknown: int = 0
    num_socs: int = 0
    num_throttled: int = 0
    # Of the SoCs with an accepted temperature, in one order; clocks, relative to the highest, are empty if unknown.
    temperatures_c: Sequence[float] = ()
    clock_factors: Sequence[float] = ()

    @property
    def lacks_temperatures(self) -> bool:
        """Whether the temperatures do not suffice: none is accepted, or fewer than half of the SoCs have one."""
        is_unknown = self.hottest_c is None or math.isnan(self.hottest_c)
        return is_unknown or 2 * self.num_unknown > self.num_socs


class FanPolicy(Protocol):
    """Decides on a fan speed from an observation alone, without state."""

    def rpm(self, observation: FanObservation) -> float:
        """Return the wanted speed, above 0."""
        ...


@runtime_checkable
class PredictingPolicy(FanPolicy, Protocol):
    """A policy that predicts temperatures, and so whether constant readings are plausible."""

    def expected_c(
        self,
        hottest_c: float,
        *,
        rpm: float,
        at_s: float,
        duration_s: float,
    ) -> float | None:
        """Return the predicted temperature of the hottest SoC at `at_s`, after `duration_s` at this speed, or None."""
        ...


@runtime_checkable
class RememberingPolicy(FanPolicy, Protocol):
    """A policy that remembers what it has observed: its caller keeps the memory, so that it can be stored."""

    def decide(self, observation: FanObservation, memory: Any) -> tuple[float, Any]:
        """Return the wanted speed, and the memory for the next step; the first one is None."""
        ...

    def restored(self, plain: Sequence[Any]) -> Any:
        """Return a memory from the lists that JSON made of it."""
        ...


_Endless = Annotated[float, Field(allow_inf_nan=True)]


@checked
class FixedSpeed:
    """A constant speed."""

    fixed_rpm: Positive

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed."""
        return self.fixed_rpm


@checked
class PassiveCooling:
    """Slow until the hottest SoC passes `hot_c`, then fast until it has come down to `cool_c` (F19).

    Fast, too, if the temperature of no SoC, or of fewer than half of them, is known. By default `cool_c` is half a
    sensor step below the temperature at which clocks recover.
    """

    low_rpm: Positive = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: Positive = 11000.0
    hot_c: float = 35.0
    cool_c: float = 33.5

    def check(self) -> None:
        """Refuse speeds and temperatures in the wrong order."""
        require_order(low_rpm=self.low_rpm, high_rpm=self.high_rpm)
        require_order(cool_c=self.cool_c, hot_c=self.hot_c)

    def rpm(self, observation: FanObservation) -> float:
        """Return the low or the high speed."""
        hottest_c = observation.hottest_c
        if observation.lacks_temperatures or hottest_c is None or hottest_c >= self.hot_c:
            return self.high_rpm
        # Fans may report less than their set speed, and may not reach the high speed.
        cooling = observation.rpm > 0.5 * (self.low_rpm + self.high_rpm)
        return self.high_rpm if cooling and hottest_c > self.cool_c else self.low_rpm


@checked
class PlannedLoad:
    """The heat that a plan predicts, on the clock of the observations.

    `rack_w` is the mean heat of all SoCs at full clock, while the plan is carried out; `local_rise_c` the temperature
    of the busy SoCs above the chassis air. The work ends at `end_s` at full clock. `idle_w` is the part of `rack_w`
    that no clock changes, `compute_part` the part of the time that clocks lengthen, and `num_busy` the number of SoCs
    that work, by default all; with `waits` each of them waits for the slowest one.
    """

    rack_w: NotNegative
    local_rise_c: NotNegative
    begin_s: float = 0.0
    end_s: _Endless = math.inf
    idle_w: NotNegative = 0.0
    compute_part: Annotated[float, Field(ge=0, le=1)] = 1.0
    num_busy: Annotated[int, Field(ge=1)] | None = None
    waits: bool = True

    def check(self) -> None:
        """Refuse an end before the beginning."""
        require_order(equal=True, begin_s=self.begin_s, end_s=self.end_s)
        require_order(equal=True, idle_w=self.idle_w, rack_w=self.rack_w)


@checked
class PredictiveCooling:
    """The fan speed with the least energy that keeps the SoCs below a limit under the planned load.

    Fans stay slow until the limit is near, and when the work will end before the limit is reached. The cheapest way to
    hold the limit lies on the lower hull of watts over conductance. Below their threshold, fans cool no more than fans
    at rest, so little cooling is cheapest by alternating between slow and `efficient_rpm`. Since power grows with the
    cube of the speed and cooling only linearly, much cooling is cheapest at one steady speed: the slowest that keeps
    the limit for the next `horizon_s`, at most `high_rpm`.

    With `max_slowdown` above 0 the last part of the work runs one clock step lower, at up to `coast_limit_c`. That part
    is as long as extends the whole time by this fraction.

    The rack is modelled as one heat capacity, the chassis's (F21). Effects outside this model (a failed fan, a badly
    ventilated board, work that takes longer than planned) appear in the temperature and are corrected at the next step.
    If the temperature of no SoC, or of fewer than half of them, is known, fans turn at `high_rpm`.
    """

    load: PlannedLoad
    fans: FanCurve = field(default_factory=rack_fans)
    chassis_j_per_k: Positive = field(default_factory=lambda: constant("rack", "chassis_j_per_k"))
    ambient_c: float = 25.0
    # Half a sensor step below the first trip point.
    limit_c: float = 34.5
    # Target for a SoC that has tripped; half a sensor step below its resume point.
    resume_c: float = 33.5
    # Hysteresis of alternating cooling.
    band_c: Positive = 0.5
    horizon_s: Positive = 120.0
    low_rpm: Positive = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: Positive = 11000.0
    max_slowdown: Annotated[float, Field(ge=0, lt=1)] = 0.0
    coast_limit_c: float = 39.0
    # Of the clock between the first two trip points, and the heat at that clock, as fractions.
    coast_slowdown: Annotated[float, Field(gt=0, lt=1)] = 0.102
    coast_power: float = 0.85

    def check(self) -> None:
        """Refuse speeds and temperatures in the wrong order."""
        require_order(equal=True, low_rpm=self.low_rpm, high_rpm=self.high_rpm)
        require_order(
            equal=True,
            resume_c=self.resume_c,
            limit_c=self.limit_c,
            coast_limit_c=self.coast_limit_c,
        )

    @property
    def efficient_rpm(self) -> float:
        """The speed with the most added conductance per added watt over the low speed, within the policy's speeds."""
        return _most_efficient_rpm(self.fans, self.low_rpm, self.high_rpm)

    @property
    def coast_begin_s(self) -> float:
        """Start of the last, slower part of the work."""
        load = self.load
        if not self.max_slowdown or math.isinf(load.end_s):
            return math.inf
        # x seconds of work at full clock take x / (1 - coast_slowdown) in that part.
        lost_s = self.max_slowdown * (load.end_s - load.begin_s)
        coasted_s = lost_s * (1.0 - self.coast_slowdown) / self.coast_slowdown
        return max(load.begin_s, load.end_s - coasted_s)

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed."""
        hottest_c = observation.hottest_c
        at_s = observation.at_s
        load = self.load
        if observation.lacks_temperatures or hottest_c is None:
            return self.high_rpm
        part = 1.0
        end_s = load.end_s
        # A SoC that has tripped would stay slow if it were held at the limit.
        limit_c = self.resume_c if observation.num_throttled else self.limit_c
        if at_s >= self.coast_begin_s:
            part = self.coast_power
            limit_c = self.coast_limit_c
            end_s += self.max_slowdown * (load.end_s - load.begin_s)
        rise_c = part * load.local_rise_c
        heat_w = part * load.rack_w
        # Work that passes its planned end may continue for long.
        time_s = min(self.horizon_s, end_s - at_s) if at_s < end_s else self.horizon_s
        air_limit_c = limit_c - rise_c
        wanted_rpm = self._steady_rpm(
            air_c=hottest_c - rise_c,
            limit_c=air_limit_c,
            heat_w=heat_w,
            time_s=time_s,
        )
        # The work ends before the limit is reached.
        if wanted_rpm <= self.low_rpm and time_s < self.horizon_s:
            return self.low_rpm
        efficient_rpm = self.efficient_rpm
        cooling = observation.rpm > 0.5 * (self.low_rpm + efficient_rpm)
        # The hottest SoC may be cooled less than planned: while it stays too hot, fans speed up.
        least_rpm = _FASTER * observation.rpm if cooling and hottest_c >= limit_c else 0.0
        # Little cooling is cheapest by alternating between slow and efficient.
        if self._holding_rpm(air_limit_c, heat_w) <= efficient_rpm:
            if hottest_c < limit_c and not (cooling and hottest_c > limit_c - self.band_c):
                return self.low_rpm
            above_band_rpm = wanted_rpm if hottest_c >= limit_c + self.band_c else 0.0
            wanted_rpm = max(efficient_rpm, above_band_rpm, observation.rpm if cooling else 0.0)
        return min(max(wanted_rpm, least_rpm, self.low_rpm), self.high_rpm)

    def expected_c(
        self,
        hottest_c: float,
        *,
        rpm: float,
        at_s: float,
        duration_s: float,
    ) -> float | None:
        """Return the predicted temperature of the hottest SoC at `at_s`, after `duration_s` of the planned load.

        None outside the planned time, for which the plan has no heat.
        """
        load = self.load
        if not load.begin_s <= at_s - duration_s <= at_s <= load.end_s:
            return None
        part = self.coast_power if at_s >= self.coast_begin_s else 1.0
        rise_c = part * load.local_rise_c
        conductance = self.fans.conductance_w_per_k(rpm)
        return rise_c + self._air_c(hottest_c - rise_c, conductance, part * load.rack_w, duration_s)

    def _air_c(
        self,
        air_c: float,
        conductance: float,
        heat_w: float,
        time_s: float,
    ) -> float:
        """Return the air's temperature after `time_s` of constant heat (F21 with one heat capacity)."""
        steady_c = self.ambient_c + heat_w / conductance
        left = math.exp(-time_s * conductance / self.chassis_j_per_k)
        return steady_c + (air_c - steady_c) * left

    def _holding_rpm(self, limit_c: float, heat_w: float) -> float:
        """Return the steady speed at which the air temperature settles at the limit."""
        if limit_c <= self.ambient_c:
            return self.fans.max_rpm
        return self.fans.rpm_for(heat_w / (limit_c - self.ambient_c))

    def _steady_rpm(
        self,
        *,
        air_c: float,
        limit_c: float,
        heat_w: float,
        time_s: float,
    ) -> float:
        """Return the slowest speed with which the air is at the limit or below it after `time_s`."""

        low = self.fans.still_w_per_k
        high = self.fans.conductance_w_per_k(self.fans.max_rpm)
        if self._air_c(air_c, low, heat_w, time_s) <= limit_c:
            return self.fans.min_rpm
        if self._air_c(air_c, high, heat_w, time_s) > limit_c:
            return self.fans.max_rpm
        # Bisection; 40 halvings reach the precision of floats.
        for _ in range(40):
            middle = 0.5 * (low + high)
            if self._air_c(air_c, middle, heat_w, time_s) <= limit_c:
                high = middle
            else:
                low = middle
        return self.fans.rpm_for(high)


@cache
def _most_efficient_rpm(
    fans: FanCurve,
    low_rpm: float,
    high_rpm: float,
) -> float:
    still = fans.conductance_w_per_k(low_rpm)
    low_w = fans.power_w(low_rpm)

    def gain(rpm: float) -> float:
        added_w = max(fans.power_w(rpm) - low_w, 1e-12)
        return (fans.conductance_w_per_k(rpm) - still) / added_w

    speeds = [low_rpm + (high_rpm - low_rpm) * part / 200 for part in range(1, 201)]
    return max(speeds, key=gain)
