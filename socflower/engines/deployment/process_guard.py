"""Ending all processes that carry a mark, also when the one that started them was killed.

    python -m socflower.engines.deployment.process_guard MARK [FOLDER]

waits until its standard input ends, which it does when its parent is gone in whatever way, and then ends them and
removes the folder in which they worked; unless its parent wrote something first, since it has done so itself. It
imports little, since it is there as long as a run is.
"""

import os
import shutil
import sys
from collections.abc import Mapping

import psutil

MARK = "SOCFLOWER_RUN"
PART = "SOCFLOWER_PART"
"""Environment variables: the run a process belongs to, and which part of it, such as its SuperLink."""

_GRACE_S = 5.0
_SCANS = 5


def marked(environment: Mapping[str, str], mark: str, part: str = "") -> dict[str, str]:
    """Return an environment whose processes, and all that they start, can be ended by the mark."""
    return {**environment, MARK: mark, PART: part}


def end_marked(mark: str, part: str | None = None) -> None:
    """End all processes with the mark, or those of one part of the run: at first by a signal they can obey."""
    for scan in range(_SCANS):
        # One that is being started while we look is found the next time.
        found = processes_of(mark, part)
        if not found:
            return
        for process in found:
            _signal(process, kill=scan > 0)
        _, alive = psutil.wait_procs(found, timeout=_GRACE_S)
        for process in alive:
            _signal(process, kill=True)


def processes_of(mark: str, part: str | None = None) -> list[psutil.Process]:
    """Return the running processes of a run, or of one part of it, this one not among them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue
        if environment.get(MARK) == mark and part in (None, environment.get(PART)):
            found.append(process)
    return found


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.Error:  # it was faster
        pass


if __name__ == "__main__":
    if not sys.stdin.buffer.read():
        end_marked(sys.argv[1])
        for abandoned in sys.argv[2:]:
            shutil.rmtree(abandoned, ignore_errors=True)
