"""What a scenario's model, data and arithmetic cost; torch is imported for models and data of the user's only."""

import math
from typing import TYPE_CHECKING, Any

from socflower.cluster import FP32, ModelProfile, Pricing
from socflower.did_you_mean import did_you_mean
from socflower.precision.cpu_share import most_speedup
from socflower.precision.processor_costs import Int8Pricing, MixedPricing
from socflower.quantities import percent
from socflower.scenario.schema.scenario_file import Scenario
from socflower.workloads.models.built_in import built_in_profile, model_names
from socflower.workloads.sources import data_names, data_shape

# Importing torch takes long.
if TYPE_CHECKING:
    from torch import nn


def check_names(scenario: Scenario) -> None:
    """Raise `ConfigError` for a model or data that are neither built in nor the user's."""
    _check_name("model", scenario.model, model_names(), scenario)
    _check_name("data", scenario.data, data_names(), scenario)


def model_profile(scenario: Scenario, model: "nn.Module | None" = None) -> ModelProfile:
    """Return the layer profile of the scenario's model on its data; `model` is that model if it is built already."""
    if not scenario.factories:
        shape = data_shape(scenario.data.name)
        return built_in_profile(scenario.model.name, shape.channels, shape.size)
    from socflower.model_graph.layer_profile import profile_module
    from socflower.scenario.workload import example_inputs, initial_model

    return profile_module(
        model or initial_model(scenario), example_inputs(scenario), scenario.model.name
    )


def num_samples(scenario: Scenario) -> int:
    """Return the number of training samples; data of the registry are not loaded for it."""
    if not scenario.data.factory:
        return data_shape(scenario.data.name).num_train
    from socflower.scenario.workload import scenario_data

    return len(scenario_data(scenario).train)


def num_training_samples(scenario: Scenario, num_train: int) -> int:
    """Return the number of samples to train on, of `num_train`, without the held-out ones; `ConfigError` if none."""
    num_held_out = scenario.precision.held_out
    if num_held_out >= num_train:
        why = f"{scenario.data.name} has only {num_train} training samples; set fewer aside"
        raise scenario.mistake("precision", "held_out", why)
    return num_train - num_held_out


def pricing(scenario: Scenario) -> Pricing:
    """Return the cost model of the scenario's arithmetic."""
    if scenario.precision.arithmetic == "int8":
        return Int8Pricing()
    return (
        MixedPricing(rule=scenario.precision.rule, merge=scenario.precision.merge)
        if scenario.precision.arithmetic == "mixed"
        else FP32
    )


def optimizer_copies(scenario: Scenario) -> float:
    """Return how many copies of the trained weights the optimiser keeps, at most: Muon keeps one of hidden layers."""
    of_optimizer = {"sgd": float(scenario.momentum > 0), "rmsprop": 1.0}
    return of_optimizer.get(scenario.optimizer, 2.0)


def mixing_note(rule: str) -> str:
    """Return a note on a mixing rule: its largest possible speed-up over the CPU alone (F11)."""
    most = most_speedup(rule)
    if rule == "fp32":
        return "Rule 'fp32' leaves everything to the CPU."
    if math.isfinite(most):
        return (
            f"Rule '{rule}' gives the CPU at least {percent(1.0 / most)} of the samples: computing takes no less "
            f"than 1/{most:.2f} of the CPU's time, however fast the NPU."
        )
    return f"Rule '{rule}' has no bound but the throughputs of CPU and NPU."


def _check_name(table: str, settings: Any, known: tuple[str, ...], scenario: Scenario) -> None:
    name = settings.name
    if settings.factory and name in known:
        why = f"is that of a built-in, and factory = {settings.factory!r} is given too; remove one"
        raise scenario.mistake(table, "name", why)
    if settings.factory or name in known:
        return
    factory = f'or factory = "{name}"' if ":" in name else ""
    hint = did_you_mean(name, known, factory)
    names = f"is unknown; use one of {', '.join(known)}"
    raise scenario.mistake(table, "name", f"{names}; {hint}" if hint else names)
