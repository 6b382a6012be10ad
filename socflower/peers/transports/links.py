"""Collectives whose operations a thread runs in the order in which they began; a ring over two links is one.

The links are to the next member and from the previous one.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from socflower.peers.collective import POLL_INTERVAL_S, Collective, PeerLost, Poll, no_poll
from socflower.peers.transports import all_reduce as ring_algorithm
from socflower.wire.arrays import MalformedBytes

_Result = TypeVar("_Result")


class ClosableLinks(ring_algorithm.Links, Protocol):
    """Links whose `send` and `receive` raise `PeerLost` after they were closed or a neighbour is lost."""

    def close(self, graceful: bool) -> None:
        """Close the links at once; may be called twice and from another thread.

        A graceful close still delivers all chunks that were sent, and a neighbour fails only if it needs more.
        Otherwise both neighbours fail at once.
        """
        ...


class QueuedCollective(Collective):
    """A member's end of a collective; its owner's thread begins operations, and another thread runs them."""

    def __init__(self, rank: int, size: int, transport: str) -> None:
        self.rank = rank
        self.size = size
        self.transport = transport
        self._works: SimpleQueue[_QueuedCall[object] | None] = SimpleQueue()
        self._latest: _QueuedCall[object] | None = None
        self._closed = False
        self._failed: PeerLost | None = None
        if size > 1:
            threading.Thread(target=self._run, name=f"ring-{transport}", daemon=True).start()

    def all_reduce(self, buffer: Tensor) -> "_QueuedCall[None]":
        """Begin to sum a buffer over all members, in place."""
        array = buffer.detach().numpy()
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError("a ring sums contiguous buffers of one dimension")
        return self._begin(lambda: self._sum(array))

    def all_gather(self, payload: bytes, poll: Poll = no_poll) -> list[bytes]:
        """Return every member's payload, by rank."""
        return self._begin(lambda: self._gather(payload)).result(poll)

    def broadcast(self, payload: bytes | None, source: int, poll: Poll = no_poll) -> bytes:
        """Return the payload of rank `source`."""
        return self._begin(lambda: self._spread(payload, source)).result(poll)

    def close(self) -> None:
        """Leave at once: pending operations end with `PeerLost`; completed ones complete at the neighbours too."""
        self._closed = True
        self._close_links(graceful=self._latest is None or self._latest.has_succeeded())
        self._works.put(None)

    @abstractmethod
    def _sum(self, array: NDArray[Any]) -> None:
        """Do `all_reduce`, in the thread."""

    @abstractmethod
    def _gather(self, payload: bytes) -> list[bytes]:
        """Do `all_gather`, in the thread."""

    @abstractmethod
    def _spread(self, payload: bytes | None, source: int) -> bytes:
        """Do `broadcast`, in the thread."""

    @abstractmethod
    def _close_links(self, *, graceful: bool) -> None:
        """Close what carries the bytes; see `ClosableLinks.close`."""

    def _begin(self, operation: Callable[[], _Result]) -> "_QueuedCall[_Result]":
        if self._closed:
            raise PeerLost("the ring has been left")
        work = _QueuedCall(operation)
        if self.size == 1:
            work.run(None)
        else:
            self._latest = work  # type: ignore[assignment]
            self._works.put(self._latest)
        return work

    def _run(self) -> None:
        while True:
            work = self._works.get()
            if work is None:
                break
            # Neighbours count messages, so after one failure later messages could not be assigned.
            self._failed = work.run(self._failed)
            if self._failed:
                self._close_links(graceful=False)
        while not self._works.empty():
            work = self._works.get()
            if work is not None:
                work.run(PeerLost("the ring has been left"))


class LinkedRing(QueuedCollective):
    """A member's end of a ring."""

    def __init__(self, links: ClosableLinks, rank: int, size: int, transport: str) -> None:
        self._links = links
        super().__init__(rank, size, transport)

    def _sum(self, array: NDArray[Any]) -> None:
        ring_algorithm.all_reduce(array, self.rank, self.size, self._links)

    def _gather(self, payload: bytes) -> list[bytes]:
        return ring_algorithm.all_gather(payload, self.rank, self.size, self._links)

    def _spread(self, payload: bytes | None, source: int) -> bytes:
        return ring_algorithm.broadcast(payload, source, self.rank, self.size, self._links)

    def _close_links(self, *, graceful: bool) -> None:
        self._links.close(graceful)


class _QueuedCall(Generic[_Result]):
    def __init__(self, operation: Callable[[], _Result]) -> None:
        self._operation = operation
        self._done = threading.Event()
        self._result: _Result
        self._failure: BaseException | None = None

    def run(self, failed: PeerLost | None) -> PeerLost | None:
        """Run the operation, unless the ring has failed; return the failure, if any."""
        try:
            if failed:
                raise PeerLost(str(failed))
            self._result = self._operation()
        except MalformedBytes as malformed:
            # A neighbour sent something wrong.
            self._failure = PeerLost(f"the ring carries {malformed}")
            return self._failure
        except BaseException as failure:
            self._failure = failure
            return (
                failure
                if isinstance(failure, PeerLost)
                else PeerLost(f"an operation failed: {failure}")
            )
        finally:
            self._done.set()
        return None

    def has_succeeded(self) -> bool:
        """Whether it has completed without failure; then all earlier ones have too."""
        return self._done.is_set() and self._failure is None

    def wait(self, poll: Poll = no_poll) -> None:
        """Return when it is done; raise `PeerLost`, or what `poll` raises."""
        while not self._done.wait(POLL_INTERVAL_S):
            poll()
        if self._failure is not None:
            raise self._failure

    def result(self, poll: Poll) -> _Result:
        """Wait for the operation and return its result."""
        self.wait(poll)
        return self._result
