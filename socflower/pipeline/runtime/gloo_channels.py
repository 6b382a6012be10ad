"""A pipeline's messages over gloo, point to point."""

from collections.abc import Sequence

import torch

from socflower.peers.collective import Poll, no_poll
from socflower.peers.transports.gloo import GlooRing
from socflower.peers.transports.port import RingPort
from socflower.pipeline.runtime.channels import Channels, Fetched
from socflower.pipeline.runtime.messages import LANES, is_of_any_size


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
        """Return when all devices have joined; until then, only `poll` can notice that a device has died."""
        self._ring.all_gather(b"", poll)

    def _transmit(self, target: int, lane: str, body: bytearray) -> None:
        place, tag = self._place[target], LANES.index(lane)
        if is_of_any_size(lane):
            self._ring.send(torch.tensor([len(body)]), place, tag)
        if body:
            self._ring.send(torch.frombuffer(body, dtype=torch.uint8), place, tag)

    def _fetch(self, source: int, lane: str, num_bytes: int | None) -> Fetched:
        if num_bytes is None:
            return lambda: self._of_any_size(source, lane)
        if not num_bytes:
            return lambda: memoryview(b"")
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        # Gloo sends a message once its receiver is ready, so receiving starts before the message is needed.
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
