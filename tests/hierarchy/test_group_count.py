"""The warm-up heuristic for the number of groups (F2)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import TrainingFailed
from socflower.hierarchy import choose_group_count, default_candidates
from tests.one_line import refused


def test_the_last_good_number_before_the_fall_is_chosen() -> None:
    curve = {1: 0.50, 2: 0.49, 4: 0.46, 8: 0.14, 16: 0.10}
    choice = choose_group_count((16, 8, 4, 2, 1), curve.__getitem__)
    assert (choice.num_groups, choice.stopped_at) == (4, 8)
    assert dict(choice.accuracies) == {1: 0.50, 2: 0.49, 4: 0.46, 8: 0.14}


def test_without_a_fall_the_most_groups_are_chosen() -> None:
    choice = choose_group_count((2, 4), lambda _: 0.3)
    assert (choice.num_groups, choice.stopped_at) == (4, None)


def test_the_floor_counts_only_if_the_reference_is_above_it() -> None:
    assert choose_group_count((1, 2), {1: 0.16, 2: 0.145}.__getitem__).stopped_at == 2
    assert choose_group_count((1, 2), {1: 0.12, 2: 0.11}.__getitem__).stopped_at is None


def test_divergence_is_a_fall_and_of_the_reference_an_error() -> None:
    assert choose_group_count((1, 2), {1: 0.5, 2: math.nan}.__getitem__).stopped_at == 2
    refused(lambda: choose_group_count((1, 2), lambda _: math.nan), "nan", error=TrainingFailed)


@given(
    curve=st.dictionaries(st.integers(1, 64), st.floats(0.0, 1.0), min_size=1),
    drop=st.floats(0.0, 1.0),
    floor=st.floats(0.0, 1.0),
)
def test_each_candidate_is_profiled_at_most_once_from_few_to_many(
    curve: dict[int, float],
    drop: float,
    floor: float,
) -> None:
    asked: list[int] = []
    choice = choose_group_count(
        curve, lambda n: asked.append(n) or curve[n], relative_drop=drop, floor=floor
    )
    assert asked == sorted(set(asked)) == list(choice.accuracies)
    assert choice.num_groups == (asked[-1] if choice.stopped_at is None else asked[-2])
    assert choice.stopped_at in (None, asked[-1])


def test_default_candidates_are_powers_of_two() -> None:
    assert default_candidates(1) == (1,)
    assert default_candidates(32) == (1, 2, 4, 8, 16, 32)
    assert default_candidates(60) == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("candidates", "options", "named"),
    [
        ((), {}, "candidates"),
        ((0, 1), {}, "0"),
        ((1,), {"relative_drop": 1.5}, "relative_drop"),
        ((1,), {"floor": -0.1}, "floor"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(
    candidates: tuple[int, ...], options: dict[str, float], named: str
) -> None:
    refused(lambda: choose_group_count(candidates, lambda _: 0.5, **options), named)


def test_no_socs_have_no_candidates() -> None:
    refused(lambda: default_candidates(0), "0")
