"""HetPipe's wave-synchronous parallel training: the weights that each minibatch sees, from its workers' virtual time.

As in Park et al., ATC 2020. A virtual worker keeps Nm minibatches in its pipeline: minibatch p enters after p − Nm has
left, and sees at least the local updates up to p − Nm (local staleness Nm − 1). Nm minibatches are a wave; the worker
pushes the sum of their updates to a server. Before the last minibatch of wave c enters, wave c − 1 has left; the worker
then waits until all workers have pushed their waves up to c − D − 1, and takes over the server's weights. So a
minibatch lacks at most (D + 1)·Nm + Nm − 2 earlier minibatches of any other worker (global staleness).

Our reading of Asteroid (§2.3, §5.2): a wave of all workers is one mini-batch of the other systems, divided by the
workers' speeds, so all gradients are exchanged once per mini-batch. A minibatch passes the pipeline in micro-batches of
HetPipe's plan, with the plan's number in flight. Neither Nm nor D is stated: Nm is the number of stages, as in Fig. 1
of Park et al., and D = 0 has the least staleness.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from socflower.errors import ConfigError, require_range
from socflower.hierarchy import split_batch
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.problem import PipelineProblem
from socflower.sim import EventClock
from socflower.sim.processes import Credits, Event, Process, Simulation, all_of

# Waves that are simulated first, and if their order does not repeat.
_SIMULATED = 24
_SIMULATED_LONGER = 96
# Waves at the beginning that are not repeated.
_WARM_UP = 8
# The longest cycle, in waves.
_MOST_REPEATED = 8
# Moments that differ only by rounding are ordered as equal ones.
_SAME_S_DIGITS = 9


class Kind(IntEnum):
    """Events that change or read weights; among simultaneous events, changes come first."""

    # A minibatch has left: its update is added to the worker's weights and to its wave.
    LEAVE = 0
    # A wave's update has arrived at the server.
    PUSH = 1
    # The server's weights are sent to a worker.
    PULL = 2
    # They have arrived, and the worker adds the updates of its unfinished wave.
    TAKE = 3
    # A minibatch enters: its gradient is taken at the worker's weights.
    ENTER = 4


_OF_MINIBATCHES = (Kind.ENTER, Kind.LEAVE)


class Moment(NamedTuple):
    """An event, at virtual seconds. `number` counts a worker's minibatches (ENTER, LEAVE) or waves, from 0."""

    time_s: float
    kind: Kind
    worker: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Waves:
    """A training's events in their order, and the seconds of a wave in the steady state."""

    moments: tuple[Moment, ...]
    wave_s: float
    # Nm.
    num_minibatches: int
    # Parts of a mini-batch, by worker.
    parts: tuple[float, ...]


def waves_of(
    problem: PipelineProblem,
    plan: TwoDPlan,
    num_waves: int,
    *,
    num_minibatches: int | None = None,
    max_ahead: int = 0,
) -> Waves:
    """Return the events of at least `num_waves` waves of HetPipe's plan.

    The first waves are simulated and then repeated: the waves of a cycle if their order has one, or else the longest
    run of waves between two equal states (equally many minibatches have entered, left and been exchanged).

    Parameters
    ----------
    num_minibatches : int, optional
        Nm; default the largest number of stages of a worker, at most the number of micro-batches.
    max_ahead : int
        D, in waves.

    Raises
    ------
    ConfigError
        If a stage has several devices, or Nm is more than the micro-batches.
    """
    require_range("waves", least=1, num_waves=num_waves)
    require_range("waves", least=0, max_ahead=max_ahead)
    fewest = min(group.num_micro_batches for group in plan.groups)
    stages = [stage for group in plan.groups for stage in group.stages]
    if num_minibatches is None:
        num_minibatches = min(fewest, max(len(group.stages) for group in plan.groups))
    require_range("waves", least=1, most=fewest, num_minibatches=num_minibatches)
    if any(len(stage.devices) > 1 for stage in stages):
        raise ConfigError(
            "waves: a stage of HetPipe's workers is one device; give a plan of straight pipelines"
        )
    moments, cuts, length = _simulated(problem, plan, num_waves, num_minibatches, max_ahead)
    ends_s = [moments[cut - 1].time_s for cut in cuts]
    last = length or len(cuts) - 1
    wave_s = (ends_s[-1] - ends_s[-1 - last]) / last if last else ends_s[0]
    if length:
        moments = _repeated(moments, cuts, length, num_waves, wave_s, num_minibatches)
    total = sum(group.micro_batch_size for group in plan.groups)
    return Waves(
        moments=tuple(moments),
        wave_s=wave_s,
        num_minibatches=num_minibatches,
        parts=tuple(group.micro_batch_size / total for group in plan.groups),
    )


