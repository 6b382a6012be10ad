"""What a signal that ends the command does: it ends as after Ctrl-C, so that nothing of it is left behind."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
