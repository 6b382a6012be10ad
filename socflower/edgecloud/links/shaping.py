"""A real link made as slow as a traced one: senders wait until their bytes would have passed it."""

import math
import threading
import time
from collections.abc import Callable

from socflower.edgecloud.links.bandwidth_profile import Direction, LinkTrace
from socflower.errors import ConfigError

BURST_BYTES = 65536
_LATE_S = 0.05
"""Within this time of its last bytes a sender counts as never having stopped: it woke up late, or wrapped a message."""
_LONGEST_NAP_S = 0.5


class TokenBucket:
    """Shapes one direction of a link after a trace. Latency is left out: it needs a queue, not a limit.

    A bucket that has stood idle is empty, so a first transfer takes as long as in virtual time. What a sender loses
    by waking up late, it may catch up on: at most `burst_bytes`, and nothing that is older than 50 ms. So in any span
    no more passes than the trace allows, and `burst_bytes`, and the last chunk of before, which was waited for whole.

    Parameters
    ----------
    trace, direction : LinkTrace and "up" or "down"
        What is imitated.
    start_s : float, optional
        The clock's reading at the trace's time 0; now by default.
    clock, sleep : callables
        Seconds that never go back, and what waits for some of them; by default `close` ends that wait.
    """

    def __init__(
        self, trace: LinkTrace, direction: Direction, *, burst_bytes: int = BURST_BYTES,
        start_s: float | None = None, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if burst_bytes < 0:
            raise ConfigError(f"token bucket: burst_bytes = {burst_bytes} must be 0 or more")
        self._trace, self._direction, self._burst_bytes = trace, direction, burst_bytes
        self._clock, self._closed = clock, threading.Event()
        self._sleep = self._closed.wait if sleep is None else sleep
        self._start_s = clock() if start_s is None else start_s
        self._lock = threading.Lock()
        self._passed_s = -math.inf  # when, in the trace's time, the last byte of all that was asked for has passed

    def wait(self, num_bytes: int) -> bool:
        """Block until `num_bytes` have passed, behind all that were asked for before; False if closed meanwhile.

        While the link is lost that is until the trace says that it is there again, if ever.
        """
        with self._lock:
            now_s = self._clock() - self._start_s
            self._passed_s = self._trace.passed_s(self._direction, self._begin_s(now_s), num_bytes)
            due_s = self._passed_s
        while not self._closed.is_set():
            left_s = due_s - (self._clock() - self._start_s)
            if left_s <= 0:
                return True
            self._sleep(min(left_s, _LONGEST_NAP_S))
        return False

    def close(self) -> None:
        """Let go of all that wait, now and later."""
        self._closed.set()

    def _begin_s(self, now_s: float) -> float:
        """Return from when on the link is free for the next bytes, which may lie a little back."""
        if self._passed_s >= now_s:
            return self._passed_s
        if now_s - self._passed_s > _LATE_S:
            return now_s
        missed = self._trace.bytes_between(self._direction, self._passed_s, now_s)
        if missed <= self._burst_bytes:
            return self._passed_s
        return self._trace.passed_s(self._direction, self._passed_s, missed - self._burst_bytes)
