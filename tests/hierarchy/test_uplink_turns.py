"""Whether communication groups take turns: what is chosen is never slower than either way (F6, F7)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Cluster, ModelProfile, parse_cluster
from socflower.hierarchy import (
    GroupPlan,
    IntervalCosts,
    SyncInterval,
    UplinkTurns,
    choose_turns,
    conflicts,
    plan_groups,
    step_times,
    sync_schedule,
)
from socflower.hierarchy.exchange.models import ModelExchange
from socflower.hierarchy.uplink_turns import (
    ASKED,
    NO_SHARED_UPLINK,
    NOT_PREDICTED,
    PREDICTED,
    StepTimes,
)
from socflower.sim import EventClock
from tests.hierarchy.toy_trainings import interval_costs
from tests.one_line import refused
from tests.toy_clusters import toy_profile

SHARING = [
    (slots, num_groups)
    for num_boards in (2, 3)
    for slots in product((2, 3, 4), repeat=num_boards)
    for num_groups in (2, 3, 4)
    if any(
        conflicts(plan_groups(parse_cluster({"boards": list(slots)}), num_groups).groups).values()
    )
]
"""Slots of boards, and numbers of groups with which some of them share an uplink."""


def counted(intervals: Sequence[SyncInterval]) -> Counter[int]:
    return Counter(each.num_steps for each in intervals)


def work_on(
    cluster: Cluster, num_groups: int, profile: ModelProfile, **changes: int
) -> IntervalCosts:
    values = {"batch_size": 16, "num_samples": 96 * num_groups, "steps_per_epoch": 6}
    return interval_costs(cluster, num_groups, profile=profile, **values | changes)


def chosen(work: IntervalCosts, intervals: Sequence[SyncInterval]) -> UplinkTurns:
    clock = EventClock(work.cluster)
    turns = choose_turns(
        work.plan,
        "auto",
        partial(step_times, work, counted(intervals), clock),
    )
    assert clock.now_s == 0.0  # predicting passes no time
    return turns


def training_s(work: IntervalCosts, intervals: Sequence[SyncInterval]) -> float:
    """Return what the training takes, every step of it executed."""
    clock = EventClock(work.cluster, extrapolate=False)
    for interval in intervals:
        work.run(interval, clock)
    return clock.now_s


@st.composite
def trainings(draw: st.DrawFn) -> tuple[IntervalCosts, Sequence[SyncInterval]]:
    """Groups that share uplinks, on links and with models that make computation, messages or bytes dear."""
    slots, num_groups = draw(st.sampled_from(SHARING))
    cluster = parse_cluster(
        {
            "boards": list(slots),
            "device": draw(st.sampled_from(["snapdragon-865", "raspberry-pi-4b"])),
            "soc_bytes_per_s": draw(st.sampled_from([1e7, 1e8])),
            "board_bytes_per_s": draw(st.sampled_from([1e7, 1e8])),
        }
    )
    profile = toy_profile(
        draw(st.sampled_from([1e6, 1e8, 3e9])),
        draw(st.sampled_from([1e4, 1e6, 3e7])),
        draw(st.integers(1, 30)),
    )
    work = work_on(cluster, num_groups, profile, overlap_buckets=draw(st.integers(1, 3)))
    return work, sync_schedule(draw(st.integers(1, 2)), 6, draw(st.sampled_from([0.25, 0.5, 1.0])))


@settings(max_examples=8)
@given(trainings())
def test_what_is_chosen_is_never_slower_than_either_way(
    training: tuple[IntervalCosts, Sequence[SyncInterval]],
) -> None:
    """Steps are compared: that a star may overlap a little more with turns, or without, is left out."""
    work, intervals = training
    work = replace(work, models=ModelExchange(kind="ring"))
    turns = chosen(work, intervals)
    assert turns.decided_by == PREDICTED
    both_s = {way: training_s(replace(work, uplink_turns=way), intervals) for way in (True, False)}
    assert both_s[turns.enabled] <= min(both_s.values()) * (1.0 + 1e-9)


@settings(max_examples=5)
@given(trainings())
def test_the_mean_step_is_that_of_the_training_executed_step_by_step(
    training: tuple[IntervalCosts, Sequence[SyncInterval]],
) -> None:
    work, intervals = training
    num_steps = counted(intervals)
    times = step_times(work, num_steps, EventClock(work.cluster))
    for way, step_s in ((True, times.with_turns_s), (False, times.without_turns_s)):
        clock = EventClock(work.cluster, extrapolate=False)
        for interval in intervals:
            clock.run(work.step(uplink_turns=way), repeat=interval.num_steps)
        assert step_s * sum(each.num_steps for each in intervals) == pytest.approx(clock.now_s)


VGG11 = toy_profile(0.917e9 / 3, 4 * 9.23e6, 18, name="vgg11")
"""With 0.917 GFLOP a training sample."""


@pytest.mark.parametrize(
    ("num_groups", "with_turns_s", "without_turns_s"), [(8, 1.22, 1.07), (20, 0.84, 1.10)]
)
def test_vgg11_on_60_socs_takes_turns_in_20_groups_and_not_in_8(
    num_groups: int, with_turns_s: float, without_turns_s: float
) -> None:
    """The two cases of F7."""
    cluster = parse_cluster({"boards": 12, "socs_per_board": 5})
    work, intervals = (
        work_on(cluster, num_groups, VGG11, batch_size=64),
        sync_schedule(2, 98, 1.0),
    )
    times = step_times(work, counted(intervals), EventClock(cluster))
    assert times.with_turns_s == pytest.approx(with_turns_s, abs=0.01)
    assert times.without_turns_s == pytest.approx(without_turns_s, abs=0.01)
    enabled = with_turns_s < without_turns_s
    assert chosen(work, intervals) == UplinkTurns(enabled=enabled, decided_by=PREDICTED)


# ------------------------------------------------------------------------------------------- what decides
SHARED = plan_groups(parse_cluster({"boards": [2, 2, 2]}), 2)
APART = plan_groups(parse_cluster({"boards": [2, 2]}), 2)


def unasked() -> StepTimes:
    raise AssertionError("nobody needs a prediction")


@pytest.mark.parametrize(
    ("plan", "asked", "predict", "enabled", "decided_by"),
    [
        (SHARED, True, unasked, True, ASKED),
        (SHARED, False, unasked, False, ASKED),
        (APART, True, None, False, NO_SHARED_UPLINK),
        (APART, "auto", None, False, NO_SHARED_UPLINK),
        (SHARED, "auto", None, True, NOT_PREDICTED),
        (
            SHARED,
            "auto",
            lambda: StepTimes(with_turns_s=1.0, without_turns_s=1.0),
            False,
            PREDICTED,
        ),
    ],
)
def test_what_decides_about_turns(
    plan: GroupPlan, asked: Any, predict: Any, enabled: bool, decided_by: str
) -> None:
    """A tie runs freely."""
    turns = choose_turns(plan, asked, predict)
    assert turns == UplinkTurns(enabled=enabled, decided_by=decided_by)


@pytest.mark.parametrize("asked", ["yes", 1, None])
def test_anything_else_is_refused(asked: Any) -> None:
    refused(lambda: choose_turns(APART, asked, None), repr(asked), "'auto'")
