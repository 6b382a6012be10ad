"""The execution of a plan in virtual time: every device a process, on the one engine of `sim` (paper §3.2, Fig. 4, 11).

A device does its stage's passes in the order of `schedule.order`, each on its own share of the micro-batch, as soon as
that share's activations or gradients have arrived. What it makes is sent at once and without waiting, in order on each
pair of devices. After its last backward pass it exchanges gradients and updates its weights; no device waits for
others than those that it exchanges with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from socflower.cluster import Activity, Usage
from socflower.cluster.link_rate import RateSteps
from socflower.errors import require_range
from socflower.pipeline.plan import (
    PipelinePlan,
    Plan,
    Slice,
    Sync,
    SynchronisedPart,
    TwoDPlan,
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
"""Seconds that a pass takes longer than planned, by SoC and pass."""


class PassRecord(NamedTuple):
    """A pass that a device did."""

    soc: int
    pipeline: int
    stage: int
    step: int  # which update of the weights
    kind: Pass
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRun:
    """A plan's updates in virtual time."""

    usage: Usage
    num_steps: int
    step_ends_s: tuple[float, ...]  # when all devices had updated their weights, from the start
    passes: tuple[PassRecord, ...]  # in the order of their ends
    peak_in_flight: Mapping[int, int]  # micro-batches, by SoC

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
    """Execute `num_steps` updates of a plan in virtual time, advance the clock, and return what happened.

    Parameters
    ----------
    clock : EventClock, optional
        Of the problem's cluster; its heat and background load slow devices down, its trace shows the micro-batches.
        Default: a new clock, at full speed. The idle watts of all the problem's devices count.
    link_rates : mapping, optional
        Bandwidths that change with time, of directed links of the cluster such as `soc3/tx`.
    delay : callable, optional
        Seconds added to each pass.
    within_memory : bool
        Whether the plan must keep the budgets; planners that know none make plans that do not.

    Raises
    ------
    InfeasiblePlan
        If the plan exceeds a memory budget.
    SocflowerError
        If a link is lost for good while something is yet to be sent.
    """
    require_range("pipeline", least=1, num_steps=num_steps)
    if within_memory:
        plan.check(problem)
    run = _Run(problem, plan, num_steps, link_rates or {}, delay)
    usage = (clock or EventClock(problem.cluster)).run_processes(
        run.start, socs=[device.soc for device in problem.devices], label=label
    )
    return run.result(usage)


class _Member:
    """A device's place in a plan, and what has arrived for it."""

    def __init__(self, pipeline: int, stage: int, rank: int, soc: int, share: int) -> None:
        self.pipeline, self.stage, self.rank, self.soc, self.share = (
            pipeline,
            stage,
            rank,
            soc,
            share,
        )
        self.inputs: list[Queue[None]] = []  # one a sender, in the order of micro-batches
        self.gradients: list[Queue[None]] = []
        self.parts: list[SynchronisedPart] = []  # in the order of their exchange
        self.in_flight = self.peak_in_flight = 0


class _Channel:
    """Messages from one device to another, one at a time in the order of sending."""

    def __init__(self, run: "_Run", source: int | str, target: int | str, what: str) -> None:
        self._simulation, self._source, self._target = run.simulation, source, target
        self._waiting: Queue[tuple[float, str, Queue[None]]] = Queue(what)
        self._simulation.start(self._carry(), f"{what} from {source} to {target}", background=True)

    def send(self, num_bytes: float, name: str, arrived: Queue[None]) -> None:
        """Send bytes; `arrived` gets a value when they are there."""
        self._waiting.put((num_bytes, name, arrived))

    def _carry(self) -> Process[None]:
        while True:
            num_bytes, name, arrived = yield self._waiting.get()
            yield self._simulation.send(self._source, self._target, num_bytes, name)
            arrived.put(None)


