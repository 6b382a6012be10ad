"""Table 2: which volumes plans on five Nanos can have at all, since the paper's own plans are in images only.

Enumerated are all pipelines of up to three stages on all five boards, and all divisions of them into two or more
pipelines of up to three boards with a parameter server, with cuts between blocks and the paper's mini-batch. Pipelines
of one division that have equally many boards have equal cuts. The volume of such a plan is that of Eqs. 1 and 2.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

from socflower.paper.asteroid.settings import problem_of
from socflower.pipeline.plan import PipelinePlan, Plan, Stage, Sync, TwoDPlan
from socflower.pipeline.planner.allocation import class_shares
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.selection import fits, with_in_flight
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.layers import Granularity
from socflower.pipeline.schedule.order import ASTEROID

_MOST_STAGES = 3
_MOST_TRIED = 400  # of the nearest plans, that memory is checked of


class Reached(NamedTuple):
    """The enumerated plan whose volume is nearest, of those that fit."""

    num_bytes: float
    plan: Plan
    over_best: float  # its seconds over those of the quickest enumerated plan, by the closed form


@cache
def enumerated(name: str, kind: str) -> tuple[PipelineProblem, tuple[tuple[float, Plan], ...]]:
    """Return the problem and all plans with their bytes: `kind` "hpp" of hybrid pipelines, "hdp" of divisions."""
    problem = problem_of(name, "A", 100, granularity=Granularity.BLOCKS)
    plans = hybrid_pipelines(problem) if kind == "hpp" else divisions(problem)
    return problem, tuple((plan.communication_bytes(problem), plan) for plan in plans)


def nearest(name: str, kind: str, num_bytes: float) -> Reached | None:
    """Return the plan that comes nearest to a volume and fits the boards; None if none of the nearest fits."""
    problem, plans = enumerated(name, kind)
    by_distance = sorted(plans, key=lambda each: abs(each[0] - num_bytes))
    best = next(
        ((own, plan) for own, plan in by_distance[:_MOST_TRIED] if fits(problem, plan)), None
    )
    if best is None:
        return None
    quickest_s = min(
        update_latency(problem, plan, duplex=True) for _, plan in plans if fits(problem, plan)
    )
    return Reached(*best, update_latency(problem, best[1], duplex=True) / quickest_s)


def hybrid_pipelines(problem: PipelineProblem) -> Iterator[PipelinePlan]:
    """Yield every pipeline of up to three stages in which all devices take part."""
    size = len(problem.devices)
    for num_stages in range(1, _MOST_STAGES + 1):
        for inner in combinations(range(1, size), num_stages - 1):
            widths = [end - begin for begin, end in pairwise((0, *inner, size))]
            for cuts in combinations(range(problem.model.num_layers - 1), num_stages - 1):
                yield _pipeline(problem, 0, widths, cuts, problem.micro_batch_size)


def divisions(problem: PipelineProblem) -> Iterator[TwoDPlan]:
    """Yield every division of the devices into two or more straight pipelines of up to three, with a server."""
    size = len(problem.devices)
    for sizes in _partitions(size, min(_MOST_STAGES, size - 1)):
        kinds = list(dict.fromkeys(sizes))
        shares = proportional(sizes, problem.micro_batch_size)
        for cuts in product(
            *(combinations(range(problem.model.num_layers - 1), kind - 1) for kind in kinds)
        ):
            groups, begin = [], 0
            for own, share in zip(sizes, shares, strict=True):
                groups.append(_pipeline(problem, begin, [1] * own, cuts[kinds.index(own)], share))
                begin += own
            yield TwoDPlan(groups=tuple(groups), sync=Sync.SERVER)


def proportional(sizes: Sequence[int], num_samples: int) -> list[int]:
    """Return samples in proportion to the sizes of groups; what rounding leaves is the first's."""
    shares = [num_samples * size // sum(sizes) for size in sizes]
    return [shares[0] + num_samples - sum(shares), *shares[1:]]


def _partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of falling numbers of at most `most`."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)


def _pipeline(
    problem: PipelineProblem,
    begin: int,
    widths: Sequence[int],
    cuts: Sequence[int],
    num_samples: int,
) -> PipelinePlan:
    counts = ASTEROID.counts(len(widths), problem.num_micro_batches)
    stages, first = [], 0
    for width, last, in_flight in zip(
        widths, (*cuts, problem.model.num_layers - 1), counts, strict=True
    ):
        devices = tuple(device.soc for device in problem.devices[begin : begin + width])
        stages.append(
            Stage(
                first_layer=first,
                last_layer=last,
                devices=devices,
                shares=tuple(class_shares(num_samples, width)),
                in_flight=in_flight,
            )
        )
        first, begin = last + 1, begin + width
    plan = PipelinePlan(
        stages=tuple(stages),
        micro_batch_size=num_samples,
        num_micro_batches=problem.num_micro_batches,
    )
    return with_in_flight(problem, plan, counts)
