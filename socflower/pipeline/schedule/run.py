"""The execution of a plan in virtual time; each device is a process of `sim` (paper §3.2, Fig. 4, 11).

A device does its stage's passes in the order of `schedule.order`, each on its own share of the micro-batch, as soon as
that share's activations or gradients have arrived. It sends its results at once and does not wait; messages between two
devices keep their order. After its last backward pass a device exchanges gradients and updates its weights. It waits
only for the devices with which it exchanges.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from socflower.cluster import HUB, Activity, TaskGraphBuilder, Usage
from socflower.cluster.link_rate import RateSteps
from socflower.errors import require_range
from socflower.pipeline.plan import (
    PipelinePlan,
    Place,
    Plan,
    Slice,
    Sync,
    SynchronisedPart,
    TwoDPlan,
    places,
    synchronised_parts,
)
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.schedule.order import Pass, ScheduledPass, operations
from socflower.sim import EventClock
from socflower.sim.processes import (
    Credits,
    Event,
    Process,
    Queue,
    SimulatedProcessor,
    Simulation,
    all_of,
)

Delay = Callable[[int, ScheduledPass], float]
"""Returns additional seconds of a pass, by SoC and pass."""


class PassRecord(NamedTuple):
    """A pass of a device."""

    soc: int
    pipeline: int
    stage: int
    # The update of the weights, from 0.
    step: int
    kind: Pass
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRun:
    """A plan's updates in virtual time."""

    usage: Usage
    num_steps: int
    # The ends of updates on all devices, since the start.
    step_ends_s: tuple[float, ...]
    # In the order of their ends.
    passes: tuple[PassRecord, ...]
    # Micro-batches, by SoC.
    peak_in_flight: Mapping[int, int]

    @property
    def step_s(self) -> float:
        """Mean seconds of an update."""
        return self.usage.duration_s / self.num_steps

    @property
    def num_bytes(self) -> float:
        """Bytes of all transfers."""
        return sum(self.usage.num_bytes.values())


def simulate_schedule(
    problem: PipelineProblem,
    plan: Plan,
    *,
    clock: EventClock | None = None,
    num_steps: int = 1,
    link_rates: Mapping[str, RateSteps] | None = None,
    delay: Delay | None = None,
    within_memory: bool = True,
    label: str = "pipeline",
) -> ScheduleRun:
    """Execute `num_steps` updates of a plan in virtual time, advance the clock, and return the run.

    Parameters
    ----------
    clock : EventClock, optional
        Of the problem's cluster. Its heat and background load slow devices down; its trace shows the micro-batches. The
        idle watts of all the problem's devices count. Default: a new clock, at full speed.
    link_rates : mapping, optional
        Bandwidths over time of directed links of the cluster, such as `soc3/tx`.
    delay : callable, optional
        Seconds added to each pass.
    within_memory : bool
        Whether the plan must keep the budgets; plans of planners without budgets may exceed them.

    Raises
    ------
    InfeasiblePlan
        If the plan exceeds a memory budget.
    SocflowerError
        If a link is lost for good before all messages are sent.
    """
    require_range("pipeline", least=1, num_steps=num_steps)
    if within_memory:
        plan.check(problem)
    run = _Run(problem, plan, num_steps, link_rates or {}, delay)
    clock = clock or EventClock(problem.cluster)
    socs = [device.soc for device in problem.devices]
    return run.result(clock.run_processes(run.start, socs=socs, label=label))


def interval_usage(
    problem: PipelineProblem, plan: Plan, clock: EventClock, num_steps: int
) -> Usage:
    """Advance the clock by an interval: `num_steps` updates, and then the stages' way to the hub; return its usage."""
    usage = simulate_schedule(problem, plan, clock=clock, num_steps=num_steps).usage
    builder = TaskGraphBuilder()
    for stage in plan.pipelines[0].stages:
        num_bytes = problem.model.weight_bytes(stage.first_layer, stage.last_layer)
        if num_bytes:
            builder.transfer("stage to the hub", stage.devices[0], HUB, num_bytes, num_messages=1)
    socs = [device.soc for device in problem.devices]
    return usage + clock.run(builder.build(socs), label="model to the hub")


