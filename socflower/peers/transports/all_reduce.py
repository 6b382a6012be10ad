"""The ring all-reduce, for any transport that can send to the next member and receive from the previous one.

A buffer is split into n parts. In the first n - 1 steps (reduce-scatter) rank r sends part r - s at step s and adds its
own values to part r - s - 1, which it receives; then it has the sum of part r + 1. In n - 1 more steps (all-gather)
the sums are passed along the ring. A member sends and receives 2 (n - 1) / n of the buffer, which is the minimum.

Part p is summed in the order of the ranks p, p + 1, ..., p - 1, independent of timing and transport, and then copied:
all members have the same bits, and all rings of one size give the same bits.

Steps are split into chunks. A chunk is sent as soon as it has been added, while the next one arrives, and some chunks
are sent ahead of those received, so that link, sum and neighbour work in parallel.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from socflower.wire.framing import LARGEST_PART_BYTES, Assembly, check_size

MIN_CHUNK_BYTES = 1 << 18
MAX_CHUNK_BYTES = LARGEST_PART_BYTES
"""Size limits of one message. Large ones cost least per byte; small ones overlap better if a part is short."""
SEND_AHEAD = 4
"""Chunks sent before the first is received. A link has to buffer this many, or all members could block in `send`."""

_CHUNKS_PER_PART = 4

_Array: TypeAlias = NDArray[Any]


class Links(Protocol):
    """The two links of a member. Chunks arrive complete, in order and exactly once."""

    def send(self, chunk: memoryview) -> None:
        """Send bytes to the next member; the buffer may be reused. Blocks while `SEND_AHEAD` or more are in transit."""
        ...

    def receive(self, num_bytes: int) -> memoryview:
        """Return the next chunk from the previous member, which must have this many bytes."""
        ...


def all_reduce(buffer: _Array, rank: int, size: int, links: Links) -> None:
    """Replace a contiguous, one-dimensional buffer by its sum over all members; every member calls it.

    Exceptions of `links` are passed on; the buffer is undefined then.
    """
    if size == 1 or not len(buffer):
        return
    bounds = [len(buffer) * part // size for part in range(size + 1)]
    parts = [buffer[bounds[part] : bounds[part + 1]] for part in range(size)]
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
            outgoing.append(parts[leaving % size][start : start + chunk])
            incoming.append((parts[arriving % size][start : start + chunk], take))
    _exchange(outgoing, incoming, chunks_per_part, links)


def all_gather(own: bytes, rank: int, size: int, links: Links) -> list[bytes]:
    """Return every member's bytes, by rank; lengths may differ. Every member calls it.

    Raises `MalformedBytes` for a length that no payload may have, as `broadcast` does.
    """
    lengths = np.zeros(size, np.int64)
    lengths[rank] = len(own)
    all_reduce(lengths, rank, size, links)
    for length in lengths:
        check_size(int(length), "a payload")
    payloads = [
        np.frombuffer(own, np.uint8) if member == rank else np.empty(length, np.uint8)
        for member, length in enumerate(lengths)
    ]
    longest = max(payload.nbytes for payload in payloads)

    def copy(part: _Array, arrived: memoryview) -> None:
        part[:] = np.frombuffer(arrived, np.uint8)

    outgoing, incoming = [], []
    for step in range(size - 1):
        for start in range(0, longest, MAX_CHUNK_BYTES):
            outgoing.append(payloads[(rank - step) % size][start : start + MAX_CHUNK_BYTES])
            incoming.append(
                (payloads[(rank - step - 1) % size][start : start + MAX_CHUNK_BYTES], copy)
            )
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
                links.send(memoryview(payload)[start : start + MAX_CHUNK_BYTES])
        return payload
    head = links.receive(8)
    if not is_last:
        links.send(head)
    arriving = Assembly(int(np.frombuffer(head, np.int64)[0]), "a payload")
    while arriving.missing_bytes:
        chunk = links.receive(min(MAX_CHUNK_BYTES, arriving.missing_bytes))
        if not is_last:
            links.send(chunk)
        arriving.add(chunk)
    return bytes(arriving.whole())


def chunk_bytes(part_bytes: int) -> int:
    """Return the chunk size for a part: several chunks per part for overlap, within limits, a multiple of 8 bytes."""
    return min(max(-(-part_bytes // _CHUNKS_PER_PART), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES) + 7 & ~7


def _exchange(
    outgoing: Sequence[_Array],
    incoming: Sequence[tuple[_Array, Callable[[_Array, memoryview], None]]],
    chunks_per_step: int,
    links: Links,
) -> None:
    """Send and receive alternately; the chunk sent at k is complete once k - `chunks_per_step` has been received.

    Sending runs ahead by no more than the links can buffer. This cannot deadlock: if all members were blocked in
    `send`, all links would be full, but the members have sent fewer chunks than that beyond those received.
    """
    ahead = min(SEND_AHEAD, chunks_per_step)
    for part in outgoing[:ahead]:
        _send(part, links)
    for position, (part, take) in enumerate(incoming):
        # A part may be shorter than others, or empty; both neighbours know its size.
        if part.nbytes:
            take(part, links.receive(part.nbytes))
        if position + ahead < len(outgoing):
            _send(outgoing[position + ahead], links)


def _send(part: _Array, links: Links) -> None:
    if part.nbytes:
        links.send(part.data.cast("B"))
