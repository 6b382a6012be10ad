"""What a batch's messages cost: by the byte and by the batch, in seconds of a device that is slowed down or not."""

import math
import time
from typing import Any

import pytest

from benchmarks.split_contest.stream_costs import (
    FEW_BYTES,
    Echo,
    StreamCosts,
    echo_s,
    measure_slowdown,
    with_streams,
)
from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts
from socflower.edgecloud.stream.credentials import new_token
from socflower.errors import ConfigError


def test_messages_cost_by_their_bytes_and_by_their_number() -> None:
    token, echoes = new_token(), list[Echo]()

    def half(terms: Any, weights: Any) -> Echo:
        echoes.append(Echo(int(terms.settings["echo"])))
        return echoes[-1]

    service = CloudService("127.0.0.1:0", half, operator_token=token, log=lambda line: None)
    try:
        in_flight_s = echo_s(
            service.address, token, 1 << 20, num_batches=6, name="in-flight", window=2
        )
        few_s, many_s = (
            echo_s(service.address, token, num_bytes, num_batches=6, name=f"echo-{num_bytes}")
            for num_bytes in (FEW_BYTES, 1 << 20)
        )
    finally:
        service.close()
    for few, many in (
        (few_s, many_s),
        (few_s, in_flight_s),
        (echoes[1].batch_s(), echoes[2].batch_s()),
    ):
        measured = StreamCosts.of(few, many, 1 << 20)
        assert 0 < measured.s_per_byte < 1e-6 and 0 < measured.s_per_batch < 1.0


def test_two_sizes_separate_bytes_from_batches() -> None:
    costs = StreamCosts.of(0.5 + 2 * FEW_BYTES * 1e-3, 0.5 + 2 * 4096 * 1e-3, 4096)
    assert (costs.s_per_byte, costs.s_per_batch) == pytest.approx((1e-3, 0.5))


def test_they_are_added_to_the_costs_of_a_model() -> None:
    cut = CutCost(
        name="layer",
        edge_forward_s=1.0,
        edge_backward_s=1.0,
        cloud_s=1.0,
        feature_elements=10,
        front_weight_bytes=1.0,
    )
    costs = SplitCosts(model="m", batch_size=2, cuts=(cut,), edge_only_s=3.0)
    added = with_streams(
        costs,
        StreamCosts(s_per_byte=1e-9, s_per_batch=0.01),
        StreamCosts(s_per_byte=1e-10, s_per_batch=0.001),
    )
    assert (added.edge_s_per_byte, added.edge_s_per_batch, added.cuts) == (1e-9, 0.01, costs.cuts)
    assert (added.cloud_s_per_byte, added.cloud_s_per_batch) == (1e-10, 0.001)


def test_a_process_that_is_stopped_is_slowed_down() -> None:
    assert measure_slowdown(lambda: time.sleep(0.01), at_least_s=0.1) > 2
    assert 1 <= measure_slowdown(at_least_s=0.05) < math.inf


def test_what_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_batches = 0 must be 1 or more"):
        echo_s("127.0.0.1:1", "token", FEW_BYTES, num_batches=0, name="echo")
    with pytest.raises(ConfigError, match=f"many_bytes = {FEW_BYTES} must be more"):
        StreamCosts.of(1.0, 2.0, FEW_BYTES)
