"""The kernel of virtual time: activities on processors and links, and the events at which they end.

Tasks of a graph (`socflower.sim.execution`) and processes (`socflower.sim.processes`) both start such activities.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from socflower.sim.compiled_graph import SERVER, ComputeStep, TransferStep
from socflower.sim.energy import StateMeter
from socflower.sim.flows import COMPUTE_END, SAME_INSTANT, Event, Flows, RateTable

WAITING, QUEUED, RUNNING, HANDLING, MOVING, PASSING = range(6)
"""Stages of an activity: a computation is queued and runs; a transfer is handled, then its bytes move."""


class Kernel:
    """Executes activities in the order of events; subclasses define what happens when one ends.

    A processor serves computations one at a time: the one that was ready first; on a tie, the lowest turn, then the
    lowest number. Transfers share links max-min fairly. Events of one instant are processed together, in the order of
    time, kind and number; then the rates of transfers are computed once.
    """

    def __init__(
        self,
        steps: list[ComputeStep | TransferStep],
        table: RateTable,
        *,
        num_processors: int,
        meter: StateMeter,
        now_s: float = 0.0,
    ) -> None:
        size = len(steps)
        self._steps = steps
        self._now_s = now_s
        self._events: list[Event] = []
        self._versions = [0] * size
        self._flows = Flows(table, size, self._events, self._versions)
        self._meter = meter
        self._queues: list[list[tuple[float, int, int]]] = [[] for _ in range(num_processors)]
        self._free = [True] * num_processors
        # Order among activities that become ready together.
        self._turn = [0] * size
        self._stage = [WAITING] * size
        # When a queued activity became ready, or a running one ends.
        self._stamp_s = [0.0] * size
        self._start_s = [0.0] * size
        self._moved_s = [0.0] * size

    def _complete(self, activity: int, ready: list[int]) -> None:
        """React to the end of an activity; add those that can begin to `ready`."""
        raise NotImplementedError

    def _run_until(self, until_s: float = inf) -> None:
        """Process all events up to and at `until_s`."""
        events, versions = self._events, self._versions
        while events:
            now_s, _, activity, version = events[0]
            if now_s > until_s:
                return
            heappop(events)
            # The rate has changed since this event was added.
            if versions[activity] != version:
                continue
            self._now_s = now_s
            ended = [activity]
            horizon_s = now_s * (1.0 + SAME_INSTANT)
            while events and events[0][0] <= horizon_s:
                _, _, activity, version = heappop(events)
                if versions[activity] == version:
                    ended.append(activity)
            self._settle(ended)

    def _settle(self, ended: Sequence[int]) -> None:
        """Process all events of this instant, then share the network once."""
        # An activity that takes no time ends at once and may start others in the same instant.
        while ended:
            ready: list[int] = []
            for activity in ended:
                self._end_stage(activity, ready)
            ended = self._start(ready)
        self._flows.share(self._now_s)

    def _end_stage(self, activity: int, ready: list[int]) -> None:
        step, stage = self._steps[activity], self._stage[activity]
        if isinstance(step, ComputeStep):
            self._free[step.processor] = True
            if step.soc != SERVER:
                self._meter.stop(step.soc, step.load, self._now_s)
            if queue := self._queues[step.processor]:
                # So that `_start` checks this processor again.
                ready.append(queue[0][2])
        elif stage != PASSING:
            self._flows.remove(activity)
            if stage == HANDLING and step.num_bytes:
                self._stage[activity] = MOVING
                self._moved_s[activity] = self._now_s
                self._flows.add(activity, step.data_path, step.num_bytes, self._now_s)
                return
            for soc in step.socs:
                self._meter.disconnect(soc, self._now_s)
        self._complete(activity, ready)

    def _start(self, ready: Sequence[int]) -> list[int]:
        """Queue or start activities that may begin; return those that end at once."""
        ended: list[int] = []
        now_s, steps, processors = self._now_s, self._steps, []
        for activity in ready:
            step = steps[activity]
            if isinstance(step, ComputeStep):
                processors.append(step.processor)
                if self._stage[activity] == WAITING:
                    self._stage[activity] = QUEUED
                    self._stamp_s[activity] = now_s
                    heappush(self._queues[step.processor], (now_s, self._turn[activity], activity))
                continue
            self._start_s[activity] = self._moved_s[activity] = now_s
            if step.handling_s:
                self._stage[activity] = HANDLING
                self._flows.add(activity, step.handling_path, step.handling_s, now_s)
            elif step.num_bytes:
                self._stage[activity] = MOVING
                self._flows.add(activity, step.data_path, step.num_bytes, now_s)
            else:
                self._stage[activity] = PASSING
                ended.append(activity)
                continue
            for soc in step.socs:
                self._meter.connect(soc, now_s)
        for processor in processors:
            if self._free[processor] and self._queues[processor]:
                self._free[processor] = False
                self._run_compute(heappop(self._queues[processor])[2], ended)
        return ended

    def _run_compute(self, activity: int, ended: list[int]) -> None:
        step = self._steps[activity]
        assert isinstance(step, ComputeStep)
        self._stage[activity] = RUNNING
        self._start_s[activity] = self._moved_s[activity] = self._now_s
        if step.soc != SERVER:
            self._meter.start(step.soc, step.load, self._now_s)
        if not step.duration_s:
            ended.append(activity)
            return
        self._end_at(activity, self._now_s + step.duration_s)

    def _end_at(self, activity: int, end_s: float) -> None:
        """Set the end of an activity that is not a flow; infinity means not before the next call."""
        self._stamp_s[activity] = end_s
        self._versions[activity] += 1
        if end_s < inf:
            heappush(self._events, (end_s, COMPUTE_END, activity, self._versions[activity]))
