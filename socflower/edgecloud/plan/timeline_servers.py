"""The components of the virtual-time pipeline: the times of a batch, a first-in first-out link, a cloud."""

from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, Direction, LinkRates
from socflower.edgecloud.plan.cost_model import received_weight_bytes
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import FORWARD_SHARE, cut_cost
from socflower.errors import SocflowerError

CloudMode: TypeAlias = Literal["own", "turns", "joined"]


class Decider(Protocol):
    """Decides on changes of the deployment between two batches."""

    def decide(self, batch: int, rates: LinkRates, current: SplitPlan, window: int) -> SplitPlan | None:
        """Return the new deployment from `batch` on, or None to stay; K is given, not chosen."""
        ...


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The seconds and bytes of one batch at every stage; their sums are those of `phases`."""

    split_plan: SplitPlan
    forward_s: float  # at the front half: forward pass, encoding
    step_s: float  # at the back half
    apply_s: float  # at the front half: replay, backward pass, update
    feature_bytes: float
    gradient_bytes: float
    trains: bool  # whether anything in front of the cut does
    sending_s: float = 0.0  # of the front half's processor, while the link carries the features
    receiving_s: float = 0.0  # of the same, while it carries the gradient; both are taken right after the forward pass

    @property
    def alone(self) -> bool:
        """Whether the edge does the whole training step."""
        return self.split_plan.cut is None


def batch_times(costs: SplitCosts, split_plan: SplitPlan, *, reverse: bool) -> BatchTimes:
    """Return the times of a batch under a deployment; the replay costs another forward pass unless K is 0 (F22)."""
    if split_plan.cut is None:
        return BatchTimes(split_plan, costs.edge_only_s, 0.0, 0.0, 0.0, 0.0, True)
    cut = cut_cost(costs, split_plan.cut)
    feature_bytes = costs.feature_bytes(split_plan.cut, split_plan.bits)
    gradient_bytes = costs.gradient_bytes(split_plan.cut)
    replays = split_plan.window > 0 and cut.front_trains
    codec_s = cut.feature_elements * costs.codec_s_per_element.get(split_plan.bits, 0.0)
    message_s = costs.edge_s_per_batch / 2.0  # one goes up, one down
    if reverse:
        forward_share = FORWARD_SHARE if cut.front_trains else 1.0
        forward_s = cut.cloud_s * forward_share
        apply_s = cut.cloud_s * (1.0 - forward_share) + (forward_s if replays else 0.0)
        step_s = (cut.edge_forward_s + cut.edge_backward_s + codec_s
                  + (feature_bytes + gradient_bytes) * costs.edge_s_per_byte + 2.0 * message_s)
    else:
        forward_s = cut.edge_forward_s + codec_s + message_s
        apply_s = ((cut.edge_backward_s if cut.front_trains else 0.0) + (cut.edge_forward_s if replays else 0.0)
                   + message_s)
        step_s = cut.cloud_s
    s_per_byte = 0.0 if reverse else costs.edge_s_per_byte
    return BatchTimes(split_plan, forward_s, step_s, apply_s, feature_bytes, gradient_bytes, cut.front_trains,
                feature_bytes * s_per_byte, gradient_bytes * s_per_byte)


def migration(costs: SplitCosts, old: int | None, new: int | None, *, reverse: bool) -> tuple[Direction, float]:
    """Return the direction and bytes of the layers that move with the cut (F26); `ConfigError` for unknown bytes."""
    received_bytes = received_weight_bytes(costs, old, new, reverse=reverse)
    return ("down", received_bytes) if received_bytes > 0 else ("up", -received_bytes)


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
