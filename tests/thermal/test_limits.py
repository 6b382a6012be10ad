"""Limits of heat, unreliable sources, and guards that rest: against fakes of source, clock and sleep."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
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
from tests.one_line import refused
from tests.thermal.refusals import refused_each

LIMITS = HeatLimits(resume_c=60.0, shrink_c=70.0, pause_c=80.0, min_share=0.2)
DEADLINE_S = 60.0
TEMPERATURES = st.floats(-40.0, 150.0)
PARTS = st.floats(0.0, 1.0)
FLAGS = st.none() | st.booleans()

reading = partial(Reading, at_s=0.0)


class Device:
    """A source and its clock, which only moves when somebody sleeps or works; `values` may depend on the time."""

    def __init__(self, values: Callable[[float], dict[str, Any]] | None = None, **fixed: Any):
        self.values = values or (lambda now_s: fixed)
        self.now_s, self.slept_s, self.num_reads = 100.0, 0.0, 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self) -> Reading:
        self.num_reads += 1
        return Reading(at_s=self.now_s, **self.values(self.now_s))

    def guard(self, **options: Any) -> HeatGuard:
        return HeatGuard(
            self,
            LIMITS,
            self.read(),
            timing=StepTiming(),
            sleep=self.sleep,
            clock=self.clock,
            **options,
        )


@st.composite
def all_limits(draw: st.DrawFn) -> HeatLimits:
    degrees = st.sets(st.integers(-40, 150), min_size=3, max_size=3)
    resume, shrink, pause = sorted(draw(degrees))
    return HeatLimits(
        resume_c=resume,
        shrink_c=shrink,
        pause_c=draw(st.sampled_from([shrink, pause])),
        min_share=draw(st.floats(0.01, 1.0)),
        max_user_load=draw(PARTS),
        min_battery_fraction=draw(PARTS),
        stuck_s=draw(st.floats(0.1, 100.0)),
    )


# --------------------------------------------------------------------------------------------------- limits
def test_invalid_limits_are_refused():
    refused_each(
        HeatLimits,
        resume_c=(70.0, nan),
        shrink_c=(86.0,),
        pause_c=(inf,),
        min_battery_fraction=(-0.1,),
        max_user_load=(50.0,),
        min_share=(0.0, nan),
        max_pause_s=(-1.0, inf),
        stuck_s=(0.0,),
    )


@given(limits=all_limits(), now_c=TEMPERATURES, load=PARTS)
def test_the_share_falls_linearly_and_is_multiplied_by_what_others_leave(limits, now_c, load):
    if limits.shrink_c == limits.pause_c:
        expected = 1.0 if now_c < limits.pause_c else limits.min_share
    else:
        expected = np.interp(now_c, [limits.shrink_c, limits.pause_c], [1.0, limits.min_share])
    assert limits.share(reading(temperature_c=now_c)) == pytest.approx(expected)
    used = limits.share(reading(temperature_c=now_c, user_load=load))
    assert used == pytest.approx(max(limits.min_share, expected * (1.0 - load)))
    assert limits.min_share <= used <= 1.0 == limits.share(reading())


@given(limits=all_limits(), charge=st.none() | PARTS, on_battery=FLAGS, load=st.none() | PARTS)
def test_only_a_low_charge_on_battery_or_a_users_load_refuse_a_cool_device(
    limits, charge, on_battery, load
):
    empty = on_battery is True and charge is not None and charge < limits.min_battery_fraction
    used = load is not None and load > limits.max_user_load
    state = reading(battery_fraction=charge, on_battery=on_battery, user_load=load)
    assert (limits.refusal(state, rests=False) is not None) == (empty or used)


# ------------------------------------------------------------------------------------------------ the pause
@given(limits=all_limits(), seen=st.lists(st.none() | TEMPERATURES, max_size=30))
def test_a_pause_has_hysteresis(limits, seen):
    """Against states written out: it begins at pause_c, and ends at resume_c or after an unknown time of stuck_s."""
    pause = began_s = unknown_s = None
    num_looks = 0
    for at_s, now_c in enumerate(seen):
        pause = next_pause(limits, pause, reading(temperature_c=now_c), float(at_s))
        if now_c is None:
            unknown_s = at_s if unknown_s is None else unknown_s
            ends = at_s - unknown_s >= limits.stuck_s
        else:
            unknown_s = None
            ends = now_c <= limits.resume_c
            if began_s is None and now_c >= limits.pause_c:
                began_s, num_looks = at_s, 0
            num_looks += 1
        if began_s is None or ends:
            began_s = unknown_s = None
            assert pause is None
        else:
            assert (pause.since_s, pause.num_looks) == (began_s, num_looks)


@given(
    limits=all_limits(),
    seen=st.lists(st.sampled_from([149.0, 149.5, 150.0]), min_size=1, max_size=12),
    interval_s=st.floats(0.1, 30.0),
)
def test_a_sensor_is_stuck_if_and_only_if_the_pause_changes_nothing(limits, seen, interval_s):
    pause = None
    hot_c = [max(value, limits.pause_c) for value in seen]
    for number, now_c in enumerate(hot_c):
        now_s = number * interval_s
        pause = next_pause(limits, pause, reading(temperature_c=now_c), now_s)
        constant = len(set(hot_c[: number + 1])) == 1
        assert pause.stuck(limits, now_s) == (constant and number >= 2 and now_s >= limits.stuck_s)


def test_after_a_reboot_a_pause_starts_again():
    old = Pause(since_s=5000.0, temperature_c=90.0, num_looks=7)
    pause = next_pause(LIMITS, old, reading(temperature_c=90.0), 10.0)
    assert pause == Pause(since_s=10.0, temperature_c=90.0)


@pytest.mark.parametrize(("now_c", "named"), [(None, "unknown"), (81.5, "81.5 °C")])
def test_a_refusal_names_temperature_and_limits(now_c, named):
    text = LIMITS.refusal(reading(temperature_c=now_c), rests=True)
    assert named in text and "80 °C" in text and "60 °C" in text


# ---------------------------------------------------------------------------------------------- unreliable sources
@pytest.fixture
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("flwr")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


class Calls:
    """A source whose reading is what a function returns; an exception is raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def read(self) -> Any:
        answer = self.call()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def guarded(call: Callable[[], Any], **options: Any) -> GuardedSource:
    return GuardedSource(lambda: Calls(call), **{"timeout_s": DEADLINE_S, **options})


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def forged(**values: Any) -> Reading:
    """Return a reading that was never checked."""
    made = reading()
    for key, value in values.items():
        object.__setattr__(made, key, value)
    return made


