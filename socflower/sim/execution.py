"""One program, executed event by event: processors in FIFO order, flows at max-min rates.

A task runs once in each repetition, or in a number of rounds. Its repetitions come in order; those of different tasks
overlap as far as `after`, `after_previous` and `after_round` allow. So a task has at most one instance in progress, and
the whole state is one row for each task, which makes recurrence cheap to recognise.

A repeated program is executed until its whole state recurs (steady state); the rest follows from that. The rounds of a
loop, such as a ring of thousands, are treated in the same way while nothing else is in progress.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from socflower.sim.compiled_graph import Program
from socflower.sim.energy import State, StateMeter
from socflower.sim.flows import RateTable
from socflower.sim.kernel import HANDLING, MOVING, WAITING, Kernel

MAX_PERIOD = 16
"""Longest period that is tested, in repetitions; groups that share links synchronise within a few."""

SAME_STATE = 1e-11
"""Largest difference between clocks of equal states, relative to the period; it does not grow with skipped periods."""

_ROUNDING = 2.0**-47
"""Tolerance for rounding of a clock, relative to the time: 32 units in the last place."""


class Snapshot(NamedTuple):
    """The complete state at the end of a repetition.

    `shape` holds for each task its repetition (counted from the oldest unfinished one) and its stage; `clocks_s` holds
    for each task in progress the seconds until it ends at the present rate, or since it was queued.
    """

    repetition: int
    now_s: float
    shape: tuple[int, ...]
    clocks_s: list[float]
    seconds: list[dict[State, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """From `at_s` on, `repetitions` repetitions take `period_s`, in which SoCs spend `seconds` in their states."""

    at_s: float
    repetitions: int
    period_s: float
    seconds: Sequence[dict[State, float]]


class RecurrenceFinder:
    """Compares each snapshot with those of the repetitions before."""

    def __init__(self) -> None:
        self._past: deque[Snapshot] = deque(maxlen=MAX_PERIOD)

    def find(self, present: Snapshot) -> Recurrence | None:
        """Return the shortest period with which the present state recurs, if any."""
        # The latest first, since the shortest period is wanted.
        for past in reversed(self._past):
            if past.shape == present.shape and _same_clocks(past, present):
                seconds = []
                for before, after in zip(past.seconds, present.seconds, strict=True):
                    seconds.append(
                        {
                            state: spent_s - before.get(state, 0.0)
                            for state, spent_s in after.items()
                        }
                    )
                return Recurrence(
                    at_s=present.now_s,
                    repetitions=present.repetition - past.repetition,
                    period_s=present.now_s - past.now_s,
                    seconds=seconds,
                )
        self._past.append(present)
        return None


def _same_clocks(past: Snapshot, present: Snapshot) -> bool:
    tolerance_s = SAME_STATE * (present.now_s - past.now_s) + _ROUNDING * present.now_s
    return all(
        abs(before - after) <= tolerance_s
        for before, after in zip(past.clocks_s, present.clocks_s, strict=True)
    )


class Instance(NamedTuple):
    """One finished round of a task in a repetition; `moved_s` is when a transfer's bytes began to flow."""

    task: int
    repetition: int
    round: int
    start_s: float
    moved_s: float
    end_s: float


class Gap(NamedTuple):
    """Repetitions of some tasks that were skipped, and when they take place."""

    tasks: tuple[int, ...]
    start_s: float
    end_s: float
    repetitions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of executing a program. Any number of periods can be inserted at the recurrence's `at_s`."""

    repetitions: int
    duration_s: float
    seconds: Sequence[dict[State, float]]
    recurrence: Recurrence | None
    instances: Sequence[Instance] = field(default=())
    num_unlogged: int = 0
    # The last repetition of each task, in the order of its tasks.
    ended_s: Sequence[float] = field(default=())
    gaps: Sequence["Gap"] = field(default=())
    # All tasks that an instance's task stands for, by its number; None: only itself.
    members: Sequence[Sequence[int]] | None = None

    def tasks_of(self, task: int) -> Sequence[int]:
        """Return the tasks of the whole program that a task of an instance stands for."""
        return (task,) if self.members is None else self.members[task]


MIN_LOOP_ROUNDS = 40
"""Loops of fewer rounds, such as a ring of 20, are executed completely: little could be skipped."""


class _Loop:
    """Transfers that follow each other's rounds, and their progress in one repetition."""

    def __init__(self, tasks: Sequence[int], num_rounds: int) -> None:
        self.tasks, self.num_rounds = tasks, num_rounds
        self.repetition = -1
        self.finder: RecurrenceFinder | None = None
        # Number of tasks that have ended each round.
        self._done = [0] * num_rounds

    def advance(self, repetition: int, following: int) -> bool:
        """Record that a task begins a round; return whether all tasks have ended the round before it."""
        if repetition != self.repetition:
            self.repetition, self.finder = repetition, RecurrenceFinder()
            self._done = [0] * self.num_rounds
        self._done[following - 1] += 1
        return self._done[following - 1] == len(self.tasks) and self.finder is not None


