"""Task graphs compiled for the event clock: validated, divided into independent components, with local numbers.

Components share no dependency, SoC or resource, so each has its own steady period. Their SoCs, processors and
resources are numbered by first appearance, so two groups of one shape have equal programs, which are executed once.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from socflower.cluster import Activity, Cluster, Compute, Endpoint, TaskGraph, Tier, Transfer
from socflower.cluster.task_graph import Task
from socflower.errors import ConfigError, require_range

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
    # Of each task.
    rounds: tuple[int, ...]
    # Other tasks only.
    after_round: tuple[tuple[int, ...], ...]
    # Resources of each distinct path.
    paths: tuple[tuple[int, ...], ...]
    # Of each resource: bytes per second of a link, 1 for the handler of messages at an end.
    capacities: tuple[float, ...]
    num_processors: int
    num_socs: int
    # The first tasks are repeated; the closing ones run once, after the last repetition of the tasks that they follow.
    num_repeated: int

    @property
    def has_closing_tasks(self) -> bool:
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
        steps = list(self.program.steps)
        for task, step in enumerate(steps):
            if isinstance(step, ComputeStep) and step.soc != SERVER:
                steps[task] = step._replace(duration_s=step.duration_s / own[step.soc])
        return replace(self.program, steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """All components of a graph, and their bytes: of one repetition, and of the tasks that run once."""

    graph: TaskGraph
    components: tuple[Component, ...]
    component_bytes: tuple[dict[Tier, float], ...]
    closing_bytes: tuple[dict[Tier, float], ...]


def compile_graph(graph: TaskGraph, cluster: Cluster) -> CompiledGraph:
    """Return the graph in executable form; `ConfigError` for endpoints or processors that the cluster does not have."""
    # An unknown SoC is an error, even without tasks.
    for soc in graph.participants:
        cluster.board_of(soc)
    routes = Routes(cluster)
    for task in graph.tasks:
        try:
            if isinstance(task, Compute):
                require_range("graph", least=0, seconds=task.seconds)
                routes.check_processor(task.device, task.processor)
            else:
                require_range("graph", least=0, num_bytes=task.num_bytes)
                require_range("graph", least=0, num_messages=task.num_messages)
                routes.between(task.source, task.target)
        except ConfigError as error:
            raise ConfigError(f"task {task.name!r}: {error}") from None
    components = [_component(graph, tasks, routes) for tasks in _independent(graph, routes)]
    repeated_bytes, closing_bytes = [], []
    for each in components:
        num_repeated = each.program.num_repeated
        repeated_bytes.append(_bytes(graph, each.tasks[:num_repeated], routes))
        closing_bytes.append(_bytes(graph, each.tasks[num_repeated:], routes))
    return CompiledGraph(graph, tuple(components), tuple(repeated_bytes), tuple(closing_bytes))


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


class DisjointSets:
    """Numbers from 0 on in sets that can be joined (union-find)."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))
        self._owner: dict[Hashable, int] = {}

    def join(self, number: int, other: int) -> None:
        """Join the sets of two numbers."""
        first, second = self._root(number), self._root(other)
        self._parent[max(first, second)] = min(first, second)

    def join_by(self, number: int, token: Hashable) -> bool:
        """Join the sets of all numbers with a token; return whether it was known."""
        owner = self._owner.setdefault(token, number)
        if owner == number:
            return False
        self.join(number, owner)
        return True

    def sets(self) -> list[list[int]]:
        """Return the sets, both they and their members in ascending order."""
        found: dict[int, list[int]] = {}
        for number in range(len(self._parent)):
            found.setdefault(self._root(number), []).append(number)
        return list(found.values())

    def _root(self, number: int) -> int:
        parent = self._parent
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number


def _independent(graph: TaskGraph, routes: Routes) -> list[list[int]]:
    """Return the tasks of each component, both in order of their first task."""
    parts = DisjointSets(len(graph.tasks))
    for index, task in enumerate(graph.tasks):
        for other in (*task.after, *task.after_previous, *rounds_of(task)[1]):
            parts.join(index, other)
        if isinstance(task, Compute):
            # A SoC's tasks stay together, whichever processor they use: its power depends on all of them.
            is_soc = isinstance(task.device, int)
            parts.join_by(index, task.device if is_soc else (task.device, task.processor))
            continue
        handled, moved = task.num_messages * routes.message_s > 0, task.num_bytes > 0
        # Of transfers between the same ends, only the first needs to be joined by each resource.
        if parts.join_by(index, (task.source, task.target, handled, moved)):
            continue
        route = routes.between(task.source, task.target)
        ends = [end for end in (task.source, task.target) if isinstance(end, int)]
        handlers, links = route.handlers if handled else (), route.links if moved else ()
        for token in (*ends, *handlers, *links):
            parts.join_by(index, token)
    return parts.sets()


class _LocalNumbers:
    """Numbers a component's SoCs, processors, resources and paths by first appearance."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self.socs: dict[int, int] = {}
        self.processors: dict[tuple[Endpoint, str], int] = {}
        self.resources: dict[str, int] = {}
        self.paths: dict[tuple[str, ...], int] = {}

    def step(self, task: Task) -> ComputeStep | TransferStep:
        """Return the task with local numbers."""
        if isinstance(task, Compute):
            place = (task.device, task.processor)
            processor = self.processors.setdefault(place, len(self.processors))
            soc = self._soc(task.device) if isinstance(task.device, int) else SERVER
            return ComputeStep(task.seconds, processor, soc, (task.processor, task.activity))
        route = self._routes.between(task.source, task.target)
        ends = [self._soc(end) for end in (task.source, task.target) if isinstance(end, int)]
        handling_s = task.num_messages * self._routes.message_s
        handlers = self._path(route.handlers)
        return TransferStep(
            handling_s, handlers, task.num_bytes, self._path(route.links), tuple(ends)
        )

    def _soc(self, soc: int) -> int:
        return self.socs.setdefault(soc, len(self.socs))

    def _path(self, names: tuple[str, ...]) -> int:
        if names not in self.paths:
            for name in names:
                self.resources.setdefault(name, len(self.resources))
            self.paths[names] = len(self.paths)
        return self.paths[names]


def _component(graph: TaskGraph, members: Sequence[int], routes: Routes) -> Component:
    tasks = [graph.tasks[index] for index in members]
    numbers = _LocalNumbers(routes)
    steps = [numbers.step(task) for task in tasks]
    local = {index: number for number, index in enumerate(members)}

    def renamed(all_others: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple([tuple([local[other] for other in others]) for others in all_others])

    after_round = []
    for index, task in zip(members, tasks, strict=True):
        # A task follows its own rounds in any case.
        after_round.append([other for other in rounds_of(task)[1] if other != index])
    paths = [tuple([numbers.resources[name] for name in names]) for names in numbers.paths]
    num_repeated = len(members)
    if graph.num_repeated is not None:
        num_repeated = bisect_left(members, graph.num_repeated)
    program = Program(
        steps=tuple(steps),
        after=renamed(task.after for task in tasks),
        after_previous=renamed(task.after_previous for task in tasks),
        rounds=tuple([rounds_of(task)[0] for task in tasks]),
        after_round=renamed(after_round),
        paths=tuple(paths),
        capacities=tuple([routes.capacities.get(name, 1.0) for name in numbers.resources]),
        num_processors=len(numbers.processors),
        num_socs=len(numbers.socs),
        num_repeated=num_repeated,
    )
    return Component(program, tuple(members), tuple(numbers.socs), tuple(numbers.resources))
