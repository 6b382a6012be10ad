"""An edge of a split training: its link, the costs of its batches, and the decider on its cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, LinkRates
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.errors import ConfigError

CloudMode: TypeAlias = Literal["own", "turns", "joined"]
CLOUD_MODES: tuple[CloudMode, ...] = get_args(CloudMode)


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

    `split_plan` is the deployment at the start, and `window` gives K by batch; without it K is the deployment's.
    `in_flight_limit` gives how many batches may be in flight as a batch goes forward; without it K. `away` are ranges
    of batches during which the edge's user has it, so that it trains none of them; each ends with a span.
    """

    costs: SplitCosts
    bandwidth_profile: BandwidthProfile
    split_plan: SplitPlan
    window: Callable[[int], int] | None = None
    in_flight_limit: Callable[[int], int] | None = None
    decider: Decider | None = None
    away: tuple[range, ...] = ()

    def num_batches(self, first: int, num_batches: int) -> int:
        """Return how many of a span's batches the edge trains: those before its user takes it.

        Raises `ConfigError` for an absence that ends within the span.
        """
        end = first + num_batches
        trained = num_batches
        for absence in self.away:
            if absence and first < absence.stop < end:
                raise ConfigError(
                    f"split training: an edge is away until batch {absence.stop}, but returns only where a round "
                    f"begins, not within batches {first} to {end - 1}"
                )
            if absence.start < end <= absence.stop:
                trained = min(trained, max(0, absence.start - first))
        return trained

    def k(self, batch: int) -> int:
        """Return K for a batch."""
        return self.split_plan.window if self.window is None else self.window(batch)

    def limit(self, batch: int) -> int:
        """Return how many batches may be in flight as a batch goes forward."""
        return self.k(batch) if self.in_flight_limit is None else self.in_flight_limit(batch)
