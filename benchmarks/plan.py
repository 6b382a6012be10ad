"""Mapping groups to boards, against the paper's integrity-greedy alone and against brute force.

Sixty SoCs in twelve boards of five: all in use, with idle slots, and on uneven boards after preemption. A whole plan
should take under 10 ms. `ok`: every SoC is in one group, the objective of F5 (contention, split groups, boards
spanned) is never worse than greedy's, and on small racks it is the best of all assignments.
"""

from time import perf_counter

from benchmarks.harness import Row, less_is_better, measure
from benchmarks.mapping_reference import brute_force, small_clusters
from socflower.cluster import parse_cluster
from socflower.hierarchy import GroupPlacement, integrity_greedy, map_groups, plan_groups

NUM_GROUPS = (4, 8, 12, 15, 20, 24)
RACKS: dict[str, tuple[list[int], int]] = {
    "12 x 5": ([5] * 12, 60),
    "12 x 5, 8 slots idle": ([5] * 12, 52),
    "12 uneven boards": ([5, 5, 4, 4, 3, 5, 5, 5, 5, 4, 5, 4], 54),
    "12 uneven boards, 2 slots idle": ([3, 3, 4, 5, 5, 4, 5, 2, 5, 5, 5, 5], 49),
}


def run(quick: bool = False) -> list[Row]:
    """Return planning times by rack and number of groups, then contention against greedy and brute force."""
    rows = [_time_row(rack, num_groups, quick) for rack in RACKS for num_groups in NUM_GROUPS]
    rows += [_contention_row(rack, num_groups) for rack in RACKS for num_groups in NUM_GROUPS]
    return [*rows, _brute_force_row(max_slots=8 if quick else 11)]


def _time_row(rack: str, num_groups: int, quick: bool) -> Row:
    slots, num_socs = RACKS[rack]
    cluster = parse_cluster({"boards": slots})
    repeats = 5 if quick else 21
    ours = measure(lambda: plan_groups(cluster, num_groups, num_socs), repeats=repeats)
    greedy = measure(lambda: integrity_greedy(slots, num_groups, num_socs), repeats=repeats)
    members = [
        soc for group in plan_groups(cluster, num_groups, num_socs).groups for soc in group.members
    ]
    return less_is_better(
        f"{rack}, {num_groups} groups, whole plan",
        1e3 * ours.median_s,
        "integrity-greedy alone, mapping only",
        1e3 * greedy.median_s,
        "ms",
        ok=len(members) == len(set(members)) == num_socs,
    )


def _contention_row(rack: str, num_groups: int) -> Row:
    slots, num_socs = RACKS[rack]
    best, greedy = (
        map_groups(slots, num_groups, num_socs),
        integrity_greedy(slots, num_groups, num_socs),
    )
    return Row(
        case=f"{rack}, {num_groups} groups, {_describe(best)} against {_describe(greedy)}",
        ours=best.contention,
        peer="integrity-greedy",
        peer_value=greedy.contention,
        unit="split groups a board",
        ratio=(1 + greedy.contention) / (1 + best.contention),
        limit=best.contention if best.proven_optimal else None,
        ok=best.objective <= greedy.objective and best.proven_optimal,
    )


def _describe(placement: GroupPlacement) -> str:
    contention, splits, spans = placement.objective
    return f"C={contention} with {splits} splits over {spans} boards"


def _brute_force_row(max_slots: int) -> Row:
    """Compare every rack of up to four boards and `max_slots` slots with all of its assignments."""
    num_cases = num_optimal = num_greedy_optimal = 0
    our_s = brute_s = 0.0
    for slots, num_groups, num_socs in small_clusters(max_slots):
        start_s = perf_counter()
        ours = map_groups(slots, num_groups, num_socs).objective
        middle_s = perf_counter()
        best = brute_force(slots, num_groups, num_socs)
        brute_s += perf_counter() - middle_s
        our_s += middle_s - start_s
        num_cases += 1
        num_optimal += ours == best
        num_greedy_optimal += integrity_greedy(slots, num_groups, num_socs).objective == best
    return Row(
        case=f"all {num_cases} small racks: {num_optimal} optimal, greedy {num_greedy_optimal}",
        ours=1e3 * our_s / num_cases,
        peer="brute force",
        peer_value=1e3 * brute_s / num_cases,
        unit="ms",
        ratio=brute_s / our_s,
        ok=num_optimal == num_cases,
    )
