"""Real numbers as (int8, exponent): real = q * 2^exponent, q in [-127, 127] (F13)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from socflower.errors import ConfigError

AnyArray = npt.NDArray[Any]
Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]

MAGNITUDE_BITS = 7


def channel_stride(channels: int) -> int:
    """Return the channels rounded up to the engine's block of 16."""
    return -(-channels // 16) * 16


def exponent_for(max_magnitude: float) -> int:
    """Return the smallest exponent at which a magnitude fits 127; 0 for a magnitude of 0."""
    if max_magnitude == 0.0:
        return 0
    # The mantissa lies in [0.5, 1).
    mantissa, exponent = math.frexp(max_magnitude)
    fits = mantissa * 128.0 <= 127.0
    return exponent - MAGNITUDE_BITS + (0 if fits else 1)


def shift_for(max_magnitude: int, bits: int = MAGNITUDE_BITS) -> int:
    """Return how far an accumulator is shifted so that `bits` bits of magnitude remain (F14)."""
    return max(0, max_magnitude.bit_length() - bits)


def quantise(real: FloatArray, exponent: int, out: Int8Array) -> None:
    """Write the nearest int8 of real / 2^exponent, half to even, saturated at +-127."""
    scaled = np.rint(np.ldexp(real.astype(np.float64), -exponent))
    np.clip(scaled, -127, 127, out=scaled)
    out[...] = scaled.astype(np.int8)


def to_real(data: Int8Array, exponent: int, shape: tuple[int, int, int]) -> FloatArray:
    """Return (batch, c, h, w) float32 of an (h, w, batch, channel stride) int8 tensor."""
    real = np.ldexp(data[..., : shape[0]].astype(np.float32), exponent)
    return np.ascontiguousarray(real.transpose(2, 3, 0, 1))


def require_finite(real: FloatArray, name: str) -> None:
    """Raise ConfigError, naming the first NaN or infinity."""
    if not np.isfinite(real).all():
        first, *_ = np.argwhere(~np.isfinite(real)).tolist()
        at = tuple(first)
        raise ConfigError(f"{name}: element {at} is {real[at]}; load an earlier checkpoint")


def scaled_integers(
    largest_bits: int, *coefficients: tuple[DoubleArray, int]
) -> tuple[int, list[Int32Array]]:
    """Return an exponent e and each array as integers of 2^e.

    `coefficients` are pairs (array, extra bits); an array's integers stay below 2^(largest_bits + extra bits).
    """
    exponents = []
    for array, extra in coefficients:
        if array.any():
            _, own_exponent = math.frexp(float(np.max(np.abs(array))))
            exponents.append(own_exponent - (largest_bits + extra))
    exponent = max(exponents, default=0)
    scaled = [np.ldexp(array, -exponent) for array, _ in coefficients]
    return exponent, [np.rint(each).astype(np.int32) for each in scaled]
