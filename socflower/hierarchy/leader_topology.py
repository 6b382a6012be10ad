"""How the leaders of groups exchange their models (F8): in a ring, in a tree over boards and servers, or in a star."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from socflower.errors import ConfigError
from socflower.hierarchy.plan import GroupPlan

RING, TREE, STAR = "ring", "tree", "star"
KINDS = (RING, TREE, STAR)
AUTO = "auto"
"""The setting with which the prediction decides."""

NONE, FP16, INT8 = "none", "fp16", "int8"
COMPRESSIONS = (NONE, FP16, INT8)
"""Formats of the model changes that leaders exchange; see `peers/leaders/model_changes.py`."""

COMPRESSING = (RING, TREE)
"""The kinds of exchange that can be compressed; in a star every reply to the hub would have to be."""

MOST_GROUPS_INT8 = 63
"""Limit of an int8 sum: each group needs a sign and a zero among the levels of a byte."""

_STEP_ELEMENTS = 4096
"""Elements of a block that share a quantisation step."""

ASKED, PREDICTED, ALONE, NOT_PREDICTED = "asked", "predicted", "one-group", "not-predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderExchange:
    """How leaders exchange models, and the reason."""

    kind: str = STAR
    decided_by: str = ASKED
    # Of a synchronisation of all groups, by kind.
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    compression: str = NONE

    def to_document(self) -> dict[str, Any]:
        """Return the entry for plan and result documents."""
        return {
            "leaders": self.kind,
            "leaders_by": self.decided_by,
            "leaders_s": dict(self.predicted_s),
            "leader_compression": self.compression,
        }


def choose_leaders(
    plan: GroupPlan,
    asked: str,
    predict: Callable[[str], float] | None,
    compression: str = NONE,
    kinds: Sequence[str] = KINDS,
) -> LeaderExchange:
    """Return the kind that is asked for, or with "auto" the one of `kinds` for which `predict` returns the least (F8).

    On a tie, and without `predict`, it is the first of `kinds`. With compression, only kinds that can be compressed are
    candidates. Raises `ConfigError` for an unknown kind, and for more groups than eight bits can sum.
    """
    if asked not in (AUTO, *KINDS):
        known = ", ".join(map(repr, (AUTO, *KINDS)))
        raise ConfigError(f"leaders = {asked!r} is unknown; use {known}")
    if compression == INT8 and len(plan.groups) > MOST_GROUPS_INT8:
        raise ConfigError(
            f"leader_compression = {INT8!r} sums at most {MOST_GROUPS_INT8} groups, not {len(plan.groups)}"
        )
    if asked != AUTO:
        return LeaderExchange(kind=asked, decided_by=ASKED, compression=compression)
    kinds = kinds if compression == NONE else COMPRESSING
    if len(plan.groups) == 1 or predict is None:
        reason = ALONE if len(plan.groups) == 1 else NOT_PREDICTED
        return LeaderExchange(kind=kinds[0], decided_by=reason, compression=compression)
    predicted_s = {kind: predict(kind) for kind in kinds}
    best = min(kinds, key=predicted_s.__getitem__)
    return LeaderExchange(
        kind=best, decided_by=PREDICTED, predicted_s=predicted_s, compression=compression
    )


def tree_levels(places: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return which leaders exchange at each level of a tree, as tuples of positions; the first of a tuple sums for all.

    `places` has the place of each leader, such as (board, server), narrowest first. At the last level all leaders that
    are left exchange.
    """
    present, levels = list(range(len(places))), []
    for level in range(len(places[0]) + 1):
        meeting: dict[int, list[int]] = {}
        for position in present:
            meeting.setdefault((*places[position], 0)[level], []).append(position)
        levels.append([tuple(own) for own in meeting.values()])
        # Only the leaders that sum exchange at the next level.
        present = [own[0] for own in meeting.values()]
    return levels


def compression_fault(leaders: str, compression: str) -> str:
    """Return why leaders of this kind cannot compress; empty if they can."""
    if compression == NONE or leaders in (AUTO, *COMPRESSING):
        return ""
    able = " or ".join(map(repr, (*COMPRESSING, AUTO)))
    return f"leader_compression = {compression!r} needs leaders = {able}, not {leaders!r}"


def exchanged_bytes(num_bytes: float, compression: str) -> float:
    """Return the bytes exchanged for a float32 model of `num_bytes`: all, half, or a quarter and the steps."""
    return num_bytes * {NONE: 1.0, FP16: 1 / 2, INT8: 1 / 4 + 1 / _STEP_ELEMENTS}[compression]
