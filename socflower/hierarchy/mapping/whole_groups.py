"""Placements of whole groups, those on one board: step 1 of the mapping (F5), and all its alternatives.

Groups have two sizes, s and s + 1. With one size, the number of free slots of a board is fixed: slots mod s. With two,
it depends on how many large groups the board holds, so each choice leaves other slots for the split groups.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from socflower.hierarchy.mapping.covering import Budget


@dataclass(frozen=True, slots=True)
class BoardUse:
    """Numbers of whole groups on one board, by size, and the number of slots that stay free."""

    num_small: int
    num_large: int
    slots_left: int


WholeChoice = dict[int, list[BoardUse]]
"""For each number of slots, the use of each board with that many."""


def most_whole(slots: Sequence[int], small: int, num_small: int, num_large: int) -> tuple[int, int]:
    """Return how many groups of `small` and of `small + 1` fit without a split, with the largest possible sum."""
    last_row = _most_large(slots, small, num_small)[-1]
    fitting = [
        (small_ones, min(int(large), num_large))
        for small_ones, large in enumerate(last_row)
        if large >= 0
    ]
    return max(fitting, key=lambda numbers: (sum(numbers), numbers))


def pack_whole(
    slots: Sequence[int], small: int, num_small: int, num_large: int
) -> list[BoardUse] | None:
    """Return a placement of all groups without a split, board by board, or None if there is none."""
    table = _most_large(slots, small, num_small)
    if table[-1][num_small] < num_large:
        return None
    uses: list[BoardUse] = []
    left_small, left_large = num_small, num_large
    # Backwards through the table: which choice for the last board leads to its entry?
    for index in range(len(slots) - 1, -1, -1):
        for a in range(min(slots[index] // small, left_small) + 1):
            large = (slots[index] - a * small) // (small + 1)
            before = table[index][left_small - a]
            if before >= 0 and before + large == table[index + 1][left_small]:
                large = min(large, left_large)
                uses.append(BoardUse(a, large, slots[index] - a * small - large * (small + 1)))
                left_small, left_large = left_small - a, left_large - large
                break
    return uses[::-1]


def _most_large(slots: Sequence[int], small: int, num_small: int) -> list[NDArray[np.int64]]:
    """Return a table: row k, column a is the most large groups that fit on the first k boards beside a small groups.

    It is -1 if the small groups alone do not fit.
    """
    row = np.full(num_small + 1, -1, dtype=np.int64)
    row[0] = 0
    table = [row]
    for available in slots:
        row = table[-1] + np.where(table[-1] >= 0, available // (small + 1), 0)
        # With `a` small groups on this board, the boards before hold the others.
        for a in range(1, min(available // small, num_small) + 1):
            before = table[-1][:-a]
            after = np.where(before >= 0, before + (available - a * small) // (small + 1), -1)
            row[a:] = np.maximum(row[a:], after)
        table.append(row)
    return table


def whole_choices(
    slots: Sequence[int],
    small: int,
    num_small: int,
    num_large: int,
    most_left: int,
    budget: Budget,
) -> Iterator[WholeChoice]:
    """Yield all placements of exactly these groups that leave at most `most_left` slots free on each board.

    Placements that differ only by a permutation of equal boards are yielded once. In an optimal placement no board has
    room for a whole split group, so `most_left` is one less than the size of the smallest split group. Proof: suppose
    that a board's slots without whole groups suffice for a split group g. Move g there. If another split group h used
    the board, move that part of h to the former boards of g: each had no other split group (contention 1), together
    they have as many slots as g has SoCs, and h keeps at least one slot elsewhere, so h fits even if it is one larger
    than g. This gives one split group fewer, and no more contention. With contention 2 the most whole groups are
    placed in any case.
    """
    yield from _WholeChoices(slots, small, most_left, budget).of_kind(0, num_small, num_large, {})


class _WholeChoices:
    """The search of `whole_choices`: board by board, kind by kind; a kind of boards has equally many slots."""

    def __init__(self, slots: Sequence[int], small: int, most_left: int, budget: Budget) -> None:
        self._kinds = sorted(Counter(slots).items(), reverse=True)
        self._patterns = [_patterns(available, small, most_left) for available, _ in self._kinds]
        counts = [count for _, count in self._kinds]
        most_small = [max(use.num_small for use in uses) for uses in self._patterns]
        most_large = [max(use.num_large for use in uses) for uses in self._patterns]
        self._reach_small = [most * count for most, count in zip(most_small, counts, strict=True)]
        self._reach_large = [most * count for most, count in zip(most_large, counts, strict=True)]
        self._budget = budget

    def of_kind(
        self, kind: int, num_small: int, num_large: int, chosen: WholeChoice
    ) -> Iterator[WholeChoice]:
        """Yield the choices for the boards of `kind` and of all later kinds, with these numbers of groups left."""
        if kind == len(self._kinds):
            yield chosen
            return
        available, count = self._kinds[kind]
        for uses, left_small, left_large in self._uses(kind, 0, count, num_small, num_large, []):
            # The boards of the other kinds must be able to hold all other groups.
            fits_small = left_small <= sum(self._reach_small[kind + 1 :])
            if fits_small and left_large <= sum(self._reach_large[kind + 1 :]):
                yield from self.of_kind(
                    kind + 1, left_small, left_large, {**chosen, available: uses}
                )

    def _uses(
        self,
        kind: int,
        pattern: int,
        boards: int,
        num_small: int,
        num_large: int,
        done: list[BoardUse],
    ) -> Iterator[tuple[list[BoardUse], int, int]]:
        """Yield (uses, small groups left, large groups left) of `boards` boards, by the patterns from `pattern` on."""
        self._budget.spend(1)
        if not boards:
            yield done, num_small, num_large
            return
        if pattern == len(self._patterns[kind]):
            return
        use = self._patterns[kind][pattern]
        most = boards
        if use.num_small:
            most = min(most, num_small // use.num_small)
        if use.num_large:
            most = min(most, num_large // use.num_large)
        # All boards that are left have the last pattern.
        is_last = pattern + 1 == len(self._patterns[kind])
        for count in range(most, boards - 1 if is_last else -1, -1):
            yield from self._uses(
                kind,
                pattern + 1,
                boards - count,
                num_small - count * use.num_small,
                num_large - count * use.num_large,
                done + [use] * count,
            )


def slots_left(slots: Sequence[int], small: int, most_left: int) -> tuple[int, ...]:
    """Return the possible numbers of free slots of a board in `whole_choices`, above zero, in descending order."""
    uses = (use for available in set(slots) for use in _patterns(available, small, most_left))
    return tuple(sorted({use.slots_left for use in uses if use.slots_left}, reverse=True))


def _patterns(available: int, small: int, most_left: int) -> list[BoardUse]:
    """Return the possible uses of one board that leave at most `most_left` slots free."""
    uses: list[BoardUse] = []
    for large in range(available // (small + 1) + 1):
        rest = available - large * (small + 1)
        least_small = max(0, -(-(rest - most_left) // small))
        uses.extend(
            BoardUse(a, large, rest - a * small) for a in range(least_small, rest // small + 1)
        )
    return uses
