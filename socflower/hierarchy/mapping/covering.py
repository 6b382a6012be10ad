"""Exact assignment of split groups to the slots that whole groups leave free, by branch and bound.

A component of the placement is a connected component of the graph of split groups and boards: split groups that share
boards, directly or through others. A component of k groups and m boards can be placed in sequence: then every board
holds at most two of its groups, and its groups span k + m - 1 boards in total. No placement spans fewer, since a
connected graph has at least nodes - 1 edges. So the search only has to choose which groups and which boards form a
component; the boards must have enough slots for the groups. For contention 1 a component has one group.

Boards with equal numbers of free slots are interchangeable: a state is a histogram of free slots, and is solved once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Histogram = tuple[int, ...]
"""Number of boards for each entry of `Covering.slots_left`."""

IMPOSSIBLE = 1 << 30
"""Cost of an infeasible cover, above every feasible one."""


class SearchExhausted(Exception):
    """The search has used up its budget."""


@dataclass(slots=True)
class Budget:
    """The number of steps that a search may still take; limits planning to milliseconds on clusters of any size."""

    num_left: int

    def spend(self, amount: int) -> None:
        """Subtract `amount`; raises `SearchExhausted` below zero."""
        self.num_left -= amount
        if self.num_left < 0:
            raise SearchExhausted


@dataclass(frozen=True, slots=True)
class SlotCover:
    """Groups placed in sequence on boards: numbers of groups by size, and of boards by free slots."""

    num_small: int
    num_large: int
    boards: Histogram


_State = tuple[Histogram, int, int]
"""Boards that are left, and small and large groups that are not placed yet."""


@dataclass(slots=True)
class Covering:
    """The cheapest covers of groups of `small` and `small + 1` SoCs; the cost is the sum of m - 1 over components."""

    small: int
    # Distinct values, descending.
    slots_left: tuple[int, ...]
    # Whether a component may have several groups (contention 2) or only one (contention 1).
    joint: bool
    budget: Budget
    _solved: dict[_State, tuple[int, SlotCover | None]] = field(default_factory=dict)

    def cost(self, boards: Histogram, num_small: int, num_large: int) -> int:
        """Return the least sum of m - 1 over components, or `IMPOSSIBLE`."""
        if not num_small + num_large:
            return 0
        key = (boards, num_small, num_large)
        if key not in self._solved:
            self._solved[key] = self._solve(boards, num_small, num_large)
        return self._solved[key][0]

    def components(self, boards: Histogram, num_small: int, num_large: int) -> list[SlotCover]:
        """Return the components of a cheapest cover; `cost` must have been called and have found a feasible one."""
        found: list[SlotCover] = []
        while num_small + num_large:
            component = self._solved[boards, num_small, num_large][1]
            assert component is not None
            found.append(component)
            boards = tuple(have - used for have, used in zip(boards, component.boards, strict=True))
            num_small, num_large = num_small - component.num_small, num_large - component.num_large
        return found

    def lower_bound(self, boards: Histogram, num_small: int, num_large: int) -> int:
        """Return a lower bound of `cost` without a search: the fewest boards, divided into the most components."""
        num_groups = num_small + num_large
        if not num_groups:
            return 0
        largest = self._largest(boards)
        fewest = self._fewest_boards(boards, num_small * self.small + num_large * (self.small + 1))
        if not largest or fewest >= IMPOSSIBLE:
            return IMPOSSIBLE
        least = max(2, -(-self.small // largest))
        if self.joint:
            # m - q with q <= K components of at least `least` boards each; it does not decrease as m grows.
            return fewest - min(num_groups, fewest // least)
        # With contention 1 every group has boards of its own, at least two.
        least_large = max(2, -(-(self.small + 1) // largest))
        fewest = max(fewest, num_small * least + num_large * least_large)
        return fewest - num_groups if fewest <= sum(boards) else IMPOSSIBLE

    def _joint_bound(self, boards: Histogram, demand: int, wanted: int, num_others: int) -> int:
        """Return a lower bound of the cost with a component of `wanted` slots, which other components cannot use."""
        least = max(2, -(-self.small // self._largest(boards)))
        fewest = self._fewest_boards(boards, demand)
        here = self._fewest_boards(boards, wanted)
        return fewest - 1 - min(num_others, max(0, fewest - here) // least)

    def _largest(self, boards: Histogram) -> int:
        """Return the most free slots of a board; 0 if there are no boards."""
        sizes = zip(self.slots_left, boards, strict=True)
        return next((slots for slots, count in sizes if count), 0)

    def _fewest_boards(self, boards: Histogram, demand: int) -> int:
        """Return how many boards, the largest first, have `demand` slots; `IMPOSSIBLE` if all have fewer."""
        fewest = 0
        for slots, count in zip(self.slots_left, boards, strict=True):
            if demand <= slots * count:
                return fewest + -(-demand // slots)
            demand -= slots * count
            fewest += count
        return IMPOSSIBLE

    def _solve(
        self, boards: Histogram, num_small: int, num_large: int
    ) -> tuple[int, SlotCover | None]:
        self.budget.spend(1)
        bound = self.lower_bound(boards, num_small, num_large)
        if bound >= IMPOSSIBLE:
            return IMPOSSIBLE, None
        demand = num_small * self.small + num_large * (self.small + 1)
        slack = sum(map(int.__mul__, self.slots_left, boards)) - demand
        best: tuple[int, SlotCover | None] = (IMPOSSIBLE, None)
        for small, large in self._group_choices(num_small, num_large):
            wanted = small * self.small + large * (self.small + 1)
            num_others = num_small + num_large - small - large
            # No cover with this component can be cheaper than the best one found.
            if self.joint and self._joint_bound(boards, demand, wanted, num_others) >= best[0]:
                continue
            for used in self._covers(boards, wanted, slack):
                rest = tuple(map(int.__sub__, boards, used))
                here = sum(used) - 1
                if here + self.lower_bound(rest, num_small - small, num_large - large) >= best[0]:
                    continue
                cost = here + self.cost(rest, num_small - small, num_large - large)
                if cost < best[0]:
                    best = cost, SlotCover(small, large, used)
                    # No cover is cheaper than the lower bound.
                    if cost == bound:
                        return best
        return best

    def _group_choices(self, num_small: int, num_large: int) -> Iterator[tuple[int, int]]:
        """Yield (small, large) numbers of groups of the next component; it has a large one while any are left."""
        if not self.joint:
            yield (0, 1) if num_large else (1, 0)
            return
        for total in range(1, num_small + num_large + 1):
            for large in range(min(num_large, total), -1, -1):
                if total - large <= num_small and (large or not num_large):
                    yield total - large, large

    def _covers(self, boards: Histogram, demand: int, slack: int) -> Sequence[Histogram]:
        """Return the minimal sets of boards with at least `demand` and at most `demand + slack` slots.

        Minimal: without any one of the boards the slots do not suffice. Ordered by number of boards, then by unused
        slots, since the first set is often the best one.
        """
        found: list[tuple[int, int, Histogram]] = []
        slots_left = self.slots_left

        def extend(index: int, missing: int, taken: list[int], num_boards: int) -> None:
            slots = slots_left[index]
            last = index + 1 == len(slots_left)
            # Boards are taken in descending order of slots. The cover is minimal if the last, smallest board is needed.
            enough = -(-missing // slots)
            if enough <= boards[index] and enough * slots - missing <= slack:
                used = (*taken, enough, *(0,) * (len(slots_left) - index - 1))
                found.append((num_boards + enough, enough * slots - missing, used))
            if not last:
                for count in range(min(boards[index], enough - 1), -1, -1):
                    extend(index + 1, missing - count * slots, [*taken, count], num_boards + count)

        extend(0, demand, [], 0)
        self.budget.spend(len(found))
        found.sort()
        return [used for _, _, used in found]
