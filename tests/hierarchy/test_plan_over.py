"""Plans while SoCs are away, or others stand in, keep the rules of plans."""

from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import parse_cluster
from socflower.errors import InfeasiblePlan
from socflower.hierarchy import conflicts, plan_groups, plan_over
from tests.one_line import refused


@settings(max_examples=60)
@given(
    boards=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    num_groups=st.integers(1, 6),
    data=st.data(),
)
def test_everybody_who_is_there_works_and_nobody_else(
    boards: list[int], num_groups: int, data: st.DataObject
) -> None:
    cluster = parse_cluster({"boards": boards})
    num_socs = data.draw(st.integers(min(num_groups, cluster.num_socs), cluster.num_socs))
    whole = plan_groups(cluster, min(num_groups, num_socs), num_socs)
    away = data.draw(st.sets(st.sampled_from(range(cluster.num_socs)), max_size=cluster.num_socs))
    rates = [1.0] * cluster.num_socs
    left = set(range(cluster.num_socs)) - away
    if not left:
        refused(lambda: plan_over(whole, cluster, rates, left), error=InfeasiblePlan)
        return
    plan = plan_over(whole, cluster, rates, left)
    assert set(plan.participants) == left
    assert len(plan.groups) == min(len(whole.groups), len(left))
    turn_of = {group: turn for turn, ids in enumerate(plan.communication_groups) for group in ids}
    assert all(
        turn_of[group] != turn_of[other]
        for group, others in conflicts(plan.groups).items()
        for other in others
    )
    if left == set(whole.participants):
        assert plan is whole


def test_fewer_socs_than_groups_make_fewer_groups() -> None:
    cluster = parse_cluster({"boards": [2, 2]})
    whole = plan_groups(cluster, 3)
    left = plan_over(whole, cluster, [1.0] * 4, [1, 2])
    assert [group.members for group in left.groups] == [(1,), (2,)]
