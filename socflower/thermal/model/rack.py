"""The RC model of F21: a rack as a linear network of heat capacities and conductances, integrated exactly.

SoCs are coupled to their board, boards to the chassis air, and the chassis air to the ambient air.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import Positive, checked
from socflower.thermal.model.constants import constant

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ThermalNetwork:
    """Nodes with heat capacities (J/K), conductances between them and to the ambient air (W/K), all above 0.

    `edges` are (node, node, conductance). C dT/dt = P - G (T - ambient), with the conductance Laplacian G and the
    ambient conductances on its diagonal. There is no time step: the matrix is diagonalised once, and any interval is
    computed in closed form. Every part needs a way to the ambient air.
    """

    capacities_j_per_k: tuple[float, ...]
    edges: tuple[tuple[int, int, float], ...]
    ambient_w_per_k: tuple[float, ...]

    def __post_init__(self) -> None:
        rates = self._decomposition[0]
        # Beyond it temperatures would be rounding errors, or NaN.
        if not rates[0] > 1e-12 * rates[-1]:
            raise ConfigError(
                "rack: some heat capacities or conductances are too far from the others to be computed; "
                "give airflow and coupling nearer to 1"
            )

    @cached_property
    def _matrix(self) -> Vector:
        matrix = np.diag(np.array(self.ambient_w_per_k, float))
        for left, right, conductance in self.edges:
            matrix[left, left] += conductance
            matrix[right, right] += conductance
            matrix[left, right] -= conductance
            matrix[right, left] -= conductance
        return matrix

    @cached_property
    def _decomposition(self) -> tuple[Vector, Vector, Vector]:
        """Return rates (1/s, ascending), and the matrices to and from modes."""
        # Scaled by the square roots, the matrix is symmetric, so that its modes are orthogonal.
        root = np.sqrt(self._capacities)
        scaled = self._matrix / np.outer(root, root)
        rates, modes = np.linalg.eigh(scaled)
        return rates, modes.T * root, (modes.T / root).T

    def steady_c(self, power_w: Sequence[float] | Vector, ambient_c: float) -> Vector:
        """Return the steady-state temperatures under constant power (watts by node)."""
        heat_w = np.asarray(power_w, float)
        steady: Vector = ambient_c + np.linalg.solve(self._matrix, heat_w)
        return steady

    def end_c(
        self,
        temperatures_c: Vector,
        power_w: Vector,
        ambient_c: float,
        duration_s: float,
    ) -> Vector:
        """Return the temperatures after `duration_s` of constant power."""
        rates, to_modes, from_modes = self._decomposition
        start = to_modes @ (temperatures_c - ambient_c)
        steady = (to_modes @ (power_w / self._capacities)) / rates
        modes = steady + (start - steady) * self._decay(duration_s)
        end: Vector = ambient_c + from_modes @ modes
        return end

    def _decay(self, duration_s: float) -> Vector:
        """Return the remaining part of each mode; most intervals are as long as the one before."""
        known = self._last_decay.get(duration_s)
        if known is None:
            self._last_decay.clear()
            rates = self._decomposition[0]
            known = np.exp(-rates * duration_s)
            self._last_decay[duration_s] = known
        return known

    @cached_property
    def _capacities(self) -> Vector:
        return np.array(self.capacities_j_per_k)

    @cached_property
    def _last_decay(self) -> dict[float, Vector]:
        return {}


_Slots = Annotated[int, Field(ge=1)]


def _of_rack(name: str) -> Any:
    return field(default_factory=lambda: constant("rack", name))


@checked
class Rack:
    """One chassis: a node for each SoC, then one for each board, then the chassis with its air (F21).

    `slots_per_board` as in the cluster. `airflow` is a board's conductance relative to normal, if that is not 1: behind
    a cable, under a blocked grille. `coupling` is the same for single SoCs, such as badly seated ones.
    """

    slots_per_board: Annotated[tuple[_Slots, ...], Field(min_length=1)]
    soc_to_board_w_per_k: Positive = _of_rack("soc_to_board_w_per_k")
    board_to_air_w_per_k: Positive = _of_rack("board_to_air_w_per_k")
    soc_j_per_k: Positive = _of_rack("soc_j_per_k")
    board_j_per_k: Positive = _of_rack("board_j_per_k")
    chassis_j_per_k: Positive = _of_rack("chassis_j_per_k")
    # By board, and by SoC.
    airflow: Mapping[int, Positive] = field(default_factory=dict)
    coupling: Mapping[int, Positive] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse boards and SoCs that the rack does not have."""
        for name, parts, count in (
            ("airflow", self.airflow, len(self.slots_per_board)),
            ("coupling", self.coupling, self.num_socs),
        ):
            for index in parts:
                if not 0 <= index < count:
                    raise ConfigError(f"{name} of {index}, but there are 0 to {count - 1}")

    @property
    def num_socs(self) -> int:
        """Slots over all boards."""
        return sum(self.slots_per_board)

    @property
    def num_nodes(self) -> int:
        """SoCs, boards and the chassis."""
        return self.num_socs + len(self.slots_per_board) + 1

    @property
    def total_j_per_k(self) -> float:
        """The heat capacity of everything."""
        boards_j_per_k = len(self.slots_per_board) * self.board_j_per_k
        return self.chassis_j_per_k + boards_j_per_k + self.num_socs * self.soc_j_per_k

    @property
    def _edges(self) -> tuple[tuple[int, int, float], ...]:
        chassis = self.num_nodes - 1
        edges: list[tuple[int, int, float]] = []
        soc = 0
        for board, slots in enumerate(self.slots_per_board):
            node = self.num_socs + board
            to_air_w_per_k = self.board_to_air_w_per_k * self.airflow.get(board, 1.0)
            edges.append((node, chassis, to_air_w_per_k))
            for _ in range(slots):
                to_board_w_per_k = self.soc_to_board_w_per_k * self.coupling.get(soc, 1.0)
                edges.append((soc, node, to_board_w_per_k))
                soc += 1
        return tuple(edges)

    def network(self, chassis_w_per_k: float) -> ThermalNetwork:
        """Return the network for this conductance from the chassis air to the ambient air."""
        num_socs = self.num_socs
        num_boards = len(self.slots_per_board)
        socs_j_per_k = (self.soc_j_per_k,) * num_socs
        boards_j_per_k = (self.board_j_per_k,) * num_boards
        return ThermalNetwork(
            capacities_j_per_k=(*socs_j_per_k, *boards_j_per_k, self.chassis_j_per_k),
            edges=self._edges,
            ambient_w_per_k=(*(0.0,) * (num_socs + num_boards), chassis_w_per_k),
        )

    def local_rise_c(self, soc_w: float, num_busy_on_board: int) -> float:
        """Return a SoC's steady temperature above the chassis air, for equally busy SoCs on its board."""
        above_board_c = soc_w / self.soc_to_board_w_per_k
        return above_board_c + soc_w * num_busy_on_board / self.board_to_air_w_per_k

    def node_power_w(self, soc_w: Sequence[float]) -> list[float]:
        """Return watts by node; only SoCs draw power."""
        if len(soc_w) != self.num_socs:
            raise ConfigError(f"rack: {len(soc_w)} powers for {self.num_socs} SoCs")
        return [*soc_w, *(0.0,) * (len(self.slots_per_board) + 1)]


def modelled_rack() -> Rack:
    """Return the rack of 60 SoCs that the constants are of."""
    num_boards = int(constant("experiment", "num_boards"))
    return Rack(slots_per_board=(int(constant("experiment", "socs_per_board")),) * num_boards)
