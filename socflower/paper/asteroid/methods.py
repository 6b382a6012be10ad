"""Asteroid and its peers on one problem of the paper, in virtual time.

Each system chooses among several micro-batches and uses the fastest that fits, so no system suffers from a choice made
for another. Data parallelism and pipelines are balanced for unequal devices, and pipelines run 1F1B (§5.2).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from socflower.paper.asteroid.settings import MICRO_BATCHES, problem_of
from socflower.pipeline.planner.baselines import Compared, compare
from socflower.pipeline.planner.selection import Planned, PlannerSettings, plan_pipeline
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.layers import Granularity

SETTINGS = PlannerSettings(width=2, num_simulated=6, num_tuned=2)
"""Limits of the planner's search: some seconds per plan."""

NO_FIT = "out of memory"
"""Our value of a cell whose plan exceeds a board's memory."""

WHOLE_MODEL_SIZES = (8, 16, 32)
"""Micro-batches for peers that keep the whole model on a device, in addition to those of the paper's models."""


def asteroid(name: str, environment: str | tuple[str, ...], mbps: float) -> Planned:
    """Return our plan of a model of the paper, cached."""
    return timed_plan(name, environment, mbps)[0]


@cache
def timed_plan(name: str, environment: str | tuple[str, ...], mbps: float) -> tuple[Planned, float]:
    """Return our plan of a model of the paper and the seconds that planning took here, cached."""
    problem = problem_of(name, environment, mbps)
    start_s = time.perf_counter()
    planned = plan_pipeline(problem, replace(SETTINGS, micro_batch_sizes=MICRO_BATCHES[name]))
    return planned, time.perf_counter() - start_s


@cache
def peer(
    system: str,
    name: str,
    environment: str | tuple[str, ...],
    mbps: float,
) -> Compared:
    """Return a peer's plan of a model of the paper, cached.

    Planners that ignore the tensors at a cut get cuts between blocks. Inside a block they would send up to four
    tensors, which no system does that cuts by modules.
    """
    blind = system in ("pipeline-parallel", "gpipe")
    granularity = Granularity.BLOCKS if blind else Granularity.LAYERS
    return peer_of(
        problem_of(name, environment, mbps, granularity=granularity),
        system,
        (*WHOLE_MODEL_SIZES, *MICRO_BATCHES[name]),
    )


def peer_of(problem: PipelineProblem, system: str, sizes: Sequence[int] = ()) -> Compared:
    """Return a peer's plan of a problem, with the best of the micro-batches that divide its mini-batch."""
    fitting = [size for size in sizes if not problem.mini_batch_size % size]
    return compare(problem, (system,), micro_batch_sizes=fitting)[0]
