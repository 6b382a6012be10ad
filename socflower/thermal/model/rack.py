"""The RC model of F21: a rack as a linear network of heat capacities and conductances, integrated exactly.

SoCs are coupled to their board, boards to the chassis air, and the chassis air to the ambient air.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.thermal.model.constants import constant

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """The effect of an interval of constant power on a network."""

    temperatures_c: Vector  # of the nodes, at the end
    mean_c: Vector  # of the nodes, over the interval
    heat_out_j: float  # into the ambient air


@dataclass(frozen=True, kw_only=True)
class ThermalNetwork:
    """Nodes with heat capacities (J/K), conductances between them and to the ambient air (W/K).

    `edges` are (node, node, conductance). C dT/dt = P - G (T - ambient), with the conductance Laplacian G and the
    ambient conductances on its diagonal. There is no time step: the matrix is diagonalised once, and any interval is
    computed in closed form.
    """

    capacities_j_per_k: tuple[float, ...]
    edges: tuple[tuple[int, int, float], ...]
    ambient_w_per_k: tuple[float, ...]

    def __post_init__(self) -> None:
        size = len(self.capacities_j_per_k)
        if not size or not all(0.0 < value < np.inf for value in self.capacities_j_per_k):
            raise ConfigError(
                f"thermal network: heat capacities must be above 0 and finite, got "
                f"{list(self.capacities_j_per_k)}"
            )
        if len(self.ambient_w_per_k) != size or not all(
            0.0 <= value < np.inf for value in self.ambient_w_per_k
        ):
            raise ConfigError(
                f"thermal network: need {size} conductances to the air, none negative, got "
                f"{list(self.ambient_w_per_k)}"
            )
        for left, right, conductance in self.edges:
            if not (
                0 <= left < size
                and 0 <= right < size
                and left != right
                and 0.0 < conductance < np.inf
            ):
                raise ConfigError(
                    f"thermal network: edge ({left}, {right}, {conductance}) needs two of the {size} "
                    "nodes and a conductance above 0"
                )
        if self._slowest <= 1e-12 * self._decomposition[0][-1]:
            raise ConfigError(
                "thermal network: a part of it has no way to the ambient air, and would heat up for "
                "ever; give it a conductance above 0"
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
        root = np.sqrt(np.array(self.capacities_j_per_k))
        rates, modes = np.linalg.eigh(self._matrix / np.outer(root, root))
        return rates, modes.T * root, (modes.T / root).T

    @property
    def _slowest(self) -> float:
        return float(self._decomposition[0][0])

    @property
    def slowest_s(self) -> float:
        """Time constant of the slowest mode; after five of them the initial state has no effect."""
        return 1.0 / self._slowest

    def steady_c(self, power_w: Sequence[float] | Vector, ambient_c: float) -> Vector:
        """Return the steady-state temperatures under constant power (watts by node)."""
        steady: Vector = ambient_c + np.linalg.solve(self._matrix, np.asarray(power_w, float))
        return steady

    def end_c(
        self, temperatures_c: Vector, power_w: Vector, ambient_c: float, duration_s: float
    ) -> Vector:
        """Return the temperatures after `duration_s` of constant power."""
        start, steady = self._modes(temperatures_c, power_w, ambient_c)
        end: Vector = ambient_c + self._decomposition[2] @ (
            steady + (start - steady) * self._decay(duration_s)
        )
        return end

    def pass_time(
        self, temperatures_c: Vector, power_w: Vector, ambient_c: float, duration_s: float
    ) -> Passage:
        """Return the effect of `duration_s` of constant power."""
        rates, _, from_modes = self._decomposition
        start, steady = self._modes(temperatures_c, power_w, ambient_c)
        end = steady + (start - steady) * self._decay(duration_s)
        # The mean of exp(-rate t) over the interval; 1 for an empty interval.
        mean_decay = np.where(
            rates * duration_s > 1e-12,
            -np.expm1(-rates * duration_s) / np.maximum(rates * duration_s, 1e-300),
            1.0,
        )
        mean_c = ambient_c + from_modes @ (steady + (start - steady) * mean_decay)
        return Passage(
            temperatures_c=ambient_c + from_modes @ end,
            mean_c=mean_c,
            heat_out_j=float(np.dot(self.ambient_w_per_k, mean_c - ambient_c)) * duration_s,
        )

    def _modes(
        self, temperatures_c: Vector, power_w: Vector, ambient_c: float
    ) -> tuple[Vector, Vector]:
        """Return the modes at the start, and in the steady state."""
        rates, to_modes, _ = self._decomposition
        return to_modes @ (temperatures_c - ambient_c), (
            to_modes @ (power_w / self._capacities)
        ) / rates

    def _decay(self, duration_s: float) -> Vector:
        """Return what is left of each mode; most intervals are as long as the one before."""
        known = self._last_decay.get(duration_s)
        if known is None:
            self._last_decay.clear()
            known = self._last_decay[duration_s] = np.exp(-self._decomposition[0] * duration_s)
        return known

    @cached_property
    def _capacities(self) -> Vector:
        return np.array(self.capacities_j_per_k)

    @cached_property
    def _last_decay(self) -> dict[float, Vector]:
        return {}

    def heat_j(self, temperatures_c: Vector, reference_c: float) -> float:
        """Return the heat stored above a reference temperature."""
        return float(np.dot(self.capacities_j_per_k, temperatures_c - reference_c))


@plain_numbers
@dataclass(frozen=True, kw_only=True)
class Rack:
    """One chassis: a node for each SoC, then one for each board, then the chassis with its air (F21).

    `slots_per_board` as in the cluster. `airflow` is a board's conductance relative to normal, where that is not 1:
    behind a cable, under a blocked grille. `coupling` is the same for single SoCs, such as badly seated ones.
    """

    slots_per_board: tuple[int, ...]
    soc_to_board_w_per_k: float = field(
        default_factory=lambda: constant("rack", "soc_to_board_w_per_k")
    )
    board_to_air_w_per_k: float = field(
        default_factory=lambda: constant("rack", "board_to_air_w_per_k")
    )
    soc_j_per_k: float = field(default_factory=lambda: constant("rack", "soc_j_per_k"))
    board_j_per_k: float = field(default_factory=lambda: constant("rack", "board_j_per_k"))
    chassis_j_per_k: float = field(default_factory=lambda: constant("rack", "chassis_j_per_k"))
    airflow: Mapping[int, float] = field(default_factory=dict)  # by board
    coupling: Mapping[int, float] = field(default_factory=dict)  # by SoC

    def __post_init__(self) -> None:
        if not self.slots_per_board or min(self.slots_per_board) < 1:
            raise ConfigError(
                f"rack: every board needs at least one slot, got {list(self.slots_per_board)}"
            )
        for name, parts, count in (
            ("airflow", self.airflow, len(self.slots_per_board)),
            ("coupling", self.coupling, self.num_socs),
        ):
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
        """Return the network for this conductance from the chassis air to the ambient air."""
        num_boards = len(self.slots_per_board)
        return ThermalNetwork(
            capacities_j_per_k=(
                *(self.soc_j_per_k,) * self.num_socs,
                *(self.board_j_per_k,) * num_boards,
                self.chassis_j_per_k,
            ),
            edges=self._edges,
            ambient_w_per_k=(*(0.0,) * (self.num_socs + num_boards), chassis_w_per_k),
        )

    def local_rise_c(self, soc_w: float, num_busy_on_board: int) -> float:
        """Return a SoC's steady temperature above the chassis air, for equally busy SoCs on its board."""
        return (
            soc_w / self.soc_to_board_w_per_k
            + soc_w * num_busy_on_board / self.board_to_air_w_per_k
        )

    def node_power_w(self, soc_w: Sequence[float]) -> list[float]:
        """Return watts by node where only SoCs draw power."""
        if len(soc_w) != self.num_socs:
            raise ConfigError(f"rack: {len(soc_w)} powers for {self.num_socs} SoCs")
        return [*soc_w, *(0.0,) * (len(self.slots_per_board) + 1)]
