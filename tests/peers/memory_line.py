"""Two channels joined in memory by a line that may lag, and that breaks after so many frames."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from socflower.peers.resumable_stream import (
    CREDIT,
    CREDIT_HEADER,
    PART,
    PART_HEADER,
    TRANSFER,
    Stream,
)


def part_frame(
    number: int,
    head: bytes = b"",
    body: bytes = b"",
    *,
    index: int = 0,
    num_bytes: int | None = None,
) -> bytes:
    """Return a part of a message, `num_bytes` of which are announced."""
    announced = len(body) if num_bytes is None else num_bytes
    return PART_HEADER.pack(PART, number, index, len(head), announced) + head + body


def credit_frame(received: int, used: int, *transfers: tuple[int, float]) -> bytes:
    """Return a credit with these transfers: bytes and seconds."""
    reports = b"".join(TRANSFER.pack(*transfer) for transfer in transfers)
    return CREDIT_HEADER.pack(CREDIT, received, used) + reports


class MemoryLine:
    """Joins `near` and `far` until `close`; the i-th stream breaks after `breaks[i]` frames, the last one never."""

    def __init__(
        self,
        near: Stream[Any],
        far: Stream[Any],
        *,
        breaks: Sequence[int] = (),
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._near, self._far, self._breaks, self._lag_s = near, far, list(breaks), lag_s
        self.num_streams = 0
        self.failures: list[Exception] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._near.detach()
        self._far.detach()
        self._thread.join(10)
        assert not self._thread.is_alive() and not self.failures

    def _join(self) -> None:
        near, far = self._near, self._far
        while not self._closed.is_set():
            budget = [self._breaks.pop(0) if self._breaks else 1 << 60]
            has = {end: end.received_and_used() for end in (near, far)}
            ends = {}
            for end, other in ((near, far), (far, near)):
                received, used = has[other]
                credit_bytes = other.limits.credit_bytes
                ends[end] = end.attach(received=received, used=used, credit_bytes=credit_bytes)
            self.num_streams += 1
            pumps = [
                threading.Thread(
                    target=self._pump, args=(end, ends[end], other, ends[other], budget)
                )
                for end, other in ((near, far), (far, near))
            ]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()

    def _pump(
        self,
        source: Stream[Any],
        out: int,
        sink: Stream[Any],
        into: int,
        budget: list[int],
    ) -> None:
        try:
            for frame in source.frames(out):
                budget[0] -= 1
                if budget[0] < 0:
                    break
                time.sleep(self._lag_s())
                sink.on_frame(into, frame)
        except Exception as error:
            self.failures.append(error)
        source.detach(out)
        sink.detach(into)


def lags(seed: int, longest_s: float) -> Callable[[], float]:
    """Lags that are mostly none, and now and then long."""
    chance = random.Random(seed)
    return lambda: chance.random() ** 6 * longest_s
