"""An edge of a split training: its link, the costs of its batches, and what decides on its cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, LinkRates
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.errors import require_range

CloudMode: TypeAlias = Literal["own", "turns", "joined"]


class Decider(Protocol):
    """Decides on changes of the deployment between two batches."""

    def decide(self, batch: int, rates: LinkRates, current: SplitPlan, window: int,
               edge_speed: float = 1.0) -> SplitPlan | None:
        """Return the new deployment from `batch` on, or None to stay; K is given, not chosen.

        `edge_speed` is the edge's present speed, as a fraction of that at which its costs hold.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """One edge, with its link and the costs of its batches."""

    costs: SplitCosts
    bandwidth_profile: BandwidthProfile
    split_plan: SplitPlan  # at the start
    window: Callable[[int], int] | None = None  # K by batch; the deployment's where missing
    decider: Decider | None = None

    def limit(self, batch: int) -> int:
        """Return K for a batch; `ConfigError` if it is negative."""
        limit = self.split_plan.window if self.window is None else self.window(batch)
        require_range(f"split pipeline: batch {batch}", least=0, K=limit)
        return limit
