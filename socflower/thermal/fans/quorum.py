"""A filter of several SoCs' temperatures, and whether the accepted ones suffice for fan control.

Accepted are temperatures that are recent and possible, that change when the others do, and that are not all constant
under load.
"""

import math
import numbers
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from socflower.errors import require_range
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C, HeatSource

_REPEAT_AFTER_S = 3600.0
"""An alert that comes and goes is reported again after this long."""


class Alerts:
    """Present alerts by key; `say` gets a line when one begins and when it ends, at most once per hour and key."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._present: dict[Hashable, str] = {}
        self._reported_s: dict[Hashable, float] = {}
        self._reported: set[Hashable] = set()  # keys of present alerts that were reported

    @property
    def notes(self) -> tuple[str, ...]:
        """The present alerts, one line each."""
        return tuple(self._present.values())

    def set(self, key: Hashable, text: str | None, at_s: float, *, well: str = "") -> None:
        """Set an alert, or with None clear it; `well` is reported when it ends.

        Alerts are identified by the key alone, since an error's text may vary.
        """
        if text is None:
            if self._present.pop(key, None) is not None and key in self._reported:
                self._reported.discard(key)
                self._emit(well)
            return
        begins = key not in self._present
        self._present[key] = text
        if begins and at_s - self._reported_s.get(key, -math.inf) >= _REPEAT_AFTER_S:
            self._reported_s[key] = at_s
            self._reported.add(key)
            self._emit(text)

    def _emit(self, line: str) -> None:
        if line:
            with suppress(Exception):  # a log that is full or closed must not end fan control
                self._say(line)


STUCK_AFTER_S = 600.0
"""How long a SoC may be constant while others change: coarse sensors in one air stream may differ for minutes."""

_OTHERS_MOVE_C = 5.0
"""The change of the others that counts: above rounding, below the effect of starting work or a faster fan."""

_FLICKER_PART = 0.1
"""At least this part of a rack's sensors changes within `STUCK_AFTER_S`, even at constant temperature: noise of a
twentieth of a step changes a quarter of them, since that many lie close enough to a rounding threshold."""

_IDLE_LOAD = 0.1
"""A SoC below this processor load is idle, and its temperature may stay constant without limit."""


@dataclass(slots=True)
class _SourceHistory:
    """The recent readings of a source."""

    recent_c: deque[tuple[float, float]] = field(
        default_factory=deque
    )  # when it changed, and to what
    at: float | None = None  # the source's own time
    changed_s: float = math.nan  # time of its last change of temperature
    busy_s: float = 0.0  # time under load, or under unknown load, since then
    load: float | None = None  # its last reported processor load
    load_changed_s: float = -math.inf
    renewed_s: float = math.nan  # when its time stamp or temperature last changed


class FilteredTemperatures:
    """Reads the sources of many SoCs and rejects implausible temperatures; never raises for a failing source.

    A source's temperature is rejected

    - while the source raises, or gives no temperature or an impossible one;
    - while it has given the same reading, with the same time stamp, for `max_silence_s`;
    - while it has been constant for `stuck_after_s`, and at least half of the others changed by 5 °C;
    - while it has been constant for `stuck_after_s` of load, and so have 90 % of all: on a busy rack, noise alone
      changes readings from one poll to the next. A source with no load, or a constant one, counts as busy.

    The first plausible reading ends the rejection. Wrongly rejecting SoCs in thermal equilibrium does little harm: as
    soon as the fans change their speed, temperatures change.
    """

    def __init__(
        self,
        sources: Mapping[int, HeatSource],
        *,
        max_silence_s: float,
        stuck_after_s: float,
        clock: Callable[[], float],
        alerts: Alerts,
    ) -> None:
        require_range(
            "fan control", above=0.0, max_silence_s=max_silence_s, stuck_after_s=stuck_after_s
        )
        self._sources = dict(sources)
        self._max_silence_s, self._stuck_after_s, self._clock = max_silence_s, stuck_after_s, clock
        self._alerts = alerts
        self._histories = {soc: _SourceHistory() for soc in self._sources}
        self._polled_s: float | None = None
        self.constant_since_s: float | None = None
        """Since when fewer than one in ten have changed, as of the last poll; None without temperatures."""

    def poll(self, *, all_may_be_constant: bool = False) -> dict[int, float | None]:
        """Return each SoC's temperature in °C, None where it is rejected.

        With `all_may_be_constant` no SoC is rejected because all are constant: the caller expects an equilibrium.
        """
        now_s = self._clock()
        elapsed_s = 0.0 if self._polled_s is None else now_s - self._polled_s
        self._polled_s = now_s
        reasons: dict[int, str] = {}
        values_c: dict[int, float] = {}
        for soc, source in self._sources.items():
            try:
                reading = source.read()
                temperature_c, at = (
                    reading.temperature_c,
                    reading.at_s if is_number(reading.at_s) else None,
                )
                load: Any = getattr(reading, "user_load", None)
            except Exception as error:  # foreign code may raise anything
                reasons[soc] = f"cannot be read ({type(error).__name__})"
                continue
            if temperature_c is None:
                reasons[soc] = "shows no temperature"
            elif not is_number(temperature_c) or not COLDEST_C <= temperature_c <= HOTTEST_C:
                reasons[soc] = "shows a temperature that cannot be"
            else:
                values_c[soc] = float(temperature_c)
                idle = self._is_idle(self._histories[soc], now_s, load if is_number(load) else None)
                self._record(
                    self._histories[soc],
                    now_s,
                    values_c[soc],
                    at,
                    busy_s=0.0 if idle else elapsed_s,
                )
        self.constant_since_s = self._constant_since_s(
            [self._histories[soc].changed_s for soc in values_c]
        )
        all_constant = (
            not all_may_be_constant
            and self.constant_since_s is not None
            and now_s - self.constant_since_s >= self._stuck_after_s
        )
        moved = {
            soc for soc in values_c if self._movement_c(self._histories[soc]) >= _OTHERS_MOVE_C
        }
        for soc in values_c:
            history = self._histories[soc]
            others = values_c.keys() - {soc}
            if now_s - history.renewed_s >= self._max_silence_s:
                reasons[soc] = "gives the same reading again and again"
            elif now_s - history.changed_s >= self._stuck_after_s and 0 < len(others) <= 2 * len(
                moved & others
            ):
                reasons[soc] = "stands still while others move"
            elif all_constant and history.busy_s >= self._stuck_after_s:
                reasons[soc] = "stands still under load, as all do"
        for soc in self._sources:
            self._alerts.set(
                ("soc", soc),
                f"SoC {soc} {reasons[soc]}; left out until it makes sense"
                if soc in reasons
                else None,
                now_s,
                well=f"SoC {soc} makes sense again",
            )
        return {soc: values_c[soc] if soc not in reasons else None for soc in self._sources}

    def _is_idle(self, history: _SourceHistory, now_s: float, load: float | None) -> bool:
        """Return whether a SoC reports that it is idle; a load that stays constant for long does not count."""
        if load != history.load:
            history.load, history.load_changed_s = load, now_s
        return (
            load is not None
            and load < _IDLE_LOAD
            and now_s - history.load_changed_s < self._stuck_after_s
        )

    def _record(
        self,
        history: _SourceHistory,
        now_s: float,
        temperature_c: float,
        at: float | None,
        *,
        busy_s: float,
    ) -> None:
        history.busy_s += busy_s
        last_c = history.recent_c[-1][1] if history.recent_c else None
        if last_c != temperature_c:
            history.changed_s, history.busy_s = now_s, 0.0
            history.recent_c.append((now_s, temperature_c))
        # Only equality is tested: the time may be another machine's clock, which may restart. Without a time stamp an
        # old reading cannot be detected.
        if at is None or last_c != temperature_c or history.at != at:
            history.renewed_s, history.at = now_s, at
        # The value at the start of the last `stuck_after_s` is kept, however old it is.
        while len(history.recent_c) > 1 and history.recent_c[1][0] <= now_s - self._stuck_after_s:
            history.recent_c.popleft()

    @staticmethod
    def _constant_since_s(changes_s: list[float]) -> float | None:
        """Return since when fewer than one in ten have changed, from the time of each one's last change."""
        return (
            sorted(changes_s, reverse=True)[math.ceil(_FLICKER_PART * len(changes_s)) - 1]
            if changes_s
            else None
        )

    @staticmethod
    def _movement_c(history: _SourceHistory) -> float:
        temperatures_c = [temperature_c for _, temperature_c in history.recent_c]
        return max(temperatures_c) - min(temperatures_c)


