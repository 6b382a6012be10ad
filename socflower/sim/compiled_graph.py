"""A task graph as the event clock executes it: validated, cut into independent components, renamed.

Components share no dependency, SoC or resource, so each has its own steady period. Their SoCs, processors and
resources are numbered by first appearance: two groups of one shape have equal programs, executed once.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, TypeAlias

from socflower.cluster import Activity, Cluster, Compute, Endpoint, TaskGraph, Tier, Transfer
from socflower.cluster.task_graph import Task
from socflower.errors import ConfigError

Load: TypeAlias = tuple[str, Activity]
"""The busy processor and its activity."""

SERVER = -1
"""Placeholder for a SoC's number: the power of servers is not counted."""


class ComputeStep(NamedTuple):
    """Work on one processor; `duration_s` at the present speed."""

    duration_s: float
    processor: int
    soc: int
    load: Load


class TransferStep(NamedTuple):
    """Handling through the ends, then bytes through the links; `socs` are the ends that draw power."""

    handling_s: float
    handling_path: int
    num_bytes: float
    data_path: int
    socs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One component, all numbers local. Equal programs take equal time."""

    steps: tuple[ComputeStep | TransferStep, ...]
    after: tuple[tuple[int, ...], ...]
    after_previous: tuple[tuple[int, ...], ...]
    rounds: tuple[int, ...]  # of each task
    after_round: tuple[tuple[int, ...], ...]  # of other tasks
    paths: tuple[tuple[int, ...], ...]  # resources of each distinct path
    capacities: tuple[
        float, ...
    ]  # of each resource: bytes per second of a link, 1 of an end's handler
    num_processors: int
    num_socs: int
    num_repeated: int  # the first tasks; the others run once, after the last repetition of those that they follow

    @property
    def is_closed(self) -> bool:
        """Whether there are tasks that run once."""
        return self.num_repeated < len(self.steps)


@dataclass(frozen=True, slots=True)
class Component:
    """A program and the meaning of its local numbers."""

    program: Program
    tasks: tuple[int, ...]
    socs: tuple[int, ...]
    resources: tuple[str, ...]

    def at_speed(self, factors: Sequence[float]) -> Program:
        """Return the program with each SoC's work slowed by its speed factor (`factors` of all SoCs)."""
        own = [factors[soc] for soc in self.socs]
        if all(factor == 1.0 for factor in own):
            return self.program
        return replace(
            self.program,
            steps=tuple(
                step._replace(duration_s=step.duration_s / own[step.soc])
                if isinstance(step, ComputeStep) and step.soc != SERVER
                else step
                for step in self.program.steps
            ),
        )


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """All components of a graph, and their bytes: of one repetition, and of the tasks that run once."""

    graph: TaskGraph
    components: tuple[Component, ...]
    component_bytes: tuple[dict[Tier, float], ...]
    closing_bytes: tuple[dict[Tier, float], ...]


def compile_graph(graph: TaskGraph, cluster: Cluster) -> CompiledGraph:
    """Return the graph in executable form; `ConfigError` for endpoints or processors that the cluster does not have."""
    for soc in graph.participants:
        cluster.board_of(soc)
    routes = Routes(cluster)
    for task in graph.tasks:
        try:
            if isinstance(task, Compute):
                _check(task.seconds, "seconds")
                routes.check_processor(task.device, task.processor)
            else:
                _check(task.num_bytes, "num_bytes")
                _check(task.num_messages, "num_messages")
                routes.between(task.source, task.target)
        except ConfigError as error:
            raise ConfigError(f"task {task.name!r}: {error}") from None
    components = tuple(
        _component(graph, members, routes) for members in _independent(graph, routes)
    )
    return CompiledGraph(
        graph,
        components,
        tuple(
            _bytes(graph, each.tasks[: each.program.num_repeated], routes) for each in components
        ),
        tuple(
            _bytes(graph, each.tasks[each.program.num_repeated :], routes) for each in components
        ),
    )


def _bytes(graph: TaskGraph, tasks: Sequence[int], routes: "Routes") -> dict[Tier, float]:
    num_bytes: dict[Tier, float] = {}
    for index in tasks:
        task = graph.tasks[index]
        if isinstance(task, Transfer):
            tier = routes.between(task.source, task.target).tier
            num_bytes[tier] = num_bytes.get(tier, 0.0) + task.rounds * task.num_bytes
    return num_bytes


class Route(NamedTuple):
    """The handlers and links that a transfer crosses, by name."""

    handlers: tuple[str, str]
    links: tuple[str, ...]
    tier: Tier


