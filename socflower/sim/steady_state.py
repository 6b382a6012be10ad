"""The cost of any number of repetitions of a program: executed once, and extended by whole periods."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from socflower.sim.closing_tasks import ClosingExecution
from socflower.sim.compiled_graph import Program
from socflower.sim.energy import State
from socflower.sim.execution import Execution, Outcome
from socflower.sim.flows import RateTable
from socflower.sim.symmetry import ReducedProgram, reduce_program


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedRun:
    """`outcome` with `num_periods` periods of its recurrence inserted."""

    outcome: Outcome
    num_periods: int

    @property
    def inserted_s(self) -> float:
        """Seconds that were not simulated."""
        recurrence = self.outcome.recurrence
        return recurrence.period_s * self.num_periods if recurrence else 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from the start until the last task ends."""
        return self.outcome.duration_s + self.inserted_s

    def ended_s(self) -> list[float]:
        """Return when the last repetition of each task of the component ends."""
        return [at_s + self.inserted_s for at_s in self.outcome.ended_s]

    def seconds(self) -> Sequence[dict[State, float]]:
        """Return the seconds of each SoC in each state."""
        recurrence = self.outcome.recurrence
        if not self.num_periods or recurrence is None:
            return self.outcome.seconds
        count, total = self.num_periods, []
        for base, more in zip(self.outcome.seconds, recurrence.seconds, strict=True):
            own = dict(base)
            for state, spent_s in more.items():
                own[state] = own.get(state, 0.0) + count * spent_s
            total.append(own)
        return total


class SteadyState:
    """One program at one speed; executions are kept and extended by whole periods, symmetric parts executed once."""

    def __init__(self, program: Program, *, extrapolate: bool, max_instances: int) -> None:
        self._reduced = reduce_program(program) if extrapolate else None
        self._program = program if self._reduced is None else self._reduced.program
        weights = None if self._reduced is None else self._reduced.weights
        self._table = RateTable(self._program.paths, self._program.capacities, weights)
        self._extrapolate = extrapolate
        self._max_instances = max_instances
        self._outcomes: list[Outcome] = []

    def repeated(self, repetitions: int) -> RepeatedRun:
        """Return the result of `repetitions`."""
        for outcome in self._outcomes:
            more = repetitions - outcome.repetitions
            if not more:
                return RepeatedRun(outcome=outcome, num_periods=0)
            # The rest is a whole number of periods, which can be inserted.
            if outcome.recurrence and more > 0 and not more % outcome.recurrence.repetitions:
                return RepeatedRun(
                    outcome=outcome, num_periods=more // outcome.recurrence.repetitions
                )
        kind = ClosingExecution if self._program.has_closing_tasks else Execution
        outcome = kind(
            self._program,
            self._table,
            repetitions,
            extrapolate=self._extrapolate,
            max_instances=self._max_instances,
        ).run()
        self._outcomes.append(
            outcome if self._reduced is None else _expanded(outcome, self._reduced)
        )
        return self.repeated(repetitions)


def _expanded(outcome: Outcome, reduced: ReducedProgram) -> Outcome:
    """Return the outcome of the whole program from that of its classes."""
    members: list[list[int]] = [[] for _ in reduced.program.steps]
    if outcome.instances:
        for task, number in enumerate(reduced.task_class):
            members[number].append(task)
    recurrence = outcome.recurrence
    if recurrence is not None:
        seconds = [recurrence.seconds[number] for number in reduced.soc_class]
        recurrence = replace(recurrence, seconds=seconds)
    return replace(
        outcome,
        seconds=[outcome.seconds[number] for number in reduced.soc_class],
        recurrence=recurrence,
        members=members,
        ended_s=[outcome.ended_s[number] for number in reduced.task_class],
    )
