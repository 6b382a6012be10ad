"""Clusters from TOML: `[cluster]` for a rack of one kind, `[[board]]` tables for a mixed one.

Devices are names of the catalogue, names of `[device.NAME]` tables of the same file, or paths of device profiles,
which are read once and become such tables: the resolved tables need no other file.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from socflower.cluster.device import Device
from socflower.cluster.device_catalog import (
    LinkMeasurement,
    device,
    device_names,
    link_bytes_per_s,
    message_s,
    parse_device,
    parse_link,
    read_device_file,
)
from socflower.cluster.toml_file import read_toml, reject_unknown_keys, require_tables
from socflower.cluster.topology import Board, Cluster
from socflower.errors import ConfigError

_CLUSTER_KEYS = ("name", "boards", "socs_per_board", "device", "soc_bytes_per_s", "board_bytes_per_s",
                 "hub_bytes_per_s")
_BOARD_KEYS = ("socs", "count", "device", "soc_bytes_per_s", "board_bytes_per_s")
MOST_SOCS = 4096
"""Limit of a cluster: many times the largest rack, with planning still done in seconds."""

_DEFAULT_DEVICE = "snapdragon-865"

ClusterTables: TypeAlias = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""The `[cluster]` table, the `[[board]]` tables, and the `[device.NAME]` tables by name."""


def load_cluster(path: Path) -> Cluster:
    """Return the cluster a TOML file describes; `ConfigError` if it is unreadable or invalid."""
    return parse_cluster(*cluster_tables(path), where=str(path))


def cluster_tables(path: Path) -> ClusterTables:
    """Return the tables of a cluster file, with the device profiles that it names inlined."""
    document = read_toml(path, "cluster file")
    reject_unknown_keys(document, ("schema", "cluster", "board", "device"), str(path))
    if document.get("schema", 1) != 1:
        raise ConfigError(f"{path}: schema = {document['schema']!r} is not known to this version; write schema = 1")
    return inline_devices(document.get("cluster", {}), document.get("board", ()), document.get("device", {}),
                          folder=path.parent, where=str(path))


def inline_devices(
    cluster: Mapping[str, Any], boards: Sequence[Mapping[str, Any]] = (), devices: Mapping[str, Any] | None = None, *,
    folder: Path, where: str,
) -> ClusterTables:
    """Return tables in which every `device = "file.toml"` has become the name of a device table.

    Paths are relative to `folder`. The profile's `[link]` goes with the device, as `[device.NAME.link]`. Raises
    `ConfigError` if a file cannot be read, does not hold exactly one device, or if two different devices have
    the same name.
    """
    known: dict[str, Any] = dict(_mapping(devices or {}, "device", where))

    def resolved(table: Mapping[str, Any]) -> Mapping[str, Any]:
        named = table.get("device")
        if not isinstance(named, str) or not named.endswith(".toml"):
            return table
        path = folder / named
        name, entry = _only_device(path)
        if name in device_names():
            raise ConfigError(f"{path}: device {name!r} is a name of the catalogue; give yours another one, as in "
                              f"[device.my-{name}]")
        if known.setdefault(name, entry) != entry:
            raise ConfigError(f"{where}: two different devices are called {name!r}, one of them in {path}; "
                              "rename one")
        return {**table, "device": name}

    cluster = resolved(_mapping(cluster, "cluster", where))
    return cluster, [resolved(board) for board in require_tables(boards, "board", where)], known


