"""What a training costs by prediction, under any strategy without a cloud."""

from socflower.cluster import Cluster
from socflower.cluster.device_memory import require_training_memory
from socflower.cluster.hub_round import local_round
from socflower.hierarchy.exchange.collectives import BUCKETS
from socflower.pipeline.planner.selection import plan_pipeline
from socflower.scenario.costs import (
    model_profile,
    num_samples,
    num_training_samples,
    optimizer_copies,
    pricing,
)
from socflower.scenario.pipeline_planning import pipeline_problem, planner_settings
from socflower.scenario.planning import PlannedTraining, planned_training
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import num_participants
from socflower.sim import EventClock


def predicted_training(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the seconds and joules of a whole training without heat and background load.

    Groups are priced by their plan, pipelines by the best one that the planner finds, which may take seconds, and
    FedAvg by its rounds. Raises `ConfigError` for a model that cannot be cut, and `InfeasiblePlan` for too little
    memory.
    """
    if scenario.has_groups:
        return planned_training(scenario, cluster)
    return _in_stages(scenario) if scenario.is_pipeline else _in_local_rounds(scenario, cluster)


def _in_stages(scenario: Scenario) -> PlannedTraining:
    problem, epoch_samples = pipeline_problem(scenario)
    planned = plan_pipeline(problem, planner_settings(scenario))
    updates = scenario.train.epochs * max(1, epoch_samples // scenario.train.batch_size)
    return PlannedTraining(
        duration_s=updates * planned.prediction.step_s,
        energy_j=updates * planned.prediction.energy_j,
        socs=planned.plan.socs,
    )


def _in_local_rounds(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the cost of FedAvg whose SoCs have equal parts of the data, up to a sample."""
    train, profile, cost = scenario.train, model_profile(scenario), pricing(scenario)
    num_socs = num_participants(scenario, cluster)
    least, num_more = divmod(num_training_samples(scenario, num_samples(scenario)), num_socs)
    samples = {soc: least + (soc < num_more) for soc in range(num_socs) if least or soc < num_more}
    shares = {soc: min(train.batch_size, number) for soc, number in samples.items()}
    require_training_memory(
        cluster, profile, shares, pricing=cost, optimizer_copies=optimizer_copies(scenario)
    )
    training = {
        soc: (
            cost.step_cost(profile, cluster.device_of(soc), share),
            train.local_epochs * samples[soc] / share,
        )
        for soc, share in shares.items()
    }
    # Flower's messages are one each, or one for each tensor (F8a).
    is_fused = scenario.strategy.fusion == BUCKETS
    graph = local_round(
        training,
        model_bytes=profile.weight_bytes,
        num_messages=1 if is_fused else profile.num_tensors,
    )
    usage = EventClock(cluster).run(graph) * (train.epochs // train.local_epochs)
    return PlannedTraining(
        duration_s=usage.duration_s, energy_j=usage.total_energy_j, socs=tuple(training)
    )
