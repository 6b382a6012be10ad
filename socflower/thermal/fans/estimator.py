"""A rack's thermal constants, estimated from temperatures while it works: an extended Kalman filter (F21, lumped)."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from socflower.thermal.fans.policies import PlannedLoad
from socflower.thermal.model.rack import Vector

_Values = TypeVar("_Values", float, Vector)

_CLASS_EDGES = (1 / 6, 1 / 2, 5 / 6)
"""Positions, among busy SoCs from hot to cool, of the SoCs that stand for a third of them each."""

_AIR, _AMBIENT, _LOAD, _FLOW, _RISES = 0, 1, 2, 3, 4

_PRIOR = (1.0, 2.0, 0.2, 0.2, 1.0)
"""Standard deviations of a plan: air and ambient in °C, load and flow as fractions, rises in °C."""

_DRIFT_PER_HOUR = (0.5, 0.5, 0.05, 0.03, 0.2)
"""How far they may wander in an hour, in the same units."""

_SHOWN_C = 0.3
"""Standard deviation of what a sensor shows, in steps of 0.5 °C."""


class RackEstimate(NamedTuple):
    """Mean and covariance of the constants: air and ambient (°C), load and flow over the plan's, and rises (°C)."""

    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]

    @property
    def air_c(self) -> float:
        """The chassis air's temperature."""
        return self.mean[_AIR]


