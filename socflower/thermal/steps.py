"""Things that change at given moments and hold in between: ambient air, fans that fail, users that come and go."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar

from socflower.errors import ConfigError

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Steps(Generic[_Value]):
    """A piecewise constant function of time: `values[i]` holds from `times_s[i]` on. The first time is 0."""

    times_s: tuple[float, ...]
    values: tuple[_Value, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.values) or not self.times_s or self.times_s[0] != 0.0:
            raise ConfigError(f"steps: need as many values as times, the first at 0 s, got times {list(self.times_s)}")
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
    """Return what never changes."""
    return Steps((0.0,), (value,))


def changes(first: _Value, later: Sequence[tuple[float, _Value]]) -> Steps[_Value]:
    """Return what is `first` until the first of `later`, which are times and what holds from then on."""
    ordered = sorted(later, key=lambda entry: entry[0])
    if ordered and ordered[0][0] <= 0.0:
        return Steps(tuple(time_s if index else 0.0 for index, (time_s, _) in enumerate(ordered)),
                     tuple(value for _, value in ordered))
    return Steps((0.0, *(time_s for time_s, _ in ordered)), (first, *(value for _, value in ordered)))
