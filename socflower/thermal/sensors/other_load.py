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
    """The processor load between two reads; None before the second one, and if the system does not report it."""

    # Share of all processors that others use, 0 to 1, and the share that is in use in total.
    user: float | None = None
    total: float | None = None
    num_processors: int = 1

    @property
    def busy(self) -> bool:
        """Whether at least half a processor was busy."""
        return self.total is not None and self.total * self.num_processors >= 0.5


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    # Processor time of the process itself, and of ended children that it waited for.
    own: float
    children: float
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
        self._root = root
        self._notes = notes
        self._clock = clock
        self._pid = os.getpid() if pid is None else pid
        self._also_ours = frozenset(also_ours)
        self._before: _Counts | None = None
        self._before_s = 0.0
        self._load = Load()

    def read(self) -> Load:
        """Return the load since the latest read at least half a second ago; never raises."""
        now_s = self._clock()
        before = self._before
        if before is not None and now_s - self._before_s < _SHORTEST_S:
            return self._load
        counts = self._before = self._counts(now_s)
        self._before_s = now_s
        if counts is None:
            self._load = Load()
            return self._load
        if before is None:
            self._load = Load(num_processors=counts.num_processors)
            return self._load
        total = counts.total - before.total
        busy = counts.busy - before.busy
        if total > 0:
            others = _part(busy, total) * total - _ours_since(before.ours, counts.ours)
            self._load = Load(
                user=_part(others, total),
                total=_part(busy, total),
                num_processors=counts.num_processors,
            )
        return self._load

    def _counts(self, now_s: float) -> _Counts | None:
        try:
            text = (self._root / "proc/stat").read_text("ascii")
            busy, total, num_processors = _processor_times(text)
        except FileNotFoundError:
            return self._by_psutil() if self._root == Path("/") else None
        # Android denies apps access.
        except (OSError, ValueError) as error:
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
                values = process.info
                commands[process.pid] = values["cmdline"] or []
                spent = values["cpu_times"]
                if spent is None:
                    continue
                children_s = getattr(spent, "children_user", 0.0)
                children_s += getattr(spent, "children_system", 0.0)
                own_s = spent.user + spent.system
                parent = values["ppid"] or 0
                started = values["create_time"] or 0.0
                processes[process.pid] = _Process(parent, own_s, children_s, started)
        except (psutil.Error, OSError, RuntimeError):
            return None
        total = float(sum(times))
        ours = self._ours(processes, lambda pid: commands.get(pid, []))
        return _Counts(total - times.idle, total, psutil.cpu_count() or 1, ours)

    def _command(self, pid: int) -> list[str]:
        try:
            content = (self._root / f"proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return []
        words = content.decode("utf-8", "replace").split("\0")
        return [word for word in words if word]

    def _ours(
        self, processes: Mapping[int, _Process], command: Callable[[int], list[str]]
    ) -> dict[int, _Process]:
        """Return our own processes: all descendants of our topmost processes."""
        tops = {self._pid}
        pid = self._pid
        seen = {0}
        # An inconsistent snapshot may contain a cycle.
        while pid in processes and pid not in seen:
            seen.add(pid)
            if any(map(_is_flower, _names(command(pid)))):
                tops.add(pid)
            pid = processes[pid].parent
        if self._also_ours:
            tops |= {pid for pid in processes if self._also_ours & _names(command(pid))}
        children: dict[int, list[int]] = {}
        for pid, process in processes.items():
            children.setdefault(process.parent, []).append(pid)
        ours: dict[int, _Process] = {}
        pending = list(tops)
        while pending:
            pid = pending.pop()
            if pid in processes and pid not in ours:
                ours[pid] = processes[pid]
                pending.extend(children.get(pid, ()))
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
    whole = sum(process.time for process in now.values())
    whole -= sum(process.time for process in before.values())
    themselves = 0.0
    for pid, process in now.items():
        earlier = before.get(pid)
        if earlier is not None and earlier.started == process.started:
            themselves += process.own - earlier.own
    return max(whole, themselves, 0.0)


def _processor_times(text: str) -> tuple[float, float, int]:
    """Return busy and total time of /proc/stat and the number of processors; `ValueError` for anything else."""
    lines = [line for line in text.splitlines() if line.startswith("cpu")]
    summary = next((line for line in lines if line.startswith("cpu ")), "")
    # user nice system idle iowait irq softirq steal; guests are in user already.
    times = [int(word) for word in summary.split()[1:9]]
    if len(times) < 4 or min(times) < 0 or max(times) >= 1 << 64:
        raise ValueError("no line of all processors")
    idle = sum(times[3:5])
    total = sum(times)
    num_processors = max(1, len(lines) - 1)
    return float(total - idle), float(total), num_processors


def _processes(proc: Path) -> Iterable[tuple[int, _Process]]:
    try:
        folders = [name for name in os.listdir(proc) if name.isdecimal() and len(name) < 10]
    except OSError:
        return
    for name in folders:
        try:
            # The name in parentheses may contain parentheses.
            text = (proc / name / "stat").read_bytes().rsplit(b")", 1)[1]
            # Of the fields after the name: 1 parent, 11 to 14 user and system time, own and of children, 19 start.
            fields = [float(int(word)) for word in text.split()[1:20]]
            parent = int(fields[0])
            started = fields[18]
            own = fields[10] + fields[11]
            children = fields[12] + fields[13]
        # It ended meanwhile, or is not readable.
        except (OSError, ValueError, IndexError, OverflowError):
            continue
        yield int(name), _Process(parent, own, children, started)
