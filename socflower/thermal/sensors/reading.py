"""What a device says of its heat, its clocks and who else wants it: one value, whatever the source."""

from dataclasses import dataclass
from typing import Protocol

from socflower.errors import ConfigError

COLDEST_C, HOTTEST_C = -40.0, 150.0
"""A sensor outside this range is broken: no SoC that still computes is colder or hotter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One look at a device; None where the device does not say, or says what cannot be."""

    at_s: float  # on a monotonic clock
    temperature_c: float | None = None  # of the hottest sensor that is believed
    clock_factor: float | None = None  # present clock over the highest the device can run at, 0 to 1
    throttled: bool | None = None  # whether the device itself says that heat or power holds its clocks down
    battery_fraction: float | None = None  # charge, 0 to 1
    on_battery: bool | None = None  # whether it runs on that charge
    user_load: float | None = None  # part of the processors that others use, 0 to 1
    notes: tuple[str, ...] = ()  # what is wrong with sensors, a line each

    def __post_init__(self) -> None:
        for key in ("clock_factor", "battery_fraction", "user_load"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"reading: {key} = {value} must lie between 0 and 1")
        if self.temperature_c is not None and not COLDEST_C <= self.temperature_c <= HOTTEST_C:
            raise ConfigError(f"reading: temperature_c = {self.temperature_c} cannot be; give None where a sensor lies")


class HeatSource(Protocol):
    """Where readings come from: a Linux machine, a recording, a simulated SoC."""

    def read(self) -> Reading:
        """Return how the device is now. Never raises for a sensor that is missing or lies: that is None and a note."""
        ...
