"""The pipeline of a split training in virtual time: edges, links and cloud as processes, no tensors (paper §4.1, F23).

A front half is one processor. It does the forward pass of the next batch t while t − t′ ≤ K, where t′ is the oldest
batch whose gradient is not applied, and applies the gradients that arrived, oldest first, in the order of
`next_action`: none goes forward while the features of another one wait for the link, or while the link is lost.

Links and the back half serve in order of arrival. A move of the cut waits until nothing is in flight; then the layers
are sent, and the next batch's forward pass begins. The resulting weights are a function of the actions alone.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from socflower.cluster import Cluster, Usage
from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, Direction
from socflower.edgecloud.plan.channel import Channel
from socflower.edgecloud.plan.cost_model import received_weight_bytes
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import CLOUD_MODES, CloudMode, Party
from socflower.edgecloud.plan.phases import BatchTimes, batch_times
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind, next_action
from socflower.errors import ConfigError, require_range
from socflower.sim import EventClock
from socflower.sim.processes import (
    Credits,
    Event,
    Link,
    Process,
    Queue,
    SimulatedProcessor,
    Simulation,
    all_of,
)

PROBE_BYTES = 65536
"""An edge that trains alone and has a decider sends so much in each direction, to measure whether a cut would pay."""
PROBE_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CutMove:
    """A change of deployment.

    `batch` is the first under the new one. `drain_s` is the time until nothing was in flight, 0 if only the bits
    change; `migration_s` that of the layers over the link.
    """

    batch: int
    decided_s: float
    old: SplitPlan
    new: SplitPlan
    drain_s: float
    migration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyTimeline:
    """The totals of one party; seconds within the whole duration.

    `duration_s` ends with its last update. `idle_s` is that of the edge's processor until the whole training ended.
    `sending_s` and `receiving_s` are the seconds for which its links were busy, outages included. `staleness` is by
    batch, and 0 if the front half is frozen.
    """

    duration_s: float
    compute_s: float
    idle_s: float
    sending_s: float
    receiving_s: float
    up_bytes: float
    down_bytes: float
    staleness: tuple[int, ...]
    moves: tuple[CutMove, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A training in virtual time.

    `times_s` are when each action was complete, from the start. `usage` is the edges'. `cloud_busy_s` sums over the
    cloud's processors; in a reverse split it is that of the front halves. `num_batches` is that of each party that is
    not away.
    """

    actions: tuple[Action, ...]
    times_s: tuple[float, ...]
    duration_s: float
    usage: Usage
    cloud_busy_s: float
    num_batches: int
    parties: tuple[PartyTimeline, ...]


def simulate_split(
    parties: Sequence[Party],
    num_batches: int,
    first_batch: int = 0,
    *,
    clock: EventClock,
    cluster: Cluster,
    cloud: CloudMode = "own",
    reverse: bool = False,
    uplink: BandwidthProfile | None = None,
    cloud_processors: int | None = None,
    label: str = "split training",
) -> Timeline:
    """Let all parties train the batches from `first_batch` on, advance the clock, and return the timeline (F26).

    The parties are the first SoCs of `cluster`; each trains `num_batches` batches, less those for which it is away. The
    clock's heat and users slow them down, and their links are as their profiles say at the clock's time. A `reverse`
    split has the front halves in the cloud. All edges share `uplink` behind their own links; its latency is added.

    `cloud` says how the back halves serve: "own" is a half and processor for each party, and `cloud_processors`
    (default: all) work at a time, in the order of requests; "turns" is one half that processes batch b of party 0, of
    party 1, and so on, and then batch b + 1; "joined" is one whose step on a batch waits for the features of all
    parties, and takes the longest of their step times.

    Raises `ConfigError` for invalid settings, for parties that cannot share a half, and if all are away; and
    `SocflowerError` if a link is lost for good while something is yet to be sent.
    """
    require_range("split pipeline", least=1, num_batches=num_batches)
    require_range("split pipeline", least=0, first_batch=first_batch)
    if not parties:
        raise ConfigError("split pipeline: no parties; give at least one")
    # A back half with only one party is not shared, so its cut may move, even to edge-only.
    mode: CloudMode = "own" if len(parties) == 1 and cloud in CLOUD_MODES else cloud
    _check_cloud(parties, mode, reverse, cloud_processors)
    trained = [party.num_batches(first_batch, num_batches) for party in parties]
    present = [index for index, count in enumerate(trained) if count]
    if not present:
        raise ConfigError(f"split pipeline: all parties are away from batch {first_batch} on")
    span = range(first_batch, first_batch + num_batches)
    pipeline = _Pipeline(parties, span, cluster, mode, reverse, uplink, cloud_processors)
    usage = clock.run_processes(pipeline.start, socs=present, label=label)
    return pipeline.timeline(usage)


