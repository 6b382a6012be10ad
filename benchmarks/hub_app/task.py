"""The models: LeNet-5, a perceptron thirty times its size, and those of scenarios."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn

from socflower.scenario.arithmetic import trainer
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import TrainingData, initial_model, scenario_data
from socflower.training.fp32 import FP32Trainer
from socflower.training.trainer import Trainer
from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import DataSet
from socflower.workloads.evaluation import evaluate
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

WIDTH = 1024


def load_model(name: str) -> nn.Module:
    """Return a model for the digits, or the model of a scenario file with overrides; its weights are always equal."""
    if _is_scenario(name):
        return initial_model(_scenario(name))
    if name != "perceptron":
        return build_model(name, in_channels=1, image_size=28, num_classes=10, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(28 * 28, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )


def load_trainer(name: str) -> Trainer:
    """Return the scenario's trainer, or SGD."""
    return trainer(_scenario(name)) if _is_scenario(name) else FP32Trainer()


def load_training_data(name: str) -> DataSource:
    """Return the training samples: the digits, or those of the scenario."""
    return _data(name).train


def test_scores(name: str, model: nn.Module) -> Mapping[str, float]:
    """Return accuracy or loss on the test data."""
    return evaluate(model, _data(name).test).metrics


@cache
def _scenario(name: str) -> Scenario:
    file, *overrides = name.split()
    return load_scenario(Path(file), overrides)


@cache
def _data(name: str) -> TrainingData | DataSet:
    if _is_scenario(name):
        return scenario_data(_scenario(name))
    return load_data("digits")


def _is_scenario(name: str) -> bool:
    return ".toml" in name
