"""Games over a day and windows in which training may run, against brute force; and step functions of time."""

from functools import partial
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.thermal.model.background_load import (
    DAY_S,
    NOBODY,
    QUIETEST_HOUR,
    BackgroundLoad,
    Steps,
    Tide,
    always,
    changes,
    idle_windows,
    read_hours,
)
from tests.one_line import refused
from tests.thermal.refusals import refused_each

FEW = settings(max_examples=30)
HOURS = st.integers(0, 96).map(lambda quarters: quarters / 4)
SEEDS = st.integers(0, 2**31)


@FEW
@given(
    windows=st.lists(
        st.tuples(HOURS, HOURS).filter(lambda window: window[0] != window[1]),
        min_size=1,
        max_size=4,
    ),
    start_hour=HOURS,
    days=st.floats(0.01, 3.0),
    part=st.floats(0.0, 1.0),
)
def test_windows_are_open_by_the_hour_of_the_day(windows, start_hour, days, part):
    """Brute force: the hour of any moment, in any window, which may pass midnight."""
    time_s = part * days * DAY_S
    hour = (start_hour + time_s / 3600.0) % 24.0
    for window in windows:
        for edge in window:
            assume(1e-6 < abs(hour - edge) < 24.0 - 1e-6)
    expected = any(
        begin < hour < end or (begin > end and not end <= hour <= begin) for begin, end in windows
    )
    assert idle_windows(windows, days * DAY_S, start_hour).at(time_s) == expected


def test_a_night_from_its_middle():
    night = Steps((0.0, 4 * 3600.0, 20 * 3600.0), (True, False, True))
    for start_hour in (2.0, 26.0):
        assert idle_windows([(22.0, 6.0)], DAY_S, start_hour) == night
    assert idle_windows([], DAY_S, 2.0).at(12345.0) is True


@FEW
@given(low=st.floats(0.0, 0.9), rise=st.floats(0.0, 0.09), hour=HOURS)
def test_the_tide_is_lowest_at_its_hour_highest_twelve_later_and_daily(low, rise, hour):
    tide = Tide(low=low, high=low + rise)
    assert tide.part_busy(QUIETEST_HOUR) == pytest.approx(low)
    assert tide.part_busy(QUIETEST_HOUR + 12.0) == pytest.approx(low + rise)
    assert low - 1e-9 <= tide.part_busy(hour) <= low + rise + 1e-9
    assert tide.part_busy(hour + 24.0) == pytest.approx(tide.part_busy(hour), abs=1e-9)


@FEW
@given(seed=SEEDS, socs=st.integers(1, 6), more=st.integers(1, 4), start_hour=HOURS)
def test_equal_seeds_give_equal_tides(seed, socs, more, start_hour):
    """By SoC, so a larger rack has the games of a smaller one; other seeds give other games."""
    games = Tide().loads(socs, DAY_S, start_hour, seed)
    assert games == Tide().loads(socs + more, DAY_S, start_hour, seed)[:socs]
    assert games != Tide().loads(socs, DAY_S, start_hour, seed + 1)


@FEW
@given(seed=SEEDS, low=st.floats(0.0, 0.5), takes=st.booleans(), duration_s=st.floats(1.0, 2e5))
def test_games_and_idle_times_alternate(seed, low, takes, duration_s):
    game = BackgroundLoad(share=0.5, power_w=2.5, taken=takes)
    assert Tide().game == BackgroundLoad(share=0.5, power_w=2.5)
    for users in Tide(low=low, game=game).loads(4, duration_s, 12.0, seed):
        assert set(users.values) <= {NOBODY, game}
        assert all(before != after for before, after in pairwise(users.values))
        assert users.times_s[-1] < duration_s


def num_busy(games: tuple[Steps[BackgroundLoad], ...], time_s: float) -> int:
    return sum(users.at(time_s) != NOBODY for users in games)


def test_the_mean_occupancy_follows_the_tide():
    """600 SoCs over a day: close to the cosine, which a chain follows late by about a session's length."""
    tide = Tide(low=0.1, high=0.6, mean_session_s=600.0)
    games = tide.loads(600, DAY_S, 0.0, seed=5)
    for hour in np.arange(0.5, 24.0, 1.5):
        # Three sigma of 600 draws is 0.06; being late costs up to 0.03.
        part = num_busy(games, hour * 3600.0) / 600
        assert part == pytest.approx(tide.part_busy(hour), abs=0.09)


HOURLY = st.lists(st.floats(0.0, 0.9), min_size=1, max_size=30)


@FEW
@given(hours=HOURLY, hour=st.integers(0, 200), within=st.floats(0.0, 0.999))
def test_a_recording_holds_for_each_hour_and_begins_again(hours, hour, within):
    tide = Tide(recorded=tuple(hours))
    assert tide.part_busy(hour + within) == hours[hour % len(hours)]


def test_the_mean_occupancy_follows_a_recording():
    """Of 1,500 SoCs, an hour after each jump: sessions of two minutes have ended by then."""
    hours = (0.1, 0.5, 0.02, 0.8, 0.0, 0.3)
    tide = Tide(recorded=hours, mean_session_s=120.0)
    games = tide.loads(1_500, 2 * 6 * 3600.0, 4.0, seed=7)
    for hour in range(8):
        part = num_busy(games, (hour + 0.95) * 3600.0) / 1_500
        # Three sigma of so many draws is below 0.04.
        assert part == pytest.approx(hours[(4 + hour) % 6], abs=0.04)


