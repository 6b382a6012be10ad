"""Symmetric parts of a program are executed once, exactly, by an equitable partition.

Tasks, links, processors and SoCs form a graph with edges for dependencies, crossed links and used processors. Colour
refinement divides them into classes until all members of a class have equally many neighbours in every class. Then all
members of a class are in the same state at any time: they start alike, fair shares depend only on how many flows of
which class cross a link, and processors serve their tasks in the same order. So one member represents its class, and
its flow counts on a link as often as flows of the class cross it. A part that is slower, hotter or loaded has another
colour from the start, and refinement gives other colours to all parts that it affects.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from socflower.sim.compiled_graph import SERVER, ComputeStep, Program, TransferStep

Colours = NDArray[np.int64]
Signatures = NDArray[np.uint64]

MIN_TASKS = 200
"""Smaller programs are executed as they are: the search for symmetry would cost more."""

_MIN_GAIN = 2.0
"""Least ratio of tasks to classes; below it, the program is executed as it is."""

_SALT = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)

_NUM_KINDS = 8
"""Kinds of edges, without those back."""


@dataclass(frozen=True, slots=True)
class ReducedProgram:
    """A program of one member of each class, and the class of each task and SoC of the whole program."""

    program: Program
    # By path: how many flows one flow stands for, on each of its resources.
    weights: tuple[tuple[int, ...], ...]
    task_class: tuple[int, ...]
    soc_class: tuple[int, ...]


def reduce_program(program: Program, min_tasks: int = MIN_TASKS) -> ReducedProgram | None:
    """Return the program of the classes; None if it is small or hardly symmetric."""
    size = len(program.steps)
    if size < max(min_tasks, 1):
        return None
    parts = _Parts(program)
    colours = parts.refined(int(size / _MIN_GAIN))
    return None if colours is None else _Reduction(program, parts, colours).made()


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
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(_NUM_KINDS)]
        program = self.program
        for task, step in enumerate(program.steps):
            pairs[0] += [(task, other) for other in program.after[task]]
            pairs[1] += [(task, other) for other in program.after_previous[task]]
            if isinstance(step, ComputeStep):
                pairs[2].append((task, self.first_processor + step.processor))
                if step.soc != SERVER:
                    pairs[3].append((task, self.first_soc + step.soc))
                continue
            handlers = program.paths[step.handling_path] if step.handling_s else ()
            links = program.paths[step.data_path] if step.num_bytes else ()
            pairs[4] += [(task, self.first_resource + each) for each in handlers]
            pairs[5] += [(task, self.first_resource + each) for each in links]
            pairs[6] += [(task, self.first_soc + soc) for soc in step.socs]
            pairs[7] += [(task, other) for other in program.after_round[task]]
        arrays = [np.array(each, np.int64).reshape(-1, 2) for each in pairs]
        kinds = np.repeat(np.arange(len(pairs)), [len(each) for each in arrays])
        both = np.concatenate(arrays)
        source, target = both[:, 0], both[:, 1]
        return (
            np.concatenate([source, target]),
            np.concatenate([target, source]),
            np.concatenate([kinds, kinds + _NUM_KINDS]),
        )

    def _first_colours(self) -> Colours:
        """Return colours by kind and cost; of tasks also by their position among the tasks of their processor."""
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
        """Return the coarsest equitable colours; None if the tasks have more than `most` of them.

        A round looks at the neighbours of parts that have got a new colour: along a ring of n members a difference
        passes through n rounds, each with few parts.
        """
        colours = self._first_colours()
        classes = _Refinement(colours)
        signatures = self._signatures(colours)
        num_of_tasks = len(np.unique(colours[: self.num_tasks]))
        affected = np.arange(self.size)
        while len(affected):
            changed, before = classes.split(affected, signatures[affected])
            # Each new class has parts of one sort: tasks, resources, processors or SoCs.
            num_of_tasks += len(np.unique(colours[changed[changed < self.num_tasks]]))
            # Too little symmetry to gain from.
            if num_of_tasks > most:
                return None
            affected = self._pass_on(signatures, changed, before, colours[changed])
        assert self._is_equitable(colours)
        return colours

    def _signatures(self, colours: Colours) -> Signatures:
        """Return for each part a hash of its neighbours' colours and kinds of edges, which is a sum over them."""
        sums = np.zeros(self.size, np.uint64)
        np.add.at(sums, self.source, _along(colours[self.target], self.kind))
        return sums

    def _pass_on(
        self, signatures: Signatures, changed: Colours, before: Colours, after: Colours
    ) -> Colours:
        """Correct the signatures of the neighbours of parts that have new colours; return these neighbours."""
        counts = self.starts[changed + 1] - self.starts[changed]
        firsts = np.repeat(self.starts[changed] - (np.cumsum(counts) - counts), counts)
        edges = firsts + np.arange(len(firsts))
        neighbours = self.target[edges]
        # The edge back has the other direction of the same kind.
        kinds = (self.kind[edges] + _NUM_KINDS) % (2 * _NUM_KINDS)
        gone, come = (_along(np.repeat(each, counts), kinds) for each in (before, after))
        np.add.at(signatures, neighbours, come - gone)
        return np.unique(neighbours)

    def _is_equitable(self, colours: Colours) -> bool:
        """Whether all members of a class have equally many edges of each kind to each class, without hashes."""
        keys = self.kind * (int(colours.max()) + 1) + colours[self.target]
        keys = keys[np.lexsort((keys, self.source))]
        degrees = np.diff(self.starts)
        _, first = np.unique(colours, return_index=True)
        # Of each part, the first member of its class.
        model = first[colours]
        if (degrees != degrees[model]).any():
            return False
        offsets = np.arange(len(keys)) - self.starts[self.source]
        return bool((keys == keys[self.starts[model[self.source]] + offsets]).all())


