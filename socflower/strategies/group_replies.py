"""Reads the replies of a round's members: each group's model, or why there is none."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import cast

from flwr.app import ConfigRecord, Message

from socflower.cluster import Usage
from socflower.errors import ConfigError, TrainingFailed
from socflower.flower_adapter import log
from socflower.strategies.group_models import GroupMean, means_of
from socflower.strategies.mixed_replies import group_id_of
from socflower.strategies.replies import (
    GROUP_LOST,
    failure_event,
    failure_of,
    no_reply_event,
    outcome_of,
    read_outcome,
    sort_replies,
)
from socflower.strategies.reply_events import LATE, ReplyEvent, terminated_event
from socflower.strategies.round import Round
from socflower.wire.message_keys import (
    ARRAYS,
    COMPLETED,
    LEFT_OUT,
    NO_MODEL,
    NOTES,
    PREEMPTED,
    TERMINATED,
    RingOutcome,
    RoundNotes,
    decode,
    encode,
)


@dataclass(kw_only=True, slots=True)
class GroupProgress:
    """The replies so far of a group whose members form a ring."""

    group_id: int
    leader: int  # as planned
    node_of: Mapping[int, int]  # by SoC of the group, as planned
    members: tuple[int, ...]  # as of the latest attempt, without members that are lost
    tolerate_errors: bool
    # Replies by SoC, of members that have a model.
    completed: dict[int, Message] = field(default_factory=dict)
    without_model: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    # SoCs that another one's user has freed, so that the interval's work is lost.
    terminated: set[int] = field(default_factory=set)
    model: Message | None = None
    leader_replaced: bool = False  # the model came from another member than the planned leader
    events: list[ReplyEvent] = field(default_factory=list)
    away: set[int] = field(default_factory=set)  # SoCs that left or were dropped by their ring
    preempted: set[int] = field(default_factory=set)  # those whose departure is already an event
    # Losses of members that are not events yet.
    _losses: list[str] = field(default_factory=list)

    def where(self, soc: int) -> str:
        """Return a member's name in events."""
        return f"group {self.group_id}, SoC {soc} (node {self.node_of[soc]})"

    def on_reply(self, soc: int, reply: Message) -> None:
        """Record a member's reply; `TrainingFailed` if it raised and that is not tolerated."""
        if reply.has_error():
            event = failure_event(reply, self.group_id, self.where(soc))
            if event.kind == "client-raised" and not self.tolerate_errors:
                raise TrainingFailed(event.text)
            text = event.text.removeprefix(f"group {self.group_id}, ")
            if event.kind == "client-raised":
                # The others continue. If no member has the model, that is an event of its own.
                self.event("member-lost", text)
            else:
                self.on_loss(text)
            return
        try:
            outcome = read_outcome(reply)
        except ConfigError as error:
            self.event("malformed", f"SoC {soc}: {error}; its reply is dropped")
            return
        if outcome is None:
            self.event(
                "malformed",
                f"SoC {soc}: its reply has no outcome of its ring; make its ClientApp with "
                "socflower.make_client_app",
            )
        elif outcome.outcome == COMPLETED:
            self.completed[soc] = reply
            if (
                outcome.answers
                and (ARRAYS in reply.content.array_records or outcome.met)
                and self.model is None
            ):
                self.accept_model(soc, reply)
        elif outcome.outcome == PREEMPTED:
            self._record_departure(soc)
        elif outcome.outcome == TERMINATED:
            self.terminated.add(soc)
            for left in self.node_of.keys() & set(outcome.preempted):
                self._record_departure(left)
        elif outcome.outcome == NO_MODEL:
            self.without_model.add(soc)
        elif outcome.outcome == LEFT_OUT:
            self.left_out.add(soc)
            self.event(
                "left-out",
                f"SoC {soc} joined too late, or was silent; its ring continued without it",
            )

    def on_loss(self, text: str) -> None:
        """Record that a member is lost.

        It becomes an event only if the group has no model: a member that answers reports whom its ring has
        lost, and whether Flower has noticed by then depends on timing.
        """
        log(WARNING, "group %d: %s", self.group_id, text)
        self._losses.append(text)

    def begin_again(self, members: tuple[int, ...]) -> None:
        """Record that these members are asked again, and that the others are lost."""
        self._tell_losses()
        self.away |= set(self.members) - set(members)
        self.members, self.completed, self.without_model = members, {}, set()
        self.terminated, self.left_out = set(), set()

    def accept_model(self, soc: int, reply: Message) -> None:
        """Take a member's reply as the group's, with what its ring has logged."""
        outcome = cast(RingOutcome, outcome_of(reply))
        self.model = reply
        self.leader_replaced = soc != self.leader
        # A member that died may return at once as a new process; one that hangs still blocks its node.
        self.away |= set(self.members) - set(outcome.members)
        for left in self.node_of.keys() & set(outcome.preempted):
            self._record_departure(left)
        for line in outcome.log:
            self.event("member-lost", line)
        for line in outcome.notes:
            self.event("pipeline", line)
        for line in outcome.dropped:
            self.event("gradient-dropped", line)
        for seconds in outcome.recoveries_s:
            self.event("ring-formed-again", f"training again after {seconds:.2f} s")

    def event(self, kind: str, text: str) -> None:
        """Record an event of the group."""
        self.events.append(
            ReplyEvent(kind=kind, group_id=self.group_id, text=f"group {self.group_id}: {text}")
        )

    def notes(self) -> RoundNotes:
        """Return what a reply has to tell of the group besides its model."""
        if self.model is None:
            self._tell_losses()
            if self.terminated:
                self.events.append(terminated_event(self.group_id))
        return make_notes(
            self.events,
            self.away,
            [self.group_id] if self.leader_replaced else [],
            preempted=self.preempted,
        )

    def _tell_losses(self) -> None:
        for text in self._losses:
            self.event("member-lost", text)
        self._losses.clear()

    def _record_departure(self, soc: int) -> None:
        """Record a departure once: both the member that leaves and those that stay may report it."""
        self.away.add(soc)
        if soc not in self.preempted:
            self.preempted.add(soc)
            self.event("preempted", f"SoC {soc} was preempted by its user")


