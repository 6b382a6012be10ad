"""Plans as other systems make them, under the same cost model: what Asteroid is compared with (paper §5.1).

| name | plan |
| --- | --- |
| `single-device` | the fastest device that holds the model |
| `data-parallel` | all devices, samples by speed within memory (Algorithm 1), a ring |
| `eddl` | data parallelism in which each device takes samples by speed and a leader sums the gradients; no memory |
| `pipeline-parallel` | a stage a device, layers by speed, 1F1B; neither links nor memory |
| `gpipe` | a stage a device, equal time on the mean device, backward after forward; neither links nor memory |
| `pipedream` | the partition of Narayanan et al. (SOSP 2019) for equal devices, run synchronously; no memory |
| `dapple` | the partition of Fan et al. (PPoPP 2021) for equal devices; no memory |
| `hetpipe` | virtual workers of all kinds of devices, a server, run synchronously (Park et al., ATC 2020); no memory |
| `2d` | pipelines in groups, rings across them, samples by speed, within memory |

"No memory": the planner does not know of budgets, and its plan may exceed them; `Compared.fits` tells. PipeDream and
HetPipe train asynchronously; as in the paper, their partitions are compared under synchronous training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.pipeline.plan import (
    PipelinePlan,
    Plan,
    Policy,
    Prediction,
    Stage,
    Sync,
    TwoDPlan,
    with_samples_on,
)
from socflower.pipeline.planner.allocation import Allocator, DeviceClass, LayerRanges, class_shares
from socflower.pipeline.planner.dynamic_program import search
from socflower.pipeline.planner.pruning import seconds_of
from socflower.pipeline.planner.selection import (
    OnStep,
    micro_batch_choices,
    nothing_fits,
    predict,
    single_device,
)
from socflower.pipeline.planner.two_dimensions import best_two_d, dealt, divide_samples
from socflower.pipeline.problem import Floats, LayerSeconds, PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, RULES, InFlight

Planner = Callable[[PipelineProblem], Plan]

_NO_LIMIT = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The plan of one system."""

    name: str
    problem: PipelineProblem  # with the micro-batch size of the plan
    plan: Plan | None  # None: it finds none
    prediction: Prediction | None  # as if memory were enough, where the plan does not fit
    fits: bool  # whether the plan keeps all budgets
    why_not: str = ""  # why there is no plan, or why it does not fit


def compare(
    problem: PipelineProblem,
    names: Sequence[str] = (),
    *,
    micro_batch_sizes: Sequence[int] = (),
    samples_on: int | None = None,
    on_step: OnStep = lambda text, done, total: None,
) -> tuple[Compared, ...]:
    """Return the plans of peers by name, default all, each with its best of the micro-batch sizes.

    `samples_on` is the SoC that has samples and labels; None: they are where they are needed.
    """
    unknown = next((name for name in names if name not in PEERS), None)
    if unknown is not None:
        raise ConfigError(f"pipeline: no comparator {unknown!r}; there are {', '.join(PEERS)}")
    found = []
    chosen = names or tuple(PEERS)
    for number, name in enumerate(chosen):
        on_step(f"comparing with {name}", number, len(chosen))
        tried = [
            _compared(name, sized, samples_on)
            for sized in micro_batch_choices(problem, micro_batch_sizes)
        ]
        found.append(
            min(
                tried,
                key=lambda each: (
                    not each.fits,
                    each.prediction.step_s if each.prediction else inf,
                ),
            )
        )
    return tuple(found)


def _compared(name: str, problem: PipelineProblem, samples_on: int | None) -> Compared:
    try:
        plan = PEERS[name](problem)
    except InfeasiblePlan as why:
        return Compared(
            name=name, problem=problem, plan=None, prediction=None, fits=False, why_not=str(why)
        )
    plan = with_samples_on(replace(plan, planner=name), samples_on)
    why_not = ""
    try:
        plan.check(problem)
    except InfeasiblePlan as why:
        why_not = str(why)
    return Compared(
        name=name,
        problem=problem,
        plan=plan,
        prediction=predict(problem, plan, within_memory=False),
        fits=not why_not,
        why_not=why_not,
    )


def fastest_device(problem: PipelineProblem) -> PipelinePlan:
    """Return the plan of the fastest device that holds the model."""
    for device in sorted(problem.devices, key=seconds_of):
        plan = single_device(problem, device)
        if plan is not None:
            return plan
    raise nothing_fits(problem)


