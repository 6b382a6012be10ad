"""Parts of a training that share neither links nor a rack: each has a clock of its own, and rounds end together."""

from collections.abc import Mapping, Sequence
from typing import Any

from socflower.cluster import Usage, VirtualClock
from socflower.sim.event_clock import EventClock


def idle_until_all_end(parts: Sequence[tuple[VirtualClock, Sequence[int], float]]) -> list[Usage]:
    """Let parts that began together idle until the last one has ended; return the usage of each one's wait.

    A part is its clock, its SoCs, and the seconds that it took.
    """
    longest_s = max(took_s for _, _, took_s in parts)
    return [clock.idle_for(socs, longest_s - took_s) if longest_s > took_s else Usage()
            for clock, socs, took_s in parts]


class SideBySide:
    """What an `EventClock` tells of a training, for the clocks of parts that run at the same time, by name."""

    def __init__(self, **clocks: EventClock) -> None:
        self._clocks = clocks

    @property
    def now_s(self) -> float:
        """Virtual seconds since the clocks' start; equal for all at the end of a round."""
        return max(clock.now_s for clock in self._clocks.values())

    @property
    def usage(self) -> Usage:
        """The total usage of all parts."""
        total = Usage()
        for clock in self._clocks.values():
            total = total.alongside(clock.usage)
        return total

    def state(self) -> dict[str, Any]:
        """Return the state of each clock as plain values that JSON stores exactly."""
        return {name: clock.state() for name, clock in self._clocks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of such clocks of the same parts."""
        for name, clock in self._clocks.items():
            clock.restore(state[name])
