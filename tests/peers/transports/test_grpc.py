"""Rings over gRPC streams: the contract, the bits of the in-process ring, and intruders on the streams."""

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from socflower.peers.collective import PeerLost
from socflower.peers.ring.member import open_ring
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.lanes import Lanes
from socflower.peers.transports.port import RingPort
from socflower.wire.secure_channel import PeerNotReady, PeerRefused
from tests.edgecloud.stream.breaking_line import BreakingLine
from tests.one_line import refused
from tests.peers import transport_contract as ring_contract
from tests.peers.certificates import Authority
from tests.peers.memory_line import credit_frame, part_frame
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


def greeting(generation: int, *ranks: int, lane: int = 0, used: int = 0) -> bytes:
    header = struct.pack("!III8sQQ", generation, lane, len(ranks), b"another!", 0, used)
    return header + struct.pack(f"!{len(ranks)}I", *ranks)


@pytest.mark.parametrize(
    ("sender", "words", "line"),
    [
        (1, greeting(1, 0, 1, 2), "belongs to another rank"),
        (2, greeting(1, 0, 1, 2), "a second stream"),
        (2, greeting(0, 0, 1, 2), "generation 0, which is over"),
        (2, greeting(1, 0, 2), "for other members"),
        (2, greeting(1, 0, 1, 2, lane=1), "lane 1"),
        (2, b"", "which is over"),
        (2, greeting(1, 0, 1, 2) + b"odd", "which is over"),
    ],
    ids=["not-the-neighbour", "second-stream", "older", "other-members", "lane", "empty", "odd"],
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
                intruder.open_stream(0, "exchange", greeting(2, 0, 1, 2))
        finally:
            intruder.close()
        assert len(lines) == 1
        assert line in lines[0]
        sums = on_all(rings, lambda ring: reduce_several(ring, (1000,)))
        assert torch.equal(sums[0][0], sums[2][0])


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (b"", "unknown kind None"),
        (b"short", "unknown kind 115"),
        (part_frame(1, body=bytes((1 << 20) + 1)), "a part of 1048577 bytes"),
        (part_frame(2, body=bytes(4)), "a part of message 2"),
        (part_frame(1, body=bytes(4), num_bytes=1 << 21), "a message of 2097152 bytes"),
        (part_frame(1, b"head", bytes(4)), "a head of 4 bytes"),
        (part_frame(1, body=bytes(4)), "4 bytes where 40 belong"),
        (credit_frame(1, 1), "a credit for 1 messages"),
        (bytes(5 << 20), None),
    ],
    ids=[
        "empty",
        "short",
        "oversized",
        "order",
        "large",
        "head",
        "length",
        "credit",
        "beyond-grpc",
    ],
)
def test_a_wrong_frame_of_the_neighbour_ends_the_ring(message: bytes, line: str | None) -> None:
    """Rank 1 is played by hand: it opens its stream as it should, and then sends something else."""
    lines: list[str] = []
    with ring_of_threads("grpc", 1, log=lines.append, num_addresses=2) as ((port,), _):
        ring = open_ring("grpc", port, [0, 1], 1, 1.0)
        with neighbour(port) as other:
            Lanes(other, "exchange", [0, 1], 1, 10.0, accepts=lambda rank, lane: True)
            work = ring.all_reduce(torch.ones(20))  # two parts of 40 bytes
            call, _ = other.open_stream(0, "exchange", greeting(1, 0, 1))
            call.attach(OneFrame(message), received=0, used=0, credit_bytes=1)  # type: ignore[arg-type]
            with pytest.raises(PeerLost):
                wait_with_timeout(work)
        ring.close()
    if line is not None:
        assert len(lines) == 1
        assert line in lines[0]


class OneFrame:
    """Stands for a stream that sends one frame."""

    is_finishing = False

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    def attach(self, **counts: Any) -> int:
        return 1

    def frames(self, connection: int) -> Iterator[bytes]:
        yield self._frame
        time.sleep(2.0)


@contextmanager
def neighbour(port: RingPort) -> Iterator[RingPort]:
    addresses = port.addresses
    other = RingPort(
        addresses[1], rank=1, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=10.0
    )
    try:
        yield other
    finally:
        other.close()


def test_a_connection_that_breaks_is_dialled_again_and_nothing_is_lost() -> None:
    """Each ring's streams go through lines that break after some bytes."""
    addresses = free_addresses(2)
    lines = [
        BreakingLine(int(address.rpartition(":")[2]), seed=rank, mean_bytes=3_000_000)
        for rank, address in enumerate(addresses)
    ]
    seen = [f"127.0.0.1:{line.port}" for line in lines]
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=seen, token=TOKEN, tls=None, heartbeat_s=10.0
        )
        for rank in range(2)
    ]
    rings = [open_ring("grpc", port, [0, 1], 1, 10.0) for port in ports]
    try:
        for _ in range(5):
            sums = on_all(rings, lambda ring: reduce_several(ring, (1_000_000,))[0])
            assert torch.equal(sums[0], sums[1])
        assert min(line.num_connections for line in lines) >= 3
    finally:
        for end in (*rings, *ports, *lines):
            end.close()


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
    """No more than a few MiB are under way to a member that does not receive."""
    addresses = free_addresses(2)
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=10.0
        )
        for rank in range(2)
    ]
    lanes = [
        Lanes(port, "exchange", [0, 1], 1, 10.0, accepts=lambda rank, lane: True) for port in ports
    ]
    written: list[int] = []

    def write() -> None:
        with suppress(PeerLost):
            for number in range(64):
                lanes[0].send(1, 0, memoryview(bytes(1 << 20)))
                written.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        time.sleep(1.5)
        assert 4 <= len(written) <= 16
        for _ in range(20):
            assert lanes[1].receive(0, 0).nbytes == 1 << 20
    finally:
        for end in lanes:
            end.close(graceful=False)
        for port in ports:
            port.close()
        writer.join()
