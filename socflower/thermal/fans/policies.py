"""How fast the fans shall turn: fixed speeds, the paper's passive cooling (F19), and one that knows the load."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Protocol, runtime_checkable

from socflower.cluster.toml_file import reject_unknown_keys
from socflower.errors import ConfigError
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.model.constants import constant

_FASTER = 1.005
"""By how much fans get faster from look to look while what should suffice does not; a look takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FanObservation:
    """What a policy decides on."""

    at_s: float  # on any clock that only goes forward
    hottest_c: float | None  # the hottest SoC that is believed; None: nobody knows
    rpm: float  # at present
    num_unknown: int = 0  # SoCs whose sensors say nothing that can be believed
    num_socs: int = 0  # in all
    num_throttled: int = 0  # SoCs that say that heat holds their clocks down

    @property
    def is_blind(self) -> bool:
        """Whether nobody knows how hot the SoCs are: no temperature is believed, or fewer than half of them."""
        return self.hottest_c is None or math.isnan(self.hottest_c) or 2 * self.num_unknown > self.num_socs


class FanPolicy(Protocol):
    """Decides on a fan speed; all that it remembers is in the observation."""

    def rpm(self, observation: FanObservation) -> float:
        """Return the wanted speed, above 0."""
        ...


@runtime_checkable
class ForesightedPolicy(FanPolicy, Protocol):
    """A policy that knows what heat is to come, and so whether sensors may stand still."""

    def expected_c(self, hottest_c: float, *, rpm: float, at_s: float, duration_s: float) -> float | None:
        """Return what the hottest SoC should have after `duration_s` at this speed, up to `at_s`; None: not known."""
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

    Where nobody knows how hot the SoCs are, or how hot more than half of them are, fast.
    """

    low_rpm: float = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: float = 11000.0
    hot_c: float = 35.0
    cool_c: float = 33.5  # half a step of the sensors below where clocks come back

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
        if observation.is_blind or hottest_c is None or hottest_c >= self.hot_c:
            return self.high_rpm
        # Fans may read back less than they were told, and may not reach the high speed.
        cooling = observation.rpm > 0.5 * (self.low_rpm + self.high_rpm)
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
    """The cheapest fans that keep the SoCs under a limit, by the planned load.

    Nothing is cooled before it is hot, nor once the work will end before it would be too hot. What holds the limit
    costs least along the lower hull of watts over conductance. Fans below their threshold cool nothing more than fans
    at rest, so little cooling is cheapest as turns of slow and `efficient_rpm`; and since power grows with the cube of
    the speed and cooling only linearly, much cooling is cheapest as one steady speed, the slowest that keeps the limit
    for the next `horizon_s`, and never more than `high_rpm`.

    With `max_slowdown` above 0 the last part of the work is done one clock step lower, at up to `coast_limit_c`: as
    long as that costs this fraction of the whole time.

    The rack is taken for one heat capacity, the chassis's (F21). What that leaves out, a fan that has failed, a board
    in bad air, work that takes longer than planned, shows in the temperature, and is corrected at the next look. Where
    nobody knows how hot the SoCs are, or how hot more than half of them are, fans turn at `high_rpm`.
    """

    load: PlannedLoad
    fans: FanCurve = field(default_factory=rack_fans)
    chassis_j_per_k: float = field(default_factory=lambda: constant("rack", "chassis_j_per_k"))
    ambient_c: float = 25.0
    limit_c: float = 34.5  # half a step of the sensors below the first trip point
    resume_c: float = 33.5  # to which a SoC has to cool down that has tripped all the same; half a step below its own
    band_c: float = 0.5  # that turns cool down
    horizon_s: float = 120.0
    low_rpm: float = field(default_factory=lambda: constant("fan", "low_rpm"))
    high_rpm: float = 11000.0
    max_slowdown: float = 0.0
    coast_limit_c: float = 39.0
    coast_slowdown: float = 0.102  # of the clock between the first two trip points
    coast_power: float = 0.85  # part of the heat that is left at that clock

    def __post_init__(self) -> None:
        _above_zero("predictive", horizon_s=self.horizon_s, low_rpm=self.low_rpm, high_rpm=self.high_rpm,
                    band_c=self.band_c, chassis_j_per_k=self.chassis_j_per_k)
        if not self.low_rpm <= self.high_rpm:
            raise ConfigError(f"predictive: low_rpm = {self.low_rpm} must not be above high_rpm = {self.high_rpm}")
        if not self.resume_c <= self.limit_c <= self.coast_limit_c:
            raise ConfigError(f"predictive: need resume_c <= limit_c <= coast_limit_c, got {self.resume_c}, "
                              f"{self.limit_c}, {self.coast_limit_c}")
        if not 0.0 <= self.max_slowdown < 1.0 or not 0.0 < self.coast_slowdown < 1.0:
            raise ConfigError(f"predictive: max_slowdown = {self.max_slowdown} must be 0 or more and below 1, and "
                              f"coast_slowdown = {self.coast_slowdown} between 0 and 1")

    @property
    def efficient_rpm(self) -> float:
        """The speed that carries away most for each watt more than at the low speed, within the policy's speeds."""
        return _most_efficient_rpm(self.fans, self.low_rpm, self.high_rpm)

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
        hottest_c, at_s, load = observation.hottest_c, observation.at_s, self.load
        if observation.is_blind or hottest_c is None:
            return self.high_rpm
        coasting = at_s >= self.coast_begin_s
        end_s = load.end_s + (self.max_slowdown * (load.end_s - load.begin_s) if coasting else 0.0)
        limit_c = self.coast_limit_c
        if not coasting:
            # Held at the limit, a SoC that has tripped would stay slow for ever.
            limit_c = self.resume_c if observation.num_throttled else self.limit_c
        part = self.coast_power if coasting else 1.0
        rise_c, heat_w = part * load.local_rise_c, part * load.rack_w
        # Work that goes on after its planned end may do so for long.
        time_s = min(self.horizon_s, end_s - at_s) if at_s < end_s else self.horizon_s
        wanted_rpm = self._steady_rpm(air_c=hottest_c - rise_c, limit_c=limit_c - rise_c, heat_w=heat_w, time_s=time_s)
        if wanted_rpm <= self.low_rpm and time_s < self.horizon_s:
            return self.low_rpm
        efficient_rpm = self.efficient_rpm
        cooling = observation.rpm > 0.5 * (self.low_rpm + efficient_rpm)
        # The hottest SoC may be cooled worse than the plan knows: while it stays too hot, fans get faster.
        least_rpm = _FASTER * observation.rpm if cooling and hottest_c >= limit_c else 0.0
        if self._holding_rpm(limit_c - rise_c, heat_w) <= efficient_rpm:
            if hottest_c < limit_c and not (cooling and hottest_c > limit_c - self.band_c):
                return self.low_rpm
            above_band_rpm = wanted_rpm if hottest_c >= limit_c + self.band_c else 0.0
            wanted_rpm = max(efficient_rpm, above_band_rpm, observation.rpm if cooling else 0.0)
        return min(max(wanted_rpm, least_rpm, self.low_rpm), self.high_rpm)

    def expected_c(self, hottest_c: float, *, rpm: float, at_s: float, duration_s: float) -> float | None:
        """Return what the hottest SoC should have after `duration_s` of the planned load, up to `at_s`.

        None outside the planned time: what the rack draws then, the plan does not say.
        """
        load = self.load
        if not load.begin_s <= at_s - duration_s <= at_s <= load.end_s:
            return None
        part = self.coast_power if at_s >= self.coast_begin_s else 1.0
        rise_c, conductance = part * load.local_rise_c, self.fans.conductance_w_per_k(rpm)
        steady_c = self.ambient_c + part * load.rack_w / conductance
        air_c = hottest_c - rise_c
        return steady_c + (air_c - steady_c) * math.exp(-duration_s * conductance / self.chassis_j_per_k) + rise_c

    def _holding_rpm(self, limit_c: float, heat_w: float) -> float:
        """Return the steady speed at which the air settles at the limit."""
        if limit_c <= self.ambient_c:
            return self.fans.max_rpm
        return self.fans.rpm_for(heat_w / (limit_c - self.ambient_c))

    def _steady_rpm(self, *, air_c: float, limit_c: float, heat_w: float, time_s: float) -> float:
        """Return the slowest speed with which the air is at the limit or below it after `time_s`."""

        def after_c(conductance: float) -> float:
            steady_c = self.ambient_c + heat_w / conductance
            return steady_c + (air_c - steady_c) * math.exp(-time_s * conductance / self.chassis_j_per_k)

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
    return max(speeds, key=lambda rpm: (fans.conductance_w_per_k(rpm) - still) / max(fans.power_w(rpm) - low_w, 1e-12))


