"""A ring over two links, to the next member and from the one before: one thread runs its operations, in order."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from socflower.rings import all_reduce as ring_algorithm
from socflower.rings.collective import POLL_INTERVAL_S, Collective, PeerLost, Poll, never

_Result = TypeVar("_Result")


class ClosableLinks(ring_algorithm.Links, Protocol):
    """Links whose `send` and `receive` raise `PeerLost` once they were closed or a neighbour is gone."""

    def close(self, in_peace: bool) -> None:
        """End them at once; may be called twice and from another thread.

        In peace, all that was sent still arrives, and a neighbour misses this member only where it needs it again.
        Otherwise both neighbours see them broken.
        """
        ...


class LinkedRing(Collective):
    """A member's end of a ring; the thread that owns it begins operations, another one carries them out."""

    def __init__(self, links: ClosableLinks, rank: int, size: int, transport: str) -> None:
        self.rank = rank
        self.size = size
        self.transport = transport
        self._links = links
        self._works: SimpleQueue[_Operation[object] | None] = SimpleQueue()
        self._newest: _Operation[object] | None = None
        self._closed = False
        self._failed: PeerLost | None = None
        if size > 1:
            threading.Thread(target=self._run, name=f"ring-{transport}", daemon=True).start()

    def all_reduce(self, buffer: Tensor) -> "_Operation[None]":
        """Begin to sum a buffer over all members, in place."""
        array = buffer.detach().numpy()
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError("a ring sums contiguous buffers of one dimension")
        return self._begin(lambda: ring_algorithm.all_reduce(array, self.rank, self.size, self._links))

    def all_gather(self, payload: bytes, poll: Poll = never) -> list[bytes]:
        """Return every member's payload, by rank."""
        return self._begin(lambda: ring_algorithm.all_gather(payload, self.rank, self.size, self._links)).result(poll)

    def broadcast(self, payload: bytes | None, source: int, poll: Poll = never) -> bytes:
        """Return the payload of rank `source`."""
        return self._begin(lambda: ring_algorithm.broadcast(
            payload, source, self.rank, self.size, self._links)).result(poll)

    def close(self) -> None:
        """Leave at once: what is under way here ends with `PeerLost`; what has ended here ends at the neighbours."""
        self._closed = True
        self._links.close(in_peace=self._newest is None or self._newest.has_succeeded())
        self._works.put(None)

    def _begin(self, operation: Callable[[], _Result]) -> "_Operation[_Result]":
        if self._closed:
            raise PeerLost("the ring has been left")
        work = _Operation(operation)
        if self.size == 1:
            work.run(None)
        else:
            self._newest = work  # type: ignore[assignment]
            self._works.put(self._newest)
        return work

    def _run(self) -> None:
        while True:
            work = self._works.get()
            if work is None:
                break
            # Neighbours count messages: after one failure nothing that follows could be told apart.
            self._failed = work.run(self._failed)
            if self._failed:
                self._links.close(in_peace=False)
        while not self._works.empty():
            work = self._works.get()
            if work is not None:
                work.run(PeerLost("the ring has been left"))


class _Operation(Generic[_Result]):
    def __init__(self, operation: Callable[[], _Result]) -> None:
        self._operation = operation
        self._done = threading.Event()
        self._result: _Result
        self._failure: BaseException | None = None

    def run(self, failed: PeerLost | None) -> PeerLost | None:
        """Carry it out, unless the ring has failed; return why it did."""
        try:
            if failed:
                raise PeerLost(str(failed))
            self._result = self._operation()
        except BaseException as failure:
            self._failure = failure
            return failure if isinstance(failure, PeerLost) else PeerLost(f"an operation failed: {failure}")
        finally:
            self._done.set()
        return None

    def has_succeeded(self) -> bool:
        """Whether it has ended, and well; then those before it have, too."""
        return self._done.is_set() and self._failure is None

    def wait(self, poll: Poll = never) -> None:
        """Return when it is done; raise `PeerLost`, or what `poll` raises."""
        while not self._done.wait(POLL_INTERVAL_S):
            poll()
        if self._failure is not None:
            raise self._failure

    def result(self, poll: Poll) -> _Result:
        """Wait for it and return what it came to."""
        self.wait(poll)
        return self._result
