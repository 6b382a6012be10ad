"""Re-planning after a loss: the same pipeline without lost devices, or the quickest that fits those left (F33)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median_low
from typing import NamedTuple

import numpy as np

from socflower.errors import InfeasiblePlan
from socflower.hierarchy import split_batch
from socflower.pipeline.plan import (
    PipelinePlan,
    Plan,
    Policy,
    Stage,
    TwoDPlan,
    with_samples_on,
)
from socflower.pipeline.planner.local_search import improved
from socflower.pipeline.planner.quick_schedule import Layout, QuickSchedule, Timed
from socflower.pipeline.planner.selection import (
    PlannerSettings,
    candidates,
    fits,
    nothing_fits,
    plan_pipeline,
)
from socflower.pipeline.planner.two_dimensions import search_likely
from socflower.pipeline.problem import (
    LayerSeconds,
    PipelineDevice,
    PipelineModel,
    PipelineProblem,
    fast_cluster,
)
from socflower.pipeline.schedule.order import ASTEROID, at_most
from socflower.pipeline.schedule.run import simulate_schedule

_UNBOUNDED = 1 << 62
# The part of its time by which another plan must be quicker than the light one, which moves the fewest layers.
_LEAST_GAIN = 0.02
# Sizes of micro-batches that are tried near the light plan, and layers x devices up to which all of them are.
_MOST_SIZES = 4
_MOST_WORK = 400
# Pipelines that are changed further.
_WIDTH = 4
_MOST_BYTES = 1e15


def remaining_plan(
    plan: Plan,
    model: PipelineModel,
    present: Collection[int],
    *,
    problem: PipelineProblem | None = None,
    budget_bytes: Mapping[int, float] | None = None,
) -> Plan:
    """Return the plan after a loss from what is known: `recovered`, or `replanned` without a problem and budgets.

    If the device with the samples is lost, each device that needs some has them.

    Raises `InfeasiblePlan` if no device is present, or nothing fits the devices that are.
    """
    if not {each.samples_on for each in plan.pipelines} <= {None, *present}:
        plan = with_samples_on(plan, None)
    if problem is None and budget_bytes:
        problem = assumed_problem(plan, model, budget_bytes, present)
    if problem is None or not present:
        return replanned(plan, model, present)
    return recovered(plan, problem, present)


def recovered(plan: Plan, problem: PipelineProblem, present: Collection[int]) -> Plan:
    """Return a plan within the budgets for the devices that are `present` after a loss (F33); `plan` if all are.

    It is the light plan (`replanned`) with the best K, unless another is quicker by more than 2 %: one that
    `local_search` finds from the light plan and from Algorithm 2, perhaps with smaller micro-batches. With many layers
    and devices, Algorithm 2 runs on the same order of devices only. If none of these fits, the search of the whole
    planner follows. `QuickSchedule` gives the seconds. A plan in backward-after-forward order stays in that order only
    if it fits as it is. Pipelines of a 2-D plan are planned one by one.

    Raises `InfeasiblePlan` if nothing fits the devices that are left.
    """
    if all(soc in present for soc in plan.socs):
        return plan
    light = replanned(plan, problem.model, present)
    if isinstance(light, TwoDPlan):
        groups = [
            _quickest(each, _part_of(problem, each, each.socs)) or each for each in light.pipelines
        ]
        planned = replace(light, groups=tuple(groups))
        if fits(problem, planned):
            return planned
        light = planned.pipelines[0]
        size = sum(each.micro_batch_size for each in planned.pipelines)
        number = light.num_micro_batches
        sized = replace(problem, micro_batch_size=size, num_micro_batches=number)
        light = _resized(light, sized)
    left = _part_of(problem, light, present)
    if light.policy == Policy.BACKWARD_AFTER_FORWARD and fits(left, light):
        return light
    return _quickest(light, left) or _from_all_orders(light, left)


def for_speeds(
    plan: Plan,
    problem: PipelineProblem,
    present: Collection[int],
    sample_s: Mapping[int, float],
    tolerance: float,
) -> Plan | None:
    """Return a plan that is quicker at measured speeds by more than `tolerance` of its time, or None.

    `sample_s` has the seconds of a sample in its stage by device; those without are as fast as planned. It may move
    layers away from a device that is alone in its stage, which new shares cannot. While no device is slower than the
    median, against what was planned, by more than `tolerance`, plans stay as they are, and so do 2-D plans.
    """
    if isinstance(plan, TwoDPlan):
        return None
    times: dict[int, float] = {}
    for stage in plan.stages:
        for soc, share in stage.members:
            planned_s = problem.device(soc).seconds.both(*stage.layers, share) / share
            if planned_s and sample_s.get(soc):
                times[soc] = sample_s[soc] / planned_s
    usual = median_low(times.values()) if times else 1.0
    if max(times.values(), default=1.0) <= usual * (1.0 + tolerance):
        return None
    devices = [_at_part(problem.device(soc), times.get(soc, usual)) for soc in plan.socs]
    devices += [
        _at_part(each, usual)
        for each in problem.devices
        if each.soc in present and each.soc not in plan.socs
    ]
    return _if_quicker(plan, replace(problem, devices=tuple(devices)), _quickest, tolerance)


def heavy_plan(
    plan: Plan, problem: PipelineProblem, present: Collection[int], tolerance: float
) -> Plan | None:
    """Return the whole planner's plan if it is quicker than the one after a loss by more than `tolerance`, or None."""

    def searched(light: PipelinePlan, left: PipelineProblem) -> PipelinePlan | None:
        sizes = tuple(each.micro_batch_size for each in islice(_smaller(left), _MOST_SIZES))
        settings = PlannerSettings(
            samples_on=light.samples_on, micro_batch_sizes=sizes, two_d=False
        )
        found = plan_pipeline(left, settings).plan
        assert isinstance(found, PipelinePlan)
        return found

    if isinstance(plan, TwoDPlan) or len(present) < 2:
        return None
    return _if_quicker(plan, _part_of(problem, plan, present), searched, tolerance)


