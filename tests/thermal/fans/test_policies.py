"""Fan policies: what they ask for at any observation, and what they do to a simulated rack."""

from dataclasses import dataclass, replace
from functools import partial
from math import inf, isinf, nan

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from socflower.paper.socflow_plus.heat import Experiment
from socflower.thermal.fans.config import make_policy
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.policies import (
    FanObservation,
    FanPolicy,
    FixedSpeed,
    PassiveCooling,
    PlannedLoad,
    PredictiveCooling,
)
from socflower.thermal.model.background_load import Steps
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.rack import Rack
from tests.one_line import refused
from tests.thermal.refusals import refused_each

FEW = settings(max_examples=40)
# Shrinking a simulated hour takes minutes and shows no more.
FEWER = settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
HOTTEST = st.none() | st.floats(-50.0, 200.0) | st.sampled_from([nan, inf, -inf, -128.0])
RPM = st.floats(0.0, 2e4)
AT_S = st.floats(0.0, 2e5)
PLAN = PlannedLoad(rack_w=216.0, local_rise_c=1.5)


def rpm_at(
    policy: FanPolicy, hottest_c: float | None, rpm: float = 3250.0, at_s: float = 0.0
) -> float:
    return policy.rpm(FanObservation(at_s=at_s, hottest_c=hottest_c, rpm=rpm))


@st.composite
def predictive(draw: st.DrawFn) -> PredictiveCooling:
    limit_c, begin_s = draw(st.floats(26.0, 45.0)), draw(st.floats(0.0, 1e4))
    load = PlannedLoad(
        rack_w=draw(st.floats(0.0, 600.0)),
        local_rise_c=draw(st.floats(0.0, 6.0)),
        begin_s=begin_s,
        end_s=draw(st.just(inf) | st.floats(begin_s, 1e5)),
    )
    return PredictiveCooling(
        load=load,
        ambient_c=draw(st.floats(-10.0, 25.5)),
        limit_c=limit_c,
        resume_c=limit_c - draw(st.floats(0.0, 2.0)),
        coast_limit_c=limit_c + draw(st.floats(0.0, 5.0)),
        horizon_s=draw(st.floats(1.0, 2000.0)),
        low_rpm=draw(st.floats(1100.0, 5000.0)),
        high_rpm=draw(st.floats(5001.0, 14000.0)),
        band_c=draw(st.floats(0.1, 2.0)),
        max_slowdown=draw(st.sampled_from([0.0, 0.02, 0.5])),
    )


@st.composite
def passive(draw: st.DrawFn) -> PassiveCooling:
    low, hot_c = draw(st.floats(500.0, 10000.0)), draw(st.floats(25.0, 60.0))
    return PassiveCooling(
        low_rpm=low,
        high_rpm=low + draw(st.floats(1.0, 10000.0)),
        hot_c=hot_c,
        cool_c=hot_c - draw(st.floats(0.1, 10.0)),
    )


# ------------------------------------------------------------------------------------------------ at any observation
@FEW
@given(
    policy=passive() | predictive() | st.builds(FixedSpeed, fixed_rpm=st.floats(1.0, 2e4)),
    hottest_c=HOTTEST,
    rpm=RPM | st.just(nan),
    at_s=AT_S,
)
def test_at_any_observation_the_speed_is_one_of_the_policy(policy, hottest_c, rpm, at_s):
    wanted = rpm_at(policy, hottest_c, rpm, at_s)
    if isinstance(policy, FixedSpeed):
        assert wanted == policy.fixed_rpm
    elif isinstance(policy, PassiveCooling):
        assert wanted in (policy.low_rpm, policy.high_rpm)
    else:
        assert policy.low_rpm <= wanted <= policy.high_rpm


@FEW
@given(policy=passive() | predictive(), unknown=st.sampled_from([None, nan]), rpm=RPM, at_s=AT_S)
def test_without_a_known_temperature_fans_turn_fast(policy, unknown, rpm, at_s):
    assert rpm_at(policy, unknown, rpm, at_s) == policy.high_rpm


