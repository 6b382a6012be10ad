"""Models for pipelines have the published numbers of parameters, and torch.fx can follow those for token ids."""

import pytest
import torch
from torch import fx, nn

from socflower.errors import ConfigError
from socflower.workloads.models.deep_classifiers import efficientnet_b1, mobilenet_v2, resnet50
from socflower.workloads.models.language_models import Bert, Gpt, bert_small, gpt_small


def num_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("builder", "published", "for_100_classes"), [
    (resnet50, 25_557_032, 23_712_932), (mobilenet_v2, 3_504_872, 2_351_972), (efficientnet_b1, 7_794_184, 6_641_284),
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


@pytest.mark.parametrize("builder", [resnet50, mobilenet_v2, efficientnet_b1])
def test_small_images_keep_pixels_for_the_last_convolutions(builder) -> None:
    with torch.device("meta"):
        features = torch.zeros(1, 3, 32, 32)
        for module in builder(in_channels=3, image_size=32, num_classes=10).children():
            if isinstance(module, nn.AdaptiveAvgPool2d):
                break
            features = module(features)
    assert features.shape[2] >= 2
    with pytest.raises(ConfigError, match=r"takes images of \d+x\d+ pixels or more, got 4x4"):
        builder(in_channels=3, image_size=4, num_classes=10)


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
    assert (
        num_parameters(bert) - num_parameters(bert.classifier) == 28_763_648
    )  # Turc et al.: 28.8 M
    assert (
        num_parameters(gpt) - num_parameters(gpt.head) == 124_439_808
    )  # Radford et al., corrected: 124 M


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_language_models_are_traceable_and_drawn_from_their_seed(kind: str) -> None:
    def built(seed: int) -> nn.Module:
        if kind == "bert":
            return bert_small(length=16, num_classes=3, vocabulary=50, seed=seed)
        return gpt_small(length=16, width=64, num_blocks=2, seed=seed)

    before = torch.get_rng_state()
    model, tokens = built(1).eval(), torch.arange(32).reshape(2, 16)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        logits = model(tokens)
        assert torch.equal(fx.symbolic_trace(model)(tokens), logits)
    assert (
        logits.shape == ((2, 3) if kind == "bert" else (2, 16, 256))
        and torch.isfinite(logits).all()
    )
    state, again, other = model.state_dict(), built(1).state_dict(), built(2).state_dict()
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert any(not torch.equal(state[key], other[key]) for key in state)


def test_gpt_is_causal() -> None:
    model = gpt_small(length=8, width=64, num_blocks=2, seed=1).eval()
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5:] += 7
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="up to 512 tokens, got length = 513"):
        bert_small(length=513, num_classes=2, seed=1)
    with pytest.raises(ConfigError, match="width = 200 must be a multiple of num_heads = 3"):
        gpt_small(length=8, width=200, seed=1)
