"""Messages between the devices of a plan that run in processes or threads of their own.

Every lane from one device to another has a thread at either end. One sends while the device computes; the other fetches
expected messages, at most three before their use. So transfers and passes overlap.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

from socflower.peers.collective import POLL_INTERVAL_S, PeerLost, Poll, no_poll
from socflower.peers.transports.all_reduce import all_reduce
from socflower.pipeline.runtime.messages import RING, Expect, Receive, Reduce, Script

_Result = TypeVar("_Result")
_Lane = TypeVar("_Lane")

Fetched: TypeAlias = Callable[[], memoryview]
"""Waits for a message on its way and returns it; raises `PeerLost`."""

FETCHED_AHEAD = 3
"""Messages of a lane that may be at the receiver, or on their way to it, before it needs them."""


class Channels(ABC):
    """One device's lanes to and from the others. One thread, the owner's, calls `send`, `receive` and `all_reduce`."""

    def __init__(self, soc: int) -> None:
        self.soc = soc
        self._lock = threading.Lock()
        # Notified when all messages have left or the pipeline has failed.
        self._all_left = threading.Condition(self._lock)
        self._failure: str | None = None
        self._num_leaving = 0
        self._outgoing: dict[tuple[int, str], SimpleQueue[bytearray | None]] = {}
        self._fetching: dict[tuple[int, str], _Fetcher] = {}
        # Of all messages that have left.
        self.sent_bytes = 0

    @abstractmethod
    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        """Send a message; return when its memory is free. Called by one thread a lane; raises `PeerLost`."""

    @abstractmethod
    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> Fetched:
        """Begin to fetch a lane's next message; with None for `num_bytes`, only its sender knows the size.

        Returns a function that waits for the message and returns it. Both raise `PeerLost`.
        """

    @abstractmethod
    def _shut_down(self) -> None:
        """End all calls of `_transmit` and `_fetch`."""

    def send(self, target: int, lane: str, body: bytearray) -> None:
        """Send a message in the background."""
        key = (target, lane)
        with self._lock:
            self._num_leaving += 1
            waiting = self._outgoing.get(key)
            if waiting is None:
                waiting = self._outgoing[key] = SimpleQueue()
                self._start(self._send_lane, key, waiting)
        waiting.put(body)

    def receive(self, request: Receive, poll: Poll = no_poll) -> memoryview:
        """Return the next message of a lane; raises `PeerLost`, or what `poll` raises."""
        fetcher = self._fetcher(request)
        if not fetcher.num_expected:
            self.expect([request])
        while self._failure is None or not fetcher.arrived.empty():
            try:
                body = fetcher.arrived.get(timeout=POLL_INTERVAL_S)
            except Empty:
                poll()
                continue
            if body is None:
                # The pipeline has failed.
                break
            fetcher.num_expected -= 1
            fetcher.places.release()
            return body
        assert self._failure is not None
        raise PeerLost(self._failure)

    def has_arrived(self, request: Receive) -> bool:
        """Whether the next expected message of a lane has arrived."""
        return not self._fetcher(request).arrived.empty()

    def expect(self, messages: Sequence[Receive]) -> None:
        """Fetch these messages as they come."""
        for request in messages:
            fetcher = self._fetcher(request)
            fetcher.num_expected += 1
            fetcher.wanted.put((request.num_bytes,))

    def all_reduce(self, request: Reduce, poll: Poll = no_poll) -> None:
        """Sum a buffer over devices in place, in a ring of them."""
        size, rank = len(request.devices), request.devices.index(self.soc)
        following = request.devices[(rank + 1) % size]
        links = _RingLinks(self, following, request.devices[rank - 1], poll)
        all_reduce(request.buffer.numpy(), rank, size, links)

    def flush(self, poll: Poll = no_poll) -> None:
        """Wait until all messages have left; raises `PeerLost`, or what `poll` raises."""
        while True:
            with self._lock:
                if self._failure is None and self._num_leaving:
                    self._all_left.wait(POLL_INTERVAL_S)
                if not self._num_leaving:
                    return
                if self._failure is not None:
                    raise PeerLost(self._failure)
            poll()

    def close(self) -> None:
        """Leave the pipeline; may be called twice."""
        self._fail(f"SoC {self.soc} has left the pipeline")

    def _fail(self, why: str) -> None:
        with self._lock:
            first = self._failure is None
            self._failure = self._failure or why
            self._all_left.notify_all()
            if first:
                for waiting in self._outgoing.values():
                    waiting.put(None)
                for fetcher in self._fetching.values():
                    fetcher.end()
        if first:
            self._shut_down()

    def _fetcher(self, request: Receive) -> "_Fetcher":
        key = (request.source, request.lane)
        with self._lock:
            if key not in self._fetching:
                fetcher = self._fetching[key] = _Fetcher()
                self._start(self._fetch_lane, key, fetcher)
            return self._fetching[key]

    def _start(
        self, work: Callable[[tuple[int, str], _Lane], None], key: tuple[int, str], lane: _Lane
    ) -> None:
        """Start a lane's thread; the lock is held."""

        def run() -> None:
            try:
                work(key, lane)
            except PeerLost as lost:
                self._fail(str(lost))

        if self._failure is None:
            threading.Thread(target=run, name=f"pipeline-{key[1]}", daemon=True).start()

    def _send_lane(self, key: tuple[int, str], waiting: "SimpleQueue[bytearray | None]") -> None:
        while (body := waiting.get()) is not None and self._failure is None:
            self._transmit(*key, body)
            with self._lock:
                # Counted only now: `flush` must wait for a message that is being transmitted.
                self._num_leaving -= 1
                self.sent_bytes += len(body)
                if not self._num_leaving:
                    self._all_left.notify_all()

    def _fetch_lane(self, key: tuple[int, str], fetcher: "_Fetcher") -> None:
        under_way: deque[Fetched] = deque()
        while self._failure is None:
            wanted = fetcher.next_wanted(wait=not under_way)
            while wanted is not None and self._failure is None:
                under_way.append(self._fetch(*key, *wanted))
                wanted = fetcher.next_wanted(wait=False)
            if under_way and self._failure is None:
                fetcher.arrived.put(under_way.popleft()())


