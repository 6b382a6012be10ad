"""InceptionV3 (Szegedy et al. 2016), without the auxiliary classifier that helps only deep in a training for ImageNet.

Channels and parameter counts are those of torchvision. Images of 75 pixels and more have the strides for 299x299. Below
that, where those would leave no pixel, all convolutions and poolings are padded and the first convolution has stride 1:
the three groups of blocks see 8x8, 4x4 and 2x2 pixels of a 32x32 image.
"""

import torch
from torch import nn

from socflower.workloads.models.layers import convolution_norm, require_size

_LEAST_WITH_STRIDES = 75
"""Pixels per side from which on the strides for 299x299 leave at least one pixel."""


class Branches(nn.Module):
    """Return the channels of all branches behind one another."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, channels, h, w) to (n, sum of the branches' channels, h', w'), of branches with equal h' and w'."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


def _convolutions(in_channels: int, *layers: tuple[int, int | tuple[int, int]]) -> list[nn.Module]:
    """Return convolutions of so many output channels and a kernel each, with BatchNorm and ReLU."""
    modules: list[nn.Module] = []
    for out_channels, kernel_size in layers:
        modules += [*convolution_norm(in_channels, out_channels, kernel_size), nn.ReLU()]
        in_channels = out_channels
    return modules


def _pooled(in_channels: int, out_channels: int) -> nn.Sequential:
    mean = nn.AvgPool2d(3, stride=1, padding=1)
    return nn.Sequential(mean, *_convolutions(in_channels, (out_channels, 1)))


def _block_5x5(in_channels: int, pooled_channels: int) -> Branches:
    """Return a block for the largest maps (InceptionA), of 224 + `pooled_channels` channels."""
    return Branches(
        nn.Sequential(*_convolutions(in_channels, (64, 1))),
        nn.Sequential(*_convolutions(in_channels, (48, 1), (64, 5))),
        nn.Sequential(*_convolutions(in_channels, (64, 1), (96, 3), (96, 3))),
        _pooled(in_channels, pooled_channels),
    )


def _block_7x7(width: int) -> Branches:
    """Return a block whose 7x7 convolutions are 1x7 and 7x1 ones (InceptionC), of 768 channels."""
    row, column = (1, 7), (7, 1)
    twice = ((width, 1), (width, column), (width, row), (width, column), (192, row))
    return Branches(
        nn.Sequential(*_convolutions(768, (192, 1))),
        nn.Sequential(*_convolutions(768, (width, 1), (width, row), (192, column))),
        nn.Sequential(*_convolutions(768, *twice)),
        _pooled(768, 192),
    )


def _block_wide(in_channels: int) -> Branches:
    """Return a block for the smallest maps, some of whose branches fork (InceptionE), of 2,048 channels."""

    def forked() -> Branches:
        forks = (nn.Sequential(*_convolutions(384, (384, side))) for side in ((1, 3), (3, 1)))
        return Branches(*forks)

    return Branches(
        nn.Sequential(*_convolutions(in_channels, (320, 1))),
        nn.Sequential(*_convolutions(in_channels, (384, 1)), forked()),
        nn.Sequential(*_convolutions(in_channels, (448, 1), (384, 3)), forked()),
        _pooled(in_channels, 192),
    )


def inception_v3(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return InceptionV3 for (n, in_channels, size, size) inputs; 23.83 M parameters for ImageNet.

    Raises ConfigError for images smaller than 16 pixels.
    """
    require_size("inception-v3", image_size, 16)
    is_small = image_size < _LEAST_WITH_STRIDES

    def halved() -> nn.Module:
        return nn.MaxPool2d(3, stride=2, padding=int(is_small))

    def reduced(in_channels: int, out_channels: int, stride: int = 2) -> list[nn.Module]:
        return [*convolution_norm(in_channels, out_channels, 3, stride, padded=is_small), nn.ReLU()]

    last_7x7 = ((192, 1), (192, (1, 7)), (192, (7, 1)))
    return nn.Sequential(
        *reduced(in_channels, 32, 1 if is_small else 2),
        *reduced(32, 32, 1),
        *_convolutions(32, (64, 3)),
        halved(),
        *_convolutions(64, (80, 1)),
        *reduced(80, 192, 1),
        halved(),
        *(_block_5x5(*channels) for channels in ((192, 32), (256, 64), (288, 64))),
        Branches(
            nn.Sequential(*reduced(288, 384)),
            nn.Sequential(*_convolutions(288, (64, 1), (96, 3)), *reduced(96, 96)),
            halved(),
        ),
        *(_block_7x7(width) for width in (128, 160, 160, 192)),
        Branches(
            nn.Sequential(*_convolutions(768, (192, 1)), *reduced(192, 320)),
            nn.Sequential(*_convolutions(768, *last_7x7), *reduced(192, 192)),
            halved(),
        ),
        *(_block_wide(channels) for channels in (1280, 2048)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(2048, num_classes),
    )
