"""Arrays as bytes and back, and bytes that are no arrays."""

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays
from tests.one_line import refused

DTYPES = st.sampled_from(
    ["float16", "float32", "float64", "int8", "int64", "uint8", "uint16", "bool", ">f4", ">i2"]
)
ARRAYS = DTYPES.flatmap(
    lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)


def packed(index: Any, body: bytes = b"") -> memoryview:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return memoryview(struct.pack("<I", len(text)) + text + body)


@settings(max_examples=25)
@given(named=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4))
def test_arrays_come_out_as_they_went_in(named: dict[str, Any]) -> None:
    found = unpack_arrays(memoryview(b"".join(pack_arrays(named))))
    assert list(found) == list(named)
    for came, array in zip(found.values(), named.values(), strict=True):
        same = array.astype(array.dtype.newbyteorder("="))
        assert (came.dtype, came.shape) == (same.dtype, same.shape) and came.flags.writeable
        assert came.tobytes() == same.tobytes()


def test_large_arrays_are_packed_without_a_copy_and_transposed_ones_in_their_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(np.frombuffer(pack_arrays({"x": array})[1], np.float32), array)
    found = unpack_arrays(memoryview(b"".join(pack_arrays({"x": array.T}))))
    assert found["x"].tolist() == array.T.tolist()


@pytest.mark.parametrize("array", [np.array([None]), np.array(["a"]), np.array([1j])])
def test_arrays_of_other_than_numbers_do_not_travel(array: Any) -> None:
    refused(lambda: pack_arrays({"w": array}), "w: ", array.dtype, error=TypeError)


@pytest.mark.parametrize(
    ("named", "bodies"),
    [
        ("without an index", [memoryview(b"\1\0"), memoryview(b"\xff\xff\xff\xff[]")]),
        ("index", [packed(b"[[]"), packed(b"[" * 100_000), packed({"x": 1})]),
        ("index", [packed([["x", "float32"]]), packed([["x", ["float32"], [1]]], bytes(4))]),
        ("index", [packed([["x", "float32", None]], bytes(4))]),
        ("without a name", [packed([[["x"], "float32", [1]]], bytes(4))]),
        ("equal names", [packed([["x", "float32", [1]], ["x", "float32", [1]]], bytes(8))]),
        ("type", [packed([["x", kind, [1]]], bytes(12)) for kind in ("object", "<f4,O")]),
        ("shape", [packed([["x", "float32", [size]]], bytes(4)) for size in (-1, 1.0, True)]),
        ("shape", [packed([["x", "float32", [0, 1 << 60]]])]),
        ("shape", [packed([["x", "float32", [1] * 17]], bytes(4))]),
        ("index says", [packed([["x", "float32", [1 << 30]]], bytes(4))]),
        ("index says", [packed([["x", "float32", [1]]], bytes(5))]),
    ],
)
def test_other_bytes_are_refused_before_anything_is_allocated(
    named: str, bodies: list[memoryview]
) -> None:
    for body in bodies:
        refused(lambda body=body: unpack_arrays(body), named, error=MalformedBytes)


@given(garbage=st.binary(max_size=60))
def test_garbage_is_no_arrays(garbage: bytes) -> None:
    with suppress(MalformedBytes):
        assert unpack_arrays(memoryview(garbage)) is not None


@given(change=st.tuples(st.integers(0, 10**4), st.integers(1, 255)))
def test_a_changed_byte_gives_other_arrays_or_a_refusal_and_nothing_else(
    change: tuple[int, int],
) -> None:
    whole = bytearray(b"".join(pack_arrays({"a": np.arange(3), "b": np.zeros((2, 2), np.float32)})))
    whole[change[0] % len(whole)] ^= change[1]
    with suppress(MalformedBytes):
        assert unpack_arrays(memoryview(whole)) is not None
