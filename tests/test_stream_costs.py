"""What a batch's messages cost: by the byte and by the batch, in seconds of a device that is slowed down or not."""

import math
import time

import pytest

from benchmarks.split_contest.stream_costs import StreamCosts, measure_slowdown, measure_stream
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts
from socflower.errors import ConfigError


def test_messages_cost_by_their_bytes_and_by_their_number() -> None:
    measured = measure_stream(num_batches=6, slowdown=1.0)
    assert 0 < measured.s_per_byte < 1e-6 and 0 < measured.s_per_batch < 1.0


def test_they_are_added_to_the_costs_of_a_model() -> None:
    cut = CutCost(name="layer", edge_forward_s=1.0, edge_backward_s=1.0, cloud_s=1.0, feature_elements=10,
                  front_weight_bytes=1.0)
    costs = SplitCosts(model="m", batch_size=2, cuts=(cut,), edge_only_s=3.0)
    added = StreamCosts(s_per_byte=1e-9, s_per_batch=0.01).added_to(costs)
    assert (added.edge_s_per_byte, added.edge_s_per_batch, added.cuts) == (1e-9, 0.01, costs.cuts)


def test_a_process_that_is_stopped_is_slowed_down() -> None:
    assert measure_slowdown(lambda: time.sleep(0.01), at_least_s=0.1) > 2
    assert 1 <= measure_slowdown(at_least_s=0.05) < math.inf


def test_at_least_one_batch_is_sent() -> None:
    with pytest.raises(ConfigError, match="num_batches = 0 must be 1 or more"):
        measure_stream(num_batches=0)
