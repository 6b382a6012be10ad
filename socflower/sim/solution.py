"""What a program takes for any number of repetitions, from as few executions as that needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from socflower.sim.energy import State
from socflower.sim.execution import Execution, Outcome
from socflower.sim.flows import RateTable
from socflower.sim.program import Program


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

    def seconds(self) -> Sequence[dict[State, float]]:
        """Return the seconds of each SoC in each state."""
        recurrence = self.outcome.recurrence
        if not self.num_periods or recurrence is None:
            return self.outcome.seconds
        count = self.num_periods
        return [{state: base.get(state, 0.0) + count * more.get(state, 0.0) for state in {**base, **more}}
                for base, more in zip(self.outcome.seconds, recurrence.seconds, strict=True)]


class Solution:
    """One program at one speed; executions are kept and lengthened by whole periods."""

    def __init__(self, program: Program, *, extrapolate: bool, max_instances: int) -> None:
        self._program = program
        self._table = RateTable(program.paths, program.capacities)
        self._extrapolate = extrapolate
        self._max_instances = max_instances
        self._outcomes: list[Outcome] = []

    def repeated(self, repetitions: int) -> Repeated:
        """Return what `repetitions` take."""
        for outcome in self._outcomes:
            more = repetitions - outcome.repetitions
            if not more:
                return Repeated(outcome=outcome, num_periods=0)
            if outcome.recurrence and more > 0 and not more % outcome.recurrence.repetitions:
                return Repeated(outcome=outcome, num_periods=more // outcome.recurrence.repetitions)
        self._outcomes.append(Execution(
            self._program, self._table, repetitions, extrapolate=self._extrapolate,
            max_instances=self._max_instances).run())
        return self.repeated(repetitions)
