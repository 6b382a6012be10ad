"""A round on real machines: every member of a group joins its ring, and one of them replies with the model."""

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
from socflower.strategies.node_registry import QUERY_TYPE, is_query
from socflower.strategies.replies import ReplyEvent, failure_event
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
_NUM_ATTEMPTS = 3  # at a group's interval, each with the members that answered in the previous attempt
_PULL_INTERVAL_S = 0.25
_NODE_CHECK_INTERVAL_S = 3.0  # between checks of which nodes are still connected


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSettings:
    """How groups exchange gradients where their members are real machines.

    `transport`: "gloo" for a trusted network, "grpc" with mutual TLS for any other; "auto" uses what the nodes are
    configured for. `compression`: "none", "fp16", "int8", "int8-stochastic" or "dgc". A ring drops a member that does
    not answer for `heartbeat_s`, and starts without one that does not join within `rendezvous_s`. If the member that
    answers for a group is silent for `leader_grace_s` longer than the others, another member is asked for the model.
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
class MemberLocations:
    """Node ids, addresses and participant numbers of a round's members."""

    node_of: Mapping[int, int]  # by SoC
    address_of: Mapping[int, str]
    participant_of: Mapping[int, int]


TaskOf: TypeAlias = Callable[[Group], GroupTask]


@dataclass(slots=True)
class _GroupRound:
    """The state of one group in a round."""

    group: Group  # as of the latest attempt, without members that are lost
    attempt: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # SoCs of this attempt that have not replied, by message id
    completed: dict[int, Message] = field(default_factory=dict)  # replies by SoC, of members that have a model
    without_model: set[int] = field(default_factory=set)
    fetching: dict[str, int] = field(default_factory=dict)  # SoCs that were asked for their model, by message id
    fetched_from: set[int] = field(default_factory=set)
    departures_reported: set[int] = field(default_factory=set)  # SoCs whose departure is an event already
    grace_until_s: float | None = None  # after this, members that have not replied are not waited for
    fetch_until_s: float = 0.0  # after this, another member is asked too
    model: Message | None = None
    failed: bool = False

    @property
    def finished(self) -> bool:
        return self.model is not None or self.failed


