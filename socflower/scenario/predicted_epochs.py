"""Epochs of a comparison that are predicted and not trained: as set, at equal samples a step, and each at its best."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from socflower.cluster import Cluster
from socflower.errors import InfeasiblePlan
from socflower.hierarchy.exchange.collective_tasks import FUSIONS
from socflower.scenario.planning import PlannedTraining
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.schema.config import (
    DataConfig,
    ModelConfig,
    PrecisionConfig,
    PredictedEpoch,
)
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import GroupStrategy

_BUCKETS = (1, 8)
"""Of a gradient that is exchanged while the rest is computed, as a strategy may have at its best."""


def predicted_epochs(scenario: Scenario, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """Return what an epoch of each `[[compare.predict]]` takes under each strategy that has a plan, so not FedAvg.

    Seconds and joules on the scenario's cluster without heat; nothing is trained. An epoch of N groups has N times
    fewer steps, each of N batches. `equal_epoch_s` is that of batches with which a strategy takes as many samples a
    step as the first one does, None if they do not fit a device. `best_epoch_s` is the least at so many samples a step,
    over numbers of SoCs and overlap, with the settings in `best`; None if no number fits.
    """
    rows: list[dict[str, Any]] = []
    for entry in scenario.compare.predict:
        step_samples: int | None = None
        for name in strategies:
            planned = _of_entry(scenario, entry, name)
            # FedAvg has no plan, so nothing is predicted for it.
            if not planned.kind.has_groups:
                continue
            # The first strategy decides at how many samples a step all are compared.
            step_samples = step_samples or samples_a_step(planned)
            epochs = epochs_of(planned, scenario_cluster(planned), step_samples)
            rows.append({**entry.model_dump(), "strategy": name, **epochs})
    return rows


def epochs_of(scenario: Scenario, cluster: Cluster, step_samples: int) -> dict[str, Any]:
    """Return the predicted epochs of the scenario's strategy: as set, at so many samples a step, and the best of these.

    See `predicted_epochs` for the keys. `InfeasiblePlan` if no device has the memory for the epoch as it is set.
    """
    own, own_samples = mean_epoch(scenario, cluster), samples_a_step(scenario)
    equal = own if own_samples == step_samples else _at(scenario, cluster, step_samples)
    settings: dict[str, Any] = {}
    best = equal
    # The planner of pipelines has tried all of their settings.
    if not scenario.kind.is_pipeline:
        try:
            settings, best = best_epoch(scenario, cluster, step_samples)
        except InfeasiblePlan:
            best = None
    return {
        "epoch_s": own.duration_s,
        "epoch_energy_j": own.energy_j,
        "step_samples": own_samples,
        "equal_epoch_s": equal and equal.duration_s,
        "equal_epoch_energy_j": equal and equal.energy_j,
        "best_epoch_s": best and best.duration_s,
        "best_epoch_energy_j": best and best.energy_j,
        "best": settings,
    }


def _of_entry(scenario: Scenario, entry: PredictedEpoch, name: str) -> Scenario:
    """Return an epoch of the entry under a strategy, with the scenario's cluster and groups."""
    return scenario.replaced(
        strategy=scenario.strategy.under(name, outer=None),
        edgecloud=None,
        model=ModelConfig(name=entry.model),
        data=DataConfig(name=entry.data),
        train=scenario.train.replaced(batch_size=entry.batch_size),
        precision=PrecisionConfig(arithmetic=entry.arithmetic),
    )


def best_epoch(
    scenario: Scenario, cluster: Cluster, step_samples: int
) -> tuple[dict[str, Any], PlannedTraining]:
    """Return the settings with which the scenario's strategy has the shortest epoch, and the epoch.

    `InfeasiblePlan` if no number of SoCs has the memory for so many samples a step.
    """
    tried = list(_tried(scenario, cluster, step_samples))
    if not tried:
        raise InfeasiblePlan(
            f"{scenario.strategy.name}: {step_samples} samples a step fit no number of SoCs"
        )
    return min(tried, key=lambda each: each[1].duration_s)


def mean_epoch(scenario: Scenario, cluster: Cluster) -> PlannedTraining:
    """Return the mean cost of an epoch of a training; see `predicted_training`."""
    whole, epochs = predicted_training(scenario, cluster), scenario.train.epochs
    return replace(whole, duration_s=whole.duration_s / epochs, energy_j=whole.energy_j / epochs)


def samples_a_step(scenario: Scenario) -> int:
    """Return how many samples all SoCs take between two updates of a model."""
    return _num_batches(scenario) * scenario.train.batch_size


def _num_batches(scenario: Scenario) -> int:
    """Return how many batches are trained on at the same time: one of each group, of a pipeline, of a SoC of FedAvg."""
    settings = scenario.strategy
    if scenario.kind.is_pipeline:
        return 1
    cluster = scenario_cluster(scenario)
    number = settings.num_groups(cluster.num_socs)
    # With "auto" the prediction is that of one group per board.
    return number if isinstance(number, int) else len(cluster.boards)


def _at(
    scenario: Scenario, cluster: Cluster, step_samples: int, **strategy: Any
) -> PlannedTraining | None:
    """Return the epoch with so many samples a step and other settings; None if they do not fit a device's memory."""
    changed = scenario.replaced(strategy=scenario.strategy.replaced(**strategy))
    batch_size = max(1, step_samples // _num_batches(changed))
    try:
        train = changed.train.replaced(batch_size=batch_size)
        return mean_epoch(changed.replaced(train=train), cluster)
    except InfeasiblePlan:
        return None


def _tried(
    scenario: Scenario, cluster: Cluster, step_samples: int
) -> Iterator[tuple[dict[str, Any], PlannedTraining]]:
    """Yield the settings that a strategy may have at so many samples a step, each with its epoch.

    They leave the result of a step as it is: the number of groups would change it.
    """
    settings, kind = scenario.strategy, scenario.kind
    own_socs, is_alone = None, True
    if isinstance(kind, GroupStrategy):
        own_socs, is_alone = kind.num_socs, kind.never_exchanges_gradients(settings.groups)
    counts = [own_socs or settings.socs or cluster.num_socs]
    # SoCs that train alone are as many groups.
    least = _num_batches(scenario)
    while own_socs is None and counts[-1] > least:
        counts.append(max(least, counts[-1] // 2))
    for socs in counts:
        changes: dict[str, Any] = {} if own_socs is not None else {"socs": socs}
        # Int8 exchanges its gradients after the backward pass.
        overlaps = scenario.precision.arithmetic != "int8" and not is_alone and socs > least
        for more in [{"overlap_buckets": buckets} for buckets in _BUCKETS] if overlaps else [{}]:
            found = _at(scenario, cluster, step_samples, **changes, **more)
            if found is not None:
                yield {**changes, **more}, found


def epochs_by_fusion(scenario: Scenario, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the predicted seconds of an epoch with each price of messages (F8a), for strategies that have a plan."""
    plans = {name: scenario.under(name) for name in strategies}
    return [
        {"strategy": name, "epoch_s": {fusion: _epoch_s(plan, fusion) for fusion in FUSIONS}}
        for name, plan in plans.items()
        if plan.kind.has_groups
    ]


def _epoch_s(scenario: Scenario, fusion: str) -> float:
    changed = scenario.replaced(strategy=scenario.strategy.replaced(fusion=fusion))
    return mean_epoch(changed, scenario_cluster(changed)).duration_s
