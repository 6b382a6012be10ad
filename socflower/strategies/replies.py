"""Sorts a round's replies into those that can be averaged and those that are dropped, with the cause."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from flwr.app import ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from socflower.errors import ConfigError, NodesLost, TrainingFailed
from socflower.flower_adapter import reason_of
from socflower.hierarchy import Group, first_non_finite
from socflower.strategies.records import array_views, layout_difference, layout_of
from socflower.strategies.reply_events import TERMINATED, ReplyEvent
from socflower.wire.message_keys import (
    ARRAYS,
    GROUP_ID,
    HEAT,
    LOST_STATE,
    METRICS,
    NUM_EXAMPLES,
    OUTCOME,
    HeatReport,
    RingOutcome,
    decode,
)

_CLIENT_FAULTS = (
    1,
    2,
)  # Flower's error codes of a ClientApp that cannot be loaded, and of one that raised

BACKEND_DROPPED = "backend-dropped"
"""The kind of event of a reply that is averaged although its client's accelerator failed."""

OUTER_STEP, NOT_EVALUATED = "outer-step", "not-evaluated"
"""Kinds of events of an outer strategy with too few groups for its rule, and of nodes that did not evaluate."""

GROUP_LOST = frozenset({"client-raised", "no-reply", TERMINATED})
"""Kinds of events of a lost group that `GroupGrid` reports, in place of the error reply."""

_LOSSES = frozenset({"no-reply", "member-lost", "leader-lost", "left-out", "ring-formed-again"})


def sort_replies(
    replies: Iterable[Message],
    group_of_node: Mapping[int, Group],
    lost: Iterable[ReplyEvent] = (),
    *,
    tolerate_errors: bool,
    sent: ArrayRecord | None = None,
    late: Collection[int] = (),
    may_be_none: bool = False,
) -> tuple[list[Message], tuple[ReplyEvent, ...]]:
    """Return the usable replies in group order, and an event for each group without one; some are known as `lost`.

    Groups in `late` are at work.

    Raises `TrainingFailed` if no reply is usable, unless there `may_be_none`, or if a client raised and
    `tolerate_errors` is not set: an exception is usually a mistake in the client's code, and its text is in the
    message. A client that has lost the state to resume from is never tolerated.
    """
    replies = list(replies)
    sent_views = array_views(sent or ArrayRecord())
    sent_means = {
        outcome.holds
        for reply in replies
        if reply.has_content()
        and ARRAYS in reply.content.array_records
        and (outcome := outcome_of(reply)) is not None
        and outcome.met
    }
    usable: dict[int, Message] = {}
    events = {event.group_id: event for event in lost}
    for reply in replies:
        # The error reply for a dead node has the SuperLink's id as its source: that group is found below.
        group = group_of_node.get(reply.metadata.src_node_id)
        if group is None:
            continue
        event = _fault_in_group(reply, group, sent_means, sent_views)
        if event is None:
            usable[group.group_id] = reply
        else:
            events[group.group_id] = event
    for group_id, difference in other_layouts(usable, sent).items():
        node_id = usable.pop(group_id).metadata.src_node_id
        where = _leader_of(group_of_node[node_id], node_id)
        events[group_id] = ReplyEvent(
            kind="malformed", group_id=group_id, text=f"{where}: {difference}, dropped"
        )
    for event in events.values():
        if event.kind == "client-raised" and (not tolerate_errors or LOST_STATE in event.text):
            raise TrainingFailed(event.text)
    for node_id, group in group_of_node.items():
        if group.group_id not in {*usable, *events, *late}:
            events[group.group_id] = no_reply_event(group.group_id, _leader_of(group, node_id))
    ordered = tuple(events[group_id] for group_id in sorted(events))
    if not usable and not may_be_none:
        raise failure_of("no group sent a usable model", ordered)
    return [usable[group_id] for group_id in sorted(usable)], ordered


def _leader_of(group: Group, node_id: int) -> str:
    return f"group {group.group_id}, SoC {group.leader} (node {node_id})"


def _fault_in_group(
    reply: Message,
    group: Group,
    sent_means: Collection[str],
    sent: Mapping[str, NDArray[Any]],
) -> ReplyEvent | None:
    """Return why a leader's reply cannot be averaged; `sent_means` are digests of means that some leader has sent."""
    where, outcome = _leader_of(group, reply.metadata.src_node_id), outcome_of(reply)
    has_mean = outcome is not None and bool(outcome.met) and outcome.holds in sent_means
    event = fault_of(reply, group.group_id, where, without_model=has_mean, sent=sent)
    event = event or _wrong_group_fault(reply, group.group_id, where)
    if event is None and has_mean and outcome is not None and group.group_id not in outcome.met:
        return ReplyEvent(
            kind="not-finite",
            group_id=group.group_id,
            text=f"{where}: its model is not in the mean of the leaders, since it has NaN or infinite "
            "values; a lower learning rate may help if groups diverge",
        )
    return event


def _wrong_group_fault(reply: Message, group_id: int, where: str) -> ReplyEvent | None:
    """Return the fault of a client that trained alone: its model would be averaged as that of its group."""
    if cast(MetricRecord, reply.content[METRICS]).get(GROUP_ID) == group_id:
        return None
    return ReplyEvent(
        kind="not-a-group",
        group_id=group_id,
        text=f"{where}: its ClientApp did not train as a group, dropped; make it with "
        "socflower.make_client_app",
    )


