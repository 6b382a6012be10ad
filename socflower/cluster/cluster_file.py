"""Clusters from TOML: `[cluster]` for a rack of one kind, `[[board]]` tables for a mixed one, `[site]` for several.

A device is named by the catalogue, by a `[device.NAME]` table of the same file, or by the path of a device profile.
Profiles are read once and become such tables, so the resolved tables need no other file.
"""

from collections.abc import Mapping, Sequence
from functools import partial
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
        if isinstance(self.boards, int):
            return
        if "socs_per_board" in self.model_fields_set:
            raise ValueError(f"boards = {list(self.boards)} lists the slots; drop socs_per_board")
        if not any(self.boards):
            raise ValueError(f"boards = {list(self.boards)} has no SoC in use")

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


class SiteTable(Table):
    """`[site]`: servers that each have the boards of this file"""

    servers: Count = Field(description="how many")
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
    # None: one server.
    site: SiteTable | None = None
    devices: dict[str, DeviceTable] = Field({}, alias="device")

    def check(self) -> None:
        """Refuse two lists of boards, too many SoCs, and invalid devices."""
        if self.boards and "boards" in self.cluster.model_fields_set:
            raise ValueError(
                f"[cluster] boards = {self.cluster.boards} and [[board]] tables exclude each other"
            )
        slots = self.cluster.boards
        # A number of boards may be too large to list them.
        own = slots * self.cluster.socs_per_board if isinstance(slots, int) else sum(slots)
        if self.boards:
            own = sum(each.count * each.socs for each in self.boards)
        num_socs = own * (self.site.servers if self.site else 1)
        where = "[[board]]" if self.boards else "[cluster] boards"
        require_range("[site]" if self.site else where, most=MOST_SOCS, num_socs=num_socs)
        for name in self.devices.keys() & set(device_names()):
            raise ValueError(f"[device.{name}] is in the catalogue; call yours [device.my-{name}]")
        check_devices(self.devices)


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
    if isinstance(document.get("board"), list | tuple):
        document["board"] = [resolved(entry) for entry in document["board"]]


def make_cluster(file: ClusterFile, where: str) -> Cluster:
    """Return the cluster of validated tables; `ConfigError` if a device is unknown."""
    table, makers = file.cluster, _BoardMaker(file, where)
    boards: list[Board] = []
    for group in file.boards:
        boards += makers.boards([group.socs], group.device) * group.count
    boards = boards or makers.boards(table.slots, table.device)
    servers: list[Server] = []
    if file.site is not None:
        uplink = file.site.server_bytes_per_s or max(each.uplink_bytes_per_s for each in boards)
        servers = [Server(num_boards=len(boards), uplink_bytes_per_s=uplink)] * file.site.servers
        boards = boards * file.site.servers
    link = makers.links.get(table.device)
    return Cluster(
        name=table.name,
        boards=tuple(boards),
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

    def boards(self, slots_per_board: Sequence[int], device_name: str | None) -> list[Board]:
        """Return boards of a device, one for each entry of `slots_per_board`."""
        whole, name = self._table, device_name or self._table.device
        link = self.links.get(name)
        default = whole.soc_bytes_per_s or (link.bytes_per_s.value if link else link_bytes_per_s())
        made = partial(
            Board,
            device=self._device(name),
            soc_bytes_per_s=default,
            uplink_bytes_per_s=whole.board_bytes_per_s or default,
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


_LEAST_RATE, _MOST_RATE, _LEAST_MEMORY = 1e3, 1e12, 1e6
"""Bytes per second of a link, and bytes of a memory, beyond which a figure is likely in another unit."""


def doubtful_figures(cluster: Cluster) -> list[str]:
    """Return a line for each kind of figure of a cluster that can hardly be meant, with what it may be instead."""
    found: dict[str, None] = {}
    for link, rate in cluster.link_bytes_per_s.items():
        kind = link.partition("/")[0].rstrip("0123456789")
        if not _LEAST_RATE <= rate <= _MOST_RATE:
            found[
                f"a link of a {kind} has {rate:g} bytes per second; is that the figure in another unit?"
            ] = None
    for board in cluster.boards:
        device = board.device
        if device.memory_bytes < _LEAST_MEMORY:
            found[
                f"{device.name} has memory_bytes = {device.memory_bytes:g}; write bytes, not MB or GB"
            ] = None
        for processor in device.processors.values():
            if processor.active_w < device.idle_w:
                found[
                    f"{device.name} draws {processor.active_w:g} W while its {processor.name} trains, and "
                    f"{device.idle_w:g} W at rest; are active_w and idle_w exchanged?"
                ] = None
    return list(found)
