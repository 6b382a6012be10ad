"""A pipeline's messages over gRPC streams, for any network: with TLS all bytes are encrypted."""

from collections.abc import Sequence

from socflower.peers.transports.lanes import Lanes
from socflower.peers.transports.port import PortView
from socflower.pipeline.runtime.channels import Channels, Fetched
from socflower.pipeline.runtime.messages import LANES


class GrpcChannels(Channels):
    """The lanes of one device among `socs`, whose ranks in `port` are `ranks`, in the same order.

    Each lane is a stream of its own, which opens with its first message. `heartbeat_s` is how long a device may be
    unreachable. A device that dies or hangs ends all lanes of the devices that it has lanes with.
    """

    def __init__(
        self,
        port: PortView,
        socs: Sequence[int],
        ranks: Sequence[int],
        generation: int,
        heartbeat_s: float,
    ) -> None:
        super().__init__(socs[list(ranks).index(port.rank)])
        self._rank_of = dict(zip(socs, ranks, strict=True))
        self._is_graceful = False
        self._peers = Lanes(
            port,
            "pipeline",
            ranks,
            generation,
            heartbeat_s,
            accepts=lambda rank, lane: rank in ranks and lane < len(LANES),
            on_lost=self._fail,
        )

    def close(self) -> None:
        """Leave the pipeline; messages that were sent before are still delivered unless the pipeline has failed."""
        self._is_graceful = self._failure is None
        super().close()

    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        self._peers.send(self._rank_of[target], LANES.index(lane), memoryview(body))

    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> Fetched:
        # A stream delivers its messages without a request.
        return lambda: self._next(source, lane, num_bytes)

    def _next(self, source: int, lane: str, num_bytes: int | None) -> memoryview:
        rank = self._rank_of[source]
        body = self._peers.receive(rank, LANES.index(lane))
        if num_bytes not in (None, body.nbytes):
            raise self._peers.reject(rank, f"a message of {lane} that is not of {num_bytes} bytes")
        return body

    def _shut_down(self) -> None:
        self._peers.close(graceful=self._is_graceful)
