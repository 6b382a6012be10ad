"""The clock governor of a SoC: trip points with hysteresis, and the speed and power of each clock."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from socflower.errors import ConfigError, require_order
from socflower.field_rules import NotNegative, Positive, checked
from socflower.thermal.model.constants import constant, constants

Levels = NDArray[np.int64]
"""Index of each SoC's clock in the governor's list: 0 is the highest."""


@checked
class ClockGovernor:
    """Steps a SoC's clock down when it passes a trip point, and up again when it has cooled to the resume point.

    `trip_c[i]` leads from clock i to i + 1, `resume_c[i]` back. One step per reading, as step-wise governors do.
    Speed is proportional to the clock, watts above idle to `clock ** power_exponent`.
    """

    clock_hz: Annotated[tuple[Positive, ...], Field(min_length=1)]
    trip_c: tuple[float, ...]
    resume_c: tuple[float, ...]
    power_exponent: NotNegative

    def check(self) -> None:
        """Refuse another number of points than of changes, and points in the wrong order."""
        if not len(self.clock_hz) - 1 == len(self.trip_c) == len(self.resume_c):
            raise ConfigError("trip_c and resume_c must have one number less than clock_hz")
        for key, values in (("trip_c", self.trip_c), ("resume_c", self.resume_c)):
            if any(after <= before for before, after in pairwise(values)):
                raise ConfigError(f"{key} = {list(values)} must rise")
        if any(after >= before for before, after in pairwise(self.clock_hz)):
            raise ConfigError(f"clock_hz = {list(self.clock_hz)} must fall")
        # Otherwise the clock would swing at every reading.
        for trip_c, resume_c in zip(self.trip_c, self.resume_c, strict=True):
            require_order(resume_c=resume_c, trip_c=trip_c)

    @property
    def clock_factors(self) -> tuple[float, ...]:
        """Each clock relative to the highest."""
        return tuple(clock / self.clock_hz[0] for clock in self.clock_hz)

    @property
    def power_factors(self) -> tuple[float, ...]:
        """Watts above idle at each clock, relative to those at the highest."""
        return tuple(factor**self.power_exponent for factor in self.clock_factors)

    def next_levels(
        self, levels: Levels, temperature_c: Sequence[float] | NDArray[np.float64]
    ) -> Levels:
        """Return the levels after a reading of the SoCs' temperatures; NaN changes nothing."""
        temperatures = np.asarray(temperature_c, float)
        trips, resumes = _thresholds(self.trip_c, self.resume_c)
        down = temperatures >= trips[levels]
        up = temperatures <= resumes[levels]
        changed: Levels = levels + down
        changed -= up
        return changed


@lru_cache
def _thresholds(
    trip_c: tuple[float, ...],
    resume_c: tuple[float, ...],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the trip and resume points by level. No temperature, not even infinity, leads past either end."""
    trips = np.array([*trip_c, math.nan])
    resumes = np.array([math.nan, *resume_c])
    return trips, resumes


def snapdragon_governor() -> ClockGovernor:
    """Return the governor of the SoC-Cluster's Snapdragon 865, from `constants.toml`."""
    return ClockGovernor(
        clock_hz=constants("governor", "clock_hz"),
        trip_c=constants("governor", "trip_c"),
        resume_c=constants("governor", "resume_c"),
        power_exponent=constant("governor", "power_exponent"),
    )
