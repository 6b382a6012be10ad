"""What a `hybrid-pipeline` scenario trains: the model, an example of its input, and the samples of an epoch."""

import torch
from torch import nn

from socflower.capture.graph import Example
from socflower.errors import ConfigError
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.pipeline import LANGUAGE_MODELS, PipelineConfig
from socflower.scenario.workload import example_inputs, initial_model, num_samples
from socflower.workloads.models import build_model, model_names
from socflower.workloads.models.language_models import bert_small, gpt_small

_CLASSES = 10


def pipeline_workload(scenario: Scenario) -> tuple[nn.Module, Example, int]:
    """Return the model, an example of its input, and the samples of an epoch."""
    table = scenario.pipeline or PipelineConfig()
    if not table.sample:
        example = example_inputs(scenario)
        if not isinstance(example, torch.Tensor | tuple):
            raise ConfigError(f"{scenario.name} [data] factory = {scenario.data.factory!r}: a pipeline takes one "
                              "tensor a sample; give pairs (inputs, labels)")
        return initial_model(scenario), example, num_samples(scenario)
    name, classes = scenario.model.name, table.num_classes or _CLASSES
    if name in LANGUAGE_MODELS:
        (length,) = table.sample
        tokens = torch.zeros(1, length, dtype=torch.int64)
        model: nn.Module = (bert_small(length=length, num_classes=classes, seed=scenario.seed) if name == "bert-small"
                            else gpt_small(length=length, seed=scenario.seed))
        return model, tokens, table.num_samples
    if scenario.model.factory:
        return initial_model(scenario), table.sample, table.num_samples
    if name not in model_names():
        raise ConfigError(f"{scenario.name} [model] name = {name!r} is unknown; pipelines know "
                          f"{', '.join((*model_names(), *LANGUAGE_MODELS))}")
    channels, size, _ = table.sample
    return (build_model(name, in_channels=channels, image_size=size, num_classes=classes, seed=scenario.seed),
            table.sample, table.num_samples)