def round_ends(
    round_epochs: float | Sequence[float], batches_per_epoch: int, num_epochs: int
) -> tuple[int, ...]:
    """Return how many batches are done at the end of each round.

    `round_epochs` are the epochs of each round, rounded to batches, or the epochs at the end of each. Raises
    `ConfigError` if a round would have no batch, or the last one does not end with the training.
    """
    total = batches_per_epoch * num_epochs
    if isinstance(round_epochs, int | float):
        length = max(1, round(round_epochs * batches_per_epoch))
        return tuple(min(end, total) for end in range(length, total + length, length))
    ends = [0, *(round(epoch * batches_per_epoch) for epoch in round_epochs)]
    for number, (before, end) in enumerate(pairwise(ends), 1):
        if end <= before:
            raise ConfigError(
                f"split training: round {number}, to epoch {round_epochs[number - 1]:g}, has none of the edges' "
                f"{batches_per_epoch} batches an epoch; make rounds longer, or batches smaller"
            )
    if ends[-1] != total:
        raise ConfigError(
            f"split training: round_epochs end at {[0, *round_epochs][-1]:g} of {num_epochs} epochs"
        )
    return tuple(ends[1:])


def moved(parties: Sequence[Party], timeline: Timeline) -> list[Party]:
    """Return the parties with the split plans that they had at the end of a timeline."""
    return [
        replace(party, split_plan=past.moves[-1].new) if past.moves else party
        for party, past in zip(parties, timeline.parties, strict=True)
    ]


def _check_cloud(
    parties: Sequence[Party], cloud: CloudMode, reverse: bool, cloud_processors: int | None
) -> None:
    """Raise `ConfigError` for an unknown cloud, and for parties that cannot share its half."""
    if cloud not in CLOUD_MODES:
        raise ConfigError(
            f"split pipeline: cloud = {cloud!r} must be one of {', '.join(CLOUD_MODES)}"
        )
    if cloud_processors is not None:
        require_range("split pipeline", least=1, cloud_processors=cloud_processors)
    if cloud == "own":
        return
    cuts = {party.split_plan.cut for party in parties}
    for wrong, why in (
        (any(party.away for party in parties), "every party's batch is needed, and one is away"),
        (reverse, "a reverse split cannot be, as each party has its own front half there"),
        (None in cuts, "an edge cannot be without a cut"),
        (any(party.decider for party in parties), "no cut can move; leave the decider out"),
        (cloud == "turns" and len(cuts) > 1, "all parties need the same cut"),
        (
            cloud_processors,
            f"there is one processor; leave cloud_processors = {cloud_processors} out",
        ),
    ):
        if wrong:
            raise ConfigError(f"split pipeline: with cloud = {cloud!r} {why}")


