"""Descriptions of exchanges of gradients: what codings send, and when that changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.hierarchy.exchange.gradients import (
    CODINGS,
    SERVER,
    GradientExchange,
    LargestValues,
    gradient_coding,
)
from tests.one_line import refused


def test_halves_are_half_of_the_bytes_and_eight_bits_a_quarter() -> None:
    num_bytes = 4e6
    for size in (2, 5, 15):
        sent = {
            name: GradientExchange(coding=gradient_coding(name)).wire_bytes(num_bytes, size)
            for name in CODINGS
        }
        assert sent["none"] == 2 * (size - 1) / size * num_bytes
        assert sent["fp16"] == pytest.approx(sent["none"] / 2, rel=0.001)
        assert sent["int8"] == sent["int8-stochastic"] == pytest.approx(sent["none"] / 4, rel=0.001)
        assert sent["dgc"] == pytest.approx((size - 1) * 8 * 1000, rel=0.01)


def test_four_bits_are_fewer_for_few_members_since_they_are_gathered() -> None:
    def sent(name: str, size: int) -> float:
        return GradientExchange(coding=gradient_coding(name)).wire_bytes(4e6, size)

    assert [size for size in range(2, 40) if sent("int4", size) < sent("int8", size)] == [2, 3]
    assert [size for size in range(2, 40) if sent("int4", size) < sent("none", size)] == [
        *range(2, 16)
    ]


def test_a_server_sends_what_it_gets() -> None:
    """Over all members it is n - 1 uploads and downloads."""
    assert 5 * GradientExchange(kind=SERVER).wire_bytes(100.0, 5) == 2 * 4 * 100.0


def test_the_warm_up_sends_less_and_less() -> None:
    coding = LargestValues(ratio=0.001, warm_up_steps=100)
    sent = [coding.num_sent(1_000_000, 2, step) for step in range(150)]
    assert sorted(set(sent), reverse=True) == [250_000, 62_500, 15_625, 3_907, 1_000]
    assert sent == sorted(sent, reverse=True) and sent.index(1_000) == 100
    assert sent[-1] == coding.num_sent(1_000_000, 2, None) and coding.num_sent(1, 2, 0) == 1


def test_where_sums_are_no_dearer_all_is_sent() -> None:
    coding = LargestValues(ratio=0.25)
    assert [coding.num_sent(1000, size, None) for size in (1, 2, 3, 4, 5)] == [
        1000,
        250,
        250,
        1000,
        1000,
    ]


@given(
    ratio=st.floats(1e-4, 1.0),
    warm_up_steps=st.integers(0, 90),
    first=st.integers(0, 120),
    num_steps=st.integers(0, 60),
)
def test_steps_of_a_stage_send_equally_and_stages_are_as_few_as_can_be(
    ratio: float, warm_up_steps: int, first: int, num_steps: int
) -> None:
    coding = LargestValues(ratio=ratio, warm_up_steps=warm_up_steps)
    stages = list(GradientExchange(coding=coding).stages(first, num_steps))
    assert sum(count for count, _ in stages) == num_steps
    at = first
    ratios = []
    for count, start in stages:
        assert start == at
        assert {coding.ratio_at(step) for step in range(at, at + count)} <= {coding.ratio_at(start)}
        ratios.append(coding.ratio_at(start))
        at += count
    assert len(ratios) <= max(1, len(coding.changes) + 1)


def test_mistakes_are_refused() -> None:
    refused(lambda: gradient_coding("zip"), "zip", "fp16", "int8")
    refused(lambda: GradientExchange(kind="mesh"), "mesh", "ring")
    refused(lambda: GradientExchange(kind=SERVER, coding=gradient_coding("int8")), "int8", "ring")
