"""What a split scenario trains: model and data in the form that edge, cloud and server share, and how it is judged."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from socflower.capture.layer_profile import profile_module
from socflower.cluster import Device, ModelProfile
from socflower.edgecloud.plan.baselines import gradient_bits
from socflower.edgecloud.plan.cuts import SplitCosts
from socflower.edgecloud.plan.device_costs import CutShape, split_costs
from socflower.edgecloud.program import JoinedProgram, LayeredProgram, SplitProgram
from socflower.edgecloud.samples import CodeSamples, FeatureSamples, ImageTargets, LabelledSamples, Samples
from socflower.errors import ConfigError
from socflower.scenario.arithmetic import initial_model, optimizer
from socflower.scenario.schema.config import Scenario
from socflower.training.fp32 import LossFn
from socflower.workloads import (
    ClickData,
    DataSet,
    GeneratorSamples,
    build_click_model,
    build_generator,
    class_subset,
    click_data,
    data_shape,
    evaluate,
    load_data,
    load_weights,
    partition,
)

CLICKS, CLICK_MODEL, GENERATOR = "clicks", "click-model", "digit-generator"
_EVALUATED_AT_A_TIME = 2000


@dataclass(frozen=True, slots=True)
class Score:
    """What a model achieves; accuracy is None where nothing is right or wrong."""

    accuracy: float | None
    loss: float


class SplitWorkload(ABC):
    """Model and data of a scenario; edges are numbered from 0."""

    is_joined = False
    """Whether edges hold different features of the same samples."""

    def __init__(self, scenario: Scenario, num_edges: int) -> None:
        self.scenario, self.num_edges = scenario, num_edges

    @property
    @abstractmethod
    def program(self) -> SplitProgram:
        """The model, where it can be cut, and how it is trained."""

    @abstractmethod
    def samples(self, edge: int) -> Samples:
        """Return what an edge holds."""

    def cloud_samples(self, edge: int) -> Samples | None:
        """Return what the cloud needs to know of an edge's samples; None where features bring all."""
        return None

    @abstractmethod
    def num_samples(self) -> list[int]:
        """Return how many samples each edge holds."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Score:
        """Return what the whole model achieves on samples it was not trained on."""

    @abstractmethod
    def costs(self, edge: int, device: Device, cloud: Device) -> SplitCosts:
        """Return what a batch costs an edge on a device, and a cloud, by the catalogue."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the data come from."""

    @property
    def batches_per_epoch(self) -> int:
        """Batches of every edge in an epoch: those of the one that holds most."""
        return math.ceil(max(self.num_samples()) / self.scenario.train.batch_size)

    def schedule(self, batch: int) -> float:
        """Return the factor on the learning rate for a batch."""
        train = self.scenario.train
        total = self.batches_per_epoch * train.epochs
        return 0.5 * (1.0 + math.cos(math.pi * min(batch, total) / total)) if train.schedule == "cosine" else 1.0

    def _program(self, model: nn.Module, example: tuple[int, ...], loss: LossFn, *, reverse: bool = False,
                 ) -> LayeredProgram:
        settings = self.scenario.split
        if settings.pretrained:
            load_weights(model, Path(settings.pretrained))
        return LayeredProgram(
            model_fn=lambda: copy.deepcopy(model), example=example, schedule=self.schedule, loss=loss, reverse=reverse,
            optimizer=optimizer(self.scenario), frozen=settings.frozen or None,
            seed=self.scenario.seed)

    def _layered_costs(self, profile: ModelProfile, device: Device, cloud: Device, reverse: bool) -> SplitCosts:
        program = self.program
        assert isinstance(program, LayeredProgram)
        shapes = [CutShape(name=cut.name, num_layers=cut.num_layers(profile),
                           feature_elements_per_sample=cut.feature_elements,
                           front_state_bytes=cut.front_weight_bytes) for cut in program.split.cuts]
        frozen = sum(not cut.front_trains for cut in program.split.cuts)
        return split_costs(
            profile, shapes, device, cloud, self.scenario.train.batch_size, reverse=reverse,
            frozen_layers=shapes[frozen - 1].num_layers if frozen else 0,
            gradient_bits=self._gradient_bits)

    @property
    def _gradient_bits(self) -> int:
        settings = self.scenario.split
        return gradient_bits(self.scenario.strategy.name, settings.gradient_bits)


