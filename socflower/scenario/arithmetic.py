"""The arithmetic of a scenario as it is computed here: trainer, kernels, and held-out data."""

from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import numpy as np
import torch

from socflower import _int8
from socflower.cluster import Device
from socflower.model_graph.batch_form import pair_of
from socflower.model_graph.torch_device import AUTO
from socflower.precision import (
    EngineSettings,
    Int8Model,
    NativeInt8Backend,
    RescalingPolicy,
    TrainingAlgorithm,
    int8_algorithm,
)
from socflower.precision.algorithm import HANDED_OUT_GRADIENTS
from socflower.precision.operator_costs import island_share
from socflower.precision.processor_costs import MixedPricing
from socflower.scenario.costs import mixing_note
from socflower.scenario.schema.config import TrainConfig
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import image_shape, initial_model, scenario_data
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.muon import muon
from socflower.training.schedules import RateSchedule, scheduler_of
from socflower.training.session import OptimizerFn
from socflower.training.trainer import Trainer
from socflower.workloads.data_source import DataSource


def uses_int8(scenario: Scenario) -> bool:
    """Return whether any of the scenario's training is in int8."""
    kind, rule = scenario.precision.arithmetic, scenario.precision.rule
    return kind == "int8" or (kind == "mixed" and rule != "fp32") or has_int8_stages(scenario)


def has_int8_stages(scenario: Scenario) -> bool:
    """Return whether stages of a pipeline compute in int8."""
    return scenario.pipeline is not None and bool(scenario.pipeline.int8_socs)


def kernels(scenario: Scenario) -> dict[str, str]:
    """Return what computes on this machine, by arithmetic."""
    found = {"fp32": f"torch {torch.__version__}", "aggregation": "native weighted sum, float32"}
    return found | ({"int8": f"CPU int8, {_int8.Engine().kernel}"} if uses_int8(scenario) else {})


def arithmetic_notes(scenario: Scenario) -> list[str]:
    """Return a result's notes on its arithmetic."""
    kind, devices = scenario.precision.arithmetic, _devices(scenario)
    if kind == "fp32" and not has_int8_stages(scenario):
        return []
    notes = []
    if has_int8_stages(scenario):
        devices = [device for device in devices if device.int8_processor]
    if uses_int8(scenario):
        notes.append(
            "NPU: CPU int8. The int8 training ran on this CPU; its virtual time and energy are those of "
            + ", ".join(sorted(f"{device.name}'s {_int8_side(kind, device)}" for device in devices))
            + "."
        )
        notes += _island_notes(scenario)
    if kind == "mixed":
        notes.append(mixing_note(scenario.precision.rule))
    return notes


def _island_notes(scenario: Scenario) -> list[str]:
    """Return what of the model ran in FP32, and its share of a step on this machine."""
    is_whole = scenario.precision.arithmetic != "fp32" and scenario.edgecloud is None
    has_some = unsupported(scenario) == "fp32" or scenario.precision.fp32_operators
    if not is_whole or not has_some:
        return []
    model = Int8Model.from_module(
        initial_model(scenario),
        input_shape=image_shape(scenario),
        fp32_operators=scenario.precision.fp32_operators,
    )
    if not model.islands:
        return []
    parts = ", ".join(f"{name} ({operator})" for name, operator in model.islands.items())
    share = island_share(model, min(scenario.train.batch_size, 64))
    return [
        f"FP32 islands, named or without an int8 kernel: {parts}; they took {share:.0%} of an int8 step on this "
        "machine."
    ]


def _devices(scenario: Scenario) -> list[Device]:
    """Return the distinct devices of the cluster, by name since their tables make them unhashable."""
    return list(
        {board.device.name: board.device for board in scenario_cluster(scenario).boards}.values()
    )


def _int8_side(kind: str, device: Device) -> str:
    name = device.accelerator if kind == "mixed" else device.int8_processor
    return name or f"{device.default_processor} in FP32 (no int8 processor is known for it)"


