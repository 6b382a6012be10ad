"""Placements: numbers of SoCs of each group on each board, their objective (F5), and the choice of SoCs (F20)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from socflower.errors import ConfigError, InfeasiblePlan

Pieces = tuple[tuple[int, int], ...]
"""(board, number of its SoCs) of one group, boards ascending; more than one piece means the group is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlacement:
    """The number of SoCs of each group on each board; groups in order of their first board."""

    groups: tuple[Pieces, ...]
    # Whether no placement of the same groups has a smaller objective.
    proven_optimal: bool

    @property
    def contention(self) -> int:
        """C of F5: the largest number of split groups on one board, which share its uplink."""
        present = Counter(board for pieces in self.groups if len(pieces) > 1 for board, _ in pieces)
        return max(present.values(), default=0)

    @property
    def objective(self) -> tuple[int, int, int]:
        """The quantities that F5 minimises, in this order: contention, split groups, boards spanned by split groups.

        A ring that is contiguous by board sends the same number of bytes over each of its k uplinks, so the third
        quantity is proportional to the traffic between boards.
        """
        spans = [len(pieces) for pieces in self.groups if len(pieces) > 1]
        return self.contention, len(spans), sum(spans)


def make_placement(
    groups: Iterable[dict[int, int]], *, proven_optimal: bool = False
) -> GroupPlacement:
    """Return the placement of groups given as {board: SoCs}, in a canonical order."""
    pieces = [
        tuple(sorted((board, count) for board, count in group.items() if count)) for group in groups
    ]
    pieces.sort()
    return GroupPlacement(groups=tuple(pieces), proven_optimal=proven_optimal)


def group_sizes(num_groups: int, num_socs: int) -> tuple[int, ...]:
    """Return sizes that sum to `num_socs` and differ by at most one, larger ones first.

    Raises `InfeasiblePlan` if there are no groups, or fewer SoCs than groups.
    """
    if not 1 <= num_groups <= num_socs:
        raise InfeasiblePlan(
            f"plan: {num_groups} groups of {num_socs} SoCs; ask for 1 to {num_socs} groups"
        )
    small, num_large = divmod(num_socs, num_groups)
    return (small + 1,) * num_large + (small,) * (num_groups - num_large)


def check_slots(slots_per_board: Sequence[int], num_socs: int) -> None:
    """Raise `ConfigError` for a negative number of slots, and `InfeasiblePlan` for more SoCs than slots."""
    num_slots = sum(slots_per_board)
    if any(slots < 0 for slots in slots_per_board):
        raise ConfigError(f"plan: slots per board {list(slots_per_board)} must be 0 or more")
    if num_socs > num_slots:
        raise InfeasiblePlan(f"plan: {num_socs} SoCs are more than the {num_slots} slots in use")


def fastest_socs(
    groups: Sequence[Pieces], available: Mapping[int, Sequence[int]], capacities: Sequence[float]
) -> dict[int, list[int]]:
    """Return the SoCs of each board that take part, in slot order: the fastest, ties to the lower slot."""
    wanted = dict.fromkeys(available, 0)
    for pieces in groups:
        for board, count in pieces:
            wanted[board] += count
    chosen = {}
    for board, socs in available.items():
        by_capacity = sorted(socs, key=lambda soc: -capacities[soc])
        chosen[board] = sorted(by_capacity[: wanted[board]])
    return chosen


def deal_in_order(groups: Sequence[Pieces], socs: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return each group's SoCs; each board's SoCs are assigned in the given order."""
    remaining = {board: iter(own) for board, own in socs.items()}
    return [[next(remaining[board]) for board, n in pieces for _ in range(n)] for pieces in groups]


def balance_capacities(
    members: Sequence[Sequence[int]],
    board_of: Mapping[int, int],
    capacities: Sequence[float],
    fixed: Collection[int] = (),
) -> list[list[int]]:
    """Return the groups after swaps of SoCs on the same board that even out the groups' total capacities (F20).

    All groups have the same batch size and wait for each other at synchronisations; the time of a group's step is
    the batch divided by its total capacity (F4). Each swap lowers the sum of squared totals; the search ends when no
    swap does. With equal capacities no SoC is swapped, and `fixed` SoCs never are.
    """
    groups = [list(group) for group in members]
    totals = [sum(capacities[soc] for soc in group) for group in groups]
    # Swaps that gain less than rounding errors might be repeated without end.
    threshold = 1e-9 * max(totals) ** 2
    # Group and place in it of each board's SoCs.
    positions: dict[int, list[tuple[int, int]]] = {}
    for index, group in enumerate(groups):
        for position, soc in enumerate(group):
            if soc not in fixed:
                positions.setdefault(board_of[soc], []).append((index, position))
    pairs = [
        (one, other)
        for own in positions.values()
        for one, other in combinations(own, 2)
        if one[0] != other[0]
    ]
    improved = True
    while improved:
        improved = False
        for (left, i), (right, j) in pairs:
            # The swap changes the sum of squared totals by 2 moved (left - right + moved).
            moved = capacities[groups[right][j]] - capacities[groups[left][i]]
            if -2.0 * moved * (totals[left] - totals[right] + moved) > threshold:
                groups[left][i], groups[right][j] = groups[right][j], groups[left][i]
                totals[left] += moved
                totals[right] -= moved
                improved = True
    return groups
