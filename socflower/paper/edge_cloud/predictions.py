"""Batches of the edge-cloud paper's models on its devices and links, by the cost model and in virtual time.

Cuts are those of its Table 3, between blocks. Ours is what the paper describes: K = 5, features in 8 bits, gradients in
32 (§4.4), and the edge alone where that is faster (§6.3).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from socflower.cluster import ModelProfile, device, parse_cluster
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.links.profile_generator import generate_bandwidth_profile
from socflower.edgecloud.plan.baselines import plan_baseline
from socflower.edgecloud.plan.cuts import SplitCosts
from socflower.edgecloud.plan.decision import WindowSchedule, adaptive_party
from socflower.edgecloud.plan.device_costs import CutShape, split_costs
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.split_pipeline import Timeline, simulate_split
from socflower.model_graph.layer_profile import profile_module
from socflower.sim import EventClock
from socflower.workloads.click_through import GENRE_SLOTS, HISTORY, USER_COLUMNS
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.click_model import build_click_model
from socflower.workloads.models.deep_classifiers import Bottleneck, InvertedResidual
from socflower.workloads.models.generator import CHAIR_CODE_SIZE, build_chair_generator
from socflower.workloads.models.language_models import bi_lstm

BATCH, WINDOW, NUM_BATCHES = 32, 5, 100
TX2, PI, CLOUD = "jetson-tx2", "raspberry-pi-4b", "gpu-rtx-2080-ti"
OURS, JOINT_DNN, EDGE_ONLY = "ours", "joint-dnn", "edge-only"
LINKS = ("4g-tram", "wifi", "one-hop", "5g")
"""The four kinds of the paper's networks; of its 4G traces the tram's."""

DIN_COLUMNS = (HISTORY + 1, USER_COLUMNS + (HISTORY + 1) * GENRE_SLOTS)
"""Of each party's features: movies, and attributes of users and movies."""

_WORDS = 256
_DIN_FEATURES = 1024
_BLOCKS = (
    *(nn.Conv2d, nn.Linear, nn.Upsample, nn.AdaptiveAvgPool2d),
    *(Bottleneck, InvertedResidual),
)


class PaperModel(NamedTuple):
    """A model of Table 1, and the shape of its inputs."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    # By which the catalogue may have a rate.
    name: str
    num_train: int
    epochs: int
    is_reverse: bool = False
    # Cuts between blocks that Table 3 counts as one.
    merged: tuple[int, ...] = ()


def _images(
    name: str, size: int, classes: int, num_train: int, epochs: int, *merged: int
) -> PaperModel:
    build = partial(build_model, name, in_channels=3, image_size=size, num_classes=classes, seed=1)
    return PaperModel(build, (3, size, size), name, num_train, epochs, merged=merged)


WORKLOADS = {
    "ResNet50": _images("resnet50", 32, 10, 50_000, 160),
    "ResNet50 TinyImg": _images("resnet50", 224, 20, 10_000, 5),
    # The last convolution, the pooling and the first Linear are one.
    "Mobilenetv3": _images("mobilenet-v3", 32, 10, 50_000, 200, 16, 17),
    "VGG19": _images("vgg19", 32, 10, 50_000, 100),
    "Chair": PaperModel(
        partial(build_chair_generator, 1), (CHAIR_CODE_SIZE,), "chair", 45_000, 100, True
    ),
    "BI-LSTM": PaperModel(partial(bi_lstm, seed=1), (_WORDS,), "bi-lstm", 50_000, 10),
}
"""By the names of Table 3; samples and epochs are those of Tables 1 and 2."""


@cache
def profile_of(label: str) -> tuple[ModelProfile, tuple[CutShape, ...]]:
    """Return a model's layers, and the cuts of Table 3."""
    workload = WORKLOADS[label]
    module = workload.build().eval().to("meta")
    if label == "BI-LSTM":
        return _lstm_profile(module, workload.name), _LSTM_CUTS
    profile, cuts = profile_module(module, workload.shape, workload.name), []
    features = torch.empty(1, *workload.shape, device="meta")
    before: nn.Module | None = None
    for index, block in enumerate(module.children()):
        # A convolution belongs to the up-sampling in front of it.
        if before is not None and isinstance(block, _BLOCKS) and type(before) is not nn.Upsample:
            num_layers = sum(int(layer.name.split(".")[0]) < index for layer in profile.layers)
            elements = features.numel()
            cuts.append(
                CutShape(
                    name=str(index - 1),
                    num_layers=num_layers,
                    feature_elements_per_sample=elements,
                )
            )
        features, before = block(features), block
    return profile, tuple(cut for at, cut in enumerate(cuts) if at not in workload.merged)


