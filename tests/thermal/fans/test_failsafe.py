"""Fans of a simulated rack whose sensors fail, read wrong or freeze: both policies reach the fail-safe speed in time.

The rack, its heat and its fans are those of the heat model; the control reads it through sensors with noise and steps.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sensor_faults import (
    FAILSAFE_RPM,
    FAST_FROM_C,
    LOW_RPM,
    MOST_ABOVE_C,
    PERIOD_S,
    POLICIES,
    World,
    hottest_c,
    lying_rack,
)
from socflower.thermal.fans.control_loop import FanState
from socflower.thermal.fans.policies import (
    FanObservation,
    FixedSpeed,
)
from socflower.thermal.fans.quorum import SensorQuorum
from tests.sampled_cells import sampled

both_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def failsafes(states: list[FanState]) -> list[bool]:
    return [state.failsafe for state in states]


# ------------------------------------------------------------------------------------------ too few are accepted
@both_policies
@pytest.mark.parametrize(("fault", "before_s"), [(OSError(5, "I/O"), 0.0), (None, 300.0)])
def test_one_soc_of_sixty_is_not_enough(policy, fault, before_s):
    world = World(policy, boards_known=False, noise_c=0.1)
    world.run(before_s)
    world.faults = {0: 28.0, **dict.fromkeys(range(1, 60), fault)}
    states = world.run(300.0)
    first = failsafes(states).index(True)
    assert first * PERIOD_S <= 30.0
    assert {(state.failsafe, state.rpm) for state in states[first:]} == {(True, FAILSAFE_RPM)}
    assert any("1 of 60" in note for note in states[first].notes)


@both_policies
def test_policies_alone_turn_fast_if_more_than_half_are_unknown(policy):
    for unknown in range(60):
        seen = FanObservation(
            at_s=0.0, hottest_c=28.0, rpm=LOW_RPM, num_unknown=unknown, num_socs=60
        )
        assert (policy.rpm(seen) == 11000.0) == seen.lacks_temperatures == (unknown > 30)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_a_quorum_is_half_of_all_and_one_of_each_board(board_of, data):
    known = data.draw(st.sets(st.sampled_from(range(len(board_of)))))
    missing = SensorQuorum(dict(enumerate(board_of)), patience_s=30.0).missing(known)
    boards = {board_of[soc] for soc in known}
    assert (missing == "") == (2 * len(known) >= len(board_of) and boards == set(board_of))


def test_the_failsafe_ends_if_enough_have_been_back_for_as_long_as_they_had_to_be_missing():
    world = World(POLICIES["passive"], noise_c=0.1)
    assert not any(failsafes(world.run(60.0)))
    world.faults = dict.fromkeys(range(60))
    assert failsafes(world.run(60.0)).index(True) == 5
    # Temperatures that come and go end nothing.
    for _ in range(3):
        world.faults = {}
        assert all(failsafes(world.run(20.0)))
        world.faults = dict.fromkeys(range(40), OSError())
        assert all(failsafes(world.run(5.0)))
    world.faults = {}
    assert failsafes(world.run(60.0)) == [True] * 5 + [False] * 7


# ------------------------------------------------------------------------------------------------ frozen sensors
@pytest.mark.few_cells(2)
@both_policies
@pytest.mark.parametrize("tells_load", [True, False])
def test_sixty_frozen_sensors_under_load_are_rejected(policy, tells_load):
    world = World(policy, tells_load=tells_load, faults=dict.fromkeys(range(60), "frozen"))
    world.num_busy = 40
    failsafe = failsafes(world.run(900.0))
    first = failsafe.index(True)
    assert first * PERIOD_S <= 700.0 and all(failsafe[first:])
    world.faults = {}
    assert not world.run(60.0)[-1].failsafe


def test_an_idle_rack_that_repeats_its_documents_is_rejected():
    """A program that writes what it once read with new times repeats the load as well."""
    world = World(POLICIES["passive"], faults=dict.fromkeys(range(60), 28.0))
    assert world.run(1300.0)[-1].failsafe


@both_policies
@settings(max_examples=2)
@given(data=st.data())
def test_if_a_soc_is_too_hot_while_most_sensors_are_wrong_the_fans_turn_fast(policy, data):
    """Whichever sensors are faulty, low, frozen or silent: the rest shows the heat, or too few are accepted."""
    world = World(
        policy,
        noise_c=data.draw(st.sampled_from([0.0, 0.1, 0.3])),
        seed=data.draw(st.integers(0, 99)),
        step_c=data.draw(st.sampled_from([0.5, 1.0])),
        boards_known=data.draw(st.booleans()),
    )
    world.run(data.draw(st.sampled_from([0.0, 200.0])))
    kinds = st.sampled_from([None, OSError(5), "frozen", 20.0, 28.0])
    kind = data.draw(st.sampled_from([kinds, st.just(data.draw(kinds))]))  # all different, or equal
    world.faults = data.draw(st.dictionaries(st.integers(0, 59), kind, min_size=30))
    world.num_busy = data.draw(st.sampled_from([40, 60]))
    hot_s = 0.0
    for _ in range(400):
        (state,) = world.run(PERIOD_S)
        # Half a degree of noise and rounding, and what SoCs of one rack differ by.
        hot_s = hot_s + PERIOD_S if world.truth.temperatures_c.max() > 35.0 + 1.5 else 0.0
        assert hot_s < 60.0 or state.rpm >= FAILSAFE_RPM, state


# --------------------------------------------------------------------------------------------------- healthy racks
@both_policies
@settings(max_examples=2)
@given(data=st.data())
def test_a_healthy_rack_never_trips(policy, data):
    """Idle, at work or by turns, with fine and coarse sensors whose noise is a twentieth of a step or more."""
    step_c = data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    world = World(
        policy,
        noise_c=data.draw(st.floats(0.05, 0.5)) * step_c,
        step_c=step_c,
        tells_load=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
        start_c=data.draw(st.floats(25.0, 32.0)),
    )
    for _ in range(2):
        world.num_busy = data.draw(st.integers(0, 60))
        assert not any(state.failsafe or state.num_unknown > 30 for state in world.run(1000.0))


def test_an_idle_rack_in_balance_whose_socs_tell_their_load_may_be_constant_for_hours():
    world = World(POLICIES["passive"], tells_load=True, start_c=29.75)
    states = world.run(2700.0)
    assert not any(state.failsafe or state.num_unknown for state in states)
    assert len({state.hottest_c for state in states[240:]}) == 1  # it was constant


@pytest.mark.parametrize("step_c", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_a_rack_that_the_plan_holds_in_balance_may_be_constant(step_c):
    world = World(POLICIES["predictive"], step_c=step_c)
    world.num_busy = 40
    assert not any(failsafes(world.run(2400.0)))


def test_constant_sensors_without_noise_load_and_plan_get_fast_fans_until_those_change_them():
    """The one known false alarm; it costs minutes of fast fans."""
    states = World(POLICIES["passive"], start_c=29.75).run(3600.0)
    fast = [state.rpm > LOW_RPM for state in states]
    assert 0.0 < sum(fast) / len(fast) < 0.25 and not all(fast[-200:])


# ------------------------------------------------------------------------------------------- faults that go together
@pytest.mark.parametrize(
    "seed",
    [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in sampled(range(4, 60)))],
)
def test_correlated_faults_do_not_heat_a_rack_with_working_fans(seed):
    """At most 3 °C above the temperature at which fans go fast."""
    world, said = lying_rack(seed)
    assert hottest_c(world) <= FAST_FROM_C + MOST_ABOVE_C, said


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("faults", [[-10.0], [-40.0, -1.0, -20.0], [20.0, None], [20.0, "frozen"]])
def test_named_faults_do_not_heat_a_rack(faults):
    world = World(POLICIES["passive"], start_c=33.0, noise_c=0.1)
    world.run(60.0)
    world.faults = {soc: faults[soc % len(faults)] for soc in range(60)}
    world.num_busy = 60
    assert hottest_c(world) <= FAST_FROM_C + MOST_ABOVE_C


@both_policies
def test_sensors_that_drift_down_together_do_not_heat_a_rack(policy):
    world = World(policy, start_c=30.0, noise_c=0.1)
    world.num_busy = 60
    world.run(300.0)
    world.faults = {soc: ("drift", -0.025, world.now_s) for soc in range(60)}
    assert hottest_c(world) <= FAST_FROM_C + MOST_ABOVE_C


@pytest.mark.parametrize("tells_load", [True, False])
def test_a_rack_whose_work_ends_may_cool_at_slow_fans_if_it_tells_its_load(tells_load):
    slow = FixedSpeed(fixed_rpm=LOW_RPM)
    world = World(slow, start_c=40.0, noise_c=0.1, tells_load=tells_load)
    world.num_busy = 60
    world.run(30.0)
    world.num_busy = 0
    states = world.run(1200.0)
    assert states[-1].hottest_c < 36.0
    assert any(failsafes(states)) != tells_load
    assert not all(failsafes(states[-60:]))
