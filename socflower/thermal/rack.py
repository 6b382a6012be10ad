"""A rack as a thermal network: its SoCs on boards, the boards in the chassis's air, and that in the ambient air."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from socflower.errors import ConfigError
from socflower.thermal.constants import constant
from socflower.thermal.model import ThermalNetwork


@dataclass(frozen=True, kw_only=True)
class Rack:
    """One chassis: a node for each SoC, then one for each board, then the chassis with its air (F21).

    `slots_per_board` as in the cluster. `airflow` is the part of its normal conductance that a board has, where that is
    not 1: behind a cable, under a blocked grille. `coupling` is the same of single SoCs, badly seated ones.
    """

    slots_per_board: tuple[int, ...]
    soc_to_board_w_per_k: float = field(default_factory=lambda: constant("rack", "soc_to_board_w_per_k"))
    board_to_air_w_per_k: float = field(default_factory=lambda: constant("rack", "board_to_air_w_per_k"))
    soc_j_per_k: float = field(default_factory=lambda: constant("rack", "soc_j_per_k"))
    board_j_per_k: float = field(default_factory=lambda: constant("rack", "board_j_per_k"))
    chassis_j_per_k: float = field(default_factory=lambda: constant("rack", "chassis_j_per_k"))
    airflow: Mapping[int, float] = field(default_factory=dict)  # by board
    coupling: Mapping[int, float] = field(default_factory=dict)  # by SoC

    def __post_init__(self) -> None:
        if not self.slots_per_board or min(self.slots_per_board) < 1:
            raise ConfigError(f"rack: every board needs at least one slot, got {list(self.slots_per_board)}")
        for name, parts, count in (("airflow", self.airflow, len(self.slots_per_board)),
                                   ("coupling", self.coupling, self.num_socs)):
            for index, part in parts.items():
                if not 0 <= index < count:
                    raise ConfigError(f"rack: {name} of {index}, but there are 0 to {count - 1}")
                if not 0.0 < part < math.inf:
                    raise ConfigError(f"rack: {name} of {index} = {part} must be above 0")

    @property
    def num_socs(self) -> int:
        """Slots over all boards."""
        return sum(self.slots_per_board)

    @property
    def num_nodes(self) -> int:
        """SoCs, boards and the chassis."""
        return self.num_socs + len(self.slots_per_board) + 1

    @cached_property
    def _edges(self) -> tuple[tuple[int, int, float], ...]:
        chassis = self.num_nodes - 1
        edges, soc = [], 0
        for board, slots in enumerate(self.slots_per_board):
            node = self.num_socs + board
            edges.append((node, chassis, self.board_to_air_w_per_k * self.airflow.get(board, 1.0)))
            for _ in range(slots):
                edges.append((soc, node, self.soc_to_board_w_per_k * self.coupling.get(soc, 1.0)))
                soc += 1
        return tuple(edges)

    def network(self, chassis_w_per_k: float) -> ThermalNetwork:
        """Return the network where the fans carry away so much from the chassis's air."""
        num_boards = len(self.slots_per_board)
        return ThermalNetwork(
            capacities_j_per_k=(*(self.soc_j_per_k,) * self.num_socs, *(self.board_j_per_k,) * num_boards,
                                self.chassis_j_per_k),
            edges=self._edges, ambient_w_per_k=(*(0.0,) * (self.num_socs + num_boards), chassis_w_per_k))

    def local_rise_c(self, soc_w: float, num_busy_on_board: int) -> float:
        """Return how much warmer than the chassis's air a SoC of a board of equally busy ones settles."""
        return soc_w / self.soc_to_board_w_per_k + soc_w * num_busy_on_board / self.board_to_air_w_per_k

    def node_power_w(self, soc_w: Sequence[float]) -> list[float]:
        """Return watts by node where only SoCs draw any."""
        if len(soc_w) != self.num_socs:
            raise ConfigError(f"rack: {len(soc_w)} powers for {self.num_socs} SoCs")
        return [*soc_w, *(0.0,) * (len(self.slots_per_board) + 1)]
