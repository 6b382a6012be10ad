"""Fan speeds for an objective: joules, seconds or their product, on a rack whose constants are estimated as it works.

A SoC needs fewer joules for the same work at a lower clock, and more seconds. So heat is let rise until the governors
lower the clocks, or fans prevent that, whichever the objective favours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, NamedTuple

import numpy as np

from socflower.errors import require_order
from socflower.field_rules import OneOf, Positive, checked
from socflower.thermal.fans.estimator import RackEstimate, RackModel
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.fans.policies import FanObservation, PlannedLoad
from socflower.thermal.model.constants import constant
from socflower.thermal.model.governor import ClockGovernor, snapdragon_governor
from socflower.thermal.model.rack import Vector, modelled_rack

OBJECTIVES = ("energy", "time", "energy-delay")

Objective = Annotated[str, OneOf(OBJECTIVES)]

_NUM_SPEEDS = 12
"""Fan speeds above their threshold that are compared."""

_BELOW_TRIP_C = 0.5
_BAND_C = 1.0
"""Alternating fans turn fast from so far below a trip point, until the SoC is so much cooler."""

_ERRORS_C = (-0.4, -0.2, 0.0, 0.2, 0.4)
"""Each choice is predicted with SoCs that are so much hotter, and its cost is the mean: near a trip point a choice must
not depend on less than a sensor's step."""

_STEP_C = 0.5
"""Of a coarse sensor."""

_INSIDE_C = 0.1
"""How far a SoC is from the points at which its clock would have changed, at least."""

_STEP_S = 60.0
_NUM_STEPS = 60
"""Of a prediction; the rest of the work goes on as in its second half."""

_LONGEST_S = 86400.0
"""Work without a planned end counts as so much work that is left."""

_EQUAL = 1.001
"""Costs that differ by less are equal, and the other quantity decides: predictions are no better."""


class Spent(NamedTuple):
    """What the policy remembers between two steps; all values are plain."""

    at_s: float
    # When the estimate was last updated, and when a speed was last chosen.
    updated_s: float
    chosen_s: float
    # What has been done since the plan's beginning, in seconds at full clock, and what it cost.
    done_s: float
    time_s: float
    energy_j: float
    # Fans turn at `rpm` from `from_c` on until the hottest SoC is `_BAND_C` cooler; minus infinity is always.
    rpm: float
    from_c: float
    # Of the time since the estimate was updated, times seconds: conductance of the flow, dynamic power, and by class
    # power and temperature.
    sums: tuple[float, ...]
    estimate: RackEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choices:
    """Alternatives that are predicted together: fans at `rpm` from `from_c` on, else at the lowest speed.

    All stand there once for each of `_ERRORS_C`, `error_c`.
    """

    rpm: Vector
    from_c: Vector
    error_c: Vector


