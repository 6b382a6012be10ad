"""A filter of several SoCs' temperatures, and whether the accepted ones suffice for fan control.

Accepted are temperatures that are recent and possible, that change when the others do, and that are not all constant
under load.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from socflower.thermal.sensors.reading import COLDEST_C, HeatSource, is_number, possible_c
from socflower.thermal.sensors.stuck import ConstantSensors, StuckRule

_REPEAT_AFTER_S = 3600.0
"""An alert that comes and goes is reported again after this long."""


class Alerts:
    """Present alerts by key; `say` gets a line when one begins and when it ends, at most once per hour and key."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._present: dict[Hashable, str] = {}
        self._reported_s: dict[Hashable, float] = {}
        # Keys of present alerts that were reported.
        self._reported: set[Hashable] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """The present alerts, one line each."""
        return tuple(self._present.values())

    def set(
        self,
        key: Hashable,
        text: str | None,
        *,
        well: str = "",
    ) -> None:
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
        now_s = self._clock()
        if begins and now_s - self._reported_s.get(key, -math.inf) >= _REPEAT_AFTER_S:
            self._reported_s[key] = now_s
            self._reported.add(key)
            self._emit(text)

    def _emit(self, line: str) -> None:
        if line:
            # A log that is full or closed must not end fan control.
            with suppress(Exception):
                self._say(line)


STUCK_AFTER_S = 600.0
"""How long a SoC may be constant while others change: coarse sensors in one air stream may differ for minutes."""

_RULE = StuckRule(after_s=STUCK_AFTER_S, others_change_c=5.0, others_part=0.5)

_FLICKER_PART = 0.1
"""At least this part of a rack's sensors changes within `STUCK_AFTER_S`, even at constant temperature: noise of a
twentieth of a step changes a quarter of them, since that many lie close enough to a rounding threshold."""

_FALL_C = 3.0
_FALLEN_S = 10.0
"""A sensor that fell so far at once, and then stays constant for so long under load, has not measured a SoC."""

_IDLE_LOAD = 0.1
"""A SoC below this processor load is idle, and its temperature may stay constant without limit."""


@dataclass(slots=True)
class _SourceState:
    """When the parts of a source's reading last changed."""

    # The source's own time, and its temperature.
    at: float | None = None
    temperature_c: float | None = None
    # Its last reported processor load, and since when.
    load: float | None = None
    load_changed_s: float = -math.inf
    # When its time stamp or temperature last changed.
    renewed_s: float = math.nan
    idle: bool = False
    # None if the source does not report it.
    clock_factor: float | None = None
    # The highest temperature since the last cause of a fall, its time, and until when a fall without one counts.
    peak_c: float = -math.inf
    peak_s: float = 0.0
    fallen_until_s: float = -math.inf

    def is_idle(
        self,
        now_s: float,
        load: float | None,
        stuck_after_s: float,
    ) -> bool:
        """Record a load; return whether the SoC is idle. A load that stays constant for long does not count."""
        if load != self.load:
            self.load = load
            self.load_changed_s = now_s
        is_fresh = now_s - self.load_changed_s < stuck_after_s
        self.idle = load is not None and load < _IDLE_LOAD and is_fresh
        return self.idle

    def has_fallen(self, now_s: float, temperature_c: float, *, cause: bool, most_s: float) -> bool:
        """Record a temperature; return whether it fell without a cause, for as long as that took, at most `most_s`."""
        if now_s < self.fallen_until_s:
            return True
        is_fall = not cause and temperature_c <= self.peak_c - _FALL_C
        if is_fall:
            self.fallen_until_s = now_s + min(now_s - self.peak_s, most_s)
        if is_fall or cause or temperature_c >= self.peak_c:
            self.peak_c = temperature_c
            self.peak_s = now_s
        return is_fall

    def record(self, now_s: float, temperature_c: float, at: float | None) -> None:
        """Record a temperature and the source's own time."""
        # Only equality is tested: the time may be another machine's clock, which may restart. Without a time stamp an
        # old reading cannot be detected.
        if temperature_c != self.temperature_c or at is None or at != self.at:
            self.renewed_s = now_s
        self.temperature_c = temperature_c
        self.at = at


