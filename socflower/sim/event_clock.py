"""The event clock: what task graphs take in virtual time, on shared links, with energy and changing speeds."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from socflower.cluster import Activity, Cluster, DeviceDynamics, TaskGraph, Tier, Usage
from socflower.cluster.tasks import SOC_ACTIVITIES
from socflower.errors import ConfigError
from socflower.sim.energy import IDLE_STATE, State, add_activities, power_w
from socflower.sim.program import CompiledGraph, Component, Program, compile_graph
from socflower.sim.recording import record
from socflower.sim.solution import Repeated, Solution
from socflower.sim.trace import Trace

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
    With `dynamics`, speeds and watts hold for a chunk of repetitions as long as the dynamics say; the pipeline
    drains between chunks. Joules of cooling count as an activity of their own.
    """

    def __init__(self, cluster: Cluster, dynamics: DeviceDynamics | None = None, trace: Trace | None = None, *,
                 extrapolate: bool = True) -> None:
        self._cluster = cluster
        self._devices = [cluster.device_of(soc) for soc in range(cluster.num_socs)]
        self._dynamics = dynamics
        self._trace = trace
        self._extrapolate = extrapolate
        self._usage = Usage()
        self._graphs: list[CompiledGraph] = []
        self._solutions: OrderedDict[Program, Solution] = OrderedDict()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the clock's start."""
        return self._usage.duration_s

    @property
    def usage(self) -> Usage:
        """Everything that all runs took together."""
        return self._usage

    def state(self) -> dict[str, Any]:
        """Return where the clock stands, as plain values that JSON keeps exactly."""
        usage = self._usage
        return {"duration_s": usage.duration_s,
                "soc_seconds": [[key.value, value] for key, value in usage.soc_seconds.items()],
                "energy_j": [[key.value, value] for key, value in usage.energy_j.items()],
                "num_bytes": [[key.value, value] for key, value in usage.num_bytes.items()],
                **({} if self._dynamics is None else {"dynamics": self._dynamics.state()})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where another clock of the same cluster stood; the trace is restored by itself."""
        # In the order they had: the sum of floats depends on it.
        self._usage = Usage(
            duration_s=state["duration_s"],
            soc_seconds={Activity(key): value for key, value in state["soc_seconds"]},
            energy_j={Activity(key): value for key, value in state["energy_j"]},
            num_bytes={Tier(key): value for key, value in state["num_bytes"]})
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
            raise ConfigError(f"device dynamics: need {len(self._devices)} speed factors above 0, got {factors}")
        return factors

    def taken_socs(self) -> frozenset[int]:
        """Return the SoCs that their users have now."""
        return frozenset() if self._dynamics is None else frozenset(self._dynamics.taken_socs())

    def run(self, graph: TaskGraph, *, repeat: int = 1, label: str = "") -> Usage:
        """Execute `graph` `repeat` times and advance; return what it took.

        Raises `ConfigError` for SoCs, servers or processors that the cluster does not have and for negative
        amounts. `label` names the run in the trace.
        """
        if repeat < 0:
            raise ConfigError(f"clock: repeat must not be negative, got {repeat}")
        compiled = self._compiled(graph)
        start_s, total, left = self.now_s, Usage(), repeat
        while left:
            repetitions, usage = self._advance(compiled, left)
            total += usage
            left -= repetitions
        self._label(label, start_s, total, repeat)
        return total

    def run_while_steady(self, graph: TaskGraph, *, at_most: int, label: str = "") -> tuple[int, Usage]:
        """Execute `graph` until speeds or users change; see `VirtualClock.run_while_steady`."""
        if at_most < 1:
            raise ConfigError(f"clock: at_most must be 1 or more, got {at_most}")
        start_s = self.now_s
        repetitions, usage = self._advance(self._compiled(graph), at_most)
        self._label(label, start_s, usage, repetitions)
        return repetitions, usage

    def rest(self, socs: Sequence[int]) -> Usage:
        """Let `socs` idle until speeds or users change; `ConfigError` where they never do."""
        idle_w = [device.idle_w for device in self._devices]
        duration_s = inf if self._dynamics is None else self._dynamics.steady_s(idle_w)
        if self._dynamics is None or not 0.0 < duration_s < inf:
            raise ConfigError(f"clock: resting for {duration_s} s would never end; nothing is going to change")
        soc_seconds = {Activity.IDLE: duration_s * len(socs)}
        energy_j = {Activity.IDLE: duration_s * sum(idle_w[soc] for soc in socs),
                    Activity.COOLING: self._dynamics.advance(duration_s, idle_w)}
        usage = Usage(duration_s=duration_s, soc_seconds=soc_seconds, energy_j=energy_j)
        self._label("resting", self.now_s, usage, 1)
        self._usage += usage
        return usage

    def _advance(self, compiled: CompiledGraph, left: int) -> tuple[int, Usage]:
        """Execute as many of the `left` repetitions as the present speeds hold for."""
        chunk = self._next_chunk(compiled, left)
        usage = self._account(compiled, chunk)
        if self._trace is not None:
            for component, repeated in chunk.parts:
                record(self._trace, compiled.graph, component, repeated, self.now_s)
        self._usage += usage
        return chunk.repetitions, usage

    def _label(self, label: str, start_s: float, usage: Usage, repetitions: int) -> None:
        if self._trace is not None and label:
            self._trace.add("runs", "runs", label, start_s, usage.duration_s, args={"repetitions": repetitions})

    def _compiled(self, graph: TaskGraph) -> CompiledGraph:
        """Return the compiled graph; a strategy emits equal graphs round after round."""
        for compiled in self._graphs:
            if compiled.graph is graph or compiled.graph == graph:
                return compiled
        self._graphs.append(compile_graph(graph, self._cluster))
        del self._graphs[:-_GRAPHS_KEPT]
        return self._graphs[-1]

    def _next_chunk(self, compiled: CompiledGraph, left: int) -> "_Chunk":
        """Return as many of the `left` repetitions as the present speeds hold for, at least one."""
        factors = self.speed_factors()
        if self._dynamics is None:
            return self._chunk(compiled, left, factors)
        powers = list(self._dynamics.power_factors())
        chunk = self._chunk(compiled, left, factors, powers)
        hold_s = self._dynamics.steady_s(self._mean_power_w(chunk)) * (1.0 + 1e-9)
        if chunk.duration_s > hold_s:
            fitting = max(int(hold_s / chunk.duration_s * left), 1)
            # Filling and draining cost the same for few repetitions as for many, so the estimate may be too high.
            while (chunk := self._chunk(compiled, fitting, factors, powers)).duration_s > hold_s and fitting > 1:
                fitting -= 1
        return replace(chunk, cooling_j=self._dynamics.advance(chunk.duration_s, self._mean_power_w(chunk)))

    def _chunk(self, compiled: CompiledGraph, repetitions: int, factors: Sequence[float],
               power_factors: Sequence[float] = ()) -> "_Chunk":
        parts = [(component, self._solution(component.at_speed(factors)).repeated(repetitions))
                 for component in compiled.components]
        duration_s = max((repeated.duration_s for _, repeated in parts), default=0.0)
        states: dict[int, Mapping[State, float]] = {}
        for component, repeated in parts:
            # A SoC belongs to one component, and idles once that has ended.
            rest_s = duration_s - repeated.duration_s
            for soc, seconds in zip(component.socs, repeated.seconds(), strict=True):
                states[soc] = {**seconds, IDLE_STATE: seconds.get(IDLE_STATE, 0.0) + rest_s}
        return _Chunk(repetitions, duration_s, parts, states, power_factors or [1.0] * len(self._devices))

    def _solution(self, program: Program) -> Solution:
        max_instances = self._trace.max_spans if self._trace is not None else 0
        if not self._extrapolate:
            return Solution(program, extrapolate=False, max_instances=max_instances)
        solution = self._solutions.get(program)
        if solution is None:
            solution = self._solutions[program] = Solution(program, extrapolate=True, max_instances=max_instances)
            if len(self._solutions) > _SOLUTIONS_KEPT:
                self._solutions.popitem(last=False)
        else:
            self._solutions.move_to_end(program)
        return solution

    def _account(self, compiled: CompiledGraph, chunk: "_Chunk") -> Usage:
        soc_seconds: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        energy_j: dict[Activity, float] = dict.fromkeys(SOC_ACTIVITIES, 0.0)
        for soc in dict.fromkeys(compiled.graph.participants):
            add_activities(chunk.seconds(soc), self._devices[soc], soc_seconds, energy_j, chunk.power_factors[soc])
        if self._dynamics is not None:
            energy_j[Activity.COOLING] = chunk.cooling_j
        return Usage(duration_s=chunk.duration_s, soc_seconds=soc_seconds, energy_j=energy_j,
                     num_bytes={tier: value * chunk.repetitions for tier, value in compiled.num_bytes.items()})

    def _mean_power_w(self, chunk: "_Chunk") -> list[float]:
        """Return each SoC's mean watts; a SoC that takes no part idles."""
        if not chunk.duration_s:
            return [device.idle_w for device in self._devices]
        return [sum(power_w(state, device, chunk.power_factors[soc]) * spent_s
                    for state, spent_s in chunk.seconds(soc).items()) / chunk.duration_s
                for soc, device in enumerate(self._devices)]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Repetitions at one set of speeds: what each component took, and the seconds of its SoCs in each state."""

    repetitions: int
    duration_s: float
    parts: Sequence[tuple[Component, Repeated]]
    states: Mapping[int, Mapping[State, float]]
    power_factors: Sequence[float]
    cooling_j: float = 0.0

    def seconds(self, soc: int) -> Mapping[State, float]:
        """Return the seconds of a SoC in each state; one without tasks idles."""
        return self.states.get(soc) or {IDLE_STATE: self.duration_s}
