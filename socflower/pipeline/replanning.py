"""Light re-planning: the same pipeline without lost devices; every survivor computes the same plan (F33)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from socflower.errors import InfeasiblePlan
from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, Stage, TwoDPlan
from socflower.pipeline.problem import PipelineModel

_UNBOUNDED = 1 << 62


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
