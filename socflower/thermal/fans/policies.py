"""Fan policies: fixed speed, the paper's passive cooling (F19), and predictive cooling for a planned load."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Protocol, runtime_checkable

from socflower.errors import ConfigError, require_range
from socflower.field_rules import unknown_key
from socflower.plain_numbers import plain_numbers
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.model.constants import constant

_FASTER = 1.005
"""Factor by which fans speed up per step while the planned speed is not enough; a step takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FanObservation:
    """The input of a policy's decision."""

    at_s: float  # on any monotonic clock
    hottest_c: float | None  # the hottest SoC with an accepted temperature; None: unknown
    rpm: float  # at present
    num_unknown: int = 0  # SoCs without an accepted temperature
    num_socs: int = 0  # in all
    num_throttled: int = 0  # SoCs that report throttling by heat

    @property
    def lacks_temperatures(self) -> bool:
        """Whether the temperatures do not suffice: none is accepted, or fewer than half of the SoCs have one."""
        return (
            self.hottest_c is None
            or math.isnan(self.hottest_c)
            or 2 * self.num_unknown > self.num_socs
        )


class FanPolicy(Protocol):
    """Decides on a fan speed from an observation alone, without state."""

    def rpm(self, observation: FanObservation) -> float:
        """Return the wanted speed, above 0."""
        ...


