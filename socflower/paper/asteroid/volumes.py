"""Table 2: the possible volumes of plans on five Nanos, since the paper shows its own plans only in images.

All pipelines of up to three stages on all five boards are enumerated, and all divisions of the boards into two or more
pipelines of up to three boards with a parameter server, with cuts between blocks and the paper's mini-batch. Pipelines
of a division with equal numbers of boards have equal cuts. Volumes follow Eqs. 1 and 2.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

from socflower.paper.asteroid.settings import problem_of
from socflower.pipeline.plan import PipelinePlan, Plan, Sync, TwoDPlan, staged
from socflower.pipeline.planner.allocation import class_shares
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.selection import fits, with_in_flight
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.layers import Granularity
from socflower.pipeline.schedule.order import ASTEROID

_MOST_STAGES = 3
# The number of nearest plans whose memory is checked.
_MOST_TRIED = 400


class Reached(NamedTuple):
    """The enumerated plan with the nearest volume that fits."""

    num_bytes: float
    plan: Plan
    # Its seconds over those of the fastest enumerated plan, by the closed form.
    over_best: float


@cache
def enumerated(name: str, kind: str) -> tuple[PipelineProblem, tuple[tuple[float, Plan], ...]]:
    """Return the problem and all plans with their bytes: `kind` "hpp" of hybrid pipelines, "hdp" of divisions."""
    problem = problem_of(name, "A", 100, granularity=Granularity.BLOCKS)
    plans = hybrid_pipelines(problem) if kind == "hpp" else divisions(problem)
    return problem, tuple((plan.communication_bytes(problem), plan) for plan in plans)


def nearest(name: str, kind: str, num_bytes: float) -> Reached | None:
    """Return the plan nearest to a volume that fits the boards; None if none of the nearest plans fits."""
    problem, plans = enumerated(name, kind)
    by_distance = sorted(plans, key=lambda each: abs(each[0] - num_bytes))
    for own_bytes, plan in by_distance[:_MOST_TRIED]:
        if fits(problem, plan):
            fitting = [other for _, other in plans if fits(problem, other)]
            best_s = min(update_latency(problem, other, duplex=True) for other in fitting)
            seconds = update_latency(problem, plan, duplex=True)
            return Reached(own_bytes, plan, seconds / best_s)
    return None


def hybrid_pipelines(problem: PipelineProblem) -> Iterator[PipelinePlan]:
    """Yield every pipeline of up to three stages with all devices."""
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
        places = range(problem.model.num_layers - 1)
        for cuts in product(*(combinations(places, kind - 1) for kind in kinds)):
            groups, begin = [], 0
            for own, share in zip(sizes, shares, strict=True):
                groups.append(_pipeline(problem, begin, [1] * own, cuts[kinds.index(own)], share))
                begin += own
            yield TwoDPlan(groups=tuple(groups), sync=Sync.SERVER)


def proportional(sizes: Sequence[int], num_samples: int) -> list[int]:
    """Return samples in proportion to the sizes of groups; the first group also gets the rest after rounding."""
    shares = [num_samples * size // sum(sizes) for size in sizes]
    return [shares[0] + num_samples - sum(shares), *shares[1:]]


def _partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of falling numbers, each at most `most`."""
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
    """Return the pipeline of stages of these widths on the devices from `begin` on."""
    number, members = problem.num_micro_batches, []
    for width in widths:
        socs = [device.soc for device in problem.devices[begin : begin + width]]
        members.append(list(zip(socs, class_shares(num_samples, width), strict=True)))
        begin += width
    counts = ASTEROID.counts(len(widths), number)
    plan = staged((*cuts, problem.model.num_layers - 1), members, counts, number)
    return with_in_flight(problem, plan, counts)
