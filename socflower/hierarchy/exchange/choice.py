"""How groups exchange gradients and leaders exchange models: as asked, or in the way predicted to be fastest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from socflower.cluster import VirtualClock
from socflower.hierarchy.exchange.models import KINDS, NONE, LeaderExchange, choose_leaders
from socflower.hierarchy.interval_costs import IntervalCosts
from socflower.hierarchy.plan import GroupPlan
from socflower.hierarchy.uplink_turns import UplinkTurns, choose_turns, step_times


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """The choices for a plan."""

    turns: UplinkTurns
    leaders: LeaderExchange

    def to_document(self) -> dict[str, Any]:
        """Return the entries for plan and result documents."""
        return {**self.turns.to_document(), **self.leaders.to_document()}


def choose_exchanges(
    work: IntervalCosts,
    uplink_turns: bool | str,
    leaders: str,
    lengths: Mapping[int, int],
    clock: VirtualClock | None,
    kinds: Sequence[str] = KINDS,
) -> tuple[Exchanges, IntervalCosts]:
    """Return the choices, and the work with them; see `choose_turns`, `step_times` and `choose_leaders`."""
    chosen = Exchanges(
        turns=choose_turns(
            work.plan,
            uplink_turns,
            None if clock is None else partial(step_times, work, lengths, clock),
        ),
        leaders=choose_leaders(
            work.plan,
            leaders,
            None if clock is None else partial(work.synchronisation_s, clock),
            work.models.coding.name,
            kinds,
        ),
    )
    models = replace(work.models, kind=chosen.leaders.kind)
    return chosen, replace(work, uplink_turns=chosen.turns.enabled, models=models)


def unpredicted_exchanges(
    plan: GroupPlan,
    uplink_turns: bool | str,
    leaders: str,
    compression: str = NONE,
    kinds: Sequence[str] = KINDS,
) -> Exchanges:
    """Return the choices if the cost of a step is not known."""
    return Exchanges(
        turns=choose_turns(plan, uplink_turns, None),
        leaders=choose_leaders(plan, leaders, None, compression, kinds),
    )
