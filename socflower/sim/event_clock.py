"""The event clock: task graphs in virtual time, with shared links, energy and changing speeds."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from socflower.cluster import Activity, Cluster, Device, DeviceDynamics, TaskGraph, Tier, Usage
from socflower.cluster.task_graph import SOC_ACTIVITIES
from socflower.cluster.virtual_clock import Pace
from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.sim.compiled_graph import (
    SERVER,
    CompiledGraph,
    Component,
    ComputeStep,
    Program,
    compile_graph,
)
from socflower.sim.energy import IDLE_STATE, State, add_activities, power_w
from socflower.sim.execution import MIN_LOOP_ROUNDS
from socflower.sim.processes import Simulation
from socflower.sim.steady_state import RepeatedRun, SteadyState
from socflower.sim.trace import Recorded, Rows, Trace, TracedPart, record, record_spans

_SAME_INSTANT = 1e-9
"""Tolerance relative to a stretch: a repetition that ends this little later ends with it."""


@dataclass(slots=True)
class Part:
    """A component and its progress; `solution` is that of the present speeds."""

    component: Component
    solution: SteadyState
    left: int  # repetitions
    ahead_s: float  # to the end of the repetition in progress
    before_s: float = 0.0  # of the stretch, that went on that repetition
    work_s: float = 0.0  # of the stretch, that went on new ones
    idle_s: float = 0.0  # of the stretch, after the last one
    done: RepeatedRun | None = None  # in the stretch
    repetitions: int = 0  # in the stretch

    def end_s(self, repetitions: int) -> float:
        """Return when so many repetitions more have ended, from now."""
        return self.ahead_s + (
            self.solution.repeated(repetitions).duration_s if repetitions else 0.0
        )

    def spend(self, stretch_s: float) -> None:
        """Execute all repetitions that begin within the stretch; the last one may end after it."""
        self.before_s = min(self.ahead_s, stretch_s)
        self.repetitions = self._beginning(stretch_s)
        end_s = self.end_s(self.repetitions)
        self.done = self.solution.repeated(self.repetitions) if self.repetitions else None
        self.left -= self.repetitions
        self.work_s = max(0.0, min(end_s, stretch_s) - self.ahead_s) if self.repetitions else 0.0
        self.ahead_s = end_s - stretch_s if end_s > stretch_s * (1.0 + _SAME_INSTANT) else 0.0
        self.idle_s = max(0.0, stretch_s - self.before_s - self.work_s)

    def _beginning(self, stretch_s: float) -> int:
        """Return how many of the repetitions that are left begin within the stretch."""
        if not self.left or self.end_s(self.left) <= stretch_s:
            return self.left
        limit_s = stretch_s * (1.0 - _SAME_INSTANT)
        if self.ahead_s >= limit_s:
            return 0
        # The last to begin does so when those before it have ended. Filling and draining cost the same for few
        # repetitions as for many, so this may be too high, and rounding may make it too low.
        whole_s = self.end_s(self.left) - self.ahead_s
        before = min(self.left - 1, int((limit_s - self.ahead_s) / whole_s * self.left))
        while before and self.end_s(before) >= limit_s:
            before -= 1
        while before + 1 < self.left and self.end_s(before + 1) < limit_s:
            before += 1
        return before + 1


def parts_of(
    components: Sequence[Component], pace: Pace, solve: Callable[[Component], SteadyState]
) -> list[Part]:
    """Return the components with their SoCs' remaining work; a part without SoCs has as much as the others."""
    most = max(pace.remaining.values(), default=0)
    return [
        Part(
            component,
            solve(component),
            min((pace.remaining[soc] for soc in component.socs), default=most),
            max((pace.ahead_s.get(soc, 0.0) for soc in component.socs), default=0.0),
        )
        for component in components
    ]


def stretch_s(parts: Sequence[Part], hold_s: float, at_most: int | None = None) -> float:
    """Return how long to continue: while speeds are constant, work remains, and no part has done `at_most`."""
    all_s = max((part.end_s(part.left) for part in parts), default=0.0)
    few_s = (part.end_s(at_most) for part in parts if at_most is not None and part.left > at_most)
    return min(hold_s, all_s, *few_s)


