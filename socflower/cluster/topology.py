"""Boards, servers, links and clusters: the positions of SoCs and the paths between them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from socflower.cluster.device import Device
from socflower.cluster.task_graph import Endpoint
from socflower.errors import ConfigError, require_range
from socflower.field_rules import checked
from socflower.plain_numbers import plain_numbers


class Tier(StrEnum):
    """How far a transfer travels; results count bytes by the highest tier they cross."""

    INTRA_BOARD = "intra_board"
    INTER_BOARD = "inter_board"
    INTER_SERVER = "inter_server"
    HUB = "hub"
    WAN = "wan"


Rate = Annotated[float, Field(gt=0)]
"""Bytes per second in each direction."""


@checked
class Board:
    """One PCB: SoCs of one kind behind a switch that shares one uplink."""

    num_slots: Annotated[int, Field(ge=1)]
    device: Device
    soc_bytes_per_s: Rate
    uplink_bytes_per_s: Rate


@checked
class Server:
    """Boards on one core switch, which shares one uplink to the site's switch."""

    num_boards: Annotated[int, Field(ge=1)]
    uplink_bytes_per_s: Rate


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Boards on one core switch, or on the core switches of several servers; and the hub.

    The hub is attached to the core switch, or to the site's switch that joins several servers. SoCs are numbered
    through all boards in order, and boards through all servers. Links are full duplex: each is two directed resources,
    `soc3/tx`, `soc3/rx`, `board0/up`, `board0/down`, `server0/up`, `server0/down`, `hub/tx`, `hub/rx`. Switches
    themselves never block.
    """

    name: str
    boards: tuple[Board, ...]
    hub_bytes_per_s: float
    # Handling of one message of one tensor, at each end.
    message_s: float
    # The servers of a site, each with the next boards; empty: one server without an uplink.
    servers: tuple[Server, ...] = ()

    def __post_init__(self) -> None:
        require_range("cluster", above=0, hub_bytes_per_s=self.hub_bytes_per_s)
        require_range("cluster", least=0, message_s=self.message_s)
        num_boards = sum(server.num_boards for server in self.servers) or max(1, len(self.boards))
        if num_boards != len(self.boards):
            raise ConfigError(f"cluster: needs {num_boards} boards, got {len(self.boards)}")

    @cached_property
    def _first_soc(self) -> tuple[int, ...]:
        return tuple(accumulate((board.num_slots for board in self.boards), initial=0))

    @property
    def num_socs(self) -> int:
        """Number of slots over all boards."""
        return self._first_soc[-1]

    @property
    def slots_per_board(self) -> tuple[int, ...]:
        """Number of slots of each board."""
        return tuple(board.num_slots for board in self.boards)

    def board_of(self, soc: int) -> int:
        """Return the index of the board that carries a SoC."""
        if not 0 <= soc < self.num_socs:
            raise ConfigError(f"cluster {self.name}: no SoC {soc}; it has 0 to {self.num_socs - 1}")
        return bisect_right(self._first_soc, soc) - 1

    @cached_property
    def _first_board(self) -> tuple[int, ...]:
        return tuple(accumulate((server.num_boards for server in self.servers), initial=0))

    def server_of(self, board: int) -> int:
        """Return the index of the server that has a board; 0 if there is only one server."""
        return bisect_right(self._first_board, board) - 1 if self.servers else 0

    def socs_of(self, board: int) -> range:
        """Return the SoCs of a board, in slot order."""
        return range(self._first_soc[board], self._first_soc[board + 1])

    def device_of(self, soc: int) -> Device:
        """Return the kind of device in a slot."""
        return self.boards[self.board_of(soc)].device

    @cached_property
    def link_bytes_per_s(self) -> dict[str, float]:
        """Capacity of every directed link by name."""
        links: dict[str, float] = {"hub/tx": self.hub_bytes_per_s, "hub/rx": self.hub_bytes_per_s}
        for index, server in enumerate(self.servers):
            links[f"server{index}/up"] = links[f"server{index}/down"] = server.uplink_bytes_per_s
        for index, board in enumerate(self.boards):
            links[f"board{index}/up"] = links[f"board{index}/down"] = board.uplink_bytes_per_s
            for soc in self.socs_of(index):
                links[f"soc{soc}/tx"] = links[f"soc{soc}/rx"] = board.soc_bytes_per_s
        return links

    def path(self, source: Endpoint, target: Endpoint) -> tuple[str, ...]:
        """Return the directed links between two endpoints, in order; `ConfigError` for an unknown one."""
        if (source, target) not in self._paths:
            self._paths[source, target] = self._path(source, target)
        return self._paths[source, target]

    @cached_property
    def _paths(self) -> dict[tuple[Endpoint, Endpoint], tuple[str, ...]]:
        return {}

    def _path(self, source: Endpoint, target: Endpoint) -> tuple[str, ...]:
        if source == target:
            raise ConfigError(f"cluster {self.name}: a transfer from {source} to itself")
        leaving = self._to_top(source, "tx", "up")
        arriving = self._to_top(target, "rx", "down")
        # Paths go up only as far as the lowest switch above both ends.
        num_links = {Tier.INTRA_BOARD: 1, Tier.INTER_BOARD: 2}.get(self.tier(source, target))
        return (*leaving[:num_links], *reversed(arriving[:num_links]))

    def tier(self, source: Endpoint, target: Endpoint) -> Tier:
        """Return the highest tier that a transfer between two endpoints crosses."""
        if isinstance(source, str) or isinstance(target, str):
            return Tier.HUB
        near, far = self.board_of(source), self.board_of(target)
        if near == far:
            return Tier.INTRA_BOARD
        same_server = self.server_of(near) == self.server_of(far)
        return Tier.INTER_BOARD if same_server else Tier.INTER_SERVER

    def _to_top(self, endpoint: Endpoint, port: str, uplink: str) -> tuple[str, ...]:
        """Return the links from an endpoint to the switch that all endpoints share."""
        if isinstance(endpoint, int):
            board = self.board_of(endpoint)
            links = f"soc{endpoint}/{port}", f"board{board}/{uplink}"
            return (*links, f"server{self.server_of(board)}/{uplink}") if self.servers else links
        link = f"{endpoint}/{port}"
        if link not in self.link_bytes_per_s:
            raise ConfigError(f"cluster {self.name}: no server {endpoint!r}; it has 'hub'")
        return (link,)


def uniform_cluster(
    device: Device,
    slots_per_board: Sequence[int],
    *,
    soc_bytes_per_s: float,
    board_bytes_per_s: float,
    hub_bytes_per_s: float,
    message_s: float,
    name: str = "cluster",
) -> Cluster:
    """Return a cluster of one kind of device; `slots_per_board` holds the slots in use on each board."""
    boards = tuple(
        Board(
            num_slots=slots,
            device=device,
            soc_bytes_per_s=soc_bytes_per_s,
            uplink_bytes_per_s=board_bytes_per_s,
        )
        for slots in slots_per_board
    )
    return Cluster(name=name, boards=boards, hub_bytes_per_s=hub_bytes_per_s, message_s=message_s)
