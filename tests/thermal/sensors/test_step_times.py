"""Clocks estimated from step times, against devices whose clock is known."""

import random
from functools import partial
from math import inf, nan
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.step_times import StepTiming, TimedSource
from tests.one_line import refused
from tests.thermal.refusals import refused_each

SPEEDS = st.floats(0.2, 1.0)


def step_s(num_samples: int, clock: float = 1.0) -> float:
    """Return the time of a step on a device with a fixed cost per step."""
    return (0.3 + 0.01 * num_samples) / clock


def after(*steps: tuple[int, int, float], timing: StepTiming | None = None) -> StepTiming:
    """Add a number of steps of so many samples at a clock."""
    timing = timing or StepTiming()
    for count, num_samples, clock in steps:
        for _ in range(count):
            timing.add_step(step_s(num_samples, clock), num_samples)
    return timing


@given(clocks=st.lists(SPEEDS, min_size=1, max_size=8))
def test_at_one_load_the_factor_is_the_clock_over_the_best_sustained_one(clocks):
    timing = StepTiming()
    for number, clock in enumerate(clocks):
        after((7, 64, clock), timing=timing)
        assert timing.clock_factor == pytest.approx(clock / max(clocks[: number + 1]))


@given(
    fast=st.floats(0.5, 1.0),
    slowing=SPEEDS,
    outlier_s=st.floats(1e-4, 1e4),
    place=st.integers(0, 40),
)
def test_one_outlier_changes_nothing(fast, slowing, outlier_s, place):
    """Too slow or too fast, at any time: the same factors as without it, once a change of clock is a window old."""
    plain, disturbed = StepTiming(), StepTiming()
    for number in range(40):
        if number == place:
            disturbed.add_step(outlier_s, 64)
        step = (1, 64, fast if number < 20 else fast * slowing)
        after(step, timing=plain)
        after(step, timing=disturbed)
        if number % 20 >= 8:
            assert disturbed.clock_factor == pytest.approx(plain.clock_factor)


@given(loads=st.lists(st.integers(1, 256), min_size=1, max_size=60), clock=SPEEDS)
def test_loads_of_any_size_at_one_clock_never_look_slow(loads, clock):
    timing = StepTiming()
    for load in loads:
        after((3, load, clock), timing=timing)
        assert timing.clock_factor in (None, pytest.approx(1.0))


@given(
    start=SPEEDS,
    later=st.lists(st.tuples(st.integers(1, 128), st.floats(0.3, 1.0)), min_size=1, max_size=6),
)
def test_a_new_load_is_judged_by_the_clock_known_so_far(start, later):
    """Every stretch begins at the load and clock of the stretch before, as real clocks do, and then changes clock."""
    timing = after((10, 64, 1.0), (10, 64, start))
    clock = start
    for load, next_clock in later:
        after((10, load, clock), (10, load, next_clock), timing=timing)
        clock = next_clock
        assert timing.clock_factor == pytest.approx(clock)


def test_the_short_batch_at_the_end_of_an_epoch_changes_nothing():
    timing = StepTiming()
    for clock in [1.0] * 15 + [0.6] * 15:
        after((9, 64, clock), (1, 10, clock), timing=timing)
        assert timing.clock_factor == pytest.approx(clock)


def test_scatter_alone_does_not_look_throttled():
    chance, timing = random.Random(5), StepTiming()
    factors = {1.0: [], 0.6: []}
    for number in range(2000):
        clock = 1.0 if number < 1000 else 0.6
        timing.add_step(step_s(64, clock) * chance.lognormvariate(0.0, 0.03), 64)
        if number % 1000 >= 10:
            factors[clock].append(timing.clock_factor)
    slow = factors[0.6]
    assert min(factors[1.0]) > 0.88 and min(slow) > 0.52 and max(slow) < 0.66
    assert median(slow) == pytest.approx(0.6, abs=0.04)


def test_a_device_slow_from_the_start_counts_as_full_until_it_is_faster_or_a_reference_is_known():
    assert after((10, 64, 0.5)).clock_factor == 1.0
    known = StepTiming(references_s={64: step_s(64)})
    assert after((7, 64, 0.5), timing=known).clock_factor == pytest.approx(0.5)
    earlier = after((10, 64, 1.0), (10, 32, 1.0))
    later = StepTiming(references_s=earlier.references())
    assert after((7, 32, 0.7), timing=later).clock_factor == pytest.approx(0.7)


def test_there_is_no_factor_before_seven_steps():
    assert [after((count, 8, 1.0)).clock_factor for count in range(8)] == [None] * 7 + [1.0]


@pytest.mark.parametrize(
    ("seconds", "num_samples"), [(0.0, 4), (-1.0, 4), (nan, 4), (inf, 4), (1.0, 0), (1.0, -3)]
)
def test_an_invalid_step_is_ignored(seconds, num_samples):
    timing = after((10, 64, 1.0), (10, 64, 0.5))
    for _ in range(20):
        timing.add_step(seconds, num_samples)
    assert timing.clock_factor == pytest.approx(0.5)


def test_memory_is_bounded_and_loads_in_use_keep_their_reference():
    timing = after((1, 64, 1.0), timing=StepTiming(window=1))
    for load in range(100, 500):
        after((1, 64, 0.5), (1, load, 0.5), timing=timing)
    references_s = timing.references()
    assert references_s.keys() == {64, *range(437, 500)}
    assert references_s[64] == pytest.approx(step_s(64))


@given(
    steps=st.lists(st.tuples(st.floats(1e-9, 1e9), st.integers(1, 9)), max_size=60),
    window=st.integers(1, 9),
)
def test_a_factor_is_above_0_and_at_most_1(steps, window):
    timing = StepTiming(window=window)
    for seconds, load in steps:
        timing.add_step(seconds, load)
        assert timing.clock_factor is None or 0.0 < timing.clock_factor <= 1.0
    assert all(seconds > 0.0 for seconds in timing.references().values())


class Fixed:
    """A source of one reading."""

    def __init__(self, **values: Any) -> None:
        self.reading = Reading(at_s=1.0, **values)

    def read(self) -> Reading:
        return self.reading


def test_a_source_without_clocks_gets_that_of_its_steps():
    timing = StepTiming()
    source = TimedSource(Fixed(temperature_c=50.0, notes=("a",)), timing)
    assert source.read() == source.read() == Reading(at_s=1.0, temperature_c=50.0, notes=("a",))
    after((10, 64, 1.0), timing=timing)
    first = source.read()
    assert (first.clock_factor, first.throttled) == (1.0, False)
    assert first.notes[0] == "a" and len(first.notes) == 2
    after((10, 64, 0.6), timing=timing)
    slow = source.read()
    assert (slow.clock_factor, slow.temperature_c) == (pytest.approx(0.6), 50.0)
    assert (slow.throttled, slow.notes) == (True, ("a",))


def test_what_the_device_reports_has_precedence():
    timing = after((10, 64, 1.0), (10, 64, 0.5))
    fixed = Fixed(clock_factor=0.9)
    assert TimedSource(fixed, timing).read() is fixed.reading
    reported = TimedSource(Fixed(throttled=False), timing).read()
    assert (reported.clock_factor, reported.throttled) == (pytest.approx(0.5), False)


def test_invalid_settings_are_refused():
    refused_each(StepTiming, window=(0,))
    for num_samples, seconds in ((0, 1.0), (4, 0.0), (4, nan)):
        refused(partial(StepTiming, references_s={num_samples: seconds}), num_samples, seconds)
    refused_each(partial(TimedSource, Fixed(), StepTiming()), throttled_below=(0.0, 1.1, nan))
