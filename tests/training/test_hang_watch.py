"""A watch whose ticks a test gives, over threads that really stand still."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.training.hang_watch import HangLimits, HangWatch

LIMITS = HangLimits(first_s=50.0, least_s=20.0, factor=10.0, idle_s=5.0)


class Watched:
    """A watch, and what it has reported; `used_s` is the processor time of whatever works."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.used_s = 0.0
        self.watch = HangWatch(
            self.reports.append, LIMITS, processor_s=lambda clock_id: self.used_s
        )

    def pass_s(self, seconds: int, *, share: float = 0.0) -> None:
        """Let seconds pass, in which the work uses this share of a core."""
        for _ in range(seconds):
            self.used_s += share
            self.watch.look(1.0)

    def work(self, seconds: int) -> None:
        self.watch.begin("a step")
        self.pass_s(seconds, share=1.0)
        self.watch.end()


def test_work_that_stands_still_is_reported_once_with_its_stack() -> None:
    watched = Watched()
    watched.work(1)
    watched.watch.begin("reading samples")
    watched.pass_s(19)
    assert watched.reports == []
    watched.pass_s(100)
    (report,) = watched.reports
    assert "reading samples" in report and "test_work_that_stands_still" in report


@given(st.integers(0, 30), st.integers(0, 200))
def test_the_limit_is_a_multiple_of_the_longest_work(longest_s: int, worked_s: int) -> None:
    watched = Watched()
    watched.work(longest_s)
    watched.watch.begin("a step")
    watched.pass_s(worked_s)
    assert bool(watched.reports) == (worked_s >= max(LIMITS.least_s, LIMITS.factor * longest_s))


def test_the_first_work_has_longer() -> None:
    watched = Watched()
    watched.watch.begin("a step")
    watched.pass_s(49)
    assert watched.reports == []
    watched.pass_s(2)
    assert watched.reports


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_a_slow_device_that_computes_does_not_hang(share: float) -> None:
    watched = Watched()
    watched.work(1)
    watched.watch.begin("a step")
    watched.pass_s(5000, share=share)
    assert watched.reports == []
    watched.pass_s(10)
    assert watched.reports


def test_neither_waiting_for_others_nor_a_stopped_process_counts() -> None:
    watched = Watched()
    watched.work(1)
    watched.watch.begin("a step")
    with watched.watch.waiting():
        watched.pass_s(5000)
    watched.pass_s(15)
    # What passed between two ticks is not this process's: it was stopped.
    watched.watch.look(5000.0)
    assert watched.reports == []
    watched.pass_s(4)
    assert watched.reports


def test_each_thread_is_watched_and_a_thread_that_sleeps_uses_no_processor() -> None:
    reports: list[str] = []
    watch = HangWatch(reports.append, LIMITS)
    with blocked_thread(watch):
        watch.begin("a step")
        for _ in range(60):
            watch.look(1.0)
            watch.end()
            watch.begin("a step")
    (report,) = reports
    assert "another step" in report and "stand_still" in report


@contextmanager
def blocked_thread(watch: HangWatch) -> Iterator[None]:
    begun, ended = threading.Event(), threading.Event()

    def stand_still() -> None:
        watch.begin("another step")
        begun.set()
        ended.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()