@pytest.mark.slow
def test_a_constant_recording_is_a_constant_tide_in_the_mean():
    flat, tide = Tide(recorded=(0.4,)), Tide(low=0.4, high=0.4)
    means = [
        np.mean([num_busy(each.loads(300, DAY_S, 0.0, 3), hour * 3600.0) for hour in range(1, 24)])
        for each in (flat, tide)
    ]
    assert means[0] == pytest.approx(means[1], rel=0.06)


def test_sessions_last_as_long_as_they_should():
    tide = Tide(low=0.4, high=0.4, mean_session_s=900.0)
    lasted = []
    for users in tide.loads(150, 5 * DAY_S, 0.0, seed=1):
        spans_s = np.diff(users.times_s)
        lasted += [s for s, load in zip(spans_s, users.values, strict=False) if load != NOBODY]
    assert len(lasted) > 7_500
    assert np.mean(lasted) == pytest.approx(900.0, rel=0.05)
    assert np.std(lasted) == pytest.approx(900.0, rel=0.08), "exponentially distributed"


@pytest.mark.parametrize(("low", "least", "most"), [(0.0, 0, 0), (0.99, 46, 50)])
def test_the_tide_may_be_at_either_end(low, least, most):
    games = Tide(low=low, high=low).loads(50, DAY_S, 0.0, seed=3)
    assert least <= num_busy(games, 0.5 * DAY_S) <= most


def test_invalid_users_are_refused():
    refused_each(BackgroundLoad, share=(1.0, -0.1, nan), power_w=(-1.0, inf))
    refused_each(Tide, low=(0.7, -0.1), high=(1.0, nan), mean_session_s=(0.0, nan))
    refused(partial(Tide, recorded=(0.1, 1.0)), "recorded", "1.0")
    for begin, end in ((25.0, 3.0), (-1.0, 3.0), (3.0, 3.0), (nan, 3.0)):
        refused(partial(idle_windows, [(begin, end)], DAY_S, 0.0), begin, end)


# ----------------------------------------------------------------------------------------------- recordings
@FEW
@given(hours=HOURLY)
def test_a_recording_is_read_as_it_was_written(tmp_path_factory, hours):
    path = tmp_path_factory.mktemp("load") / "night.csv"
    rows = [f"{hour},{part!r}" for hour, part in enumerate(hours)]
    path.write_text("\n".join(["hour,part_busy", *rows, ""]))
    assert read_hours(path) == tuple(hours)


HEAD = "hour,part_busy\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("line 1", "hour,part_busy")),
        ("time,load\n0,0.5\n", ("line 1", "hour,part_busy")),
        (HEAD, ("no rows",)),
        (HEAD + "0\n", ("line 2", "1 values, not 2")),
        (HEAD + "0,x\n", ("line 2", "part_busy = 'x'")),
        (HEAD + "0,1\n", ("line 2", "part_busy = 1", "below 1")),
        (HEAD + "0,-0.1\n", ("line 2", "part_busy = -0.1")),
        (HEAD + "0,nan\n", ("line 2", "part_busy = nan")),
        (HEAD + "1,0.1\n", ("line 2", "hour = 1", "0")),
        (HEAD + "0,0.1\n\n2,0.1\n", ("line 4", "hour = 2", "1")),
        (HEAD + "0,0.1\n0.5,0.1\n", ("line 3", "hour = 0.5")),
        ("\xff", ("UTF-8",)),
    ],
)
def test_a_recording_that_cannot_be_is_one_line(tmp_path, text, named):
    path = tmp_path / "night.csv"
    path.write_bytes(text.encode("latin-1"))
    refused(partial(read_hours, path), "night.csv", *named)
    refused(partial(read_hours, tmp_path / "missing.csv"), "missing.csv", "cannot be read")


# ------------------------------------------------------------------------------------- step functions of time
QUARTERS = st.integers(1, 60).map(lambda quarters: quarters / 4)


@FEW
@given(
    first=st.integers(),
    later=st.lists(
        st.tuples(QUARTERS, st.integers()), max_size=8, unique_by=lambda entry: entry[0]
    ),
    time_s=st.just(0.0) | QUARTERS,
)
def test_a_value_holds_from_its_time_to_the_next(first, later, time_s):
    """In whatever order they are given."""
    function, ordered = changes(first, later), sorted(later)
    begun = [first] + [value for at_s, value in ordered if at_s <= time_s]
    assert function.at(time_s) == begun[-1]
    assert changes(first, []) == always(first) == Steps((0.0,), (first,))


def test_a_value_at_the_beginning_replaces_the_first():
    assert changes("first", [(0.0, "now"), (3.0, "then")]) == Steps((0.0, 3.0), ("now", "then"))
    assert changes("first", [(-2.0, "now")]) == always("now")


@pytest.mark.parametrize(
    ("times_s", "values"),
    [
        ((), ()),
        ((0.0, 1.0), (1,)),
        ((1.0,), (1,)),
        ((nan,), (1,)),
        ((0.0, 2.0, 2.0), (1, 2, 3)),
        ((0.0, 2.0, 1.0), (1, 2, 3)),
    ],
)
def test_invalid_functions_are_refused(times_s, values):
    refused(partial(Steps, times_s, values), "times", *times_s)
