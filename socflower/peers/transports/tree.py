"""Sums along a tree: members of a board first, then one of each board in a server, then one of each server.

Each edge is a ring of two, so a tree needs nothing of a transport beyond rings. At every level the first member
receives the others' sums and adds them to its own in their order; the total returns the same way. So a sum depends
only on the members and their places. Where all are in one place, the first member is their parameter server.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.hierarchy.exchange.models import tree_levels
from socflower.peers.collective import Collective, PeerLost
from socflower.peers.connections import DialledCall
from socflower.peers.transports.grpc import GrpcRing
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.links import QueuedCollective
from socflower.peers.transports.port import Admission, Handler, PortView

Place = tuple[int, ...]
"""Where a member is, from the narrowest part of the cluster to the widest: its board and its server."""
Edge = tuple[int, int]
"""Ranks of the one that sums and the one that sends to it."""


def tree_edges(places: Sequence[Place]) -> tuple[Edge, ...]:
    """Return the edges of the tree of members at these places, in the order in which sums are added."""
    return tuple(
        (first, other)
        for level in tree_levels(places)
        for first, *others in level
        for other in others
    )


class Tree(QueuedCollective):
    """A member's end of a tree: its rings of two, by edge."""

    def __init__(self, rank: int, size: int, edges: Mapping[Edge, Collective]) -> None:
        self._below = [ring for (first, _), ring in edges.items() if first == rank]
        # There is at most one.
        self._above = [ring for (_, other), ring in edges.items() if other == rank]
        over = {ring.transport for ring in edges.values()} or {"in-process"}
        super().__init__(rank, size, *over)

    def _sum(self, array: NDArray[Any]) -> None:
        for ring in self._below:
            array[:] += _like(array, ring.broadcast(None, 1))
        array[:] = _like(array, self._through_top(array.tobytes()))

    def _gather(self, payload: bytes) -> list[bytes]:
        payloads = [b""] * self.size
        payloads[self.rank] = payload
        for ring in self._below:
            for rank, part in enumerate(_split(ring.broadcast(None, 1), self.size)):
                payloads[rank] = payloads[rank] or part
        return _split(self._through_top(_join(payloads)), self.size)

    def _spread(self, payload: bytes | None, source: int) -> bytes:
        return self._gather(payload or b"")[source]

    def _close_links(self, *, graceful: bool) -> None:
        # Each ring knows whether its own operations are done.
        for ring in (*self._below, *self._above):
            ring.close()

    def _through_top(self, payload: bytes) -> bytes:
        """Send the sum of all members below upwards and pass the total down; the first of all members has the total."""
        for ring in self._above:
            ring.broadcast(payload, 1)
            payload = ring.broadcast(None, 0)
        for ring in reversed(self._below):
            ring.broadcast(payload, 0)
        return payload


def in_process_trees(places: Sequence[Place]) -> list[Collective]:
    """Return the members' ends of one tree, by rank, each to be used in its own thread."""
    rings = {edge: in_process_rings(2) for edge in tree_edges(places)}
    trees: list[Collective] = []
    for rank in range(len(places)):
        own = {edge: ends[edge.index(rank)] for edge, ends in rings.items() if rank in edge}
        trees.append(Tree(rank, len(places), own))
    return trees


def grpc_tree(
    port: PortView,
    ranks: Sequence[int],
    places: Sequence[Place],
    generation: int,
    heartbeat_s: float,
) -> Tree:
    """Return this member's end of generation `generation` of a tree among `ranks` of the port's addresses."""
    own = list(ranks).index(port.rank)
    rings: dict[Edge, Collective] = {}
    for edge in tree_edges(places):
        if own in edge:
            ends = [ranks[rank] for rank in edge]
            edge_port = _EdgePort(port, f"{ends[0]}-{ends[1]}-")
            rings[edge] = GrpcRing(edge_port, ends, generation, heartbeat_s)
    return Tree(own, len(ranks), rings)


class _EdgePort:
    """A port whose methods are those of one edge, since a member has several."""

    def __init__(self, port: PortView, prefix: str) -> None:
        self.rank = port.rank
        self._port, self._prefix = port, prefix

    def address_of(self, rank: int) -> str:
        return self._port.address_of(rank)

    def handle(self, method: str, handler: Handler) -> None:
        self._port.handle(self._prefix + method, handler)

    def handle_stream(self, method: str, admission: Admission) -> None:
        self._port.handle_stream(self._prefix + method, admission)

    def call(self, rank: int, method: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        return self._port.call(rank, self._prefix + method, body, timeout_s=timeout_s)

    def open_stream(self, rank: int, method: str, greeting: bytes) -> tuple[DialledCall, bytes]:
        return self._port.open_stream(rank, self._prefix + method, greeting)

    def report_refused(self, peer: str, what: str) -> None:
        self._port.report_refused(peer, what)


def _join(payloads: Sequence[bytes]) -> bytes:
    return b"".join((struct.pack(f"<{len(payloads)}Q", *map(len, payloads)), *payloads))


def _like(array: NDArray[Any], payload: bytes) -> NDArray[Any]:
    if len(payload) != array.nbytes:
        raise PeerLost(f"the tree carries {len(payload)} bytes where {array.nbytes} belong")
    return np.frombuffer(payload, array.dtype)


def _split(joined: bytes, size: int) -> list[bytes]:
    lengths = struct.unpack_from(f"<{size}Q", joined) if len(joined) >= 8 * size else ()
    if not lengths or 8 * size + sum(lengths) != len(joined):
        raise PeerLost(f"the tree carries {len(joined)} bytes that are not {size} payloads")
    return [joined[start:end] for start, end in pairwise(accumulate(lengths, initial=8 * size))]
