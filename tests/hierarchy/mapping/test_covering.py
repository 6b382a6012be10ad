"""The exact covering against a search that omits nothing, and its lower bounds against the true cost."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.hierarchy.mapping.covering import IMPOSSIBLE, Budget, Covering, Histogram


@st.composite
def covers(draw: st.DrawFn) -> tuple[Covering, Histogram, int, int]:
    """Few boards with fewer free slots than a group has, and few groups."""
    small = draw(st.integers(2, 7))
    slots_left = tuple(
        sorted(draw(st.sets(st.integers(1, small - 1), min_size=1, max_size=3)), reverse=True)
    )
    boards = tuple(draw(st.integers(0, 3)) for _ in slots_left)
    covering = Covering(small, slots_left, draw(st.booleans()), Budget(1 << 20))
    return covering, boards, draw(st.integers(0, 3)), draw(st.integers(0, 3))


def least_cost(covering: Covering, boards: Histogram, num_small: int, num_large: int) -> int:
    """Return the least sum of m - 1 over components, trying all next components on all boards."""
    if not num_small + num_large:
        return 0
    best = IMPOSSIBLE
    for small, large in product(range(num_small + 1), range(num_large + 1)):
        if not small + large or (small + large > 1 and not covering.joint):
            continue
        demand = small * covering.small + large * (covering.small + 1)
        for used in product(*(range(count + 1) for count in boards)):
            if (
                sum(slots * count for slots, count in zip(covering.slots_left, used, strict=True))
                >= demand
            ):
                rest = tuple(have - count for have, count in zip(boards, used, strict=True))
                best = min(
                    best,
                    sum(used)
                    - 1
                    + least_cost(covering, rest, num_small - small, num_large - large),
                )
    return min(best, IMPOSSIBLE)


@settings(max_examples=60)
@given(covers())
def test_costs_are_the_least_and_bounds_are_below_them(
    case: tuple[Covering, Histogram, int, int],
) -> None:
    covering, boards, num_small, num_large = case
    least = least_cost(*case)
    assert covering.cost(boards, num_small, num_large) == least
    assert covering.lower_bound(boards, num_small, num_large) <= least
    if least < IMPOSSIBLE:
        found = covering.components(boards, num_small, num_large)
        assert sum(sum(component.boards) - 1 for component in found) == least
        assert sum(component.num_small for component in found) == num_small
        assert sum(component.num_large for component in found) == num_large


@given(
    small=st.integers(2, 9),
    slots=st.integers(1, 8),
    num_boards=st.integers(0, 40),
    groups=st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_on_equal_boards_the_bound_of_contention_1_is_the_cost(
    small: int,
    slots: int,
    num_boards: int,
    groups: tuple[int, int],
) -> None:
    slots = min(slots, small - 1)
    covering = Covering(small, (slots,), False, Budget(1 << 20))
    per_group = [-(-small // slots), -(-(small + 1) // slots)]
    needed = sum(count * boards for count, boards in zip(groups, per_group, strict=True))
    cost = needed - sum(groups) if needed <= num_boards else IMPOSSIBLE
    assert covering.lower_bound((num_boards,), *groups) == cost
    assert covering.cost((num_boards,), *groups) == cost


@settings(max_examples=60)
@given(covers())
def test_the_bound_of_a_component_is_below_every_cover_with_it(
    case: tuple[Covering, Histogram, int, int],
) -> None:
    covering, boards, num_small, num_large = case
    covering.joint = True
    demand = num_small * covering.small + num_large * (covering.small + 1)
    for small, large in product(range(num_small + 1), range(num_large + 1)):
        wanted = small * covering.small + large * (covering.small + 1)
        covers_with_it = [
            sum(used) - 1 + least_cost(covering, rest, num_small - small, num_large - large)
            for used in product(*(range(count + 1) for count in boards))
            if sum(slots * count for slots, count in zip(covering.slots_left, used, strict=True))
            >= wanted
            for rest in [tuple(have - count for have, count in zip(boards, used, strict=True))]
        ]
        least = min(covers_with_it, default=IMPOSSIBLE)
        if small + large and least < IMPOSSIBLE:
            num_others = num_small + num_large - small - large
            assert covering._joint_bound(boards, demand, wanted, num_others) <= least


@pytest.mark.parametrize(
    ("joint", "boards", "groups", "cost", "most_steps"),
    [
        (True, (12, 6, 6), (6, 3), 13, 1393),
        (True, (12, 6, 10), (7, 3), 16, 118),
        (False, (1, 8, 10), (3, 2), 13, 26),
    ],
)
def test_bounds_keep_the_search_of_a_rack_short(
    joint: bool,
    boards: Histogram,
    groups: tuple[int, int],
    cost: int,
    most_steps: int,
) -> None:
    budget = Budget(1 << 20)
    assert Covering(9, (5, 3, 2), joint, budget).cost(boards, *groups) == cost
    assert (1 << 20) - budget.num_left <= most_steps