class _Pipeline:
    """The processes of all parties and of the cloud, and what they record."""

    def __init__(
        self,
        parties: Sequence[Party],
        span: range,
        cluster: Cluster,
        cloud: CloudMode,
        reverse: bool,
        uplink: BandwidthProfile | None,
        cloud_processors: int | None,
    ) -> None:
        self.span = span
        self.reverse = reverse
        self.uplink = uplink
        self.num_parties = len(parties)
        self.cloud_busy_s = 0.0
        self._parties = parties
        self._cluster = cluster
        self._mode = cloud
        self._free: Credits | None = None
        if cloud_processors is not None:
            self._free = Credits(cloud_processors, "a processor of the cloud")
        self._actions: list[Action] = []
        self._times_s: list[float] = []
        # The next batch and party, if they take turns.
        self._turn = (span.start, 0)
        # Seconds of the step of features that wait for others, by batch and party.
        self._features: dict[tuple[int, int], float] = {}
        self._start_s = 0.0

    def start(self, simulation: Simulation) -> None:
        """Start all processes."""
        self.simulation = simulation
        self._start_s = simulation.now_s
        self.shared_links: dict[Direction, list[Link]] = {"up": [], "down": []}
        for direction, links in self.shared_links.items():
            if self.uplink is not None:
                rates = self.uplink.steps(direction)
                links.append(simulation.link(f"the shared {direction} link", rates))
        self._fronts = [_Front(self, index, party) for index, party in enumerate(self._parties)]
        for front in self._fronts:
            gradients = f"gradients of edge {front.index}"
            simulation.start(front.train(), f"edge {front.index}")
            simulation.start(front.take_gradients(), gradients, background=True)

    def edge_compute(self, index: int, seconds: float, name: str) -> Event[float]:
        """Compute on an edge's processors, and return the event of the end of the one that is priced."""
        costs = self._parties[index].costs
        for beside, part in costs.edge_beside:
            self.simulation.compute(self.simulation.processor(index, beside), seconds * part, name)
        main = costs.edge_processor or self._cluster.device_of(index).default_processor
        return self.simulation.compute(self.simulation.processor(index, main), seconds, name)

    def record(
        self,
        kind: ActionKind,
        index: int,
        batch: int,
        plan: SplitPlan,
    ) -> None:
        """Note an action that is complete now."""
        self._actions.append(Action(kind, index, batch, plan.cut, plan.bits, plan.window))
        self._times_s.append(self.simulation.now_s - self._start_s)

    # ------------------------------------------------------------------------------------------- the back halves

    def take_features(self, index: int, batch: int, step_s: float) -> None:
        """Let the back half process a batch's features as soon as its mode allows."""
        if self._mode == "own":
            self._begin_step((index,), batch, step_s)
            return
        self._features[batch, index] = step_s
        if self._mode == "joined":
            everyone = tuple(range(self.num_parties))
            if all((batch, other) in self._features for other in everyone):
                steps_s = [self._features.pop((batch, other)) for other in everyone]
                self._begin_step(everyone, batch, max(steps_s))
            return
        while self._turn in self._features:
            batch, index = self._turn
            self._begin_step((index,), batch, self._features.pop(self._turn))
            self._turn = (batch + 1, 0) if index + 1 == self.num_parties else (batch, index + 1)

    def _begin_step(
        self,
        parties: tuple[int, ...],
        batch: int,
        step_s: float,
    ) -> None:
        def end(seconds: float) -> None:
            if not self.reverse:
                self.cloud_busy_s += seconds
            for index in parties:
                self._fronts[index].return_gradient(batch, seconds)

        if self.reverse:
            self.edge_compute(parties[0], step_s, f"step {batch}").then(end)
            return
        half = f" {parties[0]}" if self._mode == "own" else ""
        processor = self.simulation.processor("cloud", f"half{half}")
        if self._free is None:
            self.simulation.compute(processor, step_s, f"step {batch}").then(end)
        else:
            name = f"step {batch} of edge {parties[0]}"
            self.simulation.start(self.cloud_work(processor, step_s, name), name).then(end)

    def cloud_work(
        self, processor: SimulatedProcessor, seconds: float, name: str
    ) -> Process[float]:
        """Compute on a processor of the cloud, if need be after waiting for a free one; return the seconds."""
        if self._free is not None:
            yield self._free.take()
        spent_s: float = yield self.simulation.compute(processor, seconds, name)
        if self._free is not None:
            self._free.give()
        return spent_s

    # ---------------------------------------------------------------------------------------------------- results

    def timeline(self, usage: Usage) -> Timeline:
        """Return what happened."""
        end_s = max(front.ended_s for front in self._fronts)
        return Timeline(
            actions=tuple(self._actions),
            times_s=tuple(self._times_s),
            duration_s=end_s - self._start_s,
            usage=usage,
            cloud_busy_s=self.cloud_busy_s,
            num_batches=len(self.span),
            parties=tuple(front.totals(self._start_s, end_s) for front in self._fronts),
        )


