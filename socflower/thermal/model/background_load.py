"""Background load: a day's cycle of game sessions, windows for training, and other step functions of time."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar

import numpy as np

from socflower.errors import ConfigError, require_range

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Steps(Generic[_Value]):
    """A piecewise constant function of time: `values[i]` holds from `times_s[i]` on. The first time is 0."""

    times_s: tuple[float, ...]
    values: tuple[_Value, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.values) or not self.times_s or self.times_s[0] != 0.0:
            raise ConfigError(
                f"steps: need as many values as times, the first at 0 s, got times {list(self.times_s)}"
            )
        if any(after <= before for before, after in pairwise(self.times_s)):
            raise ConfigError(f"steps: times must rise, got {list(self.times_s)}")

    def at(self, time_s: float) -> _Value:
        """Return the value at a time."""
        return self.values[bisect_right(self.times_s, time_s) - 1]

    def next_change_s(self, time_s: float) -> float:
        """Return the time of the next change after `time_s`; infinity if there is none."""
        index = bisect_right(self.times_s, time_s)
        return self.times_s[index] if index < len(self.times_s) else inf


def always(value: _Value) -> Steps[_Value]:
    """Return a constant function."""
    return Steps((0.0,), (value,))


def changes(first: _Value, later: Sequence[tuple[float, _Value]]) -> Steps[_Value]:
    """Return the function that starts at `first`; `later` are times and the values from each time on."""
    ordered = sorted(later, key=lambda entry: entry[0])
    if ordered and ordered[0][0] <= 0.0:
        return Steps(
            tuple(time_s if index else 0.0 for index, (time_s, _) in enumerate(ordered)),
            tuple(value for _, value in ordered),
        )
    return Steps(
        (0.0, *(time_s for time_s, _ in ordered)), (first, *(value for _, value in ordered))
    )


DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundLoad:
    """The users' load on one SoC at a moment."""

    share: float = 0.0  # of its processors, 0 to 1; training gets the rest
    power_w: float = 0.0  # that it draws for users, in addition to training
    taken: bool = False  # training has to release the SoC

    def __post_init__(self) -> None:
        require_range("user load", least=0.0, below=1.0, share=self.share)
        require_range("user load", least=0.0, power_w=self.power_w)


NOBODY = BackgroundLoad()


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """The load of a co-located game: it takes a share of a SoC, or all of it."""

    share: float = 0.5
    power_w: float = 2.5
    takes_soc: bool = False

    def __post_init__(self) -> None:
        BackgroundLoad(
            share=self.share, power_w=self.power_w, taken=self.takes_soc
        )  # raises for invalid values

    @property
    def load(self) -> BackgroundLoad:
        """Return the game as a background load."""
        return BackgroundLoad(share=self.share, power_w=self.power_w, taken=self.takes_soc)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tide:
    """Game sessions over a day of cloud gaming: few before dawn, most in the evening.

    The fraction of SoCs with a game follows a cosine between `low` at `low_hour` and `high` twelve hours later;
    sessions last `mean_session_s` on average, exponentially distributed, and are drawn for each SoC from `seed`.
    """

    low: float = 0.05
    high: float = 0.6
    low_hour: float = 5.0
    mean_session_s: float = 2400.0
    game: Game = Game()

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high < 1.0:
            raise ConfigError(f"tide: need 0 <= low <= high < 1, got {self.low} and {self.high}")
        require_range("tide", above=0.0, mean_session_s=self.mean_session_s)

    def part_busy(self, hour: float) -> float:
        """Return the mean fraction of SoCs with a game at an hour of the day."""
        return self.low + (self.high - self.low) * 0.5 * (
            1.0 - math.cos(2.0 * math.pi * (hour - self.low_hour) / 24.0)
        )

    def loads(
        self,
        num_socs: int,
        duration_s: float,
        start_hour: float,
        seed: int,
    ) -> tuple[Steps[BackgroundLoad], ...]:
        """Return each SoC's background load for `duration_s` from `start_hour` on; equal seeds give equal sessions."""
        return tuple(
            self._of_one(np.random.default_rng([seed, soc]), duration_s, start_hour)
            for soc in range(num_socs)
        )

    def _of_one(
        self, random: np.random.Generator, duration_s: float, start_hour: float
    ) -> Steps[BackgroundLoad]:
        """A two-state chain whose mean follows the daily curve: idle times depend on the fraction at their start."""
        busy = bool(random.random() < self.part_busy(start_hour))
        first = self.game.load if busy else NOBODY
        time_s, later = 0.0, list[tuple[float, BackgroundLoad]]()
        while True:
            part = self.part_busy(start_hour + time_s / 3600.0)
            mean_s = (
                self.mean_session_s
                if busy
                else self.mean_session_s * (1.0 - part) / max(part, 1e-6)
            )
            # An idle time lasts at most an hour, so that it follows the daily curve.
            drawn_s = float(random.exponential(mean_s))
            if not busy and drawn_s > 3600.0:
                time_s += 3600.0
                if time_s >= duration_s:
                    break
                continue
            time_s += drawn_s
            if time_s >= duration_s:
                break
            busy = not busy
            later.append((time_s, self.game.load if busy else NOBODY))
        return changes(first, later)


def idle_windows(
    windows: Sequence[tuple[float, float]], duration_s: float, start_hour: float
) -> Steps[bool]:
    """Return whether training may run: only within the daily windows, as hours (from, to) that may span midnight.

    Raises `ConfigError` for hours that are not between 0 and 24.
    """
    if not windows:
        return always(True)
    for begin, end in windows:
        if not (0.0 <= begin <= 24.0 and 0.0 <= end <= 24.0) or begin == end:
            raise ConfigError(
                f"idle window: hours must lie between 0 and 24 and differ, got {begin} to {end}"
            )

    start_hour %= 24.0

    def is_open(hour: float) -> bool:
        return any(
            begin <= hour < end if begin < end else hour >= begin or hour < end
            for begin, end in windows
        )

    edges = sorted({hour % 24.0 for window in windows for hour in window})
    later = []
    for day in range(-1, math.ceil(duration_s / DAY_S) + 1):
        for hour in edges:
            time_s = (day * 24.0 + hour - start_hour) * 3600.0
            if 0.0 < time_s < duration_s:
                later.append((time_s, is_open(hour)))
    return changes(is_open(start_hour), later)
