"""Background load: a day's cycle of game sessions, windows for training, and other step functions of time."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import numpy as np
from pydantic import Field

from socflower.csv_file import number_of, read_rows
from socflower.errors import ConfigError, require_order
from socflower.field_rules import NotNegative, Positive, checked

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Steps(Generic[_Value]):
    """A piecewise constant function of time: `values[i]` holds from `times_s[i]` on. The first time is 0."""

    times_s: tuple[float, ...]
    values: tuple[_Value, ...]

    def __post_init__(self) -> None:
        starts_at_0 = self.times_s[:1] == (0.0,)
        rises = all(before < after for before, after in pairwise(self.times_s))
        if len(self.times_s) != len(self.values) or not starts_at_0 or not rises:
            raise ConfigError(
                f"steps: times {list(self.times_s)} must rise from 0, one for each value"
            )

    def at(self, time_s: float) -> _Value:
        """Return the value at a time."""
        return self.values[bisect_right(self.times_s, time_s) - 1]


def always(value: _Value) -> Steps[_Value]:
    """Return a constant function."""
    return Steps((0.0,), (value,))


def changes(first: _Value, later: Sequence[tuple[float, _Value]]) -> Steps[_Value]:
    """Return the function that starts at `first`; `later` are times and the values from each time on."""
    ordered = sorted(later, key=lambda entry: entry[0])
    if not ordered or ordered[0][0] > 0.0:
        ordered.insert(0, (0.0, first))
    times_s = [time_s for time_s, _ in ordered]
    values = [value for _, value in ordered]
    times_s[0] = 0.0
    return Steps(tuple(times_s), tuple(values))


DAY_S = 86400.0
QUIETEST_HOUR = 5.0
"""Of the day, when the fewest SoCs are in a game; an assumption."""


@checked
class BackgroundLoad:
    """The users' load on one SoC at a moment, such as that of a game."""

    # Of the SoC's processors; training gets the rest.
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # Drawn for users, in addition to training.
    power_w: NotNegative = 0.0
    # Whether training has to release the SoC.
    taken: bool = False


NOBODY = BackgroundLoad()
PartBusy = Annotated[float, Field(ge=0, lt=1)]
"""A part of all SoCs that users have."""
GAME = BackgroundLoad(share=0.5, power_w=2.5)
"""Half of its SoC's processors, and what it draws; it heats the rack, and is in no total of the training's energy."""


@checked
class Tide:
    """Game sessions over a day of cloud gaming: few before dawn, most in the evening.

    The fraction of SoCs with a game follows a cosine between `low` at `QUIETEST_HOUR` and `high` twelve hours
    later, or is `recorded`: one for each hour from midnight on, again and again. Sessions last `mean_session_s` on
    average, exponentially distributed, and are drawn for each SoC from a seed.
    """

    low: NotNegative = 0.05
    high: Annotated[float, Field(lt=1)] = 0.6
    mean_session_s: Positive = 2400.0
    game: BackgroundLoad = GAME
    recorded: tuple[PartBusy, ...] = ()

    def check(self) -> None:
        """Refuse fractions in the wrong order."""
        require_order(equal=True, low=self.low, high=self.high)

    def part_busy(self, hour: float) -> float:
        """Return the mean fraction of SoCs with a game at an hour of the day, or of the recording."""
        if self.recorded:
            return self.recorded[_full_hours(hour) % len(self.recorded)]
        phase = 2.0 * math.pi * (hour - QUIETEST_HOUR) / 24.0
        span = self.high - self.low
        return self.low + span * 0.5 * (1.0 - math.cos(phase))

    def loads(
        self,
        num_socs: int,
        duration_s: float,
        start_hour: float,
        seed: int,
    ) -> tuple[Steps[BackgroundLoad], ...]:
        """Return each SoC's background load for `duration_s` from `start_hour` on; equal seeds give equal sessions."""
        # One generator per SoC, so that a larger rack has the sessions of a smaller one.
        generators = [np.random.default_rng([seed, soc]) for soc in range(num_socs)]
        return tuple(self._of_one(random, duration_s, start_hour) for random in generators)

    def _of_one(
        self,
        random: np.random.Generator,
        duration_s: float,
        start_hour: float,
    ) -> Steps[BackgroundLoad]:
        """Return a two-state chain whose mean follows the day: idle times depend on the fraction at their start."""
        busy = bool(random.random() < self.part_busy(start_hour))
        first = self.game if busy else NOBODY
        time_s = 0.0
        later: list[tuple[float, BackgroundLoad]] = []
        while True:
            hour = start_hour + time_s / 3600.0
            part = self.part_busy(hour)
            mean_s = self.mean_session_s
            if not busy:
                mean_s = self.mean_session_s * (1.0 - part) / max(part, 1e-6)
            drawn_s = float(random.exponential(mean_s))
            # An idle time is drawn again after an hour, or when a recorded one begins, so that it follows the day.
            redrawn_s = (_full_hours(hour) + 1 - hour) * 3600.0 if self.recorded else 3600.0
            is_cut = not busy and drawn_s > redrawn_s
            time_s += redrawn_s if is_cut else drawn_s
            if time_s >= duration_s:
                return changes(first, later)
            if not is_cut:
                busy = not busy
                later.append((time_s, self.game if busy else NOBODY))