def advance_pace(pace: Pace, parts: Sequence[Part], start_s: float) -> None:
    """Write the parts' progress in a stretch that began at `start_s` to `pace`."""
    for part in parts:
        for soc in part.component.socs:
            pace.remaining[soc], pace.ahead_s[soc] = part.left, part.ahead_s
        if not part.left and part.done is not None:
            pace.ended_s |= {
                soc: start_s + part.before_s + end_s
                for soc, end_s in _ends_s(part.component, part.done).items()
            }


def _ends_s(component: Component, repeated: RepeatedRun) -> dict[int, float]:
    """Return when each SoC ends the last repetition."""
    program, found = component.program, dict[int, float]()
    for step, end_s in zip(program.steps[: program.num_repeated], repeated.ended_s(), strict=False):
        for number in (step.soc,) if isinstance(step, ComputeStep) else step.socs:
            if number != SERVER:
                soc = component.socs[number]
                found[soc] = max(end_s, found.get(soc, 0.0))
    return found


def _all_ends_s(parts: Sequence[Part]) -> dict[int, float]:
    """Return when each SoC ends the last of the repetitions that are left, none of which has begun."""
    return {
        soc: end_s
        for part in parts
        for soc, end_s in _ends_s(part.component, part.solution.repeated(part.left)).items()
    }


def _is_together(times_s: Collection[float]) -> bool:
    """Whether nothing is gained by beginning at the first of several times and not at the last."""
    return max(times_s) - min(times_s) <= _SAME_INSTANT * max(times_s)


_GRAPHS_KEPT = 8
_SOLUTIONS_KEPT = 512