def make_notes(
    events: Iterable[ReplyEvent],
    away: Iterable[int] = (),
    leaders_replaced: Iterable[int] = (),
    *,
    preempted: Iterable[int] = (),
) -> RoundNotes:
    """Return notes of these events."""
    events = list(events)
    return RoundNotes(
        kinds=tuple(event.kind for event in events),
        groups=tuple(event.group_id for event in events),
        texts=tuple(event.text for event in events),
        away=tuple(sorted(away)),
        preempted=tuple(sorted(preempted)),
        leaders_replaced=tuple(sorted(leaders_replaced)),
    )


def events_of(notes: RoundNotes) -> list[ReplyEvent]:
    """Return the events of which these are the notes."""
    return [
        ReplyEvent(kind=kind, group_id=group, text=text)
        for kind, group, text in zip(notes.kinds, notes.groups, notes.texts, strict=True)
    ]


def attach_notes(reply: Message, notes: RoundNotes) -> None:
    """Add notes to those that a reply has."""
    # Of this grid: those of clients are removed on arrival.
    if NOTES in reply.content.config_records:
        notes = decode(RoundNotes, reply.content.config_records[NOTES], "notes") + notes
    reply.content[NOTES] = ConfigRecord(encode(notes))


def remove_notes(reply: Message) -> Message:
    """Return a reply without notes. Only a grid may write them: a client could exclude others with them."""
    if reply.has_content():
        reply.content.pop(NOTES, None)
    return reply


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledRound:
    """A round's replies, read."""

    usable: Sequence[Message]  # of groups whose model can be averaged, in group order
    means: Sequence[GroupMean]  # the models of those groups
    lost: tuple[ReplyEvent, ...]  # of groups whose work is lost
    events: tuple[ReplyEvent, ...]  # of failures and changes that groups recovered from
    away: frozenset[int]  # SoCs that left their rings, or were dropped by them
    preempted: frozenset[int]  # those of them that left for a user
    # Groups whose model came from another member than their leader.
    leaders_replaced: frozenset[int]
    # Where the clock decides which groups are late, so that it has run.
    usage: Usage | None = None

    def with_events(self, *events: ReplyEvent) -> "SettledRound":
        """Return the same with other events."""
        return replace(self, events=events)


