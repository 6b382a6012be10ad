"""The number of groups, chosen by trials that are the beginning of the training itself (F2, SoCFlow+ section 3.1)."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from socflower.errors import ConfigError, TrainingFailed, require_range
from socflower.plain_numbers import plain_numbers

TIME, PAPER = "time", "paper"
GROUP_RULES = (TIME, PAPER)
"""How the trials are judged: by accuracy after equal time, or by the paper's floor after the first epoch."""

WARM_UP_SHARE = 0.25
"""The part of the predicted time of a run that trials may take, with the rule `TIME` (F2)."""

PAPER_FLOOR = 0.15
"""The accuracy to which the paper's "falls significantly, typically to around 15 %" refers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a trial has come to after a round."""

    # Of this trial alone.
    seconds: float
    epoch: float
    # The accuracy, or another score where higher is better; NaN if the training diverged.
    score: float


class Trial(Protocol):
    """A training in one number of groups, which trains a round at a time; a round ends with a synchronisation."""

    @property
    def run_s(self) -> float:
        """The predicted seconds of the whole training."""

    @property
    def next_s(self) -> float:
        """The predicted seconds of the next round; infinite after the last."""

    def advance(self) -> Measured:
        """Train the next round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCountChoice:
    """The chosen number of groups, and what the trials came to."""

    num_groups: int
    # The latest of each number of groups that was tried, in the order in which they began; NaN if one diverged.
    measured: Mapping[int, Measured]
    # Numbers that were not tried: their first round takes too much of the run, or the paper's search had ended.
    untried: tuple[int, ...] = ()

    @property
    def accuracies(self) -> dict[int, float]:
        """The latest accuracy of each number of groups that was tried."""
        return {number: measured.score for number, measured in self.measured.items()}


@plain_numbers
def default_candidates(num_socs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to `num_socs`: the numbers of groups that the paper's Figure 4 tries.

    Divisors of the number of SoCs are not preferred: groups whose sizes differ by one cost little, and the planner
    minimises the contention. Raises `ConfigError` below one SoC.
    """
    require_range("group count", least=1, num_socs=num_socs)
    return tuple(1 << exponent for exponent in range(num_socs.bit_length()))


@plain_numbers
def choose_by_floor(trials: Mapping[int, Trial], *, floor: float = PAPER_FLOOR) -> GroupCountChoice:
    """Return the largest number of groups before the accuracy of the first epoch falls below a floor (the paper's F2).

    Numbers are tried from few to many, each for an epoch of the training. The search ends at the first accuracy below
    `floor`, or that is NaN; the smallest number is taken if it is below itself. Raises `ConfigError` without candidates
    and for a floor outside [0, 1], `TrainingFailed` if the smallest number diverges.
    """
    ordered = _candidates(trials)
    require_range("group count", least=0.0, most=1.0, floor=floor)
    measured: dict[int, Measured] = {}
    best = ordered[0]
    for number in ordered:
        measured[number] = _first_epoch(trials[number])
        if math.isnan(measured[number].score) and number == ordered[0]:
            raise _all_diverged(measured)
        if not measured[number].score >= floor:
            break
        best = number
    untried = tuple(number for number in ordered if number not in measured)
    return GroupCountChoice(num_groups=best, measured=measured, untried=untried)


def _first_epoch(trial: Trial) -> Measured:
    measured = trial.advance()
    while measured.epoch < 1.0 and not math.isnan(measured.score) and trial.next_s < math.inf:
        measured = trial.advance()
    return measured


