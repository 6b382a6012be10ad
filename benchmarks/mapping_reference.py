"""Brute force over all assignments of board slots to groups: the reference of the mapping's benchmark and tests."""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement


def small_clusters(max_slots: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield (slots per board, groups, SoCs) of all clusters of up to four boards of five and `max_slots` slots."""
    for num_boards in range(1, 5):
        for slots in combinations_with_replacement(range(1, 6), num_boards):
            if sum(slots) <= max_slots:
                for num_socs in range(1, sum(slots) + 1):
                    for num_groups in range(1, num_socs + 1):
                        yield slots, num_groups, num_socs


def brute_force(slots: Sequence[int], num_groups: int, num_socs: int) -> tuple[int, int, int]:
    """Return the least objective of F5 over all assignments; boards in equal states count once."""
    small, num_large = divmod(num_socs, num_groups)
    # A state is ((free slots, split groups) per board, splits, spans).
    states = {(tuple(sorted((free, 0) for free in slots)), 0, 0)}
    for size in [small + 1] * num_large + [small] * (num_groups - num_large):
        after = set()
        for boards, splits, spans in states:
            for taken in _ways(size, [free for free, _ in boards]):
                span = sum(count > 0 for count in taken)
                split = span > 1
                left = tuple(
                    sorted(
                        (free - count, present + (split and count > 0))
                        for (free, present), count in zip(boards, taken, strict=True)
                    )
                )
                after.add((left, splits + split, spans + span * split))
        states = after
    return min(
        (max(present for _, present in boards), splits, spans) for boards, splits, spans in states
    )


def _ways(size: int, free: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not free:
        if not size:
            yield ()
        return
    for count in range(min(size, free[0]) + 1):
        for rest in _ways(size - count, free[1:]):
            yield count, *rest