class _Member:
    """A device's place in a plan, and the queues of its messages."""

    def __init__(self, plan: Plan, soc: int, place: Place) -> None:
        self.soc, self.place = soc, place
        self.pipeline = plan.pipelines[place.pipeline]
        self.stage = self.pipeline.stages[place.stage]
        self.share = self.stage.shares[place.rank]
        # Arrived activations and gradients, one queue per sender, in the order of micro-batches.
        self.inputs: list[Queue[None]] = []
        self.gradients: list[Queue[None]] = []
        # Messages out of the stage and back into the stage before.
        self.outputs: list[_Outgoing] = []
        self.returns: list[_Outgoing] = []
        # Permissions for the device with the samples to send more of them.
        self.free: list[Credits] = []
        # In the order of their exchange.
        self.parts: list[SynchronisedPart] = []
        self.in_flight = self.peak_in_flight = 0

    def count(self, change: int) -> None:
        """Count micro-batches in flight."""
        self.in_flight += change
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)


class _Channel:
    """Messages from one device to another, sent one after the other in the order of `send`."""

    def __init__(
        self,
        run: "_Run",
        source: int | str,
        target: int | str,
        what: str,
    ) -> None:
        self._simulation, self._source, self._target = run.simulation, source, target
        self._waiting: Queue[tuple[float, str, Queue[None]]] = Queue(what)
        self._simulation.start(self._carry(), f"{what} from {source} to {target}", background=True)

    def send(self, num_bytes: float, name: str, arrived: Queue[None]) -> None:
        """Send bytes; `arrived` gets a value on their arrival."""
        self._waiting.put((num_bytes, name, arrived))

    def _carry(self) -> Process[None]:
        while True:
            num_bytes, name, arrived = yield self._waiting.get()
            yield self._simulation.send(self._source, self._target, num_bytes, name)
            arrived.put(None)


class _Outgoing(NamedTuple):
    """Where a device sends a part of its results for each micro-batch."""

    channel: _Channel
    piece: Slice
    arrived: Queue[None]