class FilteredTemperatures:
    """Reads the sources of many SoCs and rejects implausible temperatures; never raises for a failing source.

    A source's temperature is rejected

    - while the source raises, or gives no temperature or an impossible one;
    - while it has given the same reading, with the same time stamp, for `max_silence_s`;
    - while it is colder than `min_ambient_c`, which no SoC in that air can be;
    - while it has been constant since it fell by 3 °C at once: a SoC that cools so fast continues to cool;
    - after it fell by 3 °C while no fan cooled and no SoC became idle, as drifting sensors do: for as long as it fell;
    - while it has been constant for `stuck_after_s`, and at least half of the others changed by 5 °C;
    - while it has been constant for `stuck_after_s` of load, and so have 90 % of all: on a busy rack, noise alone
      changes readings from one poll to the next. A source with no load, or a constant one, counts as busy.

    A common drift that is slower than a rack heats looks like a lower load, and is not detected.

    The first plausible reading ends the other rejections. Wrongly rejecting SoCs in thermal equilibrium does little
    harm: as soon as the fans change their speed, temperatures change.
    """

    def __init__(
        self,
        sources: Mapping[int, HeatSource],
        *,
        max_silence_s: float,
        stuck_after_s: float,
        alerts: Alerts,
        min_ambient_c: float = COLDEST_C,
    ) -> None:
        self._sources = dict(sources)
        self._max_silence_s = max_silence_s
        self._stuck_after_s = stuck_after_s
        self._min_ambient_c = min_ambient_c
        self._alerts = alerts
        self._states = {soc: _SourceState() for soc in self._sources}
        self._sensors = ConstantSensors[int](replace(_RULE, after_s=stuck_after_s))
        self._polled_s: float | None = None
        self.constant_since_s: float | None = None
        """Since when fewer than one in ten have changed, as of the last poll; None without temperatures."""
        self.constant_busy_s = 0.0
        """For how long under load fewer than one in ten have changed, as of the last poll."""
        self._num_idle = 0
        # When it last rose; minus infinity if it has fallen since.
        self._idle_since_s = -math.inf

    def poll(
        self, now_s: float, *, all_may_be_constant: bool = False, fans_cool: bool = True
    ) -> dict[int, float | None]:
        """Return each SoC's temperature in °C, None if it is rejected.

        With `all_may_be_constant` no SoC is rejected because all are constant: the caller expects an equilibrium.
        `fans_cool` is whether the fans' speed since the last poll may have cooled a rack at work.
        """
        values_c, busy_s, rejections = self._read_all(now_s)
        stuck = self._sensors.update(now_s, values_c, busy_s)
        histories = self._sensors.histories
        cools = self._became_idle(now_s, values_c) or fans_cool
        for soc, value_c in values_c.items():
            state = self._states[soc]
            if state.has_fallen(
                now_s, value_c, cause=cools or state.idle, most_s=self._stuck_after_s
            ):
                rejections[soc] = "fell although nothing cooled it"
            if now_s - state.renewed_s >= self._max_silence_s:
                rejections[soc] = "repeats the same reading"
            elif histories[soc].fall_c >= _FALL_C and histories[soc].busy_s >= _FALLEN_S:
                rejections[soc] = "fell at once and is constant since"
            elif soc in stuck:
                rejections[soc] = "is constant while others change"
        accepted = values_c.keys() - rejections.keys()
        newest_s = _flickering([-histories[soc].changed_s for soc in accepted])
        self.constant_since_s = None if newest_s is None else -newest_s
        self.constant_busy_s = _flickering([histories[soc].busy_s for soc in accepted]) or 0.0
        all_constant = (
            not all_may_be_constant
            and self.constant_since_s is not None
            and now_s - self.constant_since_s >= self._stuck_after_s
        )
        for soc in accepted:
            if all_constant and histories[soc].busy_s >= self._stuck_after_s:
                rejections[soc] = "is constant under load, as all are"
        for soc in self._sources:
            cause = rejections.get(soc)
            text = f"SoC {soc} {cause}; left out until it is plausible" if cause else None
            self._alerts.set(("soc", soc), text, well=f"SoC {soc} is plausible again")
        return {soc: None if soc in rejections else values_c[soc] for soc in self._sources}

    def clock_factors(self, socs: Iterable[int]) -> tuple[float, ...]:
        """Return the SoCs' clocks over their highest, as of the last poll; empty if one of them does not report it."""
        clocks = [self._states[soc].clock_factor for soc in socs]
        known = [clock for clock in clocks if clock is not None and 0.0 < clock <= 1.0]
        return tuple(known) if len(known) == len(clocks) else ()

    def _became_idle(self, now_s: float, socs: Collection[int]) -> bool:
        """Return whether SoCs told that they became idle not long ago: the others' air cools then."""
        num_idle = sum(self._states[soc].idle for soc in socs)
        if num_idle != self._num_idle:
            self._idle_since_s = now_s if num_idle > self._num_idle else -math.inf
        self._num_idle = num_idle
        return now_s < self._idle_since_s + self._stuck_after_s

    def _read_all(self, now_s: float) -> tuple[dict[int, float], dict[int, float], dict[int, str]]:
        """Return the possible temperatures, the seconds of load behind them, and why the others have none."""
        elapsed_s = 0.0 if self._polled_s is None else now_s - self._polled_s
        self._polled_s = now_s
        values_c: dict[int, float] = {}
        busy_s: dict[int, float] = {}
        rejections: dict[int, str] = {}
        for soc, source in self._sources.items():
            try:
                reading = source.read()
                temperature_c = reading.temperature_c
                at = reading.at_s
                load = getattr(reading, "user_load", None)
                clock = getattr(reading, "clock_factor", None)
            # Foreign code may raise anything.
            except Exception as error:
                rejections[soc] = f"cannot be read ({type(error).__name__})"
                continue
            known_c = possible_c(temperature_c)
            if known_c is None:
                kind = "no" if temperature_c is None else "an impossible"
                rejections[soc] = f"shows {kind} temperature"
                continue
            if known_c < self._min_ambient_c:
                rejections[soc] = "is colder than the air"
                continue
            values_c[soc] = known_c
            state = self._states[soc]
            known_load = load if is_number(load) else None
            is_idle = state.is_idle(now_s, known_load, self._stuck_after_s)
            busy_s[soc] = 0.0 if is_idle else elapsed_s
            # An idle SoC's clock is low to save power, not because of heat.
            state.clock_factor = 1.0 if is_idle else clock if is_number(clock) else None
            state.record(now_s, known_c, at if is_number(at) else None)
        return values_c, busy_s, rejections