@checked
class ObjectiveCooling:
    """Fans that minimise joules, seconds, or joules times seconds of the planned work, spent ones included.

    Every `choose_every_s` the policy predicts the rest of the work with the estimated constants (`RackModel`) under
    each choice: a constant speed, or one that turns while SoCs are near a trip point, and else the lowest. It takes the
    cheapest; among equal ones (0.1 %) the one with less of the other quantity. Choices that make a SoC hotter than
    `most_c` are left out. From that temperature on, and without known temperatures, fans turn at `high_rpm`.
    """

    load: PlannedLoad
    objective: Objective = "energy-delay"
    fans: FanCurve = field(default_factory=rack_fans)
    governor: ClockGovernor = field(default_factory=snapdragon_governor)
    # Of the chassis with all boards and SoCs in it.
    rack_j_per_k: Positive = field(default_factory=lambda: modelled_rack().total_j_per_k)
    ambient_c: float = 25.0
    most_c: float = 60.0
    low_rpm: Positive = field(default_factory=lambda: constant("fan", "min_rpm"))
    high_rpm: Positive = field(default_factory=lambda: constant("fan", "max_rpm"))
    update_every_s: Positive = 30.0
    choose_every_s: Positive = 120.0

    def check(self) -> None:
        """Refuse speeds in the wrong order."""
        require_order(equal=True, low_rpm=self.low_rpm, high_rpm=self.high_rpm)

    def rpm(self, observation: FanObservation) -> float:
        """Return the speed for an observation without anything remembered."""
        return self.decide(observation, None)[0]

    def decide(
        self, observation: FanObservation, memory: Spent | None
    ) -> tuple[float, Spent | None]:
        """Return the speed, and what is to be remembered for the next observation."""
        if observation.lacks_temperatures or observation.hottest_c is None:
            return self.high_rpm, memory
        temperatures_c, clocks = self._classes(observation)
        spent = self._first(observation) if memory is None else memory
        spent = self._account(spent, observation, temperatures_c, clocks)
        if spent.at_s - spent.updated_s >= self.update_every_s:
            spent = self._update(spent)
        hottest_c = float(temperatures_c[0])
        if spent.at_s - spent.chosen_s >= self.choose_every_s:
            spent = self._choose(spent, temperatures_c, clocks)
        if observation.hottest_c >= self.most_c:
            return self.high_rpm, spent
        is_fast = observation.rpm > 0.5 * (self.low_rpm + spent.rpm)
        return (spent.rpm if self._cools(spent, hottest_c, is_fast) else self.low_rpm), spent

    def restored(self, plain: Sequence[Any]) -> Spent:
        """Return what `decide` remembered from the lists that JSON made of it."""
        spent = Spent._make(plain)
        estimate = RackEstimate._make(map(_tuples, spent.estimate))
        return spent._replace(sums=tuple(spent.sums), estimate=estimate)

    @property
    def _model(self) -> RackModel:
        return _model_of(self)

    def _cools(self, spent: Spent, hottest_c: float, is_fast: bool) -> bool:
        return hottest_c >= spent.from_c - (_BAND_C if is_fast else 0.0)

    # ------------------------------------------------------------------------------------------- what was observed

    def _classes(self, observation: FanObservation) -> tuple[Vector, Vector]:
        """Return temperatures and clocks by class of busy SoCs, the hottest SoC first."""
        all_c = _all_c(observation)
        order = np.argsort(all_c)[::-1]
        num_busy = min(self.load.num_busy or len(order), len(order))
        chosen = order[self._model.positions(num_busy)]
        temperatures_c = all_c[chosen]
        if not observation.clock_factors:
            levels = np.searchsorted(self.governor.trip_c, temperatures_c, side="right")
            return temperatures_c, np.array(self.governor.clock_factors)[levels]
        clocks = np.array(observation.clock_factors)[chosen]
        return self._consistent_c(temperatures_c, clocks), clocks

    def _consistent_c(self, shown_c: Vector, clocks: Vector) -> Vector:
        """Return temperatures as shown, but such that the governor would have left each clock as it is.

        A sensor's step is wide: a SoC that is shown at its resume point and does not resume is warmer.
        """
        governor = self.governor
        levels = np.abs(clocks[:, None] - np.array(governor.clock_factors)).argmin(axis=1)
        least_c = np.array([-math.inf, *governor.resume_c])[levels]
        most_c = np.array([*governor.trip_c, math.inf])[levels]
        inside_c = np.clip(shown_c, least_c + _INSIDE_C, most_c - _INSIDE_C)
        # A clock may be low, or high, for another reason than heat.
        return np.clip(inside_c, shown_c - _STEP_C, shown_c + _STEP_C)

    def _first(self, observation: FanObservation) -> Spent:
        at_s = observation.at_s
        coolest_c = float(_all_c(observation).min())
        return Spent(
            at_s=at_s,
            updated_s=at_s,
            chosen_s=-math.inf,
            done_s=0.0,
            time_s=0.0,
            energy_j=0.0,
            rpm=self.low_rpm,
            from_c=-math.inf,
            sums=self._model.no_sums,
            estimate=self._model.first_estimate(coolest_c, self.ambient_c),
        )

    def _account(
        self, spent: Spent, observation: FanObservation, temperatures_c: Vector, clocks: Vector
    ) -> Spent:
        """Return the memory after the time since the last step, at the present clocks and the last speed."""
        elapsed_s = max(0.0, observation.at_s - spent.at_s)
        speed, dynamic = map(float, self._model.pace(clocks))
        works = observation.at_s > self.load.begin_s
        soc_w = self._model.heat_w(spent.estimate, dynamic)
        fan_w = self.fans.power_w(observation.rpm)
        flow = self.fans.conductance_w_per_k(observation.rpm) - self.fans.still_w_per_k
        now = (flow, dynamic, *self._model.soc_power(clocks, np.array(speed)), *temperatures_c)
        return spent._replace(
            at_s=observation.at_s,
            done_s=spent.done_s + works * speed * elapsed_s,
            time_s=spent.time_s + works * elapsed_s,
            energy_j=spent.energy_j + works * (soc_w + fan_w) * elapsed_s,
            sums=tuple(
                float(total + elapsed_s * each) for total, each in zip(spent.sums, now, strict=True)
            ),
        )

    def _update(self, spent: Spent) -> Spent:
        duration_s = spent.at_s - spent.updated_s
        means = np.array(spent.sums) / duration_s
        return spent._replace(
            updated_s=spent.at_s,
            sums=self._model.no_sums,
            estimate=self._model.updated(spent.estimate, duration_s, means),
        )

    # --------------------------------------------------------------------------------------------- what is chosen

    def _choose(self, spent: Spent, temperatures_c: Vector, clocks: Vector) -> Spent:
        """Return the memory with the choice that costs least from now on."""
        choices = _choices_of(self)
        left_s = self._left_s(spent)
        predicted = self._predict(spent.estimate, temperatures_c, clocks, left_s)
        energy_j, time_s, peak_c = (
            values.reshape(len(_ERRORS_C), -1).mean(axis=0) for values in predicted
        )
        energy_j += spent.energy_j
        time_s += spent.time_s
        energy_j[peak_c > max(self.most_c, float(peak_c.min()))] = math.inf
        cost, other = {
            "energy": (energy_j, time_s),
            "time": (np.where(np.isinf(energy_j), math.inf, time_s), energy_j),
            "energy-delay": (energy_j * time_s, time_s),
        }[self.objective]
        equal = cost <= _EQUAL * cost.min()
        best = int(np.argmin(np.where(equal, other, math.inf)))
        return spent._replace(
            chosen_s=spent.at_s,
            rpm=float(choices.rpm[best]),
            from_c=float(choices.from_c[best]),
        )

    def _left_s(self, spent: Spent) -> float:
        """Return the work that is left; work that passes its planned end may continue for long."""
        left_s = self.load.end_s - self.load.begin_s - spent.done_s
        return min(left_s, _LONGEST_S) if left_s > 0.0 else _STEP_S * _NUM_STEPS

    def _predict(
        self, estimate: RackEstimate, temperatures_c: Vector, clocks: Vector, left_s: float
    ) -> tuple[Vector, Vector, Vector]:
        """Return joules, seconds and the highest temperature until the work is done, by choice."""
        model, choices = self._model, _choices_of(self)
        factors = np.array(self.governor.clock_factors)
        nearest = np.abs(clocks[:, None] - factors).argmin(axis=1)
        levels = np.tile(nearest, (len(choices.rpm), 1))
        fast = np.array(
            [[self.fans.conductance_w_per_k(r), self.fans.power_w(r)] for r in choices.rpm]
        )
        slow = (self.fans.conductance_w_per_k(self.low_rpm), self.fans.power_w(self.low_rpm))
        air_c = np.full(len(choices.rpm), estimate.air_c)
        cools = temperatures_c[0] >= choices.from_c
        left, energy_j, time_s = (np.full(len(air_c), value) for value in (left_s, 0.0, 0.0))
        peak_c = np.full(len(air_c), -math.inf)
        middle = (left, energy_j, time_s)
        for step in range(_NUM_STEPS):
            if step == _NUM_STEPS // 2:
                middle = (left, energy_j, time_s)
            speed, dynamic = model.pace(factors[levels])
            socs_c = model.socs_c(estimate, air_c, model.soc_power(factors[levels], speed))
            socs_c += choices.error_c[:, None]
            levels = self.governor.next_levels(levels, socs_c)
            hottest_c = socs_c[:, 0]
            peak_c = np.maximum(peak_c, hottest_c)
            cools = hottest_c >= choices.from_c - np.where(cools, _BAND_C, 0.0)
            heat_w = model.heat_w(estimate, dynamic)
            flow = np.where(cools, fast[:, 0], slow[0]) - model.still_w_per_k
            part_s = np.minimum(_STEP_S, left / speed)
            energy_j = energy_j + part_s * (heat_w + np.where(cools, fast[:, 1], slow[1]))
            time_s = time_s + part_s
            left = left - part_s * speed
            if not left.any():
                return energy_j, time_s, peak_c
            air_c = model.air_c(estimate, air_c, heat_w, flow, _STEP_S)
        done = np.maximum(middle[0] - left, 1e-9)
        rest = left / done
        return (
            energy_j + rest * (energy_j - middle[1]),
            time_s + rest * (time_s - middle[2]),
            peak_c,
        )


