"""Rings over gloo: the contract, the rendezvous over the ring ports, and leaving a group whose member hangs."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from socflower.peers.collective import PeerLost
from socflower.peers.ring.member import open_ring
from socflower.peers.transports import gloo
from socflower.peers.transports.gloo import GlooRing
from socflower.peers.transports.port import RingPort
from socflower.wire.secure_channel import PeerRefused
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


def test_a_member_that_is_slow_is_not_lost() -> None:
    with ring_of_threads("gloo", 2) as (_, rings):
        early, late = torch.ones(1000), torch.ones(1000)
        work = rings[0].all_reduce(early)
        time.sleep(1.0)
        wait_with_timeout(rings[1].all_reduce(late))
        wait_with_timeout(work)
        assert float(early[0]) == float(late[0]) == 2.0


def test_a_public_address_needs_trust_even_with_tls(tmp_path) -> None:
    addresses = [*free_addresses(1), "8.8.8.8:28200"]
    port = RingPort(
        addresses[0],
        rank=0,
        addresses=addresses,
        token=TOKEN,
        tls=Authority(tmp_path).member("member"),
        heartbeat_s=5.0,
    )
    try:
        refused(lambda: open_ring("gloo", port, [0, 1], 1, 5.0), "8.8.8.8:28200")
    finally:
        port.close()


def test_a_first_member_that_never_comes_is_lost() -> None:
    addresses = free_addresses(2)
    port = RingPort(
        addresses[1], rank=1, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=5.0
    )
    ring = open_ring("gloo", port, [0, 1], 1, 0.5)
    try:
        with pytest.raises(PeerLost, match="cannot be reached"):
            wait_with_timeout(ring.all_reduce(torch.ones(4)))
    finally:
        ring.close()
        port.close()


def test_a_ring_whose_other_member_never_comes_can_be_left() -> None:
    addresses = free_addresses(2)
    port = RingPort(
        addresses[0], rank=0, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=5.0
    )
    ring = open_ring("gloo", port, [0, 1], 1, 5.0)
    work = ring.all_reduce(torch.ones(4))
    ring.close()
    with pytest.raises(PeerLost, match="has been left"):
        wait_with_timeout(work)
    port.close()


def test_keys_of_a_generation_that_is_over_are_refused() -> None:
    with ring_of_threads("gloo", 2, generation=5) as (ports, rings):
        on_all(rings, lambda ring: reduce_several(ring, (10,)))
        with pytest.raises(PeerRefused, match="generation 4 is over"):
            ports[1].call(0, "rendezvous", b'[4, "get", "0"]\n', timeout_s=ring_contract.PATIENCE_S)


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="no /proc to find gloo's connections in"
)
def test_messages_to_either_side_have_connections_of_their_own() -> None:
    """The receiver's word that it is ready does not wait behind what is being sent the other way."""
    addresses, size = free_addresses(2), 500_000
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=10.0
        )
        for rank in range(2)
    ]
    rings = [GlooRing(port, [0, 1], 1, 10.0, two_way=True) for port in ports]
    try:

        def exchange(ring: GlooRing) -> list[float]:
            found = [torch.empty(size) for _ in range(6)]
            with ThreadPoolExecutor(2) as threads:
                sent = threads.submit(
                    lambda: [
                        ring.send(
                            torch.full((size,), float(number + 10 * ring.rank)),
                            1 - ring.rank,
                            number % 2,
                        )
                        for number in range(6)
                    ]
                )
                for number, buffer in enumerate(found):
                    ring.begin_receive(buffer, 1 - ring.rank, number % 2).wait()
                sent.result()
            return [float(buffer[-1]) for buffer in found]

        assert on_all(rings, exchange) == [
            [10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        ]
        groups = [(ring._group, ring._downward) for ring in rings]
        assert all(group is not downward for group, downward in groups)
        with ThreadPoolExecutor(2) as threads:
            waiting = [
                threads.submit(ring.begin_receive(torch.empty(1), 1 - ring.rank, 5).wait)
                for ring in rings
            ]
            for ring in rings:
                ring.close()
            for each in waiting:
                with pytest.raises(PeerLost):
                    each.result(60.0)
    finally:
        for end in (*rings, *ports):
            end.close()


@pytest.mark.parametrize("kind", ["message", "gather"])
def test_an_operation_ends_whose_connection_breaks_while_it_reads(kind: str) -> None:
    """Gloo tells only operations that have not begun to read; leaving the ring does not wait for the others either."""
    addresses = free_addresses(2)
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=10.0
        )
        for rank in range(2)
    ]
    rings = [GlooRing(port, [0, 1], 1, 0.5) for port in ports]
    payload, arriving = torch.ones(30_000_000), torch.zeros(30_000_000)
    try:
        on_all(rings, lambda ring: ring.all_gather(b""))
        with ThreadPoolExecutor(2) as threads:
            if kind == "message":
                receiver = threads.submit(rings[0].begin_receive(arriving, 1, 0).wait)
                threads.submit(rings[1].send, payload, 0, 0)
            else:
                receiver = threads.submit(rings[0].collect, arriving)
                threads.submit(rings[1].collect, payload)
            time.sleep(0.01)
            rings[1].close()
            with pytest.raises(PeerLost):
                receiver.result(60.0)
            began_s = time.monotonic()
            rings[0].close()
            assert time.monotonic() < began_s + 20
    finally:
        for end in (*rings, *ports):
            end.close()


def test_rings_leave_no_sockets_behind() -> None:
    def count() -> int:
        return sum(
            os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        )

    with ring_of_threads("gloo", 3) as (ports, rings):
        on_all(rings, lambda ring: reduce_several(ring, (10,)))
        for ring in rings:
            ring.close()
        before = count()
        for generation in range(2, 5):
            again = [open_ring("gloo", port, [0, 1, 2], generation, 10.0) for port in ports]
            on_all(again, lambda ring: reduce_several(ring, (10,)))
            for ring in again:
                ring.close()
        end_s = time.monotonic() + ring_contract.PATIENCE_S
        while count() > before:
            assert time.monotonic() < end_s, f"{count()} sockets instead of {before}"
            time.sleep(0.05)


def test_a_listening_socket_is_found_that_has_the_descriptor_of_an_earlier_socket() -> None:
    """Otherwise a ring does not know its connections to a member that hangs, and waits for it when it is closed."""
    sockets, listening_since = vars(gloo)["_sockets"], vars(gloo)["_listening_ports_since"]
    with socket.socket() as earlier, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        before, descriptor = sockets(), earlier.fileno()
        earlier.close()
        with socket.socket() as listening:
            assert listening.fileno() == descriptor
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            assert listening_since(before) == [listening.getsockname()[1]]
