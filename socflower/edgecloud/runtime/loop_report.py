"""The report of a loop: for the caller, for comparison with the cost model, and for tests of bounds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.stream.frame_channel import Traffic, Transfer

LARGEST_TRANSFERS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A move of the cut."""

    batch: int  # the first one at the new cut
    old: int
    new: int
    seconds: float  # with the draining of the window
    gave: bool  # the front half gave layers away


@dataclass(slots=True)
class LoopReport:
    """One side's report of a span; batches that were repeated after a rollback count once."""

    first_batch: int
    num_batches: int
    losses: dict[int, float] = field(default_factory=dict)  # by batch; with several parties in turns: their mean
    staleness: dict[int, int] = field(default_factory=dict)  # by batch: newest forward − its own, when applied (F23)
    compute_s: float = 0.0  # in the half and in the codec
    wait_s: float = 0.0  # for the other side
    sent_bytes: int = 0
    received_bytes: int = 0
    num_streams: int = 0  # 1 if the link held
    num_rollbacks: int = 0
    peak_inbox_bytes: int = 0
    peak_kept_bytes: int = 0
    peak_kept_messages: int = 0
    moves: list[Move] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    split_plan: SplitPlan | None = None  # at the end, of a front half

    def add_traffic(self, traffic: Traffic) -> None:
        """Add what went through a channel."""
        self.sent_bytes += traffic.sent_bytes
        self.received_bytes += traffic.received_bytes
        self.num_streams += traffic.streams
        self.peak_inbox_bytes = max(self.peak_inbox_bytes, traffic.peak_inbox_bytes)
        self.peak_kept_bytes = max(self.peak_kept_bytes, traffic.peak_kept_bytes)
        self.peak_kept_messages = max(self.peak_kept_messages, traffic.peak_kept_messages)

    @contextmanager
    def computing(self, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
        """Count what is inside as computation."""
        began_s = clock()
        try:
            yield
        finally:
            self.compute_s += clock() - began_s

    @contextmanager
    def waiting(self, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
        """Count what is inside as waiting."""
        began_s = clock()
        try:
            yield
        finally:
            self.wait_s += clock() - began_s
