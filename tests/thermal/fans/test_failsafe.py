"""Fans of a simulated rack whose sensors fail, read wrong or freeze: both policies end at the fail-safe speed in time.

The rack, its heat and its fans are those of the heat model; the control sees it through sensors with noise and steps.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans.control_loop import FanControl, FanState
from socflower.thermal.fans.outputs import SimulatedFan
from socflower.thermal.fans.policies import (
    FanObservation,
    FanPolicy,
    PassiveCooling,
    PlannedLoad,
    PredictiveCooling,
)
from socflower.thermal.fans.quorum import Quorum
from socflower.thermal.model.dynamics import RackDynamics
from socflower.thermal.model.rack import Rack
from socflower.thermal.sensors.reading import Reading

LOW_RPM, FAILSAFE_RPM, PERIOD_S = 3250.0, 11000.0, 5.0
IDLE_W, BUSY_W = 0.8, 5.0
BOARDS = Rack(slots_per_board=(5,) * 12)
POLICIES: Mapping[str, Callable[[], FanPolicy]] = {
    "passive": PassiveCooling,
    "predictive": lambda: PredictiveCooling(
        load=PlannedLoad(
            rack_w=40 * BUSY_W + 20 * IDLE_W, local_rise_c=BOARDS.local_rise_c(BUSY_W, 5)
        )
    ),
}
both_policies = pytest.mark.parametrize("make_policy", POLICIES.values(), ids=POLICIES)


@dataclass
class Follow:
    """The simulated rack's fans turn as the control wants."""

    wanted_rpm: float = LOW_RPM

    def rpm(self, observation: FanObservation) -> float:
        return self.wanted_rpm


@dataclass
class World:
    """A simulated rack, what its sensors show, and the control of its fans."""

    policy: FanPolicy
    rack: Rack = BOARDS
    step_c: float = 0.5
    noise_c: float = 0.0
    boards_known: bool = True
    tells_load: bool = False
    seed: int = 0
    start_c: float = 28.0
    faults: dict[int, object] = field(
        default_factory=dict
    )  # by SoC: a temperature, None, an exception, or "frozen"
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._follow = Follow()
        self.truth = RackDynamics(self.rack, self._follow, start_c=self.start_c)
        self.busy: list[bool] = [False] * self.rack.num_socs
        self.shown_c: dict[int, float] = {}
        boards = [
            board for board, slots in enumerate(self.rack.slots_per_board) for _ in range(slots)
        ]
        self.control = FanControl(
            {soc: Sensor(self, soc) for soc in range(self.rack.num_socs)},
            self.policy,
            SimulatedFan(14000.0, clock=lambda: self.now_s),
            min_rpm=1100.0,
            max_rpm=14000.0,
            failsafe_rpm=FAILSAFE_RPM,
            boards=dict(enumerate(boards)) if self.boards_known else None,
            clock=lambda: self.now_s,
            say=lambda line: None,
        )

    def read(self, soc: int) -> Reading:
        fault = self.faults.get(soc)
        true_c = float(self._temperatures_c[soc]) + self._random.gauss(0.0, self.noise_c)
        load = (0.9 if self.busy[soc] else 0.03) + self._random.uniform(-0.02, 0.02)
        if soc not in self.faults:
            self.shown_c[soc] = round(true_c / self.step_c) * self.step_c if self.step_c else true_c
        elif isinstance(fault, Exception):
            raise fault
        elif fault != "frozen":
            assert fault is None or isinstance(fault, float)
            return Reading(at_s=self.now_s, temperature_c=fault)
        return Reading(
            at_s=self.now_s,
            temperature_c=self.shown_c.setdefault(soc, 28.0),
            user_load=load if self.tells_load else None,
        )

    def poll(self) -> FanState:
        self._temperatures_c = self.truth.temperatures_c
        state = self.control.step()
        self._follow.wanted_rpm = state.rpm
        return state

    def run(self, seconds: float) -> list[FanState]:
        states = []
        for _ in range(math.ceil(seconds / PERIOD_S)):
            states.append(self.poll())
            self.now_s += PERIOD_S
            factors = self.truth.power_factors()
            self.truth.advance(
                PERIOD_S,
                [
                    IDLE_W + factor * (BUSY_W - IDLE_W) if busy else IDLE_W
                    for busy, factor in zip(self.busy, factors, strict=True)
                ],
            )
        return states

    def work(self, socs: range) -> None:
        self.busy = [soc in socs for soc in range(self.rack.num_socs)]


