"""Where SoCs sit and what lies between two of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import HUB, Board, Cluster, Server, Tier, device, parse_cluster
from tests.one_line import refused

RACK = parse_cluster({"boards": [2, 3]})


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_every_soc_is_on_the_board_that_lists_it(slots: list[int]) -> None:
    cluster = parse_cluster({"boards": slots})
    assert cluster.num_socs == sum(slots)
    assert cluster.slots_per_board == tuple(slots)
    assert [soc for board in range(len(slots)) for soc in cluster.socs_of(board)] == list(
        range(sum(slots))
    )
    for board in range(len(slots)):
        assert all(cluster.board_of(soc) == board for soc in cluster.socs_of(board))


SITE = replace(
    parse_cluster({"boards": [2, 1, 2, 1, 2]}),
    servers=tuple(Server(num_boards=boards, uplink_bytes_per_s=5e6) for boards in (2, 2, 1)),
)


@pytest.mark.parametrize(
    ("cluster", "source", "target", "links", "tier"),
    [
        (RACK, 0, 1, "soc0/tx soc1/rx", Tier.INTRA_BOARD),
        (RACK, 1, 2, "soc1/tx board0/up board1/down soc2/rx", Tier.INTER_BOARD),
        (RACK, 4, HUB, "soc4/tx board1/up hub/rx", Tier.HUB),
        (RACK, HUB, 0, "hub/tx board0/down soc0/rx", Tier.HUB),
        (SITE, 0, 1, "soc0/tx soc1/rx", Tier.INTRA_BOARD),
        (SITE, 0, 2, "soc0/tx board0/up board1/down soc2/rx", Tier.INTER_BOARD),
        (
            SITE,
            2,
            3,
            "soc2/tx board1/up server0/up server1/down board2/down soc3/rx",
            Tier.INTER_SERVER,
        ),
        (SITE, 7, HUB, "soc7/tx board4/up server2/up hub/rx", Tier.HUB),
        (SITE, HUB, 0, "hub/tx server0/down board0/down soc0/rx", Tier.HUB),
    ],
)
def test_paths_and_tiers(
    cluster: Cluster, source: int | str, target: int | str, links: str, tier: Tier
) -> None:
    assert cluster.path(source, target) == tuple(links.split())
    assert cluster.tier(source, target) is tier
    assert set(links.split()) <= set(cluster.link_bytes_per_s)


def test_servers_have_their_boards_in_order() -> None:
    assert [SITE.server_of(board) for board in range(5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("source", "target", "named"), [(1, 1, "1"), (0, 5, "SoC 5"), (0, "cloud", "'cloud'")]
)
def test_impossible_paths_are_refused(source: int, target: int | str, named: str) -> None:
    refused(lambda: RACK.path(source, target), named)


BOARD = {
    "num_slots": 2,
    "device": device("jetson-nano"),
    "soc_bytes_per_s": 1.0,
    "uplink_bytes_per_s": 1.0,
}
SERVER = {"num_boards": 1, "uplink_bytes_per_s": 1.0}
CLUSTER = {"name": "c", "boards": (Board(**BOARD),), "hub_bytes_per_s": 1.0, "message_s": 0.0}


@pytest.mark.parametrize(
    ("kind", "values", "key", "value"),
    [
        (Board, BOARD, "num_slots", 0),
        (Board, BOARD, "soc_bytes_per_s", 0.0),
        (Board, BOARD, "uplink_bytes_per_s", 0.0),
        (Server, SERVER, "num_boards", 0),
        (Server, SERVER, "uplink_bytes_per_s", 0.0),
        (Cluster, CLUSTER, "boards", ()),
        (Cluster, CLUSTER, "hub_bytes_per_s", 0.0),
        (Cluster, CLUSTER, "message_s", -1.0),
        (Cluster, CLUSTER, "servers", (Server(num_boards=2, uplink_bytes_per_s=1.0),)),
    ],
)
def test_impossible_hardware_is_refused(
    kind: type, values: dict[str, object], key: str, value: object
) -> None:
    kind(**values)
    refused(lambda: kind(**values | {key: value}))