def _full_hours(hour: float) -> int:
    """Return the full hours until a time that may have been rounded down."""
    return math.floor(hour + 1e-9)


HOURS_HEADER = ("hour", "part_busy")
"""The columns of a recording: hours from 0, one row for each, and the part of SoCs that were in use in it."""


def read_hours(path: Path) -> tuple[float, ...]:
    """Return the part of SoCs in use in each hour of a recording; `ConfigError` names the line that is invalid.

    hour,part_busy
    0,0.31
    1,0.12
    """
    what = "recorded load"
    parts: list[float] = []
    for where, (hour_text, part_text) in read_rows(path, HOURS_HEADER, what):
        hour, part = number_of(hour_text, "hour", where), number_of(part_text, "part_busy", where)
        if hour != len(parts):
            raise ConfigError(
                f"{where}: hour = {hour_text}, and the next one is {len(parts)}; give each hour a row"
            )
        if part >= 1:
            raise ConfigError(f"{where}: part_busy = {part_text} must be below 1")
        parts.append(part)
    if not parts:
        raise ConfigError(f"{what} {path}: has no rows; give one for each hour")
    return tuple(parts)


def idle_windows(
    windows: Sequence[tuple[float, float]],
    duration_s: float,
    start_hour: float,
) -> Steps[bool]:
    """Return whether training may run: only within the daily windows, as hours (from, to) that may span midnight.

    Raises `ConfigError` for hours that are not between 0 and 24.
    """
    if not windows:
        return always(True)
    for begin, end in windows:
        if not (0.0 <= begin <= 24.0 and 0.0 <= end <= 24.0) or begin == end:
            raise ConfigError(f"idle window {begin} to {end}: needs two hours from 0 to 24")

    def is_open(hour: float) -> bool:
        for begin, end in windows:
            is_after = hour >= begin
            is_before = hour < end
            # A window that ends before it begins spans midnight.
            if (is_after and is_before) if begin < end else (is_after or is_before):
                return True
        return False

    start_hour %= 24.0
    edges = sorted({hour % 24.0 for window in windows for hour in window})
    later: list[tuple[float, bool]] = []
    # From the day before, since a window may have begun before midnight.
    for day in range(-1, math.ceil(duration_s / DAY_S) + 1):
        for hour in edges:
            time_s = (day * 24.0 + hour - start_hour) * 3600.0
            if 0.0 < time_s < duration_s:
                later.append((time_s, is_open(hour)))
    return changes(is_open(start_hour), later)
