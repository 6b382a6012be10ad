"""Shares of a batch that follow the measured speeds of a ring's members (F20).

A member times only its own work: loading its part of the batch, forward and backward pass, optimiser. Gradient buckets
are sent by other threads during the backward pass, so that the pass does not wait for peers. Every
`RingTask.rebalance_steps` steps, members exchange their samples, seconds and power shares. All members feed the same
observations to equal filters, so they split each batch equally.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from socflower.hierarchy.batch_shares import CapacityFilter
from socflower.peers.collective import Collective, Poll, gather_json
from socflower.thermal.limits import current_guard
from socflower.training.hang_watch import waiting, working
from socflower.wire.message_keys import GroupTask

_THRESHOLD = 0.05
"""Dead band of shares within a ring: narrow, since changing shares of data that all members have costs nothing."""


class StepTimer:
    """Measures the time of a member's own work in steps; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.step_s = 0.0
        """Seconds of the current step so far."""
        self._rates: list[float] = []
        self._num_samples, self._seconds = 0, 0.0

    def begin_step(self) -> None:
        """Reset the time of the current step."""
        self.step_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block, which must not wait for other members."""
        began_s = self._clock()
        try:
            with working("a ring's step"):
                yield
        finally:
            self.step_s += self._clock() - began_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude a block that waits for other members from the `timed` block around it."""
        began_s = self._clock()
        try:
            with waiting():
                yield
        finally:
            self.step_s -= self._clock() - began_s

    def end_step(self, num_samples: int) -> None:
        """Record a completed step; one without samples has no information on the member's speed."""
        if num_samples and self.step_s > 0.0:
            self._num_samples += num_samples
            self._seconds += self.step_s
            self._rates.append(num_samples / self.step_s)

    @property
    def unreported(self) -> tuple[int, float]:
        """Samples and seconds of the steps since the last report to the others."""
        return self._num_samples, self._seconds

    def mark_reported(self) -> None:
        """Reset the unreported samples and seconds."""
        self._num_samples, self._seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Samples per second, the median of all steps; 0 if there were none."""
        return statistics.median(self._rates) if self._rates else 0.0


class RingBalance:
    """One member's estimates of its group's capacities, identical in all members between two exchanges.

    Members are positions in the group. Shares can change only if the group's data are common to all members
    (`GroupTask.reshuffle`); if each member has its own data, its share is fixed.
    """

    def __init__(self, group: GroupTask, timer: StepTimer) -> None:
        self._filter = CapacityFilter(dict(enumerate(group.capacities)), threshold=_THRESHOLD)
        # The share of its power that each member may use.
        self._limits = [1.0] * len(group.members)
        self._timer = timer
        guard = current_guard()
        if guard is not None:
            # A throttled member gets fewer samples instead of delaying the others.
            guard.take_over_pacing()

    def capacities(self, present: Sequence[int]) -> list[float]:
        """Return the capacities of the present members, to which their shares are proportional."""
        rates = self._filter.capacities()
        limited = [rates[member] * self._limits[member] for member in present]
        return limited if any(limited) else [rates[member] for member in present]

    def due(self, present: Sequence[int]) -> list[int]:
        """Return the indices of the present members that need at least one sample, so that their speed is observed."""
        due = self._filter.due
        return [
            index
            for index, member in enumerate(present)
            if member in due and self._limits[member] > 0.0
        ]

    def synchronise(self, ring: Collective, poll: Poll) -> None:
        """Adopt the state of the member with the most observations: an exchange may have reached only some members."""
        own = self._filter.num_noted
        state = {"filter": self._filter.state(), "limits": self._limits}
        reports: list[dict[str, Any]] = gather_json(ring, state, poll)
        # Ties go to the first member.
        newest = max(reports, key=lambda state: int(state["filter"]["noted"]))
        self._filter.restore(newest["filter"])
        self._limits = newest["limits"]
        if self._filter.num_noted > own:
            # The exchange that this member missed included its report.
            self._timer.mark_reported()

    def exchange(self, ring: Collective, present: Sequence[int], poll: Poll) -> None:
        """Exchange the members' speeds since the last exchange, and update the capacities.

        Raises `PeerLost`, or what `poll` raises; this member's report is then kept for the next exchange.
        """
        num_samples, seconds = self._timer.unreported
        reports = gather_json(ring, [num_samples, seconds, _power_share()], poll)
        self._timer.mark_reported()
        noted = {}
        for member, (samples, taken_s, share) in zip(present, reports, strict=True):
            noted[member] = (samples, taken_s)
            self._limits[member] = share
        self._filter.note(noted)


def _power_share() -> float:
    """Return the share of its power that this device may use now; 1 if there is no limit, or an invalid one."""
    guard = current_guard()
    share = 1.0 if guard is None else guard.share()
    return share if math.isfinite(share) and 0.0 <= share <= 1.0 else 1.0
