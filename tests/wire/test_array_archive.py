"""Saved arrays come back as they were, and damage is an error of one line."""

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.wire.saved_state import from_bytes, to_bytes

ARRAYS: dict[str, Any] = {"header": np.arange(6, dtype=np.int8).reshape(2, 3), "x": np.array([1.5, -0.0], np.float16)}


def test_header_and_arrays_come_back_as_they_were() -> None:
    header, arrays = from_bytes("queue", to_bytes("queue", {"count": 3, "names": ["a"]}, ARRAYS))
    assert header == {"count": 3, "names": ["a"]}
    assert {key: (array.dtype, array.tobytes()) for key, array in arrays.items()} \
        == {key: (array.dtype, array.tobytes()) for key, array in ARRAYS.items()}
    assert from_bytes("queue", to_bytes("queue", {}, {})) == ({}, {})


@given(cut=st.integers(0, 600))
def test_what_is_torn_is_refused(cut: int) -> None:
    whole = to_bytes("queue", {"count": 3}, ARRAYS)
    with pytest.raises(ConfigError, match=r"^saved queue: is damaged .*; go back to an earlier checkpoint"):
        from_bytes("queue", whole[:min(cut, len(whole) - 1)])


@given(position=st.integers(0, 10**4), value=st.integers(1, 255))
def test_what_is_changed_is_refused_or_harmless(position: int, value: int) -> None:
    """The archive has a checksum over each array; a byte outside of them can only be one that nothing hangs on."""
    whole = bytearray(to_bytes("queue", {"count": 3}, ARRAYS))
    whole[position % len(whole)] ^= value
    try:
        header, arrays = from_bytes("queue", bytes(whole))
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert header == {"count": 3}
    assert [array.tobytes() for array in arrays.values()] == [array.tobytes() for array in ARRAYS.values()]


def test_another_kind_and_pickled_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^saved queue: is of error feedback; restore what was saved by the same"):
        from_bytes("queue", to_bytes("error feedback", {}, {}))
    stream = io.BytesIO()
    np.savez(stream, header=np.frombuffer(json.dumps({"kind": "queue"}).encode(), np.uint8),
             x=np.array([object()], object))
    with pytest.raises(ConfigError, match="is damaged"):
        from_bytes("queue", stream.getvalue())
