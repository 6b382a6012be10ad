"""What a command does with its process: only its own prints are on standard output, and signals end it like Ctrl-C."""

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
    """Raise `KeyboardInterrupt` where SIGTERM or SIGHUP arrives, and at the end die of it, as who sent it expects.

    By default both end a process at once, with its temporary folders and processes left as they are. One that is
    ignored, as by nohup, stays so; commands with an answer of their own still give it.
    """
    received: list[int] = []
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # of a fork, which has nothing of ours to clean up
            _die_of(number)
        if not received:  # a second one must not interrupt the cleaning up
            received.append(number)
            raise KeyboardInterrupt

    def die() -> None:
        if received:
            _die_of(received[0])

    # Called last: what is imported from now on cleans up before it, such as the folders of multiprocessing.
    atexit.register(die)
    # Elsewhere than in the main thread Python sets no handlers.
    here = threading.current_thread() is threading.main_thread()
    taken = [number for number in _SIGNALS if here and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if not received:
            atexit.unregister(die)
            for number in taken:
                signal.signal(number, signal.SIG_DFL)


def _die_of(number: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def prints_on_stderr() -> Iterator[TextIO]:
    """Send what apps and libraries print to standard error, from Python, C and new processes; yield our own output."""
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
        _flush_c()  # what C has not written yet would go where its descriptor leads by then
        if descriptor is not None and kept is not None:
            stream.close()
            os.dup2(kept, descriptor)
            os.close(kept)
            _keep_last_words_away(descriptor)


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a process's standard output; None for what has been put in its place."""
    with suppress(OSError, ValueError, AttributeError):
        return 1 if stream.fileno() == 1 else None
    return None


def _flush_c() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


@cache
def _keep_last_words_away(descriptor: int) -> None:
    """Send what is printed at the exit of this process to standard error too: handlers run last in, first out."""
    def leave() -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            os.dup2(2, descriptor)

    atexit.register(leave)