def data_parallel(problem: PipelineProblem) -> PipelinePlan:
    """Return data parallelism over all devices that Algorithm 1 gives samples."""
    found = next(
        search(problem, problem.devices, bounds=np.array([0, problem.model.num_layers])), None
    )
    if found is None:
        raise nothing_fits(problem)
    return found.plan


def eddl(problem: PipelineProblem) -> TwoDPlan:
    """Return data parallelism with a leader, the fastest device, in place of a ring."""
    last = problem.model.num_layers - 1
    shares = _by_speed(problem, problem.devices, 0, last)
    members = [
        (device.soc, share) for device, share in zip(problem.devices, shares, strict=True) if share
    ]
    leader = min(problem.devices, key=seconds_of).soc
    groups = tuple(
        PipelinePlan(
            stages=(
                Stage(first_layer=0, last_layer=last, devices=(soc,), shares=(share,), in_flight=1),
            ),
            micro_batch_size=share,
            num_micro_batches=problem.num_micro_batches,
        )
        for soc, share in members
    )
    return TwoDPlan(groups=groups, sync=Sync.SERVER, server=leader)


def pipeline_parallel(problem: PipelineProblem) -> PipelinePlan:
    """Return a stage a device in the devices' order, whose slowest stage is as fast as layers allow, in 1F1B order."""
    devices = problem.devices[: problem.model.num_layers]
    seconds = [_layer_seconds(device.seconds, problem.micro_batch_size) for device in devices]
    return _straight(
        problem, devices, _balanced_ends(seconds), ASTEROID, Policy.ONE_FORWARD_ONE_BACKWARD
    )


def gpipe(problem: PipelineProblem) -> PipelinePlan:
    """Return a stage a device with equal times on the mean device, all forward passes before the backward passes."""
    devices = problem.devices[: problem.model.num_layers]
    mean = np.mean(
        [_layer_seconds(device.seconds, problem.micro_batch_size) for device in problem.devices],
        axis=0,
    )
    everything = InFlight(0, problem.num_micro_batches)
    return _straight(
        problem,
        devices,
        _balanced_ends([mean] * len(devices)),
        everything,
        Policy.BACKWARD_AFTER_FORWARD,
    )


def pipedream(problem: PipelineProblem) -> PipelinePlan:
    """Return PipeDream's partition over equal devices, with equal shares and P − p micro-batches in flight.

    Layers and replicas are those of `pipedream_partition` for the mean device and the least bandwidth; devices are
    taken in their order.
    """
    size = problem.micro_batch_size
    mean = np.mean([_layer_seconds(device.seconds, size) for device in problem.devices], axis=0)
    model = problem.model
    slowest = problem.least_bandwidth([device.soc for device in problem.devices])
    partition = pipedream_partition(
        mean,
        np.array([layer.weight_bytes for layer in model.layers]),
        size * model.entering_bytes[1:] * (problem.sent_part / 2.0),
        len(problem.devices),
        slowest,
    )
    return _equal_shares(problem, partition, RULES["b"])


def pipedream_partition(
    layer_s: Floats,
    weight_bytes: Floats,
    output_bytes: Floats,
    num_workers: int,
    bytes_per_s: float,
) -> list[tuple[int, int]]:
    """Return PipeDream's stages as (last layer, replicas): the least time of the slowest stage or transfer.

    A stage of layers with T seconds and W bytes on m workers takes (T + 4(m − 1)W / (m·B)) / m, since each worker takes
    every m-th mini-batch, and the transfer into it 2·a / (m·B), as its published optimiser computes them.
    """
    num_layers = len(layer_s)
    time_s, weight = (
        np.concatenate([[0.0], np.cumsum(values)]) for values in (layer_s, weight_bytes)
    )
    best = np.full((num_layers, num_workers + 1), inf)
    split = np.zeros(
        (num_layers, num_workers + 1, 2), np.int64
    )  # layers before the last stage, and its replicas
    replicas = np.arange(1, num_workers + 1)
    for last in range(num_layers):
        whole_s = (
            time_s[last + 1] + 4.0 * (replicas - 1) * weight[last + 1] / (bytes_per_s * replicas)
        ) / replicas
        best[last, 1:] = whole_s
        split[last, 1:, 1] = replicas
        for workers in range(2, num_workers + 1):
            for own in range(1, workers):
                firsts = np.arange(1, last + 1)
                if not len(firsts):
                    continue
                stage_s = (
                    time_s[last + 1]
                    - time_s[firsts]
                    + 4.0 * (own - 1) * (weight[last + 1] - weight[firsts]) / (bytes_per_s * own)
                ) / own
                period_s = np.maximum(
                    np.maximum(best[firsts - 1, workers - own], stage_s),
                    2.0 * output_bytes[firsts - 1] / (bytes_per_s * own),
                )
                if last + 1 < num_layers:
                    period_s = np.maximum(period_s, 2.0 * output_bytes[last] / (bytes_per_s * own))
                index = int(period_s.argmin())
                if period_s[index] < best[last, workers]:
                    best[last, workers] = period_s[index]
                    split[last, workers] = firsts[index], own
    stages, last, workers = [], num_layers - 1, num_workers
    while True:
        first, own = (int(value) for value in split[last, workers])
        stages.append((last, own))
        if first == 0:
            return stages[::-1]
        last, workers = first - 1, workers - own


