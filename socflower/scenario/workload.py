"""Model and data of a scenario, from the registry or from functions of the user."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, form_of
from socflower.model_graph.layer_profile import ExampleBatch
from socflower.model_graph.random_state import forked_generators
from socflower.scenario.schema.config import DataConfig, Factory
from socflower.scenario.schema.scenario_file import Scenario
from socflower.training.muon import muon
from socflower.training.trainer import require_trained_parameters
from socflower.user_code import call, import_attribute, raised
from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import LabelledData
from socflower.workloads.dispatched import require_dispatchable
from socflower.workloads.evaluation import evaluate
from socflower.workloads.map_dataset import as_data_source
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.partition import partition
from socflower.workloads.sources import data_shape, load_data
from socflower.workloads.transfer import load_weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """Training and test samples of a scenario, and their origin."""

    train: DataSource
    test: DataSource
    source: str


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Metrics of a model on the test data."""

    # From 0 to 1; None for a model that predicts no classes, such as a generator.
    accuracy: float | None
    loss: float

    @property
    def likelihood(self) -> float:
        """exp(-loss): for a cross-entropy in nats, the geometric mean of the probabilities of the right answers."""
        return math.exp(-self.loss)


def initial_model(scenario: Scenario, num_classes: int | None = None) -> nn.Module:
    """Return the scenario's model for the data's classes or `num_classes`, with its initial weights.

    They are drawn from the seed; those of `[model] pretrained` replace them. The user's function draws from torch's,
    NumPy's and Python's global generators, all seeded with the scenario's seed; their states are restored afterwards.
    """
    if scenario.model.factory:
        made = _made("model", scenario.model, scenario)
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"{_factory_text('model', scenario)}: returned a {type(made).__name__}, not a "
                "torch.nn.Module"
            )
        load_pretrained(scenario, made)
        return made
    channels, size, known_classes = _image_shape(scenario)
    model = build_model(
        scenario.model.name,
        in_channels=channels,
        image_size=size,
        num_classes=num_classes or known_classes,
        seed=scenario.seed,
    )
    load_pretrained(scenario, model)
    return model


def load_pretrained(scenario: Scenario, model: nn.Module) -> None:
    """Load the weights of `[model] pretrained`, if it names a file; `ConfigError` if they are not the model's."""
    settings = scenario.model
    if not settings.pretrained:
        return
    with _naming(f"{scenario.name} [model] pretrained"):
        load_weights(model, Path(settings.pretrained))


def scenario_data(scenario: Scenario) -> TrainingData:
    """Return the scenario's data, made once a process; `ConfigError` or `DataUnavailable` if there are none."""
    settings = scenario.data
    if not settings.factory:
        loaded = load_data(settings.name)
        return TrainingData(train=loaded.train, test=loaded.test, source=loaded.source)
    return _own_data(
        settings.factory,
        json.dumps(settings.arguments, sort_keys=True),
        scenario.seed,
        scenario.folder,
        scenario.name,
    )


def example_inputs(scenario: Scenario) -> ExampleBatch:
    """Return an example of the model's inputs: a batch of one sample, or for data of the registry a sample's shape."""
    if not scenario.data.factory:
        shape = data_shape(scenario.data.name)
        return shape.channels, shape.size, shape.size
    batch = _first(scenario, scenario_data(scenario).train)
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    if isinstance(inputs, torch.Tensor | Mapping):
        return inputs
    if isinstance(inputs, tuple | list) and inputs:
        return tuple(inputs)
    raise ConfigError(
        f"{_factory_text('data', scenario)}: its batches are {form_of(batch)}; give pairs (inputs, "
        "labels), or dicts"
    )


def image_shape(scenario: Scenario) -> tuple[int, int, int]:
    """Return channels, height and width of a sample's inputs; `ConfigError` unless they are images of floats."""
    if not scenario.data.factory:
        shape = data_shape(scenario.data.name)
        return shape.channels, shape.size, shape.size
    example, takes = example_inputs(scenario), scenario.precision.arithmetic
    kind = form_of(example)
    if isinstance(example, torch.Tensor):
        if example.dim() == 4 and example.is_floating_point():
            return example.shape[1], example.shape[2], example.shape[3]
        kind = f"{str(example.dtype).removeprefix('torch.')} of shape {tuple(example.shape[1:])}"
    raise scenario.mistake(
        "data",
        "factory",
        f"a sample's inputs are {kind}, and [precision] arithmetic = {takes!r} takes images of float32",
    )


def partitions(
    scenario: Scenario, train: DataSource, num_partitions: int
) -> list[NDArray[np.int64]]:
    """Return the numbers of each client's training samples; `ConfigError` for label skew of data without labels."""
    settings = scenario.data
    return partition(
        _labels(scenario, train), num_partitions, settings.partition, settings.alpha, scenario.seed
    )


