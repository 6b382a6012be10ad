"""Does moving the cut pay? The engine on links that alternate, and after a drop that lasts, in virtual time.

    python -m benchmarks moving-cut --seed 7

For each period, random tables of costs on a link that alternates between two rates every so many batches; the peer is
the best fixed cut in hindsight, and a ratio above 1 means that ours is faster. Then a drop of the link by 10 to 1,000
times for the rest of the training; the peer is an oracle, which knows the drop when it happens, and begins the best
move then, drain and migration included. Every table has another best cut at each of its two rates.
"""

import math
import random
import statistics
from dataclasses import dataclass, replace

from benchmarks.harness import Row, less_is_better, note, peer_notes
from socflower.cluster import Cluster, parse_cluster
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, LinkRates, segments
from socflower.edgecloud.plan.cost_model import period_s
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine
from socflower.edgecloud.plan.party import Decider, Party
from socflower.edgecloud.plan.phases import phases
from socflower.edgecloud.plan.split_pipeline import PartyTimeline, simulate_split
from socflower.sim import EventClock

# Drawn when the code was frozen.
SEED = 489922
NUM_TABLES = 100
PERIODS = (5, 10, 20, 50, 100, 200)
DROPS = (10, 30, 100, 300, 1000)
WINDOW = 4
# For each alternating link; and before and after a drop.
NUM_PERIODS, LEAST_BATCHES = 4, 200
BEFORE, AFTER = 60, 300
# Against the best fixed cut at the median and at worst, and against the oracle.
MEDIAN, WORST, ORACLE = 1.15, 1.25, 1.20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A table of costs, and two rates at which different cuts are best."""

    costs: SplitCosts
    fast: LinkRates
    slow: LinkRates


def draw_case(draw: random.Random, least_drop: float, largest_drop: float) -> Case:
    """Return a random case; features shrink and weights grow with depth, on the whole."""
    while True:
        costs = _draw_costs(draw)
        middle = costs.cuts[len(costs.cuts) // 2]
        compute_s = middle.edge_forward_s + middle.edge_backward_s
        rate = 0.25 * middle.feature_elements / compute_s * 10 ** draw.uniform(0.0, 2.5)
        fast = _rates(rate, draw.uniform(1.0, 5.0), draw.choice((0.0, 0.01, 0.05)))
        drop = 10 ** draw.uniform(least_drop, largest_drop)
        slow = replace(
            fast,
            up_bytes_per_s=fast.up_bytes_per_s / drop,
            down_bytes_per_s=fast.down_bytes_per_s / drop,
        )
        if _best(costs, fast) != _best(costs, slow):
            return Case(costs=costs, fast=fast, slow=slow)


def _draw_costs(draw: random.Random) -> SplitCosts:
    num_cuts = draw.randint(3, 7)
    step_s = draw.uniform(0.2, 3.0)
    parts = [draw.uniform(0.3, 1.0) for _ in range(num_cuts + 1)]
    elements = 10 ** draw.uniform(5.0, 6.5)
    weight_bytes = 10 ** draw.uniform(3.0, 5.5)
    cloud_part = draw.uniform(0.02, 0.2)
    cuts = []
    done = front_bytes = 0.0
    for index in range(num_cuts):
        done += parts[index] / sum(parts)
        front_bytes += weight_bytes
        cuts.append(
            CutCost(
                name=f"layer {index}",
                edge_forward_s=done * step_s / 3.0,
                edge_backward_s=done * step_s / 1.5,
                cloud_s=(1.0 - done) * step_s * cloud_part,
                feature_elements=max(1, int(elements)),
                front_weight_bytes=front_bytes,
            )
        )
        elements *= draw.uniform(0.25, 1.1)
        weight_bytes *= draw.uniform(1.0, 4.0)
    return SplitCosts(
        model="made up",
        batch_size=32,
        cuts=tuple(cuts),
        edge_only_s=step_s,
        gradient_bits=8,
        model_weight_bytes=2.0 * (front_bytes + weight_bytes),
    )


def _rates(up_bytes_per_s: float, down_part: float, latency_s: float) -> LinkRates:
    return LinkRates(
        up_bytes_per_s=up_bytes_per_s,
        down_bytes_per_s=up_bytes_per_s * down_part,
        latency_s=latency_s,
    )


def _batch_s(costs: SplitCosts, cut: int, rates: LinkRates) -> float:
    return period_s(phases(costs, SplitPlan(cut=cut, bits=8, window=WINDOW), rates), WINDOW)


def _best(costs: SplitCosts, rates: LinkRates) -> int:
    return min(range(len(costs.cuts)), key=lambda cut: _batch_s(costs, cut, rates))


def _link(case: Case, fast_s: float, slow_s: float, *, repeats: bool) -> BandwidthProfile:
    parts = [
        (seconds, rates.up_bytes_per_s, rates.down_bytes_per_s)
        for seconds, rates in ((fast_s, case.fast), (slow_s, case.slow))
    ]
    return segments(parts, latency_s=case.fast.latency_s, repeats=repeats)


class _Scheduled:
    """An oracle: one move, before the first batch that begins after the drop."""

    def __init__(self, cut: int, from_batch: int) -> None:
        self._cut = cut
        self._from_batch = from_batch

    def decide(
        self, batch: int, rates: LinkRates, current: SplitPlan, window: int, edge_speed: float = 1.0
    ) -> SplitPlan | None:
        """Return the plan with the cut, from that batch on."""
        is_due = batch >= self._from_batch and current.cut != self._cut
        return replace(current, cut=self._cut) if is_due else None


def _train(
    cluster: Cluster,
    case: Case,
    link: BandwidthProfile,
    cut: int,
    num_batches: int,
    decider: Decider | None = None,
) -> tuple[PartyTimeline, tuple[float, ...]]:
    """Return the training's totals, and when each action was complete."""
    party = Party(
        costs=case.costs,
        bandwidth_profile=link,
        split_plan=SplitPlan(cut=cut, bits=8, window=WINDOW),
        decider=decider,
    )
    timeline = simulate_split([party], num_batches, clock=EventClock(cluster), cluster=cluster)
    return timeline.parties[0], timeline.times_s


