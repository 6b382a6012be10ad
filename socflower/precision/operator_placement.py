"""Placement of operators on the NPU or the CPU: the dynamic program of Mandheling §3.3 (F17).

The NPU side is the int8 engine and the CPU side is torch FP32; the dynamic program reads only latencies.

The placement is a prediction: `socflower profile` writes it beside the measured latencies, and training does not read
it. Training runs every operator in int8 except those that `fp32_operators` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from socflower.errors import ConfigError, InfeasiblePlan

Side = Literal["cpu", "npu"]
SIDES: tuple[Side, Side] = ("npu", "cpu")
"""In order of preference: the NPU uses a third of the CPU's energy, so ties go to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorLatency:
    """Seconds of one operator, forward and backward, on each side; infinity where it has no implementation."""

    name: str
    cpu_s: float
    npu_s: float

    def __post_init__(self) -> None:
        if not (self.cpu_s >= 0.0 and self.npu_s >= 0.0):
            raise ConfigError(
                f"{self.name}: latencies must be 0 or more, got {self.cpu_s} and {self.npu_s}"
            )

    def on(self, side: Side) -> float:
        """Return the latency on a side."""
        return self.cpu_s if side == "cpu" else self.npu_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPlacement:
    """A side for every operator, in order, and the total latency."""

    operators: tuple[str, ...]
    sides: tuple[Side, ...]
    latency_s: float
    num_switches: int

    @property
    def on_cpu(self) -> tuple[str, ...]:
        """Names of the operators on the CPU side."""
        return tuple(
            name for name, side in zip(self.operators, self.sides, strict=True) if side == "cpu"
        )

    def path(self) -> str:
        """Return the placement as readable text: runs of operators per side, in order."""
        runs: list[tuple[Side, list[str]]] = []
        for name, side in zip(self.operators, self.sides, strict=True):
            if not runs or runs[-1][0] != side:
                runs.append((side, []))
            runs[-1][1].append(name)
        spans = [names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}" for _, names in runs]
        return " -> ".join(f"{side}[{span}]" for (side, _), span in zip(runs, spans, strict=True))


def place(
    latencies: Sequence[OperatorLatency], switch_s: float | Sequence[float]
) -> OperatorPlacement:
    """Return the placement of lowest latency for operators that run one after another.

    T[i+1, p] = min over q of T[i, q] + L[i+1, p] + (p != q) * switch_s; the answer is min over p of T[n, p] (F17).
    `switch_s` is one number, as in the paper, or one for each operator but the last: the output of a wide layer takes
    longer to transfer than that of a narrow one. The input and the output may be on either side at no cost. Ties go to
    the NPU. Raises InfeasiblePlan, with the operator's name, if neither side has an implementation.
    """
    if not latencies:
        raise ConfigError("placement: there are no operators")
    gaps = len(latencies) - 1
    given = [float(switch_s)] if isinstance(switch_s, int | float) else list(switch_s)
    switches = given * gaps if isinstance(switch_s, int | float) else given
    if len(switches) != gaps:
        raise ConfigError(
            f"placement: need {gaps} switches between {len(latencies)} operators, got {len(switches)}"
        )
    for switch in given:
        if not (switch >= 0.0 and math.isfinite(switch)):
            raise ConfigError(f"placement: switch_s must be 0 or more, got {switch}")
    for latency in latencies:
        if math.isinf(latency.cpu_s) and math.isinf(latency.npu_s):
            raise InfeasiblePlan(f"{latency.name}: neither the CPU nor the NPU has this operator")
    best: dict[Side, float] = {side: latencies[0].on(side) for side in SIDES}
    came_from: list[dict[Side, Side]] = []
    for latency, switch in zip(latencies[1:], switches, strict=True):
        reached: dict[Side, float] = {}
        origin: dict[Side, Side] = {}
        for side in SIDES:
            # The same side first, then in order of preference: min returns the first of equal values.
            origins = sorted(SIDES, key=lambda other: (other != side, SIDES.index(other)))
            arrival = {other: best[other] + (switch if other != side else 0.0) for other in origins}
            origin[side] = min(origins, key=arrival.__getitem__)
            reached[side] = arrival[origin[side]] + latency.on(side)
        came_from.append(origin)
        best = reached
    side = min(SIDES, key=lambda candidate: best[candidate])
    latency_s = best[side]
    sides = [side]
    for origin in reversed(came_from):
        side = origin[side]
        sides.append(side)
    sides.reverse()
    return OperatorPlacement(
        operators=tuple(latency.name for latency in latencies),
        sides=tuple(sides),
        latency_s=latency_s,
        num_switches=sum(a != b for a, b in pairwise(sides)),
    )
