"""Light re-planning, recovery within budgets, and new shares, against their definitions by brute force."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline_cases.best_plans import some_plan_fits
from benchmarks.pipeline_cases.random_problems import drawn_loss
from socflower.errors import InfeasiblePlan
from socflower.pipeline.plan import PipelinePlan, Plan, Stage, TwoDPlan
from socflower.pipeline.planner.selection import fits
from socflower.pipeline.problem import PipelineModel, PipelineProblem, from_json, to_json
from socflower.pipeline.replanning import (
    for_speeds,
    heavy_plan,
    recovered,
    remaining_plan,
    replanned,
    with_new_shares,
)
from socflower.pipeline.schedule.order import ASTEROID
from tests.one_line import refused
from tests.pipeline.problems import even, layer, parts, pipelines, straight_plan

NUM_LAYERS = 9


def model_of(flops: Sequence[float]) -> PipelineModel:
    return PipelineModel(
        name="toy", input_bytes=4.0, layers=tuple(layer(flops=each) for each in flops)
    )


FLOPS = st.sampled_from([0.0, 1.0, 2.0, 5.0, 20.0])
MODELS = st.lists(FLOPS, min_size=NUM_LAYERS, max_size=NUM_LAYERS).map(model_of)
PLANS = st.integers(1, 6).flatmap(
    lambda number: pipelines(NUM_LAYERS, 8, 12, number, st.just(ASTEROID))
)


@given(plan=PLANS, model=MODELS, data=st.data())
def test_a_plan_without_lost_devices_has_all_layers_once_and_no_lost_device(
    plan: PipelinePlan,
    model: PipelineModel,
    data: st.DataObject,
) -> None:
    present = data.draw(st.sets(st.sampled_from(plan.socs), min_size=1))
    new = replanned(plan, model, present)
    assert isinstance(new, PipelinePlan)
    assert set(new.socs) == present and new.num_layers == NUM_LAYERS
    assert new.num_samples == plan.num_samples
    if present == set(plan.socs):
        assert new is plan
    kept = [stage for stage in plan.stages if set(stage.devices) & present]
    assert [stage.in_flight for stage in new.stages] == [stage.in_flight for stage in kept]
    if len(kept) < len(plan.stages):
        return
    # No stage has lost all of its devices, so layers stay where they are.
    for before, after in zip(plan.stages, new.stages, strict=True):
        assert (after.first_layer, after.last_layer) == (before.first_layer, before.last_layer)
        assert after == before or not set(before.devices) <= present


@given(plan=PLANS, model=MODELS, data=st.data())
def test_layers_of_a_lost_stage_follow_what_the_others_had(
    plan: PipelinePlan,
    model: PipelineModel,
    data: st.DataObject,
) -> None:
    kept = data.draw(st.sets(st.integers(0, len(plan.stages) - 1), min_size=1))
    new = replanned(plan, model, {soc for number in kept for soc in plan.stages[number].devices})
    assert isinstance(new, PipelinePlan)
    flops = [each.forward_flops for each in model.layers]
    stages = [plan.stages[number] for number in sorted(kept)]
    had = [sum(flops[stage.first_layer : stage.last_layer + 1]) for stage in stages]
    if not sum(had):
        return
    for position, stage in enumerate(new.stages[1:], 1):
        wanted = sum(had[:position]) / sum(had) * sum(flops)
        reached = sum(flops[: stage.first_layer])
        # No further from it than half of the largest layer, where the others' least of one layer allows it.
        last = NUM_LAYERS - (len(new.stages) - position)
        assert not position < stage.first_layer < last or abs(reached - wanted) <= max(flops)


def test_pipelines_of_a_2d_plan_that_are_lost_are_left_out() -> None:
    model, first = model_of([1.0] * 4), straight_plan((1, 3), ((4,), (4,)), 2)
    plan = TwoDPlan(groups=(first, straight_plan((3,), ((4,),), 2, first_soc=7)), server=7)
    without = replanned(plan, model, {7})
    assert isinstance(without, TwoDPlan) and (without.socs, without.server) == ((7,), 7)
    other = replanned(plan, model, {0, 1})
    assert isinstance(other, TwoDPlan) and (other.groups, other.server) == ((first,), 0)
    alone = replanned(plan, model, {42, 43})
    assert alone == replace(
        first,
        stages=(Stage(first_layer=0, last_layer=3, devices=(42,), shares=(4,), in_flight=1),),
    )
    refused(lambda: replanned(plan, model, set()), "device", error=InfeasiblePlan)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 100), marks=pytest.mark.slow)])
def test_a_plan_after_a_loss_keeps_the_budgets_and_exists_if_any_does(seeds: range) -> None:
    num_without_plan = num_light = 0
    for seed in seeds:
        problem, plan, present = drawn_loss(seed)
        left = replace(
            problem, devices=tuple(each for each in problem.devices if each.soc in present)
        )
        new = after(plan, problem, present)
        if new is None:
            assert not some_plan_fits(left)
            num_without_plan += 1
            continue
        new.check(left)
        assert set(new.socs) <= present and new.num_samples == plan.num_samples
        num_light += fits(left, replanned(plan, problem.model, present))
    # The light plan alone would often exceed a budget.
    assert num_without_plan + num_light < len(seeds) / 2


def test_after_a_loss_k_falls_before_micro_batches_become_smaller() -> None:
    """The first stage keeps 2 kB a sample: its only device has room for 4 samples twice, not three times."""
    case = even(4, 4, activation=1000.0, output=1000.0, num_micro_batches=8)
    plan = straight_plan((1, 3), ((2, 2), (2, 2)), 8)
    tight = replace(
        case, devices=tuple(replace(each, memory_bytes=22_000.0) for each in case.devices)
    )
    plan.check(tight)
    light = replanned(plan, case.model, {0, 2, 3})
    assert not fits(tight, light)
    new = recovered(plan, tight, {0, 2, 3})
    assert isinstance(new, PipelinePlan) and new.micro_batch_size == 4
    new.check(tight)
    tighter = replace(
        case, devices=tuple(replace(each, memory_bytes=13_000.0) for each in case.devices)
    )
    smaller = recovered(plan, tighter, {0})
    assert isinstance(smaller, PipelinePlan)
    assert (smaller.micro_batch_size, smaller.num_micro_batches) == (2, 16)


def test_without_a_problem_budgets_are_kept_and_without_budgets_the_plan_is_light() -> None:
    case = even(4, 4, activation=1000.0, output=1000.0, num_micro_batches=8)
    plan = straight_plan((1, 3), ((2, 2), (2, 2)), 8)
    light = replanned(plan, case.model, {0, 2, 3})
    assert remaining_plan(plan, case.model, {0, 2, 3}) == light
    budgets = dict.fromkeys(range(4), 22_000.0)
    new = remaining_plan(plan, case.model, {0, 2, 3}, budget_bytes=budgets)
    assert new != light
    new.check(
        replace(case, devices=tuple(replace(each, memory_bytes=22_000.0) for each in case.devices))
    )
    assert remaining_plan(plan, case.model, {0, 2, 3}, problem=case) == recovered(
        plan, case, {0, 2, 3}
    )


def test_pipelines_of_a_2d_plan_keep_the_budgets_after_a_loss() -> None:
    case = even(4, 4, activation=1000.0, output=1000.0, num_micro_batches=8)
    tight = replace(
        case, devices=tuple(replace(each, memory_bytes=22_000.0) for each in case.devices)
    )
    groups = straight_plan((1, 3), ((2,), (2,)), 8), straight_plan((3,), ((1, 1),), 8, first_soc=2)
    plan = TwoDPlan(groups=groups)
    plan.check(tight)
    new = recovered(plan, tight, {1, 2, 3})
    assert isinstance(new, TwoDPlan) and set(new.socs) == {1, 2, 3}
    new.check(tight)


@pytest.mark.slow
def test_a_problem_is_the_same_after_a_message() -> None:
    for seed in range(3):
        problem, plan, present = drawn_loss(seed)
        read = from_json(to_json(problem), problem.model)
        assert to_json(read) == to_json(problem)
    assert after(plan, read, present) == after(plan, problem, present)
    refused(lambda: from_json("{}", problem.model), "version")


def after(plan: PipelinePlan, problem: PipelineProblem, present: frozenset[int]) -> Plan | None:
    """Return the plan after a loss, or None."""
    try:
        return recovered(plan, problem, present)
    except InfeasiblePlan:
        return None


@given(
    size=st.integers(3, 12),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0, 6.0]), min_size=3, max_size=3),
    most=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    data=st.data(),
)
def test_new_shares_are_the_quickest_within_memory_up_to_a_sample(
    size: int,
    speeds: list[float],
    most: list[int],
    data: st.DataObject,
) -> None:
    old = tuple(data.draw(parts(size, 3)))
    plan = straight_plan((1,), (old,), 1)
    seconds = {soc: 1.0 / speed for soc, speed in enumerate(speeds)}
    limits = [max(own, each) for own, each in zip(old, most, strict=True)]
    new = with_new_shares(plan, seconds, dict(enumerate(most)), 0.0)

    def slowest(shares: tuple[int, ...]) -> float:
        return max(share * seconds[soc] for soc, share in enumerate(shares))

    every = product(*(range(1, limit + 1) for limit in limits))
    best = min(slowest(shares) for shares in every if sum(shares) == size)
    if new is None:
        assert slowest(old) <= best + max(seconds.values()) + 1e-9
        return
    assert isinstance(new, PipelinePlan)
    shares = new.stages[0].shares
    assert sum(shares) == size
    assert all(1 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    assert slowest(shares) < slowest(old)
    assert slowest(shares) <= best + max(seconds.values()) + 1e-9


def test_layers_move_away_from_a_device_that_is_slow_alone_in_its_stage() -> None:
    problem = even(9, 3, weight=1e4, output=1.0)
    plan, socs = straight_plan((2, 5, 8), ((1,), (1,), (1,)), 16), (0, 1, 2)
    planned_s = {
        soc: problem.device(soc).seconds.both(*stage.layers, 1)
        for stage in plan.stages
        for soc in stage.devices
    }
    # Devices as quick as planned, or all of them equally slow, keep their layers.
    for part in (1.0, 3.0):
        sample_s = {soc: part * seconds for soc, seconds in planned_s.items()}
        assert for_speeds(plan, problem, socs, sample_s, 0.1) is None
    moved = for_speeds(plan, problem, socs, {**planned_s, 1: 4.0 * planned_s[1]}, 0.1)
    assert isinstance(moved, PipelinePlan) and moved.num_samples == plan.num_samples

    def num_layers_of(one: PipelinePlan, soc: int) -> int:
        own = [stage.layers for stage in one.stages if soc in stage.devices]
        return sum(last - first + 1 for first, last in own)

    assert num_layers_of(moved, 1) < num_layers_of(plan, 1) == 3


@pytest.mark.slow
def test_the_whole_planner_replaces_a_plan_that_is_slower_by_more_than_a_part() -> None:
    problem = even(9, 3, weight=1e4, output=1.0)
    uneven = straight_plan((6, 7, 8), ((4,), (4,), (4,)), 4)
    found = heavy_plan(uneven, problem, (0, 1, 2), 0.05)
    assert isinstance(found, PipelinePlan) and found != uneven
    assert heavy_plan(found, problem, (0, 1, 2), 0.05) is None
    assert heavy_plan(uneven, problem, (0,), 0.05) is None


def test_shares_that_gain_too_little_stay() -> None:
    plan = straight_plan((1,), ((6, 6),), 1)
    assert with_new_shares(plan, {0: 1.0, 1: 1.05}, {}, 0.1) is None
    new = with_new_shares(plan, {0: 1.0, 1: 3.0}, {}, 0.1)
    assert isinstance(new, PipelinePlan) and new.stages[0].shares == (9, 3)
    # A device that was not measured keeps its share.
    assert with_new_shares(plan, {0: 1.0, 1: 0.0}, {}, 0.1) is None