@FEW
@given(policy=passive(), temperatures_c=st.lists(st.floats(20.0, 65.0), min_size=1, max_size=40))
def test_passive_cooling_has_hysteresis(policy, temperatures_c):
    """Against two states written out: fast from `hot_c` on, slow again at `cool_c`."""
    rpm, fast = policy.low_rpm, False
    for hottest_c in temperatures_c:
        fast = hottest_c >= policy.hot_c or (fast and hottest_c > policy.cool_c)
        rpm = rpm_at(policy, hottest_c, rpm)
        assert rpm == (policy.high_rpm if fast else policy.low_rpm)


@FEW
@given(
    policy=passive(),
    hottest_c=st.floats(20.0, 65.0),
    fast=st.booleans(),
    reached=st.floats(0.85, 1.0),
)
def test_at_a_constant_temperature_passive_cooling_changes_at_most_once(
    policy, hottest_c, fast, reached
):
    """Also if fans turn somewhat slower than they were set to."""
    assume(reached * policy.high_rpm > 0.5 * (policy.low_rpm + policy.high_rpm))
    speeds = {rpm_at(policy, hottest_c, policy.high_rpm if fast else policy.low_rpm)}
    for _ in range(6):
        (rpm,) = speeds
        speeds.add(rpm_at(policy, hottest_c, reached * rpm if rpm == policy.high_rpm else rpm))
    assert len(speeds) == 1


@FEW
@given(
    policy=predictive(),
    hottest_c=st.floats(0.0, 80.0),
    hotter_c=st.floats(0.0, 40.0),
    rpm=st.floats(0.0, 14000.0),
)
def test_predictive_cooling_is_never_slower_for_a_hotter_rack(policy, hottest_c, hotter_c, rpm):
    # Air is colder than ambient only in a rack that was brought in from the cold.
    assume(hottest_c >= policy.ambient_c + policy.load.local_rise_c)
    slower = rpm_at(policy, hottest_c, rpm)
    assert rpm_at(policy, hottest_c + hotter_c, rpm) >= slower * (1.0 - 1e-6)


@FEW
@given(
    policy=predictive(),
    above_c=st.floats(0.0, 30.0),
    more=st.floats(1e-3, 3.0),
    part=st.floats(0.0, 1.2),
    grid=st.integers(5, 60),
)
def test_a_steady_speed_is_no_faster_than_needed_and_no_slower(policy, above_c, more, part, grid):
    """Brute force over a grid of speeds, each carried through the horizon in small steps.

    If the limit cannot be held at the efficient speed, no slower speed of the grid has the SoCs at the limit or below
    it at the horizon's end; the speed itself has, unless it is the highest.
    """
    load = policy.load
    planned_s = load.end_s - load.begin_s
    at_s = load.begin_s + part * min(planned_s, 5000.0)
    coasting = at_s >= policy.coast_begin_s
    end_s = load.end_s + (policy.max_slowdown * planned_s if coasting else 0.0)
    time_s = min(policy.horizon_s, end_s - at_s) if at_s < end_s else policy.horizon_s
    heat = policy.coast_power if coasting else 1.0
    rise_c = heat * load.local_rise_c
    limit_c = (policy.coast_limit_c if coasting else policy.limit_c) - rise_c
    efficient_w_per_k = policy.fans.conductance_w_per_k(policy.efficient_rpm)
    heat_w = max((1.0 + more) * efficient_w_per_k * (limit_c - policy.ambient_c), 1.0)
    policy = replace(policy, load=replace(load, rack_w=heat_w / heat))

    def air_c(rpm):
        now_c, steps = policy.ambient_c + above_c, 200
        conductance = policy.fans.conductance_w_per_k(rpm)
        half = 0.5 * time_s / steps / policy.chassis_j_per_k
        drive = 2.0 * half * (heat_w + conductance * policy.ambient_c)
        # Implicit midpoint rule: second order and stable.
        for _ in range(steps):
            now_c = (now_c * (1.0 - half * conductance) + drive) / (1.0 + half * conductance)
        return now_c

    wanted = rpm_at(policy, policy.ambient_c + rise_c + above_c, policy.low_rpm, at_s)
    for index in range(grid):
        slower = policy.low_rpm + index / grid * (policy.high_rpm - policy.low_rpm)
        assert slower >= 0.999 * wanted or air_c(slower) > limit_c - 2e-3
    assert wanted == policy.high_rpm or air_c(wanted * (1.0 + 1e-9)) <= limit_c + 2e-3


