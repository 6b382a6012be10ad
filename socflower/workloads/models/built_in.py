"""The built-in classifiers by name, with layers, cuts and pieces on built-in images of ten classes; needs no torch.

`profiles.json` has what `profile_module`, `cut_shapes` and `read_model` find in them. `make api` writes it, and a test
compares.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from socflower.cluster.cost_model import Gradient, LayerProfile, ModelProfile
from socflower.errors import require_known

PROFILES = Path(__file__).with_name("profiles.json")
PIECES = (
    "name",
    "forward_flops",
    "backward_to_forward",
    "weight_bytes",
    "output_bytes",
    "crossing_bytes",
    "num_tensors",
    "num_operations",
)
"""What a row of a pipeline's layers has, as `LayerProfile` names it."""

_FLOAT32_BYTES = 4.0


def model_names() -> tuple[str, ...]:
    """Return the names that `build_model` accepts."""
    return tuple(_rows())


def built_in_profile(name: str, channels: int, size: int) -> ModelProfile:
    """Return the layer profile of a built-in model on images of `size` x `size` pixels, as `profile_module` does.

    Channels and size are those of a built-in data set. Raises ConfigError for an unknown name.
    """
    require_known("model.name", name, _rows())
    layers, weights = [], []
    for layer, kind, flops, output_bytes, *texts in _rows()[name][f"{channels}x{size}"]["layers"]:
        tensors = [tuple(map(int, text.split("x"))) for text in texts]
        layers.append(
            LayerProfile(
                name=layer,
                kind=kind,
                forward_flops=float(flops),
                output_bytes=float(output_bytes),
                weight_bytes=sum(map(_num_bytes, tensors)),
                num_tensors=len(tensors),
            )
        )
        weights.append(tensors)
    return ModelProfile(
        name=name,
        layers=tuple(layers),
        input_bytes=_FLOAT32_BYTES * channels * size * size,
        gradients=_gradients(layers, weights),
    )


def built_in_cuts(name: str, channels: int, size: int) -> list[tuple[str, int, int, int]]:
    """Return the cuts of such a model: name, layers in front, elements that cross it, and bytes of the front half."""
    require_known("model.name", name, _rows())
    return [(*row,) for row in _rows()[name][f"{channels}x{size}"]["cuts"]]


def built_in_pieces(name: str, cuts: str, channels: int, size: int) -> tuple[LayerProfile, ...]:
    """Return the layers of a pipeline that is cut between `layers`; () for other cuts."""
    rows = _rows()[name][f"{channels}x{size}"]["pieces"] if cuts == "layers" else ()
    return tuple(LayerProfile(**dict(zip(PIECES, row, strict=True))) for row in rows)


def _num_bytes(shape: tuple[int, ...]) -> float:
    return _FLOAT32_BYTES * math.prod(shape)


def _gradients(
    layers: list[LayerProfile], weights: list[list[tuple[int, ...]]]
) -> tuple[Gradient, ...]:
    """Return the gradients from the last tensor to the first, each complete with its layer's backward pass."""
    backward_flops = [layer.training_flops - layer.forward_flops for layer in layers]
    total, so_far, gradients = sum(backward_flops), 0.0, []
    for flops, tensors in zip(reversed(backward_flops), reversed(weights), strict=True):
        so_far += flops
        gradients += [
            Gradient(num_bytes=_num_bytes(shape), done=so_far / total, shape=shape)
            for shape in reversed(tensors)
        ]
    return tuple(gradients)


@cache
def _rows() -> dict[str, dict[str, dict[str, list[list[Any]]]]]:
    """Return by model and images the rows of cuts, pieces and layers.

    A layer's row has its name, kind, operations, bytes of its output, and the shape of each tensor, as "6x1x5x5".
    """
    models: dict[str, dict[str, dict[str, list[list[Any]]]]] = json.loads(
        PROFILES.read_text("utf-8")
    )
    return models
