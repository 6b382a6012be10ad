"""How fast the fans shall turn: fixed speeds, the paper's passive cooling (F19), and one that knows the load."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from socflower.errors import ConfigError
from socflower.thermal.constants import constant
from socflower.thermal.fan import FanCurve, rack_fans

_AT_HIGH = 0.99
"""From this part of the high speed on fans count as being at it: what is read back is never exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FanObservation:
    """What a policy decides on."""

    at_s: float  # on any clock that only goes forward
    hottest_c: float | None  # the hottest SoC that is believed; None: nobody knows
    rpm: float  # at present
    num_unknown: int = 0  # SoCs whose sensors say nothing that can be believed


class FanPolicy(Protocol):
    """Decides on a fan speed; all that it remembers is in the observation."""

    def rpm(self, observation: FanObservation) -> float:
        """Return the wanted speed, above 0."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSpeed:
    """One speed for ever."""

    fixed_rpm: float

    def __post_init__(self) -> None:
        _above_zero("fixed", fixed_rpm=self.fixed_rpm)

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed."""
        return self.fixed_rpm


@dataclass(frozen=True, kw_only=True, slots=True)
class PassiveCooling:
    """Slow until the hottest SoC passes `hot_c`, then fast until it has come down to `cool_c` (F19).

    Where nobody knows how hot the SoCs are, fast.
    """

    low_rpm: float = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: float = 11000.0
    hot_c: float = 35.0
    cool_c: float = 34.0

    def __post_init__(self) -> None:
        _above_zero("passive", low_rpm=self.low_rpm, high_rpm=self.high_rpm)
        if not self.low_rpm < self.high_rpm:
            raise ConfigError(f"passive: low_rpm = {self.low_rpm} must be below high_rpm = {self.high_rpm}")
        if not self.cool_c < self.hot_c:
            raise ConfigError(f"passive: cool_c = {self.cool_c} must be below hot_c = {self.hot_c}, or the fans would "
                              "change at every look")

    def rpm(self, observation: FanObservation) -> float:
        """Return the low or the high speed."""
        hottest_c = observation.hottest_c
        if hottest_c is None or hottest_c >= self.hot_c:
            return self.high_rpm
        cooling = observation.rpm >= _AT_HIGH * self.high_rpm
        return self.high_rpm if cooling and hottest_c > self.cool_c else self.low_rpm


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """What a plan says of the heat to come, on the clock of the observations."""

    rack_w: float  # mean heat of all SoCs at full clock, while the plan is carried out
    local_rise_c: float  # how much warmer than the chassis's air the busy SoCs are then
    begin_s: float = 0.0
    end_s: float = math.inf  # when the work is done, at full clock

    def __post_init__(self) -> None:
        if not (0.0 <= self.rack_w < math.inf and 0.0 <= self.local_rise_c < math.inf):
            raise ConfigError(f"planned load: rack_w = {self.rack_w} and local_rise_c = {self.local_rise_c} must be "
                              "finite and not negative")
        if not self.begin_s <= self.end_s:
            raise ConfigError(f"planned load: it ends at {self.end_s} s, before it begins at {self.begin_s} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictiveCooling:
    """The slowest fans that keep the SoCs under a limit for the next `horizon_s`, by the planned load.

    Fan power grows with the cube of the speed and what it cools only linearly, so holding one speed is cheaper than
    swinging between two; nothing is cooled before it is hot, nor once the work will end before it would be too hot.
    With `max_slowdown` above 0 the last part of the work is done one clock step lower, at up to `coast_limit_c`: as
    long as that costs this fraction of the whole time.

    The rack is taken for one heat capacity, the chassis's (F21). What that leaves out, a fan that has failed, a board
    in bad air, shows in the temperature, and is corrected at the next look. Where nobody knows how hot the SoCs are,
    fans turn as fast as they can.
    """

    load: PlannedLoad
    fans: FanCurve = field(default_factory=rack_fans)
    chassis_j_per_k: float = field(default_factory=lambda: constant("rack", "chassis_j_per_k"))
    ambient_c: float = 25.0
    limit_c: float = 34.5  # half a step of the sensors below the first trip point
    horizon_s: float = 120.0
    low_rpm: float = field(default_factory=lambda: constant("fan", "low_rpm"))
    max_slowdown: float = 0.0
    coast_limit_c: float = 39.0
    coast_slowdown: float = 0.102  # of the clock between the first two trip points
    coast_power: float = 0.85  # part of the heat that is left at that clock

    def __post_init__(self) -> None:
        _above_zero("predictive", horizon_s=self.horizon_s, low_rpm=self.low_rpm, chassis_j_per_k=self.chassis_j_per_k)
        if not self.ambient_c < self.limit_c <= self.coast_limit_c:
            raise ConfigError(f"predictive: need ambient_c < limit_c <= coast_limit_c, got {self.ambient_c} < "
                              f"{self.limit_c} <= {self.coast_limit_c}")
        if not 0.0 <= self.max_slowdown < 1.0 or not 0.0 < self.coast_slowdown < 1.0:
            raise ConfigError(f"predictive: max_slowdown = {self.max_slowdown} must be 0 or more and below 1, and "
                              f"coast_slowdown = {self.coast_slowdown} between 0 and 1")

    @property
    def coast_begin_s(self) -> float:
        """When the last, slower part of the work begins."""
        load = self.load
        if not self.max_slowdown or math.isinf(load.end_s):
            return math.inf
        # x seconds of work take x / (1 - coast_slowdown) there.
        whole_s = load.end_s - load.begin_s
        lost_s = self.max_slowdown * whole_s
        return max(load.begin_s, load.end_s - lost_s * (1.0 - self.coast_slowdown) / self.coast_slowdown)

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed."""
        if observation.hottest_c is None:
            return self.fans.max_rpm
        at_s, load = observation.at_s, self.load
        coasting = at_s >= self.coast_begin_s
        end_s = load.end_s
        if coasting:
            end_s += self.max_slowdown * (load.end_s - load.begin_s)
        if at_s >= end_s:
            return self.low_rpm
        limit_c = self.coast_limit_c if coasting else self.limit_c
        part = self.coast_power if coasting else 1.0
        wanted = self._conductance(
            air_c=observation.hottest_c - part * load.local_rise_c, limit_c=limit_c - part * load.local_rise_c,
            heat_w=part * load.rack_w, time_s=min(self.horizon_s, end_s - at_s))
        return max(self.low_rpm, self.fans.rpm_for(wanted))

    def _conductance(self, *, air_c: float, limit_c: float, heat_w: float, time_s: float) -> float:
        """Return the smallest conductance with which the air is at the limit or below it after `time_s`."""
        largest = self.fans.conductance_w_per_k(self.fans.max_rpm)

        def after_c(conductance: float) -> float:
            steady_c = self.ambient_c + heat_w / conductance
            return steady_c + (air_c - steady_c) * math.exp(-time_s * conductance / self.chassis_j_per_k)

        low, high = self.fans.still_w_per_k, largest
        if after_c(low) <= limit_c:
            return low
        if after_c(high) > limit_c:
            return high
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if after_c(middle) <= limit_c else (middle, high)
        return high


def _above_zero(policy: str, **values: float) -> None:
    for key, value in values.items():
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{policy}: {key} = {value} must be above 0 and finite")
