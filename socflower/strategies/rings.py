"""How groups exchange gradients where their members are real machines: the settings, and each member's ring task."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from socflower.errors import ConfigError
from socflower.hierarchy import conflicts
from socflower.strategies.round import Round
from socflower.wire.message_keys import COMPRESSIONS, TRANSPORTS, RingTask

_TOKEN_BYTES = 32


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
