"""Mapping groups to boards: integrity-greedy, and an exact search (F5, SoCFlow+ section 3.1).

    minimise (C, split groups, boards spanned by split groups), in this order, where
    C = max over boards of the number of split groups present on it.

Integrity-greedy is optimal only if all boards are equal and full. Three facts keep the exact search small:

1. Placing groups in sequence puts at most two split groups on a board, so the optimal C is 0, 1 or 2.
2. C = 2 with the fewest possible split groups is always feasible: place as many whole groups as fit, and the rest in
   sequence. C = 1 may need another placement of the whole groups, so it is searched for every number of split groups.
3. For given whole groups, placing the split groups is the covering problem of `covering.py`.
"""

from collections.abc import Sequence

from socflower.hierarchy.mapping.placement import (
    GroupPlacement,
    check_slots,
    group_sizes,
    make_placement,
)
from socflower.hierarchy.mapping.splitting import lay_in_sequence, split_groups
from socflower.plain_numbers import plain_numbers

SEARCH_BUDGET = 2_000
"""States and covers that each of the searches for C = 1 and C = 2 may visit, which takes a few milliseconds."""


@plain_numbers
def integrity_greedy(
    slots_per_board: Sequence[int], num_groups: int, num_socs: int | None = None
) -> GroupPlacement:
    """Return the paper's mapping: step 1 places whole groups, first fit; step 2 the others in sequence (F5).

    Larger groups are placed first. Arguments and errors are those of `map_groups`.
    """
    num_socs = sum(slots_per_board) if num_socs is None else num_socs
    check_slots(slots_per_board, num_socs)
    free = list(slots_per_board)
    layout: list[dict[int, int]] = []
    to_split: list[int] = []
    for size in group_sizes(num_groups, num_socs):
        board = next((board for board, slots in enumerate(free) if slots >= size), None)
        if board is None:
            to_split.append(size)
        else:
            layout.append({board: size})
            free[board] -= size
    layout += lay_in_sequence(to_split, enumerate(free))
    return make_placement(layout, proven_optimal=not to_split)


@plain_numbers
def map_groups(
    slots_per_board: Sequence[int],
    num_groups: int,
    num_socs: int | None = None,
    *,
    budget: int = SEARCH_BUDGET,
) -> GroupPlacement:
    """Return a placement of least objective, or the best one found within `budget`.

    `slots_per_board` has the number of slots in use on each board, `num_socs` (default all) how many of them are used
    for training. Group sizes differ by at most one. The planner chooses which slots stay idle. `proven_optimal` says
    whether the search was complete. On a tie, the result is that of `integrity_greedy`.

    Raises `ConfigError` for negative slots, `InfeasiblePlan` for fewer slots than SoCs or fewer SoCs than groups.
    """
    num_socs = sum(slots_per_board) if num_socs is None else num_socs
    greedy = integrity_greedy(slots_per_board, num_groups, num_socs)
    if greedy.proven_optimal:
        return greedy
    small, num_large = divmod(num_socs, num_groups)
    num_small = num_groups - num_large
    if small == 1:
        # A group of one SoC fits on any board, so only groups of two are searched; the others fill the free slots.
        pairs = split_groups(slots_per_board, 2, num_large, 0, budget)
        better = _add_singles(pairs, slots_per_board, num_small)
    else:
        better = split_groups(slots_per_board, small, num_small, num_large, budget)
    if better.objective < greedy.objective:
        return better
    return GroupPlacement(groups=greedy.groups, proven_optimal=better.proven_optimal)


def _add_singles(
    pairs: GroupPlacement, slots_per_board: Sequence[int], num_singles: int
) -> GroupPlacement:
    free = list(slots_per_board)
    for pieces in pairs.groups:
        for board, count in pieces:
            free[board] -= count
    singles = lay_in_sequence([1] * num_singles, enumerate(free))
    return make_placement([*map(dict, pairs.groups), *singles], proven_optimal=pairs.proven_optimal)
