"""The governor's steps and hysteresis, for any ladder of clocks and any temperatures."""

from functools import partial
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.model.governor import ClockGovernor, snapdragon_governor
from tests.one_line import refused

FEW = settings(max_examples=40)
TEMPERATURES = st.floats(-50.0, 200.0) | st.sampled_from([nan, inf, -inf])


@st.composite
def governors(draw: st.DrawFn) -> ClockGovernor:
    """Any ladder; a trip point may lie below the resume point of the next step, as in hot ladders."""
    size = draw(st.integers(0, 5))
    trips = draw(st.sets(st.integers(20, 100), min_size=size, max_size=size))
    clocks = draw(st.sets(st.integers(1, 60), min_size=size + 1, max_size=size + 1))
    resumes: list[float] = []
    for trip in sorted(trips):
        resumes.append(max(trip - draw(st.integers(1, 5)), *resumes[-1:], -inf) + 1e-3)
    return ClockGovernor(
        clock_hz=tuple(5e7 * clock for clock in sorted(clocks, reverse=True)),
        trip_c=tuple(map(float, sorted(trips))),
        resume_c=tuple(resumes),
        power_exponent=draw(st.floats(0.0, 3.0)),
    )


GOVERNED = st.tuples(governors(), st.integers(0, 5)).map(
    lambda case: (case[0], min(case[1], len(case[0].trip_c)))
)


def next_level(governor: ClockGovernor, level: int, temperature_c: float) -> int:
    return int(governor.next_levels(np.array([level]), [temperature_c])[0])


@FEW
@given(governor=governors(), temperatures_c=st.lists(TEMPERATURES, min_size=1, max_size=30))
def test_a_reading_changes_at_most_one_step_of_the_ladder(governor, temperatures_c):
    """Against the rule of one SoC, written out; NaN changes nothing."""
    level = 0
    for temperature_c in temperatures_c:
        expected = level
        if level < len(governor.trip_c) and temperature_c >= governor.trip_c[level]:
            expected += 1
        elif level > 0 and temperature_c <= governor.resume_c[level - 1]:
            expected -= 1
        level = next_level(governor, level, temperature_c)
        assert level == expected


@FEW
@given(
    governor=governors(),
    socs=st.lists(st.tuples(st.integers(0, 5), TEMPERATURES), min_size=1, max_size=12),
)
def test_socs_are_governed_independently(governor, socs):
    levels = np.array([min(level, len(governor.trip_c)) for level, _ in socs])
    temperatures_c = [temperature_c for _, temperature_c in socs]
    before = levels.tolist()
    found = governor.next_levels(levels, temperatures_c).tolist()
    assert found == [next_level(governor, *soc) for soc in zip(levels, temperatures_c, strict=True)]
    assert levels.tolist() == before, "the argument is the caller's"


@FEW
@given(case=GOVERNED, temperature_c=st.floats(-50.0, 200.0))
def test_at_a_constant_temperature_the_clock_settles(case, temperature_c):
    governor, level = case
    levels = [level]
    for _ in range(2 * len(governor.clock_hz)):
        levels.append(next_level(governor, levels[-1], temperature_c))
    steps = {after - before for before, after in pairwise(levels)} - {0}
    assert len(steps) <= 1, "only down or only up"
    assert len(set(levels[len(governor.clock_hz) :])) == 1


@FEW
@given(case=GOVERNED, temperature_c=st.floats(-50.0, 200.0), hotter_c=st.floats(0.0, 100.0))
def test_a_hotter_soc_is_never_clocked_higher(case, temperature_c, hotter_c):
    assert next_level(*case, temperature_c + hotter_c) >= next_level(*case, temperature_c)


@FEW
@given(governor=governors())
def test_lower_clocks_do_less_and_draw_no_more(governor):
    speeds, powers = governor.clock_factors, governor.power_factors
    assert speeds[0] == powers[0] == 1.0
    assert list(speeds) == sorted(set(speeds), reverse=True)
    assert list(powers) == sorted(powers, reverse=True)
    assert np.array(speeds) * governor.clock_hz[0] == pytest.approx(governor.clock_hz)
    assert powers == pytest.approx([speed**governor.power_exponent for speed in speeds])


def test_the_snapdragon_steps_down_at_35_and_back_at_34():
    governor = snapdragon_governor()
    levels = [0]
    for temperature_c in (34.9, 35.0, 34.5, 39.5, 60.0, 38.6, 38.5, 34.1, 34.0):
        levels.append(next_level(governor, levels[-1], temperature_c))
    assert levels == [0, 0, 1, 1, 2, 2, 2, 1, 1, 0]
    assert governor.clock_factors == pytest.approx((1.0, 0.898, 0.634), abs=1e-3)


def test_invalid_ladders_are_refused():
    ladder = partial(
        ClockGovernor,
        clock_hz=(3e9, 2e9, 1e9),
        trip_c=(35.0, 40.0),
        resume_c=(34.0, 39.0),
        power_exponent=2.0,
    )
    for clocks in ((), (3e9, 3e9, 1e9), (3e9, 2e9, 0.0), (3e9, 2e9, nan)):
        refused(partial(ladder, clock_hz=clocks), "clock")
    for trips in ((35.0,), (41.0, 40.0)):
        refused(partial(ladder, trip_c=trips), "trip")
    for resumes in ((34.0,), (35.0, 39.0), (nan, 39.0), (34.0, 33.0)):
        refused(partial(ladder, resume_c=resumes), "resume")
    for exponent in (-0.1, nan):
        refused(partial(ladder, power_exponent=exponent), "power_exponent", exponent)
