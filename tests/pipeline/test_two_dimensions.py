"""2-D plans: the closed form beside the simulator, part by part."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import InfeasiblePlan
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.planner.closed_form import latency, update_latency
from socflower.pipeline.planner.selection import PlannerSettings, plan_pipeline, predict
from socflower.pipeline.planner.two_dimensions import best_two_d
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


def two_pairs(output: float, link: float = 100.0) -> tuple[PipelineProblem, TwoDPlan]:
    """Return two equal pipelines of two stages, whose parts are exchanged in two rings of two devices."""
    case = problem(
        [layer(weight=100.0, output=output), layer(weight=300.0)],
        [linear_seconds([0.1, 0.1], [0.2, 0.2])] * 4,
        micro_batch_size=4,
        num_micro_batches=16,
        link=link,
    )
    groups = (straight_plan([0, 1], [[2], [2]], 16, first_soc=soc) for soc in (0, 2))
    return case, TwoDPlan(groups=tuple(groups))


def test_the_exchange_follows_the_last_pass_of_a_ring_and_takes_what_the_closed_form_says() -> None:
    """Rings of 100 and 300 B at 100 B/s: 1 s and 3 s. The second stages end with a backward pass before the first."""
    case, plan = two_pairs(output=0.0)
    run = simulate_schedule(case, plan)
    ended = {each.soc: each.end_s for each in sorted(run.passes, key=lambda each: each.end_s)}
    assert run.step_s == pytest.approx(max(ended[0] + 1.0, ended[1] + 3.0))
    slowest_s = max(latency(case, group, reduces=False).seconds for group in plan.groups)
    assert update_latency(case, plan) == pytest.approx(slowest_s + 3.0)


def test_the_closed_form_of_a_cut_that_dominates_is_off_by_the_direction_that_it_adds() -> None:
    """A cut of 1 s in each direction and stages of 0.6 s: the paper counts 32 s, links carry both ways in 17 s."""
    case, plan = two_pairs(output=50.0)
    found = predict(case, plan)
    assert found.formula_s == pytest.approx(32 * 1.0 + 0.6 + 3.0)
    assert found.duplex_s == pytest.approx(17 * 1.0 + 0.6 + 3.0)
    one = latency(case, plan.groups[0], reduces=False)
    assert one.steps[one.dominant].transfers
    assert found.formula_s > 1.26 * found.step_s
    wide = predict(*two_pairs(output=50.0, link=1e4))
    assert wide.formula_s == pytest.approx(wide.duplex_s)  # no transfer dominates


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_both_closed_forms_are_equal_unless_a_transfer_dominates(seed: int) -> None:
    case = random_problem(np.random.default_rng(seed), 4, 4, micro_batch_size=4)
    plan = best_two_d(case)
    if plan is None:
        return
    found = predict(case, plan)
    assert found.duplex_s <= found.formula_s * (1.0 + 1e-12)
    forms = [latency(case, group, reduces=False) for group in plan.groups]
    if not any(step.transfers for form in forms for step in form.steps):
        assert found.duplex_s == found.formula_s


# ------------------------------------------------------------------------------- a device a stage, as SoCFlow+ compares
@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), num_devices=st.integers(4, 8), asked=st.sampled_from([0, 2]))
@settings(max_examples=25)
def test_in_a_grid_every_stage_has_one_device_and_all_devices_take_part(
    seed: int, num_devices: int, asked: int
) -> None:
    case = random_problem(
        np.random.default_rng(seed), 5, num_devices, micro_batch_size=6, num_micro_batches=3
    )
    planned = plan_pipeline(case, PlannerSettings(grid=asked, micro_batch_sizes=(6, 9)))
    pipelines = planned.plan.pipelines
    assert isinstance(planned.plan, TwoDPlan) and len(pipelines) == (asked or len(pipelines)) >= 2
    assert sorted(planned.plan.socs) == [*range(num_devices)]
    assert all(len(stage.devices) == 1 for each in pipelines for stage in each.stages)
    lengths = {len(each.stages) for each in pipelines}
    assert min(lengths) >= 2 and max(lengths) - min(lengths) <= (
        1 if asked or num_devices % 2 else 0
    )
    others = [each.prediction.step_s for each in planned.alternatives]
    assert planned.prediction.step_s <= min(others, default=np.inf)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_the_cut_of_a_group_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_problem(rng, 6, 4, micro_batch_size=4, num_micro_batches=4)
    case = replace(
        case, devices=tuple(replace(each, seconds=case.devices[0].seconds) for each in case.devices)
    )
    planned = plan_pipeline(case, PlannerSettings(grid=2))
    own = replace(case, devices=case.devices[:2], micro_batch_size=2)

    def seconds(cut: int) -> float:
        plan = straight_plan((cut, 5), ((2,), (2,)), 4)
        return latency(own, plan, reduces=False, duplex=True).seconds

    found = latency(own, planned.plan.pipelines[0], reduces=False, duplex=True).seconds
    assert found == pytest.approx(min(map(seconds, range(5))))


@pytest.mark.parametrize(("num_layers", "num_devices", "grid"), [(4, 6, 4), (2, 9, 3), (9, 16, 8)])
def test_a_grid_that_cannot_be_is_refused_with_what_a_group_needs(
    num_layers: int, num_devices: int, grid: int
) -> None:
    case = even(num_layers, num_devices)
    refused(
        lambda: plan_pipeline(case, PlannerSettings(grid=grid)),
        f"{grid} groups",
        f"{num_devices} devices",
        error=InfeasiblePlan,
    )


def test_three_devices_are_one_pipeline() -> None:
    planned = plan_pipeline(even(4, 3), PlannerSettings(grid=0))
    assert [len(each.stages) for each in planned.plan.pipelines] == [3]
