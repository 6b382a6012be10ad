"""Clocks estimated from step times: on a device without sensors, a slow step at a known load means a slow clock.

A step takes a fixed time and one per sample, so seconds per sample of different loads must not be compared. Each load
(number of samples) has its own reference, and a step counts by its ratio to it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.thermal.sensors.reading import HeatSource, Reading, is_number

_MOST_LOADS = 64
"""Number of loads that are kept; the least recently used one is dropped."""

TIMED = "no clock is readable here: clocks are judged by step times"


@dataclass(slots=True)
class _Load:
    # Times of recent steps, and the same scaled to full clock.
    recent_s: deque[float]
    at_full_clock_s: deque[float]
    reference_s: float | None


@plain_numbers
@dataclass(slots=True)
class StepTiming:
    """An estimate of the clock from step times.

    The reference of a load is the smallest median of `window` successive steps of it: the best sustained rate. The
    present clock is the median over the last `window` steps, of any load, of reference over seconds. So a single step
    that is slow, or that a timer measures too short, has no effect.

    The first steps of a *new* load are assumed to run at the present estimate. A device that is slow from its first
    step counts as running at full clock until it gets faster; `references_s` of an earlier run or a profile, seconds
    by number of samples, avoids this.
    """

    window: int = 7
    references_s: Mapping[int, float] = field(default_factory=dict)
    _loads: "OrderedDict[int, _Load]" = field(init=False, default_factory=OrderedDict)
    # Seconds over reference.
    _ratios: deque[float] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        require_range("step timing", least=1, window=self.window)
        for num_samples, seconds in self.references_s.items():
            if num_samples < 1 or not is_number(seconds) or seconds <= 0.0:
                raise ConfigError(
                    f"step timing: references_s = {{{num_samples}: {seconds}}} must be above 0"
                )
            self._loads[num_samples] = self._new_load(seconds)
        self._ratios = deque(maxlen=self.window)

    @plain_numbers
    def add_step(self, seconds: float, num_samples: int) -> None:
        """Add a step; one without samples, or with an invalid time, is ignored."""
        if num_samples < 1 or not is_number(seconds) or seconds <= 0.0:
            return
        # The order is that of the last use, so that loads in use keep their reference.
        load = self._loads.setdefault(num_samples, self._new_load(None))
        self._loads.move_to_end(num_samples)
        if len(self._loads) > _MOST_LOADS:
            self._loads.popitem(last=False)
        factor = self.clock_factor
        load.recent_s.append(seconds)
        load.at_full_clock_s.append(seconds * (1.0 if factor is None else factor))
        is_full = len(load.recent_s) == self.window
        if is_full:
            known_s = load.reference_s
            if known_s is None:
                known_s = median(load.at_full_clock_s)
            load.reference_s = min(median(load.recent_s), known_s)
        if load.reference_s is None:
            return
        self._ratios.append(seconds / load.reference_s)
        if is_full and self.clock_factor is None:
            # The steps that gave the first reference count too.
            before_s = list(load.recent_s)[:-1]
            self._ratios.extend(step_s / load.reference_s for step_s in before_s)

    @property
    def clock_factor(self) -> float | None:
        """Present rate over the reference, above 0 and at most 1; None before `window` steps."""
        if len(self._ratios) < self.window:
            return None
        factor = 1.0 / median(self._ratios)
        # Above 0 also for a step that takes forever.
        return max(min(1.0, factor), math.ulp(0.0))

    def references(self) -> dict[int, float]:
        """Return the seconds of a step at full clock by number of samples: `references_s` of a later run."""
        return {
            num_samples: load.reference_s
            for num_samples, load in self._loads.items()
            if load.reference_s is not None
        }

    def _new_load(self, reference_s: float | None) -> _Load:
        return _Load(deque(maxlen=self.window), deque(maxlen=self.window), reference_s)


@plain_numbers
class TimedSource:
    """A source that takes its clock from step times if its sensors give none; implements `HeatSource`.

    `throttled_below` is the clock factor under which the device counts as throttled, unless it reports that itself:
    step times vary by some per cent on a machine that is not throttled.
    """

    def __init__(
        self,
        source: HeatSource,
        timing: StepTiming,
        *,
        throttled_below: float = 0.85,
    ) -> None:
        require_range(
            "timed source",
            above=0.0,
            most=1.0,
            throttled_below=throttled_below,
        )
        self._source = source
        self._timing = timing
        self._throttled_below = throttled_below
        self._has_note = False

    def read(self) -> Reading:
        """Return the source's reading, completed with the clock from step times if it is missing."""
        reading = self._source.read()
        factor = self._timing.clock_factor
        if reading.clock_factor is not None or factor is None:
            return reading
        notes = reading.notes if self._has_note else (*reading.notes, TIMED)
        self._has_note = True
        throttled = reading.throttled
        if throttled is None:
            throttled = factor < self._throttled_below
        return replace(
            reading,
            clock_factor=factor,
            throttled=throttled,
            notes=notes,
        )
