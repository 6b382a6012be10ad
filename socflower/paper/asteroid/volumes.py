"""Table 2: the possible volumes of plans on five Nanos, since the paper shows its own plans only in images.

All pipelines of up to three stages on all five boards are enumerated, and all divisions of the boards into two or more
pipelines of up to three boards with a parameter server, with cuts between blocks and the paper's mini-batch. Pipelines
of a division with equal numbers of boards have equal cuts. Volumes follow Eqs. 1 and 2.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise, product
from typing import NamedTuple, TypeAlias

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


class _Group(NamedTuple):
    """A pipeline without its K."""

    # The first device's place among the problem's.
    begin: int
    # Devices of each stage.
    widths: tuple[int, ...]
    # The last layer of each stage but the last.
    cuts: tuple[int, ...]
    # Of a micro-batch.
    num_samples: int


class PipelineVolume(NamedTuple):
    """A hybrid pipeline of the enumeration, and its bytes by Eq. 2."""

    num_bytes: float
    group: _Group

    def plan(self, problem: PipelineProblem) -> PipelinePlan:
        """Return the plan, with the largest K up to the paper's that fit."""
        return _pipeline(problem, self.group)


class DivisionVolume(NamedTuple):
    """A division of the enumeration, and its bytes by Eq. 1."""

    num_bytes: float
    groups: tuple[_Group, ...]

    def plan(self, problem: PipelineProblem) -> TwoDPlan:
        """Return the plan, with the largest K up to the paper's that fit."""
        groups = tuple(_pipeline(problem, group) for group in self.groups)
        return TwoDPlan(groups=groups, sync=Sync.SERVER)


Enumerated: TypeAlias = PipelineVolume | DivisionVolume


@cache
def enumerated(name: str, kind: str) -> tuple[PipelineProblem, tuple[Enumerated, ...]]:
    """Return the problem and all plans: `kind` "hpp" of hybrid pipelines, "hdp" of divisions."""
    problem = problem_of(name, "A", 100, granularity=Granularity.BLOCKS)
    return problem, tuple(hybrid_pipelines(problem) if kind == "hpp" else divisions(problem))


def nearest(name: str, kind: str, num_bytes: float) -> Plan | None:
    """Return the plan nearest to a volume that fits the boards; None if none of the nearest plans fits."""
    problem, plans = enumerated(name, kind)
    for each in sorted(plans, key=lambda each: abs(each.num_bytes - num_bytes))[:_MOST_TRIED]:
        plan = each.plan(problem)
        if fits(problem, plan):
            return plan
    return None


def over_quickest(name: str, kind: str, plan: Plan) -> float:
    """Return a plan's seconds over those of the quickest enumerated plan that fits, by the closed form."""
    problem, plans = enumerated(name, kind)
    fitting = [other for other in (each.plan(problem) for each in plans) if fits(problem, other)]
    best_s = min(update_latency(problem, other, duplex=True) for other in fitting)
    return update_latency(problem, plan, duplex=True) / best_s


def hybrid_pipelines(problem: PipelineProblem) -> Iterator[PipelineVolume]:
    """Yield every pipeline of up to three stages with all devices."""
    size, model = len(problem.devices), problem.model
    for num_stages in range(1, _MOST_STAGES + 1):
        for inner in combinations(range(1, size), num_stages - 1):
            widths = tuple(end - begin for begin, end in pairwise((0, *inner, size)))
            for cuts in combinations(range(model.num_layers - 1), num_stages - 1):
                group = _Group(0, widths, cuts, problem.micro_batch_size)
                rings = sum(
                    2.0 * (width - 1) * model.weight_bytes(first + 1, last)
                    for width, (first, last) in zip(
                        widths, pairwise((-1, *cuts, model.num_layers - 1)), strict=True
                    )
                    if width > 1
                )
                yield PipelineVolume(rings + _crossing_bytes(problem, group), group)


def divisions(problem: PipelineProblem) -> Iterator[DivisionVolume]:
    """Yield every division of the devices into two or more straight pipelines of up to three, with a server."""
    size, model = len(problem.devices), problem.model
    for sizes in _partitions(size, min(_MOST_STAGES, size - 1)):
        kinds = list(dict.fromkeys(sizes))
        shares = proportional(sizes, problem.micro_batch_size)
        begins = list(accumulate(sizes, initial=0))[:-1]
        exchanged = 2.0 * len(sizes) * model.weight_bytes(0, model.num_layers - 1)
        places = range(model.num_layers - 1)
        for cuts in product(*(combinations(places, kind - 1) for kind in kinds)):
            groups = tuple(
                _Group(begin, (1,) * own, cuts[kinds.index(own)], share)
                for begin, own, share in zip(begins, sizes, shares, strict=True)
            )
            crossing = sum(_crossing_bytes(problem, group) for group in groups)
            yield DivisionVolume(exchanged + crossing, groups)


def _crossing_bytes(problem: PipelineProblem, group: _Group) -> float:
    num_samples = group.num_samples * problem.num_micro_batches
    layers = problem.model.layers
    crossing_bytes = sum(layers[cut].crossing_bytes for cut in group.cuts)
    return problem.sent_part * num_samples * crossing_bytes


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


def _pipeline(problem: PipelineProblem, group: _Group) -> PipelinePlan:
    number, members, begin = problem.num_micro_batches, [], group.begin
    for width in group.widths:
        socs = [device.soc for device in problem.devices[begin : begin + width]]
        shares = class_shares(group.num_samples, width)
        members.append(list(zip(socs, shares, strict=True)))
        begin += width
    counts = ASTEROID.counts(len(group.widths), number)
    plan = staged((*group.cuts, problem.model.num_layers - 1), members, counts, number)
    return with_in_flight(problem, plan, counts)
