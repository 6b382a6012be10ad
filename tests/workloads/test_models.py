from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

from socflower.workloads.click_through import click_data
from socflower.workloads.models.built_in import model_names
from socflower.workloads.models.classifiers import build_model, mobilenet_v1
from socflower.workloads.models.click_model import build_click_model
from socflower.workloads.models.generator import (
    CHAIR_CODE_SIZE,
    build_chair_generator,
    build_generator,
)
from socflower.workloads.models.language_models import bert_small, bi_lstm, gpt_small
from socflower.workloads.sample_tensors import generator_codes
from tests.one_line import refused

FORMATS = [(1, 28), (3, 32)]
SIZES = {"in_channels": 3, "image_size": 32, "num_classes": 10}


def images_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def build(name: str, in_channels: int = 3, image_size: int = 32, seed: int = 1) -> nn.Module:
    sizes = {"in_channels": in_channels, "image_size": image_size, "num_classes": 10}
    return build_model(name, **sizes, seed=seed)


PUBLISHED = {
    # channels, image size, parameters and tensors
    "lenet5": (1, 28, 61_706, 10),
    "vgg11": (3, 32, 9_225_610, 18),
    "vgg16": (3, 32, 14_719_818, 28),
    "vgg19": (3, 32, 38_947_914, 38),
    "resnet18": (3, 32, 11_173_962, 62),
    "resnet34": (3, 32, 21_282_122, 110),
    "vgg-tiny": (3, 32, 63_258, 14),
    "vgg-mini": (1, 28, 69_034, 8),
    "vgg-small": (3, 32, 307_498, 14),
    "resnet8": (3, 32, 78_042, 29),
    "mobilenet-v1": (3, 32, 3_217_226, 83),
    "mobilenet-v2": (3, 32, 2_236_682, 158),
    # 5,483,032 with a thousand classes.
    "mobilenet-v3": (3, 32, 4_214_842, 174),
    "efficientnet-b1": (3, 32, 6_525_994, 301),
    "resnet50": (3, 32, 23_520_842, 161),
    "inception-v3": (3, 32, 21_806_058, 284),
}
LEAVES = {
    *(nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Sigmoid),
    *(nn.Hardswish, nn.Hardsigmoid),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Dropout),
}


@pytest.mark.slow
def test_sizes_are_the_published_ones() -> None:
    assert set(PUBLISHED) == set(model_names())
    for name, (in_channels, image_size, num_parameters, num_tensors) in PUBLISHED.items():
        weights = list(build(name, in_channels, image_size).parameters())
        assert (sum(weight.numel() for weight in weights), len(weights)) == (
            num_parameters,
            num_tensors,
        )
        assert all(weight.requires_grad and weight.device.type == "cpu" for weight in weights)


BUILDERS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], Any]]] = {
    # how to build a model from its seed, and its inputs
    **{
        name: (partial(build_model, name, **SIZES), partial(images_of, 2, 3, 32, 32))
        for name in model_names()
    },
    "click": (
        lambda seed: build_click_model(seed=seed),
        lambda: click_data(seed=3, num_train=9, num_test=9).train.batch(range(2))[0],
    ),
    "generator": (
        lambda seed: build_generator(seed=seed),
        lambda: generator_codes(range(2), range(2), num_classes=10),
    ),
    "chair": (build_chair_generator, partial(images_of, 2, CHAIR_CODE_SIZE)),
    "bi-lstm": (
        lambda seed: bi_lstm(vocabulary=50, seed=seed),
        lambda: torch.arange(32).reshape(2, 16),
    ),
    "bert": (
        lambda seed: bert_small(length=16, num_classes=3, vocabulary=50, seed=seed),
        lambda: torch.arange(32).reshape(2, 16),
    ),
    "gpt": (
        lambda seed: gpt_small(length=16, width=64, num_blocks=2, seed=seed),
        lambda: torch.arange(32).reshape(2, 16),
    ),
}


