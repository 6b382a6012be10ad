"""A round on real machines: every member of a group gets its place in the ring, one of them answers with the model."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from typing import TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from socflower.errors import ConfigError, TrainingFailed
from socflower.hierarchy import Group, conflicts
from socflower.strategies.replies import ReplyEvent, failure_event
from socflower.strategies.roster import QUERY_TYPE, is_question
from socflower.wire.message_keys import (
    ARRAYS,
    ASK,
    ASK_MODEL,
    COMPLETED,
    COMPRESSIONS,
    CONFIG,
    GROUP,
    LEFT_OUT,
    NO_MODEL,
    OUTCOME,
    PREEMPTED,
    RING,
    TRANSPORTS,
    GroupTask,
    RingOutcome,
    RingTask,
    decode,
    encode,
)

_TOKEN_BYTES = 32
_NUM_ATTEMPTS = 3  # at a group's interval, each with those that answered to the one before
_PULL_INTERVAL_S = 0.25
_LOOK_INTERVAL_S = 3.0  # between looks at which nodes are still there


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSettings:
    """How groups exchange gradients where their members are real machines.

    `transport`: "gloo" for a trusted network, "grpc" with mutual TLS for any other; "auto" takes what the nodes are
    configured for. `compression`: "none", "fp16", "int8", "int8-stochastic" or "dgc". A member that gives no sign of
    life for `heartbeat_s` is left behind, one that does not come to its ring within `rendezvous_s` is not waited for.
    If the member that answers for a group keeps silent `leader_grace_s` longer than the others, one of them is asked.
    """

    transport: str = "auto"
    compression: str = "none"
    heartbeat_s: float = 5.0
    rendezvous_s: float = 90.0
    leader_grace_s: float = 30.0

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"rings: transport = {self.transport!r} is unknown; use one of {', '.join(TRANSPORTS)}")
        if self.compression not in COMPRESSIONS:
            raise ConfigError(f"rings: compression = {self.compression!r} is unknown; use one of "
                              f"{', '.join(COMPRESSIONS)}")
        for key in ("heartbeat_s", "rendezvous_s", "leader_grace_s"):
            if not 0.0 < getattr(self, key) < float("inf"):
                raise ConfigError(f"rings: {key} = {getattr(self, key)} must be above 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where the members of a round are."""

    node_of: Mapping[int, int]  # by SoC
    address_of: Mapping[int, str]
    participant_of: Mapping[int, int]


TaskOf: TypeAlias = Callable[[Group], GroupTask]


@dataclass(slots=True)
class _GroupRound:
    """What is known of a group in a round."""

    group: Group  # as it was asked last: members that are gone are no longer in it
    attempt: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # message ids of this attempt, and SoCs
    completed: dict[int, Message] = field(default_factory=dict)  # by SoC, of members that have a model
    without_model: set[int] = field(default_factory=set)
    fetching: dict[str, int] = field(default_factory=dict)  # questions for a member's model
    fetched_from: set[int] = field(default_factory=set)
    told_of_leaving: set[int] = field(default_factory=set)  # SoCs whose leaving is an event already
    grace_until_s: float | None = None  # after this those that have not answered are not waited for
    fetch_until_s: float = 0.0  # after this another member is asked as well
    model: Message | None = None
    failed: bool = False

    @property
    def settled(self) -> bool:
        return self.model is not None or self.failed


