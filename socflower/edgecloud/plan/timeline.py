"""The pipeline of a split training in virtual time: four queues per party, no tensors (paper §4.1, F23, F26).

A front half is one processor. It does the forward pass of the next batch t while t − t′ ≤ K, where t′ is the oldest
batch whose gradient is not applied, and applies the gradients that arrived, oldest first. If it may do either, it
alternates: after an update comes a forward pass. So the batches stay spread over the pipeline, and constant rates give
exactly F26's period, max(T_M, T_Σ/(K+1)). Applying every arrived gradient first (`apply_first`) makes gradients less
stale but bunches batches up, which costs time whenever updates are a large part of T_Σ.

Links and the back half serve in order of arrival. A move of the cut waits until nothing is in flight; then the layers
are sent, and the next batch's forward pass begins. The resulting weights are a function of the actions alone.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.plan.cost_model import received_weight_bytes
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.phases import BatchTimes, batch_times
from socflower.edgecloud.plan.timeline_actions import Action, Kind
from socflower.edgecloud.plan.timeline_servers import Cloud, CloudMode, Decider, Link
from socflower.errors import ConfigError, require_range

PROBE_BYTES = 65536
"""What an edge that trains alone sends in each direction to measure whether a cut would pay, if it has a decider."""
PROBE_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """One edge, with its link and the costs of its batches."""

    costs: SplitCosts
    bandwidth_profile: BandwidthProfile
    split_plan: SplitPlan  # at the start
    window: Callable[[int], int] | None = None  # K by batch; the deployment's where missing
    decider: Decider | None = None

    def limit(self, batch: int) -> int:
        """Return K for a batch; `ConfigError` if it is negative."""
        limit = self.split_plan.window if self.window is None else self.window(batch)
        require_range(f"timeline: batch {batch}", least=0, K=limit)
        return limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A change of deployment."""

    batch: int  # the first under the new one
    decided_s: float
    old: SplitPlan
    new: SplitPlan
    drain_s: float  # until nothing was in flight; 0 where only the bits change
    migration_s: float  # of the layers over the link


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyTimeline:
    """The totals of one party; seconds within the whole duration."""

    duration_s: float  # until its last update
    compute_s: float  # of the edge's processor
    idle_s: float  # of the same, until the whole training ended
    sending_s: float  # for which the up link was busy, outages included
    receiving_s: float
    up_bytes: float
    down_bytes: float
    staleness: tuple[int, ...]  # by batch; 0 where the front half is frozen
    moves: tuple[Move, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A training in virtual time."""

    actions: tuple[Action, ...]
    times_s: tuple[float, ...]  # when each action was complete, from the start
    duration_s: float
    cloud_busy_s: float  # of all its processors together; in a reverse split, of the front halves
    num_batches: int  # of each party
    parties: tuple[PartyTimeline, ...]


def simulate(
    parties: Sequence[Party], num_batches: int, first_batch: int = 0, *, cloud: CloudMode = "own",
    start_s: float = 0.0, reverse: bool = False, apply_first: bool = False,
) -> Timeline:
    """Simulate all parties on the batches from `first_batch` on, and return the timeline.

    Parameters
    ----------
    parties : Party ...
        The edges; each does `num_batches` batches.
    cloud : "own", "turns" or "joined"
        A cloud half and processor for each party; one half that processes batch b of party 0, of party 1, ... and then
        batch b + 1; or one whose step on a batch waits for the features of all parties, and takes the longest of their
        step times.
    start_s : float
        Where in the profiles it begins.
    reverse : bool
        Whether the front half is in the cloud: features are sent down and gradients up.
    apply_first : bool
        Whether a front half applies every arrived gradient before the next forward pass.

    Raises
    ------
    ConfigError
        For invalid settings, and for a cut that would move or differ between parties of a shared half.
    SocflowerError
        If a link is lost for good while something is yet to be sent.
    """
    _check(parties, num_batches, first_batch, cloud, reverse)
    # A back half with only one party is not shared, so its cut may move, even to edge-only.
    mode: CloudMode = "own" if len(parties) == 1 else cloud
    return _Simulation(parties, num_batches, first_batch, mode, start_s, reverse, apply_first).run()


def _check(parties: Sequence[Party], num_batches: int, first_batch: int, cloud: CloudMode, reverse: bool) -> None:
    if not parties:
        raise ConfigError("timeline: no parties; give at least one")
    require_range("timeline", least=1, num_batches=num_batches)
    require_range("timeline", least=0, first_batch=first_batch)
    if cloud not in ("own", "turns", "joined"):
        raise ConfigError(f"timeline: cloud = {cloud!r} is unknown; use own, turns or joined")
    if cloud == "own" or len(parties) == 1:
        return
    if reverse:
        raise ConfigError(f"timeline: a reverse split with cloud = {cloud!r} cannot be: each party has its own front "
                          "half there; use own")
    if any(party.split_plan.cut is None for party in parties):
        raise ConfigError(f"timeline: an edge alone beside cloud = {cloud!r} cannot be; give every party a cut")
    if any(party.decider is not None for party in parties):
        raise ConfigError(f"timeline: with cloud = {cloud!r} parties share the back half, so none can move its cut; "
                          "leave out the decider")
    if cloud == "turns" and len({party.split_plan.cut for party in parties}) > 1:
        raise ConfigError("timeline: parties that take turns share the back half; give all the same cut")


class _Front:
    """The state of one front half."""

    def __init__(self, index: int, party: Party, first_batch: int, num_batches: int, start_s: float, reverse: bool,
                 ) -> None:
        self.index, self.party, self._reverse = index, party, reverse
        self.meter = None if party.decider is None else BandwidthMeter(first=party.bandwidth_profile.rates(start_s))
        self.up = Link(party.bandwidth_profile, "up", index, self.meter)
        self.down = Link(party.bandwidth_profile, "down", index, self.meter)
        self.out, self.back = (self.down, self.up) if reverse else (self.up, self.down)
        self.cut, self.bits = party.split_plan.cut, party.split_plan.bits
        self.next = self.oldest = self.first = first_batch
        self.end = first_batch + num_batches
        self.busy = self.just_applied = False
        self.gradients: deque[int] = deque()
        self.in_flight: dict[int, BatchTimes] = {}  # of batches in flight
        self.staleness: list[int] = []
        self.moves: list[Move] = []
        self.last_asked = first_batch - 1  # the last batch before which the decider was asked
        self.pending: tuple[SplitPlan, float] | None = None  # what to move to, and since when
        self.probed_s = -math.inf
        self.front_s = self.back_s = self.alone_s = 0.0
        self.ended_s = start_s
        self._known: dict[tuple[int | None, int, int], BatchTimes] = {}

    @property
    def drained(self) -> bool:
        return self.oldest == self.next

    def batch_times(self, limit: int) -> BatchTimes:
        """Return the times of a batch under the present deployment."""
        key = (self.cut, self.bits, limit)
        if key not in self._known:
            split_plan = SplitPlan(cut=self.cut, bits=self.bits, window=limit)
            self._known[key] = batch_times(self.party.costs, split_plan, reverse=self._reverse)
        return self._known[key]


class _Simulation:
    def __init__(self, parties: Sequence[Party], num_batches: int, first_batch: int, cloud: CloudMode, start_s: float,
                 reverse: bool, apply_first: bool) -> None:
        self._start_s, self._reverse, self._apply_first = start_s, reverse, apply_first
        self._num_batches = num_batches
        self._fronts = [_Front(index, party, first_batch, num_batches, start_s, reverse)
                        for index, party in enumerate(parties)]
        self._cloud = Cloud(cloud, len(parties), first_batch)
        self._left = len(parties)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._actions: list[Action] = []
        self._times_s: list[float] = []

    def run(self) -> Timeline:
        for front in self._fronts:
            self._dispatch(front, self._start_s)
        while self._left:
            now_s, _, handler, arguments = heapq.heappop(self._events)
            handler(now_s, *arguments)
        return self._timeline()

    def _schedule(self, time_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        # Numbered, so that simultaneous events are handled in the order in which they were scheduled.
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, handler, arguments))

    def _record(self, now_s: float, kind: Kind, front: _Front, batch: int, plan: SplitPlan) -> None:
        self._actions.append(Action(kind, front.index, batch, plan.cut, plan.bits, plan.window))
        self._times_s.append(now_s - self._start_s)

    # ------------------------------------------------------------------------------------------ the front half

    def _dispatch(self, front: _Front, now_s: float) -> None:
        """Start the next task of a front half that is free, if there is one."""
        if front.busy:
            return
        may_forward, limit = False, 0
        if front.pending is None and front.next < front.end:
            limit = front.party.limit(front.next)
            may_forward = front.next - front.oldest <= limit
        if front.gradients and not (may_forward and front.just_applied and not self._apply_first):
            self._apply(front, now_s)
        elif may_forward:
            if front.party.decider is not None and front.last_asked < front.next:
                self._ask_decider(front, now_s, limit)
                self._dispatch(front, now_s)
            else:
                self._forward(front, now_s, limit)
        elif front.pending is not None and front.drained:
            self._move(front, now_s, *front.pending)

    def _forward(self, front: _Front, now_s: float, limit: int) -> None:
        front.busy, front.just_applied = True, False
        times = front.batch_times(limit)
        front.in_flight[front.next] = times
        if times.alone:
            front.alone_s += times.forward_s
            self._schedule(now_s + times.forward_s, self._on_alone, front)
        else:
            front.front_s += times.forward_s + times.sending_s + times.receiving_s
            self._schedule(now_s + times.forward_s, self._on_forwarded, front)
        front.next += 1

    def _on_forwarded(self, now_s: float, front: _Front) -> None:
        batch = front.next - 1
        times = front.in_flight[batch]
        self._record(now_s, Kind.FORWARD, front, batch, times.split_plan)
        arrival_s = front.out.send(now_s, times.feature_bytes, f"batch {batch}")
        self._schedule(max(arrival_s, now_s + times.sending_s), self._on_features, front, batch)
        # Transfers occupy the processor before it is free for another batch.
        self._schedule(now_s + times.sending_s + times.receiving_s, self._on_free, front)

    def _on_free(self, now_s: float, front: _Front) -> None:
        front.busy = False
        self._dispatch(front, now_s)

    def _apply(self, front: _Front, now_s: float) -> None:
        front.busy, front.just_applied = True, True
        times = front.in_flight[front.gradients[0]]
        front.staleness.append(front.next - 1 - front.gradients[0] if times.trains else 0)
        front.front_s += times.apply_s
        self._schedule(now_s + times.apply_s, self._on_applied, front)

    def _on_applied(self, now_s: float, front: _Front) -> None:
        front.busy = False
        self._finish_batch(front, now_s, front.gradients.popleft())

    def _on_alone(self, now_s: float, front: _Front) -> None:
        """Finish a batch that never left the edge."""
        front.busy = False
        plan = front.in_flight[front.oldest].split_plan
        self._record(now_s, Kind.FORWARD, front, front.oldest, plan)
        self._record(now_s, Kind.STEP, front, front.oldest, plan)
        front.staleness.append(0)
        self._finish_batch(front, now_s, front.oldest)

    def _finish_batch(self, front: _Front, now_s: float, batch: int) -> None:
        assert batch == front.oldest, "gradients come back in the order in which their batches went forward"
        self._record(now_s, Kind.APPLY, front, batch, front.in_flight.pop(batch).split_plan)
        front.oldest += 1
        if front.oldest == front.end:
            front.ended_s = now_s
            self._left -= 1
        self._dispatch(front, now_s)

    # ------------------------------------------------------------------------------------------- the back half

    def _on_features(self, now_s: float, front: _Front, batch: int) -> None:
        front.out.on_arrival(now_s)
        times = front.in_flight[batch]
        for end_s, parties, stepped in self._cloud.on_features(now_s, front.index, batch, times.step_s):
            self._schedule(end_s, self._on_stepped, parties, stepped)

    def _on_stepped(self, now_s: float, parties: tuple[int, ...], batch: int) -> None:
        for index in parties:
            front = self._fronts[index]
            times = front.in_flight[batch]
            front.back_s += times.step_s
            self._record(now_s, Kind.STEP, front, batch, times.split_plan)
            arrival_s = front.back.send(now_s, times.gradient_bytes, f"the gradient of batch {batch}")
            self._schedule(max(arrival_s, now_s + times.receiving_s), self._on_gradient, front, batch)

    def _on_gradient(self, now_s: float, front: _Front, batch: int) -> None:
        front.back.on_arrival(now_s)
        front.gradients.append(batch)
        self._dispatch(front, now_s)

    # ----------------------------------------------------------------------------------------- moves of the cut

    def _ask_decider(self, front: _Front, now_s: float, limit: int) -> None:
        front.last_asked = front.next
        assert front.party.decider is not None and front.meter is not None
        if front.cut is None:
            self._probe(front, now_s)
        front.up.update_meter(now_s)
        front.down.update_meter(now_s)
        current = SplitPlan(cut=front.cut, bits=front.bits, window=limit)
        new = front.party.decider.decide(front.next, front.meter.rates(now_s), current, limit)
        if new is None or (new.cut, new.bits) == (front.cut, front.bits):
            return
        if new.cut == front.cut:
            # Another width needs no drain: each batch carries its own.
            front.bits = new.bits
            front.moves.append(Move(batch=front.next, decided_s=now_s - self._start_s, old=current,
                                    new=front.batch_times(limit).split_plan, drain_s=0.0, migration_s=0.0))
        else:
            front.pending = (new, now_s)

    def _probe(self, front: _Front, now_s: float) -> None:
        if now_s - front.probed_s < PROBE_INTERVAL_S:
            return
        front.probed_s = now_s
        for link in (front.up, front.down):
            if link.is_empty:
                arrival_s = link.send(now_s, PROBE_BYTES, "a probe", may_be_lost=True)
                if math.isfinite(arrival_s):
                    self._schedule(arrival_s, link.on_arrival)

    def _move(self, front: _Front, now_s: float, new: SplitPlan, decided_s: float) -> None:
        """Transfer layers between the halves; both halves are idle meanwhile."""
        front.busy = True
        received_bytes = received_weight_bytes(front.party.costs, front.cut, new.cut, reverse=self._reverse)
        link = front.down if received_bytes > 0 else front.up
        arrival_s = link.send(now_s, abs(received_bytes), f"what moves before batch {front.next}")
        self._schedule(arrival_s, self._on_moved, front, link, now_s)

    def _on_moved(self, now_s: float, front: _Front, link: Link, drained_s: float) -> None:
        link.on_arrival(now_s)
        assert front.pending is not None
        new, decided_s = front.pending
        limit = front.party.limit(front.next)
        old = SplitPlan(cut=front.cut, bits=front.bits, window=limit)
        front.cut, front.bits, front.pending, front.busy = new.cut, new.bits, None, False
        plan = front.batch_times(limit).split_plan
        front.moves.append(Move(batch=front.next, decided_s=decided_s - self._start_s, old=old, new=plan,
                                drain_s=drained_s - decided_s, migration_s=now_s - drained_s))
        self._record(now_s, Kind.RECUT, front, front.next, plan)
        self._dispatch(front, now_s)

    # ------------------------------------------------------------------------------------------------ the end

    def _timeline(self) -> Timeline:
        end_s = max(front.ended_s for front in self._fronts)
        parties = tuple(self._party(front, end_s) for front in self._fronts)
        cloud_busy_s = sum(front.front_s for front in self._fronts) if self._reverse else self._cloud.busy_s
        return Timeline(actions=tuple(self._actions), times_s=tuple(self._times_s), duration_s=end_s - self._start_s,
                        cloud_busy_s=cloud_busy_s, num_batches=self._num_batches, parties=parties)

    def _party(self, front: _Front, end_s: float) -> PartyTimeline:
        compute_s = front.alone_s + (front.back_s if self._reverse else front.front_s)
        return PartyTimeline(
            duration_s=front.ended_s - self._start_s, compute_s=compute_s,
            idle_s=max(0.0, end_s - self._start_s - compute_s), sending_s=front.up.busy_s,
            receiving_s=front.down.busy_s, up_bytes=front.up.num_bytes, down_bytes=front.down.num_bytes,
            staleness=tuple(front.staleness), moves=tuple(front.moves))
