"""Which sensors are plausible, and in which unit they speak.

One that says what cannot be, or stands still while everything else moves, is left out. The kernel's rule is
millidegrees; some phones give degrees or tenths. One Snapdragon 625 shows all three side by side: 25000, 309 and 31. A
number alone decides where only one unit makes it the temperature of a running SoC:

    -40 to 99             degrees
    151 to 999            tenths of a degree
    1501 to 150000        millidegrees; -40000 to -1000 too

What lies between (100 may be 100 or 10.0 °C, 1200 may be 120 or 1.2 °C) decides nothing, nor does 0. Once decided, a
unit stays: 1010 of a sensor that speaks in tenths is 101 °C.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from socflower.errors import ConfigError
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C
from socflower.thermal.sensors.sysfs import Complaints

STUCK_AFTER_S = 600.0
"""How long a sensor may show the same under load: coarse sensors of an SoC in balance stand still for minutes."""

_OTHERS_MOVE_C = 3.0
"""What another sensor must have moved meanwhile: more than noise and rounding, less than a SoC that starts to work."""
_STUCK_READS = 5
"""Two looks an hour apart that see the same prove nothing."""


@dataclass(slots=True)
class _Stillness:
    """What a sensor shows, and since when."""

    shown_c: float
    all_then_c: Mapping[str, float]  # what every sensor showed when this one last changed
    busy_s: float = 0.0
    num_reads: int = 0
    others_moved: bool = False


class SensorTrust:
    """Sorts the sensors of one device at every look; never raises for what they say.

    A sensor is left out at once when it gives an error, no number, or a temperature outside `COLDEST_C` to
    `HOTTEST_C`, and taken back with the first number that can be. One that has shown the very same number for
    `stuck_after_s` of load, while another moved by 3 °C, is left out until it changes. A device's only sensor is never
    called stuck: nothing speaks against it.
    """

    def __init__(self, complaints: Complaints, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        if not stuck_after_s > 0:
            raise ConfigError(f"sensors: stuck_after_s = {stuck_after_s} must be above 0")
        self.troubles: dict[str, str] = {}
        """Why a sensor is not believed now, by its name."""
        self._complaints = complaints
        self._stuck_after_s = stuck_after_s
        self._stillness: dict[str, _Stillness] = {}
        self._last_s: float | None = None

    def believed(self, at_s: float, said: Mapping[str, float | str], *, busy: bool) -> dict[str, float]:
        """Return the temperatures that are believed, in °C by sensor.

        `said` holds what each sensor shows, or in words why it shows nothing; `busy` whether the processors had work
        since the look before.
        """
        elapsed_s = 0.0 if self._last_s is None else max(0.0, at_s - self._last_s)
        self._last_s = at_s
        possible = {name: value for name, value in said.items()
                    if not isinstance(value, str) and COLDEST_C <= value <= HOTTEST_C}
        troubles: dict[str, str] = {name: "is gone" for name in self._stillness.keys() - said.keys()}
        for name, value in said.items():
            if name in possible:
                if self._is_stuck(name, possible, elapsed_s if busy else 0.0):
                    troubles[name] = f"stands still at {value:.4g} °C under load while others move"
            elif isinstance(value, str):
                troubles[name] = value
            else:
                troubles[name] = "shows no number" if math.isnan(value) else f"shows {value:.4g} °C, which cannot be"
        self._tell(troubles, said.keys(), at_s)
        self.troubles = troubles
        return {name: value for name, value in possible.items() if name not in troubles}

    def _is_stuck(self, name: str, possible: Mapping[str, float], busy_s: float) -> bool:
        still = self._stillness.get(name)
        if still is None or still.shown_c != possible[name]:
            self._stillness[name] = _Stillness(possible[name], possible)
            return False
        if busy_s > 0.0:
            still.busy_s += busy_s
            still.num_reads += 1
        if not still.others_moved:
            still.others_moved = any(
                abs(value - still.all_then_c[other]) >= _OTHERS_MOVE_C
                for other, value in possible.items() if other in still.all_then_c)
        return still.others_moved and still.busy_s >= self._stuck_after_s and still.num_reads >= _STUCK_READS

    def _tell(self, troubles: Mapping[str, str], said: Set[str], at_s: float) -> None:
        for name in sorted(troubles):
            if name not in self.troubles:
                # Without the number, which may differ every time: else each would be a line of its own.
                kind = "shows what cannot be" if "cannot be" in troubles[name] else troubles[name]
                self._complaints.say(f"sensor {name}: {kind}; left out until it makes sense", at_s)
        for name in sorted(said & self.troubles.keys() - troubles.keys()):
            self._complaints.say(f"sensor {name}: makes sense again", at_s)


_MISFITS_TO_DECIDE_ANEW = 5
"""So many numbers in a row that the unit makes impossible: then the first number was the wrong one."""


class TemperatureUnit:
    """The unit of one sensor, learnt from its numbers."""

    def __init__(self) -> None:
        self._per_degree: int | None = None
        self._num_misfits = 0

    def degrees(self, raw: float) -> float:
        """Return a number of the sensor in °C; ValueError where it cannot be, or its unit is not clear yet."""
        if raw == 0:
            return 0.0
        if self._per_degree is None:
            self._per_degree = _likely_unit(raw)
            if self._per_degree is None:
                raise ValueError("shows what cannot be, or in a unit that is not clear yet")
            return raw / self._per_degree
        value_c = raw / self._per_degree
        # 45 of a sensor of millidegrees would be 0.045 °C: more likely its first number was garbage.
        if COLDEST_C <= value_c <= HOTTEST_C and not (self._per_degree == 1000 and abs(raw) < 1000):
            self._num_misfits = 0
            return value_c
        other = _likely_unit(raw)
        self._num_misfits = self._num_misfits + 1 if other not in (None, self._per_degree) else 0
        if self._num_misfits < _MISFITS_TO_DECIDE_ANEW or other is None:
            raise ValueError("shows what cannot be")
        self._per_degree, self._num_misfits = other, 0
        return raw / other


def _likely_unit(raw: float) -> int | None:
    if COLDEST_C <= raw < 100:
        return 1
    if HOTTEST_C < raw < 1000:
        return 10
    if 10 * HOTTEST_C < raw <= 1000 * HOTTEST_C or 1000 * COLDEST_C <= raw <= -1000:
        return 1000
    return None
