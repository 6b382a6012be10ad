import pytest
import torch
from torch import fx, nn

from socflower.errors import ConfigError
from socflower.workloads import build_model, model_names
from socflower.workloads.models.classifiers import mobilenet_v1

FORMATS = [(1, 28), (1, 32), (3, 28), (3, 32)]


def images_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def build(name: str, in_channels: int = 3, image_size: int = 32, seed: int = 1) -> nn.Module:
    return build_model(
        name, in_channels=in_channels, image_size=image_size, num_classes=10, seed=seed
    )


@pytest.mark.parametrize(
    ("name", "in_channels", "image_size", "num_parameters", "num_tensors"),
    [
        ("lenet5", 1, 28, 61_706, 10),
        ("vgg11", 3, 32, 9_225_610, 18),
        ("resnet18", 3, 32, 11_173_962, 62),
        ("vgg-tiny", 3, 32, 63_258, 14),
        ("vgg-mini", 1, 28, 69_034, 8),
        ("vgg-small", 3, 32, 307_498, 14),
        ("resnet8", 3, 32, 78_042, 29),
        ("mobilenet-v1", 3, 32, 3_217_226, 83),
        ("mobilenet-v2", 3, 32, 2_236_682, 158),
        ("efficientnet-b1", 3, 32, 6_525_994, 301),
        ("resnet50", 3, 32, 23_520_842, 161),
    ],
)
def test_sizes_are_the_published_ones(
    name: str, in_channels: int, image_size: int, num_parameters: int, num_tensors: int
) -> None:
    weights = list(build(name, in_channels, image_size).parameters())
    assert sum(weight.numel() for weight in weights) == num_parameters
    assert len(weights) == num_tensors
    assert all(weight.requires_grad and weight.device.type == "cpu" for weight in weights)


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize(("in_channels", "image_size"), FORMATS)
def test_every_model_takes_grey_and_colour_of_both_sizes(
    name: str, in_channels: int, image_size: int
) -> None:
    logits = build(name, in_channels, image_size)(images_of(2, in_channels, image_size, image_size))
    assert logits.shape == (2, 10)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", model_names())
def test_models_are_traceable_and_the_trace_computes_the_same(name: str) -> None:
    model = build(name).eval()
    traced = fx.symbolic_trace(model)
    inputs = images_of(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(traced(inputs), model(inputs))
    leaves = {type(module) for module in traced.modules() if not list(module.children())}
    assert leaves <= {
        nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Sigmoid, nn.MaxPool2d,
        nn.AdaptiveAvgPool2d, nn.Flatten, nn.Dropout,
    }  # fmt: skip


@pytest.mark.parametrize("name", model_names())
def test_no_module_overwrites_its_input(name: str) -> None:
    """An in-place ReLU would overwrite the tensor that another stage sent, which autograd refuses."""
    for module in build(name).modules():
        assert not getattr(module, "inplace", False)


@pytest.mark.parametrize("name", model_names())
def test_equal_seeds_give_equal_weights(name: str) -> None:
    first, again, other = (build(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(torch.isfinite(value).all() for value in first.values())


@pytest.mark.parametrize("name", model_names())
def test_building_neither_reads_nor_moves_the_global_random_state(name: str) -> None:
    before = torch.get_rng_state()
    first = build(name).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)  # the global generator goes on
    assert all(torch.equal(first[key], value) for key, value in build(name).state_dict().items())


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
    half = mobilenet_v1(in_channels=3, image_size=32, num_classes=10, width=0.5)
    assert [m.out_channels for m in half.modules() if isinstance(m, nn.Conv2d)][:3] == [16, 16, 32]
    assert mobilenet_v1(in_channels=3, image_size=32, num_classes=10, width=0.01)(
        images_of(2, 3, 32, 32)
    ).shape
    with pytest.raises(ConfigError, match=r"width = 0.0 must be above 0"):
        mobilenet_v1(in_channels=3, image_size=32, num_classes=10, width=0.0)


def test_unknown_name_lists_the_known_and_suggests() -> None:
    with pytest.raises(
        ConfigError, match=r"'vgg12', known are lenet5, .*; did you mean 'vgg11'\?"
    ) as caught:
        build("vgg12")
    assert "\n" not in str(caught.value)
    known = (
        "lenet5, vgg-tiny, vgg-mini, vgg-small, vgg11, resnet8, resnet18, mobilenet-v1, mobilenet-v2, "
        "efficientnet-b1, resnet50"
    )
    with pytest.raises(ConfigError, match=rf"known are {known}$"):
        build("transformer")


@pytest.mark.parametrize(
    ("name", "image_size", "reason"),
    [("vgg11", 64, "28x28 or 32x32"), ("lenet5", 30, "28x28 or 32x32"), ("resnet18", 4, "8x8"),
     ("mobilenet-v1", 8, "16x16"), ("resnet18", 0, "image_size = -?[0-9]+ must be 1 or more")],
)  # fmt: skip
def test_impossible_sizes_are_refused(name: str, image_size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(name, image_size=image_size)
