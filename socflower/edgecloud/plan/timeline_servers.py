"""The servers of the virtual-time pipeline: a first-in first-out link and a cloud; and what decides on the cut."""

from collections import deque
from typing import Literal, Protocol, TypeAlias

from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, Direction, LinkRates
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.errors import SocflowerError

CloudMode: TypeAlias = Literal["own", "turns", "joined"]


class Decider(Protocol):
    """Decides on changes of the deployment between two batches."""

    def decide(self, batch: int, rates: LinkRates, current: SplitPlan, window: int) -> SplitPlan | None:
        """Return the new deployment from `batch` on, or None to stay; K is given, not chosen."""
        ...


class Link:
    """One direction of a party's link: a first-in first-out queue, served at the rates of the profile."""

    def __init__(
        self, profile: BandwidthProfile, direction: Direction, party: int, meter: BandwidthMeter | None,
    ) -> None:
        self.direction: Direction = direction
        self.busy_s = 0.0
        self.num_bytes = 0.0
        self._profile, self._party, self._meter = profile, party, meter
        self._steps, self._latency_s = profile.steps(direction), profile.latency_s
        self._free_s = 0.0
        self._in_flight: deque[tuple[float, float]] = deque()  # begin and bytes, where there is a meter

    def send(self, now_s: float, num_bytes: float, what: str, *, may_be_lost: bool = False) -> float:
        """Queue a transfer now, and return its time of arrival.

        Raises `SocflowerError` if it never arrives, unless it `may_be_lost`.
        """
        begin_s = now_s if now_s > self._free_s else self._free_s
        end_s = self._steps.passed_s(begin_s, num_bytes)
        if end_s == float("inf"):
            if not may_be_lost:
                raise SocflowerError(f"party {self._party}: its {self.direction} link carries nothing any more after "
                                     f"{begin_s:.3f} s, so {what} never arrives; give a profile in "
                                     "which it comes back")
        else:
            self.busy_s += end_s - begin_s
            self.num_bytes += num_bytes
        self._free_s = end_s
        if self._meter is not None:
            self._in_flight.append((begin_s, num_bytes))
        return end_s + self._latency_s

    def on_arrival(self, now_s: float) -> None:
        """Report the oldest transfer, which has arrived, to the meter."""
        if self._meter is not None:
            begin_s, num_bytes = self._in_flight.popleft()
            self._meter.add_transfer(self.direction, num_bytes, now_s - begin_s, now_s)

    def update_meter(self, now_s: float) -> None:
        """Report the transfer in flight to the meter."""
        if self._meter is None:
            return
        if self._in_flight and self._in_flight[0][0] <= now_s:
            self._meter.set_in_flight(self.direction, *self._in_flight[0])
        else:
            self._meter.clear_in_flight(self.direction)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight; always true without a meter."""
        return not self._in_flight


class Cloud:
    """Schedules the steps of back halves: a processor for each party ("own"), or one for all, in turns or joined."""

    def __init__(self, mode: CloudMode, num_parties: int, first_batch: int) -> None:
        self.busy_s = 0.0
        self._mode, self._num_parties = mode, num_parties
        self._free_s = [0.0] * num_parties
        self._next = (first_batch, 0)  # in turns
        self._waiting: dict[tuple[int, int], float] = {}  # seconds of the step by batch and party

    def on_features(
        self, now_s: float, party: int, batch: int, step_s: float,
    ) -> list[tuple[float, tuple[int, ...], int]]:
        """Queue a batch's features; return the steps that can now be scheduled: (end, parties, batch)."""
        if self._mode == "own":
            return [(self._serve(now_s, party, step_s), (party,), batch)]
        self._waiting[batch, party] = step_s
        if self._mode == "joined":
            everyone = range(self._num_parties)
            if not all((batch, other) in self._waiting for other in everyone):
                return []
            longest_s = max(self._waiting.pop((batch, other)) for other in everyone)
            return [(self._serve(now_s, 0, longest_s), tuple(everyone), batch)]
        served: list[tuple[float, tuple[int, ...], int]] = []
        while self._next in self._waiting:
            turn_batch, turn_party = self._next
            end_s = self._serve(now_s, 0, self._waiting.pop(self._next))
            served.append((end_s, (turn_party,), turn_batch))
            last = turn_party + 1 == self._num_parties
            self._next = (turn_batch + 1, 0) if last else (turn_batch, turn_party + 1)
        return served

    def _serve(self, now_s: float, processor: int, step_s: float) -> float:
        end_s = max(now_s, self._free_s[processor]) + step_s
        self._free_s[processor] = end_s
        self.busy_s += step_s
        return end_s