@dataclass
class Sensor:
    world: World
    soc: int

    def read(self) -> Reading:
        return self.world.read(self.soc)


# ------------------------------------------------------------------------------------------ too few are accepted


@both_policies
@pytest.mark.parametrize("fault", [OSError(5, "I/O"), None], ids=["raises", "silent"])
@pytest.mark.parametrize("before_s", [0.0, 300.0])
def test_one_soc_of_sixty_is_not_enough(
    make_policy,
    fault,
    before_s,
):
    world = World(make_policy(), boards_known=False, noise_c=0.1)
    world.run(before_s)
    world.faults = {0: 28.0, **dict.fromkeys(range(1, 60), fault)}
    states = world.run(600.0)
    first = next(number for number, state in enumerate(states) if state.failsafe)
    assert first * PERIOD_S <= 30.0 and all(state.failsafe for state in states[first:])
    assert all(state.rpm == FAILSAFE_RPM for state in states[first:])
    assert any(
        "the temperatures of only 1 of 60 SoCs are known" in note for note in states[first].notes
    )


@both_policies
def test_policies_alone_turn_fast_where_more_than_half_are_unknown(
    make_policy,
):
    policy = make_policy()
    for num_unknown in range(60):
        seen = FanObservation(
            at_s=0.0, hottest_c=28.0, rpm=LOW_RPM, num_unknown=num_unknown, num_socs=60
        )
        assert (policy.rpm(seen) == 11000.0) == seen.lacks_temperatures == (num_unknown > 30)


@both_policies
def test_a_board_without_a_believed_sensor_is_enough_where_boards_are_known(
    make_policy,
):
    for boards_known in (True, False):
        world = World(make_policy(), boards_known=boards_known, noise_c=0.1)
        world.run(100.0)
        world.faults = dict.fromkeys(range(10, 14), None)
        assert not any(state.failsafe for state in world.run(100.0))
        world.faults = dict.fromkeys(range(10, 15), None)
        last = world.run(100.0)[-1]
        assert last.failsafe == boards_known
        assert (
            any("no temperature of board 2 is known" in note for note in last.notes) == boards_known
        )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_a_quorum_is_half_of_all_and_one_of_each_board(board_of, data):
    filtered = data.draw(st.sets(st.sampled_from(range(len(board_of)))))
    missing = Quorum(dict(enumerate(board_of)), patience_s=30.0).missing(filtered)
    enough = len(filtered) * 2 >= len(board_of) and all(
        any(board_of[soc] == board for soc in filtered) for board in board_of
    )
    assert (missing == "") == enough


def test_the_fail_safe_is_left_when_enough_have_been_back_for_as_long_as_they_had_to_be_missing():
    world = World(PassiveCooling(), noise_c=0.1)
    assert not any(state.failsafe for state in world.run(60.0))
    world.faults = dict.fromkeys(range(60), None)
    assert [state.failsafe for state in world.run(60.0)].index(True) == 5
    for _ in range(10):  # one that comes and goes ends nothing
        world.faults = {}
        assert all(state.failsafe for state in world.run(20.0))
        world.faults = dict.fromkeys(range(40), OSError())
        assert all(state.failsafe for state in world.run(5.0))
    world.faults = {}
    assert [state.failsafe for state in world.run(60.0)] == [True] * 5 + [False] * 7


def test_boards_of_other_socs_are_refused():
    with pytest.raises(ConfigError, match="give each its board"):
        FanControl(
            {0: Sensor(World(PassiveCooling()), 0)},
            PassiveCooling(),
            SimulatedFan(14000.0),
            min_rpm=1.0,
            max_rpm=2.0,
            failsafe_rpm=2.0,
            boards={1: 0},
        )


