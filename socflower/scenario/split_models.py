"""The workload of a split scenario: model, data and evaluation in the form that edge, cloud and server share."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from socflower.cluster import Device, ModelProfile
from socflower.edgecloud.plan.cuts import SplitCosts
from socflower.edgecloud.plan.device_costs import CutShape, split_costs
from socflower.edgecloud.runtime.mixed_front import MixedEdge
from socflower.edgecloud.samples import CodeSamples, FeatureSamples, ImageTargets
from socflower.edgecloud.split_program import (
    JoinedProgram,
    LayeredProgram,
    SplitProgram,
    cut_shapes,
)
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import pair_of
from socflower.model_graph.layer_profile import profile_module
from socflower.precision.processor_costs import MixedPricing
from socflower.scenario.arithmetic import (
    evaluation_device,
    held_out_split,
    optimizer,
    rate_schedule,
    trainer,
    unsupported,
)
from socflower.scenario.costs import num_training_samples
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.split import CLICK_MODEL, CLICKS, GENERATOR
from socflower.scenario.split_costs import layered_costs
from socflower.scenario.workload import (
    ModelMetrics,
    image_shape,
    initial_model,
    load_pretrained,
    scenario_data,
)
from socflower.training.fp32 import LossFn
from socflower.training.int8 import Int8Trainer
from socflower.workloads.click_through import ClickData, click_data
from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import DataSet, LabelledData
from socflower.workloads.evaluation import evaluate
from socflower.workloads.models.click_model import build_click_model
from socflower.workloads.models.generator import build_generator
from socflower.workloads.partition import partition
from socflower.workloads.sample_tensors import GeneratorSamples
from socflower.workloads.transfer import class_subset

_EVALUATION_BATCH = 2000


class SplitWorkload(ABC):
    """The model and the data of a scenario; edges are numbered from 0."""

    def __init__(self, scenario: Scenario, num_edges: int) -> None:
        self.scenario, self.num_edges = scenario, num_edges

    @property
    @abstractmethod
    def program(self) -> SplitProgram:
        """The model, its cut points, and its training settings."""

    @abstractmethod
    def samples(self, edge: int) -> DataSource:
        """Return an edge's samples."""

    def cloud_samples(self, edge: int) -> DataSource | None:
        """Return the cloud's part of an edge's samples; None if the cloud needs only features."""
        return None

    @abstractmethod
    def num_samples(self) -> list[int]:
        """Return how many samples each edge holds."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> ModelMetrics:
        """Return the whole model's scores on samples that it was not trained on."""

    def costs(self, edge: int, device: Device, cloud: Device) -> SplitCosts:
        """Return the costs of a batch on an edge's device and on the cloud, from the catalogue."""
        program = self.program
        assert isinstance(program, LayeredProgram)
        profile = profile_module(program.model(), program.example, self.scenario.model.name)
        return layered_costs(
            self.scenario,
            profile,
            cut_shapes(program.split, profile),
            device,
            cloud,
            num_frozen=sum(not cut.front_trains for cut in program.split.cuts),
            reverse=program.reverse,
        )

    @property
    @abstractmethod
    def source(self) -> str:
        """The origin of the data."""

    @property
    def batches_per_epoch(self) -> int:
        """Batches of every edge in an epoch: the number of the edge with the most samples."""
        return math.ceil(max(self.num_samples()) / self.scenario.train.batch_size)

    def schedule(self, batch: int) -> float:
        """Return the factor on the learning rate for a batch."""
        total = self.batches_per_epoch * self.scenario.train.epochs
        return rate_schedule(self.scenario.train).at(min(batch, total) / total)

    def _program(
        self,
        model: nn.Module,
        example: tuple[int, ...],
        loss: LossFn,
        *,
        reverse: bool = False,
    ) -> LayeredProgram:
        settings = self.scenario.split
        return LayeredProgram(
            # Each half trains its own copy, since training changes weights in place.
            model_fn=lambda: copy.deepcopy(model),
            example=example,
            schedule=self.schedule,
            loss=loss,
            reverse=reverse,
            optimizer=optimizer(self.scenario),
            frozen=settings.frozen or None,
            edge_trainer=self._edge_trainer(),
            seed=self.scenario.seed,
            device=self.scenario.train.device,
        )

    @property
    def _in_int8(self) -> bool:
        """Whether the edges' halves train in int8."""
        return self.scenario.precision.arithmetic == "int8"

    @property
    def _is_mixed(self) -> bool:
        """Whether the edges' halves train on CPU and NPU at once."""
        return self.scenario.precision.arithmetic == "mixed"

    def _edge_trainer(self) -> Int8Trainer | MixedEdge | None:
        scenario, rule = self.scenario, self.scenario.precision.rule
        if self._in_int8:
            return cast(Int8Trainer, trainer(scenario))
        if not self._is_mixed:
            return None
        cluster, pricing = scenario_cluster(scenario), MixedPricing(rule=rule)
        return MixedEdge(
            rule=rule,
            held_out=self._held_out_inputs(),
            unsupported=unsupported(scenario),
            npu_ratios=[
                pricing.npu_ratio(scenario.model.name, cluster.device_of(edge))
                for edge in range(self.num_edges)
            ],
        )

    def _held_out_inputs(self) -> Tensor | None:
        """Return the inputs on which mixed training measures alpha."""
        return None