@pytest.mark.parametrize(
    "answer",
    [
        OSError("gone"),
        SystemExit(1),
        KeyboardInterrupt(),
        ConfigError("temperature_c = nan"),
        None,
        {"temperature_c": 40.0},
        forged(temperature_c=nan),
        forged(temperature_c=-128.0),
        forged(temperature_c="hot"),
        forged(user_load=3.0),
        forged(notes=None),
        forged(at_s="now"),
    ],
    ids=repr,
)
def test_a_failing_source_gives_nothing_and_is_reported_once(answer, warned):
    source = guarded(lambda: answer)
    seen = [source.read() for _ in range(3)]
    assert all(one.temperature_c is None and one.user_load is None for one in seen)
    (warning,) = warned
    assert warning.startswith("heat source Calls: ") and "\n" not in warning
    kind = type(answer).__name__ if isinstance(answer, BaseException) else "Error"
    assert kind in warning and seen[2].notes == (warning,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_without_a_text_gives_nothing_too(warned):
    assert guarded(UnprintableError, timeout_s=1.0).read().temperature_c is None
    assert len(warned) == 1


def test_a_source_that_cannot_be_made_is_tried_again(warned):
    answers = iter([ImportError("no sensors here"), ImportError("no sensors here"), None])

    def make():
        error = next(answers)
        if error:
            raise error
        return Calls(lambda: reading(temperature_c=41.0))

    source = GuardedSource(make, timeout_s=DEADLINE_S)
    assert [source.read().temperature_c for _ in range(4)] == [None, None, 41.0, 41.0]
    assert len(warned) == 1 and "ImportError: no sensors here" in warned[0]


def test_a_source_that_fails_again_is_reported_again_at_most_once_a_minute(warned):
    now_s, fails = 0.0, True
    source = guarded(
        lambda: OSError("gone") if fails else reading(temperature_c=41.0), clock=lambda: now_s
    )
    # At 90 s it still fails since 2 s, which is no news; at 92 s it fails again.
    times = ((0.0, True, 1), (1.0, False, 1), (2.0, True, 1), (90.0, True, 1), (91.0, False, 1))
    for now_s, fails, num_warned in (*times, (92.0, True, 2), (92.0, True, 2)):  # noqa: B007
        assert (source.read().temperature_c is None) == fails and len(warned) == num_warned


def test_a_source_that_hangs_is_waited_for_once_and_read_again_later(warned):
    resume = threading.Event()

    def read():
        resume.wait(DEADLINE_S)
        return reading(temperature_c=41.0)

    source = guarded(read, timeout_s=0.2)
    num_threads, began_s = threading.active_count(), time.monotonic()
    assert [source.read().temperature_c for _ in range(50)] == [None] * 50
    assert threading.active_count() <= num_threads + 1 and time.monotonic() - began_s < 9.0
    resume.set()
    deadline_s = time.monotonic() + DEADLINE_S
    while source.read().temperature_c is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert len(warned) == 1 and "0.2 s" in warned[0]


def test_a_good_reading_has_plain_types():
    answer = forged(
        temperature_c=np.float32(41.5),
        throttled=np.True_,
        user_load=np.float64(0.25),
        notes=["zone \udcff", "two\nlines"],
    )
    seen = guarded(lambda: answer).read()
    expected = reading(
        temperature_c=41.5, throttled=True, user_load=0.25, notes=("zone ?", "two lines")
    )
    assert repr(seen) == repr(expected)


# --------------------------------------------------------------------------------------------------- guards
@given(now_c=TEMPERATURES, step_s=st.floats(0.001, 100.0))
def test_the_working_part_of_the_time_is_the_share(now_c, step_s):
    device = Device(temperature_c=now_c)
    rested_s = device.guard().rest_after(step_s)
    assert rested_s == pytest.approx(device.slept_s)
    share = LIMITS.share(reading(temperature_c=now_c))
    assert step_s / (step_s + rested_s) == pytest.approx(share)


@settings(max_examples=50)
@given(
    seen=st.lists(st.none() | TEMPERATURES, min_size=1, max_size=50), step_s=st.floats(0.01, 50.0)
)
def test_rest_is_never_longer_than_the_smallest_share_requires(seen, step_s):
    temperatures_c = iter(seen * 1000)
    device = Device(lambda now_s: {"temperature_c": next(temperatures_c)})
    rested_s = device.guard().rest_after(step_s)
    assert 0.0 <= rested_s <= step_s * (1.0 / LIMITS.min_share - 1.0) * (1.0 + 1e-9)


def test_a_device_that_cools_while_it_rests_continues_earlier():
    device = Device(lambda now_s: {"temperature_c": 80.0 if now_s < 104.0 else 50.0})
    assert device.guard().rest_after(10.0) == pytest.approx(4.0)  # of 40, polled every 2


@given(pauses_s=st.lists(st.floats(0.0, 3.0), max_size=30))
def test_a_source_is_read_at_most_every_poll_interval(pauses_s):
    device = Device(temperature_c=75.0)
    guard = device.guard(poll_interval_s=2.0)
    since_s, num_reads = 0.0, 1
    for pause_s in pauses_s:
        device.work(pause_s)
        since_s += pause_s
        assert guard.share() == pytest.approx(0.6)
        if device.num_reads > num_reads:
            assert since_s >= 2.0 - 1e-9
            since_s, num_reads = 0.0, num_reads + 1
        assert since_s < 2.0 + 1e-9 and device.num_reads == num_reads


def test_foreign_steps_rest_for_the_part_that_their_threads_do_not_give():
    device = Device(temperature_c=77.5)  # a share of 0.4: 0.8 of the threads, half of the time
    guard = device.guard(thread_share=0.8)
    slept_s = []
    # The time before the first step is loading.
    for work_s in (50.0, 3.0, 3.0, 3.0):
        device.work(work_s)
        guard.step_done()
        slept_s.append(device.slept_s)
    assert slept_s == pytest.approx([0.0, 3.0, 6.0, 9.0])
    guard.take_over_pacing()
    device.work(3.0)
    guard.step_done()
    assert device.slept_s == pytest.approx(9.0)


def test_batches_are_paced_by_the_guard_and_only_by_it():
    device = Device(temperature_c=80.0)
    assert list(paced(range(5))) == [0, 1, 2, 3, 4]
    guard = device.guard()
    with guarding(guard):
        for _ in paced(range(3)):
            device.work(1.0)
            guard.step_done()  # as the hook of an optimiser does
    assert device.slept_s == pytest.approx(3 * 4.0)


def test_the_guard_belongs_to_this_thread_and_this_call():
    guard, elsewhere = Device().guard(), []
    with guarding(guard):
        assert current_guard() is guard
        other = threading.Thread(target=lambda: elsewhere.append(current_guard()))
        other.start()
        other.join(DEADLINE_S)
        with pytest.raises(ZeroDivisionError), guarding(Device().guard()):
            raise ZeroDivisionError
        assert current_guard() is guard
    assert current_guard() is None and elsewhere == [None]


@pytest.mark.parametrize("takes_over", [False, True])
def test_without_a_clock_sensor_step_times_give_the_clock(takes_over):
    """Steps of a second at first, of two seconds from then on: half the clock."""
    device = Device(temperature_c=50.0)
    guard = device.guard()

    def steps(seconds):
        if takes_over:
            for _ in guard.paced([range(4)] * 10):
                device.work(seconds)
        else:
            for _ in range(10):
                device.work(seconds)
                guard.step_done()

    steps(1.0)
    assert guard.poll().clock_factor == pytest.approx(1.0)
    steps(2.0)
    slow, report = guard.poll(), guard.report()
    assert slow.clock_factor == pytest.approx(0.5) and slow.throttled is True
    assert report.triggered and 0.0 < report.throttled_s <= 20.0


@pytest.mark.parametrize(
    ("values", "thread_share", "factor"), [({"clock_factor": 0.75}, 1.0, 0.75), ({}, 0.5, None)]
)
def test_steps_do_not_count_beside_a_clock_sensor_or_on_fewer_threads(values, thread_share, factor):
    device = Device(**values)
    guard = device.guard(thread_share=thread_share)
    for number in range(20):
        device.work(1.0 + number)
        guard.step_done()
    assert guard.poll().clock_factor == factor


# -------------------------------------------------------------------------------------------------- reports
@given(
    seen=st.lists(
        st.fixed_dictionaries(
            {
                "temperature_c": st.none() | TEMPERATURES,
                "throttled": FLAGS,
                "clock_factor": st.none() | PARTS,
                "user_load": st.none() | PARTS,
            }
        ),
        min_size=1,
        max_size=20,
    ),
    pauses_s=st.lists(st.floats(0.0, 10.0), min_size=20, max_size=20),
)
def test_a_report_covers_all_readings(seen, pauses_s):
    values = iter(seen)
    device = Device(lambda now_s: next(values))
    guard = device.guard()
    throttled_s, before = 0.0, seen[0]["throttled"]
    for state, pause_s in zip(seen[1:], pauses_s, strict=False):
        device.work(pause_s)
        guard.poll()
        if state["throttled"] is not None:
            throttled_s += pause_s * (state["throttled"] + (before is True)) / 2
        before = state["throttled"]
    report = guard.report(paused_s=3.0)
    columns = {key: [state[key] for state in seen] for key in seen[0]}
    known = {
        key: [value for value in column if value is not None] for key, column in columns.items()
    }
    assert report.temperature_c == columns["temperature_c"][-1]
    assert report.peak_c == max(known["temperature_c"], default=None)
    assert (report.user_load, report.paused_s) == (columns["user_load"][-1], 3.0)
    # Before its work a device is idle, so that its clock does not count.
    clocks = [clock for clock in columns["clock_factor"][1:] if clock is not None]
    assert report.clock_factor == (pytest.approx(np.mean(clocks)) if clocks else None)
    shares = [
        LIMITS.share(reading(temperature_c=now_c, user_load=load))
        for now_c, load in zip(columns["temperature_c"], columns["user_load"], strict=True)
    ]
    assert report.share == pytest.approx(np.mean(shares))
    expected = pytest.approx(throttled_s, abs=1e-9) if known["throttled"] else None
    assert report.throttled_s == expected
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
def test_a_slow_device_requests_a_new_balance(values, triggered):
    guard = Device(**values).guard()
    guard.poll()
    assert guard.report().triggered is triggered


def test_the_clock_of_an_idle_device_does_not_count():
    """Half speed before the work and between its steps, to save power; full speed in the steps."""
    clock = {"clock_factor": 0.5}
    device = Device(lambda now_s: {"temperature_c": 75.0, **clock})
    guard = device.guard()
    for _ in range(3):
        clock["clock_factor"] = 1.0
        device.work(3.0)
        guard.poll()
        clock["clock_factor"] = 0.5
        guard.rest_after(3.0)
    guard.final_poll()
    assert guard.report().clock_factor == 1.0
    short = Device(clock_factor=0.9).guard()
    short.final_poll()
    assert short.report().clock_factor == 0.9


def test_a_report_has_at_most_16_different_notes():
    device = Device(lambda now_s: {"notes": (f"zone {now_s:g}", "the same")})
    guard = device.guard()
    for _ in range(100):
        device.work(1.0)
        guard.poll()
    notes = guard.report(notes=("stuck",)).notes
    assert notes[:4] == ("stuck", "zone 100", "the same", "zone 101") and len(notes) == 16


def test_an_unknown_value_of_a_report_has_no_key():
    record = HeatReport(peak_c=50.0).encode()
    assert record == {"peak-c": 50.0, "share": 1.0, "paused-s": 0.0, "triggered": False}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"humour": 1.0}, "humour"),
        ({"share": 0.0}, "share = 0.0"),
        ({"share": nan}, "share = nan"),
        ({"clock-factor": 2.0}, "clock_factor = 2.0"),
    ],
)
def test_an_invalid_report_is_refused(changes, named):
    refused(partial(HeatReport.decode, {**HeatReport().encode(), **changes}), named)
    refused(partial(HeatReport.decode, {}), "paused_s", "share", "triggered")
