"""Two dimensions: pipelines inside groups of devices, and data parallelism across the groups.

Each group trains its own samples on the whole model, in a pipeline with cuts of its own. Groups exchange gradients at
the end of the mini-batch. HetPipe's virtual workers are such groups, with a parameter server.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from socflower.pipeline.plan import PipelinePlan, Sync, TwoDPlan
from socflower.pipeline.planner.allocation import by_class
from socflower.pipeline.planner.closed_form import latency, update_latency
from socflower.pipeline.planner.dynamic_program import FoundPlan, search
from socflower.pipeline.planner.pruning import (
    MOST_CUTS,
    MOST_STAGES,
    by_memory,
    likely_cuts,
    likely_places,
    seconds_of,
)
from socflower.pipeline.problem import PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, InFlight

Groups = tuple[tuple[PipelineDevice, ...], ...]
GroupPlanner = Callable[[PipelineProblem], PipelinePlan | None]
"""Plans one group's pipeline; None if nothing fits."""

_MOST_MOVES = 8
_MOST_PLACES = 8


def best_two_d(problem: PipelineProblem) -> TwoDPlan | None:
    """Return the plan in two dimensions with the least latency of the closed form (F29); None if none fits.

    It tries the groupings of `groupings`. Plans of one group, or of one device per group, are left to `plan_pipeline`.
    """
    tried = [balanced_plan(problem, groups, group_pipeline) for groups in groupings(problem)]
    plans = [plan for plan in tried if plan is not None]
    return min(plans, key=lambda plan: update_latency(problem, plan, duplex=True), default=None)


def grid_plans(problem: PipelineProblem, num_groups: int = 0) -> Iterator[TwoDPlan]:
    """Yield the plans of 2-D parallelism as SoCFlow+ compares with it: a pipeline of one device a stage in each group.

    `num_groups` pipelines, or 0 for each number that divides the devices into equal groups, each of neighbours in the
    cluster; stages of a group are as many as its devices, so the ring across groups has a device of each. There are two
    groups of two devices at least, unless there are fewer than four devices.
    """
    devices = sorted(problem.devices, key=lambda device: device.soc)
    size = len(devices)
    for number in _numbers_of_groups(size, num_groups):
        ends = [round(index * size / number) for index in range(number + 1)]
        groups = tuple(tuple(devices[begin:end]) for begin, end in pairwise(ends))
        most_stages = max(map(len, groups))
        if number > problem.micro_batch_size or most_stages > problem.model.num_layers:
            continue
        plan = balanced_plan(problem, groups, _straight_pipeline)
        if plan is not None:
            yield plan


def _numbers_of_groups(num_devices: int, asked: int) -> Sequence[int]:
    """Return the numbers of groups of two devices or more: the one that was asked for, or those that divide them."""
    most = num_devices // 2
    if asked:
        return [asked] if asked <= most else []
    several = range(2, most + 1)
    return [number for number in several if num_devices % number == 0] or several or [1]


def _straight_pipeline(problem: PipelineProblem) -> PipelinePlan | None:
    """Return the pipeline of a device a stage with the least latency; None if none fits."""
    order = by_memory(problem.devices)
    num_stages = len(order)
    bounds = None
    if problem.model.num_layers > MOST_CUTS:
        bounds = likely_cuts(problem, max(MOST_CUTS, num_stages))
    every = search(problem, order, bounds=bounds, max_stages=num_stages, duplex=True)
    straight = (each for each in every if len(each.plan.stages) == num_stages)
    found = min(straight, key=lambda each: each.latency_s, default=None)
    return None if found is None else found.plan


def groupings(problem: PipelineProblem) -> Iterator[Groups]:
    """Yield ways to divide the devices into two or more groups, at least one of them with several devices.

    For each number of groups these are neighbours in the cluster, and groups that are alike in speed. Others are the
    boards, the classes of equal devices, and each device that holds the whole model alone beside a group of the others.
    """
    devices = sorted(problem.devices, key=lambda device: device.soc)
    by_speed = sorted(devices, key=lambda device: (seconds_of(device), device.soc))
    most = min(len(devices) - 1, problem.micro_batch_size)
    seen: set[frozenset[frozenset[int]]] = set()
    for groups in _divided(problem, devices, by_speed):
        key = frozenset(frozenset(device.soc for device in group) for group in groups)
        if 1 < len(groups) <= most and key not in seen:
            seen.add(key)
            yield groups