class _Placement:
    """Where one party's model is cut, and the moves of the cut that its decider asks for."""

    def __init__(
        self,
        party: Party,
        simulation: Simulation,
        index: int,
        reverse: bool,
    ) -> None:
        self._party = party
        self._simulation = simulation
        self._index = index
        self._reverse = reverse
        self._start_s = simulation.now_s
        self._cut = party.split_plan.cut
        self._bits = party.split_plan.bits
        self.moves: list[CutMove] = []
        # The deployment to move to, and since when.
        self.pending: tuple[SplitPlan, float] | None = None
        self._asked_batch: int | None = None
        self._probed_s = -math.inf
        self._known: dict[tuple[int | None, int, int], BatchTimes] = {}

    @property
    def is_alone(self) -> bool:
        """Whether the edge trains without the cloud."""
        return self._cut is None

    def times(self, batch: int) -> BatchTimes:
        """Return the times of a batch under the present deployment."""
        window = self._party.k(batch)
        key = (self._cut, self._bits, window)
        if key not in self._known:
            plan = replace(self._party.split_plan, cut=self._cut, bits=self._bits, window=window)
            self._known[key] = batch_times(
                self._party.costs,
                plan,
                reverse=self._reverse,
            )
        return self._known[key]

    def must_ask(self, batch: int) -> bool:
        """Whether the decider has not been asked before this batch."""
        return self._party.decider is not None and self._asked_batch != batch

    def ask(self, batch: int, channels: Sequence[Channel], meter: BandwidthMeter) -> None:
        """Ask the decider before a batch; a new width holds at once, a new cut is pending."""
        self._asked_batch = batch
        now_s = self._simulation.now_s
        if self._cut is None:
            self._probe(channels)
        for channel in channels:
            channel.update_meter()
        speed = self._simulation.speed(self._index)
        # The speed is 0 if a user has just taken the edge.
        if not speed or self._party.decider is None:
            return
        current = self.times(batch).split_plan
        rates = meter.rates(now_s)
        new = self._party.decider.decide(batch, rates, current, current.window, speed)
        if new is None or (new.cut, new.bits) == (self._cut, self._bits):
            return
        if new.cut != self._cut:
            self.pending = (new, now_s)
            return
        # Another width needs no drain: each batch carries its own.
        self._bits = new.bits
        self._record(batch, current, now_s, now_s)

    def _probe(self, channels: Sequence[Channel]) -> None:
        now_s = self._simulation.now_s
        if now_s - self._probed_s < PROBE_INTERVAL_S:
            return
        self._probed_s = now_s
        for channel in channels:
            if channel.is_empty:
                channel.send(PROBE_BYTES, "a probe")

    def move(self, batch: int, up: Channel, down: Channel) -> Process[SplitPlan]:
        """Transfer the layers of the pending move; return the new deployment. Both halves are idle meanwhile."""
        assert self.pending is not None
        (new, decided_s), drained_s = self.pending, self._simulation.now_s
        costs = self._party.costs
        received_bytes = received_weight_bytes(
            costs,
            self._cut,
            new.cut,
            reverse=self._reverse,
        )
        channel = down if received_bytes > 0 else up
        yield channel.send(abs(received_bytes), f"layers before batch {batch}")
        old = self.times(batch).split_plan
        self._cut = new.cut
        self._bits = new.bits
        self.pending = None
        return self._record(batch, old, decided_s, drained_s)

    def _record(self, batch: int, old: SplitPlan, decided_s: float, drained_s: float) -> SplitPlan:
        new = self.times(batch).split_plan
        move = CutMove(
            batch=batch,
            decided_s=decided_s - self._start_s,
            old=old,
            new=new,
            drain_s=drained_s - decided_s,
            migration_s=self._simulation.now_s - drained_s,
        )
        self.moves.append(move)
        return new


