"""Plans of other systems: their published examples, their own objectives by brute force, and ours beside them."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline_cases.best_plans import compositions
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner.baselines import (
    PEERS,
    compare,
    dapple,
    gpipe,
    pipedream_partition,
    pipeline_parallel,
)
from socflower.pipeline.planner.selection import plan_pipeline, predict
from socflower.pipeline.problem import Floats
from socflower.pipeline.schedule.run import simulate_schedule
from tests.one_line import refused
from tests.pipeline.problems import even, random_problem
from tests.pipeline.published_plans import Example, examples


@pytest.mark.parametrize(
    "example",
    [each for each in examples() if each.source == "PipeDream"],
    ids=lambda each: each.name,
)
def test_pipedream_finds_the_plans_that_its_published_optimiser_prints(example: Example) -> None:
    columns = np.array([row[1:] for row in example.profile])
    found = pipedream_partition(
        (columns[:, 0] + columns[:, 1]) * 1e-3,
        columns[:, 3],
        columns[:, 2],
        len(example.problem.devices),
        example.bytes_per_s,
    )
    assert tuple(found) == example.published


@pytest.mark.parametrize(
    "example", [each for each in examples() if each.source == "DAPPLE"], ids=lambda each: each.name
)
def test_dapple_finds_the_published_groups_of_devices(example: Example) -> None:
    """The cuts are not those of its runtime; ours are faster in the simulator."""
    found = dapple(example.problem)
    assert [len(stage.devices) for stage in found.stages] == [
        replicas for _, replicas in example.published
    ]
    assert (
        predict(example.problem, found).step_s
        < predict(example.problem, example.published_plan()).step_s
    )


@given(seed=st.integers(0, 2**32 - 1), num_layers=st.integers(1, 5), num_workers=st.integers(1, 4))
def test_pipedream_finds_the_least_period_of_its_own_objective(
    seed: int, num_layers: int, num_workers: int
) -> None:
    rng = np.random.default_rng(seed)
    layer_s, weights = rng.uniform(0.1, 2.0, num_layers), rng.uniform(0.0, 50.0, num_layers)
    outputs, speed = rng.uniform(0.0, 50.0, num_layers), 50.0
    cost = partial(period_s, layer_s=layer_s, weights=weights, outputs=outputs, speed=speed)
    best = min(
        cost(cuts, widths)
        for size in range(1, min(num_layers, num_workers) + 1)
        for cuts in combinations(range(num_layers - 1), size - 1)
        for widths in compositions(num_workers, size)
    )
    found = pipedream_partition(layer_s, weights, outputs, num_workers, speed)
    ends, widths = zip(*found, strict=True)
    assert sum(widths) == num_workers
    assert cost(ends[:-1], widths) == pytest.approx(best)


def period_s(
    cuts: Sequence[int],
    widths: Sequence[int],
    layer_s: Floats,
    weights: Floats,
    outputs: Floats,
    speed: float,
) -> float:
    """Return the slowest stage or transfer; the transfer behind a stage is counted over its own replicas too."""
    ends, first, slowest = [*cuts, len(layer_s) - 1], 0, 0.0
    for index, (last, width) in enumerate(zip(ends, widths, strict=True)):
        reduced = 4.0 * (width - 1) * weights[first : last + 1].sum() / (speed * width)
        slowest = max(slowest, (layer_s[first : last + 1].sum() + reduced) / width)
        if index:
            slowest = max(slowest, 2.0 * outputs[first - 1] / (speed * width))
            if last + 1 < len(layer_s):
                slowest = max(slowest, 2.0 * outputs[last] / (speed * width))
        first = last + 1
    return slowest


@given(seed=st.integers(0, 2**32 - 1))
def test_straight_pipelines_have_the_least_slowest_stage(seed: int) -> None:
    case = random_problem(np.random.default_rng(seed), 5, 3)
    last = case.model.num_layers - 1
    prefixes = [each.seconds.prefixes(case.micro_batch_size) for each in case.devices]
    own_s = np.array(
        [np.diff((there + back)[:, case.micro_batch_size]) for there, back in prefixes]
    )
    for planner, seconds in ((pipeline_parallel, own_s), (gpipe, own_s.mean(0, keepdims=True))):
        by_stage = np.broadcast_to(seconds, own_s.shape)

        def slowest(ends: Sequence[int], by_stage: Floats = by_stage) -> float:
            bounds = pairwise([-1, *ends])
            return max(
                own[begin + 1 : end + 1].sum()
                for own, (begin, end) in zip(by_stage, bounds, strict=True)
            )

        best = min(slowest((*cuts, last)) for cuts in combinations(range(last), 2))
        found = [stage.last_layer for stage in planner(case).stages]
        assert slowest(found) == pytest.approx(best)


def test_every_peer_has_a_plan_whose_bytes_are_simulated() -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        case = random_problem(rng, 5, 4, micro_batch_size=8, num_micro_batches=4)
        for each in compare(case):
            assert each.fits and each.plan is not None and each.plan.planner == each.name
            num_bytes = each.plan.communication_bytes(case)
            assert simulate_schedule(case, each.plan).num_bytes == pytest.approx(num_bytes)
            assert each.plan.num_samples == case.mini_batch_size


def test_plans_that_know_no_budgets_may_exceed_them_and_say_so() -> None:
    options = {"weight": 100.0, "output": 1.0, "activation": 10.0}
    case = even(4, 4, 0.1, 0.2, memory=1000.0, num_micro_batches=16, **options)
    found = {each.name: each for each in compare(case, micro_batch_sizes=(2, 8))}
    assert set(found) == set(PEERS)
    assert not found["gpipe"].fits and "MB" in found["gpipe"].why_not
    assert found["single-device"].plan is None
    assert "toy" in found["single-device"].why_not
    ours = plan_pipeline(case).plan
    ours.check(case)
    assert isinstance(ours, PipelinePlan)
    refused(lambda: compare(case, ["2d"], micro_batch_sizes=(7,)), "7", "64")
    refused(lambda: compare(case, ["gpip"]), "gpip", "single-device")