def check_workload(scenario: Scenario) -> None:
    """Raise `ConfigError` for models or data of the user's that cannot train."""
    data, model = scenario_data(scenario), initial_model(scenario)
    # Label skew needs classes, which some data do not have.
    _labels(scenario, data.train)
    if scenario.strategy.dispatch:
        with _naming(f"{scenario.name} [strategy]"):
            require_dispatchable(data.train, len(data.train))
    if scenario.model.factory:
        with _naming(_factory_text("model", scenario)):
            require_trained_parameters(model)
            if scenario.optimizer == "muon":
                # This refuses a model without hidden layers.
                muon()(model.parameters())
    evaluated = f"{scenario.name}: model {scenario.model.name} cannot evaluate the test data of"
    with _naming(f"{evaluated} {scenario.data.name}"):
        outcome = evaluate(model, data.test.select([0]))
        # Reading the loss raises if the model gives none.
        _ = outcome.loss
    if "accuracy" not in outcome.metrics:
        _refuse_accuracy(scenario)


def _refuse_accuracy(scenario: Scenario) -> None:
    """Raise `ConfigError` for a target or a claim on accuracy if the model only has a loss."""
    said = f"{scenario.model.name} on {scenario.data.name} has a loss and no accuracy; write"
    for claim in scenario.expect:
        if "accuracy" in claim:
            raise ConfigError(f"{scenario.name} [expect] {claim}: {said} {_of_loss(claim)}")
    if scenario.compare.target_accuracy is not None:
        raise scenario.mistake("compare", "target_accuracy", f"{said} target_loss")


def _of_loss(claim: str) -> str:
    """Return the claim on loss that says what one on accuracy does: `max_loss` for `min_accuracy`."""
    bound = {"min_accuracy": "max", "max_accuracy": "min"}.get(claim, claim[:3])
    return f"{bound}{claim[3:].replace('accuracy', 'loss')}"


def _made(table: str, settings: Factory, scenario: Scenario) -> Any:
    """Return what the factory of a table returns for its arguments."""
    text = _factory_text(table, scenario)
    function = import_attribute(
        settings.factory,
        None if scenario.folder is None else Path(scenario.folder),
        text,
        f"it is looked for in {scenario.folder or 'the import path'}",
    )
    if not callable(function):
        raise ConfigError(f"{text}: is a {type(function).__name__}, not a function")
    # The user's function may draw from global generators, whose states are restored.
    with forked_generators(scenario.seed):
        return call(function, settings.arguments, text)


def _factory_text(table: str, scenario: Scenario) -> str:
    return f"{scenario.name} [{table}] factory = {getattr(scenario, table).factory!r}"


# A comparison alternates between two seeds.
@lru_cache(maxsize=2)
def _own_data(
    factory: str, arguments: str, seed: int, folder: str | None, name: str
) -> TrainingData:
    scenario = Scenario(
        name=name,
        seed=seed,
        folder=folder,
        data=DataConfig(factory=factory, arguments=json.loads(arguments)),
    )
    text = _factory_text("data", scenario)
    made = _made("data", scenario.data, scenario)
    parts = made
    if isinstance(made, Mapping):
        parts = (made.get("train"), made.get("test"))
    elif hasattr(made, "train") and hasattr(made, "test"):
        parts = (made.train, made.test)
    if (
        not isinstance(parts, tuple | list)
        or len(parts) != 2
        or any(part is None for part in parts)
    ):
        raise ConfigError(
            f"{text}: returned {form_of(made)}; return (train, test), or an object with both"
        )
    train, test = (
        _as_source(part, which, text)
        for part, which in zip(parts, ("training", "test"), strict=True)
    )
    return TrainingData(train=train, test=test, source=factory)


def _as_source(part: Any, which: str, text: str) -> DataSource:
    with _naming(f"{text}: {which}"):
        source = as_data_source(part)
    if not len(source):
        raise ConfigError(f"{text}: there is no {which} sample")
    return source


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Let errors, of the user's functions too, begin with what they are about."""
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, ConfigError) else raised(error)
        raise ConfigError(f"{what}: {why}") from error


def _first(scenario: Scenario, source: DataSource) -> Batch:
    with _naming(f"{_factory_text('data', scenario)}: its first sample cannot be read"):
        return source.batch([0])


def _image_shape(scenario: Scenario) -> tuple[int, int, int]:
    """Return channels, pixels a side, and classes, which models of the registry are built for."""
    if not scenario.data.factory:
        shape = data_shape(scenario.data.name)
        return shape.channels, shape.size, shape.num_classes
    train = scenario_data(scenario).train
    if not isinstance(train, LabelledData) or train.inputs.shape[2] != train.inputs.shape[3]:
        raise scenario.mistake(
            "model",
            "name",
            f"takes square images of known classes; let {scenario.data.factory} return LabelledData, or "
            "name a [model] factory",
        )
    return train.inputs.shape[1], train.inputs.shape[2], train.num_classes


def _labels(scenario: Scenario, train: DataSource) -> NDArray[np.int64]:
    """Return the class of each sample; zeros for an even partition, which needs none."""
    if scenario.data.partition == "iid":
        return np.zeros(len(train), np.int64)
    if train.targets is None:
        raise scenario.mistake(
            "data",
            "partition",
            f"needs each sample's class: give the Dataset of {scenario.data.factory} a list `targets`, as "
            "torchvision's have",
        )
    labels = np.asarray(train.targets, np.int64)
    if labels.shape != (len(train),):
        why = f"`targets` has shape {labels.shape}, and there are {len(train)} training samples"
        raise scenario.mistake("data", "factory", why)
    return labels
