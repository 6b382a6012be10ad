"""Which of several SoCs' temperatures are believed: those that are fresh, possible, and move when the others do."""

import math
import numbers
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from socflower.errors import ConfigError
from socflower.thermal.reading import COLDEST_C, HOTTEST_C, HeatSource
from socflower.thermal.troubles import Troubles

STUCK_AFTER_S = 600.0
"""How long a SoC may show the same while others move: two coarse sensors in one stream of air differ for minutes."""

_OTHERS_MOVE_C = 5.0
"""What others must have moved meanwhile: more than rounding, less than work that begins or a fan that speeds up."""


@dataclass(slots=True)
class _Shown:
    """What a source has shown lately."""

    recent_c: deque[tuple[float, float]] = field(default_factory=deque)  # when it changed, and to what
    at: float | None = None  # the source's own time
    changed_s: float = math.nan  # since when it has shown the same
    renewed_s: float = math.nan  # when it last gave another time or temperature


class BelievedTemperatures:
    """Reads the sources of many SoCs and sorts out what cannot be believed; never raises for what they do or say.

    A source is not believed while it raises, gives no temperature or one that cannot be, has given the very same
    reading, its time included, for `max_silence_s`, or the same temperature for `stuck_after_s` while half of the
    others or more moved by 5 °C. It is believed again with the first reading that makes sense. To call a SoC stuck that
    only is in balance does little harm: as soon as the fans slow down its temperature moves.
    """

    def __init__(
        self, sources: Mapping[int, HeatSource], *, max_silence_s: float, stuck_after_s: float,
        clock: Callable[[], float], troubles: Troubles,
    ) -> None:
        for key, value in (("max_silence_s", max_silence_s), ("stuck_after_s", stuck_after_s)):
            if not 0.0 < value < math.inf:
                raise ConfigError(f"fan control: {key} = {value} must be above 0 and finite")
        self._sources = dict(sources)
        self._max_silence_s, self._stuck_after_s, self._clock = max_silence_s, stuck_after_s, clock
        self._troubles = troubles
        self._shown = {soc: _Shown() for soc in self._sources}

    def look(self) -> dict[int, float | None]:
        """Return each SoC's temperature in °C, None where none is believed."""
        now_s = self._clock()
        reasons: dict[int, str] = {}
        said: dict[int, float] = {}
        for soc, source in self._sources.items():
            try:
                reading = source.read()
                temperature_c, at = reading.temperature_c, reading.at_s if is_number(reading.at_s) else None
            except Exception as error:  # a program of somebody else's: anything can come out of it
                reasons[soc] = f"cannot be read ({type(error).__name__})"
                continue
            if temperature_c is None:
                reasons[soc] = "shows no temperature"
            elif not is_number(temperature_c) or not COLDEST_C <= temperature_c <= HOTTEST_C:
                reasons[soc] = "shows a temperature that cannot be"
            else:
                said[soc] = float(temperature_c)
                self._note(self._shown[soc], now_s, said[soc], at)
        moved = {soc for soc in said if self._movement_c(self._shown[soc]) >= _OTHERS_MOVE_C}
        for soc in said:
            shown = self._shown[soc]
            others = said.keys() - {soc}
            if now_s - shown.renewed_s >= self._max_silence_s:
                reasons[soc] = "gives the same reading again and again"
            elif now_s - shown.changed_s >= self._stuck_after_s and 0 < len(others) <= 2 * len(moved & others):
                reasons[soc] = "stands still while others move"
        for soc in self._sources:
            self._troubles.set(("soc", soc), f"SoC {soc} {reasons[soc]}; left out until it makes sense"
                               if soc in reasons else None, now_s, well=f"SoC {soc} makes sense again")
        return {soc: said[soc] if soc not in reasons else None for soc in self._sources}

    def _note(self, shown: _Shown, now_s: float, temperature_c: float, at: float | None) -> None:
        last_c = shown.recent_c[-1][1] if shown.recent_c else None
        if last_c != temperature_c:
            shown.changed_s = now_s
            shown.recent_c.append((now_s, temperature_c))
        # By equality alone: the source's clock may be another machine's, and begin anew. Without a time nothing shows
        # that a reading is an old one.
        if at is None or last_c != temperature_c or shown.at != at:
            shown.renewed_s, shown.at = now_s, at
        # What it showed when the last `stuck_after_s` began is kept, however old it is.
        while len(shown.recent_c) > 1 and shown.recent_c[1][0] <= now_s - self._stuck_after_s:
            shown.recent_c.popleft()

    @staticmethod
    def _movement_c(shown: _Shown) -> float:
        temperatures_c = [temperature_c for _, temperature_c in shown.recent_c]
        return max(temperatures_c) - min(temperatures_c)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; truth values are none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False
