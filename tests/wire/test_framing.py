"""Bytes in parts and whole again."""

from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.framing import body_num_bytes, parts_of


@given(pieces=st.lists(st.binary(max_size=20)), part_bytes=st.integers(1, 15))
def test_parts_are_the_whole_in_order(pieces: list[bytes], part_bytes: int) -> None:
    parts = list(parts_of(pieces, part_bytes))
    assert b"".join(parts) == b"".join(pieces) and body_num_bytes(parts) == body_num_bytes(pieces)
    assert all(len(piece) == part_bytes for piece in parts[:-1]) and len(parts) >= 1
    assert len(parts[-1]) <= part_bytes and (parts[-1] or len(parts) == 1)
