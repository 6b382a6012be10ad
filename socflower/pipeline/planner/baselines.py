"""Plans of other systems under the same cost model, with which Asteroid is compared (paper §5.1).

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

With a laxer exchange (`laxer`), devices train alone on samples by speed and average models only now and then; that is
another training, so it is priced beside the plans, and never chosen.

| name | average |
| --- | --- |
| `local-sgd` | in a ring, every 8 updates |
| `fedavg` | at the hub, once an epoch |

"No memory": the planner ignores budgets, and its plan may exceed them (`Compared.fits`). PipeDream and HetPipe train
asynchronously; as in the paper, their partitions are compared under synchronous training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from socflower.cluster import TaskGraphBuilder
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.hierarchy.exchange.collective_tasks import Exchange
from socflower.hierarchy.exchange.models import RING, STAR, ModelExchange
from socflower.pipeline.plan import (
    PipelinePlan,
    Plan,
    Policy,
    Prediction,
    Sync,
    TwoDPlan,
    staged,
    with_samples_on,
)
from socflower.pipeline.planner.allocation import Allocator, LayerRanges, by_class, class_shares
from socflower.pipeline.planner.closed_form import stage_seconds
from socflower.pipeline.planner.dynamic_program import search
from socflower.pipeline.planner.pruning import seconds_of
from socflower.pipeline.planner.selection import (
    OnStep,
    micro_batch_choices,
    nothing_fits,
    predict,
    single_stage,
)
from socflower.pipeline.planner.two_dimensions import balanced_plan, best_two_d, dealt
from socflower.pipeline.problem import Floats, Ints, LayerSeconds, PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, RULES, InFlight
from socflower.sim import EventClock

Planner = Callable[[PipelineProblem], Plan]

_NO_LIMIT = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The plan of one system."""

    name: str
    # With the micro-batch size of the plan.
    problem: PipelineProblem
    # None: the system finds no plan.
    plan: Plan | None
    # It ignores budgets that the plan exceeds.
    prediction: Prediction | None
    # Whether the plan keeps all budgets.
    fits: bool
    # The reason for which there is no plan, or it does not fit.
    why_not: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """Order of preference: plans that fit come first, then faster ones."""
        return not self.fits, inf if self.prediction is None else self.prediction.step_s


def compare(
    problem: PipelineProblem,
    names: Sequence[str] = (),
    *,
    micro_batch_sizes: Sequence[int] = (),
    samples_on: int | None = None,
    on_step: OnStep = lambda text, done, total: None,
) -> tuple[Compared, ...]:
    """Return the plans of peers by name, default all, each with its best of the micro-batch sizes.

    `samples_on` is the SoC that has samples and labels; None: each device has those that it needs.
    """
    chosen = names or tuple(PEERS)
    choices = micro_batch_choices(problem, micro_batch_sizes)
    found = []
    for number, name in enumerate(chosen):
        if name not in PEERS:
            raise ConfigError(f"pipeline: peer {name!r} is unknown; use one of {[*PEERS]}")
        on_step(f"comparing with {name}", number, len(chosen))
        tried = [_compared(name, sized, samples_on) for sized in choices]
        found.append(min(tried, key=lambda each: each.rank))
    return tuple(found)


def _compared(name: str, problem: PipelineProblem, samples_on: int | None) -> Compared:
    plan: Plan | None = None
    prediction, why_not = None, ""
    try:
        plan = with_samples_on(replace(PEERS[name](problem), planner=name), samples_on)
        prediction = predict(problem, plan, within_memory=False)
        plan.check(problem)
    except InfeasiblePlan as error:
        why_not = str(error)
    return Compared(
        name=name,
        problem=problem,
        plan=plan,
        prediction=prediction,
        fits=not why_not,
        why_not=why_not,
    )


def laxer(
    problem: PipelineProblem, epoch_updates: int, *, micro_batch_sizes: Sequence[int] = ()
) -> tuple[tuple[Compared, int], ...]:
    """Return local SGD and FedAvg as `compare` does, each with the updates between two averages of models.

    `epoch_updates` are those of an epoch. The prediction is of the samples of one update of the weights.
    """
    choices = micro_batch_choices(problem, micro_batch_sizes)
    found = []
    for name, (kind, most) in LAXER.items():
        interval = min(most or epoch_updates, epoch_updates)
        tried = [_alone(name, sized, ModelExchange(kind=kind), interval) for sized in choices]
        found.append((min(tried, key=lambda each: each.rank), interval))
    return tuple(found)


