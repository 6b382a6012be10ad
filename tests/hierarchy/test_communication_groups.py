"""Communication groups (F6): proper colourings, two colours wherever groups lie in sequence."""

from dataclasses import dataclass
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from socflower.hierarchy import communication_groups, conflicts, integrity_greedy, map_groups


@dataclass(frozen=True)
class Placed:
    group_id: int
    boards: tuple[int, ...]

    @property
    def split(self) -> bool:
        return len(self.boards) > 1


PLACED = st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=4), max_size=10).map(
    lambda sets: [Placed(index, tuple(sorted(boards))) for index, boards in enumerate(sets)]
)


@given(groups=PLACED)
def test_colouring_is_proper_and_complete(groups: list[Placed]) -> None:
    found = communication_groups(groups)
    assert sorted(group_id for ids in found for group_id in ids) == [
        group.group_id for group in groups
    ]
    turn = {group_id: index for index, ids in enumerate(found) for group_id in ids}
    for left, right in combinations(groups, 2):
        conflict = left.split and right.split and bool({*left.boards} & {*right.boards})
        assert conflict == (right.group_id in conflicts(groups)[left.group_id])
        assert not conflict or turn[left.group_id] != turn[right.group_id]
    assert all(turn[group_id] == 0 for group_id, others in conflicts(groups).items() if not others)


@given(slots=st.lists(st.integers(1, 6), min_size=1, max_size=12), data=st.data())
def test_contiguous_placement_yields_paths_hence_at_most_two_colours(
    slots: list[int],
    data: st.DataObject,
) -> None:
    num_socs = data.draw(st.integers(1, sum(slots)))
    num_groups = data.draw(st.integers(1, num_socs))
    for plan in (map_groups, integrity_greedy):
        placement = plan(slots, num_groups, num_socs)
        groups = [
            Placed(index, tuple(board for board, _ in pieces))
            for index, pieces in enumerate(placement.groups)
        ]
        assert all(len(others) <= 2 for others in conflicts(groups).values())
        assert len(communication_groups(groups)) <= 2


def test_odd_cycles_get_a_third_communication_group() -> None:
    triangle = [Placed(0, (0, 1)), Placed(1, (1, 2)), Placed(2, (0, 2)), Placed(3, (4,))]
    found = communication_groups(triangle)
    assert len(found) == 3 and 3 in found[0]
