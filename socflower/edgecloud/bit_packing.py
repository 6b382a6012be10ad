"""Numbers of 2 or 4 bits, packed into bytes: the first in the lowest bits of its byte.

    2 bits   value 4i + k in bits 2k and 2k + 1 of byte i
    4 bits   value 2i in the lower half of byte i, value 2i + 1 in the upper half

Whole words are shifted, so that NumPy does it many values at a time; the words are little-endian by declaration, so
that the same bytes come out on every machine.
"""

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError

_SHIFTS = {4: (4,), 2: (6, 12)}
"""By how much a word is shifted over itself so that its values move together into its lowest byte."""

_SPREADS = {4: ((4, 0x0F0F),), 2: ((12, 0x000F000F), (6, 0x03030303))}
"""The way back: shifts, and which bits hold values after each."""


def packed_bytes(num_values: int, bits: int) -> int:
    """Return how many bytes hold `num_values` numbers of `bits`, the last byte filled up."""
    return -(-num_values * bits // 8)


def pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return values (..., n), each below 2^bits, as bytes (..., ceil(n·bits/8)); what fills the last byte up is 0.

    Raises `ConfigError` for other than 2 and 4 bits. A value that has more bits would spill into its neighbours.
    """
    word = _word(bits)
    missing = -values.shape[-1] % word.itemsize  # a word holds as many values as it has bytes
    if missing:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], missing), np.uint8)], axis=-1)
    words = np.ascontiguousarray(values).view(word)
    for shift in _SHIFTS[bits]:
        words = words | words >> shift
    return words.astype(np.uint8)  # keeps the lowest byte


def unpack(packed: NDArray[np.uint8], bits: int, num_values: int) -> NDArray[np.uint8]:
    """Return the first `num_values` (..., num_values) of what `pack` made (..., bytes).

    Raises `ConfigError` for other than 2 and 4 bits, and for fewer bytes than that many values take.
    """
    words = packed.astype(_word(bits))
    if num_values > words.shape[-1] * words.itemsize:
        raise ConfigError(f"packed values: {words.shape[-1]} bytes cannot hold {num_values} values of {bits} bits; "
                          f"{packed_bytes(num_values, bits)} are needed")
    for shift, mask in _SPREADS[bits]:
        words |= words << shift
        words &= mask
    return words.view(np.uint8)[..., :num_values]


def _word(bits: int) -> np.dtype[np.unsignedinteger]:
    if bits not in _SHIFTS:
        raise ConfigError(f"packed values: {bits} bits are not packed; use 2 or 4")
    return np.dtype(f"<u{8 // bits}")
