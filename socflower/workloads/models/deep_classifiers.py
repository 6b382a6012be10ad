"""Image classifiers deep enough to be cut into a pipeline: ResNet-50, MobileNetV2 and V3, EfficientNet-B1.

Layers and parameter counts are those of the papers and of torchvision. For images below 64 pixels the strides are those
usual for CIFAR: with the strides for 224x224, the last third of a network would see a single pixel of a 32x32 input.
This changes no parameters except the stem of ResNet-50, whose kernel is then 3x3, as in `resnet18`.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from socflower.workloads.models.layers import convolution_norm, require_size

_SMALL_IMAGE = 64
"""Pixels per side below which a network has the strides for small images."""


class Bottleneck(nn.Module):
    """Return relu(residual(x) + shortcut(x)); the residual reduces the channels, convolves 3x3, and expands them."""

    EXPANSION = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.EXPANSION
        self.residual = nn.Sequential(
            *convolution_norm(in_channels, width, 1),
            nn.ReLU(),
            *convolution_norm(width, width, 3, stride),
            nn.ReLU(),
            *convolution_norm(width, out_channels, 1),
        )
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Sequential(
            *([] if same_shape else convolution_norm(in_channels, out_channels, 1, stride))
        )
        self.relu = nn.ReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, 4 width, h / stride, w / stride)."""
        output: torch.Tensor = self.relu(self.residual(inputs) + self.shortcut(inputs))
        return output


class InvertedResidual(nn.Module):
    """An inverted residual (Sandler et al. 2018): expand, depthwise, squeeze-and-excitation, project; add the input."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        expansion: float,
        kernel_size: int,
        stride: int,
        activation: type[nn.Module],
        excitation: Callable[[int, int], nn.Module] | None,
    ) -> None:
        super().__init__()
        width = round(in_channels * expansion)
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*convolution_norm(in_channels, width, 1), activation()]
        layers += [*convolution_norm(width, width, kernel_size, stride, groups=width), activation()]
        if excitation is not None:
            layers.append(excitation(in_channels, width))
        self.residual = nn.Sequential(*layers, *convolution_norm(width, out_channels, 1))
        self.adds_input = stride == 1 and in_channels == out_channels

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, out_channels, h / stride, w / stride)."""
        output: torch.Tensor = self.residual(inputs)
        return output + inputs if self.adds_input else output


class SqueezeExcitation(nn.Module):
    """Scale each channel by a gate in 0..1, computed from the means of all channels (Hu et al. 2018)."""

    def __init__(
        self,
        channels: int,
        squeezed: int,
        activation: type[nn.Module],
        gate: type[nn.Module] = nn.Sigmoid,
    ) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            activation(),
            nn.Conv2d(squeezed, channels, 1),
            gate(),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, channels, h, w) to the same shape."""
        output: torch.Tensor = inputs * self.gate(inputs)
        return output


_RESNET50_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, number of blocks and first stride of each stage."""


