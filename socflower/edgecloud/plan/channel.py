"""One direction of an edge's link in virtual time: transfers one after another, each delivered after the latency."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import Direction
from socflower.sim.processes import Event, Link, Process, Queue, Simulation


class Channel:
    """A first-in first-out queue over the links of `path`; the network of SoC `edge` draws power while it carries.

    With a meter, transfers are reported to it as the link carries them.
    """

    def __init__(
        self,
        simulation: Simulation,
        path: Sequence[Link],
        edge: int,
        direction: Direction,
        *,
        latency_s: float = 0.0,
        meter: BandwidthMeter | None = None,
    ) -> None:
        self.direction: Direction = direction
        self.busy_s = 0.0
        self.num_bytes = 0.0
        self._simulation = simulation
        self._meter = meter
        self._path = tuple(path)
        self._edge = edge
        self._latency_s = latency_s
        self._waiting: Queue[tuple[float, str, Event[None]]] = Queue()
        # Begin and bytes of each transfer under way.
        self._in_flight: deque[tuple[float, float]] = deque()
        self._num_sent = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called when the link begins with a transfer, and when one has arrived."""
        simulation.start(
            self._carry(),
            f"the {direction} link of edge {edge}",
            background=True,
        )

    def send(self, num_bytes: float, what: str) -> Event[None]:
        """Queue a transfer now, and return the event of its arrival."""
        arrived: Event[None] = Event(what)
        self._num_sent += 1
        self._waiting.put((num_bytes, what, arrived))
        return arrived

    def update_meter(self) -> None:
        """Report the transfer in flight to the meter."""
        if self._meter is None:
            return
        if self._in_flight:
            self._meter.set_in_flight(self.direction, *self._in_flight[0])
        else:
            self._meter.clear_in_flight(self.direction)

    @property
    def is_empty(self) -> bool:
        """Whether all that was sent has arrived."""
        return not self._num_sent

    @property
    def is_idle(self) -> bool:
        """Whether the sending of all that was sent has at least begun."""
        return len(self._in_flight) == self._num_sent

    def _carry(self) -> Process[None]:
        simulation = self._simulation
        while True:
            num_bytes, what, arrived = yield self._waiting.get()
            self._in_flight.append((simulation.now_s, num_bytes))
            self.on_change()
            carried_s = yield simulation.transfer(
                self._path,
                num_bytes,
                what,
                socs=(self._edge,),
            )
            self.busy_s += carried_s
            self.num_bytes += num_bytes
            if self._latency_s:
                simulation.timeout(self._latency_s).then(partial(self._deliver, arrived))
            else:
                self._deliver(arrived)

    def _deliver(self, arrived: Event[None], _: float = 0.0) -> None:
        begin_s, num_bytes = self._in_flight.popleft()
        self._num_sent -= 1
        if self._meter is not None:
            now_s = self._simulation.now_s
            self._meter.add_transfer(self.direction, num_bytes, now_s - begin_s, now_s)
        arrived.fire()
        self.on_change()
