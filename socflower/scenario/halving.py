"""Successive halving: all candidates train a little, the better half twice as far, and so on, the last to their end."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from socflower.scenario.candidates import PredictedCosts, by_fronts

NUM_RUNGS = 4
"""How many trainings the last candidates have, each twice as far as the one before."""
TIME, ENERGY = "time", "energy"


class Tried(Protocol):
    """A candidate that was trained a part of the way."""

    def costs(self) -> Sequence[PredictedCosts]:
        """Return what each of its settings costs to the target, as far as it is known."""


AnyTried = TypeVar("AnyTried", bound=Tried)


def part_of_rung(rung: int) -> float:
    """Return which part of the whole training a rung has, from 0: 1/8, 1/4, 1/2, 1."""
    return 2.0 ** (rung + 1 - NUM_RUNGS)


def halve(
    first: Sequence[AnyTried],
    farther: Callable[[AnyTried, int], AnyTried],
    prefer: str,
) -> list[AnyTried]:
    """Return the last candidates, two or more; `first` were trained in rung 0, and `farther` trains one in a rung.

    Farther go in turn those that are best in what is preferred, and those that no other dominates.
    """
    left = list(first)
    for rung in range(1, NUM_RUNGS):
        kept = ranked(left, prefer)[: max(2, math.ceil(len(left) / 2))]
        left = [farther(left[index], rung) for index in kept]
    return left


def ranked(tried: Sequence[Tried], prefer: str) -> list[int]:
    """Return all indices, those that should go farther first."""
    quickest = [min(each.costs(), key=_time) for each in tried]
    frugal = [min(each.costs(), key=_energy) for each in tried]
    preferred, key = (quickest, _time) if prefer == TIME else (frugal, _energy)
    alone = sorted(range(len(tried)), key=lambda index: key(preferred[index]))
    of_both = _in_turn(by_fronts(quickest), by_fronts(frugal))
    return _in_turn(alone, of_both)


def _in_turn(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the elements of both orders, alternating, each once."""
    return list(dict.fromkeys(each for pair in zip(first, second, strict=True) for each in pair))


def _time(costs: PredictedCosts) -> float:
    return costs.time_s


def _energy(costs: PredictedCosts) -> float:
    return costs.energy_j
