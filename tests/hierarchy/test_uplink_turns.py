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

from socflower.cluster import Cluster, LayerProfile, ModelProfile, parse_cluster
from socflower.errors import ConfigError
from socflower.hierarchy import (
    IntervalCosts,
    SyncInterval,
    UplinkTurns,
    choose_turns,
    conflicts,
    plan_groups,
    step_times,
    sync_schedule,
)
from socflower.hierarchy.uplink_turns import (
    ASKED,
    NO_SHARED_UPLINK,
    NOT_PREDICTED,
    PREDICTED,
    StepTimes,
)
from socflower.sim import EventClock

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


def toy(*, forward_flops: float, weight_bytes: float, num_tensors: int) -> ModelProfile:
    return ModelProfile(
        name="toy",
        input_bytes=4.0,
        layers=(
            LayerProfile(
                name="only",
                kind="Linear",
                forward_flops=forward_flops,
                output_bytes=4.0,
                weight_bytes=weight_bytes,
                num_tensors=num_tensors,
            ),
        ),
    )


def work_on(
    cluster: Cluster, num_groups: int, profile: ModelProfile, **changes: Any
) -> IntervalCosts:
    values: dict[str, Any] = {
        "cluster": cluster,
        "plan": plan_groups(cluster, num_groups),
        "profile": profile,
        "batch_size": 16,
        "num_samples": 16 * 6 * num_groups,
        "steps_per_epoch": 6,
        "uplink_turns": False,
    }
    return IntervalCosts(**(values | changes))


def chosen(work: IntervalCosts, intervals: Sequence[SyncInterval]) -> UplinkTurns:
    clock = EventClock(work.cluster)
    turns = choose_turns(
        work.plan,
        "auto",
        partial(step_times, work, Counter(each.num_steps for each in intervals), clock),
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
    profile = toy(
        forward_flops=draw(st.sampled_from([1e6, 1e8, 3e9])),
        weight_bytes=draw(st.sampled_from([1e4, 1e6, 3e7])),
        num_tensors=draw(st.integers(1, 30)),
    )
    work = work_on(cluster, num_groups, profile, overlap_buckets=draw(st.integers(1, 3)))
    return work, sync_schedule(draw(st.integers(1, 2)), 6, draw(st.sampled_from([0.25, 0.5, 1.0])))


@settings(max_examples=30)
@given(trainings())
def test_what_is_chosen_is_never_slower_than_either_way(
    training: tuple[IntervalCosts, Sequence[SyncInterval]],
) -> None:
    """Steps are compared: that a star may overlap a little more with turns, or without, is left out."""
    work, intervals = training
    work = replace(work, leaders="ring")
    turns = chosen(work, intervals)
    assert turns.decided_by == PREDICTED
    with_turns_s, without_turns_s, chosen_s = (
        training_s(replace(work, uplink_turns=way), intervals)
        for way in (True, False, turns.enabled)
    )
    assert chosen_s <= min(with_turns_s, without_turns_s) * (1.0 + 1e-9)


@settings(max_examples=15)
@given(trainings())
def test_the_mean_step_is_that_of_the_training_executed_step_by_step(
    training: tuple[IntervalCosts, Sequence[SyncInterval]],
) -> None:
    work, intervals = training
    times = step_times(
        work, Counter(each.num_steps for each in intervals), EventClock(work.cluster)
    )
    for way, step_s in ((True, times.with_turns_s), (False, times.without_turns_s)):
        clock = EventClock(work.cluster, extrapolate=False)
        for interval in intervals:
            clock.run(work.step(uplink_turns=way), repeat=interval.num_steps)
        assert step_s * sum(interval.num_steps for interval in intervals) == pytest.approx(
            clock.now_s
        )


VGG11 = replace(
    toy(forward_flops=0.917e9 / 3, weight_bytes=4 * 9.23e6, num_tensors=18), name="vgg11"
)
"""With 0.917 GFLOP a training sample."""


@pytest.mark.parametrize(
    ("num_groups", "taken", "with_turns_s", "without_turns_s"),
    [(8, False, 1.22, 1.07), (20, True, 0.84, 1.10)],
)
def test_vgg11_on_60_socs_takes_turns_in_20_groups_and_not_in_8(
    num_groups: int,
    taken: bool,
    with_turns_s: float,
    without_turns_s: float,
) -> None:
    """The two cases of F7."""
    work = work_on(
        parse_cluster({"boards": 12, "socs_per_board": 5}), num_groups, VGG11, batch_size=64
    )
    intervals = sync_schedule(2, 98, 1.0)
    times = step_times(
        work, Counter(each.num_steps for each in intervals), EventClock(work.cluster)
    )
    assert (times.with_turns_s, times.without_turns_s) == (
        pytest.approx(with_turns_s, abs=0.01),
        pytest.approx(without_turns_s, abs=0.01),
    )
    assert chosen(work, intervals) == UplinkTurns(enabled=taken, decided_by=PREDICTED)


# ------------------------------------------------------------------------------------------- what decides
SHARED = plan_groups(parse_cluster({"boards": [2, 2, 2]}), 2)
APART = plan_groups(parse_cluster({"boards": [2, 2]}), 2)


@pytest.mark.parametrize("asked", [True, False])
def test_who_asks_for_one_way_gets_it_unpredicted(asked: bool) -> None:
    def predict() -> StepTimes:
        raise AssertionError("nobody needs a prediction")

    assert choose_turns(SHARED, asked, predict) == UplinkTurns(enabled=asked, decided_by=ASKED)


@pytest.mark.parametrize("asked", [True, False, "auto"])
def test_groups_that_share_no_uplink_run_freely_whatever_is_asked(asked: bool | str) -> None:
    assert choose_turns(APART, asked, None) == UplinkTurns(
        enabled=False, decided_by=NO_SHARED_UPLINK
    )


def test_without_a_prediction_groups_that_share_an_uplink_take_turns() -> None:
    assert choose_turns(SHARED, "auto", None) == UplinkTurns(enabled=True, decided_by=NOT_PREDICTED)


def test_a_tie_runs_freely() -> None:
    assert not choose_turns(
        SHARED, "auto", lambda: StepTimes(with_turns_s=1.0, without_turns_s=1.0)
    ).enabled


@pytest.mark.parametrize("asked", ["yes", "true", 1, None])
def test_anything_else_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match="use true, false or 'auto'"):
        choose_turns(APART, asked, None)
