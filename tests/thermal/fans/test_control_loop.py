"""The control loop against sources, policies and fans that do anything: fans never stop, and the loop continues."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.fans.control_loop import FanControl, FanSettings, FanState, StopSignals
from socflower.thermal.fans.outputs import FanFailure, FanNotFound
from socflower.thermal.fans.policies import PassiveCooling
from tests.one_line import refused
from tests.thermal.fake_machines import Clock
from tests.thermal.refusals import refused_each

MIN_RPM, FAILSAFE_RPM, MAX_RPM = 3000.0, 9000.0, 14000.0
LIMITS = {
    "min_rpm": MIN_RPM,
    "max_rpm": MAX_RPM,
    "failsafe_rpm": FAILSAFE_RPM,
    "min_ambient_c": -40.0,
}
DENIED = PermissionError(13, "Permission denied")
BROKEN = OSError(5, "Input/output error")


@dataclass
class Sensor:
    """A source whose `temperature_c` may be of any type; an exception is raised."""

    clock: Clock
    temperature_c: Any = 30.0
    at_s: Any = None
    user_load: Any = None

    def read(self) -> Any:
        """Return a copy, since `Reading` itself refuses what a broken source might return."""
        if isinstance(self.temperature_c, BaseException):
            raise self.temperature_c
        at_s = self.clock() if self.at_s is None else self.at_s
        return Sensor(self.clock, self.temperature_c, at_s, self.user_load)


@dataclass
class Fan:
    """Keeps what was written; may fail. Measures what was written, or what `shows` is set to."""

    failure: Exception | None = None
    restore_failure: Exception | None = None
    shows: Any = "written"
    written: list[float] = field(default_factory=list)
    restored: int = 0

    def set_rpm(self, rpm: float) -> None:
        if self.failure is not None:
            raise self.failure
        self.written.append(rpm)

    def measured_rpm(self) -> Any:
        if isinstance(self.shows, Exception):
            raise self.shows
        return [None, *self.written][-1] if self.shows == "written" else self.shows

    def restore(self) -> None:
        if self.restore_failure is not None:
            raise self.restore_failure
        self.restored += 1

    def describe(self) -> str:
        return "fake"


class Rig:
    """A control with fake sources, fans and clock; it is its own policy, which wants `wants`."""

    def __init__(
        self,
        num_socs: int = 2,
        num_fans: int = 1,
        *,
        policy: Any = None,
        output: Any = None,
        boards: Any = None,
        say: Any = None,
        **settings: float,
    ) -> None:
        self.clock = Clock()
        self.sensors = [Sensor(self.clock) for _ in range(num_socs)]
        self.fans = [Fan() for _ in range(num_fans)]
        self.wants: Any = 5000.0
        self.said: list[str] = []
        self.control = FanControl(
            dict(enumerate(self.sensors)),
            policy or self,
            self.fans if output is None else output,
            FanSettings(**{**LIMITS, **settings}),
            boards=boards,
            clock=self.clock,
            say=say or self.said.append,
        )

    def rpm(self, observation: Any) -> Any:
        self.observation = observation
        if isinstance(self.wants, Exception):
            raise self.wants
        return self.wants

    def step(self, *temperatures_c: Any, after_s: float = 5.0) -> FanState:
        self.clock.now_s += after_s
        for sensor, value in zip(self.sensors, temperatures_c, strict=False):
            sensor.temperature_c = value
        return self.control.step()

    def steps(self, count: int, *temperatures_c: Any, after_s: float = 5.0) -> list[FanState]:
        return [self.step(*temperatures_c, after_s=after_s) for _ in range(count)]


NO_NUMBERS = st.one_of(st.booleans(), st.none(), st.text(max_size=3), st.just(10**400))
SPEEDS = st.one_of(
    st.floats(),
    st.integers(),
    st.floats(1.0, 20000.0),
    NO_NUMBERS,
    st.sampled_from([[5000.0], 1 + 2j, ValueError("no"), KeyError(), BROKEN]),
)
TEMPERATURES = st.one_of(
    st.floats(-60.0, 170.0),
    st.sampled_from([30.0, 41.5, -128.0, nan, inf, -inf, 0.0, 85.0]),
    NO_NUMBERS,
    st.sampled_from([[40.0], DENIED, ValueError("x"), RecursionError(), StopIteration()]),
)
FAILURES = st.sampled_from([None, BROKEN, ValueError("x"), AssertionError(), FanNotFound("x")])
ANY = st.none() | st.floats() | st.text(max_size=1)
SHOWN = st.sampled_from(["written", 0, 0.0, None, nan, -5, 65535, "x", BROKEN])


# ------------------------------------------------------------------------------------------------- properties
@given(st.data())
def test_whatever_happens_every_written_speed_is_within_the_limits_and_the_loop_continues(data):
    rig = Rig(
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
        max_silence_s=data.draw(st.sampled_from([1.0, 30.0])),
        stuck_after_s=data.draw(st.sampled_from([1.0, 600.0])),
        spin_up_s=data.draw(st.sampled_from([1.0, 15.0])),
    )
    with rig.control:
        for _ in range(data.draw(st.integers(1, 8))):
            for sensor in rig.sensors:
                sensor.temperature_c = data.draw(TEMPERATURES)
                sensor.at_s, sensor.user_load = data.draw(ANY), data.draw(ANY)
            rig.wants = data.draw(SPEEDS)
            for fan in rig.fans:
                fan.failure, fan.restore_failure = data.draw(FAILURES), data.draw(FAILURES)
                fan.shows = data.draw(SHOWN)
            state = rig.step(after_s=data.draw(st.sampled_from([0.0, 1.0, 5.0, 1000.0])))
            assert MIN_RPM <= state.rpm <= MAX_RPM
            for fan, rpm in zip(rig.fans, state.set_rpm, strict=True):
                assert rpm == (None if fan.failure else fan.written[-1])
    for fan in rig.fans:
        assert all(MIN_RPM <= rpm <= MAX_RPM for rpm in fan.written)
        if fan.restore_failure is not None and fan.failure is None:
            assert fan.written[-1] == FAILSAFE_RPM


@given(wants=st.floats(0.001, 1e6), temperature_c=st.floats(-40.0, 150.0))
def test_a_valid_speed_is_written_clamped(wants, temperature_c):
    rig = Rig()
    rig.wants = wants
    state = rig.step(temperature_c)
    assert rig.fans[0].written == [min(max(wants, MIN_RPM), MAX_RPM)] == [state.rpm]
    assert not state.failsafe


@given(first=TEMPERATURES, second=st.floats(-40.0, 150.0))
def test_the_hottest_is_the_hottest_possible_temperature(first, second):
    rig = Rig(3)
    state = rig.step(first, second, None)
    possible = [c for c in (first, second) if type(c) is float and -40.0 <= c <= 150.0]
    assert state.hottest_c == rig.observation.hottest_c == max(possible)
    assert state.num_unknown == rig.observation.num_unknown == 3 - len(possible)


def expected_accepted(history: Any, num_steps: int) -> list[bool]:
    """Return by the definition, over the whole history, which SoCs are accepted at its last step."""
    columns = list(zip(*history[-num_steps - 1 :], strict=True))
    constant = [len(history) > num_steps and len(set(column)) == 1 for column in columns]
    moved = [max(column) - min(column) >= 5.0 for column in columns]
    # It fell by 3 °C, and two readings, ten seconds, were the same since.
    fell = [
        any(
            len(set(column[at:])) == 1 and column[at - 1] - column[at] >= 3.0
            for at in range(1, len(column) - 2)
        )
        for column in zip(*history, strict=True)
    ]
    accepted = []
    for soc, is_constant in enumerate(constant):
        others = moved[:soc] + moved[soc + 1 :]
        moving = others and 2 * sum(others) >= len(others)
        accepted.append(not (fell[soc] or (is_constant and moving)))
    num_moving = sum(kept and not still for kept, still in zip(accepted, constant, strict=True))
    all_constant = 10 * num_moving < sum(accepted)
    return [
        kept and not (all_constant and still)
        for kept, still in zip(accepted, constant, strict=True)
    ]


@given(st.data())
def test_constant_socs_are_rejected_exactly_if_half_of_the_others_move_or_all_are_constant(data):
    num_socs, num_steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 16))
    run = st.tuples(st.sampled_from([30.0, 30.5, 33.0, 35.0, 40.0]), st.integers(1, 12))
    columns = []
    for _ in range(num_socs):
        runs = [*data.draw(st.lists(run, min_size=1, max_size=8)), (30.0, num_steps)]
        columns.append([value for value, times in runs for _ in range(times)][:num_steps])
    history = list(zip(*columns, strict=True))
    rig = Rig(num_socs, stuck_after_s=20.0)
    # Behind fans that cool, temperatures may fall.
    rig.wants = FAILSAFE_RPM
    for now, row in enumerate(history):
        accepted = [value is not None for value in rig.step(*row).temperatures_c.values()]
        assert accepted == expected_accepted(history[: now + 1], 4)


@pytest.mark.parametrize(("rpm", "away"), [(0.7, range(6, 12)), (0.8, range(0))])
def test_a_soc_that_falls_while_the_fans_are_slow_is_left_out_for_as_long_as_it_fell(rpm, away):
    rig = Rig(3)
    rig.wants = rpm * FAILSAFE_RPM
    rig.step(40.0, 40.0, 40.0)
    shown = [rig.step(40.0 - 0.5 * min(n, 7), 40.0, 40.0 + n % 2).temperatures_c for n in range(16)]
    assert [n for n, each in enumerate(shown) if each[0] is None] == [*away]


# ------------------------------------------------------------------------------------------- sources and silence
def test_the_failsafe_speed_holds_before_the_first_temperature_and_after_a_long_silence():
    rig = Rig(max_silence_s=30.0)
    assert rig.step(None, nan).failsafe and rig.fans[0].written == [FAILSAFE_RPM]
    assert rig.step(40.0).rpm == 5000.0
    # For 25 s the policy still decides, and knows.
    assert [state.rpm for state in rig.steps(5, OSError())] == [5000.0] * 5
    assert rig.observation.hottest_c is None and rig.observation.num_unknown == 2
    state = rig.step()
    assert state.failsafe and state.rpm == FAILSAFE_RPM
    back = [state.rpm for state in rig.steps(7, OSError(), 40.0)]
    assert back == [FAILSAFE_RPM] * 5 + [5000.0] * 2


def test_a_source_that_repeats_one_reading_is_silent():
    """As a web server whose sensors hang: the same time, the same temperature."""
    rig = Rig(1, max_silence_s=30.0)
    rig.sensors[0].at_s = 7.0
    assert [state.hottest_c for state in rig.steps(8)] == [30.0] * 6 + [None] * 2
    rig.sensors[0].at_s = 6.0  # it restarted
    assert rig.step().hottest_c == 30.0


@pytest.mark.parametrize("at_s", [nan, "noon"])
def test_a_source_without_a_time_does_not_repeat_itself(at_s):
    rig = Rig(1, max_silence_s=30.0)
    rig.sensors[0].at_s = at_s
    assert [state.hottest_c for state in rig.steps(12)] == [30.0] * 12


def test_constant_sensors_of_a_whole_rack_are_rejected_unless_the_socs_are_idle():
    rig = Rig(3, stuck_after_s=600.0)
    unknown = [state.num_unknown for state in rig.steps(60, after_s=60.0)]
    assert unknown == [0] * 10 + [3] * 50
    assert rig.step(30.0, 30.5, after_s=60.0).num_unknown == 0  # one that changes is enough
    idle = Rig(3, stuck_after_s=600.0)
    for at in range(60):
        for sensor in idle.sensors:
            sensor.user_load = 0.05 + at % 2 / 100
        assert idle.step(after_s=60.0).num_unknown == 0


def test_an_alert_is_said_once_and_stays_in_the_notes():
    rig = Rig()
    for hour in range(20):
        state = rig.step(30.0 + hour % 2, DENIED, after_s=1000.0)
        assert state.notes == tuple(rig.said) and "SoC 1" in rig.said[0]
    # One that flickers: within an hour one line more, and when either ends.
    for _ in range(20):
        rig.step(30.0, 30.0)
        rig.step(30.0, DENIED)
    begins, ends, *more = rig.said
    assert more == [begins, ends] and begins != ends


def test_a_log_that_fails_ends_nothing():
    def say(line):
        raise BrokenPipeError

    assert Rig(say=say).step(None, None).failsafe


# ------------------------------------------------------------------------------------------------------ policy
@pytest.mark.parametrize(
    "wants", [nan, inf, -inf, 0, 0.0, -1.0, None, "5000", ValueError("no"), True]
)
def test_a_policy_without_a_valid_speed_is_said_once(wants):
    rig = Rig()
    rig.step()
    rig.wants = wants
    assert all(state.failsafe for state in rig.steps(5))
    assert rig.fans[0].written == [5000.0] + [FAILSAFE_RPM] * 5 and len(rig.said) == 1
    rig.wants = 4000.0
    assert rig.step().rpm == 4000.0 and len(rig.said) == 2


def test_errors_whose_text_differs_every_time_are_said_once_too():
    rig = Rig()
    for at in range(10):
        rig.wants, rig.fans[0].failure = ValueError(f"at {at}"), OSError(f"at {at}")
        state = rig.step()
    assert len(rig.said) == len(state.notes) == 2 and state.num_output_errors == 10


def test_passive_cooling_keeps_its_hysteresis_if_its_high_speed_is_above_the_fans_limit():
    policy = PassiveCooling(low_rpm=3250.0, high_rpm=20000.0, hot_c=35.0, cool_c=30.0)
    rig = Rig(policy=policy)
    speeds = [rig.step(c, 20.0).rpm for c in (25.0, 34.0, 36.0, 34.0, 31.0, 29.0, 31.0)]
    assert speeds == [3250.0] * 2 + [MAX_RPM] * 3 + [3250.0] * 2


# -------------------------------------------------------------------------------------------------------- fans
def test_a_fan_that_cannot_be_set_is_tried_again_at_every_step():
    rig = Rig()
    rig.fans[0].failure = BROKEN
    states = rig.steps(3)
    assert [state.num_output_errors for state in states] == [1, 2, 3]
    assert states[-1].set_rpm == (None,) and states[-1].rpm == 5000.0
    rig.fans[0].failure = None
    state = rig.step()
    assert state.num_output_errors == 3 and rig.fans[0].written == [5000.0] and not state.notes
    assert len(rig.said) == 2


def test_the_control_ends_if_a_fan_is_not_there_in_three_successive_readings():
    rig = Rig(num_fans=2)
    missing, failing = FanNotFound("there is no nct6798 now"), FanFailure("x")
    failures = [missing, missing, None, missing, missing, failing, missing, missing, missing, None]
    states = []

    def wait(seconds):
        rig.fans[1].failure = failures[len(states)]
        return len(states) == len(failures) - 1

    wait(0.0)
    with rig.control:
        run = partial(rig.control.run, wait, states.append)
        refused(run, "fake", "there is no nct6798 now", error=FanNotFound)
    failed = [failure is not None for failure in failures[:-1]]
    assert [state.set_rpm[1] is None for state in states] == failed
    assert rig.fans[0].restored == 1 and states[-1].set_rpm[0] is not None


def test_if_a_fan_stops_the_others_turn_at_full_speed():
    rig = Rig(num_fans=3, spin_up_s=15.0)
    rig.step()
    rig.fans[1].shows = 0
    all_slow, others_fast = (5000.0,) * 3, (MAX_RPM, 5000.0, MAX_RPM)
    assert [state.set_rpm for state in rig.steps(5)] == [all_slow] * 3 + [others_fast] * 2
    assert len(rig.said) == 1
    assert rig.step().measured_rpm == (MAX_RPM, 0.0, MAX_RPM)
    rig.fans[1].shows = None  # unknown: it still counts as stopped
    assert rig.step().set_rpm == others_fast
    rig.fans[1].shows = 4000
    assert rig.step().set_rpm == all_slow and len(rig.said) == 2
    rig.fans[0].shows = rig.fans[2].shows = 0
    assert rig.steps(4)[-1].set_rpm == (MAX_RPM,) * 3


# ----------------------------------------------------------------------------------------------------- the end
def test_at_the_end_each_fan_is_restored_or_left_at_the_failsafe_speed():
    rig = Rig(num_fans=3)
    with rig.control:
        rig.step()
        rig.fans[1].restore_failure = rig.fans[2].restore_failure = rig.fans[2].failure = BROKEN
    assert [fan.restored for fan in rig.fans] == [1, 0, 0]
    assert rig.fans[1].written == [5000.0, FAILSAFE_RPM]
    assert ["9000 rpm" in line for line in rig.said] == [True] * 2
    assert rig.control.uncontrolled == ("fake",)


def test_the_fan_is_restored_whatever_ends_the_control():
    rig = Rig()

    def wait(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), rig.control as control:
        control.run(wait)
    assert rig.fans[0].restored == 1


def test_run_steps_until_wait_returns_true_whatever_the_listener_does():
    rig = Rig(period_s=7.0)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        return len(waits) == 3

    def listen(state):
        raise OSError("disk full")

    rig.control.run(wait, listen)
    assert waits == [7.0] * 3 and len(rig.fans[0].written) == 3
    assert len(rig.said) == 1 and "disk full" in rig.said[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_wait_and_the_handlers_are_restored(number):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.wait(0.0)
        sender = threading.Timer(0.1, os.kill, (os.getpid(), number))
        sender.start()
        began_s = time.monotonic()
        assert stop.wait(60.0) and time.monotonic() - began_s < 50.0
        assert stop.wait(60.0)
        sender.join()
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    waited = []

    def work():
        with StopSignals() as stop:
            waited.append(stop.wait(0.01))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)
    assert waited == [False] and signal.getsignal(signal.SIGTERM) is before


# --------------------------------------------------------------------------------------------------- bad input
def test_an_invalid_control_is_refused():
    refused_each(
        Rig,
        min_rpm=(0.0, -1.0, nan),
        failsafe_rpm=(1000.0, 15000.0),
        max_rpm=(inf, 2000.0),
        period_s=(0.0,),
        spin_up_s=(nan,),
        max_silence_s=(-1.0,),
        stuck_after_s=(inf,),
    )
    refused(partial(Rig, 0), "0 sources")
    refused(partial(Rig, output=[]), "0 fans")
    refused(partial(Rig, boards={0: 0}), "[0]", "[0, 1]")


def test_the_only_fan_that_does_not_turn_is_reported_alone():
    rig = Rig()
    rig.fans[0].shows = 0
    assert [rig.step().rpm for _ in range(10)] == [5000.0] * 10
    (line,) = rig.said
    assert "does not turn" in line and "others" not in line


def test_a_soc_that_shows_less_than_the_air_is_rejected():
    rig = Rig(3, min_ambient_c=20.0)
    assert list(rig.step(19.9, 20.0, -10.0).temperatures_c.values()) == [None, 20.0, None]


def test_while_all_are_constant_under_load_the_policy_sees_what_they_may_have_risen_by():
    rig = Rig(2, rise_c_per_s=0.1)
    seen = [rig.step(30.0, 29.0) and rig.observation.hottest_c for _ in range(4)]
    assert seen == pytest.approx([30.0, 30.5, 31.0, 31.5])
    assert rig.step(30.0, 29.5).hottest_c == rig.observation.hottest_c == 30.0
    for sensor in rig.sensors:
        sensor.user_load = 0.01
    # An idle SoC gets no hotter.
    rig.step(30.5, 29.0)
    assert [rig.step() and rig.observation.hottest_c for _ in range(3)] == [30.5] * 3
