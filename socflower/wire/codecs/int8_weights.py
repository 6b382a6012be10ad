"""Models of clients that train in int8, as int8 weights with a scale for each tensor: real = q · scale.

Weights of two and more dimensions travel so; biases, scales of normalisation and statistics are small and stay float32.
"""

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

_LEVELS = 127


def is_coded(array: NDArray[np.generic]) -> bool:
    """Whether a tensor travels in int8; values that are not finite do not, so that the receiver sees them."""
    is_weight = array.dtype == np.float32 and array.ndim > 1 and array.size > 0
    return is_weight and bool(np.isfinite(array).all())


def to_int8(
    real: NDArray[np.float32], random: np.random.Generator | None = None
) -> tuple[NDArray[np.int8], float]:
    """Return int8 values and their scale, exactly if the tensor has both already, as that of NITI.

    Otherwise: without `random`, the nearest multiples of a power of two, which an int8 client takes as they are; with
    it, multiples of the largest magnitude / 127, rounded up or down at random so that their expectation is exact.
    """
    largest = float(np.abs(real).max())
    fraction, exponent = math.frexp(largest / _LEVELS)
    # The least power of two with which the largest value is at most 127; above the least normal float32.
    scale = math.ldexp(1.0, max(-126, exponent - (fraction == 0.5)))
    quotient = real / np.float32(scale)
    nearest = np.rint(quotient)
    if random is not None and not np.array_equal(nearest, quotient):
        scale = float(np.float32(max(largest / _LEVELS, 2.0**-126)))
        quotient = real / np.float32(scale)
        nearest = np.floor(quotient + random.random(real.shape, np.float32))
    return np.clip(nearest, -_LEVELS, _LEVELS).astype(np.int8), scale


def coded(
    arrays: Mapping[str, NDArray[np.generic]], random: np.random.Generator | None = None
) -> tuple[dict[str, NDArray[np.generic]], dict[str, float]]:
    """Return the arrays with weights in int8, and the scales of these by name; see `to_int8`."""
    sent, scales = dict(arrays), {}
    for name, array in arrays.items():
        if is_coded(array):
            sent[name], scales[name] = to_int8(cast(NDArray[np.float32], array), random)
    return sent, scales


def decoded(
    arrays: Mapping[str, NDArray[np.generic]], scales: Mapping[str, float]
) -> dict[str, NDArray[np.generic]]:
    """Return the arrays in float32; an array that is not of int8 stays, since its sender is at fault."""
    return {
        name: array.astype(np.float32) * np.float32(scales[name])
        if name in scales and array.dtype == np.int8
        else array
        for name, array in arrays.items()
    }
