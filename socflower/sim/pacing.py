"""Independent parts of a graph, each with its own progress while the speeds of SoCs change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from socflower.cluster.virtual_clock import Pace
from socflower.sim.execution import Repeated, Solution
from socflower.sim.program import Component

_SAME_INSTANT = 1e-9
"""Tolerance relative to a stretch: a repetition that ends this little later ends with it."""


@dataclass(slots=True)
class Part:
    """A component and its progress; `solution` is that of the present speeds."""

    component: Component
    solution: Solution
    left: int  # repetitions
    ahead_s: float  # to the end of the repetition in progress
    before_s: float = 0.0  # of the stretch, that went on that repetition
    work_s: float = 0.0  # of the stretch, that went on new ones
    idle_s: float = 0.0  # of the stretch, after the last one
    done: Repeated | None = None  # in the stretch
    repetitions: int = 0  # in the stretch

    def end_s(self, repetitions: int) -> float:
        """Return when so many repetitions more have ended, from now."""
        return self.ahead_s + (self.solution.repeated(repetitions).duration_s if repetitions else 0.0)

    def spend(self, stretch_s: float) -> None:
        """Execute all repetitions that begin within the stretch; the last one may end after it."""
        self.before_s = min(self.ahead_s, stretch_s)
        self.repetitions = self._beginning(stretch_s)
        end_s = self.end_s(self.repetitions)
        self.done = self.solution.repeated(self.repetitions) if self.repetitions else None
        self.left -= self.repetitions
        self.work_s = max(0.0, min(end_s, stretch_s) - self.ahead_s) if self.repetitions else 0.0
        self.ahead_s = end_s - stretch_s if end_s > stretch_s * (1.0 + _SAME_INSTANT) else 0.0
        self.idle_s = max(0.0, stretch_s - self.before_s - self.work_s)

    def _beginning(self, stretch_s: float) -> int:
        """Return how many of the repetitions that are left begin within the stretch."""
        if not self.left or self.end_s(self.left) <= stretch_s:
            return self.left
        limit_s = stretch_s * (1.0 - _SAME_INSTANT)
        if self.ahead_s >= limit_s:
            return 0
        # The last to begin does so when those before it have ended. Filling and draining cost the same for few
        # repetitions as for many, so this may be too high, and rounding may make it too low.
        whole_s = self.end_s(self.left) - self.ahead_s
        before = min(self.left - 1, int((limit_s - self.ahead_s) / whole_s * self.left))
        while before and self.end_s(before) >= limit_s:
            before -= 1
        while before + 1 < self.left and self.end_s(before + 1) < limit_s:
            before += 1
        return before + 1


def parts_of(components: Sequence[Component], pace: Pace, solve: Callable[[Component], Solution]) -> list[Part]:
    """Return the components with their SoCs' remaining work; a part without SoCs has as much as the others."""
    most = max(pace.remaining.values(), default=0)
    return [Part(component, solve(component), min((pace.remaining[soc] for soc in component.socs), default=most),
                 max((pace.ahead_s.get(soc, 0.0) for soc in component.socs), default=0.0))
            for component in components]


def stretch_s(parts: Sequence[Part], hold_s: float, at_most: int | None = None) -> float:
    """Return how long to continue: while speeds are constant, work remains, and no part has done `at_most`."""
    all_s = max((part.end_s(part.left) for part in parts), default=0.0)
    few_s = (part.end_s(at_most) for part in parts if at_most is not None and part.left > at_most)
    return min(hold_s, all_s, *few_s)


def advance_pace(pace: Pace, parts: Sequence[Part]) -> None:
    """Write the parts' progress to `pace`."""
    for part in parts:
        for soc in part.component.socs:
            pace.remaining[soc], pace.ahead_s[soc] = part.left, part.ahead_s
