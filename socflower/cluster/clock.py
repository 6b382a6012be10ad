"""Protocols between who plans and who keeps virtual time: neither imports the other, `scenario` joins them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from socflower.cluster.tasks import Activity, TaskGraph
from socflower.cluster.topology import Tier

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What executing a graph took: virtual seconds, and where SoC-seconds, joules and bytes went.

    `soc_seconds` and `energy_j` sum over the participating SoCs; a SoC that computes while it sends
    counts as computing. `num_bytes` counts every transfer once, under the highest tier it crosses.
    """

    duration_s: float = 0.0
    soc_seconds: Mapping[Activity, float] = field(default_factory=dict)
    energy_j: Mapping[Activity, float] = field(default_factory=dict)
    num_bytes: Mapping[Tier, float] = field(default_factory=dict)

    @property
    def total_energy_j(self) -> float:
        """Joules over all activities."""
        return sum(self.energy_j.values())

    def __add__(self, other: "Usage") -> "Usage":
        """Return the usage of both, one after the other."""
        return Usage(
            duration_s=self.duration_s + other.duration_s,
            soc_seconds=_sum(self.soc_seconds, other.soc_seconds),
            energy_j=_sum(self.energy_j, other.energy_j),
            num_bytes=_sum(self.num_bytes, other.num_bytes),
        )


class VirtualClock(Protocol):
    """Executes task graphs in virtual time; strategies are handed one and emit graphs to it."""

    @property
    def now_s(self) -> float:
        """Virtual seconds since the clock's start."""
        ...

    def run(self, graph: TaskGraph, *, repeat: int = 1, label: str = "") -> Usage:
        """Execute `graph` `repeat` times, repetitions overlapping as its dependencies allow, and advance."""
        ...


class DeviceDynamics(Protocol):
    """How fast each SoC runs as time and load go by (heat, clocks, user load); `sim` asks, `thermal` answers."""

    def speed_factors(self) -> Sequence[float]:
        """Return each SoC's present speed as a fraction of its profile's, in SoC order; each above 0."""
        ...

    def steady_s(self, power_w: Sequence[float]) -> float:
        """Return how long the present factors hold under this load (watts per SoC); `math.inf` if for good."""
        ...

    def advance(self, duration_s: float, power_w: Sequence[float]) -> None:
        """Let `duration_s` pass under this mean load (watts per SoC)."""
        ...


def _sum(left: Mapping[_Key, float], right: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *right)}
