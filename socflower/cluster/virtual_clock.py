"""Protocols between who plans and who keeps virtual time: neither imports the other, `scenario` joins them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from socflower.cluster.task_graph import Activity, TaskGraph
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

    def __mul__(self, count: int) -> "Usage":
        """Return the usage of `count` of these, one after the other."""
        return Usage(
            duration_s=self.duration_s * count,
            soc_seconds={key: value * count for key, value in self.soc_seconds.items()},
            energy_j={key: value * count for key, value in self.energy_j.items()},
            num_bytes={key: value * count for key, value in self.num_bytes.items()},
        )


@dataclass(slots=True)
class Pace:
    """How far SoCs have come with a repeated graph, parts of which never wait for each other, while speeds change.

    SoCs of one part are always equally far. A repetition that is under way when speeds change is executed as it began:
    its part is ahead of the clock then.
    """

    left: dict[int, int]  # repetitions that each SoC has still to begin
    ahead_s: dict[int, float] = field(default_factory=dict)  # from the clock to the end of the one under way
    under_way_w: dict[int, float] = field(default_factory=dict)  # what each SoC draws for that

    @property
    def done(self) -> bool:
        """Whether no SoC has anything left to do."""
        return not any(self.left.values()) and not any(ahead_s > 0.0 for ahead_s in self.ahead_s.values())


class VirtualClock(Protocol):
    """Executes task graphs in virtual time; strategies are handed one and emit graphs to it."""

    @property
    def now_s(self) -> float:
        """Virtual seconds since the clock's start."""
        ...

    @property
    def changes(self) -> bool:
        """Whether speeds and users of SoCs change with time; if not, neither of the following has anything to say."""
        ...

    def speed_factors(self) -> Sequence[float]:
        """Return each SoC's present speed as a fraction of its profile's, in SoC order, as its step times show it."""
        ...

    def taken_socs(self) -> Collection[int]:
        """Return the SoCs that training has to leave to their users now."""
        ...

    def run(self, graph: TaskGraph, *, repeat: int = 1, label: str = "") -> Usage:
        """Execute `graph` `repeat` times, repetitions overlapping as its dependencies allow, and advance."""
        ...

    def predicted_s(self, graph: TaskGraph, *, repeat: int = 1) -> float:
        """Return the seconds that `run` would take at the devices' nominal speeds; no time passes."""
        ...

    def run_while_steady(self, graph: TaskGraph, pace: Pace, *, at_most: int | None = None, label: str = "") -> Usage:
        """Execute `graph` until speeds or users change, or all is done; move `pace` on and return what it took.

        All tasks of `graph` are of SoCs in `pace`. Ends as well once a part has done `at_most` repetitions.
        """
        ...

    def rest(self, socs: Sequence[int]) -> Usage:
        """Let `socs` idle until speeds or users change, and advance."""
        ...

    def spend(self, usage: Usage, label: str = "") -> None:
        """Advance by what was simulated elsewhere, as over links whose rates follow a recording."""
        ...


class DeviceDynamics(Protocol):
    """How fast each SoC runs as time and load go by (heat, clocks, user load); `sim` asks, `thermal` answers."""

    def speed_factors(self) -> Sequence[float]:
        """Return each SoC's present speed as a fraction of its profile's, in SoC order; each above 0."""
        ...

    def power_factors(self) -> Sequence[float]:
        """Return what work draws above idle on each SoC at present, as a fraction of its profile's."""
        ...

    def taken_socs(self) -> Collection[int]:
        """Return the SoCs that training has to leave to their users now."""
        ...

    def steady_s(self, power_w: Sequence[float]) -> float:
        """Return how long all of these hold under this load (watts per SoC); `math.inf` if for good."""
        ...

    def advance(self, duration_s: float, power_w: Sequence[float]) -> float:
        """Let `duration_s` pass under this mean load (watts per SoC); return the joules of cooling."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that the future depends on, as plain values that JSON keeps exactly."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where others of the same description stood."""
        ...


def _sum(left: Mapping[_Key, float], right: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *right)}
