"""Which of several SoCs' temperatures are believed, and whether those are enough to go by.

Believed are temperatures that are fresh and possible, that move when the others do, and that do not all stand still
under load.
"""

import math
import numbers
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from socflower.errors import ConfigError
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C, HeatSource

_AGAIN_AFTER_S = 3600.0
"""A trouble that comes and goes is worth a line again after this long."""


class Troubles:
    """Troubles that last, by key; `say` gets a line when one begins and when it ends, once an hour and key at most."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._present: dict[Hashable, str] = {}
        self._said_s: dict[Hashable, float] = {}
        self._untold_end: set[Hashable] = set()  # whose beginning was said

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong now, a line each."""
        return tuple(self._present.values())

    def set(self, key: Hashable, text: str | None, at_s: float, *, well: str = "") -> None:
        """Take in that a trouble is there, or with None that it is not; `well` is said when it ends.

        By the key alone, since an error's text may differ every time.
        """
        if text is None:
            if self._present.pop(key, None) is not None and key in self._untold_end:
                self._untold_end.discard(key)
                self._tell(well)
            return
        begins = key not in self._present
        self._present[key] = text
        if begins and at_s - self._said_s.get(key, -math.inf) >= _AGAIN_AFTER_S:
            self._said_s[key] = at_s
            self._untold_end.add(key)
            self._tell(text)

    def _tell(self, line: str) -> None:
        if line:
            with suppress(Exception):  # a log that is full or closed must not end the control of a fan
                self._say(line)


STUCK_AFTER_S = 600.0
"""How long a SoC may show the same while others move: two coarse sensors in one stream of air differ for minutes."""

_OTHERS_MOVE_C = 5.0
"""What others must have moved meanwhile: more than rounding, less than work that begins or a fan that speeds up."""

_FLICKER_PART = 0.1
"""The part of a rack's sensors that changes within `STUCK_AFTER_S` at least, in balance too: noise of a twentieth of a
step makes a quarter of them change, for so many lie near enough to where they round to the next number."""

_IDLE_LOAD = 0.1
"""Below this part of its processors a SoC is idle, and its temperature may stand still for as long as it likes."""


@dataclass(slots=True)
class _Shown:
    """What a source has shown lately."""

    recent_c: deque[tuple[float, float]] = field(default_factory=deque)  # when it changed, and to what
    at: float | None = None  # the source's own time
    changed_s: float = math.nan  # since when it has shown the same
    busy_s: float = 0.0  # how long of that under load, or under a load that nobody knows
    load: float | None = None  # of its processors, as it told last
    load_changed_s: float = -math.inf
    renewed_s: float = math.nan  # when it last gave another time or temperature


