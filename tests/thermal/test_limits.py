"""Limits of heat, sources that cannot be trusted, and guards that rest: against fakes of source, clock and sleep."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.limits import (
    HeatGuard,
    HeatLimits,
    Pause,
    current_guard,
    guarding,
    next_pause,
    paced,
)
from socflower.thermal.sensors.guarded import GuardedSource
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.step_times import StepTiming
from socflower.wire.message_keys import HeatReport

LIMITS = HeatLimits(resume_c=60.0, shrink_c=70.0, pause_c=80.0, min_share=0.2)
DEADLINE_S = 60.0


class Time:
    """A clock that only moves when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 100.0, 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds

    def work(self, seconds: float) -> None:
        self.now_s += seconds


class Source:
    """A source that says what a function of the time says."""

    def __init__(self, say: Callable[[float], dict[str, Any]], when: Time) -> None:
        self._say, self._time = say, when
        self.num_reads = 0

    def read(self) -> Reading:
        self.num_reads += 1
        return Reading(at_s=self._time.now_s, **self._say(self._time.now_s))


def reading(**values: Any) -> Reading:
    return Reading(at_s=0.0, **values)


def guard_of(say: Callable[[float], dict[str, Any]], when: Time, **changes: Any) -> HeatGuard:
    source = Source(say, when)
    return HeatGuard(
        source,
        LIMITS,
        source.read(),
        timing=StepTiming(),
        sleep=when.sleep,
        clock=when.clock,
        **changes,
    )


temperatures = st.floats(-40.0, 150.0)
parts = st.floats(0.0, 1.0)


@st.composite
def all_limits(draw: st.DrawFn) -> HeatLimits:
    resume, shrink, pause = sorted(
        draw(st.lists(st.integers(-40, 150), min_size=3, max_size=3, unique=True))
    )
    return HeatLimits(
        resume_c=resume,
        shrink_c=shrink,
        pause_c=draw(st.sampled_from([shrink, pause])),
        min_share=draw(st.floats(0.01, 1.0)),
        max_user_load=draw(parts),
        min_battery_fraction=draw(parts),
        stuck_s=draw(st.floats(0.1, 100.0)),
    )


# --------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"resume_c": 70.0}, "need resume_c < shrink_c <= pause_c"),
        ({"shrink_c": 86.0}, "need resume_c < shrink_c <= pause_c"),
        ({"resume_c": math.nan}, "need resume_c < shrink_c <= pause_c"),
        ({"pause_c": math.inf}, "between -40 and 150"),
        (
            {"min_battery_fraction": -0.1},
            "min_battery_fraction = -0.1 must be 0 or more and at most 1",
        ),
        ({"max_user_load": 50.0}, "max_user_load = 50.0 must be 0 or more and at most 1"),
        ({"min_share": 0.0}, "min_share = 0.0 must be above 0"),
        ({"min_share": math.nan}, "min_share = nan must be above 0"),
        ({"max_pause_s": -1.0}, "max_pause_s = -1.0 must be 0 or more and finite"),
        ({"max_pause_s": math.inf}, "max_pause_s = inf must be 0 or more and finite"),
        ({"stuck_s": 0.0}, "stuck_s = 0.0 must be above 0 and finite"),
    ],
)
def test_limits_that_cannot_be_are_one_line(changes, text):
    with pytest.raises(ConfigError) as caught:
        HeatLimits(**changes)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@given(limits=all_limits(), one=temperatures, other=temperatures, load=st.none() | parts)
def test_the_share_falls_with_temperature(limits, one, other, load):
    cooler, hotter = sorted((one, other))
    at = [limits.share(reading(temperature_c=value, user_load=load)) for value in (cooler, hotter)]
    assert limits.min_share <= at[1] <= at[0] <= 1.0


@given(limits=all_limits(), now_c=temperatures, load=parts)
def test_the_share_is_a_straight_line_times_what_others_leave(limits, now_c, load):
    if limits.shrink_c == limits.pause_c:
        expected = 1.0 if now_c < limits.pause_c else limits.min_share
    else:
        expected = np.interp(now_c, [limits.shrink_c, limits.pause_c], [1.0, limits.min_share])
    assert limits.share(reading(temperature_c=now_c)) == pytest.approx(expected)
    assert limits.share(reading(temperature_c=now_c, user_load=load)) == pytest.approx(
        max(limits.min_share, expected * (1.0 - load))
    )
    assert limits.share(reading()) == 1.0


