"""Sensors of a Linux machine: thermal zones, hwmon, cpufreq, throttle states, battery, load of others.

Every read searches again, since sensors appear and disappear with drivers. No file below /sys or /proc makes `read`
raise.

The SoC's temperature is recognised by the names that kernels and vendors give their sensors.
"""

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import psutil

from socflower.plain_numbers import plain_numbers
from socflower.thermal.sensors.clocks import Clocks
from socflower.thermal.sensors.other_load import OtherLoad
from socflower.thermal.sensors.plausibility import STUCK_AFTER_S, SensorFilter, TemperatureUnit
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.sysfs import (
    NoteLog,
    error_text,
    matching_paths,
    read_integer,
    read_text,
)


class SensorKind(IntEnum):
    """How closely a sensor measures the training processor; lower is better."""

    # On the die: CPU, GPU, NPU, junction.
    SOC = 0
    # An uninformative name, such as acpitz.
    UNNAMED = 1
    # Battery, skin, board, power chip, radio, disk: delayed, or with other heat sources.
    OTHER = 2


# Qualcomm lists charge, voltage and current of the battery among its thermal zones; "soc" is the state of charge.
_NO_TEMPERATURE = re.compile(r"^soc$|[iv]bat|bcl|[-_]lvl\d|current|volt|power$")
_OTHER = re.compile(
    r"batt|^bat\d*\b|bms|skin|shell|case|quiet|xo[-_]?therm|pa[-_]?therm|mmw|pmic|^pm[a-z]?\d|mtktspmic|chg|charg|usb|conn"
    r"|wifi|wlan|iwl|wmt|wcn|modem|mdm|sdr|nvme|drivetemp|^sd[a-z]\b|disk|board|ambient|flash|cam|lcd|display|panel"
    r"|fan[-_]?est|tdiode|mtktsap|mtktspa|btsmdpa|^rf|emmc|ufs|amdgpu|radeon|nouveau|nvidia|^i915|^xe\b|pch|jc42|spd5118"
    r"|nct\d|it87|^w83|^lm\d|^tmp\d|mlx|i350|bnxt|ixgbe|^eth|sfp|dimm|vrm|systin|auxtin"
)
_SOC = re.compile(
    r"cpu|gpu|npu|tpu|dsp|soc|tsens|^tj|junction|cluster|core|pkg|k10temp|zenpower|apss|aoss|kryo|cvp?\d|pll|aux|^ao[-_]|"
    r"^big$|^mid$|^little$|^g3d$|^isp$|^ddr|exynos|bcm2\d{3}|tsadc|package|tctl|tdie|tccd|thermal_sys|imx|sunxi|a5\d|a7\d"
)


def kind_of(name: str) -> SensorKind | None:
    """Return the kind of a sensor by its name; None if it does not measure a temperature."""
    plain = name.strip().lower()
    if _NO_TEMPERATURE.search(plain):
        return None
    if _OTHER.search(plain):
        return SensorKind.OTHER
    return SensorKind.SOC if _SOC.search(plain) else SensorKind.UNNAMED


@dataclass(frozen=True, kw_only=True, slots=True)
class BatteryState:
    """All batteries of a device as one; None for what they do not report."""

    # Charge, 0 to 1.
    fraction: float | None = None
    on_battery: bool | None = None
    names: tuple[str, ...] = ()
    # In tenths of a degree by the kernel's rule.
    temperature_files: tuple[Path, ...] = ()


def read_battery(
    root: Path,
    notes: NoteLog,
    at_s: float,
) -> BatteryState:
    """Return the state of the batteries below `root`; never raises.

    The charge is the mean of all batteries; if one discharges, the device runs on battery. Batteries of a mouse or a
    pen (`scope` is Device) do not count. If the running system has no /sys, psutil is used.
    """
    fractions: list[float] = []
    discharging: list[bool] = []
    names: list[str] = []
    temperature_files: list[Path] = []
    for folder in matching_paths(root / "sys/class/power_supply", "*"):
        if _word(folder / "type") != "battery" or _word(folder / "scope") == "device":
            continue
        names.append(folder.name)
        temperature_files.extend(matching_paths(folder, "temp"))
        try:
            percent = read_integer(folder / "capacity")
            if not 0 <= percent <= 100:
                raise ValueError(percent)
            fractions.append(percent / 100)
        except (OSError, ValueError) as error:
            notes.add(f"battery {folder.name}, charge: {error_text(error)}; left out", at_s)
        status = _word(folder / "status")
        if status in ("charging", "discharging", "not charging", "full"):
            discharging.append(status == "discharging")
    if not names and root == Path("/"):
        return _by_psutil()
    return BatteryState(
        fraction=sum(fractions) / len(fractions) if fractions else None,
        on_battery=any(discharging) if discharging else None,
        names=tuple(names),
        temperature_files=tuple(temperature_files),
    )


def _word(path: Path) -> str:
    try:
        return read_text(path).lower()
    except (OSError, ValueError):
        return ""


def _by_psutil() -> BatteryState:
    try:
        battery = psutil.sensors_battery()
    # psutil raises various types on unusual systems, and the battery state is optional.
    except (AttributeError, NotImplementedError, OSError, RuntimeError, ValueError):
        battery = None
    if battery is None:
        return BatteryState()
    percent = battery.percent
    plugged = battery.power_plugged
    return BatteryState(
        fraction=percent / 100 if percent is not None and 0 <= percent <= 100 else None,
        on_battery=None if plugged is None else not plugged,
        names=("psutil",),
    )