class _Refinement:
    """Colours whose classes are split, in place; the parts of a class have equal signatures, but for those affected."""

    def __init__(self, colours: Colours) -> None:
        self._colours = colours
        self._num_colours = int(colours.max()) + 1
        # There are never more colours than parts.
        self._sizes = np.bincount(colours, minlength=len(colours))
        self._signatures = np.zeros(len(colours), np.uint64)

    def split(self, affected: Colours, signatures: Signatures) -> tuple[Colours, Colours]:
        """Split classes by the signatures of affected parts; return the parts with a new colour, and their old one.

        One part of a split class keeps its colour: that of the parts which are not affected, else the largest.
        """
        old = self._colours[affected]
        order = np.lexsort((signatures, old))
        affected, old, signatures = affected[order], old[order], signatures[order]
        # Groups of equal colour and signature.
        is_first = np.ones(len(order), bool)
        is_first[1:] = (old[1:] != old[:-1]) | (signatures[1:] != signatures[:-1])
        firsts = np.flatnonzero(is_first)
        colour, signature = old[firsts], signatures[firsts]
        count = np.diff(np.append(firsts, len(order)))
        keeps = signature == self._signatures[colour]
        # Groups are in order of their colours.
        begins = np.flatnonzero(np.append(True, colour[1:] != colour[:-1]))
        num_affected = np.add.reduceat(count, begins)
        # If a class is affected as a whole, none of its parts has the signature of before.
        is_whole = num_affected == self._sizes[colour[begins]]
        keeps[np.repeat(is_whole, np.diff(np.append(begins, len(firsts))))] = False
        largest = np.lexsort((-count, colour))[begins][is_whole]
        keeps[largest] = True
        self._signatures[colour[largest]] = signature[largest]
        new = np.flatnonzero(~keeps)
        numbers = self._num_colours + np.arange(len(new))
        np.subtract.at(self._sizes, colour[new], count[new])
        self._sizes[numbers], self._signatures[numbers] = count[new], signature[new]
        self._num_colours += len(new)
        group = np.cumsum(is_first) - 1
        moves = ~keeps[group]
        number_of = np.zeros(len(firsts), np.int64)
        number_of[new] = numbers
        self._colours[affected[moves]] = number_of[group[moves]]
        return affected[moves], old[moves]


