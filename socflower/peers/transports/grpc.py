"""A ring over gRPC streams, for any network: with TLS, all bytes are encrypted and both ends have certificates."""

from collections.abc import Sequence

from socflower.peers.transports.all_reduce import MAX_CHUNK_BYTES
from socflower.peers.transports.lanes import Lanes
from socflower.peers.transports.links import LinkedRing
from socflower.peers.transports.port import PortView


class GrpcRing(LinkedRing):
    """One generation of a ring among the members `ranks` of a port's addresses, in ring order.

    Each member keeps one lane open to the next. Returns at once; the lane opens as soon as the next member is in the
    same generation. `heartbeat_s` is how long that member may be unreachable meanwhile. A neighbour that dies or hangs
    breaks the ring; a slow one does not, and neither does a connection that breaks for less than a heartbeat.
    """

    def __init__(
        self, port: PortView, ranks: Sequence[int], generation: int, heartbeat_s: float
    ) -> None:
        position = list(ranks).index(port.rank)
        following, before = ranks[(position + 1) % len(ranks)], ranks[position - 1]
        lanes = Lanes(
            port,
            "exchange",
            ranks,
            generation,
            heartbeat_s,
            accepts=lambda rank, lane: (rank, lane) == (before, 0),
            most_bytes=MAX_CHUNK_BYTES,
        )
        if len(ranks) > 1:
            lanes.open(following, 0)
        super().__init__(_LaneLinks(lanes, following, before), position, len(ranks), "grpc")


class _LaneLinks:
    """The lane to the next member and the one from the previous member."""

    def __init__(self, lanes: Lanes, following: int, before: int) -> None:
        self._lanes, self._following, self._before = lanes, following, before

    def send(self, chunk: memoryview) -> None:
        self._lanes.send(self._following, 0, chunk)

    def receive(self, num_bytes: int) -> memoryview:
        chunk = self._lanes.receive(self._before, 0)
        if chunk.nbytes != num_bytes:
            what = f"a chunk of {chunk.nbytes} bytes where {num_bytes} belong"
            raise self._lanes.reject(self._before, what)
        return chunk

    def close(self, graceful: bool) -> None:
        self._lanes.close(graceful=graceful)
