"""A rack over time, against its own integration in small steps, and what must hold however time is cut."""

import json
from functools import partial
from itertools import pairwise
from math import ceil, floor, fsum, inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.policies import FanObservation, FanPolicy, FixedSpeed, PassiveCooling
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, Steps, always, changes
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.governor import snapdragon_governor
from socflower.thermal.model.rack import Rack, Vector
from tests.one_line import refused
from tests.thermal.refusals import refused_each

FEW = settings(max_examples=10)
# Little air, so that minutes are enough for everything to happen.
RACK = Rack(slots_per_board=(2, 1), chassis_j_per_k=400.0)
# Three SoCs that are as hot as forty others.
WATTS = st.lists(st.floats(0.0, 70.0), min_size=3, max_size=3)
START_C = st.floats(20.0, 45.0)
TICK_S = st.sampled_from([1.0, 5.0, 0.7])
POLICIES = st.sampled_from(
    [
        FixedSpeed(fixed_rpm=3250.0),
        FixedSpeed(fixed_rpm=11000.0),
        PassiveCooling(),
        PassiveCooling(high_rpm=8300.0),
    ]
)


def steps_of(first: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Steps[Any]]:
    """Return functions that change up to twice in the first minutes, at any moment."""
    entry = st.tuples(st.floats(0.5, 280.0), values)
    later = st.lists(entry, max_size=2, unique_by=lambda entry: entry[0])
    return later.map(partial(changes, first))


USERS = st.builds(
    BackgroundLoad, share=st.floats(0.0, 0.9), power_w=st.floats(0.0, 4.0), taken=st.booleans()
)
SURROUNDINGS = st.builds(
    Surroundings,
    ambient_c=steps_of(25.0, st.floats(15.0, 33.0)),
    fans_working=steps_of(1.0, st.floats(0.0, 1.0)),
    background_load=st.just(()) | st.tuples(*[steps_of(NOBODY, USERS)] * 3),
    open=steps_of(True, st.booleans()),
)
AROUND = {"surroundings": SURROUNDINGS, "policy": POLICIES}
CASES = st.fixed_dictionaries({**AROUND, "start_c": START_C, "tick_s": TICK_S})


class SmallSteps:
    """The same rack by Runge and Kutta, in steps of at most a quarter of a second."""

    def __init__(
        self, policy: FanPolicy, surroundings: Surroundings, start_c: float, tick_s: float
    ) -> None:
        self.policy, self.around, self.tick_s = policy, surroundings, tick_s
        self.governor, self.fans = snapdragon_governor(), rack_fans()
        self.levels = [0, 0, 0]
        self.rpm, self.fan_j, self.at_s, self.ticks = self.fans.min_rpm, 0.0, 0.0, 0
        self.nodes_c = np.full(6, start_c)  # three SoCs, two boards, air
        self.capacities = np.array([RACK.soc_j_per_k] * 3 + [RACK.board_j_per_k] * 2 + [400.0])
        between = np.zeros((6, 6))  # W/K
        between[0, 3] = between[1, 3] = between[2, 4] = RACK.soc_to_board_w_per_k
        between[3, 5] = between[4, 5] = RACK.board_to_air_w_per_k
        self.between = between + between.T
        self.update_controls()

    def update_controls(self) -> None:
        for soc, hot_c in enumerate(self.nodes_c[:3]):
            level = self.levels[soc]
            if level < 2 and hot_c >= self.governor.trip_c[level]:
                self.levels[soc] += 1
            elif level and hot_c <= self.governor.resume_c[level - 1]:
                self.levels[soc] -= 1
        hottest_c = round(float(self.nodes_c[:3].max()) / 0.5) * 0.5
        seen = FanObservation(at_s=self.at_s, hottest_c=hottest_c, rpm=self.rpm)
        self.rpm = min(max(25.0 * ceil(self.policy.rpm(seen) / 25.0), 1100.0), 14000.0)
        loads = self.around.background_load or [always(NOBODY)] * 3
        self.users = [load.at(self.at_s) for load in loads]

    def tick(self, watts: list[float]) -> None:
        """Advance to the next tick, and update the controls."""
        working = self.around.fans_working.at(self.at_s)
        to_ambient = self.fans.conductance_w_per_k(self.rpm, working)
        ambient_c = self.around.ambient_c.at(self.at_s)
        users_w = [load.power_w for load in self.users]
        heat_w = np.concatenate([np.add(watts, users_w), np.zeros(3)])

        def slopes(nodes_c: Vector) -> Vector:
            in_w = heat_w + (self.between * (nodes_c - nodes_c[:, None])).sum(1)
            in_w[5] -= to_ambient * (nodes_c[5] - ambient_c)
            return np.asarray(in_w / self.capacities)

        self.fan_j += self.fans.power_w(self.rpm, working) * self.tick_s
        num_steps = ceil(self.tick_s / 0.25)
        h = self.tick_s / num_steps
        for _ in range(num_steps):
            k1 = slopes(self.nodes_c)
            k2 = slopes(self.nodes_c + 0.5 * h * k1)
            k3 = slopes(self.nodes_c + 0.5 * h * k2)
            k4 = slopes(self.nodes_c + h * k3)
            self.nodes_c = self.nodes_c + h * (k1 + 2.0 * k2 + 2.0 * k3 + k4) / 6.0
        self.ticks += 1
        self.at_s = self.ticks * self.tick_s
        self.update_controls()

    def near_an_edge(self) -> bool:
        """Return whether a temperature is within rounding of a trip point, a resume point or a sensor step."""
        edges_c = np.array([34.0, 35.0, 38.5, 39.5])
        to_edge_c = np.abs(self.nodes_c[:3, None] - edges_c).min()
        to_step_c = abs((self.nodes_c[:3].max() * 2.0) % 1.0 - 0.5)
        return bool(min(to_edge_c, to_step_c) < 5e-4)

    def speed_factors(self) -> list[float]:
        clocks = [self.governor.clock_hz[level] / 2.84e9 for level in self.levels]
        return [clock * (1.0 - load.share) for clock, load in zip(clocks, self.users, strict=True)]


