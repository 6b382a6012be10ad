"""The plan of a scenario without training: who works with whom, and what the clock predicts of it."""

from typing import Any

from socflower.cluster import Activity, ModelProfile, step_cost, sustained_rates
from socflower.cluster.tracing import profile_module
from socflower.errors import ConfigError
from socflower.hierarchy import (
    Exchange,
    GroupPlan,
    group_steps_per_epoch,
    plan_groups,
    split_batch,
    step_graph,
    synchronisation_graph,
)
from socflower.scenario.config import Scenario
from socflower.scenario.scenario_file import scenario_cluster
from socflower.sim import EventClock
from socflower.workloads import build_model, data_shape


def plan_scenario(scenario: Scenario) -> dict[str, Any]:
    """Return the plan document of `socflower plan`: groups on boards, communication groups, predictions.

    `predicted` has, per training step, what a step takes alone and with taking turns (F7), and what a gradient
    exchange, a synchronisation and an epoch take, with the epoch's energy. With `groups = "auto"`, which only
    training can decide (F2), the plan is that of one group per board, and `notes` says so.
    """
    cluster = scenario_cluster(scenario)
    settings, notes = scenario.strategy, []
    if settings.name == "fedavg":
        raise ConfigError("plan: fedavg has no groups to plan; use strategy.name = 'socflow', 'ring' or 'sgd'")
    num_socs = 1 if settings.name == "sgd" else settings.socs
    num_groups = settings.groups if settings.name == "socflow" else 1
    if isinstance(num_groups, str):
        num_groups = min(len(cluster.boards), num_socs or cluster.num_socs)
        notes.append(f"groups = 'auto' is decided by training an epoch with each candidate; planned with {num_groups}, "
                     "one group per board")
    plan = plan_groups(cluster, num_groups, num_socs, sustained_rates(cluster, scenario.model.name))
    return {"schema": 1, **plan.to_document(), "predicted": _predict(scenario, plan), "notes": notes}


def profile_of(scenario: Scenario) -> ModelProfile:
    """Return the layer profile of the scenario's model on its data, without loading any data."""
    shape = data_shape(scenario.data.name)
    model = build_model(scenario.model.name, in_channels=shape.channels, image_size=shape.size,
                        num_classes=shape.num_classes, seed=scenario.seed)
    return profile_module(model, (shape.channels, shape.size, shape.size), scenario.model.name)


def _predict(scenario: Scenario, plan: GroupPlan) -> dict[str, float]:
    cluster, profile, batch_size = scenario_cluster(scenario), profile_of(scenario), scenario.train.batch_size
    exchange = Exchange(num_bytes=profile.weight_bytes, num_tensors=profile.num_tensors)
    rates = sustained_rates(cluster, profile.name)
    shares = {soc: share for group in plan.groups for soc, share in zip(
        group.members, split_batch(batch_size, [rates[soc] for soc in group.members]), strict=True)}
    costs = {soc: step_cost(profile, cluster.device_of(soc), share) for soc, share in shares.items()}
    num_steps = group_steps_per_epoch(data_shape(scenario.data.name).num_train, len(plan.groups), batch_size)
    sequenced = step_graph(plan, costs, exchange, sequenced=scenario.strategy.sequenced,
                           overlap_buckets=scenario.strategy.overlap_buckets)
    epoch = EventClock(cluster).run(sequenced, repeat=num_steps)
    free = EventClock(cluster).run(step_graph(plan, costs, exchange, sequenced=False), repeat=num_steps)
    sync_s, sync_j = 0.0, 0.0
    if len(plan.groups) > 1:
        synchronisation = EventClock(cluster).run(synchronisation_graph(plan, exchange))
        sync_s, sync_j = synchronisation.duration_s, synchronisation.total_energy_j
    busy = sum(epoch.soc_seconds.values())
    memory = profile.training_memory_bytes(max(shares.values()))
    return {
        "step_s": epoch.duration_s / num_steps, "step_free_running_s": free.duration_s / num_steps,
        "steps_per_epoch": float(num_steps), "sync_s": sync_s, "epoch_s": epoch.duration_s + sync_s,
        "epoch_energy_j": epoch.total_energy_j + sync_j, "memory_bytes": memory,
        "compute_fraction": epoch.soc_seconds.get(Activity.COMPUTE, 0.0) / busy if busy else 0.0,
    }
