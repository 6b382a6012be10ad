"""Schedules in virtual time: order, K_p, bytes, heat, changing links, traces."""

from collections import defaultdict
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Activity
from socflower.cluster.link_rate import RateSteps
from socflower.errors import ConfigError, SocflowerError
from socflower.pipeline.plan import PipelinePlan, Policy, Sync, TwoDPlan
from socflower.pipeline.problem import PipelineModel, PipelineProblem
from socflower.pipeline.schedule.order import (
    ASTEROID,
    RULES,
    Pass,
    ScheduledPass,
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
from tests.pipeline.problems import layer, linear_seconds, plans, problem, problems, straight_plan


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
        assert [each.micro_batch for each in order if each.kind == kind] == list(
            range(num_micro_batches)
        )
    kept, most = 0, 0
    for each in order:
        kept += 1 if each.kind == Pass.FORWARD else -1
        most = max(most, kept)
        assert kept >= 0
    limit = (
        num_micro_batches
        if policy == Policy.BACKWARD_AFTER_FORWARD
        else min(in_flight, num_micro_batches)
    )
    assert most == limit


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
    counter = iter(range(10**9))
    run = simulate_schedule(
        case,
        plan,
        num_steps=num_steps,
        delay=lambda soc, operation: delays[next(counter) % len(delays)],
    )
    check_passes(run, plan, num_steps)
    for stage in plan.stages:
        for soc in stage.devices:
            assert run.peak_in_flight[soc] <= stage.in_flight
    assert run.num_bytes == pytest.approx(num_steps * plan.communication_bytes(case))


def check_passes(run: ScheduleRun, plan: PipelinePlan, num_steps: int) -> None:
    done: dict[tuple[int, int, Pass, int], tuple[float, float]] = {}
    by_device = defaultdict(list)
    for each in run.passes:
        done[each.soc, each.step, each.kind, each.micro_batch] = (each.start_s, each.end_s)
        by_device[each.soc].append(each)
    for index, stage in enumerate(plan.stages):
        expected = list(operations(plan.policy, stage.in_flight, plan.num_micro_batches))
        for soc in stage.devices:
            assert [
                ScheduledPass(each.kind, each.micro_batch) for each in by_device[soc]
            ] == expected * num_steps
            for before, after in zip(by_device[soc], by_device[soc][1:], strict=False):
                assert before.end_s <= after.start_s + 1e-9
        if index + 1 == len(plan.stages):
            continue
        for piece in plan.slices(index):
            sender, receiver = (
                stage.devices[piece.sender],
                plan.stages[index + 1].devices[piece.receiver],
            )
            for step in range(num_steps):
                for number in range(plan.num_micro_batches):
                    assert (
                        done[sender, step, Pass.FORWARD, number][1]
                        <= done[receiver, step, Pass.FORWARD, number][0] + 1e-9
                    )
                    assert (
                        done[receiver, step, Pass.BACKWARD, number][1]
                        <= done[sender, step, Pass.BACKWARD, number][0] + 1e-9
                    )


def test_a_pipeline_of_equal_stages_takes_m_plus_p_minus_1_steps() -> None:
    case = problem(
        [layer() for _ in range(3)],
        [linear_seconds([0.5] * 3, [0.75] * 3)] * 3,
        num_micro_batches=8,
    )
    for policy in Policy:
        run = simulate_schedule(case, straight_plan([0, 1, 2], [[4]] * 3, 8, policy=policy))
        assert run.step_s == pytest.approx((8 + 3 - 1) * 4 * (0.5 + 0.75))
        assert run.usage.soc_seconds[Activity.COMPUTE] == pytest.approx(3 * 8 * 5.0)


def test_one_in_flight_keeps_one_stage_busy_at_a_time() -> None:
    """Paper §3.2: with K_p = 1 for all stages, only one is active."""
    case = problem(
        [layer() for _ in range(3)],
        [linear_seconds([0.5] * 3, [0.75] * 3)] * 3,
        num_micro_batches=8,
    )
    assert simulate_schedule(
        case, straight_plan([0, 1, 2], [[4]] * 3, 8, rule=at_most(1))
    ).step_s == pytest.approx(8 * 3 * 5.0)


def test_a_ring_and_an_update_end_the_step() -> None:
    """Two devices, 1 s a pass of their half; 2(n-1)/n of 100 B at 100 B/s; 5 passes over 100 B at 1,000 B/s."""
    case = problem([layer(weight=100.0)], [linear_seconds([0.5], [0.5])] * 2, num_micro_batches=3)
    case = replace(
        case, devices=tuple(replace(each, update_bytes_per_s=1000.0) for each in case.devices)
    )
    run = simulate_schedule(case, straight_plan([0], [[2, 2]], 3), num_steps=2)
    assert run.step_ends_s == pytest.approx((6 + 1 + 0.5, 15.0))
    assert run.usage.soc_seconds[Activity.UPDATE] == pytest.approx(2 * 2 * 0.5)


def test_samples_that_are_elsewhere_are_sent() -> None:
    """Images of 10 B to the first stage, labels of 1 B to the last; SoC 2 has them."""
    case = problem(
        [layer(output=5.0), layer()],
        [linear_seconds([0.1, 0.1], [0.1, 0.1])] * 3,
        num_micro_batches=3,
    )
    case = replace(
        case,
        model=PipelineModel(
            name="toy", layers=case.model.layers, input_bytes=10.0, label_bytes=1.0
        ),
    )
    for source, own_bytes in ((2, 12 * 11), (0, 12 * 1), (1, 12 * 10)):
        plan = straight_plan([0, 1], [[4], [4]], 3, samples_on=source)
        assert simulate_schedule(case, plan, num_steps=2).num_bytes == 2 * (2 * 12 * 5 + own_bytes)
        assert plan.communication_bytes(case) == 2 * 12 * 5 + own_bytes
    single = straight_plan([1], [[4]], 3, samples_on=2)
    assert simulate_schedule(case, single).num_bytes == 12 * 11


# ------------------------------------------------------------------------------------------------- two dimensions


def two_d(sync: Sync, server: int | str = "hub") -> TwoDPlan:
    whole = straight_plan([0, 1], [[4], [4]], 3)
    other = replace(
        whole,
        stages=tuple(replace(stage, devices=(stage.devices[0] + 2,)) for stage in whole.stages),
    )
    return TwoDPlan(groups=(whole, other), sync=sync, server=server)


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
    case = problem(
        [layer(weight=40.0, output=5.0), layer(weight=30.0)],
        [linear_seconds([0.1, 0.1], [0.1, 0.1])] * 4,
        num_micro_batches=3,
    )
    plan = two_d(sync, server)
    expected = num_bytes + 2 * (2 * 12 * 5.0)
    assert plan.communication_bytes(case) == expected
    assert simulate_schedule(case, plan, num_steps=2).num_bytes == pytest.approx(2 * expected)


def test_groups_that_are_cut_in_different_places_exchange_by_part() -> None:
    case = problem(
        [layer(weight=40.0, output=5.0), layer(weight=30.0, output=5.0), layer(weight=20.0)],
        [linear_seconds([0.1] * 3, [0.1] * 3)] * 4,
        num_micro_batches=3,
    )
    one, other = straight_plan([0, 2], [[4], [4]], 3), straight_plan([1, 2], [[4], [4]], 3)
    other = replace(
        other,
        stages=tuple(replace(stage, devices=(stage.devices[0] + 2,)) for stage in other.stages),
    )
    for sync in Sync:
        plan = TwoDPlan(groups=(one, other), sync=sync)
        assert simulate_schedule(case, plan, num_steps=2).num_bytes == pytest.approx(
            2 * plan.communication_bytes(case)
        )


# ------------------------------------------------------------------------------------ heat, users, links, traces


def make_rack(w_per_k: float, around: Surroundings | None = None) -> RackDynamics:
    return RackDynamics(
        Rack(slots_per_board=(2,), chassis_j_per_k=300.0, soc_to_board_w_per_k=w_per_k),
        FixedSpeed(fixed_rpm=3250.0),
        surroundings=around,
    )


def slow_case() -> tuple[PipelineProblem, PipelinePlan]:
    case = problem(
        [layer(output=10.0), layer()],
        [linear_seconds([1.0, 1.0], [1.0, 1.0])] * 2,
        num_micro_batches=8,
    )
    return case, straight_plan([0, 1], [[4], [4]], 8)


def test_a_user_who_takes_a_device_stops_the_pipeline() -> None:
    case, plan = slow_case()
    free = simulate_schedule(case, plan, clock=EventClock(case.cluster, make_rack(0.4)))
    taken = changes(
        NOBODY, [(20.0, BackgroundLoad(share=0.0, power_w=1.0, taken=True)), (50.0, NOBODY)]
    )
    around = Surroundings(background_load=(changes(NOBODY, []), taken))
    late = simulate_schedule(case, plan, clock=EventClock(case.cluster, make_rack(0.4, around)))
    assert free.step_s + 20.0 < late.step_s <= free.step_s + 30.0 + 1e-6


def test_heat_slows_a_pipeline_down() -> None:
    case, plan = slow_case()
    cool = simulate_schedule(case, plan, num_steps=20)
    hot = simulate_schedule(
        case, plan, num_steps=20, clock=EventClock(case.cluster, make_rack(0.02))
    )
    assert hot.usage.duration_s > cool.usage.duration_s
    assert hot.usage.energy_j[Activity.COOLING] > 0.0


def test_a_link_that_comes_and_goes() -> None:
    case, plan = slow_case()
    steady = simulate_schedule(case, plan).step_s
    rates = {"soc0/tx": RateSteps((0.0, 10.0, 30.0), (100.0, 0.0, 100.0))}
    run = simulate_schedule(case, plan, link_rates=rates)
    assert steady + 5.0 < run.step_s < steady + 20.0 + 1e-6
    lost = {"soc0/tx": RateSteps((0.0, 10.0), (100.0, 0.0), inf)}
    with pytest.raises(SocflowerError, match="soc0/tx carries nothing any more"):
        simulate_schedule(case, plan, link_rates=lost)
    with pytest.raises(ConfigError, match="no link 'soc9/tx'"):
        simulate_schedule(case, plan, link_rates={"soc9/tx": RateSteps((0.0,), (1.0,))})


def test_the_trace_shows_micro_batches() -> None:
    case, plan = slow_case()
    trace = Trace()
    simulate_schedule(case, plan, clock=EventClock(case.cluster, trace=trace))
    names = {span[1] for span in trace.state()["spans"]}
    assert {
        "forward 0",
        "backward 7",
        "activations 3 of stage 0",
        "gradients 3 of stage 1",
        "pipeline",
    } <= names
