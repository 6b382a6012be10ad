"""Bytes in parts and whole again."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.arrays import MalformedBytes
from socflower.wire.framing import Assembly, body_num_bytes, parts_of
from tests.one_line import refused


@given(pieces=st.lists(st.binary(max_size=20)), part_bytes=st.integers(1, 15))
def test_parts_are_the_whole_in_order(pieces: list[bytes], part_bytes: int) -> None:
    parts = list(parts_of(pieces, part_bytes))
    assert b"".join(parts) == b"".join(pieces) and body_num_bytes(parts) == body_num_bytes(pieces)
    assert all(len(piece) == part_bytes for piece in parts[:-1]) and len(parts) >= 1
    assert len(parts[-1]) <= part_bytes and (parts[-1] or len(parts) == 1)


@given(body=st.binary(max_size=60), part_bytes=st.integers(1, 15))
def test_what_was_cut_is_whole_again_and_only_then(body: bytes, part_bytes: int) -> None:
    arriving = Assembly(len(body), "a letter")
    for part in parts_of([body], part_bytes):
        if arriving.missing_bytes:
            refused(arriving.whole, "a letter", f"{len(body)} bytes", error=MalformedBytes)
        arriving.add(part)
    assert bytes(arriving.whole()) == body and arriving.whole().readonly
    refused(lambda: arriving.add(b"x"), "a letter", error=MalformedBytes)


@pytest.mark.parametrize("num_bytes", [-1, 11, 1 << 62])
def test_too_large_a_body_is_refused_before_it_arrives(num_bytes: int) -> None:
    begin = partial(Assembly, num_bytes, "a letter", most_bytes=10)
    refused(begin, "a letter", num_bytes, "10", error=MalformedBytes)
