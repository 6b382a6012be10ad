"""Devices as processes, joined by gloo: the bits of one process, bytes as predicted, and the end when one dies."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.pipeline.plan import Plan, TwoDPlan, with_samples_on
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.estimates import estimated_problem
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from tests.pipeline.problems import cluster, straight_plan
from tests.pipeline.runtime.processes import Death, Devices, Report, Training
from tests.pipeline.runtime.training import assert_same, minis, model, read, train_together

HYBRID = straight_plan((2, 5), ((4, 2), (6,)), 4)
"""A stage of two devices with uneven shares, and one of one."""

STRAIGHT = straight_plan((1, 3, 5), ((4,), (4,), (4,)), 4)
TWO_D = TwoDPlan(
    groups=(straight_plan((2, 5), ((5,), (5,)), 2), straight_plan((5,), ((3,),), 2, first_soc=2))
)
CODED = ActivationCoding(bits=8, gradient_bits=8)
LIMIT_S = 1.0
"""Until a device knows that another one is gone."""


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    with Devices(3) as three:
        yield three


def end_of(reports: dict[int, Report]) -> Report:
    assert not any(report.lost or report.threads_left for report in reports.values()), reports
    return next(report for report in reports.values() if report.end is not None)


PLANS: list[tuple[Plan, tuple[int, ...]]] = [
    (HYBRID, ()),
    (with_samples_on(HYBRID, 1), (0,)),
    (STRAIGHT, ()),
    (HYBRID, (0, 1, 2)),
    (with_samples_on(TWO_D, 2), ()),
    (with_samples_on(TWO_D, 2), (1, 2)),
]
# Each plan with one coding, the other one for its neighbour; with the other it is slow.
WORK = [
    pytest.param(*case, coding, marks=() if (row + column) % 2 == 0 else pytest.mark.slow)
    for row, case in enumerate(PLANS)
    for column, coding in enumerate((EXACT, CODED))
]


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(("plan", "int8_socs", "coding"), WORK)
def test_processes_compute_the_bits_of_one(
    devices: Devices, plan: Plan, int8_socs: tuple[int, ...], coding: ActivationCoding
) -> None:
    steps, options = tuple(minis(3, plan.num_samples - 1)), {"norm": True, "dropout": 0.3}
    work = Training(plan=plan, minis=steps, model=options, coding=coding, int8_socs=int8_socs)
    end = end_of(devices.train(work)).end
    together = train_together(model(**options), plan, steps, coding=coding, int8_socs=int8_socs)
    assert end is not None and end.peak_bytes == together.peak_bytes
    assert_same(end, together)


def problem_of(plan: Plan) -> PipelineProblem:
    first = plan.pipelines[0]
    return estimated_problem(
        read(model()).model,
        cluster(3),
        micro_batch_size=first.micro_batch_size,
        num_micro_batches=first.num_micro_batches,
    )


@pytest.mark.parametrize("plan", [HYBRID, STRAIGHT, TWO_D], ids=["hybrid", "straight", "2-D"])
def test_bytes_on_the_wire_are_those_of_equations_1_and_2(devices: Devices, plan: Plan) -> None:
    """Besides, the first device gets the other stages' weights, their state and their losses, once at the end."""
    steps = tuple(minis(3, plan.num_samples))
    reports = devices.train(Training(plan=plan, minis=steps))
    end = end_of(reports)
    # The devices with a loss sum the weights of their labels, a number of eight bytes.
    with_loss = sum(len(pipeline.stages[-1].devices) for pipeline in plan.pipelines)
    expected = plan.communication_bytes(problem_of(plan)) + 2 * 8 * (with_loss - 1)
    assert sum(report.sent_bytes for report in reports.values()) == len(steps) * expected
    others = [report.end_bytes for report in reports.values() if report is not end]
    assert end.end_bytes == 0 < min(others)


def test_eight_bits_take_a_quarter_of_the_bytes_of_activations(devices: Devices) -> None:
    """Each of an update's messages has the range of its values besides, in eight bytes."""
    steps = tuple(minis(2, STRAIGHT.num_samples))
    reports = devices.train(Training(plan=STRAIGHT, minis=steps, coding=CODED))
    pieces = read(model()).chain.pieces
    crossing = sum(len(pieces[stage.last_layer].leaving) for stage in STRAIGHT.stages[:-1])
    expected = STRAIGHT.communication_bytes(problem_of(STRAIGHT)) / 4
    expected += 8 * 2 * STRAIGHT.num_micro_batches * crossing
    assert sum(report.sent_bytes for report in reports.values()) == len(steps) * expected


def test_samples_from_a_device_take_their_bytes_and_a_header_each(devices: Devices) -> None:
    """Samples go to the other device of the first stage, labels to the last."""
    plan, steps = with_samples_on(HYBRID, 1), minis(1, HYBRID.num_samples)
    reports = devices.train(Training(plan=plan, minis=tuple(steps)))
    sent = sum(report.sent_bytes for report in reports.values())
    headers = sent - plan.communication_bytes(problem_of(plan))
    assert 0 < headers < 200 * 2 * HYBRID.num_micro_batches


def die(death: Death, plan: Plan) -> None:
    """Let a device die: all others know it within `LIMIT_S`, though each waits for other devices, and none hangs."""
    with Devices(3) as some:
        reports = some.train(
            Training(plan=plan, minis=tuple(minis(20, plan.num_samples)), death=death)
        )
    dead = reports.pop(death.soc)
    assert dead.lost == "killed"
    for report in reports.values():
        assert report.lost is not None and report.end is None and not report.threads_left, reports
        assert report.moment_s - dead.moment_s < LIMIT_S, reports


@pytest.mark.parametrize(
    ("plan", "death"),
    [(STRAIGHT, Death(soc=2, pass_number=9)), (HYBRID, Death(soc=0, pass_number=6))],
    ids=["straight", "hybrid"],
)
def test_when_a_device_dies_all_others_know_it_at_once(plan: Plan, death: Death) -> None:
    die(death, plan)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    plan=st.sampled_from([HYBRID, STRAIGHT, TWO_D]),
    soc=st.integers(0, 2),
    pass_number=st.integers(0, 40),
    after_s=st.floats(0.0, 0.01),
)
def test_a_device_may_die_at_any_moment(
    plan: Plan, soc: int, pass_number: int, after_s: float
) -> None:
    die(Death(soc=soc, pass_number=pass_number, after_s=after_s), plan)
