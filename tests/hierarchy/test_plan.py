"""Plans: members, rings, leaders and documents of whole clusters."""

import json
import math
from itertools import groupby, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import Cluster, parse_cluster
from socflower.errors import InfeasiblePlan
from socflower.hierarchy import GroupPlan, plan_groups
from socflower.hierarchy.mapping.placement import balance_capacities
from tests.one_line import refused


def cluster(*slots: int) -> Cluster:
    return parse_cluster({"boards": list(slots)})


def totals(plan: GroupPlan, capacities: list[float]) -> list[float]:
    return [sum(capacities[soc] for soc in group.members) for group in plan.groups]


@given(slots=st.lists(st.integers(1, 6), min_size=1, max_size=8), data=st.data())
def test_every_soc_is_used_at_most_once_and_rings_are_contiguous_by_board(
    slots: list[int],
    data: st.DataObject,
) -> None:
    rack = cluster(*slots)
    num_socs = data.draw(st.integers(1, sum(slots)))
    num_groups = data.draw(st.integers(1, num_socs))
    plan = plan_groups(rack, num_groups, num_socs)
    members = [soc for group in plan.groups for soc in group.members]
    assert sorted(members) == list(plan.participants) and len(set(members)) == num_socs
    assert [group.group_id for group in plan.groups] == list(range(num_groups))
    assert plan.slots_per_board == tuple(slots)
    for group in plan.groups:
        boards = [board for board, _ in groupby(map(rack.board_of, group.members))]
        assert tuple(boards) == group.boards
        assert group.split == (len(boards) > 1)
        on_board = [sum(rack.board_of(soc) == board for soc in group.members) for board in boards]
        assert on_board[boards.index(rack.board_of(group.leader))] == max(on_board)
    assert sorted(group_id for ids in plan.communication_groups for group_id in ids) == list(
        range(num_groups)
    )


def test_leader_is_the_first_member_where_most_of_its_group_is() -> None:
    plan = plan_groups(cluster(2, 5), 1)
    assert plan.groups[0].members == (0, 1, 2, 3, 4, 5, 6)
    assert plan.groups[0].leader == 2
    assert plan_groups(cluster(2, 2), 1).groups[0].leader == 0


def test_document_has_the_keys_that_programs_rely_on() -> None:
    plan = plan_groups(cluster(2, 3), 2)
    (first, second), turns = plan.groups, plan.communication_groups
    assert json.loads(json.dumps(plan.to_document())) == {
        "groups": [
            {
                "id": group.group_id,
                "members": list(group.members),
                "leader": group.leader,
                "boards": list(group.boards),
                "server": 0,
                "split": group.split,
            }
            for group in (first, second)
        ],
        "contention": plan.contention,
        "communication_groups": [list(ids) for ids in turns],
        "proven_optimal": True,
        "slots_per_board": [2, 3],
    }


@pytest.mark.parametrize(
    ("num_groups", "num_socs", "named"),
    [(9, 8, ("9 groups", "8")), (2, 11, ("11 SoCs", "10")), (0, None, ("0 groups",))],
)
def test_infeasible_plans_are_refused(
    num_groups: int, num_socs: int | None, named: tuple[str, ...]
) -> None:
    refused(lambda: plan_groups(cluster(5, 5), num_groups, num_socs), *named, error=InfeasiblePlan)


@pytest.mark.parametrize("capacities", [[1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_capacities_that_cannot_be_are_refused(capacities: list[float]) -> None:
    refused(lambda: plan_groups(cluster(2), 1, capacities=capacities), "2 capacities")


def test_a_soc_without_capacity_takes_no_part_and_keeps_the_others_numbers() -> None:
    capacities = [1.0] * 10
    capacities[3] = capacities[7] = 0.0
    plan = plan_groups(cluster(5, 5), 2, capacities=capacities)
    assert plan.participants == (0, 1, 2, 4, 5, 6, 8, 9)
    assert plan.slots_per_board == (4, 4)
    refused(
        lambda: plan_groups(cluster(5, 5), 2, 9, capacities=capacities),
        "9 SoCs",
        "8",
        error=InfeasiblePlan,
    )


def test_slow_socs_stay_idle_first() -> None:
    capacities = [1, 0.5, 1, 1, 1, 1, 1, 1, 1, 0.5]
    assert plan_groups(cluster(5, 5), 2, 8, capacities).participants == (0, 2, 3, 4, 5, 6, 7, 8)


def test_equal_capacities_change_nothing() -> None:
    rack = cluster(5, 5, 4)
    assert plan_groups(rack, 4, 13) == plan_groups(rack, 4, 13, [0.7] * 14)


@given(capacities=st.lists(st.sampled_from([0.5, 0.6, 0.9, 1.0]), min_size=8, max_size=8))
def test_groups_of_a_board_are_about_equally_fast_and_placement_stays(
    capacities: list[float],
) -> None:
    rack = cluster(4, 4)
    plain, dealt = plan_groups(rack, 4), plan_groups(rack, 4, capacities=capacities)
    assert [group.boards for group in dealt.groups] == [group.boards for group in plain.groups]
    for board in range(2):
        own = capacities[4 * board : 4 * board + 4]
        best = min(sum(x * x for x in (a + b, c + d)) for a, b, c, d in permutations(own))
        got = totals(dealt, capacities)[2 * board : 2 * board + 2]
        assert sum(x * x for x in got) == pytest.approx(best)


@given(data=st.data())
def test_exchanges_never_make_groups_less_even_and_end(data: st.DataObject) -> None:
    capacities = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=12))
    members = [[0, 1, 2, 6], [3, 4, 7], [5, 8, 9, 10, 11]]
    board_of = {soc: soc // 6 for soc in range(12)}
    after = balance_capacities(members, board_of, capacities)
    assert [[board_of[soc] for soc in group] for group in after] == [
        [board_of[s] for s in g] for g in members
    ]
    assert sorted(soc for group in after for soc in group) == list(range(12))
    squares = [
        sum(sum(capacities[soc] for soc in group) ** 2 for group in groups)
        for groups in (members, after)
    ]
    assert squares[1] <= squares[0] * (1 + 1e-12)
