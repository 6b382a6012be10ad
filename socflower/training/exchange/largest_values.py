"""The largest values of a tensor and where they are, as bytes."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from socflower.wire.codecs.quantisation import Floats

Indices: TypeAlias = NDArray[np.uint32]


def largest(values: Floats, count: int) -> Indices:
    """Return the indices of the `count` largest magnitudes, in ascending order; NaN counts as larger than all."""
    found = np.argpartition(np.abs(values), values.size - count)[values.size - count :]
    return np.sort(found).astype("<u4")


def encode_values(indices: Indices, values: Floats) -> bytes:
    """Return `values` (count,) and their indices as bytes."""
    return b"".join((indices.astype("<u4").tobytes(), values.astype("<f4").tobytes()))


def decode_values(payload: bytes) -> tuple[Indices, Floats]:
    """Return the indices and values (count,) that were encoded."""
    middle = len(payload) // 2
    return np.frombuffer(payload[:middle], "<u4"), np.frombuffer(payload[middle:], "<f4")
