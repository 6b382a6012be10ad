"""What the virtual-time pipeline is made of: the work of a batch, a link that serves in order, a cloud."""

from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from socflower.edgecloud.links.bandwidth_profile import Direction, LinkRates, LinkTrace
from socflower.edgecloud.plan.cost_model import received_weight_bytes
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import FORWARD_SHARE, cut_cost
from socflower.errors import SocflowerError

CloudMode: TypeAlias = Literal["own", "turns", "joined"]


class Decider(Protocol):
    """What may change a deployment between two batches."""

    def decide(self, batch: int, rates: LinkRates, current: SplitPlan, window: int) -> SplitPlan | None:
        """Return what `batch` shall be the first to run under, or None to stay; K is given, not chosen."""
        ...


class Meter(Protocol):
    """What estimates the rates of a link from the transfers over it; times are virtual seconds."""

    def completed(self, direction: Direction, num_bytes: float, seconds: float, now_s: float) -> None:
        """Count a transfer that took `seconds`, latency included, and ended now."""
        ...

    def waiting(self, direction: Direction, since_s: float, num_bytes: float) -> None:
        """Note what is under way."""
        ...

    def idle(self, direction: Direction) -> None:
        """Note that nothing is under way."""
        ...

    def rates(self, now_s: float) -> LinkRates:
        """Return the rates as far as they can be known."""
        ...


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What one batch asks of every server; the sums over each are those of `phases`."""

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
        """Whether the edge does it all."""
        return self.split_plan.cut is None


def batch_times(costs: SplitCosts, split_plan: SplitPlan, *, reverse: bool) -> BatchTimes:
    """Return the work of a batch under a deployment; the replay costs a forward pass more unless K is 0 (F22)."""
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
    """Return which way layers move when the cut does, and their bytes (F26); `ConfigError` if those are not known."""
    received_bytes = received_weight_bytes(costs, old, new, reverse=reverse)
    return ("down", received_bytes) if received_bytes > 0 else ("up", -received_bytes)


class Link:
    """One direction of a party's link: a queue that is served in order, as fast as the trace allows."""

    def __init__(self, trace: LinkTrace, direction: Direction, party: int, meter: Meter | None) -> None:
        self.direction: Direction = direction
        self.busy_s = 0.0
        self.num_bytes = 0.0
        self._trace, self._party, self._meter = trace, party, meter
        self._steps, self._latency_s = trace.steps(direction), trace.latency_s
        self._free_s = 0.0
        self._under_way: deque[tuple[float, float]] = deque()  # begin and bytes, where there is a meter

    def send(self, now_s: float, num_bytes: float, what: str, *, may_be_lost: bool = False) -> float:
        """Return when a transfer that is handed over now arrives.

        Raises `SocflowerError` if that is never, unless it `may_be_lost`.
        """
        begin_s = now_s if now_s > self._free_s else self._free_s
        end_s = self._steps.passed_s(begin_s, num_bytes)
        if end_s == float("inf"):
            if not may_be_lost:
                raise SocflowerError(f"party {self._party}: its {self.direction} link carries nothing any more after "
                                     f"{begin_s:.3f} s, so {what} never arrives; give a trace in which it comes back")
        else:
            self.busy_s += end_s - begin_s
            self.num_bytes += num_bytes
        self._free_s = end_s
        if self._meter is not None:
            self._under_way.append((begin_s, num_bytes))
        return end_s + self._latency_s

    def arrived(self, now_s: float) -> None:
        """Let the meter know of the oldest transfer, which is there now."""
        if self._meter is not None:
            begin_s, num_bytes = self._under_way.popleft()
            self._meter.completed(self.direction, num_bytes, now_s - begin_s, now_s)

    def look(self, now_s: float) -> None:
        """Let the meter know of what is under way."""
        if self._meter is None:
            return
        if self._under_way and self._under_way[0][0] <= now_s:
            self._meter.waiting(self.direction, *self._under_way[0])
        else:
            self._meter.idle(self.direction)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way, as far as the meter knows."""
        return not self._under_way


class Cloud:
    """Who steps when: one processor each ("own"), or one for all, in turns by party, or joined by batch."""

    def __init__(self, mode: CloudMode, num_parties: int, first_batch: int) -> None:
        self.busy_s = 0.0
        self._mode, self._num_parties = mode, num_parties
        self._free_s = [0.0] * num_parties
        self._next = (first_batch, 0)  # in turns
        self._waiting: dict[tuple[int, int], float] = {}  # seconds of the step by batch and party

    def arrived(self, now_s: float, party: int, batch: int, step_s: float) -> list[tuple[float, tuple[int, ...], int]]:
        """Take a batch's features; return what is stepped now or as soon as may be: (end, parties, batch)."""
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
