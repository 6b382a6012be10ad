"""Plans of hybrid pipelines: planning time, gaps to brute force and other systems' plans, closed form and simulator.

Planning times are compared with the 480 s of Asteroid's paper for EfficientNet-B1's 213 layers on the six devices of
its environment C, planned on a Jetson NX (§5.7).
"""

import statistics
import sys
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from benchmarks.harness import Row, less_is_better, main, measure
from benchmarks.pipeline_cases.brute_force import plans_of, plans_of_order
from benchmarks.pipeline_cases.published import Example, examples
from benchmarks.pipeline_cases.random_problems import large_problem, small_problem
from socflower.errors import InfeasiblePlan
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner.baselines import PEERS, compare
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.selection import (
    algorithm_2,
    best_in_flight,
    fits,
    plan_pipeline,
    predict,
    with_in_flight,
)
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID

PUBLISHED_S = 480.0
"""Asteroid's own planner (§5.7)."""


def run(quick: bool = False) -> list[Row]:
    """Return planning times, then gaps to brute force and peers, then the closed form against the simulator."""
    rows = [_algorithm_2_row(quick), _planner_row(quick), _rack_row()]
    cases = [small_problem(seed) for seed in range(12 if quick else 60)]
    rows += _brute_force_rows(cases)
    rows += [_published_row(example) for example in examples()]
    rows += _peer_rows([large_problem(seed, 40, 6) for seed in range(3 if quick else 20)])
    rows += _deviation_rows(20 if quick else 300)
    return [*rows, _in_flight_row(5 if quick else 40)]


def _algorithm_2_row(quick: bool) -> Row:
    problem = large_problem(0, 213, 6)
    found = algorithm_2(problem)
    timed = measure(lambda: algorithm_2(problem), repeats=5 if quick else 15)
    return less_is_better(
        "Algorithm 2 alone, 213 layers on 6 devices",
        timed.median_s,
        "Asteroid, as published",
        PUBLISHED_S,
        "s",
        ok=timed.min_s < 0.2 and fits(problem, found.plan),
    )


def _planner_row(quick: bool) -> Row:
    problem = large_problem(0, 213, 6)
    found = plan_pipeline(problem)
    timed = measure(lambda: plan_pipeline(problem), repeats=1 if quick else 3, warmup=0)
    paper = predict(problem, algorithm_2(problem).plan)
    return less_is_better(
        f"Pareto set and re-ranking, 213 layers on 6 devices: a step of {found.prediction.step_s:.3f} s "
        f"instead of Algorithm 2's {paper.step_s:.3f} s",
        timed.median_s,
        "Asteroid, as published",
        PUBLISHED_S,
        "s",
        ok=timed.median_s < 5.0
        and found.prediction.step_s <= paper.step_s
        and fits(problem, found.plan),
    )


def _rack_row() -> Row:
    problem = large_problem(0, 400, 64, bytes_per_s=1.25e8, micro_batch_size=128)
    found = []
    timed = measure(lambda: found.append(plan_pipeline(problem)), repeats=1, warmup=0)
    how = "whole search" if found[0].exact else "pruned"
    return less_is_better(
        f"400 layers on 64 devices, {how}: {found[0].plan.architecture}, "
        f"{found[0].prediction.step_s:.2f} s a step",
        timed.median_s,
        "the bound of the issue",
        60.0,
        "s",
        ok=timed.median_s < 60.0 and fits(problem, found[0].plan),
    )


def _brute_force_rows(cases: Sequence[PipelineProblem]) -> list[Row]:
    """Return gaps to the best of all orders, groups and cuts: by the closed form, and in the simulator."""
    gaps: dict[str, list[float]] = {"closed form": [], "simulator": []}
    papers: dict[str, list[float]] = {"closed form": [], "simulator": []}
    for case in cases:
        plans = {
            plan
            for size in range(1, len(case.devices) + 1)
            for order in permutations(case.devices, size)
            for plan in plans_of_order(case, order)
        }
        try:
            ours, paper = plan_pipeline(case), algorithm_2(case).plan
        except InfeasiblePlan:
            continue
        best = {
            "closed form": min(update_latency(case, plan) for plan in plans),
            "simulator": min(predict(case, plan).step_s for plan in plans),
        }
        candidates = [ours, *ours.alternatives]
        gaps["closed form"].append(
            min(each.prediction.formula_s for each in candidates) / best["closed form"]
        )
        gaps["simulator"].append(ours.prediction.step_s / best["simulator"])
        papers["closed form"].append(update_latency(case, paper) / best["closed form"])
        papers["simulator"].append(predict(case, paper).step_s / best["simulator"])
    rows = []
    for name, own in gaps.items():
        optimal = sum(gap <= 1.0 + 1e-6 for gap in own)
        of_paper = sum(gap <= 1.0 + 1e-6 for gap in papers[name])
        rows.append(
            less_is_better(
                f"mean time as a multiple of brute force's, {name}, {len(own)} cases of 4 "
                f"layers on 3 devices: not "
                f"more in {optimal}, Algorithm 2 in {of_paper}, worst {max(own):.3f} and {max(papers[name]):.3f}",
                statistics.fmean(own),
                "Algorithm 2",
                statistics.fmean(papers[name]),
                "times",
                ok=statistics.median(own) <= 1.0 + 1e-6,
            )
        )
    return rows


