"""Clusters from TOML: what is meant, and one line for what cannot be."""

from pathlib import Path
from typing import Any

import pytest

from socflower.cluster import load_cluster, parse_cluster
from socflower.errors import ConfigError


def test_defaults_are_one_board_of_five_snapdragons() -> None:
    cluster = parse_cluster({})
    assert cluster.slots_per_board == (5,)
    assert cluster.device_of(0).name == "snapdragon-865"


def test_a_list_of_slots_leaves_out_boards_without_any() -> None:
    assert parse_cluster({"boards": [4, 0, 5]}).slots_per_board == (4, 5)


def test_link_rates_go_where_they_belong() -> None:
    links = parse_cluster({"soc_bytes_per_s": 1e6, "board_bytes_per_s": 2e6, "hub_bytes_per_s": 3e6}).link_bytes_per_s
    assert (links["soc0/tx"], links["board0/up"], links["hub/rx"]) == (1e6, 2e6, 3e6)
    assert parse_cluster({"soc_bytes_per_s": 1e6}).link_bytes_per_s["board0/up"] == 1e6


def test_a_mixed_rack(tmp_path: Path) -> None:
    file = tmp_path / "rack.toml"
    file.write_text('[cluster]\nname = "mixed"\n[[board]]\ncount = 2\nsocs = 3\n[[board]]\nsocs = 1\n'
                    'device = "jetson-nx"\nboard_bytes_per_s = 5e6\n')
    cluster = load_cluster(file)
    assert cluster.slots_per_board == (3, 3, 1)
    assert [cluster.device_of(soc).name for soc in (0, 6)] == ["snapdragon-865", "jetson-nx"]
    assert cluster.link_bytes_per_s["board2/up"] == 5e6


@pytest.mark.parametrize(("table", "boards", "says"), [
    ({"bords": 3}, (), r"unknown key 'bords' \(value 3\); did you mean 'boards'\?"),
    ({"zzz": 3}, (), r"unknown key 'zzz' \(value 3\); known keys: name, boards"),
    ({"boards": 0}, (), r"boards = 0 must be a whole number, 1 or more"),
    ({"boards": True}, (), r"boards = True must be a whole number"),
    ({"boards": [3, -1]}, (), r"boards = \[3, -1\] must list the slots in use"),
    ({"boards": []}, (), r"boards = \[\] must list"),
    ({"boards": [0, 0]}, (), r"has no SoC in use"),
    ({"boards": [3], "socs_per_board": 5}, (), r"already lists the slots; drop socs_per_board"),
    ({"boards": 2}, ({"socs": 1},), r"boards = 2 and \[\[board\]\] tables are both given"),
    ({}, ({"scos": 1},), r"\[\[board\]\] 1: unknown key 'scos' \(value 1\); did you mean 'socs'"),
    ({"soc_bytes_per_s": 0}, (), r"soc_bytes_per_s = 0 must be a number above 0 \(bytes per second\)"),
    ({"hub_bytes_per_s": "fast"}, (), r"hub_bytes_per_s = 'fast' must be a number above 0"),
    ({"device": "abacus"}, (), r"device 'abacus' is unknown; the catalogue has"),
    ({}, {"socs": 3}, r"board = \{'socs': 3\} must be written \[\[board\]\], a list of tables"),
])
def test_what_cannot_be_is_one_line_with_key_value_and_remedy(
    table: dict[str, Any], boards: tuple[dict[str, Any], ...], says: str,
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_cluster(table, boards)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [
    ("[cluster", "not valid TOML"), ("[clusters]\n", "unknown key 'clusters'"),
])
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
