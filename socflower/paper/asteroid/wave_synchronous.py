"""HetPipe's wave-synchronous parallel training: which weights each minibatch sees, from its workers' virtual time.

As in Park et al., ATC 2020. A virtual worker keeps Nm minibatches in its pipeline: minibatch p enters when p − Nm has
left it, and sees the local updates up to that one at least (local staleness Nm − 1). Nm minibatches are a wave, whose
summed update the worker pushes to a server. Before the last minibatch of wave c enters, by when wave c − 1 has left,
the worker waits until all have pushed their waves up to c − D − 1, and takes over the server's weights. So a minibatch
lacks at most (D + 1)·Nm + Nm − 2 of the minibatches before it of any other worker (global staleness).

Read from Asteroid (§2.3, §5.2): a wave of all workers is the mini-batch that other systems have, each worker's part by
its speed, so that all gradients are exchanged once a mini-batch. A minibatch passes the pipeline in micro-batches of
HetPipe's plan, as many in flight as the plan has. Neither Nm nor D is stated: Nm is the number of stages, as in Fig. 1
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

_SIMULATED = 24  # waves, at first
_SIMULATED_LONGER = 96  # if their order does not repeat
_WARM_UP = 8  # waves that are not repeated
_MOST_REPEATED = 8  # waves of a cycle
_SAME_S_DIGITS = 9  # moments that are equal but for rounding take one order


class Kind(IntEnum):
    """What happens to weights; of simultaneous events, updates come before what reads them."""

    LEAVE = 0  # a minibatch has left: its update is added to the worker's weights and to its wave
    PUSH = 1  # a wave's update has arrived at the server
    PULL = 2  # the server's weights set out for a worker
    TAKE = 3  # they are there, and the worker adds the updates of its unfinished wave
    ENTER = 4  # a minibatch enters: its gradient is at the worker's weights


_OF_MINIBATCHES = (Kind.ENTER, Kind.LEAVE)


class Moment(NamedTuple):
    """An event, at virtual seconds. `number` counts a worker's minibatches (ENTER, LEAVE) or waves, from 0."""

    time_s: float
    kind: Kind
    worker: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Waves:
    """A training's events in their order, and how long a wave takes in the steady state."""

    moments: tuple[Moment, ...]
    wave_s: float
    num_minibatches: int  # Nm
    parts: tuple[float, ...]  # of a mini-batch, by worker


