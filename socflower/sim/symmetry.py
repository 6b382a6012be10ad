"""Symmetric parts of a program are executed once: exactly, by an equitable partition of its parts.

Tasks, links, processors and SoCs form a graph: who depends on whom, crosses what, runs where. Colour refinement divides
them into classes until all members of a class have equally many neighbours in every class. Then all members of a class
are in the same state at any time: they start alike, fair shares depend only on how many flows of which class cross a
link, and processors serve their tasks in the same order. So one member stands for its class, and its flow for as many
as cross a link there. A part that is slower, hotter or loaded has another colour from the beginning, and so have, step
by step, all that notice it.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from socflower.sim.compiled_graph import SERVER, ComputeStep, Program, TransferStep

Colours = NDArray[np.int64]

MIN_TASKS = 200
"""Smaller programs are executed as they are: to look for symmetry would cost more."""
_MIN_GAIN = 2.0
"""Tasks by classes; where symmetry gains less, the program is executed as it is."""
_SALT = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True, slots=True)
class Folded:
    """A program of one member of each class, and the class of each task and SoC of the whole one."""

    program: Program
    weights: tuple[
        tuple[int, ...], ...
    ]  # by path: how many flows one stands for, on each of its resources
    task_class: tuple[int, ...]
    soc_class: tuple[int, ...]


def fold(program: Program, min_tasks: int = MIN_TASKS) -> Folded | None:
    """Return the program of the classes; None where it is small or hardly symmetric."""
    size = len(program.steps)
    if size < max(min_tasks, 1):
        return None
    parts = _Parts(program)
    colours = parts.refined(int(size / _MIN_GAIN))
    return None if colours is None else _quotient(program, parts, colours)


class _Parts:
    """The parts of a program in one numbering (tasks, resources, processors, SoCs), and the edges between them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.num_tasks = len(program.steps)
        self.first_resource = self.num_tasks
        self.first_processor = self.first_resource + len(program.capacities)
        self.first_soc = self.first_processor + program.num_processors
        self.size = self.first_soc + program.num_socs
        source, target, kind = self._edges()
        order = np.argsort(source, kind="stable")
        self.source, self.target, self.kind = source[order], target[order], kind[order]
        self.starts = np.searchsorted(self.source, np.arange(self.size + 1))

    def _edges(self) -> tuple[Colours, Colours, Colours]:
        """Return every edge in both directions, as (from, to, kind)."""
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(8)]
        program = self.program
        for task, step in enumerate(program.steps):
            pairs[0] += [(task, other) for other in program.after[task]]
            pairs[1] += [(task, other) for other in program.after_previous[task]]
            if isinstance(step, ComputeStep):
                pairs[2].append((task, self.first_processor + step.processor))
                if step.soc != SERVER:
                    pairs[3].append((task, self.first_soc + step.soc))
                continue
            if step.handling_s:
                pairs[4] += [
                    (task, self.first_resource + each) for each in program.paths[step.handling_path]
                ]
            if step.num_bytes:
                pairs[5] += [
                    (task, self.first_resource + each) for each in program.paths[step.data_path]
                ]
            pairs[6] += [(task, self.first_soc + soc) for soc in step.socs]
            pairs[7] += [(task, other) for other in program.after_round[task]]
        arrays = [np.array(each, np.int64).reshape(-1, 2) for each in pairs]
        kinds = np.repeat(np.arange(len(pairs)), [len(each) for each in arrays])
        both = np.concatenate(arrays)
        return (
            np.concatenate([both[:, 0], both[:, 1]]),
            np.concatenate([both[:, 1], both[:, 0]]),
            np.concatenate([kinds, kinds + len(pairs)]),
        )

    def _first_colours(self) -> Colours:
        """Colour the parts by what they are; tasks also by their place among those of their processor."""
        places = [0] * self.program.num_processors
        colours: list[Hashable] = []
        for task, (step, rounds) in enumerate(
            zip(self.program.steps, self.program.rounds, strict=True)
        ):
            is_repeated = task < self.program.num_repeated
            if isinstance(step, ComputeStep):
                colours.append((step.duration_s, step.load, places[step.processor], is_repeated))
                places[step.processor] += 1
            else:
                colours.append((step.handling_s, step.num_bytes, rounds, is_repeated))
        colours += [("resource", capacity) for capacity in self.program.capacities]
        colours += ["processor"] * self.program.num_processors + ["soc"] * self.program.num_socs
        numbers: dict[Hashable, int] = {}
        return np.array([numbers.setdefault(colour, len(numbers)) for colour in colours], np.int64)

    def refined(self, most: int) -> Colours | None:
        """Return the coarsest equitable colours; None if the tasks have more than `most` of them."""
        colours = self._first_colours()
        num_colours = int(colours.max()) + 1
        while True:
            signature = _mixed(colours.astype(np.uint64) * _SALT[0] + np.uint64(1))
            along = _mixed(
                colours[self.target].astype(np.uint64) * _SALT[1]
                + self.kind.astype(np.uint64) * _SALT[2]
            )
            sums = np.zeros(self.size, np.uint64)
            used = np.flatnonzero(np.diff(self.starts))
            if len(used):
                sums[used] = np.add.reduceat(along, self.starts[used])
            _, colours = np.unique(signature + sums * _SALT[2], return_inverse=True)
            before, num_colours = num_colours, int(colours.max()) + 1
            if len(np.unique(colours[: self.num_tasks])) > most:
                return None
            if num_colours == before:
                assert self._is_equitable(colours)
                return colours

    def _is_equitable(self, colours: Colours) -> bool:
        """Whether all members of a class have equally many edges of each kind to each class; no hashes."""
        keys = self.kind * (int(colours.max()) + 1) + colours[self.target]
        keys = keys[np.lexsort((keys, self.source))]
        degrees = np.diff(self.starts)
        _, first = np.unique(colours, return_index=True)
        model = first[colours]  # of each part, the first of its class
        if (degrees != degrees[model]).any():
            return False
        offsets = np.arange(len(keys)) - self.starts[self.source]
        return bool((keys == keys[self.starts[model[self.source]] + offsets]).all())


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed bits (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _Classes:
    """The classes of consecutive parts, numbered by their first members."""

    def __init__(self, colours: Iterable[int]) -> None:
        numbers: dict[int, int] = {}
        self.of: list[int] = []
        self.first: list[int] = []
        for part, colour in enumerate(colours):
            number = numbers.setdefault(colour, len(numbers))
            if number == len(self.first):
                self.first.append(part)
            self.of.append(number)


def _quotient(program: Program, parts: _Parts, colours: Colours) -> Folded:
    tasks, resources, processors, socs = (
        _Classes(colours[first:end].tolist())
        for first, end in (
            (0, parts.first_resource),
            (parts.first_resource, parts.first_processor),
            (parts.first_processor, parts.first_soc),
            (parts.first_soc, parts.size),
        )
    )
    crossing = _crossing(program, tasks.of, resources.first)
    steps: list[ComputeStep | TransferStep] = []
    paths: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def path(task: int, number: int, handled: bool) -> int:
        crossed = sorted({resources.of[each] for each in program.paths[number]})
        weights = [crossing[handled, each, tasks.of[task]] for each in crossed]
        return paths.setdefault((tuple(crossed), tuple(weights)), len(paths))

    for task in tasks.first:
        step = program.steps[task]
        if isinstance(step, ComputeStep):
            steps.append(
                step._replace(
                    processor=processors.of[step.processor],
                    soc=SERVER if step.soc == SERVER else socs.of[step.soc],
                )
            )
        else:
            steps.append(
                step._replace(
                    handling_path=path(task, step.handling_path, True) if step.handling_s else 0,
                    data_path=path(task, step.data_path, False) if step.num_bytes else 0,
                    socs=tuple(socs.of[soc] for soc in step.socs),
                )
            )

    def others(before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            [tuple(sorted({tasks.of[other] for other in before[task]})) for task in tasks.first]
        )

    return Folded(
        program=Program(
            steps=tuple(steps),
            after=others(program.after),
            after_previous=others(program.after_previous),
            rounds=tuple(program.rounds[first] for first in tasks.first),
            after_round=tuple(
                tuple(
                    other for other in before if other != task
                )  # a task follows its own rounds anyway
                for task, before in enumerate(others(program.after_round))
            ),
            paths=tuple(crossed for crossed, _ in paths),
            capacities=tuple(program.capacities[first] for first in resources.first),
            num_processors=len(processors.first),
            num_socs=len(socs.first),
            num_repeated=bisect_left(tasks.first, program.num_repeated),
        ),
        weights=tuple(weights for _, weights in paths),
        task_class=tuple(tasks.of),
        soc_class=tuple(socs.of),
    )


def _crossing(
    program: Program, task_class: Sequence[int], models: Sequence[int]
) -> dict[tuple[bool, int, int], int]:
    """Return how many tasks cross the first resource of a class, by (handled or moved, that class, class of tasks)."""
    class_of = {resource: number for number, resource in enumerate(models)}
    counts: dict[tuple[bool, int, int], int] = {}
    for task, step in enumerate(program.steps):
        if isinstance(step, ComputeStep):
            continue
        for handled, used, number in (
            (True, step.handling_s, step.handling_path),
            (False, step.num_bytes, step.data_path),
        ):
            for resource in program.paths[number] if used else ():
                if resource in class_of:
                    key = handled, class_of[resource], task_class[task]
                    counts[key] = counts.get(key, 0) + 1
    return counts
