"""Arrays as bytes: weights on the wire and in files, without pickle, which could execute code."""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from socflower.edgecloud.halves import Weights
from socflower.edgecloud.stream.failures import FrameRefused
from socflower.edgecloud.stream.messages import split_pb2 as wire

_INDEX_LENGTH = struct.Struct("<I")
_DTYPES = frozenset(np.dtype(name) for name in (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"))
_LARGEST_RANK = 16
_MOST_ELEMENTS = 1 << 40


def array_to_bytes(array: NDArray[Any]) -> memoryview:
    """Return an array's elements in C order, little-endian; a view if the array already has this layout."""
    # ascontiguousarray would make a vector of a scalar, hence the reshape.
    flat: NDArray[Any] = np.ascontiguousarray(array).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8).data if flat.size else memoryview(b"")


def describe_array(array: NDArray[Any], name: str = "") -> wire.Block:
    """Return what `array_from_bytes` needs besides the bytes. Raises `TypeError` for arrays of other than numbers."""
    if array.dtype.newbyteorder("=") not in _DTYPES:
        raise TypeError(f"{name or 'array'}: elements of type {array.dtype} do not travel")
    return wire.Block(name=name, dtype=array.dtype.newbyteorder("=").name, shape=array.shape)


def array_num_bytes(block: wire.Block) -> int:
    """Return the size of an array in bytes; `FrameRefused` for an invalid type or shape."""
    try:
        dtype = np.dtype(block.dtype)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype not in _DTYPES or not is_valid_shape(block.shape):
        raise FrameRefused(f"an array of type {block.dtype[:40]!r} with shape {list(block.shape[:5])}")
    return int(np.dtype(block.dtype).itemsize * math.prod(block.shape))


def is_valid_shape(shape: Sequence[int]) -> bool:
    """Whether an array can have that shape, also one without elements, whose other sizes would go unchecked."""
    return len(shape) <= _LARGEST_RANK and math.prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS


def array_from_bytes(block: wire.Block, body: memoryview) -> NDArray[Any]:
    """Return the array; it shares memory with `body`, which has exactly its bytes (else `FrameRefused`)."""
    if array_num_bytes(block) != body.nbytes:
        raise FrameRefused(f"{body.nbytes} bytes for an array {tuple(block.shape)} of {block.dtype}")
    array = np.frombuffer(body, np.dtype(block.dtype).newbyteorder("<")).reshape(tuple(block.shape))
    return array.astype(np.dtype(block.dtype), copy=False)


def pack_weights(weights: Weights) -> list[memoryview]:
    """Return the pieces of a body: an index of names, types and shapes, then the bytes. The arrays are not copied."""
    index = wire.Blocks(blocks=[describe_array(array, name) for name, array in weights.items()]).SerializeToString()
    return [memoryview(_INDEX_LENGTH.pack(len(index)) + index), *(array_to_bytes(array) for array in weights.values())]


def unpack_weights(body: memoryview) -> dict[str, NDArray[Any]]:
    """Return what `pack_weights` packed, as arrays that may be written to; `FrameRefused` for anything else."""
    if body.nbytes < _INDEX_LENGTH.size:
        raise FrameRefused("weights without an index")
    end = _INDEX_LENGTH.size + _INDEX_LENGTH.unpack_from(body)[0]
    try:
        blocks = wire.Blocks.FromString(bytes(body[_INDEX_LENGTH.size:end])).blocks
    except DecodeError:
        raise FrameRefused("weights whose index cannot be read") from None
    if len({block.name for block in blocks}) != len(blocks):
        raise FrameRefused("weights with a name twice")
    if end + sum(array_num_bytes(block) for block in blocks) != body.nbytes:
        raise FrameRefused(f"{body.nbytes} bytes of weights, which is not what their index says")
    weights: dict[str, NDArray[Any]] = {}
    for block in blocks:
        size = array_num_bytes(block)
        weights[block.name] = array_from_bytes(block, body[end:end + size]).copy()
        end += size
    return weights


def body_num_bytes(pieces: Iterable[bytes | memoryview]) -> int:
    """Return the total bytes of a body in pieces."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def slice_body(pieces: Sequence[bytes | memoryview], slice_bytes: int) -> Iterable[bytes]:
    """Yield a body in slices of `slice_bytes`, the last one shorter; one empty slice for an empty body."""
    pending: list[memoryview] = []
    pending_bytes, anything = 0, False
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest.nbytes:
            head = rest[:slice_bytes - pending_bytes]
            rest = rest[head.nbytes:]
            pending.append(head)
            pending_bytes += head.nbytes
            if pending_bytes == slice_bytes:
                anything = True
                yield b"".join(pending)
                pending, pending_bytes = [], 0
    if pending or not anything:
        yield b"".join(pending)
