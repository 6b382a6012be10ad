"""The grid to start SoCFlow with: within a round it waits for groups instead of for every node."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO
from typing import TypeVar, cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from socflower.errors import require_type
from socflower.flower_adapter import log
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.group_replies import (
    GroupProgress,
    attach_notes,
    make_notes,
    no_model,
    remove_notes,
)
from socflower.strategies.node_registry import QUERY_TYPE
from socflower.strategies.replies import failure_event, outcome_of
from socflower.strategies.reply_events import LATE, LATE_DROPPED, ReplyEvent, late_event
from socflower.strategies.round import new_token
from socflower.wire.arrays import digest_of
from socflower.wire.message_keys import (
    ARRAYS,
    ASK,
    ASK_MODEL,
    CONFIG,
    GROUP,
    RING,
    GroupTask,
    RingTask,
    RoundNotes,
    decode,
    encode,
)

# At a group's interval, each with the members that answered in the previous attempt.
_NUM_ATTEMPTS = 3
_PULL_INTERVAL_S = 0.25
_NODE_CHECK_INTERVAL_S = 3.0  # between checks of which nodes are still connected

_Value = TypeVar("_Value")


class GroupGrid(ForwardingGrid):
    """A grid through which each group of SoCFlow answers with one reply, also if members of it fail.

    Flower's `start` waits for a reply of every node, and reports a dead one after a minute. Through this grid, a group
    of real machines is settled by its first reply with a model. If the model was lost, its survivors are asked
    again; if the member that should answer is silent, another one is asked for the model. Replies of failed clients
    are withheld, since strategies such as Flower's differential privacy drop the whole round because of one. What
    happened is noted in the other groups' replies, where `SoCFlow` reads it.

    Everything is read from the messages, so any strategy may be between `SoCFlow` and Flower's `start`:
    `strategy.start(GroupGrid(grid), …)`, `AroundIt(strategy).start(GroupGrid(grid), …)`. Messages of other strategies
    pass unchanged. The grids of the `local` engine and of scenarios are of this kind already.

    Raises `TrainingFailed` with the first cause if no group answers.
    """

    settles_groups = True

    def __init__(self, grid: Grid) -> None:
        if isinstance(grid, type) or not hasattr(grid, "send_and_receive"):
            require_type(
                type(self).__name__, (), "the Grid that Flower gives the ServerApp", grid=grid
            )
        super().__init__(grid)
        self._late: list[_RingGroup] = []  # groups of earlier exchanges that are at work
        self._held: dict[int, str] = {}  # digests of the models that nodes have kept, by node

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Exchange messages through the inner grid, for at most `timeout` seconds; one reply for each group."""
        sent = list(messages)
        if any(RING in message.content.config_records for message in sent):
            exchange = _RingExchange(self._grid, sent, self._held, self._late)
            replies = exchange.run(timeout)
            self._late = exchange.late
            return replies
        groups = [
            (message, GroupTask.decode(message.content.config_records[GROUP]))
            for message in sent
            if GROUP in message.content.config_records
        ]
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        if not getattr(
            self._grid, "settles_groups", False
        ):  # else these notes are the inner grid's
            replies = [remove_notes(reply) for reply in replies]
        return _without_errors(replies, groups) if groups else replies


def _without_errors(
    replies: Sequence[Message], groups: Sequence[tuple[Message, GroupTask]]
) -> list[Message]:
    """Return the replies that have content, with errors as notes of the first."""
    by_node = {message.metadata.dst_node_id: (message, task) for message, task in groups}
    # The error reply for a dead node has the SuperLink's id as its source; only a real grid gives messages ids.
    by_id = {
        message.metadata.message_id: (message, task)
        for message, task in groups
        if message.metadata.message_id
    }
    answered, errors = [], list[ReplyEvent]()
    for reply in replies:
        group = by_node.get(reply.metadata.src_node_id) or by_id.get(
            reply.metadata.reply_to_message_id
        )
        if reply.has_content() or group is None:
            answered.append(reply)
        else:
            errors.append(failure_event(reply, group[1].group_id, _leader_of(*group)))
    notes = make_notes(sorted(errors, key=lambda event: event.group_id))
    if not any(reply.has_content() for reply in answered):
        raise no_model(notes, groups[0][1].group_id, _leader_of(*groups[0]))
    if errors:
        attach_notes(next(reply for reply in answered if reply.has_content()), notes)
    return answered