def alternating(cluster: Cluster, draw: random.Random, period: int) -> tuple[float, int]:
    """Return ours over the best fixed cut in hindsight, in time, and our moves."""
    case = draw_case(draw, 0.5, 2.0)
    best_s = [
        _batch_s(case.costs, _best(case.costs, rates), rates) for rates in (case.fast, case.slow)
    ]
    half_s = period * statistics.mean(best_s)
    link = _link(case, half_s, half_s, repeats=True)
    num_batches = max(LEAST_BATCHES, NUM_PERIODS * period)
    fixed_s = [
        _train(cluster, case, link, cut, num_batches)[0].duration_s
        for cut in range(len(case.costs.cuts))
    ]
    engine = DecisionEngine(case.costs, (8,), num_batches=num_batches)
    first = engine.best(case.fast, WINDOW).cut
    assert first is not None
    ours, _ = _train(cluster, case, link, first, num_batches, engine)
    return ours.duration_s / min(fixed_s), len(ours.moves)


def dropping(cluster: Cluster, draw: random.Random, drop: int) -> tuple[float, int, float]:
    """Return ours over the oracle after a drop, in time, with our moves, and staying over the oracle."""
    case = draw_case(draw, math.log10(drop), math.log10(drop))
    costs = case.costs
    first = _best(costs, case.fast)
    num_batches = BEFORE + AFTER
    fast_s = BEFORE * _batch_s(costs, first, case.fast)
    link = _link(case, fast_s, 1.0, repeats=False)
    stay, times_s = _train(cluster, case, link, first, num_batches)
    # The first batch whose forward pass is complete after the drop; each batch has three actions.
    num_before = sum(time_s < fast_s for time_s in times_s) // 3
    oracle_s = min(
        stay.duration_s,
        *(
            _train(cluster, case, link, first, num_batches, _Scheduled(cut, num_before + 1))[
                0
            ].duration_s
            for cut in range(len(costs.cuts))
        ),
    )
    engine = DecisionEngine(costs, (8,), num_batches=num_batches)
    ours, _ = _train(cluster, case, link, first, num_batches, engine)
    after_s = oracle_s - fast_s
    return (
        (ours.duration_s - fast_s) / after_s,
        len(ours.moves),
        (stay.duration_s - fast_s) / after_s,
    )


def run(*, quick: bool = False, seed: int = SEED) -> list[Row]:
    """Return a row for each period and each drop; `ok` is whether the worst case is within the limits too."""
    cluster = parse_cluster({"boards": 1, "socs_per_board": 1, "device": "raspberry-pi-4b"})
    num_tables = 3 if quick else NUM_TABLES
    rows = []
    for period in PERIODS:
        draws = [random.Random(f"{seed}.{period}.{table}") for table in range(num_tables)]
        found = [alternating(cluster, draw, period) for draw in draws]
        ratios = [ratio for ratio, _ in found]
        peer_notes[f"period {period}"] = {
            "ratio": [*ratios],
            "moves": [moves for _, moves in found],
        }
        median = statistics.median(ratios)
        case = f"alternates every {period} batches, {num_tables} tables, worst {max(ratios):.2f}"
        is_ok = median <= MEDIAN and max(ratios) <= WORST
        rows.append(_row(case, median, "the best fixed cut in hindsight", is_ok))
    for drop in DROPS:
        draws = [random.Random(f"{seed}.{drop}.{table}") for table in range(num_tables)]
        after = [dropping(cluster, draw, drop) for draw in draws]
        ratios = [ratio for ratio, _, _ in after]
        moves = [each for _, each, _ in after]
        stay = [each for _, _, each in after]
        peer_notes[f"drop {drop}"] = {"ratio": [*ratios], "moves": [*moves], "staying": [*stay]}
        case = (
            f"drops {drop} times, {num_tables} tables, worst {max(ratios):.2f}, at most {max(moves)} moves; without a "
            f"move {statistics.median(stay):.1f}, worst {max(stay):.1f}"
        )
        is_ok = max(ratios) <= ORACLE and max(moves) <= 1
        rows.append(_row(case, statistics.median(ratios), "an oracle", is_ok))
    return rows


def _row(case: str, ours: float, peer: str, is_ok: bool) -> Row:
    note(f"{case}: median {ours:.3f}")
    return less_is_better(case, ours, peer, 1.0, "times as long", ok=is_ok)
