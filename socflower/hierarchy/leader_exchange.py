"""How the leaders of groups exchange their models (F8): in a ring, in a tree of boards and servers, or in a star."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from socflower.errors import ConfigError
from socflower.hierarchy.plan import GroupPlan

RING, TREE, STAR = "ring", "tree", "star"
KINDS = (RING, TREE, STAR)
AUTO = "auto"
"""The setting with which the prediction decides."""

ASKED, PREDICTED, ALONE, NOT_PREDICTED = "asked", "predicted", "one-group", "not-predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderExchange:
    """How leaders exchange models, and the reason."""

    kind: str = STAR
    decided_by: str = ASKED
    predicted_s: Mapping[str, float] = field(default_factory=dict)  # of a synchronisation of all groups, by kind

    def to_document(self) -> dict[str, Any]:
        """Return the entry for plan and result documents."""
        return {"leaders": self.kind, "leaders_by": self.decided_by, "leaders_s": dict(self.predicted_s)}


def choose_leaders(
    plan: GroupPlan, asked: str, predict: Callable[[str], float] | None, kinds: Sequence[str] = KINDS,
) -> LeaderExchange:
    """Return the kind that is asked for, or with "auto" that of `kinds` for which `predict` returns the fewest seconds.

    On a tie, and without `predict`, it is the first of `kinds`. Raises `ConfigError` for an unknown kind.
    """
    if asked not in (AUTO, *KINDS):
        raise ConfigError(f"leaders = {asked!r} is unknown; use {', '.join(map(repr, (AUTO, *KINDS)))}")
    if asked != AUTO:
        return LeaderExchange(kind=asked, decided_by=ASKED)
    if len(plan.groups) == 1 or predict is None:
        return LeaderExchange(kind=kinds[0], decided_by=ALONE if len(plan.groups) == 1 else NOT_PREDICTED)
    predicted_s = {kind: predict(kind) for kind in KINDS}
    best = min(kinds, key=predicted_s.__getitem__)
    return LeaderExchange(kind=best, decided_by=PREDICTED, predicted_s=predicted_s)