class _Fetcher:
    """The wanted and the arrived messages of one lane; None in either queue is its end."""

    def __init__(self) -> None:
        self.wanted: SimpleQueue[tuple[int | None] | None] = SimpleQueue()
        self.places = threading.Semaphore(FETCHED_AHEAD)
        self.arrived: SimpleQueue[memoryview | None] = SimpleQueue()
        # Expected messages that the owner has not taken yet.
        self.num_expected = 0

    def next_wanted(self, *, wait: bool) -> tuple[int | None] | None:
        """Return the size of the next wanted message once it has a place; None at the end.

        Without `wait`, return None also if there is no message or no place now.
        """
        if not self.places.acquire(blocking=wait):
            return None
        try:
            wanted = self.wanted.get(block=wait)
        except Empty:
            wanted = None
        if wanted is None:
            self.places.release()
        return wanted

    def end(self) -> None:
        """Wake the waiting threads."""
        self.wanted.put(None)
        self.places.release()
        self.arrived.put(None)


class _RingLinks:
    """The links of a ring over the lanes of a pipeline."""

    def __init__(
        self,
        channels: Channels,
        following: int,
        before: int,
        poll: Poll,
    ) -> None:
        self._channels, self._poll = channels, poll
        self._following, self._before = following, before

    def send(self, chunk: memoryview) -> None:
        self._channels.send(self._following, RING, bytearray(chunk))

    def receive(self, num_bytes: int) -> memoryview:
        return self._channels.receive(Receive(self._before, RING, num_bytes), self._poll)


def run_script(script: Script[_Result], channels: Channels, poll: Poll = no_poll) -> _Result:
    """Run one member's script over its channels and return its result."""
    answer = None
    while True:
        try:
            request = script.send(answer)
        except StopIteration as end:
            result: _Result = end.value
            return result
        answer = None
        if isinstance(request, Receive):
            answer = channels.receive(request, poll)
        elif isinstance(request, Reduce):
            channels.all_reduce(request, poll)
        elif isinstance(request, Expect):
            channels.expect(request.messages)


class QueueChannels(Channels):
    """Lanes among threads of one process; the reference for other transports."""

    def __init__(
        self,
        soc: int,
        lanes: dict[tuple[int, int, str], deque[bytearray]],
        changed: threading.Condition,
    ) -> None:
        super().__init__(soc)
        self._lanes, self._moved, self._closed = lanes, changed, False

    @classmethod
    def of(cls, socs: Sequence[int]) -> "dict[int, QueueChannels]":
        """Return the channels of several devices."""
        lanes: dict[tuple[int, int, str], deque[bytearray]] = {}
        changed = threading.Condition()
        return {soc: cls(soc, lanes, changed) for soc in socs}

    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        with self._moved:
            self._lanes.setdefault((self.soc, target, lane), deque()).append(body)
            self._moved.notify_all()

    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> Fetched:
        return lambda: self._next(source, lane)

    def _next(self, source: int, lane: str) -> memoryview:
        key = (source, self.soc, lane)
        with self._moved:
            self._moved.wait_for(lambda: self._closed or self._lanes.get(key))
            if self._closed:
                raise PeerLost(f"SoC {self.soc} has left the pipeline")
            return memoryview(self._lanes[key].popleft())

    def _shut_down(self) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify_all()