def waves_of(
    problem: PipelineProblem,
    plan: TwoDPlan,
    num_waves: int,
    *,
    num_minibatches: int | None = None,
    max_ahead: int = 0,
) -> Waves:
    """Return the events of at least `num_waves` waves of HetPipe's plan.

    Some waves are simulated, and then repeated: those of a cycle where their order has one, else the longest run of
    waves between two moments at which equally many minibatches have entered, left and been exchanged.

    Parameters
    ----------
    num_minibatches : int, optional
        Nm; default the most stages of a worker, and at most the micro-batches.
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
    most_stages = max(len(group.stages) for group in plan.groups)
    minibatches = min(most_stages, fewest) if num_minibatches is None else num_minibatches
    require_range("waves", least=1, most=fewest, num_minibatches=minibatches)
    if any(len(stage.devices) > 1 for group in plan.groups for stage in group.stages):
        raise ConfigError(
            "waves: a stage of HetPipe's workers is one device; give a plan of straight pipelines"
        )
    ending = max_ahead + 3  # waves in which workers run out of minibatches
    length = 0
    for wanted in (_SIMULATED, _SIMULATED_LONGER, num_waves):
        simulated = min(wanted, num_waves)
        run = _Run(problem, plan, simulated + ending, minibatches, max_ahead)
        EventClock(problem.cluster).run_processes(
            run.start, socs=[device.soc for device in problem.devices]
        )
        moments = sorted(
            run.moments, key=lambda each: (round(each.time_s, _SAME_S_DIGITS), *each[1:])
        )
        cuts = [index + 1 for index, each in enumerate(moments) if each[1:3] == (Kind.PUSH, 0)][
            :simulated
        ]
        length = _cycle(moments, cuts, minibatches)
        if not length and wanted == _SIMULATED_LONGER:
            length = _between_equal_states(moments, cuts, minibatches)
        if length or simulated == num_waves:
            break
    ends_s = [moments[cut - 1].time_s for cut in cuts]
    last = length or max(0, simulated - 1)
    wave_s = (ends_s[-1] - ends_s[-1 - last]) / last if last else ends_s[0]
    if length:
        moments = _repeated(moments, cuts, length, num_waves, wave_s, minibatches)
    total = sum(group.micro_batch_size for group in plan.groups)
    return Waves(
        moments=tuple(moments),
        wave_s=wave_s,
        num_minibatches=minibatches,
        parts=tuple(group.micro_batch_size / total for group in plan.groups),
    )


def _cycle(moments: Sequence[Moment], cuts: Sequence[int], num_minibatches: int) -> int:
    """Return after how many waves the order of the last ones repeats, seen three times; 0 if it does not."""
    blocks = [
        tuple(_shifted(each, -number, 0.0, num_minibatches)[1:] for each in moments[begin:end])
        for number, (begin, end) in enumerate(pairwise(cuts))
    ]
    for length in range(1, _MOST_REPEATED + 1):
        if (
            len(blocks) >= 3 * length
            and blocks[-length:]
            == blocks[-2 * length : -length]
            == (blocks[-3 * length : -2 * length])
        ):
            return length
    return 0


def _between_equal_states(
    moments: Sequence[Moment], cuts: Sequence[int], num_minibatches: int
) -> int:
    """Return the most waves before the last cut at whose start as much had happened, counted from their first."""
    states: list[Counter[tuple[Kind, int]]] = []
    counts: Counter[tuple[Kind, int]] = Counter()
    begin = 0
    for number, cut in enumerate(cuts):
        counts.update((kind, worker) for _, kind, worker, _ in moments[begin:cut])
        states.append(
            Counter(
                {
                    key: count - number * (num_minibatches if key[0] in _OF_MINIBATCHES else 1)
                    for key, count in counts.items()
                }
            )
        )
        begin = cut
    return next(
        (
            len(cuts) - 1 - number
            for number in range(_WARM_UP, len(cuts) - 1)
            if states[number] == states[-1]
        ),
        0,
    )


def _repeated(
    moments: Sequence[Moment],
    cuts: Sequence[int],
    length: int,
    num_waves: int,
    wave_s: float,
    num_minibatches: int,
) -> list[Moment]:
    found, block = list(moments[: cuts[-1]]), moments[cuts[-1 - length] : cuts[-1]]
    for done in range(len(cuts), num_waves + length, length):
        by = done - len(cuts) + length
        found += [_shifted(each, by, by * wave_s, num_minibatches) for each in block]
    return found


def _shifted(moment: Moment, waves: int, seconds: float, num_minibatches: int) -> Moment:
    per_wave = num_minibatches if moment.kind in _OF_MINIBATCHES else 1
    return moment._replace(time_s=moment.time_s + seconds, number=moment.number + waves * per_wave)


class _Stage(NamedTuple):
    """A device's part of a worker: seconds of a micro-batch's passes and of an update, bytes before it, its weights."""

    soc: int
    forward_s: float
    backward_s: float
    update_s: float
    entering_bytes: float
    returned_bytes: float
    weight_bytes: float


class _Run:
    """The processes of all workers, and what they record."""

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
        self._pushed: list[list[Event[None]]] = [
            [
                Event(f"worker {worker}'s wave {wave} at the server")
                for wave in range(self._num_waves)
            ]
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
            first, last = stage.first_layer, stage.last_layer
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
        """Let a worker's minibatches enter, and exchange its waves."""
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
                ends.append(
                    self._simulation.start(
                        self._micro_batch(worker, places), f"a micro-batch of {number}"
                    )
                )
            left.append(
                self._simulation.start(
                    self._leave(worker, number, ends), f"the end of minibatch {number}"
                )
            )

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
        """Take over the server's weights when all workers have pushed as many waves as wave `wave` needs."""
        yield self._pushed[worker][wave - 1]
        needed = wave - self._max_ahead - 1
        if needed >= 0:
            yield all_of(*[pushed[needed] for pushed in self._pushed])
        self._record(Kind.PULL, worker, wave)
        yield self._exchanged(worker, to_server=False)
        self._record(Kind.TAKE, worker, wave)

    def _exchanged(self, worker: int, *, to_server: bool) -> Event[None]:
        """Return the event of all stages' having sent their part of the weights, or having got it."""
        server = self._plan.server
        if len(self._plan.groups) == 1:
            return all_of()
        ends = [
            (stage.soc, server) if to_server else (server, stage.soc)
            for stage in self._stages[worker]
        ]
        return all_of(
            *[
                self._simulation.send(
                    source, target, stage.weight_bytes, "push" if to_server else "pull"
                )
                for stage, (source, target) in zip(self._stages[worker], ends, strict=True)
                if stage.soc != server
            ]
        )

    def _compute(self, stage: _Stage, seconds: float) -> Event[float]:
        processor = self._simulation.processor(
            stage.soc, self._problem.kind(stage.soc).default_processor
        )
        return self._simulation.compute(processor, seconds)

    def _record(self, kind: Kind, worker: int, number: int) -> None:
        self.moments.append(Moment(self._simulation.now_s, kind, worker, number))