def _all_c(observation: FanObservation) -> Vector:
    shown_c: Sequence[float | None] = observation.temperatures_c or [observation.hottest_c]
    return np.array(shown_c, float)


@cache
def _model_of(policy: ObjectiveCooling) -> RackModel:
    return RackModel(
        load=policy.load,
        still_w_per_k=policy.fans.still_w_per_k,
        rack_j_per_k=policy.rack_j_per_k,
        power_exponent=policy.governor.power_exponent,
    )


@cache
def _choices_of(policy: ObjectiveCooling) -> _Choices:
    fans = policy.fans
    first_rpm = min(max(fans.threshold_rpm, policy.low_rpm), policy.high_rpm)
    speeds = np.linspace(first_rpm, policy.high_rpm, _NUM_SPEEDS + 1)[1:]
    limits_c = [-math.inf, *(trip_c - _BELOW_TRIP_C for trip_c in policy.governor.trip_c)]
    rpm = [policy.low_rpm, *np.tile(speeds, len(limits_c))]
    from_c = [-math.inf, *np.repeat(limits_c, len(speeds))]
    return _Choices(
        rpm=np.tile(rpm, len(_ERRORS_C)),
        from_c=np.tile(from_c, len(_ERRORS_C)),
        error_c=np.repeat(_ERRORS_C, len(rpm)),
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