NO_TEMPERATURE = "no temperature sensor here: only slow steps can show heat"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureSensor:
    """One temperature sensor at the last reading."""

    name: str
    kind: SensorKind
    # None if it is rejected.
    temperature_c: float | None
    # The reason of its rejection; "" if accepted.
    rejection: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SensorsFound:
    """The sensors found by the last reading."""

    temperatures: tuple[TemperatureSensor, ...]
    num_clock_policies: int
    throttle_sources: tuple[str, ...]
    batteries: tuple[str, ...]
    # Whether the system reports processor load.
    load_known: bool


@plain_numbers
class LinuxSensors:
    """Implements `HeatSource` for the files below `root`.

    Parameters
    ----------
    root : Path
        Where `sys` and `proc` are.
    clock : callable
        Seconds, monotonic; stamps the readings.
    stuck_after_s : float
        How long a temperature may stay constant under load while others change, see `SensorFilter`.
    pid, also_ours : int, iterable of str
        Processes whose time does not count as others' load, see `OtherLoad`.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        stuck_after_s: float = STUCK_AFTER_S,
        pid: int | None = None,
        also_ours: Iterable[str] = (),
    ) -> None:
        self._root = root
        self._clock = clock
        self._notes = NoteLog()
        self._filter = SensorFilter(self._notes, stuck_after_s=stuck_after_s)
        self._units: dict[str, TemperatureUnit] = {}
        self._clocks = Clocks(root, self._notes)
        self._load = OtherLoad(
            root,
            self._notes,
            clock=clock,
            pid=pid,
            also_ours=also_ours,
        )
        self._found: SensorsFound | None = None

    @property
    def found(self) -> SensorsFound:
        """The sensors found by the last reading; reads if there was none yet."""
        return self._found or self._poll()[1]

    def read(self) -> Reading:
        """Return the present reading, with the temperature of the hottest accepted sensor of the best kind."""
        reading, _ = self._poll()
        return replace(reading, notes=self._notes.drain())

    def _poll(self) -> tuple[Reading, SensorsFound]:
        """Return a reading without notes, which stay for `read`, and the sensors that were found."""
        at_s = self._clock()
        load = self._load.read()
        clocks = self._clocks.read(at_s)
        battery = read_battery(self._root, self._notes, at_s)
        files = self._temperature_files(battery)
        values = {name: self._temperature(name, path) for name, (_, path) in files.items()}
        accepted = self._filter.apply(at_s, values, busy=load.busy)
        if not values:
            self._notes.add_once(NO_TEMPERATURE)
        sensors: list[TemperatureSensor] = []
        for name, (kind, _) in files.items():
            rejection = self._filter.rejections.get(name, "")
            sensors.append(
                TemperatureSensor(
                    name=name,
                    kind=kind,
                    temperature_c=accepted.get(name),
                    rejection=rejection,
                )
            )
        self._found = SensorsFound(
            temperatures=tuple(sorted(sensors, key=lambda sensor: sensor.kind)),
            num_clock_policies=clocks.num_policies,
            throttle_sources=clocks.throttle_sources,
            batteries=battery.names,
            load_known=load.total is not None,
        )
        # A hotter sensor of a worse kind, such as a power chip's, says less about the processor.
        best = min((files[name][0] for name in accepted), default=None)
        best_c = [value for name, value in accepted.items() if files[name][0] == best]
        reading = Reading(
            at_s=at_s,
            temperature_c=max(best_c, default=None),
            clock_factor=clocks.factor,
            throttled=clocks.throttled,
            battery_fraction=battery.fraction,
            on_battery=battery.on_battery,
            user_load=load.user,
        )
        return reading, self._found

    def _temperature(self, name: str, path: Path) -> float | str:
        """Return °C, or a text why there is none."""
        try:
            raw = float(read_text(path))
        except (OSError, ValueError) as error:
            return error_text(error)
        if not math.isfinite(raw):
            return "is not a number"
        try:
            return self._units.setdefault(name, TemperatureUnit()).degrees(raw)
        except ValueError as error:
            return str(error)

    def _temperature_files(self, battery: BatteryState) -> dict[str, tuple[SensorKind, Path]]:
        """Return kind and file of every temperature sensor by name; names are unique and constant."""
        found: dict[str, tuple[SensorKind, Path]] = {}

        def add(
            names: str,
            place: str,
            path: Path,
        ) -> None:
            kind = kind_of(names)
            if kind is not None:
                found[f"{names or 'unnamed'} ({place})"] = kind, path

        for folder in matching_paths(self._root / "sys/class/thermal", "thermal_zone*"):
            add(_label(folder / "type"), folder.name, folder / "temp")
        hwmon = self._root / "sys/class/hwmon"
        for pattern in ("hwmon*/temp*_input", "hwmon*/device/temp*_input"):
            for path in matching_paths(hwmon, pattern):
                chip = _label(path.parent / "name")
                label = _label(path.with_name(path.name.replace("_input", "_label")))
                place = path.relative_to(hwmon).as_posix().removesuffix("_input")
                add(f"{chip} {label}".strip(), place, path)
        for path in battery.temperature_files:
            found[f"battery ({path.parent.name})"] = SensorKind.OTHER, path
        return found


def _label(path: Path) -> str:
    """Return the device's name of a sensor as one line of text; "" if there is none."""
    try:
        return "".join(letter for letter in read_text(path) if letter.isprintable())[:60]
    except (OSError, ValueError):
        return ""
