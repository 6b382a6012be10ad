"""The `split` part of a result: the cuts over time, the staleness of gradients, and how busy each part was."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import Party
from socflower.strategies.split_replay import SplitRoundReport

# The most points of a link's rates that a result has.
_MAX_SAMPLES = 2000


class SplitHistory:
    """Collects the rounds of a split training; times are virtual seconds from the start of the run."""

    def __init__(
        self,
        links: Sequence[BandwidthProfile],
        parties: Sequence[Party],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._links = links
        self._names = [cut.name for cut in parties[0].costs.cuts]
        kept = state or {}
        self._start: str = kept.get("start") or parties[0].costs.text_of(parties[0].split_plan)
        self._moves: list[dict[str, Any]] = list(kept.get("moves", ()))
        self._cuts: list[list[float]] = list(
            kept.get("cuts") or [[0.0, self._index(parties[0].split_plan)]]
        )
        before: Sequence[Mapping[str, int]] = kept.get("staleness") or ({},) * len(
            parties
        )  # by edge
        self._staleness = [
            Counter({int(key): count for key, count in one.items()}) for one in before
        ]
        self._busy = Counter(kept.get("busy", {}))
        self._num_parties = len(parties)
        self._costs = [party.costs for party in parties]

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, as JSON values."""
        return {
            "start": self._start,
            "moves": self._moves,
            "cuts": self._cuts,
            "staleness": [
                {str(key): value for key, value in one.items()} for one in self._staleness
            ],
            "busy": dict(self._busy),
        }

    def add(self, report: SplitRoundReport, began_s: float) -> None:
        """Add a round that began at `began_s`."""
        timeline = report.timeline
        for edge, fresh in staleness_by_edge(report).items():
            self._staleness[edge].update(fresh)
        for edge, (party, costs) in enumerate(zip(timeline.parties, self._costs, strict=True)):
            for move in party.moves:
                at_s = began_s + move.decided_s + move.drain_s + move.migration_s
                self._moves.append(
                    {
                        "at_s": at_s,
                        "edge": edge,
                        "batch": move.batch,
                        "from": costs.text_of(move.old),
                        "to": costs.text_of(move.new),
                        "drain_s": move.drain_s,
                        "migration_s": move.migration_s,
                    }
                )
                if edge == 0:
                    self._cuts.append([at_s, self._index(move.new)])
            self._busy.update(
                {"edge": party.compute_s, "up": party.sending_s, "down": party.receiving_s}
            )
        self._busy.update({"cloud": timeline.cloud_busy_s})

    def document(self, parties: Sequence[Party], mode: str, now_s: float) -> dict[str, Any]:
        """Return the result's `split`."""
        staleness = sum(self._staleness, Counter[int]())
        by_edge = [_mean(one) for one in self._staleness]
        whole_s = now_s * self._num_parties
        return {
            "mode": mode,
            "num_edges": self._num_parties,
            "cut_names": self._names,
            "start": self._start,
            "end": parties[0].costs.text_of(parties[0].split_plan),
            "num_moves": len(self._moves),
            "moves": self._moves,
            "cuts_over_time": [*self._cuts, [now_s, self._cuts[-1][1]]],
            "link_over_time": _rates(self._links[0], now_s),
            "staleness": {str(key): staleness[key] for key in sorted(staleness)},
            "mean_staleness": _mean(staleness),
            "max_staleness": max(staleness, default=0),
            "mean_staleness_by_edge": by_edge,
            "staleness_spread": max(by_edge) - min(by_edge),
            # For the cloud, as if each half had its own processor.
            "busy": {key: value / whole_s if whole_s else 0.0 for key, value in self._busy.items()},
        }

    def _index(self, split_plan: SplitPlan) -> float:
        return float(len(self._names) if split_plan.cut is None else split_plan.cut)


def staleness_by_edge(report: SplitRoundReport) -> dict[int, Counter[int]]:
    """Return each edge's number of gradients by staleness: measured on real links, otherwise in virtual time."""
    if report.measured:
        return {
            edge: Counter({stale: count for stale, count in enumerate(each.staleness) if count})
            for edge, each in zip(report.answered, report.measured, strict=True)
        }
    return {edge: Counter(party.staleness) for edge, party in enumerate(report.timeline.parties)}


def staleness_of(report: SplitRoundReport) -> Counter[int]:
    """Return the number of gradients by staleness over all edges."""
    return sum(staleness_by_edge(report).values(), Counter[int]())


def _mean(staleness: Counter[int]) -> float:
    total = staleness.total()
    return sum(key * value for key, value in staleness.items()) / total if total else 0.0


def _rates(link: BandwidthProfile, until_s: float) -> list[list[float]]:
    """Return [seconds, bytes/s up, bytes/s down] at equally spaced times of a run."""
    num_moments = min(_MAX_SAMPLES, max(2, int(until_s) + 1))
    moments = [until_s * index / (num_moments - 1) for index in range(num_moments)]
    rates = [link.rates(at_s) for at_s in moments]
    return [
        [at_s, each.up_bytes_per_s, each.down_bytes_per_s]
        for at_s, each in zip(moments, rates, strict=True)
    ]
