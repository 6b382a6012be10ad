"""Memory kept between steps: compute-graph reuse under a budget (Mandheling §3.6).

Building a step's operators and buffers takes time, and the network does not change between steps, so the next step
reuses them. Training always runs its operators in the same order, so the most recently used region is the one whose
next use is furthest ahead: when the budget is exceeded, it is evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from socflower.errors import ConfigError


@dataclass(slots=True)
class _Region:
    content: Any
    num_bytes: int
    in_use: bool


class RegionCache:
    """Regions by key. A region in use stays; idle ones may be evicted, most recently used first.

    With `reuse` False a region is dropped as soon as it is released, as in engines that build a graph per batch.
    """

    def __init__(self, *, budget_bytes: int | None = None, reuse: bool = True) -> None:
        self._budget_bytes = budget_bytes
        self._reuse = reuse
        self._regions: dict[Hashable, _Region] = {}
        # In the order of release: the last is the most recently used.
        self._idle: dict[Hashable, None] = {}
        self.held_bytes = 0
        self.peak_bytes = 0
        self.num_built = 0
        self.num_evicted = 0

    def acquire(self, key: Hashable, num_bytes: int, build: Callable[[], Any]) -> Any:
        """Return the region of that key, built now if it is not held, and keep it until `release`.

        Raises ConfigError, with the bytes, if the regions in use leave no room for it.
        """
        region = self._regions.get(key)
        if region is not None:
            region.in_use = True
            self._idle.pop(key, None)
            return region.content
        self._make_room(key, num_bytes)
        region = _Region(build(), num_bytes, in_use=True)
        self._regions[key] = region
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.num_built += 1
        return region.content

    def release(self, key: Hashable) -> None:
        """Release a region; its content is not needed before the next `acquire`."""
        region = self._regions.get(key)
        if region is None or not region.in_use:
            return
        region.in_use = False
        if self._reuse:
            self._idle[key] = None
        else:
            self._drop(key)

    def release_all(self) -> None:
        """Release every region, in the order in which they were built."""
        for key in list(self._regions):
            self.release(key)

    def _make_room(self, key: Hashable, num_bytes: int) -> None:
        if self._budget_bytes is None:
            return
        while self._idle and self.held_bytes + num_bytes > self._budget_bytes:
            self._drop(next(reversed(self._idle)))
            self.num_evicted += 1
        needed = self.held_bytes + num_bytes
        if needed > self._budget_bytes:
            raise ConfigError(
                f"memory budget of {self._budget_bytes} bytes: {self.held_bytes} bytes are in use and {key} needs "
                f"{num_bytes} more; allow at least {needed} bytes or use a smaller batch"
            )

    def _drop(self, key: Hashable) -> None:
        region = self._regions.pop(key)
        self._idle.pop(key, None)
        self.held_bytes -= region.num_bytes
