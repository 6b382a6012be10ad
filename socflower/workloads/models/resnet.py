"""ResNet-18 and ResNet-8 (He et al. 2016) in the variant for small images: 3x3 stem, no max-pool."""

import torch
from torch import nn

from socflower.errors import ConfigError

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Output channels and first stride of each stage of ResNet-18, of two blocks."""

SMALL_STAGES = ((16, 1), (32, 2), (64, 2))
"""Output channels and first stride of each stage of ResNet-8, of one block."""


def _convolution_norm(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
    )
    return [convolution, nn.BatchNorm2d(out_channels)]


class BasicBlock(nn.Module):
    """Return relu(residual(x) + shortcut(x)), two 3x3 convolutions against an identity or a projection."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution_norm(in_channels, out_channels, 3, stride),
            nn.ReLU(),
            *_convolution_norm(out_channels, out_channels, 3, 1),
        )
        same_shape = stride == 1 and in_channels == out_channels
        projection = [] if same_shape else _convolution_norm(in_channels, out_channels, 1, stride)
        self.shortcut = nn.Sequential(*projection)  # an empty one is the identity
        # Not in place: if the model is cut here, the block's input belongs to the other half.
        self.relu = nn.ReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, out_channels, h / stride, w / stride)."""
        output: torch.Tensor = self.relu(self.residual(inputs) + self.shortcut(inputs))
        return output


def resnet18(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return ResNet-18 for (n, in_channels, image_size, image_size) inputs: 62 tensors, 11.17 M parameters.

    Raises ConfigError for images smaller than 8 pixels, too small for three strides of two.
    """
    return _resnet("resnet18", STAGES, 2, in_channels, image_size, num_classes)


def resnet8(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return ResNet-8 for (n, in_channels, image_size, image_size) inputs: 78 thousand parameters.

    Raises ConfigError for images smaller than 8 pixels.
    """
    return _resnet("resnet8", SMALL_STAGES, 1, in_channels, image_size, num_classes)


def _resnet(
    name: str, stages: tuple[tuple[int, int], ...], num_blocks: int, in_channels: int, image_size: int, num_classes: int
) -> nn.Sequential:
    if image_size < 8:
        raise ConfigError(f"model {name}: takes images of 8x8 pixels or more, got {image_size}x{image_size}")
    channels = stages[0][0]
    layers: list[nn.Module] = [*_convolution_norm(in_channels, channels, 3, 1), nn.ReLU()]
    for out_channels, stride in stages:
        for block in range(num_blocks):
            layers.append(BasicBlock(channels, out_channels, stride if block == 0 else 1))
            channels = out_channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
