"""Timing for profiles: medians, after a run that is not counted."""

import statistics
import time
from collections.abc import Callable


def median_seconds(function: Callable[[], None], repeats: int) -> float:
    """Return the median duration of `repeats` runs."""
    function()
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)
