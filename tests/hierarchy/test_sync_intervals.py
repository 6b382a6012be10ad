"""Delayed synchronisation (F3)."""

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.hierarchy import SyncInterval, group_steps_per_epoch, sync_schedule, sync_shapes
from socflower.hierarchy.sync_intervals import _IntervalCursor
from tests.one_line import refused

INTERVALS = st.one_of(st.just("decay"), st.floats(1e-3, 50.0))


@given(num_epochs=st.integers(1, 60), steps=st.integers(1, 120), interval=INTERVALS)
def test_every_step_lies_in_one_interval_in_order(
    num_epochs: int, steps: int, interval: float | str
) -> None:
    schedule = sync_schedule(num_epochs, steps, interval)
    position = 0
    for index, part in enumerate(schedule):
        assert (part.index, part.first_step) == (index, position)
        assert part.num_steps >= 1
        position += part.num_steps
        assert part.epoch_end == position / steps
    assert position == num_epochs * steps


@given(
    num_epochs=st.integers(1, 40),
    steps=st.integers(1, 200),
    interval=st.sampled_from([0.1, 0.25, 0.3, 1.5]),
)
def test_intervals_are_rounded_without_drifting(
    num_epochs: int, steps: int, interval: float
) -> None:
    if interval * steps >= 1.0:
        for number, part in enumerate(sync_schedule(num_epochs, steps, interval)[:-1], start=1):
            assert abs(part.first_step + part.num_steps - number * interval * steps) <= 0.5 + 1e-6


def test_decay_starts_at_a_quarter_epoch_and_doubles_every_ten_epochs_up_to_two() -> None:
    lengths = [part.num_steps for part in sync_schedule(50, 100, "decay")]
    assert lengths == [25] * 40 + [50] * 20 + [100] * 10 + [200] * 10