def settle(
    this: Round,
    replies: Iterable[Message],
    *,
    tolerate_errors: bool,
    arrived: Collection[int] = (),
    lost: Sequence[ReplyEvent] = (),
) -> SettledRound:
    """Read the replies of a round, whether `GroupGrid` has settled its groups or any other grid brought all of them.

    Of groups in `arrived` there are replies to an earlier round; of those of the events `lost` there are none.

    Raises `TrainingFailed` if no group has a usable reply, or if a client raised and that is not tolerated.
    """
    replies = list(replies) if this.settled_by_grid else [remove_notes(reply) for reply in replies]
    records = [
        reply.content.config_records[NOTES]
        for reply in replies
        if reply.has_content() and NOTES in reply.content.config_records
    ]
    notes = sum((decode(RoundNotes, record, "notes") for record in records), start=RoundNotes())
    if this.in_rings and not records:
        replies, notes = _settle_rings(this, replies, tolerate_errors)
    events = events_of(notes)
    usable, all_lost = sort_replies(
        replies,
        this.group_of_node,
        [*lost, *(event for event in events if event.kind in GROUP_LOST)],
        tolerate_errors=tolerate_errors,
        sent=this.sent,
        late=[event.group_id for event in events if event.kind == LATE],
        may_be_none=bool(arrived),
    )
    means = means_of(this, usable)
    met = {group for mean in means for group in mean.groups}
    saved = [_only_leader_lost(event) for event in all_lost if event.group_id in met]
    twice = [_met_apart(group) for group in map(group_id_of, usable) if group not in met]
    return SettledRound(
        usable=[reply for reply in usable if group_id_of(reply) in met],
        means=means,
        lost=(*(event for event in all_lost if event.group_id not in met), *twice),
        events=(*(event for event in events if event.kind not in GROUP_LOST), *saved),
        away=frozenset(notes.away) & this.node_of.keys(),
        preempted=frozenset(notes.preempted) & this.node_of.keys(),
        leaders_replaced=frozenset(notes.leaders_replaced),
    )


def _only_leader_lost(event: ReplyEvent) -> ReplyEvent:
    text = f"{event.text.partition(';')[0]}; its model is in the mean of the leaders"
    return ReplyEvent(kind="leader-lost", group_id=event.group_id, text=text)


def _met_apart(group: int) -> ReplyEvent:
    text = f"group {group}: its leader met others that had met without it; left out of this synchronisation"
    return ReplyEvent(kind="no-reply", group_id=group, text=text)


def _settle_rings(
    this: Round, replies: Sequence[Message], tolerate_errors: bool
) -> tuple[list[Message], RoundNotes]:
    """Read the replies of all members; nobody was asked again, so a group without a model is lost."""
    groups = {
        group.group_id: GroupProgress(
            group_id=group.group_id,
            leader=group.leader,
            members=group.members,
            node_of={soc: this.node_of[soc] for soc in group.members},
            tolerate_errors=tolerate_errors,
        )
        for group in this.plan.groups
    }
    heard: set[int] = set()
    soc_of = {node: soc for soc, node in this.node_of.items()}
    for reply in replies:
        node = reply.metadata.src_node_id
        if node in this.group_of_node:
            groups[this.group_of_node[node].group_id].on_reply(soc_of[node], reply)
            heard.add(soc_of[node])
    for group in groups.values():
        # If members that hang were planned again, every round would run into its timeout.
        group.away |= set(group.members) - heard
    models = [group.model for group in groups.values() if group.model is not None]
    return models, sum((group.notes() for group in groups.values()), start=RoundNotes())


def no_model(notes: RoundNotes, first_group: int, where: str) -> TrainingFailed:
    """Return the error of a round in which no group has a model; `where` names the first group."""
    events = events_of(notes) or [no_reply_event(first_group, where)]
    return failure_of("no group sent a usable model", events)
