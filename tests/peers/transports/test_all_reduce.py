"""The ring's arithmetic, over links that hold as few chunks as links may."""

import functools
import threading
from queue import Queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from socflower.peers.transports import all_reduce as ring_algorithm
from socflower.peers.transports.all_reduce import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    SEND_AHEAD,
    chunk_bytes,
)
from socflower.training.exchange.buckets import sum_in_ring_order
from socflower.wire.arrays import MalformedBytes

PATIENCE_S = 30.0


class BoundedLinks:
    """Queues that hold what the contract asks for and no more, so that a circle of waiting would show."""

    def __init__(self, to_next: "Queue[bytes]", from_previous: "Queue[bytes]") -> None:
        self._to_next = to_next
        self._from_previous = from_previous
        self.num_sent = 0
        self.bytes_sent = 0

    def send(self, chunk: memoryview) -> None:
        self._to_next.put(bytes(chunk), timeout=PATIENCE_S)
        self.num_sent += 1
        self.bytes_sent += chunk.nbytes

    def receive(self, num_bytes: int) -> memoryview:
        chunk = self._from_previous.get(timeout=PATIENCE_S)
        assert len(chunk) == num_bytes
        return memoryview(chunk)


def run_ring(size: int, operation: Any) -> tuple[list[Any], list[BoundedLinks]]:
    """Call operation(rank, links) for every rank, each in a thread; return what they returned, and their links."""
    queues: list[Queue[bytes]] = [Queue(SEND_AHEAD) for _ in range(size)]
    links = [BoundedLinks(queues[(rank + 1) % size], queues[rank]) for rank in range(size)]
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def member(rank: int) -> None:
        try:
            results[rank] = operation(rank, links[rank])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert all(queue.empty() for queue in queues)
    return results, links


def reduced(buffers: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], list[BoundedLinks]]:
    copies = [buffer.copy() for buffer in buffers]
    _, links = run_ring(
        len(buffers),
        lambda rank, link: ring_algorithm.all_reduce(copies[rank], rank, len(buffers), link),
    )
    return copies, links


def in_ring_order(buffers: list[NDArray[Any]]) -> NDArray[Any]:
    """The specification: part p is summed from rank p on, around the ring."""
    size, length = len(buffers), len(buffers[0])
    bounds = [length * part // size for part in range(size + 1)]
    parts = []
    for part in range(size):
        terms = [
            buffers[(part + turn) % size][bounds[part] : bounds[part + 1]] for turn in range(size)
        ]
        parts.append(functools.reduce(np.add, terms))
    return np.concatenate(parts)


@pytest.mark.parametrize("size", range(1, 8))
def test_every_length_up_to_forty_has_the_bits_of_the_specification(size: int) -> None:
    rng = np.random.default_rng(size)
    for length in range(41):
        buffers = [rng.normal(size=length).astype(np.float32) for _ in range(size)]
        sums, _ = reduced(buffers)
        for copy in sums:
            assert copy.tobytes() == in_ring_order(buffers).tobytes()


@settings(max_examples=30)
@given(
    size=st.integers(2, 5),
    length=st.integers(1, 600_000),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.float32, np.float64, np.float16, np.int32]),
)
def test_sums_are_numpys_and_alike_on_all_ranks(
    size: int, length: int, seed: int, dtype: type
) -> None:
    rng = np.random.default_rng(seed)
    buffers = [(rng.normal(size=length) * 100).astype(dtype) for _ in range(size)]
    sums, _ = reduced(buffers)
    assert len({copy.tobytes() for copy in sums}) == 1
    assert sums[0].tobytes() == in_ring_order(buffers).tobytes()
    tolerance = {np.float32: 1e-6, np.float64: 1e-14, np.float16: 5e-3, np.int32: 0}[dtype]
    exact = np.sum(np.stack(buffers).astype(np.float64), axis=0)
    magnitude = np.sum(np.abs(np.stack(buffers).astype(np.float64)), axis=0)
    assert np.all(np.abs(sums[0] - exact) <= tolerance * magnitude)


def test_a_member_sends_the_least_possible_in_chunks_within_the_limit() -> None:
    size, length = 4, 4_000_000
    _, links = reduced([np.ones(length, np.float32) for _ in range(size)])
    assert {link.bytes_sent for link in links} == {2 * (size - 1) * length * 4 // size}
    assert {link.num_sent for link in links} == {
        2 * (size - 1) * 4
    }  # parts of 4 MB in chunks of 1 MiB


@given(part_bytes=st.integers(0, 10**9))
def test_chunks_keep_their_limits_and_alignment(part_bytes: int) -> None:
    assert MIN_CHUNK_BYTES <= chunk_bytes(part_bytes) <= MAX_CHUNK_BYTES
    assert chunk_bytes(part_bytes) % 8 == 0


@settings(max_examples=20)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 5, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, 3_000_000]),
        min_size=1,
        max_size=5,
    )
)
def test_everybody_gathers_everything(lengths: list[int]) -> None:
    payloads = [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
    gathered, _ = run_ring(
        len(payloads),
        lambda rank, link: ring_algorithm.all_gather(payloads[rank], rank, len(payloads), link),
    )
    assert all(each == payloads for each in gathered)


@pytest.mark.parametrize("length", [0, 1, MAX_CHUNK_BYTES, 5_000_001])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_broadcast_reaches_everybody_from_every_source(size: int, length: int) -> None:
    payload = np.random.default_rng(length).bytes(length)
    for source in range(size):
        received, _ = run_ring(
            size,
            lambda rank, link, source=source: ring_algorithm.broadcast(
                payload if rank == source else None, source, rank, size, link
            ),
        )
        assert received == [payload] * size


@given(size=st.integers(1, 7), length=st.integers(0, 40), seed=st.integers(0, 99))
def test_one_process_can_sum_as_a_ring_does(size: int, length: int, seed: int) -> None:
    buffers = list(np.random.default_rng(seed).standard_normal((size, length)).astype(np.float32))
    assert np.array_equal(sum_in_ring_order(buffers), in_ring_order(buffers))


@pytest.mark.parametrize("length", [-1, 1 << 40, 1 << 62])
def test_a_length_that_no_payload_has_is_refused_before_anything_is_allocated(length: int) -> None:
    to_next, arriving = Queue[bytes](), Queue[bytes]()
    links = BoundedLinks(to_next, arriving)
    arriving.put(np.int64(length).tobytes())
    with pytest.raises(
        MalformedBytes, match=rf"^a payload of {length} bytes, where {4 << 30} are the limit$"
    ):
        ring_algorithm.broadcast(None, 1, 0, 2, links)
    # Two members sum lengths in two parts: the sum of the first's comes back from the other.
    own = np.int64(0).tobytes()
    for lengths in (own, np.int64(length).tobytes()):
        arriving.put(lengths)
    with pytest.raises(MalformedBytes, match=r"^a payload of"):
        ring_algorithm.all_gather(b"", 0, 2, links)
