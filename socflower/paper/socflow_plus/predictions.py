"""Epochs of SoCFlow+'s workloads in virtual time: as the paper ran its methods, and with each at its best.

As run (§4.1): groups of four of at most 32 SoCs on boards of five, batches of 64 (MobileNetV1: 256) for a group and
for each other method, FP32 for all but SoCFlow+, gradients exchanged beside the backward pass, and a message for each
tensor, with which the cost model has the paper's latencies (F8a). At its best: FP32 for all, and as many samples a step
as SoCFlow takes, with the number of SoCs and the overlap of the shortest epoch; of 2-D parallelism, the number of
groups. FedAvg, which has no plan, is priced as groups of one SoC whose models the hub averages once an epoch.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from socflower.errors import InfeasiblePlan
from socflower.hierarchy.exchange.collective_tasks import PER_TENSOR
from socflower.pipeline.planner.selection import plan_pipeline
from socflower.scenario.pipeline_planning import pipeline_problem, planner_settings
from socflower.scenario.planning import plan_scenario, planned_training
from socflower.scenario.predicted_epochs import best_epoch
from socflower.scenario.schema.file import parse_scenario, scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES

OURS, RING, FEDAVG = "socflow", "ring", "fedavg"
NO_STRATEGY, NO_FIT = "no such strategy", "out of memory"
FP32, MIXED = "fp32", "mixed"
NUM_SOCS, SOCS_PER_BOARD, GROUP_SIZE = 32, 5, 4

EPOCHS = 150
"""Of a training, as in Mandheling's Table 8; SoCFlow+ does not state its own."""

