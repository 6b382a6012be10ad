"""An edge of a split training from its costs and its link: where it begins, and what may move it later."""

from collections.abc import Sequence

from socflower.edgecloud.decision import DecisionEngine, WindowSchedule
from socflower.edgecloud.deployment import LinkRates, SplitCosts
from socflower.edgecloud.link_trace import LinkTrace
from socflower.edgecloud.timeline import Party


def adaptive_party(
    costs: SplitCosts, link: LinkTrace, *, num_batches: int, bits: Sequence[int] = (8,),
    window: WindowSchedule | None = None, allow_edge_only: bool = False, moves: bool = True, reverse: bool = False,
) -> Party:
    """Return an edge that begins with the best deployment for its link, and moves the cut as the link changes.

    `num_batches` is the length of the whole training, `bits` the widths of features that may be chosen, `window` K by
    part of training, by default the paper's. Without `moves` it stays where it begins. Raises ConfigError for what
    cannot be.
    """
    schedule = window or WindowSchedule()
    engine = DecisionEngine(costs, bits, allow_edge_only=allow_edge_only, num_batches=num_batches, reverse=reverse)
    first = engine.best(rates_at_the_start(link), schedule.window(0, num_batches))
    return Party(costs=costs, trace=link, deployment=first, window=lambda batch: schedule.window(batch, num_batches),
                 decider=engine if moves else None)


def rates_at_the_start(link: LinkTrace) -> LinkRates:
    """Return what the link carries at the beginning, or on average where it begins with an outage."""
    now = link.rates(0.0)
    return now if now.up_bytes_per_s > 0 and now.down_bytes_per_s > 0 else link.mean_rates()
