"""The plan of a hierarchical training: groups of SoCs, their leaders, and the order of exchanges.

Also the new plan while SoCs are preempted or dead.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.cluster import Cluster
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.hierarchy.communication_groups import communication_groups
from socflower.hierarchy.mapping.placement import balance_capacities, deal_in_order, fastest_socs
from socflower.hierarchy.mapping.servers import map_to_servers
from socflower.plain_numbers import plain_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A logical group: SoCs that train synchronously, in the order of their ring."""

    group_id: int
    # SoC indices, contiguous by board, so that the ring has one flow each way per uplink.
    members: tuple[int, ...]
    leader: int
    # Ascending.
    boards: tuple[int, ...]
    # The server that has its boards; 0 if groups span servers.
    server: int = 0

    @property
    def split(self) -> bool:
        """Whether the ring crosses uplinks."""
        return len(self.boards) > 1


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """All groups of a cluster, as strategies, the simulator and the real runtime execute them."""

    groups: tuple[Group, ...]
    # Group ids; conflicting groups are in different communication groups (F6).
    communication_groups: tuple[tuple[int, ...], ...]
    # C of F5: split groups on the fullest board.
    contention: int
    # Slots available for training.
    slots_per_board: tuple[int, ...]
    # All members, ascending.
    participants: tuple[int, ...]
    # Whether no mapping has a smaller objective (F5) in any server.
    proven_optimal: bool

    @property
    def by_server(self) -> Mapping[int, Sequence[Group]]:
        """The groups of each server that has any."""
        found: dict[int, list[Group]] = {}
        for group in self.groups:
            found.setdefault(group.server, []).append(group)
        return found

    def to_document(self) -> dict[str, Any]:
        """Return the public part of the plan document, with stable keys."""
        return {
            "groups": [
                {
                    "id": group.group_id,
                    "members": list(group.members),
                    "leader": group.leader,
                    "boards": list(group.boards),
                    "server": group.server,
                    "split": group.split,
                }
                for group in self.groups
            ],
            "contention": self.contention,
            "communication_groups": [list(ids) for ids in self.communication_groups],
            "proven_optimal": self.proven_optimal,
            "slots_per_board": list(self.slots_per_board),
        }


@plain_numbers
def plan_groups(
    cluster: Cluster,
    num_groups: int,
    num_socs: int | None = None,
    capacities: Sequence[float] | None = None,
) -> GroupPlan:
    """Return `num_groups` groups of `num_socs` SoCs (default all): mapping by F5, turns by F6, leaders by F8.

    No group spans servers, unless there are fewer groups than servers: then all boards count as those of one server.

    `capacities` has one entry per SoC of the cluster, in any unit. A SoC at 0 is unavailable, the slowest SoCs stay
    idle first, and the SoCs of a board are assigned so that groups are about equally fast (F20).

    Raises `InfeasiblePlan` for more groups than SoCs or more SoCs than slots, `ConfigError` for capacities that
    are negative, not finite or of the wrong number.
    """
    capacities = (1.0,) * cluster.num_socs if capacities is None else capacities
    require_one_per_soc("plan", cluster, capacities)
    available = {
        board: [soc for soc in cluster.socs_of(board) if capacities[soc] > 0.0]
        for board in range(len(cluster.boards))
    }
    board_of = {soc: board for board, socs in available.items() for soc in socs}
    slots = tuple(map(len, available.values()))
    placement, servers = map_to_servers(_by_server(cluster, slots), num_groups, num_socs)
    # The placement says how many SoCs a group has on each board; now they are chosen.
    chosen = fastest_socs(placement.groups, available, capacities)
    members = deal_in_order(placement.groups, chosen)
    members = balance_capacities(members, board_of, capacities)
    placed = enumerate(zip(members, servers, strict=True))
    groups = tuple(_group(group_id, socs, board_of, server) for group_id, (socs, server) in placed)
    return GroupPlan(
        groups=groups,
        communication_groups=communication_groups(groups),
        contention=placement.contention,
        slots_per_board=slots,
        participants=tuple(sorted(soc for socs in members for soc in socs)),
        proven_optimal=placement.proven_optimal,
    )


def _by_server(cluster: Cluster, slots: Sequence[int]) -> list[list[int]]:
    """Return the slots of each server's boards."""
    found: list[list[int]] = [[] for _ in cluster.servers or ((),)]
    for board, own in enumerate(slots):
        found[cluster.server_of(board)].append(own)
    return found


def _group(group_id: int, socs: Sequence[int], board_of: Mapping[int, int], server: int) -> Group:
    """Return a group with its ring in ascending order, which is contiguous by board, and its leader (F8).

    The leader is the first member on the board with most of the group's members (the lowest such board). Every SoC is
    equally far from the hub, so only the broadcast from the leader to its group matters: from this board it crosses an
    uplink for the fewest members.
    """
    members = tuple(sorted(socs))
    on_board = Counter(board_of[soc] for soc in members)
    fullest = max(on_board, key=lambda board: (on_board[board], -board))
    leader = next(soc for soc in members if board_of[soc] == fullest)
    return Group(
        group_id=group_id,
        members=members,
        leader=leader,
        boards=tuple(sorted(on_board)),
        server=server,
    )


def plan_over(
    whole: GroupPlan, cluster: Cluster, capacities: Sequence[float], socs: Collection[int]
) -> GroupPlan:
    """Return a plan of these SoCs by the rules of `whole` (F5, F6): `whole` itself, if they are its own.

    They may be fewer than those of `whole`, or others; all other SoCs stay idle. The plan has as many groups as
    `whole`, or one per SoC if there are fewer SoCs. `capacities` has one entry for each SoC of the cluster. Raises
    `InfeasiblePlan` without any SoC.
    """
    used = set(socs)
    if used == set(whole.participants):
        return whole
    if not used:
        raise InfeasiblePlan("no SoC is left to train: all have gone or are preempted")
    return plan_of_socs(cluster, min(len(whole.groups), len(used)), capacities, used)


def plan_of_socs(
    cluster: Cluster, num_groups: int, capacities: Sequence[float], socs: Collection[int]
) -> GroupPlan:
    """Return `num_groups` groups of these SoCs; see `plan_groups`."""
    rates = [capacity if soc in socs else 0.0 for soc, capacity in enumerate(capacities)]
    return plan_groups(cluster, num_groups, None, rates)


def require_one_per_soc(where: str, cluster: Cluster, capacities: Sequence[float]) -> None:
    """Raise `ConfigError` unless there is a capacity of 0 or more, finite, for each SoC of the cluster."""
    usable = [capacity for capacity in capacities if 0.0 <= capacity < math.inf]
    if len(usable) != cluster.num_socs or len(capacities) != len(usable):
        raise ConfigError(
            f"{where}: need {cluster.num_socs} capacities of 0 or more, got {list(capacities)}"
        )
