"""Standard output is a command's own: whatever else is printed in its process, or in one that it starts, is not."""

import atexit
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TextIO


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