POLICIES = ("fixed", "passive", "predictive")


def make_policy(name: str, settings: Mapping[str, object]) -> FanPolicy:
    """Return a policy of a configuration file; `ConfigError` for an unknown name or key, or a value that cannot be.

    Keys are those of the classes that are numbers; of "fixed" `rpm`, and of "predictive" also those of its load.
    """
    numbers: dict[str, float] = {}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"policy: {key} = {value!r} must be a number")
        numbers[key] = float(value)
    if name == "fixed":
        reject_unknown_keys(numbers, ["rpm"], "policy fixed")
        if "rpm" not in numbers:
            raise ConfigError("policy fixed: rpm is missing")
        return FixedSpeed(fixed_rpm=numbers["rpm"])
    if name == "passive":
        reject_unknown_keys(numbers, [entry.name for entry in fields(PassiveCooling)], "policy passive")
        return PassiveCooling(**numbers)
    if name != "predictive":
        raise ConfigError(f"policy: name = {name!r} is unknown; use one of {', '.join(POLICIES)}")
    of_load = [entry.name for entry in fields(PlannedLoad)]
    of_policy = [entry.name for entry in fields(PredictiveCooling) if entry.name not in ("load", "fans")]
    reject_unknown_keys(numbers, [*of_load, *of_policy], "policy predictive")
    if "rack_w" not in numbers or "local_rise_c" not in numbers:
        raise ConfigError("policy predictive: rack_w and local_rise_c, the planned heat, are needed")
    load = PlannedLoad(**{key: value for key, value in numbers.items() if key in of_load})
    others: dict[str, Any] = {key: value for key, value in numbers.items() if key in of_policy}
    return PredictiveCooling(load=load, **others)


def _above_zero(policy: str, **values: float) -> None:
    for key, value in values.items():
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{policy}: {key} = {value} must be above 0 and finite")