def balanced_plan(
    problem: PipelineProblem,
    groups: Groups,
    plan_group: GroupPlanner,
    *,
    sync: Sync = Sync.RING,
    server: int | str = "hub",
) -> TwoDPlan | None:
    """Return the plan of given groups in which they take about equal time; None if a group has no plan.

    Each micro-batch is divided in proportion to the groups' speeds at equal shares. Then samples move one by one from
    the slowest group to the fastest, as long as the slowest time falls.
    """
    known: dict[tuple[int, int], _Timed | None] = {}

    def planned(index: int, size: int) -> _Timed | None:
        if (index, size) not in known:
            own = replace(problem, devices=groups[index], micro_batch_size=size)
            known[index, size] = _timed(own, plan_group(own))
        return known[index, size]

    even = max(1, problem.micro_batch_size // len(groups))
    firsts = [planned(index, even) for index in range(len(groups))]
    rates = [0.0 if first is None else 1.0 / max(first.seconds, 1e-12) for first in firsts]
    if not any(rates):
        return None
    sizes = _proportional(rates, problem.micro_batch_size)
    best: list[_Timed] = []
    for _ in range(_MOST_MOVES):
        timed = [planned(index, size) for index, size in enumerate(sizes)]
        present = [each for each in timed if each is not None]
        if len(present) < len(groups):
            break
        if best and _slowest_s(present) >= _slowest_s(best):
            break
        best = present
        order = sorted(range(len(groups)), key=lambda index: present[index].seconds)
        if sizes[order[-1]] == 1:
            break
        sizes[order[-1]] -= 1
        sizes[order[0]] += 1
    if not best:
        return None
    return TwoDPlan(groups=tuple(each.plan for each in best), sync=sync, server=server)


class _Timed(NamedTuple):
    """A group's plan and its seconds by the closed form, without an exchange."""

    seconds: float
    plan: PipelinePlan


def _timed(problem: PipelineProblem, plan: PipelinePlan | None) -> _Timed | None:
    if plan is None:
        return None
    return _Timed(latency(problem, plan, reduces=False, duplex=True).seconds, plan)


def _slowest_s(timed: Sequence[_Timed]) -> float:
    return max(each.seconds for each in timed)


def group_pipeline(problem: PipelineProblem) -> PipelinePlan | None:
    """Return the plan of Algorithm 2 for a group, over likely cuts and places; None if none fits.

    A stage may have several devices.
    """
    every = search_likely(problem, by_memory(problem.devices))
    found = min(every, key=lambda each: each.latency_s, default=None)
    return None if found is None else found.plan


def search_likely(
    problem: PipelineProblem, order: Sequence[PipelineDevice], rule: InFlight = ASTEROID
) -> Iterator[FoundPlan]:
    """Yield the plans of Algorithm 2 for one order of devices, over likely cuts and places."""
    few = len(order) <= _MOST_PLACES
    most_cuts = MOST_CUTS if few else MOST_CUTS // 2
    bounds = likely_cuts(problem, most_cuts) if problem.model.num_layers > most_cuts else None
    places = None if few else likely_places(order, _MOST_PLACES)
    return search(
        problem,
        order,
        bounds=bounds,
        places=places,
        rule=rule,
        max_stages=MOST_STAGES,
        may_skip=True,
        duplex=True,
    )


def dealt(devices: Sequence[PipelineDevice], num_groups: int) -> Groups:
    """Return groups of all speeds: they take devices in turn, in forward and then in backward order."""
    groups: list[list[PipelineDevice]] = [[] for _ in range(num_groups)]
    for index, device in enumerate(devices):
        turn, place = divmod(index, num_groups)
        groups[place if turn % 2 == 0 else num_groups - 1 - place].append(device)
    return tuple(tuple(group) for group in groups)


def _divided(
    problem: PipelineProblem, devices: Sequence[PipelineDevice], by_speed: Sequence[PipelineDevice]
) -> Iterator[Groups]:
    size = len(devices)
    for num_groups in range(2, min(size, 9)):
        ends = [round(index * size / num_groups) for index in range(num_groups + 1)]
        yield tuple(tuple(devices[begin:end]) for begin, end in pairwise(ends))
        yield dealt(by_speed, num_groups)
    boards: dict[int, list[PipelineDevice]] = {}
    for device in devices:
        boards.setdefault(problem.cluster.board_of(device.soc), []).append(device)
    for own in (boards, by_class(devices)):
        yield tuple(tuple(group) for group in own.values())
    model, whole = problem.model, (0, problem.model.num_layers - 1)
    needed = model.state_bytes(*whole, problem.optimizer_copies) + model.kept_bytes(*whole)
    alone = [device for device in devices if device.memory_bytes >= needed]
    others = [device for device in devices if device.memory_bytes < needed]
    if others:
        yield (*((device,) for device in alone), tuple(others))


def _proportional(rates: Sequence[float], total: int) -> list[int]:
    """Return whole numbers of at least 1 with the sum `total`, in proportion to the rates."""
    shares = [max(1.0, total * rate / sum(rates)) for rate in rates]
    sizes = [max(1, int(share)) for share in shares]
    while sum(sizes) < total:
        missing = [share - size for size, share in zip(sizes, shares, strict=True)]
        sizes[missing.index(max(missing))] += 1
    while sum(sizes) > total:
        # A group keeps its last sample.
        over = [(size > 1, size - share) for size, share in zip(sizes, shares, strict=True)]
        sizes[over.index(max(over))] -= 1
    return sizes
