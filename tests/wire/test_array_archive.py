"""Saved arrays come back as they were, and damage is an error of one line."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.saved_state import StateKind, from_bytes, seal, to_bytes
from tests.one_line import refused

ARRAYS: dict[str, Any] = {
    "header": np.arange(6, dtype=np.int8).reshape(2, 3),
    "x": np.array([1.5, -0.0], np.float16),
}


def test_header_and_arrays_come_back_as_they_were() -> None:
    header, arrays = from_bytes("queue", to_bytes("queue", {"count": 3, "names": ["a"]}, ARRAYS))
    assert header == {"count": 3, "names": ["a"]}
    assert {key: (array.dtype, array.tobytes()) for key, array in arrays.items()} == {
        key: (array.dtype, array.tobytes()) for key, array in ARRAYS.items()
    }
    assert all(array.flags.writeable for array in arrays.values())
    assert from_bytes("queue", to_bytes("queue", {}, {})) == ({}, {})


@given(cut=st.integers(0, 600))
def test_what_is_torn_is_refused(cut: int) -> None:
    whole = to_bytes("queue", {"count": 3}, ARRAYS)
    refused(lambda: from_bytes("queue", whole[: min(cut, len(whole) - 1)]), "queue", "damaged")


@given(position=st.integers(0, 10**4), value=st.integers(1, 255))
def test_what_is_changed_is_refused(position: int, value: int) -> None:
    whole = bytearray(to_bytes("queue", {"count": 3}, ARRAYS))
    whole[position % len(whole)] ^= value
    refused(lambda: from_bytes("queue", bytes(whole)), "queue", "damaged")


def test_another_kind_and_pickled_objects_are_refused() -> None:
    other = to_bytes("error feedback", {}, {})
    refused(lambda: from_bytes("queue", other), "saved queue", "error feedback")
    with pytest.raises(TypeError):
        to_bytes("queue", {}, {"x": np.array([object()], object)})
    kind = StateKind(name="queue", schema=2, remedy="")
    pickled = b"".join(seal(kind, {}, [b'\x10\0\0\0[["x","|O",[1]]]', bytes(8)]))
    refused(lambda: from_bytes("queue", pickled), "damaged")
