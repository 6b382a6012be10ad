"""Clusters from TOML: `[cluster]` for a rack of one kind, `[[board]]` tables for a mixed one, `[[server]]` for a site.

Devices are names of the catalogue, names of `[device.NAME]` tables of the same file, or paths of device profiles,
which are read once and become such tables: the resolved tables need no other file.
"""

from collections.abc import Mapping, Sequence
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
from socflower.errors import ConfigError
from socflower.field_rules import SchemaVersion
from socflower.toml_file import Table, read_table, read_toml

MOST_SOCS = 20_000
"""Limit of a cluster: more than the largest deployment of which we know, with planning still done in seconds."""

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=1.0)]
Slots = tuple[Annotated[int, Field(ge=0)], ...]


def _check_boards(table: Table, boards: int | Slots | None) -> None:
    """Refuse a list of boards that has no SoCs, or a number of slots beside it."""
    if boards is None or isinstance(boards, int):
        return
    if "socs_per_board" in table.model_fields_set:
        raise ValueError(f"boards = {list(boards)} already lists the slots; drop socs_per_board")
    if not any(boards):
        raise ValueError(f"boards = {list(boards)} has no SoC in use; give at least one")


def _slots(boards: int | Slots, socs_per_board: int) -> Sequence[int]:
    """Return the slots of each board that has any."""
    return (
        [socs_per_board] * boards
        if isinstance(boards, int)
        else [slots for slots in boards if slots]
    )


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
        """Refuse a list of boards that has no SoCs, or a number beside it."""
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
    """`[[server]]`: servers of one kind, of a site; what is left out is as in `[cluster]`"""

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
        """Refuse a list of boards that has no SoCs, or a number beside it."""
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
    site: SiteTable | None = None  # None: one server
    devices: dict[str, DeviceTable] = Field({}, alias="device")

    def check(self) -> None:
        """Refuse two lists of boards, too many SoCs, and devices that cannot be."""
        if self.boards and "boards" in self.cluster.model_fields_set:
            raise ValueError(
                f"[cluster] boards = {self.cluster.boards} and [[board]] tables are both given; keep one"
            )
        if self.boards and self.servers:
            raise ValueError(
                "[[board]] and [[server]] tables are both given; give each server a `boards` and `device`"
            )
        if self.site is not None and not self.servers:
            raise ValueError(
                "[site] joins servers, and there is no [[server]]; add some, or leave [site] out"
            )
        _require_few(_num_socs(self.cluster.boards, self.cluster.socs_per_board), "[cluster]")
        num_socs = 0
        for index, server in enumerate(self.servers):
            num_socs += server.count * _num_socs(*self._boards_of(server))
            _require_few(num_socs, f"[[server]] {index + 1}")
        num_socs = 0
        for index, board in enumerate(self.boards):
            num_socs += board.count * board.socs
            _require_few(num_socs, f"[[board]] {index + 1}")
        for name in self.devices:
            if name in device_names():
                raise ValueError(
                    f"[device.{name}] has a name of the catalogue; give yours another one, as in "
                    f"[device.my-{name}]"
                )
        check_devices(self.devices)

    def _boards_of(self, server: ServerTable) -> tuple[int | Slots, int]:
        """Return the boards of each such server, and their slots if it is a number of boards."""
        return (
            self.cluster.boards if server.boards is None else server.boards,
            server.socs_per_board or self.cluster.socs_per_board,
        )

    def slots_of(self, server: ServerTable) -> Sequence[int]:
        """Return the slots of each board of such a server."""
        return _slots(*self._boards_of(server))


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster a TOML file describes; `ConfigError` if it is unreadable or invalid."""
    return make_cluster(read_table(ClusterFile, cluster_document(Path(path)), str(path)), str(path))


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
    """Return the cluster of a `[cluster]` table and of what a cluster file may have besides.

    These are `[[board]]`, `[device.NAME]`, `[[server]]` and `[site]` tables.

    `boards` in the table is a number of boards of `socs_per_board` slots, or a list of the slots in use. A device
    profile given as a path is relative to the current folder. A profile's link is the default for the rates of its
    boards, and for the cost of a message if it is the profile of `[cluster]`.
    Raises `ConfigError` naming key and value for invalid input.
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

    Paths are relative to `folder`. The profile's `[link]` goes with the device, as `[device.NAME.link]`. Raises
    `ConfigError` if a file cannot be read, does not hold exactly one device, or if two different devices have the
    same name. Tables of a wrong shape are left as they are, for the schema to refuse.
    """

    def resolved(table: Any) -> Any:
        named = table.get("device") if isinstance(table, Mapping) else None
        known = document.get("device", {})
        if (
            not isinstance(named, str)
            or not named.endswith(".toml")
            or not isinstance(known, Mapping)
        ):
            return table
        path = folder / named
        name, entry = _only_device(path)
        if name in device_names():
            raise ConfigError(
                f"{path}: device {name!r} is a name of the catalogue; give yours another one, as in "
                f"[device.my-{name}]"
            )
        if known.get(name, entry) != entry:
            raise ConfigError(
                f"{where}: two different devices are called {name!r}, one of them in {path}; "
                "rename one"
            )
        document["device"] = {**known, name: entry}
        return {**table, "device": name}

    document["cluster"] = resolved(document.get("cluster", {}))
    for key in ("board", "server"):
        if isinstance(document.get(key), list | tuple):
            document[key] = [resolved(entry) for entry in document[key]]


def make_cluster(file: ClusterFile, where: str) -> Cluster:
    """Return the cluster of validated tables; `ConfigError` if a device is unknown."""
    own = {name: table.device(name) for name, table in file.devices.items()}
    links = {name: table.link for name, table in file.devices.items() if table.link}
    table = file.cluster

    def device_of(name: str) -> Device:
        try:
            return own.get(name) or device(name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def board(num_slots: int, name: str, soc_rate: float | None, board_rate: float | None) -> Board:
        link = links.get(name)
        soc_rate_of_all = table.soc_bytes_per_s or (
            link.bytes_per_s.value if link else link_bytes_per_s()
        )
        return Board(
            num_slots=num_slots,
            device=device_of(name),
            soc_bytes_per_s=soc_rate or soc_rate_of_all,
            uplink_bytes_per_s=board_rate or table.board_bytes_per_s or soc_rate_of_all,
        )

    def equal_boards(
        slots_per_board: Sequence[int],
        name: str,
        soc_rate: float | None,
        board_rate: float | None,
    ) -> list[Board]:
        kinds = {slots: board(slots, name, soc_rate, board_rate) for slots in set(slots_per_board)}
        return [kinds[slots] for slots in slots_per_board]

    boards: list[Board] = []
    servers: list[Server] = []
    for group in file.boards:
        boards += [
            board(
                group.socs,
                group.device or table.device,
                group.soc_bytes_per_s,
                group.board_bytes_per_s,
            )
        ] * group.count
    for kind in file.servers:
        own_boards = equal_boards(
            file.slots_of(kind),
            kind.device or table.device,
            kind.soc_bytes_per_s,
            kind.board_bytes_per_s,
        )
        rate = kind.server_bytes_per_s or (file.site.server_bytes_per_s if file.site else None)
        boards += own_boards * kind.count
        servers += [
            Server(
                num_boards=len(own_boards),
                uplink_bytes_per_s=rate or max(each.uplink_bytes_per_s for each in own_boards),
            )
        ] * kind.count
    link = links.get(table.device)
    return Cluster(
        name=table.name,
        boards=tuple(boards or equal_boards(table.slots, table.device, None, None)),
        servers=tuple(servers),
        message_s=link.message_s.value if link else message_s(),
        hub_bytes_per_s=table.hub_bytes_per_s or link_bytes_per_s(),
    )


def _only_device(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return name and table of a profile's device, including its link."""
    profile = read_device_file(path)
    if len(profile["device"]) != 1:
        raise ConfigError(
            f"{path}: a cluster needs a profile of exactly one device, this one has "
            f"{', '.join(profile['device'])}; split the file"
        )
    ((name, table),) = profile["device"].items()
    return name, {**table, "link": profile["link"]} if "link" in profile else table


def _require_few(num_socs: int, where: str) -> None:
    if num_socs > MOST_SOCS:
        raise ConfigError(
            f"{where}: {num_socs} SoCs, of at most {MOST_SOCS} in a cluster; lower boards or their SoCs"
        )