class EventClock:
    """Executes task graphs and advances; implements `socflower.cluster.VirtualClock`.

    Compute: one task at a time on a processor, first come (ready time, then task), first served. Transfer:
    first `num_messages * message_s` of handling, which both ends share among their messages in each direction,
    then its bytes, which flows share max-min fairly on every directed link of their path. In a repeated graph
    a task also follows its own previous repetition.

    Repetitions in steady state and components of one shape are not simulated again; with `extrapolate=False`
    everything is, and the result is the same to rounding.
    With `dynamics`, independent parts of a graph progress separately. A part's pipeline drains when speeds change, and
    repetitions in progress finish at their initial speeds. Joules of cooling count as a separate activity.
    """

    def __init__(
        self,
        cluster: Cluster,
        dynamics: DeviceDynamics | None = None,
        trace: Trace | None = None,
        *,
        extrapolate: bool = True,
    ) -> None:
        self._cluster = cluster
        self._devices = [cluster.device_of(soc) for soc in range(cluster.num_socs)]
        self._dynamics = dynamics
        self._trace = trace
        self._rows = Rows(cluster)
        self._recorded: list[
            tuple[CompiledGraph, int, Recorded]
        ] = []  # of the latest runs at full speed
        self._latest_ends_s: tuple[CompiledGraph, int, dict[int, float]] | None = None
        self._extrapolate = extrapolate
        self._usage = Usage()
        self._graphs: list[CompiledGraph] = []
        self._solutions: OrderedDict[Program, SteadyState] = OrderedDict()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the clock's start."""
        return self._usage.duration_s

    @property
    def usage(self) -> Usage:
        """The total usage of all runs."""
        return self._usage

    def state(self) -> dict[str, Any]:
        """Return the state as plain values that JSON stores exactly."""
        usage = self._usage
        return {
            "duration_s": usage.duration_s,
            "soc_seconds": [[key.value, value] for key, value in usage.soc_seconds.items()],
            "energy_j": [[key.value, value] for key, value in usage.energy_j.items()],
            "num_bytes": [[key.value, value] for key, value in usage.num_bytes.items()],
            **({} if self._dynamics is None else {"dynamics": self._dynamics.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another clock of the same cluster; the trace is restored separately."""
        # In the original order, on which the sum of floats depends.
        self._usage = Usage(
            duration_s=state["duration_s"],
            soc_seconds={Activity(key): value for key, value in state["soc_seconds"]},
            energy_j={Activity(key): value for key, value in state["energy_j"]},
            num_bytes={Tier(key): value for key, value in state["num_bytes"]},
        )
        if self._dynamics is not None:
            self._dynamics.restore(state["dynamics"])

    @property
    def changes(self) -> bool:
        """Whether there are dynamics: speeds and users that change with time."""
        return self._dynamics is not None

    def speed_factors(self) -> list[float]:
        """Return each SoC's present speed as a fraction of its profile's; see `VirtualClock.speed_factors`."""
        if self._dynamics is None:
            return [1.0] * len(self._devices)
        factors = list(self._dynamics.speed_factors())
        if len(factors) != len(self._devices) or not all(0 < factor < inf for factor in factors):
            raise ConfigError(
                f"device dynamics: need {len(self._devices)} speed factors above 0, got {factors}"
            )
        return factors

    def taken_socs(self) -> frozenset[int]:
        """Return the SoCs that users have now."""
        return frozenset() if self._dynamics is None else frozenset(self._dynamics.taken_socs())

    @plain_numbers
    def run(
        self, graph: TaskGraph, *, repeat: int = 1, label: str = "", head_start_s: float = 0.0
    ) -> Usage:
        """Execute `graph` `repeat` times and advance; return what it took.

        Of `head_start_s` its SoCs' time is over and was idle; what they did in it is counted now.

        Raises `ConfigError` for SoCs, servers or processors that the cluster does not have and for negative
        amounts. `label` names the run in the trace.
        """
        if repeat < 0:
            raise ConfigError(f"clock: repeat must not be negative, got {repeat}")
        compiled = self._compiled(graph)
        start_s = self.now_s
        if self._dynamics is None or head_start_s:
            parts = self._whole_parts(compiled, repeat, self.speed_factors())
            total = self._run_parts(compiled, parts, repeat, head_start_s)
        else:
            total, pace = (
                Usage(),
                Pace({soc: repeat for component in compiled.components for soc in component.socs}),
            )
            while not pace.done:
                total += self.run_while_steady(graph, pace)
        self._label(label, start_s, total.duration_s, repeat)
        return total

    @plain_numbers
    def predicted_ends_s(self, graph: TaskGraph, *, repeat: int = 1) -> dict[int, float]:
        """Return when each SoC has done its last repetition; see `VirtualClock.predicted_ends_s`."""
        compiled = self._compiled(graph)
        known = self._latest_ends_s
        if known is None or known[0] is not compiled or known[1] != repeat:
            known = self._latest_ends_s = (
                compiled,
                repeat,
                _all_ends_s(self._whole_parts(compiled, repeat)),
            )
        return known[2]

    @plain_numbers
    def run_overlapped(
        self,
        graph: TaskGraph,
        closing: TaskGraph,
        waits: Mapping[int, Sequence[int]],
        *,
        repeat: int,
        labels: tuple[str, str] = ("", ""),
    ) -> Usage | None:
        """Execute `graph` so many times with `closing` at its end; see `VirtualClock.run_overlapped`."""
        factors, start_s, hold_s = self.speed_factors(), self.now_s, inf
        parts = self._whole_parts(self._compiled(graph), repeat, factors)
        if self._dynamics is None:
            ends_s = self.predicted_ends_s(graph, repeat=repeat)
        else:
            ends_s = _all_ends_s(parts)
            hold_s = self._dynamics.steady_s(
                self._working_w(parts, list(self._dynamics.power_factors()), Pace({}))
            )
        if (
            _is_together([max(ends_s[soc] for soc in socs) for socs in waits.values()])
            or max(ends_s.values()) > hold_s
            or any(
                rounds >= MIN_LOOP_ROUNDS
                for part in parts
                for rounds in part.component.program.rounds
            )
        ):
            return None
        compiled = self._compiled(graph.followed_by(closing, waits))
        parts = self._whole_parts(compiled, repeat, factors)
        if stretch_s(parts, inf) > hold_s:
            return None
        steps_s = max(_all_ends_s(parts).values())
        usage = self._run_parts(compiled, parts, repeat)
        self._label(labels[0], start_s, steps_s, repeat)
        self._label(labels[1], start_s + steps_s, usage.duration_s - steps_s, 1)
        return usage

    @plain_numbers
    def predicted_s(self, graph: TaskGraph, *, repeat: int = 1) -> float:
        """Return the time of `run` at nominal speeds, without heat or users; see `VirtualClock.predicted_s`."""
        if repeat < 0:
            raise ConfigError(f"clock: repeat must not be negative, got {repeat}")
        return stretch_s(self._whole_parts(self._compiled(graph), repeat), inf) if repeat else 0.0

    @plain_numbers
    def run_while_steady(
        self, graph: TaskGraph, pace: Pace, *, at_most: int | None = None, label: str = ""
    ) -> Usage:
        """Execute `graph` until speeds or users change; see `VirtualClock.run_while_steady`."""
        if at_most is not None and at_most < 1:
            raise ConfigError(f"clock: at_most must be 1 or more, got {at_most}")
        if self._dynamics is None:
            raise ConfigError("clock: without dynamics speeds never change; use run")
        compiled, start_s = self._compiled(graph), self.now_s
        factors, powers = self.speed_factors(), list(self._dynamics.power_factors())
        parts = parts_of(
            compiled.components, pace, lambda component: self._solution(component.at_speed(factors))
        )
        hold_s = self._dynamics.steady_s(self._working_w(parts, powers, pace))
        duration_s = stretch_s(parts, hold_s, at_most)
        for part in parts:
            part.spend(duration_s)
        if self._trace is not None:
            self._record(compiled.graph, parts, self._trace.room).add_to(self._trace, start_s)
        usage = self._account(compiled, parts, duration_s, powers, pace)
        advance_pace(pace, parts, start_s)
        self._usage += usage
        self._label(
            label, start_s, duration_s, max((part.repetitions for part in parts), default=0)
        )
        return usage

    def idle(self, socs: Sequence[int]) -> Usage:
        """Let `socs` idle until speeds or users change; `ConfigError` where they never do."""
        idle_w = [device.idle_w for device in self._devices]
        duration_s = inf if self._dynamics is None else self._dynamics.steady_s(idle_w)
        if self._dynamics is None or not 0.0 < duration_s < inf:
            raise ConfigError(
                f"clock: resting for {duration_s} s would never end; nothing is going to change"
            )
        soc_seconds = {Activity.IDLE: duration_s * len(socs)}
        energy_j = {
            Activity.IDLE: duration_s * sum(idle_w[soc] for soc in socs),
            Activity.COOLING: self._dynamics.advance(duration_s, idle_w),
        }
        usage = Usage(duration_s=duration_s, soc_seconds=soc_seconds, energy_j=energy_j)
        self._label("resting", self.now_s, duration_s, 1)
        self._usage += usage
        return usage

    def run_processes(
        self, start: Callable[[Simulation], object], *, socs: Sequence[int], label: str = ""
    ) -> Usage:
        """Run processes that react until they have ended, and advance; return what it took.

        `start` starts them; of the cluster's SoCs they may use `socs`, whose idle watts count. Heat and users change
        the SoCs' speeds while they run; a SoC that users have taken waits. Raises what `Simulation.run` does.
        """
        simulation = Simulation(
            self._cluster,
            socs,
            now_s=self.now_s,
            max_spans=0 if self._trace is None else self._trace.room,
        )
        start(simulation)
        total, start_s = Usage(num_bytes=dict.fromkeys(Tier, 0.0)), self.now_s
        while not simulation.done:
            begin_s, powers = simulation.now_s, [1.0] * len(self._devices)
            if self._dynamics is None:
                simulation.run()
            else:
                powers = list(self._dynamics.power_factors())
                simulation.set_speeds(self._process_speeds(socs))
                simulation.run(begin_s + self._dynamics.until_reading_s())
            total += self._account_processes(simulation, socs, simulation.now_s - begin_s, powers)
        total = replace(
            total, num_bytes={tier: value for tier, value in simulation.num_bytes.items()}
        )
        if self._trace is not None:
            record_spans(simulation.log.spans, simulation.log.num_unlogged, self._rows).add_to(
                self._trace, 0.0
            )
        self._label(label, start_s, total.duration_s, 1)
        self._usage += total
        return total

    def _process_speeds(self, socs: Sequence[int]) -> dict[int, float]:
        """Return the present speeds of SoCs under processes: 0 for those that users have."""
        taken, factors = self.taken_socs(), self.speed_factors()
        return {soc: 0.0 if soc in taken else factors[soc] for soc in socs}

    def _account_processes(
        self,
        simulation: Simulation,
        socs: Sequence[int],
        duration_s: float,
        powers: Sequence[float],
    ) -> Usage:
        """Return the usage of a stretch of time, and advance the dynamics by it."""
        soc_seconds: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        energy_j: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        watts = [device.idle_w for device in self._devices]
        for soc, seconds in zip(socs, simulation.take_seconds(), strict=True):
            add_activities(seconds, self._devices[soc], soc_seconds, energy_j, powers[soc])
            watts[soc] = _mean_w(seconds, self._devices[soc], powers[soc])
        if self._dynamics is not None:
            energy_j[Activity.COOLING] = self._dynamics.advance(duration_s, watts)
        return Usage(duration_s=duration_s, soc_seconds=soc_seconds, energy_j=energy_j)

    def _run_parts(
        self,
        compiled: CompiledGraph,
        parts: Sequence[Part],
        repetitions: int,
        head_start_s: float = 0.0,
    ) -> Usage:
        """Execute all repetitions at constant speeds."""
        if not repetitions:
            return Usage()
        duration_s = stretch_s(parts, inf)
        for part in parts:
            part.spend(duration_s)
        if self._trace is not None:
            recorded = self._recorded_steadily(compiled, repetitions, parts, self._trace)
            recorded.add_to(self._trace, self.now_s - head_start_s)
        powers = (
            [1.0] * len(self._devices)
            if self._dynamics is None
            else list(self._dynamics.power_factors())
        )
        usage = self._account(compiled, parts, duration_s, powers, Pace({}), head_start_s)
        self._usage += usage
        return usage

    def _recorded_steadily(
        self,
        compiled: CompiledGraph,
        repetitions: int,
        parts: Sequence[Part],
        trace: Trace,
    ) -> Recorded:
        """Return the spans of a run; without dynamics those of the latest runs are kept, for rounds are often alike."""
        for graph, count, recorded in self._recorded:
            if graph is compiled and count == repetitions:
                return recorded
        found = self._record(compiled.graph, parts, trace.room)
        if self._dynamics is None and trace.room >= len(found.pieces):  # else it may lack some
            self._recorded.append((compiled, repetitions, found))
            del self._recorded[:-_GRAPHS_KEPT]
        return found

    def _record(self, graph: TaskGraph, parts: Sequence[Part], most: int) -> Recorded:
        return record(
            graph,
            [
                TracedPart(part.component, part.done, part.before_s)
                for part in parts
                if part.done is not None
            ],
            self._rows,
            most,
        )

    def _whole_parts(
        self,
        compiled: CompiledGraph,
        repetitions: int,
        factors: Sequence[float] | None = None,
    ) -> list[Part]:
        """Return the parts of all repetitions, at nominal speeds or with each SoC's factor."""
        return [
            Part(
                component,
                self._solution(
                    component.program if factors is None else component.at_speed(factors)
                ),
                repetitions,
                0.0,
            )
            for component in compiled.components
        ]

    def _label(self, label: str, start_s: float, duration_s: float, repetitions: int) -> None:
        if self._trace is not None and label:
            self._trace.add(
                "runs", "runs", label, start_s, duration_s, args={"repetitions": repetitions}
            )

    def _compiled(self, graph: TaskGraph) -> CompiledGraph:
        """Return the compiled graph; a strategy emits equal graphs round after round."""
        for compiled in self._graphs:
            if compiled.graph is graph or compiled.graph == graph:
                return compiled
        self._graphs.append(compile_graph(graph, self._cluster))
        del self._graphs[:-_GRAPHS_KEPT]
        return self._graphs[-1]

    def _solution(self, program: Program) -> SteadyState:
        max_instances = self._trace.max_spans if self._trace is not None else 0
        if not self._extrapolate:
            return SteadyState(program, extrapolate=False, max_instances=max_instances)
        solution = self._solutions.get(program)
        if solution is None:
            solution = self._solutions[program] = SteadyState(
                program, extrapolate=True, max_instances=max_instances
            )
            if len(self._solutions) > _SOLUTIONS_KEPT:
                self._solutions.popitem(last=False)
        else:
            self._solutions.move_to_end(program)
        return solution

    def _account(
        self,
        compiled: CompiledGraph,
        parts: Sequence[Part],
        duration_s: float,
        powers: Sequence[float],
        pace: Pace,
        head_start_s: float = 0.0,
    ) -> Usage:
        """Return the usage of a stretch of time, and advance the dynamics by it.

        Of a head start all SoCs were counted as idle, and the dynamics advanced with that.
        """
        soc_seconds: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        energy_j: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        num_bytes = dict.fromkeys(Tier, 0.0)
        states: dict[int, Mapping[State, float]] = {}
        watts: dict[int, list[tuple[float, float]]] = {}  # by SoC: (end time, watts)
        for part, own, closing in zip(
            parts, compiled.component_bytes, compiled.closing_bytes, strict=True
        ):
            for part_bytes, times in ((own, part.repetitions), (closing, 1)):
                for tier, value in part_bytes.items():
                    num_bytes[tier] += value * times
            worked = (
                part.done.seconds() if part.done is not None else [{} for _ in part.component.socs]
            )
            for soc, seconds in zip(part.component.socs, worked, strict=True):
                states[soc] = {**seconds, IDLE_STATE: seconds.get(IDLE_STATE, 0.0) + part.idle_s}
                before_w = pace.in_progress_w.get(soc, 0.0)
                if seconds:
                    pace.in_progress_w[soc] = _mean_w(seconds, self._devices[soc], powers[soc])
                watts[soc] = [
                    (part.before_s, before_w),
                    (part.before_s + part.work_s, pace.in_progress_w.get(soc, before_w)),
                ]
        for soc in dict.fromkeys(compiled.graph.participants):
            add_activities(
                states.get(soc, {IDLE_STATE: duration_s}),
                self._devices[soc],
                soc_seconds,
                energy_j,
                powers[soc],
            )
        duration_s -= head_start_s
        if head_start_s:
            for soc in dict.fromkeys(compiled.graph.participants):
                idle_w = self._devices[soc].idle_w
                soc_seconds[Activity.IDLE] -= head_start_s
                energy_j[Activity.IDLE] -= idle_w * head_start_s
                above_w = _mean_w(states.get(soc, {}), self._devices[soc], powers[soc]) - idle_w
                watts[soc] = [
                    (
                        duration_s,
                        idle_w + above_w * (1.0 + head_start_s / duration_s if duration_s else 0.0),
                    )
                ]
        if self._dynamics is not None:
            energy_j[Activity.COOLING] = self._heat(self._dynamics, watts, duration_s)
        return Usage(
            duration_s=duration_s, soc_seconds=soc_seconds, energy_j=energy_j, num_bytes=num_bytes
        )

    def _heat(
        self,
        dynamics: DeviceDynamics,
        watts: Mapping[int, Sequence[tuple[float, float]]],
        duration_s: float,
    ) -> float:
        """Advance the dynamics by the stretch, with each SoC's watts over time; return the joules of cooling."""
        ends_s = sorted(
            {end_s for phases in watts.values() for end_s, _ in phases if 0.0 < end_s < duration_s}
        )
        begin_s = cooling_j = 0.0
        for end_s in (*ends_s, duration_s):
            if end_s - begin_s > 1e-9 * duration_s or not duration_s:
                cooling_j += dynamics.advance(
                    end_s - begin_s,
                    [
                        next(
                            (own_w for until_s, own_w in watts.get(soc, ()) if begin_s < until_s),
                            device.idle_w,
                        )
                        for soc, device in enumerate(self._devices)
                    ],
                )
                begin_s = end_s
        return cooling_j

    def _working_w(self, parts: Sequence[Part], powers: Sequence[float], pace: Pace) -> list[float]:
        """Return each SoC's mean watts during its remaining work; a SoC without work idles."""
        working_w = [device.idle_w for device in self._devices]
        for part in parts:
            if part.left:
                for soc, seconds in zip(
                    part.component.socs, part.solution.repeated(part.left).seconds(), strict=True
                ):
                    working_w[soc] = _mean_w(seconds, self._devices[soc], powers[soc])
            elif part.ahead_s:
                for soc in part.component.socs:
                    working_w[soc] = pace.in_progress_w[soc]
        return working_w


def _mean_w(seconds: Mapping[State, float], device: Device, factor: float) -> float:
    """Return a device's mean watts over its time in states; idle without any."""
    spent_s = sum(seconds.values())
    if not spent_s:
        return device.idle_w
    return sum(power_w(state, device, factor) * own_s for state, own_s in seconds.items()) / spent_s
