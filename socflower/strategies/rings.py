"""The ring task of each member of a group, where members are real machines."""

import secrets
from collections.abc import Mapping

from socflower.hierarchy import conflicts
from socflower.rings.settings import RingSettings
from socflower.strategies.round import Round
from socflower.wire.message_keys import RingTask

_TOKEN_BYTES = 32


def new_token() -> str:
    """Return a secret for the rings of one interval, hexadecimal."""
    return secrets.token_hex(_TOKEN_BYTES)


def ring_tasks(
    this: Round, settings: RingSettings, address_of: Mapping[int, str], participant_of: Mapping[int, int], *,
    num_buckets: int, rebalance_steps: int, tolerate_errors: bool,
) -> dict[int, RingTask]:
    """Return the ring task of each member of the round's groups, by SoC, in ring order."""
    token = new_token()
    groups = {group.group_id: group for group in this.plan.groups}
    turn_of = {ident: turn for turn, ids in enumerate(this.plan.communication_groups) for ident in ids}
    sharing = conflicts(this.plan.groups) if this.turns.taken else {}
    tasks: dict[int, RingTask] = {}
    for ident, group in groups.items():
        others = sharing.get(ident, frozenset())
        before = sorted(other for other in others if turn_of[other] < turn_of[ident])
        after = sorted(set(others) - set(before))
        neighbours = tuple(f"{other} {participant_of[soc]} {address_of[soc]}"
                           for other in (*before, *after) for soc in groups[other].members)
        for soc in group.members:
            tasks[soc] = RingTask(
                participant=participant_of[soc], leader=participant_of[group.leader],
                addresses=tuple(address_of[member] for member in group.members), token=token,
                transport=this.transport, num_buckets=num_buckets, compression=settings.compression,
                heartbeat_s=settings.heartbeat_s, rendezvous_s=settings.rendezvous_s,
                leader_grace_s=settings.leader_grace_s, tolerate_errors=tolerate_errors,
                rebalance_steps=rebalance_steps, groups_before=tuple(before), groups_after=tuple(after),
                neighbours=neighbours)
    return tasks
