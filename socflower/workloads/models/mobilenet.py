"""MobileNetV1 (Howard et al. 2017) for small images: the first convolution has stride 1."""

from torch import nn

from socflower.errors import ConfigError, require_range

BLOCKS = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
    (512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1),
)  # fmt: skip
"""Output channels at width 1 and stride of each depthwise separable block."""


def _separable(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, in_channels, 3, stride=stride, padding=1, groups=in_channels, bias=False),
        nn.BatchNorm2d(in_channels),
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]


def mobilenet_v1(*, in_channels: int, image_size: int, num_classes: int, width: float = 1.0) -> nn.Sequential:
    """Return MobileNetV1 for (n, in_channels, image_size, image_size) inputs; 3.2 M parameters at width 1.

    `width` multiplies every channel count, down to 8 channels. Raises ConfigError for a width of zero or less
    and for images smaller than 16 pixels, too small for four strides of two.
    """
    require_range("model mobilenet-v1", above=0.0, width=width)
    if image_size < 16:
        size = f"{image_size}x{image_size}"
        raise ConfigError(f"model mobilenet-v1: takes images of 16x16 pixels or more, got {size}")
    channels = max(8, round(32 * width))
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    ]  # fmt: skip
    for width_one_channels, stride in BLOCKS:
        out_channels = max(8, round(width_one_channels * width))
        layers += _separable(channels, out_channels, stride)
        channels = out_channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
