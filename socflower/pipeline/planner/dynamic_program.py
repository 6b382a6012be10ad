"""Algorithm 2 (F32): stages for the devices of one order by dynamic programming over suffixes of layers and devices.

Q(l, n, p) is the best pipeline of the last l layers in p stages on the last n devices. A pipeline is known by two
numbers (D, A) whose sum is its latency, see `closed_form`. Prepending an execution step `e` and a communication step
`c` to a pipeline gives

    D' = max(M·E_e, M·E_c + E_e, D + E_e + E_c),        (Eq. 11 with the indices of F30)
    A' = max(T_a^e, A − E_b^e − E_b^c).

Both rise with D and A, so keeping the pairs that no other is below in both would be exact (but for E_c, which also
depends on the width and the shares of the stage behind the cut). Algorithm 2 keeps the one with the least sum, which
may lose: `width` says how many pairs are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from socflower.pipeline.plan import PipelinePlan, Stage
from socflower.pipeline.planner.allocation import class_shares
from socflower.pipeline.planner.range_costs import RangeCosts
from socflower.pipeline.problem import Floats, Ints, PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, InFlight


class Found(NamedTuple):
    """A plan and its latency as the dynamic programme counts it."""

    latency_s: float
    plan: PipelinePlan


@dataclass(slots=True)
class _States:
    """Kept pipelines of the last n devices in p stages: arrays of kept pipelines x first cut."""

    aligned_s: Floats  # D
    tail_s: Floats  # A
    share: Floats  # the largest of the first stage
    begin: Ints  # the first stage's devices in the order, from `begin` up to `end`
    end: Ints
    layers: Ints  # its range
    rest: Ints  # which of the kept pipelines of the devices behind follows
    num_rest: Ints  # the n of those

    def first_cut(self) -> "_States":
        """Return the states of the first cut alone."""
        return _States(*(getattr(self, name)[:, :1] for name in self.__slots__))

    def at(self, which: Ints) -> "_States":
        """Return a choice of kept pipelines for each cut."""
        columns = np.arange(self.aligned_s.shape[1])
        return _States(*(getattr(self, name)[which, columns] for name in self.__slots__))


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
) -> Iterator[Found]:
    """Yield plans for the devices in this order: for each number of stages the kept ones, if they fit the budgets.

    Parameters
    ----------
    bounds : array, optional
        Layers before which a stage may begin, rising, with 0 at the start and the number of layers at the end.
    places : sequence of int, optional
        Positions in the order at which a group of devices may begin; the first always may.
    rule : InFlight
        K_p, which depends on the stages behind only.
    width : int
        How many pairs (D, A) are kept for each state; 1 is Algorithm 2.
    may_skip : bool
        Whether devices may be left out.
    duplex : bool
        Whether the two directions of a transfer are counted as concurrent; see `closed_form`.
    """
    size = len(order)
    if bounds is None:
        bounds = np.arange(problem.model.num_layers + 1)
    costs = _Costs(problem, order, bounds, duplex)
    most = min(size, len(bounds) - 1, max_stages or size)
    # Numbers of devices from a place to the end, rising.
    nums = sorted(
        {size, *(size - place for place in range(size) if places is None or place in places)}
    )
    before: list[_States | None] = [None] * (size + 1)
    history: list[list[_States | None]] = []
    for stages in range(1, most + 1):
        in_flight = rule.count(stages, problem.num_micro_batches)
        now: list[_States | None] = [None] * (size + 1)
        for index, num in enumerate(nums):
            pool = []
            if stages == 1:
                pool.append(_last_stage(costs, size - num, size, in_flight))
            else:
                for rest in nums[:index]:
                    behind = before[rest]
                    if behind is not None:
                        pool += _prepended(
                            costs, size - num, size - rest, in_flight, behind, rest, width
                        )
            skipped = now[nums[index - 1]] if may_skip and index else None
            if skipped is not None:
                pool.append(skipped)
            # In front of all devices only the first cut matters.
            now[num] = _kept([each.first_cut() for each in pool] if num == size else pool, width)
        history.append(now)
        before = now
        last = now[size]
        if last is not None:
            for which in range(len(last.aligned_s)):
                total = float(last.aligned_s[which, 0] + last.tail_s[which, 0])
                if np.isfinite(total):
                    yield Found(total, _plan(costs, history, rule, which))


class _Costs:
    """Costs of ranges: of all for groups in the middle, of those that a first or a last group can have otherwise."""

    def __init__(
        self, problem: PipelineProblem, order: Sequence[PipelineDevice], bounds: Ints, duplex: bool
    ) -> None:
        self.problem, self.size, self.num_cuts = problem, len(order), len(bounds) - 1
        self.num_transfers = (
            problem.num_micro_batches + 1.0 if duplex else 2.0 * problem.num_micro_batches
        )
        self._parts = {
            which: RangeCosts(problem, order, bounds, which) for which in ("first", "last", "all")
        }

    def of(self, begin: int, end: int) -> RangeCosts:
        """Return the costs of a group of devices."""
        return self._parts["last" if end == self.size else "all" if begin else "first"]


def _last_stage(costs: _Costs, begin: int, end: int, in_flight: int) -> _States:
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
    every: _Costs, begin: int, end: int, in_flight: int, behind: _States, num_rest: int, width: int
) -> list[_States]:
    """Return the best pipelines of a stage on devices `begin` to `end` before those kept for the rest."""
    costs = every.of(begin, end)
    stage, cut = costs.stage(begin, end, in_flight), costs.stop_cut
    inside = np.minimum(
        cut, every.num_cuts - 1
    )  # the empty rest, behind the last cut, has no state
    num_micro_batches, found = every.problem.num_micro_batches, []
    for which in range(len(behind.aligned_s)):
        rest_s = np.append(behind.aligned_s[which], np.inf)[cut]
        transfer_s = costs.transfer_s(
            begin,
            end,
            behind.end[which][inside],
            np.maximum(stage.most_share, behind.share[which][inside]),
            cut,
        )
        aligned_s = np.maximum(
            num_micro_batches * stage.both_s,
            np.maximum(every.num_transfers * transfer_s, rest_s + 2.0 * transfer_s) + stage.both_s,
        )
        with np.errstate(invalid="ignore"):
            tail_s = np.maximum(
                stage.after_s,
                np.append(behind.tail_s[which], 0.0)[cut] - stage.backward_s - transfer_s,
            )
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


def _kept(pool: Sequence[_States], width: int) -> _States | None:
    """Return for each first cut up to `width` pipelines of a pool: the least latency first, then pairs that none beats.

    Of many such pairs those are kept that divide the range of A evenly.
    """
    if not pool:
        return None
    if len(pool) == 1:
        every = pool[0]
    else:
        every = _States(
            *(np.concatenate([getattr(each, name) for each in pool]) for name in _States.__slots__)
        )
    best = (every.aligned_s + every.tail_s).argmin(axis=0)
    if width == 1:
        return every.at(best[None])
    chosen = [best]
    # Bounds on A between its value with the least D, which wants no more, and the least A.
    tail_s, aligned_s = every.tail_s, every.aligned_s
    columns = np.arange(tail_s.shape[1])
    high_s, low_s = tail_s[aligned_s.argmin(axis=0), columns], tail_s.min(axis=0)
    for index in range(width - 1):
        with np.errstate(invalid="ignore"):
            limit_s = low_s + (high_s - low_s) * (1.0 - index / max(1, width - 2))
            chosen.append(np.where(tail_s <= limit_s, aligned_s, np.inf).argmin(axis=0))
    return every.at(np.array(chosen))


def _plan(
    every: _Costs, history: Sequence[Sequence[_States | None]], rule: InFlight, which: int
) -> PipelinePlan:
    """Return the plan of a kept pipeline of all layers."""
    problem = every.problem
    stages, cut, num = [], 0, len(history[0]) - 1
    for left in range(len(history), 0, -1):
        states = history[left - 1][num]
        assert states is not None
        layers, begin, end = (
            int(values[which, cut]) for values in (states.layers, states.begin, states.end)
        )
        costs, in_flight = every.of(begin, end), rule.count(left, problem.num_micro_batches)
        stages.append(_stage(costs, layers, begin, end, in_flight))
        which, num = int(states.rest[which, cut]), int(states.num_rest[which, cut])
        cut = int(costs.stop_cut[layers])
    return PipelinePlan(
        stages=tuple(stages),
        micro_batch_size=problem.micro_batch_size,
        num_micro_batches=problem.num_micro_batches,
    )


def _stage(costs: RangeCosts, layers: int, begin: int, end: int, in_flight: int) -> Stage:
    totals = costs.allocation(begin, end, in_flight).totals[:, layers]
    members = [
        (device.soc, share)
        for total, devices in zip(totals, costs.devices_by_class(begin, end), strict=True)
        for device, share in zip(devices, class_shares(int(total), len(devices)), strict=True)
        if share
    ]
    return Stage(
        first_layer=int(costs.ranges.first[layers]),
        last_layer=int(costs.ranges.stop[layers]) - 1,
        devices=tuple(soc for soc, _ in members),
        shares=tuple(share for _, share in members),
        in_flight=in_flight,
    )
