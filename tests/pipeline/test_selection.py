"""The planner's choice: cases in which one kind of parallelism must win, memory, K, and what cannot be planned."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import InfeasiblePlan, SocflowerError
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner import selection
from socflower.pipeline.planner.baselines import compare
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.pruning import near
from socflower.pipeline.planner.selection import (
    PlannerSettings,
    algorithm_2,
    best_in_flight,
    plan_pipeline,
    predict,
    with_in_flight,
)
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.schedule.run import simulate_schedule
from tests.one_line import refused
from tests.pipeline.problems import (
    even,
    layer,
    linear_seconds,
    problem,
    random_problem,
    straight_plan,
)

LARGE_WEIGHTS = {"weight": 1e5, "output": 1.0}
WINNERS = {
    # Weights are small and what crosses a cut is large; the two layers are unequal, so stages could not be even.
    "data parallelism": problem(
        [layer(weight=10.0, output=1e4), layer(weight=10.0)],
        [linear_seconds([1.0, 3.0], [2.0, 6.0])] * 3,
        micro_batch_size=6,
    ),
    # Weights are large, cuts are thin, layers are even.
    "pipeline": even(3, 3, micro_batch_size=6, num_micro_batches=12, **LARGE_WEIGHTS),
    # A device that holds the model, and two a quarter as fast that hold one of two layers each. Samples a second in
    # units of the slow: 2 on the quick one and 1 on the pair; a pipeline of all has at most 2.
    "2-D": problem(
        [layer(weight=1000.0, output=1.0)] * 2,
        [linear_seconds([by, by], [2 * by, 2 * by]) for by in (0.25, 1.0, 1.0)],
        memory=[1e6, 3500.0, 3500.0],
        micro_batch_size=6,
        num_micro_batches=24,
        link=1e4,
    ),
    # One device is far faster than the others, and links are slow.
    "single device": problem(
        [layer(weight=1000.0, output=100.0)] * 3,
        [linear_seconds([by] * 3, [2 * by] * 3) for by in (0.01, 1.0, 1.0)],
    ),
}


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("architecture", WINNERS)
def test_the_planner_says_which_kind_of_parallelism_wins(architecture: str) -> None:
    found = plan_pipeline(WINNERS[architecture])
    assert found.plan.architecture == architecture
    # By a margin, so that no detail of the model decides it.
    others = [each for each in found.alternatives if each.plan.architecture != architecture]
    assert min(each.prediction.step_s for each in others) > 1.1 * found.prediction.step_s
    document = found.to_document()
    assert document["architecture"] == architecture
    assert document["predicted"]["step_s"] == found.prediction.step_s


@pytest.mark.slow
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_plan_exceeds_a_budget_and_each_is_predicted_and_simulated(seed: int) -> None:
    case = random_problem(np.random.default_rng(seed), 4, 3, memory=True)
    try:
        found = plan_pipeline(case, PlannerSettings(num_simulated=3))
    except InfeasiblePlan as refused:
        assert "no plan of toy fits" in str(refused)
        return
    for each in (found, *found.alternatives):
        each.plan.check(each.problem)
        assert simulate_schedule(each.problem, each.plan).step_s == each.prediction.step_s
        assert each.prediction.formula_s == update_latency(each.problem, each.plan)
        assert each.prediction.step_s >= found.prediction.step_s


@pytest.mark.slow
def test_the_choice_is_never_worse_than_algorithm_2() -> None:
    for seed in range(8):
        case = random_problem(np.random.default_rng(seed), 5, 4)
        paper = predict(case, algorithm_2(case).plan)
        assert plan_pipeline(case).prediction.step_s <= paper.step_s * (1.0 + 1e-9)


def test_the_simulator_chooses_a_larger_k_where_links_are_slow() -> None:
    """Transfers as long as a backward pass: 2(P − p) − 1 leaves devices waiting, and K is raised as memory allows."""
    case = even(3, 3, 0.25, 0.5, output=50.0, activation=1.0, num_micro_batches=16)
    plan = straight_plan([0, 1, 2], [[4]] * 3, 16)
    chosen, prediction = best_in_flight(case, plan)
    assert prediction.step_s < predict(case, plan).step_s * 0.95
    assert chosen.stages[0].in_flight > plan.stages[0].in_flight
    # A sample keeps 50 B of input and 1 B in the second stage, so that a micro-batch keeps 204 B.
    tight = replace(
        case, devices=tuple(replace(device, memory_bytes=3.5 * 204.0) for device in case.devices)
    )
    lower = with_in_flight(tight, plan, (9, 9, 9))
    assert [stage.in_flight for stage in lower.stages] == [9, 3, 3]
    lower.check(tight)


def test_other_micro_batch_sizes_of_the_same_mini_batch_may_win() -> None:
    """A fixed cost a pass makes larger micro-batches better."""
    case = problem(
        [layer(**LARGE_WEIGHTS)] * 2,
        [linear_seconds([0.01] * 2, [0.01] * 2, fixed_s=1.0)] * 2,
        micro_batch_size=1,
        num_micro_batches=32,
    )
    found = plan_pipeline(case, PlannerSettings(micro_batch_sizes=(4, 8)))
    assert isinstance(found.plan, PipelinePlan)
    assert found.plan.micro_batch_size > 1
    assert found.plan.num_samples == 32
    settings = PlannerSettings(micro_batch_sizes=(5,))
    refused(lambda: plan_pipeline(case, settings), "5", "32")


@pytest.mark.slow
def test_sizes_that_are_left_out_hold_no_better_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PlannerSettings(micro_batch_sizes=(1, 2, 8), num_simulated=3, two_d=False)
    shape = {"micro_batch_size": 4, "num_micro_batches": 4}
    cases = [random_problem(np.random.default_rng(seed), 4, 3, **shape) for seed in range(3)]
    chosen = [plan_pipeline(case, settings) for case in cases]
    monkeypatch.setattr(selection, "_CLOSED_FORM_ERROR", math.inf)
    of_all = [plan_pipeline(case, settings) for case in cases]
    assert [each.plan for each in chosen] == [each.plan for each in of_all]
    simulated = [sum(len(each.alternatives) for each in every) for every in (chosen, of_all)]
    assert simulated[0] < 0.8 * simulated[1]


@pytest.mark.slow
def test_a_pruned_search_is_near_the_whole_one() -> None:
    rng = np.random.default_rng(3)
    base = rng.uniform(0.5, 2.0, 90)
    kinds = [linear_seconds(base / speed * 1e-3, base / speed * 2e-3) for speed in (2.0, 1.0)]
    layers = [
        layer(weight=float(rng.integers(1, 1000)), output=float(rng.integers(1, 50)))
        for _ in range(90)
    ]
    case = problem(layers, kinds * 4, micro_batch_size=16, num_micro_batches=8, link=1e5)
    whole = plan_pipeline(case, PlannerSettings(prune=False, two_d=False))
    pruned = plan_pipeline(case, PlannerSettings(prune=True, two_d=False))
    assert (whole.exact, pruned.exact) == (True, False)
    assert pruned.prediction.step_s <= 1.05 * whole.prediction.step_s


@pytest.mark.parametrize("num_devices", [100, 7])
def test_near_a_plan_are_its_places_and_not_too_many_others(num_devices: int) -> None:
    case = even(30, num_devices)
    width = num_devices // 7
    plan = straight_plan([4, 8, 12, 16, 20, 24, 29], [[7] * width] * 7, 4)
    cuts, places = near(replace(case, micro_batch_size=7 * width), plan, case.devices)
    ends = {index * width for index in range(8)} - {num_devices}
    assert {0, 5, 9, 13, 17, 21, 25, 30} <= set(cuts.tolist()) and ends <= set(places)
    assert len(places) <= 30 and places == sorted(places) and places[-1] < num_devices


@pytest.mark.parametrize("prune", [False, True])
def test_steps_are_counted_from_nothing_to_all(prune: bool) -> None:
    on_step = Mock()
    case = even(4, 3, num_micro_batches=2)
    plan_pipeline(case, PlannerSettings(micro_batch_sizes=(1, 2), prune=prune), on_step=on_step)
    texts, done, totals = zip(*(call.args for call in on_step.call_args_list), strict=True)
    assert done == tuple(range(8)) and {*totals} == {8}
    assert texts[0] == "searching plans, micro-batches of 4"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (even(1, 2), "toy layer"),
        (even(2, 1), "toy 0"),
        (even(2, 2, weight=1e6, memory=1e6), "6.0 MB 3.0 MB layer 2 2.0 MB 1.0 MB 4"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(case: PipelineProblem, named: str) -> None:
    refused(lambda: plan_pipeline(case), *named.split(), error=SocflowerError)


def test_samples_on_one_device_are_part_of_the_plan_and_its_time() -> None:
    """Large inputs on one device: the first stage should be that device, since others would have to receive them."""
    weights = {"weight": 1e4, "output": 1.0}
    case = even(3, 3, micro_batch_size=6, num_micro_batches=12, input_bytes=500.0, **weights)
    for source in (0, 2):
        plan = plan_pipeline(case, PlannerSettings(samples_on=source)).plan
        assert isinstance(plan, PipelinePlan)
        assert plan.samples_on == source
        assert plan.stages[0].devices == (source,)
        for each in compare(case, ["gpipe", "2d"], samples_on=source):
            assert each.plan is not None
            num_bytes = each.plan.communication_bytes(case)
            assert simulate_schedule(case, each.plan).num_bytes == pytest.approx(num_bytes)
    refused(lambda: plan_pipeline(case, PlannerSettings(samples_on=7)), "SoC 7", "0, 1, 2")
