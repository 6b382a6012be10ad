"""The token bucket by a clock of its own: never faster than the profile, and over long transfers not slower."""

import math
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster.link_rate import RateSteps
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, constant, segments
from socflower.edgecloud.links.shaping import BURST_BYTES, TokenBucket


class Clock:
    """Seconds that pass only while someone sleeps, who wakes up late."""

    def __init__(self, late_s: list[float]) -> None:
        self.now_s = 100.0
        self._late_s, self._slept = late_s, 0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self._slept += 1
        # A real clock moves on even in a sleep that is shorter than its step.
        self.now_s = max(
            math.nextafter(self.now_s, math.inf),
            self.now_s + seconds + self._late_s[self._slept % len(self._late_s)],
        )


LATE = st.lists(st.floats(0, 0.008), min_size=1, max_size=10)


@st.composite
def profiles(draw: st.DrawFn) -> BandwidthProfile:
    rates = draw(
        st.lists(st.sampled_from([0.0, 1e5, 1e6]) | st.floats(2e4, 8e6), min_size=1, max_size=5)
    )
    parts = [
        (draw(st.floats(0.05, 2.0)), rate, 0.0) for rate in [*rates, draw(st.floats(1e5, 8e6))]
    ]
    return segments(parts, repeats=draw(st.booleans()))


@settings(max_examples=80)
@given(
    profile=profiles(),
    late_s=LATE,
    sends=st.lists(
        st.tuples(st.integers(1, 40_000), st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.4])),
        min_size=1,
        max_size=40,
    ),
)
def test_in_no_span_passes_more_than_the_trace_and_a_burst(
    profile: BandwidthProfile,
    late_s: list[float],
    sends: list[tuple[int, float]],
) -> None:
    clock = Clock(late_s)
    bucket = TokenBucket(profile, "up", clock=clock, sleep=clock.sleep)
    passed: list[tuple[float, int]] = []
    for num_bytes, pause_s in sends:
        clock.now_s += pause_s
        assert bucket.wait(num_bytes)
        passed.append((clock.now_s - 100.0, num_bytes))
    for first, (begin_s, num_bytes) in enumerate(passed):
        total = 0
        for end_s, more_bytes in passed[first:]:
            total += more_bytes
            allowed = profile.bytes_between("up", begin_s, end_s) + BURST_BYTES + num_bytes
            assert total <= allowed * (1 + 1e-9) + 1
            assert (
                sum(size for when_s, size in passed if when_s <= end_s)
                <= profile.bytes_between("up", 0.0, end_s) * (1 + 1e-9) + 1
            )


@settings(max_examples=50)
@given(
    profile=profiles(),
    late_s=LATE,
    chunk=st.sampled_from([4096, 16384, 65536]),
    pause_s=st.sampled_from([0.0, 1e-4]),
)
def test_a_long_transfer_takes_what_the_trace_says(
    profile: BandwidthProfile,
    late_s: list[float],
    chunk: int,
    pause_s: float,
) -> None:
    """To 1 %, waking up late and the work between chunks notwithstanding, which is less than they take to pass."""
    clock = Clock(late_s)
    bucket = TokenBucket(
        profile, "up", clock=clock, sleep=clock.sleep, burst_bytes=BURST_BYTES + chunk
    )
    for _ in range(400):
        assert bucket.wait(chunk)
        clock.now_s += pause_s
    took_s = clock.now_s - 100.0
    assert 0.999999 * profile.passed_s("up", 0.0, 400 * chunk) <= took_s
    assert took_s <= 1.01 * profile.passed_s("up", 0.0, 400 * chunk) + max(late_s) + pause_s


def test_a_link_that_stood_idle_saves_nothing_up() -> None:
    clock = Clock([0.0])
    bucket = TokenBucket(constant(1000.0, 1.0), "up", clock=clock, sleep=clock.sleep)
    assert bucket.wait(500)
    clock.now_s += 60.0
    assert bucket.wait(500)
    assert clock.now_s == pytest.approx(161.0)


def test_an_outage_is_waited_for() -> None:
    clock = Clock([0.0])
    profile = segments([(1.0, 1000.0, 0.0), (30.0, 0.0, 0.0), (1.0, 1000.0, 0.0)])
    bucket = TokenBucket(profile, "up", clock=clock, sleep=clock.sleep)
    assert bucket.wait(1500)
    assert clock.now_s == pytest.approx(131.5)


def test_the_trace_begins_where_it_is_told_to() -> None:
    clock = Clock([0.0])
    profile = BandwidthProfile(RateSteps((0.0, 10.0), (0.0, 100.0)), RateSteps((0.0,), (1.0,)))
    assert TokenBucket(profile, "up", clock=clock, sleep=clock.sleep, start_s=95.0).wait(100)
    assert clock.now_s == pytest.approx(106.0)


def test_closing_lets_go_of_all_that_wait_on_a_dead_link() -> None:
    bucket = TokenBucket(constant(0.0, 0.0), "down")
    answers: list[bool] = []
    waiting = [
        threading.Thread(target=lambda: answers.append(bucket.wait(1)), daemon=True)
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    bucket.close()
    for thread in waiting:
        thread.join(timeout=20)
    assert answers == [False, False, False]
    assert not bucket.wait(1)


def test_threads_share_one_link() -> None:
    """By the real clock: together they are not faster than one."""
    bucket = TokenBucket(constant(1.0, 400_000.0), "down")
    began_s = time.monotonic()

    def send() -> None:
        for _ in range(10):
            assert bucket.wait(3000)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert time.monotonic() - began_s >= 120_000 / 400_000 - 0.01