def resnet50(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return ResNet-50 (He et al. 2016) for (n, in_channels, size, size) inputs; 25.56 M parameters for ImageNet.

    The stride of a stage is that of its 3x3 convolution, as in torchvision. Raises ConfigError for images smaller than
    8 pixels.
    """
    require_size("resnet50", image_size, 8)
    if image_size < _SMALL_IMAGE:
        layers = [*convolution_norm(in_channels, 64, 3), nn.ReLU()]
    else:
        layers = [
            *convolution_norm(in_channels, 64, 7, 2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
    channels = 64
    for width, num_blocks, stride in _RESNET50_STAGES:
        for block in range(num_blocks):
            layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = width * Bottleneck.EXPANSION
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )


_MOBILENET_V2_STAGES = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 3, 32, 3, 2), (6, 3, 64, 4, 2), (6, 3, 96, 3, 1), (6, 3, 160, 3, 2),
    (6, 3, 320, 1, 1),
)  # fmt: skip
"""Expansion, kernel size, output channels, number of blocks and first stride of each stage."""


def mobilenet_v2(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return MobileNetV2 (Sandler et al. 2018) for (n, in_channels, size, size) inputs; 3.50 M parameters for ImageNet.

    For small images the stem and the first stage with stride 2 have stride 1. Raises ConfigError for images smaller
    than 16 pixels.
    """
    require_size("mobilenet-v2", image_size, 16)
    is_small = image_size < _SMALL_IMAGE
    layers = [*convolution_norm(in_channels, 32, 3, 1 if is_small else 2), nn.ReLU6()]
    for number, stage in enumerate(_MOBILENET_V2_STAGES):
        stride = 1 if is_small and number == 1 else stage[-1]
        layers += _inverted_residuals(layers, stage, stride, nn.ReLU6)
    return _classifier(layers, nn.ReLU6(), num_classes)


_MOBILENET_V3_STAGES = (
    (1, 3, 16, 1, 1), (4, 3, 24, 1, 2), (3, 3, 24, 1, 1), (3, 5, 40, 3, 2), (6, 3, 80, 1, 2), (2.5, 3, 80, 1, 1),
    (2.3, 3, 80, 2, 1), (6, 3, 112, 2, 1), (6, 5, 160, 3, 2),
)  # fmt: skip
"""As above for MobileNetV3, whose blocks have excitation from 40 channels on, but not those of 80, and hard swish from
80 channels on."""


def mobilenet_v3(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return MobileNetV3-large (Howard et al. 2019) for (n, in_channels, size, size) inputs; 5.48 M for ImageNet.

    Strides for small images are as in `mobilenet_v2`. Raises ConfigError for images smaller than 16 pixels.
    """
    require_size("mobilenet-v3", image_size, 16)
    is_small = image_size < _SMALL_IMAGE
    layers = [*convolution_norm(in_channels, 16, 3, 1 if is_small else 2), nn.Hardswish()]
    for number, stage in enumerate(_MOBILENET_V3_STAGES):
        channels = stage[2]
        layers += _inverted_residuals(
            layers,
            stage,
            1 if is_small and number == 1 else stage[-1],
            nn.Hardswish if channels >= 80 else nn.ReLU,
            excitation=_hard_excitation if channels >= 40 and channels != 80 else None,
        )
    return nn.Sequential(
        *layers,
        *convolution_norm(160, 960, 1),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(960, 1280),
        nn.Hardswish(),
        nn.Dropout(0.2),
        nn.Linear(1280, num_classes),
    )


def _hard_excitation(_: int, width: int) -> nn.Module:
    # A quarter of the channels, rounded to a multiple of 8 and by at most a tenth down, as torchvision has it.
    squeezed = max(8, int(width // 4 + 4) // 8 * 8)
    squeezed += 8 if squeezed < 0.9 * (width // 4) else 0
    return SqueezeExcitation(width, squeezed, nn.ReLU, nn.Hardsigmoid)


_EFFICIENTNET_STAGES = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1), (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)  # fmt: skip
"""As above for EfficientNet-B0, whose depth is 1."""

_B1_DEPTH = 1.1


def efficientnet_b1(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return EfficientNet-B1 (Tan and Le 2019) for (n, in_channels, size, size) inputs; 7.79 M parameters for ImageNet.

    Width 1.0, depth 1.1, without stochastic depth, which would drop blocks at random. For small images the stem has
    stride 1. Raises ConfigError for images smaller than 16 pixels.
    """
    require_size("efficientnet-b1", image_size, 16)
    stem_stride = 1 if image_size < _SMALL_IMAGE else 2
    layers = [*convolution_norm(in_channels, 32, 3, stem_stride), nn.SiLU()]
    for stage in _EFFICIENTNET_STAGES:
        layers += _inverted_residuals(
            layers,
            stage,
            stage[-1],
            nn.SiLU,
            depth=_B1_DEPTH,
            excitation=lambda before, width: SqueezeExcitation(width, max(1, before // 4), nn.SiLU),
        )
    return _classifier(layers, nn.SiLU(), num_classes)


def _inverted_residuals(
    before: list[nn.Module],
    stage: tuple[float, int, int, int, int],
    stride: int,
    activation: type[nn.Module],
    *,
    depth: float = 1.0,
    excitation: Callable[[int, int], nn.Module] | None = None,
) -> list[nn.Module]:
    """Return the blocks of a stage behind the layers `before`; the first block has the stride."""
    expansion, kernel_size, out_channels, num_blocks, _ = stage
    blocks: list[nn.Module] = []
    channels = _last_channels(before)
    for _ in range(math.ceil(depth * num_blocks)):
        block = InvertedResidual(
            channels,
            out_channels,
            expansion=expansion,
            kernel_size=kernel_size,
            stride=1 if blocks else stride,
            activation=activation,
            excitation=excitation,
        )
        blocks.append(block)
        channels = out_channels
    return blocks


def _last_channels(layers: list[nn.Module]) -> int:
    norms = [
        each for layer in layers for each in layer.modules() if isinstance(each, nn.BatchNorm2d)
    ]
    return norms[-1].num_features


def _classifier(layers: list[nn.Module], activation: nn.Module, num_classes: int) -> nn.Sequential:
    """Return `layers`, a last convolution, and the mean over pixels of its 1280 channels, with a Linear for classes."""
    return nn.Sequential(
        *layers,
        *convolution_norm(_last_channels(layers), 1280, 1),
        activation,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(1280, num_classes),
    )
