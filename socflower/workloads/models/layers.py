"""Parts shared by models: initial weights from a separate generator, and the sizes of images that a model takes."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from socflower.errors import ConfigError

_Model = TypeVar("_Model", bound=nn.Module)


def drawn(build: Callable[[], _Model], seed: int) -> _Model:
    """Return the model that `build` makes, with weights from `seed`: torch's global generator is not used."""
    # Constructors draw weights from the global generator, except on the meta device, whose tensors have no values.
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    draw_weights_(model, torch.Generator().manual_seed(seed))
    return model


def require_size(model: str, image_size: int, least: int) -> None:
    """Raise `ConfigError` for images that are too small for the strides of a model."""
    if image_size < least:
        raise ConfigError(
            f"model {model}: takes images of {least}x{least} pixels or more, got {image_size}x{image_size}"
        )


def padding_to_32(model: str, image_size: int) -> int:
    """Return how many zeros pad each edge of an image to 32 pixels per side; `ConfigError` unless it has 28 or 32.

    The first convolution adds them to its own padding. The result is that of a padding layer in front, without the
    layer's activation, and integer engines need no such layer.
    """
    if image_size not in (28, 32):
        raise ConfigError(
            f"model {model}: takes images of 28x28 or 32x32 pixels, got {image_size}x{image_size}"
        )
    return (32 - image_size) // 2


def convolution_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int],
    stride: int = 1,
    *,
    groups: int = 1,
    padded: bool = True,
) -> list[nn.Module]:
    """Return a convolution without bias, and the BatchNorm behind it; padded, it keeps h and w at stride 1."""
    sides = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    convolution = nn.Conv2d(
        in_channels,
        out_channels,
        sides,
        stride=stride,
        padding=(sides[0] // 2, sides[1] // 2) if padded else 0,
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
    equation 10); without it VGG-11, which has no BatchNorm, does not start to learn. A convolution without bias is
    followed by a BatchNorm, which makes the forward pass independent of the gain, but a step changes the direction of
    large weights less. So its gain is 1/3, torch's default: at a rate of 0.01, MobileNet reaches a loss in 45 steps for
    which it needs 90 with gain 2. The last layer has the same gain: logits are small, and the first loss is close to
    log(num_classes). Embeddings are small, so that their products start near zero; a padding row is zero. LSTMs are
    drawn as in torch.
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
            # Weights of one, biases of zero, and the initial running statistics.
            module.reset_parameters()
        elif isinstance(module, nn.LSTM):
            for weight in module.parameters(recurse=False):
                bound = 1.0 / math.sqrt(module.hidden_size)
                nn.init.uniform_(weight, -bound, bound, generator=generator)
        else:
            has_weights = list(module.parameters(recurse=False))
            assert not has_weights, f"no rule for the weights of {module}"
