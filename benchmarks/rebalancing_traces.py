"""Re-balancing over random traces of speeds, against none: how much it gains, and what it costs at worst.

Each trace is a rack of boards, a plan of groups on it, and speeds of its SoCs that change with games, with heat that
swings, for good, or at random moments. The same intervals run in virtual time under every kind of re-balancing.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import Row, less_is_better, main, note
from socflower.cluster import Cluster, parse_cluster, sustained_rates
from socflower.hierarchy import IntervalCosts, Rebalancing, SyncInterval, plan_groups
from socflower.sim import EventClock
from socflower.strategies.balancer import Balancer
from tests.toy_clusters import Weather, toy_profile

WITHIN = 1.01
NUM_INTERVALS = 12
MODES: dict[str, Rebalancing | None] = {
    "none": None,
    "shares": Rebalancing(across_groups=False),
    "groups": Rebalancing(within_groups=False),
    "both": Rebalancing(),
}
KINDS = ("games", "heat", "lasting", "random")
_FIRST_SEED = 4600


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedTrace:
    """A plan's work, and the speeds of the SoCs from each moment on."""

    kind: str
    cluster: Cluster
    work: IntervalCosts
    steps: int
    stretches: tuple[tuple[float, list[float], frozenset[int]], ...]

    def seconds(self, rebalancing: Rebalancing | None) -> float:
        """Return how long the intervals take with a kind of re-balancing."""
        clock = EventClock(self.cluster, dynamics=Weather(*self.stretches))
        work = replace(self.work, rebalancing=rebalancing)
        rates = sustained_rates(self.cluster, work.profile.name, work.pricing)
        balancer = Balancer(self.cluster, rates, rebalancing)
        plan = work.plan
        for index in range(NUM_INTERVALS):
            balancer.update_speeds(clock, plan.participants)
            plan, _ = balancer.rebalance_groups(plan)
            work = replace(work, plan=plan)
            work.run(_interval(index, self.steps), clock, capacities=balancer.in_use)
        return clock.now_s


def _interval(index: int, steps: int) -> SyncInterval:
    return SyncInterval(
        index=index,
        first_step=index * steps,
        num_steps=steps,
        epoch_end=float(index + 1),
        deal_epoch=0,
    )


def random_trace(seed: int) -> SpeedTrace:
    """Draw a trace; its speeds change from five times an interval to once in five intervals."""
    random = np.random.default_rng(seed)
    cluster = parse_cluster(
        {"boards": int(random.integers(2, 5)), "socs_per_board": int(random.integers(3, 7))}
    )
    num_groups = int(random.integers(2, cluster.num_socs // 2 + 1))
    work = IntervalCosts(
        cluster=cluster,
        plan=plan_groups(cluster, num_groups),
        profile=toy_profile(float(10.0 ** random.uniform(7.0, 8.5)), 4e6, 4),
        num_samples=4096,
        batch_size=int(random.integers(16, 129)),
        steps_per_epoch=1,
        uplink_turns=False,
    )
    steps = int(random.integers(10, 60))
    one_s = work.run(_interval(0, steps), EventClock(cluster)).duration_s
    kind = str(random.choice(KINDS))
    every_s = one_s * float(10.0 ** random.uniform(-0.7, 0.7))
    stretches = _stretches(kind, random, cluster.num_socs, every_s, 6 * NUM_INTERVALS * one_s)
    return SpeedTrace(
        kind=kind, cluster=cluster, work=work, steps=steps, stretches=tuple(stretches)
    )


def _stretches(
    kind: str, random: np.random.Generator, num_socs: int, every_s: float, until_s: float
) -> Iterator[tuple[float, list[float], frozenset[int]]]:
    speeds = np.ones(num_socs)
    slow = random.choice([0.3, 0.5, 0.634, 0.898], num_socs)
    hot = random.random(num_socs) < random.uniform(0.1, 0.6)
    at_s = 0.0
    while at_s < until_s:
        yield at_s, speeds.tolist(), frozenset()
        at_s += every_s * float(random.exponential() + 0.01)
        if kind == "lasting":
            # One SoC after the other becomes slow, for good.
            speeds[random.integers(num_socs)] = random.choice(slow)
        elif kind == "heat":
            speeds = np.where(hot & (speeds == 1.0), slow, 1.0)
        elif kind == "games":
            changed = random.random(num_socs) < 0.2
            speeds = np.where(changed, np.where(random.random(num_socs) < 0.4, 0.5, 1.0), speeds)
        else:
            speeds = random.uniform(0.3, 1.0, num_socs)


def run(quick: bool = False, traces: int = 200, seed: int = _FIRST_SEED) -> list[Row]:
    """Return rows of the worst and the median time over so many traces from a seed on, by kind of re-balancing."""
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES if mode != "none"}
    for number in range(seed, seed + (8 if quick else traces)):
        trace = random_trace(number)
        none_s = trace.seconds(None)
        for mode, found in ratios.items():
            found.append(trace.seconds(MODES[mode]) / none_s)
            note(f"trace {number}, {trace.kind}, {mode}: {found[-1]:.4f}")
    return [
        less_is_better(
            f"{len(found)} traces, {mode}, {sum(each > WITHIN for each in found)} slower: {what}",
            value(found),
            "none, and 1 %",
            WITHIN,
            "times",
            ok=value(found) <= WITHIN,
        )
        for mode, found in ratios.items()
        for what, value in (("worst", max), ("median", statistics.median))
    ]


if __name__ == "__main__":
    sys.exit(main(run))
