"""Asteroid and its peers on one problem of the paper, in virtual time.

Each may choose among several micro-batches, and uses the fastest that fits, so that none suffers from a choice that was
made for another. §5.2: data parallelism and pipelines are balanced for unequal devices, and the pipeline runs 1F1B.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from socflower.paper.asteroid.settings import MICRO_BATCHES, problem_of
from socflower.pipeline.planner.peers import Compared, compare
from socflower.pipeline.planner.selection import Planned, PlannerSettings, plan_pipeline
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.layers import Granularity

SETTINGS = PlannerSettings(width=2, num_simulated=6, num_tuned=2)
"""How far the planner looks here: some seconds a plan."""

NO_FIT = "out of memory"
"""Ours of a cell whose plan exceeds a board's memory."""

WHOLE_MODEL_SIZES = (8, 16, 32)
"""Micro-batches for peers that keep the whole model on a device, beside those of the paper's models."""


@cache
def asteroid(name: str, environment: str | tuple[str, ...], mbps: float) -> Planned:
    """Return our plan of a model of the paper, cached."""
    return plan_pipeline(
        problem_of(name, environment, mbps),
        replace(SETTINGS, micro_batch_sizes=MICRO_BATCHES[name]),
    )


@cache
def peer(system: str, name: str, environment: str | tuple[str, ...], mbps: float) -> Compared:
    """Return a peer's plan of a model of the paper, cached.

    A pipeline that overlooks what crosses a cut has its cuts between blocks: inside one it would send up to four
    tensors, which nobody who cuts by modules does.
    """
    granularity = (
        Granularity.BLOCKS if system in ("pipeline-parallel", "gpipe") else Granularity.LAYERS
    )
    return peer_of(
        problem_of(name, environment, mbps, granularity=granularity),
        system,
        (*WHOLE_MODEL_SIZES, *MICRO_BATCHES[name]),
    )


def peer_of(problem: PipelineProblem, system: str, sizes: Sequence[int] = ()) -> Compared:
    """Return a peer's plan of a problem, of the sizes of micro-batches that divide its mini-batch."""
    fitting = [size for size in sizes if not problem.mini_batch_size % size]
    return compare(problem, (system,), micro_batch_sizes=fitting)[0]
