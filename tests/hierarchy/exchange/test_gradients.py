"""Descriptions of exchanges of gradients: what codings send, and when that changes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster.cost_model import Gradient
from socflower.hierarchy import Exchange, exchange_graph
from socflower.hierarchy.exchange.coding_bytes import (
    CODINGS,
    SERVER,
    Coding,
    LargestValues,
    PowerSGD,
    SelectedBuckets,
    gradient_coding,
)
from socflower.hierarchy.exchange.gradients import EXACT_RING, GradientExchange
from socflower.sim import EventClock
from tests.one_line import refused
from tests.toy_clusters import toy_cluster


def bucket_of(*shape: int) -> Exchange:
    num_bytes = 4.0 * math.prod(shape)
    gradient = Gradient(num_bytes=num_bytes, done=1.0, shape=shape)
    return Exchange(num_bytes=num_bytes, num_tensors=1, gradients=(gradient,))


def coding_of(name: str) -> Coding:
    """Return a coding; one that compares times has links on which fewer bytes are faster."""
    return gradient_coding(f"{name} bytes_per_s=1e6" if name == "hipress" else name)


def test_halves_are_half_of_the_bytes_and_eight_bits_a_quarter() -> None:
    num_bytes = 4e6
    for size in (2, 5, 15):
        sent = {
            name: GradientExchange(coding=coding_of(name)).wire_bytes(bucket_of(1000, 1000), size)
            for name in CODINGS
        }
        assert sent["none"] == 2 * (size - 1) / size * num_bytes
        assert sent["fp16"] == pytest.approx(sent["none"] / 2, rel=0.001)
        assert sent["int8"] == sent["int8-stochastic"] == pytest.approx(sent["none"] / 4, rel=0.001)
        assert sent["dgc"] == sent["hipress"] == pytest.approx((size - 1) * 8 * 1000, rel=0.01)
        assert sent["powersgd"] == pytest.approx(sent["none"] / 500)


def test_four_bits_are_fewer_for_few_members_since_they_are_gathered() -> None:
    def sent(name: str, size: int) -> float:
        bucket = Exchange(num_bytes=4e6, num_tensors=1)
        return GradientExchange(coding=gradient_coding(name)).wire_bytes(bucket, size)

    assert [size for size in range(2, 40) if sent("int4", size) < sent("int8", size)] == [2, 3]
    assert [size for size in range(2, 40) if sent("int4", size) < sent("none", size)] == [
        *range(2, 16)
    ]


def test_a_server_sends_what_it_gets() -> None:
    """Over all members it is n - 1 uploads and downloads; of values and indices it returns those of all."""
    bucket = bucket_of(5000)
    assert 5 * GradientExchange(kind=SERVER).wire_bytes(bucket, 5) == 2 * 4 * 20_000
    largest = GradientExchange(kind=SERVER, coding=gradient_coding("dgc ratio=0.01"))
    assert 5 * largest.wire_bytes(bucket, 5) == 4 * (8 * 50 * (1 + 5) + 2 * 8 * 5)


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
    hipress = coding_of("hipress")
    refused(lambda: GradientExchange(kind=SERVER, coding=hipress), "server", "hipress", "dgc")
    refused(
        lambda: gradient_coding("hipress").operations(bucket_of(5), 2), "hipress", "bytes_per_s"
    )
    refused(lambda: gradient_coding("powersgd rank=1.5"), "rank=1.5", "rank=N")
    refused(lambda: gradient_coding("fp16 ratio=1"), "ratio=1", "'fp16'", "none")
    refused(lambda: gradient_coding("powersgd rank=0"), "rank", "0")
    refused(lambda: gradient_coding("dgc ratio=0.1 ratio=0.2"), "ratio=0.1 ratio=0.2", "twice")
    unknown = Exchange(num_bytes=40.0, num_tensors=1)
    refused(
        lambda: gradient_coding("powersgd").operations(unknown, 2), "powersgd", "profile_module"
    )


@pytest.mark.parametrize("name", CODINGS)
def test_a_coding_is_made_again_from_its_text(name: str) -> None:
    for steps in (0, 10):
        coding = gradient_coding(name, steps_per_epoch=steps)
        assert gradient_coding(coding.spec, steps_per_epoch=99) == coding
    assert gradient_coding("powersgd rank=3 start_step=5") == PowerSGD(rank=3, start_step=5)


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=5),
    rank=st.integers(1, 5),
)
def test_matrices_are_sent_in_low_rank_if_that_is_less_than_half(
    shapes: list[list[int]], rank: int
) -> None:
    for shape, (rows, columns, used) in zip(
        shapes, PowerSGD(rank=rank).matrices(shapes), strict=True
    ):
        assert rows * columns == math.prod(shape) and rows == [*shape, 1][0]
        least = min(rows, columns, rank)
        assert used == (least if 2 * least * (rows + columns) < rows * columns else 0)


@given(size=st.integers(2, 12), seed=st.integers(0, 999))
def test_hipress_takes_for_each_bucket_what_the_clock_says_is_faster(size: int, seed: int) -> None:
    """SeCoPa's choice against the simulation of both, with the time to encode."""
    rng = np.random.default_rng(seed)
    message_s, link = float(rng.choice([1e-6, 1e-4, 1e-2])), 10 ** float(rng.uniform(3, 9))
    cluster = toy_cluster((size,), message_s=message_s, link=link)
    num_elements = int(10 ** rng.uniform(0, 5))
    selective = gradient_coding("hipress ratio=0.01").on(cluster, range(size))
    assert isinstance(selective, SelectedBuckets)
    bucket = bucket_of(num_elements)
    num_sent = max(1, math.ceil(0.01 * num_elements))
    exact, largest = EXACT_RING, GradientExchange(coding=LargestValues(ratio=0.01))
    coded_s = largest.coding.memory_bytes(bucket, size) / selective.memory_bytes_per_s
    if largest.coding.operations(bucket, size) == exact.coding.operations(bucket, size):
        return
    clock = EventClock(cluster)
    fused = replace(bucket, fused=True)
    exact_s = clock.predicted_s(exchange_graph(range(size), fused, exact))
    coded_s += clock.predicted_s(exchange_graph(range(size), fused, largest))
    chosen = selective.num_sent(num_elements, size, None)
    assert chosen == (num_sent if coded_s < exact_s else num_elements)
