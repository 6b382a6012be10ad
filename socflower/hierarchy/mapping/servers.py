"""Groups inside servers: how many each server of a site gets, and their mapping there (F5)."""

import heapq
from collections.abc import Sequence
from functools import cache

from socflower.hierarchy.mapping.integrity_greedy import map_groups
from socflower.hierarchy.mapping.placement import GroupPlacement, Pieces, check_slots


def map_to_servers(
    slots: Sequence[Sequence[int]],
    num_groups: int,
    num_socs: int | None = None,
) -> tuple[GroupPlacement, tuple[int, ...]]:
    """Return a placement in which no group has members in two servers, and the server of each group.

    `slots` has the slots in use of each server's boards; boards are numbered through all servers. `num_socs` SoCs
    (default all) are taken from as few servers as have them. With fewer groups than these servers, groups have to span
    servers: then all boards are mapped like those of one server, and every group's server is 0. Within a server, sizes
    differ by at most one. Raises the errors of `map_groups`.
    """
    everything = [count for own in slots for count in own]
    num_socs = sum(everything) if num_socs is None else num_socs
    check_slots(everything, num_socs)
    socs = _fill([sum(own) for own in slots], num_socs)
    if len(slots) == 1 or num_groups < sum(map(bool, socs)):
        placement = map_groups(everything, num_groups, num_socs)
        return placement, (0,) * len(placement.groups)
    counts = groups_per_server(socs, num_groups)
    # Equal servers are mapped once.
    mapped = cache(map_groups)
    groups: list[Pieces] = []
    servers: list[int] = []
    proven = True
    first_board = 0
    for server, own in enumerate(slots):
        first, first_board = first_board, first_board + len(own)
        if not counts[server]:
            continue
        inside = mapped(tuple(own), counts[server], socs[server])
        for pieces in inside.groups:
            groups.append(tuple((first + board, count) for board, count in pieces))
        servers += [server] * len(inside.groups)
        proven = proven and inside.proven_optimal
    return GroupPlacement(groups=tuple(groups), proven_optimal=proven), tuple(servers)


def groups_per_server(socs: Sequence[int], num_groups: int) -> list[int]:
    """Return the number of groups of each server with SoCs, at least one, so that the largest group is smallest.

    Each further group goes to the server with the largest groups: any other choice would leave these as they are.
    """
    counts = [min(1, own) for own in socs]
    largest = [(-float(own), server) for server, own in enumerate(socs) if own]
    heapq.heapify(largest)
    for _ in range(num_groups - sum(counts)):
        server = largest[0][1]
        # The heap has the server with the largest groups first.
        counts[server] += 1
        heapq.heapreplace(largest, (-socs[server] / counts[server], server))
    return counts


def _fill(capacity: Sequence[int], num_socs: int) -> list[int]:
    """Return how many SoCs each server gives, the largest ones first."""
    socs = [0] * len(capacity)
    for server in sorted(range(len(capacity)), key=lambda server: -capacity[server]):
        socs[server] = min(capacity[server], num_socs)
        num_socs -= socs[server]
    return socs
