"""The report of a round of split training: its schedule, the cuts, and the staleness of gradients."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from socflower.cluster import Usage
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.split_pipeline import Timeline
from socflower.plain_numbers import plain_numbers
from socflower.strategies.reply_events import ReplyEvent
from socflower.wire.split_message_keys import SplitReport


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRoundReport:
    """The report of one round; the latest is `strategy.reports[-1]`."""

    server_round: int
    # Epochs completed at its end.
    epoch: float
    # Of the edges in this round alone; a prediction on real machines.
    usage: Usage
    events: tuple[ReplyEvent, ...]
    # The simulated schedule that virtual time follows.
    timeline: Timeline
    # The edges at its end.
    parties: tuple[Party, ...]
    # Virtual seconds at its end, from the start of the clock.
    ended_s: float
    # On real links, in the order of the parties that answered, and these parties.
    measured: tuple[SplitReport, ...] = ()
    answered: tuple[int, ...] = ()

    def entry(self) -> dict[str, Any]:
        """Return cuts at the round's end, moves, gradients by staleness of each edge, seconds of work by part."""
        timeline = self.timeline
        began_s = self.ended_s - timeline.duration_s
        stale = _staleness_by_edge(self)
        busy: Counter[str] = Counter({"cloud": timeline.cloud_busy_s})
        moves = []
        for edge, (party, on_line) in enumerate(zip(self.parties, timeline.parties, strict=True)):
            busy.update(
                {"edge": on_line.compute_s, "up": on_line.sending_s, "down": on_line.receiving_s}
            )
            for move in on_line.moves:
                moves.append(
                    {
                        "at_s": began_s + move.decided_s + move.drain_s + move.migration_s,
                        "edge": edge,
                        "batch": move.batch,
                        "from": party.costs.describe(move.old),
                        "to": party.costs.describe(move.new),
                        "to_index": party.costs.position(move.new),
                        "drain_s": move.drain_s,
                        "migration_s": move.migration_s,
                    }
                )
        entry: dict[str, Any] = {
            "mean_staleness": mean_staleness(sum(stale, Counter[int]())),
            "cuts": [party.costs.describe(party.split_plan) for party in self.parties],
            "moves": moves,
            "staleness": [as_texts(one) for one in stale],
            "busy_s": dict(busy),
        }
        if self.measured:
            entry["links"] = [asdict(each) for each in self.measured]
        return entry


def _staleness_by_edge(report: SplitRoundReport) -> list[Counter[int]]:
    """Return each edge's number of gradients by staleness: measured on real links, otherwise in virtual time."""
    parties = report.timeline.parties
    if not report.measured:
        return [Counter(party.staleness) for party in parties]
    found = [Counter[int]() for _ in parties]
    for edge, each in zip(report.answered, report.measured, strict=True):
        found[edge] = Counter({stale: count for stale, count in enumerate(each.staleness) if count})
    return found


def as_texts(staleness: Counter[int]) -> dict[str, int]:
    """Return counts by staleness, ascending, as JSON keeps them."""
    return {str(key): staleness[key] for key in sorted(staleness)}


def mean_staleness(staleness: Counter[int]) -> float:
    """Return the mean of counts by staleness; 0 without any."""
    return sum(key * value for key, value in staleness.items()) / max(1, staleness.total())
