"""Arrays as bytes, in messages and in files: without pickle, which could execute code."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INDEX_LENGTH = struct.Struct("<I")
_LONGEST_INDEX_BYTES = 16 << 20
_NAMES = (
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
)
_DTYPES = {name: np.dtype(name) for name in _NAMES}
_LARGEST_RANK = 16
_MOST_ELEMENTS = 1 << 40


class MalformedBytes(ValueError):
    """Invalid bytes from a peer or a file; the text is one line."""


def array_to_bytes(array: NDArray[Any]) -> memoryview:
    """Return an array's elements in C order, little-endian; a view if the array already has this layout."""
    # ascontiguousarray would make a vector of a scalar, hence the reshape.
    flat: NDArray[Any] = np.ascontiguousarray(array).reshape(-1)
    if not flat.size:
        return memoryview(b"")
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def array_type(array: NDArray[Any], name: str = "array") -> str:
    """Return the name of an array's type. Raises `TypeError` for elements other than numbers."""
    found: str = array.dtype.newbyteorder("=").name
    if found not in _DTYPES:
        raise TypeError(f"{name}: elements of type {array.dtype} do not travel")
    return found


def array_num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of an array in bytes; `MalformedBytes` for an invalid type or shape."""
    if dtype not in _DTYPES:
        raise MalformedBytes(f"an array of type {dtype[:40]!r}")
    check_shape(shape)
    return _DTYPES[dtype].itemsize * math.prod(shape)


def check_shape(shape: Sequence[int]) -> None:
    """Raise `MalformedBytes` if no array has that shape."""
    is_size = len(shape) <= _LARGEST_RANK and all(type(size) is int and size >= 0 for size in shape)
    # An empty array has no bytes that would bound its other sizes, hence a 1 for each 0.
    if not is_size or math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise MalformedBytes(f"a tensor of shape {str(list(shape[:5]))[:80]}")


def array_from_bytes(dtype: str, shape: Sequence[int], body: memoryview) -> NDArray[Any]:
    """Return the array; it shares memory with `body`, which has exactly its bytes (else `MalformedBytes`)."""
    if array_num_bytes(dtype, shape) != body.nbytes:
        raise MalformedBytes(f"{body.nbytes} bytes for an array {tuple(shape)} of {dtype}")
    flat = np.frombuffer(body, _DTYPES[dtype].newbyteorder("<"))
    return flat.reshape(tuple(shape)).astype(_DTYPES[dtype], copy=False)


def digest_of(entries: Mapping[str, bytes]) -> str:
    """Return a digest of named bytes, in their order; equal for equal names and bytes only."""
    digest = hashlib.sha256()
    for name, content in entries.items():
        digest.update(json.dumps([name, len(content)]).encode())
        digest.update(content)
    return digest.hexdigest()


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> list[memoryview]:
    """Return named arrays as pieces of bytes: an index of names, types and shapes, then the elements, not copied.

    Raises `TypeError` for arrays of other than numbers.
    """
    entries = [[name, array_type(array, name), array.shape] for name, array in arrays.items()]
    index = json.dumps(entries).encode()
    head = memoryview(_INDEX_LENGTH.pack(len(index)) + index)
    return [head, *map(array_to_bytes, arrays.values())]


def unpack_arrays(body: memoryview) -> dict[str, NDArray[Any]]:
    """Return what `pack_arrays` packed, as arrays that may be written to; `MalformedBytes` for anything else.

    Types, shapes and sizes are checked before anything is allocated: the arrays have at most as many bytes as `body`.
    """
    length = _INDEX_LENGTH.unpack_from(body)[0] if body.nbytes >= _INDEX_LENGTH.size else math.inf
    if length > min(body.nbytes - _INDEX_LENGTH.size, _LONGEST_INDEX_BYTES):
        raise MalformedBytes("arrays without an index")
    start = _INDEX_LENGTH.size + int(length)
    index = _read_index(bytes(body[_INDEX_LENGTH.size : start]))
    if start + sum(num_bytes for *_, num_bytes in index) != body.nbytes:
        raise MalformedBytes(f"{body.nbytes} bytes of arrays, which is not what their index says")
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, shape, num_bytes in index:
        arrays[name] = array_from_bytes(dtype, shape, body[start : start + num_bytes]).copy()
        start += num_bytes
    return arrays


def _read_index(text: bytes) -> list[tuple[str, str, list[int], int]]:
    """Return name, type, shape and size in bytes of each array."""
    try:
        index = [
            (name, dtype, shape, array_num_bytes(dtype, shape))
            for name, dtype, shape in json.loads(text)
        ]
        num_names = len({name for name, *_ in index if isinstance(name, str)})
    except MalformedBytes:
        raise
    except (ValueError, TypeError, RecursionError):
        raise MalformedBytes("arrays whose index cannot be read") from None
    if num_names != len(index):
        raise MalformedBytes("arrays with equal names, or one without a name")
    return index
