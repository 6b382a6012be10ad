"""Algorithm 2 (F32): stages for the devices of one order by dynamic programming over suffixes of layers and devices.

Q(l, n, p) is the best pipeline of the last l layers in p stages on the last n devices. Two numbers (D, A), whose sum is
the latency (`closed_form`), stand for a pipeline. Prepending an execution step `e` and a communication step `c` gives

    D' = max(M·E_e, M·E_c + E_e, D + E_e + E_c),        (Eq. 11 with the indices of F30)
    A' = max(T_a^e, A − E_b^e − E_b^c).

Both rise with D and A, so keeping every pair that no other pair beats in both numbers would be exact, except that
E_c also depends on the width and the shares of the stage behind the cut. Algorithm 2 keeps the pair with the least sum,
which may lose the best pipeline; `width` is the number of pairs that are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from socflower.pipeline.plan import PipelinePlan, staged
from socflower.pipeline.planner.allocation import class_shares
from socflower.pipeline.planner.range_costs import RangeCosts
from socflower.pipeline.problem import Floats, Ints, PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, InFlight


class FoundPlan(NamedTuple):
    """A plan and its latency by the dynamic programme."""

    latency_s: float
    plan: PipelinePlan


@dataclass(slots=True)
class _States:
    """Kept pipelines of the last n devices in p stages; arrays are [kept pipeline][first cut]."""

    # D and A.
    aligned_s: Floats
    tail_s: Floats
    # The largest share of the first stage.
    share: Floats
    # The first stage's devices are `begin` to `end` - 1 of the order, and `layers` is its range of layers.
    begin: Ints
    end: Ints
    layers: Ints
    # The pipeline behind: its number among the kept ones, and its number of devices.
    rest: Ints
    num_rest: Ints

    def first_cut(self) -> "_States":
        """Return the states of the first cut alone."""
        return _States(*(getattr(self, name)[:, :1] for name in self.__slots__))

    def at_place(self, which: int, cut: int) -> "_Place":
        """Return the first stage of one kept pipeline, and the pipeline behind it."""
        return _Place(*(int(getattr(self, name)[which, cut]) for name in _Place._fields))

    def at(self, which: Ints) -> "_States":
        """Return a choice of kept pipelines for each cut."""
        columns = np.arange(self.aligned_s.shape[1])
        return _States(*(getattr(self, name)[which, columns] for name in self.__slots__))


class _Place(NamedTuple):
    """The first stage of a kept pipeline, and the pipeline behind it, as in `_States`."""

    begin: int
    end: int
    layers: int
    rest: int
    num_rest: int


def search(
    problem: PipelineProblem,
    order: Sequence[PipelineDevice],
    *,
    bounds: Ints | None = None,
    places: Sequence[int] | None = None,
    rule: InFlight = ASTEROID,
    width: int = 1,
    max_stages: int | None = None,
    may_skip: bool = False,
    duplex: bool = False,
    costs: "CostsByPosition | None" = None,
) -> Iterator[FoundPlan]:
    """Yield the kept plans of each number of stages for the devices in this order (F32); all fit the budgets.

    Parameters
    ----------
    bounds : array, optional
        Layers before which a stage may begin, rising, with 0 at the start and the number of layers at the end.
    places : sequence of int, optional
        Positions in the order at which a group of devices may begin; position 0 is always one of them.
    rule : InFlight
        K_p, which depends only on the stages behind.
    width : int
        Number of pairs (D, A) kept for each state; 1 is Algorithm 2.
    may_skip : bool
        Whether devices may be left out.
    duplex : bool
        Whether the two directions of a transfer are concurrent (`closed_form`).
    costs : Costs, optional
        Those of the same problem, order, bounds and `duplex` in an earlier search.
    """
    size = len(order)
    costs = costs or CostsByPosition(problem, order, bounds, duplex=duplex)
    allowed = {0, *(range(size) if places is None else places)}
    # Numbers of devices from a place to the end, rising.
    nums = sorted(size - place for place in allowed if place < size)
    history: list[dict[int, _States]] = []
    for stages in range(1, min(size, costs.num_cuts, max_stages or size) + 1):
        in_flight = rule.count(stages, problem.num_micro_batches)
        now: dict[int, _States] = {}
        for index, num in enumerate(nums):
            behind = history[-1] if history else {}
            pool = [] if history else [_last_stage(costs, size - num, size, in_flight)]
            for rest in (rest for rest in nums[:index] if rest in behind):
                group = (size - num, size - rest)
                pool += _prepended(costs, *group, in_flight, behind[rest], rest, width)
            if may_skip and index and nums[index - 1] in now:
                pool.append(now[nums[index - 1]])
            if num == size:
                # In front of all devices only the first cut matters.
                pool = [each.first_cut() for each in pool]
            if pool:
                now[num] = _kept(pool, width)
        history.append(now)
        if size in now:
            totals = (now[size].aligned_s + now[size].tail_s)[:, 0]
            for which in np.flatnonzero(np.isfinite(totals)).tolist():
                yield FoundPlan(float(totals[which]), _plan(costs, history, rule, which))


class CostsByPosition:
    """Costs of ranges of layers: a first group of devices has only first ranges, a last group only last ranges."""

    def __init__(
        self,
        problem: PipelineProblem,
        order: Sequence[PipelineDevice],
        bounds: Ints | None = None,
        *,
        duplex: bool,
    ) -> None:
        if bounds is None:
            bounds = np.arange(problem.model.num_layers + 1)
        self.problem, self.size, self.num_cuts = problem, len(order), len(bounds) - 1
        number = problem.num_micro_batches
        self.num_transfers = number + 1.0 if duplex else 2.0 * number
        self._parts = {
            which: RangeCosts(problem, order, bounds, which) for which in ("first", "last", "all")
        }

    def of(self, begin: int, end: int) -> RangeCosts:
        """Return the costs of a group of devices."""
        return self._parts["last" if end == self.size else "all" if begin else "first"]


def _last_stage(
    costs: CostsByPosition,
    begin: int,
    end: int,
    in_flight: int,
) -> _States:
    """Return the single stages of all suffixes of the layers."""
    found = costs.of(begin, end).stage(begin, end, in_flight)
    constant = np.ones((1, costs.num_cuts), np.int64)
    return _States(
        costs.problem.num_micro_batches * found.both_s[None],
        found.after_s[None],
        found.most_share[None],
        begin * constant,
        end * constant,
        np.arange(costs.num_cuts)[None],
        0 * constant,
        0 * constant,
    )


def _prepended(
    every: CostsByPosition,
    begin: int,
    end: int,
    in_flight: int,
    behind: _States,
    num_rest: int,
    width: int,
) -> list[_States]:
    """Return the best pipelines of a stage on devices `begin` to `end` - 1 before those kept for the rest."""
    costs = every.of(begin, end)
    stage, cut = costs.stage(begin, end, in_flight), costs.stop_cut
    # The empty rest behind the last cut has no state.
    inside = np.minimum(cut, every.num_cuts - 1)
    num_micro_batches, found = every.problem.num_micro_batches, []
    for which in range(len(behind.aligned_s)):
        rest_s = np.append(behind.aligned_s[which], np.inf)[cut]
        share = np.maximum(stage.most_share, behind.share[which][inside])
        transfer_s = costs.transfer_s(begin, end, behind.end[which][inside], share, cut)
        after_s = np.maximum(every.num_transfers * transfer_s, rest_s + 2.0 * transfer_s)
        aligned_s = np.maximum(num_micro_batches * stage.both_s, after_s + stage.both_s)
        with np.errstate(invalid="ignore"):
            rest_tail_s = np.append(behind.tail_s[which], 0.0)[cut]
            tail_s = np.maximum(stage.after_s, rest_tail_s - stage.backward_s - transfer_s)
            tail_s[~np.isfinite(aligned_s)] = np.inf
            latency_s = aligned_s + tail_s
        for measure in (latency_s,) if width == 1 else (latency_s, aligned_s, tail_s):
            layers = _least_of_rows(costs, measure)
            ones = np.ones((1, len(layers)), np.int64)
            found.append(
                _States(
                    aligned_s[layers][None],
                    tail_s[layers][None],
                    stage.most_share[layers][None],
                    begin * ones,
                    end * ones,
                    layers[None],
                    which * ones,
                    num_rest * ones,
                )
            )
    return found


def _least_of_rows(costs: RangeCosts, values: Floats) -> Ints:
    """Return for each first cut the range with the least value, the shortest of equals."""
    least = np.repeat(np.minimum.reduceat(values, costs.row_starts), costs.row_lengths)
    hits = np.flatnonzero(values == least)
    rows = costs.first_cut[hits]
    first: Ints = hits[np.concatenate([[True], rows[1:] != rows[:-1]])]
    return first


def _kept(pool: Sequence[_States], width: int) -> _States:
    """Return for each first cut up to `width` pipelines: the least latency, then pairs (D, A) that none beats.

    If there are many such pairs, those are kept that divide the range of A evenly.
    """
    joined = [np.concatenate([getattr(each, name) for each in pool]) for name in _States.__slots__]
    every = _States(*joined) if len(pool) > 1 else pool[0]
    best = (every.aligned_s + every.tail_s).argmin(axis=0)
    if width == 1:
        return every.at(best[None])
    chosen = [best]
    # Bounds on A from its value at the least D down to the least A.
    tail_s, aligned_s = every.tail_s, every.aligned_s
    columns = np.arange(tail_s.shape[1])
    high_s, low_s = tail_s[aligned_s.argmin(axis=0), columns], tail_s.min(axis=0)
    for index in range(width - 1):
        with np.errstate(invalid="ignore"):
            limit_s = low_s + (high_s - low_s) * (1.0 - index / max(1, width - 2))
            chosen.append(np.where(tail_s <= limit_s, aligned_s, np.inf).argmin(axis=0))
    return every.at(np.array(chosen))


def _plan(
    every: CostsByPosition,
    history: Sequence[dict[int, _States]],
    rule: InFlight,
    which: int,
) -> PipelinePlan:
    """Return the plan of a kept pipeline of all layers."""
    number = every.problem.num_micro_batches
    counts = rule.counts(len(history), number)
    ends, members, cut, num = [], [], 0, every.size
    for states, in_flight in zip(reversed(history), counts, strict=True):
        own = states[num].at_place(which, cut)
        costs = every.of(own.begin, own.end)
        ends.append(int(costs.ranges.stop[own.layers]) - 1)
        members.append(_members(costs, own, in_flight))
        which, num, cut = own.rest, own.num_rest, int(costs.stop_cut[own.layers])
    return staged(ends, members, counts, number)


def _members(costs: RangeCosts, place: _Place, in_flight: int) -> list[tuple[int, int]]:
    """Return the SoCs and shares of a stage."""
    group = (place.begin, place.end)
    totals = costs.allocation(*group, in_flight).totals[:, place.layers]
    found = []
    for total, devices in zip(totals, costs.devices_by_class(*group), strict=True):
        shares = class_shares(int(total), len(devices))
        found += [(each.soc, share) for each, share in zip(devices, shares, strict=True) if share]
    return found
