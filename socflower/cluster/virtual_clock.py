"""Protocols between planners and the simulator of virtual time: neither imports the other; `scenario` joins them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
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
        # Most clusters have one server; their results have no entry for traffic between servers.
        if not found[Tier.INTER_SERVER]:
            del found[Tier.INTER_SERVER]
        return found

    def __add__(self, other: "Usage") -> "Usage":
        """Return the usage of both, one after the other."""
        return Usage(
            duration_s=self.duration_s + other.duration_s,
            soc_seconds=_sum(self.soc_seconds, other.soc_seconds),
            energy_j=_sum(self.energy_j, other.energy_j),
            num_bytes=_sum(self.num_bytes, other.num_bytes),
        )

    def __mul__(self, count: float) -> "Usage":
        """Return the usage of `count` of these, one after the other."""
        return Usage(
            duration_s=self.duration_s * count,
            soc_seconds=_scaled(self.soc_seconds, count),
            energy_j=_scaled(self.energy_j, count),
            num_bytes=_scaled(self.num_bytes, count),
        )


@dataclass(slots=True)
class Pace:
    """The progress of SoCs in a repeated graph with independent parts, while speeds change.

    SoCs of one part have equal progress. A repetition that is in progress when speeds change is finished at its initial
    speeds; its part is then ahead of the clock.
    """

    # Repetitions that each SoC has not started.
    remaining: dict[int, int]
    # Seconds from the clock to the end of the repetition in progress.
    ahead_s: dict[int, float] = field(default_factory=dict)
    # Each SoC's power during that time.
    in_progress_w: dict[int, float] = field(default_factory=dict)
    # Clock time at which a SoC without remaining work ends.
    ended_s: dict[int, float] = field(default_factory=dict)

    def clear(self, socs: Iterable[int]) -> None:
        """Take all remaining work from SoCs, also what is in progress."""
        for soc in socs:
            self.remaining[soc], self.ahead_s[soc] = 0, 0.0

    @property
    def done(self) -> bool:
        """Whether all SoCs have finished."""
        return not any(self.remaining.values()) and max(self.ahead_s.values(), default=0.0) <= 0.0


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
        """Return the SoCs that users have taken; training must not use them."""
        ...

    def run(
        self, graph: TaskGraph, *, repeat: int = 1, label: str = "", head_start_s: float = 0.0
    ) -> Usage:
        """Execute `graph` `repeat` times, repetitions overlapping as its dependencies allow, and advance.

        `head_start_s`: how long before now the graph started. It overlaps what ran since then, during which its SoCs
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
        """Execute `graph` `repeat` times and `closing` once, without waiting for all between them, and advance.

        A SoC computes and sends for `closing` once the last repetition has ended on the SoCs of its entry in `waits`.
        `labels` name both graphs in the trace.

        Returns None, and lets no time pass, in three cases: all SoCs end together, so that nothing would overlap;
        speeds or users change before the end; or rings are so large that their rounds are not simulated one by one.
        """
        ...

    def predicted_s(self, graph: TaskGraph, *, repeat: int = 1) -> float:
        """Return the seconds that `run` would take at the devices' nominal speeds; no time passes."""
        ...

    def predicted_ends_s(self, graph: TaskGraph, *, repeat: int = 1) -> Mapping[int, float]:
        """Return after how many seconds of that run each SoC would end its last repetition; no time passes."""
        ...

    def ends_while_steady(self, graph: TaskGraph, pace: Pace) -> Mapping[int, float]:
        """Return the clock time at which each SoC of `graph` would end its remaining work at present speeds.

        `math.inf` for a SoC with more work left than another one of its part. No time passes.
        """
        ...

    def run_while_steady(
        self,
        graph: TaskGraph,
        pace: Pace,
        *,
        at_most: int | None = None,
        at_most_s: float = inf,
        label: str = "",
    ) -> Usage:
        """Execute `graph` until speeds or users change, or all is done; advance `pace` and return the usage.

        Also ends once a part has done `at_most` repetitions, and after `at_most_s`. All tasks of `graph` belong to SoCs
        in `pace`.
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
        """Return the SoCs that users have taken; training must not use them."""
        ...

    def steady_s(self, power_w: Sequence[float]) -> float:
        """Return how long speeds and users stay constant under this load (watts per SoC); `math.inf` if always."""
        ...

    def until_reading_s(self) -> float:
        """Return the least time until speeds may change, under any load; `math.inf` if they never do."""
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


def _scaled(values: Mapping[_Key, float], count: float) -> dict[_Key, float]:
    return {key: value * count for key, value in values.items()}