_OVERLAP = 8
# Of 2-D parallelism: four and two SoCs a group.
_GRID_GROUPS = (8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model on a data set, as `[model]`, `[data]` and `[train] batch_size` have them."""

    model: str
    data: str = "cifar10"
    batch_size: int = 64


# EMNIST and Fashion-MNIST have MNIST's shape, and ratios of epochs do not depend on the number of samples.
WORKLOADS = {
    "LeNet": Workload(model="lenet5", data="mnist"),
    "VGG-11": Workload(model="vgg11"),
    "ResNet-18": Workload(model="resnet18"),
    "MobileNetV1": Workload(model="mobilenet-v1", batch_size=256),
}


class Epoch(NamedTuple):
    """What an epoch takes."""

    duration_s: float
    energy_j: float


def rack(num_socs: int, device: str = "snapdragon-865") -> dict[str, Any]:
    """Return the `[cluster]` of so many SoCs on as few boards of five as hold them."""
    full, left = divmod(num_socs, SOCS_PER_BOARD)
    return {"boards": [SOCS_PER_BOARD] * full + [left] * (left > 0), "device": device}


@cache
def as_run(
    label: str, method: str, num_socs: int = NUM_SOCS, *, arithmetic: str = FP32
) -> Epoch | str:
    """Return the mean epoch of a workload under a method as the paper ran it, or why there is none."""
    if method not in STRATEGIES:
        return NO_STRATEGY
    scenario = scenario_of(label, method, rack(num_socs), arithmetic=arithmetic)
    try:
        return _of_grid(scenario) if STRATEGIES[method].is_grid else mean_epoch(scenario)
    except InfeasiblePlan:
        return NO_FIT


@cache
def at_best(label: str, method: str, fusion: str) -> Epoch | str:
    """Return the shortest epoch of a workload under a method with a price of messages (F8a), or why there is none."""
    if method not in STRATEGIES:
        return NO_STRATEGY
    step_samples = NUM_SOCS // GROUP_SIZE * WORKLOADS[label].batch_size
    try:
        if STRATEGIES[method].is_grid:
            return min(_grids(label, method, step_samples))
        scenario = scenario_of(label, method, rack(NUM_SOCS), fusion=fusion)
        if scenario.strategy.groups == NUM_SOCS:
            # Averaging in the hub leaves nothing to choose but the batch of each SoC.
            return mean_epoch(_with_batch(scenario, step_samples // NUM_SOCS))
        _, training = best_epoch(scenario, scenario_cluster(scenario), step_samples)
    except InfeasiblePlan:
        return NO_FIT
    return Epoch(training.duration_s, training.energy_j)


def mean_epoch(scenario: Scenario) -> Epoch:
    """Return the mean epoch of a training; raises `InfeasiblePlan` for a device with too little memory."""
    training, epochs = planned_training(scenario, scenario_cluster(scenario)), scenario.train.epochs
    return Epoch(training.duration_s / epochs, training.energy_j / epochs)


def _of_grid(scenario: Scenario) -> Epoch:
    """Return the epoch of pipelines in groups, whose messages the planner prices by their tensors."""
    problem, num_samples = pipeline_problem(scenario)
    prediction = plan_pipeline(problem, planner_settings(scenario)).prediction
    steps = num_samples // scenario.train.batch_size
    return Epoch(steps * prediction.step_s, steps * prediction.energy_j)


def _grids(label: str, method: str, step_samples: int) -> list[Epoch]:
    """Return the epochs of the numbers of groups that have a plan; raises `InfeasiblePlan` if none has."""
    found = []
    for groups in _GRID_GROUPS:
        scenario = _with_batch(
            scenario_of(label, method, rack(NUM_SOCS), groups=groups), step_samples
        )
        with suppress(InfeasiblePlan):
            found.append(_of_grid(scenario))
    if not found:
        raise InfeasiblePlan(f"{method}: no number of groups of {_GRID_GROUPS} has a plan")
    return found


def _with_batch(scenario: Scenario, batch_size: int) -> Scenario:
    return scenario.replaced(train=scenario.train.replaced(batch_size=batch_size))


def planned(
    label: str, method: str, num_socs: int = NUM_SOCS, **settings: Any
) -> Mapping[str, Any]:
    """Return the `predicted` of `socflower plan` for a workload under a method as the paper ran it."""
    document = plan_scenario(scenario_of(label, method, rack(num_socs), **settings))
    return dict(document["predicted"])


def synchronising(predicted: Mapping[str, Any]) -> float:
    """Return the fraction of an epoch in which the slowest SoC neither computes nor updates (Fig. 12)."""
    steps_s = predicted["step_s"] * predicted["steps_per_epoch"]
    own_s = (1.0 - predicted["exchange_fraction"]) * steps_s
    return float(1.0 - own_s / predicted["epoch_s"])


def scenario_of(
    label: str,
    method: str,
    cluster: Mapping[str, Any],
    *,
    fusion: str = PER_TENSOR,
    arithmetic: str = FP32,
    rule: str = "paper",
    groups: int | None = None,
    interval: float | str = "decay",
    epochs: int = EPOCHS,
) -> Scenario:
    """Return the scenario of a workload under a method; by default as the paper ran it."""
    workload, num_socs = WORKLOADS[label], sum(cluster["boards"])
    tables: dict[str, Any] = {
        "cluster": cluster,
        "model": {"name": workload.model},
        "data": {"name": workload.data},
        "train": {"epochs": epochs, "batch_size": workload.batch_size},
        "precision": {"arithmetic": arithmetic} | ({"rule": rule} if arithmetic == MIXED else {}),
        "strategy": {
            "groups": groups or max(1, num_socs // GROUP_SIZE),
            "sync_interval_epochs": interval,
            "fusion": fusion,
            "overlap_buckets": 1 if arithmetic == "int8" else _OVERLAP,
        },
    }
    if method == FEDAVG:
        averaged = {
            "groups": num_socs,
            "sync_interval_epochs": 1.0,
            "leaders": "star",
            "overlap_buckets": 1,
        }
        tables["strategy"] |= averaged
        method = OURS
    if STRATEGIES[method].is_grid:
        tables["strategy"] = {"name": method, "groups": tables["strategy"]["groups"]}
    scenario = parse_scenario(tables, name=label, question="", where=f"paper: {label}")
    return scenario.under(method)
