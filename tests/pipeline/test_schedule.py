"""Schedules in virtual time: order, K_p, bytes, heat, changing links, traces."""

from dataclasses import replace
from itertools import accumulate, cycle, pairwise, product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Activity
from socflower.cluster.link_rate import RateSteps
from socflower.errors import SocflowerError
from socflower.pipeline.plan import PipelinePlan, Policy, Sync, TwoDPlan
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.schedule.order import (
    ASTEROID,
    RULES,
    Pass,
    at_most,
    operations,
)
from socflower.pipeline.schedule.run import ScheduleRun, simulate_schedule
from socflower.sim import EventClock
from socflower.sim.trace import Trace
from socflower.thermal.fans.policies import FixedSpeed
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, changes
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.rack import Rack
from tests.one_line import refused
from tests.pipeline.problems import (
    even,
    layer,
    linear_seconds,
    plans,
    problem,
    problems,
    straight_plan,
)


@given(
    policy=st.sampled_from(list(Policy)),
    in_flight=st.integers(1, 12),
    num_micro_batches=st.integers(1, 12),
)
def test_an_order_does_every_pass_once_and_keeps_at_most_k(
    policy: Policy, in_flight: int, num_micro_batches: int
) -> None:
    order = list(operations(policy, in_flight, num_micro_batches))
    for kind in Pass:
        done = [each.micro_batch for each in order if each.kind == kind]
        assert done == list(range(num_micro_batches))
    kept = list(accumulate(1 if each.kind == Pass.FORWARD else -1 for each in order))
    gpipe = policy == Policy.BACKWARD_AFTER_FORWARD
    limit = num_micro_batches if gpipe else min(in_flight, num_micro_batches)
    assert min(kept) >= 0 and max(kept) == limit


def test_the_rules_of_the_paper() -> None:
    """Fig. 4: K of 5, 3, 1 for three stages; Fig. 15(b): the policies."""
    assert ASTEROID.counts(3, 8) == (5, 3, 1)
    assert {name: each.counts(3, 8) for name, each in RULES.items()} == {
        "asteroid": (5, 3, 1),
        "a": (6, 4, 2),
        "b": (3, 2, 1),
        "c": (7, 5, 3),
    }
    assert at_most(4).counts(3, 3) == (3, 3, 3)


@settings(max_examples=120)
@given(data=st.data(), case=problems(max_devices=5), num_steps=st.integers(1, 2))
def test_dependencies_and_memory_hold_under_random_delays(
    data: st.DataObject, case: PipelineProblem, num_steps: int
) -> None:
    """A pass follows the passes of the same samples next to it, and K_p and the budgets hold, whatever is late."""
    plan = data.draw(plans(case))
    delays = data.draw(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=7))
    lengths = cycle(delays)
    run = simulate_schedule(
        case, plan, num_steps=num_steps, delay=lambda soc, operation: next(lengths)
    )
    check_passes(run, plan, num_steps)
    for stage in plan.stages:
        for soc in stage.devices:
            assert run.peak_in_flight[soc] <= stage.in_flight
    assert run.num_bytes == pytest.approx(num_steps * plan.communication_bytes(case))


def check_passes(run: ScheduleRun, plan: PipelinePlan, num_steps: int) -> None:
    done = {(each.soc, each.step, each.kind, each.micro_batch): each for each in run.passes}
    for index, stage in enumerate(plan.stages):
        expected = list(operations(plan.policy, stage.in_flight, plan.num_micro_batches))
        for soc in stage.devices:
            own = [each for each in run.passes if each.soc == soc]
            assert [(each.kind, each.micro_batch) for each in own] == expected * num_steps
            for before, after in pairwise(own):
                assert before.end_s <= after.start_s + 1e-9
        for piece in plan.slices(index) if index + 1 < len(plan.stages) else ():
            sender = stage.devices[piece.sender]
            receiver = plan.stages[index + 1].devices[piece.receiver]
            for one in product(range(num_steps), (Pass.FORWARD,), range(plan.num_micro_batches)):
                assert done[sender, *one].end_s <= done[receiver, *one].start_s + 1e-9
                back = (one[0], Pass.BACKWARD, one[2])
                assert done[receiver, *back].end_s <= done[sender, *back].start_s + 1e-9


def test_a_pipeline_of_equal_stages_takes_m_plus_p_minus_1_steps() -> None:
    """With K_p = 1 for all stages only one is active at a time (paper §3.2)."""
    case = even(3, 3, 0.5, 0.75, num_micro_batches=8)
    for policy in Policy:
        run = simulate_schedule(case, straight_plan([0, 1, 2], [[4]] * 3, 8, policy=policy))
        assert run.step_s == pytest.approx((8 + 3 - 1) * 4 * (0.5 + 0.75))
        assert run.usage.soc_seconds[Activity.COMPUTE] == pytest.approx(3 * 8 * 5.0)
    alone = simulate_schedule(case, straight_plan([0, 1, 2], [[4]] * 3, 8, rule=at_most(1)))
    assert alone.step_s == pytest.approx(8 * 3 * 5.0)


def test_a_ring_and_an_update_end_the_step() -> None:
    """Two devices, 1 s a pass of their half; 2(n-1)/n of 100 B at 100 B/s; 5 passes over 100 B at 1,000 B/s."""
    case = even(1, 2, 0.5, 0.5, weight=100.0, num_micro_batches=3)
    devices = tuple(replace(each, update_bytes_per_s=1000.0) for each in case.devices)
    case = replace(case, devices=devices)
    run = simulate_schedule(case, straight_plan([0], [[2, 2]], 3), num_steps=2)
    assert run.step_ends_s == pytest.approx((6 + 1 + 0.5, 15.0))
    assert run.usage.soc_seconds[Activity.UPDATE] == pytest.approx(2 * 2 * 0.5)