def dapple(problem: PipelineProblem) -> PipelinePlan:
    """Return DAPPLE's partition: the least latency of its formula over equal devices, with equal shares.

    Its latency, warm-up, steady phase and ending around a pivot stage, is D + A of `planner.closed_form` but for stages
    behind the pivot, so Algorithm 2 on copies of the mean device without budgets finds it.
    """
    kinds = list(dict.fromkeys(device.seconds for device in problem.devices))
    batches = tuple(
        sorted(
            {
                1,
                problem.micro_batch_size,
                *(size for size in (2, 4, 8, 16, 32, 64, 128) if size < problem.micro_batch_size),
            }
        )
    )
    counts = [sum(device.seconds is kind for device in problem.devices) for kind in kinds]
    passes = [
        np.average(
            [
                np.diff(kind.prefixes(problem.micro_batch_size)[which][:, batches], axis=0)
                for kind in kinds
            ],
            axis=0,
            weights=counts,
        )
        for which in (0, 1)
    ]
    mean = LayerSeconds(device="mean", batches=batches, forward_s=passes[0], backward_s=passes[1])
    equal = replace(
        problem,
        devices=tuple(
            replace(device, seconds=mean, memory_bytes=_NO_LIMIT) for device in problem.devices
        ),
    )
    return min(search(equal, equal.devices), key=lambda each: each.latency_s).plan


