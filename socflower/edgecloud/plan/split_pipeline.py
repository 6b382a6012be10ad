"""The pipeline of a split training in virtual time: edges, links and cloud as processes, no tensors (paper §4.1, F23).

A front half is one processor. It does the forward pass of the next batch t while t − t′ ≤ K, where t′ is the oldest
batch whose gradient is not applied, and applies the gradients that arrived, oldest first. If it may do either, it
alternates: after an update comes a forward pass. So the batches stay spread over the pipeline, and constant rates give
exactly F26's period, max(T_M, T_Σ/(K+1)). Applying every arrived gradient first (`apply_first`) makes gradients less
stale but bunches batches up, which costs time whenever updates are a large part of T_Σ.

Links and the back half serve in order of arrival. A move of the cut waits until nothing is in flight; then the layers
are sent, and the next batch's forward pass begins. The resulting weights are a function of the actions alone.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from socflower.cluster import Cluster, Usage
from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, Direction
from socflower.edgecloud.plan.channel import Channel
from socflower.edgecloud.plan.cost_model import received_weight_bytes
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import CloudMode, Decider, Party
from socflower.edgecloud.plan.phases import BatchTimes, batch_times
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
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
"""What an edge that trains alone sends in each direction to measure whether a cut would pay, if it has a decider."""
PROBE_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CutMove:
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
    moves: tuple[CutMove, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A training in virtual time."""

    actions: tuple[Action, ...]
    times_s: tuple[float, ...]  # when each action was complete, from the start
    duration_s: float
    usage: Usage  # of the edges
    cloud_busy_s: float  # of all its processors together; in a reverse split, of the front halves
    num_batches: int  # of each party that is not away
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
    apply_first: bool = False,
    uplink: BandwidthProfile | None = None,
    cloud_processors: int | None = None,
    label: str = "split training",
) -> Timeline:
    """Let all parties train the batches from `first_batch` on, advance the clock, and return the timeline.

    Parameters
    ----------
    parties : Party ...
        The edges, which are the first SoCs of `cluster`; each does `num_batches` batches, less those for which it is
        away, if the cloud is "own".
    clock : EventClock
        Of the same cluster. Its heat and users slow the edges down, and links are as their profiles say at its time.
    cloud : "own", "turns" or "joined"
        A cloud half and processor for each party; one half that processes batch b of party 0, of party 1, ... and then
        batch b + 1; or one whose step on a batch waits for the features of all parties, and takes the longest of their
        step times.
    reverse : bool
        Whether the front half is in the cloud: features are sent down and gradients up.
    apply_first : bool
        Whether a front half applies every arrived gradient before the next forward pass.
    uplink : BandwidthProfile, optional
        A link that all edges share behind their own ones; its latency is added to theirs.
    cloud_processors : int, optional
        How many halves of the cloud "own" work at a time, in the order of asking; default: all.

    Raises
    ------
    ConfigError
        For invalid settings, for a cut that would move or differ between parties of a shared half or that lose one, and
        if all parties are away.
    SocflowerError
        If a link is lost for good while something is yet to be sent.
    """
    _check(parties, num_batches, first_batch, cloud, reverse)
    # A back half with only one party is not shared, so its cut may move, even to edge-only.
    mode: CloudMode = "own" if len(parties) == 1 else cloud
    require_range(
        "split pipeline",
        least=1,
        cloud_processors=1 if cloud_processors is None else cloud_processors,
    )
    if mode != "own" and cloud_processors is not None:
        raise ConfigError(
            f"split pipeline: cloud = {mode!r} has one half and one processor; leave cloud_processors = "
            f"{cloud_processors} out"
        )
    pipeline = _Pipeline(
        parties,
        num_batches,
        first_batch,
        cluster,
        mode,
        reverse,
        apply_first,
        uplink,
        cloud_processors,
    )
    present = [
        index for index, party in enumerate(parties) if party.num_batches(first_batch, num_batches)
    ]
    if not present:
        raise ConfigError(
            f"split pipeline: all parties are away from batch {first_batch} on; one must train"
        )
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
    ends = tuple(round(epoch * batches_per_epoch) for epoch in round_epochs)
    empty = next(
        (index for index, end in enumerate(ends) if end <= (ends[index - 1] if index else 0)), None
    )
    if empty is not None:
        raise ConfigError(
            f"split training: round {empty + 1}, to epoch {round_epochs[empty]:g}, would have no batch "
            f"of the edges' {batches_per_epoch} an epoch; make rounds longer, or batches smaller"
        )
    if not ends or ends[-1] != total:
        raise ConfigError(
            f"split training: round_epochs end at {round_epochs[-1] if ends else 0:g} of {num_epochs} "
            "epochs; the last round ends with the training"
        )
    return ends


