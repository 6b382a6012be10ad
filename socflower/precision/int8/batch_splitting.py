"""How many images a convolution works on at a time, from a short profile (F15, Mandheling §3.5).

A batch whose tensors do not fit the cache costs more per image than a small one. The weight gradient of a split batch
is summed in int32 over its micro-batches and rounded once, so splitting never changes a result.
The paper's Eq. 4 rounds each micro-batch's gradient to int8 and adds those, which overflows int8.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from socflower import _int8
from socflower.plain_numbers import plain_numbers
from socflower.precision.int8.network import Convolution, Graph, convolution_geometry
from socflower.precision.int8.operators.weighted import convolution_plan, is_wide

CANDIDATES = (0, 32, 16, 8)
"""Images at a time; 0 is the whole batch."""

GAIN = 0.95
"""A split must save 5 %: less is noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """Seconds of forward, input gradient and weight gradient of one convolution per candidate."""

    name: str
    seconds: dict[int, float]

    @property
    def best(self) -> int:
        """The candidate to use: the fastest, if it is clearly faster than the whole batch."""
        quickest = min(self.seconds, key=lambda block: self.seconds[block])
        return quickest if self.seconds[quickest] < GAIN * self.seconds[0] else 0


@plain_numbers
def profile_batch_blocks(
    graph: Graph, batch: int, engine: _int8.Engine, *, repeats: int = 3
) -> list[BlockProfile]:
    """Time every convolution of the graph, on random values, for every candidate smaller than the batch (F15).

    Convolutions of one geometry are timed once in a process.
    """
    result = []
    for node in graph.nodes:
        if not isinstance(node, Convolution):
            continue
        if is_wide(graph, node):
            continue
        geometry = (*convolution_geometry(graph, node, batch), *node.dilation)
        key = (engine.kernel, engine.num_threads, repeats, geometry)
        if key not in _TIMED:
            _TIMED[key] = {
                block: _step_seconds(convolution_plan(graph, node, batch, block), engine, repeats)
                for block in CANDIDATES
                if block < batch
            }
        result.append(BlockProfile(name=node.name, seconds=_TIMED[key]))
    return result


# By kernel path, threads, repeats and geometry, for the whole process.
_TIMED: dict[tuple[str, int, int, tuple[int, ...]], dict[int, float]] = {}


def best_blocks(profiles: list[BlockProfile]) -> dict[str, int]:
    """Return the value for `EngineSettings.batch_blocks`: the convolutions that a split makes faster."""
    return {profile.name: profile.best for profile in profiles if profile.best}


def _step_seconds(plan: _int8.Convolution, engine: _int8.Engine, repeats: int) -> float:
    random = np.random.default_rng(0)
    x = random.integers(0, 128, plan.input_shape).astype(np.int8)
    # Small, so that sums over large batches stay in int32.
    dy = random.integers(-7, 8, plan.output_shape).astype(np.int8)
    weight = random.integers(-127, 128, plan.weight_shape).astype(np.int8)
    y = np.empty_like(dy)
    dx = np.empty_like(x)
    gradient = np.empty(plan.weight_shape, dtype=np.int32)
    workspace = np.empty(plan.workspace_bytes(engine), dtype=np.uint8)

    def step() -> None:
        plan.forward(engine, x, weight, None, y, workspace, True, 12, 0, True)
        plan.input_gradient(engine, dy, weight, dx, workspace, 12, 1)
        plan.weight_gradient(engine, x, dy, gradient, workspace, True)

    return median_seconds(step, repeats)


def median_seconds(function: Callable[[], None], repeats: int) -> float:
    """Return the median duration of `repeats` runs, after one that is not counted."""
    function()
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)
