"""Finds own work that hangs, such as a data loader in a deadlock or a disk that does not answer.

Peers cannot tell such a process from a slow one: its threads answer their calls while the thread that trains stands
still. The process itself can, since it knows when it works and when it waits for others: work that takes much longer
than any before it, and uses no processor time meanwhile, hangs. A slow device uses its processor, so it is left alone.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import psutil

OnHang = Callable[[str], None]
"""Gets what hangs, with the stack of its thread; called once, in a thread of the watch."""

_TICK_S: Final = 1.0
_IDLE_SHARE: Final = 0.01
"""Work that uses less of one core than this stands still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """Work hangs after `factor` times the longest one so far, and at least `least_s`; the first one after `first_s`.

    It must have used no processor time for `idle_s`.
    """

    first_s: float = 600.0
    least_s: float = 60.0
    factor: float = 20.0
    idle_s: float = 30.0


@dataclass
class _Work:
    """A thread's work in progress; seconds count only while the process runs."""

    what: str
    clock_id: int
    begun_s: float
    waited_s: float = 0.0
    waits_since_s: float | None = None
    cpu_s: float = -1.0
    idle_since_s: float = 0.0


def _processor_s(clock_id: int) -> float:
    """Return the processor seconds of a thread and of all child processes, such as a data loader's workers."""
    used_s = time.clock_gettime(clock_id)
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            # It has just ended.
            continue
        used_s += times.user + times.system
    return used_s


@dataclass
class HangWatch:
    """Watches the work of a process's threads; `look` is called every second by the thread that `watch_hangs` starts.

    `now_s` is the sum of the ticks, not a clock: a process that was stopped, or a machine that slept, has not worked.
    """

    on_hang: OnHang
    limits: HangLimits = field(default_factory=HangLimits)
    now_s: float = 0.0
    # Of all work that has ended; None before the first.
    _longest_s: float | None = None
    # Seconds of processor time of the thread with this clock, and of what works for it.
    processor_s: Callable[[int], float] = _processor_s
    _has_hung: bool = False
    _work: dict[int, _Work] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, what: str) -> None:
        """Note that the calling thread begins work, which must not wait for other machines."""
        thread = threading.get_ident()
        clock_id = time.pthread_getcpuclockid(thread)
        with self._lock:
            self._work[thread] = _Work(what, clock_id, self.now_s)

    def end(self) -> None:
        """Note that the calling thread's work is done."""
        with self._lock:
            work = self._work.pop(threading.get_ident(), None)
            if work is not None:
                worked_s = self.now_s - work.begun_s - work.waited_s
                self._longest_s = max(self._longest_s or 0.0, worked_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude a block in which the calling thread's work waits for other machines."""
        with self._lock:
            work = self._work.get(threading.get_ident())
            if work is not None:
                work.waits_since_s = self.now_s
        try:
            yield
        finally:
            with self._lock:
                if work is not None and work.waits_since_s is not None:
                    work.waited_s += self.now_s - work.waits_since_s
                    work.waits_since_s = None

    def look(self, passed_s: float) -> None:
        """Let at most a tick pass, and report the first work that hangs."""
        with self._lock:
            self.now_s += min(passed_s, 2 * _TICK_S)
            hung = [(thread, work) for thread, work in self._work.items() if self._hangs(work)]
            if not hung or self._has_hung:
                return
            self._has_hung = True
            # With the lock, so that the work does not end meanwhile.
            self.on_hang(self._report(*hung[0]))

    def _report(self, thread: int, work: _Work) -> str:
        worked_s = self.now_s - work.begun_s - work.waited_s
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return (
            f"{work.what} has stood still for {worked_s:.0f} s without using the processor "
            f"(longest before: {self._longest_s or 0.0:.0f} s); its stack:\n{stack}"
        )

    def _hangs(self, work: _Work) -> bool:
        if work.waits_since_s is not None:
            return False
        worked_s = self.now_s - work.begun_s - work.waited_s
        limits = self.limits
        limit_s = (
            limits.first_s
            if self._longest_s is None
            else max(limits.least_s, limits.factor * self._longest_s)
        )
        # Reading the clocks of a thread and of children costs more than the rest, so only what takes long pays for it.
        if worked_s < limit_s - limits.idle_s:
            return False
        used_s = self.processor_s(work.clock_id)
        idle_s = self.now_s - work.idle_since_s
        if work.cpu_s < 0.0 or used_s - work.cpu_s > _IDLE_SHARE * max(idle_s, _TICK_S):
            work.cpu_s, work.idle_since_s = used_s, self.now_s
            return False
        return worked_s >= limit_s and idle_s >= limits.idle_s


_of_this_process: list[HangWatch] = []
"""None, or one."""


def watch_hangs(on_hang: OnHang, limits: HangLimits | None = None) -> HangWatch:
    """Watch this process's work from now on, with one watch however often this is called.

    Whoever starts a process decides this, as only he knows what its end costs. Without a watch `working` does nothing.
    """
    if not _of_this_process:
        watch = HangWatch(on_hang, limits or HangLimits())
        _of_this_process.append(watch)
        threading.Thread(
            target=_look_for_ever, args=[watch], name="hang-watch", daemon=True
        ).start()
    return _of_this_process[0]


def end_process(text: str) -> None:
    """Print what hangs, and end this process at once, as a failure that others can recover from.

    A thread cannot be ended, and what it holds stays held; peers and supervisors know what to do without a process.
    """
    print(f"socflower: {text}this process ends (exit status {os.EX_TEMPFAIL})", file=sys.stderr)
    sys.stderr.flush()
    os._exit(os.EX_TEMPFAIL)


def _look_for_ever(watch: HangWatch) -> None:
    before_s = time.monotonic()
    while True:
        time.sleep(_TICK_S)
        now_s = time.monotonic()
        watch.look(now_s - before_s)
        before_s = now_s


@contextmanager
def working(what: str) -> Iterator[None]:
    """Watch the block as work of the calling thread that is this process's own."""
    for watch in _of_this_process:
        watch.begin(what)
    try:
        yield
    finally:
        for watch in _of_this_process:
            watch.end()


@contextmanager
def waiting() -> Iterator[None]:
    """Exclude a block that waits for other machines from the `working` block around it."""
    with _of_this_process[0].waiting() if _of_this_process else nullcontext():
        yield