class Quorum:
    """Decides whether enough SoCs have an accepted temperature for their maximum to stand for the rack.

    Needed are half of all SoCs, and one of each board: SoCs of a board share their air and differ little, boards may
    differ. The quorum is lost after it was missing for `patience_s`, and regained after it was met for as long.

    Parameters
    ----------
    boards : mapping of int to int
        Each SoC's board.
    """

    def __init__(self, boards: Mapping[int, int], *, patience_s: float) -> None:
        self._boards, self._patience_s = dict(boards), patience_s
        self._holds = False
        self._enough_s = (
            self._lost_s
        ) = -math.inf  # last time with enough; last time with too few, while lost

    def missing(self, filtered: Collection[int]) -> str:
        """Return a description of what is missing, or ""."""
        known = {self._boards[soc] for soc in filtered}
        silent = sorted(set(self._boards.values()) - known)
        if not filtered:
            return "no SoC's temperature is known"
        if 2 * len(filtered) < len(self._boards):
            return f"the temperatures of only {len(filtered)} of {len(self._boards)} SoCs are known"
        if silent:
            return f"no temperature of board{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))} is known"
        return ""

    def holds(self, now_s: float, filtered: Collection[int]) -> bool:
        """Update with the SoCs accepted now; return whether the quorum holds, or did within `patience_s`."""
        if not self.missing(filtered):
            self._enough_s = now_s
            self._holds = self._holds or now_s - self._lost_s >= self._patience_s
        else:
            self._holds = self._holds and now_s - self._enough_s < self._patience_s
            if (
                not self._holds and self._enough_s > -math.inf
            ):  # before the first quorum nothing is lost
                self._lost_s = now_s
        return self._holds


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; booleans do not count."""
    if isinstance(
        value, float
    ):  # the usual case; looking up an abstract class takes seven times as long
        return math.isfinite(value)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer with hundreds of digits
        return False