# Others of their families are built by the same functions.
DEEP = ("vgg16", "vgg19", "resnet34", "resnet50")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in DEEP else ()) for name in BUILDERS],
)
def test_a_model_follows_from_its_seed_and_its_trace_computes_the_same(name: str) -> None:
    build_from, inputs_of = BUILDERS[name]
    before = torch.get_rng_state()
    model, inputs = build_from(seed=3).eval(), inputs_of()
    assert torch.equal(torch.get_rng_state(), before)
    # The global generator goes on, and matters to no model.
    torch.rand(1)
    first, again, other = (
        one.state_dict() for one in (model, build_from(seed=3), build_from(seed=4))
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(torch.isfinite(value).all() for value in first.values())

    traced = fx.symbolic_trace(model)
    with torch.no_grad():
        assert torch.equal(traced(inputs), model(inputs))
    for module in model.modules():
        # In place, an activation would overwrite the tensor that another stage sent, which autograd refuses.
        assert not getattr(module, "inplace", False)
    leaves = {type(module) for module in traced.modules() if not list(module.children())}
    assert name not in PUBLISHED or leaves <= LEAVES


@pytest.mark.few_cells(8)
@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize(("in_channels", "image_size"), FORMATS)
def test_every_model_takes_grey_and_colour_of_both_sizes(
    name: str, in_channels: int, image_size: int
) -> None:
    logits = build(name, in_channels, image_size)(images_of(2, in_channels, image_size, image_size))
    assert logits.shape == (2, 10)
    assert torch.isfinite(logits).all()


def test_features_of_vgg_tiny_shrink_from_one_activation_to_the_next() -> None:
    features, sizes = torch.zeros(1, 3, 32, 32), []
    for module in build("vgg-tiny").eval().children():
        features = module(features)
        if isinstance(module, nn.ReLU):
            sizes.append(features.numel())
    assert sizes == [16_384, 8_192, 4_096, 1_024]


def test_batch_norm_starts_neutral() -> None:
    norms = [module for module in build("resnet18").modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 20
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        assert norm.num_batches_tracked is not None and int(norm.num_batches_tracked) == 0
        assert (norm.weight == 1).all() and (norm.bias == 0).all()
        assert (norm.running_mean == 0).all() and (norm.running_var == 1).all()


def test_vgg11_keeps_the_scale_of_its_activations() -> None:
    """Without BatchNorm the initial weights alone decide whether gradients reach the first layer."""
    model = build("vgg11")
    with torch.no_grad():
        features = images_of(32, 3, 32, 32)
        for module in list(model.children())[:-1]:
            features = module(features)
            if isinstance(module, nn.ReLU):
                assert 0.1 < features.square().mean() < 20.0


def test_28_pixels_are_padded_to_32() -> None:
    images = images_of(2, 1, 28, 28)
    padded = nn.functional.pad(images, (2, 2, 2, 2))
    for name in ("lenet5", "vgg11"):
        with torch.no_grad():
            small, large = build(name, 1, 28)(images), build(name, 1, 32)(padded)
        torch.testing.assert_close(small, large)


def test_width_multiplies_mobilenet_channels() -> None:
    half = mobilenet_v1(**SIZES, width=0.5)
    assert [m.out_channels for m in half.modules() if isinstance(m, nn.Conv2d)][:3] == [16, 16, 32]
    assert mobilenet_v1(**SIZES, width=0.01)(images_of(2, 3, 32, 32)).shape == (2, 10)
    refused(lambda: mobilenet_v1(**SIZES, width=0.0), "width = 0.0")


@pytest.mark.parametrize(
    ("name", "image_size", "named"),
    [
        ("vgg111", 32, ("'vgg111'", "'vgg11'")),
        ("transformer", 32, model_names()),
        ("vgg11", 64, ("28x28", "32x32")),
        ("lenet5", 30, ("28x28", "32x32")),
        ("vgg16", 64, ("28x28", "32x32")),
        ("resnet18", 4, ("8x8",)),
        ("resnet34", 4, ("8x8",)),
        ("mobilenet-v1", 8, ("16x16",)),
        ("resnet18", 0, ("image_size = 0",)),
    ],
)
def test_unknown_names_and_impossible_sizes_are_refused(
    name: str, image_size: int, named: tuple[str, ...]
) -> None:
    refused(lambda: build(name, image_size=image_size), *named)