@given(num_epochs=st.integers(1, 90), steps=st.integers(1, 60), doubling=st.integers(1, 30))
def test_an_interval_has_a_quarter_epoch_doubled_every_gn_epochs_up_to_two(
    num_epochs: int, steps: int, doubling: int
) -> None:
    """min(1/4 · 2^⌊e / GN⌋, 2) epochs from epoch e on, summed in exact fractions and rounded to whole steps."""
    position, first = Fraction(0), 0
    for part in sync_schedule(num_epochs, steps, "decay", doubling_epochs=doubling):
        position += min(Fraction(2 ** (math.floor(position) // doubling), 4), Fraction(2))
        end = math.floor(position * steps + Fraction(1, 2))
        if end <= first:
            end = first + 1
            position = Fraction(end, steps)
        end = min(end, num_epochs * steps)
        assert (part.first_step, part.num_steps) == (first, end - first)
        first = end


def test_a_constant_interval_does_not_double() -> None:
    assert sync_schedule(9, 10, 0.5, doubling_epochs=1) == sync_schedule(9, 10, 0.5)


def test_whole_epochs_and_the_cut_last_interval() -> None:
    assert [part.num_steps for part in sync_schedule(5, 7, 2)] == [14, 14, 7]
    assert [part.num_steps for part in sync_schedule(1, 97, 0.25)] == [24, 25, 24, 24]
    assert [part.num_steps for part in sync_schedule(1, 3, 0.01)] == [1, 1, 1]


@given(
    num_epochs=st.integers(1, 90),
    steps=st.integers(1, 120),
    interval=INTERVALS,
    server_interval=st.integers(1, 5),
    doubling=st.integers(1, 12),
    changes=st.lists(st.integers(1, 300), max_size=3).map(sorted),
)
def test_the_shapes_of_a_schedule_are_its_intervals_counted(
    num_epochs: int,
    steps: int,
    interval: float | str,
    server_interval: int,
    doubling: int,
    changes: list[int],
) -> None:
    """Against brute force."""

    def shape(part: SyncInterval) -> tuple[int, bool, int, bool]:
        is_own = part.index == 0 or any(part.first_step < step for step in changes)
        return (
            part.num_steps,
            part.first_step == part.deal_epoch * steps,
            part.index if is_own else -1,
            part.across_servers,
        )

    own = {"server_interval": server_interval, "doubling_epochs": doubling}
    schedule = sync_schedule(num_epochs, steps, interval, **own)
    shapes = sync_shapes(num_epochs, steps, interval, **own, changes=changes)
    assert {shape(first): count for first, count in shapes} == Counter(map(shape, schedule))
    assert all(first == schedule[first.index] for first, _ in shapes)


@given(
    steps=st.integers(1, 120),
    interval=st.one_of(st.just("decay"), st.integers(1, 400).map(lambda n: n / 100)),
)
def test_shapes_take_no_more_work_for_more_epochs(steps: int, interval: float | str) -> None:
    """Counted in intervals that are walked along: two decimals repeat after a hundred epochs."""
    num_walked = [0]
    next_one = _IntervalCursor.next

    def counting(walk: _IntervalCursor) -> SyncInterval:
        num_walked[0] += 1
        return next_one(walk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_IntervalCursor, "next", counting)
        shapes = sync_shapes(10**12, steps, interval)
    assert num_walked[0] <= 100 * 120 + 1000
    assert sum(first.num_steps * count for first, count in shapes) == 10**12 * steps


@pytest.mark.parametrize(
    ("num_epochs", "steps", "interval"),
    [(10**8, 100, "decay"), (10**8, 1, 1.0), (10, 10**6, 1e-300), (10**7, 3, 0.123456789123)],
)
def test_more_rounds_than_can_be_meant_are_refused_with_the_way_out(
    num_epochs: int,
    steps: int,
    interval: float | str,
) -> None:
    refused(lambda: sync_schedule(num_epochs, steps, interval), f"epochs = {num_epochs}")


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((0, 5, 1.0), {}, "epochs"),
        ((5, 0, 1.0), {}, "steps_per_epoch"),
        ((5, 5, 0.0), {}, "0.0"),
        ((5, 5, float("nan")), {}, "nan"),
        ((5, 5, float("inf")), {}, "inf"),
        ((5, 5, "sometimes"), {}, "'sometimes'"),
        ((5, 5, "decay"), {"server_interval": 0}, "server_interval"),
        ((5, 5, "decay"), {"doubling_epochs": 0}, "doubling_epochs"),
    ],
)
def test_schedules_that_cannot_be_are_refused(
    arguments: tuple[int, int, float | str],
    options: dict[str, int],
    named: str,
) -> None:
    refused(lambda: sync_schedule(*arguments, **options), named)


@given(
    num_epochs=st.integers(1, 30),
    steps=st.integers(1, 20),
    interval=INTERVALS,
    server_interval=st.integers(1, 6),
)
def test_servers_take_part_in_every_nth_synchronisation_and_the_last_and_data_change_only_after_these(
    num_epochs: int,
    steps: int,
    interval: float | str,
    server_interval: int,
) -> None:
    schedule = sync_schedule(num_epochs, steps, interval, server_interval=server_interval)
    flat = sync_schedule(num_epochs, steps, interval)
    assert [(part.first_step, part.num_steps) for part in schedule] == [
        (part.first_step, part.num_steps) for part in flat
    ]
    assert [part.index for part in schedule if part.across_servers] == [
        index
        for index in range(len(flat))
        if index % server_interval == server_interval - 1 or index == len(flat) - 1
    ]
    for before, part in pairwise(schedule):
        if part.deal_epoch != before.deal_epoch:
            assert before.across_servers and part.first_step == part.deal_epoch * steps
        assert (part.deal_epoch == part.first_step / steps) >= (
            before.across_servers and part.first_step % steps == 0
        )


@given(
    num_samples=st.integers(1, 10_000),
    num_groups=st.integers(1, 60),
    batch_size=st.integers(1, 300),
)
def test_steps_suffice_for_the_group_with_most_samples_and_no_more(
    num_samples: int,
    num_groups: int,
    batch_size: int,
) -> None:
    most = max(len(range(group, num_samples, num_groups)) for group in range(num_groups))
    steps = group_steps_per_epoch(num_samples, num_groups, batch_size)
    assert (steps - 1) * batch_size < most <= steps * batch_size


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_steps_need_samples_groups_and_a_batch(arguments: tuple[int, int, int]) -> None:
    refused(lambda: group_steps_per_epoch(*arguments), "= 0")


@pytest.mark.parametrize(
    ("interval", "deals"),
    [
        (0.5, [0, 0, 1, 1, 2, 2, 3, 3]),
        (1.0, [0, 1, 2, 3]),
        (2.0, [0, 2]),
        (0.75, [0, 0, 0, 0, 3, 3]),
    ],
)
def test_data_are_dealt_where_a_synchronisation_ends_an_epoch(
    interval: float, deals: list[int]
) -> None:
    assert [entry.deal_epoch for entry in sync_schedule(4, 4, interval)] == deals