class RingRound:
    """One round's messages and replies.

    Only leaders receive and send the model (F8). If a group's leader never joined, the group's work is sent again
    without it. If the member that should answer is lost, another one that completed the interval is asked for the
    model. One answer per group is used.
    """

    def __init__(
        self, groups: Sequence[Group], communication_groups: Sequence[Sequence[int]], locations: MemberLocations,
        settings: RingSettings, transport: str, task_of: TaskOf, configs: Mapping[int, ConfigRecord],
        arrays: ArrayRecord, *, serialize_uplinks: bool, num_buckets: int, group_id: str, tolerate_errors: bool,
        rebalance_steps: int = 0,
    ) -> None:
        self._rounds = {group.group_id: _GroupRound(group) for group in groups}
        self._planned_leader_of = {group.group_id: group.leader for group in groups}  # as planned
        self._turn_of = {ident: turn for turn, ids in enumerate(communication_groups) for ident in ids}
        self._conflicts = conflicts(groups) if serialize_uplinks else {}
        self._locations, self._settings, self._transport = locations, settings, transport
        self._task_of, self._configs, self._arrays = task_of, configs, arrays
        self._num_buckets, self._group_id, self._tolerate_errors = num_buckets, group_id, tolerate_errors
        self._rebalance_steps = rebalance_steps
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self.events: list[ReplyEvent] = []
        self.leader_replaced: set[int] = set()  # groups whose model came from a member other than their planned leader
        self.away: set[int] = set()  # SoCs that left or were dropped by their rings

    def messages(self) -> list[Message]:
        """Return the round's messages, group by group in ring order."""
        return [message for entry in self._rounds.values() for message, _ in self._group_messages(entry)]

    def exchange(
        self, grid: Grid, messages: Sequence[Message], timeout_s: float | None,
        on_query_reply: Callable[[Message], None],
        pending_queries: dict[str, int],
    ) -> list[Message]:
        """Send the messages, run the round to its end and return a reply with a model for each group that has one.

        `messages` are those of `messages()` and status queries of the registry, whose answers go to `on_query_reply`.
        Returns as soon as all groups have answered or failed, even if other replies are pending. `pending_queries`
        holds the unanswered queries, node ids by message id, and is updated in place.
        """
        ids = list(grid.push_messages(messages))
        socs = {self._locations.node_of[soc]: (entry, soc) for entry in self._rounds.values()
                for soc in entry.group.members}
        for message_id, message in zip(ids, messages, strict=True):
            if is_query(message):
                pending_queries[message_id] = message.metadata.dst_node_id
            else:
                entry, soc = socs[message.metadata.dst_node_id]
                entry.waiting[message_id] = soc
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        next_check_s = time.monotonic() + _NODE_CHECK_INTERVAL_S
        while not all(entry.finished for entry in self._rounds.values()):
            open_ids = {*pending_queries, *(message_id for entry in self._rounds.values() if not entry.finished
                                            for message_id in (*entry.waiting, *entry.fetching))}
            for reply in grid.pull_messages(open_ids):
                message_id = reply.metadata.reply_to_message_id
                if message_id in pending_queries:
                    del pending_queries[message_id]
                    on_query_reply(reply)
                    continue
                for entry in self._rounds.values():
                    if entry.finished:  # by an earlier one of these replies
                        continue
                    if message_id in entry.waiting:
                        self._on_member_reply(entry, entry.waiting.pop(message_id), reply)
                    elif message_id in entry.fetching:
                        self._on_model_reply(entry, entry.fetching.pop(message_id), reply)
            if time.monotonic() > next_check_s:
                self._drop_disconnected(set(grid.get_node_ids()))
                next_check_s = time.monotonic() + _NODE_CHECK_INTERVAL_S
            for entry in self._rounds.values():
                if not entry.finished:
                    self._advance(entry, grid)
            if deadline_s is not None and time.monotonic() > deadline_s:
                # If members that hang were planned again, every round would run into its timeout.
                self.away |= {soc for entry in self._rounds.values() if not entry.finished
                              for soc in entry.waiting.values()}
                break
            time.sleep(_PULL_INTERVAL_S)
        for reply in grid.pull_messages(list(pending_queries)) if pending_queries else ():
            pending_queries.pop(reply.metadata.reply_to_message_id, None)
            on_query_reply(reply)
        return [entry.model for entry in self._rounds.values() if entry.model is not None]

    # ------------------------------------------------------------------------------------------------ sending

    def _group_messages(self, entry: _GroupRound) -> list[tuple[Message, int]]:
        group = entry.group
        task, locations = self._task_of(group), self._locations
        before = sorted(other for other in self._conflicts.get(group.group_id, ())
                        if self._turn_of[other] < self._turn_of[group.group_id])
        after = sorted(self._conflicts.get(group.group_id, frozenset()) - set(before))
        neighbours = tuple(f"{other} {locations.participant_of[soc]} {locations.address_of[soc]}"
                           for other in (*before, *after) for soc in self._rounds[other].group.members)
        made = []
        for soc in group.members:
            ring = RingTask(
                participant=locations.participant_of[soc], leader=locations.participant_of[group.leader],
                addresses=tuple(locations.address_of[member] for member in group.members), token=self._token,
                transport=self._transport, num_buckets=self._num_buckets, compression=self._settings.compression,
                heartbeat_s=self._settings.heartbeat_s, rendezvous_s=self._settings.rendezvous_s,
                rebalance_steps=self._rebalance_steps, groups_before=tuple(before), groups_after=tuple(after),
                neighbours=neighbours)
            content = RecordDict({CONFIG: self._configs[group.group_id], GROUP: ConfigRecord(task.encode()),
                                  RING: ConfigRecord(encode(ring))})
            if soc == group.leader:
                content[ARRAYS] = self._arrays
            made.append((Message(content, locations.node_of[soc], MessageType.TRAIN, group_id=self._group_id), soc))
        return made

    def _retry(self, entry: _GroupRound, grid: Grid, survivors: Sequence[int]) -> None:
        """Send a group's work again to its members that answered, with a new token for their ring."""
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

    def _on_member_reply(self, entry: _GroupRound, soc: int, reply: Message) -> None:
        where = f"group {entry.group.group_id}, SoC {soc} (node {self._locations.node_of[soc]})"
        if reply.has_error():
            event = failure_event(reply, entry.group.group_id, where)
            if event.kind == "client-raised" and not self._tolerate_errors:
                raise TrainingFailed(event.text)
            # The others continue: the work is lost only if no member answers with it, which is a separate event.
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
                self._accept_model(entry, reply, outcome)
        elif outcome.outcome == PREEMPTED:
            self._record_departure(entry, soc)
        elif outcome.outcome == NO_MODEL:
            entry.without_model.add(soc)
        elif outcome.outcome == LEFT_OUT:
            self._event("left-out", entry.group, f"SoC {soc} joined too late, or was silent; its ring continued "
                                                 "without it")

    def _accept_model(self, entry: _GroupRound, reply: Message, outcome: RingOutcome) -> None:
        entry.model = reply
        if reply.metadata.src_node_id != self._locations.node_of[self._planned_leader_of[entry.group.group_id]]:
            self.leader_replaced.add(entry.group.group_id)
        # A member that died may return at once as a new process; one that hangs still blocks its node.
        self.away |= set(entry.group.members) - set(outcome.members)
        for soc in outcome.preempted:
            self._record_departure(entry, soc)
        for line in outcome.log:
            self._event("member-lost", entry.group, line)
        for seconds in outcome.recoveries_s:
            self._event("ring-formed-again", entry.group, f"training again after {seconds:.2f} s")

    def _record_departure(self, entry: _GroupRound, soc: int) -> None:
        """Record a departure once: both the member that leaves and those that stay may report it."""
        self.away.add(soc)
        if soc not in entry.departures_reported:
            entry.departures_reported.add(soc)
            self._event("preempted", entry.group, f"SoC {soc} was preempted by its user")

    def _on_model_reply(self, entry: _GroupRound, soc: int, reply: Message) -> None:
        if reply.has_error() or ARRAYS not in reply.content.array_records:
            return
        own = entry.completed[soc]
        own.content[ARRAYS] = reply.content.array_records[ARRAYS]
        self._event("leader-lost", entry.group, f"the member that should answer did not; SoC {soc} did")
        self._accept_model(entry, own, decode(RingOutcome, own.content.config_records[OUTCOME], "outcome"))
        self.away |= set(entry.waiting.values())  # silent during the whole grace period

    def _drop_disconnected(self, connected: Collection[int]) -> None:
        """Stop waiting for nodes that have left the federation."""
        for entry in self._rounds.values():
            if entry.finished:
                continue
            for message_id, soc in list(entry.waiting.items()):
                if self._locations.node_of[soc] not in connected:
                    del entry.waiting[message_id]
                    self._event("member-lost", entry.group, f"SoC {soc}: its node "
                                                            f"{self._locations.node_of[soc]} is gone")
            entry.fetching = {message_id: soc for message_id, soc in entry.fetching.items()
                              if self._locations.node_of[soc] in connected}

    def _advance(self, entry: _GroupRound, grid: Grid) -> None:
        """Retry the group, or fetch the model from another member, if no model is to be expected otherwise."""
        now_s = time.monotonic()
        none_waiting = not entry.waiting
        if entry.grace_until_s is None and (entry.completed or entry.without_model):
            entry.grace_until_s = now_s + self._settings.leader_grace_s
        grace_over = entry.grace_until_s is not None and now_s > entry.grace_until_s
        if entry.completed:
            if not (none_waiting or grace_over):
                return
            candidates = [soc for soc in entry.completed if soc not in entry.fetched_from]
            if candidates and not (entry.fetching and now_s < entry.fetch_until_s):
                entry.fetch_until_s = now_s + self._settings.leader_grace_s
                self._fetch(entry, grid, candidates[0])
            elif none_waiting and not entry.fetching:
                entry.failed = True
        elif entry.without_model:
            # Without the leader there is no model, so it is not waited for; the others are, for the grace period.
            others = set(entry.waiting.values()) - {entry.group.leader}
            if others and not grace_over:
                return
            if entry.attempt + 1 < _NUM_ATTEMPTS:
                self._retry(entry, grid, [soc for soc in entry.group.members if soc in entry.without_model])
            else:
                entry.failed = True
        elif none_waiting:
            entry.failed = True

    def _fetch(self, entry: _GroupRound, grid: Grid, soc: int) -> None:
        log(INFO, "group %d: asking SoC %d for the model", entry.group.group_id, soc)
        entry.fetched_from.add(soc)
        message = Message(RecordDict({CONFIG: ConfigRecord({ASK: ASK_MODEL})}), self._locations.node_of[soc],
                          QUERY_TYPE, group_id=self._group_id)
        for message_id in grid.push_messages([message]):
            entry.fetching[message_id] = soc

    def _event(self, kind: str, group: Group, text: str) -> None:
        self.events.append(ReplyEvent(kind=kind, group_id=group.group_id, text=f"group {group.group_id}: {text}"))


def outcome_of(reply: Message) -> RingOutcome | None:
    """Return the ring outcome in a reply, or None if it has none."""
    record = reply.content.config_records.get(OUTCOME) if reply.has_content() else None
    return None if record is None else decode(RingOutcome, record, "outcome")
