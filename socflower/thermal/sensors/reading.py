"""A device's temperature, clocks, battery and load as one value, independent of its source."""

from dataclasses import dataclass
from typing import Protocol

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers

COLDEST_C, HOTTEST_C = -40.0, 150.0
"""A sensor outside this range is broken: no working SoC is colder or hotter."""


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One reading of a device; None for what it does not report, or reports with an impossible value."""

    at_s: float  # on a monotonic clock
    temperature_c: float | None = None  # of the hottest accepted sensor
    clock_factor: float | None = (
        None  # present clock over the highest the device can run at, 0 to 1
    )
    throttled: bool | None = None  # whether the device itself reports throttling by heat or power
    battery_fraction: float | None = None  # charge, 0 to 1
    on_battery: bool | None = None  # whether it runs on that charge
    user_load: float | None = None  # share of the processors that others use, 0 to 1
    notes: tuple[str, ...] = ()  # sensor errors, one line each

    def __post_init__(self) -> None:
        shares = {
            key: getattr(self, key) for key in ("clock_factor", "battery_fraction", "user_load")
        }
        require_range(
            "reading",
            least=0.0,
            most=1.0,
            **{key: part for key, part in shares.items() if part is not None},
        )
        if self.temperature_c is not None and not COLDEST_C <= self.temperature_c <= HOTTEST_C:
            raise ConfigError(
                f"reading: temperature_c = {self.temperature_c} cannot be; give None where a sensor lies"
            )


class HeatSource(Protocol):
    """A source of readings: a Linux machine, a recording, a simulated SoC."""

    def read(self) -> Reading:
        """Return the present reading. Never raises for a missing or faulty sensor: its value is None, with a note."""
        ...