def parse_cluster(
    cluster: Mapping[str, Any], boards: Sequence[Mapping[str, Any]] = (), devices: Mapping[str, Any] | None = None, *,
    where: str = "scenario",
) -> Cluster:
    """Return the cluster of a `[cluster]` table, optional `[[board]]` and optional `[device.NAME]` tables.

    `boards` in the table is a number of boards of `socs_per_board` slots, or a list of the slots in use. A device
    profile given as a path is relative to the current folder. A profile's link is the default for the rates of its
    boards, and for the cost of a message if it is the profile of `[cluster]`.
    Raises `ConfigError` naming key and value for invalid input.
    """
    cluster, boards, tables = inline_devices(cluster, boards, devices, folder=Path(), where=where)
    kinds = _NamedDevices(tables, where)
    where = f"{where} [cluster]"
    reject_unknown_keys(cluster, _CLUSTER_KEYS, where)
    main_device = _device_name(cluster, _DEFAULT_DEVICE, where)
    made: list[Board] = []
    num_socs = 0
    if boards:
        if "boards" in cluster:
            raise ConfigError(f"{where}: boards = {cluster['boards']!r} and [[board]] tables are both given; keep one")
        for index, table in enumerate(boards):
            at = f"{where} [[board]] {index + 1}"
            reject_unknown_keys(table, _BOARD_KEYS, at)
            name = _device_name(table, main_device, at)
            soc_rate, board_rate = _board_rates(cluster, kinds.link(name), where)
            board = Board(
                num_slots=_count(table, "socs", 1, at), device=kinds.device(name),
                soc_bytes_per_s=_rate(table, "soc_bytes_per_s", soc_rate, at),
                uplink_bytes_per_s=_rate(table, "board_bytes_per_s", board_rate, at),
            )
            count = _count(table, "count", 1, at)
            num_socs += count * board.num_slots
            _require_few(num_socs, at)
            made.extend([board] * count)
    else:
        soc_rate, board_rate = _board_rates(cluster, kinds.link(main_device), where)
        kind = kinds.device(main_device)
        made = [Board(num_slots=slots, device=kind, soc_bytes_per_s=soc_rate, uplink_bytes_per_s=board_rate)
                for slots in _slots(cluster, where)]
    link = kinds.link(main_device)
    return Cluster(name=str(cluster.get("name", "cluster")), boards=tuple(made),
                   message_s=link.message_s if link else message_s(),
                   hub_bytes_per_s=_rate(cluster, "hub_bytes_per_s", link_bytes_per_s(), where))


class _NamedDevices:
    """The devices that a cluster may name: those of the catalogue and of its own tables, all validated."""

    def __init__(self, tables: Mapping[str, Any], where: str) -> None:
        for name in tables:
            if name in device_names():
                raise ConfigError(f"{where}: [device.{name}] has a name of the catalogue; give yours another one, as "
                                  f"in [device.my-{name}]")
        self._devices = {name: parse_device(name, table, where) for name, table in tables.items()}
        self._links = {name: parse_link(table["link"], f"{where} [device.{name}]")
                       for name, table in tables.items() if "link" in table}

    def device(self, name: str) -> Device:
        """Return the device of a name."""
        return self._devices[name] if name in self._devices else device(name)

    def link(self, name: str) -> LinkMeasurement | None:
        """Return the measurement of the device's link, if any."""
        return self._links.get(name)


def _only_device(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return name and table of a profile's device, including its link."""
    profile = read_device_file(path)
    if len(profile.devices) != 1:
        raise ConfigError(f"{path}: a cluster needs a profile of exactly one device, this one has "
                          f"{', '.join(profile.devices)}; split the file")
    (name, table), = profile.devices.items()
    if profile.link is None:
        return name, table
    return name, {**table, "link": profile.link}


def _board_rates(cluster: Mapping[str, Any], link: LinkMeasurement | None, where: str) -> tuple[float, float]:
    """Return the rates of a SoC's link and of its board's uplink where the board's table states none."""
    soc_rate = _rate(cluster, "soc_bytes_per_s", link.bytes_per_s if link else link_bytes_per_s(), where)
    return soc_rate, _rate(cluster, "board_bytes_per_s", soc_rate, where)


def _device_name(table: Mapping[str, Any], default: str, where: str) -> str:
    name = table.get("device", default)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: device = {name!r} must be a name or the path of a device profile, in quotes")
    return name


def _mapping(value: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} = {value!r} must be a table")
    return value


def _slots(cluster: Mapping[str, Any], where: str) -> list[int]:
    boards = cluster.get("boards", 1)
    if isinstance(boards, list):
        if "socs_per_board" in cluster:
            raise ConfigError(f"{where}: boards = {boards} already lists the slots; drop socs_per_board")
        if not boards or any(isinstance(slots, bool) or not isinstance(slots, int) or slots < 0 for slots in boards):
            raise ConfigError(f"{where}: boards = {boards} must list the slots in use, whole numbers, one a board")
        if not any(boards):
            raise ConfigError(f"{where}: boards = {boards} has no SoC in use; give at least one")
        _require_few(sum(boards), where)
        return [slots for slots in boards if slots]
    per_board, num_boards = _count(cluster, "socs_per_board", 5, where), _count(cluster, "boards", 1, where)
    _require_few(per_board * num_boards, where)
    return [per_board] * num_boards


def _require_few(num_socs: int, where: str) -> None:
    if num_socs > MOST_SOCS:
        raise ConfigError(f"{where}: {num_socs} SoCs, of at most {MOST_SOCS} in a cluster; lower boards or their SoCs")


def _count(table: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} = {value!r} must be a whole number, 1 or more")
    return value


def _rate(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} = {value!r} must be a number above 0 (bytes per second)")
    return float(value)
