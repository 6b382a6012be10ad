"""Clusters from TOML: `[cluster]` for a rack of one kind, `[[board]]` tables for a mixed one.

Devices are names of the catalogue, names of `[device.NAME]` tables of the same file, or paths of device profiles,
which are read once and become such tables: the resolved tables need no other file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from socflower.cluster.device_catalog import (
    DeviceTable,
    check_devices,
    device,
    device_names,
    link_bytes_per_s,
    message_s,
    read_device_file,
)
from socflower.cluster.toml_file import SchemaVersion, Table, read_table, read_toml
from socflower.cluster.topology import Board, Cluster
from socflower.errors import ConfigError

MOST_SOCS = 4096
"""Limit of a cluster: many times the largest rack, with planning still done in seconds."""

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class ClusterTable(Table):
    """`[cluster]`"""

    name: str = Field("cluster", description="for messages")
    boards: Count | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        1, description="number of boards, or the slots in use on each, as in `[5, 5, 2]`; a board with 0 slots is left "
                       "out. Not together with `[[board]]` tables")
    socs_per_board: Count = Field(5, description="slots of each board; not together with a list. A cluster has at most "
                                                 "4,096 SoCs")
    device: str = Field("snapdragon-865", description="a device of the catalogue or of a `[device.NAME]` table, or the "
                        "path of a [device profile](concepts/virtual-time.md#devices), which ends in `.toml`")
    soc_bytes_per_s: Rate | None = Field(None, description="of each SoC's link, in each direction; default: the link "
                                                           "in the device's profile, else 129.5e6")
    board_bytes_per_s: Rate | None = Field(None, description="of each board's uplink, in each direction; default: "
                                                             "`soc_bytes_per_s`")
    hub_bytes_per_s: Rate | None = Field(None, description="of the server's link, in each direction; default: 129.5e6")

    def check(self) -> None:
        """Refuse a list of boards that has no SoCs, or a number beside it."""
        if isinstance(self.boards, int):
            return
        if "socs_per_board" in self.model_fields_set:
            raise ValueError(f"boards = {list(self.boards)} already lists the slots; drop socs_per_board")
        if not any(self.boards):
            raise ValueError(f"boards = {list(self.boards)} has no SoC in use; give at least one")

    @property
    def slots(self) -> Sequence[int]:
        """The slots of each board that has any."""
        if isinstance(self.boards, int):
            return [self.socs_per_board] * self.boards
        return [slots for slots in self.boards if slots]


class BoardTable(Table):
    """`[[board]]`: boards of one kind."""

    socs: Count = Field(1, description="slots of the board")
    count: Count = Field(1, description="how many boards like this one follow each other")
    device: str | None = Field(None, description="as in `[cluster]`, whose device is the default")
    soc_bytes_per_s: Rate | None = Field(None, description="the same")
    board_bytes_per_s: Rate | None = Field(None, description="the same")


class ClusterFile(Table):
    """A cluster file. Scenarios have the same tables."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    cluster: ClusterTable = ClusterTable()
    boards: tuple[BoardTable, ...] = Field((), alias="board")
    devices: dict[str, DeviceTable] = Field({}, alias="device")

    def check(self) -> None:
        """Refuse two lists of boards, too many SoCs, and devices that cannot be."""
        if self.boards and "boards" in self.cluster.model_fields_set:
            raise ValueError(f"[cluster] boards = {self.cluster.boards} and [[board]] tables are both given; keep one")
        if isinstance(self.cluster.boards, int):
            _require_few(self.cluster.socs_per_board * self.cluster.boards, "[cluster]")
        else:
            _require_few(sum(self.cluster.boards), "[cluster]")
        num_socs = 0
        for index, board in enumerate(self.boards):
            num_socs += board.count * board.socs
            _require_few(num_socs, f"[[board]] {index + 1}")
        for name in self.devices:
            if name in device_names():
                raise ValueError(f"[device.{name}] has a name of the catalogue; give yours another one, as in "
                                 f"[device.my-{name}]")
        check_devices(self.devices)


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster a TOML file describes; `ConfigError` if it is unreadable or invalid."""
    return make_cluster(read_table(ClusterFile, cluster_document(Path(path)), str(path)), str(path))


def cluster_document(path: Path) -> dict[str, Any]:
    """Return the document of a cluster file, with the device profiles that it names inlined."""
    document = read_toml(path, "cluster file")
    inline_devices(document, path.parent, str(path))
    return document


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
    document: dict[str, Any] = {"cluster": cluster, "board": boards, "device": {} if devices is None else devices}
    inline_devices(document, Path(), where)
    return make_cluster(read_table(ClusterFile, document, where), where)


def inline_devices(document: dict[str, Any], folder: Path, where: str) -> None:
    """Replace every `device = "file.toml"` of a document by the name of a device table, and add the table.

    Paths are relative to `folder`. The profile's `[link]` goes with the device, as `[device.NAME.link]`. Raises
    `ConfigError` if a file cannot be read, does not hold exactly one device, or if two different devices have the
    same name. Tables of a wrong shape are left as they are, for the schema to refuse.
    """
    def resolved(table: Any) -> Any:
        named = table.get("device") if isinstance(table, Mapping) else None
        known = document.get("device", {})
        if not isinstance(named, str) or not named.endswith(".toml") or not isinstance(known, Mapping):
            return table
        path = folder / named
        name, entry = _only_device(path)
        if name in device_names():
            raise ConfigError(f"{path}: device {name!r} is a name of the catalogue; give yours another one, as in "
                              f"[device.my-{name}]")
        if known.get(name, entry) != entry:
            raise ConfigError(f"{where}: two different devices are called {name!r}, one of them in {path}; "
                              "rename one")
        document["device"] = {**known, name: entry}
        return {**table, "device": name}

    document["cluster"] = resolved(document.get("cluster", {}))
    if isinstance(document.get("board"), list | tuple):
        document["board"] = [resolved(board) for board in document["board"]]


def make_cluster(file: ClusterFile, where: str) -> Cluster:
    """Return the cluster of validated tables; `ConfigError` if a device is unknown."""
    own = {name: table.device(name) for name, table in file.devices.items()}
    links = {name: table.link for name, table in file.devices.items() if table.link}
    table = file.cluster

    def board(num_slots: int, name: str, soc_rate: float | None, board_rate: float | None) -> Board:
        link = links.get(name)
        soc_rate_of_all = table.soc_bytes_per_s or (link.bytes_per_s.value if link else link_bytes_per_s())
        return Board(num_slots=num_slots, device=own.get(name) or device(name),
                     soc_bytes_per_s=soc_rate or soc_rate_of_all,
                     uplink_bytes_per_s=board_rate or table.board_bytes_per_s or soc_rate_of_all)

    if file.boards:
        boards = [made for each in file.boards for made in [board(
            each.socs, each.device or table.device, each.soc_bytes_per_s, each.board_bytes_per_s)] * each.count]
    else:
        kinds = {slots: board(slots, table.device, None, None) for slots in set(table.slots)}
        boards = [kinds[slots] for slots in table.slots]
    link = links.get(table.device)
    return Cluster(name=table.name, boards=tuple(boards), message_s=link.message_s.value if link else message_s(),
                   hub_bytes_per_s=table.hub_bytes_per_s or link_bytes_per_s())


def _only_device(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return name and table of a profile's device, including its link."""
    profile = read_device_file(path)
    if len(profile["device"]) != 1:
        raise ConfigError(f"{path}: a cluster needs a profile of exactly one device, this one has "
                          f"{', '.join(profile['device'])}; split the file")
    (name, table), = profile["device"].items()
    return name, {**table, "link": profile["link"]} if "link" in profile else table


def _require_few(num_socs: int, where: str) -> None:
    if num_socs > MOST_SOCS:
        raise ConfigError(f"{where}: {num_socs} SoCs, of at most {MOST_SOCS} in a cluster; lower boards or their SoCs")