def _published_row(example: Example) -> Row:
    """Return the row of a published example: our plan and the published one, both simulated with the best K."""
    problem = example.problem
    ours = plan_pipeline(problem)
    _, published = best_in_flight(problem, example.published_plan())
    shape = "-".join(str(replicas) for _, replicas in example.published)
    own = "-".join(str(len(stage.devices)) for stage in ours.plan.pipelines[0].stages)
    times = f"{len(ours.plan.pipelines)} x " if len(ours.plan.pipelines) > 1 else ""
    return less_is_better(
        f"{example.name}: {ours.plan.architecture} {times}{own} against {shape}",
        ours.prediction.step_s,
        f"{example.source}'s published plan",
        published.step_s,
        "s a step",
        ok=ours.prediction.step_s <= published.step_s * (1.0 + 1e-9),
    )


def _peer_rows(cases: Sequence[PipelineProblem]) -> list[Row]:
    """Return rows of our step against that of each peer: medians over the cases in which its plan fits."""
    ours = [plan_pipeline(case).prediction.step_s for case in cases]
    compared = [compare(case) for case in cases]
    rows = []
    for index, name in enumerate(PEERS):
        pairs = [
            (own, each[index].prediction.step_s)
            for own, each in zip(ours, compared, strict=True)
            if each[index].fits and each[index].prediction is not None
        ]
        if not pairs:
            continue
        ratios = [theirs / own for own, theirs in pairs]
        rows.append(
            Row(
                case=f"40 layers on 6 devices of up to 3 kinds, fits in {len(pairs)} of {len(cases)} cases, "
                f"{min(ratios):.2f} to {max(ratios):.2f} times ours",
                ours=statistics.median(own for own, _ in pairs),
                peer=name,
                peer_value=statistics.median(theirs for _, theirs in pairs),
                unit="s a step",
                ratio=statistics.median(ratios),
                ok=min(ratios) >= 0.98,
            )
        )
    return rows


def _deviation_rows(count: int) -> list[Row]:
    """Return rows of closed form / simulator over random plans of random problems, by number of micro-batches.

    The peer is the paper's formula; ours counts the two directions of a link as concurrent.
    """
    rows = []
    for num_micro_batches in (2, 4, 16):
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(count):
            problem = large_problem(
                seed,
                12,
                4,
                bytes_per_s=(2e6, 1.25e7, 1.25e8)[seed % 3],
                num_micro_batches=num_micro_batches,
            )
            plan = _random_plan(np.random.default_rng(seed), problem)
            step_s = predict(problem, plan, within_memory=False).step_s
            for duplex, own in ratios.items():
                own.append(update_latency(problem, plan, duplex=duplex) / step_s)
        paper, ours = (statistics.median(own) for own in ratios.values())
        spans = [f"{min(own):.2f} to {max(own):.2f}" for own in ratios.values()]
        rows.append(
            less_is_better(
                f"closed form / simulator, median of {count} random pipelines, M = {num_micro_batches}; "
                f"the paper's formula {spans[0]}, with concurrent directions {spans[1]}",
                ours,
                "the paper's formula",
                paper,
                "times",
                ok=0.85 < ours < 1.15 and 0.85 < paper < 1.15,
            )
        )
    return rows


def _random_plan(rng: np.random.Generator, problem: PipelineProblem) -> PipelinePlan:
    """Return a plan of two or more stages with random groups and cuts, proportional shares and the paper's K."""
    order = [problem.devices[index] for index in rng.permutation(len(problem.devices))]
    num_stages = int(rng.integers(2, len(order) + 1))
    widths, depths = (
        np.diff([0, *sorted(rng.choice(np.arange(1, total), num_stages - 1, replace=False)), total])
        for total in (len(order), problem.model.num_layers)
    )
    return next(plans_of(problem, order, widths, depths))


def _in_flight_row(count: int) -> Row:
    """Return the row of the K that the simulator chooses against 2(P − p) − 1 (F28)."""
    gains = []
    for seed in range(count):
        problem = large_problem(seed, 12, 4, bytes_per_s=(2e6, 1.25e7)[seed % 2])
        plan = _random_plan(np.random.default_rng(seed), problem)
        paper = with_in_flight(
            problem, plan, ASTEROID.counts(len(plan.stages), plan.num_micro_batches)
        )
        gains.append(predict(problem, paper).step_s / best_in_flight(problem, paper)[1].step_s)
    return Row(
        case=f"K by the simulator, {count} random pipelines, M = 16, best {max(gains):.2f} times faster",
        ours=1.0,
        peer="2(P - p) - 1",
        peer_value=statistics.median(gains),
        unit="times",
        ratio=statistics.median(gains),
        ok=min(gains) >= 1.0 - 1e-9,
    )


if __name__ == "__main__":
    sys.exit(main(run))