def hetpipe(problem: PipelineProblem, server: int | str = "hub") -> TwoDPlan:
    """Return HetPipe's plan: virtual workers with devices of all speeds, each a pipeline, and a parameter server.

    For each number of workers devices are dealt out by speed (its "equal distribution"); each worker's layers are
    divided so that the slowest stage or transfer is as fast as possible; the best number is that of least latency.
    """
    by_speed = sorted(problem.devices, key=lambda device: (seconds_of(device), device.soc))
    plans = []
    for num_groups in range(1, len(by_speed) // 2 + 1):
        groups = dealt(by_speed, num_groups)
        if num_groups <= problem.micro_batch_size:
            plan = divide_samples(
                problem, groups, _bottleneck_pipeline, sync=Sync.SERVER, server=server
            )
            if plan is not None:
                plans.append(plan)
    if not plans:
        raise InfeasiblePlan(
            f"hetpipe: {len(by_speed)} devices make no virtual worker of 2 or more; give more devices"
        )
    return min(plans, key=lambda plan: predict(problem, plan, within_memory=False).step_s)


def two_d(problem: PipelineProblem) -> TwoDPlan:
    """Return the plan in two dimensions; `InfeasiblePlan` if no grouping fits."""
    plan = best_two_d(problem)
    if plan is None:
        raise InfeasiblePlan(
            f"2d: {len(problem.devices)} devices cannot be divided into groups that hold the model, "
            f"with a sample each of {problem.micro_batch_size}; give more memory, or use a pipeline"
        )
    return plan


PEERS: dict[str, Planner] = {
    "single-device": fastest_device,
    "data-parallel": data_parallel,
    "eddl": eddl,
    "pipeline-parallel": pipeline_parallel,
    "gpipe": gpipe,
    "pipedream": pipedream,
    "dapple": dapple,
    "hetpipe": hetpipe,
    "2d": two_d,
}
"""All peers by name."""


# ------------------------------------------------------------------------------------------------------- helpers


def _layer_seconds(seconds: LayerSeconds, num_samples: int) -> Floats:
    forward, backward = seconds.prefixes(num_samples)
    found: Floats = np.diff(forward[:, num_samples] + backward[:, num_samples])
    return found


def _balanced_ends(seconds: Sequence[Floats], transfer_s: Floats | None = None) -> list[int]:
    """Return the last layer of each stage, in order, so that the slowest stage or transfer takes least.

    `seconds` are by stage and layer, those of transfers by the layer that they enter.
    """
    num_layers = len(seconds[0])
    entering_s = np.zeros(num_layers + 1) if transfer_s is None else transfer_s
    prefixes = [np.concatenate([[0.0], np.cumsum(each)]) for each in seconds]
    best = prefixes[0][1:].copy()  # by last layer, for the stages so far
    choices = []
    for prefix in prefixes[1:]:
        now, choice = np.full(num_layers, inf), np.zeros(num_layers, np.int64)
        for last in range(1, num_layers):
            slowest = np.maximum(
                np.maximum(best[:last], entering_s[1 : last + 1]),
                prefix[last + 1] - prefix[1 : last + 1],
            )
            choice[last] = int(slowest.argmin())
            now[last] = slowest[choice[last]]
        best = now
        choices.append(choice)
    ends = [num_layers - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return ends[::-1]


def _straight(
    problem: PipelineProblem,
    devices: Sequence[PipelineDevice],
    ends: Sequence[int],
    rule: InFlight,
    policy: Policy,
) -> PipelinePlan:
    counts = rule.counts(len(devices), problem.num_micro_batches)
    stages, first = [], 0
    for device, last, count in zip(devices, ends, counts, strict=True):
        stages.append(
            Stage(
                first_layer=first,
                last_layer=last,
                devices=(device.soc,),
                shares=(problem.micro_batch_size,),
                in_flight=count,
            )
        )
        first = last + 1
    return PipelinePlan(
        stages=tuple(stages),
        micro_batch_size=problem.micro_batch_size,
        num_micro_batches=problem.num_micro_batches,
        policy=policy,
    )


def _equal_shares(
    problem: PipelineProblem, partition: Sequence[tuple[int, int]], rule: InFlight
) -> PipelinePlan:
    """Return the plan of (last layer, replicas) on the devices in their order; those without a sample are left out."""
    counts = rule.counts(len(partition), problem.num_micro_batches)
    stages, first, begin = [], 0, 0
    for (last, replicas), count in zip(partition, counts, strict=True):
        shares = [share for share in class_shares(problem.micro_batch_size, replicas) if share]
        devices = problem.devices[begin : begin + replicas][: len(shares)]
        stages.append(
            Stage(
                first_layer=first,
                last_layer=last,
                devices=tuple(device.soc for device in devices),
                shares=tuple(shares),
                in_flight=count,
            )
        )
        first, begin = last + 1, begin + replicas
    return PipelinePlan(
        stages=tuple(stages),
        micro_batch_size=problem.micro_batch_size,
        num_micro_batches=problem.num_micro_batches,
    )


def _by_speed(
    problem: PipelineProblem, devices: Sequence[PipelineDevice], first: int, last: int
) -> list[int]:
    """Return samples that take devices equal time, whatever their memory."""
    groups: dict[DeviceClass, list[int]] = {}
    for index, device in enumerate(devices):
        groups.setdefault(DeviceClass.of(replace(device, memory_bytes=_NO_LIMIT)), []).append(index)
    ranges = LayerRanges.of(problem, np.array([first]), np.array([last + 1]))
    found = Allocator(ranges, problem.micro_batch_size).allocate(
        list(groups), [len(each) for each in groups.values()], 1
    )
    shares = [0] * len(devices)
    for total, indices in zip(found.totals[:, 0], groups.values(), strict=True):
        for index, share in zip(indices, class_shares(int(total), len(indices)), strict=True):
            shares[index] = share
    return shares


def _bottleneck_pipeline(problem: PipelineProblem) -> PipelinePlan:
    """Return a stage a device, fastest first, for the least time of the slowest stage or transfer; memory aside."""
    size, model = problem.micro_batch_size, problem.model
    devices = problem.devices[: model.num_layers]
    slowest = problem.least_bandwidth([device.soc for device in devices])
    transfer_s = problem.sent_part * size * model.entering_bytes / slowest
    ends = _balanced_ends([_layer_seconds(device.seconds, size) for device in devices], transfer_s)
    return _straight(problem, devices, ends, ASTEROID, Policy.ONE_FORWARD_ONE_BACKWARD)
