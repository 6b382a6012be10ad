"""Rings among threads of one process: the reference with which the other transports are compared, bit for bit."""

from collections import deque
from threading import Condition

from socflower.peers.collective import Collective, PeerLost
from socflower.peers.transports.all_reduce import SEND_AHEAD
from socflower.peers.transports.links import LinkedRing


def in_process_rings(size: int) -> list[Collective]:
    """Return the members' ends of one ring, by rank, each to be used in its own thread."""
    # Queue r leads from rank r - 1 to rank r.
    queues = [_Queue() for _ in range(size)]
    return [
        LinkedRing(_QueueLinks(queues[(rank + 1) % size], queues[rank]), rank, size, "in-process")
        for rank in range(size)
    ]


class _Queue:
    """A bounded queue of chunks that either end can close; after a graceful close, its content can still be read."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._changed = Condition()
        self._closed = False

    def put(self, chunk: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._chunks) < SEND_AHEAD)
            if self._closed:
                raise PeerLost("the next member has left the ring")
            self._chunks.append(chunk)
            self._changed.notify_all()

    def get(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._chunks)
            if not self._chunks:
                raise PeerLost("the member before has left the ring")
            chunk = self._chunks.popleft()
            self._changed.notify_all()
            return chunk

    def close(self, graceful: bool) -> None:
        with self._changed:
            self._closed = True
            if not graceful:
                self._chunks.clear()
            self._changed.notify_all()


class _QueueLinks:
    def __init__(self, to_next: _Queue, from_previous: _Queue) -> None:
        self._to_next = to_next
        self._from_previous = from_previous

    def send(self, chunk: memoryview) -> None:
        # A copy: the neighbour may read it after this operation has ended.
        self._to_next.put(chunk.tobytes())

    def receive(self, num_bytes: int) -> memoryview:
        chunk = self._from_previous.get()
        if len(chunk) != num_bytes:
            raise PeerLost(f"the member before sent {len(chunk)} bytes where {num_bytes} belong")
        return memoryview(chunk)

    def close(self, graceful: bool) -> None:
        self._to_next.close(graceful)
        self._from_previous.close(graceful)
