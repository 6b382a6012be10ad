"""The largest values of a tensor and where they are, as bytes: float32, or float16 in a unit of their own."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from socflower.wire.codecs.quantisation import Floats, half_exponent

Indices: TypeAlias = NDArray[np.uint32]


def largest(values: Floats, count: int) -> Indices:
    """Return the indices of the `count` largest magnitudes, in ascending order; NaN counts as larger than all."""
    found = np.argpartition(np.abs(values), values.size - count)[values.size - count:]
    return np.sort(found).astype("<u4")


def encoded_bytes(count: int, *, half_values: bool) -> int:
    """Return the bytes that `count` values and their indices take."""
    return 4 + 6 * count if half_values else 8 * count


def encode_values(indices: Indices, values: Floats, *, half_values: bool) -> bytes:
    """Return `values` (count,) and their indices as bytes; with `half_values`, an exponent and halves."""
    if not half_values:
        return indices.tobytes() + values.astype("<f4").tobytes()
    exponent = half_exponent(float(np.abs(values).max()))
    with np.errstate(over="ignore"):  # only next to values that are already infinite
        halves = (values * np.float32(2.0 ** exponent)).astype("<f2")
    return b"".join((np.array(exponent, "<i4").tobytes(), indices.tobytes(), halves.tobytes()))


def decode_values(payload: bytes, *, half_values: bool) -> tuple[Indices, Floats]:
    """Return the indices and values (count,) that were encoded."""
    if not half_values:
        middle = len(payload) // 2
        return np.frombuffer(payload[:middle], "<u4"), np.frombuffer(payload[middle:], "<f4")
    num_values = (len(payload) - 4) // 6
    scale = np.float32(2.0 ** -int(np.frombuffer(payload, "<i4", 1)[0]))
    indices = np.frombuffer(payload, "<u4", num_values, offset=4)
    return indices, np.frombuffer(payload, "<f2", offset=4 + 4 * num_values).astype(np.float32) * scale
