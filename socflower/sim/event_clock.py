"""The event clock: task graphs in virtual time, with shared links, energy and changing speeds."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from socflower.cluster import Activity, Cluster, Device, DeviceDynamics, TaskGraph, Tier, Usage
from socflower.cluster.task_graph import SOC_ACTIVITIES
from socflower.cluster.virtual_clock import Pace
from socflower.errors import ConfigError, require_range
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
"""Tolerance relative to a stretch of time: a repetition that ends later by less ends with the stretch."""


@dataclass(slots=True)
class Part:
    """A component and its progress, at the present speeds.

    The fields from `before_s` on are about the latest stretch of time.
    """

    component: Component
    steady: SteadyState
    # Repetitions that have not begun.
    left: int
    # Seconds to the end of the repetition in progress.
    ahead_s: float
    # Seconds on that repetition, on new ones, and after the last one.
    before_s: float = 0.0
    work_s: float = 0.0
    idle_s: float = 0.0
    # The repetitions that began, and their cost.
    repetitions: int = 0
    done: RepeatedRun | None = None

    def end_s(self, repetitions: int) -> float:
        """Return the seconds from now until the end of `repetitions` more repetitions."""
        if not repetitions:
            return self.ahead_s
        return self.ahead_s + self.steady.repeated(repetitions).duration_s

    def spend(self, stretch_s: float) -> None:
        """Execute all repetitions that begin within the stretch; the last one may end after it."""
        self.before_s = min(self.ahead_s, stretch_s)
        self.repetitions = self._beginning(stretch_s)
        end_s = self.end_s(self.repetitions)
        self.done = self.steady.repeated(self.repetitions) if self.repetitions else None
        self.left -= self.repetitions
        self.work_s = max(0.0, min(end_s, stretch_s) - self.ahead_s) if self.repetitions else 0.0
        # The last repetition may end after the stretch.
        self.ahead_s = end_s - stretch_s if end_s > stretch_s * (1.0 + _SAME_INSTANT) else 0.0
        self.idle_s = max(0.0, stretch_s - self.before_s - self.work_s)

    def _beginning(self, stretch_s: float) -> int:
        """Return how many of the repetitions that are left begin within the stretch."""
        if not self.left or self.end_s(self.left) <= stretch_s:
            return self.left
        limit_s = stretch_s * (1.0 - _SAME_INSTANT)
        if self.ahead_s >= limit_s:
            return 0
        # The last repetition begins when those before it have ended. Filling and draining cost the same for few
        # repetitions as for many, so this estimate may be too high, and rounding may make it too low.
        whole_s = self.end_s(self.left) - self.ahead_s
        before = min(self.left - 1, int((limit_s - self.ahead_s) / whole_s * self.left))
        while before and self.end_s(before) >= limit_s:
            before -= 1
        while before + 1 < self.left and self.end_s(before + 1) < limit_s:
            before += 1
        return before + 1


def parts_of(
    components: Sequence[Component], pace: Pace, steady_of: Callable[[Component], SteadyState]
) -> list[Part]:
    """Return the components with their SoCs' remaining work; a part without SoCs has as much as the others."""
    most = max(pace.remaining.values(), default=0)
    parts = []
    for component in components:
        left = min((pace.remaining[soc] for soc in component.socs), default=most)
        ahead_s = max((pace.ahead_s.get(soc, 0.0) for soc in component.socs), default=0.0)
        parts.append(Part(component, steady_of(component), left, ahead_s))
    return parts


def stretch_s(parts: Sequence[Part], hold_s: float, at_most: int | None = None) -> float:
    """Return how long speeds are constant (`hold_s`), work remains, and no part has done `at_most` repetitions."""
    all_s = max((part.end_s(part.left) for part in parts), default=0.0)
    few_s = (part.end_s(at_most) for part in parts if at_most is not None and part.left > at_most)
    return min(hold_s, all_s, *few_s)


