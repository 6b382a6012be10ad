"""The processors' clocks, and the sources that report throttling by heat or power."""

from dataclasses import dataclass
from pathlib import Path

from socflower.thermal.sensors.sysfs import (
    DeviceIdentity,
    NoteLog,
    OpenFolder,
    error_text,
    matching_paths,
    read_integer,
    read_text,
)

_CPUFREQ = "sys/devices/system/cpu/cpufreq"
_MOST_CPUS = 1 << 16

# Raspberry Pi: bits of `vcgencmd get_throttled`. Bits 16 to 19 refer to the time since start-up, not to the present.
_PI_UNDER_VOLTAGE = 1 << 0
# Capped, throttled, or at the soft limit.
_PI_SLOW = 1 << 1 | 1 << 2 | 1 << 3

# Cooling devices that cool by lowering clocks; a fan's state is unrelated to clocks.
_SLOWING = (
    "cpufreq",
    "thermal-cpufreq",
    "devfreq",
    "thermal-devfreq",
    "processor",
    "intel_powerclamp",
)
# CPU-balanced, GPU-balanced: a Jetson's governors of all clocks together.
_SLOWING_TEGRA = "-balanced"

# Event counters by name, folder and pattern: clocks were throttled if one rose since the previous reading.
_OVER_CURRENT = ("over-current events", "sys/class/hwmon", "hwmon*/oc*_event_cnt")
_CPU_THROTTLING = (
    "processor throttle events",
    "sys/devices/system/cpu",
    "cpu*/thermal_throttle/*_throttle_count",
)

