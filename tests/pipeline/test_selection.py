"""The planner's choice: cases in which one kind of parallelism must win, memory, K, and what cannot be planned."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.peers import compare
from socflower.pipeline.planner.pruning import near
from socflower.pipeline.planner.selection import (
    PlannerSettings,
    algorithm_2,
    best_in_flight,
    plan_pipeline,
    predict,
    with_in_flight,
)
from socflower.pipeline.problem import LayerSeconds, PipelineProblem
from socflower.pipeline.schedule.run import simulate_schedule
from tests.pipeline.problems import layer, linear_seconds, problem, random_problem, straight_plan


def even(num_layers: int, seconds: float = 1.0) -> LayerSeconds:
    return linear_seconds([seconds] * num_layers, [2.0 * seconds] * num_layers)


def data_parallelism_wins() -> PipelineProblem:
    """Weights are small and what crosses a cut is large; the two layers are unequal, so stages could not be even."""
    seconds = linear_seconds([1.0, 3.0], [2.0, 6.0])
    return problem(
        [layer(weight=10.0, output=1e4), layer(weight=10.0)],
        [seconds] * 3,
        micro_batch_size=6,
        num_micro_batches=4,
    )


def pipeline_wins() -> PipelineProblem:
    """Weights are large, cuts are thin, layers are even."""
    return problem(
        [layer(weight=1e5, output=1.0) for _ in range(3)],
        [even(3)] * 3,
        micro_batch_size=6,
        num_micro_batches=12,
    )


def two_dimensions_win() -> PipelineProblem:
    """A device that holds the model, and two a quarter as fast that hold one of two layers each.

    Samples a second in units of the slow: 2 on the quick one and 1 on the pair; a pipeline of all has at most 2.
    """
    quick, slow = even(2, 0.25), even(2, 1.0)
    return problem(
        [layer(weight=1000.0, output=1.0), layer(weight=1000.0, output=1.0)],
        [quick, slow, slow],
        memory=[1e6, 3500.0, 3500.0],
        micro_batch_size=6,
        num_micro_batches=24,
        link=1e4,
    )


def single_device_wins() -> PipelineProblem:
    """One device is far faster than the others, and links are slow."""
    return problem(
        [layer(weight=1000.0, output=100.0) for _ in range(3)],
        [even(3, 0.01), even(3), even(3)],
        micro_batch_size=4,
        num_micro_batches=4,
    )


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        (data_parallelism_wins(), "data parallelism"),
        (pipeline_wins(), "pipeline"),
        (two_dimensions_win(), "2-D"),
        (single_device_wins(), "single device"),
    ],
)
def test_the_planner_says_which_kind_of_parallelism_wins(
    case: PipelineProblem, architecture: str
) -> None:
    found = plan_pipeline(case)
    assert found.plan.architecture == architecture
    # By a margin, so that no detail of the model decides it.
    others = [each for each in found.alternatives if each.plan.architecture != architecture]
    assert others
    assert min(each.prediction.step_s for each in others) > 1.1 * found.prediction.step_s
    document = found.to_document()
    assert document["architecture"] == architecture
    assert document["predicted"]["step_s"] == found.prediction.step_s


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


def test_the_choice_is_never_worse_than_algorithm_2() -> None:
    for seed in range(8):
        case = random_problem(np.random.default_rng(seed), 5, 4)
        paper = predict(case, algorithm_2(case).plan)
        assert plan_pipeline(case).prediction.step_s <= paper.step_s * (1.0 + 1e-9)


def test_the_simulator_chooses_a_larger_k_where_links_are_slow() -> None:
    """Transfers as long as a backward pass: 2(P − p) − 1 leaves devices waiting, and K is raised as memory allows."""
    layers = [layer(output=50.0, activation=1.0) for _ in range(3)]
    case = problem(layers, [linear_seconds([0.25] * 3, [0.5] * 3)] * 3, num_micro_batches=16)
    plan = straight_plan([0, 1, 2], [[4]] * 3, 16)
    chosen, prediction = best_in_flight(case, plan)
    assert prediction.step_s < predict(case, plan).step_s * 0.95
    assert chosen.stages[0].in_flight > plan.stages[0].in_flight
    # A sample keeps 50 B of input and 1 B in the second stage, so that a micro-batch keeps 204 B.
    tight = replace(
        case, devices=tuple(replace(device, memory_bytes=3.5 * 204.0) for device in case.devices)
    )
    assert [stage.in_flight for stage in with_in_flight(tight, plan, (9, 9, 9)).stages] == [9, 3, 3]
    with_in_flight(tight, plan, (9, 9, 9)).check(tight)


def test_other_micro_batch_sizes_of_the_same_mini_batch_may_win() -> None:
    """A fixed cost a pass makes larger micro-batches better."""
    case = problem(
        [layer(weight=1e5, output=1.0) for _ in range(2)],
        [linear_seconds([0.01] * 2, [0.01] * 2, fixed_s=1.0)] * 2,
        micro_batch_size=1,
        num_micro_batches=32,
    )
    found = plan_pipeline(case, PlannerSettings(micro_batch_sizes=(4, 8)))
    assert isinstance(found.plan, PipelinePlan)
    assert found.plan.micro_batch_size > 1
    assert found.plan.num_samples == 32
    with pytest.raises(
        ConfigError, match="a micro-batch of 5 samples does not divide the mini-batch of 32"
    ):
        plan_pipeline(case, PlannerSettings(micro_batch_sizes=(5,)))


def test_a_pruned_search_is_near_the_whole_one() -> None:
    rng = np.random.default_rng(3)
    base = rng.uniform(0.5, 2.0, 90)
    kinds = [linear_seconds(base / speed * 1e-3, base / speed * 2e-3) for speed in (2.0, 1.0)]
    layers = [
        layer(weight=float(rng.integers(1, 1000)), output=float(rng.integers(1, 50)))
        for _ in range(90)
    ]
    case = problem(
        layers,
        [kinds[index % 2] for index in range(8)],
        micro_batch_size=16,
        num_micro_batches=8,
        link=1e5,
    )
    whole = plan_pipeline(case, PlannerSettings(prune=False, two_d=False))
    pruned = plan_pipeline(case, PlannerSettings(prune=True, two_d=False))
    assert (whole.exact, pruned.exact) == (True, False)
    assert pruned.prediction.step_s <= 1.05 * whole.prediction.step_s


@pytest.mark.parametrize("num_devices", [100, 7])
def test_near_a_plan_are_its_places_and_not_too_many_others(num_devices: int) -> None:
    case = problem(
        [layer() for _ in range(30)], [even(30)] * num_devices, micro_batch_size=num_devices
    )
    width = num_devices // 7
    plan = straight_plan([4, 8, 12, 16, 20, 24, 29], [[7] * width] * 7, 4)
    cuts, places = near(replace(case, micro_batch_size=7 * width), plan, case.devices)
    ends = {index * width for index in range(8)} - {num_devices}
    assert {0, 5, 9, 13, 17, 21, 25, 30} <= set(cuts.tolist()) and ends <= set(places)
    assert len(places) <= 30 and places == sorted(places) and places[-1] < num_devices


def test_steps_are_counted_from_nothing_to_all() -> None:
    for prune in (False, True):
        steps: list[tuple[str, int, int]] = []
        plan_pipeline(
            random_problem(np.random.default_rng(1), 4, 3, micro_batch_size=4, num_micro_batches=2),
            PlannerSettings(micro_batch_sizes=(1, 2), prune=prune),
            on_step=lambda text, done, total, steps=steps: steps.append((text, done, total)),
        )  # type: ignore[misc]
        assert [done for _, done, _ in steps] == list(range(steps[0][2])) and len(steps) == 8
        assert steps[0][0] == "searching plans, micro-batches of 4"


@pytest.mark.parametrize(
    ("case", "error", "complaint"),
    [
        (
            problem([layer("only")], [even(1)] * 2),
            ConfigError,
            "model toy has one layer, only, and cannot be cut into stages; profile it in finer layers",
        ),
        (
            problem([layer(), layer()], [even(2)]),
            ConfigError,
            "one device, toy 0, and a pipeline needs 2 or more",
        ),
        (
            problem([layer("wide", weight=1e6), layer()], [even(2)] * 2, memory=1e6),
            InfeasiblePlan,
            r"weights, gradients and optimiser take 3\.0 MB and its largest layer, wide, 3\.0 "
            r"MB with one sample, while 2 "
            r"devices have 2\.0 MB, the largest 1\.0 MB",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    case: PipelineProblem, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint) as caught:
        plan_pipeline(case)
    assert "\n" not in str(caught.value)


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"soc_bytes_per_s = 0\.0 must be above 0"):
        problem([layer(), layer()], [even(2)] * 2, link=0.0)


def test_samples_on_one_device_are_part_of_the_plan_and_its_time() -> None:
    """Large inputs on one device: the first stage should be that device, since others would have to receive them."""
    layers = [layer(weight=1e4, output=1.0) for _ in range(3)]
    case = problem(
        layers, [even(3)] * 3, micro_batch_size=6, num_micro_batches=12, input_bytes=500.0
    )
    for source in (0, 2):
        found = plan_pipeline(case, PlannerSettings(samples_on=source))
        assert isinstance(found.plan, PipelinePlan)
        assert found.plan.samples_on == source
        assert found.plan.stages[0].devices == (source,)
        for each in compare(case, ["gpipe", "2d"], samples_on=source):
            assert each.plan is not None
            assert simulate_schedule(case, each.plan).num_bytes == pytest.approx(
                each.plan.communication_bytes(case)
            )
    with pytest.raises(ConfigError, match="SoC 7 is no device of this problem"):
        plan_pipeline(case, PlannerSettings(samples_on=7))
    with pytest.raises(ConfigError, match="no comparator 'gpip'; there are single-device"):
        compare(case, ["gpip"])
