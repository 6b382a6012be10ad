"""The metric by which runs are compared, accuracy or loss, and the cost of reaching a target."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.quantities import MISSING, finite, percent, significant

_MARGIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """A metric of the test data by which models are compared, under its `name` in each round of a result."""

    name: str
    # Of an axis, with the unit, and with the better direction if it is not obvious.
    label: str
    lower_is_better: bool
    # In tables and sentences.
    shown: Callable[[Any], str]
    # On an axis.
    tick: Callable[[float], str]
    # Of an axis; noise would resemble progress below it.
    least_span: float

    @property
    def final_key(self) -> str:
        """The key of a result with the value after the last round."""
        return f"final_{self.name}"

    @property
    def target_key(self) -> str:
        """The key of a result with the value that runs are timed to; `None` there for the other metrics."""
        return f"target_{self.name}"

    @property
    def time_key(self) -> str:
        """The key of a result with the seconds until the target was reached."""
        return f"time_to_{self.name}_s"

    @property
    def energy_key(self) -> str:
        """The key of a result with the joules until the target was reached."""
        return f"energy_to_{self.name}_j"

    def reaches(self, value: Any, target: float) -> bool:
        """Return whether a value is as good as the target; a value that was not measured is not."""
        measured = finite(value)
        if measured is None:
            return False
        return measured <= target if self.lower_is_better else measured >= target

    def rank(self, value: Any) -> float:
        """Return a number that is smaller for better values; infinity for a value that was not measured."""
        measured = finite(value)
        if measured is None:
            return math.inf
        return measured if self.lower_is_better else -measured

    def common_target(self, results: Sequence[Mapping[str, Any]]) -> float | None:
        """Return a target that all results reach: 0.01 below the lowest accuracy, or 1 % above the highest loss.

        None if a result has no final accuracy, or if no result has a final loss; a training that diverged has no loss.
        """
        reached = [
            value for result in results if (value := finite(result.get(self.final_key))) is not None
        ]
        if self.lower_is_better:
            return max(reached) + _MARGIN * abs(max(reached)) if reached else None
        return max(0.0, min(reached) - _MARGIN) if len(reached) == len(results) else None

    def goal(self, target: float | None) -> str:
        """Return a target in words, such as "81.2%" or "loss 2.4"."""
        if target is None:
            return MISSING
        return self.shown(target) if self is ACCURACY else f"{self.name} {self.shown(target)}"


def _loss(value: Any) -> str:
    """Return a loss with four significant digits, and no zeros at their end: 2.41302 -> "2.413"."""
    number = finite(value)
    if number is None:
        return MISSING
    text = significant(number, 4)
    return text.rstrip("0").rstrip(".") if "." in text else text


ACCURACY = Quality(
    name="accuracy",
    label="accuracy on the test data",
    lower_is_better=False,
    shown=percent,
    tick=lambda value: percent(value, 0),
    least_span=0.1,
)
LOSS = Quality(
    name="loss",
    label="loss on the test data (lower is better)",
    lower_is_better=True,
    shown=_loss,
    tick="{:g}".format,
    least_span=0.0,
)
QUALITIES: Mapping[str, Quality] = {each.name: each for each in (ACCURACY, LOSS)}
TARGETS = tuple(each.target_key for each in QUALITIES.values())
"""The keys of a document with the targets; at most one target is set."""
_COST_KEYS = tuple(
    key for each in QUALITIES.values() for key in (each.target_key, each.time_key, each.energy_key)
)
FIGURES = ("quality", *(each.final_key for each in QUALITIES.values()), *_COST_KEYS)
"""The keys of a result with its quality and the cost of the target."""


def quality_of(results: Sequence[Mapping[str, Any]]) -> Quality:
    """Return the metric by which results, or their means, are compared: loss if one has only a loss, else accuracy."""
    return LOSS if any(result.get("quality") == LOSS.name for result in results) else ACCURACY


def final_figures(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's final accuracy and loss, and the one by which it is compared: accuracy if it has one."""
    has_only_loss = scores.get(ACCURACY.name) is None and LOSS.name in scores
    return {
        "quality": (LOSS if has_only_loss else ACCURACY).name,
        **{each.final_key: scores.get(each.name) for each in QUALITIES.values()},
    }


def costs_to_target(
    result: Mapping[str, Any],
    quality: Quality,
    target: float | None,
    *,
    in_wall_time: bool = False,
) -> dict[str, Any]:
    """Return the target, and the time and energy until the end of the first round that reached it, or None.

    The time is virtual time. It is wall time if there is no virtual time, or if the run is compared with such runs
    (`in_wall_time`). The keys of the other metric are None.
    """
    reached: Mapping[str, Any] = {}
    if target is not None:
        rounds = result["rounds"]
        good = (entry for entry in rounds if quality.reaches(entry.get(quality.name), target))
        reached = next(good, {})
    virtual_s = reached.get("virtual_s")
    return {
        **dict.fromkeys(_COST_KEYS),
        "quality": quality.name,
        quality.target_key: target,
        quality.time_key: reached.get("wall_s") if virtual_s is None or in_wall_time else virtual_s,
        quality.energy_key: reached.get("energy_j"),
    }
