"""A SoC's seconds and joules by activity, computed from its time in each state and the watts of the state."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from socflower.cluster import Activity, Device
from socflower.sim.compiled_graph import Load

State: TypeAlias = tuple[tuple[Load, ...], bool]
"""Which loads run on a SoC (sorted), and whether it has a transfer."""

IDLE_STATE: State = ((), False)


class StateMeter:
    """Seconds that each SoC of an execution spends in each state."""

    def __init__(self, num_socs: int, now_s: float = 0.0) -> None:
        self.seconds: list[dict[State, float]] = [{} for _ in range(num_socs)]
        self._loads: list[tuple[Load, ...]] = [()] * num_socs
        self._num_transfers = [0] * num_socs
        self._since_s = [now_s] * num_socs

    def start(self, soc: int, load: Load, now_s: float) -> None:
        """Record that a load begins."""
        self._settle(soc, now_s)
        self._loads[soc] = tuple(sorted((*self._loads[soc], load)))

    def stop(self, soc: int, load: Load, now_s: float) -> None:
        """Record that a load ends."""
        self._settle(soc, now_s)
        loads = list(self._loads[soc])
        loads.remove(load)
        self._loads[soc] = tuple(loads)

    def connect(self, soc: int, now_s: float) -> None:
        """Record that a transfer of the SoC begins."""
        # Only the first transfer changes the state.
        if not self._num_transfers[soc]:
            self._settle(soc, now_s)
        self._num_transfers[soc] += 1

    def disconnect(self, soc: int, now_s: float) -> None:
        """Record that a transfer of the SoC ends."""
        if self._num_transfers[soc] == 1:
            self._settle(soc, now_s)
        self._num_transfers[soc] -= 1

    def settle_all(self, now_s: float) -> None:
        """Add the time of every SoC's present state up to now."""
        self.settle(range(len(self.seconds)), now_s)

    def postpone(
        self, soc: int, shift_s: float, more: Mapping[State, float], times: int, now_s: float
    ) -> None:
        """Skip `shift_s` from now on for a SoC, which spends `more` in its states `times` times in it."""
        self._settle(soc, now_s)
        self._since_s[soc] = now_s + shift_s
        seconds = self.seconds[soc]
        for state, spent_s in more.items():
            seconds[state] = seconds.get(state, 0.0) + times * spent_s

    def settle(self, socs: Iterable[int], now_s: float) -> None:
        """Add the time of some SoCs' present states up to now."""
        for soc in socs:
            self._settle(soc, now_s)

    def take(self) -> list[dict[State, float]]:
        """Return the seconds added since the last call, and start again from 0."""
        seconds, self.seconds = self.seconds, [{} for _ in self.seconds]
        return seconds

    def _settle(self, soc: int, now_s: float) -> None:
        passed_s = now_s - self._since_s[soc]
        if passed_s > 0.0:
            state = (self._loads[soc], self._num_transfers[soc] > 0)
            seconds = self.seconds[soc]
            seconds[state] = seconds.get(state, 0.0) + passed_s
            self._since_s[soc] = now_s


def power_w(state: State, device: Device, factor: float = 1.0) -> float:
    """Return a device's watts in a state: idle watts, those of active processors above idle, and those of the network.

    `factor` scales the watts above idle to the present clocks.
    """
    loads, networking = state
    active_w = sum(device.processor(processor).active_w - device.idle_w for processor, _ in loads)
    return device.idle_w + factor * active_w + (device.network_w if networking else 0.0)


def split_state(
    state: State, device: Device, factor: float = 1.0
) -> Iterator[tuple[Activity, float, float]]:
    """Yield activity, its share of the time and its watts; shares sum to 1 and watts to `power_w`.

    Processors that work together share time and idle watts evenly. A transfer during work costs no time,
    but its watts are synchronisation's.
    """
    loads, networking = state
    for processor, activity in loads:
        share = 1.0 / len(loads)
        above_idle_w = device.processor(processor).active_w - device.idle_w
        yield activity, share, factor * above_idle_w + device.idle_w * share
    if networking:
        alone_w = 0.0 if loads else device.idle_w
        yield Activity.SYNCHRONISATION, 0.0 if loads else 1.0, device.network_w + alone_w
    elif not loads:
        yield Activity.IDLE, 1.0, device.idle_w


def add_activities(
    seconds: Mapping[State, float],
    device: Device,
    soc_seconds: dict[Activity, float],
    energy_j: dict[Activity, float],
    factor: float = 1.0,
) -> None:
    """Add one SoC's time in states to the sums of seconds and joules by activity."""
    for state, spent_s in seconds.items():
        for activity, share, watts in split_state(state, device, factor):
            soc_seconds[activity] += share * spent_s
            energy_j[activity] += watts * spent_s
