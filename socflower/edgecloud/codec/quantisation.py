"""Uniform quantisation of features between a tensor's least and largest value (F24).

    q = round((h − min)·(2ⁿ − 1)/(max − min)),    h′ = min + q·(max − min)/(2ⁿ − 1)

Widths 2, 4, 8 and 16 follow this one rule; 32 are the float32 values as they are. Why not IEEE halves at 16 bits: for
values spread like a feature's they are several times less accurate, they end at 65,504, and gradients of a mean over a
large batch sink into their subnormal range.

Both ways are computed in float32 up to 8 bits, and in float64 at 16 bits and where max − min is so large or small that
float32 would overflow. So |h′ − h| is at most half a step, plus 2⁻¹³ of a step, plus the rounding of h′ to float32. h′
is a multiplication and an addition, each rounded, which gives the same bits on every machine; min comes back exactly,
so that the zeros behind a ReLU stay zeros.

Tensors are processed in blocks that fit into a thin device's cache: besides the result, at most about half a MiB.

Values of 2 and 4 bits are packed into bytes, the first in the lowest bits: whole words are shifted, little-endian by
declaration, so that the same bytes come out on every machine.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from socflower.edgecloud.halves import Array
from socflower.edgecloud.plan.cuts import BITS
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


Grouping: TypeAlias = Literal["tensor", "sample"]
"""The scope of a least and largest value: the whole tensor, as in the paper, or each sample (first dimension)."""

GROUPINGS: tuple[Grouping, ...] = ("tensor", "sample")

_BLOCK = 1 << 15  # elements worked on at a time; a multiple of what a byte holds
_FLOAT32_RANGES = (1e-30, 1e38)  # max − min for which float32 neither overflows nor loses bits
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTensor:
    """An encoded tensor, from `encode` or from the wire. Raises `ConfigError` if it is invalid.

    A group is the whole tensor, or one of its samples, in order; each begins on a byte of its own.
    """

    bits: int
    shape: tuple[int, ...]
    low: tuple[float, ...] = ()  # least value of each group: one, or one per sample; none at 32 bits, none if empty
    high: tuple[float, ...] = ()  # largest value of each group
    payload: bytes | memoryview  # 2 and 4 bits: see `bit_packing`; 16: little-endian; 32: little-endian float32

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"encoded tensor: bits = {self.bits} is unknown; use one of {', '.join(map(str, BITS))}")
        if not all(size >= 0 for size in self.shape):
            raise ConfigError(f"encoded tensor: shape {self.shape} has a negative size")
        groups = len(self.low)
        quantised = self.bits < 32 and self.num_elements > 0
        if len(self.high) != groups or groups not in ({1, self.shape[0] if self.shape else 1} if quantised else {0}):
            wanted = f"one of each, or {self.shape[0]}" if quantised and self.shape else "one of each" if quantised \
                else "none"
            raise ConfigError(f"encoded tensor: {groups} least and {len(self.high)} largest values for shape "
                              f"{self.shape} at {self.bits} bits; it has {wanted}")
        for low, high in zip(self.low, self.high, strict=True):
            if not -_LARGEST <= low <= high <= _LARGEST:
                raise ConfigError(f"encoded tensor: least value {low} and largest {high} are no range of finite "
                                  "float32 numbers")
        given = memoryview(self.payload).nbytes
        whole = groups * packed_bytes(self.num_elements // groups, self.bits) if groups else 4 * self.num_elements
        if given != whole:
            raise ConfigError(f"encoded tensor: {given} bytes of payload for shape {self.shape} at {self.bits} bits; "
                              f"it has {whole}")

    @property
    def num_elements(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What travels: payload and, as float32, least and largest values."""
        return memoryview(self.payload).nbytes + 8 * len(self.low)


def encode(features: Array, bits: int, *, grouping: Grouping = "tensor", what: str = "features") -> EncodedTensor:
    """Return `features` (any shape) in `bits` per element (F24).

    At 32 bits the payload is a view of `features`, which must then not change until it has been sent; other payloads
    are the tensor's own. A tensor that is not contiguous is copied first. Least and largest value per sample cost 8
    bytes a sample, and a sample's error then goes by its own range: behind LeNet's first pooling that makes the squared
    error 1.2 to 1.5 times smaller on digits, and many times where samples differ in scale.
    Raises `ConfigError`, with `what` as the tensor's name, for NaN and infinity (the training has diverged), for other
    types than float32, unknown bits and an unknown grouping.
    """
    if features.dtype != np.float32:
        raise ConfigError(f"{what}: of type {features.dtype} cannot be encoded; give float32")
    if bits not in BITS:
        raise ConfigError(f"{what}: cannot be encoded in {bits} bits; use one of {', '.join(map(str, BITS))}")
    if grouping not in GROUPINGS:
        raise ConfigError(f"{what}: grouping {grouping!r} is unknown; use {' or '.join(GROUPINGS)}")
    shape = features.shape
    if not features.size:
        return EncodedTensor(bits=bits, shape=shape, payload=b"")
    num_groups = shape[0] if grouping == "sample" and shape and bits < 32 else 1
    groups = features.reshape(num_groups, -1)
    low, high = groups.min(axis=1), groups.max(axis=1)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        # Least and largest value are NaN if any is.
        found = "NaN" if np.isnan(low).any() else "infinite values"
        raise ConfigError(f"{what}: hold {found}, so the training has diverged; lower the learning rate, or go back to "
                          "an earlier checkpoint")
    if bits == 32:
        return EncodedTensor(bits=bits, shape=shape, payload=_bytes_of(groups.astype("<f4", copy=False)))
    payload = np.empty((num_groups, packed_bytes(groups.shape[1], bits)), np.uint8)
    _quantise(groups, low, high, bits, payload)
    return EncodedTensor(bits=bits, shape=shape, low=tuple(low.tolist()), high=tuple(high.tolist()),
                         payload=_bytes_of(payload))