@given(
    limits=all_limits(),
    charge=st.none() | parts,
    on_battery=st.none() | st.booleans(),
    load=st.none() | parts,
)
def test_only_a_low_charge_on_battery_or_a_users_load_refuse_a_cool_device(
    limits,
    charge,
    on_battery,
    load,
):
    empty = on_battery is True and charge is not None and charge < limits.min_battery_fraction
    used = load is not None and load > limits.max_user_load
    refusal = limits.refusal(
        reading(battery_fraction=charge, on_battery=on_battery, user_load=load), rests=False
    )
    assert (refusal is not None) == (empty or used)
    assert refusal is None or "\n" not in refusal


# ------------------------------------------------------------------------------------------------ the pause
@given(limits=all_limits(), seen=st.lists(st.none() | temperatures, max_size=30))
def test_a_pause_has_hysteresis(limits, seen):
    """It begins at pause_c only, and ends only at resume_c or where nothing has been known for stuck_s."""
    pause = None
    unknown_from_s = None
    for at_s, now_c in enumerate(seen):
        before, pause = pause, next_pause(limits, pause, reading(temperature_c=now_c), float(at_s))
        unknown_from_s = (
            None
            if now_c is not None or before is None
            else at_s
            if unknown_from_s is None
            else unknown_from_s
        )
        if before is None and pause is not None:
            assert now_c is not None and now_c >= limits.pause_c
        elif before is None:
            assert now_c is None or now_c < limits.pause_c
        elif pause is None:
            if now_c is None:
                assert unknown_from_s is not None and at_s - unknown_from_s >= limits.stuck_s
            else:
                assert now_c <= limits.resume_c
        else:
            assert pause.since_s == before.since_s
            if now_c is None:
                assert unknown_from_s is not None and at_s - unknown_from_s < limits.stuck_s
                assert pause.num_looks == before.num_looks
                assert "unknown temperature" in str(limits.refusal(reading(), rests=True))
            else:
                assert now_c > limits.resume_c and pause.num_looks == before.num_looks + 1


@given(
    limits=all_limits(),
    seen=st.lists(st.integers(148, 150), min_size=1, max_size=12),
    interval_s=st.floats(0.1, 30.0),
)
def test_a_sensor_is_stuck_if_and_only_if_rest_changes_nothing(
    limits,
    seen,
    interval_s,
):
    pause = None
    hot = [float(value) if value >= limits.pause_c else limits.pause_c for value in seen]
    for number, now_c in enumerate(hot):
        pause = next_pause(limits, pause, reading(temperature_c=now_c), number * interval_s)
        assert pause is not None
        same = len(set(hot[: number + 1])) == 1
        assert pause.stuck(limits, number * interval_s) == (
            same and number >= 2 and number * interval_s >= limits.stuck_s
        )


def test_after_a_reboot_a_pause_is_counted_anew():
    old = Pause(since_s=5000.0, temperature_c=90.0, num_looks=7)
    assert next_pause(LIMITS, old, reading(temperature_c=90.0), 10.0) == Pause(
        since_s=10.0, temperature_c=90.0
    )


# ----------------------------------------------------------------------------- sources that cannot be trusted
class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    handler, logger = Warnings(), logging.getLogger("flwr")
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


class Calls:
    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raising(error: BaseException) -> Callable[[], Any]:
    def read() -> Any:
        raise error

    return read


def forged(**values: Any) -> Reading:
    """A reading that was never checked."""
    made = reading()
    for key, value in values.items():
        object.__setattr__(made, key, value)
    return made


@pytest.mark.parametrize(
    "read",
    [
        raising(OSError("gone")),
        raising(PermissionError(13, "denied")),
        raising(SystemExit(1)),
        raising(KeyboardInterrupt()),
        raising(ConfigError("temperature_c = nan")),
        lambda: None,
        lambda: 40.0,
        lambda: {"temperature_c": 40.0},
        lambda: forged(temperature_c=math.nan),
        lambda: forged(temperature_c=-128.0),
        lambda: forged(temperature_c="hot"),
        lambda: forged(user_load=3.0),
        lambda: forged(notes=None),
        lambda: forged(at_s="now"),
    ],
    ids=lambda read: "",
)
def test_what_fails_is_unknown_and_said_once(read, warned):
    careful = GuardedSource(lambda: Calls(read), timeout_s=DEADLINE_S)
    seen = [careful.read() for _ in range(3)]
    assert all(one.temperature_c is None and one.user_load is None for one in seen)
    assert (
        len(warned) == 1 and warned[0].startswith("heat source Calls: ") and "\n" not in warned[0]
    )
    assert "Error" in warned[0] or "SystemExit" in warned[0] or "KeyboardInterrupt" in warned[0]
    assert seen[2].notes == (warned[0],)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_without_a_text_is_unknown_too(warned):
    assert (
        GuardedSource(lambda: Calls(raising(UnprintableError())), timeout_s=1.0)
        .read()
        .temperature_c
        is None
    )
    assert len(warned) == 1


