"""Models by the names that scenarios use."""

import difflib
from collections.abc import Callable

import torch
from torch import nn

from socflower.errors import ConfigError, require_range
from socflower.workloads.models.layers import draw_weights_
from socflower.workloads.models.lenet import lenet5
from socflower.workloads.models.mobilenet import mobilenet_v1
from socflower.workloads.models.resnet import resnet8, resnet18
from socflower.workloads.models.vgg import vgg11, vgg_small, vgg_tiny

_BUILDERS: dict[str, Callable[..., nn.Sequential]] = {
    "lenet5": lenet5,
    "vgg-tiny": vgg_tiny,
    "vgg-small": vgg_small,
    "vgg11": vgg11,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "mobilenet-v1": mobilenet_v1,
}


def model_names() -> tuple[str, ...]:
    """Return the names that `build_model` accepts."""
    return tuple(_BUILDERS)


def build_model(name: str, *, in_channels: int, image_size: int, num_classes: int, seed: int) -> nn.Module:
    """Return the named model for (n, in_channels, image_size, image_size) inputs and (n, num_classes) logits.

    Equal seeds give equal weights; torch's global random state is neither read nor changed. Raises ConfigError for
    an unknown name and for sizes that the model does not support.
    """
    builder = _BUILDERS.get(name)
    if builder is None:
        close = difflib.get_close_matches(name, _BUILDERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"model.name: unknown model {name!r}, known are {', '.join(_BUILDERS)}{hint}")
    require_range(f"model {name}", least=1, in_channels=in_channels, image_size=image_size, num_classes=num_classes)
    # Constructors draw weights from the global generator, except on the meta device, whose tensors have no values.
    with torch.device("meta"):
        model = builder(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
    model.to_empty(device="cpu")
    draw_weights_(model, torch.Generator().manual_seed(seed))
    return model