def _loops(program: Program) -> list[_Loop | None]:
    """Return the loop of each task whose rounds may be skipped."""
    found: list[_Loop | None] = [None] * len(program.steps)
    neighbours: list[list[int]] = [list(before) for before in program.after_round]
    for task, before in enumerate(program.after_round):
        for other in before:
            neighbours[other].append(task)
    for task, num_rounds in enumerate(program.rounds):
        if num_rounds < MIN_LOOP_ROUNDS or found[task] is not None:
            continue
        members, frontier = {task}, [task]
        while frontier:
            fresh = set(neighbours[frontier.pop()]) - members
            members |= fresh
            frontier += fresh
        loop = _Loop(sorted(members), num_rounds)
        for member in members:
            found[member] = loop
    return found


class Execution(Kernel):
    """Executes `repetitions` of a program from time 0, fewer when its state recurs and `extrapolate` is set.

    Skipping whole periods is exact: from equal states equal futures follow, so a run that is m periods
    longer differs only by m periods inserted where the recurrence was seen.
    """

    def __init__(
        self,
        program: Program,
        table: RateTable,
        repetitions: int,
        *,
        extrapolate: bool = True,
        max_instances: int = 0,
    ) -> None:
        size = len(program.steps)
        super().__init__(
            list(program.steps),
            table,
            num_processors=program.num_processors,
            meter=StateMeter(program.num_socs),
        )
        self._program = program
        self._limit = repetitions
        self._finder = RecurrenceFinder() if extrapolate else None
        self._recurrence: Recurrence | None = None
        # Of each task. As turns: of tasks that are ready together, the one of the earlier repetition is served first.
        self._repetition = self._turn
        self._missing = [len(after) for after in program.after]
        # Round of the repetition.
        self._round = [0] * size
        self._next_round: list[list[int]] = [[] for _ in range(size)]
        for task in range(size):
            for other in program.after_round[task]:
                self._next_round[other].append(task)
        self._loop_of = _loops(program) if extrapolate else [None] * size
        self._ended_loop: _Loop | None = None
        # Virtual time of rounds that were not executed, which the present time does not include.
        self._skipped_s = 0.0
        self._oldest = 0
        self._num_oldest = size
        self._next: list[list[int]] = [[] for _ in range(size)]
        self._next_repetition: list[list[int]] = [[] for _ in range(size)]
        for task in range(size):
            for other in program.after[task]:
                self._next[other].append(task)
            for other in program.after_previous[task]:
                self._next_repetition[other].append(task)
        self._max_instances = max_instances
        self._instances: list[Instance] = []
        self._num_unlogged = 0
        self._ended_s = [0.0] * size

    def run(self) -> Outcome:
        """Return the outcome once no task is left."""
        first = [task for task, missing in enumerate(self._missing) if not missing]
        self._settle(self._start(first))
        self._run_until()
        assert self._is_done(), f"tasks of repetition {min(self._repetition)} can never finish"
        self._meter.settle_all(self._now_s)
        return Outcome(
            repetitions=self._limit,
            duration_s=self._now_s + self._skipped_s,
            seconds=self._meter.seconds,
            recurrence=self._recurrence,
            instances=self._instances,
            num_unlogged=self._num_unlogged,
            ended_s=self._ended_s,
        )

    def _is_done(self) -> bool:
        return self._oldest == self._limit or not self._steps

    def _settle(self, ended: Sequence[int]) -> None:
        super()._settle(ended)
        if self._ended_loop is not None:
            loop, self._ended_loop = self._ended_loop, None
            self._close_round(loop)
        if not self._num_oldest:
            self._close_repetition()

    def _complete(self, task: int, ready: list[int]) -> None:
        """Move a task to its next repetition, and release the tasks that waited for this one."""
        if not self._end_round(task, ready):
            return
        missing, repetition = self._missing, self._repetition
        finished = repetition[task]
        repetition[task] = following = finished + 1
        if finished == self._oldest:
            self._num_oldest -= 1
        # Before its dependents are released, so that a task that follows its own previous repetition counts once.
        program = self._program
        count = 0
        for other in program.after[task]:
            count += repetition[other] < following + 1
        for other in program.after_previous[task]:
            count += repetition[other] < following
        missing[task] = count
        if not count and following < self._limit:
            ready.append(task)
        for other in self._next[task]:
            if repetition[other] == finished:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        for other in self._next_repetition[task]:
            if repetition[other] == following and other != task:
                missing[other] -= 1
                if not missing[other] and following < self._limit:
                    ready.append(other)

    def _end_round(self, task: int, ready: list[int]) -> bool:
        """Move a task to its next round; return whether that was the last one."""
        now_s = self._now_s + self._skipped_s
        if self._max_instances:
            instance = Instance(
                task,
                self._repetition[task],
                self._round[task],
                self._start_s[task] + self._skipped_s,
                self._moved_s[task] + self._skipped_s,
                now_s,
            )
            self._log(instance)
        self._stage[task] = WAITING
        if self._round[task] + 1 < self._program.rounds[task]:
            self._begin_round(task, ready)
            return False
        self._round[task] = 0
        self._ended_s[task] = now_s
        return True

    def _begin_round(self, task: int, ready: list[int]) -> None:
        """Move a task to its next round, and release the tasks whose rounds waited for this one."""
        repetition, rounds, missing = self._repetition, self._round, self._missing
        own, following = repetition[task], rounds[task] + 1
        rounds[task] = following
        missing[task] = sum(
            [
                repetition[other] < own or (repetition[other] == own and rounds[other] < following)
                for other in self._program.after_round[task]
            ]
        )
        if not missing[task]:
            ready.append(task)
        for other in self._next_round[task]:
            if rounds[other] == following and repetition[other] == own:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        loop = self._loop_of[task]
        if loop is not None and loop.advance(own, following):
            self._ended_loop = loop

    def _close_round(self, loop: "_Loop") -> None:
        """If nothing but a loop is in progress and its state recurs, skip whole periods of its rounds."""
        tasks, rounds = loop.tasks, self._round
        if loop.finder is None or any(self._repetition[task] != loop.repetition for task in tasks):
            return
        latest = max([rounds[task] for task in tasks])
        # Other activities in progress would change the rates of the loop.
        active = sum([stage != WAITING for stage in self._stage])
        if active != sum([self._stage[task] != WAITING for task in tasks]):
            return
        self._meter.settle_all(self._now_s)
        oldest = min([rounds[task] for task in tasks])
        progress = [(task, rounds[task] - oldest) for task in tasks]
        found = loop.finder.find(self._state(oldest, progress))
        if found is None:
            return
        # Rounds are skipped once in a repetition.
        loop.finder = None
        periods = (loop.num_rounds - 1 - latest) // found.repetitions
        self._skipped_s += periods * found.period_s
        for task in tasks:
            rounds[task] += periods * found.repetitions
        for seconds, more in zip(self._meter.seconds, found.seconds, strict=True):
            for state, spent_s in more.items():
                seconds[state] = seconds.get(state, 0.0) + periods * spent_s

    def _close_repetition(self) -> None:
        """Record the end of the oldest repetition; if the state recurs, skip whole periods."""
        self._oldest = min(self._repetition)
        self._num_oldest = self._repetition.count(self._oldest)
        begun = max(self._repetition) + 1
        # Once a task has done its last repetition, the state differs from that of an endless run.
        if self._finder is None or self._recurrence is not None or begun > self._limit:
            return
        self._meter.settle_all(self._now_s)
        oldest = self._oldest
        progress = [(task, self._rounds_since(oldest, task)) for task in range(len(self._round))]
        self._recurrence = found = self._finder.find(self._state(oldest, progress))
        if found is not None:
            self._limit -= (self._limit - begun) // found.repetitions * found.repetitions

    def _rounds_since(self, oldest: int, task: int) -> int:
        """Return how many rounds a task has done since the start of repetition `oldest`."""
        repetitions = self._repetition[task] - oldest
        return repetitions * self._program.rounds[task] + self._round[task]

    def _state(
        self, oldest: int, progress: Iterable[tuple[int, int]], socs: Sequence[int] | None = None
    ) -> Snapshot:
        """Return the state of tasks, each with its progress since the oldest repetition or round, and of SoCs."""
        now_s = self._now_s
        shape: list[int] = []
        clocks_s: list[float] = []
        for task, done in progress:
            stage = self._stage[task]
            # Progress and stage in one number; there are fewer than 8 stages.
            shape.append(done * 8 + stage)
            if stage in (HANDLING, MOVING):
                clocks_s.append(self._flows.end_s[task] - now_s)
            elif stage:
                clocks_s.append(self._stamp_s[task] - now_s)
        all_seconds = self._meter.seconds
        seconds = [
            dict(all_seconds[soc]) for soc in (range(len(all_seconds)) if socs is None else socs)
        ]
        return Snapshot(oldest, now_s + self._skipped_s, tuple(shape), clocks_s, seconds)

    def _log(self, instance: Instance) -> None:
        if len(self._instances) < self._max_instances:
            self._instances.append(instance)
        else:
            self._num_unlogged += 1
