"""What a `hybrid-pipeline` scenario trains: the model, an example of its input, and the samples of an epoch."""

import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.graph import Example
from socflower.scenario.costs import num_samples
from socflower.scenario.schema.pipeline import LANGUAGE_MODELS, PipelineConfig
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import example_inputs, initial_model
from socflower.workloads.models.built_in import model_names
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.language_models import bert_small, gpt_small

_CLASSES = 10


def pipeline_workload(scenario: Scenario) -> tuple[nn.Module, Example, int]:
    """Return the model, an example of its input, and the samples of an epoch."""
    table, name = scenario.pipeline or PipelineConfig(), scenario.model.name
    known = (*model_names(), *LANGUAGE_MODELS)
    if not scenario.model.factory and name not in known:
        raise scenario.mistake("model", "name", f"is unknown; pipelines know {', '.join(known)}")
    if not table.sample:
        own = example_inputs(scenario)
        if not isinstance(own, torch.Tensor | tuple):
            raise scenario.mistake("data", "factory", "a pipeline takes pairs (inputs, labels)")
        return initial_model(scenario), own, num_samples(scenario)
    if scenario.model.factory:
        return initial_model(scenario), table.sample, table.num_samples
    wanted: Example = table.sample
    if name in LANGUAGE_MODELS:
        wanted = torch.zeros(1, *table.sample, dtype=torch.int64)
    elif len(table.sample) == 1:
        why = f"is of tokens, and {name!r} takes images; write [channels, pixels, pixels]"
        raise scenario.mistake("pipeline", "sample", why)
    try:
        return _model(name, table, scenario.seed), wanted, table.num_samples
    except ConfigError as error:
        raise scenario.mistake("pipeline", "sample", str(error)) from None


def _model(name: str, table: PipelineConfig, seed: int) -> nn.Module:
    classes = table.num_classes or _CLASSES
    if name == "bert-small":
        return bert_small(length=table.sample[0], num_classes=classes, seed=seed)
    if name == "gpt-small":
        return gpt_small(length=table.sample[0], seed=seed)
    channels, size, _ = table.sample
    return build_model(name, in_channels=channels, image_size=size, num_classes=classes, seed=seed)
