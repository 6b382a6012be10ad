"""One VGG-11 epoch of a cluster on the event clock, against the same clock simulating every step.

Groups train synchronously: each member computes its share of the group's batch of 64, gradients go round a ring of
2(n-1) sub-steps of n real transfers, every member updates. The peer knows no steady state and no equal groups; the
answer is right if both give the same virtual duration and energy. Required of 60 SoCs: less than 1 s.
"""

import sys
from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter

from benchmarks.harness import Row, main
from socflower.cluster import Activity, Cluster, GraphBuilder, LayerProfile, ModelProfile, TaskGraph, Usage, step_cost
from socflower.cluster.cluster_file import parse_cluster
from socflower.sim import EventClock

NUM_SAMPLES = 50_000
BATCH_SIZE = 64
VGG11 = ModelProfile(name="vgg11", input_bytes=3 * 32 * 32 * 4.0, layers=(LayerProfile(
    name="all", kind="conv", forward_flops=0.917e9 / 3, output_bytes=0.0, weight_bytes=36.9e6, num_tensors=18),))


def synchronous_step(cluster: Cluster, groups: Sequence[Sequence[int]]) -> TaskGraph:
    """Return one step of all groups; a member begins the next as soon as it has updated."""
    b = GraphBuilder()
    for group in groups:
        n = len(group)
        shares = [BATCH_SIZE // n + (rank < BATCH_SIZE % n) for rank in range(n)]
        costs = [step_cost(VGG11, cluster.device_of(soc), share) for soc, share in zip(group, shares, strict=True)]
        computes = [b.compute("compute", soc, cost.compute_s) for soc, cost in zip(group, costs, strict=True)]
        holds: list[tuple[int, ...]] = [(task,) for task in computes]
        for _ in range(2 * (n - 1)):
            sent = [b.transfer("ring", soc, group[(rank + 1) % n], VGG11.weight_bytes / n,
                               num_messages=VGG11.num_tensors, after=holds[rank]) for rank, soc in enumerate(group)]
            holds = [(sent[rank - 1], sent[rank]) for rank in range(n)]
        for soc, cost, after, compute in zip(group, costs, holds, computes, strict=True):
            update = b.compute("update", soc, cost.update_s, activity=Activity.UPDATE, after=after)
            b.follow_previous(compute, [update])
    return b.build([soc for group in groups for soc in group])


def run(quick: bool = False) -> list[Row]:
    """Return a row for each cluster and group size; `quick` leaves out the large cluster."""
    cases = [("60 SoCs, 12 groups of 5, one to a board", 12, 5),
             ("60 SoCs, 15 groups of 4, 9 split over boards", 12, 4)]
    if not quick:
        cases.append(("1000 SoCs, 250 groups of 4, 150 split over boards", 200, 4))
    return [_row(case, parse_cluster({"boards": boards, "socs_per_board": 5}), size, 1 if quick else 3)
            for case, boards, size in cases]


def _row(case: str, cluster: Cluster, size: int, times: int) -> Row:
    groups = [range(first, first + size) for first in range(0, cluster.num_socs, size)]
    # A cluster too large for 50,000 samples still takes as many steps as one of 60 SoCs.
    steps = ceil(NUM_SAMPLES / (min(len(groups), 60 // size) * BATCH_SIZE))

    def epoch(extrapolate: bool) -> Usage:
        clock = EventClock(cluster, extrapolate=extrapolate)
        return clock.run(synchronous_step(cluster, groups), repeat=steps)

    ours_s, ours = _fastest(lambda: epoch(True), times)
    peer_s, peer = _fastest(lambda: epoch(False), 1)
    return Row(case=f"VGG-11 epoch of {steps} steps, {case}", ours=ours_s, peer="every step simulated",
               peer_value=peer_s, unit="s", ratio=peer_s / ours_s,
               ok=_equal(ours.duration_s, peer.duration_s) and _equal(ours.total_energy_j, peer.total_energy_j))


def _equal(left: float, right: float) -> bool:
    return abs(left - right) <= 1e-9 * abs(right)


def _fastest(work: Callable[[], Usage], times: int) -> tuple[float, Usage]:
    """Return the least wall-clock seconds, graph building included, and the result."""
    best_s, usage = float("inf"), Usage()
    for _ in range(times):
        start_s = perf_counter()
        usage = work()
        best_s = min(best_s, perf_counter() - start_s)
    return best_s, usage


if __name__ == "__main__":
    sys.exit(main(run))
