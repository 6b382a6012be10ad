"""Clusters from TOML: `[cluster]` for a rack of one kind, `[[board]]` tables for a mixed one, `[[server]]` for a site.

A device is named by the catalogue, by a `[device.NAME]` table of the same file, or by the path of a device profile.
Profiles are read once and become such tables, so the resolved tables need no other file.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from socflower.cluster.device import Device
from socflower.cluster.device_catalog import (
    DeviceTable,
    check_devices,
    device,
    device_names,
    link_bytes_per_s,
    message_s,
    read_device_file,
)
from socflower.cluster.topology import Board, Cluster, Server
from socflower.errors import ConfigError, require_range
from socflower.field_rules import SchemaVersion
from socflower.toml_file import Table, read_table, read_toml

MOST_SOCS = 20_000
"""Limit of a cluster: above the largest deployment that we know, and still planned in seconds."""

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=1.0)]
Slots = tuple[Annotated[int, Field(ge=0)], ...]


def _check_boards(table: Table, boards: int | Slots | None) -> None:
    """Refuse a list of boards without SoCs, or with a number of slots beside it."""
    if boards is None or isinstance(boards, int):
        return
    if "socs_per_board" in table.model_fields_set:
        raise ValueError(f"boards = {list(boards)} lists the slots; drop socs_per_board")
    if not any(boards):
        raise ValueError(f"boards = {list(boards)} has no SoC in use")


def _slots(boards: int | Slots, socs_per_board: int) -> Sequence[int]:
    """Return the slots of each board that has any."""
    if isinstance(boards, int):
        return [socs_per_board] * boards
    return [slots for slots in boards if slots]


def _num_socs(boards: int | Slots, socs_per_board: int) -> int:
    return boards * socs_per_board if isinstance(boards, int) else sum(boards)


class ClusterTable(Table):
    """`[cluster]`"""

    name: str = Field("cluster", description="for messages")
    boards: Count | Slots = Field(
        1,
        description="number of boards, or the slots in use on each, as in `[5, 5, 2]`; a board with 0 slots is left "
        "out. Not together with `[[board]]` tables",
    )
    socs_per_board: Count = Field(
        5,
        description="slots of each board; not together with a list. A cluster has at most "
        f"{MOST_SOCS:,} SoCs",
    )
    device: str = Field(
        "snapdragon-865",
        description="a device of the catalogue or of a `[device.NAME]` table, or the "
        "path of a [device profile](concepts/virtual-time.md#devices), which ends in `.toml`",
    )
    soc_bytes_per_s: Rate | None = Field(
        None,
        description="of each SoC's link, in each direction; default: the link "
        "in the device's profile, else 129.5e6",
    )
    board_bytes_per_s: Rate | None = Field(
        None, description="of each board's uplink, in each direction; default: `soc_bytes_per_s`"
    )
    hub_bytes_per_s: Rate | None = Field(
        None,
        description="of the link of the hub, the machine of the ServerApp, in "
        "each direction; default: 129.5e6",
    )

    def check(self) -> None:
        """Refuse a list of boards without SoCs, or with a number of slots beside it."""
        _check_boards(self, self.boards)

    @property
    def slots(self) -> Sequence[int]:
        """The slots of each board that has any."""
        return _slots(self.boards, self.socs_per_board)


class BoardTable(Table):
    """`[[board]]`: boards of one kind."""

    socs: Count = Field(1, description="slots of the board")
    count: Count = Field(1, description="how many boards like this one follow each other")
    device: str | None = Field(None, description="as in `[cluster]`, whose device is the default")
    soc_bytes_per_s: Rate | None = Field(None, description="the same")
    board_bytes_per_s: Rate | None = Field(None, description="the same")


class ServerTable(Table):
    """`[[server]]`: servers of one kind, of a site; keys that are left out are as in `[cluster]`"""

    count: Count = Field(1, description="how many servers like this one follow each other")
    boards: Count | Slots | None = Field(None, description="of each server, as in `[cluster]`")
    socs_per_board: Count | None = Field(None, description="the same")
    device: str | None = Field(None, description="the same")
    soc_bytes_per_s: Rate | None = Field(None, description="the same")
    board_bytes_per_s: Rate | None = Field(None, description="the same")
    server_bytes_per_s: Rate | None = Field(
        None, description="of each server's uplink, as in `[site]`"
    )

    def check(self) -> None:
        """Refuse a list of boards without SoCs, or with a number of slots beside it."""
        _check_boards(self, self.boards)


class SiteTable(Table):
    """`[site]`: what joins servers"""

    server_bytes_per_s: Rate | None = Field(
        None,
        description=(
            "of each server's uplink to the site's switch, where the hub is, in each direction; default: that of its "
            "boards"
        ),
    )


class ClusterFile(Table):
    """A cluster file. Scenarios have the same tables."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    cluster: ClusterTable = ClusterTable()
    boards: tuple[BoardTable, ...] = Field((), alias="board")
    servers: tuple[ServerTable, ...] = Field((), alias="server")
    # None: one server.
    site: SiteTable | None = None
    devices: dict[str, DeviceTable] = Field({}, alias="device")

    def check(self) -> None:
        """Refuse two lists of boards, too many SoCs, and invalid devices."""
        if self.boards and "boards" in self.cluster.model_fields_set:
            raise ValueError(
                f"[cluster] boards = {self.cluster.boards} and [[board]] tables exclude each other"
            )
        if self.boards and self.servers:
            raise ValueError("[[board]] and [[server]] tables exclude each other")
        if self.site is not None and not self.servers:
            raise ValueError("[site] joins servers; add a [[server]], or leave [site] out")
        own = _num_socs(self.cluster.boards, self.cluster.socs_per_board)
        require_range("[cluster] boards", most=MOST_SOCS, num_socs=own)
        servers = [each.count * _num_socs(*self._boards_of(each)) for each in self.servers]
        _require_few(servers, "[[server]]")
        _require_few([each.count * each.socs for each in self.boards], "[[board]]")
        for name in self.devices.keys() & set(device_names()):
            raise ValueError(f"[device.{name}] is in the catalogue; call yours [device.my-{name}]")
        check_devices(self.devices)

    def _boards_of(self, server: ServerTable) -> tuple[int | Slots, int]:
        """Return the boards of each server of a table, and the slots per board if they are a number."""
        return (
            self.cluster.boards if server.boards is None else server.boards,
            server.socs_per_board or self.cluster.socs_per_board,
        )

    def slots_of(self, server: ServerTable) -> Sequence[int]:
        """Return the slots of each board of a server."""
        return _slots(*self._boards_of(server))


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster of a TOML file; `ConfigError` if it is unreadable or invalid."""
    document = cluster_document(Path(path))
    return make_cluster(read_table(ClusterFile, document, str(path)), str(path))


def cluster_document(path: Path) -> dict[str, Any]:
    """Return the document of a cluster file, with the device profiles that it names inlined."""
    document = read_toml(path, "cluster file")
    inline_devices(document, path.parent, str(path))
    return document


def parse_cluster(
    cluster: Mapping[str, Any],
    boards: Sequence[Mapping[str, Any]] = (),
    devices: Mapping[str, Any] | None = None,
    *,
    servers: Sequence[Mapping[str, Any]] = (),
    site: Mapping[str, Any] | None = None,
    where: str = "scenario",
) -> Cluster:
    """Return the cluster of a `[cluster]` table, and of the other tables that a cluster file may have.

    `boards` of the `[cluster]` table is a number of boards of `socs_per_board` slots, or a list of the slots in use. A
    device profile's path is relative to the current folder. A profile's link is the default for the rates of its
    boards; if it is the profile of `[cluster]`, also for the cost of a message. Raises `ConfigError`, which names key
    and value, for invalid input.
    """
    document: dict[str, Any] = {
        "cluster": cluster,
        "board": boards,
        "device": {} if devices is None else devices,
        "server": servers,
        **({} if site is None else {"site": site}),
    }
    inline_devices(document, Path(), where)
    return make_cluster(read_table(ClusterFile, document, where), where)


def inline_devices(document: dict[str, Any], folder: Path, where: str) -> None:
    """Replace every `device = "file.toml"` of a document by the name of a device table, and add the table.

    Paths are relative to `folder`. The profile's `[link]` becomes `[device.NAME.link]`. Raises `ConfigError` for a
    file that cannot be read or does not hold exactly one device, and for two different devices of one name. Tables of
    a wrong shape are left for the schema to refuse.
    """

    def resolved(table: Any) -> Any:
        named = table.get("device") if isinstance(table, Mapping) else None
        known = document.get("device", {})
        if not isinstance(named, str) or not named.endswith(".toml"):
            return table
        if not isinstance(known, Mapping):
            return table
        name, entry = _only_device(folder / named)
        # Two files may describe the same device, but not two devices of one name.
        if known.get(name, entry) != entry:
            raise ConfigError(f"{where}: {named} has another device {name!r}; rename one")
        document["device"] = {**known, name: entry}
        return {**table, "device": name}

    document["cluster"] = resolved(document.get("cluster", {}))
    for key in ("board", "server"):
        if isinstance(document.get(key), list | tuple):
            document[key] = [resolved(entry) for entry in document[key]]


def make_cluster(file: ClusterFile, where: str) -> Cluster:
    """Return the cluster of validated tables; `ConfigError` if a device is unknown."""
    table, makers = file.cluster, _BoardMaker(file, where)
    boards: list[Board] = []
    servers: list[Server] = []
    for group in file.boards:
        boards += makers.boards([group.socs], group) * group.count
    for kind in file.servers:
        own = makers.boards(file.slots_of(kind), kind)
        site_rate = file.site.server_bytes_per_s if file.site else None
        rate = kind.server_bytes_per_s or site_rate
        uplink = rate or max(each.uplink_bytes_per_s for each in own)
        boards += own * kind.count
        servers += [Server(num_boards=len(own), uplink_bytes_per_s=uplink)] * kind.count
    link = makers.links.get(table.device)
    return Cluster(
        name=table.name,
        boards=tuple(boards or makers.boards(table.slots, table)),
        servers=tuple(servers),
        message_s=link.message_s.value if link else message_s(),
        hub_bytes_per_s=table.hub_bytes_per_s or link_bytes_per_s(),
    )


class _BoardMaker:
    """Makes the boards of tables; a value that a table leaves out is that of `[cluster]`."""

    def __init__(self, file: ClusterFile, where: str) -> None:
        self._table, self._where = file.cluster, where
        self._own = {name: table.device(name) for name, table in file.devices.items()}
        self.links = {name: table.link for name, table in file.devices.items() if table.link}

    def boards(
        self, slots_per_board: Sequence[int], table: BoardTable | ServerTable | ClusterTable
    ) -> list[Board]:
        """Return a table's boards, one for each entry of `slots_per_board`."""
        whole, name = self._table, table.device or self._table.device
        link = self.links.get(name)
        default = whole.soc_bytes_per_s or (link.bytes_per_s.value if link else link_bytes_per_s())
        made = partial(
            Board,
            device=self._device(name),
            soc_bytes_per_s=table.soc_bytes_per_s or default,
            uplink_bytes_per_s=table.board_bytes_per_s or whole.board_bytes_per_s or default,
        )
        # Equal boards are one object, so that thousands of them are compared and checked quickly.
        kinds = {slots: made(num_slots=slots) for slots in set(slots_per_board)}
        return [kinds[slots] for slots in slots_per_board]

    def _device(self, name: str) -> Device:
        try:
            return self._own.get(name) or device(name)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from None


def _only_device(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return name and table of a profile's device, including its link."""
    profile = read_device_file(path)
    devices = profile["device"]
    if len(devices) != 1:
        raise ConfigError(f"{path}: needs exactly one device, has {', '.join(devices)}")
    ((name, table),) = devices.items()
    return name, {**table, "link": profile["link"]} if "link" in profile else table


def _require_few(num_socs: Sequence[int], where: str) -> None:
    for number, total in enumerate(accumulate(num_socs), start=1):
        if total > MOST_SOCS:
            raise ConfigError(f"{where} {number}: {total} SoCs, the limit is {MOST_SOCS}")
