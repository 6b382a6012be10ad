"""VGG-11 (Simonyan and Zisserman 2015, configuration A) and two small variants for 32x32 images."""

from torch import nn

from socflower.workloads.models.layers import padding_to_32

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Output channels of the convolutions of each stage of VGG-11; a max-pool ends the stage."""

SMALL_STAGES = ((32, 32), (64, 64), (128, 128))
"""The same of VGG-small, whose last stage leaves 4x4 pixels."""

TINY_STAGES = ((16,), (32,), (64,), (64,))
"""The same of VGG-tiny, whose last stage leaves 2x2 pixels."""


def vgg11(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-11 for (n, in_channels, image_size, image_size) inputs: 18 tensors, about 9.2 M parameters.

    Five max-pools leave one pixel of 512 channels, so one Linear replaces the three for ImageNet.
    Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg11", STAGES, 1, in_channels, image_size, num_classes)


def vgg_small(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-small for (n, in_channels, image_size, image_size) inputs: 14 tensors, 0.31 M parameters.

    Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg-small", SMALL_STAGES, 4, in_channels, image_size, num_classes)


def vgg_tiny(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-tiny, with BatchNorm: 14 tensors, 63 thousand parameters, 7 MFLOP for an image of 32x32 pixels.

    It is for experiments on a single core, where an epoch of CIFAR-10 takes a quarter of VGG-small's time. Features
    shrink from stage to stage (16,384, 8,192, 4,096 and 1,024 elements), so cuts differ in the bytes that they send.
    Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg-tiny", TINY_STAGES, 2, in_channels, image_size, num_classes, batch_norm=True)


def _vgg(
    name: str, stages: tuple[tuple[int, ...], ...], last_size: int, in_channels: int, image_size: int, num_classes: int,
    *, batch_norm: bool = False,
) -> nn.Sequential:
    padding = 1 + padding_to_32(name, image_size)
    layers: list[nn.Module] = []
    for stage in stages:
        for channels in stage:
            # BatchNorm has a bias of its own, and would cancel that of the convolution.
            layers.append(nn.Conv2d(in_channels, channels, kernel_size=3, padding=padding, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
            in_channels, padding = channels, 1
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(in_channels * last_size**2, num_classes))
