"""What a ring port refused, one line each, and few lines for each peer and minute."""

import time
from collections.abc import Callable
from logging import WARNING

from flwr.supercore import log

from socflower.cluster.refusal_log import Log, RefusalLog

_LINES_PER_MINUTE = 3


def warn(line: str) -> None:
    """Log a line as Flower's warnings."""
    log(WARNING, line)


class RingRefusals:
    """Reports refusals through `log_line`; from several threads."""

    def __init__(self, log_line: Log = warn, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = RefusalLog(log_line, what="ring port", lines_per_period=_LINES_PER_MINUTE, clock=clock)

    def report(self, peer: str, what: str) -> None:
        """Say that `what` of `peer` (an address, with or without a port) was refused, unless too much was said."""
        self._log.report(peer, f"ring port: refused {what} from {peer}; the run is unharmed")

    def close(self) -> None:
        """Say how many refusals were only counted."""
        self._log.flush(everything=True)