class _Run:
    """The processes of a plan, and their records."""

    def __init__(
        self,
        problem: PipelineProblem,
        plan: Plan,
        num_steps: int,
        link_rates: Mapping[str, RateSteps],
        delay: Delay | None,
    ) -> None:
        self._problem, self._plan, self._num_steps, self._delay = problem, plan, num_steps, delay
        self._link_rates = link_rates
        self._members = {soc: _Member(plan, soc, place) for soc, place in places(plan).items()}
        self._passes: list[PassRecord] = []
        self._step_ends_s = [0.0] * num_steps
        self._start_s = 0.0

    def start(self, simulation: Simulation) -> None:
        """Start all processes."""
        self.simulation, self._start_s = simulation, simulation.now_s
        simulation.change_rates(self._link_rates)
        self._plan_exchange()
        for pipeline in self._plan.pipelines:
            self._connect(pipeline)
            if pipeline.samples_on is not None:
                self._supply(pipeline, pipeline.samples_on)
        for member in self._members.values():
            name = f"SoC {member.soc}, stage {member.place.stage}"
            simulation.start(self._work(member), name)

    def result(self, usage: Usage) -> ScheduleRun:
        """Return the record of the run."""
        return ScheduleRun(
            usage=usage,
            num_steps=self._num_steps,
            step_ends_s=tuple(self._step_ends_s),
            passes=tuple(self._passes),
            peak_in_flight={soc: member.peak_in_flight for soc, member in self._members.items()},
        )

    # ------------------------------------------------------------------------------------------------ connections

    def _connect(self, pipeline: PipelinePlan) -> None:
        """Join the devices of neighbouring stages: activations forward, their gradients backward."""
        for index, (stage, following) in enumerate(pairwise(pipeline.stages)):
            for piece in pipeline.slices(index):
                sender = self._members[stage.devices[piece.sender]]
                receiver = self._members[following.devices[piece.receiver]]
                arrived: Queue[None] = Queue(f"activations of stage {index}")
                returned: Queue[None] = Queue(f"gradients of stage {index + 1}")
                receiver.inputs.append(arrived)
                sender.gradients.append(returned)
                there = _Channel(self, sender.soc, receiver.soc, "activations")
                sender.outputs.append(_Outgoing(there, piece, arrived))
                back = _Channel(self, receiver.soc, sender.soc, "gradients")
                receiver.returns.append(_Outgoing(back, piece, returned))

    def _supply(self, pipeline: PipelinePlan, source: int) -> None:
        """Let a device send samples to the first stage and labels to the last, at most K_p micro-batches ahead."""
        model = self._problem.model
        ends = (
            (pipeline.stages[0], model.input_bytes, "samples"),
            (pipeline.stages[-1], model.label_bytes, "labels"),
        )
        for stage, num_bytes, what in ends:
            for soc, share in stage.members:
                if soc != source and num_bytes:
                    arrived: Queue[None] = Queue(what)
                    free = Credits(stage.in_flight, f"a place for {what}")
                    self._members[soc].inputs.append(arrived)
                    self._members[soc].free.append(free)
                    channel = _Channel(self, source, soc, what)
                    number = pipeline.num_micro_batches
                    sending = self._send_samples(
                        channel, free, share * num_bytes, number, what, arrived
                    )
                    self.simulation.start(sending, f"{what} for SoC {soc}")

    def _send_samples(
        self,
        channel: _Channel,
        free: Credits,
        num_bytes: float,
        num_micro_batches: int,
        what: str,
        arrived: Queue[None],
    ) -> Process[None]:
        for number in range(num_micro_batches * self._num_steps):
            yield free.take()
            channel.send(num_bytes, f"{what} {number % num_micro_batches}", arrived)

    # ---------------------------------------------------------------------------------------------------- passes

    def _work(self, member: _Member) -> Process[None]:
        """Do all updates of a device."""
        problem, stage, pipeline = self._problem, member.stage, member.pipeline
        device, simulation = problem.device(member.soc), self.simulation
        update_s = device.update_s(problem.model.weight_bytes(*stage.layers))
        # Only passes run on the int8 processor; gradients and updates are in FP32.
        cpu = processor = simulation.processor(
            member.soc, problem.kind(member.soc).default_processor
        )
        if device.int8_processor:
            processor = simulation.processor(member.soc, device.int8_processor)
        costs = self._pass_costs(member)
        order = tuple(operations(pipeline.policy, stage.in_flight, pipeline.num_micro_batches))
        for step in range(self._num_steps):
            for operation in order:
                yield from self._pass(member, processor, costs[operation.kind], step, operation)
            for part in member.parts:
                yield from self._exchange(member, part, step, cpu)
            if update_s:
                yield simulation.compute(cpu, update_s, "update", activity=Activity.UPDATE)
            self._step_ends_s[step] = max(self._step_ends_s[step], simulation.now_s - self._start_s)

    def _pass_costs(self, member: _Member) -> dict[Pass, tuple[float, float]]:
        """Return the seconds of a pass and the bytes that it sends of one sample."""
        problem, (first, last) = self._problem, member.stage.layers
        device, layers = problem.device(member.soc), problem.model.layers
        forward_s, backward_s = problem.pass_s(device, first, last, member.share)
        returned_bytes = layers[first - 1].crossing_bytes if first else 0.0
        return {
            Pass.FORWARD: (forward_s, layers[last].crossing_bytes * problem.activation_part),
            Pass.BACKWARD: (backward_s, returned_bytes * problem.gradient_part),
        }

    def _pass(
        self,
        member: _Member,
        processor: SimulatedProcessor,
        costs: tuple[float, float],
        step: int,
        operation: ScheduledPass,
    ) -> Process[None]:
        """Wait for a pass's tensors, compute it, and send its results."""
        simulation, (kind, micro_batch) = self.simulation, operation
        seconds, sent_bytes = costs
        forward = kind == Pass.FORWARD
        for queue in member.inputs if forward else member.gradients:
            yield queue.get()
        if forward:
            member.count(1)
        if self._delay is not None:
            seconds += self._delay(member.soc, operation)
        ran_s = yield simulation.compute(processor, seconds, f"{kind.value} {micro_batch}")
        place, now_s = member.place, simulation.now_s
        self._passes.append(
            PassRecord(
                soc=member.soc,
                pipeline=place.pipeline,
                stage=place.stage,
                step=step,
                kind=kind,
                micro_batch=micro_batch,
                start_s=now_s - ran_s,
                end_s=now_s,
            )
        )
        if forward:
            for free in member.free:
                free.give()
        else:
            member.count(-1)
        what = "activations" if forward else "gradients"
        for channel, piece, arrived in member.outputs if forward else member.returns:
            name = f"{what} {micro_batch} of stage {place.stage}"
            channel.send(piece.num_samples * sent_bytes, name, arrived)

    # -------------------------------------------------------------------------------------------------- gradients

    def _plan_exchange(self) -> None:
        """Give every device the parts that it exchanges: last layers first, in one order on all devices."""
        plan, model = self._plan, self._problem.model
        self._by_server: int | str | None = None
        self._rings: dict[tuple[SynchronisedPart, int], _Ring] = {}
        # At the server: uploads by part, SoC and step, and the event of all of a part's uploads.
        self._arrivals: dict[tuple[SynchronisedPart, int, int], Queue[None]] = {}
        self._uploads: dict[tuple[SynchronisedPart, int], Event[None]] = {}
        if isinstance(plan, TwoDPlan) and plan.sync == Sync.SERVER:
            self._by_server = plan.server
            if len(plan.groups) == 1:
                return
        for part in reversed(synchronised_parts(plan, model.ties)):
            if len(part.devices) < 2 or not part.weight_bytes(model):
                continue
            for soc in part.devices:
                self._members[soc].parts.append(part)
            if self._by_server is None:
                self._join_ring(part)
            else:
                for step in range(self._num_steps):
                    self._uploads[part, step] = self._gather(part, step)

    def _join_ring(self, part: SynchronisedPart) -> None:
        arrivals: list[Queue[None]] = [
            Queue(f"a ring of stage gradients at SoC {soc}") for soc in part.devices
        ]
        for rank, soc in enumerate(part.devices):
            following = (rank + 1) % len(part.devices)
            channel = _Channel(self, soc, part.devices[following], "ring")
            self._rings[part, soc] = _Ring(channel, arrivals[rank], arrivals[following])

    def _gather(self, part: SynchronisedPart, step: int) -> Event[None]:
        """Return the event that the server has the gradients of all devices of a part."""
        waiting: list[Queue[None]] = [Queue(f"the upload of SoC {soc}") for soc in part.devices]
        for soc, queue in zip(part.devices, waiting, strict=True):
            self._arrivals[part, soc, step] = queue
        return all_of(*[queue.get() for queue in waiting])

    def _exchange(
        self,
        member: _Member,
        part: SynchronisedPart,
        step: int,
        processor: SimulatedProcessor,
    ) -> Process[None]:
        """All-reduce a part's gradients: 2(n − 1) rounds in a ring of n, or an upload to the server and a download."""
        simulation, soc, server = self.simulation, member.soc, self._by_server
        num_bytes = part.weight_bytes(self._problem.model)
        if server is None:
            ring, size = self._rings[part, soc], len(part.devices)
            for _ in range(2 * (size - 1)):
                ring.channel.send(num_bytes / size, "ring", ring.at_next)
                yield ring.arrived.get()
                yield from self._handle(soc, 2.0 * num_bytes / size, processor)
            return
        if soc != server:
            yield simulation.send(soc, server, num_bytes, "upload")
        self._arrivals[part, soc, step].put(None)
        yield self._uploads[part, step]
        if soc != server:
            yield simulation.send(server, soc, num_bytes, "download")
            yield from self._handle(soc, 2.0 * num_bytes, processor)

    def _handle(self, soc: int, num_bytes: float, processor: SimulatedProcessor) -> Process[None]:
        byte_s = self._problem.device(soc).byte_s
        if byte_s:
            yield self.simulation.compute(processor, num_bytes * byte_s, "messages")


class _Ring(NamedTuple):
    """A device's links in a ring."""

    channel: _Channel
    arrived: Queue[None]
    at_next: Queue[None]