# ------------------------------------------------------------------------------------------------ frozen sensors


@both_policies
@pytest.mark.parametrize("tells_load", [True, False])
def test_sixty_frozen_sensors_under_load_are_not_believed(
    make_policy,
    tells_load,
):
    world = World(make_policy(), tells_load=tells_load, faults=dict.fromkeys(range(60), "frozen"))
    world.work(range(40))
    states = world.run(2000.0)
    first = next(number for number, state in enumerate(states) if state.failsafe)
    assert first * PERIOD_S <= 700.0 and all(state.failsafe for state in states[first:])
    world.faults = {}
    assert not world.run(60.0)[-1].failsafe


def test_an_idle_rack_whose_documents_are_all_the_same_for_ever_is_not_believed():
    """A program that writes what it once read with new times repeats the load as well."""
    world = World(PassiveCooling(), faults=dict.fromkeys(range(60), 28.0))
    assert world.run(1300.0)[-1].failsafe


@both_policies
@settings(max_examples=3)
@given(data=st.data())
def test_if_a_soc_is_too_hot_while_most_sensors_lie_the_fans_turn_fast(
    make_policy,
    data,
):
    """Whichever sensors are faulty, low, frozen or silent: the rest shows the heat, or too few are accepted."""
    world = World(
        make_policy(),
        noise_c=data.draw(st.sampled_from([0.0, 0.1, 0.3])),
        seed=data.draw(st.integers(0, 99)),
        step_c=data.draw(st.sampled_from([0.5, 1.0])),
        boards_known=data.draw(st.booleans()),
    )
    world.run(data.draw(st.sampled_from([0.0, 200.0])))
    faulty = data.draw(st.sets(st.integers(0, 59), min_size=30, max_size=60))
    kinds = st.sampled_from([None, OSError(5), "frozen", 20.0, 28.0])
    kind = data.draw(st.none() | st.just(kinds))  # one kind of all, or each its own
    common = data.draw(kinds)
    world.faults = {soc: common if kind is None else data.draw(kinds) for soc in sorted(faulty)}
    world.work(range(data.draw(st.sampled_from([40, 60]))))
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
def test_a_healthy_rack_never_trips(make_policy, data):
    """Idle, at work or by turns, with fine and coarse sensors whose noise is a twentieth of a step or more."""
    step_c = data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    world = World(
        make_policy(),
        noise_c=data.draw(st.floats(0.05, 0.5)) * step_c,
        step_c=step_c,
        tells_load=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
        start_c=data.draw(st.floats(25.0, 32.0)),
    )
    for _ in range(2):
        world.work(range(data.draw(st.integers(0, 60))))
        assert not any(state.failsafe or state.num_unknown > 30 for state in world.run(1500.0))


@pytest.mark.parametrize("step_c", [0.5, 1.0])
def test_an_idle_rack_in_balance_whose_socs_tell_their_load_stands_still_for_hours(
    step_c,
):
    world = World(PassiveCooling(), step_c=step_c, tells_load=True, start_c=29.75)
    states = world.run(3600.0)
    assert not any(state.failsafe or state.num_unknown for state in states)
    assert len({state.hottest_c for state in states[360:]}) == 1  # it did stand still


@pytest.mark.parametrize("step_c", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_a_rack_that_the_plan_holds_in_balance_may_stand_still(step_c):
    world = World(POLICIES["predictive"](), step_c=step_c)
    world.work(range(40))
    assert not any(state.failsafe for state in world.run(3600.0))


def test_still_sensors_without_noise_load_and_plan_trip_and_are_believed_again_once_the_fans_have_moved_them():
    """The one false alarm there is; it costs minutes of fast fans."""
    world = World(PassiveCooling(), start_c=29.75)
    failsafe = [state.failsafe for state in world.run(3600.0)]
    assert 0.0 < sum(failsafe) / len(failsafe) < 0.25
    assert not all(failsafe[-200:])
