"""Rate limiting of a real link by a bandwidth profile: senders wait until their bytes would have passed."""

import math
import threading
import time
from collections.abc import Callable

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, Direction

BURST_BYTES = 65536
_LATE_S = 0.05
"""A sender that pauses for less than this counts as sending without pause: it woke up late, or wrapped a message."""
_LONGEST_NAP_S = 0.5


class TokenBucket:
    """Limits one direction of a link to the rates of a profile, without its latency, which would need a queue.

    An idle bucket saves nothing up, so a first transfer takes as long as in virtual time. A sender may catch up on
    the time it lost by waking up late: at most `burst_bytes`, and at most 50 ms. So in any span no more bytes pass
    than the profile allows, plus `burst_bytes`, plus the last chunk before the span, which was waited for as a whole.

    Parameters
    ----------
    profile, direction : BandwidthProfile and "up" or "down"
        The rates to follow.
    start_s : float, optional
        The clock's reading at the profile's time 0; now by default.
    clock, sleep : callables
        A monotonic clock in seconds, and a function that waits for some of them; by default `close` ends that wait.
    """

    def __init__(
        self,
        profile: BandwidthProfile,
        direction: Direction,
        *,
        burst_bytes: int = BURST_BYTES,
        start_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._profile = profile
        self._direction = direction
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._closed = threading.Event()
        self._sleep = self._closed.wait if sleep is None else sleep
        self._start_s = clock() if start_s is None else start_s
        self._lock = threading.Lock()
        # When, in the profile's time, the last byte requested so far has passed.
        self._passed_s = -math.inf

    def wait(self, num_bytes: int) -> bool:
        """Block until `num_bytes` have passed, after all that were requested before; False if closed meanwhile.

        While the link is lost this waits until the profile has a rate again, if ever.
        """
        with self._lock:
            begin_s = self._begin_s(self._clock() - self._start_s)
            due_s = self._profile.passed_s(self._direction, begin_s, num_bytes)
            self._passed_s = due_s
        while not self._closed.is_set():
            left_s = due_s - (self._clock() - self._start_s)
            if left_s <= 0:
                return True
            self._sleep(min(left_s, _LONGEST_NAP_S))
        return False

    def close(self) -> None:
        """Release all waiting senders, now and later."""
        self._closed.set()

    def _begin_s(self, now_s: float) -> float:
        """Return the time at which the next bytes begin to pass; it may lie slightly in the past."""
        if self._passed_s >= now_s:
            return self._passed_s
        if now_s - self._passed_s > _LATE_S:
            return now_s
        missed = self._profile.bytes_between(self._direction, self._passed_s, now_s)
        if missed <= self._burst_bytes:
            return self._passed_s
        return self._profile.passed_s(self._direction, self._passed_s, missed - self._burst_bytes)