class ImageWorkload(SplitWorkload):
    """Images, divided among the edges; a classifier that begins at the edge."""

    @cached_property
    def program(self) -> LayeredProgram:
        """A model of the catalogue, with the scenario's seed or weights that were trained before."""
        shape = data_shape(self.scenario.data.name)
        classes = self.scenario.split.classes
        model = initial_model(self.scenario, num_classes=len(classes) or None)
        return self._program(model, (shape.channels, shape.size, shape.size), functional.cross_entropy)

    def samples(self, edge: int) -> Samples:
        """Return an edge's part of the images."""
        return LabelledSamples(self._data.train.select(self._parts[edge]))

    def num_samples(self) -> list[int]:
        """Return how many images each edge holds."""
        return [len(part) for part in self._parts]

    def evaluate(self, model: nn.Module) -> Score:
        """Return accuracy and loss on the test images."""
        outcome = evaluate(model, self._data.test)
        return Score(outcome.accuracy, outcome.loss)

    def costs(self, edge: int, device: Device, cloud: Device) -> SplitCosts:
        """Return the costs of the model's layers."""
        shape = data_shape(self.scenario.data.name)
        profile = profile_module(self.program.model(), (shape.channels, shape.size, shape.size),
                                 self.scenario.model.name)
        return self._layered_costs(profile, device, cloud, reverse=False)

    @property
    def source(self) -> str:
        """Where the images were found."""
        return self._data.source

    @cached_property
    def _data(self) -> DataSet:
        return _chosen(self.scenario)

    @cached_property
    def _parts(self) -> Sequence[NDArray[np.int64]]:
        settings = self.scenario.data
        return partition(self._data.train.labels.numpy(), self.num_edges, settings.partition, settings.alpha,
                         self.scenario.seed)


class ClickWorkload(SplitWorkload):
    """Clicks on movies: two parties know different things of the same samples, and the cloud joins them."""

    is_joined = True

    @cached_property
    def program(self) -> JoinedProgram:
        """A deep interest network with a bottom model at each party."""
        seed = self.scenario.seed
        parts, _ = self._data.train.batch(torch.arange(1))
        return JoinedProgram(
            model_fn=lambda: build_click_model(self.num_edges, seed=seed), examples=parts[:self.num_edges], top="top",
            bottoms=[f"bottoms.{edge}" for edge in range(self.num_edges)], schedule=self.schedule, seed=seed,
            optimizer=optimizer(self.scenario))

    def samples(self, edge: int) -> Samples:
        """Return a party's features of all samples."""
        return FeatureSamples(self._data.train, edge)

    def num_samples(self) -> list[int]:
        """Return the number of samples, of which every party knows something."""
        return [len(self._data.train)] * self.num_edges

    def evaluate(self, model: nn.Module) -> Score:
        """Return accuracy and loss on later samples of the same users."""
        test, right, loss = self._data.test, 0, 0.0
        model.eval()
        with torch.inference_mode():
            for first in range(0, len(test), _EVALUATED_AT_A_TIME):
                parts, labels = test.batch(range(first, min(first + _EVALUATED_AT_A_TIME, len(test))))
                logits = model(parts[:self.num_edges])
                right += int((logits.argmax(dim=1) == labels).sum())
                loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        return Score(right / len(test), loss / len(test))

    def costs(self, edge: int, device: Device, cloud: Device) -> SplitCosts:
        """Return the costs of one party's bottom model and of the top."""
        model = build_click_model(self.num_edges, seed=self.scenario.seed)
        bottom = profile_module(model.bottoms[edge], self.program.examples[edge], self.program.bottoms[edge])
        features = model.bottoms[edge](self.program.examples[edge]).shape[1]
        top = profile_module(model.top, (features * self.num_edges,), "top")
        whole = ModelProfile(name=self.scenario.model.name, layers=(*bottom.layers, *top.layers),
                             input_bytes=bottom.input_bytes)
        state = model.bottoms[edge].state_dict().values()
        shape = CutShape(name=self.program.bottoms[edge], num_layers=len(bottom.layers),
                         feature_elements_per_sample=features,
                         front_state_bytes=float(sum(tensor.nbytes for tensor in state)))
        return split_costs(whole, [shape], device, cloud, self.scenario.train.batch_size,
                           gradient_bits=self._gradient_bits,
                           label_bytes_per_sample=8.0 if edge == 0 else 0.0)

    @property
    def source(self) -> str:
        """What the samples are, and between which accuracies a model's must lie."""
        data = self._data
        return (f"generated in the shape of MovieLens, seed {self.scenario.seed}; the majority's accuracy is "
                f"{data.majority_accuracy:.3f}, that of one who knows all probabilities {data.best_accuracy:.3f}")

    @cached_property
    def _data(self) -> ClickData:
        return _clicks(self.scenario.seed)