def _alone(name: str, problem: PipelineProblem, exchange: ModelExchange, interval: int) -> Compared:
    """Return training alone with samples by speed, and a model exchange after each `interval` updates."""
    try:
        plan = data_parallel(problem)
    except InfeasiblePlan as error:
        return Compared(
            name=name, problem=problem, plan=None, prediction=None, fits=False, why_not=str(error)
        )
    (stage,), cluster = plan.stages, problem.cluster
    weight_bytes = problem.model.weight_bytes(*stage.layers)
    builder, ready = TaskGraphBuilder(), {}
    for soc, share in stage.members:
        forward_s, backward_s, update_s = stage_seconds(problem, stage.layers, ((soc, share),))
        own_s = plan.num_micro_batches * (forward_s + backward_s) + update_s
        processor = problem.device(soc).int8_processor or problem.kind(soc).default_processor
        name_of_task = f"{interval} updates"
        ready[soc] = [builder.compute(name_of_task, soc, interval * own_s, processor=processor)]
    model = Exchange(num_bytes=weight_bytes, num_tensors=1)
    exchange.lower(builder, [[*ready]], model, cluster, ready, across_servers=False)
    socs = [device.soc for device in problem.devices]
    usage = EventClock(cluster).run(builder.build(socs), label=name)
    step_s = usage.duration_s / interval
    return Compared(
        name=name,
        problem=problem,
        plan=plan,
        prediction=Prediction(
            formula_s=step_s,
            duplex_s=step_s,
            step_s=step_s,
            energy_j=usage.total_energy_j / interval,
            num_samples=plan.num_samples,
            num_bytes={tier: each / interval for tier, each in usage.bytes_by_tier.items()},
        ),
        fits=True,
    )


def fastest_device(problem: PipelineProblem) -> PipelinePlan:
    """Return the plan of the fastest device that holds the model."""
    for device in sorted(problem.devices, key=seconds_of):
        plan = single_stage(problem, [device])
        if plan is not None:
            return plan
    raise nothing_fits(problem)


def data_parallel(problem: PipelineProblem) -> PipelinePlan:
    """Return data parallelism over all devices that Algorithm 1 (F31) gives samples."""
    plan = single_stage(problem, problem.devices)
    if plan is None:
        raise nothing_fits(problem)
    return plan


def eddl(problem: PipelineProblem) -> TwoDPlan:
    """Return data parallelism with a leader, the fastest device, in place of a ring."""
    last = problem.model.num_layers - 1
    groups = tuple(
        staged([last], [[(soc, share)]], [1], problem.num_micro_batches)
        for soc, share in _by_speed(problem)
        if share
    )
    leader = min(problem.devices, key=seconds_of).soc
    return TwoDPlan(groups=groups, sync=Sync.SERVER, server=leader)


def pipeline_parallel(problem: PipelineProblem) -> PipelinePlan:
    """Return a stage per device, in the devices' order, with the fastest slowest stage, in 1F1B order."""
    devices = problem.devices[: problem.model.num_layers]
    return _straight(problem, devices, _balanced_ends(_layers_s(problem, devices)))


def gpipe(problem: PipelineProblem) -> PipelinePlan:
    """Return a stage per device with equal times on the mean device, all forward passes before the backward passes."""
    devices = problem.devices[: problem.model.num_layers]
    mean_s = np.mean(_layers_s(problem, problem.devices), axis=0)
    ends = _balanced_ends([mean_s] * len(devices))
    return _straight(problem, devices, ends, Policy.BACKWARD_AFTER_FORWARD)


