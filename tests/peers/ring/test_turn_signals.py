"""Groups that exchange in turn, a member each, with their ports in this process."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from socflower.peers.collective import no_poll
from socflower.peers.ring.turn_signals import Neighbours, TurnSignals
from socflower.peers.transports.port import Caller, RingPort
from tests.peers.peers import TOKEN, free_addresses

WAIT_S = 60.0


class Rack:
    """Groups 0 and 1, which take turns in this order: member 0 is group 0, members 1 and 2 are group 1."""

    def __init__(self) -> None:
        self.addresses = free_addresses(3)
        self._closing: list[RingPort] = []

    def port(self, rank: int) -> RingPort:
        port = RingPort(
            self.addresses[rank],
            rank=rank,
            addresses=self.addresses,
            token=TOKEN,
            tls=None,
            heartbeat_s=2.0,
        )
        self._closing.append(port)
        return port

    def turns(
        self, rank: int, *, rendezvous_s: float = WAIT_S, heartbeat_s: float = 2.0
    ) -> TurnSignals:
        group_id = 0 if rank == 0 else 1
        neighbours = (
            Neighbours(after=(1,), members={1: (1, 2)})
            if group_id == 0
            else Neighbours(before=(0,), members={0: (0,)})
        )
        return TurnSignals(
            self.port(rank),
            group_id,
            neighbours,
            heartbeat_s=heartbeat_s,
            rendezvous_s=rendezvous_s,
        )

    def close(self) -> None:
        for port in self._closing:
            port.close()


@pytest.fixture
def rack() -> Iterator[Rack]:
    made = Rack()
    yield made
    made.close()


def test_groups_exchange_one_after_the_other(rack: Rack) -> None:
    first, second = rack.turns(0), rack.turns(1)
    rack.turns(2)
    exchanges: list[tuple[int, int]] = []

    def train(turns: TurnSignals, group_id: int) -> None:
        for step in range(6):
            turns.wait(step, no_poll)
            exchanges.append((step, group_id))
            turns.finish_step(step)
        turns.close()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(train, first, 0), threads.submit(train, second, 1)]:
            future.result(timeout=WAIT_S)
    assert exchanges == [(step, group_id) for step in range(6) for group_id in (0, 1)]


def test_a_word_that_came_before_its_hearer_is_said_again(rack: Rack) -> None:
    """Group 0 has exchanged before group 1's ring is there: now each would wait for the other's first word."""
    first = rack.turns(0)
    first.wait(0, no_poll)
    first.finish_step(0)
    time.sleep(0.5)
    second = rack.turns(1)
    rack.turns(2)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(first.wait, 1, no_poll)
        threads.submit(second.wait, 0, no_poll).result(timeout=WAIT_S)
        assert not waits.done()
        second.finish_step(0)
        waits.result(timeout=WAIT_S)
    first.close()
    second.close()


def test_another_member_may_say_what_the_first_could_not(rack: Rack) -> None:
    """The member that waited for group 1 dies after an exchange, before it has told of it."""
    first, _, heir = rack.turns(0), rack.turns(1), rack.turns(2)
    first.finish_step(0)
    heir.wait(0, no_poll)
    heir.finish_step(0)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(first.wait, 1, no_poll).result(timeout=WAIT_S)


def test_a_group_that_is_gone_is_not_waited_for(rack: Rack) -> None:
    first = rack.turns(0, rendezvous_s=0.5, heartbeat_s=0.5)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(first.wait, 1, no_poll).result(timeout=WAIT_S)
    first.close()


def test_a_member_that_hangs_holds_up_neither_the_others_nor_the_end(rack: Rack) -> None:
    first, second = rack.turns(0, heartbeat_s=40.0), rack.turns(1)
    awake = threading.Event()

    def hang(caller: Caller, body: bytes) -> bytes:
        awake.wait(WAIT_S)
        return b""

    rack.port(2).handle("turn", hang)
    try:
        # More than there are threads in any pool.
        for step in range(30):
            first.wait(step, no_poll)
            first.finish_step(step)
            second.wait(step, no_poll)
            second.finish_step(step)
        began_s = time.monotonic()
        first.close()
        assert time.monotonic() - began_s < 9.0  # a question to the member that hangs lasts 10 s
    finally:
        awake.set()