def outputs(rack: RackDynamics) -> tuple[Any, ...]:
    """Return what work can observe of a rack."""
    return rack.speed_factors(), rack.power_factors(), rack.taken_socs()


@FEW
@given(case=CASES, watts=st.lists(WATTS, min_size=3, max_size=3))
def test_a_rack_follows_its_equations_in_small_steps(case, watts):
    """Temperatures, clocks, fan speeds and joules, tick by tick; loads change every 15 ticks."""
    rack, brute = RackDynamics(RACK, **case), SmallSteps(**case)
    for number in range(45):
        now_w = watts[number // 15]
        rack.advance(case["tick_s"], now_w)
        brute.tick(now_w)
        assert rack.temperatures_c == pytest.approx(brute.nodes_c[:3], abs=2e-4)
        # One may trip and the other not.
        if brute.near_an_edge():
            return
        assert rack.speed_factors() == pytest.approx(brute.speed_factors())
        assert rack.history[-1].rpm == brute.rpm
    assert rack.cooling_j == pytest.approx(brute.fan_j)


@settings(max_examples=6)
@given(case=CASES, watts=WATTS, before_s=st.floats(0.0, 300.0))
def test_speeds_are_constant_for_the_predicted_time_and_then_change(case, watts, before_s):
    """Brute force: a copy that is read several times a tick."""
    tick_s = case["tick_s"]
    rack = RackDynamics(RACK, **case)
    rack.advance(before_s, watts)
    steady_s, before = rack.steady_s(watts), outputs(rack)
    assert rack.steady_s(watts) == steady_s > 0.0 and outputs(rack) == before, "nothing changed"
    walker = RackDynamics(RACK, **case)
    walker.restore(rack.state())
    step_s = 0.3 * tick_s
    for _ in range(ceil((min(steady_s, 150.0) - 1e-6) / step_s) - 1):
        walker.advance(step_s, watts)
        assert outputs(walker) == before
    if steady_s < 1800.0:
        rack.advance(steady_s, watts)
        last_tick_s = floor(before_s / tick_s + 1e-9) * tick_s
        users = case["surroundings"].background_load
        users_changed = any(
            load.at(last_tick_s).power_w != load.at(before_s + steady_s).power_w for load in users
        )
        assert outputs(rack) != before or users_changed


@FEW
@given(case=CASES, watts=WATTS, pieces_s=st.lists(st.floats(0.0, 40.0), max_size=12))
def test_advancing_in_pieces_equals_advancing_at_once(case, watts, pieces_s):
    """The joules are the integral of the fans' watts, which the log has, since fans change at ticks only."""
    whole, pieces = RackDynamics(RACK, **case), RackDynamics(RACK, **case)
    end_s = fsum(pieces_s)
    at_once_j = whole.advance(end_s, watts)
    piecewise_j = fsum(pieces.advance(piece_s, watts) for piece_s in pieces_s)
    assert pieces.temperatures_c == pytest.approx(whole.temperatures_c, abs=1e-7)
    assert outputs(pieces) == outputs(whole)
    assert [entry.rpm for entry in pieces.history] == [entry.rpm for entry in whole.history]
    assert piecewise_j == pytest.approx(at_once_j, rel=1e-9, abs=1e-9)
    assert pieces.cooling_j == pytest.approx(piecewise_j)
    integral_j = 0.0
    for entry, until_s in zip(
        whole.history, [*(entry.at_s for entry in whole.history[1:]), end_s], strict=True
    ):
        working = case["surroundings"].fans_working.at(entry.at_s)
        assert entry.fan_w == rack_fans().power_w(entry.rpm, working)
        integral_j += entry.fan_w * (until_s - entry.at_s)
    assert at_once_j == pytest.approx(integral_j, abs=1e-6)


@pytest.mark.parametrize(("tick_s", "piece_s"), [(5.0, 0.1), (0.7, 0.07), (0.3, 0.1)])
def test_no_tick_is_lost_to_rounding(tick_s, piece_s):
    """Tenths of a second do not sum to whole ones."""
    rack = RackDynamics(RACK, FixedSpeed(fixed_rpm=3250.0), start_c=60.0, tick_s=tick_s)
    for _ in range(round(tick_s / piece_s)):
        rack.advance(piece_s, [5.0] * 3)
    # This is the second tick; the first was at the start.
    assert rack.speed_factors() == pytest.approx([1.80 / 2.84] * 3)


@FEW
@given(case=CASES, watts=WATTS, first_s=st.floats(0.0, 300.0), then_s=st.floats(0.0, 300.0))
def test_a_restored_rack_continues_to_the_last_bit(case, watts, first_s, then_s):
    whole = RackDynamics(RACK, **case)
    whole.advance(first_s, watts)
    restored = RackDynamics(RACK, **{**case, "start_c": 60.0}, start_rpm=14000.0)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert outputs(restored) == outputs(whole)
    assert restored.steady_s(watts) == whole.steady_s(watts)
    assert restored.advance(then_s, watts) == whole.advance(then_s, watts)
    assert restored.state() == whole.state() and restored.history == whole.history


# ------------------------------------------------------------------------------------------------- single effects
def rack_at(rpm: float, **around: Any) -> RackDynamics:
    return RackDynamics(RACK, FixedSpeed(fixed_rpm=rpm), surroundings=Surroundings(**around))


def test_users_take_their_share_and_may_take_the_soc():
    busy = BackgroundLoad(share=0.25, taken=True)
    users = changes(NOBODY, [(100.0, busy), (200.0, NOBODY)])
    rack = rack_at(14000.0, background_load=(users, always(NOBODY), always(NOBODY)))
    assert rack.steady_s([1.0] * 3) == 100.0
    for advance_s, speed, taken in ((50.0, 1.0, set()), (100.0, 0.75, {0}), (100.0, 1.0, set())):
        rack.advance(advance_s, [1.0] * 3)
        assert rack.speed_factors() == rack.power_factors() == [speed, 1.0, 1.0]
        assert rack.taken_socs() == taken


def test_outside_its_windows_training_has_to_release_all_socs():
    rack = rack_at(14000.0, open=Steps((0.0, 60.0, 90.0), (True, False, True)))
    assert rack.taken_socs() == set() and rack.steady_s([0.5] * 3) == 60.0
    assert rack.until_reading_s() == 5.0
    rack.advance(62.0, [0.5] * 3)
    assert rack.taken_socs() == {0, 1, 2} and rack.steady_s([0.5] * 3) == 28.0
    assert rack.speed_factors() == [1.0] * 3 and rack.until_reading_s() == 3.0
    rack.advance(28.0, [0.5] * 3)
    assert rack.taken_socs() == set()


def test_a_prediction_ends_after_half_an_hour():
    assert rack_at(14000.0).steady_s([0.0] * 3) == 1800.0


def test_the_peak_is_the_hottest_of_all_times_and_the_log_is_thinned_evenly():
    rack = rack_at(3250.0)
    rack.advance(300.0, [60.0] * 3)
    hot_c = rack.peak_c
    assert hot_c == max(entry.hottest_c for entry in rack.history) > 40.0
    rack.advance(25000.0, [0.1] * 3)
    assert rack.peak_c >= hot_c > rack.temperatures_c.max()
    times_s = [entry.at_s for entry in rack.history]
    assert 2000 < len(times_s) <= 4000
    assert {round(after - before, 6) for before, after in pairwise(times_s)} == {10.0}


def test_invalid_racks_and_loads_are_refused():
    policy = FixedSpeed(fixed_rpm=3250.0)
    refused_each(partial(RackDynamics, RACK, policy), tick_s=(0.0, inf, nan))
    refused(partial(rack_at, 3250.0, background_load=(always(NOBODY),)), 1, 3)
    rack = RackDynamics(RACK, policy)
    for watts in ([], [1.0] * 2, [1.0] * 4):
        refused(partial(rack.steady_s, watts), len(watts), 3)
        refused(partial(rack.advance, 1.0, watts), len(watts), 3)