class GeneratorWorkload(SplitWorkload):
    """A generator of images: it begins in the cloud, and its last layers, which see the images, are at the edge."""

    @cached_property
    def program(self) -> LayeredProgram:
        """The digit generator."""
        model = build_generator(self.scenario.seed, num_classes=self._samples.images.num_classes)
        example = (self._samples.codes([0]).shape[1],)
        return self._program(model, example, functional.mse_loss, reverse=True)

    def samples(self, edge: int) -> Samples:
        """Return the images."""
        return ImageTargets(self._samples)

    def cloud_samples(self, edge: int) -> Samples:
        """Return the codes."""
        return CodeSamples(self._samples)

    def num_samples(self) -> list[int]:
        """Return the number of images; there is one edge."""
        return [len(self._samples)]

    def evaluate(self, model: nn.Module) -> Score:
        """Return the mean squared error on the images that it learns to make: others have codes it cannot know."""
        rows = torch.arange(min(len(self._samples), _EVALUATED_AT_A_TIME))
        model.eval()
        with torch.inference_mode():
            return Score(None, float(functional.mse_loss(model(self._samples.codes(rows)),
                                                         self._samples.targets(rows))))

    def costs(self, edge: int, device: Device, cloud: Device) -> SplitCosts:
        """Return the costs of the generator's layers, the last ones at the edge."""
        profile = profile_module(self.program.model(), self.program.example, self.scenario.model.name)
        return self._layered_costs(profile, device, cloud, reverse=True)

    @property
    def source(self) -> str:
        """Where the images were found, and what trivial generators achieve."""
        of_all, of_class = self._samples.mean_image_losses()
        return (f"{_chosen(self.scenario).source}; the mean image has a mean squared error of "
                f"{of_all:.4f}, the mean image of each class {of_class:.4f}")

    @cached_property
    def _samples(self) -> GeneratorSamples:
        return GeneratorSamples(_chosen(self.scenario).train, seed=self.scenario.seed)


def split_workload(scenario: Scenario, num_edges: int) -> SplitWorkload:
    """Return what a scenario trains; `ConfigError` for a model, data and edges that do not go together."""
    model, data = scenario.model.name, scenario.data.name
    if (data == CLICKS) != (model == CLICK_MODEL):
        raise ConfigError(f"{scenario.name}: [model] name = {model!r} with [data] name = {data!r}; {CLICK_MODEL!r} and "
                          f"{CLICKS!r} belong together")
    if data == CLICKS:
        if scenario.split.classes or scenario.split.frozen or scenario.split.pretrained:
            raise ConfigError(f"{scenario.name} [edgecloud]: {CLICKS!r} knows no classes, frozen and pretrained; leave "
                              "them out")
        if num_edges != 2:
            raise ConfigError(f"{scenario.name}: {CLICKS!r} has two parties, and {num_edges} SoCs take part; set "
                              "[strategy] socs = 2")
        return ClickWorkload(scenario, num_edges)
    if model == GENERATOR:
        if num_edges != 1:
            raise ConfigError(f"{scenario.name}: {GENERATOR!r} is trained with one edge, and {num_edges} SoCs take "
                              "part; set [strategy] socs = 1")
        return GeneratorWorkload(scenario, num_edges)
    return ImageWorkload(scenario, num_edges)


def _chosen(scenario: Scenario) -> DataSet:
    """Return the scenario's images, of the classes that it names."""
    data, classes = load_data(scenario.data.name), scenario.split.classes
    if not classes:
        return data
    return DataSet(class_subset(data.train, classes), class_subset(data.test, classes), data.name,
                   f"{data.source}, classes {', '.join(map(str, classes))}")


@cache
def _clicks(seed: int) -> ClickData:
    return click_data(seed=seed)
