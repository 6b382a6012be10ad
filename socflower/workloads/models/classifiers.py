"""Small image classifiers, by the names that scenarios use.

LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, as trained today; VGG-11, VGG-16 and VGG-19 (Simonyan and
Zisserman 2015, configurations A, D and E) and small variants for 32x32 images; ResNet-18, ResNet-34 and ResNet-8 (He et
al. 2016) in the variant for small images, with a 3x3 stem and no max-pool; MobileNetV1 (Howard et al. 2017), whose
first convolution has stride 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from socflower.errors import require_known, require_range
from socflower.plain_numbers import plain_numbers
from socflower.workloads.models.deep_classifiers import (
    efficientnet_b1,
    mobilenet_v2,
    mobilenet_v3,
    resnet50,
)
from socflower.workloads.models.inception import inception_v3
from socflower.workloads.models.layers import (
    convolution_norm,
    drawn,
    padding_to_32,
    require_size,
)


def lenet5(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return LeNet-5 for (n, in_channels, image_size, image_size) inputs; 61,706 parameters for MNIST.

    Raises ConfigError unless the image size is 28 or 32.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, kernel_size=5, padding=padding_to_32("lenet5", image_size)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


_VGG_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Output channels of the convolutions of each stage of VGG-11; a max-pool ends the stage."""

_VGG16_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""As above for VGG-16."""

_VGG19_STAGES = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)
"""As above for VGG-19."""

_VGG_SMALL_STAGES = ((32, 32), (64, 64), (128, 128))
"""As above for VGG-small, whose last stage leaves 4x4 pixels."""

_VGG_MINI_STAGES = ((32, 32), (64,))
"""As above for VGG-mini, whose last stage leaves 8x8 pixels."""

_VGG_TINY_STAGES = ((16,), (32,), (64,), (64,))
"""As above for VGG-tiny, whose last stage leaves 2x2 pixels."""


def vgg11(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-11 for (n, in_channels, image_size, image_size) inputs: 18 tensors, about 9.2 M parameters.

    Five max-pools leave one pixel of 512 channels, so one Linear replaces the three for ImageNet.
    Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg11", _VGG_STAGES, 1, in_channels, image_size, num_classes)


def vgg16(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-16 for (n, in_channels, image_size, image_size) inputs: 28 tensors, 14.7 M parameters.

    One Linear replaces the three for ImageNet, as in `vgg11`. Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg16", _VGG16_STAGES, 1, in_channels, image_size, num_classes)


def vgg19(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-19 for (n, in_channels, image_size, image_size) inputs: 38 tensors, 38.9 M parameters.

    It has three Linear layers, of 4096 units, as the edge-cloud paper trains it (Table 3). Raises ConfigError unless
    the image size is 28 or 32.
    """
    return _vgg(
        "vgg19", _VGG19_STAGES, 1, in_channels, image_size, num_classes, hidden=(4096, 4096)
    )


