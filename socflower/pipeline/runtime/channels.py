"""Messages between the devices of a plan that run in processes or threads of their own.

Every lane from one device to another has a thread at either end: one sends while the device computes, the other fetches
the messages that are expected, not more than two ahead of their use, so that transfers and passes overlap.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from socflower.pipeline.runtime.member import (
    CONTROL,
    END,
    LABELS,
    RING,
    SAMPLES,
    STATE,
    Expect,
    Receive,
    Reduce,
    Script,
)
from socflower.rings.all_reduce import all_reduce
from socflower.rings.collective import POLL_INTERVAL_S, PeerLost, Poll, no_poll

_Result = TypeVar("_Result")

FETCHED_AHEAD = 2
"""Messages of a lane that may lie at the receiver before it needs them."""

_OF_ANY_SIZE = frozenset((SAMPLES, LABELS, END, STATE, CONTROL))


class Channels(ABC):
    """One device's lanes to and from the others. Its owner's thread calls `send`, `receive` and `all_reduce`."""

    def __init__(self, soc: int) -> None:
        self.soc = soc
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._outgoing: dict[tuple[int, str], deque[bytearray]] = {}
        self._fetching: dict[tuple[int, str], _Fetcher] = {}
        self.sent_bytes = 0  # of all messages that have left

    @abstractmethod
    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        """Send a message; return when its memory is free. Called by one thread a lane; raises `PeerLost`."""

    @abstractmethod
    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> memoryview:
        """Return the next message of a lane, of a size that only its sender knows if None; raises `PeerLost`."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End all calls of `_transmit` and `_fetch`."""

    def send(self, target: int, lane: str, body: bytearray) -> None:
        """Send a message in the background."""
        key = (target, lane)
        with self._changed:
            if key not in self._outgoing:
                self._outgoing[key] = deque()
                threading.Thread(target=self._send_lane, args=key, name=f"pipeline-{lane}", daemon=True).start()
            self._outgoing[key].append(body)
            self._changed.notify_all()

    def receive(self, request: Receive, poll: Poll = no_poll) -> memoryview:
        """Return the next message of a lane; raises `PeerLost`, or what `poll` raises."""
        fetcher = self._fetcher(request)
        if not fetcher.expected:
            self.expect([request])
        with self._changed:
            while not fetcher.arrived:
                if self._failure is not None:
                    raise PeerLost(self._failure)
                if not self._changed.wait(POLL_INTERVAL_S):
                    poll()
            fetcher.expected -= 1
            body = fetcher.arrived.popleft()
            self._changed.notify_all()
            return body

    def has_arrived(self, request: Receive) -> bool:
        """Whether the next message of a lane, which was expected, is there."""
        return bool(self._fetcher(request).arrived)

    def expect(self, messages: Sequence[Receive]) -> None:
        """Fetch these messages as they come."""
        for request in messages:
            fetcher = self._fetcher(request)
            with self._changed:
                fetcher.wanted.append(request.num_bytes)
                fetcher.expected += 1
                self._changed.notify_all()

    def all_reduce(self, request: Reduce, poll: Poll = no_poll) -> None:
        """Sum a buffer over devices in place, in a ring of them."""
        size, rank = len(request.devices), request.devices.index(self.soc)
        links = _RingLinks(self, request.devices[(rank + 1) % size], request.devices[rank - 1], poll)
        all_reduce(request.buffer.numpy(), rank, size, links)

    def flush(self, poll: Poll = no_poll) -> None:
        """Wait until all messages have left; raises `PeerLost`, or what `poll` raises."""
        with self._changed:
            while any(self._outgoing.values()):
                if self._failure is not None:
                    raise PeerLost(self._failure)
                if not self._changed.wait(POLL_INTERVAL_S):
                    poll()

    def close(self) -> None:
        """Leave at once; may be called twice."""
        self._fail(f"SoC {self.soc} has left the pipeline")

    def _fail(self, why: str) -> None:
        with self._changed:
            first = self._failure is None
            self._failure = self._failure or why
            self._changed.notify_all()
        if first:
            self._shut_down()

    def _fetcher(self, request: Receive) -> "_Fetcher":
        key = (request.source, request.lane)
        with self._changed:
            if key not in self._fetching:
                self._fetching[key] = _Fetcher()
                threading.Thread(target=self._fetch_lane, args=key, name=f"pipeline-{request.lane}",
                                 daemon=True).start()
            return self._fetching[key]

    def _send_lane(self, target: int, lane: str) -> None:
        waiting = self._outgoing[target, lane]

        def next_message() -> bytearray | None:
            with self._changed:
                self._changed.wait_for(lambda: self._failure or waiting)
                return None if self._failure else waiting[0]

        def send(body: bytearray) -> None:
            self._transmit(target, lane, body)
            with self._changed:
                waiting.popleft()  # only now, so that `flush` sees what is under way
                self.sent_bytes += len(body)
                self._changed.notify_all()

        self._until_lost(lambda: _each(next_message, send))

    def _fetch_lane(self, source: int, lane: str) -> None:
        fetcher = self._fetching[source, lane]

        def next_size() -> tuple[int | None] | None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._failure or (fetcher.wanted and len(fetcher.arrived) < FETCHED_AHEAD))
                return None if self._failure else (fetcher.wanted.popleft(),)

        def fetch(size: tuple[int | None]) -> None:
            body = self._fetch(source, lane, size[0])
            with self._changed:
                fetcher.arrived.append(body)
                self._changed.notify_all()

        self._until_lost(lambda: _each(next_size, fetch))

    def _until_lost(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PeerLost as lost:
            self._fail(str(lost))


class _Fetcher:
    """The messages of one lane that are wanted, and those that have come."""

    def __init__(self) -> None:
        self.wanted: deque[int | None] = deque()
        self.arrived: deque[memoryview] = deque()
        self.expected = 0  # that the owner has not taken yet


class _RingLinks:
    """The links of a ring over the lanes of a pipeline."""

    def __init__(self, channels: Channels, following: int, before: int, poll: Poll) -> None:
        self._channels, self._following, self._before, self._poll = channels, following, before, poll

    def send(self, chunk: memoryview) -> None:
        self._channels.send(self._following, RING, bytearray(chunk))

    def receive(self, num_bytes: int) -> memoryview:
        return self._channels.receive(Receive(self._before, RING, num_bytes), self._poll)


def is_of_any_size(lane: str) -> bool:
    """Whether only the sender knows the sizes of a lane's messages."""
    return lane in _OF_ANY_SIZE


def run_script(script: Script[_Result], channels: Channels, poll: Poll = no_poll) -> _Result:
    """Run one member's script to its end over its channels and return its result."""
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


_Item = TypeVar("_Item")


def _each(take: Callable[[], _Item | None], handle: Callable[[_Item], object]) -> None:
    while (item := take()) is not None:
        handle(item)


class QueueChannels(Channels):
    """Lanes among threads of one process: the reference for other transports."""

    def __init__(
        self, soc: int, lanes: dict[tuple[int, int, str], deque[bytearray]], changed: threading.Condition,
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

    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> memoryview:
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
