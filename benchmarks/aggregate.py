"""Aggregating whole replies, against Flower's `aggregate_arrayrecords`: from ArrayRecords to an ArrayRecord.

The model is VGG-11's size, 9.2 million float32 parameters, once in 18 tensors as VGG-11 has them (a few large
ones) and once in 63 as a ResNet has them. Replies hold distinct memory, as they do when they come off the wire.
"""

import os
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from benchmarks.harness import Row, less_is_better, measure, measure_interleaved
from socflower.strategies.records import aggregate_records, array_views

NUM_PARAMETERS = 9_228_362
_VGG11_CHANNELS = (3, 64, 128, 256, 256, 512, 512, 512, 512)
_PEER = "flwr aggregate_arrayrecords"


def shapes_in_18_tensors() -> list[tuple[int, ...]]:
    """Return VGG-11's shapes for 32 x 32 images and 10 classes: eight convolutions and one linear layer."""
    shapes: list[tuple[int, ...]] = []
    for inputs, outputs in pairwise(_VGG11_CHANNELS):
        shapes += [(outputs, inputs, 3, 3), (outputs,)]
    return [*shapes, (10, 512), (10,)]


def shapes_in_63_tensors() -> list[tuple[int, ...]]:
    """Return the shapes of 62 tensors, alternately of about 295,000 and 2,048 elements, and of one with the rest."""
    shapes: list[tuple[int, ...]] = [(512, 64, 3, 3), (2048,)] * 31
    return [*shapes, (NUM_PARAMETERS - sum(int(np.prod(shape)) for shape in shapes),)]


def run(quick: bool = False) -> list[Row]:
    """Return rows of time and of peak extra memory for 8 and 32 replies; answers must agree to 1e-6."""
    rows: list[Row] = []
    for shapes in (shapes_in_18_tensors(), shapes_in_63_tensors()):
        replies = [_reply(shapes, seed) for seed in range(32)]
        for num_replies in (8, 32):
            rows += _compare(
                f"{num_replies} replies of {len(shapes)} tensors", replies[:num_replies], quick
            )
    return rows


def _reply(shapes: list[tuple[int, ...]], seed: int) -> RecordDict:
    rng = np.random.default_rng(seed)
    arrays = {
        str(i): Array(rng.standard_normal(shape, dtype=np.float32))
        for i, shape in enumerate(shapes)
    }
    return RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 100 + seed})}
    )


def _compare(case: str, replies: list[RecordDict], quick: bool) -> list[Row]:
    weights = [float(reply.metric_records["metrics"]["num-examples"]) for reply in replies]

    def ours() -> ArrayRecord:
        return aggregate_records([reply.array_records["arrays"] for reply in replies], weights)

    def flowers() -> ArrayRecord:
        return aggregate_arrayrecords(replies, "num-examples")

    ok = _agree(ours(), flowers())
    our_time, flower_time = measure_interleaved([ours, flowers], repeats=3 if quick else 9)
    our_models, flower_models = _peak_models(ours), _peak_models(flowers)
    read_s = _read_time_s(replies)
    return [
        less_is_better(
            f"{case}, time",
            our_time.median_s,
            _PEER,
            flower_time.median_s,
            "s",
            limit=read_s,
            ok=ok,
        ),
        less_is_better(
            f"{case}, peak memory above the replies",
            our_models,
            _PEER,
            flower_models,
            "models",
            limit=1.0,
            ok=ok and our_models <= 2.0,
        ),
    ]


def _agree(ours: ArrayRecord, theirs: ArrayRecord) -> bool:
    """Return whether all elements agree to 1e-6; the values are sums of shares of standard normal numbers."""
    left, right = array_views(ours), array_views(theirs)
    return list(left) == list(right) and all(
        np.allclose(left[name], right[name], rtol=1e-6, atol=1e-6) for name in left
    )


def _peak_models(function: Callable[[], object]) -> float:
    """Return the peak memory of `function` as a multiple of the model's; NumPy and bytes objects are traced."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] / (4 * NUM_PARAMETERS)
    finally:
        tracemalloc.stop()


def _read_time_s(replies: list[RecordDict]) -> float:
    """Return the time to read every byte of the replies once with as many threads as ours (a maximum over int64)."""
    arrays = [
        np.frombuffer(array.data, np.int64, len(array.data) // 8)
        for reply in replies
        for array in reply.array_records["arrays"].values()
    ]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return measure(lambda: list(threads.map(np.max, arrays)), repeats=5).median_s