class Routes:
    """The cluster's paths between endpoints, computed once per pair."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._routes: dict[tuple[Endpoint, Endpoint], Route] = {}
        self._processors: set[tuple[Endpoint, str]] = set()
        self.message_s = cluster.message_s
        self.capacities = cluster.link_bytes_per_s

    def between(self, source: Endpoint, target: Endpoint) -> Route:
        """Return the path of transfers from one place to another."""
        pair = (source, target)
        route = self._routes.get(pair)
        if route is None:
            route = self._routes[pair] = Route(
                (f"{_port(source)}/send", f"{_port(target)}/receive"),
                self._cluster.path(*pair),
                self._cluster.tier(*pair),
            )
        return route

    def check_processor(self, device: Endpoint, processor: str) -> None:
        """Raise `ConfigError` for a SoC or processor that the cluster does not have."""
        if (device, processor) in self._processors:
            return
        if isinstance(device, int):
            self._cluster.device_of(device).processor(processor)
        elif f"{device}/tx" not in self.capacities:
            raise ConfigError(f"cluster {self._cluster.name}: no server {device!r}; it has 'hub'")
        self._processors.add((device, processor))


def rounds_of(task: Task) -> tuple[int, tuple[int, ...]]:
    """Return a task's rounds, and the tasks whose previous rounds each of them follows."""
    return (task.rounds, task.after_round) if isinstance(task, Transfer) else (1, ())


def _port(endpoint: Endpoint) -> str:
    return f"soc{endpoint}" if isinstance(endpoint, int) else endpoint


def _check(value: float, key: str) -> None:
    if not 0 <= value < inf:
        raise ConfigError(f"{key} must be finite and not negative, got {value}")


def _independent(graph: TaskGraph, routes: Routes) -> list[list[int]]:
    """Return the tasks of each component, both in order of their first task."""
    parent = list(range(len(graph.tasks)))
    owner: dict[Hashable, int] = {}

    def find(task: int) -> int:
        while parent[task] != task:
            parent[task] = task = parent[parent[task]]
        return task

    def join(task: int, other: int) -> None:
        first, second = find(task), find(other)
        if first != second:
            parent[max(first, second)] = min(first, second)

    for index, task in enumerate(graph.tasks):
        for other in (*task.after, *task.after_previous, *rounds_of(task)[1]):
            join(index, other)
        if isinstance(task, Compute):
            # A SoC's tasks stay together, whichever processor they use: its power depends on all of them.
            token: Hashable = (
                task.device if isinstance(task.device, int) else (task.device, task.processor)
            )
            join(index, owner.setdefault(token, index))
            continue
        handled, moved = task.num_messages * routes.message_s > 0, task.num_bytes > 0
        pair = (task.source, task.target, handled, moved)
        if pair in owner:
            join(index, owner[pair])
            continue
        owner[pair] = index
        route = routes.between(task.source, task.target)
        ends = (end for end in (task.source, task.target) if isinstance(end, int))
        for token in (*ends, *(route.handlers if handled else ()), *(route.links if moved else ())):
            join(index, owner.setdefault(token, index))
    components: dict[int, list[int]] = {}
    for index in range(len(graph.tasks)):
        components.setdefault(find(index), []).append(index)
    return list(components.values())


def _component(graph: TaskGraph, members: Sequence[int], routes: Routes) -> Component:
    local = {task: index for index, task in enumerate(members)}
    socs: dict[int, int] = {}
    processors: dict[tuple[Endpoint, str], int] = {}
    resources: dict[str, int] = {}
    paths: dict[tuple[str, ...], int] = {}

    def path(names: tuple[str, ...]) -> int:
        if names not in paths:
            for name in names:
                resources.setdefault(name, len(resources))
            paths[names] = len(paths)
        return paths[names]

    steps: list[ComputeStep | TransferStep] = []
    for index in members:
        task = graph.tasks[index]
        if isinstance(task, Compute):
            processor = processors.setdefault((task.device, task.processor), len(processors))
            soc = (
                socs.setdefault(task.device, len(socs)) if isinstance(task.device, int) else SERVER
            )
            steps.append(ComputeStep(task.seconds, processor, soc, (task.processor, task.activity)))
        else:
            route = routes.between(task.source, task.target)
            ends = tuple(
                [
                    socs.setdefault(end, len(socs))
                    for end in (task.source, task.target)
                    if isinstance(end, int)
                ]
            )
            steps.append(
                TransferStep(
                    task.num_messages * routes.message_s,
                    path(route.handlers),
                    task.num_bytes,
                    path(route.links),
                    ends,
                )
            )
    program = Program(
        steps=tuple(steps),
        after=tuple(
            [tuple([local[other] for other in graph.tasks[index].after]) for index in members]
        ),
        after_previous=tuple(
            [
                tuple([local[other] for other in graph.tasks[index].after_previous])
                for index in members
            ]
        ),
        rounds=tuple([rounds_of(graph.tasks[index])[0] for index in members]),
        after_round=tuple(
            [
                tuple(
                    [local[other] for other in rounds_of(graph.tasks[index])[1] if other != index]
                )
                for index in members
            ]
        ),
        paths=tuple([tuple([resources[name] for name in names]) for names in paths]),
        capacities=tuple([routes.capacities.get(name, 1.0) for name in resources]),
        num_processors=len(processors),
        num_socs=len(socs),
        num_repeated=len(members)
        if graph.num_repeated is None
        else bisect_left(members, graph.num_repeated),
    )
    return Component(program, tuple(members), tuple(socs), tuple(resources))
