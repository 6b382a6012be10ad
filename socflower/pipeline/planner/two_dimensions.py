"""Two dimensions: pipelines inside groups of devices, and data parallelism across the groups.

Each group trains its own samples on the whole model, in a pipeline of its own cuts, and groups exchange gradients at
the end of the mini-batch. HetPipe's virtual workers are such groups, with a parameter server.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from socflower.pipeline.plan import PipelinePlan, Sync, TwoDPlan
from socflower.pipeline.planner.allocation import DeviceClass
from socflower.pipeline.planner.closed_form import latency, update_latency
from socflower.pipeline.planner.dynamic_program import search
from socflower.pipeline.planner.pruning import (
    MOST_CUTS,
    MOST_STAGES,
    by_memory,
    likely_cuts,
    likely_places,
    seconds_of,
)
from socflower.pipeline.problem import PipelineDevice, PipelineProblem

Groups = tuple[tuple[PipelineDevice, ...], ...]
GroupPlanner = Callable[[PipelineProblem], PipelinePlan | None]
"""Plans one group's pipeline; None if nothing fits."""

_MOST_MOVES = 8
_MOST_PLACES = 8


def best_two_d(
    problem: PipelineProblem, *, sync: Sync = Sync.RING, server: int | str = "hub"
) -> TwoDPlan | None:
    """Return the plan in two dimensions with the least latency of the closed form; None if none fits the budgets.

    It tries some groupings (`groupings`), not all, and leaves to `plan_pipeline` what has one group or one device each.
    """
    plans = [
        plan
        for groups in groupings(problem)
        if (plan := divide_samples(problem, groups, group_pipeline, sync=sync, server=server))
        is not None
    ]
    return min(plans, key=lambda plan: update_latency(problem, plan, duplex=True), default=None)


def groupings(problem: PipelineProblem) -> Iterator[Groups]:
    """Yield ways to divide the devices into two or more groups, at least one of several devices.

    For each number of groups: neighbours in the cluster, and devices dealt out by speed so that groups are alike; and
    each device that holds the whole model alone, with the others in one group.
    """
    devices = sorted(problem.devices, key=lambda device: device.soc)
    by_speed = sorted(devices, key=lambda device: (seconds_of(device), device.soc))
    seen: set[frozenset[frozenset[int]]] = set()
    for groups in _divided(problem, devices, by_speed):
        key = frozenset(frozenset(device.soc for device in group) for group in groups)
        if (
            1 < len(groups) < len(devices)
            and len(groups) <= problem.micro_batch_size
            and key not in seen
        ):
            seen.add(key)
            yield groups


def divide_samples(
    problem: PipelineProblem,
    groups: Groups,
    plan_group: GroupPlanner,
    *,
    sync: Sync = Sync.RING,
    server: int | str = "hub",
    planner: str = "2d",
) -> TwoDPlan | None:
    """Return the plan of given groups, with the samples of each micro-batch divided so that they take equal time.

    Samples are in proportion to speed at an equal share first; then some move from the slowest group to the fastest as
    long as the slowest becomes faster. None if a group has no plan for its samples.
    """
    known: dict[tuple[int, int], tuple[float, PipelinePlan] | None] = {}

    def planned(index: int, size: int) -> tuple[float, PipelinePlan] | None:
        if (index, size) not in known:
            own = replace(problem, devices=groups[index], micro_batch_size=size)
            plan = plan_group(own)
            known[index, size] = (
                None
                if plan is None
                else (latency(own, plan, reduces=False, duplex=True).seconds, plan)
            )
        return known[index, size]

    total = problem.micro_batch_size
    even = max(1, total // len(groups))
    firsts = [planned(index, even) for index in range(len(groups))]
    rates = [1.0 / max(first[0], 1e-12) if first is not None else 0.0 for first in firsts]
    if not any(rates):
        return None
    sizes = _proportional(rates, total)
    best: tuple[float, TwoDPlan] | None = None
    for _ in range(_MOST_MOVES):
        plans = [planned(index, size) for index, size in enumerate(sizes)]
        present = [plan for plan in plans if plan is not None]
        if len(present) < len(groups):
            return None if best is None else best[1]
        slowest_s = max(seconds for seconds, _ in present)
        if best is not None and slowest_s >= best[0]:
            break
        best = (
            slowest_s,
            TwoDPlan(
                groups=tuple(plan for _, plan in present), sync=sync, server=server, planner=planner
            ),
        )
        order = sorted(range(len(groups)), key=lambda index: present[index][0])
        if sizes[order[-1]] == 1:
            break
        sizes[order[-1]] -= 1
        sizes[order[0]] += 1
    return None if best is None else best[1]


def group_pipeline(problem: PipelineProblem) -> PipelinePlan | None:
    """Return the plan of Algorithm 2 for a group, over likely cuts and places; None if none fits.

    Its stages may themselves be groups.
    """
    order = by_memory(problem.devices)
    few = len(order) <= _MOST_PLACES
    most_cuts = MOST_CUTS if few else MOST_CUTS // 2
    bounds = likely_cuts(problem, most_cuts) if problem.model.num_layers > most_cuts else None
    places = None if few else likely_places(order, _MOST_PLACES)
    found = min(
        search(
            problem,
            order,
            bounds=bounds,
            places=places,
            max_stages=MOST_STAGES,
            may_skip=True,
            duplex=True,
        ),
        key=lambda each: each.latency_s,
        default=None,
    )
    return None if found is None else found.plan


def dealt(devices: Sequence[PipelineDevice], num_groups: int) -> Groups:
    """Return groups that take devices in turn, there and back, so that each has some of all speeds."""
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
    yield tuple(tuple(group) for group in boards.values())
    classes: dict[DeviceClass, list[PipelineDevice]] = {}
    for device in devices:
        classes.setdefault(DeviceClass.of(device), []).append(device)
    yield tuple(tuple(group) for group in classes.values())
    model = problem.model
    whole = model.state_bytes(0, model.num_layers - 1, problem.optimizer_copies) + model.kept_bytes(
        0, model.num_layers - 1
    )
    alone = [device for device in devices if device.memory_bytes >= whole]
    others = [device for device in devices if device.memory_bytes < whole]
    if others:
        yield (*((device,) for device in alone), tuple(others))


def _proportional(rates: Sequence[float], total: int) -> list[int]:
    """Return whole numbers of at least 1 in proportion to rates that add up to `total`."""
    shares = [max(1.0, total * rate / sum(rates)) for rate in rates]
    sizes = [max(1, int(share)) for share in shares]
    while sum(sizes) < total:
        sizes[max(range(len(sizes)), key=lambda index: shares[index] - sizes[index])] += 1
    while sum(sizes) > total:
        sizes[
            max(
                range(len(sizes)),
                key=lambda index: (sizes[index] > 1, sizes[index] - shares[index]),
            )
        ] -= 1
    return sizes