@runtime_checkable
class PredictingPolicy(FanPolicy, Protocol):
    """A policy that predicts temperatures, and so whether constant readings are plausible."""

    def expected_c(
        self, hottest_c: float, *, rpm: float, at_s: float, duration_s: float
    ) -> float | None:
        """Return the predicted temperature of the hottest SoC at `at_s`, after `duration_s` at this speed, or None."""
        ...


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSpeed:
    """A constant speed."""

    fixed_rpm: float

    def __post_init__(self) -> None:
        require_range("fixed", above=0.0, fixed_rpm=self.fixed_rpm)

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed."""
        return self.fixed_rpm


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class PassiveCooling:
    """Slow until the hottest SoC passes `hot_c`, then fast until it has come down to `cool_c` (F19).

    Fast, too, where the temperature of no SoC, or of fewer than half of them, is known.
    """

    low_rpm: float = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: float = 11000.0
    hot_c: float = 35.0
    cool_c: float = 33.5  # half a sensor step below the temperature at which clocks recover

    def __post_init__(self) -> None:
        require_range("passive", above=0.0, low_rpm=self.low_rpm, high_rpm=self.high_rpm)
        if not self.low_rpm < self.high_rpm:
            raise ConfigError(
                f"passive: low_rpm = {self.low_rpm} must be below high_rpm = {self.high_rpm}"
            )
        if not self.cool_c < self.hot_c:
            raise ConfigError(
                f"passive: cool_c = {self.cool_c} must be below hot_c = {self.hot_c}, or the fans would "
                "change at every look"
            )

    def rpm(self, observation: FanObservation) -> float:
        """Return the low or the high speed."""
        hottest_c = observation.hottest_c
        if observation.lacks_temperatures or hottest_c is None or hottest_c >= self.hot_c:
            return self.high_rpm
        # Fans may report less than their set speed, and may not reach the high speed.
        cooling = observation.rpm > 0.5 * (self.low_rpm + self.high_rpm)
        return self.high_rpm if cooling and hottest_c > self.cool_c else self.low_rpm


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """The heat that a plan predicts, on the clock of the observations."""

    rack_w: float  # mean heat of all SoCs at full clock, while the plan is carried out
    local_rise_c: float  # temperature of the busy SoCs above the chassis air
    begin_s: float = 0.0
    end_s: float = math.inf  # end of the work, at full clock

    def __post_init__(self) -> None:
        require_range("planned load", least=0.0, rack_w=self.rack_w, local_rise_c=self.local_rise_c)
        if not self.begin_s <= self.end_s:
            raise ConfigError(
                f"planned load: it ends at {self.end_s} s, before it begins at {self.begin_s} s"
            )


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
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
    Where the temperature of no SoC, or of fewer than half of them, is known, fans turn at `high_rpm`.
    """

    load: PlannedLoad
    fans: FanCurve = field(default_factory=rack_fans)
    chassis_j_per_k: float = field(default_factory=lambda: constant("rack", "chassis_j_per_k"))
    ambient_c: float = 25.0
    limit_c: float = 34.5  # half a sensor step below the first trip point
    resume_c: float = (
        33.5  # target for a SoC that has tripped; half a sensor step below its resume point
    )
    band_c: float = 0.5  # hysteresis of alternating cooling
    horizon_s: float = 120.0
    low_rpm: float = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: float = 11000.0
    max_slowdown: float = 0.0
    coast_limit_c: float = 39.0
    coast_slowdown: float = 0.102  # of the clock between the first two trip points
    coast_power: float = 0.85  # heat at that clock, as a fraction

    def __post_init__(self) -> None:
        require_range(
            "predictive",
            above=0.0,
            horizon_s=self.horizon_s,
            low_rpm=self.low_rpm,
            high_rpm=self.high_rpm,
            band_c=self.band_c,
            chassis_j_per_k=self.chassis_j_per_k,
        )
        require_range("predictive", least=0.0, below=1.0, max_slowdown=self.max_slowdown)
        require_range("predictive", above=0.0, below=1.0, coast_slowdown=self.coast_slowdown)
        if not self.low_rpm <= self.high_rpm:
            raise ConfigError(
                f"predictive: low_rpm = {self.low_rpm} must not be above high_rpm = {self.high_rpm}"
            )
        if not self.resume_c <= self.limit_c <= self.coast_limit_c:
            raise ConfigError(
                f"predictive: need resume_c <= limit_c <= coast_limit_c, got {self.resume_c}, "
                f"{self.limit_c}, {self.coast_limit_c}"
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
        whole_s = load.end_s - load.begin_s
        lost_s = self.max_slowdown * whole_s
        return max(
            load.begin_s, load.end_s - lost_s * (1.0 - self.coast_slowdown) / self.coast_slowdown
        )

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed."""
        hottest_c, at_s, load = observation.hottest_c, observation.at_s, self.load
        if observation.lacks_temperatures or hottest_c is None:
            return self.high_rpm
        coasting = at_s >= self.coast_begin_s
        end_s = load.end_s + (self.max_slowdown * (load.end_s - load.begin_s) if coasting else 0.0)
        limit_c = self.coast_limit_c
        if not coasting:
            # If held at the limit, a SoC that has tripped would stay slow.
            limit_c = self.resume_c if observation.num_throttled else self.limit_c
        part = self.coast_power if coasting else 1.0
        rise_c, heat_w = part * load.local_rise_c, part * load.rack_w
        # Work that passes its planned end may continue for long.
        time_s = min(self.horizon_s, end_s - at_s) if at_s < end_s else self.horizon_s
        wanted_rpm = self._steady_rpm(
            air_c=hottest_c - rise_c, limit_c=limit_c - rise_c, heat_w=heat_w, time_s=time_s
        )
        if wanted_rpm <= self.low_rpm and time_s < self.horizon_s:
            return self.low_rpm
        efficient_rpm = self.efficient_rpm
        cooling = observation.rpm > 0.5 * (self.low_rpm + efficient_rpm)
        # The hottest SoC may be cooled less than planned: while it stays too hot, fans speed up.
        least_rpm = _FASTER * observation.rpm if cooling and hottest_c >= limit_c else 0.0
        if self._holding_rpm(limit_c - rise_c, heat_w) <= efficient_rpm:
            if hottest_c < limit_c and not (cooling and hottest_c > limit_c - self.band_c):
                return self.low_rpm
            above_band_rpm = wanted_rpm if hottest_c >= limit_c + self.band_c else 0.0
            wanted_rpm = max(efficient_rpm, above_band_rpm, observation.rpm if cooling else 0.0)
        return min(max(wanted_rpm, least_rpm, self.low_rpm), self.high_rpm)

    def expected_c(
        self, hottest_c: float, *, rpm: float, at_s: float, duration_s: float
    ) -> float | None:
        """Return the predicted temperature of the hottest SoC at `at_s`, after `duration_s` of the planned load.

        None outside the planned time, for which the plan has no heat.
        """
        load = self.load
        if not load.begin_s <= at_s - duration_s <= at_s <= load.end_s:
            return None
        part = self.coast_power if at_s >= self.coast_begin_s else 1.0
        rise_c, conductance = part * load.local_rise_c, self.fans.conductance_w_per_k(rpm)
        steady_c = self.ambient_c + part * load.rack_w / conductance
        air_c = hottest_c - rise_c
        return (
            steady_c
            + (air_c - steady_c) * math.exp(-duration_s * conductance / self.chassis_j_per_k)
            + rise_c
        )

    def _holding_rpm(self, limit_c: float, heat_w: float) -> float:
        """Return the steady speed at which the air temperature settles at the limit."""
        if limit_c <= self.ambient_c:
            return self.fans.max_rpm
        return self.fans.rpm_for(heat_w / (limit_c - self.ambient_c))

    def _steady_rpm(self, *, air_c: float, limit_c: float, heat_w: float, time_s: float) -> float:
        """Return the slowest speed with which the air is at the limit or below it after `time_s`."""

        def after_c(conductance: float) -> float:
            steady_c = self.ambient_c + heat_w / conductance
            return steady_c + (air_c - steady_c) * math.exp(
                -time_s * conductance / self.chassis_j_per_k
            )

        low, high = self.fans.still_w_per_k, self.fans.conductance_w_per_k(self.fans.max_rpm)
        if after_c(low) <= limit_c:
            return self.fans.min_rpm
        if after_c(high) > limit_c:
            return self.fans.max_rpm
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if after_c(middle) <= limit_c else (middle, high)
        return self.fans.rpm_for(high)


@cache
def _most_efficient_rpm(fans: FanCurve, low_rpm: float, high_rpm: float) -> float:
    still, low_w = fans.conductance_w_per_k(low_rpm), fans.power_w(low_rpm)
    speeds = [low_rpm + (high_rpm - low_rpm) * part / 200 for part in range(1, 201)]
    return max(
        speeds,
        key=lambda rpm: (
            (fans.conductance_w_per_k(rpm) - still) / max(fans.power_w(rpm) - low_w, 1e-12)
        ),
    )


POLICIES = ("fixed", "passive", "predictive")


def make_policy(name: str, settings: Mapping[str, object]) -> FanPolicy:
    """Return a policy of a configuration file; `ConfigError` for an unknown name or key, or an invalid value.

    Keys are the classes' numeric fields; `rpm` for "fixed", and for "predictive" also those of its load.
    """
    numbers: dict[str, float] = {}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"policy: {key} = {value!r} must be a number")
        numbers[key] = float(value)
    if name == "fixed":
        _require_known(numbers, ["rpm"], "policy fixed")
        if "rpm" not in numbers:
            raise ConfigError("policy fixed: rpm is missing")
        return FixedSpeed(fixed_rpm=numbers["rpm"])
    if name == "passive":
        _require_known(numbers, [entry.name for entry in fields(PassiveCooling)], "policy passive")
        return PassiveCooling(**numbers)
    if name != "predictive":
        raise ConfigError(f"policy: name = {name!r} is unknown; use one of {', '.join(POLICIES)}")
    of_load = [entry.name for entry in fields(PlannedLoad)]
    of_policy = [
        entry.name for entry in fields(PredictiveCooling) if entry.name not in ("load", "fans")
    ]
    _require_known(numbers, [*of_load, *of_policy], "policy predictive")
    if "rack_w" not in numbers or "local_rise_c" not in numbers:
        raise ConfigError(
            "policy predictive: rack_w and local_rise_c, the planned heat, are needed"
        )
    load = PlannedLoad(**{key: value for key, value in numbers.items() if key in of_load})
    others: dict[str, Any] = {key: value for key, value in numbers.items() if key in of_policy}
    return PredictiveCooling(load=load, **others)


def _require_known(numbers: Mapping[str, float], known: Sequence[str], policy: str) -> None:
    for key, value in numbers.items():
        if key not in known:
            raise ConfigError(unknown_key(key, value, known, policy))
