"""The governor's steps and hysteresis, for any ladder of clocks and any temperatures."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.model.governor import ClockGovernor, snapdragon_governor

FEW = settings(max_examples=40)
TEMPERATURES = st.one_of(st.floats(-50.0, 200.0), st.sampled_from([math.nan, math.inf, -math.inf]))


@st.composite
def governors(draw: st.DrawFn) -> ClockGovernor:
    """Any ladder; a trip point may lie below the resume point of the next step, as hot ladders have it."""
    size = draw(st.integers(0, 5))
    trips = sorted(draw(st.sets(st.integers(20, 100), min_size=size, max_size=size)))
    clocks = sorted(
        draw(st.sets(st.integers(1, 60), min_size=size + 1, max_size=size + 1)), reverse=True
    )
    widths = draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    resumes: list[float] = []
    for trip, width in zip(trips, widths, strict=True):
        resumes.append(max(trip - width, resumes[-1] + 1e-3 if resumes else -math.inf))
    return ClockGovernor(
        clock_hz=tuple(5e7 * clock for clock in clocks),
        trip_c=tuple(map(float, trips)),
        resume_c=tuple(resumes),
        power_exponent=draw(st.floats(0.0, 3.0)),
    )


def one_look(governor: ClockGovernor, level: int, temperature_c: float) -> int:
    return int(governor.next_levels(np.array([level]), [temperature_c])[0])


@FEW
@given(governor=governors(), temperatures_c=st.lists(TEMPERATURES, min_size=1, max_size=30))
def test_one_step_at_a_look_and_never_off_the_ladder(governor, temperatures_c):
    """Against the rule of one SoC, written out."""
    level = 0
    for temperature_c in temperatures_c:
        expected = level
        if level < len(governor.trip_c) and temperature_c >= governor.trip_c[level]:
            expected += 1
        elif level > 0 and temperature_c <= governor.resume_c[level - 1]:
            expected -= 1
        found = one_look(governor, level, temperature_c)
        assert found == expected
        assert abs(found - level) <= 1 and 0 <= found < len(governor.clock_hz)
        level = found


@FEW
@given(
    governor=governors(),
    socs=st.lists(st.tuples(st.integers(0, 5), TEMPERATURES), min_size=1, max_size=12),
)
def test_socs_do_not_see_each_other(governor, socs):
    top = len(governor.clock_hz) - 1
    levels = np.array([min(level, top) for level, _ in socs])
    temperatures_c = [temperature_c for _, temperature_c in socs]
    before = levels.copy()
    found = governor.next_levels(levels, temperatures_c)
    assert found.tolist() == [
        one_look(governor, int(level), temperature_c)
        for level, temperature_c in zip(levels, temperatures_c, strict=True)
    ]
    assert (levels == before).all(), "the argument is the caller's"


@FEW
@given(governor=governors(), level=st.integers(0, 5), temperature_c=st.floats(-50.0, 200.0))
def test_at_a_constant_temperature_the_clock_settles_and_does_not_oscillate(
    governor,
    level,
    temperature_c,
):
    levels = [min(level, len(governor.clock_hz) - 1)]
    for _ in range(2 * len(governor.clock_hz)):
        levels.append(one_look(governor, levels[-1], temperature_c))
    steps = {after - before for before, after in pairwise(levels)} - {0}
    assert len(steps) <= 1, "only down or only up"
    assert len(set(levels[len(governor.clock_hz) :])) == 1


@FEW
@given(governor=governors(), level=st.integers(0, 5))
def test_a_temperature_nobody_knows_changes_nothing(governor, level):
    level = min(level, len(governor.clock_hz) - 1)
    assert one_look(governor, level, math.nan) == level


@FEW
@given(
    governor=governors(),
    level=st.integers(0, 5),
    temperature_c=st.floats(-50.0, 200.0),
    hotter_c=st.floats(0.0, 100.0),
)
def test_a_hotter_soc_is_never_clocked_higher(
    governor,
    level,
    temperature_c,
    hotter_c,
):
    level = min(level, len(governor.clock_hz) - 1)
    assert one_look(governor, level, temperature_c + hotter_c) >= one_look(
        governor, level, temperature_c
    )


@FEW
@given(governor=governors())
def test_lower_clocks_do_less_and_draw_no_more(governor):
    speeds, powers = governor.clock_factors, governor.power_factors
    assert speeds[0] == powers[0] == 1.0
    assert list(speeds) == sorted(set(speeds), reverse=True)
    assert list(powers) == sorted(powers, reverse=True)
    assert [speed * governor.clock_hz[0] for speed in speeds] == pytest.approx(
        list(governor.clock_hz)
    )


def test_the_snapdragon_steps_down_at_35_and_back_at_34():
    governor = snapdragon_governor()
    levels = [0]
    for temperature_c in (34.9, 35.0, 34.5, 39.5, 60.0, 38.6, 38.5, 34.1, 34.0):
        levels.append(one_look(governor, levels[-1], temperature_c))
    assert levels == [0, 0, 1, 1, 2, 2, 2, 1, 1, 0]
    assert governor.clock_factors == pytest.approx((1.0, 0.898, 0.634), abs=1e-3)


LADDER: dict[str, Any] = {
    "clock_hz": (3e9, 2e9, 1e9),
    "trip_c": (35.0, 40.0),
    "resume_c": (34.0, 39.0),
    "power_exponent": 2.0,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clock_hz": ()}, "0 clocks need one trip"),
        ({"trip_c": (35.0,)}, "one trip and one resume point fewer"),
        ({"resume_c": (34.0,)}, "one trip and one resume point fewer"),
        ({"clock_hz": (3e9, 3e9, 1e9)}, "clocks must fall"),
        ({"clock_hz": (3e9, 2e9, 0.0)}, "above 0"),
        ({"clock_hz": (3e9, 2e9, math.nan)}, "above 0"),
        ({"resume_c": (35.0, 39.0)}, "resume_c = 35.0 must be below trip_c = 35.0"),
        ({"resume_c": (math.nan, 39.0)}, "must be below trip_c"),
        ({"trip_c": (41.0, 40.0), "resume_c": (34.0, 39.0)}, "must rise"),
        ({"resume_c": (34.0, 33.0)}, "must rise"),
        ({"power_exponent": -0.1}, "power_exponent = -0.1"),
        ({"power_exponent": math.nan}, "power_exponent = nan"),
    ],
)
def test_ladders_that_cannot_be_are_refused_in_one_line(change, text):
    with pytest.raises(ConfigError, match=text) as error:
        ClockGovernor(**LADDER | change)
    assert "\n" not in str(error.value)
