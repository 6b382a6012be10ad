"""A filter for implausible sensors, and the detection of their unit.

A sensor with impossible values, or one that is constant while all others change, is left out. The kernel's unit is
millidegrees; some phones give degrees or tenths. One Snapdragon 625 uses all three: 25000, 309 and 31. A single number
decides the unit if only one unit makes it the temperature of a running SoC:

    -40 to 99             degrees
    151 to 999            tenths of a degree
    1501 to 150000        millidegrees; -40000 to -1000 too

Numbers between these ranges (100 may be 100 or 10.0 °C, 1200 may be 120 or 1.2 °C) and 0 decide nothing. Once
decided, a unit is kept: 1010 from a sensor in tenths is 101 °C.
"""

from collections.abc import Mapping, Set
from dataclasses import replace

from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C, possible_c
from socflower.thermal.sensors.stuck import ConstantSensors, StuckRule
from socflower.thermal.sensors.sysfs import NoteLog

STUCK_AFTER_S = 600.0
"""How long a sensor may be constant under load: coarse sensors of a SoC in equilibrium do not change for minutes."""

_RULE = StuckRule(after_s=STUCK_AFTER_S, min_reads=5, others_change_c=3.0, under_load=True)


class SensorFilter:
    """Filters the sensors of one device at every reading; never raises for their values.

    A sensor is rejected at once when it gives an error, no number, or a temperature outside `COLDEST_C` to `HOTTEST_C`,
    until its first possible value. A sensor with a constant value for `stuck_after_s` of load, while another changed by
    3 °C, is rejected until it changes. A device's only sensor is never rejected as stuck, for lack of a comparison.
    """

    def __init__(self, notes: NoteLog, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self.rejections: dict[str, str] = {}
        """The reason of each present rejection, by sensor name."""
        self._notes = notes
        self._sensors = ConstantSensors[str](replace(_RULE, after_s=stuck_after_s))
        self._last_s: float | None = None

    def apply(
        self,
        at_s: float,
        values: Mapping[str, float | str],
        *,
        busy: bool,
    ) -> dict[str, float]:
        """Return the accepted temperatures, in °C by sensor.

        `values` has each sensor's temperature, or a text why there is none; `busy` is whether the processors had work
        since the previous reading.
        """
        # A clock that goes back must not take busy time away.
        elapsed_s = 0.0 if self._last_s is None else max(0.0, at_s - self._last_s)
        self._last_s = at_s
        busy_s = elapsed_s if busy else 0.0
        possible: dict[str, float] = {}
        rejections = {name: "is gone" for name in self._sensors.histories.keys() - values.keys()}
        for name, value in values.items():
            known_c = possible_c(value)
            if known_c is not None:
                possible[name] = known_c
            elif isinstance(value, str):
                rejections[name] = value
            else:
                rejections[name] = f"shows an impossible temperature ({value:.4g} °C)"
        for name in self._sensors.update(at_s, possible, dict.fromkeys(possible, busy_s)):
            rejections[name] = (
                f"is stuck ({possible[name]:.4g} °C): constant under load while others change"
            )
        self._report(rejections, values.keys(), at_s)
        self.rejections = rejections
        return {name: value for name, value in possible.items() if name not in rejections}

    def _report(
        self,
        rejections: Mapping[str, str],
        values: Set[str],
        at_s: float,
    ) -> None:
        for name in sorted(rejections.keys() - self.rejections.keys()):
            # Without the number in parentheses, which may vary: each would be a separate note.
            cause = rejections[name].partition(" (")[0]
            self._notes.add(f"sensor {name}: {cause}; left out until it is plausible", at_s)
        for name in sorted(values & self.rejections.keys() - rejections.keys()):
            self._notes.add(f"sensor {name}: is plausible again", at_s)


_MISFITS_TO_REDECIDE = 5
"""After this many successive numbers that are impossible in its unit, the unit is decided again."""


class TemperatureUnit:
    """The unit of one sensor, detected from its numbers."""

    def __init__(self) -> None:
        self._per_degree: int | None = None
        self._num_misfits = 0

    def degrees(self, raw: float) -> float:
        """Return a number of the sensor in °C; `ValueError` if it is impossible, or its unit is not decided yet."""
        if raw == 0:
            return 0.0
        if self._per_degree is None:
            self._per_degree = _likely_unit(raw)
            if self._per_degree is None:
                raise ValueError("shows an impossible temperature, or one in an unknown unit")
            return raw / self._per_degree
        value_c = raw / self._per_degree
        # 45 from a sensor in millidegrees would be 0.045 °C: more likely its first number was invalid.
        is_too_small = self._per_degree == 1000 and abs(raw) < 1000
        if COLDEST_C <= value_c <= HOTTEST_C and not is_too_small:
            self._num_misfits = 0
            return value_c
        other = _likely_unit(raw)
        self._num_misfits = self._num_misfits + 1 if other not in (None, self._per_degree) else 0
        if self._num_misfits < _MISFITS_TO_REDECIDE or other is None:
            raise ValueError("shows an impossible temperature")
        self._per_degree = other
        self._num_misfits = 0
        return raw / other


def _likely_unit(raw: float) -> int | None:
    if COLDEST_C <= raw < 100:
        return 1
    if HOTTEST_C < raw < 1000:
        return 10
    if 10 * HOTTEST_C < raw <= 1000 * HOTTEST_C or 1000 * COLDEST_C <= raw <= -1000:
        return 1000
    return None
