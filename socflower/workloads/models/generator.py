"""Image generators (after Dosovitskiy et al. 2016) for reverse splits, in which images stay with the back half."""

from itertools import pairwise

from torch import nn

from socflower.errors import require_range
from socflower.plain_numbers import plain_numbers
from socflower.workloads.models.layers import drawn
from socflower.workloads.sample_tensors import STYLE_SIZE

_CHANNELS, _SIZE = 32, 7


@plain_numbers
def build_generator(seed: int, *, num_classes: int = 10) -> nn.Sequential:
    """Return the digit generator: codes (n, num_classes + STYLE_SIZE) to grey images (n, 1, 28, 28) in 0..1.

    It has fully connected layers, then twice up-sampling and convolution. Features grow with the depth, so a cut near
    the front sends the fewest bytes. Train it by the mean squared error against `GeneratorSamples.targets`. Equal seeds
    give equal weights; torch's global random state is neither read nor changed. Raises ConfigError for no classes.
    """
    require_range("model digit-generator", least=1, num_classes=num_classes)
    return drawn(lambda: _generator(num_classes), seed)


def _generator(num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_classes + STYLE_SIZE, 128),
        nn.ReLU(),
        nn.Linear(128, _CHANNELS * _SIZE**2),
        nn.ReLU(),
        nn.Unflatten(1, (_CHANNELS, _SIZE, _SIZE)),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(_CHANNELS, 32, 3, padding=1),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1),
        nn.Sigmoid(),
    )


CHAIR_CODE_SIZE = 825
"""The code of a chair: its style, the view and the transformation of the image."""


@plain_numbers
def build_chair_generator(seed: int) -> nn.Sequential:
    """Return the edge-cloud paper's generator: codes (n, CHAIR_CODE_SIZE) to colour images (n, 3, 128, 128) in 0..1.

    Widths are those at which its Table 3 measures features; it prints no others. Equal seeds give equal weights.
    """
    return drawn(_chair_generator, seed)


def _chair_generator() -> nn.Sequential:
    layers: list[nn.Module] = []
    widths = (CHAIR_CODE_SIZE, 384, 256, 256, 4096)
    for before, width in pairwise(widths):
        layers += [nn.Linear(before, width), nn.ReLU()]
    layers.append(nn.Unflatten(1, (256, 4, 4)))
    channels = 256
    for width in (256, 92, 48):
        layers.append(nn.Upsample(scale_factor=2))
        for before in (channels, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers, nn.Upsample(scale_factor=4), nn.Conv2d(channels, 3, 3, padding=1), nn.Sigmoid()
    )
