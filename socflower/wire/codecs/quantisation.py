"""Tensors as integers of few bits: each in its own range (F24), or in a unit that several senders share.

**Own range.** A tensor, or each of its samples, is divided uniformly between its least and largest value:

    q = round((h − min)·(2ⁿ − 1)/(max − min)),    h′ = min + q·(max − min)/(2ⁿ − 1)

This applies to the widths 2, 4, 8 and 16; 32 bits are the float32 values unchanged. IEEE halves would be worse at 16
bits: for values distributed like features they are several times less accurate, they end at 65,504, and gradients of a
mean over a large batch become subnormal.

Both ways are computed in float32 up to 8 bits. At 16 bits, and if max − min is so large or small that float32 would
overflow, they are computed in float64. So |h′ − h| is at most half a step, plus 2⁻¹³ of a step, plus the rounding of h′
to float32. h′ is a multiplication and an addition, each rounded, which gives the same bits on every machine; min comes
back exactly, so that the zeros behind a ReLU stay zeros. Tensors are processed in blocks that fit into a small cache.

**Shared unit.** Sums of several senders need multiples of one step, or halves of one power of two: `pack_lanes` puts
four signed integers into a word such that words can be added, `half_exponent` chooses the power.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError

BITS = (2, 4, 8, 16, 32)
"""The widths of an element."""

Floats: TypeAlias = NDArray[np.float32]
Grouping: TypeAlias = Literal["tensor", "sample"]
"""The scope of a least and largest value: the whole tensor, as in the paper, or each sample (first dimension)."""

GROUPINGS: tuple[Grouping, ...] = ("tensor", "sample")

_PACKED_BITS = (2, 4)
# Elements that are processed at a time.
_BLOCK = 1 << 14
# Least and largest max − min for which float32 neither overflows nor loses bits.
_FLOAT32_RANGES = (1e-30, 1e38)
_LARGEST = float(np.finfo(np.float32).max)
_ZERO_LANES = np.uint32(0x80808080)


# ------------------------------------------------------------------------------------------------- bits of integers
def packed_bytes(num_values: int, bits: int) -> int:
    """Return how many bytes hold `num_values` numbers of `bits`."""
    return -(-num_values * bits // 8)


def pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return values (..., n), each below 2^bits, as bytes (..., ceil(n·bits/8)): the first value in the lowest bits.

    Unused bits of the last byte are 0. A value with more bits would change its neighbours. Raises `ConfigError` for
    other than 2 and 4 bits.
    """
    per_byte = _values_per_byte(bits)
    packed = np.zeros((*values.shape[:-1], packed_bytes(values.shape[-1], bits)), np.uint8)
    for place in range(per_byte):
        part = values[..., place::per_byte]
        packed[..., : part.shape[-1]] |= part << np.uint8(place * bits)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, num_values: int) -> NDArray[np.uint8]:
    """Return the first `num_values` values (..., num_values) of bytes (..., bytes) from `pack`.

    Raises `ConfigError` for other than 2 and 4 bits, and for fewer bytes than that many values take.
    """
    per_byte, num_bytes = _values_per_byte(bits), packed.shape[-1]
    if num_values > num_bytes * per_byte:
        raise ConfigError(
            f"packed values: {num_bytes} bytes for {num_values} values of {bits} bits, which need "
            f"{packed_bytes(num_values, bits)}"
        )
    values = np.empty((*packed.shape[:-1], num_bytes * per_byte), np.uint8)
    for place in range(per_byte):
        values[..., place::per_byte] = packed >> np.uint8(place * bits) & np.uint8(2**bits - 1)
    return values[..., :num_values]


def _values_per_byte(bits: int) -> int:
    if bits not in _PACKED_BITS:
        raise ConfigError(f"packed values: {bits} bits are not packed; use 2 or 4")
    return 8 // bits


def pack_lanes(levels: Floats) -> NDArray[np.int32]:
    """Return int32 words of four integers each, −127 to 127: Σ levelⱼ · 256^j.

    Words add lane by lane as long as lanes stay in ±127, without overflow: 127 · (1 + 256 + 256² + 256³) < 2³¹.
    """
    lanes = (levels + 128).astype(np.uint8)
    # One subtraction of all zero points carries the borrows from lane to lane.
    return (lanes.view("<u4") - _ZERO_LANES).astype(np.uint32).view(np.int32)


