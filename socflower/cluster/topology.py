"""Boards, links and clusters: the positions of SoCs and the paths between them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from socflower.cluster.device import Device
from socflower.cluster.task_graph import Endpoint
from socflower.errors import ConfigError, require_range


class Tier(StrEnum):
    """How far a transfer travels; results count bytes by the highest tier they cross."""

    INTRA_BOARD = "intra_board"
    INTER_BOARD = "inter_board"
    HUB = "hub"
    WAN = "wan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """One PCB: SoCs of one kind behind a switch that shares one uplink. Rates are per direction."""

    num_slots: int
    device: Device
    soc_bytes_per_s: float
    uplink_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ConfigError(f"board: needs at least one SoC slot, got {self.num_slots}")
        require_range("board", above=0, soc_bytes_per_s=self.soc_bytes_per_s,
                      uplink_bytes_per_s=self.uplink_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Boards on one core switch, and servers (the hub) on the same switch.

    SoCs are numbered through all boards in order. Links are full duplex: each is two directed resources,
    `soc3/tx`, `soc3/rx`, `board0/up`, `board0/down`, `hub/tx`, `hub/rx`. Switches themselves never block.
    """

    name: str
    boards: tuple[Board, ...]
    hub_bytes_per_s: float
    message_s: float  # handling of one message of one tensor at each end

    def __post_init__(self) -> None:
        if not self.boards:
            raise ConfigError("cluster: needs at least one board")
        require_range("cluster", above=0, hub_bytes_per_s=self.hub_bytes_per_s)
        if not self.message_s >= 0:
            raise ConfigError(f"cluster: message_s must not be negative, got {self.message_s}")

    @cached_property
    def _first_soc(self) -> tuple[int, ...]:
        starts = [0]
        for board in self.boards:
            starts.append(starts[-1] + board.num_slots)
        return tuple(starts)

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
        for index, board in enumerate(self.boards):
            links[f"board{index}/up"] = links[f"board{index}/down"] = board.uplink_bytes_per_s
            for soc in self.socs_of(index):
                links[f"soc{soc}/tx"] = links[f"soc{soc}/rx"] = board.soc_bytes_per_s
        return links

    def path(self, source: Endpoint, target: Endpoint) -> tuple[str, ...]:
        """Return the directed links between two endpoints, in order; `ConfigError` for an unknown one."""
        if source == target:
            raise ConfigError(f"cluster {self.name}: a transfer from {source} to itself")
        leaving = self._to_core(source, "tx", "up")
        arriving = self._to_core(target, "rx", "down")
        if isinstance(source, int) and isinstance(target, int) and self.board_of(source) == self.board_of(target):
            return leaving[0], arriving[0]
        return (*leaving, *reversed(arriving))

    def tier(self, source: Endpoint, target: Endpoint) -> Tier:
        """Return the highest tier that a transfer between two endpoints crosses."""
        if isinstance(source, str) or isinstance(target, str):
            return Tier.HUB
        return Tier.INTRA_BOARD if self.board_of(source) == self.board_of(target) else Tier.INTER_BOARD

    def _to_core(self, endpoint: Endpoint, port: str, uplink: str) -> tuple[str, ...]:
        if isinstance(endpoint, int):
            return f"soc{endpoint}/{port}", f"board{self.board_of(endpoint)}/{uplink}"
        link = f"{endpoint}/{port}"
        if link not in self.link_bytes_per_s:
            raise ConfigError(f"cluster {self.name}: no server {endpoint!r}; it has 'hub'")
        return (link,)


def uniform_cluster(
    device: Device, slots_per_board: Sequence[int], *, soc_bytes_per_s: float, board_bytes_per_s: float,
    hub_bytes_per_s: float, message_s: float, name: str = "cluster",
) -> Cluster:
    """Return a cluster of one kind of device; `slots_per_board` holds the slots in use on each board."""
    boards = tuple(Board(num_slots=slots, device=device, soc_bytes_per_s=soc_bytes_per_s,
                         uplink_bytes_per_s=board_bytes_per_s) for slots in slots_per_board)
    return Cluster(name=name, boards=boards, hub_bytes_per_s=hub_bytes_per_s, message_s=message_s)
