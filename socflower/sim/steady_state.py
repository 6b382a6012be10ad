"""What so many repetitions of a program take: executed once, and lengthened by whole periods."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from socflower.sim.closing_tasks import ClosedExecution
from socflower.sim.compiled_graph import Program
from socflower.sim.energy import State
from socflower.sim.execution import Execution, Outcome
from socflower.sim.flows import RateTable
from socflower.sim.symmetry import Folded, fold


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
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
        count = self.num_periods
        return [
            {
                state: base.get(state, 0.0) + count * more.get(state, 0.0)
                for state in {**base, **more}
            }
            for base, more in zip(self.outcome.seconds, recurrence.seconds, strict=True)
        ]


class SteadyState:
    """One program at one speed; executions are kept and lengthened by whole periods, symmetric parts executed once."""

    def __init__(self, program: Program, *, extrapolate: bool, max_instances: int) -> None:
        self._folded = fold(program) if extrapolate else None
        self._program = program if self._folded is None else self._folded.program
        self._table = RateTable(
            self._program.paths,
            self._program.capacities,
            None if self._folded is None else self._folded.weights,
        )
        self._extrapolate = extrapolate
        self._max_instances = max_instances
        self._outcomes: list[Outcome] = []

    def repeated(self, repetitions: int) -> Repeated:
        """Return the result of `repetitions`."""
        for outcome in self._outcomes:
            more = repetitions - outcome.repetitions
            if not more:
                return Repeated(outcome=outcome, num_periods=0)
            if outcome.recurrence and more > 0 and not more % outcome.recurrence.repetitions:
                return Repeated(outcome=outcome, num_periods=more // outcome.recurrence.repetitions)
        kind = ClosedExecution if self._program.is_closed else Execution
        outcome = kind(
            self._program,
            self._table,
            repetitions,
            extrapolate=self._extrapolate,
            max_instances=self._max_instances,
        ).run()
        self._outcomes.append(outcome if self._folded is None else _unfolded(outcome, self._folded))
        return self.repeated(repetitions)


def _unfolded(outcome: Outcome, folded: Folded) -> Outcome:
    """Return the outcome of the whole program from that of its classes."""
    recurrence = outcome.recurrence
    members: list[list[int]] = [[] for _ in folded.program.steps]
    if outcome.instances:
        for task, number in enumerate(folded.task_class):
            members[number].append(task)
    return replace(
        outcome,
        seconds=[outcome.seconds[number] for number in folded.soc_class],
        recurrence=None
        if recurrence is None
        else replace(
            recurrence, seconds=[recurrence.seconds[number] for number in folded.soc_class]
        ),
        members=members,
        ended_s=[outcome.ended_s[number] for number in folded.task_class],
    )