def _if_quicker(
    plan: PipelinePlan,
    problem: PipelineProblem,
    search: Callable[[PipelinePlan, PipelineProblem], PipelinePlan | None],
    tolerance: float,
) -> PipelinePlan | None:
    # Seconds say how quick int8 is; a problem from a message has no processors.
    devices = tuple(replace(device, int8_processor="") for device in problem.devices)
    problem = replace(problem, devices=devices)
    own = _part_of(problem, plan, [device.soc for device in problem.devices])
    new = search(plan, own)
    if new is None or new == plan:
        return None
    sized = _part_of(problem, new, [device.soc for device in problem.devices])
    before_s = simulate_schedule(own, plan, within_memory=False).step_s
    is_quicker = simulate_schedule(sized, new).step_s < before_s * (1.0 - tolerance)
    return new if is_quicker else None


def _at_part(device: PipelineDevice, times: float) -> PipelineDevice:
    """Return a device that takes so many times its seconds."""
    seconds = device.seconds
    slower = replace(
        seconds,
        device=f"{seconds.device}, SoC {device.soc}",
        forward_s=seconds.forward_s * times,
        backward_s=seconds.backward_s * times,
    )
    return replace(device, seconds=slower)


def assumed_problem(
    plan: Plan, model: PipelineModel, budget_bytes: Mapping[int, float], present: Collection[int]
) -> PipelineProblem:
    """Return a problem for `recovered` if only the plan and the budgets are known.

    The stages of each pipeline are taken to keep pace, and the optimiser to have one copy of the weights; links take no
    time. A device without a stage or a budget is like the plan's first one, without a limit.
    """
    flops = [max(layer.training_flops, 1.0) for layer in model.layers]
    rates = {
        soc: sum(flops[stage.first_layer : stage.last_layer + 1]) * share
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for soc, share in stage.members
    }
    socs = sorted({*plan.socs, *present})
    first = plan.pipelines[0]
    devices = []
    for soc in socs:
        seconds_s = np.array(flops)[:, None] / rates.get(soc, rates[plan.socs[0]])
        seconds = LayerSeconds(
            device=f"SoC {soc}",
            batches=(1,),
            forward_s=seconds_s / 3.0,
            backward_s=seconds_s * (2.0 / 3.0),
        )
        devices.append(
            PipelineDevice(
                soc=soc,
                name=seconds.device,
                seconds=seconds,
                memory_bytes=budget_bytes.get(soc, _MOST_BYTES),
            )
        )
    return PipelineProblem(
        model=model,
        devices=tuple(devices),
        cluster=fast_cluster(socs[-1] + 1),
        micro_batch_size=first.micro_batch_size,
        num_micro_batches=first.num_micro_batches,
    )


def _part_of(
    problem: PipelineProblem, plan: PipelinePlan, socs: Collection[int]
) -> PipelineProblem:
    """Return the problem of some devices with a plan's micro-batches."""
    return replace(
        problem,
        devices=tuple(each for each in problem.devices if each.soc in socs),
        micro_batch_size=plan.micro_batch_size,
        num_micro_batches=plan.num_micro_batches,
    )


