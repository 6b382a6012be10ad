"""Games that follow the tide of a day, and windows in which training may run, against brute force."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.model.background_load import (
    DAY_S,
    NOBODY,
    BackgroundLoad,
    Game,
    Steps,
    Tide,
    idle_windows,
)

FEW = settings(max_examples=30)
HOURS = st.integers(0, 96).map(lambda quarters: quarters / 4)


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
def test_windows_are_open_as_a_clock_on_the_wall_says(
    windows,
    start_hour,
    days,
    part,
):
    """Brute force: the hour of any minute, in any window, which may pass midnight."""
    time_s = part * days * DAY_S
    hour = (start_hour + time_s / 3600.0) % 24.0
    assume(min(abs(hour - edge) % 24.0 for window in windows for edge in window) > 1e-6)
    assume(max(abs(hour - edge) % 24.0 for window in windows for edge in window) < 24.0 - 1e-6)
    expected = any(
        begin < hour < end or (begin > end and (hour > begin or hour < end))
        for begin, end in windows
    )
    assert idle_windows(windows, days * DAY_S, start_hour).at(time_s) == expected


def test_a_night_from_its_middle():
    assert idle_windows([(22.0, 6.0)], DAY_S, 2.0) == Steps(
        (0.0, 4 * 3600.0, 20 * 3600.0), (True, False, True)
    )
    assert idle_windows([(22.0, 6.0)], DAY_S, 26.0) == idle_windows([(22.0, 6.0)], DAY_S, 2.0)
    assert idle_windows([], DAY_S, 2.0).at(12345.0) is True


@FEW
@given(
    low=st.floats(0.0, 0.9),
    rise=st.floats(0.0, 0.09),
    low_hour=st.floats(0.0, 24.0),
    hour=st.floats(0.0, 72.0),
)
def test_the_tide_is_lowest_at_its_hour_highest_twelve_later_and_daily(
    low,
    rise,
    low_hour,
    hour,
):
    tide = Tide(low=low, high=low + rise, low_hour=low_hour)
    assert tide.part_busy(low_hour) == pytest.approx(low)
    assert tide.part_busy(low_hour + 12.0) == pytest.approx(low + rise)
    assert low - 1e-9 <= tide.part_busy(hour) <= low + rise + 1e-9
    assert tide.part_busy(hour + 24.0) == pytest.approx(tide.part_busy(hour), abs=1e-9)


@FEW
@given(
    seed=st.integers(0, 2**31),
    socs=st.integers(1, 6),
    more=st.integers(1, 4),
    start_hour=st.floats(0.0, 24.0),
)
def test_equal_seeds_give_equal_tides(seed, socs, more, start_hour):
    """SoC by SoC, so a larger rack has the games of a smaller one; other seeds give other games."""
    tide = Tide()
    games = tide.loads(socs, DAY_S, start_hour, seed)
    assert games == tide.loads(socs, DAY_S, start_hour, seed)
    assert games == tide.loads(socs + more, DAY_S, start_hour, seed)[:socs]
    assert games != tide.loads(socs, DAY_S, start_hour, seed + 1)


@FEW
@given(
    seed=st.integers(0, 2**31),
    low=st.floats(0.0, 0.5),
    takes=st.booleans(),
    duration_s=st.floats(1.0, 2e5),
)
def test_a_soc_is_in_a_game_or_in_none_in_turn(seed, low, takes, duration_s):
    tide = Tide(low=low, game=Game(takes_soc=takes))
    for users in tide.loads(4, duration_s, 12.0, seed):
        assert set(users.values) <= {NOBODY, BackgroundLoad(share=0.5, power_w=2.5, taken=takes)}
        assert all(before != after for before, after in pairwise(users.values))
        assert users.times_s[-1] < duration_s


def test_the_mean_occupancy_follows_the_tide():
    """1,000 SoCs over a day: close to the cosine, which a chain follows late by about a session's length."""
    tide = Tide(low=0.1, high=0.6, mean_session_s=600.0)
    games = tide.loads(1000, DAY_S, 0.0, seed=5)
    for hour in np.arange(0.5, 24.0, 1.5):
        busy = sum(
            users.at(hour * 3600.0) is not NOBODY and users.at(hour * 3600.0) != NOBODY
            for users in games
        )
        # Three sigma of 1,000 draws is 0.046; being late costs up to 0.03.
        assert busy / 1000 == pytest.approx(tide.part_busy(hour), abs=0.08)


def test_sessions_last_as_long_as_they_should():
    tide = Tide(low=0.4, high=0.4, mean_session_s=900.0)
    lasted = [
        end_s - begin_s
        for users in tide.loads(200, 5 * DAY_S, 0.0, seed=1)
        for begin_s, end_s, load in zip(
            users.times_s, users.times_s[1:], users.values, strict=False
        )
        if load != NOBODY
    ]
    assert len(lasted) > 10_000
    assert float(np.mean(lasted)) == pytest.approx(900.0, rel=0.05)
    assert float(np.std(lasted)) == pytest.approx(900.0, rel=0.08), "exponentially distributed"


@pytest.mark.parametrize(("low", "busy"), [(0.0, 0), (0.99, 50)])
def test_no_tide_and_a_flood(low, busy):
    games = Tide(low=low, high=low).loads(50, DAY_S, 0.0, seed=3)
    assert sum(users.at(0.5 * DAY_S) != NOBODY for users in games) == pytest.approx(
        busy, abs=4 if busy else 0
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BackgroundLoad(share=1.0), "share = 1.0"),
        (lambda: BackgroundLoad(share=-0.1), "share = -0.1"),
        (lambda: BackgroundLoad(share=math.nan), "share = nan"),
        (lambda: BackgroundLoad(power_w=-1.0), "-1.0 must be 0 or more and finite"),
        (lambda: BackgroundLoad(power_w=math.inf), "power_w = inf must be"),
        (lambda: Game(share=1.5).load, "share = 1.5"),
        (lambda: Tide(low=0.7), "need 0 <= low <= high < 1, got 0.7 and 0.6"),
        (lambda: Tide(low=-0.1), "0 <= low"),
        (lambda: Tide(high=1.0), "high < 1"),
        (lambda: Tide(high=math.nan), "high < 1"),
        (lambda: Tide(mean_session_s=0.0), "mean_session_s = 0.0 must be above 0"),
        (lambda: Tide(mean_session_s=math.nan), "mean_session_s = nan"),
        (
            lambda: idle_windows([(25.0, 3.0)], DAY_S, 0.0),
            "between 0 and 24 and differ, got 25.0 to 3.0",
        ),
        (lambda: idle_windows([(-1.0, 3.0)], DAY_S, 0.0), "got -1.0 to 3.0"),
        (lambda: idle_windows([(3.0, 3.0)], DAY_S, 0.0), "differ, got 3.0 to 3.0"),
        (lambda: idle_windows([(math.nan, 3.0)], DAY_S, 0.0), "got nan"),
    ],
)
def test_users_that_cannot_be_are_refused_in_one_line(make, text):
    with pytest.raises(ConfigError, match=text) as error:
        make()
    assert "\n" not in str(error.value)
