"""A device's temperature, clocks, battery and load as one value, independent of its source."""

import math
from numbers import Real
from typing import Annotated, Protocol, TypeGuard

from pydantic import Field

from socflower.field_rules import checked

COLDEST_C = -40.0
HOTTEST_C = 150.0
"""A sensor outside this range is broken: no working SoC is colder or hotter."""

Temperature = Annotated[float, Field(ge=COLDEST_C, le=HOTTEST_C)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@checked
class Reading:
    """One reading of a device; None for what it does not report, or reports with an impossible value."""

    # On a monotonic clock.
    at_s: float
    # Of the hottest accepted sensor.
    temperature_c: Temperature | None = None
    # Present clock over the highest that the device can run at.
    clock_factor: Fraction | None = None
    # Whether the device itself reports throttling by heat or power.
    throttled: bool | None = None
    # Charge.
    battery_fraction: Fraction | None = None
    # Whether it runs on that charge.
    on_battery: bool | None = None
    # Share of the processors that others use.
    user_load: Fraction | None = None
    # Sensor errors, one line each.
    notes: tuple[str, ...] = ()


class HeatSource(Protocol):
    """A source of readings: a Linux machine, a recording, a simulated SoC."""

    def read(self) -> Reading:
        """Return the present reading. A missing or faulty sensor raises nothing: its value is None, with a note."""
        ...


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; booleans do not count."""
    # The usual case comes first: looking up an abstract class takes seven times as long.
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer with hundreds of digits
        return False


def possible_c(value: object) -> float | None:
    """Return a value in °C if a working SoC can be that warm; None otherwise, also for what is not a number."""
    return float(value) if is_number(value) and COLDEST_C <= value <= HOTTEST_C else None
