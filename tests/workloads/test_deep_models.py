"""Models for pipelines have the published numbers of parameters, and torch.fx can follow those for token ids."""

import pytest
import torch
from torch import nn

from socflower.workloads.models.deep_classifiers import efficientnet_b1, mobilenet_v2, resnet50
from socflower.workloads.models.inception import inception_v3
from socflower.workloads.models.language_models import Bert, Gpt, bert_small, gpt_small
from tests.one_line import refused


def num_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(("builder", "published", "for_100_classes"), [
    (resnet50, 25_557_032, 23_712_932), (mobilenet_v2, 3_504_872, 2_351_972), (efficientnet_b1, 7_794_184, 6_641_284),
    (inception_v3, 23_834_568, 21_990_468),
])  # fmt: skip
def test_classifiers_have_the_published_parameters_for_imagenet(
    builder, published, for_100_classes
) -> None:
    """Of torchvision's pages; 100 classes are those of Mini-ImageNet."""
    with torch.device("meta"):
        model = builder(in_channels=3, image_size=224, num_classes=1000)
        assert num_parameters(model) == published
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
        assert (
            num_parameters(builder(in_channels=3, image_size=224, num_classes=100))
            == for_100_classes
        )


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("builder", [resnet50, mobilenet_v2, efficientnet_b1, inception_v3])
def test_small_images_keep_pixels_for_the_last_convolutions(builder) -> None:
    with torch.device("meta"):
        features = torch.zeros(1, 3, 32, 32)
        for module in builder(in_channels=3, image_size=32, num_classes=10).children():
            if isinstance(module, nn.AdaptiveAvgPool2d):
                break
            features = module(features)
    assert features.shape[2] >= 2
    refused(lambda: builder(in_channels=3, image_size=4, num_classes=10), "4x4")


@pytest.mark.slow
def test_inception_takes_the_smallest_images_with_either_strides() -> None:
    with torch.device("meta"):
        for size, last in ((16, 1), (32, 2), (74, 5), (75, 1), (299, 8)):
            model = inception_v3(in_channels=3, image_size=size, num_classes=10)
            features = model[:-4](torch.zeros(2, 3, size, size))
            assert features.shape == (2, 2048, last, last)


def test_bert_small_and_gpt2_have_the_published_parameters() -> None:
    with torch.device("meta"):
        bert = Bert(
            num_blocks=4,
            width=512,
            num_heads=8,
            vocabulary=30_522,
            length=512,
            num_classes=2,
            dropout=0.1,
        )
        gpt = Gpt(
            num_blocks=12, width=768, num_heads=12, vocabulary=50_257, length=1024, dropout=0.1
        )
    # Turc et al.: 28.8 M.
    assert num_parameters(bert) - num_parameters(bert.classifier) == 28_763_648
    # Radford et al., corrected: 124 M.
    assert num_parameters(gpt) - num_parameters(gpt.head) == 124_439_808


def test_sizes_that_cannot_be_are_refused() -> None:
    refused(lambda: bert_small(length=513, num_classes=2, seed=1), "512", "length = 513")
    refused(lambda: gpt_small(length=8, width=200, seed=1), "width = 200", "num_heads = 3")


def test_language_models_give_classes_of_a_text_and_of_each_token() -> None:
    tokens = torch.arange(32).reshape(2, 16)
    bert = bert_small(length=16, num_classes=3, vocabulary=50, seed=1)
    assert bert(tokens).shape == (2, 3)
    assert gpt_small(length=16, width=64, num_blocks=2, seed=1)(tokens).shape == (2, 16, 256)


def test_gpt_is_causal() -> None:
    model = gpt_small(length=8, width=64, num_blocks=2, seed=1).eval()
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5:] += 7
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
