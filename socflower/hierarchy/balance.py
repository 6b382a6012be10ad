"""Which of a board's SoCs serve which of its groups, where SoCs are not equally fast (the rule of F20).

The numbers of SoCs that each group takes of each board are the mapping's and stay as they are, and with them
contention and communication groups.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from socflower.hierarchy.placement import Pieces


def fastest_socs(groups: Sequence[Pieces], available: Mapping[int, Sequence[int]],
                 capacities: Sequence[float]) -> dict[int, list[int]]:
    """Return the SoCs of each board that take part, in slot order: the fastest, ties to the lower slot."""
    wanted = dict.fromkeys(available, 0)
    for pieces in groups:
        for board, count in pieces:
            wanted[board] += count
    return {board: sorted(sorted(socs, key=lambda soc: -capacities[soc])[:wanted[board]])
            for board, socs in available.items()}


def deal_in_order(groups: Sequence[Pieces], socs: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return each group's SoCs, each board's dealt in the order given."""
    decks = {board: iter(cards) for board, cards in socs.items()}
    return [[next(decks[board]) for board, count in pieces for _ in range(count)] for pieces in groups]


def even_out(members: Sequence[Sequence[int]], board_of: Mapping[int, int], capacities: Sequence[float],
             fixed: Collection[int] = ()) -> list[list[int]]:
    """Return the groups after exchanges of SoCs on the same board that even out the groups' total capacities.

    All groups have the same batch and wait for each other at synchronisations, and a group's step takes as long as
    the batch over its total capacity (F4). Each exchange lowers the sum of squared totals; ends where none does.
    With equal capacities nothing moves, and `fixed` SoCs never do.
    """
    groups = [list(group) for group in members]
    totals = [sum(capacities[soc] for soc in group) for group in groups]
    threshold = 1e-9 * max(totals) ** 2  # what gains less than rounding errors could be undone for ever
    seats: dict[int, list[tuple[int, int]]] = {}
    for index, group in enumerate(groups):
        for position, soc in enumerate(group):
            if soc in fixed:
                continue
            seats.setdefault(board_of[soc], []).append((index, position))
    pairs = [(one, other) for own in seats.values() for one, other in combinations(own, 2) if one[0] != other[0]]
    improved = True
    while improved:
        improved = False
        for (left, i), (right, j) in pairs:
            moved = capacities[groups[right][j]] - capacities[groups[left][i]]
            if -2.0 * moved * (totals[left] - totals[right] + moved) > threshold:
                groups[left][i], groups[right][j] = groups[right][j], groups[left][i]
                totals[left] += moved
                totals[right] -= moved
                improved = True
    return groups