def test_a_source_that_cannot_be_made_is_tried_again(warned):
    tries = []

    def make():
        tries.append(1)
        if len(tries) < 3:
            raise ImportError("no sensors here")
        return Calls(lambda: reading(temperature_c=41.0))

    careful = GuardedSource(make, timeout_s=DEADLINE_S)
    assert [careful.read().temperature_c for _ in range(4)] == [None, None, 41.0, 41.0]
    assert len(tries) == 3 and warned == [
        "heat source: ImportError: no sensors here; what it does not say is unknown"
    ]


def test_a_source_that_fails_again_after_it_was_well_is_warned_of_again(warned):
    """A day later the log must say so; one that comes and goes is said once a minute."""
    now_s, fails = [0.0], [True]

    def read():
        if fails[0]:
            raise OSError("gone")
        return reading(temperature_c=41.0)

    careful = GuardedSource(lambda: Calls(read), timeout_s=DEADLINE_S, clock=lambda: now_s[0])
    for now_s[0], fails[0] in ((0.0, True), (1.0, False), (2.0, True), (90.0, True), (91.0, False)):
        assert (careful.read().temperature_c is None) == fails[0]
    assert len(warned) == 1  # once a minute, and a source that still fails is no news
    now_s[0], fails[0] = 92.0, True
    careful.read(), careful.read()
    assert len(warned) == 2


def test_a_source_that_hangs_is_waited_for_once_and_heard_again_later(warned):
    goes_on, hangs = threading.Event(), threading.Event()
    hangs.set()

    def read():
        if hangs.is_set():
            goes_on.wait(DEADLINE_S)
        return reading(temperature_c=41.0)

    careful = GuardedSource(lambda: Calls(read), timeout_s=0.2)
    threads = threading.active_count()
    assert [careful.read().temperature_c for _ in range(5)] == [None] * 5
    assert threading.active_count() <= threads + 1
    hangs.clear()
    goes_on.set()
    until_s = time.monotonic() + DEADLINE_S
    while careful.read().temperature_c is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert len(warned) == 1 and "did not answer within 0.2 s" in warned[0]


def test_a_good_reading_comes_through_in_plain_types():
    careful = GuardedSource(
        lambda: Calls(
            lambda: forged(
                temperature_c=np.float32(41.5),
                throttled=np.True_,
                user_load=np.float64(0.25),
                notes=["zone \udcff", "two\nlines"],
            )
        ),
        timeout_s=DEADLINE_S,
    )
    seen = careful.read()
    assert (type(seen.temperature_c), type(seen.throttled), type(seen.user_load)) == (
        float,
        bool,
        float,
    )
    assert (
        seen.temperature_c == 41.5
        and seen.throttled is True
        and seen.notes == ("zone ?", "two lines")
    )


# --------------------------------------------------------------------------------------------------- guards
@given(now_c=temperatures, step_s=st.floats(0.001, 100.0))
def test_the_working_part_of_the_time_is_the_share(now_c, step_s):
    when = Time()
    guard = guard_of(lambda now_s: {"temperature_c": now_c}, when)
    rested_s = guard.rest_after(step_s)
    assert rested_s == pytest.approx(when.slept_s)
    assert step_s / (step_s + rested_s) == pytest.approx(LIMITS.share(reading(temperature_c=now_c)))


@settings(max_examples=50)
@given(
    seen=st.lists(st.none() | temperatures, min_size=1, max_size=50), step_s=st.floats(0.01, 50.0)
)
def test_rest_is_never_longer_than_the_smallest_share_asks_for(seen, step_s):
    when = Time()
    say = iter(seen * 1000)
    guard = guard_of(lambda now_s: {"temperature_c": next(say)}, when)
    rested_s = guard.rest_after(step_s)
    assert 0.0 <= rested_s <= step_s * (1.0 / LIMITS.min_share - 1.0) * (1.0 + 1e-9)


