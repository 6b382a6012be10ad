"""The ring all-reduce over "send to the next member" and "receive from the one before", for whatever carries them.

A buffer is cut into n parts. In the first n - 1 steps (reduce-scatter) rank r passes on part r - s at step s and adds
its own numbers to part r - s - 1, which arrives; then it has the sum of part r + 1. In n - 1 more steps (all-gather)
the sums go round. A member sends and receives 2 (n - 1) / n of the buffer, the least possible.

Part p is summed in the order of the ranks p, p + 1, ..., p - 1, whatever the timing and the transport, and then copied:
every member has the same bits, and a ring has the bits of any other ring of its size.

Steps are cut into chunks. A chunk goes on as soon as it has been added, while the one behind it arrives, and some are
sent ahead of what has been received, so that the link, the sum and the neighbour work at the same time.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

MIN_CHUNK_BYTES = 1 << 18
MAX_CHUNK_BYTES = 1 << 20
"""Of one message. Large ones cost least for each byte; small ones overlap better where a part is short."""
SEND_AHEAD = 4
"""Chunks sent before the first is received. A link has to hold this many, or all members could wait for room."""

_CHUNKS_PER_PART = 4

_Array: TypeAlias = NDArray[Any]


class Links(Protocol):
    """The two links of a member. Chunks arrive whole, in order, once."""

    def send(self, chunk: memoryview) -> None:
        """Send bytes to the next member; they may change afterwards. Waits while `SEND_AHEAD` or more are under way."""
        ...

    def receive(self, num_bytes: int) -> memoryview:
        """Return the next chunk of the member before, which has to have this many bytes."""
        ...


def all_reduce(buffer: _Array, rank: int, size: int, links: Links) -> None:
    """Replace a contiguous, one-dimensional buffer by its sum over all members; every member calls it.

    Whatever `links` raises passes through and leaves the buffer in a useless state.
    """
    if size == 1 or not len(buffer):
        return
    bounds = [len(buffer) * part // size for part in range(size + 1)]
    parts = [buffer[bounds[part]:bounds[part + 1]] for part in range(size)]
    chunk = chunk_bytes(max(part.nbytes for part in parts)) // buffer.itemsize

    def add(part: _Array, arrived: memoryview) -> None:
        np.add(np.frombuffer(arrived, part.dtype), part, out=part)

    def copy(part: _Array, arrived: memoryview) -> None:
        part[:] = np.frombuffer(arrived, part.dtype)

    chunks_per_part = -(-max(len(part) for part in parts) // chunk)
    steps = [(rank - step, rank - step - 1, add) for step in range(size - 1)]
    steps += [(rank - step + 1, rank - step, copy) for step in range(size - 1)]
    outgoing, incoming = [], []
    for leaving, arriving, take in steps:
        for start in range(0, chunks_per_part * chunk, chunk):
            outgoing.append(parts[leaving % size][start:start + chunk])
            incoming.append((parts[arriving % size][start:start + chunk], take))
    _exchange(outgoing, incoming, chunks_per_part, links)


def all_gather(own: bytes, rank: int, size: int, links: Links) -> list[bytes]:
    """Return every member's bytes, by rank; lengths may differ. Every member calls it."""
    lengths = np.zeros(size, np.int64)
    lengths[rank] = len(own)
    all_reduce(lengths, rank, size, links)
    payloads = [np.frombuffer(own, np.uint8) if member == rank else np.empty(int(length), np.uint8)
                for member, length in enumerate(lengths)]
    longest = max(payload.nbytes for payload in payloads)

    def copy(part: _Array, arrived: memoryview) -> None:
        part[:] = np.frombuffer(arrived, np.uint8)

    outgoing, incoming = [], []
    for step in range(size - 1):
        for start in range(0, longest, MAX_CHUNK_BYTES):
            outgoing.append(payloads[(rank - step) % size][start:start + MAX_CHUNK_BYTES])
            incoming.append((payloads[(rank - step - 1) % size][start:start + MAX_CHUNK_BYTES], copy))
    _exchange(outgoing, incoming, -(-longest // MAX_CHUNK_BYTES), links)
    return [payload.tobytes() for payload in payloads]


def broadcast(payload: bytes | None, source: int, rank: int, size: int, links: Links) -> bytes:
    """Return the payload of rank `source`, passed along the ring chunk by chunk. Every member calls it."""
    is_last = (rank + 1) % size == source
    if rank == source:
        if payload is None:
            raise ValueError("the source of a broadcast has to give its payload")
        if size > 1:
            links.send(memoryview(np.int64(len(payload)).tobytes()))
            for start in range(0, len(payload), MAX_CHUNK_BYTES):
                links.send(memoryview(payload)[start:start + MAX_CHUNK_BYTES])
        return payload
    head = links.receive(8)
    if not is_last:
        links.send(head)
    length = int(np.frombuffer(head, np.int64)[0])
    chunks = []
    for start in range(0, length, MAX_CHUNK_BYTES):
        chunk = links.receive(min(MAX_CHUNK_BYTES, length - start))
        if not is_last:
            links.send(chunk)
        chunks.append(chunk)
    return b"".join(chunks)


def chunk_bytes(part_bytes: int) -> int:
    """Return the chunk of a part: some to a part, for the overlap, within the limits, a multiple of eight bytes."""
    return min(max(-(-part_bytes // _CHUNKS_PER_PART), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES) + 7 & ~7


def _exchange(
    outgoing: Sequence[_Array], incoming: Sequence[tuple[_Array, Callable[[_Array, memoryview], None]]],
    chunks_per_step: int, links: Links,
) -> None:
    """Send and receive in turn, where what is sent at k is complete once k - `chunks_per_step` has been received.

    Sending runs ahead by no more than the links hold. Were all members waiting for room, then all links would be full,
    yet together they have sent fewer chunks than that beyond those received: it cannot be.
    """
    ahead = min(SEND_AHEAD, chunks_per_step)
    for part in outgoing[:ahead]:
        _send(part, links)
    for position, (part, take) in enumerate(incoming):
        if part.nbytes:  # a part may be shorter than others, or empty; the neighbour knows
            take(part, links.receive(part.nbytes))
        if position + ahead < len(outgoing):
            _send(outgoing[position + ahead], links)


def _send(part: _Array, links: Links) -> None:
    if part.nbytes:
        links.send(part.data.cast("B"))
