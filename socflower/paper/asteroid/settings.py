"""The settings of Asteroid's evaluation: four models, environments A to D, two bandwidths (§5.1, Tables 5 and 6)."""

from functools import cache

import torch
from torch import nn

from socflower.cluster import Board, Cluster, device
from socflower.model_graph.graph import Example
from socflower.pipeline.problem import PipelineModel, PipelineProblem
from socflower.pipeline.profiler.estimates import estimated_problem
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.language_models import bert_small

NANO, TX2, NX = "jetson-nano", "jetson-tx2", "jetson-nx"
ENVIRONMENTS = {"A": (NANO,) * 5, "B": (NX,) * 3 + (TX2,) * 2, "C": (NX, TX2, TX2, NANO, NANO, NANO),
                "D": (TX2, NANO, NANO, NANO)}  # fmt: skip

CNNS = ("efficientnet-b1", "mobilenet-v2", "resnet50")
MODELS = (*CNNS, "bert-small")
MINI_BATCH = {
    "efficientnet-b1": 2048,
    "mobilenet-v2": 2048,
    "resnet50": 256,
    "bert-small": 2048,
}
"""§5.2."""

MICRO_BATCHES = {"efficientnet-b1": (64, 128, 256), "mobilenet-v2": (64, 128, 256), "resnet50": (8, 16, 32),
                 "bert-small": (64, 128, 256)}  # fmt: skip
"""Samples of a micro-batch, among which the planner chooses; the paper does not state them."""

EPOCH_SAMPLES = {
    "efficientnet-b1": 50_000,
    "mobilenet-v2": 50_000,
    "resnet50": 48_000,
}
"""Training images of CIFAR-10, and 80 % of the 60,000 of Mini-ImageNet."""

_IMAGES = {
    "efficientnet-b1": (32, 10),
    "mobilenet-v2": (32, 10),
    "resnet50": (224, 100),
}
"""Pixels per side and classes: CIFAR-10, and Mini-ImageNet resized."""

_TOKENS = 32
"""We read the input of BERT-small, "32 x 512", as 32 tokens of 512 features: with 512 tokens a step of one board would
take so long that synchronisation could not have the part that the table states."""


def module_of(name: str) -> tuple[nn.Module, Example]:
    """Return a model of the paper and an example of its input."""
    if name in _IMAGES:
        size, num_classes = _IMAGES[name]
        model: nn.Module = build_model(
            name, in_channels=3, image_size=size, num_classes=num_classes, seed=0
        )
        return model, (3, size, size)
    return bert_small(length=_TOKENS, num_classes=2, seed=0), torch.zeros(
        1, _TOKENS, dtype=torch.int64
    )


@cache
def model_of(name: str, granularity: Granularity = Granularity.LAYERS) -> PipelineModel:
    """Return a model of the paper by layers, with the cuts of `granularity`."""
    module, example = module_of(name)
    return read_model(module, example, name, granularity=granularity).model


def cluster_of(devices: tuple[str, ...], mbps: float, name: str = "boards") -> Cluster:
    """Return boards on one switch, each with a link of `mbps` in either direction."""
    rate = mbps * 1e6 / 8.0
    return Cluster(
        name=name,
        hub_bytes_per_s=rate,
        message_s=0.0,
        boards=tuple(
            Board(
                num_slots=1,
                device=device(kind),
                soc_bytes_per_s=rate,
                uplink_bytes_per_s=rate,
            )
            for kind in devices
        ),
    )


def problem_of(
    name: str,
    environment: str | tuple[str, ...],
    mbps: float,
    *,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
    granularity: Granularity = Granularity.LAYERS,
) -> PipelineProblem:
    """Return the problem of a model on an environment, by default with the paper's mini-batch."""
    devices = ENVIRONMENTS[environment] if isinstance(environment, str) else environment
    size = micro_batch_size or MICRO_BATCHES[name][1]
    return estimated_problem(
        model_of(name, granularity),
        cluster_of(devices, mbps),
        micro_batch_size=size,
        num_micro_batches=num_micro_batches or MINI_BATCH[name] // size,
    )