def _simulated(
    problem: PipelineProblem,
    plan: TwoDPlan,
    num_waves: int,
    num_minibatches: int,
    max_ahead: int,
) -> tuple[list[Moment], list[int], int]:
    """Return moments, the ends of waves among them, and the number of last waves that can be repeated.

    Waves are simulated until some can be repeated, or all are simulated; then the number is 0.
    """
    # In the last waves workers run out of minibatches.
    ending = max_ahead + 3
    socs = [device.soc for device in problem.devices]
    for wanted in (_SIMULATED, _SIMULATED_LONGER, num_waves):
        simulated = min(wanted, num_waves)
        run = _Run(problem, plan, simulated + ending, num_minibatches, max_ahead)
        EventClock(problem.cluster).run_processes(run.start, socs=socs)
        moments = sorted(
            run.moments, key=lambda each: (round(each.time_s, _SAME_S_DIGITS), *each[1:])
        )
        ends = [index + 1 for index, each in enumerate(moments) if each[1:3] == (Kind.PUSH, 0)]
        cuts = ends[:simulated]
        length = _cycle(moments, cuts, num_minibatches)
        if not length and wanted == _SIMULATED_LONGER:
            length = _between_equal_states(moments, cuts, num_minibatches)
        if length or simulated == num_waves:
            break
    return moments, cuts, length


