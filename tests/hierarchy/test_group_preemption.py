"""Users that end whole groups: who stays, what is planned, and what it costs (SoCFlow+ section 3)."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Activity, parse_cluster
from socflower.hierarchy import GroupPlan, conflicts, plan_groups, sync_schedule
from socflower.hierarchy.group_preemption import (
    GROUPS,
    SOCS,
    plan_of_whole_groups,
    terminated_groups,
)
from socflower.hierarchy.interval_costs import with_groups
from socflower.sim import EventClock
from tests.hierarchy.test_rebalancing import plans
from tests.hierarchy.toy_trainings import interval_costs
from tests.toy_clusters import Weather, toy_profile

LOOSE = settings(max_examples=40)
NOBODY = frozenset[int]()
(INTERVAL,) = sync_schedule(1, 100, 1.0)


def some_of(plan: GroupPlan) -> st.SearchStrategy[set[int]]:
    return st.sets(st.sampled_from(plan.participants))


# ------------------------------------------------------------------------------------------------- who ends
@LOOSE
@given(plans(), st.data(), st.booleans())
def test_a_group_ends_if_one_of_its_socs_is_taken_and_another_group_stays(
    rack: tuple[object, GroupPlan], data: st.DataObject, one_stays: bool
) -> None:
    plan = rack[1]
    taken = data.draw(some_of(plan))
    ended = terminated_groups(plan.groups, taken, one_stays=one_stays)
    hit = [group for group in plan.groups if taken.intersection(group.members)]
    left = {group.group_id: len(set(group.members) - taken) for group in plan.groups}
    if taken >= set(plan.participants):
        assert ended == []
    elif one_stays and len(hit) == len(plan.groups):
        (spared,) = (group for group in hit if group not in ended)
        assert left[spared.group_id] == max(left.values())
    else:
        assert ended == hit


# ------------------------------------------------------------------------------------------------- the plan
@LOOSE
@given(plans(), st.data())
def test_whole_groups_keep_their_members_and_the_rules_of_plans(
    rack: tuple[object, GroupPlan], data: st.DataObject
) -> None:
    whole = rack[1]
    away = data.draw(some_of(whole))
    plan = plan_of_whole_groups(whole, away)
    kept = [group for group in whole.groups if away.isdisjoint(group.members)]
    if plan is None:
        assert not kept
        return
    assert away or plan is whole
    placed = [(group.members, group.leader, group.boards, group.server) for group in kept]
    assert [
        (group.members, group.leader, group.boards, group.server) for group in plan.groups
    ] == placed
    assert [group.group_id for group in plan.groups] == list(range(len(kept)))
    assert plan.participants == tuple(sorted(soc for group in kept for soc in group.members))
    assert plan.contention <= whole.contention
    turn_of = {ident: turn for turn, ids in enumerate(plan.communication_groups) for ident in ids}
    assert all(
        turn_of[ident] != turn_of[other]
        for ident, others in conflicts(plan.groups).items()
        for other in others
    )


# ------------------------------------------------------------------------------------------------ what it costs
def run(
    preemption: str, *later: tuple[float, frozenset[int]], num_boards: int = 2
) -> tuple[float, float, frozenset[int]]:
    """Return seconds, seconds of all SoCs, and the groups that ended in 100 steps of a group on each board."""
    cluster = parse_cluster({"boards": [2] * num_boards})
    costs = interval_costs(
        cluster,
        num_boards,
        profile=toy_profile(1e10, 4.0),
        batch_size=120,
        num_samples=12_000,
        steps_per_epoch=100,
        preemption=preemption,
    )
    speeds = [1.0] * cluster.num_socs
    weather = Weather((0.0, speeds, NOBODY), *((at_s, speeds, socs) for at_s, socs in later))
    usage, ended = costs.run_interrupted(INTERVAL, EventClock(cluster, dynamics=weather))
    return usage.duration_s, sum(usage.soc_seconds.values()), ended


FULL_S, ALL_S, _ = run(SOCS)


@pytest.mark.parametrize("part", [0.01, 0.3, 0.9])
def test_the_other_groups_go_on_as_if_nothing_had_happened(part: float) -> None:
    """With `socs` the group does its steps with one SoC less, and the other one waits for it."""
    hit = (part * FULL_S, frozenset({3}))
    time_s, soc_s, ended = run(GROUPS, hit)
    assert ended == {1}
    assert time_s == pytest.approx(FULL_S, rel=1e-2)
    # The SoCs of the group that ended cost nothing more.
    assert soc_s == pytest.approx(ALL_S * (0.5 + part / 2), rel=0.02)
    slow_s, _, none = run(SOCS, hit)
    assert none == NOBODY
    assert slow_s == pytest.approx(FULL_S * (part + 2 * (1 - part)), rel=0.05)


def test_a_group_that_ended_costs_what_a_plan_without_it_does() -> None:
    """Taken from the beginning: to the last bit."""
    cluster = parse_cluster({"boards": [2, 2, 2]})
    costs = interval_costs(cluster, 3, preemption=GROUPS)
    taken = Weather((0.0, [1.0] * 6, frozenset({2})))
    usage, ended = costs.run_interrupted(INTERVAL, EventClock(cluster, dynamics=taken))
    assert ended == {1}
    left = with_groups(costs.plan, [costs.plan.groups[0], costs.plan.groups[2]])
    free = Weather((0.0, [1.0] * 6, NOBODY))
    alone = interval_costs(cluster, left).run(INTERVAL, EventClock(cluster, dynamics=free))
    assert usage.duration_s == pytest.approx(alone.duration_s, rel=1e-9)
    assert usage.soc_seconds[Activity.COMPUTE] == pytest.approx(
        alone.soc_seconds[Activity.COMPUTE], rel=1e-9
    )


def test_the_last_group_stays_and_goes_on_without_its_soc() -> None:
    time_s, _, ended = run(GROUPS, (1.0, frozenset({0})), (FULL_S / 2, frozenset({0, 2})))
    assert ended == {0}
    assert time_s == pytest.approx(FULL_S * 1.5, rel=0.05)


def test_outside_the_hours_of_training_nobody_ends() -> None:
    closed = (FULL_S / 2, frozenset(range(4)))
    time_s, _, ended = run(GROUPS, closed, (3 * FULL_S, NOBODY))
    assert ended == NOBODY
    assert time_s == pytest.approx(3.5 * FULL_S, rel=0.05)


def test_a_user_after_the_steps_of_a_group_ends_nothing() -> None:
    assert run(GROUPS, (1.5 * FULL_S, frozenset({0})))[2] == NOBODY


@LOOSE
@given(
    times=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=3, unique=True).map(sorted),
    data=st.data(),
)
def test_whole_groups_never_take_longer_than_groups_that_lose_socs(
    times: Sequence[float], data: st.DataObject
) -> None:
    """As long as a group is never hit, the others end or are undisturbed."""
    taken = st.frozensets(st.sampled_from(range(2, 6)), max_size=3)
    later = tuple((part * FULL_S, data.draw(taken)) for part in times)
    whole_s, _, ended = run(GROUPS, *later, (9 * FULL_S, NOBODY), num_boards=3)
    lost_s, _, _ = run(SOCS, *later, (9 * FULL_S, NOBODY), num_boards=3)
    assert 0 not in ended
    assert whole_s <= lost_s * (1 + 1e-9)


def test_a_plan_on_one_board_ends_and_returns() -> None:
    whole = plan_groups(parse_cluster({"boards": [4]}), 2)
    left = plan_of_whole_groups(whole, {1})
    assert left is not None and [group.members for group in left.groups] == [(2, 3)]
    assert plan_of_whole_groups(whole, {1, 2}) is None
    assert plan_of_whole_groups(whole, set()) is whole
