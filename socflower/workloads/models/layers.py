"""Parts shared by models: initial weights from a separate generator, and padding of 28 pixels to 32."""

import math

import torch
from torch import nn

from socflower.errors import ConfigError


def padding_to_32(model: str, image_size: int) -> int:
    """Return the zeros to add at each edge so that an image has 32 pixels per side.

    The first convolution adds them to its own padding. The result is the same as with a padding layer in front, with
    one activation less to write, and integer engines need no padding layer.
    """
    if image_size not in (28, 32):
        raise ConfigError(
            f"model {model}: takes images of 28x28 or 32x32 pixels, got {image_size}x{image_size}"
        )
    return (32 - image_size) // 2


def convolution_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    *,
    groups: int = 1,
) -> list[nn.Module]:
    """Return a convolution that keeps h and w at stride 1, and the BatchNorm behind it, in place of a bias."""
    convolution = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        groups=groups,
        bias=False,
    )
    return [convolution, nn.BatchNorm2d(out_channels)]


_BEFORE_RELU = 2.0
_BEFORE_NORM_OR_LOSS = 1.0 / 3.0
_EMBEDDING_STD = 0.1


def draw_weights_(model: nn.Module, generator: torch.Generator) -> None:
    """Fill the weights of `model` in place: normal with variance gain / fan_in, biases zero.

    A layer that feeds a ReLU gets gain 2, which keeps the activations' scale from layer to layer (He et al. 2015,
    equation 10); VGG-11, which has no BatchNorm to restore it, does not start to learn otherwise. A convolution without
    bias is followed by a BatchNorm: the forward pass is the same for any gain, but a step changes the direction of
    large weights less, so the gain is 1/3, torch's default: at a rate of 0.01 MobileNet then takes 45 steps to a loss
    for which it needs 90 with gain 2. The last layer gets the same gain: logits are small, so the first loss is close
    to log(num_classes).
    Embeddings are small, so that their products start near zero; a padding row is zero.
    """
    last = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)][-1]
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            gain = _BEFORE_NORM_OR_LOSS if module is last or module.bias is None else _BEFORE_RELU
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=math.sqrt(gain / fan_in), generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=_EMBEDDING_STD, generator=generator)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            # Ones and zeros, and initial running statistics.
            module.reset_parameters()
        else:
            assert not list(module.parameters(recurse=False)), (
                f"no rule for the weights of {module}"
            )
