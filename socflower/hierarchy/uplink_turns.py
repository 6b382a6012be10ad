"""Whether communication groups take turns (F6), decided by the predicted time of a step with and without turns.

Turns overlap computation with exchanges, but uplinks are idle while messages are handled (F7).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from socflower.cluster import TaskGraph, VirtualClock
from socflower.errors import ConfigError
from socflower.hierarchy.communication_groups import conflicts
from socflower.hierarchy.interval_costs import IntervalCosts
from socflower.hierarchy.plan import GroupPlan

AUTO = "auto"
"""The setting with which the prediction decides."""

ASKED, PREDICTED, NO_SHARED_UPLINK, NOT_PREDICTED = (
    "asked",
    "predicted",
    "no-shared-uplink",
    "not-predicted",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Predicted seconds of a step of all groups, averaged over the training, at nominal speeds."""

    with_turns_s: float
    without_turns_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UplinkTurns:
    """Whether groups that share an uplink exchange in turn, and the reason."""

    enabled: bool
    decided_by: str

    def to_document(self) -> dict[str, Any]:
        """Return the entry for plan and result documents."""
        return {"uplink_turns": self.enabled, "uplink_turns_by": self.decided_by}


def step_times(work: IntervalCosts, lengths: Mapping[int, int], clock: VirtualClock) -> StepTimes:
    """Return the step times with and without turns, over all intervals; `work`'s own setting is ignored.

    `lengths` maps a number of steps to the number of intervals with that many.
    """
    num_steps = sum(length * count for length, count in lengths.items())

    def mean_s(graph: TaskGraph) -> float:
        times_s = (count * clock.predicted_s(graph, repeat=n) for n, count in lengths.items())
        return sum(times_s) / num_steps

    with_turns_s = mean_s(work.step(uplink_turns=True))
    without_turns_s = mean_s(work.step(uplink_turns=False))
    return StepTimes(with_turns_s=with_turns_s, without_turns_s=without_turns_s)


def choose_turns(
    plan: GroupPlan, uplink_turns: bool | str, predict: Callable[[], StepTimes] | None
) -> UplinkTurns:
    """Return the choice of `uplink_turns`, or with "auto" the faster one; on a tie, no turns.

    Without `predict`, groups that share an uplink take turns: by F7 a step takes max(C + S, 2S) with turns and C + 2S
    without, so turns are never slower; this ignores the time for handling messages. Raises `ConfigError` for any other
    value of `uplink_turns`.
    """
    if not isinstance(uplink_turns, bool) and uplink_turns != AUTO:
        raise ConfigError(f"uplink_turns = {uplink_turns!r} must be true, false or {AUTO!r}")
    # Without a shared uplink, turns would only delay exchanges.
    if not any(conflicts(plan.groups).values()):
        return UplinkTurns(enabled=False, decided_by=NO_SHARED_UPLINK)
    if isinstance(uplink_turns, bool):
        return UplinkTurns(enabled=uplink_turns, decided_by=ASKED)
    if predict is None:
        return UplinkTurns(enabled=True, decided_by=NOT_PREDICTED)
    times = predict()
    return UplinkTurns(enabled=times.with_turns_s < times.without_turns_s, decided_by=PREDICTED)
