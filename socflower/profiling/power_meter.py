"""Power that this machine exposes under /sys: RAPL counters, rails of INA sensors, a discharging battery.

None of them measures the whole machine at the wall; `source` names the measured part for the profile.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from socflower.thermal.sensors.sysfs import (
    DeviceFolder,
    OpenFolder,
    matching_paths,
    read_integer,
    read_text,
)

_GRAPHICS = ("amdgpu", "i915", "nouveau", "nvidia", "radeon", "xe")
_SAMPLE_S = 0.05


@runtime_checkable
class EnergyMeter(Protocol):
    """A counter of joules, which is exact over any period."""

    source: str

    def energy_j(self) -> float:
        """Return joules since a fixed time; never decreasing. Raises `OSError` or `ValueError`."""
        ...


@runtime_checkable
class WattMeter(Protocol):
    """A sensor of the current power in watts."""

    source: str

    def power_w(self) -> float:
        """Return the current watts. Raises `OSError` or `ValueError` if they cannot be read."""
        ...


PowerMeter = EnergyMeter | WattMeter


def find_power_meter(root: Path = Path("/")) -> PowerMeter | None:
    """Return the first readable meter below `root`, or None, in the order RAPL, INA rails, battery."""
    for candidate in (_find_rapl, _find_rail, _find_battery):
        meter = candidate(root)
        if meter is not None:
            return meter
    return None


def mean_watts(meter: PowerMeter, work: Callable[[], object]) -> float | None:
    """Return the mean watts while `work` runs; None if the meter failed or showed 0, as in many VMs."""
    measure: Any = _from_counter if isinstance(meter, EnergyMeter) else _from_samples
    try:
        watts: float = measure(meter, work)
    except (OSError, ValueError):
        return None
    return watts if watts > 0 else None


class RaplMeter:
    """Intel's and AMD's running average power limit: a counter per package, or one of the whole platform (psys)."""

    def __init__(self, zones: tuple[Path, ...], source: str) -> None:
        self.source = source
        self._zones = tuple(map(DeviceFolder, zones))
        self._ranges_uj = [_whole_number(zone / "max_energy_range_uj") for zone in zones]
        self._last_uj = [_whole_number(zone / "energy_uj") for zone in zones]
        self._total_uj = 0

    def energy_j(self) -> float:
        """Return joules since this meter was created; call it before a counter wraps twice, in minutes to hours."""
        for index, zone in enumerate(self._zones):
            with zone.open() as opened:
                now_uj = _whole_number_in(opened, "energy_uj")
            step_uj = now_uj - self._last_uj[index]
            # The counter wraps from max_energy_range_uj to 0.
            self._total_uj += step_uj if step_uj >= 0 else step_uj + self._ranges_uj[index] + 1
            self._last_uj[index] = now_uj
        return self._total_uj / 1e6


class ProductMeter:
    """Watts from a device's file in microwatts, or from the product of two files, volts and amperes."""

    def __init__(
        self,
        source: str,
        folder: Path,
        factors: tuple[tuple[str, float], ...],
        *,
        is_battery: bool = False,
    ) -> None:
        self.source = source
        self._device = DeviceFolder(folder)
        self._factors = factors
        self._is_battery = is_battery

    def power_w(self) -> float:
        """Return the product of all files, each in its unit; `ValueError` if a battery does not discharge."""
        watts = 1.0
        with self._device.open() as opened:
            if self._is_battery and opened.read_text("status").lower() != "discharging":
                raise ValueError(f"{opened.path}: the battery does not discharge")
            for name, unit in self._factors:
                watts *= _whole_number_in(opened, name) * unit
        return watts


def _find_rapl(root: Path) -> RaplMeter | None:
    zones: dict[Path, str] = {}
    for zone in matching_paths(root / "sys/class/powercap", "intel-rapl:*"):
        # More colons are parts of a package, such as its cores or DRAM.
        if zone.name.count(":") != 1:
            continue
        try:
            _whole_number(zone / "energy_uj")
            if _whole_number(zone / "max_energy_range_uj") > 0:
                zones[zone] = read_text(zone / "name")
        except (OSError, ValueError):
            continue
    # psys includes the packages, so the two must not be added.
    chosen = [zone for zone, name in zones.items() if name == "psys"][:1] or list(zones)
    if not chosen:
        return None
    try:
        return RaplMeter(tuple(chosen), f"RAPL, {' and '.join(zones[zone] for zone in chosen)}")
    except (OSError, ValueError):
        return None


def _find_rail(root: Path) -> ProductMeter | None:
    """Return the rail labelled as the total input (Jetson: VDD_IN, POM_5V_IN), else the first rail."""
    for folder in matching_paths(root / "sys/class/hwmon", "hwmon*"):
        try:
            chip = read_text(folder / "name")
        except (OSError, ValueError):
            chip = folder.name
        # A graphics card is not the machine.
        rails = [] if chip in _GRAPHICS else _rails_of(folder, chip)
        if rails:
            inputs = [meter for label, meter in rails if "_in" in label.lower()]
            return inputs[0] if inputs else rails[0][1]
    return None


def _rails_of(folder: Path, chip: str) -> list[tuple[str, ProductMeter]]:
    """Return the labels and meters of a chip's readable channels."""
    found = []
    for channel in range(1, 17):
        label = _label(folder, channel)
        source = f"hwmon {chip}, {label or f'channel {channel}'}"
        power = ((f"power{channel}_input", 1e-6),)
        product = ((f"in{channel}_input", 1e-3), (f"curr{channel}_input", 1e-3))
        meter = _first_readable(
            ProductMeter(source, folder, power), ProductMeter(source, folder, product)
        )
        if meter is not None:
            found.append((label, meter))
    return found


def _find_battery(root: Path) -> ProductMeter | None:
    for folder in matching_paths(root / "sys/class/power_supply", "*"):
        try:
            if read_text(folder / "type") != "Battery":
                continue
        except (OSError, ValueError):
            continue
        source = f"battery {folder.name}"
        product = (("current_now", 1e-6), ("voltage_now", 1e-6))
        meter = _first_readable(
            ProductMeter(source, folder, (("power_now", 1e-6),), is_battery=True),
            ProductMeter(source, folder, product, is_battery=True),
        )
        if meter is not None:
            return meter
    return None


def _first_readable(*meters: ProductMeter) -> ProductMeter | None:
    for meter in meters:
        with suppress(OSError, ValueError):
            if meter.power_w() > 0:
                return meter
    return None


def _label(folder: Path, channel: int) -> str:
    for name in (f"power{channel}_label", f"in{channel}_label"):
        with suppress(OSError, ValueError):
            return read_text(folder / name)
    return ""


def _whole_number(path: Path) -> int:
    return _not_negative(path, read_integer(path))


def _whole_number_in(folder: OpenFolder, name: str) -> int:
    return _not_negative(folder.path / name, folder.read_integer(name))


def _not_negative(path: Path, value: int) -> int:
    if value < 0:
        raise ValueError(f"{path}: {value} is negative")
    return value


def _from_counter(meter: EnergyMeter, work: Callable[[], object]) -> float:
    before_j, start_s = meter.energy_j(), time.perf_counter()
    work()
    return (meter.energy_j() - before_j) / max(time.perf_counter() - start_s, 1e-9)


def _from_samples(meter: WattMeter, work: Callable[[], object]) -> float:
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            try:
                samples.append(meter.power_w())
            except (OSError, ValueError):
                return

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        work()
    finally:
        done.set()
        sampler.join()
    # At least one sample; it raises if the meter has failed.
    samples.append(meter.power_w())
    return sum(samples) / len(samples)