_Answer = tuple[str, bool | None]
"""A source that was asked for throttling, and its answer; None if it does not know yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockState:
    """The clocks at one reading; None for what the device does not report."""

    # Present over highest clock, 0 to 1: the mean over processors, weighted by capacity.
    factor: float | None
    throttled: bool | None
    num_policies: int
    # Sources that were asked for throttling.
    throttle_sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Policy:
    # All in kHz as in the files: only ratios are used.
    present_khz: int
    highest_khz: int
    cap_khz: int
    cpus: tuple[int, ...]


class Clocks:
    """Clocks and throttle states below `root`. An idle device has low clocks, too, since its governor saves power."""

    def __init__(self, root: Path, notes: NoteLog) -> None:
        self._root = root
        self._notes = notes
        # By identity too: another device may get the path's number, with a counter of its own.
        self._counters: dict[tuple[Path, DeviceIdentity], int] = {}
        self._highest_caps: dict[str, int] = {}

    def read(self, at_s: float) -> ClockState:
        """Return the present state; what cannot be read is left out, with a note."""
        policies = self._policies(at_s)
        asked = (
            self._pi(at_s),
            self._cooling_devices(at_s),
            self._counted(*_OVER_CURRENT, at_s),
            self._counted(*_CPU_THROTTLING, at_s),
        )
        answers = [answer for answer in asked if answer is not None]
        if policies and not answers:
            # A cap set by the user looks the same, so only a drop since the first reading counts.
            answers = [("cap of cpufreq", self._cap_dropped(policies))]
        known = [throttled for _, throttled in answers if throttled is not None]
        return ClockState(
            factor=self._factor(policies),
            throttled=any(known) if known else None,
            num_policies=len(policies),
            throttle_sources=tuple(name for name, _ in answers),
        )

    # ------------------------------------------------------------------------------------------------ clocks

    def _policies(self, at_s: float) -> dict[str, _Policy]:
        policies: dict[str, _Policy] = {}
        for folder in matching_paths(self._root / _CPUFREQ, "policy*"):
            cpus = self._cpus(folder)
            try:
                present = _positive(folder / "scaling_cur_freq")
                highest = _positive(folder / "cpuinfo_max_freq")
            except (OSError, ValueError) as error:
                # A policy whose processors are all offline has no clock, which is not an error.
                if cpus != ():
                    self._notes.add(f"clock {folder.name}: {error_text(error)}; left out", at_s)
                continue
            try:
                cap = _positive(folder / "scaling_max_freq")
            except (OSError, ValueError):
                cap = highest
            policies[folder.name] = _Policy(present, highest, cap, cpus or ())
        return policies

    def _cpus(self, folder: Path) -> tuple[int, ...] | None:
        """Return the online processors of a policy; None if unknown."""
        try:
            words = read_text(folder / "affected_cpus").split()
            numbers = tuple(map(int, words))
        except (OSError, ValueError):
            return None
        return numbers if all(0 <= number < _MOST_CPUS for number in numbers) else None

    def _factor(self, policies: dict[str, _Policy]) -> float | None:
        weights: list[int] = []
        for policy in policies.values():
            capacity = self._capacity(policy.cpus)
            if capacity is None:
                # Without the capacities of all, little and big cores count equally.
                weights = [max(1, len(policy.cpus)) for policy in policies.values()]
                break
            weights.append(capacity)
        if not weights:
            return None
        done = 0.0
        for weight, policy in zip(weights, policies.values(), strict=True):
            done += weight * min(1.0, policy.present_khz / policy.highest_khz)
        return min(1.0, done / sum(weights))

    def _capacity(self, cpus: tuple[int, ...]) -> int | None:
        """Return the sum of the processors' capacities (the largest of a machine: 1024), or None."""
        total = 0
        try:
            for cpu in cpus:
                total += _positive(self._root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity")
        except (OSError, ValueError):
            return None
        return total or None

    def _cap_dropped(self, policies: dict[str, _Policy]) -> bool:
        has_dropped = False
        for name, policy in policies.items():
            highest = max(policy.cap_khz, self._highest_caps.get(name, 0))
            self._highest_caps[name] = highest
            has_dropped = has_dropped or policy.cap_khz < highest
        return has_dropped

    # --------------------------------------------------------------------------------------- throttle states

    def _pi(self, at_s: float) -> _Answer | None:
        """Read a Raspberry Pi's firmware state: hexadecimal, with or without 0x."""
        for pattern in ("soc*/*firmware/get_throttled", "*firmware/get_throttled"):
            for path in matching_paths(self._root / "sys/devices/platform", pattern):
                try:
                    bits = int(read_text(path), 16)
                    if not 0 <= bits < 1 << 32:
                        raise ValueError(path)
                except (OSError, ValueError) as error:
                    self._notes.add(
                        f"Raspberry Pi's get_throttled: {error_text(error)}; left out", at_s
                    )
                    continue
                if bits & _PI_UNDER_VOLTAGE:
                    self._notes.add(
                        "the supply voltage is too low: the firmware may lower the clocks", at_s
                    )
                return "Raspberry Pi firmware", bits & _PI_SLOW != 0
        return None

    def _cooling_devices(self, at_s: float) -> _Answer | None:
        states: list[int] = []
        for folder in matching_paths(self._root / "sys/class/thermal", "cooling_device*"):
            try:
                name = read_text(folder / "type").lower()
                if name.startswith(_SLOWING) or name.endswith(_SLOWING_TEGRA):
                    states.append(read_integer(folder / "cur_state"))
            except (OSError, ValueError) as error:
                self._notes.add(f"{folder.name}: {error_text(error)}; left out", at_s)
        # More than 0: intel_powerclamp reports -1 while inactive.
        return ("cooling devices", any(state > 0 for state in states)) if states else None

    def _counted(
        self,
        name: str,
        folder: str,
        pattern: str,
        at_s: float,
    ) -> _Answer | None:
        is_found = False
        rose = list[bool]()
        for path in matching_paths(self._root / folder, pattern):
            try:
                with OpenFolder(path.parent) as opened:
                    counter = path, opened.identity()
                    count = opened.read_integer(path.name)
            except (OSError, ValueError) as error:
                self._notes.add(f"{name}, {path.name}: {error_text(error)}; left out", at_s)
                continue
            is_found = True
            if counter in self._counters:
                rose.append(count > self._counters[counter])
            self._counters[counter] = count
        if not is_found:
            return None
        return name, any(rose) if rose else None


def _positive(path: Path) -> int:
    """Return a file's integer above 0. Raises `OSError` and `ValueError`."""
    value = read_integer(path)
    if value <= 0:
        raise ValueError(f"{path}: {value}")
    return value
