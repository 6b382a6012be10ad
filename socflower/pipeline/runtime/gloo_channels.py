"""A pipeline's messages over gloo, point to point."""

from collections.abc import Sequence

import torch

from socflower.peers.collective import Poll, no_poll
from socflower.peers.transports.gloo import GlooRing
from socflower.peers.transports.port import RingPort
from socflower.pipeline.runtime.channels import Channels, Fetched, is_of_any_size
from socflower.pipeline.runtime.member import LANES


class GlooChannels(Channels):
    """The lanes of one device among `socs`, whose ranks in `port` are `ranks`, in the same order.

    Raises what `GlooRing` does. Once all have joined, a device that dies ends all lanes of all others with `PeerLost`.
    """

    def __init__(
        self,
        port: RingPort,
        socs: Sequence[int],
        ranks: Sequence[int],
        generation: int,
        heartbeat_s: float,
    ) -> None:
        super().__init__(socs[list(ranks).index(port.rank)])
        self._place = {soc: place for place, soc in enumerate(socs)}
        self._ring = GlooRing(port, ranks, generation, heartbeat_s, two_way=True)

    def join(self, poll: Poll = no_poll) -> None:
        """Return when all devices have joined; until then, that one has died is for `poll` to find out and raise."""
        self._ring.all_gather(b"", poll)

    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        if is_of_any_size(lane):
            self._ring.send(torch.tensor([len(body)]), self._place[target], LANES.index(lane))
        if body:
            self._ring.send(
                torch.frombuffer(body, dtype=torch.uint8), self._place[target], LANES.index(lane)
            )

    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> Fetched:
        if num_bytes is None:
            return lambda: self._of_any_size(source, lane)
        if not num_bytes:
            return lambda: memoryview(b"")
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        # Gloo sends when it knows that the receiver is ready, so it is told of messages before they are due.
        arriving = self._ring.begin_receive(buffer, self._place[source], LANES.index(lane))

        def fetched() -> memoryview:
            arriving.wait()
            return buffer.numpy().data

        return fetched

    def _of_any_size(self, source: int, lane: str) -> memoryview:
        length = torch.empty(1, dtype=torch.int64)
        self._ring.begin_receive(length, self._place[source], LANES.index(lane)).wait()
        return self._fetch(source, lane, int(length))()

    def _shut_down(self) -> None:
        self._ring.close()