def vgg_small(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-small for (n, in_channels, image_size, image_size) inputs: 14 tensors, 0.31 M parameters.

    Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg-small", _VGG_SMALL_STAGES, 4, in_channels, image_size, num_classes)


def vgg_tiny(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-tiny, with BatchNorm: 14 tensors, 63 thousand parameters, 7 MFLOP for an image of 32x32 pixels.

    It is for experiments on a single core, where an epoch of CIFAR-10 takes a quarter of VGG-small's time. Features
    shrink from stage to stage (16,384, 8,192, 4,096 and 1,024 elements), so cuts differ in the bytes that they send.
    Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg(
        "vgg-tiny", _VGG_TINY_STAGES, 2, in_channels, image_size, num_classes, batch_norm=True
    )


def vgg_mini(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return VGG-mini, three convolutions and one Linear: 8 tensors, 69 thousand parameters, 29 MFLOP for an image.

    It computes much for few and small tensors, which is where training in groups gains most, and trains within minutes
    on two cores. Raises ConfigError unless the image size is 28 or 32.
    """
    return _vgg("vgg-mini", _VGG_MINI_STAGES, 8, in_channels, image_size, num_classes)


def _vgg(
    name: str,
    stages: tuple[tuple[int, ...], ...],
    last_size: int,
    in_channels: int,
    image_size: int,
    num_classes: int,
    *,
    batch_norm: bool = False,
    hidden: tuple[int, ...] = (),
) -> nn.Sequential:
    padding = 1 + padding_to_32(name, image_size)
    layers: list[nn.Module] = []
    for stage in stages:
        for channels in stage:
            # BatchNorm has its own bias, and would cancel the bias of the convolution.
            convolution = nn.Conv2d(
                in_channels, channels, kernel_size=3, padding=padding, bias=not batch_norm
            )
            layers.append(convolution)
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
            in_channels, padding = channels, 1
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    features = in_channels * last_size**2
    for width in hidden:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, num_classes))


_RESNET18_STAGES = ((64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2))
"""Output channels, number of blocks and first stride of each stage."""

_RESNET34_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_RESNET8_STAGES = ((16, 1, 1), (32, 1, 2), (64, 1, 2))


class BasicBlock(nn.Module):
    """Return relu(residual(x) + shortcut(x)): two 3x3 convolutions, and an identity or a projection."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *convolution_norm(in_channels, out_channels, 3, stride),
            nn.ReLU(),
            *convolution_norm(out_channels, out_channels, 3, 1),
        )
        same_shape = stride == 1 and in_channels == out_channels
        projection = [] if same_shape else convolution_norm(in_channels, out_channels, 1, stride)
        # An empty Sequential is the identity.
        self.shortcut = nn.Sequential(*projection)
        # The activation is not in place: if the model is cut here, the block's input belongs to the other half.
        self.relu = nn.ReLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, out_channels, h / stride, w / stride)."""
        output: torch.Tensor = self.relu(self.residual(inputs) + self.shortcut(inputs))
        return output


def resnet18(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return ResNet-18 for (n, in_channels, image_size, image_size) inputs: 62 tensors, 11.17 M parameters.

    Raises ConfigError for images smaller than 8 pixels, too small for three strides of two.
    """
    return _resnet("resnet18", _RESNET18_STAGES, in_channels, image_size, num_classes)


def resnet34(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return ResNet-34 for (n, in_channels, image_size, image_size) inputs: 110 tensors, 21.28 M parameters.

    Raises ConfigError for images smaller than 8 pixels.
    """
    return _resnet("resnet34", _RESNET34_STAGES, in_channels, image_size, num_classes)


def resnet8(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return ResNet-8 for (n, in_channels, image_size, image_size) inputs: 78 thousand parameters.

    Raises ConfigError for images smaller than 8 pixels.
    """
    return _resnet("resnet8", _RESNET8_STAGES, in_channels, image_size, num_classes)


def _resnet(
    name: str,
    stages: tuple[tuple[int, int, int], ...],
    in_channels: int,
    image_size: int,
    num_classes: int,
) -> nn.Sequential:
    require_size(name, image_size, 8)
    channels = stages[0][0]
    layers: list[nn.Module] = [*convolution_norm(in_channels, channels, 3, 1), nn.ReLU()]
    for out_channels, num_blocks, stride in stages:
        for block in range(num_blocks):
            layers.append(BasicBlock(channels, out_channels, stride if block == 0 else 1))
            channels = out_channels
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )


_MOBILENET_BLOCKS = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
    (512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1),
)  # fmt: skip
"""Output channels at width 1 and stride of each depthwise separable block."""


def _separable(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
    depthwise = convolution_norm(in_channels, in_channels, 3, stride, groups=in_channels)
    pointwise = convolution_norm(in_channels, out_channels, 1)
    return [*depthwise, nn.ReLU(), *pointwise, nn.ReLU()]


def mobilenet_v1(
    *, in_channels: int, image_size: int, num_classes: int, width: float = 1.0
) -> nn.Sequential:
    """Return MobileNetV1 for (n, in_channels, image_size, image_size) inputs; 3.2 M parameters at width 1.

    `width` multiplies every channel count, down to 8 channels. Raises ConfigError for a width of zero or less
    and for images smaller than 16 pixels, too small for four strides of two.
    """
    require_range("model mobilenet-v1", above=0.0, width=width)
    require_size("mobilenet-v1", image_size, 16)
    channels = max(8, round(32 * width))
    layers = [*convolution_norm(in_channels, channels, 3), nn.ReLU()]
    for width_one_channels, stride in _MOBILENET_BLOCKS:
        out_channels = max(8, round(width_one_channels * width))
        layers += _separable(channels, out_channels, stride)
        channels = out_channels
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )


BUILDERS: dict[str, Callable[..., nn.Sequential]] = {
    "lenet5": lenet5,
    "vgg-tiny": vgg_tiny,
    "vgg-mini": vgg_mini,
    "vgg-small": vgg_small,
    "vgg11": vgg11,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "mobilenet-v1": mobilenet_v1,
    "mobilenet-v2": mobilenet_v2,
    "mobilenet-v3": mobilenet_v3,
    "efficientnet-b1": efficientnet_b1,
    "resnet50": resnet50,
    "inception-v3": inception_v3,
}


@plain_numbers
def build_model(
    name: str, *, in_channels: int, image_size: int, num_classes: int, seed: int
) -> nn.Module:
    """Return the named model for (n, in_channels, image_size, image_size) inputs and (n, num_classes) logits.

    Equal seeds give equal weights; torch's global random state is neither read nor changed. Raises ConfigError for
    an unknown name and for sizes that the model does not support.
    """
    require_known("model.name", name, BUILDERS)
    sizes: dict[str, Any] = {
        "in_channels": in_channels,
        "image_size": image_size,
        "num_classes": num_classes,
    }
    require_range(f"model {name}", least=1, **sizes)
    return drawn(partial(BUILDERS[name], **sizes), seed)