def other_layouts(replies: Mapping[int, Message], sent: ArrayRecord | None) -> dict[int, str]:
    """Return how models differ from the one that was sent; nothing if all replies have the same tensors."""
    layouts = {
        ident: layout_of(cast(ArrayRecord, reply.content[ARRAYS]))
        for ident, reply in replies.items()
        if ARRAYS in reply.content.array_records
    }
    if sent is None or all(layout == next(iter(layouts.values())) for layout in layouts.values()):
        return {}
    expected = layout_of(sent)
    return {
        ident: difference
        for ident, layout in layouts.items()
        if (difference := layout_difference(layout, expected))
    }


def failure_of(what: str, events: Sequence[ReplyEvent]) -> TrainingFailed:
    """Return the error of a round without a model; `NodesLost` if all that happened is that nodes were lost."""
    error = NodesLost if _LOSSES.issuperset(event.kind for event in events) else TrainingFailed
    return error(f"{what}; first cause: {events[0].text}")


def no_reply_event(group_id: int, where: str) -> ReplyEvent:
    """Return the event of a missing reply."""
    return ReplyEvent(
        kind="no-reply",
        group_id=group_id,
        text=f"{where}: no reply; left out of this synchronisation",
    )


def fault_of(
    reply: Message,
    group_id: int,
    where: str,
    *,
    without_model: bool = False,
    sent: Mapping[str, NDArray[Any]] | None = None,
) -> ReplyEvent | None:
    """Return why a reply cannot be averaged, or None if it can; `where` names its sender.

    `without_model`: the reply needs no model, since the mean of leaders contains it. Values that were infinite in
    `sent` are constants and may stay infinite.
    """
    if reply.has_error():
        return failure_event(reply, group_id, where)

    def fault(kind: str, text: str) -> ReplyEvent:
        return ReplyEvent(kind=kind, group_id=group_id, text=f"{where}: {text}")

    content = reply.content
    try:
        read_outcome(reply)
    except ConfigError as error:
        return fault("malformed", f"{error}; dropped")
    has_model = ARRAYS in content.array_records
    lacks_model = not has_model and not without_model
    if lacks_model and OUTCOME in content.config_records:
        return fault("group-left", "all of its SoCs were preempted by their users")
    if lacks_model or NUM_EXAMPLES not in content.metric_records.get(METRICS, {}):
        needed = f"{ARRAYS!r} or {METRICS!r} with {NUM_EXAMPLES!r}"
        return fault("malformed", f"its reply lacks {needed}, dropped")
    try:
        arrays = content.array_records.get(ARRAYS, ArrayRecord())
        tensor = first_non_finite(array_views(arrays), sent)
    except (ValueError, TypeError, EOFError) as error:
        return fault("malformed", f"its arrays cannot be read ({error}), dropped")
    if tensor is not None:
        return fault(
            "not-finite",
            f"{tensor} has NaN or infinite values, dropped; a lower learning rate may help if "
            "groups diverge",
        )
    num_examples = cast(MetricRecord, content[METRICS])[NUM_EXAMPLES]
    if num_examples == 0:
        advice = "give it data, or leave its SoCs out"
        return fault("malformed", f"it trained on no samples, dropped; {advice}")
    if not isinstance(num_examples, int | float) or not 0 < num_examples < math.inf:
        return fault(
            "malformed", f"{NUM_EXAMPLES} = {num_examples} is not a number above 0, dropped"
        )
    return None


def num_examples_of(reply: Message) -> float:
    """Return the samples that a usable reply was trained on."""
    return float(cast(float, cast(MetricRecord, reply.content[METRICS])[NUM_EXAMPLES]))


def read_outcome(reply: Message) -> RingOutcome | None:
    """Return the ring outcome in a reply, or None if it has none; `ConfigError` if it cannot be read."""
    record = reply.content.config_records.get(OUTCOME) if reply.has_content() else None
    return None if record is None else decode(RingOutcome, record, "outcome")


def outcome_of(reply: Message) -> RingOutcome | None:
    """Return the ring outcome in a reply, or None if there is none or it cannot be read."""
    try:
        return read_outcome(reply)
    except ConfigError:
        return None


def failure_event(reply: Message, group_id: int, where: str) -> ReplyEvent:
    """Return the event of an error reply."""
    raised = reply.error.code in _CLIENT_FAULTS
    return ReplyEvent(
        kind="client-raised" if raised else "no-reply",
        group_id=group_id,
        text=f"{where}: {'the client raised' if raised else 'failed:'} {reason_of(reply)}",
    )


def heat_events(reply: Message, ident: int, where: str) -> list[ReplyEvent]:
    """Return an event for a device that was throttled by heat, other users or its battery; `where` names it.

    A record that cannot be decoded becomes an event too: an invalid heat report must not end a training.
    """
    record = reply.content.config_records.get(HEAT) if reply.has_content() else None
    if record is None:
        return []
    try:
        report = HeatReport.decode(record)
    except (ConfigError, TypeError, ValueError) as error:
        return [
            ReplyEvent(
                kind="hot",
                group_id=ident,
                text=f"{where}: its heat record cannot be read ({error})",
            )
        ]
    if not report.triggered:
        return []
    parts = [
        f"at {report.temperature_c:.1f} C" if report.temperature_c is not None else "",
        f"at most {report.peak_c:.1f} C" if report.peak_c is not None else "",
        f"clocks at {report.clock_factor:.0%}" if report.clock_factor is not None else "",
        f"throttled for {report.throttled_s:.0f} s" if report.throttled_s else "",
        f"limited to {report.share:.0%} of its power" if report.share < 1.0 else "",
        f"others use {report.user_load:.0%}" if report.user_load else "",
        f"waited {report.paused_s:.0f} s" if report.paused_s else "",
    ]
    return [
        ReplyEvent(
            kind="hot",
            group_id=ident,
            text=f"{where}: {', '.join(filter(None, parts)) or 'slow clocks'}",
        )
    ]
