"""Sums along a tree of boards and servers: the order is that of the plan, on real ports as in one process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.hierarchy.exchange.models import tree_levels
from socflower.peers.collective import Collective, PeerLost
from socflower.peers.transports.port import RingPort
from socflower.peers.transports.tree import Place, grpc_tree, in_process_trees, tree_edges
from tests.peers.peers import TOKEN, free_addresses

PLACES = st.lists(st.tuples(st.integers(0, 4), st.just(0)), min_size=1, max_size=7).map(
    lambda boards: [(board, board // 2) for board, _ in boards]
)
_Got = TypeVar("_Got")


def at_all(trees: Sequence[Collective], do: Callable[[Collective], _Got]) -> list[_Got]:
    with ThreadPoolExecutor(len(trees)) as threads:
        try:
            return list(threads.map(do, trees))
        finally:
            for tree in trees:
                tree.close()


def summed(places: Sequence[Place], values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the sum by its definition: of each board, then of each server's boards, then of all servers."""

    def add(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        total = parts[0].copy()
        for part in parts[1:]:
            total = total + part
        return total

    rows = list(zip(places, values, strict=True))
    for level in range(2):
        where = list(dict.fromkeys(place[level] for place, _ in rows))
        rows = [
            (
                next(place for place, _ in rows if place[level] == here),
                add([value for place, value in rows if place[level] == here]),
            )
            for here in where
        ]
    return add([value for _, value in rows])


@settings(deadline=None, max_examples=40)
@given(places=PLACES, seed=st.integers(0, 10**6))
def test_boards_are_summed_first_then_servers_and_all_have_the_same_bits(
    places: list[Place], seed: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(len(places), 33)).astype(np.float32)

    def reduce(tree: Collective) -> bytes:
        own = torch.from_numpy(values[tree.rank].copy())
        tree.all_reduce(own).wait()
        return own.numpy().tobytes()

    assert {*at_all(in_process_trees(places), reduce)} == {summed(places, list(values)).tobytes()}


@settings(deadline=None, max_examples=20)
@given(places=PLACES, source=st.integers(0, 6))
def test_all_get_all_payloads_and_that_of_any_source(places: list[Place], source: int) -> None:
    size = len(places)

    def exchange(tree: Collective) -> tuple[list[bytes], bytes]:
        own = b"x" * (3 * tree.rank)
        return tree.all_gather(own), tree.broadcast(
            b"told" if tree.rank == source % size else None, source % size
        )

    assert (
        at_all(in_process_trees(places), exchange)
        == [([b"x" * (3 * rank) for rank in range(size)], b"told")] * size
    )


@settings(max_examples=60)
@given(places=PLACES)
def test_every_member_but_the_first_sends_to_one_other(places: list[Place]) -> None:
    edges = tree_edges(places)
    assert sorted(other for _, other in edges) == list(range(1, len(places)))
    for level in tree_levels(places)[:1]:
        assert all(len({places[position][0] for position in own}) == 1 for own in level)


def test_members_that_lose_one_are_all_told() -> None:
    places = [(0, 0), (0, 0), (1, 0), (1, 0)]
    trees = in_process_trees(places)

    def reduce(tree: Collective) -> str:
        if tree.rank == 3:
            tree.close()
            return "gone"
        try:
            tree.all_reduce(torch.ones(4)).wait()
        except PeerLost:
            tree.close()
            return "told"
        return "summed"

    assert at_all(trees, reduce) == ["told", "told", "told", "gone"]


@pytest.mark.parametrize("num_generations", [1, 2])
def test_ports_give_the_bits_of_one_process(num_generations: int) -> None:
    places = [(0, 0), (2, 1), (0, 0), (1, 0), (2, 1)]
    values = np.random.default_rng(3).normal(size=(5, 100_000)).astype(np.float32)
    addresses = free_addresses(5)
    ports = [
        RingPort(
            addresses[rank], rank=rank, addresses=addresses, token=TOKEN, tls=None, heartbeat_s=4.0
        )
        for rank in range(5)
    ]

    def reduce(tree: Collective) -> tuple[bytes, int]:
        own = torch.from_numpy(values[tree.rank].copy())
        tree.all_reduce(own).wait()
        return own.numpy().tobytes(), len(tree.all_gather(b"own"))

    try:
        expected = (summed(places, list(values)).tobytes(), 5)
        for generation in range(1, 1 + num_generations):
            trees = [grpc_tree(port, range(5), places, generation, 4.0) for port in ports]
            assert at_all(trees, reduce) == [expected] * 5
    finally:
        for port in ports:
            port.close()