def _flickering(constant_s: list[float]) -> float | None:
    """Return for how long fewer than one in ten have changed, from the time for which each one is constant."""
    if not constant_s:
        return None
    num_flickering = math.ceil(_FLICKER_PART * len(constant_s))
    return sorted(constant_s)[num_flickering - 1]


class SensorQuorum:
    """Decides whether enough SoCs have an accepted temperature for their maximum to represent the rack.

    Needed are half of all SoCs, and one of each board: SoCs of a board share their air and differ little, boards may
    differ. The quorum is lost after it was missing for `patience_s`, and regained after it was met for as long.

    Parameters
    ----------
    boards : mapping of int to int
        Each SoC's board.
    """

    def __init__(self, boards: Mapping[int, int], *, patience_s: float) -> None:
        self._boards = dict(boards)
        self._patience_s = patience_s
        self._holds = False
        # The last time with enough, and the last time with too few while the quorum was lost.
        self._enough_s = self._lost_s = -math.inf

    def missing(self, accepted: Collection[int]) -> str:
        """Return a description of what is missing, or ""."""
        known = {self._boards[soc] for soc in accepted}
        silent = sorted(set(self._boards.values()) - known)
        if not accepted:
            return "no SoC's temperature is known"
        if 2 * len(accepted) < len(self._boards):
            return f"the temperatures of only {len(accepted)} of {len(self._boards)} SoCs are known"
        if silent:
            plural = "s" if len(silent) > 1 else ""
            return f"no temperature of board{plural} {', '.join(map(str, silent))} is known"
        return ""

    def holds(self, now_s: float, accepted: Collection[int]) -> bool:
        """Update with the SoCs accepted now; return whether the quorum holds, or did within `patience_s`."""
        if not self.missing(accepted):
            self._enough_s = now_s
            self._holds = self._holds or now_s - self._lost_s >= self._patience_s
            return self._holds
        self._holds = self._holds and now_s - self._enough_s < self._patience_s
        # Before the first quorum nothing is lost.
        if not self._holds and self._enough_s > -math.inf:
            self._lost_s = now_s
        return self._holds
