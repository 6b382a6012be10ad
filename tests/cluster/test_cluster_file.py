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
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.toml_file import read_table
from tests.one_line import refused


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
        'device = "jetson-nx"\n'
    )
    cluster = load_cluster(file)
    assert load_cluster(str(file)) == cluster
    assert cluster.slots_per_board == (3, 3, 1)
    assert [cluster.device_of(soc).name for soc in (0, 6)] == ["snapdragon-865", "jetson-nx"]


def test_servers_of_a_site_have_the_boards_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        '[[board]]\nsocs = 3\n[[board]]\nsocs = 1\ndevice = "jetson-nx"\n'
        "[site]\nservers = 3\nserver_bytes_per_s = 5e6\n"
    )
    cluster = load_cluster(file)
    assert cluster.slots_per_board == (3, 1) * 3
    assert [server.num_boards for server in cluster.servers] == [2, 2, 2]
    rates = [cluster.link_bytes_per_s[f"server{index}/down"] for index in range(3)]
    assert rates == [5e6] * 3
    assert [cluster.device_of(soc).name for soc in (10, 11)] == ["snapdragon-865", "jetson-nx"]
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        "# Does it hold?\n[cluster]\nboards = 1\n[strategy]\ngroups = 3\nserver_interval = 2\n"
    )
    loaded = load_scenario(scenario, [f"cluster={file}"])
    assert (
        scenario_cluster(loaded) == scenario_cluster(from_document(to_document(loaded))) == cluster
    )


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"site": {}}, ("[site]", "servers is missing")),
        (
            {"cluster": {"boards": [1], "socs_per_board": 2}},
            ("boards = [1]", "socs_per_board"),
        ),
        ({"cluster": {"boards": [0]}}, ("boards = [0]",)),
        ({"site": {"servers": 4001}}, ("[site]", "20005", "20000")),
        ({"boards": [{"count": 5001, "socs": 4}]}, ("[[board]]", "20004", "20000")),
        ({"cluster": {"boards": 4001}}, ("[cluster]", "20005", "20000")),
        ({"site": {"servers": 2, "server_bytes_per_s": 0}}, ("server_bytes_per_s = 0",)),
        ({"cluster": {"bords": 3}}, ("'bords'", "'boards'")),
        ({"cluster": {"zzz": 3}}, ("'zzz'", "name", "boards")),
        ({"cluster": {"boards": 0}}, ("boards = 0",)),
        ({"cluster": {"boards": True}}, ("boards = True",)),
        ({"cluster": {"boards": [3, -1]}}, ("boards = [3, -1]",)),
        ({"cluster": {"boards": []}}, ("boards = []",)),
        ({"cluster": {"boards": [3], "socs_per_board": 5}}, ("boards = [3]", "socs_per_board")),
        ({"cluster": {"boards": 2}, "boards": [{"socs": 1}]}, ("boards = 2", "[[board]]")),
        ({"boards": [{"scos": 1}]}, ("[[board]] 1", "'scos'", "'socs'")),
        ({"cluster": {"soc_bytes_per_s": 0}}, ("soc_bytes_per_s = 0",)),
        ({"cluster": {"hub_bytes_per_s": "fast"}}, ("hub_bytes_per_s = 'fast'",)),
        ({"cluster": {"device": "abacus"}}, ("'abacus'", "snapdragon-865")),
        ({"cluster": {"device": 3}}, ("device = 3",)),
        ({"boards": {"socs": 3}}, ("[[board]]",)),
        ({"devices": 3}, ("scenario: device = 3", "[device.NAME]")),
        ({"devices": {"x86-core": device_table("x86-core")}}, ("[device.x86-core]",)),
    ],
)
def test_what_cannot_be_names_key_and_value(tables: dict[str, Any], named: tuple[str, ...]) -> None:
    refused(lambda: parse_cluster(**{"cluster": {}} | tables), *named)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"[cluster", "TOML"), (b"[clusters]\n", "'clusters'"), (b"# caf\xe9\n", "UTF-8")],
)
def test_files_that_are_no_clusters(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "bad.toml"
    refused(lambda: load_cluster(file), "bad.toml")
    file.write_bytes(content)
    refused(lambda: load_cluster(file), "bad.toml", named)


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
    document = {"schema": 1, "device": tables} | ({"link": LINK} if link else {})
    path.write_text(toml_text(document), "utf-8")
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
    cluster: dict[str, Any] = {"device": "first.toml"} if main else {}
    if stated:
        cluster["soc_bytes_per_s"] = 5e6
    boards: list[dict[str, Any]] = [{"socs": 2} for _ in range(4)]
    for index in profiled:
        boards[index]["device"] = "second.toml"
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
    cluster = parse_cluster({"soc_bytes_per_s": 7e6, "board_bytes_per_s": 8e6}, [{"device": path}])
    assert cluster.boards[0].soc_bytes_per_s == 7e6
    assert cluster.boards[0].uplink_bytes_per_s == 8e6
    assert cluster.message_s == message_s()  # of the [cluster] device, which is the default one


def test_profiles_that_a_cluster_cannot_use(tmp_path: Path) -> None:
    write_profile(tmp_path / "two.toml", "one", "two")
    write_profile(tmp_path / "mine.toml", "mine")
    write_profile(tmp_path / "other/mine.toml", "mine", like="jetson-nx")
    (tmp_path / "none.toml").write_text("[cluster]\n")
    for name, named in (
        ("missing", ()),
        ("two", ("one",)),
        ("none", ()),
    ):
        path = f"{tmp_path / name}.toml"
        refused(lambda path=path: parse_cluster({"device": path}), path, *named)
    shadow = str(write_profile(tmp_path / "shadow.toml", "jetson-nx"))
    refused(lambda: parse_cluster({"device": shadow}), "[device.jetson-nx]")
    document = {"cluster": {"device": "mine.toml"}, "board": [{"device": "other/mine.toml"}]}
    refused(lambda: inline_devices(document, tmp_path, "x"), "x", "'mine'")
