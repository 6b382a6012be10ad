"""Recognising that a repeated program is in steady state: its whole state recurs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from socflower.sim.energy import State

MAX_PERIOD = 16
"""Longest period that is looked for, repetitions; groups that share links fall into step within a few."""

SAME_STATE = 1e-11
"""Largest difference between clocks of equal states, relative to the period; m periods are off by as little."""

_ROUNDING = 2.0**-47
"""What rounding may add to a clock, relative to the time: 32 units in the last place."""


class Snapshot(NamedTuple):
    """The state when a repetition has just ended, all of it that the future depends on.

    `shape` holds for each task its repetition (counted from the oldest unfinished) and its stage; `clocks_s` for
    each task under way the seconds until it ends at the present rate, or since it was queued.
    """

    repetition: int
    now_s: float
    shape: tuple[int, ...]
    clocks_s: list[float]
    seconds: list[dict[State, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """From `at_s` on, every `repetitions` take `period_s`, in which SoCs spend `seconds` in their states."""

    at_s: float
    repetitions: int
    period_s: float
    seconds: Sequence[dict[State, float]]


class RecurrenceFinder:
    """Compares each snapshot with those of the repetitions before."""

    def __init__(self) -> None:
        self._past: deque[Snapshot] = deque(maxlen=MAX_PERIOD)

    def find(self, present: Snapshot) -> Recurrence | None:
        """Return the shortest period with which the present state recurs, if any."""
        for past in reversed(self._past):
            if past.shape == present.shape and _same_clocks(past, present):
                return Recurrence(
                    at_s=present.now_s, repetitions=present.repetition - past.repetition,
                    period_s=present.now_s - past.now_s,
                    seconds=[{state: spent_s - before.get(state, 0.0) for state, spent_s in after.items()}
                             for before, after in zip(past.seconds, present.seconds, strict=True)])
        self._past.append(present)
        return None


def _same_clocks(past: Snapshot, present: Snapshot) -> bool:
    tolerance_s = SAME_STATE * (present.now_s - past.now_s) + _ROUNDING * present.now_s
    return all(abs(before - after) <= tolerance_s
               for before, after in zip(past.clocks_s, present.clocks_s, strict=True))