@plain_numbers
def choose_by_time(
    trials: Mapping[int, Trial],
    initial: float,
    *,
    otherwise: int = 1,
    share: float = WARM_UP_SHARE,
) -> GroupCountChoice:
    """Return the number of groups whose accuracy is best after equal time (F2), by successive halving.

    The accuracy after equal time stands for the time to a target that lies further ahead: the training that is ahead is
    taken to stay ahead. In each stage all trials that are left train until they have had equal time, then the better
    half continues from where it is, until one is left. The stages share what trials may take, `share` of the shortest
    predicted run among those that are left; so all trials together take at most that part of the run that is chosen,
    as predicted. The exception is a stage in which all diverge: one that left before is chosen then. The first stage
    has as many as that allows, quick runs first. If the slowest of those tried is the best, the next slower one is
    tried against it.

    A trial leaves once its score is NaN, or not above `initial`, the score before training, while another's
    is. Equal scores go to fewer groups. If fewer than two trials can be compared within `share`, none trains and the
    largest number up to `otherwise` is taken. Raises `ConfigError` without candidates and for a share outside [0, 1],
    `TrainingFailed` if all diverge.
    """
    ordered = _candidates(trials)
    require_range("group count", least=0.0, most=1.0, share=share)
    race = _Race(trials, initial, share)
    waiting = sorted(ordered, key=lambda number: (trials[number].run_s, -number))
    field = race.first_field(waiting)
    if len(field) < 2:
        number = max((each for each in ordered if each <= otherwise), default=ordered[0])
        return GroupCountChoice(num_groups=number, measured={}, untried=ordered)
    waiting = [number for number in waiting if number not in field]
    while len(field) > 1:
        slowest = max(field, key=lambda number: trials[number].run_s)
        ranked = race.rank(field)
        waiting = sorted(
            {*waiting, *(each for each in field if each not in race.measured)},
            key=lambda number: (trials[number].run_s, -number),
        )
        field = ranked[: max(1, len(field) // 2)]
        best = field[0]
        is_edge = trials[best].run_s >= trials[slowest].run_s or slowest in waiting
        if len(field) == 1 and is_edge and waiting and race.can_try(best, waiting[0]):
            field.append(waiting.pop(0))
    return GroupCountChoice(
        num_groups=field[0], measured=race.measured, untried=tuple(sorted(waiting))
    )


class _Race:
    """Trials that train side by side, and the seconds that all of them have taken."""

    def __init__(self, trials: Mapping[int, Trial], initial: float, share: float) -> None:
        self._trials, self._share = trials, share
        self._initial = 0.0 if math.isnan(initial) else initial
        self._points: dict[int, list[tuple[float, float]]] = {}
        self.measured: dict[int, Measured] = {}

    def first_field(self, waiting: Sequence[int]) -> list[int]:
        """Return the quickest runs, as many as can all train the slowest one's first round within their part."""
        field: list[int] = []
        for number in waiting:
            wider = [*field, number]
            most_s = max(self._trials[each].next_s for each in wider)
            if len(wider) * most_s > self._left_s(wider) / _num_halvings(wider):
                break
            field = wider
        return field

    def can_try(self, best: int, number: int) -> bool:
        """Return whether a trial's first round, and the best one's rounds until then, fit into what is left."""
        first_s = self._trials[number].next_s
        needed_s = first_s + max(0.0, first_s - self._seconds(best))
        return needed_s <= self._left_s([best, number])

    def rank(self, field: Collection[int]) -> list[int]:
        """Train a field for its part of what is left; return the trials that learn, the best after equal time first."""
        running, before_s = list(field), self._spent_s
        num_halvings = _num_halvings(running)
        while running:
            # The one that has had least time is next, so that all have had about equally much.
            number = min(running, key=lambda each: (self._seconds(each), self._trials[each].next_s))
            part_s = (self._share * self._least_run_s(running) - before_s) / num_halvings
            if self._spent_s + self._trials[number].next_s > before_s + part_s:
                break
            if math.isnan(self._advance(number)):
                running.remove(number)
        return self._ranked(running)

    def _ranked(self, field: Collection[int]) -> list[int]:
        """Return the trials of a field that learn, by their scores after equal time.

        If none does, those that left an earlier field take its place: any that learns, else any that has not diverged.
        """
        last = {number: measured.score for number, measured in self.measured.items()}
        learning = [number for number, score in last.items() if score > self._initial]
        in_field = [number for number in learning if number in field]
        pool = (
            in_field or learning or [each for each, score in last.items() if not math.isnan(score)]
        )
        if not pool:
            raise _all_diverged(self.measured)
        equal_s = min(map(self._seconds, pool))
        return sorted(pool, key=lambda number: (-self._score_at(number, equal_s), number))

    def _advance(self, number: int) -> float:
        measured = self._trials[number].advance()
        self.measured[number] = measured
        self._points.setdefault(number, [(0.0, self._initial)]).append(
            (measured.seconds, measured.score)
        )
        return measured.score

    def _score_at(self, number: int, seconds: float) -> float:
        """Return a trial's score at a time, between rounds on the line between their ends."""
        points = self._points[number]
        for (begin_s, begin), (end_s, end) in pairwise(points):
            if seconds < end_s:
                return begin + (end - begin) * (seconds - begin_s) / (end_s - begin_s)
        return points[-1][1]

    def _seconds(self, number: int) -> float:
        return self.measured[number].seconds if number in self.measured else 0.0

    @property
    def _spent_s(self) -> float:
        return math.fsum(measured.seconds for measured in self.measured.values())

    def _least_run_s(self, field: Collection[int]) -> float:
        return min(self._trials[number].run_s for number in field)

    def _left_s(self, field: Collection[int]) -> float:
        return self._share * self._least_run_s(field) - self._spent_s


def _num_halvings(field: Collection[int]) -> int:
    return max(1, math.ceil(math.log2(len(field))))


def _candidates(trials: Mapping[int, Trial]) -> tuple[int, ...]:
    ordered = tuple(sorted(trials))
    if not ordered or ordered[0] < 1:
        raise ConfigError(f"group count: candidates = {list(ordered)} must be numbers of 1 or more")
    return ordered


def _all_diverged(measured: Mapping[int, Measured]) -> TrainingFailed:
    tried = ", ".join(map(str, sorted(measured)))
    return TrainingFailed(
        f"group count: the training diverges with {tried} groups; lower the learning rate, or give a number of groups"
    )
