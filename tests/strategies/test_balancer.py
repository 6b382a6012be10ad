"""The balancer: constant load never makes it move twice, and weights are the full batch's whatever it decides."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Cluster, parse_cluster, sustained_rates
from socflower.hierarchy import GroupPlan, Rebalancing, plan_groups, split_batch
from socflower.strategies.balancer import Balancer
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.group import train_group
from socflower.wire.message_keys import RingOutcome
from tests.one_line import refused
from tests.training.test_batches import task
from tests.training.test_group import small_data, small_network

TOLERANCE = 0.05
FEW = settings(max_examples=40)
SPEEDS = st.lists(st.floats(0.1, 1.0), min_size=8, max_size=8)


class Thermometer:
    """As much of a virtual clock as the balancer looks at."""

    changes = True

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = list(speeds)

    def speed_factors(self) -> list[float]:
        return self.speeds


def rack() -> tuple[Cluster, GroupPlan]:
    """Two boards of four with two groups each."""
    cluster = parse_cluster({"boards": [4, 4]})
    return cluster, plan_groups(cluster, 4)


def balancer(cluster: Cluster, **changes: Any) -> Balancer:
    return Balancer(cluster, sustained_rates(cluster), Rebalancing(tolerance=TOLERANCE, **changes))


def look(one: Balancer, speeds: Sequence[float], plan: GroupPlan) -> GroupPlan:
    """Do what a strategy does before an interval, in virtual time."""
    one.update_speeds(Thermometer(speeds), plan.participants)  # type: ignore[arg-type]
    return one.rebalance_groups(plan)[0]


def hear(one: Balancer, rates: Sequence[float], plan: GroupPlan) -> GroupPlan:
    """Do what a strategy does after and before an interval of rings."""
    for group in plan.groups:
        one.on_outcome(
            RingOutcome(
                outcome="completed",
                members=group.members,
                num_steps=1,
                answers=True,
                rates=tuple(rates[soc] for soc in group.members),
            )
        )
    one.update_speeds(None, plan.participants)
    return one.rebalance_groups(plan)[0]


def decisions(one: Balancer, plan: GroupPlan) -> tuple[Any, ...]:
    return plan.groups, tuple(one.capacities(group) for group in plan.groups)


# ----------------------------------------------------------------------------------------------- no oscillation
@FEW
@given(speeds=SPEEDS, data=st.data())
def test_under_constant_load_noise_within_the_tolerance_moves_each_soc_at_most_once(
    speeds: list[float], data: st.DataObject
) -> None:
    """Noise of up to 0.45 of the tolerance; groups change at most as often as capacities do."""
    cluster, plan = rack()
    one, noise = balancer(cluster), st.floats(-0.45 * TOLERANCE, 0.45 * TOLERANCE)
    moves, changes_of_groups, changes_of_capacity = [0] * 8, 0, 0
    for _ in range(12):
        before, parts_before = plan, [one.in_use.part(soc) for soc in range(8)]
        plan = look(one, [speed * (1.0 + data.draw(noise)) for speed in speeds], plan)
        moved = [one.in_use.part(soc) != parts_before[soc] for soc in range(8)]
        moves = [count + own for count, own in zip(moves, moved, strict=True)]
        changes_of_capacity += any(moved)
        changes_of_groups += plan is not before
    assert max(moves) <= 1
    assert changes_of_groups <= changes_of_capacity


@FEW
@given(speeds=SPEEDS)
def test_constant_speeds_are_taken_once_and_then_nothing_moves(speeds: list[float]) -> None:
    cluster, plan = rack()
    one = balancer(cluster)
    plan = look(one, speeds, plan)
    settled = decisions(one, plan)
    for _ in range(3):
        plan = look(one, speeds, plan)
        assert decisions(one, plan) == settled


@FEW
@given(speeds=SPEEDS, scale=st.floats(0.01, 100.0), data=st.data())
def test_rings_that_measure_with_noise_move_each_soc_at_most_once(
    speeds: list[float], scale: float, data: st.DataObject
) -> None:
    """Noise of up to a fifth of the tolerance, since parts are ratios of two measurements; their unit is nothing."""
    cluster, plan = rack()
    one, noise = balancer(cluster), st.floats(-TOLERANCE / 5, TOLERANCE / 5)
    seen: list[set[float]] = [set() for _ in range(8)]
    for _ in range(8):
        plan = hear(one, [scale * speed * (1.0 + data.draw(noise)) for speed in speeds], plan)
        for soc in range(8):
            seen[soc].add(one.in_use.part(soc))
    assert max(len(parts - {1.0}) for parts in seen) <= 1


@FEW
@given(speeds=SPEEDS)
def test_clock_and_rings_that_say_the_same_lead_to_the_same_shares(speeds: list[float]) -> None:
    """Of rings the fastest counts as whole, so speeds are compared relative to it."""
    cluster, plan = rack()
    rates = sustained_rates(cluster)
    by_clock, by_rings = (
        balancer(cluster, across_groups=False),
        balancer(cluster, across_groups=False),
    )
    fastest = max(speeds)
    look(by_clock, [speed / fastest for speed in speeds], plan)
    hear(by_rings, [rate * speed for rate, speed in zip(rates, speeds, strict=True)], plan)
    for group in plan.groups:
        assert by_rings.capacities(group) == pytest.approx(
            by_clock.capacities(group), rel=2 * TOLERANCE
        )


# ------------------------------------------------------------------------------------------------------- modes
def test_without_rebalancing_nothing_is_measured_and_nothing_moves() -> None:
    cluster, plan = rack()
    one = Balancer(cluster, sustained_rates(cluster), None)
    before = decisions(one, plan)
    assert look(one, [0.1, *[1.0] * 7], plan) is plan
    assert hear(one, [0.1, *[1.0] * 7], plan) is plan
    assert decisions(one, plan) == before
    assert one.ring_steps == 0 and one.state(plan) == {} and one.restore({}, plan) is plan


def test_rings_look_as_often_as_shares_may_move() -> None:
    cluster, _ = rack()
    assert balancer(cluster, steps=7).ring_steps == 7
    assert balancer(cluster, steps=7, within_groups=False).ring_steps == 0
    assert balancer(cluster, steps=0).ring_steps == 0


def test_groups_stay_where_only_shares_may_move() -> None:
    """SoCs 0 and 1, a group, are slow; their board's other group could take one of them."""
    cluster, plan = rack()
    speeds = [0.5, 0.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [group.members for group in plan.groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert look(balancer(cluster, across_groups=False), speeds, plan) is plan
    new = look(balancer(cluster), speeds, plan)
    assert [group.members for group in new.groups] == [(0, 3), (1, 2), (4, 5), (6, 7)]


def test_what_moved_is_told() -> None:
    cluster = parse_cluster({"boards": [6]})
    plan = plan_groups(cluster, 2)
    one = balancer(cluster)
    one.update_speeds(Thermometer([1.0, 0.5, 0.5, 1.0, 1.0, 1.0]), plan.participants)  # type: ignore[arg-type]
    new, (event,) = one.rebalance_groups(plan)
    assert sorted(
        sum(
            speed
            for soc, speed in enumerate([1.0, 0.5, 0.5, 1.0, 1.0, 1.0])
            if soc in group.members
        )
        for group in new.groups
    ) == [2.5, 2.5]
    assert event.kind == "re-balanced"
    assert event.text.startswith("re-balanced: SoCs ") and event.text.endswith(
        "the slowest group is 25% faster for it"
    )


@pytest.mark.parametrize("rate", [-1.0, 0.0])
def test_members_that_measured_nothing_count_as_whole(rate: float) -> None:
    cluster, plan = rack()
    one = balancer(cluster, across_groups=False)
    hear(one, [1.0] * 7 + [rate], plan)
    assert one.in_use.part(7) == 1.0


def test_a_measured_speed_that_cannot_be_is_refused() -> None:
    cluster, plan = rack()
    refused(lambda: look(balancer(cluster), [1.0, 1.0, math.nan, *[1.0] * 5], plan), "SoC 2", "nan")


# ----------------------------------------------------------------------------------------------- interruptions
@FEW
@given(first=SPEEDS, then=SPEEDS, by_rings=st.booleans())
def test_a_balancer_that_is_restored_decides_as_if_it_had_not_been_interrupted(
    first: list[float], then: list[float], by_rings: bool
) -> None:
    """Through JSON, as checkpoints carry it."""
    cluster, whole = rack()
    step = hear if by_rings else look
    one = balancer(cluster)
    plan = step(one, first, whole)
    other = balancer(cluster)
    restored = other.restore(json.loads(json.dumps(one.state(plan))), whole)
    assert decisions(other, restored) == decisions(one, plan)
    assert decisions(other, step(other, then, restored)) == decisions(one, step(one, then, plan))


# ----------------------------------------------------------------------------------------------------- weights
@settings(max_examples=10)
@given(
    capacities=st.lists(
        st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3), min_size=1, max_size=3
    ),
    batch_size=st.integers(2, 17),
)
def test_weights_under_any_rebalancing_equal_the_full_batch_step(
    capacities: list[list[float]], batch_size: int
) -> None:
    """F4: intervals with other capacities each, every member's pass run, against one member that does it all."""
    data, steps = small_data(60), 3
    members, alone = small_network(norm=False), small_network(norm=False)
    states: list[bytes | None] = [None, None]
    for number, own in enumerate(capacities):
        settings_ = {
            "num_steps": steps,
            "first_step": number * steps,
            "total_steps": steps * len(capacities),
            "steps_per_epoch": steps,
            "batch_size": batch_size,
        }
        assert sum(split_batch(batch_size, own)) == batch_size
        split = task(
            0, 1, members=(0, 1, 2), partitions=(0, 1, 2), capacities=tuple(own), **settings_
        )
        states[0] = train_group(
            members,
            data,
            split,
            FP32Trainer(optimizer=sgd(0.05, 0.9), reduction="always"),
            states[0],
        ).end.state
        states[1] = train_group(
            alone, data, task(0, 1, **settings_), FP32Trainer(optimizer=sgd(0.05, 0.9)), states[1]
        ).end.state
    for ours, reference in zip(members.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)