def moved(parties: Sequence[Party], timeline: Timeline) -> list[Party]:
    """Return the parties with the split plans that they had at the end of a timeline."""
    return [
        replace(party, split_plan=past.moves[-1].new) if past.moves else party
        for party, past in zip(parties, timeline.parties, strict=True)
    ]


def _check(
    parties: Sequence[Party], num_batches: int, first_batch: int, cloud: CloudMode, reverse: bool
) -> None:
    if not parties:
        raise ConfigError("split pipeline: no parties; give at least one")
    require_range("split pipeline", least=1, num_batches=num_batches)
    require_range("split pipeline", least=0, first_batch=first_batch)
    if cloud not in ("own", "turns", "joined"):
        raise ConfigError(f"split pipeline: cloud = {cloud!r} is unknown; use own, turns or joined")
    if cloud == "own" or len(parties) == 1:
        return
    if any(party.away for party in parties):
        raise ConfigError(
            f"split pipeline: a party is away, and with cloud = {cloud!r} the back half needs every "
            "party's batch; use own"
        )
    if reverse:
        raise ConfigError(
            f"split pipeline: a reverse split with cloud = {cloud!r} cannot be: each party has its own "
            "front half there; use own"
        )
    if any(party.split_plan.cut is None for party in parties):
        raise ConfigError(
            f"split pipeline: an edge alone beside cloud = {cloud!r} cannot be; give every party a cut"
        )
    if any(party.decider is not None for party in parties):
        raise ConfigError(
            f"split pipeline: with cloud = {cloud!r} parties share the back half, so none can move its "
            "cut; leave out the decider"
        )
    if cloud == "turns" and len({party.split_plan.cut for party in parties}) > 1:
        raise ConfigError(
            "split pipeline: parties that take turns share the back half; give all the same cut"
        )


class _Pipeline:
    """The processes of all parties and of the cloud, and what they record."""

    def __init__(
        self,
        parties: Sequence[Party],
        num_batches: int,
        first_batch: int,
        cluster: Cluster,
        cloud: CloudMode,
        reverse: bool,
        apply_first: bool,
        uplink: BandwidthProfile | None,
        cloud_processors: int | None,
    ) -> None:
        self.num_batches, self.first_batch, self.num_parties = (
            num_batches,
            first_batch,
            len(parties),
        )
        self.reverse, self.apply_first = reverse, apply_first
        self.cloud_busy_s = 0.0
        self.uplink = uplink
        self._parties, self._cluster, self._mode = parties, cluster, cloud
        self._free = (
            None
            if cloud_processors is None
            else Credits(cloud_processors, "a processor of the cloud")
        )
        self._actions: list[Action] = []
        self._times_s: list[float] = []
        self._turn = (first_batch, 0)  # the next batch and party, where they take turns
        self._features: dict[
            tuple[int, int], float
        ] = {}  # that wait for others: seconds of the step, by batch, party
        self._start_s = 0.0

    def start(self, simulation: Simulation) -> None:
        """Start all processes."""
        self.simulation, self._start_s = simulation, simulation.now_s
        shared = self.uplink
        self.shared_links: dict[Direction, list[Link]] = (
            {"up": [], "down": []}
            if shared is None
            else {
                "up": [simulation.link("the shared up link", shared.up)],
                "down": [simulation.link("the shared down link", shared.down)],
            }
        )
        self._fronts = [_Front(self, index, party) for index, party in enumerate(self._parties)]
        for front in self._fronts:
            simulation.start(front.train(), f"edge {front.index}")
            simulation.start(
                front.take_gradients(), f"gradients of edge {front.index}", background=True
            )

    def edge_compute(self, index: int, seconds: float, name: str) -> Event[float]:
        """Compute on an edge's processors, and return the event of the end of the one that is priced."""
        costs = self._parties[index].costs
        for beside, part in costs.edge_beside:
            self.simulation.compute(self.simulation.processor(index, beside), seconds * part, name)
        main = costs.edge_processor or self._cluster.device_of(index).default_processor
        return self.simulation.compute(self.simulation.processor(index, main), seconds, name)

    def record(self, kind: ActionKind, index: int, batch: int, plan: SplitPlan) -> None:
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
            everyone = tuple(range(len(self._parties)))
            if all((batch, other) in self._features for other in everyone):
                self._begin_step(
                    everyone, batch, max(self._features.pop((batch, other)) for other in everyone)
                )
            return
        while self._turn in self._features:
            batch, index = self._turn
            self._begin_step((index,), batch, self._features.pop(self._turn))
            self._turn = (batch + 1, 0) if index + 1 == len(self._parties) else (batch, index + 1)

    def _begin_step(self, parties: tuple[int, ...], batch: int, step_s: float) -> None:
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
            num_batches=self.num_batches,
            parties=tuple(front.totals(self._start_s, end_s) for front in self._fronts),
        )


