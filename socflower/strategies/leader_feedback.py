"""The error feedback of compressed exchanges of leaders: what each group has still to send (F8).

For groups in one process the values are kept here. Members on their own machines keep the values themselves,
and this is their digest. It tells them in the next round whether their values are current: the group may have
been left out of an exchange, or have been led by another member.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from socflower.hierarchy.exchange.models import INT4, INT8
from socflower.strategies.group_models import GroupMean
from socflower.strategies.mixed_replies import group_id_of
from socflower.strategies.replies import outcome_of
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.round import GroupFeedback, Round


def feedback_after_round(
    this: Round,
    means: Sequence[GroupMean],
    usable: Sequence[Message],
) -> dict[int, GroupFeedback]:
    """Return the groups' error feedback after a round with these means and replies; see `Round.feedback`."""
    after = dict(this.feedback)
    replies = {group_id_of(reply): reply for reply in usable}
    for mean in means:
        after |= mean.feedback
        for group in mean.groups if this.in_rings else ():
            before = after.get(group, GroupFeedback())
            outcome = outcome_of(replies[group]) if group in replies else None
            if outcome is not None and outcome.met == mean.groups:
                # A group alone has sent nothing, and members that left may come back with what it owes.
                alone = mean.groups == (group,) and not outcome.feedback_sha256
                after[group] = before if alone else GroupFeedback(sha256=outcome.feedback_sha256)
            elif (
                len(mean.groups) > 1
            ):  # what it owes now went with those that met; what it owed has been sent
                after[group] = GroupFeedback()
    return {group: each for group, each in after.items() if each.sha256 or each.values is not None}


def lost_feedback(
    this: Round, means: Sequence[GroupMean], after: Mapping[int, GroupFeedback]
) -> list[ReplyEvent]:
    """Return an event for each group whose error feedback no member holds any more."""
    if this.exchanges.leaders.compression not in (INT8, INT4) or not this.in_rings:
        return []
    return [
        ReplyEvent(
            kind="leader-lost",
            group_id=group,
            text=(
                f"group {group}: what compression left of its change, up to half a step, is lost with its leader"
            ),
        )
        for mean in means
        if len(mean.groups) > 1
        for group in mean.groups
        if group not in after
    ]


def to_arrays(feedback: Mapping[int, GroupFeedback]) -> dict[str, NDArray[Any]]:
    """Return arrays by "group/part", as a checkpoint has them."""
    arrays: dict[str, NDArray[Any]] = {}
    for group, each in feedback.items():
        arrays[f"{group}/socs"] = np.array(sorted(each.socs), np.int64)
        arrays[f"{group}/sha256"] = np.frombuffer(each.sha256.encode(), np.uint8)
        if each.values is not None:
            arrays[f"{group}/values"] = each.values
    return arrays


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[int, GroupFeedback]:
    """Return what `to_arrays` stored."""
    groups = sorted({int(key.partition("/")[0]) for key in arrays})
    return {
        group: GroupFeedback(
            values=arrays.get(f"{group}/values"),
            socs=frozenset(arrays[f"{group}/socs"].tolist()),
            sha256=arrays[f"{group}/sha256"].tobytes().decode(),
        )
        for group in groups
    }
