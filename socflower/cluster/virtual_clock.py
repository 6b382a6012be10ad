"""Protocols between planners and the simulator of virtual time; neither imports the other, `scenario` joins them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from socflower.cluster.task_graph import Activity, TaskGraph
from socflower.cluster.topology import Tier

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The cost of executing a graph: virtual seconds, and SoC-seconds, joules and bytes by use.

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

    @property
    def bytes_by_tier(self) -> dict[str, float]:
        """The bytes of every tier by its name, 0 without traffic; between servers only if there is some."""
        found = {tier.value: self.num_bytes.get(tier, 0.0) for tier in Tier}
        return {
            tier: count for tier, count in found.items() if count or tier != Tier.INTER_SERVER.value
        }

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
    """The progress of SoCs in a repeated graph with independent parts, while speeds change.

    SoCs of one part have equal progress. A repetition in progress when speeds change is finished at its initial speeds;
    its part is then ahead of the clock.
    """

    remaining: dict[int, int]  # repetitions that each SoC has not started
    ahead_s: dict[int, float] = field(
        default_factory=dict
    )  # from the clock to the end of the repetition in progress
    in_progress_w: dict[int, float] = field(
        default_factory=dict
    )  # each SoC's power during that time
    ended_s: dict[int, float] = field(
        default_factory=dict
    )  # by the clock: when a SoC without remaining work ends

    @property
    def done(self) -> bool:
        """Whether all SoCs have finished."""
        return not any(self.remaining.values()) and not any(
            ahead_s > 0.0 for ahead_s in self.ahead_s.values()
        )


class VirtualClock(Protocol):
    """Executes task graphs in virtual time; strategies receive one and emit graphs to it."""

    @property
    def now_s(self) -> float:
        """Virtual seconds since the clock's start."""
        ...

    @property
    def changes(self) -> bool:
        """Whether speeds and users of SoCs change with time; if not, the next two are constant."""
        ...

    def speed_factors(self) -> Sequence[float]:
        """Return each SoC's present speed as a fraction of its profile's, in SoC order, as seen in its step times."""
        ...

    def taken_socs(self) -> Collection[int]:
        """Return the SoCs that users have now and training must not use."""
        ...

    def run(
        self, graph: TaskGraph, *, repeat: int = 1, label: str = "", head_start_s: float = 0.0
    ) -> Usage:
        """Execute `graph` `repeat` times, repetitions overlapping as its dependencies allow, and advance.

        With `head_start_s` the graph began so long ago, beside what was run since then, in which the SoCs that it uses
        were idle.
        """
        ...

    def run_overlapped(
        self,
        graph: TaskGraph,
        closing: TaskGraph,
        waits: Mapping[int, Sequence[int]],
        *,
        repeat: int,
        labels: tuple[str, str] = ("", ""),
    ) -> Usage | None:
        """Execute `graph` so many times and `closing` once, without a barrier between them, and advance.

        For `closing` a SoC computes and sends when the last repetition has ended on the SoCs of its entry in `waits`.
        Return None, and let no time pass, where that would be a barrier because all end together, where speeds or
        users change before the end, and for rings so large that their rounds are not simulated one by one.
        `labels` name both in the trace.
        """
        ...

    def predicted_s(self, graph: TaskGraph, *, repeat: int = 1) -> float:
        """Return the seconds that `run` would take at the devices' nominal speeds; no time passes."""
        ...

    def predicted_ends_s(self, graph: TaskGraph, *, repeat: int = 1) -> Mapping[int, float]:
        """Return after how many seconds of such a run each SoC would have done its last repetition; no time passes."""
        ...

    def run_while_steady(
        self, graph: TaskGraph, pace: Pace, *, at_most: int | None = None, label: str = ""
    ) -> Usage:
        """Execute `graph` until speeds or users change, or all is done; advance `pace` and return the usage.

        All tasks of `graph` are of SoCs in `pace`. It also ends once a part has done `at_most` repetitions.
        """
        ...

    def idle(self, socs: Sequence[int]) -> Usage:
        """Let `socs` idle until speeds or users change, and advance."""
        ...


class DeviceDynamics(Protocol):
    """Each SoC's speed over time (heat, clocks, user load); used by `sim`, implemented by `thermal`."""

    def speed_factors(self) -> Sequence[float]:
        """Return each SoC's present speed as a fraction of its profile's, in SoC order; each above 0."""
        ...

    def power_factors(self) -> Sequence[float]:
        """Return each SoC's present power above idle under work, as a fraction of its profile's."""
        ...

    def taken_socs(self) -> Collection[int]:
        """Return the SoCs that users have now and training must not use."""
        ...

    def steady_s(self, power_w: Sequence[float]) -> float:
        """Return how long these stay constant under this load (watts per SoC); `math.inf` if always."""
        ...

    def until_reading_s(self) -> float:
        """Return the time until speeds may change at the earliest, whatever the load; `math.inf` if they never do."""
        ...

    def advance(self, duration_s: float, power_w: Sequence[float]) -> float:
        """Advance by `duration_s` under this mean load (watts per SoC); return the joules of cooling."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the complete state as plain values that JSON stores exactly."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of dynamics of the same description."""
        ...


def _sum(left: Mapping[_Key, float], right: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *right)}
