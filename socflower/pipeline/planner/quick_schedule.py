"""The seconds of many pipelines at once, pass by pass, and the best K of each (F28).

Stages and cuts have the seconds of the closed form. Passes and messages run in the order of `schedule.order`, so K
counts, which the closed form leaves out. Two approximations remain. The devices of a stage keep pace with the slowest
(Eq. 8). What a stage sends in both directions takes turns on its own links, but what it receives does not; in the
simulator both share links evenly. The simulator decides among the best.

In one order all pipelines can be computed together: round 0 has each stage's first K_p forward passes, and round m the
forward pass m + K_p − 1 of each stage in turn; then the backward passes m follow from the last stage to the first. K
never rises from stage to stage, so all that a pass needs is known by then.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from socflower.pipeline.plan import Members, PipelinePlan, staged
from socflower.pipeline.planner.closed_form import concurrent_s, cut_seconds, stage_seconds
from socflower.pipeline.problem import Floats, Ints, PipelineProblem
from socflower.pipeline.schedule.order import RULES, InFlight

# Of a stage far from the end, micro-batches in flight up to a multiple of the paper's, and all.
_RULES = (*RULES.values(), InFlight(3, 0), InFlight(4, 1))
# K of all stages are all tried if there are at most so many combinations.
_ALL_COUNTS = 300
_MOST_ROUNDS = 12

Counts = tuple[int, ...]
"""K of each stage."""


class Layout(NamedTuple):
    """A pipeline without its K: the last layer and the members of each stage."""

    ends: tuple[int, ...]
    members: tuple[Members, ...]

    @classmethod
    def of(cls, plan: PipelinePlan) -> "Layout":
        """Return the layout of a plan."""
        return cls(
            tuple(stage.last_layer for stage in plan.stages),
            tuple(stage.members for stage in plan.stages),
        )

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return (0, *(end + 1 for end in self.ends[:-1]))


class Timed(NamedTuple):
    """A layout with K and its approximate seconds."""

    seconds: float
    layout: Layout
    counts: Counts

    def plan(self, num_micro_batches: int) -> PipelinePlan:
        """Return the plan."""
        return staged(self.layout.ends, self.layout.members, self.counts, num_micro_batches)


class _StageCosts(NamedTuple):
    forward_s: float
    backward_s: float
    after_s: float
    # The most micro-batches in flight within all budgets; 0: it does not fit.
    most: int


class QuickSchedule:
    """Times pipelines of one problem; the costs of a stage or a cut are computed once."""

    def __init__(self, problem: PipelineProblem, samples_on: int | None = None) -> None:
        self._problem, self._samples_on = problem, samples_on
        self._stages: dict[tuple[int, int, Members], _StageCosts] = {}
        self._cuts: dict[tuple[int, Members, Members], tuple[float, float, float, float]] = {}
        # Of `_RULES`, by the number of stages.
        self._rule_counts: dict[int, tuple[Counts, ...]] = {}

    def most_in_flight(self, layout: Layout) -> Counts | None:
        """Return the largest K within memory, which never rise from stage to stage; None if a stage does not fit."""
        most, found = self._problem.num_micro_batches, []
        for first, last, members in zip(layout.firsts, layout.ends, layout.members, strict=True):
            most = min(most, self._stage(first, last, members).most)
            if not most:
                return None
            found.append(most)
        return tuple(found)

    def by_rules(self, layouts: Sequence[Layout], limit_s: float = inf) -> list[Timed]:
        """Return the layouts that fit, each with the best K of some rules and of the largest that fits.

        Layouts that take more than `limit_s` with any K may be left out.
        """
        rows: list[tuple[Layout, Counts]] = []
        for layout in layouts:
            most = self.most_in_flight(layout)
            if most is not None and self._least_s(layout, limit_s) <= limit_s:
                limits = [most, *self._rules(len(most))]
                choices = {tuple(map(min, most, limit)) for limit in limits}
                rows += [(layout, counts) for counts in sorted(choices)]
        return _best_of_each(self.timed(rows))

    def with_best_counts(self, starts: Sequence[Timed], count: int) -> list[list[Timed]]:
        """Return the best `count` choices of K of layouts that fit: of all K, or of those found by single steps."""
        every_most, found, rows = [], [], list[tuple[Layout, Counts]]()
        for start in starts:
            most = self.most_in_flight(start.layout)
            assert most is not None
            every_most.append(most)
            found.append({start.counts: start})
            falling = list(_falling(most, _ALL_COUNTS + 1))
            if len(falling) <= _ALL_COUNTS:
                rows += [(start.layout, counts) for counts in falling]
        numbers = {start.layout: number for number, start in enumerate(starts)}

        def add(new: Sequence[tuple[Layout, Counts]]) -> set[int]:
            """Time choices of K, and return the layouts that have them."""
            for each in self.timed(new):
                found[numbers[each.layout]][each.counts] = each
            return {numbers[layout] for layout, _ in new}

        # Layouts with too many K to time all climb by single steps.
        all_timed = add(rows)
        climbing = {*range(len(starts))} - all_timed
        for _ in range(_MOST_ROUNDS):
            rows = []
            for number in climbing:
                near = sorted(found[number].values())[:2]
                changed = {step for each in near for step in steps(each.counts, every_most[number])}
                new = sorted(changed - found[number].keys())
                rows += [(starts[number].layout, counts) for counts in new]
            climbing = add(rows)
        # Of equal times the smallest K needs the least memory.
        return [
            sorted(own.values(), key=lambda each: (each.seconds, sum(each.counts)))[:count]
            for own in found
        ]

    def _rules(self, num_stages: int) -> tuple[Counts, ...]:
        if num_stages not in self._rule_counts:
            number = self._problem.num_micro_batches
            self._rule_counts[num_stages] = tuple(
                rule.counts(num_stages, number) for rule in _RULES
            )
        return self._rule_counts[num_stages]

    def _least_s(self, layout: Layout, limit_s: float) -> float:
        """Return seconds below which no K is; transfers only count if the passes alone are within `limit_s`.

        A stage, a cut or a link begins after a micro-batch has passed all before it, and is busy for all micro-batches.
        Its last gradient then passes all before it, and updates follow.
        """
        stages = self._stage_rows(layout)
        least_s = self._bound_s(stages, [(0.0, 0.0, 0.0, 0.0)] * len(stages))
        return least_s if least_s > limit_s else self._bound_s(stages, self._cut_rows(layout))

    def _bound_s(
        self,
        stages: Sequence[tuple[float, float, float]],
        cuts: Sequence[tuple[float, float, float, float]],
    ) -> float:
        number = self._problem.num_micro_batches
        least_s = before_s = behind_s = last_busy_s = 0.0
        for (forward_s, backward_s, after_s), cut in zip(stages, cuts, strict=True):
            there_s, back_s, there_busy_s, back_busy_s = cut
            behind_s = max(after_s, behind_s)
            own_s = number * (forward_s + backward_s) + behind_s
            behind_s += backward_s
            sent_s = forward_s + number * max(there_s, back_s) + behind_s
            # Bytes may still leave on the link when the last message has arrived.
            link_s = forward_s + (number - 1) * (there_busy_s + last_busy_s)
            least_s = max(least_s, before_s + max(own_s, sent_s, link_s))
            before_s += forward_s + there_s
            behind_s += back_s
            last_busy_s = back_busy_s
        # Sums of many terms round otherwise.
        return least_s * (1.0 - 1e-9)

    def timed(self, rows: Sequence[tuple[Layout, Counts]]) -> list[Timed]:
        """Return the seconds of layouts with K, in their order."""
        by_stages: dict[int, list[int]] = {}
        for index, (layout, _) in enumerate(rows):
            by_stages.setdefault(len(layout.ends), []).append(index)
        seconds = np.zeros(len(rows))
        for chosen in by_stages.values():
            seconds[chosen] = self._seconds([rows[index] for index in chosen])
        return [
            Timed(own_s, layout, counts)
            for own_s, (layout, counts) in zip(seconds.tolist(), rows, strict=True)
        ]

    def _seconds(self, rows: Sequence[tuple[Layout, Counts]]) -> Floats:
        """Return the seconds of rows with equal numbers of stages."""
        known: dict[Layout, int] = {}
        numbers = [known.setdefault(layout, len(known)) for layout, _ in rows]
        stages = np.array([self._stage_rows(layout) for layout in known])[numbers]
        cuts = np.array([self._cut_rows(layout) for layout in known])[numbers]
        supply_s = np.array([self._supply_s(layout) for layout in known])[numbers]
        counts = np.array([counts for _, counts in rows], np.int64).T
        passes = _Passes(stages.transpose(2, 1, 0), cuts.transpose(2, 1, 0), supply_s, counts)
        return passes.seconds(self._problem.num_micro_batches)

    def _stage_rows(self, layout: Layout) -> list[tuple[float, float, float]]:
        return [
            self._stage(*own)[:3]
            for own in zip(layout.firsts, layout.ends, layout.members, strict=True)
        ]

    def _cut_rows(self, layout: Layout) -> list[tuple[float, float, float, float]]:
        pairs = zip(layout.ends, layout.members, layout.members[1:], strict=False)
        # The last stage has a cut of no bytes, so that one stage is a case like others.
        return [*(self._cut(*own) for own in pairs), (0.0, 0.0, 0.0, 0.0)]

    def _stage(self, first: int, last: int, members: Members) -> _StageCosts:
        key = (first, last, members)
        if key not in self._stages:
            most = most_in_flight(self._problem, (first, last), members)
            self._stages[key] = _StageCosts(
                *stage_seconds(self._problem, (first, last), members), most
            )
        return self._stages[key]

    def _cut(
        self, last: int, senders: Members, receivers: Members
    ) -> tuple[float, float, float, float]:
        """Return the seconds of a micro-batch's activations and gradients, and in which they occupy a sender's link."""
        key = (last, senders, receivers)
        if key not in self._cuts:
            problem = self._problem
            output_bytes = problem.model.layers[last].crossing_bytes
            there_s, back_s = (
                max(share / self._sent_bytes_per_s(soc) for soc, share in members) * output_bytes
                for members in (senders, receivers)
            )
            self._cuts[key] = (
                *cut_seconds(problem, last, senders, receivers),
                there_s * problem.activation_part,
                back_s * problem.gradient_part,
            )
        return self._cuts[key]

    def _sent_bytes_per_s(self, soc: int) -> float:
        cluster = self._problem.cluster
        return cluster.boards[cluster.board_of(soc)].soc_bytes_per_s

    def _supply_s(self, layout: Layout) -> float:
        """Return the seconds in which the device with the samples sends a micro-batch to the first stage."""
        source, problem = self._samples_on, self._problem
        if source is None:
            return 0.0
        transfers = [
            (source, soc, problem.model.input_bytes * share)
            for soc, share in layout.members[0]
            if soc != source
        ]
        return concurrent_s(problem.cluster, transfers)


class _Passes:
    """Pipelines with equal numbers of stages; arrays are [stage][pipeline].

    Round r of a stage is forward pass r − (max K − K) of a pipeline, so that all begin their first backward pass after
    round max K − 1.
    """

    def __init__(self, stages: Floats, cuts: Floats, supply_s: Floats, counts: Ints) -> None:
        self._forward_s, self._backward_s, self._after_s = stages
        self._there_s, self._back_s, self._there_busy_s, self._back_busy_s = cuts
        self._supply_s = supply_s
        self._most = counts.max(axis=1)
        # The round of the first forward pass.
        self._first = self._most[:, None] - counts

    def seconds(self, num_micro_batches: int) -> Floats:
        """Return the seconds of an update of each pipeline."""
        self._number = num_micro_batches
        shape = self._first.shape
        self._columns = np.arange(shape[1])
        # When a stage, a direction of the cut behind it, or a sender's own link is free.
        self._free_s, self._there_free_s, self._back_free_s, self._link_free_s = np.zeros(
            (4, *shape)
        )
        # When activations arrive, as [stage][round][pipeline], and gradients, as [stage][micro-batch][pipeline].
        self._activations_s = [
            np.zeros((num_micro_batches + int(first.max()), shape[1])) for first in self._first
        ]
        self._gradients_s = np.zeros((shape[0], num_micro_batches, shape[1]))
        rounds = np.arange(len(self._activations_s[0]))[:, None]
        self._activations_s[0] += (rounds + 1 - self._first[0]) * self._supply_s
        for number in range(num_micro_batches):
            for stage, most in enumerate(self._most):
                for turn in range(0 if number == 0 else most + number - 1, most + number):
                    self._forward(stage, turn)
            for stage in reversed(range(shape[0])):
                self._backward(stage, number)
        ends_s: Floats = (self._free_s + self._after_s).max(axis=0)
        return ends_s

    def _forward(self, stage: int, turn: int) -> None:
        """Do a stage's forward pass of each pipeline, except where this round has none."""
        if turn >= len(self._activations_s[stage]):
            return
        numbers = turn - self._first[stage]
        does = (numbers >= 0) & (numbers < self._number)
        end_s = np.maximum(self._free_s[stage], self._activations_s[stage][turn])
        end_s += self._forward_s[stage]
        np.copyto(self._free_s[stage], end_s, where=does)
        if stage + 1 < len(self._first):
            np.maximum(end_s, self._there_free_s[stage], out=end_s)
            np.maximum(end_s, self._link_free_s[stage], out=end_s)
            np.copyto(self._link_free_s[stage], end_s + self._there_busy_s[stage], where=does)
            end_s += self._there_s[stage]
            np.copyto(self._there_free_s[stage], end_s, where=does)
            turns = numbers + self._first[stage + 1]
            self._activations_s[stage + 1][turns[does], self._columns[does]] = end_s[does]

    def _backward(self, stage: int, number: int) -> None:
        """Do a backward pass of all pipelines."""
        end_s = np.maximum(self._free_s[stage], self._gradients_s[stage, number])
        end_s += self._backward_s[stage]
        self._free_s[stage] = end_s
        if stage:
            sent_s = self._gradients_s[stage - 1, number]
            np.maximum(end_s, self._back_free_s[stage], out=sent_s)
            np.maximum(sent_s, self._link_free_s[stage], out=sent_s)
            np.add(sent_s, self._back_busy_s[stage - 1], out=self._link_free_s[stage])
            sent_s += self._back_s[stage - 1]
            self._back_free_s[stage] = sent_s


