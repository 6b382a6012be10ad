"""The loop that keeps fans at what a policy wants, whatever sensors, policy and fans do: they never stand still."""

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

from socflower.errors import ConfigError
from socflower.thermal.fans.outputs import FanOutput
from socflower.thermal.fans.policies import FanObservation, FanPolicy, ForesightedPolicy
from socflower.thermal.fans.quorum import STUCK_AFTER_S, BelievedTemperatures, Quorum, Troubles, is_number
from socflower.thermal.sensors.reading import HeatSource

SPIN_UP_S = 15.0
"""A fan that still shows no turn this long after it was set does not turn."""

_EXPECTED_C = 3.0
"""How far the hottest SoC should have moved, by the policy's plan, before sensors that all stand still are doubted:
more than two steps of the coarsest sensors."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FanState:
    """What a look found, and what was done."""

    at_s: float
    temperatures_c: Mapping[int, float | None]  # by SoC; None: not believed
    hottest_c: float | None
    rpm: float  # what the fans are to turn at, within the limits
    failsafe: bool  # whether that is the fail-safe speed, because nothing better is known
    set_rpm: tuple[float, ...]  # what was written, fan by fan
    measured_rpm: tuple[float | None, ...]  # before that
    num_output_errors: int  # since the control began
    notes: tuple[str, ...]  # what is wrong, a line each

    @property
    def num_unknown(self) -> int:
        """How many SoCs say nothing that can be believed."""
        return sum(temperature_c is None for temperature_c in self.temperatures_c.values())


class FanControl:
    """Keeps fans at the speed that a policy wants for the hottest SoC; a context manager that gives them back.

    Every speed that is written lies between `min_rpm` and `max_rpm`. The fail-safe speed is written instead of the
    policy's until enough SoCs are believed for the first time, after too few were for `max_silence_s` until enough are
    for as long, and whenever the policy raises or wants what is no speed. Enough are half of all, and one of each
    board (`Quorum`).

    Parameters
    ----------
    sources : Mapping
        Sources by SoC.
    policy : FanPolicy
        Asked once a step.
    output : FanOutput or a sequence of them
        One fan or several. If one of several does not turn, the others turn at `max_rpm`.
    min_rpm, max_rpm, failsafe_rpm : float
        Need 0 < min_rpm <= failsafe_rpm <= max_rpm.
    period_s : float
        Seconds between two looks of `run`.
    boards : Mapping, optional
        Each SoC's board; by default all are on one.
    max_silence_s, stuck_after_s : float
        When sources are no longer believed: see `BelievedTemperatures`.
    clock : Callable
        Seconds; only goes forward.
    say : Callable
        Gets a line when something goes wrong or well again; by default the log does.
    """

    def __init__(
        self, sources: Mapping[int, HeatSource], policy: FanPolicy, output: FanOutput | Sequence[FanOutput], *,
        min_rpm: float, max_rpm: float, failsafe_rpm: float, boards: Mapping[int, int] | None = None,
        period_s: float = 5.0, max_silence_s: float = 30.0, stuck_after_s: float = STUCK_AFTER_S,
        spin_up_s: float = SPIN_UP_S, clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _log.warning,
    ) -> None:
        if not 0.0 < min_rpm <= failsafe_rpm <= max_rpm < math.inf:
            raise ConfigError(f"fan control: need 0 < min_rpm <= failsafe_rpm <= max_rpm, got {min_rpm:g}, "
                              f"{failsafe_rpm:g} and {max_rpm:g}")
        for key, value in (("period_s", period_s), ("spin_up_s", spin_up_s)):
            if not 0.0 < value < math.inf:
                raise ConfigError(f"fan control: {key} = {value} must be above 0 and finite")
        self._outputs = tuple(output) if isinstance(output, Sequence) else (output,)
        if not sources or not self._outputs:
            raise ConfigError(f"fan control: {len(sources)} sources and {len(self._outputs)} fans; one of each at "
                              "least is needed")
        if boards is not None and boards.keys() != sources.keys():
            raise ConfigError(f"fan control: boards of SoCs {sorted(boards)}, but sources of {sorted(sources)}; give "
                              "each its board")
        self._policy, self._clock = policy, clock
        self._min_rpm, self._max_rpm, self._failsafe_rpm = min_rpm, max_rpm, failsafe_rpm
        self._period_s, self._spin_up_s = period_s, spin_up_s
        self._troubles = Troubles(say)
        self._temperatures = BelievedTemperatures(
            sources, max_silence_s=max_silence_s, stuck_after_s=stuck_after_s, clock=clock, troubles=self._troubles)
        self._quorum = Quorum(boards or dict.fromkeys(sources, 0), patience_s=max_silence_s)
        self._expectation = _Expectation(policy)
        self._rpm = failsafe_rpm
        # What the policy wanted, while only the limits made something else of it: one that asks for more than the fans
        # can give, and looks whether it is cooling already, must find its own speed.
        self._asked_rpm = failsafe_rpm
        self._num_errors = 0
        self._still_since_s: list[float | None] = [None] * len(self._outputs)
        self._stopped = [False] * len(self._outputs)

    def __enter__(self) -> "FanControl":
        """Begin; nothing is written before the first step."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give every fan back to what controlled it before, or if that fails leave it at the fail-safe speed."""
        for index, output in enumerate(self._outputs):
            try:
                output.restore()
                continue
            except Exception as error:
                self._trouble(("restore", index), f"fan {self._name(index)}: has no automatic control now ({error}); "
                                                  f"it is left at {self._failsafe_rpm:g} rpm")
            try:
                output.set_rpm(self._failsafe_rpm)
            except Exception as error:
                self._trouble(("leave", index), f"fan {self._name(index)}: nothing controls it, and it cannot be set "
                                                f"to {self._failsafe_rpm:g} rpm ({error})")

    def step(self) -> FanState:
        """Look at all SoCs, ask the policy, and set the fans. Never raises; what goes wrong is in the notes."""
        now_s = self._clock()
        temperatures_c = self._temperatures.look(
            may_all_stand_still=self._expectation.may_stand_still(now_s, self._rpm))
        believed = {soc: value for soc, value in temperatures_c.items() if value is not None}
        hottest_c = max(believed.values(), default=None)
        self._expectation.note(now_s, hottest_c, self._temperatures.still_since_s)
        lost = not self._quorum.holds(now_s, believed)
        missing = self._quorum.missing(believed)
        self._trouble("sight", f"{missing}; the fans {'turn at' if lost else 'go to'} the fail-safe speed"
                               f"{'' if lost else ' if that lasts'}" if missing else None,
                      well="enough temperatures are known again")
        wanted_rpm = self._ask(FanObservation(
            at_s=now_s, hottest_c=hottest_c, rpm=self._asked_rpm, num_unknown=len(temperatures_c) - len(believed),
            num_socs=len(temperatures_c)))
        failsafe = lost or wanted_rpm is None
        rpm = self._failsafe_rpm if lost or wanted_rpm is None else wanted_rpm
        self._asked_rpm = rpm
        self._rpm = min(max(rpm, self._min_rpm), self._max_rpm)
        measured_rpm = tuple(self._measure(index, now_s) for index in range(len(self._outputs)))
        set_rpm = tuple(self._set(index) for index in range(len(self._outputs)))
        return FanState(
            at_s=now_s, temperatures_c=temperatures_c, hottest_c=hottest_c, rpm=self._rpm, failsafe=failsafe,
            set_rpm=set_rpm, measured_rpm=measured_rpm, num_output_errors=self._num_errors,
            notes=self._troubles.notes)

    def run(self, wait: Callable[[float], bool], on_step: Callable[[FanState], object] = lambda state: None) -> None:
        """Step until `wait`, given the seconds to the next look, returns True, such as `StopSignals.wait`."""
        while True:
            state = self.step()
            try:
                on_step(state)
                self._trouble("on_step", None)
            except Exception as error:
                self._trouble("on_step", f"what was done cannot be reported ({error})")
            if wait(self._period_s):
                return

    def _ask(self, observation: FanObservation) -> float | None:
        """Return what the policy wants, or None if that is no speed."""
        try:
            wanted_rpm: Any = self._policy.rpm(observation)
        except Exception as error:
            self._trouble("policy", f"the policy fails ({type(error).__name__}: {error}); the fans turn at the "
                                    "fail-safe speed")
            return None
        if not is_number(wanted_rpm) or wanted_rpm <= 0.0:
            self._trouble("policy", "the policy wants what is no speed; the fans turn at the fail-safe speed")
            return None
        self._trouble("policy", None, well="the policy works again")
        return float(wanted_rpm)

    def _measure(self, index: int, now_s: float) -> float | None:
        """Return how fast a fan turns, and take in whether it does."""
        try:
            rpm = self._outputs[index].measured_rpm()
        except Exception:
            rpm = None
        if rpm is None or not is_number(rpm) or rpm < 0.0:
            return None  # what was known of it stands
        if rpm > 0.0:
            self._still_since_s[index] = None
            self._stopped[index] = False
        else:
            since_s = self._still_since_s[index]
            if since_s is None:
                self._still_since_s[index] = now_s
            elif now_s - since_s >= self._spin_up_s:
                self._stopped[index] = True
        others = "; the others turn at full speed" if len(self._outputs) > 1 else ""
        self._trouble(("stopped", index), f"fan {self._name(index)}: is set and does not turn; see to it{others}"
                      if self._stopped[index] else None, well=f"fan {self._name(index)}: turns again")
        return float(rpm)

    def _set(self, index: int) -> float:
        """Set a fan and return what it was set to; a failure is counted, and the next step tries again."""
        others_stopped = any(self._stopped[:index] + self._stopped[index + 1:])
        rpm = self._max_rpm if others_stopped else self._rpm
        try:
            self._outputs[index].set_rpm(rpm)
        except Exception as error:
            self._num_errors += 1
            self._trouble(("output", index), f"fan {self._name(index)}: cannot be set ({error}); tried again at every "
                                             "look")
        else:
            self._trouble(("output", index), None, well=f"fan {self._name(index)}: can be set again")
        return rpm

    def _name(self, index: int) -> str:
        try:
            return self._outputs[index].describe()
        except Exception:
            return str(index)

    def _trouble(self, key: object, text: str | None, *, well: str = "") -> None:
        self._troubles.set(key, text, self._clock(), well=well)


