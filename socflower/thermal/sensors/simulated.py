"""Sensors of a simulated SoC, as coarse and as noisy as real ones, which lie when they are told to."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from socflower.errors import ConfigError
from socflower.thermal.sensors.plausibility import STUCK_AFTER_S, SensorTrust
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.sysfs import Complaints

FAULTS = ("stuck", "nan", "cold", "missing", "denied")


@dataclass(frozen=True, kw_only=True, slots=True)
class SensorFault:
    """How one sensor lies, and when, on the source's clock."""

    kind: str  # "stuck" at its last number, "nan", "cold" (-128 °C), "missing", "denied"
    from_s: float = 0.0
    until_s: float = math.inf
    sensor: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ConfigError(f"sensor fault {self.kind!r}: there are {', '.join(FAULTS)}")
        if not self.from_s < self.until_s:
            raise ConfigError(f"sensor fault {self.kind}: need from_s < until_s, got {self.from_s} and {self.until_s}")
        if self.sensor < 0:
            raise ConfigError(f"sensor fault {self.kind}: sensor = {self.sensor} must be 0 or above")


class SimulatedSource:
    """Implements `HeatSource` over a model's temperature; what its sensors say is judged as a real machine's is.

    Parameters
    ----------
    temperature_of : callable
        The SoC's true temperature now, in °C.
    speed_of : callable, optional
        Its clock now over the highest, 0 to 1; below 1 the device says that it is throttled.
    step_c : float
        What the sensors round to: 0.5 °C as the interface of SoCFlow+ does; 0 for no rounding.
    noise_c : float
        Standard deviation of a sensor's noise before rounding; drawn anew at every read, from `seed`.
    num_sensors : int
        All of them show the one temperature, each with noise of its own. A stuck one is found only beside another.
    busy_of : callable
        Whether the SoC has work: an idle sensor may stand still for as long as it likes.
    faults : sequence of SensorFault
        Which sensor lies when, and how.

    Raises
    ------
    ConfigError
        For steps or noise below 0, no sensors, or a fault of a sensor that is not there.
    """

    def __init__(
        self, temperature_of: Callable[[], float], speed_of: Callable[[], float] | None = None, *,
        step_c: float = 0.5, noise_c: float = 0.0, seed: int = 0, num_sensors: int = 1,
        clock: Callable[[], float] = time.monotonic, busy_of: Callable[[], bool] = lambda: True,
        faults: Sequence[SensorFault] = (), stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        for name, value in (("step_c", step_c), ("noise_c", noise_c)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"simulated sensor: {name} = {value} must be 0 or above")
        if num_sensors < 1:
            raise ConfigError(f"simulated sensor: num_sensors = {num_sensors} must be 1 or above")
        for fault in faults:
            if fault.sensor >= num_sensors:
                raise ConfigError(f"sensor fault {fault.kind}: there is no sensor {fault.sensor} among {num_sensors}")
        self._temperature_of, self._speed_of, self._busy_of, self._clock = temperature_of, speed_of, busy_of, clock
        self._step_c, self._noise_c = step_c, noise_c
        self._random = random.Random(seed)
        self._faults = tuple(faults)
        self._complaints = Complaints()
        self._trust = SensorTrust(self._complaints, stuck_after_s=stuck_after_s)
        self._shown_c: list[float | None] = [None] * num_sensors  # what a sensor showed while it worked

    def read(self) -> Reading:
        """Return how the SoC seems to be."""
        at_s, true_c = self._clock(), self._temperature_of()
        said: dict[str, float | str] = {}
        for sensor in range(len(self._shown_c)):
            # Drawn also for one that lies, so that the others' noise is the same with and without faults.
            honest_c = self._round(true_c + self._random.gauss(0.0, self._noise_c))
            shown = self._shown(sensor, honest_c, at_s)
            if shown is not None:
                said[f"simulated {sensor}"] = shown
        believed = self._trust.believed(at_s, said, busy=self._busy_of())
        factor = None if self._speed_of is None else min(1.0, max(0.0, self._speed_of()))
        return Reading(at_s=at_s, temperature_c=max(believed.values(), default=None), clock_factor=factor,
                       throttled=None if factor is None else factor < 1.0, notes=self._complaints.take())

    def _shown(self, sensor: int, honest_c: float, at_s: float) -> float | str | None:
        """Return what a sensor shows, in words why it shows nothing, or None where it is not there."""
        for fault in self._faults:
            if fault.sensor != sensor or not fault.from_s <= at_s < fault.until_s:
                continue
            if fault.kind == "stuck":
                last_c = self._shown_c[sensor]
                self._shown_c[sensor] = honest_c if last_c is None else last_c
                return self._shown_c[sensor]
            return {"nan": math.nan, "cold": -128.0, "missing": None, "denied": "permission denied"}[fault.kind]
        self._shown_c[sensor] = honest_c
        return honest_c

    def _round(self, value_c: float) -> float:
        if not (self._step_c and math.isfinite(value_c)):
            return value_c
        return round(value_c / self._step_c) * self._step_c
