"""Rings among threads: order of operations, leaving, and what a wait lets through."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from socflower.peers.collective import Collective, PeerLost
from socflower.peers.transports.in_process import in_process_rings


def on_all(rings: list[Collective], do: Callable[[Collective], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(rings)) as pool:
        return list(pool.map(do, rings))


@pytest.fixture
def rings() -> Any:
    made = in_process_rings(3)
    yield made
    for ring in made:
        ring.close()


def test_sums_gathers_and_broadcasts(rings: list[Collective]) -> None:
    def work(ring: Collective) -> tuple[list[float], list[bytes], bytes]:
        buffer = torch.arange(5.0) * (ring.rank + 1)
        ring.all_reduce(buffer).wait()
        gathered = ring.all_gather(b"x" * ring.rank)
        return buffer.tolist(), gathered, ring.broadcast(b"hello" if ring.rank == 1 else None, 1)

    assert on_all(rings, work) == [([0.0, 6.0, 12.0, 18.0, 24.0], [b"", b"x", b"xx"], b"hello")] * 3
    assert [(ring.rank, ring.size, ring.transport) for ring in rings] == [
        (r, 3, "in-process") for r in range(3)
    ]


def test_several_reductions_may_be_under_way(rings: list[Collective]) -> None:
    def work(ring: Collective) -> list[float]:
        buffers = [torch.full((1000,), float(number * (ring.rank + 1))) for number in range(20)]
        for begun in [ring.all_reduce(buffer) for buffer in buffers]:
            begun.wait()
        return [float(buffer[-1]) for buffer in buffers]

    assert on_all(rings, work) == [[6.0 * number for number in range(20)]] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_other_types_sum(rings: list[Collective], dtype: torch.dtype) -> None:
    def work(ring: Collective) -> list[float]:
        buffer = torch.full((7,), ring.rank + 1).to(dtype)
        ring.all_reduce(buffer).wait()
        return buffer.tolist()

    assert on_all(rings, work) == [[6] * 7] * 3


def test_a_ring_of_one_needs_nobody() -> None:
    (ring,) = in_process_rings(1)
    buffer = torch.ones(3)
    ring.all_reduce(buffer).wait()
    assert buffer.tolist() == [1.0] * 3
    assert ring.all_gather(b"a") == [b"a"]
    assert ring.broadcast(b"b", 0) == b"b"
    ring.close()
    ring.close()


def test_who_leaves_ends_what_the_others_have_under_way(rings: list[Collective]) -> None:
    begun = [ring.all_reduce(torch.ones(100)) for ring in rings[:2]]
    rings[2].close()
    for work in begun:
        with pytest.raises(PeerLost):
            work.wait()
    with pytest.raises(PeerLost):
        rings[0].all_gather(b"later")
    with pytest.raises(PeerLost):
        rings[2].all_reduce(torch.ones(1))


def test_who_leaves_when_all_is_done_takes_nothing_from_slower_members() -> None:
    for _ in range(30):
        made = in_process_rings(4)

        def work(ring: Collective) -> float:
            buffer = torch.ones(1000)
            ring.all_reduce(buffer).wait()
            ring.close()  # the neighbour may still have to read the last parts
            return float(buffer.sum())

        assert on_all(made, work) == [4000.0] * 4


def test_what_the_poll_raises_ends_the_wait(rings: list[Collective]) -> None:
    class Enough(Exception):
        pass

    asked = threading.Event()

    def poll() -> None:
        asked.set()
        raise Enough

    work = rings[0].all_reduce(torch.ones(10))  # the others never begin
    with pytest.raises(Enough):
        work.wait(poll)
    assert asked.is_set()


def test_buffers_that_cannot_be_summed_in_place_are_refused(rings: list[Collective]) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        rings[0].all_reduce(torch.ones(4, 4).T)