def _along(colours: Colours, kinds: Colours) -> Signatures:
    """Return a hash for an edge of each kind to a part of each colour."""
    return _mixed(colours.astype(np.uint64) * _SALT[0] + kinds.astype(np.uint64) * _SALT[1])


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


class _Reduction:
    """Builds the program of the classes."""

    def __init__(self, program: Program, parts: _Parts, colours: Colours) -> None:
        self._program = program
        self._tasks, self._resources, self._processors, self._socs = (
            _Classes(colours[first:end].tolist())
            for first, end in (
                (0, parts.first_resource),
                (parts.first_resource, parts.first_processor),
                (parts.first_processor, parts.first_soc),
                (parts.first_soc, parts.size),
            )
        )
        self._crossing = self._count_crossing()
        # Numbers of (resources, weights).
        self._paths: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def made(self) -> ReducedProgram:
        """Return the program of the first member of each class."""
        program, first_tasks = self._program, self._tasks.first
        steps = [self._step(task) for task in first_tasks]
        after_round = []
        for task, before in enumerate(self._others(program.after_round)):
            # A task follows its own rounds in any case.
            after_round.append(tuple(other for other in before if other != task))
        reduced = Program(
            steps=tuple(steps),
            after=self._others(program.after),
            after_previous=self._others(program.after_previous),
            rounds=tuple(program.rounds[first] for first in first_tasks),
            after_round=tuple(after_round),
            paths=tuple(crossed for crossed, _ in self._paths),
            capacities=tuple(program.capacities[first] for first in self._resources.first),
            num_processors=len(self._processors.first),
            num_socs=len(self._socs.first),
            num_repeated=bisect_left(first_tasks, program.num_repeated),
        )
        return ReducedProgram(
            program=reduced,
            weights=tuple(weights for _, weights in self._paths),
            task_class=tuple(self._tasks.of),
            soc_class=tuple(self._socs.of),
        )

    def _step(self, task: int) -> ComputeStep | TransferStep:
        step = self._program.steps[task]
        if isinstance(step, ComputeStep):
            soc = SERVER if step.soc == SERVER else self._socs.of[step.soc]
            return step._replace(processor=self._processors.of[step.processor], soc=soc)
        return step._replace(
            handling_path=self._path(task, step.handling_path, True) if step.handling_s else 0,
            data_path=self._path(task, step.data_path, False) if step.num_bytes else 0,
            socs=tuple(self._socs.of[soc] for soc in step.socs),
        )

    def _path(self, task: int, number: int, handled: bool) -> int:
        crossed = sorted({self._resources.of[each] for each in self._program.paths[number]})
        own = self._tasks.of[task]
        weights = [self._crossing[handled, each, own] for each in crossed]
        return self._paths.setdefault((tuple(crossed), tuple(weights)), len(self._paths))

    def _others(self, before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return for each class the classes of the tasks that its first member follows."""
        of = self._tasks.of
        return tuple(
            [tuple(sorted({of[other] for other in before[task]})) for task in self._tasks.first]
        )

    def _count_crossing(self) -> Counter[tuple[bool, int, int]]:
        """Return how many tasks cross the first resource of a class, by (handled, that class, class of tasks)."""
        class_of = {resource: number for number, resource in enumerate(self._resources.first)}
        counts = Counter[tuple[bool, int, int]]()
        for task, step in enumerate(self._program.steps):
            if isinstance(step, ComputeStep):
                continue
            for handled, used, number in (
                (True, step.handling_s, step.handling_path),
                (False, step.num_bytes, step.data_path),
            ):
                for resource in self._program.paths[number] if used else ():
                    if resource in class_of:
                        counts[handled, class_of[resource], self._tasks.of[task]] += 1
        return counts
