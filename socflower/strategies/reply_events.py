"""What a result says of an unusual reply; apart from `replies.py`, since planning loads no Flower."""

from dataclasses import dataclass

LATE, ARRIVED, LATE_DROPPED = "late", "arrived", "late-dropped"
"""Kinds of events with a quorum: a group continues with its interval, its work counts, or it never will."""

TERMINATED = "terminated"
"""The kind of event of a group that a user ended by taking one of its SoCs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyEvent:
    """A reply that was dropped, or a failure or change in a group that was recovered from."""

    # A group's work is lost: "client-raised", "no-reply", "not-finite", "malformed", "not-a-group", "group-left",
    # "terminated".
    # It is kept: "backend-dropped" (an accelerator failed), "preempted", "returned", "replanned", "no-answer" (nodes
    # left out at the start), "re-balanced", "hot" (a device was throttled).
    # With a quorum: "late", "arrived", "late-dropped".
    # In rings: "member-lost", "resting" (a member that was lost several times), "left-out",
    # "leader-lost", "ring-formed-again", "pipeline" (a change of its plan),
    # "gradient-dropped" (of one member).
    # Of no group: "outer-step", "not-evaluated".
    kind: str
    # Of a client that trains alone: its SoC.
    group_id: int
    text: str


def late_event(kind: str, group_id: int, text: str) -> ReplyEvent:
    """Return an event of a group that is or was late."""
    return ReplyEvent(kind=kind, group_id=group_id, text=f"group {group_id}: {text}")


def terminated_event(group_id: int) -> ReplyEvent:
    """Return the event of a group that a user ended."""
    text = f"group {group_id}: terminated, as a user took one of its SoCs; its interval is lost"
    return ReplyEvent(kind=TERMINATED, group_id=group_id, text=text)
