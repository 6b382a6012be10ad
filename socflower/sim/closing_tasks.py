"""Repetitions with closing tasks: these run once, as soon as the repetitions that they follow have ended.

So groups of unequal speed end their steps, and their leaders send their models, while slower groups still train. The
repeated tasks form lanes: parts that share no dependency, SoC or resource, except with closing tasks. While no closing
task is in progress, each lane proceeds independently, and its state may recur. Once the states of all unfinished lanes
have recurred, each lane skips whole periods, up to the earliest time at which a lane may end. That is exact: no closing
task can begin in the time that is skipped.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify
from math import inf

from socflower.sim.compiled_graph import SERVER, ComputeStep, DisjointSets, Program
from socflower.sim.execution import Execution, Gap, Outcome, Recurrence, RecurrenceFinder
from socflower.sim.flows import RateTable
from socflower.sim.kernel import HANDLING, MOVING, QUEUED, RUNNING, WAITING

_SAME_TIME = 1e-12
"""Relative tolerance for a number of periods that fit into a time."""


class _Lane:
    """Repeated tasks that share nothing with others, and their progress."""

    def __init__(self, tasks: Sequence[int], program: Program) -> None:
        self.tasks = tasks
        steps = [program.steps[task] for task in tasks]
        computes = [step for step in steps if isinstance(step, ComputeStep)]
        ends = [soc for step in steps if not isinstance(step, ComputeStep) for soc in step.socs]
        self.socs = sorted({*ends, *(step.soc for step in computes if step.soc != SERVER)})
        self.processors = sorted({step.processor for step in computes})
        self.oldest, self.num_oldest = 0, len(tasks)
        self.forget()

    def forget(self) -> None:
        """Discard the states seen so far: a closing task has disturbed the lane."""
        self.finder = RecurrenceFinder()
        self.found: Recurrence | None = None


class ClosingExecution(Execution):
    """Executes `repetitions` of the repeated tasks of a program from time 0, and its closing tasks once."""

    def __init__(
        self,
        program: Program,
        table: RateTable,
        repetitions: int,
        *,
        extrapolate: bool = True,
        max_instances: int = 0,
    ) -> None:
        super().__init__(
            program, table, repetitions, extrapolate=extrapolate, max_instances=max_instances
        )
        # Only lanes recur, never the whole.
        self._finder = None
        self._first_closing = first = program.num_repeated
        self._closed_by = [
            [other for other in following if other >= first] for following in self._next[:first]
        ]
        # Closing tasks are released by `_complete`, after the last repetition only.
        for task in range(first):
            self._next[task] = [other for other in self._next[task] if other < first]
        self._num_left = len(program.steps)
        # Closing tasks in progress.
        self._num_closing = 0
        self._lanes = (
            [_Lane(tasks, program) for tasks in _independent(program)] if extrapolate else []
        )
        self._lane_of: list[_Lane | None] = [None] * len(program.steps)
        for lane in self._lanes:
            for task in lane.tasks:
                self._lane_of[task] = lane
        # Lanes that have ended their oldest repetition at this instant.
        self._repeated_lanes: list[_Lane] = []
        self._gaps: list[Gap] = []

    def run(self) -> Outcome:
        """Return the outcome once no task is left."""
        outcome = super().run()
        return replace(outcome, gaps=self._gaps)

    def _is_done(self) -> bool:
        return not self._num_left

    def _start(self, ready: Sequence[int]) -> list[int]:
        closing = sum(
            [task >= self._first_closing and self._stage[task] == WAITING for task in ready]
        )
        if closing:
            self._num_closing += closing
            for lane in self._lanes:
                lane.forget()
        return super()._start(ready)

    def _complete(self, task: int, ready: list[int]) -> None:
        if task >= self._first_closing:
            self._close(task, ready)
            return
        finished = self._repetition[task]
        super()._complete(task, ready)
        if self._repetition[task] == finished:
            return
        if finished + 1 == self._limit:
            self._num_left -= 1
            self._release(self._closed_by[task], ready)
        lane = self._lane_of[task]
        if lane is not None and finished == lane.oldest:
            lane.num_oldest -= 1
            if not lane.num_oldest:
                self._repeated_lanes.append(lane)

    def _close(self, task: int, ready: list[int]) -> None:
        """End a closing task, or move it to its next round."""
        self._num_closing -= 1
        if self._end_round(task, ready):
            self._num_left -= 1
            self._repetition[task] += 1
            self._release(self._next[task], ready)

    def _release(self, tasks: Sequence[int], ready: list[int]) -> None:
        for task in tasks:
            self._missing[task] -= 1
            if not self._missing[task]:
                ready.append(task)

    def _settle(self, ended: Sequence[int]) -> None:
        super()._settle(ended)
        if not self._repeated_lanes:
            return
        lanes, self._repeated_lanes = self._repeated_lanes, []
        for lane in lanes:
            lane.oldest = min([self._repetition[task] for task in lane.tasks])
            lane.num_oldest = sum([self._repetition[task] == lane.oldest for task in lane.tasks])
            if lane.oldest == self._limit:
                self._lanes.remove(lane)
            elif not self._num_closing and lane.found is None and self._num_to_begin(lane) >= 0:
                self._meter.settle(lane.socs, self._now_s)
                progress = [(task, self._rounds_since(lane.oldest, task)) for task in lane.tasks]
                lane.found = lane.finder.find(self._state(lane.oldest, progress, lane.socs))
        if self._lanes and not self._num_closing:
            self._skip()

    def _num_to_begin(self, lane: _Lane) -> int:
        """Return how many repetitions none of a lane's tasks has begun."""
        return self._limit - 1 - max([self._repetition[task] for task in lane.tasks])

    def _skip(self) -> None:
        """If the states of all lanes recur, let each skip periods, up to the first time at which one may end."""
        most: list[int] = []
        horizon_s = inf
        for lane in self._lanes:
            # A lane whose future is unknown limits all others.
            if lane.found is None:
                return
            most.append(self._num_to_begin(lane) // lane.found.repetitions)
            horizon_s = min(horizon_s, most[-1] * lane.found.period_s)
        for lane, periods in zip(self._lanes, most, strict=True):
            assert lane.found is not None
            periods = min(periods, int(horizon_s / lane.found.period_s * (1.0 + _SAME_TIME)))
            if periods > 0:
                self._postpone(lane, lane.found, periods)

    def _postpone(self, lane: _Lane, found: Recurrence, periods: int) -> None:
        """Move the present state of a lane `periods` periods into the future; the lane is idle until then."""
        shift_s, repetitions = periods * found.period_s, periods * found.repetitions
        begin_s, end_s = self._now_s, self._now_s + shift_s
        self._gaps.append(
            Gap(tuple(lane.tasks), begin_s + self._skipped_s, end_s + self._skipped_s, repetitions)
        )
        lane.oldest += repetitions
        for soc, seconds in zip(lane.socs, found.seconds, strict=True):
            self._meter.postpone(soc, shift_s, seconds, periods, begin_s)
        for task in lane.tasks:
            self._repetition[task] += repetitions
            # So that spans begin after the gap.
            self._start_s[task] = self._moved_s[task] = end_s
            stage = self._stage[task]
            # All that is in progress ends later by the skipped time.
            if stage == RUNNING:
                self._end_at(task, self._stamp_s[task] + shift_s)
            elif stage == QUEUED:
                self._stamp_s[task] += shift_s
            elif stage in (HANDLING, MOVING):
                self._flows.postpone(task, shift_s)
        for loop in {self._loop_of[task] for task in lane.tasks}:
            if loop is not None and loop.repetition >= 0:
                loop.repetition += repetitions
        for processor in lane.processors:
            self._queues[processor] = [
                (ready_s + shift_s, turn + repetitions, task)
                for ready_s, turn, task in self._queues[processor]
            ]
            heapify(self._queues[processor])


def _independent(program: Program) -> list[list[int]]:
    """Return the repeated tasks of each part that shares no dependency, SoC, processor or resource with others."""
    parts = DisjointSets(program.num_repeated)
    for task, step in enumerate(program.steps[: program.num_repeated]):
        for other in (
            *program.after[task],
            *program.after_previous[task],
            *program.after_round[task],
        ):
            parts.join(task, other)
        if isinstance(step, ComputeStep):
            parts.join_by(task, ("processor", step.processor))
        else:
            handlers = program.paths[step.handling_path] if step.handling_s else ()
            links = program.paths[step.data_path] if step.num_bytes else ()
            for resource in (*handlers, *links):
                parts.join_by(task, ("resource", resource))
        for soc in (step.soc,) if isinstance(step, ComputeStep) else step.socs:
            if soc != SERVER:
                parts.join_by(task, ("soc", soc))
    return parts.sets()