def _lstm_profile(module: nn.Module, name: str) -> ModelProfile:
    """Return the profile for `_WORDS` words, from that of four: a pass without values takes 0.1 s for each."""
    num_words = 4
    short = profile_module(module, torch.zeros(1, num_words, dtype=torch.int64), name)
    times = _WORDS / num_words
    layers = [
        replace(
            layer,
            forward_flops=layer.forward_flops * times,
            output_bytes=layer.output_bytes * times,
        )
        if layer.kind in ("Embedding", "LSTM")
        else layer
        for layer in short.layers
    ]
    return replace(short, layers=tuple(layers), input_bytes=short.input_bytes * times)


# Cuts behind the words, behind each LSTM and behind the ReLU of the hidden layer.
_LSTM_CUTS = tuple(
    CutShape(name=name, num_layers=layers, feature_elements_per_sample=elements)
    for name, layers, elements in (
        ("words", 1, 100 * _WORDS),
        ("first", 2, 200 * _WORDS),
        ("second", 3, 100 * _WORDS),
        ("relu", 5, 128),
    )
)


@cache
def costs_of(label: str, edge: str, gradient_bits: int = 32) -> SplitCosts:
    """Return what a batch costs at every cut on an edge, with an RTX 2080 Ti in the cloud."""
    profile, cuts = profile_of(label)
    reverse = WORKLOADS[label].is_reverse
    return split_costs(
        profile,
        cuts,
        device(edge),
        device(CLOUD),
        BATCH,
        reverse=reverse,
        gradient_bits=gradient_bits,
    )


@cache
def link_of(kind: str) -> BandwidthProfile:
    """Return ten minutes of a link with the published statistics of its kind."""
    return generate_bandwidth_profile(kind, seed=1, duration_s=600.0)


def party_of(label: str, edge: str, link: BandwidthProfile, method: str) -> Party:
    """Return an edge as a method deploys it for a link: ours moves its cut, the others decide by the link's mean."""
    costs, reverse = costs_of(label, edge), WORKLOADS[label].is_reverse
    if method == OURS:
        return adaptive_party(
            costs,
            link,
            num_batches=NUM_BATCHES,
            window=WindowSchedule(steps=((0.0, WINDOW),)),
            allow_edge_only=True,
            reverse=reverse,
        )
    plan = plan_baseline(method, costs, link.mean_rates(), num_batches=NUM_BATCHES, reverse=reverse)
    return Party(costs=costs, bandwidth_profile=link, split_plan=plan)


class PredictedBatches(NamedTuple):
    """A hundred batches of one edge."""

    duration_s: float
    energy_j: float
    # The largest that it had, with the inputs of the batches in flight.
    memory_bytes: float
    is_split: bool


@cache
def run_of(label: str, edge: str, kind: str, method: str) -> PredictedBatches | None:
    """Return a hundred batches of a method over a kind of link; None if the edge has too little memory to train alone.

    Raises `InfeasiblePlan` if no cut of a split method fits.
    """
    costs = costs_of(label, edge)
    budget_bytes = costs.edge_budget_bytes or 0.0
    if method == EDGE_ONLY and costs.edge_only_memory_bytes > budget_bytes:
        return None
    party = party_of(label, edge, link_of(kind), method)
    timeline = simulate([party], edge, reverse=WORKLOADS[label].is_reverse)
    (trained,) = timeline.parties
    plans = [party.split_plan, *(move.new for move in trained.moves)]
    history_bytes = WINDOW * BATCH * profile_of(label)[0].input_bytes if method == OURS else 0.0
    memory_bytes = max(
        costs.needed_bytes(plan) + (history_bytes if plan.cut is not None else 0.0)
        for plan in plans
    )
    return PredictedBatches(
        timeline.duration_s,
        timeline.usage.total_energy_j,
        memory_bytes,
        any(plan.cut is not None for plan in plans),
    )


def simulate(parties: list[Party], *edges: str, reverse: bool = False) -> Timeline:
    """Return a hundred batches of edges on devices, in virtual time; several feed one half in the cloud."""
    boards = [{"socs": 1, "device": edge} for edge in edges]
    cluster = parse_cluster({}, boards)
    return simulate_split(
        parties,
        NUM_BATCHES,
        clock=EventClock(cluster),
        cluster=cluster,
        cloud="joined" if len(parties) > 1 else "own",
        reverse=reverse,
    )


@cache
def din_costs(party: int, edge: str) -> SplitCosts:
    """Return a batch of a deep interest network's party: its bottom model at the edge, the top in the cloud."""
    model = build_click_model(seed=1, feature_size=_DIN_FEATURES)
    columns = DIN_COLUMNS[party]
    ids = torch.zeros(1, columns, dtype=torch.int64)
    bottom = profile_module(model.bottoms[party], ids, f"bottoms.{party}")
    top = profile_module(model.top, (2 * _DIN_FEATURES,), "top")
    whole = replace(bottom, name="din", layers=(*bottom.layers, *top.layers), gradients=())
    shape = CutShape(
        name=bottom.name,
        num_layers=len(bottom.layers),
        feature_elements_per_sample=_DIN_FEATURES,
    )
    return split_costs(whole, [shape], device(edge), device(CLOUD), BATCH)