def advance_pace(pace: Pace, parts: Sequence[Part], start_s: float) -> None:
    """Write the parts' progress in a stretch that began at `start_s` to `pace`."""
    for part in parts:
        for soc in part.component.socs:
            # SoCs of one part may have unequal work left: that of the least.
            pace.remaining[soc] -= part.repetitions
            pace.ahead_s[soc] = part.ahead_s
        if not part.left and part.done is not None:
            for soc, end_s in _ends_s(part.component, part.done).items():
                pace.ended_s[soc] = start_s + part.before_s + end_s


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
    """Return when each SoC ends the last remaining repetition, if none of these has begun."""
    found: dict[int, float] = {}
    for part in parts:
        found |= _ends_s(part.component, part.steady.repeated(part.left))
    return found


def _is_together(times_s: Collection[float]) -> bool:
    """Whether several times are equal but for rounding."""
    return max(times_s) - min(times_s) <= _SAME_INSTANT * max(times_s)


_GRAPHS_KEPT = 12
_STEADY_STATES_KEPT = 512


class EventClock:
    """Executes task graphs and advances; implements `socflower.cluster.VirtualClock`.

    A processor runs one task at a time, in the order in which they become ready, on a tie the earlier task. A transfer
    is handled for `num_messages * message_s`, during which both ends share their time among messages in the same
    direction; then its bytes flow, and flows share every directed link of their path max-min fairly. In a repeated
    graph a task also follows its own previous repetition.

    Repetitions in steady state and components of one shape are not simulated again. With `extrapolate=False` they are;
    the result is the same but for rounding. With `dynamics`, independent parts of a graph progress separately: the
    pipeline of a part drains when speeds change, and repetitions in progress finish at their initial speeds. Joules of
    cooling count as a separate activity.
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
        # Spans of the latest runs at full speed.
        self._recorded: list[tuple[CompiledGraph, int, Recorded]] = []
        self._latest_ends_s: tuple[CompiledGraph, int, dict[int, float]] | None = None
        self._extrapolate = extrapolate
        self._usage = Usage()
        self._graphs: list[CompiledGraph] = []
        self._steady_states: OrderedDict[Program, SteadyState] = OrderedDict()

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
        state: dict[str, Any] = {"duration_s": usage.duration_s}
        for name in ("soc_seconds", "energy_j", "num_bytes"):
            state[name] = [[key.value, value] for key, value in getattr(usage, name).items()]
        if self._dynamics is not None:
            state["dynamics"] = self._dynamics.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another clock of the same cluster; the trace is restored separately."""
        # The original order is kept, since the sum of floats depends on it.
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
                f"clock: need {len(self._devices)} speed factors above 0, got {factors}"
            )
        return factors

    def taken_socs(self) -> frozenset[int]:
        """Return the SoCs that users have taken."""
        return frozenset() if self._dynamics is None else frozenset(self._dynamics.taken_socs())

    @plain_numbers
    def run(
        self, graph: TaskGraph, *, repeat: int = 1, label: str = "", head_start_s: float = 0.0
    ) -> Usage:
        """Execute `graph` `repeat` times and advance; return the usage.

        `head_start_s`: how long before now the graph started. Its SoCs were counted as idle since then, which the usage
        corrects. Raises `ConfigError` for SoCs, servers or processors that the cluster does not have and for negative
        amounts. `label` names the run in the trace.
        """
        require_range("clock", least=0, repeat=repeat)
        compiled = self._compiled(graph)
        start_s = self.now_s
        if self._dynamics is None or head_start_s:
            parts = self._whole_parts(compiled, repeat, self.speed_factors())
            total = self._run_parts(compiled, parts, repeat, head_start_s)
        else:
            socs = [soc for component in compiled.components for soc in component.socs]
            total, pace = Usage(), Pace(dict.fromkeys(socs, repeat))
            while not pace.done:
                total += self.run_while_steady(graph, pace)
        self._label(label, start_s, total.duration_s, repeat)
        return total

    @plain_numbers
    def predicted_ends_s(self, graph: TaskGraph, *, repeat: int = 1) -> dict[int, float]:
        """Return when each SoC ends its last repetition; see `VirtualClock.predicted_ends_s`."""
        compiled = self._compiled(graph)
        known = self._latest_ends_s
        if known is None or known[0] is not compiled or known[1] != repeat:
            ends_s = _all_ends_s(self._whole_parts(compiled, repeat))
            known = self._latest_ends_s = (compiled, repeat, ends_s)
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
        """Execute `graph` `repeat` times and `closing` once; see `VirtualClock.run_overlapped`."""
        factors, start_s, hold_s = self.speed_factors(), self.now_s, inf
        parts = self._whole_parts(self._compiled(graph), repeat, factors)
        if self._dynamics is None:
            ends_s = self.predicted_ends_s(graph, repeat=repeat)
        else:
            ends_s = _all_ends_s(parts)
            powers = list(self._dynamics.power_factors())
            hold_s = self._dynamics.steady_s(self._working_w(parts, powers, Pace({})))
        starts_s = [max(ends_s[soc] for soc in socs) for socs in waits.values()]
        most_rounds = max(max(part.component.program.rounds) for part in parts)
        changes = max(ends_s.values()) > hold_s
        if _is_together(starts_s) or changes or most_rounds >= MIN_LOOP_ROUNDS:
            return None
        compiled = self._compiled(graph.followed_by(closing, waits))
        parts = self._whole_parts(compiled, repeat, factors)
        # Speeds or users would change during the closing tasks.
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
        require_range("clock", least=0, repeat=repeat)
        return stretch_s(self._whole_parts(self._compiled(graph), repeat), inf) if repeat else 0.0

    @plain_numbers
    def ends_while_steady(self, graph: TaskGraph, pace: Pace) -> dict[int, float]:
        """Return when each SoC would end its work at present speeds; see `VirtualClock.ends_while_steady`."""
        ends_s: dict[int, float] = {}
        for part in self._paced_parts(self._compiled(graph), pace):
            own_s = dict.fromkeys(part.component.socs, 0.0)
            if part.left:
                own_s |= _ends_s(part.component, part.steady.repeated(part.left))
            for soc, end_s in own_s.items():
                known = pace.remaining[soc] == part.left
                ends_s[soc] = self.now_s + part.ahead_s + end_s if known else inf
        return ends_s

    @plain_numbers
    def run_while_steady(
        self,
        graph: TaskGraph,
        pace: Pace,
        *,
        at_most: int | None = None,
        at_most_s: float = inf,
        label: str = "",
    ) -> Usage:
        """Execute `graph` until speeds or users change; see `VirtualClock.run_while_steady`."""
        require_range("clock", least=1, at_most=1 if at_most is None else at_most)
        compiled, start_s = self._compiled(graph), self.now_s
        powers, hold_s = self._power_factors(), inf
        parts = self._paced_parts(compiled, pace)
        if self._dynamics is not None:
            hold_s = self._dynamics.steady_s(self._working_w(parts, powers, pace))
        duration_s = min(stretch_s(parts, hold_s, at_most), at_most_s)
        for part in parts:
            part.spend(duration_s)
        if self._trace is not None:
            self._record(compiled.graph, parts, self._trace.room).add_to(self._trace, start_s)
        # Before the progress is written: the watts of repetitions in progress are those of this stretch.
        usage = self._account(compiled, parts, duration_s, powers, pace)
        advance_pace(pace, parts, start_s)
        self._usage += usage
        most = max((part.repetitions for part in parts), default=0)
        self._label(label, start_s, duration_s, most)
        return usage

    def idle(self, socs: Sequence[int]) -> Usage:
        """Let `socs` idle until speeds or users change; `ConfigError` if they never do."""
        idle_w = [device.idle_w for device in self._devices]
        duration_s = inf if self._dynamics is None else self._dynamics.steady_s(idle_w)
        if self._dynamics is None or not 0.0 < duration_s < inf:
            raise ConfigError(f"clock: nothing changes, so idling takes {duration_s} s")
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
        """Run processes until they have ended, and advance; return the usage.

        `start` starts them; they may use the SoCs `socs` of the cluster, whose idle watts count. Heat and users change
        the SoCs' speeds during the run; a SoC that users have taken waits. Raises the errors of `Simulation.run`.
        """
        max_spans = 0 if self._trace is None else self._trace.room
        simulation = Simulation(self._cluster, socs, now_s=self.now_s, max_spans=max_spans)
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
        total = replace(total, num_bytes=dict(simulation.num_bytes))
        if self._trace is not None:
            log = simulation.log
            record_spans(log.spans, log.num_unlogged, self._rows).add_to(self._trace, 0.0)
        self._label(label, start_s, total.duration_s, 1)
        self._usage += total
        return total

    def _process_speeds(self, socs: Sequence[int]) -> dict[int, float]:
        """Return the speeds of SoCs for processes: 0 for SoCs that users have taken."""
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
        powers = self._power_factors()
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
        """Return the spans of a run; without dynamics they are kept for later runs, which are often equal."""
        for graph, count, recorded in self._recorded:
            if graph is compiled and count == repetitions:
                return recorded
        found = self._record(compiled.graph, parts, trace.room)
        # With less room, later spans may be missing.
        if self._dynamics is None and trace.room >= len(found.pieces):
            self._recorded.append((compiled, repetitions, found))
            del self._recorded[:-_GRAPHS_KEPT]
        return found

    def _record(self, graph: TaskGraph, parts: Sequence[Part], most: int) -> Recorded:
        traced = [
            TracedPart(part.component, part.done, part.before_s)
            for part in parts
            if part.done is not None
        ]
        return record(graph, traced, self._rows, most)

    def _whole_parts(
        self,
        compiled: CompiledGraph,
        repetitions: int,
        factors: Sequence[float] | None = None,
    ) -> list[Part]:
        """Return the parts of all repetitions, at nominal speeds or with each SoC's factor."""
        parts = []
        for component in compiled.components:
            program = component.program if factors is None else component.at_speed(factors)
            parts.append(Part(component, self._steady_state(program), repetitions, 0.0))
        return parts

    def _paced_parts(self, compiled: CompiledGraph, pace: Pace) -> list[Part]:
        """Return the parts of the work that is left, at the present speeds."""
        factors = self.speed_factors()
        return parts_of(
            compiled.components,
            pace,
            lambda component: self._steady_state(component.at_speed(factors)),
        )

    def _power_factors(self) -> list[float]:
        if self._dynamics is None:
            return [1.0] * len(self._devices)
        return list(self._dynamics.power_factors())

    def _label(self, label: str, start_s: float, duration_s: float, repetitions: int) -> None:
        if self._trace is not None and label:
            args = {"repetitions": repetitions}
            self._trace.add("runs", "runs", label, start_s, duration_s, args=args)

    def _compiled(self, graph: TaskGraph) -> CompiledGraph:
        """Return the compiled graph; the latest are kept, since a strategy emits equal graphs in every round."""
        for compiled in self._graphs:
            if compiled.graph is graph or compiled.graph == graph:
                return compiled
        self._graphs.append(compile_graph(graph, self._cluster))
        del self._graphs[:-_GRAPHS_KEPT]
        return self._graphs[-1]

    def _steady_state(self, program: Program) -> SteadyState:
        max_instances = self._trace.max_spans if self._trace is not None else 0
        if not self._extrapolate:
            return SteadyState(program, extrapolate=False, max_instances=max_instances)
        known = self._steady_states.pop(program, None)
        if known is None:
            known = SteadyState(program, extrapolate=True, max_instances=max_instances)
        # The latest used is last; the first is forgotten.
        self._steady_states[program] = known
        if len(self._steady_states) > _STEADY_STATES_KEPT:
            self._steady_states.popitem(last=False)
        return known

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

        During a head start all SoCs were counted as idle, and the dynamics advanced with that load.
        """
        soc_seconds: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        energy_j: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        states: dict[int, Mapping[State, float]] = {}
        watts: dict[int, list[tuple[float, float]]] = {}
        for part in parts:
            self._add_part(part, powers, pace, states, watts)
        participants = dict.fromkeys(compiled.graph.participants)
        for soc in participants:
            seconds = states.get(soc, {IDLE_STATE: duration_s})
            add_activities(seconds, self._devices[soc], soc_seconds, energy_j, powers[soc])
        duration_s -= head_start_s
        if head_start_s:
            # The watts above idle of the head start are drawn in the rest of the time.
            stretched = 1.0 + head_start_s / duration_s if duration_s else 0.0
            for soc in participants:
                device = self._devices[soc]
                soc_seconds[Activity.IDLE] -= head_start_s
                energy_j[Activity.IDLE] -= device.idle_w * head_start_s
                above_w = _mean_w(states.get(soc, {}), device, powers[soc]) - device.idle_w
                watts[soc] = [(duration_s, device.idle_w + above_w * stretched)]
        if self._dynamics is not None:
            energy_j[Activity.COOLING] = self._heat(self._dynamics, watts, duration_s)
        return Usage(
            duration_s=duration_s,
            soc_seconds=soc_seconds,
            energy_j=energy_j,
            num_bytes=_bytes_of(compiled, parts),
        )

    def _add_part(
        self,
        part: Part,
        powers: Sequence[float],
        pace: Pace,
        states: dict[int, Mapping[State, float]],
        watts: dict[int, list[tuple[float, float]]],
    ) -> None:
        """Add the seconds by state, and the watts up to each end time, of a part's SoCs in the latest stretch."""
        component = part.component
        worked = [{} for _ in component.socs] if part.done is None else part.done.seconds()
        for soc, seconds in zip(component.socs, worked, strict=True):
            states[soc] = {**seconds, IDLE_STATE: seconds.get(IDLE_STATE, 0.0) + part.idle_s}
            before_w = pace.in_progress_w.get(soc, 0.0)
            if seconds:
                pace.in_progress_w[soc] = _mean_w(seconds, self._devices[soc], powers[soc])
            work_w = pace.in_progress_w.get(soc, before_w)
            watts[soc] = [(part.before_s, before_w), (part.before_s + part.work_s, work_w)]

    def _heat(
        self,
        dynamics: DeviceDynamics,
        watts: Mapping[int, Sequence[tuple[float, float]]],
        duration_s: float,
    ) -> float:
        """Advance the dynamics by the stretch, with each SoC's watts over time; return the joules of cooling."""
        all_ends_s = {end_s for phases in watts.values() for end_s, _ in phases}
        ends_s = sorted(end_s for end_s in all_ends_s if 0.0 < end_s < duration_s)
        begin_s = cooling_j = 0.0
        for end_s in (*ends_s, duration_s):
            # Differences of end times that are due to rounding would only cost time.
            if end_s - begin_s <= 1e-9 * duration_s and duration_s:
                continue
            load_w = []
            for soc, device in enumerate(self._devices):
                later = (own_w for until_s, own_w in watts.get(soc, ()) if begin_s < until_s)
                load_w.append(next(later, device.idle_w))
            cooling_j += dynamics.advance(end_s - begin_s, load_w)
            begin_s = end_s
        return cooling_j

    def _working_w(self, parts: Sequence[Part], powers: Sequence[float], pace: Pace) -> list[float]:
        """Return each SoC's mean watts during its remaining work; a SoC without work idles."""
        working_w = [device.idle_w for device in self._devices]
        for part in parts:
            component = part.component
            if part.left:
                worked = part.steady.repeated(part.left).seconds()
                for soc, seconds in zip(component.socs, worked, strict=True):
                    working_w[soc] = _mean_w(seconds, self._devices[soc], powers[soc])
            elif part.ahead_s:
                for soc in component.socs:
                    working_w[soc] = pace.in_progress_w[soc]
        return working_w


def _mean_w(seconds: Mapping[State, float], device: Device, factor: float) -> float:
    """Return a device's mean watts over its time in states; idle without any."""
    spent_s = sum(seconds.values())
    if not spent_s:
        return device.idle_w
    return sum(power_w(state, device, factor) * own_s for state, own_s in seconds.items()) / spent_s


def _bytes_of(compiled: CompiledGraph, parts: Sequence[Part]) -> dict[Tier, float]:
    """Return the bytes of the repetitions in the latest stretch, and of the closing tasks."""
    num_bytes = dict.fromkeys(Tier, 0.0)
    for part, own, closing in zip(
        parts, compiled.component_bytes, compiled.closing_bytes, strict=True
    ):
        for part_bytes, times in ((own, part.repetitions), (closing, 1)):
            for tier, value in part_bytes.items():
                num_bytes[tier] += value * times
    return num_bytes


def at_start(clock: EventClock) -> EventClock:
    """Return a clock of the same cluster at time 0, without dynamics and trace, that shares what the other knows."""
    own = EventClock(clock._cluster, extrapolate=clock._extrapolate)
    own._graphs, own._steady_states = clock._graphs, clock._steady_states
    return own