def mean_w(policy: PredictiveCooling, first_rpm: float, second_rpm: float, wanted: float) -> float:
    """Return the mean watts of alternating between two speeds with a mean conductance; infinity if they cannot."""
    fans = policy.fans
    first, second = fans.conductance_w_per_k(first_rpm), fans.conductance_w_per_k(second_rpm)
    if not min(first, second) <= wanted <= max(first, second) or first == second:
        return inf
    part = (wanted - first) / (second - first)
    return (1.0 - part) * fans.power_w(first_rpm) + part * fans.power_w(second_rpm)


@FEW
@given(policy=predictive(), hold=st.floats(0.0, 1.0), grid=st.integers(2, 25))
def test_alternating_between_any_two_speeds_is_not_cheaper(policy, hold, grid):
    """Slow and efficient by turns below the efficient speed, one steady speed above: the lower hull, by brute force.

    The efficient speed is one of 200, which costs up to half a percent.
    """
    fans, low, high = policy.fans, policy.low_rpm, policy.high_rpm
    efficient = policy.efficient_rpm
    assert low < efficient <= high * (1.0 + 1e-12)
    least, most = fans.conductance_w_per_k(low), fans.conductance_w_per_k(high)
    assume(most > 1.01 * least)
    wanted = least + hold * (most - least)
    steady_rpm = fans.rpm_for(wanted)
    steady_w = fans.power_w(steady_rpm)
    ours_w = steady_w if steady_rpm > efficient else mean_w(policy, low, efficient, wanted)
    speeds = [low + index / grid * (high - low) for index in range(grid + 1)]
    for first in speeds:
        for second in speeds:
            assert ours_w <= 1.005 * mean_w(policy, first, second, wanted) + 1e-9
    assert steady_rpm < low or wanted == least or ours_w <= 1.005 * steady_w


@FEW
@given(policy=predictive(), temperatures_c=st.lists(st.floats(20.0, 60.0), min_size=1, max_size=30))
def test_alternating_has_hysteresis(policy, temperatures_c):
    """If the efficient speed is enough: on from the limit, off from `band_c` below it, against two states."""
    load, efficient = policy.load, policy.efficient_rpm
    room_c = policy.limit_c - load.local_rise_c - policy.ambient_c
    assume(isinf(load.end_s) and room_c > 0.0)
    assume(policy.fans.rpm_for(load.rack_w / room_c) <= efficient)
    rpm, fast = policy.low_rpm, False
    for hottest_c in temperatures_c:
        fast = hottest_c >= policy.limit_c or (fast and hottest_c > policy.limit_c - policy.band_c)
        rpm = rpm_at(policy, hottest_c, rpm)
        assert rpm >= efficient * (1.0 - 1e-12) if fast else rpm == policy.low_rpm


def test_the_low_and_the_high_speed_may_be_equal():
    policy = PredictiveCooling(load=PLAN, low_rpm=5000.0, high_rpm=5000.0)
    assert {rpm_at(policy, hottest_c) for hottest_c in (20.0, 34.4, 34.6, 60.0)} == {5000.0}


def test_fans_stay_slow_if_the_work_ends_before_the_limit():
    policy = PredictiveCooling(load=replace(PLAN, end_s=1000.0))
    assert rpm_at(policy, 34.3, at_s=800.0) > rpm_at(policy, 34.3, at_s=995.0) == 3250.0
    # Work that takes longer than planned is still cooled.
    assert rpm_at(policy, 34.5, at_s=1001.0) == rpm_at(policy, 34.5) > 8000.0


