"""The control loop that sets fans by a policy, with a fail-safe speed for failing sensors, policies and fans."""

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from socflower.errors import ConfigError, require_order
from socflower.field_rules import NotNegative, Positive, checked
from socflower.plain_numbers import plain_numbers
from socflower.thermal.fans.outputs import FanNotFound, FanOutput, measured_speed
from socflower.thermal.fans.policies import (
    FanObservation,
    FanPolicy,
    PredictingPolicy,
    RememberingPolicy,
)
from socflower.thermal.fans.quorum import STUCK_AFTER_S, Alerts, FilteredTemperatures, SensorQuorum
from socflower.thermal.sensors.reading import HeatSource, Temperature, is_number

MOST_MISSING = 3
"""The control ends when a fan is not there in so many readings in succession."""

_EXPECTED_C = 3.0
"""How far the hottest SoC should have moved, by the policy's plan, before constant readings of all count as stuck:
more than two steps of the coarsest sensors."""

_COOLING_PART = 0.75
"""Fans below this part of the fail-safe speed do not cool a rack at work."""

_log = logging.getLogger(__name__)


@checked
class FanSettings:
    """Limits of the speeds that are set, and times of the control.

    `failsafe_rpm` should cool the rack at full load. `period_s` is the time between two steps of `FanControl.run`. A
    source's reading is rejected by `max_silence_s` and `stuck_after_s` (`FilteredTemperatures`); too few accepted ones
    for `max_silence_s` bring the fail-safe speed. A fan that measures 0 rpm for `spin_up_s` counts as stopped.
    The inlet air is never colder than `min_ambient_c`, and the rack at full load and slow fans gets at most
    `rise_c_per_s` hotter: so much is added to the temperatures while all are constant under load.
    """

    min_rpm: Positive
    max_rpm: Positive
    failsafe_rpm: Positive
    period_s: Positive = 5.0
    max_silence_s: Positive = 30.0
    stuck_after_s: Positive = STUCK_AFTER_S
    spin_up_s: Positive = 15.0
    min_ambient_c: Temperature = 0.0
    rise_c_per_s: NotNegative = 0.03

    def check(self) -> None:
        """Refuse speeds in the wrong order, and a range of one speed."""
        require_order(min_rpm=self.min_rpm, max_rpm=self.max_rpm)
        require_order(
            equal=True,
            min_rpm=self.min_rpm,
            failsafe_rpm=self.failsafe_rpm,
            max_rpm=self.max_rpm,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FanState:
    """What one step measured and set."""

    at_s: float
    # By SoC; None if it is rejected.
    temperatures_c: Mapping[int, float | None]
    hottest_c: float | None
    # The target speed, within the limits, and whether it is the fail-safe speed, for lack of a valid one.
    rpm: float
    failsafe: bool
    # By fan: what was written, None if it could not be set, and what was measured before.
    set_rpm: tuple[float | None, ...]
    measured_rpm: tuple[float | None, ...]
    # Since the control started.
    num_output_errors: int
    # Present alerts, one line each.
    notes: tuple[str, ...]

    @property
    def num_unknown(self) -> int:
        """Number of SoCs without an accepted temperature."""
        return list(self.temperatures_c.values()).count(None)


class _Fan:
    """An output that is driven, with its alerts; no failure of the output raises."""

    def __init__(
        self,
        index: int,
        output: FanOutput,
        settings: FanSettings,
        alerts: Alerts,
        *,
        is_only: bool,
    ) -> None:
        self._index = index
        self._output = output
        self._settings = settings
        self._alerts = alerts
        self._is_only = is_only
        self._still_since_s: float | None = None
        self.is_stopped = False
        self.num_errors = 0
        self._num_missing = 0
        self.missing: FanNotFound | None = None
        """The error after which the control ends: the fan was not there in three steps in succession."""

    @property
    def name(self) -> str:
        """The output's description, or its index if it has none."""
        try:
            return self._output.describe()
        except Exception:
            return str(self._index)

    def measure(self, now_s: float) -> float | None:
        """Return the measured speed, and update whether the fan counts as stopped."""
        try:
            shown = self._output.measured_rpm()
        except Exception:
            shown = None
        rpm = measured_speed(shown) if is_number(shown) else None
        # Without a valid speed its state is unchanged.
        if rpm is None:
            return None
        if rpm > 0.0:
            self._still_since_s = None
            self.is_stopped = False
        # A fan that was just set still accelerates.
        elif self._still_since_s is None:
            self._still_since_s = now_s
        elif now_s - self._still_since_s >= self._settings.spin_up_s:
            self.is_stopped = True
        others = "" if self._is_only else "; the others turn at full speed"
        text = f"does not turn although it is set; check it{others}" if self.is_stopped else None
        self._set_alert("stopped", text, well="turns again")
        return rpm

    def set(self, rpm: float) -> float | None:
        """Set the speed and return it; None if that fails, which is counted. The next step tries again."""
        try:
            self._output.set_rpm(rpm)
        except Exception as error:
            self.num_errors += 1
            # Only successive steps count: a driver that is loaded again is back soon.
            self._num_missing = self._num_missing + 1 if isinstance(error, FanNotFound) else 0
            if self._num_missing >= MOST_MISSING:
                self.missing = FanNotFound(
                    f"fan {self.name}: not there in {MOST_MISSING} readings ({error}); "
                    "fan control ends"
                )
            self._set_alert("output", f"cannot be set ({error}); tried again at every step")
            return None
        self._num_missing = 0
        self._set_alert("output", None, well="can be set again")
        return rpm

    def restore(self) -> bool:
        """Restore the previous control, or else set the fail-safe speed; return whether either succeeded."""
        try:
            self._output.restore()
            return True
        except Exception as error:
            cause = str(error)
        rpm = self._settings.failsafe_rpm
        try:
            self._output.set_rpm(rpm)
        except Exception as error:
            problem = f"cannot be restored ({cause}), nor set to {rpm:g} rpm ({error})"
            self._set_alert("leave", problem)
            return False
        self._set_alert("restore", f"cannot be restored ({cause}); it stays at {rpm:g} rpm")
        return True

    def _set_alert(
        self,
        kind: str,
        text: str | None,
        *,
        well: str = "",
    ) -> None:
        start = f"fan {self.name}: "
        key = (kind, self._index)
        self._alerts.set(key, text and start + text, well=start + well)


def restore_fans(
    outputs: Sequence[FanOutput],
    settings: FanSettings,
    say: Callable[[str], object],
) -> None:
    """Restore the previous control of every fan, or else set the fail-safe speed; `say` gets each failure."""
    alerts = Alerts(say, time.monotonic)
    for index, output in enumerate(outputs):
        _Fan(index, output, settings, alerts, is_only=True).restore()


@plain_numbers
class FanControl:
    """Sets fans to the speed that a policy chooses for the hottest SoC; a context manager that restores them at exit.

    Every speed that is written lies between `min_rpm` and `max_rpm`. The fail-safe speed replaces the policy's

    - until enough SoCs have an accepted temperature for the first time;
    - when too few have had one for `max_silence_s`, until enough have had one for as long;
    - while the policy raises an exception or returns no valid speed.

    Enough are half of all SoCs, and one of each board (`SensorQuorum`).

    Parameters
    ----------
    sources : Mapping
        Sources by SoC.
    policy : FanPolicy
        Called once a step.
    output : FanOutput or a sequence of them
        One fan or several. If one of several does not turn, the others turn at `max_rpm`.
    settings : FanSettings
        Limits and times.
    boards : Mapping, optional
        Each SoC's board; by default all are on one.
    clock : Callable
        Seconds; only goes forward.
    say : Callable
        Called with one line when an alert begins or ends; by default the line is logged.
    """

    def __init__(
        self,
        sources: Mapping[int, HeatSource],
        policy: FanPolicy,
        output: FanOutput | Sequence[FanOutput],
        settings: FanSettings,
        *,
        boards: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _log.warning,
    ) -> None:
        outputs = tuple(output) if isinstance(output, Sequence) else (output,)
        if not sources or not outputs:
            raise ConfigError(f"fan control: {len(sources)} sources and {len(outputs)} fans")
        if boards is not None and boards.keys() != sources.keys():
            raise ConfigError(f"fan control: boards of {[*boards]}, but sources of {[*sources]}")
        self._policy = policy
        # Of a policy that remembers.
        self._memory: Any = None
        self._settings = settings
        self._clock = clock
        self._alerts = Alerts(say, clock)
        self._fans = [
            _Fan(index, each, settings, self._alerts, is_only=len(outputs) == 1)
            for index, each in enumerate(outputs)
        ]
        self._temperatures = FilteredTemperatures(
            sources,
            max_silence_s=settings.max_silence_s,
            stuck_after_s=settings.stuck_after_s,
            alerts=self._alerts,
            min_ambient_c=settings.min_ambient_c,
        )
        boards = boards or dict.fromkeys(sources, 0)
        self._quorum = SensorQuorum(boards, patience_s=settings.max_silence_s)
        self._constant_check = _ConstantReadingCheck(policy)
        # The policy's speed before it is clipped to the limits: a policy that asks for more than the fans can give, and
        # checks whether it already cools, must see the speed that it asked for.
        self._rpm = self._policy_rpm = settings.failsafe_rpm
        self.uncontrolled: tuple[str, ...] = ()
        """After the end: fans that could neither be restored nor set to the fail-safe speed."""

    def __enter__(self) -> "FanControl":
        """Start; nothing is written before the first step."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous control of every fan, or if that fails set the fail-safe speed."""
        self.uncontrolled = tuple(fan.name for fan in self._fans if not fan.restore())

    def step(self) -> FanState:
        """Read all SoCs, call the policy, and set the fans. Never raises; errors are in the notes."""
        now_s = self._clock()
        # Before the poll: the fans turned at the last step's speed until now.
        may_be_constant = self._constant_check.may_be_constant(now_s, self._rpm)
        temperatures_c = self._temperatures.poll(
            now_s,
            all_may_be_constant=may_be_constant,
            fans_cool=self._rpm > _COOLING_PART * self._settings.failsafe_rpm,
        )
        accepted = {soc: value for soc, value in temperatures_c.items() if value is not None}
        hottest_c = max(accepted.values(), default=None)
        self._constant_check.update(now_s, hottest_c, self._temperatures.constant_since_s)
        # If all sensors have stopped, it may be so hot by now.
        risen_c = self._settings.rise_c_per_s * self._temperatures.constant_busy_s
        observation = FanObservation(
            at_s=now_s,
            hottest_c=None if hottest_c is None else hottest_c + risen_c,
            rpm=self._policy_rpm,
            num_unknown=len(temperatures_c) - len(accepted),
            num_socs=len(temperatures_c),
            temperatures_c=tuple(value + risen_c for value in accepted.values()),
            clock_factors=self._temperatures.clock_factors(accepted),
        )
        # The policy is called also without a quorum: its failures must be reported.
        failsafe = not self._has_quorum(now_s, accepted)
        wanted_rpm = self._wanted_rpm(observation)
        if failsafe or wanted_rpm is None:
            failsafe = True
            wanted_rpm = self._settings.failsafe_rpm
        self._policy_rpm = wanted_rpm
        self._rpm = min(max(wanted_rpm, self._settings.min_rpm), self._settings.max_rpm)
        # All are measured first: whether one has stopped decides on the speed of the others.
        measured_rpm = tuple(fan.measure(now_s) for fan in self._fans)
        set_rpm = tuple(fan.set(self._rpm_of(fan)) for fan in self._fans)
        return FanState(
            at_s=now_s,
            temperatures_c=temperatures_c,
            hottest_c=hottest_c,
            rpm=self._rpm,
            failsafe=failsafe,
            set_rpm=set_rpm,
            measured_rpm=measured_rpm,
            num_output_errors=sum(fan.num_errors for fan in self._fans),
            notes=self._alerts.notes,
        )

    def run(
        self,
        wait: Callable[[float], bool],
        on_step: Callable[[FanState], object] = lambda state: None,
    ) -> None:
        """Step until `wait`, called with the seconds to the next step, returns True, such as `StopSignals.wait`.

        Raises `FanNotFound` after three readings in succession in which a fan was not there.
        """
        while True:
            state = self.step()
            try:
                on_step(state)
                self._alerts.set("on_step", None)
            except Exception as error:
                self._alerts.set("on_step", f"the state cannot be reported ({error})")
            for fan in self._fans:
                if fan.missing is not None:
                    raise fan.missing
            if wait(self._settings.period_s):
                return

    def _has_quorum(self, now_s: float, accepted: Mapping[int, float]) -> bool:
        holds = self._quorum.holds(now_s, accepted)
        text = missing = self._quorum.missing(accepted)
        if missing and holds:
            text = f"{missing}; the fans go to the fail-safe speed if that lasts"
        elif missing:
            text = f"{missing}; the fans turn at the fail-safe speed"
        self._alerts.set("quorum", text or None, well="enough temperatures are known again")
        return holds

    def _wanted_rpm(self, observation: FanObservation) -> float | None:
        """Return the policy's speed, or None if it is not valid."""
        try:
            wanted_rpm: Any = self._policy_speed(observation)
            problem = None
            if not is_number(wanted_rpm) or wanted_rpm <= 0.0:
                problem = "gives no valid speed"
        except Exception as error:
            problem = f"fails ({type(error).__name__}: {error})"
        text = problem and f"the policy {problem}; the fans turn at the fail-safe speed"
        self._alerts.set("policy", text, well="the policy works again")
        return None if problem else float(wanted_rpm)

    def _policy_speed(self, observation: FanObservation) -> float:
        if not isinstance(self._policy, RememberingPolicy):
            return self._policy.rpm(observation)
        wanted_rpm, self._memory = self._policy.decide(observation, self._memory)
        return wanted_rpm

    def _rpm_of(self, fan: _Fan) -> float:
        """Return the speed for a fan: the highest if another one has stopped."""
        others_stopped = any(other.is_stopped for other in self._fans if other is not fan)
        return self._settings.max_rpm if others_stopped else self._rpm


class _ConstantReadingCheck:
    """Decides whether constant readings of all SoCs agree with the policy's prediction; without one they do not.

    The prediction starts at the temperature at which the readings became constant, and follows the fan speeds since.
    """

    def __init__(self, policy: FanPolicy) -> None:
        self._policy = policy if isinstance(policy, PredictingPolicy) else None
        self._since_s: float | None = None
        self._at_s = 0.0
        self._shown_c: float | None = None
        # None if there is no prediction.
        self._expected_c: float | None = None
        # At some time since the readings became constant.
        self._should_have_changed = False

    def may_be_constant(self, now_s: float, rpm: float) -> bool:
        """Return whether they may be constant, after the time since the last `update` at this speed."""
        if self._policy is None or self._expected_c is None or self._shown_c is None:
            return False
        try:
            self._expected_c = self._policy.expected_c(
                self._expected_c,
                rpm=rpm,
                at_s=now_s,
                duration_s=max(0.0, now_s - self._at_s),
            )
        # `_wanted_rpm` reports a failing policy.
        except Exception:
            self._expected_c = None
        self._at_s = now_s
        expected_c = self._expected_c
        if expected_c is None or not abs(expected_c - self._shown_c) < _EXPECTED_C:
            # Remembered: a prediction that returns to the shown temperature explains nothing.
            self._should_have_changed = True
        return not self._should_have_changed

    def update(
        self,
        now_s: float,
        hottest_c: float | None,
        constant_since_s: float | None,
    ) -> None:
        """Record a reading; a change of temperature restarts the prediction."""
        if constant_since_s != self._since_s:
            self._since_s = constant_since_s
            self._shown_c = hottest_c
            self._expected_c = hottest_c
            self._should_have_changed = False
        self._at_s = now_s


class StopSignals:
    """Ends a wait on SIGTERM, SIGINT or SIGHUP, so that fans are restored before exit; a context manager.

    Only the main thread of a process can catch signals; in other threads `wait` only waits.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._stopped = False

    def __enter__(self) -> "StopSignals":
        """Install the signal handlers."""
        # A handler may interrupt any line, even inside a lock, so it only writes to a pipe.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        with suppress(ValueError):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether a stop signal has arrived, during the wait or before."""
        if not self._stopped:
            select.select([self._read_end], [], [], max(0.0, seconds))
        return self._stopped

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        with suppress(BlockingIOError):
            os.write(self._write_end, b"x")