@dataclass(frozen=True, kw_only=True)
class RackModel:
    """One heat capacity, the whole rack's, and classes of busy SoCs that are warmer than its air by their power.

    The first class is the hottest SoC; the others stand for a third of the rest each.
    """

    load: PlannedLoad
    still_w_per_k: float
    rack_j_per_k: float
    power_exponent: float

    @cached_property
    def _weights(self) -> Vector:
        num_busy = self.load.num_busy or 60
        first = 1.0 / num_busy
        return np.array([first, *[(1.0 - first) / 3.0] * 3])

    def positions(self, num_busy: int) -> list[int]:
        """Return the places, from hot to cool, of the SoCs that stand for the classes."""
        return [0, *(int(edge * num_busy) for edge in _CLASS_EDGES)]

    @property
    def no_sums(self) -> tuple[float, ...]:
        """Zero for flow and dynamic power, and for each class's power and temperature."""
        return (0.0,) * (2 + 2 * len(self._weights))

    # -------------------------------------------------------------------------------------------------- the model

    def pace(self, clocks: Vector) -> tuple[Vector, Vector]:
        """Return speed and dynamic power, relative to full clock, by the classes' clocks (last axis)."""
        load = self.load
        slowest = clocks.min(axis=-1, keepdims=True) if load.waits else clocks
        speeds = 1.0 / (load.compute_part / slowest + 1.0 - load.compute_part)
        powers = clocks ** (self.power_exponent - 1.0) * speeds
        return speeds @ self._weights if not load.waits else speeds[..., 0], powers @ self._weights

    def soc_power(self, clocks: Vector, speed: Vector) -> Vector:
        """Return the power of a SoC of each class, relative to that at full clock."""
        load = self.load
        still = load.idle_w / load.rack_w
        speeds = speed[..., None] if load.waits else clocks
        return still + (1.0 - still) * clocks ** (self.power_exponent - 1.0) * speeds

    def heat_w(self, estimate: RackEstimate, dynamic: _Values) -> _Values:
        """Return the rack's watts."""
        load = self.load
        return estimate.mean[_LOAD] * (load.idle_w + (load.rack_w - load.idle_w) * dynamic)

    def socs_c(self, estimate: RackEstimate, air_c: Vector, soc_power: Vector) -> Vector:
        """Return the temperatures of the classes."""
        return air_c[..., None] + np.array(estimate.mean[_RISES:]) * soc_power

    def air_c(
        self, estimate: RackEstimate, air_c: Vector, heat_w: Vector, flow: Vector, time_s: float
    ) -> Vector:
        """Return the air's temperature after `time_s`; `flow` is the planned conductance above that at rest."""
        conductance = self.still_w_per_k + estimate.mean[_FLOW] * flow
        steady_c = estimate.mean[_AMBIENT] + heat_w / conductance
        left = np.exp(-time_s * conductance / self.rack_j_per_k)
        return steady_c + (air_c - steady_c) * left

    # ------------------------------------------------------------------------------------------------ the estimate

    def first_estimate(self, air_c: float, ambient_c: float) -> RackEstimate:
        """Return what the plan says, for air that is as warm as the coolest SoC."""
        num_classes = len(self._weights)
        mean = (air_c, ambient_c, 1.0, 1.0, *(self.load.local_rise_c,) * num_classes)
        deviations = np.array([*_PRIOR[:_RISES], *(_PRIOR[_RISES],) * num_classes])
        return _estimate(np.array(mean), np.diag(deviations**2))

    def updated(self, estimate: RackEstimate, duration_s: float, means: Vector) -> RackEstimate:
        """Return the estimate after `duration_s` with these means of what `no_sums` lists."""
        flow, dynamic = means[:2]
        num_classes = len(self._weights)
        powers, shown_c = means[2 : 2 + num_classes], means[2 + num_classes :]
        state = np.array(estimate.mean)
        transition, end_c = self._transition(estimate, float(flow), float(dynamic), duration_s)
        middle_c = 0.5 * (state[_AIR] + end_c)
        observed = np.zeros((num_classes, len(state)))
        # The mean air of the interval.
        observed[:] = 0.5 * transition[_AIR]
        observed[:, _AIR] += 0.5
        observed[:, _RISES:] += np.diag(powers)
        covariance = np.array(estimate.covariance)
        noise = _SHOWN_C**2 * np.eye(num_classes)
        gain = covariance @ observed.T @ np.linalg.inv(observed @ covariance @ observed.T + noise)
        state = state + gain @ (shown_c - middle_c - state[_RISES:] * powers)
        state[_LOAD:_RISES] = np.maximum(state[_LOAD:_RISES], 0.2)
        kept = np.eye(len(state)) - gain @ observed
        covariance = kept @ covariance
        transition, end_c = self._transition(
            _estimate(state, covariance), float(flow), float(dynamic), duration_s
        )
        drift = np.array([*_DRIFT_PER_HOUR[:_RISES], *(_DRIFT_PER_HOUR[_RISES],) * num_classes])
        covariance = transition @ covariance @ transition.T
        covariance += np.diag(drift**2) * duration_s / 3600.0
        state[_AIR] = end_c
        return _estimate(state, 0.5 * (covariance + covariance.T))

    def _transition(
        self, estimate: RackEstimate, flow: float, dynamic: float, time_s: float
    ) -> tuple[Vector, float]:
        """Return the Jacobian of the state after `time_s`, and the air's temperature then."""
        air_c, ambient_c, load, flow_part = estimate.mean[:_RISES]
        heat_w = float(self.heat_w(estimate, dynamic))
        conductance = self.still_w_per_k + flow_part * flow
        above_c = air_c - ambient_c - heat_w / conductance
        left = float(np.exp(-time_s * conductance / self.rack_j_per_k))
        transition = np.eye(len(estimate.mean))
        transition[_AIR, _AIR] = left
        transition[_AIR, _AMBIENT] = 1.0 - left
        transition[_AIR, _LOAD] = (1.0 - left) * heat_w / load / conductance
        transition[_AIR, _FLOW] = flow * (
            -(1.0 - left) * heat_w / conductance**2 - above_c * left * time_s / self.rack_j_per_k
        )
        return transition, air_c - above_c * (1.0 - left)


def _estimate(mean: Vector, covariance: Vector) -> RackEstimate:
    return RackEstimate(tuple(mean.tolist()), tuple(tuple(row) for row in covariance.tolist()))