def test_the_last_part_is_coasted_as_long_as_the_slowdown_allows():
    """1 % of 10,000 s: 100 s may be lost, at 0.102 lost of each second; that is 980 s, which do 880 s of work."""
    policy = PredictiveCooling(load=replace(PLAN, end_s=1e4), max_slowdown=0.01)
    begin_s = policy.coast_begin_s
    assert begin_s == pytest.approx(1e4 - 100.0 * 0.898 / 0.102)
    assert (1e4 + 100.0 - begin_s) * 0.102 == pytest.approx(100.0)
    assert rpm_at(policy, 36.0, at_s=begin_s - 1.0) > 8000.0
    assert rpm_at(policy, 36.0, at_s=begin_s + 1.0) == 3250.0
    assert replace(policy, load=PLAN).coast_begin_s == inf


# ------------------------------------------------------------------------------------------------- on a rack
BUSY_RACK = Experiment(num_busy=40, busy_w=5.0, idle_w=0.8)


@dataclass(frozen=True)
class Run:
    rack: RackDynamics
    fan_w: float  # mean
    slowdown: float  # mean of the busy SoCs


def cooled(
    policy: FanPolicy,
    experiment: Experiment,
    hours: float,
    surroundings: Surroundings | None = None,
    start_c: float = 28.0,
    rack: Rack | None = None,
) -> Run:
    """Run constant work under a policy."""
    dynamics = RackDynamics(
        rack or experiment.rack, policy, start_c=start_c, surroundings=surroundings
    )
    num_steps = round(hours * 120.0)
    done = 0.0
    for _ in range(num_steps):
        done += sum(dynamics.speed_factors()[: experiment.num_busy])
        dynamics.advance(30.0, experiment.power_w(dynamics.power_factors()))
    slowdown = 1.0 - done / num_steps / experiment.num_busy
    return Run(dynamics, dynamics.cooling_j / num_steps / 30.0, slowdown)


def plan_of(experiment: Experiment) -> PlannedLoad:
    busy_on_board = min(experiment.num_busy, experiment.socs_per_board)
    return PlannedLoad(
        rack_w=sum(experiment.power_w([1.0] * experiment.rack.num_socs)),
        local_rise_c=experiment.rack.local_rise_c(experiment.busy_w, busy_on_board),
    )


@FEWER
@given(
    busy=st.integers(2, 16),
    busy_w=st.floats(4.0, 22.0),
    start_c=st.floats(25.0, 33.5),
    ambient_c=st.floats(20, 27),
)
def test_predictive_cooling_keeps_a_rack_under_its_limit(busy, busy_w, start_c, ambient_c):
    """Within half a degree, at any constant load that the fans can carry away; so nothing is ever slowed down."""
    experiment = Experiment(
        num_busy=busy, busy_w=busy_w, idle_w=0.8, num_boards=8, socs_per_board=2
    )
    load = plan_of(experiment)
    strongest_c = load.rack_w / rack_fans().conductance_w_per_k(10500.0)
    assume(ambient_c + strongest_c + load.local_rise_c < 34.0)
    # A rack that is hot before its SoCs get busy is too hot before fans can do anything.
    start_c = min(start_c, 34.0 - load.local_rise_c)
    policy = PredictiveCooling(load=load, ambient_c=ambient_c)
    around = Surroundings(ambient_c=Steps((0.0,), (ambient_c,)))
    run = cooled(policy, experiment, 1.5, around, start_c)
    assert run.rack.peak_c <= policy.limit_c + 0.5 and run.slowdown == 0.0


def test_predictive_cooling_answers_a_hot_board():
    """A board in bad air is 1.5 C hotter than planned; its temperature is held, not the planned one."""
    rack = Rack(slots_per_board=(5,) * 12, airflow={2: 0.25})
    planned = plan_of(BUSY_RACK)
    run = cooled(PredictiveCooling(load=planned), BUSY_RACK, 1.0, rack=rack)
    rpm = rack_fans().rpm_for(planned.rack_w / (34.5 - 25.0 - planned.local_rise_c))
    blind = cooled(FixedSpeed(fixed_rpm=rpm), BUSY_RACK, 1.0, rack=rack)
    temperatures_c = run.rack.temperatures_c
    assert temperatures_c.argmax() in range(10, 15)
    assert temperatures_c.max() < 35.0 and run.slowdown == 0.0 < blind.slowdown


