"""Groups that are late for a synchronisation with a quorum: their work is kept, and counts when it arrives.

A group g that began in round b with the model w_b ends its interval with w_b + D_g. In the round r in which it arrives,
the next model is the mean over all groups that arrive, by their samples n_g,

    w_{r+1} = sum_g n_g (w_r + D_g) / sum_g n_g,

as in Decoupled DiLoCo (Douillard et al., arXiv 2604.21428). For a group of this round w_r + D_g is its model itself. An
outer strategy, and an average of the user's, are given the same models.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
from socflower.strategies.replies import num_examples_of
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.round import Round
from socflower.wire.message_keys import ARRAYS, METRICS

Arrays = Mapping[str, NDArray[Any]]

LATE, ARRIVED, LATE_DROPPED = "late", "arrived", "late-dropped"
"""Kinds of events: a group goes on with its interval, its work counts, or it never will."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateGroup:
    """A group at work for an earlier round; `change` is D_g, which it will arrive with."""

    members: tuple[int, ...]
    began: int
    # At the end of its interval.
    next_step: int
    metrics: Mapping[str, Any]
    change: Arrays

    def reply(self, sent: ArrayRecord, node: int) -> Message:
        """Return its work as a reply to a round that began with the model `sent`."""
        arrays = to_array_record(added(array_views(sent), self.change))
        content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(dict(self.metrics))})
        return Message(content, node, MessageType.TRAIN)


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
        # By group that was late: at which step its optimiser is.
        self._next_step: dict[int, int] = {}

    def missed_steps(self, group_id: int, first_step: int) -> int:
        """Return how many steps the others have done since the last interval of a group that was late."""
        return first_step - self._next_step.get(group_id, first_step)

    def follow(self, plan: GroupPlan) -> list[ReplyEvent]:
        """Drop the work of groups that a new plan does not have; return an event for each."""
        members = {group.group_id: group.members for group in plan.groups}
        gone = [ident for ident, late in self.held.items() if members.get(ident) != late.members]
        for ident in gone:
            self._next_step.pop(ident, None)
        return [self._drop(ident, "its SoCs are in other groups now") for ident in sorted(gone)]

    def settle(
        self,
        this: Round,
        settled: SettledRound,
        usage: Usage,
        late: Iterable[int],
        *,
        is_last: bool,
    ) -> SettledRound:
        """Keep the work of groups that are late after a round, and add that of groups that have arrived."""
        late, usable = set(late), {group_id_of(reply): reply for reply in settled.usable}
        means = {mean.groups[0]: mean for mean in settled.means}
        events: list[ReplyEvent] = []
        for ident in sorted(self.held.keys() - late):
            work = self.held.pop(ident)
            leader = next(group.leader for group in this.plan.groups if group.group_id == ident)
            usable[ident] = reply = work.reply(this.sent, this.node_of[leader])
            means[ident] = GroupMean(
                arrays=cast(ArrayRecord, reply.content[ARRAYS]),
                samples=num_examples_of(reply),
                groups=(ident,),
            )
            events.append(_event(ARRIVED, ident, f"its work of round {work.began} has arrived"))
        for group in this.addressed:
            self._next_step.pop(group.group_id, None)
            if group.group_id in late & usable.keys():
                ident, reply = group.group_id, usable.pop(group.group_id)
                end = this.interval.first_step + this.interval.num_steps
                self.held[ident] = LateGroup(
                    members=group.members,
                    began=this.server_round,
                    next_step=end,
                    metrics=dict(cast(MetricRecord, reply.content[METRICS])),
                    change=change_of(means.pop(ident).arrays, this.sent),
                )
                self._next_step[ident] = end
                events.append(_event(LATE, ident, "late; its work counts when it arrives"))
        for ident, work in sorted(self.held.items()):
            missed = this.server_round + 1 - work.began
            if is_last:
                events.append(self._drop(ident, "the training has ended"))
            elif missed > self.quorum.late_rounds:
                events.append(self._drop(ident, f"it has missed {missed} synchronisations"))
        return replace(
            settled,
            usable=[usable[ident] for ident in sorted(usable)],
            means=[means[ident] for ident in sorted(means)],
            events=(*settled.events, *events),
            usage=usage,
        )

    def _drop(self, ident: int, why: str) -> ReplyEvent:
        work = self.held.pop(ident)
        return _event(LATE_DROPPED, ident, f"its work of round {work.began} is lost: {why}")

    # ------------------------------------------------------------------------------------------- resuming
    def save(self) -> dict[str, Any]:
        """Return plain values and arrays for `restore`."""
        pace, socs = self.pace, [soc for work in self.held.values() for soc in work.members]
        return {
            "groups": [
                [ident, work.began, work.next_step, dict(work.metrics)]
                for ident, work in self.held.items()
            ],
            "changes": {
                f"{ident}/{name}": array
                for ident, work in self.held.items()
                for name, array in work.change.items()
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


def _event(kind: str, group_id: int, text: str) -> ReplyEvent:
    return ReplyEvent(kind=kind, group_id=group_id, text=f"group {group_id}: {text}")
