"""Mapping (F5) against brute force over every assignment of board slots to groups."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mapping_reference import brute_force, small_clusters
from socflower.errors import InfeasiblePlan
from socflower.hierarchy import GroupPlacement, integrity_greedy, map_groups
from socflower.hierarchy.mapping.splitting import _own_boards
from socflower.hierarchy.mapping.whole_groups import BoardUse
from tests.one_line import refused

BOARD_LISTS = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def assert_valid(
    placement: GroupPlacement, slots: Sequence[int], num_groups: int, num_socs: int
) -> None:
    sizes = [sum(count for _, count in pieces) for pieces in placement.groups]
    used = Counter[int]()
    for pieces in placement.groups:
        assert all(count > 0 for _, count in pieces)
        assert len({board for board, _ in pieces}) == len(pieces)
        used.update(dict(pieces))
    assert len(sizes) == num_groups and sum(sizes) == num_socs
    assert max(sizes) - min(sizes) <= 1
    assert all(used[board] <= slots[board] for board in used)


@pytest.mark.parametrize("most_socs", [10, pytest.param(12, marks=pytest.mark.slow)])
def test_mapping_equals_brute_force_on_all_small_clusters_with_idle_slots_and_uneven_boards(
    most_socs: int,
) -> None:
    for slots, num_groups, num_socs in small_clusters(most_socs):
        placement = map_groups(slots, num_groups, num_socs)
        assert_valid(placement, slots, num_groups, num_socs)
        assert placement.proven_optimal
        assert placement.objective == brute_force(slots, num_groups, num_socs)


@settings(max_examples=75)
@given(
    slots=st.lists(st.integers(1, 4), min_size=4, max_size=6).filter(
        lambda slots: sum(slots) <= 16
    ),
    data=st.data(),
)
def test_mapping_equals_brute_force_on_more_boards_in_any_order(
    slots: list[int], data: st.DataObject
) -> None:
    num_socs = data.draw(st.integers(1, sum(slots)))
    num_groups = data.draw(st.integers(1, num_socs))
    assert map_groups(slots, num_groups, num_socs).objective == brute_force(
        slots, num_groups, num_socs
    )


@pytest.mark.parametrize(
    ("slots", "size", "num_groups", "greedy", "optimum"),
    [
        ([5, 5, 5, 5], 3, 6, 2, 1),  # idle slots
        ([4, 4, 5, 5], 3, 6, 2, 1),  # uneven boards
    ],
)
def test_theorem_1_is_false_with_idle_slots_and_on_uneven_boards(
    slots: list[int],
    size: int,
    num_groups: int,
    greedy: int,
    optimum: int,
) -> None:
    assert integrity_greedy(slots, num_groups, size * num_groups).contention == greedy
    assert map_groups(slots, num_groups, size * num_groups).contention == optimum


@given(num_boards=st.integers(1, 12), slots=st.integers(1, 8), data=st.data())
def test_theorem_1_integrity_greedy_is_optimal_for_equal_full_boards(
    num_boards: int,
    slots: int,
    data: st.DataObject,
) -> None:
    total = num_boards * slots
    num_groups = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    boards = [slots] * num_boards
    best = map_groups(boards, num_groups)
    assert best.proven_optimal
    assert integrity_greedy(boards, num_groups).contention == best.contention


@given(slots=BOARD_LISTS, data=st.data())
def test_mapping_is_never_worse_than_greedy_and_uses_no_slot_twice(
    slots: list[int], data: st.DataObject
) -> None:
    num_socs = data.draw(st.integers(1, sum(slots)))
    num_groups = data.draw(st.integers(1, num_socs))
    # Also when the search ends early.
    for budget in (0, 3, 10_000):
        placement = map_groups(slots, num_groups, num_socs, budget=budget)
        assert_valid(placement, slots, num_groups, num_socs)
        assert placement.objective <= integrity_greedy(slots, num_groups, num_socs).objective
        assert placement.contention <= 2
        if placement.proven_optimal:
            assert placement.objective == map_groups(slots, num_groups, num_socs).objective


@settings(max_examples=30)
@given(
    taken=st.lists(st.integers(0, 3), min_size=0, max_size=8),
    num_groups=st.integers(1, 6),
    data=st.data(),
)
def test_mapping_stays_optimal_when_socs_are_taken_away(
    taken: list[int],
    num_groups: int,
    data: st.DataObject,
) -> None:
    slots = [4, 4, 4, 4]
    for board in taken:
        slots[board] = max(0, slots[board] - 1)
    if sum(slots) >= num_groups:
        assert map_groups(slots, num_groups).objective == brute_force(slots, num_groups, sum(slots))


@pytest.mark.parametrize("num_groups", [4, 7, 12, 17, 23])
def test_optimality_is_proven_for_sixty_socs_whole_and_after_preemption(num_groups: int) -> None:
    for slots, num_socs in (
        ([5] * 12, 60),
        ([5] * 12, 52),
        ([5, 5, 4, 4, 3, 5, 5, 5, 5, 4, 5, 4], 54),
        ([3, 3, 4, 5, 5, 4, 5, 5, 5, 5, 5, 5], 52),
    ):
        assert map_groups(slots, num_groups, num_socs).proven_optimal


@pytest.mark.parametrize(("num_groups", "num_socs"), [(700, 5000), (1400, 4500), (2500, 5000)])
def test_thousands_of_socs_are_planned_without_proof_but_without_needless_contention(
    num_groups: int, num_socs: int
) -> None:
    slots = [5] * 1000
    placement = map_groups(slots, num_groups, num_socs)
    assert_valid(placement, slots, num_groups, num_socs)
    assert placement.objective <= integrity_greedy(slots, num_groups, num_socs).objective


def test_without_search_split_groups_get_boards_of_their_own_where_there_are_enough() -> None:
    # 1400 groups of 3 on 1000 boards of 5: 400 groups over two boards with two slots left each.
    assert map_groups([5] * 1000, 1400, 4200).objective == (1, 400, 800)


def test_own_boards_are_the_largest_and_for_the_remainder_the_smallest_that_suffices() -> None:
    uses = [BoardUse(0, 0, left) for left in (4, 2, 3, 1, 4)]
    assert _own_boards([6], uses) == [{4: 4, 1: 2}]
    assert _own_boards([5, 5], uses) == [{4: 4, 3: 1}, {0: 4, 1: 1}]
    assert _own_boards([9, 6], uses) is None


@pytest.mark.parametrize(
    ("slots", "num_groups", "num_socs", "named"),
    [
        ([5, 5], 11, None, "11 groups"),
        ([5, 5], 3, 11, "11 SoCs"),
        ([5, 5], 0, None, "0 groups"),
        ([0], 1, None, "0"),
        ([5], 1, 0, "0"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_both_numbers(
    slots: list[int], num_groups: int, num_socs: int | None, named: str
) -> None:
    for plan in (map_groups, integrity_greedy):
        refused(lambda plan=plan: plan(slots, num_groups, num_socs), named, error=InfeasiblePlan)


def test_negative_slots_are_refused() -> None:
    refused(lambda: map_groups([5, -1], 1), "-1")
