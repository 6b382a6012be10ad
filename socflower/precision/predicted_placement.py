"""Placement of operators on the NPU or the CPU: the dynamic program of Mandheling §3.3 (F17).

The NPU side is the int8 engine and the CPU side is torch FP32; the dynamic program reads only latencies.

Training follows a placement by `fp32_operators=placement.on_cpu`; a scenario reads it from a file of
`socflower profile`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

from socflower.errors import InfeasiblePlan

Side = Literal["cpu", "npu"]
SIDES: tuple[Side, Side] = ("npu", "cpu")
"""In order of preference: the NPU uses a third of the CPU's energy, so ties go to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorLatency:
    """Seconds of one operator, forward and backward, on each side; infinity if a side cannot run it."""

    name: str
    cpu_s: float
    npu_s: float

    def on(self, side: Side) -> float:
        """Return the latency on a side."""
        return self.cpu_s if side == "cpu" else self.npu_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPlacement:
    """A side for every operator, in order, and the total latency."""

    operators: tuple[str, ...]
    sides: tuple[Side, ...]
    latency_s: float

    @property
    def on_cpu(self) -> tuple[str, ...]:
        """Names of the operators on the CPU side, as `fp32_operators` of trainers takes them."""
        placed = zip(self.operators, self.sides, strict=True)
        return tuple(name for name, side in placed if side == "cpu")

    def path(self) -> str:
        """Return the placement as text, such as "npu[conv1..relu2] -> cpu[gelu]"."""
        runs = []
        placed = zip(self.operators, self.sides, strict=True)
        for side, run in groupby(placed, key=itemgetter(1)):
            first, *others = [name for name, _ in run]
            last = f"..{others[-1]}" if others else ""
            runs.append(f"{side}[{first}{last}]")
        return " -> ".join(runs)


def place(latencies: Sequence[OperatorLatency], switches_s: Sequence[float]) -> OperatorPlacement:
    """Return the placement of lowest latency for operators that run one after another (F17).

    T[i+1, p] = min over q of T[i, q] + L[i+1, p] + (p != q) * switches_s[i]; the answer is min over p of T[n, p].
    The paper has one switch time for all; here each operator but the last has its own, since the output of a wide
    layer takes longer to transfer than that of a narrow one. The input and the output may be on either side at no
    cost. Ties go to the NPU. Raises InfeasiblePlan, with the operator's name, if neither side can run it.
    """
    for latency in latencies:
        if min(latency.cpu_s, latency.npu_s) == math.inf:
            raise InfeasiblePlan(f"{latency.name}: neither the CPU nor the NPU has this operator")
    # The least latency of the operators so far, and their sides, by the side of the last one.
    best: dict[Side, tuple[float, tuple[Side, ...]]] = {
        side: (latencies[0].on(side), (side,)) for side in SIDES
    }
    for latency, switch_s in zip(latencies[1:], switches_s, strict=True):
        reached = {}
        for side in SIDES:
            other = SIDES[1 - SIDES.index(side)]
            stay_s = best[side][0]
            change_s = best[other][0] + switch_s
            origin = side if stay_s <= change_s else other
            total_s = min(stay_s, change_s) + latency.on(side)
            reached[side] = (total_s, (*best[origin][1], side))
        best = reached
    # `min` returns the first of equal values, so ties go to the first of SIDES.
    latency_s, sides = min((best[side] for side in SIDES), key=itemgetter(0))
    names = tuple(latency.name for latency in latencies)
    return OperatorPlacement(operators=names, sides=sides, latency_s=latency_s)