def _cycle(moments: Sequence[Moment], cuts: Sequence[int], num_minibatches: int) -> int:
    """Return the number of waves after which the order of the last waves repeats, seen three times, or 0."""
    blocks = []
    for number, (begin, end) in enumerate(pairwise(cuts)):
        own = [_shifted(each, -number, 0.0, num_minibatches) for each in moments[begin:end]]
        blocks.append([each[1:] for each in own])
    for length in range(1, min(_MOST_REPEATED, len(blocks) // 3) + 1):
        last, before = blocks[-length:], blocks[-2 * length : -length]
        if last == before == blocks[-3 * length : -2 * length]:
            return length
    return 0


def _between_equal_states(
    moments: Sequence[Moment], cuts: Sequence[int], num_minibatches: int
) -> int:
    """Return the largest number of last waves that begin and end in equal states, or 0."""
    states: list[Counter[tuple[Kind, int]]] = []
    counts: Counter[tuple[Kind, int]] = Counter()
    begin = 0
    for number, cut in enumerate(cuts):
        counts.update((kind, worker) for _, kind, worker, _ in moments[begin:cut])
        state = Counter[tuple[Kind, int]]()
        for key, count in counts.items():
            per_wave = num_minibatches if key[0] in _OF_MINIBATCHES else 1
            state[key] = count - number * per_wave
        states.append(state)
        begin = cut
    last = len(cuts) - 1
    return next(
        (last - number for number in range(_WARM_UP, last) if states[number] == states[last]), 0
    )


def _repeated(
    moments: Sequence[Moment],
    cuts: Sequence[int],
    length: int,
    num_waves: int,
    wave_s: float,
    num_minibatches: int,
) -> list[Moment]:
    """Return the moments up to the last cut, and then the last `length` waves again and again."""
    found, block = list(moments[: cuts[-1]]), moments[cuts[-1 - length] : cuts[-1]]
    for done in range(len(cuts), num_waves + length, length):
        by = done - len(cuts) + length
        found += [_shifted(each, by, by * wave_s, num_minibatches) for each in block]
    return found


def _shifted(
    moment: Moment,
    waves: int,
    seconds: float,
    num_minibatches: int,
) -> Moment:
    per_wave = num_minibatches if moment.kind in _OF_MINIBATCHES else 1
    return moment._replace(time_s=moment.time_s + seconds, number=moment.number + waves * per_wave)


class _Stage(NamedTuple):
    """A worker's stage on one device: seconds of a micro-batch and of an update, bytes into it and back, weights."""

    soc: int
    forward_s: float
    backward_s: float
    update_s: float
    entering_bytes: float
    returned_bytes: float
    weight_bytes: float


class _Run:
    """The processes of all workers, and their records."""

    def __init__(
        self,
        problem: PipelineProblem,
        plan: TwoDPlan,
        num_waves: int,
        num_minibatches: int,
        max_ahead: int,
    ) -> None:
        self._problem, self._plan, self._num_waves = problem, plan, num_waves
        self._num_minibatches, self._max_ahead = num_minibatches, max_ahead
        self.moments: list[Moment] = []

    def start(self, simulation: Simulation) -> None:
        """Start all workers."""
        self._simulation = simulation
        groups = range(len(self._plan.groups))
        waves = range(self._num_waves)
        self._pushed: list[list[Event[None]]] = [
            [Event(f"worker {worker}'s wave {wave} at the server") for wave in waves]
            for worker in groups
        ]
        self._stages = [self._stages_of(worker) for worker in groups]
        for worker in groups:
            simulation.start(self._work(worker), f"worker {worker}")

    def _stages_of(self, worker: int) -> list[_Stage]:
        model, group = self._problem.model, self._plan.groups[worker]
        found = []
        for stage in group.stages:
            device, size = self._problem.device(stage.devices[0]), group.micro_batch_size
            first, last = stage.layers
            crossing = size * float(model.entering_bytes[first]) if first else 0.0
            weight_bytes = model.weight_bytes(first, last)
            found.append(
                _Stage(
                    soc=device.soc,
                    forward_s=device.seconds.forward(first, last, size),
                    backward_s=device.seconds.backward(first, last, size),
                    update_s=device.update_s(weight_bytes),
                    entering_bytes=crossing * self._problem.activation_part,
                    returned_bytes=crossing * self._problem.gradient_part,
                    weight_bytes=weight_bytes,
                )
            )
        return found

    def _work(self, worker: int) -> Process[None]:
        """Start a worker's minibatches, and exchange its waves."""
        group, per_wave = self._plan.groups[worker], self._num_minibatches
        sizes = split_batch(group.num_micro_batches, [1.0] * per_wave)
        places = Credits(group.stages[0].in_flight, "a place in the pipeline")
        left: list[Event[None]] = []
        for number in range(self._num_waves * per_wave):
            wave, position = divmod(number, per_wave)
            if number >= per_wave:
                yield left[number - per_wave]
            if wave and position == per_wave - 1:
                yield from self._pull(worker, wave)
            ends: list[Event[None]] = []
            for _ in range(sizes[position]):
                yield places.take()
                if not ends:
                    self._record(Kind.ENTER, worker, number)
                passing = self._micro_batch(worker, places)
                ends.append(self._simulation.start(passing, f"a micro-batch of {number}"))
            leaving = self._leave(worker, number, ends)
            left.append(self._simulation.start(leaving, f"the end of minibatch {number}"))

    def _micro_batch(self, worker: int, places: Credits) -> Process[None]:
        stages = self._stages[worker]
        for index, stage in enumerate(stages):
            if index:
                yield self._simulation.send(
                    stages[index - 1].soc, stage.soc, stage.entering_bytes, "activations"
                )
            # On the last device one pass follows the other at once.
            last_s = stage.backward_s if index == len(stages) - 1 else 0.0
            yield self._compute(stage, stage.forward_s + last_s)
        for index, stage in reversed(list(enumerate(stages))):
            if index < len(stages) - 1:
                yield self._compute(stage, stage.backward_s)
            if index:
                yield self._simulation.send(
                    stage.soc, stages[index - 1].soc, stage.returned_bytes, "gradients"
                )
        places.give()

    def _leave(self, worker: int, number: int, ends: Sequence[Event[None]]) -> Process[None]:
        """Update the worker's weights when all micro-batches have left, and push at the end of a wave."""
        yield all_of(*ends)
        yield all_of(*[self._compute(stage, stage.update_s) for stage in self._stages[worker]])
        self._record(Kind.LEAVE, worker, number)
        wave, position = divmod(number, self._num_minibatches)
        if position == self._num_minibatches - 1:
            self._simulation.start(self._push(worker, wave), f"the push of wave {wave}")

    def _push(self, worker: int, wave: int) -> Process[None]:
        yield self._exchanged(worker, to_server=True)
        self._record(Kind.PUSH, worker, wave)
        self._pushed[worker][wave].fire()

    def _pull(self, worker: int, wave: int) -> Process[None]:
        """Take over the server's weights once all workers have pushed the waves that wave `wave` needs."""
        yield self._pushed[worker][wave - 1]
        needed = wave - self._max_ahead - 1
        if needed >= 0:
            yield all_of(*[pushed[needed] for pushed in self._pushed])
        self._record(Kind.PULL, worker, wave)
        yield self._exchanged(worker, to_server=False)
        self._record(Kind.TAKE, worker, wave)

    def _exchanged(self, worker: int, *, to_server: bool) -> Event[None]:
        """Return the event that all stages have sent their parts of the weights, or received them."""
        server, sent = self._plan.server, []
        for stage in self._stages[worker] if len(self._plan.groups) > 1 else ():
            if stage.soc != server:
                source, target = (stage.soc, server) if to_server else (server, stage.soc)
                name = "push" if to_server else "pull"
                sent.append(self._simulation.send(source, target, stage.weight_bytes, name))
        return all_of(*sent)

    def _compute(self, stage: _Stage, seconds: float) -> Event[float]:
        kind = self._problem.kind(stage.soc)
        processor = self._simulation.processor(stage.soc, kind.default_processor)
        return self._simulation.compute(processor, seconds)

    def _record(self, kind: Kind, worker: int, number: int) -> None:
        self.moments.append(Moment(self._simulation.now_s, kind, worker, number))
