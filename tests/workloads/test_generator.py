"""The generator of digits, and that it learns to make them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower.workloads.models.generator import build_generator
from socflower.workloads.sample_tensors import GeneratorSamples, generator_codes
from socflower.workloads.sources import load_data
from tests.one_line import refused


def test_images_are_of_the_digits_size_and_range() -> None:
    codes = generator_codes(range(5), range(5), num_classes=10)
    with torch.no_grad():
        images = build_generator(seed=1)(codes)
    assert images.shape == (5, 1, 28, 28)
    assert float(images.min()) >= 0 and float(images.max()) <= 1
    of_three = build_generator(seed=1, num_classes=3)
    assert of_three(generator_codes([0], [2], num_classes=3)).shape == (1, 1, 28, 28)
    refused(lambda: build_generator(0, num_classes=0), "num_classes = 0")


def test_features_grow_along_the_depth() -> None:
    """The reverse of a classifier: the nearer a cut is to the codes, the less it sends."""
    features, sizes = generator_codes([0], [0], num_classes=10), []
    for module in build_generator(seed=1):
        features = module(features)
        if isinstance(module, nn.ReLU):
            sizes.append(features.numel())
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes) == 4


@pytest.mark.slow
def test_the_generator_learns_to_tell_classes_apart(shared_cache: Path) -> None:
    """A few digits suffice to be better than the mean image, which needs the class."""
    train = load_data("digits").train
    samples = GeneratorSamples(train.select(range(128)), seed=0)
    any_code, own_class = samples.mean_image_losses()
    model = build_generator(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    order = torch.Generator().manual_seed(0)
    for _ in range(15):
        for rows in torch.randperm(len(samples), generator=order).split(32):
            optimizer.zero_grad()
            functional.mse_loss(model(samples.codes(rows)), samples.targets(rows)).backward()
            optimizer.step()
    with torch.no_grad():
        loss = float(
            functional.mse_loss(model(samples.codes(range(128))), samples.targets(range(128)))
        )
    assert own_class < any_code
    assert loss < (any_code + own_class) / 2
