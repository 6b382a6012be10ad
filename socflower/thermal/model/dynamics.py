"""A rack under load over virtual time: heat, clocks, fans and users. Implements `socflower.cluster.DeviceDynamics`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from socflower.thermal.fans.policies import FanObservation, FanPolicy, RememberingPolicy
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, Steps, always
from socflower.thermal.model.governor import ClockGovernor, Levels, snapdragon_governor
from socflower.thermal.model.rack import Rack, ThermalNetwork, Vector

_RPM_STEP = 25.0
"""Fan speeds are rounded up to a multiple of it, which limits the number of networks to diagonalise."""

_MAX_HORIZON_S = 1800.0
"""Longest time that `steady_s` looks ahead."""

_LOG_ENTRIES = 4000
"""A longer log is thinned out."""

_ROOM_C = always(25.0)
_ALL_FANS = always(1.0)
_ALWAYS = always(True)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """External influences on a rack; a change takes effect at the first tick at or after its virtual time."""

    ambient_c: Steps[float] = _ROOM_C
    # Fraction of the fans that turn.
    fans_working: Steps[float] = _ALL_FANS
    # By SoC; empty without users.
    background_load: tuple[Steps[BackgroundLoad], ...] = ()
    # Whether training may run at all.
    open: Steps[bool] = _ALWAYS


@dataclass(frozen=True, kw_only=True, slots=True)
class RackRecord:
    """The rack at one moment, for plots."""

    at_s: float
    hottest_c: float
    # Over all SoCs, relative to the highest clock.
    mean_clock: float
    rpm: float
    fan_w: float


@dataclass(frozen=True, slots=True)
class _State:
    time_s: float
    # By node.
    temperatures_c: Vector
    levels: Levels
    rpm: float
    # Of a policy that remembers.
    memory: Any = None


@plain_numbers
class RackDynamics:
    """Speeds, watts and fans of a cluster's SoCs in one chassis.

    Every `tick_s` the governor reads each SoC's temperature, and the fan policy the hottest SoC's rounded reading.
    Between ticks clocks and fans are constant and heat flow is exact. `start_c` is all nodes' initial temperature.
    """

    def __init__(
        self,
        rack: Rack,
        policy: FanPolicy,
        *,
        governor: ClockGovernor | None = None,
        fans: FanCurve | None = None,
        surroundings: Surroundings | None = None,
        start_c: float = 28.0,
        tick_s: float = 5.0,
        sensor_step_c: float = 0.5,
        start_rpm: float | None = None,
    ) -> None:
        require_range("rack", above=0.0, tick_s=tick_s)
        self._rack = rack
        self._policy = policy
        # Looking for the methods of a protocol takes as long as a tick.
        self._remembering = policy if isinstance(policy, RememberingPolicy) else None
        self._governor = governor or snapdragon_governor()
        self._fans = fans or rack_fans()
        self._clock_factors = np.array(self._governor.clock_factors)
        self._power_factors = np.array(self._governor.power_factors)
        self._surroundings = surroundings or Surroundings()
        users = self._surroundings.background_load
        if users and len(users) != rack.num_socs:
            raise ConfigError(f"rack: users of {len(users)} SoCs, but it has {rack.num_socs}")
        self._tick_s = tick_s
        self._sensor_step_c = sensor_step_c
        self._networks: dict[float, ThermalNetwork] = {}
        rpm = self._fans.min_rpm if start_rpm is None else start_rpm
        temperatures_c = np.full(rack.num_nodes, start_c)
        levels = np.zeros(rack.num_socs, np.int64)
        self._state = self._update_controls(_State(0.0, temperatures_c, levels, rpm))
        self._log: list[RackRecord] = []
        self._log_every_s = tick_s
        self.cooling_j = 0.0
        self.peak_c = float(start_c)
        self._append_record(self._state)

    # ------------------------------------------------------------------------------------ speed and availability

    def speed_factors(self) -> list[float]:
        """Return each SoC's clock over its highest, times the share that users leave."""
        return self._shared(self._clock_factors)

    def power_factors(self) -> list[float]:
        """Return each SoC's training power above idle, relative to that at full clock without users."""
        return self._shared(self._power_factors)

    def _shared(self, by_level: Vector) -> list[float]:
        factors = by_level[self._state.levels].tolist()
        loads = self._loads(self._state)
        return [factor * (1.0 - load.share) for factor, load in zip(factors, loads, strict=True)]

    def taken_socs(self) -> frozenset[int]:
        """Return the SoCs that training must not use now; all of them outside the training windows."""
        if not self._surroundings.open.at(self._last_tick_s(self._state)):
            return frozenset(range(self._rack.num_socs))
        loads = self._loads(self._state)
        return frozenset(soc for soc, load in enumerate(loads) if load.taken)

    # ---------------------------------------------------------------------------------------------------- time

    @plain_numbers
    def steady_s(self, power_w: Sequence[float]) -> float:
        """Return how long speeds, powers and taken SoCs stay constant under this load; at most half an hour."""
        state = self._state
        begin_s = state.time_s
        node_w = self._node_power(power_w)
        before = self._control_state(state)
        while state.time_s < begin_s + _MAX_HORIZON_S:
            state, _ = self._to_next_tick(state, node_w, math.inf)
            if self._control_state(state) != before:
                break
        return state.time_s - begin_s

    def until_reading_s(self) -> float:
        """Return the time until the next tick, before which neither speeds nor users change."""
        time_s = self._state.time_s
        next_s = (self._num_ticks(time_s) + 1) * self._tick_s
        return max(next_s - time_s, 0.0)

    @plain_numbers
    def advance(self, duration_s: float, power_w: Sequence[float]) -> float:
        """Advance by `duration_s` under this mean load (watts by SoC, without users); return the fans' joules."""
        state = self._state
        fan_j = 0.0
        end_s = state.time_s + duration_s
        node_w = self._node_power(power_w)
        while state.time_s < end_s:
            before_s = state.time_s
            fan_w = self._fan_w(state)
            state, ticked = self._to_next_tick(state, node_w, end_s)
            fan_j += fan_w * (state.time_s - before_s)
            if ticked:
                self._append_record(state)
        # Exactly the caller's time, which sums of ticks may miss by rounding.
        self._state = replace(state, time_s=end_s)
        self.cooling_j += fan_j
        return fan_j

    def _to_next_tick(
        self,
        state: _State,
        node_w: Vector,
        end_s: float,
    ) -> tuple[_State, bool]:
        """Return the state at the next tick, or at `end_s` if that comes first, and whether there was a tick."""
        # From the number of ticks, not by adding: rounding would add up over hours.
        number = self._num_ticks(state.time_s) + 1
        until_s = min(number * self._tick_s, end_s)
        heat_w = node_w + self._user_w(state) if self._surroundings.background_load else node_w
        ambient_c = self._surroundings.ambient_c.at(self._last_tick_s(state))
        duration_s = until_s - state.time_s
        network = self._network(state)
        end_c = network.end_c(state.temperatures_c, heat_w, ambient_c, duration_s)
        state = replace(state, time_s=until_s, temperatures_c=end_c)
        if self._num_ticks(until_s) < number:
            return state, False
        return self._update_controls(state), True

    def _num_ticks(self, time_s: float) -> int:
        """Return the number of ticks after the first, tolerating rounding in sums of times."""
        return math.floor(time_s / self._tick_s + 1e-9)

    def _last_tick_s(self, state: _State) -> float:
        """Return the time of the last tick, which also selects the present surroundings."""
        return self._num_ticks(state.time_s) * self._tick_s

    def _update_controls(self, state: _State) -> _State:
        """Return the state after governor and fan policy have read the temperatures."""
        socs_c = state.temperatures_c[: self._rack.num_socs]
        levels = self._governor.next_levels(state.levels, socs_c)
        step_c = self._sensor_step_c
        sensed_c = np.round(socs_c / step_c) * step_c if step_c else socs_c
        observation = FanObservation(
            at_s=state.time_s,
            hottest_c=float(sensed_c.max()),
            rpm=state.rpm,
            num_throttled=int((levels > 0).sum()),
            temperatures_c=sensed_c.tolist(),
            clock_factors=self._clock_factors[levels].tolist(),
        )
        memory = state.memory
        if self._remembering:
            wanted_rpm, memory = self._remembering.decide(observation, memory)
        else:
            wanted_rpm = self._policy.rpm(observation)
        rpm = math.ceil(wanted_rpm / _RPM_STEP) * _RPM_STEP
        rpm = max(rpm, self._fans.min_rpm)
        rpm = min(rpm, self._fans.max_rpm)
        return _State(state.time_s, state.temperatures_c, levels, rpm, memory)

    def _control_state(self, state: _State) -> tuple[bytes, bool, list[BackgroundLoad]]:
        """Return what speeds, powers and taken SoCs depend on."""
        is_open = self._surroundings.open.at(self._last_tick_s(state))
        return state.levels.tobytes(), is_open, self._loads(state)

    # ------------------------------------------------------------------------------------------------- details

    def _network(self, state: _State) -> ThermalNetwork:
        working = self._surroundings.fans_working.at(self._last_tick_s(state))
        conductance = self._fans.conductance_w_per_k(state.rpm, working)
        network = self._networks.get(conductance)
        if network is None:
            network = self._networks[conductance] = self._rack.network(conductance)
        return network

    def _fan_w(self, state: _State) -> float:
        working = self._surroundings.fans_working.at(self._last_tick_s(state))
        return self._fans.power_w(state.rpm, working)

    def _loads(self, state: _State) -> list[BackgroundLoad]:
        users = self._surroundings.background_load
        tick_start_s = self._last_tick_s(state)
        if not users:
            return [NOBODY] * self._rack.num_socs
        return [load.at(tick_start_s) for load in users]

    def _node_power(self, power_w: Sequence[float]) -> Vector:
        return np.array(self._rack.node_power_w(power_w))

    def _user_w(self, state: _State) -> Vector:
        return self._node_power([load.power_w for load in self._loads(state)])

    # --------------------------------------------------------------------------------------------------- records

    @property
    def temperatures_c(self) -> Vector:
        """Present temperatures of the SoCs."""
        return self._state.temperatures_c[: self._rack.num_socs].copy()

    @property
    def history(self) -> tuple[RackRecord, ...]:
        """The records over time; a long history is thinned out evenly."""
        return tuple(self._log)

    @property
    def present(self) -> RackRecord:
        """The rack at the present time."""
        return self._record(self._state)

    def _hottest_c(self, state: _State) -> float:
        return float(state.temperatures_c[: self._rack.num_socs].max())

    def _record(self, state: _State) -> RackRecord:
        return RackRecord(
            at_s=state.time_s,
            hottest_c=self._hottest_c(state),
            mean_clock=float(self._clock_factors[state.levels].mean()),
            rpm=state.rpm,
            fan_w=self._fan_w(state),
        )

    def _append_record(self, state: _State) -> None:
        self.peak_c = max(self.peak_c, self._hottest_c(state))
        if self._log:
            next_s = self._log[-1].at_s + self._log_every_s
            # Sums of ticks may be rounded.
            if state.time_s < next_s - 1e-9:
                return
        self._log.append(self._record(state))
        if len(self._log) > _LOG_ENTRIES:
            self._log_every_s *= 2.0
            self._log = self._log[::2]

    # --------------------------------------------------------------------------------------------- interruptions

    def state(self) -> dict[str, Any]:
        """Return the state as plain values that JSON stores exactly."""
        state = self._state
        return {
            "time_s": state.time_s,
            "temperatures_c": state.temperatures_c.tolist(),
            "levels": state.levels.tolist(),
            "rpm": state.rpm,
            "memory": state.memory,
            "cooling_j": self.cooling_j,
            "peak_c": self.peak_c,
            "log_every_s": self._log_every_s,
            "log": [list(astuple(entry)) for entry in self._log],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another rack of the same description."""
        temperatures_c = np.array(state["temperatures_c"], float)
        levels = np.array(state["levels"], np.int64)
        memory = state["memory"]
        if memory is not None and self._remembering:
            memory = self._remembering.restored(memory)
        self._state = _State(state["time_s"], temperatures_c, levels, state["rpm"], memory)
        self.cooling_j = state["cooling_j"]
        self.peak_c = state["peak_c"]
        self._log_every_s = state["log_every_s"]
        self._log = []
        names = [entry.name for entry in fields(RackRecord)]
        for row in state["log"]:
            values = dict(zip(names, row, strict=True))
            self._log.append(RackRecord(**values))
