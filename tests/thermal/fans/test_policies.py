"""Fan policies: what they ask for at any observation, and what they do to a simulated rack."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.policies import (
    FanObservation,
    FanPolicy,
    FixedSpeed,
    PassiveCooling,
    PlannedLoad,
    PredictiveCooling,
    make_policy,
)
from socflower.thermal.model.background_load import Steps
from socflower.thermal.model.calibration import Experiment
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.rack import Rack

FEW = settings(max_examples=40)
# Shrinking a simulated hour takes minutes and says no more.
FEWER = settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
HOTTEST = st.one_of(
    st.none(), st.floats(-50.0, 200.0), st.sampled_from([math.nan, math.inf, -math.inf, -128.0])
)
PLAN = PlannedLoad(rack_w=216.0, local_rise_c=1.5)


def observation(hottest_c: float | None, rpm: float = 3250.0, at_s: float = 0.0) -> FanObservation:
    return FanObservation(at_s=at_s, hottest_c=hottest_c, rpm=rpm)


@st.composite
def plans(draw: st.DrawFn) -> PlannedLoad:
    begin_s = draw(st.floats(0.0, 1e4))
    return PlannedLoad(
        rack_w=draw(st.floats(0.0, 600.0)),
        local_rise_c=draw(st.floats(0.0, 6.0)),
        begin_s=begin_s,
        end_s=draw(st.one_of(st.just(math.inf), st.floats(begin_s, 1e5))),
    )


@st.composite
def predictive(draw: st.DrawFn) -> PredictiveCooling:
    limit_c = draw(st.floats(26.0, 45.0))
    return PredictiveCooling(
        load=draw(plans()),
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
    policy=st.one_of(
        passive(), predictive(), st.floats(1.0, 2e4).map(lambda rpm: FixedSpeed(fixed_rpm=rpm))
    ),
    hottest_c=HOTTEST,
    rpm=st.one_of(st.floats(0.0, 2e4), st.just(math.nan)),
    at_s=st.floats(0.0, 2e5),
)
def test_whatever_is_seen_the_speed_is_above_zero_and_finite(
    policy,
    hottest_c,
    rpm,
    at_s,
):
    wanted = policy.rpm(observation(hottest_c, rpm, at_s))
    assert 0.0 < wanted < math.inf
    if isinstance(policy, PredictiveCooling):
        assert policy.low_rpm <= wanted <= policy.high_rpm
    if isinstance(policy, PassiveCooling):
        assert wanted in (policy.low_rpm, policy.high_rpm)


@FEW
@given(
    slow=passive(),
    planned=predictive(),
    unknown=st.sampled_from([None, math.nan]),
    rpm=st.floats(0.0, 2e4),
    at_s=st.floats(0.0, 2e5),
)
def test_where_nobody_knows_how_hot_it_is_fans_turn_fast(
    slow,
    planned,
    unknown,
    rpm,
    at_s,
):
    assert slow.rpm(observation(unknown, rpm, at_s)) == slow.high_rpm
    assert planned.rpm(observation(unknown, rpm, at_s)) == planned.high_rpm


@FEW
@given(policy=passive(), temperatures_c=st.lists(st.floats(20.0, 65.0), min_size=1, max_size=40))
def test_passive_cooling_has_hysteresis(policy, temperatures_c):
    """Against two states written out: fast from `hot_c` on, slow again only once it has come down to `cool_c`."""
    rpm, fast = policy.low_rpm, False
    for hottest_c in temperatures_c:
        fast = hottest_c >= policy.hot_c or (fast and hottest_c > policy.cool_c)
        rpm = policy.rpm(observation(hottest_c, rpm))
        assert rpm == (policy.high_rpm if fast else policy.low_rpm)


@FEW
@given(
    policy=passive(),
    hottest_c=st.floats(20.0, 65.0),
    fast=st.booleans(),
    reached=st.floats(0.85, 1.0),
)
def test_at_a_constant_temperature_passive_cooling_changes_once_at_most(
    policy,
    hottest_c,
    fast,
    reached,
):
    """Also where fans turn somewhat slower than they were told to."""
    assume(reached * policy.high_rpm > 0.5 * (policy.low_rpm + policy.high_rpm))
    speeds = [policy.rpm(observation(hottest_c, policy.high_rpm if fast else policy.low_rpm))]
    for _ in range(6):
        turning = reached * speeds[-1] if speeds[-1] == policy.high_rpm else speeds[-1]
        speeds.append(policy.rpm(observation(hottest_c, turning)))
    assert len(set(speeds)) == 1


@FEW
@given(
    policy=predictive(),
    hottest_c=st.floats(0.0, 80.0),
    hotter_c=st.floats(0.0, 40.0),
    rpm=st.floats(0.0, 14000.0),
)
def test_predictive_cooling_is_never_slower_for_a_hotter_rack(
    policy,
    hottest_c,
    hotter_c,
    rpm,
):
    # The air can be no colder than ambient, other than in a rack that came in from the cold.
    assume(hottest_c >= policy.ambient_c + policy.load.local_rise_c)
    assert policy.rpm(observation(hottest_c + hotter_c, rpm)) >= policy.rpm(
        observation(hottest_c, rpm)
    ) * (1.0 - 1e-6)


@FEW
@given(
    policy=predictive(),
    above_c=st.floats(0.0, 30.0),
    more=st.floats(1e-3, 3.0),
    part=st.floats(0.0, 1.2),
    grid=st.integers(5, 60),
)
def test_a_steady_speed_is_no_faster_than_needed_and_no_slower(
    policy,
    above_c,
    more,
    part,
    grid,
):
    """Brute force over a grid of speeds, each carried through the horizon in small steps.

    Where the limit cannot be held at the efficient speed, no slower speed of the grid has the SoCs at the limit or
    below it at the horizon's end; and the speed itself has, unless it is the highest.
    """
    load = policy.load
    at_s = load.begin_s + part * (min(load.end_s, load.begin_s + 5000.0) - load.begin_s)
    coasting = at_s >= policy.coast_begin_s
    end_s = load.end_s + (policy.max_slowdown * (load.end_s - load.begin_s) if coasting else 0.0)
    time_s = min(policy.horizon_s, end_s - at_s) if at_s < end_s else policy.horizon_s
    heat = policy.coast_power if coasting else 1.0
    rise_c = heat * load.local_rise_c
    limit_c = (policy.coast_limit_c if coasting else policy.limit_c) - rise_c
    hottest_c = policy.ambient_c + rise_c + above_c
    efficient_w_per_k = policy.fans.conductance_w_per_k(policy.efficient_rpm)
    heat_w = max((1.0 + more) * efficient_w_per_k * (limit_c - policy.ambient_c), 1.0)
    policy = replace(policy, load=replace(load, rack_w=heat_w / heat))

    def air_c(rpm):
        now_c, steps = hottest_c - rise_c, 200
        conductance = policy.fans.conductance_w_per_k(rpm)
        half = 0.5 * time_s / steps / policy.chassis_j_per_k
        drive = heat_w + conductance * policy.ambient_c
        for _ in range(steps):  # implicit midpoint rule: second order and stable
            now_c = (now_c * (1.0 - half * conductance) + 2.0 * half * drive) / (
                1.0 + half * conductance
            )
        return now_c

    wanted = policy.rpm(observation(hottest_c, policy.low_rpm, at_s))
    for index in range(grid):
        slower = policy.low_rpm + index / grid * (policy.high_rpm - policy.low_rpm)
        if slower < 0.999 * wanted:
            assert air_c(slower) > limit_c - 2e-3
    assert wanted == policy.high_rpm or air_c(wanted * (1.0 + 1e-9)) <= limit_c + 2e-3


def mean_w(
    policy: PredictiveCooling, first_rpm: float, second_rpm: float, wanted_w_per_k: float
) -> float:
    """Fan watts of turns of two speeds that carry away `wanted_w_per_k` on average; infinite if they cannot."""
    fans = policy.fans
    first, second = fans.conductance_w_per_k(first_rpm), fans.conductance_w_per_k(second_rpm)
    if not min(first, second) <= wanted_w_per_k <= max(first, second) or first == second:
        return math.inf
    part = (wanted_w_per_k - first) / (second - first)
    return (1.0 - part) * fans.power_w(first_rpm) + part * fans.power_w(second_rpm)


@FEW
@given(policy=predictive(), hold=st.floats(0.0, 1.0), grid=st.integers(2, 25))
def test_no_turns_of_any_two_speeds_are_cheaper_than_what_is_done(
    policy,
    hold,
    grid,
):
    """Turns of slow and efficient below the efficient speed, one steady speed above: the lower hull, by brute force.

    The efficient speed is one of 200, which costs up to half a percent.
    """
    fans, low, high = policy.fans, policy.low_rpm, policy.high_rpm
    efficient = policy.efficient_rpm
    assert low < efficient <= high * (1.0 + 1e-12)
    least, most = fans.conductance_w_per_k(low), fans.conductance_w_per_k(high)
    assume(most > 1.01 * least)
    wanted = least + hold * (most - least)
    ours_w = (
        fans.power_w(fans.rpm_for(wanted))
        if fans.rpm_for(wanted) > efficient
        else mean_w(policy, low, efficient, wanted)
    )
    speeds = [low + index / grid * (high - low) for index in range(grid + 1)]
    for first in speeds:
        for second in speeds:
            assert ours_w <= 1.005 * mean_w(policy, first, second, wanted) + 1e-9
    steady_rpm = fans.rpm_for(wanted)
    assert steady_rpm < low or wanted == least or ours_w <= 1.005 * fans.power_w(steady_rpm)


@FEW
@given(policy=predictive(), temperatures_c=st.lists(st.floats(20.0, 60.0), min_size=1, max_size=30))
def test_turns_have_hysteresis(policy, temperatures_c):
    """Where the efficient speed is enough: on from the limit, off from `band_c` below it, against two states."""
    load, fans = policy.load, policy.fans
    room_c = policy.limit_c - load.local_rise_c - policy.ambient_c
    assume(math.isinf(load.end_s) and room_c > 0.0)
    assume(fans.rpm_for(load.rack_w / room_c) <= policy.efficient_rpm)
    rpm, fast = policy.low_rpm, False
    for hottest_c in temperatures_c:
        fast = hottest_c >= policy.limit_c or (fast and hottest_c > policy.limit_c - policy.band_c)
        rpm = policy.rpm(observation(hottest_c, rpm))
        assert rpm <= policy.high_rpm
        assert rpm >= policy.efficient_rpm * (1.0 - 1e-12) if fast else rpm == policy.low_rpm


def test_one_speed_only_is_a_speed_too():
    policy = PredictiveCooling(load=PLAN, low_rpm=5000.0, high_rpm=5000.0)
    assert {policy.rpm(observation(hottest_c)) for hottest_c in (20.0, 34.4, 34.6, 60.0)} == {
        5000.0
    }


def test_nothing_is_cooled_once_the_work_will_end_before_it_is_too_hot():
    load = PlannedLoad(rack_w=216.0, local_rise_c=1.5, end_s=1000.0)
    policy = PredictiveCooling(load=load)
    assert policy.rpm(observation(34.3, at_s=800.0)) > 3250.0
    assert policy.rpm(observation(34.3, at_s=995.0)) == 3250.0
    # Work that takes longer than planned is cooled on.
    assert (
        policy.rpm(observation(34.5, at_s=1001.0))
        == policy.rpm(observation(34.5, at_s=0.0))
        > 8000.0
    )


def test_the_last_part_is_coasted_as_long_as_the_slowdown_allows():
    """1 % of 10,000 s: 100 s may be lost, at 0.102 lost of each second; that is 980 s, which do 880 s of work."""
    policy = PredictiveCooling(
        load=PlannedLoad(rack_w=216.0, local_rise_c=1.5, end_s=1e4), max_slowdown=0.01
    )
    assert policy.coast_begin_s == pytest.approx(1e4 - 100.0 * 0.898 / 0.102)
    coasted_s = 1e4 + 100.0 - policy.coast_begin_s
    assert coasted_s * 0.102 == pytest.approx(100.0)
    assert policy.rpm(observation(36.0, at_s=policy.coast_begin_s - 1.0)) > 8000.0
    assert policy.rpm(observation(36.0, at_s=policy.coast_begin_s + 1.0)) == 3250.0
    endless = PredictiveCooling(load=PLAN, max_slowdown=0.01)
    assert endless.coast_begin_s == math.inf


# ------------------------------------------------------------------------------------------------- on a rack
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
    """Constant work under a policy."""
    dynamics = RackDynamics(
        rack or experiment.rack, policy, start_c=start_c, surroundings=surroundings
    )
    passed_s, done_s, end_s = 0.0, 0.0, hours * 3600.0
    while passed_s < end_s:
        power_w = experiment.power_w(dynamics.power_factors())
        # Steps are long: it does not matter how the time is cut, other than for the clocks.
        step_s = min(30.0, end_s - passed_s)
        done_s += (
            step_s * sum(dynamics.speed_factors()[: experiment.num_busy]) / experiment.num_busy
        )
        dynamics.advance(step_s, power_w)
        passed_s += step_s
    return Run(dynamics, dynamics.cooling_j / end_s, 1.0 - done_s / end_s)


def small(num_boards: int, num_busy: int, busy_w: float) -> Experiment:
    """A rack of boards of two; its fans are those of the large one."""
    return Experiment(
        num_busy=num_busy, busy_w=busy_w, idle_w=0.8, num_boards=num_boards, socs_per_board=2
    )


def plan_of(experiment: Experiment, rack: Rack | None = None) -> PlannedLoad:
    on_a_board = min(experiment.num_busy, experiment.socs_per_board)
    rise_c = (rack or experiment.rack).local_rise_c(experiment.busy_w, on_a_board)
    return PlannedLoad(
        rack_w=sum(
            experiment.power_w(
                [1.0] * experiment.num_busy
                + [1.0] * (experiment.num_boards * experiment.socs_per_board - experiment.num_busy)
            )
        ),
        local_rise_c=rise_c,
    )


@FEWER
@given(
    busy=st.integers(2, 16),
    busy_w=st.floats(4.0, 22.0),
    start_c=st.floats(25.0, 33.5),
    ambient_c=st.floats(20, 27),
)
def test_predictive_cooling_keeps_a_rack_under_its_limit(
    busy,
    busy_w,
    start_c,
    ambient_c,
):
    """Within half a degree, at any constant load that the fans can carry away; so nothing is ever slowed down."""
    experiment = small(8, busy, busy_w)
    load = plan_of(experiment)
    strongest_c = load.rack_w / rack_fans().conductance_w_per_k(10500.0)
    assume(ambient_c + strongest_c + load.local_rise_c < 34.0)
    # A rack that is hot before its SoCs get busy is too hot before fans can do anything.
    start_c = min(start_c, 34.0 - load.local_rise_c)
    policy = PredictiveCooling(load=load, ambient_c=ambient_c)
    run = cooled(
        policy, experiment, 1.5, Surroundings(ambient_c=Steps((0.0,), (ambient_c,))), start_c
    )
    assert run.rack.peak_c <= policy.limit_c + 0.5
    assert run.slowdown == 0.0


def test_predictive_cooling_answers_a_hot_board():
    """A board in bad air is 1.5 C hotter than the plan thinks; its temperature is held, not that of the plan."""
    rack = Rack(slots_per_board=(5,) * 12, airflow={2: 0.25})
    experiment = Experiment(num_busy=40, busy_w=5.0, idle_w=0.8)
    planned = plan_of(experiment)
    run = cooled(PredictiveCooling(load=planned), experiment, 1.0, rack=rack)
    blind = cooled(
        FixedSpeed(
            fixed_rpm=rack_fans().rpm_for(planned.rack_w / (34.5 - 25.0 - planned.local_rise_c))
        ),
        experiment,
        1.0,
        rack=rack,
    )
    hottest_c = float(run.rack.temperatures_c.max())
    assert int(run.rack.temperatures_c.argmax()) in range(10, 15)
    assert hottest_c < 35.0 and run.slowdown == 0.0
    assert float(blind.rack.temperatures_c[10:15].max()) > 35.0 - 0.25 and blind.slowdown > 0.0


@pytest.mark.parametrize(("working", "enough"), [(0.75, True), (0.5, False)])
def test_predictive_cooling_answers_fans_that_fail(working, enough):
    """What is left turns faster: nothing is slowed down where that is enough, and less than at the speed of before."""
    experiment = Experiment(num_busy=40, busy_w=5.0, idle_w=0.8)
    failing = Surroundings(fans_working=Steps((0.0, 3600.0), (1.0, working)))
    policy = PredictiveCooling(load=plan_of(experiment))
    run = cooled(policy, experiment, 2.0, failing)
    before = [entry.rpm for entry in run.rack.history if 2400.0 < entry.at_s < 3600.0]
    after = [entry.rpm for entry in run.rack.history if entry.at_s > 5400.0]
    mean_rpm = sum(before) / len(before)
    assert sum(after) / len(after) > 1.1 * mean_rpm
    blind = cooled(FixedSpeed(fixed_rpm=mean_rpm), experiment, 2.0, failing)
    assert run.slowdown < blind.slowdown
    assert run.slowdown == 0.0 if enough else max(after) == policy.high_rpm


@pytest.mark.parametrize(
    ("num_busy", "busy_w", "at_most"),
    [(10, 5.0, 1.05), (20, 5.0, 0.95), (30, 5.0, 0.95), (40, 5.0, 0.95), (40, 6.42, 1.05)],
)
def test_predictive_cooling_needs_no_more_fan_energy_than_passive_at_no_more_slowdown(
    num_busy,
    busy_w,
    at_most,
):
    """Over two hours from a cold start.

    Loads that hardly need fans or all of them leave nothing to choose; there it pays for staying half a degree cooler.
    """
    experiment = Experiment(num_busy=num_busy, busy_w=busy_w, idle_w=0.8)
    ours = cooled(PredictiveCooling(load=plan_of(experiment)), experiment, 2.0)
    paper = cooled(PassiveCooling(), experiment, 2.0)
    assert ours.slowdown <= paper.slowdown
    assert ours.fan_w < at_most * paper.fan_w


# --------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FixedSpeed(fixed_rpm=0.0), "fixed: fixed_rpm = 0.0 must be above 0"),
        (lambda: FixedSpeed(fixed_rpm=math.nan), "fixed_rpm = nan"),
        (lambda: FixedSpeed(fixed_rpm=math.inf), "above 0 and finite"),
        (lambda: PassiveCooling(low_rpm=-1.0), "passive: low_rpm = -1.0"),
        (
            lambda: PassiveCooling(high_rpm=3250.0),
            "low_rpm = 3250.0 must be below high_rpm = 3250.0",
        ),
        (lambda: PassiveCooling(cool_c=35.0), "cool_c = 35.0 must be below hot_c = 35.0"),
        (lambda: PassiveCooling(hot_c=math.nan), "must be below hot_c = nan"),
        (lambda: PlannedLoad(rack_w=-1.0, local_rise_c=1.0), "rack_w = -1.0"),
        (lambda: PlannedLoad(rack_w=math.nan, local_rise_c=1.0), "rack_w = nan"),
        (lambda: PlannedLoad(rack_w=1.0, local_rise_c=math.inf), "local_rise_c = inf"),
        (
            lambda: PlannedLoad(rack_w=1.0, local_rise_c=1.0, begin_s=2.0, end_s=1.0),
            "ends at 1.0 s, before it begins",
        ),
        (lambda: PredictiveCooling(load=PLAN, horizon_s=0.0), "predictive: horizon_s = 0.0"),
        (lambda: PredictiveCooling(load=PLAN, low_rpm=0.0), "predictive: low_rpm = 0.0"),
        (
            lambda: PredictiveCooling(load=PLAN, low_rpm=12000.0),
            "low_rpm = 12000.0 must not be above high_rpm = 11000.0",
        ),
        (lambda: PredictiveCooling(load=PLAN, band_c=0.0), "predictive: band_c = 0.0"),
        (lambda: PredictiveCooling(load=PLAN, chassis_j_per_k=math.nan), "chassis_j_per_k = nan"),
        (
            lambda: PredictiveCooling(load=PLAN, limit_c=33.0),
            "need resume_c <= limit_c <= coast_limit_c, got 33.5, 33.0",
        ),
        (lambda: PredictiveCooling(load=PLAN, limit_c=39.5), "got 33.5, 39.5, 39.0"),
        (lambda: PredictiveCooling(load=PLAN, limit_c=math.nan), "33.5, nan, 39.0"),
        (lambda: PredictiveCooling(load=PLAN, max_slowdown=1.0), "max_slowdown = 1.0"),
        (lambda: PredictiveCooling(load=PLAN, coast_slowdown=0.0), "coast_slowdown = 0.0"),
    ],
)
def test_policies_that_cannot_be_are_refused_in_one_line(make, text):
    with pytest.raises(ConfigError, match=text) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "settings_of", "expected"),
    [
        ("fixed", {"rpm": 8300}, FixedSpeed(fixed_rpm=8300.0)),
        ("passive", {}, PassiveCooling()),
        (
            "passive",
            {"high_rpm": 8300, "cool_c": 33.5},
            PassiveCooling(high_rpm=8300.0, cool_c=33.5),
        ),
        (
            "predictive",
            {"rack_w": 216, "local_rise_c": 1.5, "limit_c": 36.0},
            PredictiveCooling(load=PLAN, limit_c=36.0),
        ),
    ],
)
def test_policies_are_made_by_name(name, settings_of, expected):
    assert make_policy(name, settings_of) == expected


@pytest.mark.parametrize(
    ("name", "settings_of", "text"),
    [
        ("fast", {}, "name = 'fast' is unknown; use one of fixed, passive, predictive"),
        ("fixed", {}, "rpm is missing"),
        ("fixed", {"rpm": True}, "rpm = True must be a number"),
        ("fixed", {"rpm": "8300"}, "must be a number"),
        ("fixed", {"rpm": 8300, "low_rpm": 1}, "low_rpm"),
        ("passive", {"limit_c": 34.5}, "limit_c"),
        ("passive", {"low_rpm": 0}, "low_rpm = 0.0 must be above 0"),
        ("predictive", {"rack_w": 216}, "local_rise_c, the planned heat, are needed"),
        ("predictive", {"rack_w": 216, "local_rise_c": 1.5, "load": 3}, "load"),
    ],
)
def test_settings_that_make_no_policy_are_refused_in_one_line(
    name,
    settings_of,
    text,
):
    with pytest.raises(ConfigError, match=text) as error:
        make_policy(name, settings_of)
    assert "\n" not in str(error.value)
