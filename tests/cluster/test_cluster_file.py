"""Clusters from TOML: what is meant, and one line for what cannot be."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import load_cluster, parse_cluster
from socflower.cluster.cluster_file import (
    ClusterFile,
    cluster_document,
    inline_devices,
    make_cluster,
)
from socflower.cluster.device_catalog import (
    device_table,
    figure,
    link_bytes_per_s,
    message_s,
    toml_text,
)
from socflower.errors import ConfigError
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.toml_file import read_table


def test_defaults_are_one_board_of_five_snapdragons() -> None:
    cluster = parse_cluster({})
    assert cluster.slots_per_board == (5,)
    assert cluster.device_of(0).name == "snapdragon-865"


def test_a_list_of_slots_leaves_out_boards_without_any() -> None:
    assert parse_cluster({"boards": [4, 0, 5]}).slots_per_board == (4, 5)


def test_link_rates_go_where_they_belong() -> None:
    links = parse_cluster(
        {"soc_bytes_per_s": 1e6, "board_bytes_per_s": 2e6, "hub_bytes_per_s": 3e6}
    ).link_bytes_per_s
    assert (links["soc0/tx"], links["board0/up"], links["hub/rx"]) == (1e6, 2e6, 3e6)
    assert parse_cluster({"soc_bytes_per_s": 1e6}).link_bytes_per_s["board0/up"] == 1e6


def test_a_mixed_rack(tmp_path: Path) -> None:
    file = tmp_path / "rack.toml"
    file.write_text(
        '[cluster]\nname = "mixed"\n[[board]]\ncount = 2\nsocs = 3\n[[board]]\nsocs = 1\n'
        'device = "jetson-nx"\nboard_bytes_per_s = 5e6\n'
    )
    cluster = load_cluster(file)
    assert load_cluster(str(file)) == cluster
    assert cluster.slots_per_board == (3, 3, 1)
    assert [cluster.device_of(soc).name for soc in (0, 6)] == ["snapdragon-865", "jetson-nx"]
    assert cluster.link_bytes_per_s["board2/up"] == 5e6


def test_servers_of_a_site_are_like_the_cluster_where_they_say_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        "[cluster]\nboards = 2\nsocs_per_board = 3\n[[server]]\ncount = 2\n[[server]]\nboards = [1, 4]\n"
        'device = "jetson-nx"\nserver_bytes_per_s = 7e6\n[site]\nserver_bytes_per_s = 5e6\n'
    )
    cluster = load_cluster(file)
    assert cluster.slots_per_board == (3, 3, 3, 3, 1, 4)
    assert [server.num_boards for server in cluster.servers] == [2, 2, 2]
    assert [cluster.link_bytes_per_s[f"server{index}/down"] for index in range(3)] == [
        5e6,
        5e6,
        7e6,
    ]
    assert [cluster.device_of(soc).name for soc in (11, 12)] == ["snapdragon-865", "jetson-nx"]
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        "# Does it hold?\n[cluster]\nboards = 1\n[strategy]\ngroups = 3\nserver_interval = 2\n"
    )
    loaded = load_scenario(scenario, [f"cluster={file}"])
    assert (
        scenario_cluster(loaded) == scenario_cluster(from_document(to_document(loaded))) == cluster
    )


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"site": {}},
            r"\[site\] joins servers, and there is no \[\[server\]\]; add some, or leave \[site\] out",
        ),
        (
            {"servers": [{}], "boards": [{}]},
            r"\[\[board\]\] and \[\[server\]\] tables are both given; give each server",
        ),
        (
            {"servers": [{"boards": [1], "socs_per_board": 2}]},
            r"boards = \[1\] already lists the slots",
        ),
        ({"servers": [{"boards": [0]}]}, r"boards = \[0\] has no SoC in use"),
        (
            {"servers": [{"count": 4001}]},
            r"\[\[server\]\] 1: 20005 SoCs, of at most 20000 in a cluster",
        ),
        (
            {"servers": [{"server_bytes_per_s": 0}]},
            r"server_bytes_per_s = 0 must be a number of 1 or more",
        ),
    ],
)
def test_sites_that_cannot_be_are_one_line(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_cluster({}, **tables)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "boards", "says"),
    [
        ({"bords": 3}, (), r"unknown key 'bords' \(value 3\); did you mean 'boards'\?"),
        ({"zzz": 3}, (), r"unknown key 'zzz' \(value 3\); known keys: name, boards"),
        (
            {"boards": 0},
            (),
            r"boards = 0 must be a whole number of 1 or more or a list of whole numbers of 0 or more",
        ),
        ({"boards": True}, (), r"boards = True must be a whole number"),
        (
            {"boards": [3, -1]},
            (),
            r"boards = \[3, -1\] must be a whole number of 1 or more or a list of",
        ),
        ({"boards": []}, (), r"boards = \[\] has no SoC in use"),
        ({"boards": [0, 0]}, (), r"has no SoC in use"),
        ({"boards": [3], "socs_per_board": 5}, (), r"already lists the slots; drop socs_per_board"),
        ({"boards": 2}, ({"socs": 1},), r"boards = 2 and \[\[board\]\] tables are both given"),
        (
            {},
            ({"scos": 1},),
            r"\[\[board\]\] 1: unknown key 'scos' \(value 1\); did you mean 'socs'",
        ),
        ({"soc_bytes_per_s": 0}, (), r"soc_bytes_per_s = 0 must be a number of 1 or more"),
        (
            {"hub_bytes_per_s": "fast"},
            (),
            r"hub_bytes_per_s = 'fast' must be a number of 1 or more",
        ),
        ({"device": "abacus"}, (), r"device 'abacus' is unknown; the catalogue has"),
        ({}, {"socs": 3}, r"board = \{'socs': 3\} must be written \[\[board\]\], a list of tables"),
    ],
)
def test_what_cannot_be_is_one_line_with_key_value_and_remedy(
    table: dict[str, Any],
    boards: tuple[dict[str, Any], ...],
    says: str,
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_cluster(table, boards)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cluster", "not valid TOML"),
        ("[clusters]\n", "unknown key 'clusters'"),
    ],
)
def test_files_that_are_no_clusters(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_cluster(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path / "nothing.toml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_cluster(file)


# ------------------------------------------------------------------------------------------- device profiles
LINK = {
    "peer": "there:1",
    "bytes_per_s": figure(11e6, "measured"),
    "round_trip_s": figure(3e-4, "measured"),
    "message_s": figure(2e-4, "measured"),
}


def write_profile(
    path: Path, *names: str, link: bool = False, like: str = "raspberry-pi-4b"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = {name: device_table(like) for name in names}
    path.write_text(
        toml_text({"schema": 1, "device": tables, **({"link": LINK} if link else {})}), "utf-8"
    )
    return path


def test_a_profile_is_sought_beside_the_file_that_names_it(tmp_path: Path) -> None:
    write_profile(tmp_path / "devices/mine.toml", "mine")
    rack = tmp_path / "clusters/rack.toml"
    rack.parent.mkdir()
    rack.write_text('[cluster]\ndevice = "../devices/mine.toml"\nboards = [2]\n')
    soc = load_cluster(rack).device_of(1)
    assert (soc.name, soc.idle_w) == ("mine", 2.7)


@given(
    profiled=st.sets(st.integers(0, 3)),
    main=st.booleans(),
    links=st.booleans(),
    stated=st.booleans(),
)
def test_the_resolved_tables_are_the_same_cluster_without_any_file(
    tmp_path_factory: pytest.TempPathFactory,
    profiled: set[int],
    main: bool,
    links: bool,
    stated: bool,
) -> None:
    folder = tmp_path_factory.mktemp("case")
    for name in ("first", "second"):
        write_profile(folder / f"{name}.toml", name, link=links)
    cluster = {
        **({"device": "first.toml"} if main else {}),
        **({"soc_bytes_per_s": 5e6} if stated else {}),
    }
    boards = [
        {"socs": 2, **({"device": "second.toml"} if index in profiled else {})}
        for index in range(4)
    ]
    (folder / "rack.toml").write_text(toml_text({"schema": 1, "cluster": cluster, "board": boards}))
    loaded = load_cluster(folder / "rack.toml")
    resolved = cluster_document(folder / "rack.toml")
    again = copy.deepcopy(resolved)
    inline_devices(again, Path("/nowhere"), "x")
    assert again == resolved
    assert (
        make_cluster(read_table(ClusterFile, json.loads(json.dumps(resolved)), "x"), "x") == loaded
    )
    for index, board in enumerate(loaded.boards):
        name = "second" if index in profiled else "first" if main else "snapdragon-865"
        measured = links and name != "snapdragon-865"
        assert board.device.name == name
        assert board.soc_bytes_per_s == (
            5e6 if stated else 11e6 if measured else link_bytes_per_s()
        )
        assert board.uplink_bytes_per_s == board.soc_bytes_per_s
    assert loaded.message_s == (2e-4 if main and links else message_s())
    assert loaded.hub_bytes_per_s == link_bytes_per_s()


def test_device_tables_may_stand_in_the_cluster_file_itself(tmp_path: Path) -> None:
    rack = tmp_path / "rack.toml"
    rack.write_text(
        '[cluster]\ndevice = "mine"\n'
        + toml_text({"device": {"mine": device_table("jetson-nano")}})
    )
    assert load_cluster(rack).device_of(0).name == "mine"
    assert cluster_document(rack)["device"] == {"mine": device_table("jetson-nano")}


def test_what_a_table_states_wins_over_what_was_measured(tmp_path: Path) -> None:
    path = str(write_profile(tmp_path / "mine.toml", "mine", link=True))
    cluster = parse_cluster(
        {}, [{"device": path, "soc_bytes_per_s": 7e6}, {"device": path, "board_bytes_per_s": 8e6}]
    )
    assert [board.soc_bytes_per_s for board in cluster.boards] == [7e6, 11e6]
    assert [board.uplink_bytes_per_s for board in cluster.boards] == [11e6, 8e6]
    assert cluster.message_s == message_s()  # of the [cluster] device, which is the default one


def test_profiles_that_a_cluster_cannot_use(tmp_path: Path) -> None:
    write_profile(tmp_path / "two.toml", "one", "two")
    write_profile(tmp_path / "shadow.toml", "jetson-nx")
    write_profile(tmp_path / "mine.toml", "mine")
    write_profile(tmp_path / "other/mine.toml", "mine", like="jetson-nx")
    (tmp_path / "none.toml").write_text("[cluster]\n")
    for name, says in (
        ("missing.toml", "missing.toml: cannot be read"),
        (
            "two.toml",
            "two.toml: a cluster needs a profile of exactly one device, this one has one, two",
        ),
        ("shadow.toml", "device 'jetson-nx' is a name of the catalogue; give yours another one"),
        ("none.toml", "none.toml: unknown key 'cluster'"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            parse_cluster({"device": str(tmp_path / name)})
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="two different devices are called 'mine'"):
        inline_devices(
            {"cluster": {"device": "mine.toml"}, "board": [{"device": "other/mine.toml"}]},
            tmp_path,
            "x",
        )
    with pytest.raises(ConfigError, match=r"\[device.x86-core\] has a name of the catalogue"):
        parse_cluster({}, (), {"x86-core": device_table("x86-core")})
    with pytest.raises(ConfigError, match=r"scenario: device = 3 must be tables \[device.NAME\]"):
        parse_cluster({}, (), 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device = 3 must be a text"):
        parse_cluster({"device": 3})
