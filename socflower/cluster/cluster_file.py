"""Clusters from TOML: `[cluster]` for a rack of one kind, `[[board]]` tables for a mixed one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from socflower.cluster.catalog import device, link_bytes_per_s, message_s
from socflower.cluster.toml_file import read_toml, reject_unknown_keys, require_tables
from socflower.cluster.topology import Board, Cluster
from socflower.errors import ConfigError

_CLUSTER_KEYS = ("name", "boards", "socs_per_board", "device", "soc_bytes_per_s", "board_bytes_per_s",
                 "hub_bytes_per_s")
_BOARD_KEYS = ("socs", "count", "device", "soc_bytes_per_s", "board_bytes_per_s")
_DEFAULT_DEVICE = "snapdragon-865"


def load_cluster(path: Path) -> Cluster:
    """Return the cluster a TOML file describes; `ConfigError` if it cannot be read or be."""
    return parse_cluster(*cluster_tables(path), where=str(path))


def cluster_tables(path: Path) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the `[cluster]` table and the `[[board]]` tables of a cluster file."""
    document = read_toml(path, "cluster file")
    reject_unknown_keys(document, ("schema", "cluster", "board"), str(path))
    if document.get("schema", 1) != 1:
        raise ConfigError(f"{path}: schema = {document['schema']!r} is not known to this version; write schema = 1")
    return document.get("cluster", {}), document.get("board", ())


def parse_cluster(
    cluster: Mapping[str, Any], boards: Sequence[Mapping[str, Any]] = (), *, where: str = "scenario",
) -> Cluster:
    """Return the cluster of a `[cluster]` table and optional `[[board]]` tables.

    `boards` in the table is a number of boards of `socs_per_board` slots, or a list of the slots in use.
    Raises `ConfigError` naming key and value for anything that cannot be.
    """
    boards = require_tables(boards, "board", where)
    where = f"{where} [cluster]"
    reject_unknown_keys(cluster, _CLUSTER_KEYS, where)
    soc_rate = _rate(cluster, "soc_bytes_per_s", link_bytes_per_s(), where)
    board_rate = _rate(cluster, "board_bytes_per_s", soc_rate, where)
    made: list[Board] = []
    if boards:
        if "boards" in cluster:
            raise ConfigError(f"{where}: boards = {cluster['boards']!r} and [[board]] tables are both given; keep one")
        for index, table in enumerate(boards):
            at = f"{where} [[board]] {index + 1}"
            reject_unknown_keys(table, _BOARD_KEYS, at)
            board = Board(
                num_slots=_count(table, "socs", 1, at),
                device=device(str(table.get("device", cluster.get("device", _DEFAULT_DEVICE)))),
                soc_bytes_per_s=_rate(table, "soc_bytes_per_s", soc_rate, at),
                uplink_bytes_per_s=_rate(table, "board_bytes_per_s", board_rate, at),
            )
            made.extend([board] * _count(table, "count", 1, at))
    else:
        kind = device(str(cluster.get("device", _DEFAULT_DEVICE)))
        made = [Board(num_slots=slots, device=kind, soc_bytes_per_s=soc_rate, uplink_bytes_per_s=board_rate)
                for slots in _slots(cluster, where)]
    return Cluster(name=str(cluster.get("name", "cluster")), boards=tuple(made), message_s=message_s(),
                   hub_bytes_per_s=_rate(cluster, "hub_bytes_per_s", link_bytes_per_s(), where))


def _slots(cluster: Mapping[str, Any], where: str) -> list[int]:
    boards = cluster.get("boards", 1)
    if isinstance(boards, list):
        if "socs_per_board" in cluster:
            raise ConfigError(f"{where}: boards = {boards} already lists the slots; drop socs_per_board")
        if not boards or any(isinstance(slots, bool) or not isinstance(slots, int) or slots < 0 for slots in boards):
            raise ConfigError(f"{where}: boards = {boards} must list the slots in use, whole numbers, one a board")
        if not any(boards):
            raise ConfigError(f"{where}: boards = {boards} has no SoC in use; give at least one")
        return [slots for slots in boards if slots]
    return [_count(cluster, "socs_per_board", 5, where)] * _count(cluster, "boards", 1, where)


def _count(table: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} = {value!r} must be a whole number, 1 or more")
    return value


def _rate(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{where}: {key} = {value!r} must be a number above 0 (bytes per second)")
    return float(value)