class _Expectation:
    """Whether temperatures that all stand still do what the policy's plan expects; without a plan they do not.

    The plan's prediction starts at what was shown when they came to rest, and goes by the speeds of the fans since.
    """

    def __init__(self, policy: FanPolicy) -> None:
        self._policy = policy if isinstance(policy, ForesightedPolicy) else None
        self._since_s: float | None = None
        self._at_s = 0.0
        self._shown_c: float | None = None
        self._expected_c: float | None = None  # None: nothing is known to speak for standing still
        self._should_have_moved = False  # at some time since they came to rest

    def may_stand_still(self, now_s: float, rpm: float) -> bool:
        """Return whether they may, having passed the time since the last `note` at this speed."""
        if self._policy is None or self._expected_c is None or self._shown_c is None:
            return False
        try:
            self._expected_c = self._policy.expected_c(
                self._expected_c, rpm=rpm, at_s=now_s, duration_s=max(0.0, now_s - self._at_s))
        except Exception:  # that the policy fails is said where it is asked for a speed
            self._expected_c = None
        self._at_s = now_s
        if self._expected_c is None or not abs(self._expected_c - self._shown_c) < _EXPECTED_C:
            self._should_have_moved = True
        return not self._should_have_moved

    def note(self, now_s: float, hottest_c: float | None, still_since_s: float | None) -> None:
        """Take in a look; a movement begins the prediction anew."""
        if still_since_s != self._since_s:
            self._since_s, self._shown_c, self._expected_c = still_since_s, hottest_c, hottest_c
            self._should_have_moved = False
        self._at_s = now_s


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGHUP into the end of a wait, so that a fan is given back first; a context manager.

    Only a process's main thread may catch signals: elsewhere `wait` only waits.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._stopped = False

    def __enter__(self) -> "StopSignals":
        """Catch the signals."""
        # A handler may interrupt any line, also one within a lock: writing to a pipe is all that it does.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        with suppress(ValueError):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether a signal asked for the end, then or before."""
        if not self._stopped:
            select.select([self._read_end], [], [], max(0.0, seconds))
        return self._stopped

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        with suppress(BlockingIOError):
            os.write(self._write_end, b"x")
