"""Groups inside the servers of a site: against every division, and the mapping of each server alone."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import parse_cluster
from socflower.hierarchy import map_groups, plan_groups
from socflower.hierarchy.mapping.servers import groups_per_server, map_to_servers


@given(socs=st.lists(st.integers(1, 7), min_size=1, max_size=4), data=st.data())
def test_the_largest_group_is_as_small_as_in_the_best_division(
    socs: list[int], data: st.DataObject
) -> None:
    num_groups = data.draw(st.integers(len(socs), sum(socs)))

    def largest(counts: tuple[int, ...]) -> float:
        return max(own / count for own, count in zip(socs, counts, strict=True))

    counts = groups_per_server(socs, num_groups)
    every = [
        each for each in product(*(range(1, own + 1) for own in socs)) if sum(each) == num_groups
    ]
    assert tuple(counts) in every
    assert largest(tuple(counts)) == min(map(largest, every))


SERVERS = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any), min_size=1, max_size=4
)


@given(slots=SERVERS, data=st.data())
def test_every_server_is_mapped_as_if_it_were_alone(
    slots: list[list[int]], data: st.DataObject
) -> None:
    num_groups = data.draw(st.integers(1, sum(map(sum, slots))))
    placement, servers = map_to_servers(slots, num_groups)
    if num_groups < len(slots):
        assert placement == map_groups([count for own in slots for count in own], num_groups)
        assert set(servers) == {0}
        return
    first = 0
    for server, own in enumerate(slots):
        inside = [
            tuple((board - first, count) for board, count in pieces)
            for pieces, where in zip(placement.groups, servers, strict=True)
            if where == server
        ]
        alone = map_groups(own, len(inside))
        assert tuple(inside) == alone.groups
        assert alone.proven_optimal or not placement.proven_optimal
        first += len(own)


@given(slots=SERVERS, data=st.data())
def test_fewer_socs_are_taken_from_as_few_servers_as_have_them(
    slots: list[list[int]], data: st.DataObject
) -> None:
    num_socs = data.draw(st.integers(1, sum(map(sum, slots))))
    placement, servers = map_to_servers(slots, min(num_socs, len(slots)), num_socs)
    assert sum(count for pieces in placement.groups for _, count in pieces) == num_socs
    sizes = sorted(map(sum, slots), reverse=True)
    fewest = next(number for number in range(1, len(sizes) + 1) if sum(sizes[:number]) >= num_socs)
    assert len(set(servers)) <= fewest


@given(
    num_servers=st.integers(2, 4),
    boards=st.integers(1, 3),
    num_groups=st.integers(1, 8),
    lost=st.integers(0, 11),
)
def test_a_plan_has_the_server_of_every_group(
    num_servers: int, boards: int, num_groups: int, lost: int
) -> None:
    cluster = parse_cluster({"boards": boards, "socs_per_board": 4}, site={"servers": num_servers})
    capacities = [0.0 if soc < lost else 1.0 for soc in range(cluster.num_socs)]
    if num_groups > sum(map(bool, capacities)):
        return
    plan = plan_groups(cluster, num_groups, capacities=capacities)
    present = {cluster.server_of(cluster.board_of(soc)) for soc in plan.participants}
    for group in plan.groups:
        places = {cluster.server_of(board) for board in group.boards}
        assert places == {group.server} or (num_groups < len(present) and group.server == 0)
    assert sorted(
        soc for own in plan.by_server.values() for group in own for soc in group.members
    ) == list(plan.participants)
