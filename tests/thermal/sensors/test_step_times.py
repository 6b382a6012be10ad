"""Clocks told from step times, against devices whose clock is known."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.step_times import StepTiming, TimedSource

SPEEDS = st.floats(0.2, 1.0)


def step_s(num_samples: int, clock: float = 1.0) -> float:
    """A device with a fixed cost per step."""
    return (0.3 + 0.01 * num_samples) / clock


def noted(timing: StepTiming, steps: list[tuple[int, float]]) -> StepTiming:
    for num_samples, clock in steps:
        timing.add_step(step_s(num_samples, clock), num_samples)
    return timing


@given(clocks=st.lists(SPEEDS, min_size=1, max_size=8))
def test_at_one_load_the_factor_is_the_clock_over_the_best_that_held(clocks):
    timing = StepTiming()
    for number, clock in enumerate(clocks):
        noted(timing, [(64, clock)] * 7)
        assert timing.clock_factor == pytest.approx(clock / max(clocks[: number + 1]))


@given(
    fast=st.floats(0.5, 1.0),
    slowing=SPEEDS,
    outlier_s=st.floats(1e-4, 1e4),
    place=st.integers(0, 40),
)
def test_one_outlier_changes_nothing(fast, slowing, outlier_s, place):
    """Too slow or too fast, at any time: the same factors as without it, once a change of clock is a window old."""
    clocks = [fast] * 20 + [fast * slowing] * 20
    plain, disturbed = StepTiming(), StepTiming()
    for number, clock in enumerate(clocks):
        if number == place:
            disturbed.add_step(outlier_s, 64)
        noted(plain, [(64, clock)])
        noted(disturbed, [(64, clock)])
        if number % 20 >= 8:
            assert disturbed.clock_factor == pytest.approx(plain.clock_factor)


@given(loads=st.lists(st.integers(1, 256), min_size=1, max_size=60), clock=SPEEDS)
def test_loads_of_any_size_at_one_clock_never_look_slow(loads, clock):
    timing = StepTiming()
    for load in loads:
        noted(timing, [(load, clock)] * 3)
        assert timing.clock_factor in (None, pytest.approx(1.0))


@given(
    start=SPEEDS,
    later=st.lists(st.tuples(st.integers(1, 128), st.floats(0.3, 1.0)), min_size=1, max_size=6),
)
def test_a_new_load_is_judged_by_the_clock_known_so_far(start, later):
    """Every stretch begins at the load and clock of the stretch before, as real clocks do, and then changes clock."""
    timing = noted(StepTiming(), [(64, 1.0)] * 10 + [(64, start)] * 10)
    clock = start
    for load, next_clock in later:
        noted(timing, [(load, clock)] * 10 + [(load, next_clock)] * 10)
        clock = next_clock
        assert timing.clock_factor == pytest.approx(clock)


def test_the_short_batch_at_the_end_of_an_epoch_confuses_nothing():
    timing = StepTiming()
    for epoch in range(30):
        clock = 1.0 if epoch < 15 else 0.6
        noted(timing, [(64, clock)] * 9 + [(10, clock)])
        assert timing.clock_factor == pytest.approx(clock)


def test_scatter_alone_does_not_look_throttled():
    chance = random.Random(5)
    timing = StepTiming()
    factors = []
    for number in range(2000):
        clock = 1.0 if number < 1000 else 0.6
        timing.add_step(step_s(64, clock) * chance.lognormvariate(0.0, 0.03), 64)
        if timing.clock_factor is not None and not 1000 <= number < 1010:
            factors.append((clock, timing.clock_factor))
    assert min(factor for clock, factor in factors if clock == 1.0) > 0.88
    slow = [factor for clock, factor in factors if clock == 0.6]
    assert min(slow) > 0.52 and max(slow) < 0.66 and median(slow) == pytest.approx(0.6, abs=0.04)


def test_a_device_that_was_slow_from_the_start_is_full_until_it_is_faster_or_a_reference_is_known():
    assert noted(StepTiming(), [(64, 0.5)] * 10).clock_factor == 1.0
    known = StepTiming(references_s={64: step_s(64)})
    assert noted(known, [(64, 0.5)] * 7).clock_factor == pytest.approx(0.5)
    earlier = noted(StepTiming(), [(64, 1.0)] * 10 + [(32, 1.0)] * 10)
    later = StepTiming(references_s=earlier.references())
    assert noted(later, [(32, 0.7)] * 7).clock_factor == pytest.approx(0.7)


def test_few_steps_tell_nothing():
    timing = StepTiming()
    for _ in range(6):
        timing.add_step(1.0, 8)
        assert timing.clock_factor is None
    timing.add_step(1.0, 8)
    assert timing.clock_factor == 1.0


@pytest.mark.parametrize(
    ("seconds", "num_samples"),
    [(0.0, 4), (-1.0, 4), (float("nan"), 4), (float("inf"), 4), (1.0, 0), (1.0, -3)],
)
def test_a_step_that_cannot_be_tells_nothing(seconds, num_samples):
    timing = noted(StepTiming(), [(64, 1.0)] * 10 + [(64, 0.5)] * 10)
    for _ in range(20):
        timing.add_step(seconds, num_samples)
    assert timing.clock_factor == pytest.approx(0.5)


def test_memory_is_bounded_and_loads_in_use_keep_their_reference():
    timing = noted(StepTiming(window=1), [(64, 1.0)])
    for load in range(100, 500):
        noted(timing, [(64, 0.5), (load, 0.5)])
    references_s = timing.references()
    assert len(references_s) == 64 and 100 not in references_s
    assert references_s[64] == pytest.approx(step_s(64))


@given(
    steps=st.lists(st.tuples(st.floats(1e-9, 1e9), st.integers(1, 9)), max_size=60),
    window=st.integers(1, 9),
)
def test_a_factor_lies_above_0_and_at_most_at_1(steps, window):
    timing = StepTiming(window=window)
    for seconds, load in steps:
        timing.add_step(seconds, load)
        assert timing.clock_factor is None or 0.0 < timing.clock_factor <= 1.0
    assert all(seconds > 0.0 for seconds in timing.references().values())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"window": 0}, "window = 0"),
        ({"references_s": {0: 1.0}}, "for 0 samples"),
        ({"references_s": {4: 0.0}}, "reference of 0.0 s"),
        ({"references_s": {4: float("nan")}}, "reference of nan s"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        StepTiming(**options)  # type: ignore[arg-type]


class Given:
    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def read(self) -> Reading:
        return Reading(at_s=1.0, **self.fields)  # type: ignore[arg-type]


def test_a_source_without_clocks_gets_that_of_its_steps():
    timing = StepTiming()
    source = TimedSource(Given(temperature_c=50.0, notes=("a",)), timing)
    assert source.read() == Reading(at_s=1.0, temperature_c=50.0, notes=("a",))
    noted(timing, [(64, 1.0)] * 10)
    first = source.read()
    assert (first.clock_factor, first.throttled) == (1.0, False)
    assert first.notes[0] == "a" and "step times" in first.notes[1]
    noted(timing, [(64, 0.6)] * 10)
    slow = source.read()
    assert slow.clock_factor == pytest.approx(0.6)
    assert (slow.temperature_c, slow.throttled, slow.notes) == (50.0, True, ("a",))


def test_what_the_device_says_itself_stands():
    timing = noted(StepTiming(), [(64, 1.0)] * 10 + [(64, 0.5)] * 10)
    assert TimedSource(Given(clock_factor=0.9), timing).read() == Reading(
        at_s=1.0, clock_factor=0.9
    )
    told = TimedSource(Given(throttled=False), timing).read()
    assert (told.clock_factor, told.throttled) == (pytest.approx(0.5), False)


@pytest.mark.parametrize("threshold", [0.0, 1.1, float("nan")])
def test_a_threshold_that_cannot_be_is_refused(threshold):
    with pytest.raises(ConfigError, match="throttled_below"):
        TimedSource(Given(), StepTiming(), throttled_below=threshold)
