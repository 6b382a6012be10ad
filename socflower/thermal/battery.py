"""Charge and warmth of the device's own batteries."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from socflower.thermal.sysfs import Complaints, matches, text_of, whole_number, why


@dataclass(frozen=True, kw_only=True, slots=True)
class BatteryState:
    """All batteries of a device as one; None for what they do not say."""

    fraction: float | None = None  # charge, 0 to 1
    on_battery: bool | None = None
    names: tuple[str, ...] = ()
    temperature_files: tuple[Path, ...] = ()  # in tenths of a degree by the kernel's rule


def read_battery(root: Path, complaints: Complaints, at_s: float) -> BatteryState:
    """Return the state of the batteries below `root`; never raises.

    Several batteries count by the mean of their charges; one that discharges means that the device runs on it.
    Batteries of a mouse or a pen (`scope` says Device) are none of the machine's. Where the running system has no
    /sys, psutil is asked.
    """
    fractions: list[float] = []
    discharging: list[bool] = []
    names: list[str] = []
    warmth: list[Path] = []
    for folder in matches(root / "sys/class/power_supply", "*"):
        if _word(folder / "type") != "battery" or _word(folder / "scope") == "device":
            continue
        names.append(folder.name)
        warmth.extend(matches(folder, "temp"))
        try:
            percent = whole_number(folder / "capacity")
            if not 0 <= percent <= 100:
                raise ValueError(percent)
            fractions.append(percent / 100)
        except (OSError, ValueError) as error:
            complaints.say(f"battery {folder.name}, charge: {why(error)}; left out", at_s)
        status = _word(folder / "status")
        if status in ("charging", "discharging", "not charging", "full"):
            discharging.append(status == "discharging")
    if not names and root == Path("/"):
        return _by_psutil()
    return BatteryState(fraction=sum(fractions) / len(fractions) if fractions else None,
                        on_battery=any(discharging) if discharging else None,
                        names=tuple(names), temperature_files=tuple(warmth))


def _word(path: Path) -> str:
    try:
        return text_of(path).lower()
    except (OSError, ValueError):
        return ""


def _by_psutil() -> BatteryState:
    try:
        battery = psutil.sensors_battery()
    # It fails in ways of its own on odd systems, and nothing depends on it.
    except (AttributeError, NotImplementedError, OSError, RuntimeError, ValueError):
        battery = None
    if battery is None:
        return BatteryState()
    fraction = battery.percent / 100 if battery.percent is not None and 0 <= battery.percent <= 100 else None
    plugged = battery.power_plugged
    return BatteryState(fraction=fraction, on_battery=None if plugged is None else not plugged, names=("psutil",))