class _Run:
    """The processes of a plan, and what they record."""

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
        self._members = {
            soc: _Member(number, index, rank, soc, share)
            for number, pipeline in enumerate(plan.pipelines)
            for index, stage in enumerate(pipeline.stages)
            for rank, (soc, share) in enumerate(zip(stage.devices, stage.shares, strict=True))
        }
        self._passes: list[PassRecord] = []
        self._step_ends_s = [0.0] * num_steps
        self._start_s = 0.0

    def start(self, simulation: Simulation) -> None:
        """Start all processes."""
        self.simulation, self._start_s = simulation, simulation.now_s
        simulation.change_rates(self._link_rates)
        self._plan_exchange()
        self._outputs: dict[int, list[tuple[_Channel, Slice, Queue[None]]]] = {
            soc: [] for soc in self._members
        }
        self._returns: dict[int, list[tuple[_Channel, Slice, Queue[None]]]] = {
            soc: [] for soc in self._members
        }
        self._sources: dict[int, list[Credits]] = {}
        for pipeline in self._plan.pipelines:
            self._connect(pipeline)
            if pipeline.samples_on is not None:
                self._supply(pipeline, pipeline.samples_on)
        for member in self._members.values():
            simulation.start(self._work(member), f"SoC {member.soc}, stage {member.stage}")

    def result(self, usage: Usage) -> ScheduleRun:
        """Return what happened."""
        return ScheduleRun(
            usage=usage,
            num_steps=self._num_steps,
            step_ends_s=tuple(self._step_ends_s),
            passes=tuple(self._passes),
            peak_in_flight={soc: member.peak_in_flight for soc, member in self._members.items()},
        )

    # ------------------------------------------------------------------------------------------------ connections

    def _connect(self, pipeline: PipelinePlan) -> None:
        """Join the devices of neighbouring stages: activations one way, their gradients the other."""
        for index, stage in enumerate(pipeline.stages[:-1]):
            following = pipeline.stages[index + 1]
            for piece in pipeline.slices(index):
                sender = self._members[stage.devices[piece.sender]]
                receiver = self._members[following.devices[piece.receiver]]
                arrived: Queue[None] = Queue(f"activations of stage {index}")
                returned: Queue[None] = Queue(f"gradients of stage {index + 1}")
                receiver.inputs.append(arrived)
                sender.gradients.append(returned)
                self._outputs[sender.soc].append(
                    (_Channel(self, sender.soc, receiver.soc, "activations"), piece, arrived)
                )
                self._returns[receiver.soc].append(
                    (_Channel(self, receiver.soc, sender.soc, "gradients"), piece, returned)
                )

    def _supply(self, pipeline: PipelinePlan, source: int) -> None:
        """Let a device send samples to the first stage and labels to the last, not more than K_p ahead."""
        model = self._problem.model
        ends = (
            (pipeline.stages[0], model.input_bytes, "samples"),
            (pipeline.stages[-1], model.label_bytes, "labels"),
        )
        for stage, num_bytes, what in ends:
            for soc, share in zip(stage.devices, stage.shares, strict=True):
                if soc == source or not num_bytes:
                    continue
                arrived: Queue[None] = Queue(what)
                self._members[soc].inputs.append(arrived)
                free = Credits(stage.in_flight, f"a place for {what}")
                self._sources.setdefault(soc, []).append(free)
                channel = _Channel(self, source, soc, what)
                self.simulation.start(
                    self._send_samples(
                        channel, free, share * num_bytes, pipeline.num_micro_batches, what, arrived
                    ),
                    f"{what} for SoC {soc}",
                )

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
        pipeline = self._plan.pipelines[member.pipeline]
        stage = pipeline.stages[member.stage]
        device, model = self._problem.device(member.soc), self._problem.model
        first, last = stage.first_layer, stage.last_layer
        seconds = dict(
            zip(
                (Pass.FORWARD, Pass.BACKWARD),
                self._problem.pass_s(device, first, last, member.share),
                strict=True,
            )
        )
        returned_bytes = model.layers[first - 1].output_bytes if first else 0.0
        sent_bytes = {
            Pass.FORWARD: model.layers[last].output_bytes * self._problem.activation_part,
            Pass.BACKWARD: returned_bytes * self._problem.gradient_part,
        }
        update_s = device.update_s(model.weight_bytes(first, last))
        simulation = self.simulation
        cpu = simulation.processor(member.soc, self._problem.kind(member.soc).default_processor)
        processor = (
            simulation.processor(member.soc, device.int8_processor)
            if device.int8_processor
            else cpu
        )
        order = tuple(operations(pipeline.policy, stage.in_flight, pipeline.num_micro_batches))
        for step in range(self._num_steps):
            for operation in order:
                kind, micro_batch = operation
                forward = kind == Pass.FORWARD
                for queue in member.inputs if forward else member.gradients:
                    yield queue.get()
                if forward:
                    member.in_flight += 1
                    member.peak_in_flight = max(member.peak_in_flight, member.in_flight)
                longer_s = 0.0 if self._delay is None else self._delay(member.soc, operation)
                ran_s = yield simulation.compute(
                    processor, seconds[kind] + longer_s, f"{kind.value} {micro_batch}"
                )
                now_s = simulation.now_s
                self._passes.append(
                    PassRecord(
                        member.soc,
                        member.pipeline,
                        member.stage,
                        step,
                        kind,
                        micro_batch,
                        now_s - ran_s,
                        now_s,
                    )
                )
                if not forward:
                    member.in_flight -= 1
                else:
                    for free in self._sources.get(member.soc, ()):
                        free.give()
                name = f"{'activations' if forward else 'gradients'} {micro_batch} of stage {member.stage}"
                for channel, piece, arrived in (self._outputs if forward else self._returns)[
                    member.soc
                ]:
                    channel.send(piece.num_samples * sent_bytes[kind], name, arrived)
            for part in member.parts:
                yield from self._exchange(member, part, step, cpu)
            if update_s:
                yield simulation.compute(cpu, update_s, "update", activity=Activity.UPDATE)
            self._step_ends_s[step] = max(self._step_ends_s[step], simulation.now_s - self._start_s)

    # -------------------------------------------------------------------------------------------------- gradients

    def _plan_exchange(self) -> None:
        """Give every device the parts that it exchanges: last layers first, in one order for all devices."""
        plan = self._plan
        self._by_server = (
            plan.server if isinstance(plan, TwoDPlan) and plan.sync == Sync.SERVER else None
        )
        alone = isinstance(plan, TwoDPlan) and len(plan.groups) == 1
        self._rings: dict[
            tuple[SynchronisedPart, int], tuple[_Channel, Queue[None], Queue[None]]
        ] = {}
        self._arrivals: dict[
            tuple[SynchronisedPart, int, int], Queue[None]
        ] = {}  # at the server, by part, SoC, step
        self._uploads: dict[tuple[SynchronisedPart, int], Event[None]] = {}
        for part in reversed(synchronised_parts(plan)):
            if (
                len(part.devices) < 2
                or not self._problem.model.weight_bytes(part.first_layer, part.last_layer)
                or (alone and self._by_server is not None)
            ):
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
            self._rings[part, soc] = (channel, arrivals[rank], arrivals[following])

    def _gather(self, part: SynchronisedPart, step: int) -> Event[None]:
        """Return the event of a server's having the gradients of all devices of a part."""
        waiting: list[Queue[None]] = [Queue(f"the upload of SoC {soc}") for soc in part.devices]
        for soc, queue in zip(part.devices, waiting, strict=True):
            self._arrivals[part, soc, step] = queue
        return all_of(*[queue.get() for queue in waiting])

    def _exchange(
        self, member: _Member, part: SynchronisedPart, step: int, processor: SimulatedProcessor
    ) -> Process[None]:
        """All-reduce a part's gradients: 2(n − 1) rounds in a ring of n, or up to the server and down again."""
        num_bytes, simulation = (
            self._problem.model.weight_bytes(part.first_layer, part.last_layer),
            self.simulation,
        )
        byte_s = self._problem.device(member.soc).byte_s

        def handle(moved_bytes: float) -> Process[None]:
            if byte_s:
                yield simulation.compute(processor, moved_bytes * byte_s, "messages")

        if self._by_server is None:
            channel, arrived, at_next = self._rings[part, member.soc]
            size = len(part.devices)
            for _ in range(2 * (size - 1)):
                channel.send(num_bytes / size, "ring", at_next)
                yield arrived.get()
                yield from handle(2.0 * num_bytes / size)
            return
        if member.soc != self._by_server:
            yield simulation.send(member.soc, self._by_server, num_bytes, "upload")
        self._arrivals[part, member.soc, step].put(None)
        yield self._uploads[part, step]
        if member.soc != self._by_server:
            yield simulation.send(self._by_server, member.soc, num_bytes, "download")
            yield from handle(2.0 * num_bytes)
