"""What a whole training costs by prediction, under any strategy of a cluster: groups, pipelines and FedAvg."""

from collections.abc import Sequence

from socflower.cluster import Cluster, Usage
from socflower.cluster.device_memory import require_training_memory
from socflower.cluster.hub_round import Payload, Training, local_round
from socflower.errors import ConfigError
from socflower.hierarchy import group_steps_per_epoch
from socflower.hierarchy.exchange.collective_tasks import BUCKETS
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.planner.selection import Planned, plan_pipeline
from socflower.pipeline.schedule.run import interval_usage
from socflower.scenario.costs import (
    model_profile,
    num_samples,
    num_training_samples,
    optimizer_copies,
    pricing,
)
from socflower.scenario.pipeline_planning import pipeline_problem, planner_settings
from socflower.scenario.planning import PlannedTraining, planned_training
from socflower.scenario.schema.file import num_participants
from socflower.scenario.schema.scenario_file import Scenario
from socflower.sim import EventClock
from socflower.wire.message_keys import INT8_WIRE

_SIMULATED_STEPS = 3
"""Updates of a pipeline that are simulated: from the third on each takes as long as the one before."""


def predicted_training(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the predicted cost of a training without heat, users and events.

    Raises `ConfigError` for training with a cloud, `InfeasiblePlan` for devices with too little memory.
    """
    if scenario.kind.has_groups:
        return planned_training(scenario, cluster)
    if scenario.kind.uses_cloud:
        raise ConfigError(f"{scenario.strategy.name}: has a cloud; use `socflower plan`")
    if scenario.kind.is_pipeline:
        return _pipeline_training(scenario, cluster)
    return _local_training(scenario, cluster)


def _local_training(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the prediction for FedAvg, whose rounds are all equal."""
    train = scenario.train
    sizes = _part_sizes(scenario, num_participants(scenario, cluster))
    profile, cost = model_profile(scenario), pricing(scenario)
    batches = {soc: min(train.batch_size, size) for soc, size in enumerate(sizes)}
    require_training_memory(
        cluster, profile, batches, pricing=cost, optimizer_copies=optimizer_copies(scenario)
    )
    training = {
        soc: Training(
            cost=cost.step_cost(profile, cluster.device_of(soc), batch),
            num_batches=train.local_epochs * sizes[soc] / batch,
        )
        for soc, batch in batches.items()
    }
    # Flower's messages are one each, or one for each tensor (F8a).
    is_fused = scenario.strategy.fusion == BUCKETS
    num_messages = 1 if is_fused else profile.num_tensors
    in_int8 = scenario.precision.wire == INT8_WIRE
    model_bytes = profile.int8_bytes if in_int8 else profile.weight_bytes
    graph = local_round(training, Payload(model_bytes, num_messages))
    usage = EventClock(cluster).run(graph, label="train")
    whole = usage * (train.epochs // train.local_epochs)
    memory_bytes = profile.training_memory_bytes(
        max(batches.values()), optimizer_copies=optimizer_copies(scenario)
    )
    return PlannedTraining.of(whole, tuple(training), memory_bytes)


def _part_sizes(scenario: Scenario, num_parts: int) -> Sequence[int]:
    """Return the samples of each SoC; those of an uneven partition are counted, for which the data are loaded."""
    if scenario.data.partition == "iid":
        whole = num_training_samples(scenario, num_samples(scenario))
        if whole < num_parts:
            raise ConfigError(
                f"{scenario.name} [strategy] socs = {num_parts}: there are {whole} training samples; use fewer"
            )
        least, extra = divmod(whole, num_parts)
        return [least + (part < extra) for part in range(num_parts)]
    # Torch is imported only for labels.
    from socflower.scenario.arithmetic import training_data
    from socflower.scenario.workload import partitions

    parts = partitions(scenario, training_data(scenario), num_parts)
    # A SoC may have no sample, and then computes one batch less than is counted here.
    return [max(1, len(part)) for part in parts]


def _pipeline_training(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the prediction for a pipeline, whose rounds are intervals of at most an epoch."""
    problem, epoch_samples = pipeline_problem(scenario)
    planned = plan_pipeline(problem, planner_settings(scenario))
    whole = num_training_samples(scenario, epoch_samples)
    steps_per_epoch = group_steps_per_epoch(whole, 1, scenario.train.batch_size)
    total = Usage()
    for shape, count in scenario.schedule(whole).shapes(steps_per_epoch):
        total += _interval(planned, cluster, shape.num_steps) * count
    plan = planned.plan
    parts = plan.groups if isinstance(plan, TwoDPlan) else (plan,)
    memory_bytes = max(
        stage.memory_bytes(planned.problem, share)
        for part in parts
        for stage in part.stages
        for _, share in stage.members
    )
    return PlannedTraining.of(total, plan.socs, memory_bytes)


def _interval(planned: Planned, cluster: Cluster, num_steps: int) -> Usage:
    """Return the usage of so many updates; of many only the first are simulated."""
    few = min(num_steps, _SIMULATED_STEPS)
    usage = interval_usage(planned.problem, planned.plan, EventClock(cluster), few)
    if few < 2 or few == num_steps:
        return usage
    without_last = interval_usage(planned.problem, planned.plan, EventClock(cluster), few - 1)
    last_step = usage + without_last * -1.0
    return usage + last_step * (num_steps - few)
