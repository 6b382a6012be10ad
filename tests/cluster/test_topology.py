"""Where SoCs sit and what lies between two of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import HUB, Board, Cluster, Server, Tier, device, parse_cluster
from socflower.cluster.topology import uniform_cluster
from socflower.errors import ConfigError

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


@pytest.mark.parametrize(
    ("source", "target", "links", "tier"),
    [
        (0, 1, ("soc0/tx", "soc1/rx"), Tier.INTRA_BOARD),
        (1, 2, ("soc1/tx", "board0/up", "board1/down", "soc2/rx"), Tier.INTER_BOARD),
        (4, HUB, ("soc4/tx", "board1/up", "hub/rx"), Tier.HUB),
        (HUB, 0, ("hub/tx", "board0/down", "soc0/rx"), Tier.HUB),
    ],
)
def test_paths_and_tiers(
    source: int | str, target: int | str, links: tuple[str, ...], tier: Tier
) -> None:
    assert RACK.path(source, target) == links
    assert RACK.tier(source, target) is tier
    assert all(link in RACK.link_bytes_per_s for link in links)


SITE = parse_cluster(
    {"boards": [2, 1]},
    servers=[{"count": 2}, {"boards": 1, "socs_per_board": 2}],
    site={"server_bytes_per_s": 5e6},
)


@pytest.mark.parametrize(
    ("source", "target", "links", "tier"),
    [
        (0, 1, ("soc0/tx", "soc1/rx"), Tier.INTRA_BOARD),
        (0, 2, ("soc0/tx", "board0/up", "board1/down", "soc2/rx"), Tier.INTER_BOARD),
        (
            2,
            3,
            ("soc2/tx", "board1/up", "server0/up", "server1/down", "board2/down", "soc3/rx"),
            Tier.INTER_SERVER,
        ),
        (7, HUB, ("soc7/tx", "board4/up", "server2/up", "hub/rx"), Tier.HUB),
        (HUB, 0, ("hub/tx", "server0/down", "board0/down", "soc0/rx"), Tier.HUB),
    ],
)
def test_paths_between_servers_lead_over_their_uplinks(
    source: int | str,
    target: int | str,
    links: tuple[str, ...],
    tier: Tier,
) -> None:
    assert SITE.path(source, target) == links
    assert SITE.tier(source, target) is tier
    assert all(link in SITE.link_bytes_per_s for link in links)
    assert [SITE.server_of(board) for board in range(5)] == [0, 0, 1, 1, 2]


def test_impossible_paths_are_refused() -> None:
    with pytest.raises(ConfigError, match="a transfer from 1 to itself"):
        RACK.path(1, 1)
    with pytest.raises(ConfigError, match="no SoC 5; it has 0 to 4"):
        RACK.path(0, 5)
    with pytest.raises(ConfigError, match="no server 'cloud'"):
        RACK.path(0, "cloud")


def test_impossible_hardware_is_refused() -> None:
    soc = device("snapdragon-865")
    board = Board(num_slots=2, device=soc, soc_bytes_per_s=1.0, uplink_bytes_per_s=1.0)
    with pytest.raises(ConfigError, match="at least one SoC slot, got 0"):
        Board(num_slots=0, device=soc, soc_bytes_per_s=1.0, uplink_bytes_per_s=1.0)
    with pytest.raises(ConfigError, match=r"uplink_bytes_per_s = .* must be above 0"):
        Board(num_slots=1, device=soc, soc_bytes_per_s=1.0, uplink_bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="at least one board"):
        Cluster(name="c", boards=(), hub_bytes_per_s=1.0, message_s=0.0)
    with pytest.raises(ConfigError, match=r"hub_bytes_per_s = .* must be above 0"):
        Cluster(name="c", boards=(board,), hub_bytes_per_s=0.0, message_s=0.0)
    with pytest.raises(ConfigError, match="its servers have 2 boards, and 1 are described"):
        Cluster(
            name="c",
            boards=(board,),
            hub_bytes_per_s=1.0,
            message_s=0.0,
            servers=(Server(num_boards=2, uplink_bytes_per_s=1.0),),
        )
    with pytest.raises(ConfigError, match="message_s must not be negative"):
        Cluster(name="c", boards=(board,), hub_bytes_per_s=1.0, message_s=-1.0)


def test_a_cluster_from_code() -> None:
    cluster = uniform_cluster(
        device("jetson-nano"),
        [1, 1, 1],
        soc_bytes_per_s=12.5e6,
        board_bytes_per_s=12.5e6,
        hub_bytes_per_s=125e6,
        message_s=1e-4,
        name="shelf",
    )
    assert cluster.device_of(2).name == "jetson-nano"
    assert cluster.link_bytes_per_s["board2/up"] == 12.5e6
