"""A member's side of each coding of gradients, by its description."""

from socflower.hierarchy.exchange.coding_bytes import (
    Coding,
    Exact,
    Float16,
    Int4,
    Int8,
    LargestValues,
    PowerSGD,
    StochasticInt8,
)
from socflower.training.exchange.compression import (
    ExactSum,
    Float16Compression,
    GradientCompression,
    Int4Compression,
    Int8Compression,
    StochasticInt8Compression,
)
from socflower.training.exchange.largest_values import DeepGradientCompression
from socflower.training.exchange.power_sgd import PowerSGDCompression


def make_compression(
    coding: Coding, *, seed: int = 0, momentum: float = 0.0
) -> GradientCompression:
    """Return a member's side of a coding; `seed` is for stochastic rounding, `momentum` for one that applies it."""
    match coding:
        case Float16():
            return Float16Compression(coding)
        case StochasticInt8():
            return StochasticInt8Compression(coding, seed)
        case Int8():
            return Int8Compression(coding)
        case Int4():
            return Int4Compression(coding)
        case PowerSGD():
            return PowerSGDCompression(coding, seed)
        case LargestValues():
            return DeepGradientCompression(coding, momentum)
    assert isinstance(coding, Exact), f"{type(coding).__name__} has no compression"
    return ExactSum(coding)
