"""Processes that get a set part of the machine's processors and no more: slow devices, made with the kernel's cgroups.

A quota is counted over periods of 10 ms, so that a process runs a little in each of them and is slow, not halting. It
counts for all threads and children together: cores = 0.5 is half a core however many threads share it. Within its quota
a group goes before what else the machine does, as far as that may be: a device's speed is its own business.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PERIOD_S = 0.01
_LEAST_S = 0.001
"""What the kernel accepts as a quota of a period, at least: a tenth of a core."""

_WEIGHT = 10
"""Times that of a group as the kernel makes it."""

_GONE_S = 10.0
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """A group of processes that share a quota."""

    folder: Path

    def set(self, cores: float) -> None:
        """Change the quota; it holds from the next period on."""
        quota_us = round(1e6 * max(_LEAST_S, cores * PERIOD_S))
        if _is_v1(self.folder):
            # The period first: a quota is only accepted for the period that is there.
            (self.folder / "cpu.cfs_period_us").write_text(str(round(1e6 * PERIOD_S)))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{quota_us} {round(1e6 * PERIOD_S)}")

    def add(self, pid: int) -> None:
        """Take in a process with all its descendants; what they start later is in the group, too."""
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                with suppress(ProcessLookupError):
                    (self.folder / "cgroup.procs").write_text(str(process.pid))

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that starts `command` inside the group: before it can start anything outside."""
        return [
            "sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(self.folder / "cgroup.procs"),
            *map(str, command),
        ]

    def num_throttled(self) -> int:
        """Return in how many periods the quota was used up."""
        lines = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(lines["nr_throttled"])


@contextmanager
def quota(*pids: int, cores: float) -> Iterator[Quota]:
    """Hold processes to `cores` processors, one in ten at least, all of them together, while the block lasts.

    Raises `RuntimeError` with the reason where no quota can be set; ask `missing` before.
    """
    parent = _parent()
    if isinstance(parent, str):
        raise RuntimeError(parent)
    folder = parent / f"socflower-quota-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    held = Quota(folder=folder)
    try:
        held.set(cores)
        weight, usual = ("cpu.shares", 1024) if _is_v1(folder) else ("cpu.weight", 100)
        (folder / weight).write_text(str(_WEIGHT * usual))
        for pid in pids:
            held.add(pid)
        yield held
    finally:
        _remove(folder)


@contextmanager
def quotas(pids: Sequence[int], cores: Sequence[float]) -> Iterator[list[Quota]]:
    """Hold each process, with all that it starts, to a quota of its own while the block lasts.

    A SuperNode's ClientApps descend from it: those that it starts later are born into its group.
    """
    with ExitStack() as stack:
        yield [
            stack.enter_context(quota(pid, cores=each))
            for pid, each in zip(pids, cores, strict=True)
        ]


def missing() -> str | None:
    """Return why no quota can be set here, or None where one can."""
    parent = _parent()
    if isinstance(parent, str):
        return parent
    try:
        with quota(cores=0.5):
            return None
    except OSError as error:
        return f"no CPU quota can be set in {parent} ({error.strerror}); run as root"


def _parent() -> Path | str:
    """Return where groups can be made, or why nowhere."""
    reason = "no CPU quota can be set: no cgroup file system with the cpu controller is mounted"
    mounts = Path("/proc/mounts")
    for line in mounts.read_text("utf-8", "replace").splitlines() if mounts.exists() else ():
        _, mount, kind, options, *_ = line.split()
        folder = Path(mount)
        if kind == "cgroup" and "cpu" in options.split(","):
            if os.access(folder, os.W_OK):
                return folder
            reason = f"no CPU quota can be set: {folder} is read-only for this user"
        elif kind == "cgroup2":
            for parent in (folder, (folder / _own_group("").lstrip("/")).parent):
                control = parent / "cgroup.subtree_control"
                if (
                    folder in (parent, *parent.parents)
                    and control.exists()
                    and "cpu" in control.read_text().split()
                ):
                    if os.access(parent, os.W_OK):
                        return parent
                    reason = f"no CPU quota can be set: {parent} is read-only for this user"
    return reason


def _own_group(controller: str) -> str:
    """Return this process's group of a controller, or in cgroup v2 of none."""
    for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _is_v1(folder: Path) -> bool:
    return (folder / "cpu.cfs_quota_us").exists()


def _remove(folder: Path) -> None:
    """Give the processes that are left back to this one's group, and remove theirs."""
    v1, root = _is_v1(folder), folder.parent
    if not v1:
        while root.parent.joinpath("cgroup.controllers").exists():
            root = root.parent
    home = root / _own_group("cpu" if v1 else "").lstrip("/") / "cgroup.procs"
    end_s = time.monotonic() + _GONE_S
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                home.write_text(pid)
        try:
            return folder.rmdir()
        except OSError:  # a process that has just ended may still be counted
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
