"""Light re-planning: the same pipeline without the devices that are gone, as any survivor computes it (F33)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from socflower.errors import InfeasiblePlan
from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, Policy, Stage, TwoDPlan
from socflower.pipeline.problem import PipelineModel


def replanned(plan: Plan, model: PipelineModel, present: Collection[int]) -> Plan:
    """Return a plan for the devices of `plan` that are `present`, which may be more; the plan itself if all are.

    A stage that has lost some of its devices divides its micro-batches among the others, in proportion to their shares.
    If a stage has lost all, the layers of its pipeline are divided anew among the other stages, in their order, so that
    the operations of a stage are in proportion to those that it had: it was given these to keep pace with the others.
    Of a 2-D plan, pipelines without devices are left out, and the others take their samples. If only devices are left
    that the plan does not use, the first of them trains alone.

    Raises `InfeasiblePlan` if none is left.
    """
    if all(soc in present for soc in plan.socs):
        return plan
    left = [
        pipeline
        for each in plan.pipelines
        if (pipeline := _without(each, model, present)) is not None
    ]
    if not left and not present:
        raise InfeasiblePlan("pipeline: no device is left")
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
    if isinstance(plan, TwoDPlan):
        server = (
            plan.server
            if not isinstance(plan.server, int) or plan.server in present
            else left[0].socs[0]
        )
        return replace(plan, groups=tuple(left), server=server)
    return left[0]


def shared_anew(
    plan: Plan, sample_s: Mapping[int, float], most: Mapping[int, int], tolerance: float
) -> Plan | None:
    """Return the plan with the samples of replicated stages divided by measured speeds; None if that gains too little.

    `sample_s` are each device's seconds for a sample, `most` the samples of a micro-batch that fit its memory; a device
    without either keeps its share. A stage is changed if its slowest device would take less time by more than
    `tolerance`. Each device keeps a sample, so that its speed is measured on.
    """
    changed = False
    pipelines = []
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            shares = _by_speed(stage, sample_s, most)
            before, after = (
                max(
                    share * sample_s.get(soc, 0.0)
                    for soc, share in zip(stage.devices, own, strict=True)
                )
                for own in (stage.shares, shares)
            )
            gains = after < before * (1.0 - tolerance)
            changed |= gains
            stages.append(replace(stage, shares=shares) if gains else stage)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    if not changed:
        return None
    return replace(plan, groups=tuple(pipelines)) if isinstance(plan, TwoDPlan) else pipelines[0]


def _by_speed(
    stage: Stage, sample_s: Mapping[int, float], most: Mapping[int, int]
) -> tuple[int, ...]:
    if len(stage.devices) < 2 or not all(sample_s.get(soc) for soc in stage.devices):
        return stage.shares
    shares = [
        max(1, share)
        for share in split_batch(
            stage.micro_batch_size, [1.0 / sample_s[soc] for soc in stage.devices]
        )
    ]
    shares = [
        min(share, max(own, most.get(soc, share)))
        for share, own, soc in zip(shares, stage.shares, stage.devices, strict=True)
    ]
    # What is over or missing goes to, or comes from, the device for which that costs least.
    while (rest := stage.micro_batch_size - sum(shares)) != 0:
        step = 1 if rest > 0 else -1
        free = [
            rank
            for rank, soc in enumerate(stage.devices)
            if (
                shares[rank] > 1
                if step < 0
                else shares[rank] < max(stage.shares[rank], most.get(soc, 1 << 62))
            )
        ]
        if not free:
            return stage.shares
        rank = min(
            free,
            key=lambda rank: step * (shares[rank] + (step > 0)) * sample_s[stage.devices[rank]],
        )
        shares[rank] += step
    return tuple(shares)


def _without(
    plan: PipelinePlan, model: PipelineModel, present: Collection[int]
) -> PipelinePlan | None:
    stages = [stage for each in plan.stages if (stage := _shared_by(each, present)) is not None]
    if not stages:
        return None
    if len(stages) < len(plan.stages):
        stages = _with_all_layers(stages, model)
    gpipe = plan.policy == Policy.BACKWARD_AFTER_FORWARD
    return replace(
        plan,
        stages=tuple(
            replace(stage, in_flight=plan.num_micro_batches) if gpipe else stage for stage in stages
        ),
        samples_on=plan.samples_on if plan.samples_on in present else None,
    )


def _shared_by(stage: Stage, present: Collection[int]) -> Stage | None:
    """Return a stage on those of its devices that are present; None without any."""
    kept = [
        (soc, share)
        for soc, share in zip(stage.devices, stage.shares, strict=True)
        if soc in present
    ]
    if not kept:
        return None
    shares = split_batch(stage.micro_batch_size, [share for _, share in kept])
    return replace(stage, devices=tuple(soc for soc, _ in kept), shares=shares)


def _with_all_layers(stages: Sequence[Stage], model: PipelineModel) -> list[Stage]:
    """Return the stages with all layers of the model, cut where each has about its part of the operations."""
    flops = [layer.forward_flops + layer.backward_flops for layer in model.layers]
    capacity = [sum(flops[stage.first_layer : stage.last_layer + 1]) for stage in stages]
    total = sum(capacity) or float(len(stages))
    wanted, ends, done, layer = 0.0, [], 0.0, 0
    for position, own in enumerate(capacity[:-1]):
        wanted += (own if sum(capacity) else 1.0) / total * sum(flops)
        last = len(flops) - (
            len(stages) - position
        )  # a layer is left for each of the stages behind
        done, layer = done + flops[layer], layer + 1
        while layer <= last and abs(done + flops[layer] - wanted) <= abs(done - wanted):
            done, layer = done + flops[layer], layer + 1
        ends.append(layer - 1)
    bounds = [-1, *ends, len(flops) - 1]
    return [
        replace(stage, first_layer=before + 1, last_layer=after)
        for stage, before, after in zip(stages, bounds, bounds[1:], strict=False)
    ]