def _leader_of(message: Message, task: GroupTask) -> str:
    return f"group {task.group_id}, SoC {task.leader} (node {message.metadata.dst_node_id})"


@dataclass(slots=True, eq=False)
class _RingGroup:
    """A group whose members form a ring, and the messages that it waits for."""

    task: GroupTask  # as of the latest attempt, without members that are lost
    ring: RingTask  # of any member; equal for all but for its participant
    messages: dict[int, Message]  # of the first attempt, by SoC
    progress: GroupProgress
    attempt: int = 0
    # SoCs of this attempt that have not replied, by message id.
    waiting: dict[str, int] = field(default_factory=dict)
    # SoCs that were asked for their model, by message id.
    fetching: dict[str, int] = field(default_factory=dict)
    fetched_from: set[int] = field(default_factory=set)
    # After this, members that have not replied are not waited for.
    grace_until_s: float | None = None
    fetch_until_s: float = 0.0  # after this, another member is asked too
    failed: bool = False

    @property
    def finished(self) -> bool:
        return self.progress.model is not None or self.failed


class _RingExchange:
    """One exchange of messages among which are those of rings.

    Only leaders receive and send the model (F8). If a group's leader never joined, the group's work is sent again
    without it. If the member that should answer is lost, another one that completed the interval is asked for the
    model. One answer per group is used.

    Where leaders meet in a ring, only one of them sends a model, their mean. The others' answers say that theirs is in
    it. Members keep it, and a group in which one member still has what is to be sent does not get it again.

    With a quorum, groups that have not answered by then are `late`: the next exchange also waits for them. Groups that
    get new messages are not `late` any more.
    """

    def __init__(
        self,
        grid: Grid,
        sent: Sequence[Message],
        held: dict[int, str],
        late: Sequence[_RingGroup] = (),
    ) -> None:
        self._grid, self._held = grid, held
        groups, busy = _ring_groups(sent), {message.metadata.dst_node_id for message in sent}
        self._before = [group for group in late if not busy & {*group.progress.node_of.values()}]
        self._groups = [*self._before, *groups]
        self.late: list[_RingGroup] = []
        self._other_ids = set(
            grid.push_messages(
                [message for message in sent if RING not in message.content.config_records]
            )
        )
        self._other_replies: list[Message] = []
        digests: dict[int, str] = {}  # of a record that all leaders get, by its identity
        for group in groups:
            self._push(group, self._first_messages(group, digests))

    def run(self, timeout_s: float | None) -> list[Message]:
        """Return a reply with a model for each group that has one, and the replies to other messages.

        Returns as soon as all groups have answered or failed, or the grace after the quorum is over, even if replies
        of members are pending.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        next_check_s = time.monotonic() + _NODE_CHECK_INTERVAL_S
        ends_s: float | None = None
        while self._other_ids or self._unfinished():
            self._pull()
            if time.monotonic() > next_check_s:
                self._drop_disconnected(set(self._grid.get_node_ids()))
                next_check_s = time.monotonic() + _NODE_CHECK_INTERVAL_S
            for group in self._unfinished():
                self._advance(group)
            if not self._unfinished():
                self._continue_one()
            if ends_s is None and self._has_quorum():
                ends_s = time.monotonic() + self._groups[-1].ring.quorum_grace_s
            if ends_s is not None and not self._other_ids and time.monotonic() >= ends_s:
                self.late = self._unfinished()
                break
            if deadline_s is not None and time.monotonic() > deadline_s:
                # Otherwise the next plan has the members that hang, and every round runs into its timeout.
                for group in self._unfinished():
                    group.progress.away |= set(group.waiting.values())
                break
            time.sleep(_PULL_INTERVAL_S)
        while self._ask_for_means() and not (
            deadline_s is not None and time.monotonic() > deadline_s
        ):
            time.sleep(_PULL_INTERVAL_S)
            self._pull()
        return [*self._answers(), *self._other_replies]

    def _has_quorum(self) -> bool:
        needed = self._groups[-1].ring.quorum
        alive = [group for group in self._groups if not group.failed]
        answered = sum(group.finished for group in alive)
        return 0 < min(needed, len(alive)) <= answered

    def _answers(self) -> list[Message]:
        """Return the groups' replies, each with the notes of its group, the first one with those of groups without."""
        answered = [group.progress for group in self._groups if group.progress.model is not None]
        if not answered:
            first = self._groups[0]
            raise no_model(
                sum((group.progress.notes() for group in self._groups), start=RoundNotes()),
                first.task.group_id,
                first.progress.where(first.task.leader),
            )
        replies = [cast(Message, progress.model) for progress in answered]
        for group in self._groups:
            progress = group.progress
            if group in self.late:
                if group not in self._before:
                    event = late_event(
                        LATE, group.task.group_id, "late; its work counts when it arrives"
                    )
                    attach_notes(replies[0], make_notes([event]))
                continue
            if group in self._before and progress.model is None:
                progress.events.append(
                    late_event(LATE_DROPPED, group.task.group_id, "lost while it was late")
                )
            attach_notes(progress.model or replies[0], progress.notes())
        return replies

    def _unfinished(self) -> list[_RingGroup]:
        return [group for group in self._groups if not group.finished]

    # ------------------------------------------------------------------------------------------------ sending

    def _push(self, group: _RingGroup, messages: Mapping[int, Message]) -> None:
        ids = self._grid.push_messages(list(messages.values()))
        group.waiting = dict(zip(ids, messages, strict=True))

    def _first_messages(self, group: _RingGroup, digests: dict[int, str]) -> Mapping[int, Message]:
        """Return the messages as they are, or without the model if a member has kept it from the last interval."""
        if not group.ring.leaders:
            return group.messages
        arrays = group.messages[group.task.leader].content.array_records[ARRAYS]
        if id(arrays) not in digests:
            digests[id(arrays)] = digest_of({name: array.data for name, array in arrays.items()})
        digest = digests[id(arrays)]
        if digest not in map(self._held.get, group.progress.node_of.values()):
            return group.messages
        group.ring = replace(group.ring, model_sha256=digest)
        return {soc: self._message_again(group, soc, with_model=False) for soc in group.messages}

    def _continue_one(self) -> None:
        """If users have ended all groups, ask the one that keeps most of its members to continue without the others."""
        if any(group.progress.model is not None for group in self._groups):
            return
        left = {
            group.task.group_id: set(group.task.members) - group.progress.away
            for group in self._groups
            if group.progress.terminated
        }
        for group in sorted(self._groups, key=lambda each: -len(left.get(each.task.group_id, ()))):
            if left.get(group.task.group_id):
                group.failed = False
                self._retry(
                    group, left[group.task.group_id], "users ended all groups, this one by taking"
                )
                return

    def _retry(self, group: _RingGroup, survivors: Collection[int], why: str) -> None:
        """Send a group's work again to its members that answered, with a new token for their ring."""
        task, progress = group.task, group.progress
        kept = [position for position, soc in enumerate(task.members) if soc in survivors]
        gone = [soc for soc in task.members if soc not in survivors]
        leader = task.leader if task.leader in survivors else task.members[kept[0]]
        group.attempt += 1
        group.task = replace(
            task,
            members=_at(kept, task.members),
            partitions=_at(kept, task.partitions),
            leader=leader,
            capacities=_at(kept, task.capacities),
            npu_ratios=_at(kept, task.npu_ratios) if task.npu_ratios else (),
        )
        # With a new token, others are out of reach: the group answers with its own model.
        group.ring = replace(
            group.ring,
            leader=task.partitions[task.members.index(leader)],
            token=new_token(),
            addresses=_at(kept, group.ring.addresses),
            leaders=(),
            model_sha256="",
            ends_with_member=False,
        )
        group.grace_until_s = None
        progress.begin_again(group.task.members)
        again = f"{why} SoCs {', '.join(map(str, gone))}; the others" if gone else "all members"
        kind = "member-lost" if gone else "left-out"
        progress.event(kind, f"{again} are asked again, led by SoC {leader}")
        self._push(group, {soc: self._message_again(group, soc) for soc in group.task.members})

    def _message_again(self, group: _RingGroup, soc: int, *, with_model: bool = True) -> Message:
        """Return a member's message for the group as it is now, with the model if it leads it."""
        first = group.messages[soc]
        content = RecordDict(
            {
                **first.content,
                GROUP: ConfigRecord(group.task.encode()),
                RING: ConfigRecord(
                    encode(
                        replace(
                            group.ring,
                            participant=group.task.partitions[group.task.members.index(soc)],
                        )
                    )
                ),
            }
        )
        content.pop(ARRAYS, None)
        if with_model and soc == group.task.leader:
            content[ARRAYS] = group.messages[group.progress.leader].content[ARRAYS]
        return Message(
            content,
            first.metadata.dst_node_id,
            first.metadata.message_type,
            group_id=first.metadata.group_id,
        )

    def _fetch(self, group: _RingGroup, soc: int) -> None:
        log(INFO, "group %d: asking SoC %d for the model", group.task.group_id, soc)
        group.fetched_from.add(soc)
        message = Message(
            RecordDict({CONFIG: ConfigRecord({ASK: ASK_MODEL})}),
            group.progress.node_of[soc],
            QUERY_TYPE,
            group_id=group.messages[soc].metadata.group_id,
        )
        for message_id in self._grid.push_messages([message]):
            group.fetching[message_id] = soc

    # ---------------------------------------------------------------------------------------------- receiving

    def _pull(self) -> None:
        waited_for = {
            *self._other_ids,
            *(
                message_id
                for group in self._groups
                for message_id in (
                    group.fetching if group.finished else (*group.waiting, *group.fetching)
                )
            ),
        }
        for reply in map(remove_notes, self._grid.pull_messages(waited_for)):
            message_id = reply.metadata.reply_to_message_id
            if message_id in self._other_ids:
                self._other_ids.discard(message_id)
                self._other_replies.append(reply)
            # Some may be finished by an earlier one of these replies.
            for group in self._groups:
                if message_id in group.fetching:
                    self._on_model_reply(group, group.fetching.pop(message_id), reply)
                elif message_id in group.waiting and not group.finished:
                    soc = group.waiting.pop(message_id)
                    outcome = outcome_of(reply) if reply.has_content() else None
                    self._held[group.progress.node_of[soc]] = (
                        "" if outcome is None else outcome.holds
                    )
                    group.progress.on_reply(soc, reply)

    def _on_model_reply(self, group: _RingGroup, soc: int, reply: Message) -> None:
        if reply.has_error() or ARRAYS not in reply.content.array_records:
            return
        progress = group.progress
        if progress.model is None:
            own = progress.completed[soc]
            own.content[ARRAYS] = reply.content.array_records[ARRAYS]
            self._answer_for_leader(group, soc, own)
        elif ARRAYS not in progress.model.content.array_records:
            progress.model.content[ARRAYS] = reply.content.array_records[ARRAYS]
            progress.event(
                "leader-lost", f"the leader that should send the mean did not; SoC {soc} did"
            )

    def _answer_for_leader(self, group: _RingGroup, soc: int, reply: Message) -> None:
        group.progress.event("leader-lost", f"the member that should answer did not; SoC {soc} did")
        group.progress.accept_model(soc, reply)
        group.progress.away |= set(group.waiting.values())  # silent during the whole grace period

    def _ask_for_means(self) -> bool:
        """Ask for means of leaders that nobody has sent; return whether any may come."""
        now_s = time.monotonic()
        answered = [
            (group, outcome)
            for group in self._groups
            if group.progress.model is not None
            and (outcome := outcome_of(group.progress.model)) is not None
            and outcome.met
        ]
        sent = {
            outcome.holds
            for group, outcome in answered
            if group.progress.model is not None
            and ARRAYS in group.progress.model.content.array_records
        }
        asked: set[str] = set()
        for group, outcome in answered:
            if outcome.holds in {*sent, *asked}:
                continue
            if group.fetching and now_s < group.fetch_until_s:
                asked.add(outcome.holds)
                continue
            candidates = [soc for soc in group.progress.completed if soc not in group.fetched_from]
            if candidates:
                group.fetch_until_s = now_s + group.ring.leader_grace_s
                self._fetch(group, candidates[0])
                asked.add(outcome.holds)
        return bool(asked)

    def _drop_disconnected(self, connected: Collection[int]) -> None:
        """Stop waiting for nodes that have left the federation."""
        for group in self._unfinished():
            node_of = group.progress.node_of
            for message_id, soc in list(group.waiting.items()):
                if node_of[soc] not in connected:
                    del group.waiting[message_id]
                    group.progress.on_loss(f"SoC {soc}: its node {node_of[soc]} is gone")
            group.fetching = {
                message_id: soc
                for message_id, soc in group.fetching.items()
                if node_of[soc] in connected
            }

    def _advance(self, group: _RingGroup) -> None:
        """Retry the group, or fetch the model from another member, if no model is to be expected otherwise."""
        now_s, progress, grace_s = time.monotonic(), group.progress, group.ring.leader_grace_s
        none_waiting = not group.waiting
        without = progress.without_model or progress.terminated
        if group.grace_until_s is None and (progress.completed or without):
            group.grace_until_s = now_s + grace_s
        grace_over = group.grace_until_s is not None and now_s > group.grace_until_s
        if progress.completed:
            if not (none_waiting or grace_over):
                return
            for soc, reply in progress.completed.items():
                outcome = outcome_of(reply)
                if outcome is not None and outcome.met and outcome.met[0] != group.task.group_id:
                    return self._answer_for_leader(
                        group, soc, reply
                    )  # another group sends the mean
            candidates = [soc for soc in progress.completed if soc not in group.fetched_from]
            if candidates and not (group.fetching and now_s < group.fetch_until_s):
                group.fetch_until_s = now_s + grace_s
                self._fetch(group, candidates[0])
            elif none_waiting and not group.fetching:
                group.failed = True
        elif progress.terminated:
            # A member that had done all steps may bring the model.
            group.failed = none_waiting or grace_over
        elif progress.without_model:
            # Without the leader there is no model, so it is not waited for; the others are, for the grace period.
            others = set(group.waiting.values()) - {group.task.leader}
            if others and not grace_over:
                return
            if group.attempt + 1 < _NUM_ATTEMPTS:
                survivors = progress.without_model | progress.left_out
                self._retry(group, survivors, "the model was lost with")
            else:
                group.failed = True
        elif none_waiting:
            if progress.left_out and group.attempt + 1 < _NUM_ATTEMPTS:
                # Their nodes were at work for another run, or those that left them out have died.
                self._retry(group, progress.left_out, "the ring did not form with")
            else:
                group.failed = True


def _ring_groups(sent: Iterable[Message]) -> list[_RingGroup]:
    """Return the groups that messages are for, in their order; rings of one interval share a token."""
    members: dict[tuple[str, int], dict[int, Message]] = {}
    tasks: dict[tuple[str, int], tuple[GroupTask, RingTask]] = {}
    for message in sent:
        records = message.content.config_records
        if RING in records:
            task, ring = GroupTask.decode(records[GROUP]), decode(RingTask, records[RING], "ring")
            key = ring.token, task.group_id
            tasks[key] = task, ring
            members.setdefault(key, {})[task.members[task.partitions.index(ring.participant)]] = (
                message
            )
    return [
        _RingGroup(
            task=task,
            ring=ring,
            messages=members[key],
            progress=GroupProgress(
                group_id=task.group_id,
                leader=task.leader,
                members=task.members,
                tolerate_errors=ring.tolerate_errors,
                node_of={
                    soc: message.metadata.dst_node_id for soc, message in members[key].items()
                },
            ),
        )
        for key, (task, ring) in tasks.items()
    ]


def _at(positions: Sequence[int], values: Sequence[_Value]) -> tuple[_Value, ...]:
    return tuple(values[position] for position in positions)