class _Front:
    """One front half."""

    def __init__(self, pipeline: _Pipeline, index: int, party: Party) -> None:
        self.index, self._party, self._pipeline = index, party, pipeline
        self._simulation = simulation = pipeline.simulation
        profile, now_s = party.bandwidth_profile, simulation.now_s
        self._start_s = now_s
        shared = pipeline.uplink.rates(now_s) if pipeline.uplink else None
        self._meter = (
            None
            if party.decider is None
            else BandwidthMeter(first=profile.rates(now_s).behind(shared, pipeline.num_parties))
        )
        latency_s = profile.latency_s + (pipeline.uplink.latency_s if pipeline.uplink else 0.0)

        def channel(direction: Direction) -> Channel:
            own = simulation.link(f"party {index}: its {direction} link", profile.steps(direction))
            return Channel(
                simulation,
                [own, *pipeline.shared_links[direction]],
                index,
                direction,
                latency_s=latency_s,
                meter=self._meter,
            )

        self._up, self._down = channel("up"), channel("down")
        self._out, self._back = (
            (self._down, self._up) if pipeline.reverse else (self._up, self._down)
        )
        self._cut, self._bits = party.split_plan.cut, party.split_plan.bits
        self._next = self._oldest = pipeline.first_batch
        self._end = pipeline.first_batch + party.num_batches(
            pipeline.first_batch, pipeline.num_batches
        )
        self._just_applied = False
        self._gradients: deque[int] = deque()  # that have arrived
        self._returning: Queue[tuple[int, Event[None]]] = Queue()
        self._woken: Event[None] | None = None
        self._in_flight: dict[int, BatchTimes] = {}
        self._staleness: list[int] = []
        self._moves: list[CutMove] = []
        self._last_asked = (
            pipeline.first_batch - 1
        )  # the last batch before which the decider was asked
        self._pending: tuple[SplitPlan, float] | None = None  # what to move to, and since when
        self._probed_s = -math.inf
        self._compute_s = 0.0  # of the edge
        self.ended_s = now_s
        self._known: dict[tuple[int | None, int, int], BatchTimes] = {}

    # ------------------------------------------------------------------------------------------------- processes

    def train(self) -> Process[None]:
        """Do all batches; begin the next task as soon as there is one."""
        while self._oldest < self._end:
            may_forward, limit = False, 0
            if self._pending is None and self._next < self._end:
                limit = self._party.limit(self._next)
                may_forward = self._next - self._oldest <= limit
            if self._gradients and not (
                may_forward and self._just_applied and not self._pipeline.apply_first
            ):
                yield from self._apply()
            elif may_forward:
                if self._party.decider is not None and self._last_asked < self._next:
                    self._ask_decider(self._party.decider, limit)
                else:
                    yield from self._forward(limit)
            elif self._pending is not None and self._oldest == self._next:
                yield from self._move(*self._pending)
            else:
                self._woken = Event("a gradient")
                yield self._woken
        self.ended_s = self._simulation.now_s

    def take_gradients(self) -> Process[None]:
        """Receive the gradients, in the order of their batches."""
        while True:
            batch, arrived = yield self._returning.get()
            yield arrived
            self._gradients.append(batch)
            if self._woken is not None and not self._woken.happened:
                self._woken.fire()

    def _forward(self, limit: int) -> Process[None]:
        self._just_applied = False
        batch, times = self._next, self._batch_times(limit)
        self._in_flight[batch] = times
        self._next += 1
        yield from self._work(times.forward_s, f"forward {batch}", at_edge=times.alone)
        self._pipeline.record(ActionKind.FORWARD, self.index, batch, times.split_plan)
        if times.alone:
            self._pipeline.record(ActionKind.STEP, self.index, batch, times.split_plan)
            self._staleness.append(0)
            self._finish(batch)
            return
        # The processor is busy with a transfer while the link carries it, and before it is free for another batch.
        sent: Event[None] = Event("features")
        all_of(self._out.send(times.feature_bytes, f"batch {batch}"), sent).then(
            lambda _: self._pipeline.take_features(self.index, batch, times.step_s)
        )
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
        arrived = self._back.send(times.gradient_bytes, f"the gradient of batch {batch}")
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
        assert batch == self._oldest, (
            "gradients come back in the order in which their batches went forward"
        )
        self._pipeline.record(
            ActionKind.APPLY, self.index, batch, self._in_flight.pop(batch).split_plan
        )
        self._oldest += 1

    def _work(self, seconds: float, name: str, *, at_edge: bool = False) -> Process[None]:
        """Compute where the front half is, or `at_edge`."""
        if self._pipeline.reverse and not at_edge:
            processor = self._simulation.processor("cloud", f"front {self.index}")
            spent_s = yield from self._pipeline.cloud_work(processor, seconds, name)
            self._pipeline.cloud_busy_s += spent_s
        else:
            spent_s = yield self._pipeline.edge_compute(self.index, seconds, name)
            self._compute_s += spent_s

    def _batch_times(self, limit: int) -> BatchTimes:
        """Return the times of a batch under the present deployment."""
        key = (self._cut, self._bits, limit)
        if key not in self._known:
            plan = SplitPlan(cut=self._cut, bits=self._bits, window=limit)
            self._known[key] = batch_times(self._party.costs, plan, reverse=self._pipeline.reverse)
        return self._known[key]

    # ----------------------------------------------------------------------------------------- moves of the cut

    def _ask_decider(self, decider: Decider, limit: int) -> None:
        self._last_asked, now_s = self._next, self._simulation.now_s
        assert self._meter is not None
        if self._cut is None:
            self._probe()
        self._up.update_meter()
        self._down.update_meter()
        current = SplitPlan(cut=self._cut, bits=self._bits, window=limit)
        speed = self._simulation.speed(self.index)
        if not speed:  # a user has just taken it
            return
        new = decider.decide(self._next, self._meter.rates(now_s), current, limit, speed)
        if new is None or (new.cut, new.bits) == (self._cut, self._bits):
            return
        if new.cut == self._cut:
            # Another width needs no drain: each batch carries its own.
            self._bits = new.bits
            self._moves.append(
                CutMove(
                    batch=self._next,
                    decided_s=now_s - self._start_s,
                    old=current,
                    new=self._batch_times(limit).split_plan,
                    drain_s=0.0,
                    migration_s=0.0,
                )
            )
        else:
            self._pending = (new, now_s)

    def _probe(self) -> None:
        now_s = self._simulation.now_s
        if now_s - self._probed_s < PROBE_INTERVAL_S:
            return
        self._probed_s = now_s
        for channel in (self._up, self._down):
            if channel.is_empty:
                channel.send(PROBE_BYTES, "a probe")

    def _move(self, new: SplitPlan, decided_s: float) -> Process[None]:
        """Transfer layers between the halves; both halves are idle meanwhile."""
        drained_s = self._simulation.now_s
        received_bytes = received_weight_bytes(
            self._party.costs, self._cut, new.cut, reverse=self._pipeline.reverse
        )
        channel = self._down if received_bytes > 0 else self._up
        yield channel.send(abs(received_bytes), f"what moves before batch {self._next}")
        limit = self._party.limit(self._next)
        old = SplitPlan(cut=self._cut, bits=self._bits, window=limit)
        self._cut, self._bits, self._pending = new.cut, new.bits, None
        plan = self._batch_times(limit).split_plan
        self._moves.append(
            CutMove(
                batch=self._next,
                decided_s=decided_s - self._start_s,
                old=old,
                new=plan,
                drain_s=drained_s - decided_s,
                migration_s=self._simulation.now_s - drained_s,
            )
        )
        self._pipeline.record(ActionKind.RECUT, self.index, self._next, plan)

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
            moves=tuple(self._moves),
        )
