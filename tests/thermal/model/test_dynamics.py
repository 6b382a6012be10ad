"""A rack as time goes by, against an integration of its own in small steps, and what must hold however time is cut."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.policies import FanObservation, FanPolicy, FixedSpeed, PassiveCooling
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, Steps, changes
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.governor import snapdragon_governor
from socflower.thermal.model.rack import Rack

FEW = settings(max_examples=25)
# Little air, so that minutes are enough for everything to happen.
RACK = Rack(slots_per_board=(2, 1), chassis_j_per_k=400.0)
SLOW_S = st.floats(0.0, 300.0)
# Three SoCs that are as hot as forty others.
WATTS = st.lists(st.floats(0.0, 70.0), min_size=3, max_size=3)


@st.composite
def surroundings(draw: st.DrawFn) -> Surroundings:
    """Ambient air, fans, users and windows that change a few times in the first minutes, at any moment."""

    def later(values: st.SearchStrategy[Any]) -> list[tuple[float, Any]]:
        return draw(
            st.lists(
                st.tuples(st.floats(0.5, 280.0), values),
                max_size=2,
                unique_by=lambda entry: entry[0],
            )
        )

    users = st.builds(
        BackgroundLoad, share=st.floats(0.0, 0.9), power_w=st.floats(0.0, 4.0), taken=st.booleans()
    )
    return Surroundings(
        ambient_c=changes(25.0, later(st.floats(15.0, 33.0))),
        fans_working=changes(1.0, later(st.floats(0.0, 1.0))),
        background_load=draw(
            st.sampled_from([(), tuple(changes(NOBODY, later(users)) for _ in range(3))])
        ),
        open=changes(True, later(st.booleans())),
    )


POLICIES = st.sampled_from(
    [
        FixedSpeed(fixed_rpm=3250.0),
        FixedSpeed(fixed_rpm=11000.0),
        PassiveCooling(),
        PassiveCooling(high_rpm=8300.0),
    ]
)


class SmallSteps:
    """The same rack by Runge and Kutta, in steps of at most a quarter of a second; one node after the other."""

    def __init__(
        self, rack: Rack, policy: FanPolicy, around: Surroundings, start_c: float, tick_s: float
    ) -> None:
        self.rack, self.policy, self.around, self.tick_s = rack, policy, around, tick_s
        self.governor, self.fans = snapdragon_governor(), rack_fans()
        self.socs_c, self.boards_c = (
            np.full(rack.num_socs, start_c),
            np.full(len(rack.slots_per_board), start_c),
        )
        self.air_c = start_c
        self.board_of = np.repeat(np.arange(len(rack.slots_per_board)), rack.slots_per_board)
        self.into_board = np.array(
            [
                rack.soc_to_board_w_per_k * rack.coupling.get(soc, 1.0)
                for soc in range(rack.num_socs)
            ]
        )
        self.into_air = np.array(
            [
                rack.board_to_air_w_per_k * rack.airflow.get(board, 1.0)
                for board in range(len(rack.slots_per_board))
            ]
        )
        self.levels, self.rpm, self.fan_j, self.ticks = (
            [0] * rack.num_socs,
            self.fans.min_rpm,
            0.0,
            0,
        )
        self.update_controls()

    def update_controls(self) -> None:
        for soc, hot_c in enumerate(self.socs_c):
            level = self.levels[soc]
            if level < 2 and hot_c >= self.governor.trip_c[level]:
                self.levels[soc] += 1
            elif level and hot_c <= self.governor.resume_c[level - 1]:
                self.levels[soc] -= 1
        hottest_c = round(float(self.socs_c.max()) / 0.5) * 0.5
        wanted = self.policy.rpm(
            FanObservation(at_s=self.ticks * self.tick_s, hottest_c=hottest_c, rpm=self.rpm)
        )
        self.rpm = min(max(25.0 * math.ceil(wanted / 25.0), 1100.0), 14000.0)

    def slopes(self, now: Any, watts: Any, chassis: float, ambient_c: float) -> Any:
        socs_c, boards_c, air_c = now
        up = self.into_board * (socs_c - boards_c[self.board_of])
        out = self.into_air * (boards_c - air_c)
        return (
            (watts - up) / self.rack.soc_j_per_k,
            (np.bincount(self.board_of, up, len(boards_c)) - out) / self.rack.board_j_per_k,
            (out.sum() - chassis * (air_c - ambient_c)) / self.rack.chassis_j_per_k,
        )

    def tick(self, watts: list[float]) -> None:
        """Advance to the next tick, and update the controls."""
        at_s = self.ticks * self.tick_s
        users = [load.at(at_s) for load in self.around.background_load] or [
            NOBODY
        ] * self.rack.num_socs
        working = self.around.fans_working.at(at_s)
        drive = (
            np.array(watts) + np.array([load.power_w for load in users]),
            self.fans.conductance_w_per_k(self.rpm, working),
            self.around.ambient_c.at(at_s),
        )
        self.fan_j += self.fans.power_w(self.rpm, working) * self.tick_s
        steps = math.ceil(self.tick_s / 0.25)
        h = self.tick_s / steps
        now: Any = (self.socs_c, self.boards_c, self.air_c)
        for _ in range(steps):
            k1 = self.slopes(now, *drive)
            k2 = self.slopes([x + 0.5 * h * k for x, k in zip(now, k1, strict=True)], *drive)
            k3 = self.slopes([x + 0.5 * h * k for x, k in zip(now, k2, strict=True)], *drive)
            k4 = self.slopes([x + h * k for x, k in zip(now, k3, strict=True)], *drive)
            now = [
                x + h * (a + 2.0 * b + 2.0 * c + d) / 6.0
                for x, a, b, c, d in zip(now, k1, k2, k3, k4, strict=True)
            ]
        self.socs_c, self.boards_c, self.air_c = now
        self.ticks += 1
        self.update_controls()

    def speed_factors(self) -> list[float]:
        at_s = self.ticks * self.tick_s
        users = [load.at(at_s) for load in self.around.background_load] or [
            NOBODY
        ] * self.rack.num_socs
        return [
            self.governor.clock_hz[level] / self.governor.clock_hz[0] * (1.0 - load.share)
            for level, load in zip(self.levels, users, strict=True)
        ]


def everything(rack: RackDynamics) -> tuple[Any, ...]:
    """What work can see of a rack."""
    return tuple(rack.speed_factors()), tuple(rack.power_factors()), rack.taken_socs()


@FEW
@given(
    around=surroundings(),
    policy=POLICIES,
    watts=st.lists(WATTS, min_size=3, max_size=3),
    start_c=st.floats(20.0, 45.0),
    tick_s=st.sampled_from([1.0, 5.0, 0.7]),
)
def test_a_rack_goes_as_its_equations_in_small_steps_go(
    around,
    policy,
    watts,
    start_c,
    tick_s,
):
    """Temperatures, clocks, fan speeds and joules, tick by tick; loads change every 15 ticks."""
    rack = RackDynamics(RACK, policy, surroundings=around, start_c=start_c, tick_s=tick_s)
    brute = SmallSteps(RACK, policy, around, start_c, tick_s)
    for number in range(45):
        now_w = watts[number // 15]
        rack.advance(tick_s, now_w)
        brute.tick(now_w)
        assert rack.temperatures_c == pytest.approx(brute.socs_c, abs=2e-4)
        # A temperature within rounding of a trip point may trip one and not the other.
        near = min(
            abs(float(hot_c) - edge) for hot_c in brute.socs_c for edge in (34.0, 35.0, 38.5, 39.5)
        )
        near = min(near, abs((float(brute.socs_c.max()) * 2.0) % 1.0 - 0.5))
        if near < 5e-4:
            return
        assert rack.speed_factors() == pytest.approx(brute.speed_factors())
        assert rack.history[-1].rpm == brute.rpm
    assert rack.cooling_j == pytest.approx(brute.fan_j)


@settings(max_examples=15)
@given(
    around=surroundings(),
    policy=POLICIES,
    watts=WATTS,
    before_s=SLOW_S,
    start_c=st.floats(20.0, 45.0),
    tick_s=st.sampled_from([1.0, 5.0, 0.7]),
)
def test_speeds_hold_as_long_as_they_are_said_to_and_then_change(
    around,
    policy,
    watts,
    before_s,
    start_c,
    tick_s,
):
    """Brute force: a copy that is looked at several times a tick."""
    rack = RackDynamics(RACK, policy, surroundings=around, start_c=start_c, tick_s=tick_s)
    rack.advance(before_s, watts)
    said_s = rack.steady_s(watts)
    seen = everything(rack)
    assert rack.steady_s(watts) == said_s and everything(rack) == seen, (
        "looking ahead changes nothing"
    )
    assert said_s > 0.0
    walker = RackDynamics(RACK, policy, surroundings=around, tick_s=tick_s)
    walker.restore(rack.state())
    walked_s, step_s = 0.0, 0.3 * tick_s
    while walked_s + step_s < min(said_s, 150.0) - 1e-6:
        walker.advance(step_s, watts)
        walked_s += step_s
        assert everything(walker) == seen
    if said_s < 1800.0:
        after_w = [
            users.at(rack.state()["time_s"] + said_s).power_w for users in around.background_load
        ]
        rack.advance(said_s, watts)
        look_s = math.floor(before_s / tick_s + 1e-9) * tick_s
        before_w = [users.at(look_s).power_w for users in around.background_load]
        assert everything(rack) != seen or before_w != after_w


@FEW
@given(
    around=surroundings(),
    policy=POLICIES,
    watts=WATTS,
    pieces_s=st.lists(st.floats(0.0, 40.0), max_size=12),
    tick_s=st.sampled_from([1.0, 5.0, 0.7, 0.1]),
)
def test_advancing_in_pieces_equals_advancing_at_once(
    around,
    policy,
    watts,
    pieces_s,
    tick_s,
):
    whole = RackDynamics(RACK, policy, surroundings=around, tick_s=tick_s)
    pieces = RackDynamics(RACK, policy, surroundings=around, tick_s=tick_s)
    at_once_j = whole.advance(math.fsum(pieces_s), watts)
    piecewise_j = math.fsum(pieces.advance(piece_s, watts) for piece_s in pieces_s)
    assert pieces.temperatures_c == pytest.approx(whole.temperatures_c, abs=1e-7)
    assert piecewise_j == pytest.approx(at_once_j, rel=1e-9, abs=1e-9)
    assert everything(pieces) == everything(whole)
    assert [entry.rpm for entry in pieces.history] == [entry.rpm for entry in whole.history]


@pytest.mark.parametrize(("tick_s", "piece_s"), [(5.0, 0.1), (1.0, 0.1), (0.7, 0.07), (0.3, 0.1)])
def test_no_look_is_lost_to_rounding(tick_s, piece_s):
    """Tenths of a second do not sum to whole ones."""
    rack = RackDynamics(RACK, FixedSpeed(fixed_rpm=3250.0), start_c=60.0, tick_s=tick_s)
    for _ in range(round(tick_s / piece_s)):
        rack.advance(piece_s, [5.0] * 3)
    assert rack.speed_factors() == pytest.approx([1.80 / 2.84] * 3), (
        "the second tick, one at the start"
    )


@FEW
@given(around=surroundings(), policy=POLICIES, watts=WATTS, times_s=st.tuples(SLOW_S, SLOW_S))
def test_a_restored_rack_goes_on_to_the_last_bit(
    around,
    policy,
    watts,
    times_s,
):
    whole = RackDynamics(RACK, policy, surroundings=around)
    whole.advance(times_s[0], watts)
    restored = RackDynamics(RACK, policy, surroundings=around, start_c=60.0, start_rpm=14000.0)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert everything(restored) == everything(whole)
    assert restored.steady_s(watts) == whole.steady_s(watts)
    assert restored.advance(times_s[1], watts) == whole.advance(times_s[1], watts)
    assert restored.state() == whole.state()
    assert restored.history == whole.history


@FEW
@given(
    around=surroundings(),
    policy=POLICIES,
    watts=WATTS,
    pieces_s=st.lists(st.floats(0.0, 100.0), max_size=5),
)
def test_joules_of_cooling_are_the_integral_of_the_fans_watts(
    around,
    policy,
    watts,
    pieces_s,
):
    """Fans change at looks only, so the log has every watt; the last entry has not lasted yet."""
    rack = RackDynamics(RACK, policy, surroundings=around)
    returned_j = [rack.advance(piece_s, watts) for piece_s in pieces_s]
    assert rack.cooling_j == pytest.approx(math.fsum(returned_j))
    entries, end_s = rack.history, math.fsum(pieces_s)
    lasted_s = [
        *(after.at_s - before.at_s for before, after in pairwise(entries)),
        end_s - entries[-1].at_s,
    ]
    assert rack.cooling_j == pytest.approx(
        math.fsum(entry.fan_w * spent_s for entry, spent_s in zip(entries, lasted_s, strict=True)),
        abs=1e-6,
    )
    assert all(
        entry.fan_w == rack_fans().power_w(entry.rpm, around.fans_working.at(entry.at_s))
        for entry in entries
    )


# ------------------------------------------------------------------------------------------------- as one expects
def warm(
    around: Surroundings | None = None,
    *,
    rack: Rack = RACK,
    watts: float = 30.0,
    rpm: float = 11000.0,
    duration_s: float = 600.0,
) -> RackDynamics:
    dynamics = RackDynamics(rack, FixedSpeed(fixed_rpm=rpm), surroundings=around)
    dynamics.advance(duration_s, [watts] * rack.num_socs)
    return dynamics


def test_users_take_their_share_draw_their_watts_and_may_take_the_soc():
    busy = BackgroundLoad(share=0.25, power_w=3.0, taken=True)
    around = Surroundings(
        background_load=(
            changes(NOBODY, [(100.0, busy), (200.0, NOBODY)]),
            Steps((0.0,), (NOBODY,)),
            Steps((0.0,), (NOBODY,)),
        )
    )
    rack = RackDynamics(RACK, FixedSpeed(fixed_rpm=14000.0), surroundings=around)
    alone = RackDynamics(RACK, FixedSpeed(fixed_rpm=14000.0))
    assert rack.steady_s([1.0] * 3) == 100.0
    for at_s, speeds, taken in (
        (50.0, [1.0, 1.0, 1.0], frozenset()),
        (150.0, [0.75, 1.0, 1.0], frozenset({0})),
        (250.0, [1.0, 1.0, 1.0], frozenset()),
    ):
        rack.advance(at_s - rack.state()["time_s"], [1.0] * 3)
        alone.advance(at_s - alone.state()["time_s"], [1.0] * 3)
        assert rack.speed_factors() == rack.power_factors() == speeds
        assert rack.taken_socs() == taken
        warmer_c = rack.temperatures_c - alone.temperatures_c
        assert (warmer_c > 0.02).all() if taken else (warmer_c < 0.3).all()
        assert not taken or warmer_c[0] > warmer_c[1] > warmer_c[2], "itself, its board, the rack"


def test_outside_of_its_windows_training_has_to_leave_all_socs():
    around = Surroundings(open=Steps((0.0, 60.0, 90.0), (True, False, True)))
    rack = RackDynamics(RACK, FixedSpeed(fixed_rpm=14000.0), surroundings=around)
    assert rack.taken_socs() == frozenset() and rack.steady_s([0.5] * 3) == 60.0
    rack.advance(60.0, [0.5] * 3)
    assert rack.taken_socs() == frozenset({0, 1, 2}) and rack.steady_s([0.5] * 3) == 30.0
    assert rack.speed_factors() == [1.0] * 3, "they could work"
    rack.advance(30.0, [0.5] * 3)
    assert rack.taken_socs() == frozenset()


def test_no_more_than_half_an_hour_is_looked_ahead():
    assert RackDynamics(RACK, FixedSpeed(fixed_rpm=14000.0)).steady_s([0.0] * 3) == 1800.0


def test_failed_fans_draw_less_and_cool_less():
    whole, half, none = (
        warm(Surroundings(fans_working=Steps((0.0,), (part,)))) for part in (1.0, 0.5, 0.0)
    )
    assert whole.cooling_j == pytest.approx(2.0 * half.cooling_j) and none.cooling_j == 0.0
    assert (whole.temperatures_c < half.temperatures_c).all() and (
        half.temperatures_c < none.temperatures_c
    ).all()
    still = warm(rpm=5700.0)
    assert none.temperatures_c == pytest.approx(still.temperatures_c), (
        "as warm as fans below their threshold leave it"
    )


def test_hot_ambient_air_shifts_a_rack_that_is_not_throttled():
    cool = warm(watts=2.0, rpm=14000.0, duration_s=3000.0)
    hot = warm(
        Surroundings(ambient_c=Steps((0.0,), (29.0,))), watts=2.0, rpm=14000.0, duration_s=3000.0
    )
    assert hot.temperatures_c == pytest.approx(cool.temperatures_c + 4.0, abs=1e-6)


def test_a_hot_board_throttles_alone():
    rack = Rack(slots_per_board=(5,) * 4, airflow={1: 0.06}, chassis_j_per_k=4000.0)
    hot = RackDynamics(rack, FixedSpeed(fixed_rpm=14000.0))
    watts = [5.0] * 20
    hot.advance(3600.0, watts)
    slow = {soc for soc, factor in enumerate(hot.speed_factors()) if factor < 1.0}
    assert slow == set(range(5, 10))


def test_the_peak_is_the_hottest_ever_seen_and_the_log_is_thinned_evenly():
    rack = warm(watts=60.0, rpm=3250.0, duration_s=300.0)
    hot_c = rack.peak_c
    assert hot_c == max(entry.hottest_c for entry in rack.history) > 40.0
    rack.advance(43200.0, [0.1] * 3)
    assert rack.peak_c >= hot_c > rack.temperatures_c.max()
    entries = rack.history
    assert 2000 < len(entries) <= 4000
    gaps = {round(after.at_s - before.at_s, 6) for before, after in pairwise(entries)}
    assert len(gaps) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tick_s": 0.0}, "tick_s = 0.0 must be above 0"),
        ({"tick_s": math.inf}, "tick_s = inf"),
        ({"tick_s": math.nan}, "tick_s = nan"),
        (
            {"surroundings": Surroundings(background_load=(Steps((0.0,), (NOBODY,)),))},
            "users of 1 SoCs, but it has 3",
        ),
    ],
)
def test_racks_in_impossible_surroundings_are_refused_in_one_line(arguments, text):
    with pytest.raises(ConfigError, match=text) as error:
        RackDynamics(RACK, FixedSpeed(fixed_rpm=3250.0), **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("power_w", [[], [1.0] * 2, [1.0] * 4])
def test_loads_are_one_for_each_soc(power_w):
    rack = RackDynamics(RACK, FixedSpeed(fixed_rpm=3250.0))
    for ask in (rack.steady_s, lambda watts: rack.advance(1.0, watts)):
        with pytest.raises(ConfigError, match=f"{len(power_w)} powers for 3 SoCs"):
            ask(power_w)
