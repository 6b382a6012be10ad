"""A command's process: standard output is reserved for the command's own output; signals end it like Ctrl-C."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import TextIO

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM or SIGHUP, and exit by that signal at the end, as its sender expects.

    By default both end a process at once and leave its temporary folders and child processes. A signal that is
    ignored, for example under nohup, stays ignored; handlers that a command has set stay in effect.
    """
    received: list[int] = []
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A fork has nothing to clean up.
        if os.getpid() != owner:
            _die_by_signal(number)
        # A second signal must not interrupt the cleanup.
        if not received:
            received.append(number)
            raise KeyboardInterrupt

    def die() -> None:
        if received:
            _die_by_signal(received[0])

    # Called last: modules imported later clean up before it, such as the folders of multiprocessing.
    atexit.register(die)
    # Python sets signal handlers only in the main thread.
    in_main_thread = threading.current_thread() is threading.main_thread()
    taken = [
        number
        for number in _SIGNALS
        if in_main_thread and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if not received:
            atexit.unregister(die)
            for number in taken:
                signal.signal(number, signal.SIG_DFL)


def _die_by_signal(number: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def prints_to_stderr() -> Iterator[TextIO]:
    """Redirect the prints of apps and libraries (Python, C, child processes) to stderr; yield the original stdout."""
    own = sys.stdout
    own.flush()
    _flush_c()
    descriptor = _descriptor(own)
    kept = os.dup(descriptor) if descriptor is not None else None
    stream = own
    if descriptor is not None and kept is not None:
        os.dup2(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, descriptor)
        stream = os.fdopen(os.dup(kept), "w", encoding=own.encoding, errors=own.errors)
    sys.stdout = sys.stderr
    try:
        yield stream
    finally:
        sys.stdout = own
        # C's buffer would otherwise be written after the descriptor is restored.
        _flush_c()
        if descriptor is not None and kept is not None:
            stream.close()
            os.dup2(kept, descriptor)
            os.close(kept)
            _redirect_prints_at_exit(descriptor)


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of the process's standard output; None if the stream was replaced."""
    with suppress(OSError, ValueError, AttributeError):
        return 1 if stream.fileno() == 1 else None
    return None


def _flush_c() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


@cache
def _redirect_prints_at_exit(descriptor: int) -> None:
    """Also redirect prints at the exit of this process to stderr; exit handlers run last in, first out."""

    def redirect() -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            os.dup2(2, descriptor)

    atexit.register(redirect)
