"""The commands that build a rack, without building it, and the cluster that the simulator sees in it."""

import re
from collections import Counter
from typing import Any

import pytest

from tests.one_line import refused
from tests.testbed.topology import GOODPUT, Rack

RACK = Rack(slots_per_board=(2, 3), soc_bit_per_s=80_000_000, uplink_bit_per_s=60_000_000)


def matching(pattern: str) -> list[tuple[str, ...]]:
    return [
        found.groups() for command in RACK.commands() if (found := re.fullmatch(pattern, command))
    ]


def test_socs_are_numbered_through_and_addressed_by_board() -> None:
    assert [RACK.address(soc) for soc in range(5)] == [
        "10.77.0.1",
        "10.77.0.2",
        "10.77.1.1",
        "10.77.1.2",
        "10.77.1.3",
    ]
    refused(lambda: RACK.address(5), "SoC 5", "0 to 4")


def test_every_link_is_limited_at_both_ends() -> None:
    shaped = "root tbf rate 80000000bit burst 131072 latency 50ms"
    assert matching(rf"tc qdisc add dev (soc\d) {shaped}") == [(f"soc{soc}",) for soc in range(5)]
    assert matching(rf"tc -n (soc\d) qdisc add dev eth0 {shaped}") == [
        (f"soc{soc}",) for soc in range(5)
    ]
    assert matching(r"tc class add dev (\w+) parent 1: classid 1:1 htb rate (\d+)bit .*") == [
        (f"{way}{board}", "60000000") for board in range(2) for way in ("up", "down")
    ]


def test_an_uplink_has_a_leaf_for_each_soc_of_its_board_and_they_may_all_use_it_whole() -> None:
    leaves = matching(
        r"tc class add dev (\w+) parent 1:1 classid (\S+) htb rate (\d+)bit ceil (\d+)bit .*"
    )
    filters = matching(r"tc filter add dev (\w+) parent 1: .* match ip (\w+) (\S+)/32 flowid (\S+)")
    assert Counter(name for name, *_ in leaves) == {"up0": 2, "down0": 2, "up1": 3, "down1": 3}
    assert {ceil for *_, ceil in leaves} == {"60000000"}
    for name in ("up0", "down0", "up1", "down1"):
        assert sum(int(rate) for device, _, rate, _ in leaves if device == name) <= 60_000_000
    assert [(name, leaf) for name, leaf, *_ in leaves] == [
        (name, leaf) for name, _, _, leaf in filters
    ]
    # What leaves a board is told apart by its sender, what comes to it by its receiver.
    assert [found[1:3] for found in filters if found[0] == "up1"] == [
        ("src", RACK.address(soc)) for soc in (2, 3, 4)
    ]
    assert [found[1:3] for found in filters if found[0] == "down1"] == [
        ("dst", RACK.address(soc)) for soc in (2, 3, 4)
    ]


def test_a_connection_has_less_under_way_than_any_queue_holds() -> None:
    windows = {
        int(largest) for (largest,) in matching(r"ip netns exec .*tcp_wmem='4096 \d+ (\d+)'")
    }
    queues = {int(limit) for (limit,) in matching(r".* bfifo limit (\d+)")}
    assert len(windows) == 1 and max(windows) < min(queues) == 0.05 * RACK.uplink_bit_per_s / 8


def test_socs_are_on_the_bridge_of_their_board_and_boards_on_the_core() -> None:
    assert dict(matching(r"ip link set (\w+) master (\w+) up")) == {
        "up0": "board0",
        "down0": "core",
        "up1": "board1",
        "down1": "core",
        "soc0": "board0",
        "soc1": "board0",
        "soc2": "board1",
        "soc3": "board1",
        "soc4": "board1",
    }


def test_names_fit_the_kernels_fifteen_characters_also_in_a_large_rack() -> None:
    commands = Rack(slots_per_board=(60,) * 12).commands()
    names = {
        found[1] for command in commands if (found := re.search(r"ip link add (\w+) ", command))
    }
    assert len(names) == 1 + 12 * 2 + 720 and max(map(len, names)) <= 15


def test_the_simulated_cluster_has_the_goodput_of_the_links() -> None:
    cluster = RACK.cluster()
    assert cluster.slots_per_board == (2, 3)
    assert cluster.link_bytes_per_s["soc4/tx"] == pytest.approx(GOODPUT * 10e6)
    assert cluster.link_bytes_per_s["board1/down"] == pytest.approx(GOODPUT * 7.5e6)
    assert pytest.approx(0.956, abs=0.001) == GOODPUT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots_per_board": ()}, "250"),
        ({"slots_per_board": (2, 0)}, "250"),
        ({"slots_per_board": (1,) * 251}, "1 board"),
        ({"soc_bit_per_s": 0}, "soc_bit_per_s"),
        ({"uplink_bit_per_s": -1}, "uplink_bit_per_s"),
        ({"burst_bytes": 1500}, "burst_bytes"),
        ({"queue_s": 0.0}, "queue_s"),
    ],
)
def test_a_rack_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    refused(lambda: Rack(**{"slots_per_board": (2,), **changes}), said)