def pipedream(problem: PipelineProblem) -> PipelinePlan:
    """Return PipeDream's partition over equal devices, with equal shares and P − p micro-batches in flight.

    Layers and replicas are those of `pipedream_partition` for the mean device and the least bandwidth; devices are
    taken in their order.
    """
    model, size = problem.model, problem.micro_batch_size
    slowest = problem.least_bandwidth([device.soc for device in problem.devices])
    partition = pipedream_partition(
        np.mean(_layers_s(problem, problem.devices), axis=0),
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
    """Return PipeDream's stages as (last layer, replicas) with the least time of the slowest stage or transfer.

    A stage with T seconds and W bytes on m workers takes (T + 4(m − 1)W / (m·B)) / m, since each worker takes every
    m-th mini-batch. The transfer into it takes 2·a / (m·B). Both are as in its published optimiser.
    """
    num_layers = len(layer_s)
    time_s, weight = (
        np.concatenate([[0.0], np.cumsum(values)]) for values in (layer_s, weight_bytes)
    )

    def stage_s(firsts: Ints | int, last: int, own: Ints | int) -> Floats:
        own_s = time_s[last + 1] - time_s[firsts]
        reduced = 4.0 * (own - 1) * (weight[last + 1] - weight[firsts])
        found: Floats = (own_s + reduced / (bytes_per_s * own)) / own
        return found

    best = np.full((num_layers, num_workers + 1), inf)
    # The first layer of the last stage, and its replicas.
    split = np.zeros((num_layers, num_workers + 1, 2), np.int64)
    replicas = np.arange(1, num_workers + 1)
    for last in range(num_layers):
        best[last, 1:] = stage_s(0, last, replicas)
        split[last, 1:, 1] = replicas
        firsts = np.arange(1, last + 1)
        for workers in range(2, num_workers + 1) if last else ():
            for own in range(1, workers):
                period_s = np.maximum(best[firsts - 1, workers - own], stage_s(firsts, last, own))
                entering_s = 2.0 * output_bytes[firsts - 1] / (bytes_per_s * own)
                period_s = np.maximum(period_s, entering_s)
                if last + 1 < num_layers:
                    leaving_s = 2.0 * output_bytes[last] / (bytes_per_s * own)
                    period_s = np.maximum(period_s, leaving_s)
                index = int(period_s.argmin())
                if period_s[index] < best[last, workers]:
                    best[last, workers] = period_s[index]
                    split[last, workers] = firsts[index], own
    stages, last, workers = [], num_layers - 1, num_workers
    while last >= 0:
        first, own = (int(value) for value in split[last, workers])
        stages.append((last, own))
        last, workers = first - 1, workers - own
    return stages[::-1]


def dapple(problem: PipelineProblem) -> PipelinePlan:
    """Return DAPPLE's partition: the least latency of its formula over equal devices, with equal shares.

    Its latency is warm-up, steady phase and ending around a pivot stage: D + A of `planner.closed_form`, except for the
    stages behind the pivot. So Algorithm 2 on copies of the mean device without budgets finds it.
    """
    size = problem.micro_batch_size
    smaller = [each for each in (2, 4, 8, 16, 32, 64, 128) if each < size]
    batches = sorted({1, size, *smaller})
    kinds = list(dict.fromkeys(device.seconds for device in problem.devices))
    counts = [sum(device.seconds is kind for device in problem.devices) for kind in kinds]

    def mean_s(which: int) -> Floats:
        every = [np.diff(kind.prefixes(size)[which][:, batches], axis=0) for kind in kinds]
        return np.asarray(np.average(every, axis=0, weights=counts))

    mean = LayerSeconds(
        device="mean",
        batches=tuple(batches),
        forward_s=mean_s(0),
        backward_s=mean_s(1),
    )
    devices = tuple(
        replace(device, seconds=mean, memory_bytes=_NO_LIMIT) for device in problem.devices
    )
    found = search(replace(problem, devices=devices), devices)
    return min(found, key=lambda each: each.latency_s).plan


def hetpipe(problem: PipelineProblem) -> TwoDPlan:
    """Return HetPipe's plan: virtual workers with devices of all speeds, each a pipeline, and a parameter server.

    For each number of workers, devices are dealt out by speed (its "equal distribution"), and each worker's layers are
    divided for the fastest slowest stage or transfer. The plan has the number of workers with the least latency.
    """
    by_speed = sorted(problem.devices, key=lambda device: (seconds_of(device), device.soc))
    plans = []
    for num_groups in range(1, min(len(by_speed) // 2, problem.micro_batch_size) + 1):
        groups = dealt(by_speed, num_groups)
        plan = balanced_plan(problem, groups, _bottleneck_pipeline, sync=Sync.SERVER)
        if plan is not None:
            plans.append(plan)
    if not plans:
        raise InfeasiblePlan(
            f"hetpipe: {len(by_speed)} devices make no virtual worker of 2; give more devices"
        )
    return min(plans, key=lambda plan: predict(problem, plan, within_memory=False).step_s)


def two_d(problem: PipelineProblem) -> TwoDPlan:
    """Return the plan in two dimensions; `InfeasiblePlan` if no grouping fits."""
    plan = best_two_d(problem)
    if plan is None:
        raise InfeasiblePlan(
            f"2d: no groups of {len(problem.devices)} devices hold the model; use a pipeline"
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

LAXER: dict[str, tuple[str, int]] = {"local-sgd": (RING, 8), "fedavg": (STAR, 0)}
"""How models are averaged, and after how many updates; 0: once an epoch."""


# ------------------------------------------------------------------------------------------------------- helpers


def _layers_s(problem: PipelineProblem, devices: Sequence[PipelineDevice]) -> list[Floats]:
    """Return the seconds of both passes of a whole micro-batch, by device and layer."""
    size, found = problem.micro_batch_size, []
    for device in devices:
        forward, backward = device.seconds.prefixes(size)
        found.append(np.diff(forward[:, size] + backward[:, size]))
    return found


def _balanced_ends(seconds: Sequence[Floats], transfer_s: Floats | None = None) -> list[int]:
    """Return the last layer of each stage, in order, for the fastest slowest stage or transfer.

    `seconds` are by stage and layer, `transfer_s` by the layer that a transfer enters.
    """
    num_layers = len(seconds[0])
    entering_s = np.zeros(num_layers + 1) if transfer_s is None else transfer_s
    prefixes = [np.concatenate([[0.0], np.cumsum(each)]) for each in seconds]
    # The slowest of the stages so far, by their last layer.
    best = prefixes[0][1:].copy()
    choices = []
    for prefix in prefixes[1:]:
        now, choice = np.full(num_layers, inf), np.zeros(num_layers, np.int64)
        for last in range(1, num_layers):
            before_s = np.maximum(best[:last], entering_s[1 : last + 1])
            slowest = np.maximum(before_s, prefix[last + 1] - prefix[1 : last + 1])
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
    policy: Policy = Policy.ONE_FORWARD_ONE_BACKWARD,
) -> PipelinePlan:
    """Return the plan of a stage per device."""
    number = problem.num_micro_batches
    gpipe_order = policy == Policy.BACKWARD_AFTER_FORWARD
    counts = [number] * len(ends) if gpipe_order else ASTEROID.counts(len(ends), number)
    members = [[(device.soc, problem.micro_batch_size)] for device in devices]
    return staged(ends, members, counts, number, policy)


def _equal_shares(
    problem: PipelineProblem, partition: Sequence[tuple[int, int]], rule: InFlight
) -> PipelinePlan:
    """Return the plan of (last layer, replicas), on devices in their order; devices without a sample are left out."""
    begin, members = 0, []
    for _, replicas in partition:
        shares = [share for share in class_shares(problem.micro_batch_size, replicas) if share]
        socs = [device.soc for device in problem.devices[begin : begin + len(shares)]]
        members.append(list(zip(socs, shares, strict=True)))
        begin += replicas
    counts = rule.counts(len(partition), problem.num_micro_batches)
    return staged([last for last, _ in partition], members, counts, problem.num_micro_batches)


def _by_speed(problem: PipelineProblem) -> list[tuple[int, int]]:
    """Return (SoC, samples) so that all devices take equal time, whatever their memory."""
    classes = by_class([replace(each, memory_bytes=_NO_LIMIT) for each in problem.devices])
    ranges = LayerRanges.of(problem, np.array([0]), np.array([problem.model.num_layers]))
    counts = [len(devices) for devices in classes.values()]
    found = Allocator(ranges, problem.micro_batch_size).allocate(list(classes), counts, 1)
    shares: dict[int, int] = {}
    for total, devices in zip(found.totals[:, 0], classes.values(), strict=True):
        own = class_shares(int(total), len(devices))
        shares |= zip([device.soc for device in devices], own, strict=True)
    return [(device.soc, shares[device.soc]) for device in problem.devices]


def _bottleneck_pipeline(problem: PipelineProblem) -> PipelinePlan:
    """Return a stage per device, fastest first, for the fastest slowest stage or transfer; budgets are ignored."""
    size, model = problem.micro_batch_size, problem.model
    devices = problem.devices[: model.num_layers]
    slowest = problem.least_bandwidth([device.soc for device in devices])
    transfer_s = problem.sent_part * size * model.entering_bytes / slowest
    return _straight(problem, devices, _balanced_ends(_layers_s(problem, devices), transfer_s))
