"""Virtual time: the event clock, the shared network under it, and traces."""

from socflower.sim.event_clock import EventClock
from socflower.sim.flows import max_min_rates
from socflower.sim.trace import Trace

__all__ = ["EventClock", "Trace", "max_min_rates"]