def test_a_device_that_cools_while_it_rests_goes_on_earlier():
    when = Time()
    guard = guard_of(lambda now_s: {"temperature_c": 80.0 if now_s < 104.0 else 50.0}, when)
    assert guard.rest_after(10.0) == pytest.approx(4.0)  # of 40, looking every 2


@given(looks=st.lists(st.floats(0.0, 3.0), max_size=30))
def test_a_source_is_read_at_most_every_poll_interval(looks):
    when = Time()
    source = Source(lambda now_s: {"temperature_c": 75.0}, when)
    guard = HeatGuard(
        source,
        LIMITS,
        source.read(),
        timing=StepTiming(),
        poll_interval_s=2.0,
        sleep=when.sleep,
        clock=when.clock,
    )
    for pause_s in looks:
        when.work(pause_s)
        assert guard.share() == pytest.approx(0.6)
    assert source.num_reads <= 1 + sum(looks) / 2.0


def test_foreign_steps_rest_for_what_their_threads_have_not_given_up_yet():
    when = Time()
    guard = guard_of(lambda now_s: {"temperature_c": 77.5}, when, thread_share=0.8)  # share 0.4
    when.work(50.0)
    guard.step_done()
    assert when.slept_s == 0.0  # what came before the first step was loading
    for number in (1, 2, 3):
        when.work(3.0)
        guard.step_done()
        assert when.slept_s == pytest.approx(
            number * 3.0
        )  # 0.4 = 0.8 of the threads half of the time
    guard.take_over_pacing()
    when.work(3.0)
    guard.step_done()
    assert when.slept_s == pytest.approx(9.0)


def test_batches_are_paced_by_the_guard_and_only_by_it():
    when = Time()
    assert list(paced(range(5))) == [0, 1, 2, 3, 4]
    guard = guard_of(lambda now_s: {"temperature_c": 80.0}, when)
    with guarding(guard):
        for _ in paced(range(3)):
            when.work(1.0)
            guard.step_done()  # as the hook of an optimiser does
    assert when.slept_s == pytest.approx(3 * 4.0)


def test_the_guard_is_of_this_thread_and_this_call():
    guard = guard_of(lambda now_s: {}, Time())
    elsewhere = []
    with guarding(guard):
        assert current_guard() is guard
        other = threading.Thread(target=lambda: elsewhere.append(current_guard()))
        other.start()
        other.join(DEADLINE_S)
        with pytest.raises(ZeroDivisionError), guarding(guard_of(lambda now_s: {}, Time())):
            raise ZeroDivisionError
        assert current_guard() is guard
    assert current_guard() is None and elsewhere == [None]


@pytest.mark.parametrize("takes_over", [False, True])
def test_where_no_sensor_tells_the_clock_steps_do(takes_over):
    """Steps of a second at first, of two seconds from then on: half the clock."""
    when = Time()
    guard = guard_of(lambda now_s: {"temperature_c": 50.0}, when)

    def steps(count, seconds):
        if takes_over:
            for _ in guard.paced([range(4)] * count):
                when.work(seconds)
        else:
            for _ in range(count):
                when.work(seconds)
                guard.step_done()

    steps(10, 1.0)
    assert guard.poll().clock_factor == pytest.approx(1.0)
    steps(10, 2.0)
    slow = guard.poll()
    assert slow.clock_factor == pytest.approx(0.5) and slow.throttled is True
    report = guard.report()
    assert report.triggered and report.throttled_s is not None and 0.0 < report.throttled_s <= 20.0


def test_a_clock_that_is_told_goes_before_steps():
    when = Time()
    guard = guard_of(lambda now_s: {"clock_factor": 0.75}, when)
    for number in range(20):
        when.work(1.0 + number)
        guard.step_done()
    assert guard.poll().clock_factor == 0.75


def test_steps_on_fewer_threads_are_not_taken_for_a_slow_clock():
    when = Time()
    guard = guard_of(lambda now_s: {}, when, thread_share=0.5)
    for number in range(20):
        when.work(1.0 + number)
        guard.step_done()
    assert guard.poll().clock_factor is None


