"""Rings over gRPC streams: the contract, the bits of the in-process ring, and intruders on the streams."""

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from socflower.peers.collective import PeerLost
from socflower.peers.ring.member import open_ring
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.port import RingPort
from socflower.peers.transports.stream import OutgoingStream
from socflower.wire.secure_channel import PeerNotReady, PeerRefused, PeerUnreachable
from tests.one_line import refused
from tests.peers import transport_contract as ring_contract
from tests.peers.certificates import Authority
from tests.peers.peers import TOKEN, free_addresses
from tests.peers.transport_contract import (
    on_all,
    reduce_several,
    ring_of_threads,
    wait_with_timeout,
)


def test_operations_over_tls(tmp_path: Path) -> None:
    ring_contract.check_operations("grpc", 2, Authority(tmp_path).member("member"))


def test_the_bits_are_those_of_the_in_process_ring() -> None:
    lengths = (3, 1000, 1_500_001)
    with ring_of_threads("grpc", 4) as (_, rings):
        sums = on_all(rings, lambda ring: reduce_several(ring, lengths))
    references = on_all(in_process_rings(4), lambda ring: reduce_several(ring, lengths))
    for found, reference in zip(sums, references, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, reference, strict=True))


def test_a_member_that_computes_longer_than_the_heartbeat_is_not_lost() -> None:
    addresses = free_addresses(2)
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=1.5
        )
        for rank in range(2)
    ]
    rings = [open_ring("grpc", port, [0, 1], 1, 10.0) for port in ports]
    try:
        early = torch.ones(3_000_000)
        work = rings[0].all_reduce(early)
        time.sleep(2.5)
        late = torch.ones(3_000_000)
        wait_with_timeout(rings[1].all_reduce(late))
        wait_with_timeout(work)
        assert float(early[0]) == float(late[-1]) == 2.0
    finally:
        for end in (*rings, *ports):
            end.close()


def test_unknown_transports_are_refused_and_a_ring_of_one_is_none() -> None:
    address = free_addresses(1)
    port = RingPort(address[0], rank=0, addresses=address, token=TOKEN, tls=None, heartbeat_s=5.0)
    try:
        refused(lambda: open_ring("mpi", port, [0], 1, 5.0), "mpi", "gloo, grpc")
        assert open_ring("grpc", port, [0], 1, 5.0).transport == "in-process"
    finally:
        port.close()


# ------------------------------------------------------------------------------------------------ intruders


def opening(generation: int, *ranks: int) -> bytes:
    return struct.pack(f"!{1 + len(ranks)}I", generation, *ranks)


@pytest.mark.parametrize(
    ("sender", "words", "line"),
    [
        (1, opening(1, 0, 1, 2), "belongs to rank 2 alone"),
        (2, opening(1, 0, 1, 2), "alone, and once"),
        (2, opening(0, 0, 1, 2), "generation 0, which is over"),
        (2, opening(1, 0, 2), "for another ring"),
        (2, b"", "which is over"),
        (2, b"odd", "which is over"),
    ],
    ids=["not-the-neighbour", "second-stream", "older-generation", "other-members", "empty", "odd"],
)
def test_a_stream_that_does_not_belong_is_refused_and_the_ring_goes_on(
    sender: int, words: bytes, line: str
) -> None:
    lines: list[str] = []
    with ring_of_threads("grpc", 3, log=lines.append) as (ports, rings):
        on_all(rings, lambda ring: reduce_several(ring, (1000,)))
        intruder = RingPort(
            "127.0.0.1:0",
            rank=sender,
            addresses=ports[0].addresses,
            token=TOKEN,
            tls=None,
            heartbeat_s=10.0,
        )
        try:
            with pytest.raises(PeerRefused, match=line):
                intruder.open_stream(0, "exchange", words)
            with pytest.raises(PeerNotReady):
                intruder.open_stream(0, "exchange", opening(2, 0, 1, 2))
        finally:
            intruder.close()
        assert len(lines) == 1
        assert line in lines[0]
        sums = on_all(rings, lambda ring: reduce_several(ring, (1000,)))
        assert torch.equal(sums[0][0], sums[2][0])