def most_in_flight(problem: PipelineProblem, layers: tuple[int, int], members: Members) -> int:
    """Return the most micro-batches in flight within all budgets of a stage (F28), up to M; 0: it does not fit."""
    model, most = problem.model, problem.num_micro_batches
    state = model.state_bytes(*layers, problem.optimizer_copies)
    kept = model.kept_bytes(*layers)
    for soc, share in members:
        # The tolerance is that of `PipelinePlan.check`.
        room = problem.device(soc).memory_bytes * (1.0 + 1e-12) - state
        if room < 0.0:
            return 0
        if kept:
            most = min(most, int(room / (share * kept)))
    return most


def _falling(most: Sequence[int], limit: int) -> Iterator[Counts]:
    """Yield K of 1 or more that never rise from stage to stage, within `most`; at most about `limit` of them."""
    yielded = 0
    if not most:
        yield ()
        return
    for count in range(1, most[0] + 1):
        for rest in _falling([min(count, each) for each in most[1:]], limit - yielded):
            yield (count, *rest)
            yielded += 1
            if yielded >= limit:
                return


def steps(counts: Counts, most: Counts) -> set[Counts]:
    """Return K within `most` that differ in one stage, or from one stage on or up to one stage, by 1 or 2."""
    found, size = set(), len(counts)
    for stage in range(size):
        for by in (-2, -1, 1, 2):
            for first, stop in ((stage, stage + 1), (0, stage + 1), (stage, size)):
                new = [
                    min(max(1, count + by), limit) if first <= index < stop else count
                    for index, (count, limit) in enumerate(zip(counts, most, strict=True))
                ]
                # A stage has no more than the stage before.
                found.add(tuple(np.minimum.accumulate(new).tolist()))
    return found


def _best_of_each(rows: Sequence[Timed]) -> list[Timed]:
    """Return the best K of each layout, the least seconds first; of equal times the smallest K."""
    best: dict[Layout, Timed] = {}
    for row in sorted(rows, key=lambda each: (each.seconds, sum(each.counts))):
        best.setdefault(row.layout, row)
    return list(best.values())
