"""The `split` part of a result: the cuts over time, the staleness of gradients, and how busy each part was."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.plan.party import Party
from socflower.strategies.methods.split_report import as_texts, mean_staleness

# The most points of a link's rates that a result has.
_MAX_SAMPLES = 2000


def split_document(
    start: Sequence[Party],
    link: BandwidthProfile,
    mode: str,
    rounds: Sequence[Mapping[str, Any]],
    now_s: float,
) -> dict[str, Any]:
    """Return the result's `split`, from the entries of all rounds.

    `start` are the edges at the beginning, and `link` is that of the first one.
    """
    trained = [entry for entry in rounds if "moves" in entry]
    moves = [move for entry in trained for move in entry["moves"]]
    by_edge = [Counter[int]() for _ in start]
    busy = Counter[str]()
    for entry in trained:
        busy.update(entry["busy_s"])
        for edge, stale in zip(by_edge, entry["staleness"], strict=True):
            edge.update({int(key): count for key, count in stale.items()})
    staleness = sum(by_edge, Counter[int]())
    means = [mean_staleness(one) for one in by_edge]
    first = start[0]
    cuts: list[list[float]] = [[0.0, first.costs.position(first.split_plan)]]
    cuts += [[move["at_s"], move["to_index"]] for move in moves if move["edge"] == 0]
    begin = first.costs.describe(first.split_plan)
    whole_s = now_s * len(start)
    return {
        "mode": mode,
        "num_edges": len(start),
        "cut_names": [cut.name for cut in first.costs.cuts],
        "start": begin,
        "end": trained[-1]["cuts"][0] if trained else begin,
        "num_moves": len(moves),
        "moves": moves,
        "cuts_over_time": [*cuts, [now_s, cuts[-1][1]]],
        "link_over_time": _rates(link, now_s),
        "staleness": as_texts(staleness),
        "mean_staleness": mean_staleness(staleness),
        "max_staleness": max(staleness, default=0),
        "mean_staleness_by_edge": means,
        "staleness_spread": max(means) - min(means),
        # For the cloud, as if each half had its own processor.
        "busy": {key: value / whole_s if whole_s else 0.0 for key, value in busy.items()},
    }


def _rates(link: BandwidthProfile, until_s: float) -> list[list[float]]:
    """Return [seconds, bytes/s up, bytes/s down] at equally spaced times of a run."""
    num_moments = min(_MAX_SAMPLES, max(2, int(until_s) + 1))
    moments = [until_s * index / (num_moments - 1) for index in range(num_moments)]
    rates = [link.rates(at_s) for at_s in moments]
    return [
        [at_s, each.up_bytes_per_s, each.down_bytes_per_s]
        for at_s, each in zip(moments, rates, strict=True)
    ]
