"""What both transports have to do, over real ports; their tests call it with a transport's name."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from socflower.peers.collective import Collective, PeerLost, Work
from socflower.peers.transports.port import RingPort
from socflower.wire.secure_channel import Tls
from tests.peers.peers import TOKEN, Peer, free_addresses, opened, wait_for_peers

PATIENCE_S = 60.0


class Lost(Exception):
    """What a poll raises that has seen enough."""


@contextmanager
def ring_of_threads(
    transport: str,
    size: int,
    *,
    tls: Tls | None = None,
    generation: int = 1,
    log: Callable[[str], Any] = print,
    num_addresses: int = 0,
) -> Iterator[tuple[list[RingPort], list[Collective]]]:
    """Open ports and rings for a thread each; real sockets between them."""
    addresses = free_addresses(num_addresses or size)
    ports = [
        RingPort(
            addresses[rank],
            rank=rank,
            addresses=addresses,
            token=TOKEN,
            tls=tls,
            heartbeat_s=10.0,
            log=log,
        )
        for rank in range(size)
    ]
    rings = [opened(transport, port, list(range(size)), generation, 10.0) for port in ports]
    try:
        yield ports, rings
    finally:
        for end in (*rings, *ports):
            end.close()


def on_all(rings: list[Collective], do: Callable[[Collective], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(rings)) as pool:
        return list(pool.map(do, rings))


def wait_with_timeout(work: Work) -> None:
    """Wait for a work, but not for ever."""
    end_s = time.monotonic() + PATIENCE_S

    def poll() -> None:
        assert time.monotonic() < end_s, "the work did not end"

    work.wait(poll)


def reduce_several(ring: Collective, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Sum random buffers, all begun before the first is done."""
    generator = torch.Generator().manual_seed(ring.rank)
    buffers = [torch.randn(length, generator=generator) for length in lengths]
    for work in [ring.all_reduce(buffer) for buffer in buffers]:
        wait_with_timeout(work)
    return buffers


def check_operations(transport: str, size: int, tls: Tls | None = None) -> list[list[torch.Tensor]]:
    """Sum, gather and spread; return each rank's sums."""
    lengths = (1, 10, 100_003, 2_000_000)
    blob = bytes(range(256)) * 12_345  # three chunks and a bit
    with ring_of_threads(transport, size, tls=tls) as (_, rings):

        def work(ring: Collective) -> tuple[list[torch.Tensor], list[bytes], bytes, bytes]:
            sums = reduce_several(ring, lengths)
            gathered = ring.all_gather(blob[: ring.rank * 1_000_000])
            return (
                sums,
                gathered,
                ring.broadcast(blob if ring.rank == 1 else None, 1),
                ring.broadcast(b"" if ring.rank == 0 else None, 0),
            )

        results = on_all(rings, work)
        assert [(ring.rank, ring.size, ring.transport) for ring in rings] == [
            (rank, size, transport.partition("-")[0]) for rank in range(size)
        ]
    terms = [
        [torch.randn(length, generator=generator) for length in lengths]
        for generator in (torch.Generator().manual_seed(rank) for rank in range(size))
    ]
    for sums, gathered, spread, nothing in results:
        assert gathered == [blob[: rank * 1_000_000] for rank in range(size)]
        assert (spread, nothing) == (blob, b"")
        for index, found in enumerate(sums):
            assert torch.equal(found, results[0][0][index])  # same bits on all ranks
            assert torch.allclose(
                found, torch.stack([term[index] for term in terms]).sum(0), atol=1e-5
            )
    return [sums for sums, *_ in results]


def check_types(transport: str) -> None:
    """Every element type sums."""
    with ring_of_threads(transport, 2) as (_, rings):

        def work(ring: Collective) -> None:
            for dtype in (torch.float64, torch.float16, torch.int32):
                buffer = torch.full((9,), ring.rank + 1).to(dtype)
                wait_with_timeout(ring.all_reduce(buffer))
                assert buffer.tolist() == [3] * 9

        on_all(rings, work)


def check_graceful_close(transport: str) -> None:
    """Whoever is done leaves at once; nobody loses a sum by it, and the next generation opens."""
    addresses = free_addresses(3)
    with (
        Peer(f"graceful-{transport}", 0, addresses) as first,
        Peer(f"graceful-{transport}", 1, addresses) as second,
        Peer(f"graceful-{transport}", 2, addresses) as third,
    ):
        assert [peer.read_line() for peer in (first, second, third)] == [str([3.0] * 10)] * 3


def check_survivors_form_again(transport: str) -> None:
    """One of three leaves in the middle; the others see it, and go on as a ring of two."""
    with ring_of_threads(transport, 3) as (ports, rings):
        # Once open: of one that leaves while gloo still opens, the others may learn from their polls only.
        on_all(rings, lambda ring: reduce_several(ring, (10,)))
        works = [ring.all_reduce(torch.ones(1_000_000)) for ring in rings[:2]]
        rings[2].close()
        for ring, work in zip(rings, works, strict=False):
            with pytest.raises(PeerLost):
                wait_with_timeout(work)
            ring.close()
            with pytest.raises(PeerLost):
                ring.all_reduce(torch.ones(1))
        again = [opened(transport, port, [1, 0], 2, 10.0) for port in ports[:2]]
        sums = on_all(again, lambda ring: reduce_several(ring, (1000,))[0])
        assert torch.equal(sums[0], sums[1])
        assert [ring.rank for ring in again] == [1, 0]
        for ring in again:
            ring.close()


def check_death(transport: str) -> None:
    """A member killed in the middle of a reduction ends it for the others, who are processes and this one."""
    addresses = free_addresses(3)
    with (
        Peer(transport, 1, addresses) as victim,
        Peer(transport, 2, addresses),
        member_zero(transport, addresses) as ring,
    ):
        wait_with_timeout(ring.all_reduce(torch.ones(250_000)))
        killer = threading.Timer(0.3, victim.kill)
        killer.start()
        with pytest.raises(PeerLost):
            while True:
                wait_with_timeout(ring.all_reduce(torch.ones(250_000)))
        killer.join()


def check_hang(transport: str) -> None:
    """A member that hangs ends nothing by itself; what the poll raises does, and closing waits for nobody."""
    addresses = free_addresses(2)
    with (
        Peer(transport, 1, addresses, heartbeat_s=60.0) as victim,
        member_zero(transport, addresses, heartbeat_s=60.0) as ring,
    ):
        wait_with_timeout(ring.all_reduce(torch.ones(250_000)))
        victim.stop()
        began_s = time.monotonic()

        def poll() -> None:
            if time.monotonic() > began_s + 0.5:
                raise Lost

        with pytest.raises(Lost):
            while True:
                ring.all_reduce(torch.ones(250_000)).wait(poll)
        closing_s = time.monotonic()
        ring.close()
        assert (
            time.monotonic() < closing_s + 20
        )  # gloo alone would wait for its group's ten minutes


@contextmanager
def member_zero(
    transport: str, addresses: list[str], heartbeat_s: float = 5.0
) -> Iterator[Collective]:
    """Open this process's end of a ring whose other members are processes."""
    port = RingPort(
        addresses[0], rank=0, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=heartbeat_s
    )
    ranks = list(range(len(addresses)))
    try:
        wait_for_peers(port, ranks)
        ring = opened(transport, port, ranks, 1, heartbeat_s)
        try:
            yield ring
        finally:
            ring.close()
    finally:
        port.close()