@pytest.mark.parametrize(("working", "enough"), [(0.75, True), (0.5, False)])
def test_predictive_cooling_answers_fans_that_fail(working, enough):
    """The remaining fans turn faster: nothing is slowed down if that is enough, else less than at the old speed."""
    failing = Surroundings(fans_working=Steps((0.0, 3600.0), (1.0, working)))
    policy = PredictiveCooling(load=plan_of(BUSY_RACK))
    run = cooled(policy, BUSY_RACK, 2.0, failing)
    before = [entry.rpm for entry in run.rack.history if 2400.0 < entry.at_s < 3600.0]
    after = [entry.rpm for entry in run.rack.history if entry.at_s > 5400.0]
    mean_rpm = sum(before) / len(before)
    assert sum(after) / len(after) > 1.1 * mean_rpm
    blind = cooled(FixedSpeed(fixed_rpm=mean_rpm), BUSY_RACK, 2.0, failing)
    assert run.slowdown < blind.slowdown
    assert run.slowdown == 0.0 if enough else max(after) == policy.high_rpm


@pytest.mark.parametrize(
    ("num_busy", "busy_w", "at_most"), [(10, 5.0, 1.05), (30, 5.0, 0.95), (40, 6.42, 1.05)]
)
def test_predictive_cooling_needs_no_more_fan_energy_than_passive_at_no_more_slowdown(
    num_busy, busy_w, at_most
):
    """Over two hours from a cold start.

    Loads that hardly need fans, or need all of them, leave no choice; there it pays for staying half a degree cooler.
    """
    experiment = replace(BUSY_RACK, num_busy=num_busy, busy_w=busy_w)
    ours = cooled(PredictiveCooling(load=plan_of(experiment)), experiment, 2.0)
    paper = cooled(PassiveCooling(), experiment, 2.0)
    assert ours.slowdown <= paper.slowdown and ours.fan_w < at_most * paper.fan_w


# --------------------------------------------------------------------------------------------------- mistakes
def test_invalid_policies_are_refused():
    refused_each(FixedSpeed, fixed_rpm=(0.0, nan, inf))
    refused_each(PassiveCooling, low_rpm=(-1.0,), high_rpm=(3250.0,), cool_c=(35.0,), hot_c=(nan,))
    refused_each(partial(replace, PLAN), rack_w=(-1.0, nan), local_rise_c=(inf,))
    refused(partial(replace, PLAN, begin_s=2.0, end_s=1.0), 2.0, 1.0)
    refused_each(
        partial(PredictiveCooling, load=PLAN),
        horizon_s=(0.0,),
        low_rpm=(0.0, 12000.0),
        band_c=(0.0,),
        chassis_j_per_k=(nan,),
        limit_c=(33.0, 39.5, nan),
        max_slowdown=(1.0,),
        coast_slowdown=(0.0,),
    )


def test_policies_are_made_by_name():
    assert make_policy("fixed", {"rpm": 8300}) == FixedSpeed(fixed_rpm=8300.0)
    passive_settings = {"high_rpm": 8300, "cool_c": 33.0}
    assert make_policy("passive", passive_settings) == PassiveCooling(high_rpm=8300.0, cool_c=33.0)
    load = {"rack_w": 216, "local_rise_c": 1.5}
    made = make_policy("predictive", {**load, "limit_c": 36.0})
    assert made == PredictiveCooling(load=PLAN, limit_c=36.0)


@pytest.mark.parametrize(
    ("name", "settings_of", "named"),
    [
        ("fast", {}, "fast"),
        ("fixed", {}, "rpm"),
        ("fixed", {"rpm": True}, "rpm = True"),
        ("fixed", {"rpm": "8300"}, "8300"),
        ("fixed", {"rpm": 8300, "low_rpm": 1}, "low_rpm"),
        ("passive", {"limit_c": 34.5}, "limit_c"),
        ("passive", {"low_rpm": 0}, "low_rpm"),
        ("predictive", {"rack_w": 216}, "local_rise_c"),
        ("predictive", {"rack_w": 216, "local_rise_c": 1.5, "load": 3}, "load"),
    ],
)
def test_invalid_settings_of_a_policy_are_refused(name, settings_of, named):
    refused(partial(make_policy, name, settings_of), named)