def _resized(plan: PipelinePlan, problem: PipelineProblem) -> PipelinePlan:
    """Return a plan with the problem's micro-batches, whose devices take them in proportion to their shares."""
    size, number, stages = problem.micro_batch_size, problem.num_micro_batches, []
    for stage in plan.stages:
        shares = split_batch(size, stage.shares)
        kept = {soc: share for soc, share in zip(stage.devices, shares, strict=True) if share}
        count = min(stage.in_flight, number)
        stages.append(
            replace(stage, devices=tuple(kept), shares=tuple(kept.values()), in_flight=count)
        )
    return replace(plan, stages=tuple(stages), micro_batch_size=size, num_micro_batches=number)


def _smaller(problem: PipelineProblem) -> Iterator[PipelineProblem]:
    """Yield the problem, and the same mini-batch in ever smaller micro-batches."""
    total = problem.mini_batch_size
    for size in range(problem.micro_batch_size, 0, -1):
        if total % size == 0:
            yield replace(problem, micro_batch_size=size, num_micro_batches=total // size)


def _quickest(light: PipelinePlan, problem: PipelineProblem) -> PipelinePlan | None:
    """Return the light plan or the quickest near it; None if none of them fits."""
    order = [problem.device(soc) for soc in light.socs]
    order += [each for each in problem.devices if each.soc not in light.socs]
    is_small = problem.model.num_layers * len(order) <= _MOST_WORK
    kept, best = list[_Sized](), list[_Sized]()
    for sized in islice(_smaller(problem), _MOST_SIZES):
        quick = QuickSchedule(sized, light.samples_on)
        same = Layout.of(_resized(light, sized))
        if is_small:
            plans, _ = candidates(sized, PlannerSettings(samples_on=light.samples_on))
        else:
            plans = [
                found.plan
                for rule in (ASTEROID, at_most(1))
                for found in search_likely(sized, order, rule)
            ]
        others = [Layout.of(plan) for plan in plans]
        timed = quick.by_rules(list(dict.fromkeys([same, *others])))
        kept += [_Sized(each, sized) for each in timed if each.layout == same]
        best += [_Sized(each, sized) for each in _changed(quick, timed, sized)[:1]]
        if best and not is_small:
            break
    if not best:
        return None
    limit_s = min(each.seconds for each in best) / (1.0 - _LEAST_GAIN)
    # Layers stay where they are if that costs little, and micro-batches as large as they are.
    chosen = [each for each in (*kept, *best) if each.seconds <= limit_s]
    return chosen[0].plan(light)


def _from_all_orders(light: PipelinePlan, problem: PipelineProblem) -> PipelinePlan:
    """Return the quickest plan of the whole planner's search with the largest micro-batches that fit."""
    settings = PlannerSettings(samples_on=light.samples_on)
    *larger, smallest = _smaller(problem)
    # If one sample does not fit, nothing does.
    if not candidates(smallest, settings)[0]:
        raise nothing_fits(problem)
    for sized in (*larger, smallest):
        quick = QuickSchedule(sized, light.samples_on)
        timed = quick.by_rules([Layout.of(plan) for plan in candidates(sized, settings)[0]])
        if timed:
            return _Sized(_changed(quick, timed, sized)[0], sized).plan(light)
    raise nothing_fits(problem)


def _changed(quick: QuickSchedule, timed: Sequence[Timed], problem: PipelineProblem) -> list[Timed]:
    return improved(quick, timed, [device.soc for device in problem.devices], width=_WIDTH)


class _Sized(NamedTuple):
    """A pipeline with its size of micro-batches."""

    timed: Timed
    problem: PipelineProblem

    @property
    def seconds(self) -> float:
        """Seconds of a mini-batch."""
        return self.timed.seconds

    def plan(self, light: PipelinePlan) -> PipelinePlan:
        """Return the plan, with what it has in common with the light one."""
        new = self.timed.plan(self.problem.num_micro_batches)
        return replace(new, samples_on=light.samples_on, planner=light.planner)


def replanned(plan: Plan, model: PipelineModel, present: Collection[int]) -> Plan:
    """Return a plan for the devices of `plan` that are `present` (F33); the plan itself if all are.

    A stage that has lost some devices divides its micro-batches among the others, in proportion to their shares. If a
    stage has lost all devices, the layers of its pipeline are divided among the other stages, in their order, in
    proportion to the operations that these had: their operations were chosen so that they keep pace. Pipelines of a 2-D
    plan without devices are left out, and the others take their samples. If only devices are present that the plan does
    not use, the first of them trains alone.

    Raises `InfeasiblePlan` if no device is present.
    """
    if all(soc in present for soc in plan.socs):
        return plan
    if not present:
        raise InfeasiblePlan("pipeline: no device is left")
    reduced = [_without(each, model, present) for each in plan.pipelines]
    left = tuple(each for each in reduced if each is not None)
    if not left:
        first = plan.pipelines[0]
        alone = Stage(
            first_layer=0,
            last_layer=model.num_layers - 1,
            devices=(min(present),),
            shares=(first.micro_batch_size,),
            in_flight=first.stages[-1].in_flight,
        )
        return replace(first, stages=(alone,), samples_on=None)
    if not isinstance(plan, TwoDPlan):
        return left[0]
    lost_server = isinstance(plan.server, int) and plan.server not in present
    return replace(plan, groups=left, server=left[0].socs[0] if lost_server else plan.server)


def with_new_shares(
    plan: Plan,
    sample_s: Mapping[int, float],
    most: Mapping[int, int],
    tolerance: float,
) -> Plan | None:
    """Return the plan with new shares in replicated stages by measured speeds; None if that gains too little.

    `sample_s` has each device's seconds for a sample, `most` the samples of a micro-batch that fit its memory. A stage
    with a device of unknown speed keeps its shares, and so does one whose slowest device would save at most `tolerance`
    of its time. Each device keeps at least one sample, so that its speed is still measured.
    """
    changed, pipelines = False, []
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            shares = _by_speed(stage, sample_s, most)
            if shares is not None:
                new = replace(stage, shares=shares)
                limit_s = _slowest_s(stage, sample_s) * (1.0 - tolerance)
                if _slowest_s(new, sample_s) < limit_s:
                    changed, stage = True, new
            stages.append(stage)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    if not changed:
        return None
    return replace(plan, groups=tuple(pipelines)) if isinstance(plan, TwoDPlan) else pipelines[0]


def _slowest_s(stage: Stage, sample_s: Mapping[int, float]) -> float:
    return max(share * sample_s.get(soc, 0.0) for soc, share in stage.members)


def _by_speed(
    stage: Stage, sample_s: Mapping[int, float], most: Mapping[int, int]
) -> tuple[int, ...] | None:
    """Return shares of about equal time within memory, or None if they are not known."""
    if len(stage.devices) < 2 or not all(sample_s.get(soc) for soc in stage.devices):
        return None
    seconds = [sample_s[soc] for soc in stage.devices]
    limits = [max(own, most.get(soc, _UNBOUNDED)) for soc, own in stage.members]
    wanted = split_batch(stage.micro_batch_size, [1.0 / each for each in seconds])
    shares = [min(max(1, share), limit) for share, limit in zip(wanted, limits, strict=True)]
    # Each missing or excess sample goes to, or comes from, the device with the least resulting time.
    while (rest := stage.micro_batch_size - sum(shares)) != 0:
        step = 1 if rest > 0 else -1
        costs = {}
        for rank, (share, limit) in enumerate(zip(shares, limits, strict=True)):
            if share > 1 if step < 0 else share < limit:
                costs[rank] = step * (share + (step > 0)) * seconds[rank]
        if not costs:
            return None
        shares[min(costs, key=costs.__getitem__)] += step
    return tuple(shares)


def _without(
    plan: PipelinePlan, model: PipelineModel, present: Collection[int]
) -> PipelinePlan | None:
    shared = [_shared_by(each, present) for each in plan.stages]
    stages = [stage for stage in shared if stage is not None]
    if not stages:
        return None
    if len(stages) < len(plan.stages):
        stages = _with_all_layers(stages, model)
    samples_on = plan.samples_on if plan.samples_on in present else None
    return replace(plan, stages=tuple(stages), samples_on=samples_on)


def _shared_by(stage: Stage, present: Collection[int]) -> Stage | None:
    """Return a stage on those of its devices that are present, or None."""
    kept = {soc: share for soc, share in stage.members if soc in present}
    if not kept:
        return None
    shares = split_batch(stage.micro_batch_size, list(kept.values()))
    return replace(stage, devices=tuple(kept), shares=shares)


def _with_all_layers(stages: Sequence[Stage], model: PipelineModel) -> list[Stage]:
    """Return the stages with all layers of the model; each has about its former part of the operations."""
    flops = [layer.training_flops for layer in model.layers]
    capacity = [sum(flops[stage.first_layer : stage.last_layer + 1]) for stage in stages]
    total = sum(capacity) or float(len(stages))
    wanted, ends, done, layer = 0.0, [], 0.0, 0
    for position, own in enumerate(capacity[:-1]):
        wanted += (own if sum(capacity) else 1.0) / total * sum(flops)
        # A layer is left for each of the stages behind.
        last = len(flops) - (len(stages) - position)
        done, layer = done + flops[layer], layer + 1
        while layer <= last and abs(done + flops[layer] - wanted) <= abs(done - wanted):
            done, layer = done + flops[layer], layer + 1
        ends.append(layer - 1)
    bounds = [-1, *ends, len(flops) - 1]
    return [
        replace(stage, first_layer=before + 1, last_layer=after)
        for stage, before, after in zip(stages, bounds, bounds[1:], strict=False)
    ]