class _Front:
    """One front half."""

    def __init__(self, pipeline: _Pipeline, index: int, party: Party) -> None:
        self.index = index
        self._party = party
        self._pipeline = pipeline
        self._simulation = pipeline.simulation
        self._placement = _Placement(party, self._simulation, index, pipeline.reverse)
        self._meter = self._new_meter()
        self._up, self._down = self._channel("up"), self._channel("down")
        self._out = self._down if pipeline.reverse else self._up
        self._out.on_change = self._wake
        first = pipeline.span.start
        # The next batch to go forward, and the oldest whose gradient is not applied.
        self._next = self._oldest = first
        self._end = first + party.num_batches(first, len(pipeline.span))
        self._just_applied = False
        # Batches whose gradients have arrived.
        self._gradients: deque[int] = deque()
        self._returning: Queue[tuple[int, Event[None]]] = Queue()
        self._woken: Event[None] | None = None
        self._in_flight: dict[int, BatchTimes] = {}
        self._staleness: list[int] = []
        # Of the edge.
        self._compute_s = 0.0
        self.ended_s = self._simulation.now_s

    def _new_meter(self) -> BandwidthMeter | None:
        if self._party.decider is None:
            return None
        uplink = self._pipeline.uplink
        now_s = self._simulation.now_s
        shared = uplink.rates(now_s) if uplink else None
        own = self._party.bandwidth_profile.rates(now_s)
        return BandwidthMeter(first=own.behind(shared, self._pipeline.num_parties))

    def _channel(self, direction: Direction) -> Channel:
        profile = self._party.bandwidth_profile
        uplink = self._pipeline.uplink
        name = f"party {self.index}: its {direction} link"
        own = self._simulation.link(name, profile.steps(direction))
        return Channel(
            self._simulation,
            [own, *self._pipeline.shared_links[direction]],
            self.index,
            direction,
            latency_s=profile.latency_s + (uplink.latency_s if uplink else 0.0),
            meter=self._meter,
        )

    # ------------------------------------------------------------------------------------------------- processes

    def train(self) -> Process[None]:
        """Train all batches; begin the next task as soon as there is one."""
        placement = self._placement
        while self._oldest < self._end:
            may_forward = False
            if placement.pending is None and self._next < self._end:
                may_forward = self._next - self._oldest <= self._party.limit(self._next)
            action = next_action(
                allowed=may_forward,
                link_is_idle=self._link_is_idle(),
                has_gradient=bool(self._gradients),
                just_applied=self._just_applied,
                is_drained=self._oldest == self._next,
            )
            if action is ActionKind.APPLY:
                yield from self._apply()
            elif action is ActionKind.FORWARD:
                if placement.must_ask(self._next) and self._meter is not None:
                    placement.ask(self._next, (self._up, self._down), self._meter)
                else:
                    yield from self._forward()
            elif action is ActionKind.RECUT:
                plan = yield from placement.move(self._next, self._up, self._down)
                self._pipeline.record(ActionKind.RECUT, self.index, self._next, plan)
            else:
                self._woken = Event("a gradient, or an idle link")
                yield self._woken
        self.ended_s = self._simulation.now_s

    def take_gradients(self) -> Process[None]:
        """Receive the gradients, in the order of their batches."""
        while True:
            batch, arrived = yield self._returning.get()
            yield arrived
            self._gradients.append(batch)
            self._wake()

    def _link_is_idle(self) -> bool:
        """Whether a batch that goes forward now would be sent next; no batch is, while the link is lost."""
        if self._placement.is_alone or self._out.is_empty:
            return True
        if self._meter is None or not self._out.is_idle:
            return self._out.is_idle
        self._out.update_meter()
        rates = self._meter.rates(self._simulation.now_s)
        return (rates.down_bytes_per_s if self._pipeline.reverse else rates.up_bytes_per_s) > 0.0

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.happened:
            self._woken.fire()

    def _forward(self) -> Process[None]:
        self._just_applied = False
        batch = self._next
        times = self._placement.times(batch)
        self._in_flight[batch] = times
        self._next += 1
        yield from self._work(
            times.forward_s,
            f"forward {batch}",
            at_edge=times.alone,
        )
        self._pipeline.record(ActionKind.FORWARD, self.index, batch, times.split_plan)
        if times.alone:
            self._pipeline.record(ActionKind.STEP, self.index, batch, times.split_plan)
            self._staleness.append(0)
            self._finish(batch)
            return

        def take(_: object) -> None:
            self._pipeline.take_features(self.index, batch, times.step_s)

        # The processor is busy with a transfer while the link carries it, and before it is free for another batch.
        sent: Event[None] = Event("features")
        all_of(self._out.send(times.feature_bytes, f"batch {batch}"), sent).then(take)
        if times.sending_s:
            yield from self._work(times.sending_s, f"send {batch}")
        sent.fire()
        if times.receiving_s:
            yield from self._work(times.receiving_s, f"receive {batch}")

    def return_gradient(self, batch: int, step_s: float) -> None:
        """Send a batch's gradient to this front half; the step took `step_s`."""
        times = self._in_flight[batch]
        if self._pipeline.reverse:
            self._compute_s += step_s
        self._pipeline.record(ActionKind.STEP, self.index, batch, times.split_plan)
        back = self._up if self._pipeline.reverse else self._down
        arrived = back.send(times.gradient_bytes, f"the gradient of batch {batch}")
        if times.receiving_s:
            arrived = all_of(arrived, self._simulation.timeout(times.receiving_s))
        self._returning.put((batch, arrived))

    def _apply(self) -> Process[None]:
        self._just_applied = True
        batch = self._gradients.popleft()
        times = self._in_flight[batch]
        self._staleness.append(self._next - 1 - batch if times.trains else 0)
        yield from self._work(times.apply_s, f"update {batch}")
        self._finish(batch)

    def _finish(self, batch: int) -> None:
        assert batch == self._oldest, "gradients return in the order of their batches"
        plan = self._in_flight.pop(batch).split_plan
        self._pipeline.record(ActionKind.APPLY, self.index, batch, plan)
        self._oldest += 1

    def _work(
        self,
        seconds: float,
        name: str,
        *,
        at_edge: bool = False,
    ) -> Process[None]:
        """Compute at the front half's place, or `at_edge`."""
        if self._pipeline.reverse and not at_edge:
            processor = self._simulation.processor("cloud", f"front {self.index}")
            spent_s = yield from self._pipeline.cloud_work(processor, seconds, name)
            self._pipeline.cloud_busy_s += spent_s
        else:
            spent_s = yield self._pipeline.edge_compute(self.index, seconds, name)
            self._compute_s += spent_s

    def totals(self, start_s: float, end_s: float) -> PartyTimeline:
        """Return the party's totals of a training from `start_s` to `end_s`."""
        return PartyTimeline(
            duration_s=self.ended_s - start_s,
            compute_s=self._compute_s,
            idle_s=max(0.0, end_s - start_s - self._compute_s),
            sending_s=self._up.busy_s,
            receiving_s=self._down.busy_s,
            up_bytes=self._up.num_bytes,
            down_bytes=self._down.num_bytes,
            staleness=tuple(self._staleness),
            moves=tuple(self._placement.moves),
        )
