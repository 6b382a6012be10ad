"""The control loop that sets fans by a policy, with a fail-safe speed for failing sensors, policies and fans."""

import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.thermal.fans.outputs import FanNotFound, FanOutput, measured_speed
from socflower.thermal.fans.policies import FanObservation, FanPolicy, PredictingPolicy
from socflower.thermal.fans.quorum import (
    STUCK_AFTER_S,
    Alerts,
    FilteredTemperatures,
    Quorum,
    is_number,
)
from socflower.thermal.sensors.reading import HeatSource

SPIN_UP_S = 15.0
"""A fan that still measures 0 rpm this long after it was set counts as stopped."""

MOST_MISSING = 3
"""The control ends when a fan is not there in so many readings in succession."""

_EXPECTED_C = 3.0
"""How far the hottest SoC should have moved, by the policy's plan, before constant readings of all count as stuck:
more than two steps of the coarsest sensors."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FanState:
    """What one step measured and set."""

    at_s: float
    temperatures_c: Mapping[int, float | None]  # by SoC; None: rejected
    hottest_c: float | None
    rpm: float  # the target speed, within the limits
    failsafe: bool  # whether that is the fail-safe speed, for lack of a valid one
    set_rpm: tuple[float | None, ...]  # what was written, fan by fan; None: it could not be set
    measured_rpm: tuple[float | None, ...]  # before they were set
    num_output_errors: int  # since the control started
    notes: tuple[str, ...]  # present alerts, one line each

    @property
    def num_unknown(self) -> int:
        """Number of SoCs without an accepted temperature."""
        return sum(temperature_c is None for temperature_c in self.temperatures_c.values())


@plain_numbers
class FanControl:
    """Sets fans to the speed that a policy chooses for the hottest SoC; a context manager that restores them at exit.

    Every speed that is written lies between `min_rpm` and `max_rpm`. The fail-safe speed replaces the policy's

    - until enough SoCs have an accepted temperature for the first time;
    - when too few have had one for `max_silence_s`, until enough have had one for as long;
    - while the policy raises an exception or returns no valid speed.

    Enough are half of all SoCs, and one of each board (`Quorum`).

    Parameters
    ----------
    sources : Mapping
        Sources by SoC.
    policy : FanPolicy
        Called once a step.
    output : FanOutput or a sequence of them
        One fan or several. If one of several does not turn, the others turn at `max_rpm`.
    min_rpm, max_rpm, failsafe_rpm : float
        Need 0 < min_rpm <= failsafe_rpm <= max_rpm.
    period_s : float
        Seconds between two steps of `run`.
    boards : Mapping, optional
        Each SoC's board; by default all are on one.
    max_silence_s, stuck_after_s : float
        When the readings of a source are rejected: see `FilteredTemperatures`.
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
        *,
        min_rpm: float,
        max_rpm: float,
        failsafe_rpm: float,
        boards: Mapping[int, int] | None = None,
        period_s: float = 5.0,
        max_silence_s: float = 30.0,
        stuck_after_s: float = STUCK_AFTER_S,
        spin_up_s: float = SPIN_UP_S,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _log.warning,
    ) -> None:
        if not 0.0 < min_rpm <= failsafe_rpm <= max_rpm < math.inf:
            raise ConfigError(
                f"fan control: need 0 < min_rpm <= failsafe_rpm <= max_rpm, got {min_rpm:g}, "
                f"{failsafe_rpm:g} and {max_rpm:g}"
            )
        require_range("fan control", above=0.0, period_s=period_s, spin_up_s=spin_up_s)
        self._outputs = tuple(output) if isinstance(output, Sequence) else (output,)
        if not sources or not self._outputs:
            raise ConfigError(
                f"fan control: {len(sources)} sources and {len(self._outputs)} fans; one of each at "
                "least is needed"
            )
        if boards is not None and boards.keys() != sources.keys():
            raise ConfigError(
                f"fan control: boards of SoCs {sorted(boards)}, but sources of {sorted(sources)}; give "
                "each its board"
            )
        self._policy, self._clock = policy, clock
        self._min_rpm, self._max_rpm, self._failsafe_rpm = min_rpm, max_rpm, failsafe_rpm
        self._period_s, self._spin_up_s = period_s, spin_up_s
        self._alerts = Alerts(say)
        self._temperatures = FilteredTemperatures(
            sources,
            max_silence_s=max_silence_s,
            stuck_after_s=stuck_after_s,
            clock=clock,
            alerts=self._alerts,
        )
        self._quorum = Quorum(boards or dict.fromkeys(sources, 0), patience_s=max_silence_s)
        self._constant_check = _ConstantReadingCheck(policy)
        self._rpm = failsafe_rpm
        # The policy's speed before it is clipped to the limits: a policy that asks for more than the fans can give, and
        # checks whether it already cools, must see the speed that it asked for.
        self._policy_rpm = failsafe_rpm
        self._num_errors = 0
        self._stopped_since_s: list[float | None] = [None] * len(self._outputs)
        self._stopped = [False] * len(self._outputs)
        self._num_missing = [0] * len(
            self._outputs
        )  # readings in succession in which the fan was not there
        self._missing: FanNotFound | None = None
        self.uncontrolled: tuple[str, ...] = ()
        """After the end: fans that could neither be restored nor set to the fail-safe speed."""

    def __enter__(self) -> "FanControl":
        """Start; nothing is written before the first step."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous control of every fan, or if that fails set the fail-safe speed."""
        for index, output in enumerate(self._outputs):
            try:
                output.restore()
                continue
            except Exception as error:
                cause = str(error)
            try:
                output.set_rpm(self._failsafe_rpm)
                self._set_alert(
                    ("restore", index),
                    f"fan {self._name(index)}: has no automatic control now ({cause}); "
                    f"it is left at {self._failsafe_rpm:g} rpm",
                )
            except Exception as error:
                self.uncontrolled += (self._name(index),)
                self._set_alert(
                    ("leave", index),
                    f"fan {self._name(index)}: its control cannot be restored ({cause}), "
                    f"and it cannot be set to {self._failsafe_rpm:g} rpm ({error})",
                )

    def step(self) -> FanState:
        """Read all SoCs, call the policy, and set the fans. Never raises; errors are in the notes."""
        now_s = self._clock()
        temperatures_c = self._temperatures.poll(
            all_may_be_constant=self._constant_check.may_be_constant(now_s, self._rpm)
        )
        filtered = {soc: value for soc, value in temperatures_c.items() if value is not None}
        hottest_c = max(filtered.values(), default=None)
        self._constant_check.update(now_s, hottest_c, self._temperatures.constant_since_s)
        lost = not self._quorum.holds(now_s, filtered)
        missing = self._quorum.missing(filtered)
        self._set_alert(
            "quorum",
            f"{missing}; the fans {'turn at' if lost else 'go to'} the fail-safe speed"
            f"{'' if lost else ' if that lasts'}"
            if missing
            else None,
            well="enough temperatures are known again",
        )
        wanted_rpm = self._wanted_rpm(
            FanObservation(
                at_s=now_s,
                hottest_c=hottest_c,
                rpm=self._policy_rpm,
                num_unknown=len(temperatures_c) - len(filtered),
                num_socs=len(temperatures_c),
            )
        )
        failsafe = lost or wanted_rpm is None
        rpm = self._failsafe_rpm if lost or wanted_rpm is None else wanted_rpm
        self._policy_rpm = rpm
        self._rpm = min(max(rpm, self._min_rpm), self._max_rpm)
        measured_rpm = tuple(self._measure(index, now_s) for index in range(len(self._outputs)))
        set_rpm = tuple(self._set(index) for index in range(len(self._outputs)))
        return FanState(
            at_s=now_s,
            temperatures_c=temperatures_c,
            hottest_c=hottest_c,
            rpm=self._rpm,
            failsafe=failsafe,
            set_rpm=set_rpm,
            measured_rpm=measured_rpm,
            num_output_errors=self._num_errors,
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
                self._set_alert("on_step", None)
            except Exception as error:
                self._set_alert("on_step", f"what was done cannot be reported ({error})")
            if self._missing is not None:
                raise self._missing
            if wait(self._period_s):
                return

    def _wanted_rpm(self, observation: FanObservation) -> float | None:
        """Return the policy's speed, or None if it is not valid."""
        try:
            wanted_rpm: Any = self._policy.rpm(observation)
        except Exception as error:
            self._set_alert(
                "policy",
                f"the policy fails ({type(error).__name__}: {error}); the fans turn at the "
                "fail-safe speed",
            )
            return None
        if not is_number(wanted_rpm) or wanted_rpm <= 0.0:
            self._set_alert(
                "policy", "the policy gives no valid speed; the fans turn at the fail-safe speed"
            )
            return None
        self._set_alert("policy", None, well="the policy works again")
        return float(wanted_rpm)

    def _measure(self, index: int, now_s: float) -> float | None:
        """Return a fan's measured speed, and update whether it counts as stopped."""
        try:
            rpm = self._outputs[index].measured_rpm()
        except Exception:
            rpm = None
        if rpm is None or not is_number(rpm) or measured_speed(rpm) is None:
            return None  # its state is unchanged
        if rpm > 0.0:
            self._stopped_since_s[index] = None
            self._stopped[index] = False
        else:
            since_s = self._stopped_since_s[index]
            if since_s is None:
                self._stopped_since_s[index] = now_s
            elif now_s - since_s >= self._spin_up_s:
                self._stopped[index] = True
        others = "; the others turn at full speed" if len(self._outputs) > 1 else ""
        self._set_alert(
            ("stopped", index),
            f"fan {self._name(index)}: is set and does not turn; see to it{others}"
            if self._stopped[index]
            else None,
            well=f"fan {self._name(index)}: turns again",
        )
        return float(rpm)

    def _set(self, index: int) -> float | None:
        """Set a fan and return what it was set to; a failure is None and counted, and the next step tries again."""
        others_stopped = any(self._stopped[:index] + self._stopped[index + 1 :])
        rpm = self._max_rpm if others_stopped else self._rpm
        try:
            self._outputs[index].set_rpm(rpm)
        except Exception as error:
            self._num_errors += 1
            self._num_missing[index] = (
                self._num_missing[index] + 1 if isinstance(error, FanNotFound) else 0
            )
            if self._num_missing[index] >= MOST_MISSING:
                self._missing = FanNotFound(
                    f"fan {self._name(index)}: not there in {MOST_MISSING} readings ({error}); "
                    "fan control ends"
                )
            self._set_alert(
                ("output", index),
                f"fan {self._name(index)}: cannot be set ({error}); tried again at every step",
            )
            return None
        self._num_missing[index] = 0
        self._set_alert(("output", index), None, well=f"fan {self._name(index)}: can be set again")
        return rpm

    def _name(self, index: int) -> str:
        try:
            return self._outputs[index].describe()
        except Exception:
            return str(index)

    def _set_alert(self, key: object, text: str | None, *, well: str = "") -> None:
        self._alerts.set(key, text, self._clock(), well=well)


class _ConstantReadingCheck:
    """Decides whether constant readings of all SoCs agree with the policy's prediction; without one they do not.

    The prediction starts at the temperature at which the readings became constant, and follows the fan speeds since.
    """

    def __init__(self, policy: FanPolicy) -> None:
        self._policy = policy if isinstance(policy, PredictingPolicy) else None
        self._since_s: float | None = None
        self._at_s = 0.0
        self._shown_c: float | None = None
        self._expected_c: float | None = None  # None: no prediction
        self._should_have_changed = False  # at some time since the readings became constant

    def may_be_constant(self, now_s: float, rpm: float) -> bool:
        """Return whether they may be constant, after the time since the last `update` at this speed."""
        if self._policy is None or self._expected_c is None or self._shown_c is None:
            return False
        try:
            self._expected_c = self._policy.expected_c(
                self._expected_c, rpm=rpm, at_s=now_s, duration_s=max(0.0, now_s - self._at_s)
            )
        except Exception:  # `_wanted_rpm` reports a failing policy
            self._expected_c = None
        self._at_s = now_s
        if self._expected_c is None or not abs(self._expected_c - self._shown_c) < _EXPECTED_C:
            self._should_have_changed = True
        return not self._should_have_changed

    def update(self, now_s: float, hottest_c: float | None, constant_since_s: float | None) -> None:
        """Record a reading; a change of temperature restarts the prediction."""
        if constant_since_s != self._since_s:
            self._since_s, self._shown_c, self._expected_c = constant_since_s, hottest_c, hottest_c
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