# -------------------------------------------------------------------------------------------------- reports
@given(
    seen=st.lists(
        st.tuples(
            st.none() | temperatures,
            st.none() | st.booleans(),
            st.none() | parts,
            st.none() | parts,
            st.floats(0.0, 10.0),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_a_report_is_of_all_looks(
    seen,
):
    when = Time()
    say = iter(
        [
            {
                "temperature_c": now_c,
                "throttled": throttled,
                "clock_factor": clock,
                "user_load": load,
            }
            for now_c, throttled, clock, load, _ in seen
        ]
    )
    guard = guard_of(lambda now_s: next(say), when)
    for *_, pause_s in seen[1:]:
        when.work(pause_s)
        guard.poll()
    report = guard.report(paused_s=3.0)
    known = [now_c for now_c, *_ in seen if now_c is not None]
    assert (report.temperature_c, report.peak_c) == (seen[-1][0], max(known, default=None))
    assert (report.user_load, report.paused_s) == (seen[-1][3], 3.0)
    clocks = [
        clock for *_, clock, _, _ in seen[1:] if clock is not None
    ]  # before its work a device is idle
    assert report.clock_factor == (pytest.approx(sum(clocks) / len(clocks)) if clocks else None)
    shares = [
        LIMITS.share(reading(temperature_c=now_c, user_load=load)) for now_c, _, _, load, _ in seen
    ]
    assert report.share == pytest.approx(sum(shares) / len(shares))
    if all(throttled is None for _, throttled, *_ in seen):
        assert report.throttled_s is None
    elif all(throttled is not None for _, throttled, *_ in seen):
        flags = [float(bool(throttled)) for _, throttled, *_ in seen]
        halves = [
            pause_s * (flags[number] + flags[number + 1]) / 2
            for number, (*_, pause_s) in enumerate(seen[1:])
        ]
        assert report.throttled_s == pytest.approx(sum(halves))
    assert HeatReport.decode(report.encode()) == report


@pytest.mark.parametrize(
    ("values", "triggered"),
    [
        ({}, False),
        ({"temperature_c": 70.0, "clock_factor": 0.95, "throttled": False}, False),
        ({"throttled": True}, True),
        ({"clock_factor": 0.94}, True),
        ({"temperature_c": 70.1}, True),
        ({"user_load": 0.1}, True),
        ({"on_battery": True, "battery_fraction": 0.9}, False),
    ],
)
def test_a_slow_device_asks_for_a_new_balance(values, triggered):
    guard = guard_of(lambda now_s: values, Time())
    guard.poll()
    assert guard.report().triggered is triggered


def test_the_clock_of_an_idle_device_does_not_count():
    """Half speed before the work and between its steps, to save power; full speed in the steps."""
    when = Time()
    working = False
    guard = guard_of(
        lambda now_s: {"clock_factor": 1.0 if working else 0.5, "temperature_c": 75.0}, when
    )
    for _ in range(3):
        working = True
        when.work(3.0)
        guard.poll()
        working = False
        guard.rest_after(3.0)
    guard.final_poll()
    assert guard.report().clock_factor == 1.0
    short = guard_of(lambda now_s: {"clock_factor": 0.9}, when)
    short.final_poll()
    assert short.report().clock_factor == 0.9


def test_many_notes_are_few_lines():
    when = Time()
    number = iter(range(1000))
    guard = guard_of(lambda now_s: {"notes": (f"zone {next(number)} lies", "the same")}, when)
    for _ in range(100):
        guard.poll()
    notes = guard.report(notes=("stuck",)).notes
    assert notes[:3] == ("stuck", "zone 0 lies", "the same") and len(notes) == 16


def test_what_a_device_does_not_say_has_no_key():
    report = HeatReport(peak_c=50.0)
    assert report.encode() == {"peak-c": 50.0, "share": 1.0, "paused-s": 0.0, "triggered": False}
    assert HeatReport.decode(report.encode()) == report


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({}, r"heat record: missing \['paused_s', 'share', 'triggered'\]"),
        ({**HeatReport().encode(), "humour": 1.0}, r"unknown \['humour'\]"),
        ({**HeatReport().encode(), "share": 0.0}, "share = 0.0 must be above 0"),
        ({**HeatReport().encode(), "share": math.nan}, "share = nan must be above 0"),
        (
            {**HeatReport().encode(), "clock-factor": 2.0},
            "clock-factor = 2.0 must lie between 0 and 1",
        ),
    ],
)
def test_a_report_that_cannot_be_is_refused(record, text):
    with pytest.raises(ConfigError, match=text):
        HeatReport.decode(record)
