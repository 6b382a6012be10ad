"""Fans for an objective: what they cost beside fixed speeds, what they learn of a rack, and what they remember."""

import json
from dataclasses import replace
from functools import partial
from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fan_objectives import OBJECTIVES, Outcome, RackCase
from socflower.thermal.fans.config import make_policy
from socflower.thermal.fans.control_loop import FanControl, FanSettings
from socflower.thermal.fans.estimator import RackEstimate, RackModel
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.objectives import ObjectiveCooling
from socflower.thermal.fans.outputs import SimulatedFan
from socflower.thermal.fans.policies import FanObservation, FixedSpeed, PlannedLoad
from socflower.thermal.model.dynamics import RackDynamics
from socflower.thermal.model.rack import Rack
from socflower.thermal.sensors.reading import Reading
from tests.thermal.refusals import refused_each

PLAN = PlannedLoad(rack_w=216.0, local_rise_c=1.5, idle_w=48.0, num_busy=40, end_s=7200.0)
SPEEDS_RPM = (1100.0, 7500.0, 8500.0, 9500.0, 11000.0, 14000.0)
CASE = RackCase(
    rack=Rack(slots_per_board=(2,) * 4, chassis_j_per_k=1820.0),
    num_busy=6,
    busy_w=5.0,
    idle_w=0.8,
    ambient_c=25.0,
    cold_s=2400.0,
    waits=True,
)


def policy_of(case: RackCase, objective: str) -> ObjectiveCooling:
    return ObjectiveCooling(
        load=case.plan,
        objective=objective,
        fans=case.planned_fans,
        rack_j_per_k=case.rack.total_j_per_k,
        ambient_c=case.ambient_c,
    )


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("world", [{}, {"flow": 0.7}, {"warmer_c": 3.0}, {"load": 1.28}])
def test_no_fixed_speed_costs_three_percent_less_by_the_objective(world: dict[str, float]) -> None:
    case = replace(CASE, **world)
    fixed = [case.run(FixedSpeed(fixed_rpm=rpm)) for rpm in SPEEDS_RPM]
    for objective in OBJECTIVES:
        ours = case.run(policy_of(case, objective))
        assert ours.cost(objective) <= 1.03 * min(each.cost(objective) for each in fixed)


def test_each_objective_is_met_best_by_its_own_policy() -> None:
    found: dict[str, Outcome] = {each: CASE.run(policy_of(CASE, each)) for each in OBJECTIVES}
    for objective, own in found.items():
        assert own.cost(objective) <= 1.01 * min(each.cost(objective) for each in found.values())
    assert found["energy"].energy_j < found["time"].energy_j
    assert found["time"].time_s < found["energy"].time_s


