"""One round of SoCFlow as a value: made for its messages, read for its replies; and the tasks of its rings."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from socflower.hierarchy import (
    Exchanges,
    Group,
    GroupPlan,
    IntervalCosts,
    Quorum,
    SyncInterval,
    conflicts,
)
from socflower.hierarchy.exchange.models import STAR, TREE
from socflower.peers.ring.settings import RingSettings
from socflower.strategies.records import SentInt8
from socflower.wire.message_keys import GRPC_WITH_TLS, RingTask

IN_PROCESS = "in process"
"""The transport inside groups whose members run in one client call."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupFeedback:
    """A group's error feedback, and who holds it; see `strategies/leader_feedback.py`."""

    values: NDArray[np.float32] | None = None  # where the group trains in one process
    socs: frozenset[int] = frozenset()  # members that would have it on machines of their own
    sha256: str = ""  # of what members have on machines of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """All that a round needs between its messages and its replies."""

    server_round: int
    interval: SyncInterval
    plan: GroupPlan
    exchanges: Exchanges  # whether groups take turns (F6), how leaders exchange models (F8), and the reasons
    costs: IntervalCosts | None  # of this plan with these turns; None without a profile
    node_of: Mapping[int, int]  # by SoC of the plan
    transport: str  # of gradients inside groups: "gloo", "grpc", "grpc+tls", or "in process"
    sent: ArrayRecord  # the model that leaders got
    settled_by_grid: (
        bool  # whether the grid is a GroupGrid, so that notes in replies are the grid's
    )
    # Board and server of leaders, by group.
    place_of: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # By group, of earlier rounds.
    feedback: Mapping[int, GroupFeedback] = field(default_factory=dict)
    # The model as leaders got it; None if that was in float32.
    in_int8: SentInt8 | None = None
    # Groups that are at work since an earlier round, and got no message.
    late: Collection[int] = ()
    group_of_node: Mapping[int, Group] = field(init=False)  # of all nodes that got a message

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "group_of_node",
            {
                self.node_of[soc]: group
                for group in self.addressed
                for soc in (group.members if self.in_rings else (group.leader,))
            },
        )

    @property
    def addressed(self) -> Sequence[Group]:
        """The groups that got messages."""
        return [group for group in self.plan.groups if group.group_id not in self.late]

    @property
    def in_rings(self) -> bool:
        """Whether members are machines of their own, which exchange gradients in rings."""
        return self.transport != IN_PROCESS

    @property
    def leaders_meet(self) -> bool:
        """Whether leaders exchange models in a ring or a tree, so that the hub gets their mean."""
        return self.exchanges.leaders.kind != STAR

    @property
    def leader_transport(self) -> str:
        """The transport of leaders' models; empty if they pass the hub."""
        if not self.leaders_meet:
            return ""
        if not self.in_rings:
            return IN_PROCESS
        # Always gRPC, whose rings sum in one order everywhere.
        return GRPC_WITH_TLS if self.transport == GRPC_WITH_TLS else "grpc"

    @property
    def in_tree(self) -> bool:
        """Whether they do so in a tree."""
        return self.exchanges.leaders.kind == TREE

    @property
    def meetings(self) -> Collection[Sequence[Group]]:
        """The sets of groups whose leaders exchange models: those of each server, or all groups."""
        return [self.plan.groups] if self.interval.across_servers else self.plan.by_server.values()


_TOKEN_BYTES = 32
# Members besides its leader that others know of a group; more would lengthen every message.
_NUM_DEPUTIES = 2


def new_token() -> str:
    """Return a secret for the rings of one interval, hexadecimal."""
    return secrets.token_hex(_TOKEN_BYTES)


def ring_tasks(
    this: Round,
    settings: RingSettings,
    address_of: Mapping[int, str],
    participant_of: Mapping[int, int],
    *,
    resident: Collection[int] = (),
    rebalance_steps: int,
    tolerate_errors: bool,
    quorum: Quorum = Quorum(),
    ends_with_member: bool = False,
) -> dict[int, RingTask]:
    """Return the ring task of each member of the groups that get messages, by SoC, in ring order.

    `resident`: SoCs whose clients stay between messages.
    """
    token = new_token()
    groups = {group.group_id: group for group in this.addressed}
    num_groups = len(this.plan.groups)
    leaders = _lines_of_leaders(this, participant_of, address_of)
    places = _lines_of_places(this) if this.in_tree else {}
    turns = _turns(this)
    tasks: dict[int, RingTask] = {}
    for ident, group in groups.items():
        before, after = turns.get(ident, ((), ()))
        neighbours = tuple(
            f"{other} {participant_of[soc]} {address_of[soc]}"
            for other in (*before, *after)
            for soc in groups[other].members
        )
        resident_group = set(group.members) <= set(resident)
        owed = this.feedback[ident].sha256 if ident in this.feedback else ""
        for soc in group.members:
            tasks[soc] = RingTask(
                participant=participant_of[soc],
                leader=participant_of[group.leader],
                addresses=tuple(address_of[member] for member in group.members),
                token=token,
                transport=this.transport,
                heartbeat_s=settings.heartbeat_s,
                rendezvous_s=settings.rendezvous_s,
                leader_grace_s=settings.leader_grace_s,
                tolerate_errors=tolerate_errors,
                ends_with_member=ends_with_member,
                rebalance_steps=rebalance_steps,
                groups_before=before,
                groups_after=after,
                neighbours=neighbours,
                leaders=leaders.get(ident, ()),
                leader_places=places.get(ident, ()),
                leader_compression=this.exchanges.leaders.compression,
                feedback_sha256=owed,
                quorum=quorum.num_groups(num_groups) if quorum.fraction < 1 else 0,
                quorum_grace_s=quorum.grace_s,
                resident=resident_group,
            )
    return tasks


def _turns(this: Round) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, for each group that shares an uplink and takes turns, the groups before and after it."""
    if not this.exchanges.turns.enabled:
        return {}
    turn_of = {
        ident: turn for turn, ids in enumerate(this.plan.communication_groups) for ident in ids
    }
    turns = {}
    for ident, others in conflicts(this.addressed).items():
        before = [other for other in sorted(others) if turn_of[other] < turn_of[ident]]
        turns[ident] = (tuple(before), tuple(sorted(set(others) - set(before))))
    return turns


def _lines_of_places(this: Round) -> dict[int, tuple[str, ...]]:
    """Return for each group the places in the tree of all groups whose leaders its own meets."""
    places: dict[int, tuple[str, ...]] = {}
    for groups_met in this.meetings:
        lines = tuple(
            " ".join(map(str, (group.group_id, *this.place_of[group.group_id])))
            for group in groups_met
        )
        places |= {group.group_id: lines for group in groups_met}
    return places


def _lines_of_leaders(
    this: Round,
    participant_of: Mapping[int, int],
    address_of: Mapping[int, str],
) -> dict[int, tuple[str, ...]]:
    """Return, for each group whose leader exchanges models, the members that may answer for each other group (F8)."""
    if not this.leaders_meet:
        return {}
    lines_of: dict[int, tuple[str, ...]] = {}
    for groups in this.meetings:
        lines = tuple(
            f"{group.group_id} {participant_of[soc]} {address_of[soc]}"
            for group in groups
            for soc in _answering(group)
        )
        lines_of |= {group.group_id: lines for group in groups}
    return lines_of


def _answering(group: Group) -> tuple[int, ...]:
    """Return who may answer for a group: its leader, then others as they take its place."""
    return (group.leader, *(soc for soc in group.members if soc != group.leader))[
        : 1 + _NUM_DEPUTIES
    ]
