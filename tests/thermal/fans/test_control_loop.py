"""The control loop against sources, policies and fans that do anything: no fan is ever still, and the loop goes on."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans.control_loop import FanControl, FanState, StopSignals
from socflower.thermal.fans.outputs import FanFailure, FanNotFound, SimulatedFan
from socflower.thermal.fans.policies import FanObservation, FixedSpeed, PassiveCooling
from socflower.thermal.sensors.reading import Reading

MIN_RPM, FAILSAFE_RPM, MAX_RPM = 3000.0, 9000.0, 14000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Sensor:
    """A source that says what it is told: a number, None, an exception, or any other thing as its temperature."""

    clock: Clock
    says: Any = 30.0
    at_s: Any = None
    load: Any = None

    def read(self) -> Any:
        if isinstance(self.says, BaseException):
            raise self.says
        reading = AnyReading()
        reading.temperature_c = self.says
        reading.at_s = self.clock() if self.at_s is None else self.at_s
        reading.user_load = self.load
        return reading


class AnyReading:
    """`Reading` itself refuses what a broken source might make."""

    temperature_c: Any
    at_s: Any
    user_load: Any


@dataclass
class Fan:
    """Remembers what was written; may fail, and shows what it is told to, by default what was written."""

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
        return (
            (self.written[-1] if self.written else None) if self.shows == "written" else self.shows
        )

    def restore(self) -> None:
        if self.restore_failure is not None:
            raise self.restore_failure
        self.restored += 1

    def describe(self) -> str:
        return "made up"


@dataclass
class Wish:
    """A policy that wants what it is told to."""

    wants: Any = 5000.0
    asked: list[FanObservation] = field(default_factory=list)

    def rpm(self, observation: FanObservation) -> Any:
        self.asked.append(observation)
        if isinstance(self.wants, Exception):
            raise self.wants
        return self.wants


class Rig:
    """A control with all that it needs."""

    def __init__(
        self, *, num_socs: int = 2, num_fans: int = 1, policy: Any = None, **settings: Any
    ) -> None:
        self.clock = Clock()
        self.sensors = {soc: Sensor(self.clock) for soc in range(num_socs)}
        self.fans = [Fan() for _ in range(num_fans)]
        self.wish = Wish()
        self.said: list[str] = []
        self.control = FanControl(
            self.sensors,
            policy or self.wish,
            self.fans,
            **{
                "min_rpm": MIN_RPM,
                "max_rpm": MAX_RPM,
                "failsafe_rpm": FAILSAFE_RPM,
                "clock": self.clock,
                "say": self.said.append,
                **settings,
            },
        )

    def step(self, seconds: float = 5.0, **says: Any) -> FanState:
        self.clock.now_s += seconds
        for soc, value in says.items():
            self.sensors[int(soc[3:])].says = value
        return self.control.step()


def speeds() -> st.SearchStrategy[Any]:
    """Return what a policy may want, most of it no speed."""
    return st.one_of(
        st.floats(),
        st.integers(),
        st.floats(1.0, 20000.0),
        st.booleans(),
        st.none(),
        st.text(max_size=3),
        st.just(10**400),
        st.just([5000.0]),
        st.just(1 + 2j),
        st.sampled_from([ValueError("no"), KeyError(), OSError(5)]),
    )


def temperatures() -> st.SearchStrategy[Any]:
    """Return what a source may say, most of it no temperature."""
    return st.one_of(
        st.floats(-60.0, 170.0),
        st.sampled_from([30.0, 41.5, -128.0, math.nan, math.inf, -math.inf, 0.0, 85.0]),
        st.none(),
        st.just("hot"),
        st.just(10**400),
        st.just([40.0]),
        st.booleans(),
        st.sampled_from(
            [
                PermissionError(13, "Permission denied"),
                ValueError("x"),
                RecursionError(),
                StopIteration(),
            ]
        ),
    )


# ------------------------------------------------------------------------------------------------- properties


@given(st.data())
def test_whatever_sources_policy_and_fans_do_every_speed_written_is_within_the_limits_and_the_loop_goes_on(
    data: st.DataObject,
) -> None:
    num_socs, num_fans = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    rig = Rig(
        num_socs=num_socs,
        num_fans=num_fans,
        max_silence_s=data.draw(st.sampled_from([1.0, 30.0])),
        stuck_after_s=data.draw(st.sampled_from([1.0, 600.0])),
        spin_up_s=data.draw(st.sampled_from([1.0, 15.0])),
    )
    failures = st.none() | st.sampled_from(
        [OSError(5, "I/O"), ValueError("x"), AssertionError(), FanNotFound("x")]
    )
    with rig.control as control:
        for _ in range(data.draw(st.integers(1, 8))):
            rig.clock.now_s += data.draw(st.sampled_from([0.0, 1.0, 5.0, 1000.0]))
            for sensor in rig.sensors.values():
                sensor.says = data.draw(temperatures())
                sensor.at_s = data.draw(st.none() | st.floats() | st.text(max_size=1))
                sensor.load = data.draw(st.none() | st.floats() | st.text(max_size=1))
            rig.wish.wants = data.draw(speeds())
            for fan in rig.fans:
                fan.failure, fan.restore_failure = data.draw(failures), data.draw(failures)
                fan.shows = data.draw(
                    st.sampled_from(["written", 0, 0.0, None, math.nan, -5, 65535, "x", OSError(5)])
                )
            state = control.step()
            assert MIN_RPM <= state.rpm <= MAX_RPM
            for fan, rpm in zip(rig.fans, state.set_rpm, strict=True):
                assert (
                    rpm is None
                    if fan.failure
                    else rpm is not None and MIN_RPM <= rpm == fan.written[-1] <= MAX_RPM
                )
    for fan in rig.fans:
        assert all(MIN_RPM <= rpm <= MAX_RPM for rpm in fan.written)
        if fan.restore_failure is not None and fan.failure is None:
            assert fan.written[-1] == FAILSAFE_RPM


@given(wants=st.floats(0.001, 1e6), temperature_c=st.floats(-40.0, 150.0))
def test_a_healthy_policys_speed_is_written_clamped(wants: float, temperature_c: float) -> None:
    rig = Rig()
    rig.wish.wants = wants
    state = rig.step(soc0=temperature_c)
    assert (
        rig.fans[0].written == [min(max(wants, MIN_RPM), MAX_RPM)] == [state.rpm]
        and not state.failsafe
    )


@given(lie=temperatures(), truth=st.floats(-40.0, 150.0))
def test_the_hottest_is_the_hottest_of_those_that_can_be(lie: Any, truth: float) -> None:
    rig = Rig(num_socs=3)
    state = rig.step(soc0=lie, soc1=truth, soc2=None)
    possible = [value for value in (lie, truth) if type(value) is float and -40.0 <= value <= 150.0]
    assert state.hottest_c == rig.wish.asked[-1].hottest_c == max(possible)
    assert state.num_unknown == rig.wish.asked[-1].num_unknown == 3 - len(possible)


def expected_accepted(
    history: Sequence[Sequence[float]],
    now: int,
    period_s: float,
    stuck_after_s: float,
) -> list[bool]:
    """Return by the definition, over the whole history, which SoCs are accepted at step `now`."""
    num_steps = int(stuck_after_s / period_s)

    def moved(soc: int) -> bool:
        recent = [history[at][soc] for at in range(max(0, now - num_steps), now + 1)]
        return max(recent) - min(recent) >= 5.0

    def still(soc: int) -> bool:
        return (
            now >= num_steps
            and len({history[at][soc] for at in range(now - num_steps, now + 1)}) == 1
        )

    socs = range(len(history[0]))
    all_still = 10 * sum(not still(soc) for soc in socs) < len(socs)
    accepted = []
    for soc in socs:
        others = [other for other in socs if other != soc]
        witnesses = sum(moved(other) for other in others)
        accepted.append(
            not (still(soc) and (all_still or (others and 2 * witnesses >= len(others))))
        )
    return accepted


def series(num_steps: int) -> st.SearchStrategy[list[float]]:
    """Return what a SoC shows step by step: the same for a while, again and again."""
    shown = st.tuples(st.sampled_from([30.0, 30.5, 33.0, 35.0, 40.0]), st.integers(1, 12))
    return st.lists(shown, min_size=1, max_size=8).map(
        lambda runs: (
            [value for value, times in runs for _ in range(times)] + [runs[-1][0]] * num_steps
        )[:num_steps]
    )


@given(
    history=st.tuples(st.integers(1, 4), st.integers(1, 16)).flatmap(
        lambda size: st.lists(series(size[1]), min_size=size[0], max_size=size[0]).map(
            lambda columns: list(zip(*columns, strict=True))
        )
    )
)
def test_a_soc_is_not_believed_exactly_if_it_stands_still_while_half_of_the_others_move_or_all_stand_still(
    history: list[tuple[float, ...]],
) -> None:
    rig = Rig(num_socs=len(history[0]), stuck_after_s=20.0)
    for now, row in enumerate(history):
        state = rig.step(5.0, **{f"soc{soc}": value for soc, value in enumerate(row)})
        expected = expected_accepted(history, now, 5.0, 20.0)
        assert [value is not None for value in state.temperatures_c.values()] == expected


# ------------------------------------------------------------------------------------------- sources and silence


def test_before_the_first_temperature_and_after_a_long_silence_the_fans_are_at_the_failsafe_speed() -> (
    None
):
    rig = Rig(max_silence_s=30.0)
    assert rig.step(soc0=None, soc1=math.nan).failsafe and rig.fans[0].written == [FAILSAFE_RPM]
    assert rig.step(soc0=40.0).rpm == 5000.0
    for _ in range(5):
        assert (
            rig.step(5.0, soc0=OSError()).rpm == 5000.0
        )  # 25 s: the policy still decides, and knows
        assert rig.wish.asked[-1].hottest_c is None and rig.wish.asked[-1].num_unknown == 2
    state = rig.step(5.0)
    assert state.failsafe and state.rpm == FAILSAFE_RPM
    back = [rig.step(5.0, soc1=40.0) for _ in range(7)]
    assert [state.rpm for state in back] == [FAILSAFE_RPM] * 5 + [5000.0] * 2


def test_a_source_that_repeats_one_reading_has_fallen_silent() -> None:
    """As a web server whose sensors hang: the same time, the same temperature."""
    rig = Rig(num_socs=1, max_silence_s=30.0)
    rig.sensors[0].at_s = 7.0
    assert [rig.step().hottest_c for _ in range(8)] == [30.0] * 6 + [None] * 2
    rig.sensors[0].at_s = 6.0  # it was started anew
    assert rig.step().hottest_c == 30.0


@pytest.mark.parametrize("at_s", [math.nan, "noon"])
def test_a_source_without_a_time_is_not_taken_for_one_that_repeats_itself(at_s: Any) -> None:
    rig = Rig(num_socs=1, max_silence_s=30.0)
    rig.sensors[0].at_s = at_s
    assert [rig.step().hottest_c for _ in range(12)] == [30.0] * 12


def test_a_stuck_hot_sensor_does_not_run_the_fans_for_ever_and_is_believed_when_it_moves() -> None:
    rig = Rig(num_socs=3, stuck_after_s=600.0)
    for at in range(121):
        state = rig.step(soc0=80.0, soc1=30.0 + at / 20, soc2=31.0 + at / 20)
    assert state.hottest_c == 37.0 and state.temperatures_c[0] is None
    assert rig.said == ["SoC 0 stands still while others move; left out until it makes sense"]
    assert rig.step(soc0=79.5).hottest_c == 79.5
    assert rig.said[1:] == ["SoC 0 makes sense again"]


def test_sensors_that_all_stand_still_are_doubted_unless_their_socs_are_idle() -> None:
    rig = Rig(num_socs=3, stuck_after_s=600.0)
    assert [rig.step(60.0).num_unknown for _ in range(60)] == [0] * 10 + [3] * 50
    assert rig.step(60.0, soc1=30.5).num_unknown == 0  # one that moves speaks for all
    idle = Rig(num_socs=3, stuck_after_s=600.0)
    for at in range(60):
        for sensor in idle.sensors.values():
            sensor.load = 0.05 + at % 2 / 100
        assert idle.step(60.0).num_unknown == 0


def test_a_trouble_is_said_once_and_stays_in_the_notes() -> None:
    rig = Rig()
    for hour in range(20):
        state = rig.step(
            1000.0, soc0=30.0 + hour % 2, soc1=PermissionError(13, "Permission denied")
        )
        assert state.notes == (
            "SoC 1 cannot be read (PermissionError); left out until it makes sense",
        )
    assert rig.said == list(state.notes)
    for _ in range(20):  # one that flickers: within an hour one line more, and when either ends
        rig.step(soc1=30.0)
        rig.step(soc1=PermissionError())
    assert rig.said[1:] == ["SoC 1 makes sense again", rig.said[0], "SoC 1 makes sense again"]


def test_a_log_that_fails_ends_nothing() -> None:
    def say(line: str) -> None:
        raise BrokenPipeError

    rig = Rig(say=say)
    assert rig.step(soc0=None, soc1=None).failsafe


# ------------------------------------------------------------------------------------------------------ policy


@pytest.mark.parametrize(
    "wants", [math.nan, math.inf, -math.inf, 0, 0.0, -1.0, None, "5000", ValueError("no"), True]
)
def test_a_policy_that_gives_no_speed_is_said_once(wants: Any) -> None:
    rig = Rig()
    rig.step()
    rig.wish.wants = wants
    assert all(rig.step().failsafe for _ in range(5))
    assert rig.fans[0].written == [5000.0] + [FAILSAFE_RPM] * 5 and len(rig.said) == 1
    rig.wish.wants = 4000.0
    assert rig.step().rpm == 4000.0 and rig.said[1:] == ["the policy works again"]


def test_errors_whose_text_differs_every_time_are_said_once_too() -> None:
    rig = Rig()
    for at in range(10):
        rig.wish.wants = ValueError(f"at {at}")
        rig.fans[0].failure = OSError(f"at {at}")
        state = rig.step()
    assert len(rig.said) == 2 and len(state.notes) == 2 and state.num_output_errors == 10


def test_passive_cooling_keeps_its_hysteresis_where_its_high_speed_is_above_the_fans_limit() -> (
    None
):
    rig = Rig(policy=PassiveCooling(low_rpm=3250.0, high_rpm=20000.0, hot_c=35.0, cool_c=30.0))
    assert [
        rig.step(soc0=value, soc1=20.0).rpm for value in (25.0, 34.0, 36.0, 34.0, 31.0, 29.0, 31.0)
    ] == [3250.0, 3250.0, MAX_RPM, MAX_RPM, MAX_RPM, 3250.0, 3250.0]


# -------------------------------------------------------------------------------------------------------- fans


def test_a_fan_that_cannot_be_set_is_tried_again_at_every_look() -> None:
    rig = Rig()
    rig.fans[0].failure = OSError(5, "Input/output error")
    assert [(state := rig.step()).num_output_errors for _ in range(3)] == [1, 2, 3]
    assert state.set_rpm == (None,) and state.rpm == 5000.0
    rig.fans[0].failure = None
    state = rig.step()
    assert state.num_output_errors == 3 and rig.fans[0].written == [5000.0] and not state.notes
    assert len(rig.said) == 2 and rig.said[1] == "fan made up: can be set again"


def test_the_control_ends_when_a_fan_is_not_there_in_three_readings_in_succession() -> None:
    rig = Rig(num_fans=2)
    missing, failing, states = (
        FanNotFound("there is no nct6798 now"),
        FanFailure("x"),
        list[FanState](),
    )
    failures = [missing, missing, None, missing, missing, failing, missing, missing, missing, None]

    def wait(seconds: float) -> bool:
        rig.fans[1].failure = failures[len(states)]
        return len(states) == len(failures) - 1

    wait(0.0)
    with (
        pytest.raises(
            FanNotFound, match=r"^fan made up: not there in 3 readings \(there is no nct6798 now\)"
        ),
        rig.control as control,
    ):
        control.run(wait, states.append)
    assert [state.set_rpm[1] is None for state in states] == [
        failure is not None for failure in failures[:-1]
    ]
    # The others are restored; the missing one is neither restored nor set, which is said.
    assert rig.fans[0].restored == 1 and states[-1].set_rpm[0] is not None


def test_when_a_fan_stands_still_the_others_turn_at_full_speed() -> None:
    rig = Rig(num_fans=3, spin_up_s=15.0)
    rig.step()
    rig.fans[1].shows = 0
    states = [rig.step() for _ in range(5)]
    assert [state.set_rpm for state in states] == [(5000.0,) * 3] * 3 + [
        (MAX_RPM, 5000.0, MAX_RPM)
    ] * 2
    assert rig.said == [
        "fan made up: is set and does not turn; see to it; the others turn at full speed"
    ]
    rig.fans[1].shows = None  # nothing is known: that it stood still is not forgotten
    assert rig.step().set_rpm == (MAX_RPM, 5000.0, MAX_RPM)
    rig.fans[1].shows = 4000
    assert rig.step().set_rpm == (5000.0,) * 3 and rig.said[1:] == ["fan made up: turns again"]
    rig.fans[0].shows = rig.fans[2].shows = 0
    assert [rig.step().set_rpm for _ in range(4)][-1] == (MAX_RPM,) * 3


def test_the_only_fan_that_stands_still_is_reported_and_set_as_ever() -> None:
    rig = Rig()
    rig.fans[0].shows = 0
    assert [rig.step().rpm for _ in range(10)] == [5000.0] * 10
    assert rig.said == ["fan made up: is set and does not turn; see to it"]


def test_a_simulated_fan_that_stops_is_found_out() -> None:
    rig = Rig()
    fans = [SimulatedFan(MAX_RPM, clock=rig.clock), SimulatedFan(MAX_RPM, clock=rig.clock)]
    control = FanControl(
        rig.sensors,
        FixedSpeed(fixed_rpm=5000.0),
        fans,
        min_rpm=MIN_RPM,
        max_rpm=MAX_RPM,
        failsafe_rpm=FAILSAFE_RPM,
        clock=rig.clock,
        say=rig.said.append,
    )
    fans[0].fail("stopped")
    for _ in range(20):
        rig.clock.now_s += 5.0
        state = control.step()
    assert state.set_rpm == (5000.0, MAX_RPM) and state.measured_rpm == (0.0, MAX_RPM)


# ----------------------------------------------------------------------------------------------------- the end


def test_at_the_end_each_fan_is_given_back_or_left_at_the_failsafe_speed() -> None:
    rig = Rig(num_fans=3)
    with rig.control:
        rig.step()
        rig.fans[1].restore_failure = OSError(5, "Input/output error")
        rig.fans[2].restore_failure = OSError()
        rig.fans[2].failure = OSError()
    assert [fan.restored for fan in rig.fans] == [1, 0, 0]
    assert rig.fans[1].written == [5000.0, FAILSAFE_RPM]
    assert ["it is left at 9000 rpm" in line for line in rig.said] == [True, False]
    assert (
        "its control cannot be restored" in rig.said[1]
        and "it cannot be set to 9000 rpm" in rig.said[1]
    )
    assert rig.control.uncontrolled == ("made up",)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_the_fan_is_given_back_whatever_ends_the_control(error: BaseException) -> None:
    rig = Rig()

    def wait(seconds: float) -> bool:
        raise error

    with pytest.raises(type(error)), rig.control as control:
        control.run(wait)
    assert rig.fans[0].restored == 1


def test_run_steps_until_the_wait_says_so_whatever_the_listener_does() -> None:
    rig = Rig(period_s=7.0)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 3

    def listen(state: FanState) -> None:
        raise OSError("disk full")

    rig.control.run(wait, listen)
    assert waits == [7.0] * 3 and len(rig.fans[0].written) == 3
    assert rig.said == ["what was done cannot be reported (disk full)"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_wait_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.wait(0.0)
        sender = threading.Timer(0.2, lambda: os.kill(os.getpid(), number))
        sender.start()
        began_s = time.monotonic()
        assert stop.wait(60.0) and time.monotonic() - began_s < 50.0
        assert stop.wait(60.0)
        sender.join()
    assert signal.getsignal(number) is before


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    waited: list[bool] = []

    def work() -> None:
        with StopSignals() as stop:
            waited.append(stop.wait(0.01))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)
    assert waited == [False] and signal.getsignal(signal.SIGTERM) is before


# --------------------------------------------------------------------------------------------------- bad input


def made(**settings: Any) -> Callable[[], FanControl]:
    complete: dict[str, Any] = {
        "min_rpm": MIN_RPM,
        "max_rpm": MAX_RPM,
        "failsafe_rpm": FAILSAFE_RPM,
        "sources": {0: Sensor(Clock())},
        "output": Fan(),
        **settings,
    }
    return lambda: FanControl(complete.pop("sources"), Wish(), complete.pop("output"), **complete)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_rpm": 0.0}, "0 < min_rpm"),
        ({"min_rpm": -1.0}, "0 < min_rpm"),
        ({"min_rpm": math.nan}, "0 < min_rpm"),
        ({"failsafe_rpm": 1000.0}, "min_rpm <= failsafe_rpm <= max_rpm, got 3000, 1000 and 14000"),
        ({"failsafe_rpm": 15000.0}, "failsafe_rpm"),
        ({"max_rpm": math.inf}, "max_rpm"),
        ({"max_rpm": 2000.0}, "max_rpm"),
        ({"period_s": 0.0}, "period_s = 0"),
        ({"spin_up_s": math.nan}, "spin_up_s = nan"),
        ({"max_silence_s": -1.0}, "max_silence_s = -1"),
        ({"stuck_after_s": math.inf}, "stuck_after_s = inf"),
        ({"sources": {}}, "0 sources"),
        ({"output": []}, "0 fans"),
    ],
)
def test_a_control_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^fan control: .*{says}"):
        made(**settings)()


def test_a_real_reading_is_believed() -> None:
    class Real:
        def read(self) -> Reading:
            return Reading(at_s=1.0, temperature_c=41.5)

    rig = Rig()
    control = FanControl(
        {7: Real()}, rig.wish, rig.fans, min_rpm=MIN_RPM, max_rpm=MAX_RPM, failsafe_rpm=FAILSAFE_RPM
    )
    assert control.step().temperatures_c == {7: 41.5}