def unpack_lanes(words: NDArray[np.int32]) -> Floats:
    """Return the four integers of each word."""
    lanes = (words.view(np.uint32) + _ZERO_LANES).astype("<u4").view(np.uint8)
    return lanes.astype(np.float32) - np.float32(128)


def half_exponent(largest: float) -> int:
    """Return e such that values up to `largest`, times 2^e, neither overflow nor needlessly underflow as float16.

    2^15 leaves a factor of almost 2 for rounding; beyond ±126 the factor itself would not be a normal float32.
    """
    if not math.isfinite(largest) or not largest:
        return 0
    return max(-126, min(126, 15 - math.frexp(largest)[1]))


# ------------------------------------------------------------------------------------------------- tensors in a range
@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTensor:
    """An encoded tensor, from `encode` or from the wire. Raises `ConfigError` if it is invalid.

    A group is the whole tensor, or one of its samples, in order; each begins on a byte of its own.
    """

    bits: int
    shape: tuple[int, ...]
    # Least value of each group; none at 32 bits and for an empty tensor.
    low: tuple[float, ...] = ()
    # Largest value of each group.
    high: tuple[float, ...] = ()
    # 2 and 4 bits: see `pack`; 16: little-endian; 32: little-endian float32.
    payload: bytes | memoryview

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ConfigError(f"encoded tensor: {problem}")

    def _problem(self) -> str | None:
        if self.bits not in BITS:
            return f"bits = {self.bits} is unknown; use one of {', '.join(map(str, BITS))}"
        if min(self.shape, default=0) < 0:
            return f"shape {self.shape} has a negative size"
        groups = len(self.low)
        is_quantised = self.bits < 32 and self.num_elements > 0
        allowed = (1, self.shape[0] if self.shape else 1) if is_quantised else (0,)
        if len(self.high) != groups or groups not in allowed:
            wanted = f"{allowed[0]} or {allowed[-1]} of each" if is_quantised else "none"
            return f"{groups} least and {len(self.high)} largest values; it needs {wanted}"
        for low, high in zip(self.low, self.high, strict=True):
            if not -_LARGEST <= low <= high <= _LARGEST:
                return (
                    f"least value {low} and largest {high} are no range of finite float32 numbers"
                )
        given, needed = memoryview(self.payload).nbytes, 4 * self.num_elements
        if groups:
            needed = groups * packed_bytes(self.num_elements // groups, self.bits)
        if given != needed:
            return (
                f"{given} bytes of payload for shape {self.shape} at {self.bits} bits, not {needed}"
            )
        return None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire: the payload and, as float32, least and largest values."""
        return memoryview(self.payload).nbytes + 8 * len(self.low)


def encode(
    features: Floats,
    bits: int,
    *,
    grouping: Grouping = "tensor",
    what: str = "features",
    quantum: float | None = None,
) -> EncodedTensor:
    """Return `features` (any shape) in `bits` per element (F24).

    At 32 bits the payload is a view of `features`, which must not change until it has been sent; other payloads are
    the tensor's own. With `grouping` "sample" the ranges cost 8 bytes a sample, and a sample's error depends on its own
    range: on digits behind LeNet's first pooling the squared error is 1.2 to 1.5 times smaller, and many times smaller
    if samples differ in scale.

    With `quantum`, a power of two whose multiples all features are, 8 or 16 bits lose nothing if the features are
    at most 2^bits − 1 multiples apart: the range is widened until a step is the quantum.

    Raises `ConfigError`, with `what` as the tensor's name, for NaN and infinity (the training has diverged), for other
    types than float32, unknown bits and an unknown grouping.
    """
    if features.dtype != np.float32:
        raise ConfigError(f"{what}: of type {features.dtype} cannot be encoded; give float32")
    if bits not in BITS:
        raise ConfigError(
            f"{what}: cannot be encoded in {bits} bits; use one of {', '.join(map(str, BITS))}"
        )
    if grouping not in GROUPINGS:
        raise ConfigError(f"{what}: grouping {grouping!r} is unknown; use {' or '.join(GROUPINGS)}")
    shape = features.shape
    if not features.size:
        return EncodedTensor(bits=bits, shape=shape, payload=b"")
    num_groups = shape[0] if grouping == "sample" and shape and bits < 32 else 1
    groups = features.reshape(num_groups, -1)
    low, high = _finite_range(groups, what)
    if bits == 32:
        little_endian = groups.astype("<f4", copy=False)
        return EncodedTensor(bits=bits, shape=shape, payload=_bytes_of(little_endian))
    if quantum is not None and bits >= 8:
        widest = np.float32((2**bits - 1) * quantum)
        high = np.where(high - low <= widest, low + widest, high)
    return EncodedTensor(
        bits=bits,
        shape=shape,
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        payload=_bytes_of(_quantised(groups, low, high, bits)),
    )


def _finite_range(groups: Floats, what: str) -> tuple[Floats, Floats]:
    """Return least and largest value of each group; `ConfigError` if any value is not finite."""
    low, high = groups.min(axis=1), groups.max(axis=1)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        # If any value is NaN, so are least and largest value.
        found = "NaN" if np.isnan(low).any() else "infinite values"
        raise ConfigError(
            f"{what}: hold {found}, so the training has diverged; lower the learning rate"
        )
    return low, high


def decode(encoded: EncodedTensor) -> Floats:
    """Return the tensor h′ that was encoded, as an array of its own: the same bits on both ends of a link (F24)."""
    if not encoded.low:
        # A copy, since the caller may write into it, and so that the received buffer can be freed.
        return np.frombuffer(encoded.payload, "<f4").reshape(encoded.shape).astype(np.float32)
    bits, num_groups = encoded.bits, len(encoded.low)
    extent = np.array(encoded.high) - encoded.low
    real = _real_type(extent, bits)
    step = (extent / (2**bits - 1)).astype(real)[:, None]
    low = np.array(encoded.low, real)[:, None]
    features = np.empty((num_groups, encoded.num_elements // num_groups), np.float32)
    payload = np.frombuffer(encoded.payload, np.uint8).reshape(num_groups, -1)
    for columns in _blocks(*features.shape):
        if bits >= 8:
            integers: NDArray[Any] = payload.view(f"<u{bits // 8}")[:, columns]
        else:
            packed = payload[:, _byte_columns(columns, bits)]
            integers = unpack(packed, bits, columns.stop - columns.start)
        level = integers.astype(real)
        level *= step
        level += low
        features[:, columns] = level
    return features.reshape(encoded.shape)


def _quantised(groups: Floats, low: Floats, high: Floats, bits: int) -> NDArray[np.uint8]:
    """Return q of `groups` (groups, elements) as bytes (groups, bytes)."""
    payload = np.empty((len(groups), packed_bytes(groups.shape[1], bits)), np.uint8)
    extent = high.astype(np.float64) - low
    real = _real_type(extent, bits)
    # A group that is constant gets q = 0.
    scale = np.divide(2**bits - 1, extent, out=np.zeros_like(extent), where=extent > 0)
    scales, least_values = scale.astype(real)[:, None], low.astype(real)[:, None]
    for columns in _blocks(*groups.shape):
        level = np.subtract(groups[:, columns], least_values, dtype=real)
        level *= scales
        np.rint(level, out=level)
        if bits >= 8:
            payload.view(f"<u{bits // 8}")[:, columns] = level
        else:
            payload[:, _byte_columns(columns, bits)] = pack(level.astype(np.uint8), bits)
    return payload


def _real_type(extent: NDArray[np.float64], bits: int) -> type[np.floating[Any]]:
    """Return the type to compute in, given max − min of each group: the same at both ends."""
    least, largest = _FLOAT32_RANGES
    fits = (extent == 0) | ((least <= extent) & (extent <= largest))
    return np.float32 if bits <= 8 and bool(fits.all()) else np.float64


def _blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yield the columns of each block of a matrix; a block begins on a byte, at any width."""
    width = max(4, _BLOCK // num_rows // 4 * 4)
    for start in range(0, num_columns, width):
        yield slice(start, min(start + width, num_columns))


def _byte_columns(columns: slice, bits: int) -> slice:
    return slice(columns.start * bits // 8, packed_bytes(columns.stop, bits))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data.toreadonly()
