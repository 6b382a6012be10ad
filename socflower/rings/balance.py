"""Shares of a batch that follow how fast a ring's members really are, from one batch to another (F20).

A member times what it does itself, waiting for nobody: making its part of the batch, the pass, the optimiser. Parts of
the gradient that travel while the pass goes on are sent by other threads, so that the pass does not wait for peers.
Every `RingTask.rebalance_steps` steps members tell each other samples and seconds, and what part of its power each may
give; all of them feed equal observations to equal filters, and so split each batch alike.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from socflower.hierarchy.batch_shares import CapacityFilter
from socflower.rings.collective import Collective, Poll
from socflower.thermal.limits import current_guard
from socflower.wire.message_keys import GroupTask

_THRESHOLD = 0.05
"""Dead band of shares within a ring: narrow, since moving the shares of data that all members have costs nothing."""


class PassTimer:
    """What a member spends on its own part of steps; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.step_s = 0.0
        """Seconds of the present step so far."""
        self._rates: list[float] = []
        self._num_samples, self._seconds = 0, 0.0

    def begin_step(self) -> None:
        """Forget a step that was broken off."""
        self.step_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block, in which nobody is waited for."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.step_s += self._clock() - began_s

    def end_step(self, num_samples: int) -> None:
        """Note a step as done; one without samples says nothing of the member's speed."""
        if num_samples and self.step_s > 0.0:
            self._num_samples += num_samples
            self._seconds += self.step_s
            self._rates.append(num_samples / self.step_s)

    @property
    def untold(self) -> tuple[int, float]:
        """Samples and seconds of the steps that the others have not been told of."""
        return self._num_samples, self._seconds

    def told(self) -> None:
        """Note that they have."""
        self._num_samples, self._seconds = 0, 0.0

    @property
    def rate(self) -> float:
        """Samples per second, the median of all steps; 0 if there were none."""
        return statistics.median(self._rates) if self._rates else 0.0


class RingBalance:
    """One member's knowledge of its group's capacities, the same in all members between two exchanges.

    Members are positions in the group. Only data that are dealt can move between members: where each has its own
    (`GroupTask.reshuffle` is false) shares are what they are, and there is nothing to balance.
    """

    def __init__(self, group: GroupTask, work: PassTimer) -> None:
        self._filter = CapacityFilter(dict(enumerate(group.capacities)), threshold=_THRESHOLD)
        self._limits = [1.0] * len(group.members)  # what part of its power each member may give
        self._work = work
        guard = current_guard()
        if guard is not None:
            guard.take_over()  # a member that may do less gets fewer samples, instead of letting all others wait

    def capacities(self, present: Sequence[int]) -> list[float]:
        """Return what the present members' shares are proportional to."""
        rates = self._filter.capacities()
        limited = [rates[member] * self._limits[member] for member in present]
        return limited if any(limited) else [rates[member] for member in present]

    def due(self, present: Sequence[int]) -> list[int]:
        """Return which of the present members, by their index, are to have one sample at least, to be observed."""
        due = self._filter.due
        return [index for index, member in enumerate(present) if member in due and self._limits[member] > 0.0]

    def agree(self, ring: Collective, poll: Poll) -> None:
        """Stand where the member stands that knows most, since an exchange may have reached only some of them."""
        own = self._filter.num_noted
        told: list[dict[str, Any]] = [json.loads(payload) for payload in ring.all_gather(
            json.dumps({"filter": self._filter.state(), "limits": self._limits}).encode(), poll)]
        newest = max(told, key=lambda state: int(state["filter"]["noted"]))  # the first of those that know as much
        self._filter.restore(newest["filter"])
        self._limits = newest["limits"]
        if self._filter.num_noted > own:
            self._work.told()  # the exchange that this member has missed had its passes in it

    def exchange(self, ring: Collective, present: Sequence[int], poll: Poll) -> None:
        """Tell the others how fast this member was since the last exchange, and go by what they tell.

        Raises `PeerLost`, or what `poll` raises; the passes are kept for the next exchange then.
        """
        num_samples, seconds = self._work.untold
        told = [json.loads(payload) for payload in ring.all_gather(
            json.dumps([num_samples, seconds, _share()]).encode(), poll)]
        self._work.told()
        self._filter.note({member: (samples, taken_s) for member, (samples, taken_s, _) in
                           zip(present, told, strict=True)})
        for member, (_, _, share) in zip(present, told, strict=True):
            self._limits[member] = share


def _share() -> float:
    """Return what part of its power this device may give now: 1 where nobody limits it, or says what cannot be."""
    guard = current_guard()
    share = 1.0 if guard is None else guard.share()
    return share if math.isfinite(share) and 0.0 <= share <= 1.0 else 1.0