class RingRound:
    """One round's messages and replies.

    The model travels to leaders only, and only from them (F8). A group whose leader never came is asked again without
    it; where the member that should answer is gone, another one that finished with it is asked for the model. One
    answer of a group counts.
    """

    def __init__(
        self, groups: Sequence[Group], communication_groups: Sequence[Sequence[int]], places: Places,
        settings: RingSettings, transport: str, task_of: TaskOf, configs: Mapping[int, ConfigRecord],
        arrays: ArrayRecord, *, serialize_uplinks: bool, num_buckets: int, group_id: str, tolerate_errors: bool,
        rebalance_steps: int = 0,
    ) -> None:
        self._rounds = {group.group_id: _GroupRound(group) for group in groups}
        self._leader_of = {group.group_id: group.leader for group in groups}  # as planned
        self._turn_of = {ident: turn for turn, ids in enumerate(communication_groups) for ident in ids}
        self._conflicts = conflicts(groups) if serialize_uplinks else {}
        self._places, self._settings, self._transport = places, settings, transport
        self._task_of, self._configs, self._arrays = task_of, configs, arrays
        self._num_buckets, self._group_id, self._tolerate = num_buckets, group_id, tolerate_errors
        self._rebalance_steps = rebalance_steps
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self.events: list[ReplyEvent] = []
        self.led_by_others: set[int] = set()  # groups for which another member than their leader has answered
        self.away: set[int] = set()  # SoCs that left, or that their rings went on without

    def messages(self) -> list[Message]:
        """Return the first messages, group by group in the order of their rings."""
        return [message for entry in self._rounds.values() for message, _ in self._group_messages(entry)]

    def exchange(
        self, grid: Grid, messages: Sequence[Message], timeout_s: float | None, hear: Callable[[Message], None],
        questions: dict[str, int],
    ) -> list[Message]:
        """Send the messages, see the round through and return a reply with a model for each group that has one.

        `messages` are those of `messages()` and questions of the roster, whose answers go to `hear`. Ends as soon as
        all groups have answered, whatever else is still on its way: `questions` are those that were open, message ids
        and nodes, and is left with those that still are.
        """
        ids = list(grid.push_messages(messages))
        socs = {self._places.node_of[soc]: (entry, soc) for entry in self._rounds.values()
                for soc in entry.group.members}
        for message_id, message in zip(ids, messages, strict=True):
            if is_question(message):
                questions[message_id] = message.metadata.dst_node_id
            else:
                entry, soc = socs[message.metadata.dst_node_id]
                entry.waiting[message_id] = soc
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        look_s = time.monotonic() + _LOOK_INTERVAL_S
        while not all(entry.settled for entry in self._rounds.values()):
            open_ids = {*questions, *(ident for entry in self._rounds.values() if not entry.settled
                                      for ident in (*entry.waiting, *entry.fetching))}
            for reply in grid.pull_messages(open_ids):
                message_id = reply.metadata.reply_to_message_id
                if message_id in questions:
                    del questions[message_id]
                    hear(reply)
                    continue
                for entry in self._rounds.values():
                    if entry.settled:  # by another of these replies
                        continue
                    if message_id in entry.waiting:
                        self._take(entry, entry.waiting.pop(message_id), reply)
                    elif message_id in entry.fetching:
                        self._take_fetched(entry, entry.fetching.pop(message_id), reply)
            if time.monotonic() > look_s:
                self._forget_the_gone(set(grid.get_node_ids()))
                look_s = time.monotonic() + _LOOK_INTERVAL_S
            for entry in self._rounds.values():
                if not entry.settled:
                    self._go_on(entry, grid)
            if deadline_s is not None and time.monotonic() > deadline_s:
                # Planned with again, those that hang would cost every round its whole time.
                self.away |= {soc for entry in self._rounds.values() if not entry.settled
                              for soc in entry.waiting.values()}
                break
            time.sleep(_PULL_INTERVAL_S)
        for reply in grid.pull_messages(list(questions)) if questions else ():
            questions.pop(reply.metadata.reply_to_message_id, None)
            hear(reply)
        return [entry.model for entry in self._rounds.values() if entry.model is not None]

    # ------------------------------------------------------------------------------------------------ sending

    def _group_messages(self, entry: _GroupRound) -> list[tuple[Message, int]]:
        group = entry.group
        task, places = self._task_of(group), self._places
        before = sorted(other for other in self._conflicts.get(group.group_id, ())
                        if self._turn_of[other] < self._turn_of[group.group_id])
        after = sorted(self._conflicts.get(group.group_id, frozenset()) - set(before))
        neighbours = tuple(f"{other} {places.participant_of[soc]} {places.address_of[soc]}"
                           for other in (*before, *after) for soc in self._rounds[other].group.members)
        made = []
        for soc in group.members:
            ring = RingTask(
                participant=places.participant_of[soc], leader=places.participant_of[group.leader],
                addresses=tuple(places.address_of[member] for member in group.members), token=self._token,
                transport=self._transport, num_buckets=self._num_buckets, compression=self._settings.compression,
                heartbeat_s=self._settings.heartbeat_s, rendezvous_s=self._settings.rendezvous_s,
                rebalance_steps=self._rebalance_steps, groups_before=tuple(before), groups_after=tuple(after),
                neighbours=neighbours)
            content = RecordDict({CONFIG: self._configs[group.group_id], GROUP: ConfigRecord(task.encode()),
                                  RING: ConfigRecord(encode(ring))})
            if soc == group.leader:
                content[ARRAYS] = self._arrays
            made.append((Message(content, places.node_of[soc], MessageType.TRAIN, group_id=self._group_id), soc))
        return made

    def _ask_again(self, entry: _GroupRound, grid: Grid, survivors: Sequence[int]) -> None:
        """Send a group's work anew to those of its members that answered, with a new token for their ring."""
        entry.attempt += 1
        group = entry.group
        leader = group.leader if group.leader in survivors else survivors[0]
        gone = [soc for soc in group.members if soc not in survivors]
        entry.group = Group(group_id=group.group_id, members=tuple(survivors), leader=leader, boards=group.boards)
        entry.completed, entry.without_model, entry.grace_until_s = {}, set(), None
        self.away |= set(gone)
        self._event("member-lost", group, f"the model was lost with SoCs {', '.join(map(str, gone))}; the others are "
                                          f"asked again, led by SoC {leader}")
        token, self._token = self._token, secrets.token_hex(_TOKEN_BYTES)
        try:
            made = self._group_messages(entry)
        finally:
            self._token = token
        ids = grid.push_messages([message for message, _ in made])
        entry.waiting = {ident: soc for ident, (_, soc) in zip(ids, made, strict=True)}

    # ---------------------------------------------------------------------------------------------- receiving

    def _take(self, entry: _GroupRound, soc: int, reply: Message) -> None:
        where = f"group {entry.group.group_id}, SoC {soc} (node {self._places.node_of[soc]})"
        if reply.has_error():
            event = failure_event(reply, entry.group.group_id, where)
            if event.kind == "client-raised" and not self._tolerate:
                raise TrainingFailed(event.text)
            # The others go on: the group's work is lost only if nobody answers with it, which is an event of its own.
            self._event("member-lost", entry.group, event.text.removeprefix(f"group {entry.group.group_id}, "))
            return
        record = reply.content.config_records.get(OUTCOME)
        if record is None:
            self._event("malformed", entry.group, f"SoC {soc}: its reply says nothing of its ring; make its ClientApp "
                                                  "with socflower.make_client_app")
            return
        outcome = decode(RingOutcome, record, "outcome")
        if outcome.outcome == COMPLETED:
            entry.completed[soc] = reply
            if outcome.answers and ARRAYS in reply.content.array_records:
                self._settle(entry, reply, outcome)
        elif outcome.outcome == PREEMPTED:
            self._note_leaving(entry, soc)
        elif outcome.outcome == NO_MODEL:
            entry.without_model.add(soc)
        elif outcome.outcome == LEFT_OUT:
            self._event("left-out", entry.group, f"SoC {soc} came too late, or was silent; its ring went on without it")

    def _settle(self, entry: _GroupRound, reply: Message, outcome: RingOutcome) -> None:
        entry.model = reply
        if reply.metadata.src_node_id != self._places.node_of[self._leader_of[entry.group.group_id]]:
            self.led_by_others.add(entry.group.group_id)
        # Those that died may come back at once, as new processes; one that hangs still blocks its node.
        self.away |= set(entry.group.members) - set(outcome.members)
        for soc in outcome.preempted:
            self._note_leaving(entry, soc)
        for line in outcome.log:
            self._event("member-lost", entry.group, line)
        for seconds in outcome.recoveries_s:
            self._event("ring-formed-again", entry.group, f"training again after {seconds:.2f} s")

    def _note_leaving(self, entry: _GroupRound, soc: int) -> None:
        """Both the member that leaves and those that stay say so; the first to do it may be the only one."""
        self.away.add(soc)
        if soc not in entry.told_of_leaving:
            entry.told_of_leaving.add(soc)
            self._event("preempted", entry.group, f"SoC {soc} has left for its user's own work")

    def _take_fetched(self, entry: _GroupRound, soc: int, reply: Message) -> None:
        if reply.has_error() or ARRAYS not in reply.content.array_records:
            return
        own = entry.completed[soc]
        own.content[ARRAYS] = reply.content.array_records[ARRAYS]
        self._event("leader-lost", entry.group, f"the member that should answer did not; SoC {soc} did")
        self._settle(entry, own, decode(RingOutcome, own.content.config_records[OUTCOME], "outcome"))
        self.away |= set(entry.waiting.values())  # silent for the whole grace

    def _forget_the_gone(self, there: Collection[int]) -> None:
        """Wait no longer for nodes that have left the federation: nobody will answer for them."""
        for entry in self._rounds.values():
            if entry.settled:
                continue
            for message_id, soc in list(entry.waiting.items()):
                if self._places.node_of[soc] not in there:
                    del entry.waiting[message_id]
                    self._event("member-lost", entry.group, f"SoC {soc}: its node "
                                                            f"{self._places.node_of[soc]} is gone")
            entry.fetching = {message_id: soc for message_id, soc in entry.fetching.items()
                              if self._places.node_of[soc] in there}

    def _go_on(self, entry: _GroupRound, grid: Grid) -> None:
        """Ask again, or another member, where the answers that are there say that no model will come."""
        now_s = time.monotonic()
        nobody_left = not entry.waiting
        if entry.grace_until_s is None and (entry.completed or entry.without_model):
            entry.grace_until_s = now_s + self._settings.leader_grace_s
        grace_over = entry.grace_until_s is not None and now_s > entry.grace_until_s
        if entry.completed:
            if not (nobody_left or grace_over):
                return
            candidates = [soc for soc in entry.completed if soc not in entry.fetched_from]
            if candidates and not (entry.fetching and now_s < entry.fetch_until_s):
                entry.fetch_until_s = now_s + self._settings.leader_grace_s
                self._fetch(entry, grid, candidates[0])
            elif nobody_left and not entry.fetching:
                entry.failed = True
        elif entry.without_model:
            # Without the leader there is no model, so nobody waits for it; for the others a while.
            others = set(entry.waiting.values()) - {entry.group.leader}
            if others and not grace_over:
                return
            if entry.attempt + 1 < _NUM_ATTEMPTS:
                self._ask_again(entry, grid, [soc for soc in entry.group.members if soc in entry.without_model])
            else:
                entry.failed = True
        elif nobody_left:
            entry.failed = True

    def _fetch(self, entry: _GroupRound, grid: Grid, soc: int) -> None:
        log(INFO, "group %d: asking SoC %d for the model", entry.group.group_id, soc)
        entry.fetched_from.add(soc)
        message = Message(RecordDict({CONFIG: ConfigRecord({ASK: ASK_MODEL})}), self._places.node_of[soc], QUERY_TYPE,
                          group_id=self._group_id)
        for message_id in grid.push_messages([message]):
            entry.fetching[message_id] = soc

    def _event(self, kind: str, group: Group, text: str) -> None:
        self.events.append(ReplyEvent(kind=kind, group_id=group.group_id, text=f"group {group.group_id}: {text}"))


def outcome_of(reply: Message) -> RingOutcome | None:
    """Return what a reply says of how its group's training ended for its members, if it says anything."""
    record = reply.content.config_records.get(OUTCOME) if reply.has_content() else None
    return None if record is None else decode(RingOutcome, record, "outcome")
