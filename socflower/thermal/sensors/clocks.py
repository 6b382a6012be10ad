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
PI_UNDER_VOLTAGE, PI_CAPPED, PI_THROTTLED, PI_SOFT_LIMIT = 1 << 0, 1 << 1, 1 << 2, 1 << 3

# Cooling devices that cool by lowering clocks; a fan's state is unrelated to clocks.
_SLOWING = (
    "cpufreq",
    "thermal-cpufreq",
    "devfreq",
    "thermal-devfreq",
    "processor",
    "intel_powerclamp",
)
_SLOWING_TEGRA = (
    "-balanced"  # CPU-balanced, GPU-balanced: a Jetson's governors of all clocks together
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockState:
    """The clocks at one reading; None for what the device does not report."""

    factor: (
        float | None
    )  # present over highest clock, 0 to 1, mean over processors weighted by capacity
    throttled: bool | None
    num_policies: int
    throttle_sources: tuple[str, ...]  # sources asked for throttling


@dataclass(frozen=True, slots=True)
class _Policy:
    present_hz: int  # all three in kHz as in the files: only ratios are used
    highest_hz: int
    cap_hz: int
    cpus: tuple[int, ...]


class Clocks:
    """Clocks and throttle states below `root`. An idle device has low clocks too: its governor saves power."""

    def __init__(self, root: Path, notes: NoteLog) -> None:
        self._root = root
        self._notes = notes
        # The path's number may go to another device, whose counter has nothing to do with the last one's.
        self._counters: dict[tuple[Path, DeviceIdentity], int] = {}
        self._highest_caps: dict[str, int] = {}

    def read(self, at_s: float) -> ClockState:
        """Return the present state; what cannot be read is left out, with a note."""
        policies = self._policies(at_s)
        answers = [
            answer
            for answer in (self._pi(at_s), self._cooling_devices(at_s), *self._event_counters(at_s))
            if answer is not None
        ]
        if not answers:
            # A cap set by the user looks the same, so only a drop since the first reading counts.
            answers = [("cap of cpufreq", self._cap_dropped(policies))] if policies else []
        said = [throttled for _, throttled in answers if throttled is not None]
        return ClockState(
            factor=self._factor(policies),
            throttled=any(said) if said else None,
            num_policies=len(policies),
            throttle_sources=tuple(name for name, _ in answers),
        )

    # ------------------------------------------------------------------------------------------------ clocks

    def _policies(self, at_s: float) -> dict[str, _Policy]:
        policies: dict[str, _Policy] = {}
        for folder in matching_paths(self._root / _CPUFREQ, "policy*"):
            try:
                present, highest = (
                    read_integer(folder / name) for name in ("scaling_cur_freq", "cpuinfo_max_freq")
                )
                if present <= 0 or highest <= 0:
                    raise ValueError(folder)
            except (OSError, ValueError) as error:
                # A policy whose processors are all offline has no clock, which is not an error.
                if self._cpus(folder) != ():
                    self._notes.add(f"clock {folder.name}: {error_text(error)}; left out", at_s)
                continue
            policies[folder.name] = _Policy(
                present, highest, self._cap(folder, highest), self._cpus(folder) or ()
            )
        return policies

    def _cap(self, folder: Path, highest: int) -> int:
        try:
            cap = read_integer(folder / "scaling_max_freq")
        except (OSError, ValueError):
            return highest
        return cap if cap > 0 else highest

    def _cpus(self, folder: Path) -> tuple[int, ...] | None:
        """Return the online processors of a policy; None if unknown."""
        try:
            numbers = tuple(int(word) for word in read_text(folder / "affected_cpus").split())
        except (OSError, ValueError):
            return None
        return numbers if all(0 <= number < _MOST_CPUS for number in numbers) else None

    def _factor(self, policies: dict[str, _Policy]) -> float | None:
        weights = {name: self._capacity(policy.cpus) for name, policy in policies.items()}
        if None in weights.values():  # without capacities little and big cores count alike
            weights = {name: max(1, len(policy.cpus)) for name, policy in policies.items()}
        total = sum(weight or 0 for weight in weights.values())
        if not total:
            return None
        mean = (
            sum(
                (weights[name] or 0) * min(1.0, policy.present_hz / policy.highest_hz)
                for name, policy in policies.items()
            )
            / total
        )
        return min(1.0, mean)

    def _capacity(self, cpus: tuple[int, ...]) -> int | None:
        """Return the sum of the processors' capacities (the largest of a machine: 1024), or None."""
        try:
            capacities = [
                read_integer(self._root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity")
                for cpu in cpus
            ]
        except (OSError, ValueError):
            return None
        return sum(capacities) if capacities and min(capacities) > 0 else None

    def _cap_dropped(self, policies: dict[str, _Policy]) -> bool:
        sank = False
        for name, policy in policies.items():
            highest = max(policy.cap_hz, self._highest_caps.get(name, 0))
            self._highest_caps[name] = highest
            sank = sank or policy.cap_hz < highest
        return sank

    # --------------------------------------------------------------------------------------- throttle states

    def _pi(self, at_s: float) -> tuple[str, bool | None] | None:
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
                if bits & PI_UNDER_VOLTAGE:
                    self._notes.add(
                        "the supply voltage is too low: the firmware may lower the clocks", at_s
                    )
                return "Raspberry Pi firmware", bool(
                    bits & (PI_CAPPED | PI_THROTTLED | PI_SOFT_LIMIT)
                )
        return None

    def _cooling_devices(self, at_s: float) -> tuple[str, bool | None] | None:
        states: list[int] = []
        for folder in matching_paths(self._root / "sys/class/thermal", "cooling_device*"):
            try:
                name = read_text(folder / "type").lower()
                if name.startswith(_SLOWING) or name.endswith(_SLOWING_TEGRA):
                    states.append(read_integer(folder / "cur_state"))
            except (OSError, ValueError) as error:
                self._notes.add(f"{folder.name}: {error_text(error)}; left out", at_s)
        # intel_powerclamp reports -1 while inactive.
        return ("cooling devices", any(state > 0 for state in states)) if states else None

    def _event_counters(self, at_s: float) -> list[tuple[str, bool | None]]:
        """Read event counters: clocks were throttled if one rose since the previous reading."""
        return [
            answer
            for answer in (
                self._counted(
                    "over-current events", "sys/class/hwmon", "hwmon*/oc*_event_cnt", at_s
                ),
                self._counted(
                    "processor throttle events",
                    "sys/devices/system/cpu",
                    "cpu*/thermal_throttle/*_throttle_count",
                    at_s,
                ),
            )
            if answer is not None
        ]

    def _counted(
        self, name: str, folder: str, pattern: str, at_s: float
    ) -> tuple[str, bool | None] | None:
        rose: list[bool | None] = []
        for path in matching_paths(self._root / folder, pattern):
            try:
                with OpenFolder(path.parent) as opened:
                    counter = path, opened.identity()
                    count = opened.read_integer(path.name)
            except (OSError, ValueError) as error:
                self._notes.add(f"{name}, {path.name}: {error_text(error)}; left out", at_s)
                continue
            before = self._counters.get(counter)
            rose.append(None if before is None else count > before)
            self._counters[counter] = count
        known = [one for one in rose if one is not None]
        if not rose:
            return None
        return name, any(known) if known else None
