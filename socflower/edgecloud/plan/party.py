"""An edge of a split training: its link, the costs of its batches, and what decides on its cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, LinkRates
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.errors import ConfigError, require_range

CloudMode: TypeAlias = Literal["own", "turns", "joined"]


class Decider(Protocol):
    """Decides on changes of the deployment between two batches."""

    def decide(
        self, batch: int, rates: LinkRates, current: SplitPlan, window: int, edge_speed: float = 1.0
    ) -> SplitPlan | None:
        """Return the new deployment from `batch` on, or None to stay; K is given, not chosen.

        `edge_speed` is the edge's present speed, as a fraction of that at which its costs hold.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """One edge, with its link and the costs of its batches.

    It trains no batch of `away`, ranges of batches during which its user has it; each ends where a span does.
    """

    costs: SplitCosts
    bandwidth_profile: BandwidthProfile
    split_plan: SplitPlan  # at the start
    window: Callable[[int], int] | None = None  # K by batch; the deployment's where missing
    decider: Decider | None = None
    away: tuple[range, ...] = ()

    def num_batches(self, first: int, num_batches: int) -> int:
        """Return how many of a span's batches it trains: those before its user takes it.

        Raises ConfigError for an absence that ends within the span.
        """
        end = first + num_batches
        for absence in self.away:
            if first < absence.stop < end and absence.start < absence.stop:
                raise ConfigError(
                    f"split training: an edge is away until batch {absence.stop}, within the round of "
                    f"batches {first} to {end - 1}; it can return where a round begins"
                )
        return min(
            [
                max(0, absence.start - first)
                for absence in self.away
                if absence.start < end <= absence.stop
            ],
            default=num_batches,
        )

    def limit(self, batch: int) -> int:
        """Return K for a batch; `ConfigError` if it is negative."""
        limit = self.split_plan.window if self.window is None else self.window(batch)
        require_range(f"split pipeline: batch {batch}", least=0, K=limit)
        return limit