@settings(max_examples=5)
@given(st.floats(0.7, 1.0), st.floats(0.9, 1.28), st.floats(-3.0, 3.0))
def test_the_estimate_predicts_how_warm_the_air_gets_at_speeds_that_were_used(
    flow: float, load: float, warmer_c: float
) -> None:
    """A rack that is like the model, but for its constants; sensors show steps of half a degree."""
    fans, rise_c = rack_fans(), 2.0
    model = RackModel(
        load=PLAN, still_w_per_k=fans.still_w_per_k, rack_j_per_k=17850.0, power_exponent=2.0
    )
    estimate = model.first_estimate(28.0, 25.0)
    truth = RackEstimate((28.0, 25.0 + warmer_c, load, flow, *(rise_c,) * 4), ())
    air_c = np.array(28.0)
    heat_w = model.heat_w(truth, 1.0)
    flows = [
        fans.conductance_w_per_k(rpm) - fans.still_w_per_k for rpm in (1100.0, 8500.0, 11000.0)
    ]
    for step in range(360):
        own = flows[step // 30 % 3]
        air_c = model.air_c(truth, air_c, heat_w, np.array(own), 30.0)
        shown_c = round((float(air_c) + rise_c) * 2.0) / 2.0
        means = np.array([own, 1.0, *(1.0,) * 4, *(shown_c,) * 4])
        estimate = model.updated(estimate, 30.0, means)
    for own in flows[1:]:
        steady_c, predicted_c = (
            float(model.air_c(each, air_c, model.heat_w(each, 1.0), np.array(own), 1e6))
            + each.mean[4]
            for each in (truth, estimate)
        )
        assert abs(predicted_c - steady_c) < 0.7


OBSERVED_C = st.lists(st.floats(10.0, 70.0), min_size=4, max_size=4)


@settings(max_examples=20)
@given(st.sampled_from(OBJECTIVES), st.lists(st.tuples(OBSERVED_C, st.booleans()), max_size=6))
def test_at_any_observation_the_speed_is_one_of_the_policy_and_the_memory_can_be_stored(
    objective: str, observed: list[tuple[list[float], bool]]
) -> None:
    policy = ObjectiveCooling(load=PLAN, objective=objective, low_rpm=2000.0, high_rpm=12000.0)
    memory = None
    rpm = 2000.0
    for index, (temperatures_c, tells_clocks) in enumerate(observed):
        observation = FanObservation(
            at_s=50.0 * index,
            hottest_c=max(temperatures_c),
            rpm=rpm,
            temperatures_c=temperatures_c,
            clock_factors=[0.634, 0.898, 1.0, 1.0] if tells_clocks else (),
        )
        stored = memory and policy.restored(json.loads(json.dumps(memory)))
        assert stored == memory
        rpm, memory = policy.decide(observation, memory)
        assert 2000.0 <= rpm <= 12000.0
        if max(temperatures_c) >= policy.most_c:
            assert rpm == 12000.0


def test_without_a_known_temperature_fans_turn_fast_and_nothing_is_forgotten() -> None:
    policy = ObjectiveCooling(load=PLAN)
    _, memory = policy.decide(FanObservation(at_s=0.0, hottest_c=30.0, rpm=1100.0), None)
    unknown = FanObservation(at_s=5.0, hottest_c=None, rpm=1100.0)
    assert policy.decide(unknown, memory) == (policy.high_rpm, memory)


def test_an_interrupted_rack_goes_on_as_if_it_had_not_been() -> None:
    def rack() -> RackDynamics:
        return RackDynamics(CASE.rack, policy_of(CASE, "energy-delay"), fans=CASE.fans)

    power_w = [6.0] * 8
    whole, first, second = rack(), rack(), rack()
    whole.advance(900.0, power_w)
    whole.advance(900.0, power_w)
    first.advance(900.0, power_w)
    second.restore(json.loads(json.dumps(first.state())))
    second.advance(900.0, power_w)
    assert second.state() == whole.state()


def test_fan_control_keeps_what_the_policy_remembers() -> None:
    """At clocks that its sources report the work takes longer; an idle SoC's low clock means nothing."""
    now_s = 0.0
    readings = [Reading(at_s=0.0, temperature_c=36.0, clock_factor=0.5, user_load=0.9)] * 3
    readings.append(Reading(at_s=0.0, temperature_c=30.0, clock_factor=0.2, user_load=0.0))

    class Source:
        def __init__(self, reading: Reading) -> None:
            self.reading = reading

        def read(self) -> Reading:
            # A renewed reading with a little noise, as sensors give.
            return replace(self.reading, at_s=now_s, temperature_c=30.0 + now_s % 3.0)

    policy = Recorded(load=PLAN)
    control = FanControl(
        {soc: Source(reading) for soc, reading in enumerate(readings)},
        policy,
        SimulatedFan(14000.0, clock=lambda: now_s),
        FanSettings(min_rpm=1100.0, max_rpm=14000.0, failsafe_rpm=11000.0),
        clock=lambda: now_s,
        say=lambda line: None,
    )
    for _ in range(40):
        assert not control.step().notes
        now_s += 5.0
    assert Recorded.seen is not None and Recorded.seen.at_s == 195.0
    assert Recorded.seen.done_s == pytest.approx(0.5 * 195.0)


class Recorded(ObjectiveCooling):
    """Shows what it remembers."""

    seen = None

    def decide(self, observation, memory):
        rpm, Recorded.seen = ObjectiveCooling.decide(self, observation, memory)
        return rpm, Recorded.seen


def test_invalid_policies_are_refused() -> None:
    refused_each(
        partial(ObjectiveCooling, load=PLAN),
        objective=("watts",),
        low_rpm=(0.0, 15000.0),
        update_every_s=(0.0,),
        rack_j_per_k=(nan,),
    )
    refused_each(partial(replace, PLAN), idle_w=(-1.0, 300.0), num_busy=(0,), compute_part=(1.1,))


def test_the_policy_is_made_by_name() -> None:
    made = make_policy("objective", {"rack_w": 216, "local_rise_c": 1.5, "objective": "energy"})
    load = PlannedLoad(rack_w=216.0, local_rise_c=1.5)
    assert made == ObjectiveCooling(load=load, objective="energy")
