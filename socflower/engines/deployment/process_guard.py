"""Ends all processes with a mark, also if the process that started them was killed.

    python -m socflower.engines.deployment.process_guard MARK [FOLDER]

waits for the end of its standard input, which comes when its parent has ended for any reason. It then ends the marked
processes and removes their folder, unless its parent wrote something first: then the parent has done both. It imports
little, since it runs as long as the run.
"""

import os
import shutil
import sys
from collections.abc import Mapping

import psutil

MARK = "SOCFLOWER_RUN"
PART = "SOCFLOWER_PART"
"""Environment variables: the run that a process belongs to, and the part of it, such as its SuperLink."""

_GRACE_S = 5.0
_SCANS = 5


def marked(environment: Mapping[str, str], mark: str, part: str = "") -> dict[str, str]:
    """Return an environment with the mark, by which its processes and their descendants can be ended."""
    return {**environment, MARK: mark, PART: part}


def end_marked(mark: str, part: str | None = None) -> None:
    """End all processes with the mark, or those of one part of the run: by SIGTERM first, then by SIGKILL."""
    for scan in range(_SCANS):
        # The next scan finds a process that starts during this one.
        found = processes_of(mark, part)
        if not found:
            return
        for process in found:
            _signal(process, kill=scan > 0)
        _, alive = psutil.wait_procs(found, timeout=_GRACE_S)
        for process in alive:
            _signal(process, kill=True)


def processes_of(mark: str, part: str | None = None) -> list[psutil.Process]:
    """Return the running processes of a run, or of one part of it, without this process."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
        except (psutil.Error, OSError):  # ended, or of another user
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
    except psutil.Error:  # already ended
        pass


if __name__ == "__main__":
    if not sys.stdin.buffer.read():
        end_marked(sys.argv[1])
        for abandoned in sys.argv[2:]:
            shutil.rmtree(abandoned, ignore_errors=True)
