"""Sensors of a simulated SoC, with the rounding and noise of real ones and configurable faults."""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from socflower.errors import ConfigError, require_order, require_range
from socflower.field_rules import OneOf, checked
from socflower.plain_numbers import plain_numbers
from socflower.thermal.sensors.plausibility import STUCK_AFTER_S, SensorFilter
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.sysfs import NoteLog

FAULTS = ("stuck", "nan", "cold", "missing", "denied")


@checked
class SensorFault:
    """A fault of one sensor, and its time on the source's clock.

    `kind`: "stuck" at its last value, "nan", "cold" (-128 °C), "missing", or "denied".
    """

    kind: Annotated[str, OneOf(FAULTS)]
    from_s: float = 0.0
    until_s: Annotated[float, Field(allow_inf_nan=True)] = math.inf
    sensor: Annotated[int, Field(ge=0)] = 0

    def check(self) -> None:
        """Refuse times in the wrong order."""
        require_order(from_s=self.from_s, until_s=self.until_s)


@plain_numbers
class SimulatedSource:
    """Implements `HeatSource` over a model's temperature; its sensors pass the same filter as a real machine's.

    Parameters
    ----------
    temperature_of : callable
        The SoC's true temperature now, in °C.
    speed_of : callable, optional
        Its clock now over the highest, 0 to 1; below 1 the device reports throttling.
    step_c : float
        Rounding of the sensors: 0.5 °C as in SoCFlow+; 0 for no rounding.
    noise_c : float
        Standard deviation of a sensor's noise before rounding; drawn at every read, from `seed`.
    num_sensors : int
        All measure the same temperature, each with its own noise. A stuck sensor is detected only by comparison.
    busy_of : callable
        Whether the SoC has work: an idle SoC's sensor may stay constant without limit.
    faults : sequence of SensorFault
        Faults of the sensors.

    Raises
    ------
    ConfigError
        For steps or noise below 0, no sensors, or a fault of a sensor that does not exist.
    """

    def __init__(
        self,
        temperature_of: Callable[[], float],
        speed_of: Callable[[], float] | None = None,
        *,
        step_c: float = 0.5,
        noise_c: float = 0.0,
        seed: int = 0,
        num_sensors: int = 1,
        clock: Callable[[], float] = time.monotonic,
        busy_of: Callable[[], bool] = lambda: True,
        faults: Sequence[SensorFault] = (),
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        require_range(
            "simulated sensor",
            least=0.0,
            step_c=step_c,
            noise_c=noise_c,
        )
        require_range("simulated sensor", least=1, num_sensors=num_sensors)
        for fault in faults:
            if fault.sensor >= num_sensors:
                raise ConfigError(
                    f"sensor fault {fault.kind}: no sensor {fault.sensor} among {num_sensors}"
                )
        self._temperature_of = temperature_of
        self._speed_of = speed_of
        self._busy_of = busy_of
        self._clock = clock
        self._step_c = step_c
        self._noise_c = noise_c
        self._random = random.Random(seed)
        self._faults = tuple(faults)
        self._notes = NoteLog()
        self._filter = SensorFilter(self._notes, stuck_after_s=stuck_after_s)
        # Last values without a fault.
        self._shown_c: list[float | None] = [None] * num_sensors

    def read(self) -> Reading:
        """Return the reading that the simulated sensors give."""
        at_s = self._clock()
        true_c = self._temperature_of()
        values: dict[str, float | str] = {}
        for sensor in range(len(self._shown_c)):
            # Also drawn for a faulty sensor, so that the others' noise is the same with and without faults.
            noise_c = self._random.gauss(0.0, self._noise_c)
            shown = self._shown(sensor, self._round(true_c + noise_c), at_s)
            if shown is not None:
                values[f"simulated {sensor}"] = shown
        filtered = self._filter.apply(at_s, values, busy=self._busy_of())
        factor = None
        if self._speed_of is not None:
            factor = min(1.0, max(0.0, self._speed_of()))
        return Reading(
            at_s=at_s,
            temperature_c=max(filtered.values(), default=None),
            clock_factor=factor,
            throttled=None if factor is None else factor < 1.0,
            notes=self._notes.drain(),
        )

    def _shown(
        self,
        sensor: int,
        true_reading_c: float,
        at_s: float,
    ) -> float | str | None:
        """Return a sensor's value, a text why there is none, or None for a missing sensor."""
        for fault in self._faults:
            if fault.sensor != sensor or not fault.from_s <= at_s < fault.until_s:
                continue
            if fault.kind == "stuck":
                # A sensor that is stuck from the start keeps its first reading.
                last_c = self._shown_c[sensor]
                self._shown_c[sensor] = true_reading_c if last_c is None else last_c
                return self._shown_c[sensor]
            if fault.kind == "denied":
                return "permission denied"
            return {"nan": math.nan, "cold": -128.0}.get(fault.kind)
        self._shown_c[sensor] = true_reading_c
        return true_reading_c

    def _round(self, value_c: float) -> float:
        if not (self._step_c and math.isfinite(value_c)):
            return value_c
        return round(value_c / self._step_c) * self._step_c
