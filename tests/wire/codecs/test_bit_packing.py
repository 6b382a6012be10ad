"""Packing into bytes: against bits set one by one, for any length and number of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.codecs.quantisation import pack, packed_bytes, unpack
from tests.one_line import refused


def by_hand(values: list[int], bits: int) -> bytes:
    number = sum(value << i * bits for i, value in enumerate(values))
    return number.to_bytes(packed_bytes(len(values), bits), "little")


@given(bits=st.sampled_from([2, 4]), numbers=st.lists(st.integers(0, 255), max_size=70))
def test_packed_bytes_are_one_little_endian_number(bits: int, numbers: list[int]) -> None:
    values = [number % 2**bits for number in numbers]
    packed = pack(np.array(values, np.uint8), bits)
    assert packed.tobytes() == by_hand(values, bits)
    assert unpack(packed, bits, len(values)).tolist() == values


@given(
    bits=st.sampled_from([2, 4]),
    rows=st.integers(1, 4),
    columns=st.integers(1, 33),
    seed=st.integers(0, 99),
)
def test_every_row_begins_on_a_byte_of_its_own(
    bits: int, rows: int, columns: int, seed: int
) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (rows, columns), np.uint8)
    packed = pack(values, bits)
    assert packed.shape == (rows, packed_bytes(columns, bits))
    assert [row.tobytes() for row in packed] == [by_hand(row.tolist(), bits) for row in values]
    assert np.array_equal(unpack(packed, bits, columns), values)
    # In whatever layout.
    assert np.array_equal(pack(values[:, ::-1], bits), pack(values[:, ::-1].copy(), bits))


@pytest.mark.parametrize(
    ("bits", "packed"), [(2, [0b11_10_01_00, 0b00_00_00_11]), (4, [0x10, 0x32, 0x03])]
)
def test_the_first_value_is_in_the_lowest_bits(bits: int, packed: list[int]) -> None:
    assert pack(np.array([0, 1, 2, 3, 3], np.uint8), bits).tolist() == packed


def test_other_widths_and_too_few_bytes_are_refused() -> None:
    for bits in (1, 3, 8):
        refused(lambda bits=bits: pack(np.zeros(4, np.uint8), bits), f"{bits} bits")
    refused(lambda: unpack(np.zeros(2, np.uint8), 2, 9), "2 bytes", "9 values", "3")
