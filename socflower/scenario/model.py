"""A scenario's model and its profile, from what is known of its data before they are loaded."""

from torch import nn

from socflower.cluster import ModelProfile
from socflower.cluster.tracing import profile_module
from socflower.scenario.config import Scenario
from socflower.workloads import build_model, data_shape


def initial_model(scenario: Scenario, num_classes: int | None = None) -> nn.Module:
    """Return the scenario's model with the weights its seed gives it, for the data's classes or `num_classes`."""
    shape = data_shape(scenario.data.name)
    return build_model(scenario.model.name, in_channels=shape.channels, image_size=shape.size,
                       num_classes=num_classes or shape.num_classes, seed=scenario.seed)


def model_profile(scenario: Scenario) -> ModelProfile:
    """Return the layer profile of the scenario's model on its data."""
    shape = data_shape(scenario.data.name)
    return profile_module(initial_model(scenario), (shape.channels, shape.size, shape.size), scenario.model.name)