class ImageWorkload(SplitWorkload):
    """Images, divided among the edges; a classifier whose first layers are at the edge."""

    @cached_property
    def program(self) -> LayeredProgram:
        """A model of the registry, with weights from the scenario's seed or pretrained ones."""
        classes = self.scenario.split.classes
        model = initial_model(self.scenario, num_classes=len(classes) or None)
        return self._program(model, image_shape(self.scenario), functional.cross_entropy)

    def samples(self, edge: int) -> DataSource:
        """Return an edge's part of the images."""
        return self._data.train.select(self._parts[edge])

    def num_samples(self) -> list[int]:
        """Return how many images each edge holds."""
        return [len(part) for part in self._parts]

    def evaluate(self, model: nn.Module) -> ModelMetrics:
        """Return accuracy and loss on the test images."""
        outcome = evaluate(model, self._data.test, device=evaluation_device(self.scenario))
        return ModelMetrics(outcome.accuracy, outcome.loss)

    @property
    def source(self) -> str:
        """The origin of the images."""
        return self._data.source

    def _held_out_inputs(self) -> Tensor | None:
        held_out = held_out_split(
            _selected_images(self.scenario).train, self.scenario.precision.held_out
        )[1]
        return pair_of(held_out.batch(np.arange(len(held_out))), "mixed precision")[0]

    @cached_property
    def _data(self) -> DataSet:
        data, num_held_out = _selected_images(self.scenario), self.scenario.precision.held_out
        if not num_held_out:
            return data
        # This raises if no sample is left to train on.
        num_training_samples(self.scenario, len(data.train))
        return replace(data, train=cast(LabelledData, held_out_split(data.train, num_held_out)[0]))

    @cached_property
    def _parts(self) -> Sequence[NDArray[np.int64]]:
        settings = self.scenario.data
        return partition(
            self._data.train.labels.numpy(),
            self.num_edges,
            settings.partition,
            settings.alpha,
            self.scenario.seed,
        )


class ClickWorkload(SplitWorkload):
    """Clicks on movies: two parties hold different features of the same samples, and the cloud joins them."""

    @cached_property
    def program(self) -> JoinedProgram:
        """A deep interest network with a bottom model at each party."""
        seed = self.scenario.seed
        parts, _ = self._data.train.batch(torch.arange(1))
        return JoinedProgram(
            model_fn=lambda: build_click_model(self.num_edges, seed=seed),
            examples=parts[: self.num_edges],
            top="top",
            bottoms=[f"bottoms.{edge}" for edge in range(self.num_edges)],
            schedule=self.schedule,
            seed=seed,
            optimizer=optimizer(self.scenario),
            device=self.scenario.train.device,
        )

    def samples(self, edge: int) -> DataSource:
        """Return a party's features of all samples."""
        return FeatureSamples(self._data.train, edge)

    def num_samples(self) -> list[int]:
        """Return the number of samples; every party holds features of all of them."""
        return [len(self._data.train)] * self.num_edges

    def evaluate(self, model: nn.Module) -> ModelMetrics:
        """Return accuracy and loss on later samples of the same users."""
        test, right, loss = self._data.test, 0, 0.0
        model.eval()
        with torch.inference_mode():
            for first in range(0, len(test), _EVALUATION_BATCH):
                parts, labels = test.batch(range(first, min(first + _EVALUATION_BATCH, len(test))))
                logits = model(parts[: self.num_edges])
                right += int((logits.argmax(dim=1) == labels).sum())
                loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        return ModelMetrics(right / len(test), loss / len(test))

    def costs(self, edge: int, device: Device, cloud: Device) -> SplitCosts:
        """Return the costs of one party's bottom model and of the top."""
        model = build_click_model(self.num_edges, seed=self.scenario.seed)
        bottom = profile_module(
            model.bottoms[edge], self.program.examples[edge], self.program.bottoms[edge]
        )
        features = model.bottoms[edge](self.program.examples[edge]).shape[1]
        top = profile_module(model.top, (features * self.num_edges,), "top")
        whole = ModelProfile(
            name=self.scenario.model.name,
            layers=(*bottom.layers, *top.layers),
            input_bytes=bottom.input_bytes,
        )
        state = model.bottoms[edge].state_dict().values()
        shape = CutShape(
            name=self.program.bottoms[edge],
            num_layers=len(bottom.layers),
            feature_elements_per_sample=features,
            front_state_bytes=float(sum(tensor.nbytes for tensor in state)),
        )
        return split_costs(
            whole,
            [shape],
            device,
            cloud,
            self.scenario.train.batch_size,
            gradient_bits=self.scenario.split.widths(self.scenario.strategy.name)[1],
            label_bytes_per_sample=8.0 if edge == 0 else 0.0,
        )

    @property
    def source(self) -> str:
        """The origin of the samples, and the accuracies of the majority class and of the best possible model."""
        data = self._data
        return (
            f"generated in the shape of MovieLens, seed {self.scenario.seed}; the majority's accuracy is "
            f"{data.majority_accuracy:.3f}, that of one who knows all probabilities {data.best_accuracy:.3f}"
        )

    @cached_property
    def _data(self) -> ClickData:
        return _clicks(self.scenario.seed)