def chunk(generation: int, number: int, length: int, payload: bytes) -> bytes:
    return struct.pack("!IQI", generation, number, length) + payload


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (b"short", "a message of 5 bytes"),
        (chunk(1, 0, 0, b""), "a message of 16 bytes"),
        (chunk(1, 0, (1 << 20) + 1, bytes((1 << 20) + 1)), "a message of 1048593 bytes"),
        (chunk(2, 0, 4, bytes(4)), "out of order or of a wrong length"),
        (chunk(1, 1, 4, bytes(4)), "out of order or of a wrong length"),
        (chunk(1, 0, 8, bytes(4)), "out of order or of a wrong length"),
        (chunk(1, 0, 4, bytes(4)), "4 bytes where 40 belong"),
        (bytes(5 << 20), None),
    ],
    ids=[
        "short",
        "empty",
        "oversized",
        "generation",
        "order",
        "truncated",
        "other-length",
        "beyond-grpc",
    ],
)
def test_a_wrong_chunk_of_the_neighbour_ends_the_ring(message: bytes, line: str | None) -> None:
    """Rank 1 is played by hand: it opens its stream as it should, and then sends something else."""
    lines: list[str] = []
    addresses = free_addresses(2)
    ports = [
        RingPort(
            addresses[rank],
            rank=rank,
            addresses=addresses,
            token=TOKEN,
            tls=None,
            heartbeat_s=10.0,
            log=lines.append,
        )
        for rank in range(2)
    ]
    ring = open_ring("grpc", ports[0], [0, 1], 1, 10.0)
    partner = open_ring("grpc", ports[1], [0, 1], 1, 10.0)
    try:
        stream = once_ready(lambda: intrude(partner))
        work = ring.all_reduce(torch.ones(20))  # two parts of 40 bytes
        stream.write(message)
        with pytest.raises(PeerLost):
            wait_with_timeout(work)
    finally:
        for end in (ring, partner, *ports):
            end.close()
    # The partner may still try to open its stream again, which is refused as well.
    refused = [each for each in lines if "a stream of generation 1, which is over" not in each]
    if line is not None:
        assert len(refused) == 1
        assert line in refused[0]


def intrude(partner: object) -> OutgoingStream | None:
    return partner._links._stream  # type: ignore[attr-defined]


def once_ready(find: Callable[[], OutgoingStream | None]) -> OutgoingStream:
    end_s = time.monotonic() + ring_contract.PATIENCE_S
    while (found := find()) is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return found


def test_a_neighbour_that_never_comes_is_lost() -> None:
    addresses = free_addresses(2)
    port = RingPort(
        addresses[0], rank=0, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=5.0
    )
    ring = open_ring("grpc", port, [0, 1], 1, 0.5)
    try:
        with pytest.raises(PeerLost, match="cannot be reached"):
            wait_with_timeout(ring.all_reduce(torch.ones(4)))
    finally:
        ring.close()
        port.close()


def test_what_is_sent_waits_while_nobody_reads() -> None:
    """No more than a few MiB are under way to a member that does not reduce."""
    addresses = free_addresses(2)
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=10.0
        )
        for rank in range(2)
    ]
    rings = [open_ring("grpc", port, [0, 1], 1, 10.0) for port in ports]
    try:
        stream = once_ready(lambda: intrude(rings[0]))
        written = []

        def write() -> None:
            for number in range(64):
                try:
                    stream.write(chunk(1, number, 1 << 20, bytes(1 << 20)))
                except (PeerUnreachable, PeerRefused):
                    return
                written.append(number)

        import threading

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(1.5)
        assert 4 <= len(written) <= 24
    finally:
        for end in (*rings, *ports):
            end.close()
        writer.join()
