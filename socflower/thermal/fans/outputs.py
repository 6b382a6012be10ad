"""The interface of fan outputs, the relation of speed and duty, and a simulated fan.

Real outputs are in `hwmon_pwm` and `ipmi`. No output ever stops a fan: a duty below `min_duty` is not written,
whatever speed is requested.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from socflower.errors import ConfigError, require_range

MIN_DUTY = 0.2
"""Below about this fraction of full power many fans stop, and some do not start again."""

_SETTLE_S = 6.0
"""A fan has reached its speed this long after a change of duty."""

_NO_READING_RPM = 65_535
"""All ones: a tachometer's register without a reading."""

_CALIBRATION_DUTIES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


class FanFailure(Exception):
    """A fan could not be set, measured or restored; the text names the fan and the reason."""


class FanNotFound(FanFailure):
    """The chip of a fan, or its output, is not there: its driver was removed, or is being loaded again."""


class FanOutput(Protocol):
    """A fan, or several that are set together."""

    def set_rpm(self, rpm: float) -> None:
        """Make the fan turn at about this speed, above 0. Raises `FanFailure`; `FanNotFound` if it is not there."""
        ...

    def measured_rpm(self) -> float | None:
        """Return the measured speed, None if it is unknown. Never raises."""
        ...

    def restore(self) -> None:
        """Restore the fan's previous control. Raises `FanFailure`, also if there was none."""
        ...

    def describe(self) -> str:
        """Return a short description of the fan."""
        ...


@dataclass(frozen=True, slots=True)
class DutyCurve:
    """A fan's speed by duty (fraction of full power): points (duty, rpm), interpolated linearly."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ConfigError(f"fan curve: needs two points or more, got {len(self.points)}")
        for (low, slow), (high, fast) in pairwise(((0.0, 0.0), *self.points)):
            if not (low < high <= 1.0 and slow < fast < math.inf):
                raise ConfigError(
                    f"fan curve: duty and speed must rise, up to 1, from {low:g} and {slow:g} rpm, "
                    f"got {high:g} and {fast:g} rpm"
                )

    def duty(self, rpm: float) -> float:
        """Return the duty for a speed, clipped to the ends of the curve."""
        speeds = [speed for _, speed in self.points]
        after = max(bisect_left(speeds, rpm), 1)
        after = min(after, len(speeds) - 1)
        (low, slow) = self.points[after - 1]
        (high, fast) = self.points[after]
        part = (rpm - slow) / (fast - slow)
        part = min(max(part, 0.0), 1.0)
        # Rounding must not exceed the end.
        return min(low + (high - low) * part, high)


def duty_curve(
    curve: DutyCurve | None,
    *,
    min_rpm: float,
    max_rpm: float,
    min_duty: float,
) -> DutyCurve:
    """Return the curve, or without one the line from `min_rpm` at `min_duty` to `max_rpm` at full power.

    Raises `ConfigError` for an invalid `min_duty`, also with a curve: no lower duty is ever set.
    """
    require_range(
        "fan",
        above=0.0,
        below=1.0,
        min_duty=min_duty,
    )
    return curve or DutyCurve(((min_duty, min_rpm), (1.0, max_rpm)))


class SimulatedFan:
    """A simulated fan, with a limited rate of change and configurable failures.

    Parameters
    ----------
    max_rpm : float
        Highest speed; also its speed after `restore`, as with a rack's firmware.
    rpm_per_s : float
        Highest rate of change of its speed.
    failure : str
        "" for a working fan, "stopped" for one that does not turn, "stuck" for one that keeps its present speed.
    clock : Callable
        Seconds; only goes forward.
    """

    def __init__(
        self,
        max_rpm: float,
        *,
        rpm_per_s: float = 2000.0,
        failure: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_range(
            "simulated fan",
            above=0.0,
            max_rpm=max_rpm,
            rpm_per_s=rpm_per_s,
        )
        self._max_rpm = max_rpm
        self._rpm_per_s = rpm_per_s
        self._clock = clock
        self._rpm = self._target_rpm = max_rpm
        self._at_s = clock()
        self._failure = ""
        self.fail(failure)

    def fail(self, failure: str) -> None:
        """Start a failure, or with "" end it."""
        if failure not in ("", "stopped", "stuck"):
            raise ConfigError(
                f"simulated fan: failure = {failure!r}; use stopped, stuck or nothing"
            )
        # The time until now passed under the previous failure.
        self._advance()
        self._failure = failure

    def set_rpm(self, rpm: float) -> None:
        """Change towards this speed, at most `max_rpm`."""
        self._advance()
        self._target_rpm = min(checked_speed(rpm), self._max_rpm)

    def measured_rpm(self) -> float:
        """Return its present speed."""
        self._advance()
        return self._rpm

    def restore(self) -> None:
        """Change towards the highest speed."""
        self.set_rpm(self._max_rpm)

    def describe(self) -> str:
        """Return its description."""
        return f"simulated fan{f', {self._failure}' if self._failure else ''}"

    def _advance(self) -> None:
        now_s = self._clock()
        most = self._rpm_per_s * max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if self._failure != "stuck":
            target = 0.0 if self._failure == "stopped" else self._target_rpm
            self._rpm += min(max(target - self._rpm, -most), most)


@runtime_checkable
class DutyOutput(FanOutput, Protocol):
    """A fan that can also be set by duty: `HwmonPwm`, `IpmiCommand`."""

    def set_duty(self, duty: float) -> None:
        """Set a fraction of full power. Raises `FanFailure`."""
        ...


def calibrate(
    output: DutyOutput,
    *,
    duties: Sequence[float] = _CALIBRATION_DUTIES,
    settle_s: float = _SETTLE_S,
    sleep: Callable[[float], object] = time.sleep,
) -> DutyCurve:
    """Return the measured speeds by duty, from the highest down; the fan is left at full power.

    Stops at the first duty at which the fan does not turn, since it would not turn at lower ones either. A point whose
    lower duty is not slower, as below the range of a fan, is left out. Raises `FanFailure` if no speed is measured, or
    the speed does not change. Run it only while nothing is hot.
    """
    points: list[tuple[float, float]] = []
    try:
        for duty in sorted(set(duties), reverse=True):
            output.set_duty(duty)
            sleep(settle_s)
            rpm = output.measured_rpm()
            if rpm is None or not math.isfinite(rpm):
                raise FanFailure(f"{output.describe()}: its speed cannot be measured")
            if rpm <= 0.0:
                break
            if not points or rpm < points[-1][1]:
                points.append((duty, rpm))
    # Whatever happens: a rack must not be left with slow fans.
    finally:
        output.set_duty(1.0)
    if len(points) < 2:
        raise FanFailure(
            f"{output.describe()}: its speed does not follow the duty; is it the fan of that output?"
        )
    return DutyCurve(tuple(reversed(points)))


def checked_speed(rpm: float) -> float:
    """Return the speed if it is valid for a fan; raise `FanFailure` otherwise."""
    if not 0.0 < rpm < math.inf:
        raise FanFailure(f"{rpm} rpm is not a speed above 0")
    return rpm


def measured_speed(rpm: float) -> float | None:
    """Return what a tachometer shows if it can be a fan's speed, else None."""
    return float(rpm) if 0 <= rpm < _NO_READING_RPM else None