class GeneratorWorkload(SplitWorkload):
    """A generator of images: its first layers are in the cloud; its last layers, which need the images, at the edge."""

    @cached_property
    def program(self) -> LayeredProgram:
        """The digit generator."""
        model = build_generator(self.scenario.seed, num_classes=self._samples.images.num_classes)
        load_pretrained(self.scenario, model)
        example = (self._samples.codes([0]).shape[1],)
        return self._program(model, example, functional.mse_loss, reverse=True)

    def samples(self, edge: int) -> DataSource:
        """Return the images."""
        return ImageTargets(self._samples)

    def cloud_samples(self, edge: int) -> DataSource:
        """Return the codes."""
        return CodeSamples(self._samples)

    def num_samples(self) -> list[int]:
        """Return the number of images; there is one edge."""
        return [len(self._samples)]

    def evaluate(self, model: nn.Module) -> ModelMetrics:
        """Return the mean squared error on the training images; the generator has no codes for other images."""
        rows = torch.arange(min(len(self._samples), _EVALUATION_BATCH))
        model.eval()
        with torch.inference_mode():
            return ModelMetrics(
                None,
                float(
                    functional.mse_loss(
                        model(self._samples.codes(rows)), self._samples.targets(rows)
                    )
                ),
            )

    @property
    def source(self) -> str:
        """The origin of the images, and the errors of trivial generators."""
        of_all, of_class = self._samples.mean_image_losses()
        return (
            f"{_selected_images(self.scenario).source}; the mean image has a mean squared error of "
            f"{of_all:.4f}, the mean image of each class {of_class:.4f}"
        )

    @cached_property
    def _samples(self) -> GeneratorSamples:
        return GeneratorSamples(_selected_images(self.scenario).train, seed=self.scenario.seed)


def split_workload(scenario: Scenario, num_edges: int) -> SplitWorkload:
    """Return the workload of a scenario; `ConfigError` if model, data and edges do not fit together."""
    model, data = scenario.model.name, scenario.data.name
    if (data == CLICKS) != (model == CLICK_MODEL):
        raise scenario.mistake("model", "name", f"it goes with {CLICKS!r}, and data is {data!r}")
    if data == CLICKS:
        split = scenario.split
        if split.classes or split.frozen:
            why = "does not support classes and frozen; leave them out"
            raise ConfigError(f"{scenario.name} [edgecloud]: {CLICKS!r} {why}")
        if scenario.model.pretrained:
            why = f"{CLICK_MODEL!r} begins with random weights; leave it out"
            raise scenario.mistake("model", "pretrained", why)
        _require_edges(scenario, num_edges, 2)
        return ClickWorkload(scenario, num_edges)
    if model == GENERATOR:
        _require_edges(scenario, num_edges, 1)
        return GeneratorWorkload(scenario, num_edges)
    return ImageWorkload(scenario, num_edges)


def _require_edges(scenario: Scenario, num_edges: int, needed: int) -> None:
    if num_edges != needed:
        why = f"{num_edges} SoCs take part; set [strategy] socs = {needed}"
        raise scenario.mistake("model", "name", why)


def _selected_images(scenario: Scenario) -> DataSet:
    """Return the scenario's images, restricted to the classes that it names."""
    data, classes = scenario_data(scenario), scenario.split.classes
    train, test = data.train, data.test
    if not isinstance(train, LabelledData) or not isinstance(test, LabelledData):
        why = f"{scenario.strategy.name!r} trains on images with labels; return LabelledData"
        raise scenario.mistake("data", "factory", why)
    if not classes:
        return DataSet(train, test, scenario.data.name, data.source)
    return DataSet(
        class_subset(train, classes),
        class_subset(test, classes),
        scenario.data.name,
        f"{data.source}, classes {', '.join(map(str, classes))}",
    )


@cache
def _clicks(seed: int) -> ClickData:
    return click_data(seed=seed)
