"""Sorting a round's replies: what can be averaged, and what was dropped and why."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from flwr.app import ArrayRecord, Message, MetricRecord

from socflower.cluster.protocol import ARRAYS, METRICS, NUM_EXAMPLES
from socflower.errors import TrainingFailed
from socflower.hierarchy import Group, first_non_finite
from socflower.strategies.records import array_views

_CLIENT_RAISED = 2  # Flower's error code of a reply whose ClientApp raised an exception


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyEvent:
    """A reply that was not averaged in."""

    kind: str  # "client-raised", "no-reply", "not-finite" or "malformed"
    group_id: int
    text: str


def sort_replies(
    replies: Iterable[Message], group_of_node: Mapping[int, Group], *, tolerate_errors: bool,
) -> tuple[list[Message], tuple[ReplyEvent, ...]]:
    """Return the usable replies in group order, and an event for each group without one.

    Raises `TrainingFailed` if no reply is usable, or if a client raised and `tolerate_errors` is not set: that is
    a mistake in the client's code, and all that is known of it is in the text.
    """
    usable: dict[int, Message] = {}
    events: dict[int, ReplyEvent] = {}
    # A dead node's error carries the SuperLink's id as its source: those groups are found by their absence.
    for reply in replies:
        node_id = reply.metadata.src_node_id
        group = group_of_node.get(node_id)
        if group is None:
            continue
        event = _fault(reply, node_id, group)
        if event is None:
            usable[group.group_id] = reply
        elif event.kind == "client-raised" and not tolerate_errors:
            raise TrainingFailed(event.text)
        else:
            events[group.group_id] = event
    for node_id, group in group_of_node.items():
        if group.group_id not in usable and group.group_id not in events:
            events[group.group_id] = ReplyEvent(
                kind="no-reply", group_id=group.group_id,
                text=f"group {group.group_id}: no reply from its leader, SoC {group.leader} (node {node_id}); the "
                     "group is left out of this synchronisation")
    ordered = tuple(events[group_id] for group_id in sorted(events))
    if not usable:
        raise TrainingFailed(f"no group sent a usable model; first cause: {ordered[0].text}")
    return [usable[group_id] for group_id in sorted(usable)], ordered


def _fault(reply: Message, node_id: int, group: Group) -> ReplyEvent | None:
    where = f"group {group.group_id}, SoC {group.leader} (node {node_id})"
    if reply.has_error():
        raised = reply.error.code == _CLIENT_RAISED
        return ReplyEvent(kind="client-raised" if raised else "no-reply", group_id=group.group_id,
                          text=f"{where}: {'the client raised' if raised else 'failed:'} {reply.error.reason}")
    content = reply.content
    if ARRAYS not in content.array_records or NUM_EXAMPLES not in content.metric_records.get(METRICS, {}):
        return ReplyEvent(kind="malformed", group_id=group.group_id,
                          text=f"{where}: its reply lacks {ARRAYS!r} or {METRICS!r} with {NUM_EXAMPLES!r}, dropped")
    tensor = first_non_finite(array_views(cast(ArrayRecord, content[ARRAYS])))
    if tensor is not None:
        return ReplyEvent(kind="not-finite", group_id=group.group_id,
                          text=f"{where}: {tensor} has NaN or infinite values, dropped; a lower learning rate may "
                               "help if groups diverge")
    if not cast(float, cast(MetricRecord, content[METRICS])[NUM_EXAMPLES]) > 0:
        return ReplyEvent(kind="malformed", group_id=group.group_id,
                          text=f"{where}: {NUM_EXAMPLES} is not above 0, dropped")
    return None