def test_samples_that_are_elsewhere_are_sent() -> None:
    """Images of 10 B to the first stage, labels of 1 B to the last; SoC 2 has them."""
    case = even(2, 3, output=5.0, num_micro_batches=3, input_bytes=10.0)
    case = replace(case, model=replace(case.model, label_bytes=1.0))
    for source, own_bytes in ((2, 12 * 11), (0, 12 * 1), (1, 12 * 10)):
        plan = straight_plan([0, 1], [[4], [4]], 3, samples_on=source)
        assert simulate_schedule(case, plan, num_steps=2).num_bytes == 2 * (2 * 12 * 5 + own_bytes)
        assert plan.communication_bytes(case) == 2 * 12 * 5 + own_bytes
    single = straight_plan([1], [[4]], 3, samples_on=2)
    assert simulate_schedule(case, single).num_bytes == 12 * 11


# ------------------------------------------------------------------------------------------------- two dimensions


@pytest.mark.parametrize(
    ("sync", "server", "num_bytes"),
    [
        (Sync.RING, "hub", 2 * 70.0),  # 2(G - 1)P
        (Sync.SERVER, "hub", 2 * 2 * 70.0),  # 2GP: Eq. 1
        (Sync.SERVER, 0, 2 * 2 * 70.0 - 2 * 40.0),  # the server's own part stays
    ],
)
def test_bytes_of_two_dimensions_are_those_of_equation_1(
    sync: Sync, server: int | str, num_bytes: float
) -> None:
    layers = [layer(weight=40.0, output=5.0), layer(weight=30.0)]
    case = problem(layers, [linear_seconds([0.1] * 2, [0.1] * 2)] * 4, num_micro_batches=3)
    groups = tuple(straight_plan([0, 1], [[4], [4]], 3, first_soc=soc) for soc in (0, 2))
    plan = TwoDPlan(groups=groups, sync=sync, server=server)
    expected = num_bytes + 2 * (2 * 12 * 5.0)
    assert plan.communication_bytes(case) == expected
    assert simulate_schedule(case, plan, num_steps=2).num_bytes == pytest.approx(2 * expected)


@pytest.mark.parametrize("sync", Sync)
def test_groups_that_are_cut_in_different_places_exchange_by_part(sync: Sync) -> None:
    case = problem(
        [layer(weight=40.0, output=5.0), layer(weight=30.0, output=5.0), layer(weight=20.0)],
        [linear_seconds([0.1] * 3, [0.1] * 3)] * 4,
        num_micro_batches=3,
    )
    one = straight_plan([0, 2], [[4], [4]], 3)
    other = straight_plan([1, 2], [[4], [4]], 3, first_soc=2)
    plan = TwoDPlan(groups=(one, other), sync=sync)
    expected = plan.communication_bytes(case)
    assert simulate_schedule(case, plan, num_steps=2).num_bytes == pytest.approx(2 * expected)


# ------------------------------------------------------------------------------------ heat, users, links, traces


def make_rack(w_per_k: float, around: Surroundings | None = None) -> RackDynamics:
    return RackDynamics(
        Rack(slots_per_board=(2,), chassis_j_per_k=300.0, soc_to_board_w_per_k=w_per_k),
        FixedSpeed(fixed_rpm=3250.0),
        surroundings=around,
    )


CASE, PLAN = (
    even(2, 2, 1.0, 1.0, output=10.0, num_micro_batches=8),
    straight_plan([0, 1], [[4]] * 2, 8),
)


def hot_run(w_per_k: float, around: Surroundings | None = None, num_steps: int = 1) -> ScheduleRun:
    clock = EventClock(CASE.cluster, make_rack(w_per_k, around))
    return simulate_schedule(CASE, PLAN, num_steps=num_steps, clock=clock)


def test_a_user_who_takes_a_device_stops_the_pipeline() -> None:
    taken = BackgroundLoad(share=0.0, power_w=1.0, taken=True)
    loads = (changes(NOBODY, []), changes(NOBODY, [(20.0, taken), (50.0, NOBODY)]))
    free, late = hot_run(0.4), hot_run(0.4, Surroundings(background_load=loads))
    assert free.step_s + 20.0 < late.step_s <= free.step_s + 30.0 + 1e-6


def test_heat_slows_a_pipeline_down() -> None:
    hot = hot_run(0.02, num_steps=20).usage
    assert hot.duration_s > simulate_schedule(CASE, PLAN, num_steps=20).usage.duration_s
    assert hot.energy_j[Activity.COOLING] > 0.0


def test_a_link_that_comes_and_goes() -> None:
    def run(link: str, *steps: Any) -> ScheduleRun:
        return simulate_schedule(CASE, PLAN, link_rates={link: RateSteps(*steps)})

    steady_s = simulate_schedule(CASE, PLAN).step_s
    late_s = run("soc0/tx", (0.0, 10.0, 30.0), (100.0, 0.0, 100.0)).step_s
    assert steady_s + 5.0 < late_s < steady_s + 20.0 + 1e-6
    lost = ((0.0, 10.0), (100.0, 0.0), inf)
    refused(lambda: run("soc0/tx", *lost), "soc0/tx", error=SocflowerError)
    refused(lambda: run("soc9/tx", (0.0,), (1.0,)), "soc9/tx")


def test_the_trace_shows_micro_batches() -> None:
    trace = Trace()
    simulate_schedule(CASE, PLAN, clock=EventClock(CASE.cluster, trace=trace))
    shown = {"forward 0", "backward 7", "activations 3 of stage 0", "gradients 3 of stage 1"}
    assert shown | {"pipeline"} <= {span[1] for span in trace.state()["spans"]}
