"""The planner of pipelines against brute force, and plans after a loss against the whole planner's, on random problems.

Problems are small enough for brute force over all orders, groups, cuts, shares and K (`pipeline_cases.best_plans`).
"Refused" are problems with a plan for which ours says that nothing fits. Both are timed by the simulator, so a gap is
one of the search. After a loss of one or two devices, each budget is 1.05 times what the plan took before (F33);
the peer searches the plan for the remaining devices from nothing, in micro-batches of this size and all smaller ones.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks.harness import Row, less_is_better, more_is_better, note
from benchmarks.pipeline_cases.best_plans import best_plan, some_plan_fits
from benchmarks.pipeline_cases.random_problems import (
    drawn_loss,
    tight_problem,
    unequal_links_problem,
)
from socflower.errors import InfeasiblePlan
from socflower.pipeline.planner.selection import (
    PlannerSettings,
    plan_pipeline,
    predict,
    single_stage,
)
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.replanning import recovered

# Seeds that development has not seen.
_FIRST_SEED = 527_318
_SETTINGS = PlannerSettings(two_d=False)
# With the largest mean gap that is right.
_KINDS: dict[str, tuple[Callable[[int], PipelineProblem], float]] = {
    "scarce memory": (tight_problem, 1.005),
    "equal devices behind unequal links": (unequal_links_problem, 1.01),
}


def run(quick: bool = False, problems: int = 300, losses: int = 400) -> list[Row]:
    """Return rows of so many problems of each kind and of losses; with `quick` of a few."""
    if quick:
        problems, losses = 6, 4
    rows: list[Row] = []
    for name in _KINDS:
        note(f"{problems} problems, {name}")
        rows += _gap_rows(name, range(_FIRST_SEED, _FIRST_SEED + problems))
        note(f"  mean and worst step: {', '.join(f'{row.ours:.4f}' for row in rows[-2:])}")
    note(f"{losses} losses")
    return [*rows, *_loss_rows(range(_FIRST_SEED, _FIRST_SEED + losses))]


def _gap_rows(name: str, seeds: range) -> Iterator[Row]:
    make, largest_mean = _KINDS[name]
    gaps, num_refused = [], 0
    for seed in seeds:
        problem = make(seed)
        try:
            ours = plan_pipeline(problem, _SETTINGS)
        except InfeasiblePlan:
            num_refused += best_plan(problem).plan is not None
            continue
        best = best_plan(problem, ours.plan.pipelines[0])
        gaps.append(ours.prediction.step_s / best.step_s)
    case = f"{name}, {len(gaps)} problems of 3 or 4 devices, {num_refused} refused"
    limits = {"mean": (statistics.fmean(gaps), largest_mean), "worst": (max(gaps), 1.05)}
    for which, (gap, limit) in limits.items():
        yield less_is_better(
            f"{case}: {which} step",
            gap,
            "brute force",
            1.0,
            "times the best",
            ok=not num_refused and gap <= limit,
            limit=1.0,
        )


@dataclass
class _Losses:
    """What was seen of plans after losses."""

    # Throughput over the whole planner's.
    ratios: list[float] = field(default_factory=list)
    planning_s: list[float] = field(default_factory=list)
    num_ended: int = 0
    num_without_plan: int = 0

    def add(self, seed: int) -> None:
        """Draw a loss and plan after it, in both ways."""
        problem, plan, present = drawn_loss(seed)
        left = replace(
            problem, devices=tuple(each for each in problem.devices if each.soc in present)
        )
        started_s = time.process_time()
        try:
            new = recovered(plan, problem, present).pipelines[0]
        except InfeasiblePlan:
            self.num_without_plan += 1
            self.num_ended += some_plan_fits(left)
            return
        finally:
            self.planning_s.append(time.process_time() - started_s)
        size, number = new.micro_batch_size, new.num_micro_batches
        sized = replace(left, micro_batch_size=size, num_micro_batches=number)
        self.ratios.append(_whole_planner_s(left) / predict(sized, new).step_s)


def _whole_planner_s(problem: PipelineProblem) -> float:
    """Return the seconds of a mini-batch of the whole planner's plan."""
    total, size = problem.mini_batch_size, problem.micro_batch_size
    sizes = tuple(each for each in range(size, 0, -1) if total % each == 0)
    if len(problem.devices) > 1:
        return plan_pipeline(problem, replace(_SETTINGS, micro_batch_sizes=sizes)).prediction.step_s
    found = []
    for each in sizes:
        sized = replace(problem, micro_batch_size=each, num_micro_batches=total // each)
        alone = single_stage(sized, sized.devices)
        if alone is not None:
            found.append(predict(sized, alone).step_s)
    return min(found)


def _loss_rows(seeds: range) -> Iterator[Row]:
    seen = _Losses()
    for seed in seeds:
        seen.add(seed)
    case = (
        f"{len(seeds)} losses with budgets of 1.05 times the memory in use, {seen.num_ended} ended although a plan "
        f"exists, {seen.num_without_plan - seen.num_ended} without any plan"
    )
    limits = {"median": (statistics.median(seen.ratios), 0.9), "worst": (min(seen.ratios), 0.8)}
    for which, (ratio, least) in limits.items():
        yield more_is_better(
            f"{case}: {which} throughput",
            ratio,
            "the whole planner",
            1.0,
            "times",
            ok=not seen.num_ended and ratio >= least,
        )
    yield less_is_better(
        f"{len(seeds)} losses: longest time to plan",
        max(seen.planning_s),
        "the bound of the issue",
        1.0,
        "s",
        ok=max(seen.planning_s) < 1.0,
    )
