"""Arrays as bytes and back, and bytes that are no arrays."""

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from socflower.wire.arrays import MalformedBytes, pack_arrays, unpack_arrays

DTYPES = st.sampled_from(
    ["float16", "float32", "float64", "int8", "int64", "uint8", "uint16", "bool", ">f4", ">i2"]
)
ARRAYS = DTYPES.flatmap(
    lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)


def packed(index: Any, body: bytes = b"") -> memoryview:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return memoryview(struct.pack("<I", len(text)) + text + body)


@given(named=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4))
def test_arrays_come_out_as_they_went_in(named: dict[str, Any]) -> None:
    found = unpack_arrays(memoryview(b"".join(pack_arrays(named))))
    assert list(found) == list(named)
    for name, array in named.items():
        same = array.astype(array.dtype.newbyteorder("="))
        assert (found[name].dtype, found[name].shape) == (same.dtype, same.shape) and found[
            name
        ].flags.writeable
        assert found[name].tobytes() == same.tobytes()


def test_large_arrays_are_packed_without_a_copy_and_transposed_ones_in_their_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(np.frombuffer(pack_arrays({"x": array})[1], np.float32), array)
    found = unpack_arrays(memoryview(b"".join(pack_arrays({"x": array.T}))))
    assert found["x"].tolist() == array.T.tolist()


@pytest.mark.parametrize("array", [np.array([None]), np.array(["a"]), np.array([1j])])
def test_arrays_of_other_than_numbers_do_not_travel(array: Any) -> None:
    with pytest.raises(TypeError, match=r"^w: elements of type .* do not travel$"):
        pack_arrays({"w": array})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (memoryview(b"\1\0"), "arrays without an index"),
        (memoryview(b"\xff\xff\xff\xff[]"), "arrays without an index"),
        (packed(b"[[]"), "arrays whose index cannot be read"),
        (packed(b"[" * 100_000), "arrays whose index cannot be read"),
        (packed({"x": 1}), "arrays whose index cannot be read"),
        (packed([["x", "float32"]]), "arrays whose index cannot be read"),
        (packed([["x", ["float32"], [1]]], bytes(4)), "arrays whose index cannot be read"),
        (packed([["x", "float32", None]], bytes(4)), "arrays whose index cannot be read"),
        (packed([[["x"], "float32", [1]]], bytes(4)), "one has none"),
        (packed([["x", "float32", [1]], ["x", "float32", [1]]], bytes(8)), "two have one name"),
        (packed([["x", "object", [1]]], bytes(8)), "an array of type 'object'"),
        (packed([["x", "<f4,O", [1]]], bytes(12)), "an array of type"),
        (packed([["x", "float32", [-1]]], bytes(4)), "a tensor of shape"),
        (packed([["x", "float32", [1.0]]], bytes(4)), "a tensor of shape"),
        (packed([["x", "float32", [True]]], bytes(4)), "a tensor of shape"),
        (packed([["x", "float32", [0, 1 << 60]]]), "a tensor of shape"),
        (packed([["x", "float32", [1] * 17]], bytes(4)), "a tensor of shape"),
        (packed([["x", "float32", [1 << 30]]], bytes(4)), "not what their index says"),
        (packed([["x", "float32", [1]]], bytes(5)), "not what their index says"),
    ],
)
def test_other_bytes_are_refused_in_one_line_before_anything_is_allocated(
    body: memoryview, why: str
) -> None:
    with pytest.raises(MalformedBytes, match=why) as refused:
        unpack_arrays(body)
    assert "\n" not in str(refused.value)


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
