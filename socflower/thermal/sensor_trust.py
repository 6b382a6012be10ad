"""Which sensors are believed: those that say what can be, and do not stand still while everything else moves."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from socflower.errors import ConfigError
from socflower.thermal.reading import COLDEST_C, HOTTEST_C
from socflower.thermal.sysfs import Complaints

STUCK_AFTER_S = 600.0
"""How long a sensor may show the same under load: coarse sensors of an SoC in balance stand still for minutes."""

_OTHERS_MOVE_C = 3.0
"""What another sensor must have moved meanwhile: more than noise and rounding, less than a SoC that starts to work."""
_STUCK_READS = 5
"""Two looks an hour apart that see the same prove nothing."""


@dataclass(slots=True)
class _Stillness:
    """What a sensor shows, and since when."""

    shown_c: float
    all_then_c: Mapping[str, float]  # what every sensor showed when this one last changed
    busy_s: float = 0.0
    num_reads: int = 0
    others_moved: bool = False


class SensorTrust:
    """Sorts the sensors of one device at every look; never raises for what they say.

    A sensor is left out at once when it gives an error, no number, or a temperature outside `COLDEST_C` to
    `HOTTEST_C`, and taken back with the first number that can be. One that has shown the very same number for
    `stuck_after_s` of load, while another moved by 3 °C, is left out until it changes. A device's only sensor is never
    called stuck: nothing speaks against it.
    """

    def __init__(self, complaints: Complaints, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        if not stuck_after_s > 0:
            raise ConfigError(f"sensors: stuck_after_s = {stuck_after_s} must be above 0")
        self.troubles: dict[str, str] = {}
        """Why a sensor is not believed now, by its name."""
        self._complaints = complaints
        self._stuck_after_s = stuck_after_s
        self._stillness: dict[str, _Stillness] = {}
        self._last_s: float | None = None

    def believed(self, at_s: float, said: Mapping[str, float | str], *, busy: bool) -> dict[str, float]:
        """Return the temperatures that are believed, in °C by sensor.

        `said` holds what each sensor shows, or in words why it shows nothing; `busy` whether the processors had work
        since the look before.
        """
        elapsed_s = 0.0 if self._last_s is None else max(0.0, at_s - self._last_s)
        self._last_s = at_s
        possible = {name: value for name, value in said.items()
                    if not isinstance(value, str) and COLDEST_C <= value <= HOTTEST_C}
        troubles: dict[str, str] = {name: "is gone" for name in self._stillness.keys() - said.keys()}
        for name, value in said.items():
            if name in possible:
                if self._is_stuck(name, possible, elapsed_s if busy else 0.0):
                    troubles[name] = f"stands still at {value:.4g} °C under load while others move"
            elif isinstance(value, str):
                troubles[name] = value
            else:
                troubles[name] = "shows no number" if math.isnan(value) else f"shows {value:.4g} °C, which cannot be"
        self._tell(troubles, said.keys(), at_s)
        self.troubles = troubles
        return {name: value for name, value in possible.items() if name not in troubles}

    def _is_stuck(self, name: str, possible: Mapping[str, float], busy_s: float) -> bool:
        still = self._stillness.get(name)
        if still is None or still.shown_c != possible[name]:
            self._stillness[name] = _Stillness(possible[name], possible)
            return False
        if busy_s > 0.0:
            still.busy_s += busy_s
            still.num_reads += 1
        if not still.others_moved:
            still.others_moved = any(
                abs(value - still.all_then_c[other]) >= _OTHERS_MOVE_C
                for other, value in possible.items() if other in still.all_then_c)
        return still.others_moved and still.busy_s >= self._stuck_after_s and still.num_reads >= _STUCK_READS

    def _tell(self, troubles: Mapping[str, str], said: Set[str], at_s: float) -> None:
        for name in sorted(troubles):
            if name not in self.troubles:
                # Without the number, which may differ every time: else each would be a line of its own.
                kind = "shows what cannot be" if "cannot be" in troubles[name] else troubles[name]
                self._complaints.say(f"sensor {name}: {kind}; left out until it makes sense", at_s)
        for name in sorted(said & self.troubles.keys() - troubles.keys()):
            self._complaints.say(f"sensor {name}: makes sense again", at_s)
