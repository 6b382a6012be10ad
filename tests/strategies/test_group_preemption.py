"""Rounds are planned without the groups of SoCs that are away, also after a resume."""

from socflower.cluster import parse_cluster
from socflower.hierarchy import plan_groups
from socflower.hierarchy.group_preemption import GROUPS, SOCS
from socflower.strategies.round_planner import RoundPlanner

CLUSTER = parse_cluster({"boards": [3, 3, 3]})
RATES = [1.0] * 9


def planner(preemption: str) -> RoundPlanner:
    return RoundPlanner(CLUSTER, plan_groups(CLUSTER, 3, 9, RATES), RATES, None, preemption)


def test_a_resumed_training_has_the_groups_that_it_had() -> None:
    """`planned_without` names all SoCs of a group that ended, of which only one is away."""
    first, second = planner(GROUPS), planner(GROUPS)
    for each, without in ((first, [4]), (second, None)):
        each.restore(away=[4], planned_without=without or first.planned_without, balance={})
    assert first.planned_without == (3, 4, 5)
    assert second.plan == first.plan
    assert [group.members for group in second.plan.groups] == [(0, 1, 2), (6, 7, 8)]


def test_without_a_whole_group_the_socs_that_are_left_share_the_work() -> None:
    gone = [0, 4, 8]
    whole, single = planner(GROUPS), planner(SOCS)
    for each in (whole, single):
        each.restore(away=gone, planned_without=gone, balance={})
    assert whole.plan == single.plan
    assert whole.planned_without == (0, 4, 8)
