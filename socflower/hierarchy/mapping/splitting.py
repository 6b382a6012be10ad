"""Mapping when some group must be split: the search over whole groups and covers, and the layout of its result."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from socflower.hierarchy.mapping.covering import (
    IMPOSSIBLE,
    Budget,
    Covering,
    Histogram,
    SearchExhausted,
    SlotCover,
)
from socflower.hierarchy.mapping.placement import GroupPlacement, make_placement
from socflower.hierarchy.mapping.whole_groups import (
    BoardUse,
    WholeChoice,
    most_whole,
    pack_whole,
    slots_left,
    whole_choices,
)

_MOST_SPLITS = 200
"""The search recurses once per component, so with more split groups than this only the heuristics run."""

Layout = list[dict[int, int]]
"""Groups as {board: SoCs}."""


def split_groups(
    slots: Sequence[int], small: int, num_small: int, num_large: int, budget: int
) -> GroupPlacement:
    """Return the best placement found for groups of `small` and `small + 1` SoCs; `small` > 1 or one size only.

    It is optimal, with `proven_optimal` set, if the search ends within `budget` states and covers for each of C = 1
    and C = 2.
    """
    packed = pack_whole(slots, small, num_small, num_large)
    if packed is not None:
        return make_placement(_lay_whole(list(enumerate(packed)), small), proven_optimal=True)
    whole_small, whole_large = most_whole(slots, small, num_small, num_large)
    fewest_splits = num_small + num_large - whole_small - whole_large
    # With contention 1 each split group has at least two boards of its own.
    most_splits = sum(available > 0 for available in slots) // 2
    proven = True
    # Contention 1 is better than 2, even with more split groups.
    for joint, last in ((False, most_splits), (True, fewest_splits)):
        search = _Search(slots, small, num_small, num_large, joint, Budget(budget))
        for num_splits in range(fewest_splits, last + 1):
            try:
                search.run(num_splits)
            except SearchExhausted:
                proven = False
                break
            if search.best is not None:
                break
        if search.best is not None:
            return make_placement(search.best, proven_optimal=proven)
    uses = pack_whole(slots, small, whole_small, whole_large)
    assert uses is not None, "`most_whole` counted groups that do not fit"
    sizes = [small + 1] * (num_large - whole_large) + [small] * (num_small - whole_small)
    split = _own_boards(sizes, uses) or _largest_first(sizes, uses)
    return make_placement(_lay_whole(enumerate(uses), small) + split)


class _Search:
    """Searches for the cheapest placement with a given contention, by number of split groups."""

    def __init__(
        self,
        slots: Sequence[int],
        small: int,
        num_small: int,
        num_large: int,
        joint: bool,
        budget: Budget,
    ) -> None:
        self.best: Layout | None = None
        self.budget = budget
        self._slots = slots
        self._small = small
        self._num_small = num_small
        self._num_large = num_large
        self._joint = joint
        self._covering = Covering(small, slots_left(slots, small, small), joint, budget)
        self._cost = IMPOSSIBLE

    def run(self, num_splits: int) -> None:
        """Set `best` to the cheapest layout with `num_splits` split groups; on `SearchExhausted`, the best so far."""
        if num_splits > _MOST_SPLITS:
            raise SearchExhausted
        covering = self._covering
        fewest_small = max(0, num_splits - self._num_large)
        for split_small in range(min(num_splits, self._num_small), fewest_small - 1, -1):
            split_large = num_splits - split_small
            for choice in whole_choices(
                self._slots,
                self._small,
                self._num_small - split_small,
                self._num_large - split_large,
                self._small - (1 if split_small else 0),
                self.budget,
            ):
                boards = self._histogram(choice)
                if covering.lower_bound(boards, split_small, split_large) >= self._cost:
                    continue
                cost = covering.cost(boards, split_small, split_large)
                if cost >= self._cost:
                    continue
                self._cost = cost
                components = covering.components(boards, split_small, split_large)
                self.best = self._lay(choice, components)
                # Two boards for each split group are the minimum.
                if not self._joint and cost == num_splits:
                    return

    def _histogram(self, choice: WholeChoice) -> Histogram:
        counts = dict.fromkeys(self._covering.slots_left, 0)
        for uses in choice.values():
            for use in uses:
                if use.slots_left:
                    counts[use.slots_left] += 1
        return tuple(counts.values())

    def _lay(self, choice: WholeChoice, components: Iterable[SlotCover]) -> Layout:
        """Return the layout: assign the histogram's boards to board indices, lowest first, and place each component."""
        unassigned = {available: list(uses) for available, uses in choice.items()}
        uses = [
            (board, unassigned[available].pop(0)) for board, available in enumerate(self._slots)
        ]
        layout = _lay_whole(uses, self._small)
        free: dict[int, list[int]] = {left: [] for left in self._covering.slots_left}
        for board, use in uses:
            if use.slots_left:
                free[use.slots_left].append(board)
        for component in components:
            taken = sorted(
                (free[left].pop(0), left)
                for left, count in zip(self._covering.slots_left, component.boards, strict=True)
                for _ in range(count)
            )
            sizes = [self._small + 1] * component.num_large + [self._small] * component.num_small
            layout += lay_in_sequence(sizes, taken)
        return layout


def lay_in_sequence(sizes: Iterable[int], boards: Iterable[tuple[int, int]]) -> Layout:
    """Return groups of these sizes on (board, free slots) pairs, filled in order without gaps (F5, step 2)."""
    remaining = iter(boards)
    board, free = -1, 0
    layout: Layout = []
    for size in sizes:
        group: dict[int, int] = {}
        while size:
            while not free:
                board, free = next(remaining)
            count = min(size, free)
            group[board] = count
            size, free = size - count, free - count
        layout.append(group)
    return layout


def _lay_whole(uses: Iterable[tuple[int, BoardUse]], small: int) -> Layout:
    return [
        {board: size}
        for board, use in uses
        for size in [small + 1] * use.num_large + [small] * use.num_small
    ]


def _own_boards(sizes: Iterable[int], uses: Sequence[BoardUse]) -> Layout | None:
    """Return split groups without shared boards (C = 1), or None: each on the largest boards, then the best fit."""
    free = sorted((use.slots_left, board) for board, use in enumerate(uses) if use.slots_left)
    layout: Layout = []
    for size in sizes:
        group: dict[int, int] = {}
        while size:
            if not free:
                return None
            # The smallest board that suffices for the rest, else the largest one.
            enough = bisect_left(free, (size, -1))
            left, board = free.pop(min(enough, len(free) - 1))
            group[board] = min(left, size)
            size -= group[board]
        layout.append(group)
    return layout


def _largest_first(sizes: Iterable[int], uses: Sequence[BoardUse]) -> Layout:
    """Return split groups in sequence, boards with most free slots first, which uses few boards (C = 2)."""
    boards = sorted(range(len(uses)), key=lambda board: (-uses[board].slots_left, board))
    return lay_in_sequence(sizes, ((board, uses[board].slots_left) for board in boards))
