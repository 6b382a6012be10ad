"""What a Linux machine says of its heat: thermal zones, hwmon, cpufreq, throttle states, battery, load of others.

Every look searches anew, for sensors come and go with drivers. Nothing below /sys or /proc can make `read` raise.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from socflower.thermal.battery import BatteryState, read_battery
from socflower.thermal.clocks import Clocks, ClockState
from socflower.thermal.reading import Reading
from socflower.thermal.sensor_names import SensorKind, kind_of
from socflower.thermal.sensor_trust import STUCK_AFTER_S, SensorTrust
from socflower.thermal.sysfs import Complaints, matches, text_of, why
from socflower.thermal.temperature_unit import TemperatureUnit
from socflower.thermal.user_load import UserLoad

NO_TEMPERATURE = "no temperature sensor here: only slow steps can show heat"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureSensor:
    """One temperature sensor as it was at the last look."""

    name: str
    kind: SensorKind
    temperature_c: float | None  # None where it is not believed
    trouble: str  # why it is not believed; "" where it is


@dataclass(frozen=True, kw_only=True, slots=True)
class SensorsFound:
    """What the last look found."""

    temperatures: tuple[TemperatureSensor, ...]
    num_clock_policies: int
    throttle_sources: tuple[str, ...]
    batteries: tuple[str, ...]
    load_known: bool  # whether the system says what its processors do


class LinuxSensors:
    """Implements `HeatSource` for the files below `root`.

    Parameters
    ----------
    root : Path
        Where `sys` and `proc` are.
    clock : callable
        Seconds, monotonic; stamps the readings.
    stuck_after_s : float
        For how long a temperature may stand still under load while others move, see `SensorTrust`.
    pid, also_ours : int, iterable of str
        Whose processor time is no user's, see `UserLoad`.
    """

    def __init__(
        self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic,
        stuck_after_s: float = STUCK_AFTER_S, pid: int | None = None, also_ours: Iterable[str] = (),
    ) -> None:
        self._root, self._clock = root, clock
        self._complaints = Complaints()
        self._trust = SensorTrust(self._complaints, stuck_after_s=stuck_after_s)
        self._units: dict[str, TemperatureUnit] = {}
        self._clocks = Clocks(root, self._complaints)
        self._load = UserLoad(root, self._complaints, clock=clock, pid=pid, also_ours=also_ours)
        self._found: SensorsFound | None = None

    @property
    def found(self) -> SensorsFound:
        """What there is, as of the last look; looks if nobody has yet."""
        if self._found is None:
            self._look()
        assert self._found is not None
        return self._found

    def read(self) -> Reading:
        """Return how the machine is now. The temperature is that of the hottest believed sensor of the best kind."""
        at_s, temperature_c, clocks, battery, user_load = self._look()
        return Reading(at_s=at_s, temperature_c=temperature_c, clock_factor=clocks.factor, throttled=clocks.throttled,
                       battery_fraction=battery.fraction, on_battery=battery.on_battery, user_load=user_load,
                       notes=self._complaints.take())

    def _look(self) -> tuple[float, float | None, ClockState, BatteryState, float | None]:
        at_s = self._clock()
        load = self._load.read()
        clocks = self._clocks.read(at_s)
        battery = read_battery(self._root, self._complaints, at_s)
        kinds: dict[str, SensorKind] = {}
        said: dict[str, float | str] = {}
        for name, kind, path in self._temperature_files(battery):
            kinds[name] = kind
            said[name] = self._temperature(name, path)
        believed = self._trust.believed(at_s, said, busy=load.busy)
        if not said:
            self._complaints.once(NO_TEMPERATURE)
        self._found = SensorsFound(
            temperatures=tuple(TemperatureSensor(name=name, kind=kinds[name], temperature_c=believed.get(name),
                                                 trouble=self._trust.troubles.get(name, ""))
                               for name in sorted(said, key=lambda name: kinds[name])),
            num_clock_policies=clocks.num_policies, throttle_sources=clocks.throttle_sources,
            batteries=battery.names, load_known=load.total is not None)
        best = min((kinds[name] for name in believed), default=None)
        hottest_c = max((value for name, value in believed.items() if kinds[name] == best), default=None)
        return at_s, hottest_c, clocks, battery, load.user

    def _temperature(self, name: str, path: Path) -> float | str:
        """Return °C, or in words why there is none."""
        try:
            raw = float(text_of(path))
            if not math.isfinite(raw):
                return "shows no number"
            return self._units.setdefault(name, TemperatureUnit()).degrees(raw)
        except OSError as error:
            return why(error)
        except ValueError as error:
            text = str(error)
            return text if text.startswith("shows ") else "shows no number"

    def _temperature_files(self, battery: BatteryState) -> list[tuple[str, SensorKind, Path]]:
        """Return name, kind and file of every temperature sensor; a name is unique, and the same at every look."""
        found: list[tuple[str, SensorKind, Path]] = []
        for folder in matches(self._root / "sys/class/thermal", "thermal_zone*"):
            label = _label(folder / "type")
            kind = kind_of(label)
            if kind is not None:
                found.append((f"{label or 'unnamed'} ({folder.name})", kind, folder / "temp"))
        for pattern in ("hwmon*/temp*_input", "hwmon*/device/temp*_input"):
            for path in matches(self._root / "sys/class/hwmon", pattern):
                chip = _label(path.parent / "name")
                label = _label(path.with_name(path.name.replace("_input", "_label")))
                kind = kind_of(f"{chip} {label}".strip())
                if kind is not None:
                    place = path.relative_to(self._root / "sys/class/hwmon").as_posix().removesuffix("_input")
                    found.append((f"{chip or 'unnamed'}{' ' if label else ''}{label} ({place})", kind, path))
        found.extend((f"battery ({path.parent.name})", SensorKind.BESIDE, path) for path in battery.temperature_files)
        return found


def _label(path: Path) -> str:
    """Return a name as the device gives it, fit for one line; "" where it gives none."""
    try:
        return "".join(letter for letter in text_of(path) if letter.isprintable())[:60]
    except (OSError, ValueError):
        return ""
