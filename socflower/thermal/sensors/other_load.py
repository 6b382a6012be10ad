"""The processor load of others: games on a phone, a customer's service, everything except this training.

It is the load of all processors less that of our own processes. So it includes short-lived processes, processes
outside a container, and time taken by a hypervisor (steal).
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from socflower.thermal.sensors.sysfs import NoteLog, error_text

_SHORTEST_S = 0.5
"""The kernel counts in hundredths of a second: a shorter span is mostly rounding."""


@dataclass(frozen=True, slots=True)
class Load:
    """The processor load between two reads; None before the second one, and where the system does not report it."""

    user: float | None = None  # share of all processors that others use, 0 to 1
    total: float | None = None  # share that is in use in total
    num_processors: int = 1

    @property
    def busy(self) -> bool:
        """Whether at least half a processor was busy."""
        return self.total is not None and self.total * self.num_processors >= 0.5


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    own: float  # processor time of the process without children
    children: float  # of ended children that were waited for
    started: float

    @property
    def time(self) -> float:
        return self.own + self.children


@dataclass(frozen=True, slots=True)
class _Counts:
    """Processor times since start-up, all in one unit."""

    busy: float
    total: float
    num_processors: int
    ours: Mapping[int, _Process]


class OtherLoad:
    """Measures between two reads; the first one is the reference.

    Parameters
    ----------
    root : Path
        Where `proc` is.
    notes : NoteLog
        Receives errors.
    pid : int
        Our own process. Its ancestors up to the topmost one that runs a command of Flower or socflower (a SuperNode)
        are ours too, with all their descendants; without such an ancestor only the process and its descendants are.
    also_ours : iterable of str
        Commands whose processes always count as ours: with ("flower-supernode",) several SuperNodes on one machine do
        not count as each other's users.
    """

    def __init__(
        self,
        root: Path,
        notes: NoteLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
        also_ours: Iterable[str] = (),
    ) -> None:
        self._root, self._notes, self._clock = root, notes, clock
        self._pid = os.getpid() if pid is None else pid
        self._also_ours = frozenset(also_ours)
        self._before: _Counts | None = None
        self._before_s = 0.0
        self._load = Load()

    def read(self) -> Load:
        """Return the load since the latest read at least half a second ago; never raises."""
        now_s = self._clock()
        if self._before is not None and now_s - self._before_s < _SHORTEST_S:
            return self._load
        counts = self._counts(now_s)
        if counts is None:
            self._before, self._load = None, Load()
            return self._load
        before, self._before, self._before_s = self._before, counts, now_s
        if before is None:
            self._load = Load(num_processors=counts.num_processors)
            return self._load
        total = counts.total - before.total
        if total > 0:
            busy = _part(counts.busy - before.busy, total)
            self._load = Load(
                user=_part(busy * total - _ours_since(before.ours, counts.ours), total),
                total=busy,
                num_processors=counts.num_processors,
            )
        return self._load

    def _counts(self, now_s: float) -> _Counts | None:
        try:
            busy, total, num_processors = _processor_times(
                (self._root / "proc/stat").read_text("ascii")
            )
        except FileNotFoundError:
            return self._by_psutil() if self._root == Path("/") else None
        except (OSError, ValueError) as error:  # Android denies apps access
            self._notes.add(f"load of others, /proc/stat: {error_text(error)}; not known", now_s)
            return None
        processes = dict(_processes(self._root / "proc"))
        return _Counts(busy, total, num_processors, self._ours(processes, self._command))

    def _by_psutil(self) -> _Counts | None:
        processes: dict[int, _Process] = {}
        commands: dict[int, list[str]] = {}
        try:
            times = psutil.cpu_times()
            for process in psutil.process_iter(["ppid", "cpu_times", "create_time", "cmdline"]):
                spent = process.info["cpu_times"]
                if spent is not None:
                    processes[process.pid] = _Process(
                        process.info["ppid"] or 0,
                        spent.user + spent.system,
                        getattr(spent, "children_user", 0.0)
                        + getattr(spent, "children_system", 0.0),
                        process.info["create_time"] or 0.0,
                    )
                commands[process.pid] = process.info["cmdline"] or []
        except (psutil.Error, OSError, RuntimeError):
            return None
        total = float(sum(times))
        return _Counts(
            total - times.idle,
            total,
            psutil.cpu_count() or 1,
            self._ours(processes, lambda pid: commands.get(pid, [])),
        )

    def _command(self, pid: int) -> list[str]:
        try:
            text = (self._root / f"proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
        except (OSError, ValueError):
            return []
        return [word for word in text.split("\0") if word]

    def _ours(
        self, processes: Mapping[int, _Process], command: Callable[[int], list[str]]
    ) -> dict[int, _Process]:
        """Return our own processes: all descendants of our topmost processes."""
        tops = {self._pid}
        pid, seen = self._pid, {0}
        while pid in processes and pid not in seen:  # an inconsistent snapshot may contain a cycle
            seen.add(pid)
            if any(_is_flower(name) for name in _names(command(pid))):
                tops.add(pid)
            pid = processes[pid].parent
        if self._also_ours:
            tops.update(
                pid for pid in processes if self._also_ours.intersection(_names(command(pid)))
            )
        children: dict[int, list[int]] = {}
        for pid, process in processes.items():
            children.setdefault(process.parent, []).append(pid)
        ours: dict[int, _Process] = {}
        untold = list(tops)
        while untold:
            pid = untold.pop()
            if pid in processes and pid not in ours:
                ours[pid] = processes[pid]
                untold.extend(children.get(pid, ()))
        return ours


def _names(command: list[str]) -> set[str]:
    return {PurePosixPath(word).name for word in command}


def _is_flower(name: str) -> bool:
    return name in ("flwr", "socflower") or name.startswith(("flower-", "flwr-"))


def _part(value: float, total: float) -> float:
    return min(1.0, max(0.0, value / total))


def _ours_since(before: Mapping[int, _Process], now: Mapping[int, _Process]) -> float:
    """Return the processor time that our processes spent since the previous read.

    A child that ends and is waited for adds its time to its parent, so the sum over the tree only grows. The time of a
    child adopted by init leaves the sum; then at least the other processes' own time counts.
    """
    whole = sum(process.time for process in now.values()) - sum(
        process.time for process in before.values()
    )
    themselves = sum(
        process.own - before[pid].own
        for pid, process in now.items()
        if pid in before and before[pid].started == process.started
    )
    return max(whole, themselves, 0.0)


def _processor_times(text: str) -> tuple[float, float, int]:
    """Return busy and total time of /proc/stat and the number of processors; ValueError for anything else."""
    num_processors = sum(
        line.startswith("cpu") and not line.startswith("cpu ") for line in text.splitlines()
    )
    for line in text.splitlines():
        if line.startswith("cpu "):
            # user nice system idle iowait irq softirq steal; guests are in user already.
            times = [int(word) for word in line.split()[1:9]]
            if len(times) < 4 or min(times) < 0 or max(times) >= 1 << 64:
                break
            return float(sum(times) - sum(times[3:5])), float(sum(times)), max(1, num_processors)
    raise ValueError("no line of all processors")


def _processes(proc: Path) -> Iterable[tuple[int, _Process]]:
    try:
        folders = [name for name in os.listdir(proc) if name.isdecimal() and len(name) < 10]
    except OSError:
        return
    for name in folders:
        try:
            # The name in parentheses may hold anything, parentheses too.
            fields = (proc / name / "stat").read_bytes().rsplit(b")", 1)[1].split()
            own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
            yield (
                int(name),
                _Process(int(fields[1]), float(own), float(children), float(int(fields[19]))),
            )
        except (OSError, ValueError, IndexError, OverflowError):
            continue  # ended meanwhile, or not readable