class BelievedTemperatures:
    """Reads the sources of many SoCs and sorts out what cannot be believed; never raises for what they do or say.

    A source is not believed

    - while it raises, or gives no temperature or one that cannot be;
    - while it has given the very same reading, its time included, for `max_silence_s`;
    - while it has shown the same temperature for `stuck_after_s` and half of the others or more moved by 5 °C;
    - while it has shown the same temperature for `stuck_after_s` of load, and so have nine in ten of all: sensors that
      measure a rack at work differ from look to look by noise alone. A source that does not tell its SoC's load, or
      always the very same, is taken for busy.

    It is believed again with the first reading that makes sense. To call SoCs stuck that only are in balance does
    little harm: as soon as the fans change their speed, temperatures move.
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
        self._looked_s: float | None = None
        self.still_since_s: float | None = None
        """Since when fewer than one in ten have changed what they show, as of the last look; None: nobody shows any."""

    def look(self, *, may_all_stand_still: bool = False) -> dict[int, float | None]:
        """Return each SoC's temperature in °C, None where none is believed.

        With `may_all_stand_still` no SoC is called stuck because all stand still: somebody knows that they are in
        balance.
        """
        now_s = self._clock()
        elapsed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        reasons: dict[int, str] = {}
        said: dict[int, float] = {}
        for soc, source in self._sources.items():
            try:
                reading = source.read()
                temperature_c, at = reading.temperature_c, reading.at_s if is_number(reading.at_s) else None
                load: Any = getattr(reading, "user_load", None)
            except Exception as error:  # a program of somebody else's: anything can come out of it
                reasons[soc] = f"cannot be read ({type(error).__name__})"
                continue
            if temperature_c is None:
                reasons[soc] = "shows no temperature"
            elif not is_number(temperature_c) or not COLDEST_C <= temperature_c <= HOTTEST_C:
                reasons[soc] = "shows a temperature that cannot be"
            else:
                said[soc] = float(temperature_c)
                idle = self._is_idle(self._shown[soc], now_s, load if is_number(load) else None)
                self._note(self._shown[soc], now_s, said[soc], at, busy_s=0.0 if idle else elapsed_s)
        self.still_since_s = self._still_since_s([self._shown[soc].changed_s for soc in said])
        all_still = not may_all_stand_still and self.still_since_s is not None and \
            now_s - self.still_since_s >= self._stuck_after_s
        moved = {soc for soc in said if self._movement_c(self._shown[soc]) >= _OTHERS_MOVE_C}
        for soc in said:
            shown = self._shown[soc]
            others = said.keys() - {soc}
            if now_s - shown.renewed_s >= self._max_silence_s:
                reasons[soc] = "gives the same reading again and again"
            elif now_s - shown.changed_s >= self._stuck_after_s and 0 < len(others) <= 2 * len(moved & others):
                reasons[soc] = "stands still while others move"
            elif all_still and shown.busy_s >= self._stuck_after_s:
                reasons[soc] = "stands still under load, as all do"
        for soc in self._sources:
            self._troubles.set(("soc", soc), f"SoC {soc} {reasons[soc]}; left out until it makes sense"
                               if soc in reasons else None, now_s, well=f"SoC {soc} makes sense again")
        return {soc: said[soc] if soc not in reasons else None for soc in self._sources}

    def _is_idle(self, shown: _Shown, now_s: float, load: float | None) -> bool:
        """Return whether a SoC tells that it is idle; one that tells the very same load for long is not believed."""
        if load != shown.load:
            shown.load, shown.load_changed_s = load, now_s
        return load is not None and load < _IDLE_LOAD and now_s - shown.load_changed_s < self._stuck_after_s

    def _note(self, shown: _Shown, now_s: float, temperature_c: float, at: float | None, *, busy_s: float) -> None:
        shown.busy_s += busy_s
        last_c = shown.recent_c[-1][1] if shown.recent_c else None
        if last_c != temperature_c:
            shown.changed_s, shown.busy_s = now_s, 0.0
            shown.recent_c.append((now_s, temperature_c))
        # By equality alone: the source's clock may be another machine's, and begin anew. Without a time nothing shows
        # that a reading is an old one.
        if at is None or last_c != temperature_c or shown.at != at:
            shown.renewed_s, shown.at = now_s, at
        # What it showed when the last `stuck_after_s` began is kept, however old it is.
        while len(shown.recent_c) > 1 and shown.recent_c[1][0] <= now_s - self._stuck_after_s:
            shown.recent_c.popleft()

    @staticmethod
    def _still_since_s(changes_s: list[float]) -> float | None:
        """Return since when fewer than one in ten have changed, by when each changed last."""
        return sorted(changes_s, reverse=True)[math.ceil(_FLICKER_PART * len(changes_s)) - 1] if changes_s else None

    @staticmethod
    def _movement_c(shown: _Shown) -> float:
        temperatures_c = [temperature_c for _, temperature_c in shown.recent_c]
        return max(temperatures_c) - min(temperatures_c)


class Quorum:
    """Whether so many SoCs are believed that the hottest of them tells how hot the rack is.

    Needed are half of all, and one of each board: a board's SoCs share their air and differ little, boards may differ.
    That must be missing for `patience_s` to count as lost, and be there for as long to count as regained.

    Parameters
    ----------
    boards : mapping of int to int
        Each SoC's board.
    """

    def __init__(self, boards: Mapping[int, int], *, patience_s: float) -> None:
        self._boards, self._patience_s = dict(boards), patience_s
        self._holds = False
        self._enough_s = self._lacked_s = -math.inf  # when there were enough last; when too few, while lost

    def missing(self, believed: Collection[int]) -> str:
        """Return in words what is missing, "" where nothing is."""
        known = {self._boards[soc] for soc in believed}
        dark = sorted(set(self._boards.values()) - known)
        if not believed:
            return "no SoC's temperature is known"
        if 2 * len(believed) < len(self._boards):
            return f"the temperatures of only {len(believed)} of {len(self._boards)} SoCs are known"
        if dark:
            return f"no temperature of board{'s' if len(dark) > 1 else ''} {', '.join(map(str, dark))} is known"
        return ""

    def holds(self, now_s: float, believed: Collection[int]) -> bool:
        """Take in who is believed now; return whether that is enough, or was until lately."""
        if not self.missing(believed):
            self._enough_s = now_s
            self._holds = self._holds or now_s - self._lacked_s >= self._patience_s
        else:
            self._holds = self._holds and now_s - self._enough_s < self._patience_s
            if not self._holds and self._enough_s > -math.inf:  # before the first time nothing was lost
                self._lacked_s = now_s
        return self._holds


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; truth values are none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False