def decode(encoded: EncodedTensor) -> Array:
    """Return the tensor h′ that was encoded, as an array of its own: the same bits on both ends of a link (F24)."""
    if not encoded.low:
        # A copy: the caller may write into it, and the received buffer can be freed.
        return np.frombuffer(encoded.payload, "<f4").reshape(encoded.shape).astype(np.float32)
    bits, num_groups = encoded.bits, len(encoded.low)
    extent = np.array(encoded.high) - encoded.low
    real = _real_type(extent, bits)
    step, low = (extent / (2**bits - 1)).astype(real)[:, None], np.array(encoded.low, real)[:, None]
    features = np.empty((num_groups, encoded.num_elements // num_groups), np.float32)
    payload = np.frombuffer(encoded.payload, np.uint8).reshape(num_groups, -1)
    work = np.empty(min(features.size, _BLOCK), real)
    for rows, columns in _blocks(*features.shape):
        target = features[rows, columns]
        level = target if real is np.float32 else work[:target.size].reshape(target.shape)
        level[...] = _levels(payload[rows], columns, bits)
        np.multiply(level, step[rows], out=level)
        np.add(level, low[rows], out=level)
        if level is not target:
            target[...] = level
    return features.reshape(encoded.shape)


def _quantise(groups: Array, low: Array, high: Array, bits: int, payload: NDArray[np.uint8]) -> None:
    """Write q of `groups` (groups, elements) into `payload` (groups, bytes)."""
    extent = high.astype(np.float64) - low
    real = _real_type(extent, bits)
    # A group that is constant gets q = 0.
    scale = np.divide(2**bits - 1, extent, out=np.zeros_like(extent), where=extent > 0).astype(real)[:, None]
    least_values = low.astype(real)[:, None]
    work = np.empty(min(groups.size, _BLOCK), real)
    small = np.empty(work.size, np.uint8) if bits < 8 else None
    for rows, columns in _blocks(*groups.shape):
        source = groups[rows, columns]
        level = work[:source.size].reshape(source.shape)
        np.subtract(source, least_values[rows], out=level, dtype=real)
        np.multiply(level, scale[rows], out=level)
        np.rint(level, out=level)
        if small is None:
            payload.view(f"<u{bits // 8}")[rows, columns] = level
            continue
        values = small[:source.size].reshape(source.shape)
        values[...] = level
        payload[rows, _byte_columns(columns, bits)] = pack(values, bits)


def _real_type(extent: NDArray[np.float64], bits: int) -> type[np.floating[Any]]:
    """Return what to compute in, given max − min of each group: the same at both ends."""
    least, largest = _FLOAT32_RANGES
    fits = (extent == 0) | ((least <= extent) & (extent <= largest))
    return np.float32 if bits <= 8 and bool(fits.all()) else np.float64


def _levels(payload: NDArray[np.uint8], columns: slice, bits: int) -> NDArray[np.unsignedinteger]:
    """Return the q of some columns of groups."""
    if bits >= 8:
        levels: NDArray[np.unsignedinteger] = payload.view(f"<u{bits // 8}")[:, columns]
        return levels
    return unpack(payload[:, _byte_columns(columns, bits)], bits, columns.stop - columns.start)


def _blocks(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield where the blocks of a matrix lie: several whole rows each, or a part of one."""
    rows, columns = max(1, _BLOCK // num_columns), min(num_columns, _BLOCK)
    for row in range(0, num_rows, rows):
        for column in range(0, num_columns, columns):
            yield slice(row, min(row + rows, num_rows)), slice(column, min(column + columns, num_columns))


def _byte_columns(columns: slice, bits: int) -> slice:
    """Return the bytes of a block's columns; a block begins on a byte, since `_BLOCK` is a multiple of four."""
    return slice(columns.start * bits // 8, packed_bytes(columns.stop, bits))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data.toreadonly()