def trainer(scenario: Scenario, soc: int = 0) -> Trainer:
    """Return the trainer of a SoC's client; outside groups it splits batches by its device's throughputs."""
    settings, precision = scenario.train, scenario.precision
    if precision.arithmetic == "int8":
        return Int8Trainer(
            algorithm=_algorithm(scenario),
            learning_rate=settings.learning_rate,
            schedule=rate_schedule(settings),
            settings=EngineSettings(
                rescaling=RescalingPolicy(adaptive=precision.adaptive_rescaling)
            ),
            unsupported=unsupported(scenario),
            fp32_operators=precision.fp32_operators,
        )
    fp32 = FP32Trainer(
        optimizer=optimizer(scenario),
        scheduler=None
        if settings.schedule == "constant"
        else partial(scheduler_of, rate_schedule(settings)),
        # The registry's models support it and are faster with it; tensors that cross cuts have torch's own layout.
        channels_last=not scenario.model.factory and not scenario.kind.is_pipeline,
        reduction=settings.reduction,
        device=settings.device,
    )
    if precision.arithmetic == "fp32":
        return fp32
    held_out = held_out_split(scenario_data(scenario).train, precision.held_out)[1]
    inputs, _ = pair_of(held_out.batch(np.arange(len(held_out))), "mixed precision")
    device = scenario_cluster(scenario).device_of(soc)
    # Outside groups a client splits each batch by the catalogue's throughputs.
    ratio = MixedPricing(rule=precision.rule).npu_ratio(scenario.model.name, device)
    return MixedPrecisionTrainer(
        fp32=fp32,
        rule=precision.rule,
        held_out=inputs,
        npu_ratio=ratio,
        merge=precision.merge,
        backend=_backend(scenario),
    )


def _backend(scenario: Scenario) -> Callable[[], NativeInt8Backend]:
    """Return what makes the int8 side of mixed training: with NITI if it trains weights of its own."""
    precision = scenario.precision
    algorithm = HANDED_OUT_GRADIENTS
    if precision.merge == "weights":
        algorithm = int8_algorithm("niti", gradient_bits=precision.gradient_bits)
    return partial(
        NativeInt8Backend,
        algorithm,
        fp32_operators=precision.fp32_operators,
        unsupported=unsupported(scenario),
    )


def _algorithm(scenario: Scenario) -> TrainingAlgorithm:
    precision = scenario.precision
    if precision.has_int8_weights:
        bits = precision.gradient_bits if precision.algorithm == "niti" else None
        return int8_algorithm(precision.algorithm, gradient_bits=bits)
    return int8_algorithm(
        precision.algorithm, scenario.momentum, weight_decay=scenario.train.weight_decay
    )


def unsupported(scenario: Scenario) -> Literal["refuse", "fp32"]:
    """Return how operators that int8 does not support are handled."""
    return "fp32" if scenario.precision.unsupported == "fp32" else "refuse"


def evaluation_device(scenario: Scenario) -> str:
    """Return the device of the server's evaluation; the server may run on another machine than the clients."""
    return "cpu" if scenario.train.device == "cpu" else AUTO


def optimizer(scenario: Scenario) -> OptimizerFn:
    """Return the scenario's optimiser; `momentum` is that of SGD only."""
    settings = scenario.train
    rate, decay = settings.learning_rate, settings.weight_decay
    match scenario.optimizer:
        case "adam":
            return partial(torch.optim.Adam, lr=rate, weight_decay=decay)
        case "adamw":
            return partial(torch.optim.AdamW, lr=rate, weight_decay=decay)
        case "rmsprop":
            return partial(torch.optim.RMSprop, lr=rate, weight_decay=decay)
        case "muon":
            return muon(rate, weight_decay=decay)
    return sgd(rate, scenario.momentum, decay)


def rate_schedule(settings: TrainConfig) -> RateSchedule:
    """Return the schedule of the learning rate."""
    return RateSchedule(
        kind=settings.schedule,
        num_epochs=settings.epochs,
        milestones=settings.milestones,
        factor=settings.decay_factor,
    )


def training_data(scenario: Scenario) -> DataSource:
    """Return the samples to train on: all except the held-out ones."""
    train = scenario_data(scenario).train
    return (
        held_out_split(train, scenario.precision.held_out)[0]
        if scenario.precision.held_out
        else train
    )


@cache
def held_out_split(train: DataSource, num_held_out: int) -> tuple[DataSource, DataSource]:
    """Return training and held-out samples; the latter are spread evenly: files may be sorted by class."""
    held_out = np.arange(num_held_out) * len(train) // num_held_out
    return train.select(np.delete(np.arange(len(train)), held_out)), train.select(held_out)
