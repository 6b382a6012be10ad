"""What a ring port refused, one line each, and few lines for each peer: whoever knocks on must not fill the log."""

from collections import Counter
from collections.abc import Callable
from logging import WARNING
from threading import Lock
from typing import TypeAlias

from flwr.supercore import log

Log: TypeAlias = Callable[[str], object]

_LINES_PER_HOST = 3
_MAX_HOSTS = 32


def warn(line: str) -> None:
    """Log a line as Flower's warnings."""
    log(WARNING, line)


class Refusals:
    """Reports refusals through `log_line`; from several threads."""

    def __init__(self, log_line: Log = warn) -> None:
        self._log = log_line
        self._lock = Lock()
        self._lines: Counter[str] = Counter()

    def report(self, peer: str, what: str) -> None:
        """Say that `what` of `peer` (an address, with or without a port) was refused, unless too much was said."""
        host = peer.rpartition(":")[0] or peer  # a stranger has a new port each time
        with self._lock:
            if host not in self._lines and len(self._lines) >= _MAX_HOSTS:
                host = "others"
            self._lines[host] += 1
            count = self._lines[host]
        if count <= _LINES_PER_HOST:
            last = "; more of it will not be logged" if count == _LINES_PER_HOST else ""
            self._log(f"ring port: refused {what} from {peer}; the run is unharmed{last}")
