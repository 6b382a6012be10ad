"""In which unit a sensor speaks: the kernel's rule is millidegrees, some phones give degrees or tenths.

One Snapdragon 625 shows all three side by side: 25000, 309 and 31. A number alone decides where only one unit makes it
the temperature of a running SoC:

    -40 to 99             degrees
    151 to 999            tenths of a degree
    1501 to 150000        millidegrees; -40000 to -1000 too

What lies between (100 may be 100 or 10.0 °C, 1200 may be 120 or 1.2 °C) decides nothing, nor does 0. Once decided, a
unit stays: 1010 of a sensor that speaks in tenths is 101 °C.
"""

from socflower.thermal.reading import COLDEST_C, HOTTEST_C

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
