"""The models in a round's replies: each of one group, or the mean of groups whose leaders exchanged them (F8)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from flwr.app import ArrayRecord, Message

from socflower.hierarchy import Group
from socflower.hierarchy.averaging import non_finite_tensors
from socflower.hierarchy.exchange.models import NONE
from socflower.peers.leaders.model_changes import ChangeCompression, Floats
from socflower.peers.leaders.model_exchange import GroupsModel, exchange_in_process, feedback_after
from socflower.strategies.mixed_replies import group_id_of
from socflower.strategies.records import array_views, to_array_record, untrained_of
from socflower.strategies.replies import num_examples_of, outcome_of
from socflower.strategies.round import GroupFeedback, Round
from socflower.wire.message_keys import ARRAYS


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMean:
    """A model that is the mean over some groups."""

    arrays: ArrayRecord
    samples: float  # that those groups trained on
    groups: tuple[int, ...]
    # Of groups that were averaged here, compressed.
    feedback: Mapping[int, GroupFeedback] = field(default_factory=dict)


Averaging = Callable[[Sequence[ArrayRecord], Sequence[float]], ArrayRecord]
"""(models of groups, their samples) -> the next model; the models have the tensors that were sent, without NaN."""


class ServerModels:
    """The models of servers that have not synchronised with the others since."""

    def __init__(self, average: Averaging) -> None:
        self._average = average
        self.models: dict[int, ArrayRecord] = {}

    def merged(self, this: Round, means: Sequence[GroupMean]) -> ArrayRecord:
        """Return the mean over groups; keep those of servers after a synchronisation inside servers."""
        if this.interval.across_servers:
            self.models = {}
        else:
            self.models |= self._averages(this, means)
        return self._mean(means)

    def _averages(self, this: Round, means: Sequence[GroupMean]) -> dict[int, ArrayRecord]:
        """Return the model of each server of the round's plan; one without usable replies keeps what it was sent."""
        server_of = {group.group_id: group.server for group in this.plan.groups}
        of_server: dict[int, list[GroupMean]] = {}
        for mean in means:
            of_server.setdefault(server_of[mean.groups[0]], []).append(mean)
        kept = {server: self.models.get(server, this.sent) for server in this.plan.by_server}
        return kept | {server: self._mean(own) for server, own in of_server.items()}

    def _mean(self, means: Sequence[GroupMean]) -> ArrayRecord:
        # The mean of leaders that have met is passed on as it came: nodes may have kept the same bits.
        if len(means) == 1 and len(means[0].groups) > 1:
            return means[0].arrays
        return self._average([mean.arrays for mean in means], [mean.samples for mean in means])


def means_of(this: Round, usable: Sequence[Message]) -> list[GroupMean]:
    """Return the models of usable replies; no group is in two of them.

    If leaders exchange models and groups run in one process, the exchange is computed here, to the same bits.
    """
    if this.leaders_meet and not this.in_rings:
        replies = {group_id_of(reply): reply for reply in usable}
        return [
            _meet(
                this,
                {group: replies[group.group_id] for group in groups if group.group_id in replies},
            )
            for groups in this.meetings
            if any(group.group_id in replies for group in groups)
        ]
    return _disjoint([_sent(reply) for reply in usable if ARRAYS in reply.content.array_records])


def _sent(reply: Message) -> GroupMean:
    outcome, arrays = outcome_of(reply), cast(ArrayRecord, reply.content[ARRAYS])
    if outcome is not None and outcome.met:
        return GroupMean(arrays=arrays, samples=outcome.met_samples, groups=outcome.met)
    return GroupMean(arrays=arrays, samples=num_examples_of(reply), groups=(group_id_of(reply),))


def _meet(this: Round, replies: Mapping[Group, Message]) -> GroupMean:
    began_with = non_finite_tensors(array_views(this.sent))
    models = [
        GroupsModel(
            arrays=array_views(cast(ArrayRecord, reply.content[ARRAYS])),
            samples=num_examples_of(reply),
            groups=(group.group_id,),
            began_with=began_with,
        )
        for group, reply in replies.items()
    ]
    places = [this.place_of[group.group_id] for group in replies] if this.in_tree else []
    compression = this.exchanges.leaders.compression
    if compression == NONE:
        mean, feedback = exchange_in_process(models, places=places), dict[int, GroupFeedback]()
    else:
        common, untrained = array_views(this.sent), untrained_of(list(replies.values()))
        changes = [
            ChangeCompression(
                name=compression,
                common=common,
                untrained=untrained,
                feedback=_held(this, group, reply),
            )
            for group, reply in replies.items()
        ]
        mean = exchange_in_process(models, changes, places)
        feedback = {
            group.group_id: GroupFeedback(
                values=feedback_after(own, mean, change), socs=_present(group, reply)
            )
            for (group, reply), own, change in zip(replies.items(), models, changes, strict=True)
        }
    return GroupMean(
        arrays=to_array_record(mean.arrays),
        samples=mean.samples,
        groups=mean.groups,
        feedback=feedback,
    )


def _held(this: Round, group: Group, reply: Message) -> Floats | None:
    """Return the group's error feedback, if a member that is present would hold it on real machines."""
    feedback = this.feedback.get(group.group_id)
    return (
        None if feedback is None or not feedback.socs & _present(group, reply) else feedback.values
    )


def _present(group: Group, reply: Message) -> frozenset[int]:
    outcome = outcome_of(reply)
    return frozenset(group.members if outcome is None else outcome.members)


def _disjoint(means: Iterable[GroupMean]) -> list[GroupMean]:
    """Return as many as have no group twice, the largest first: leaders that lost each other may have met twice."""
    chosen: list[GroupMean] = []
    for mean in sorted(means, key=lambda mean: -len(mean.groups)):
        if not any({*mean.groups} & {*other.groups} for other in chosen):
            chosen.append(mean)
    return sorted(chosen, key=lambda mean: min(mean.groups))
