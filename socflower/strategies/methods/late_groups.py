"""Groups that are late for a synchronisation with a quorum: their work is kept, and counts when it arrives.

A group g that began in round b with the model w_b ends its interval with w_b + D_g. In the round r in which it arrives,
the next model is the mean over all groups that arrive, by their samples n_g,

    w_{r+1} = sum_g n_g (w_r + D_g) / sum_g n_g,

as in Decoupled DiLoCo (Douillard et al., arXiv 2604.21428). For a group of this round w_r + D_g is its model itself. An
outer strategy, and an average of the user's, are given the same models.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray

from socflower.cluster import Usage
from socflower.cluster.virtual_clock import Pace
from socflower.hierarchy import GroupPlan, Quorum
from socflower.strategies.group_models import GroupMean
from socflower.strategies.group_replies import SettledRound
from socflower.strategies.mixed_replies import group_id_of
from socflower.strategies.records import array_views, to_array_record
from socflower.strategies.replies import fault_of, num_examples_of
from socflower.strategies.reply_events import (
    ARRIVED,
    LATE,
    LATE_DROPPED,
    ReplyEvent,
    late_event,
)
from socflower.strategies.round import Round
from socflower.wire.message_keys import ARRAYS, METRICS

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LateGroup:
    """A group at work for an earlier round.

    In virtual time `change`, which is D_g, and `metrics` are what it will arrive with. A group of real machines has
    them when it arrives, and until then the model that it began with.
    """

    members: tuple[int, ...]
    began: int
    # At the end of its interval.
    next_step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    change: Arrays | None = None
    base: ArrayRecord | None = None

    def with_reply(self, reply: Message) -> "LateGroup":
        """Return it with what its reply brings."""
        assert self.base is not None
        change = change_of(cast(ArrayRecord, reply.content[ARRAYS]), self.base)
        return replace(self, change=change, metrics=_metrics_of(reply))

    def reply(self, sent: ArrayRecord, node: int) -> Message:
        """Return its work as a reply to a round that began with the model `sent`."""
        assert self.change is not None
        arrays = to_array_record(added(array_views(sent), self.change))
        content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(dict(self.metrics))})
        return Message(content, node, MessageType.TRAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """Replies and models by group that count in a round, and what happened to late groups; filled in place."""

    usable: dict[int, Message]
    means: dict[int, GroupMean]
    events: list[ReplyEvent] = field(default_factory=list)


class LateGroups:
    """The groups that are late, between rounds.

    Attributes
    ----------
    held : dict
        Those at work, by group.
    pace : Pace
        Their progress on the clock.
    """

    def __init__(self, quorum: Quorum) -> None:
        self.quorum = quorum
        self.held: dict[int, LateGroup] = {}
        self.pace = Pace({})
        # Of the latest plan.
        self._members: Mapping[int, tuple[int, ...]] = {}
        # On real machines: who would be late by the clock.
        self.predicted: frozenset[int] = frozenset()
        # SoCs of groups that missed too many synchronisations of the latest round, and may still be at work.
        self.overdue: tuple[int, ...] = ()
        # Groups of real machines that were late when the training was interrupted.
        self._interrupted: list[int] = []
        # By group that was late: at which step its optimiser is.
        self._next_step: dict[int, int] = {}

    def missed_steps(self, group_id: int, first_step: int) -> int:
        """Return how many steps the others have done since the last interval of a group that was late."""
        return first_step - self._next_step.get(group_id, first_step)

    def follow(self, plan: GroupPlan) -> list[ReplyEvent]:
        """Drop the work of groups that a new plan does not have; return an event for each, and of a resume."""
        interrupted, self._interrupted = self._interrupted, []
        members = {group.group_id: group.members for group in plan.groups}
        # The clock has no progress of new groups.
        stays = {ident for ident in members if self._members.get(ident) == members[ident]}
        self._members, self.predicted = members, self.predicted & stays
        gone = [ident for ident, late in self.held.items() if members.get(ident) != late.members]
        for ident in gone:
            self._next_step.pop(ident, None)
        return [
            *(
                late_event(LATE_DROPPED, ident, "lost with the interruption")
                for ident in interrupted
            ),
            *(self._drop(ident, "the plan has other groups now") for ident in sorted(gone)),
        ]

    def answers(self, this: Round, replies: Iterable[Message]) -> dict[int, Message]:
        """Return the replies of late groups of real machines; they have the number of the round they began in."""
        group_of = {
            this.node_of[soc]: ident for ident, work in self.held.items() for soc in work.members
        }
        return {
            group_of[reply.metadata.src_node_id]: reply
            for reply in replies
            if reply.metadata.src_node_id in group_of
        }

    def settle(
        self,
        this: Round,
        settled: SettledRound,
        usage: Usage,
        late: Collection[int],
        answers: Mapping[int, Message] = {},
        *,
        is_last: bool,
    ) -> SettledRound:
        """Keep the work of groups that are late after a round, and add that of groups that have arrived.

        `answers` are those of real machines; a group that is neither late nor has one is lost.
        """
        counted = _Counted(
            usable={group_id_of(reply): reply for reply in settled.usable},
            means={mean.groups[0]: mean for mean in settled.means},
        )
        self._add_arrived(this, late, answers, counted)
        self._hold_late(this, late, counted)
        self._drop_overdue(this, counted, is_last=is_last)
        return replace(
            settled,
            usable=[counted.usable[ident] for ident in sorted(counted.usable)],
            means=[counted.means[ident] for ident in sorted(counted.means)],
            events=(*settled.events, *counted.events),
            usage=usage,
        )

    def _add_arrived(
        self,
        this: Round,
        late: Collection[int],
        answers: Mapping[int, Message],
        counted: _Counted,
    ) -> None:
        """Count the held work of groups that are no longer late; work that failed or was lost is dropped."""
        for ident in sorted(self.held.keys() - set(late)):
            work = self.held.pop(ident)
            if work.change is None:
                # The grid has said that a group without an answer is lost.
                if ident not in answers:
                    continue
                if fault := fault_of(answers[ident], ident, f"group {ident}"):
                    counted.events.append(fault)
                    continue
                work = work.with_reply(answers[ident])
            leader = next(group.leader for group in this.plan.groups if group.group_id == ident)
            counted.usable[ident] = reply = work.reply(this.sent, this.node_of[leader])
            counted.means[ident] = GroupMean(
                arrays=cast(ArrayRecord, reply.content[ARRAYS]),
                samples=num_examples_of(reply),
                groups=(ident,),
            )
            counted.events.append(
                late_event(ARRIVED, ident, f"its work of round {work.began} has arrived")
            )

    def _hold_late(self, this: Round, late: Collection[int], counted: _Counted) -> None:
        """Hold the work of addressed groups that are late, instead of counting it in this round."""
        for group in this.addressed:
            self._next_step.pop(group.group_id, None)
            if group.group_id not in late:
                continue
            ident, end = group.group_id, this.interval.first_step + this.interval.num_steps
            self._next_step[ident] = end
            self.held[ident] = work = LateGroup(
                members=group.members, began=this.server_round, next_step=end, base=this.sent
            )
            if ident in counted.usable:
                work = work.with_reply(counted.usable.pop(ident))
                del counted.means[ident]
                self.held[ident] = replace(work, base=None)
                counted.events.append(
                    late_event(LATE, ident, "late; its work counts when it arrives")
                )

    def _drop_overdue(self, this: Round, counted: _Counted, *, is_last: bool) -> None:
        """Drop work that has missed too many synchronisations, and all of it after the last round."""
        overdue: list[int] = []
        for ident, work in sorted(self.held.items()):
            missed = this.server_round + 1 - work.began
            if is_last:
                counted.events.append(self._drop(ident, "the training has ended"))
            elif missed > self.quorum.late_rounds:
                overdue += work.members
                counted.events.append(self._drop(ident, f"it has missed {missed} synchronisations"))
        self.overdue = tuple(overdue)

    def _drop(self, ident: int, why: str) -> ReplyEvent:
        work = self.held.pop(ident)
        return late_event(LATE_DROPPED, ident, f"its work of round {work.began} is lost: {why}")

    # ------------------------------------------------------------------------------------------- resuming
    def save(self) -> dict[str, Any]:
        """Return plain values and arrays for `restore`."""
        pace, socs = self.pace, [soc for work in self.held.values() for soc in work.members]
        return {
            "groups": [
                [ident, work.began, work.next_step, dict(work.metrics)]
                for ident, work in self.held.items()
                if work.change is not None
            ],
            # Machines that are at work do not know a new server.
            "interrupted": [ident for ident, work in self.held.items() if work.change is None],
            "changes": {
                f"{ident}/{name}": array
                for ident, work in self.held.items()
                for name, array in (work.change or {}).items()
            },
            "next_steps": [list(entry) for entry in self._next_step.items()],
            "pace": [
                [
                    soc,
                    pace.remaining.get(soc, 0),
                    pace.ahead_s.get(soc, 0.0),
                    pace.in_progress_w.get(soc),
                    pace.ended_s.get(soc),
                ]
                for soc in socs
            ],
        }

    def restore(self, state: Mapping[str, Any], plan: GroupPlan) -> None:
        """Restore what `save` returned under the plan of that time."""
        members = {group.group_id: group.members for group in plan.groups}
        changes: dict[int, dict[str, NDArray[Any]]] = {}
        for key, array in state["changes"].items():
            ident, _, name = key.partition("/")
            changes.setdefault(int(ident), {})[name] = array
        self.held = {
            ident: LateGroup(
                members=members[ident],
                began=began,
                next_step=next_step,
                metrics=metrics,
                change=changes[ident],
            )
            for ident, began, next_step, metrics in state["groups"]
        }
        self._interrupted = list(state["interrupted"])
        self._next_step = {ident: step for ident, step in state["next_steps"]}
        self.pace = Pace({})
        for soc, remaining, ahead_s, watts, ended_s in state["pace"]:
            self.pace.remaining[soc], self.pace.ahead_s[soc] = remaining, ahead_s
            if watts is not None:
                self.pace.in_progress_w[soc] = watts
            if ended_s is not None:
                self.pace.ended_s[soc] = ended_s


def change_of(model: ArrayRecord, base: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return D = model - base; 0 for equal values, such as an infinite constant of a mask."""
    before = array_views(base)
    with np.errstate(invalid="ignore"):
        return {
            name: np.where(array == before[name], np.zeros_like(array), array - before[name])
            for name, array in array_views(model).items()
        }


def added(base: Arrays, change: Arrays) -> dict[str, NDArray[Any]]:
    """Return base + D, in the base's types."""
    return {name: np.asarray(array + change[name], array.dtype) for name, array in base.items()}


def _metrics_of(reply: Message) -> dict[str, Any]:
    return dict(cast(MetricRecord, reply.content[METRICS]))
