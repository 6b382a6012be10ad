"""The choice among pipelines: a small Pareto set of Algorithm 2, ranked again by the simulator (F28, F32).

Algorithm 2 fixes the order of devices and K, and relies on the closed form. Here it runs on several orders and rules
for K, keeps several pipelines of each state and may leave devices out. `quick_schedule` gives each pipeline its K, and
`local_search` changes the best ones. Then the simulator decides among the best, also about their K.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.field_rules import checked
from socflower.pipeline.plan import PipelinePlan, Plan, Policy, Prediction, with_samples_on
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.dynamic_program import CostsByPosition, FoundPlan, search
from socflower.pipeline.planner.local_search import improved, neighbours
from socflower.pipeline.planner.pruning import (
    MOST_CUTS,
    MOST_PLACES,
    MOST_STAGES,
    by_memory,
    likely_cuts,
    likely_places,
    near,
    orders,
    search_work,
)
from socflower.pipeline.planner.quick_schedule import (
    Counts,
    Layout,
    QuickSchedule,
    most_in_flight,
    steps,
)
from socflower.pipeline.planner.two_dimensions import best_two_d, grid_plans
from socflower.pipeline.problem import Ints, PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, RULES, InFlight, at_most
from socflower.pipeline.schedule.run import simulate_schedule
from socflower.quantities import counted

WORK_LIMIT = 5e8
"""Values that the exact search may compute over all orders, rules and sizes of micro-batches (`search_work`): about six
seconds of one core. A larger search is pruned."""

OnStep = Callable[[str, int, int], None]
"""Called with the next step's name, the number of finished steps and the number of all steps."""

_MOST_OF_PAPER = 4000
"""Layers x devices up to which the plan of Algorithm 2 itself is simulated too."""


_MOST_OF_SMALL = 400
"""Layers x devices of a small problem, for which more is tried: K = 1 if memory is scarce, and more changes."""

_MOST_OF_TINY = 100
"""Layers x devices of a problem whose simulation takes milliseconds, so that changes of the best plan are simulated."""

_TUNED_OF_TINY, _NEAR_BEST = 4, 1.05
"""Plans of a tiny problem that are simulated with other K if their seconds are within this factor of the best's."""

_NEIGHBOURS = 48
"""Changes of a plan that are simulated at once, the best by `QuickSchedule` first."""

_CHANGED, _CHANGED_OF_SMALL = 4, 16
"""Pipelines that `local_search` changes, by those kept of each state."""

_CLOSED_FORM_ERROR = 1.1
"""A size of micro-batches is not simulated if the closed form of its best plan exceeds the best simulated time by this
factor. This is a margin and no proof: of the best plans of the shipped scenarios none was simulated to be more than 3 %
below its closed form."""

_TRIED_COUNTS = 2
"""Choices of K that are simulated of a plan."""

_ALL_ORDERS_OF, _ALL_ORDERS_IF_NONE_FITS = 4, 5
"""Devices up to which all orders are searched with K = 1: if memory is scarce, and if nothing fits in other orders."""

_Positive = Annotated[int, Field(ge=1)]


@checked
class PlannerSettings:
    """Limits of the planner's search."""

    # Pipelines kept of each state.
    width: _Positive = 2
    # The best by `QuickSchedule`, which are simulated; half of them if the problem is not small.
    num_simulated: _Positive = 8
    # The best of the simulated plans, which are simulated with other K.
    num_tuned: _Positive = 2
    # Other sizes to try; each divides the mini-batch.
    micro_batch_sizes: tuple[int, ...] = ()
    # The SoC that has samples and labels; None: each device has those that it needs.
    samples_on: int | None = None
    # Whether pipelines in parallel are tried too.
    two_d: bool = True
    # Only plans of `grid_plans`: of this number of groups, or 0 for that of the least time. None: any plan.
    grid: Annotated[int, Field(ge=0)] | None = None
    # None: if the search would exceed `WORK_LIMIT`.
    prune: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with its prediction, and details of the search."""

    # With the micro-batch size of the plan.
    problem: PipelineProblem
    plan: Plan
    prediction: Prediction
    # Whether all cuts and numbers of stages were tried.
    exact: bool = True
    num_candidates: int = 1
    # The next best plans that were simulated.
    alternatives: "tuple[Planned, ...]" = ()

    def to_document(self) -> dict[str, Any]:
        """Return the plan and its prediction as plain values."""
        return {
            "architecture": self.plan.architecture,
            "exact": self.exact,
            "pipelines": [pipeline.to_document(self.problem) for pipeline in self.plan.pipelines],
            "num_devices": len(self.plan.socs),
            "communication_bytes": self.plan.communication_bytes(self.problem),
            "predicted": self.prediction.to_document(),
        }


def predict(problem: PipelineProblem, plan: Plan, *, within_memory: bool = True) -> Prediction:
    """Return the costs of an update of a plan, by the closed form (F29) and in virtual time at full speed.

    Raises `InfeasiblePlan` if the plan exceeds a budget, except with `within_memory=False`.
    """
    run = simulate_schedule(problem, plan, within_memory=within_memory)
    return Prediction(
        formula_s=update_latency(problem, plan),
        duplex_s=update_latency(problem, plan, duplex=True),
        step_s=run.step_s,
        energy_j=run.usage.total_energy_j,
        num_samples=plan.num_samples,
        num_bytes=run.usage.bytes_by_tier,
    )


def algorithm_2(problem: PipelineProblem) -> FoundPlan:
    """Return the paper's plan (F32): devices by memory, descending, one pipeline per state, the least latency of Eq. 4.

    Raises `InfeasiblePlan` if no pipeline fits the budgets.
    """
    every = search(problem, by_memory(problem.devices))
    found = min(every, key=lambda each: each.latency_s, default=None)
    if found is None:
        raise nothing_fits(problem)
    return found


def plan_pipeline(
    problem: PipelineProblem,
    settings: PlannerSettings | None = None,
    *,
    on_step: OnStep = lambda text, done, total: None,
) -> Planned:
    """Return the plan with the least simulated seconds of a mini-batch, its prediction, and the next best.

    It may be one device, data parallelism, a pipeline, a hybrid of them or pipelines in parallel: `plan.architecture`.
    Other K are tried for the best `num_tuned` plans of each size of micro-batches. Sizes whose plans are all slower by
    the closed form than a plan that was simulated are left out. After a pruned search, whose plans take long to
    simulate, other K are tried for the best plans of all sizes together.

    Raises
    ------
    ConfigError
        If the model has one layer, or there is only one device.
    InfeasiblePlan
        If no plan fits the budgets.
    """
    settings = settings or PlannerSettings()
    _check(problem)
    if settings.samples_on is not None:
        problem.device(settings.samples_on)
    choices = micro_batch_choices(problem, settings.micro_batch_sizes)
    if settings.grid is not None:
        return _best_grid(choices, settings, settings.grid, on_step)
    ranked: list[Planned] = []
    num_candidates, exact = 0, True
    total = 2 * len(choices) + 1 + settings.two_d
    for number, sized in enumerate(choices):
        what = f"micro-batches of {sized.micro_batch_size}"
        on_step(f"searching plans, {what}", 2 * number, total)
        found, own_exact = candidates(sized, settings)
        num_candidates, exact = num_candidates + len(found), exact and own_exact
        on_step(f"simulating the best, {what}", 2 * number + 1, total)
        if own_exact and ranked and not _may_be_best(sized, found, ranked):
            continue
        simulated = _simulated(sized, found, settings)
        ranked += _tuned(simulated, settings) if own_exact else simulated
    if not ranked:
        raise nothing_fits(problem)
    on_step("choosing K", 2 * len(choices), total)
    if not exact:
        ranked = _tuned(ranked, settings)
    ranked.sort(key=_step_s)
    if _is_tiny(problem):
        ranked[0] = _climbed(ranked[0], settings.samples_on)
    if settings.two_d:
        on_step("searching pipelines in parallel", total - 1, total)
        ranked = sorted(
            [*ranked, *_in_two_dimensions(ranked[0].problem, settings.samples_on)], key=_step_s
        )
    best = ranked[0]
    return replace(best, exact=exact, num_candidates=num_candidates, alternatives=tuple(ranked[1:]))


def candidates(
    problem: PipelineProblem, settings: PlannerSettings
) -> tuple[list[PipelinePlan], bool]:
    """Return different plans, the least latency of the closed form first, and whether the search was exact.

    Algorithm 2 runs on the orders of devices of `orders`, with the paper's K, and with K = P − p and 1 as well if
    memory is scarce; with K = 1 on all orders of a few devices. A pruned search tries the
    likeliest cuts and even groups of devices first, and then all cuts and groups near the best plans that it found.
    """
    is_scarce, is_small = _memory_is_scarce(problem), _is_small(problem)
    rules = (ASTEROID, RULES["b"]) if is_scarce else (ASTEROID,)
    few = orders(problem, settings.samples_on)
    to_search = [(order, rule) for rule in rules for order in few]
    if is_scarce and is_small:
        every = orders(problem, settings.samples_on, all_of=_ALL_ORDERS_OF)
        to_search += [(order, at_most(1)) for order in every]
    num_searches = len(to_search) * len({problem.micro_batch_size, *settings.micro_batch_sizes})
    pruned = settings.prune
    if pruned is None:
        pruned = num_searches * search_work(problem, settings.width) > WORK_LIMIT
    ranked = _Ranked(problem, settings)
    searches: dict[PipelinePlan, tuple[list[PipelineDevice], InFlight]] = {}
    bounds, most_stages = (likely_cuts(problem, MOST_CUTS), MOST_STAGES) if pruned else (None, None)
    for order, rule in to_search:
        places = likely_places(order, MOST_PLACES) if pruned else None
        new = ranked.search(order, rule, bounds, places, most_stages)
        searches |= dict.fromkeys(new, (order, rule))
    if pruned:
        for plan in ranked.plans()[: settings.num_tuned]:
            order, rule = searches[plan]
            ranked.search(order, rule, *near(problem, plan, order), len(plan.stages))
    for device in problem.devices:
        alone = single_stage(problem, [device])
        if alone is not None:
            ranked.add(alone)
    if not searches:
        # What fits does so with K = 1, in some order.
        for order in orders(problem, all_of=_ALL_ORDERS_IF_NONE_FITS):
            places = likely_places(order, MOST_PLACES) if pruned else None
            ranked.search(order, at_most(1), bounds, places, most_stages)
    return ranked.plans(), not pruned


class _Ranked:
    """Different plans with their latency by the closed form."""

    def __init__(self, problem: PipelineProblem, settings: PlannerSettings) -> None:
        self._problem, self._settings = problem, settings
        self._latency_s: dict[PipelinePlan, float] = {}
        # By order and bounds; they do not depend on the rule for K.
        self._costs: dict[tuple[tuple[int, ...], tuple[int, ...] | None], CostsByPosition] = {}

    def plans(self) -> list[PipelinePlan]:
        """Return the plans, the least latency first."""
        return sorted(self._latency_s, key=self._latency_s.__getitem__)

    def add(self, plan: PipelinePlan) -> PipelinePlan | None:
        """Add a plan, with its samples where the settings say; return it if it is new."""
        plan = replace(plan, samples_on=self._settings.samples_on)
        if plan in self._latency_s:
            return None
        self._latency_s[plan] = update_latency(self._problem, plan, duplex=True)
        return plan

    def search(
        self,
        order: Sequence[PipelineDevice],
        rule: InFlight,
        bounds: Ints | None = None,
        places: Sequence[int] | None = None,
        max_stages: int | None = None,
    ) -> list[PipelinePlan]:
        """Add the plans of one order of devices, and return the new ones."""
        key = (tuple(device.soc for device in order), None if bounds is None else tuple(bounds))
        if key not in self._costs:
            self._costs[key] = CostsByPosition(self._problem, order, bounds, duplex=True)
        found = search(
            self._problem,
            order,
            places=places,
            rule=rule,
            width=self._settings.width,
            max_stages=max_stages,
            may_skip=True,
            costs=self._costs[key],
        )
        added = [self.add(each.plan) for each in found]
        return [plan for plan in added if plan is not None]


def best_in_flight(
    problem: PipelineProblem, plan: PipelinePlan, prediction: Prediction | None = None
) -> tuple[PipelinePlan, Prediction]:
    """Return the plan with the fastest simulated K that fits: its own, or one of the best by `QuickSchedule`.

    `prediction` is that of `plan` if it is known. Of equal times the smaller K wins, since it needs less memory.
    """
    best, best_prediction = plan, prediction or predict(problem, plan)
    if len(plan.stages) == 1 or plan.policy == Policy.BACKWARD_AFTER_FORWARD:
        return best, best_prediction
    quick, layout = QuickSchedule(problem, plan.samples_on), Layout.of(plan)
    most, tried = quick.most_in_flight(layout), {_counts(plan)}

    def try_all(every: Iterable[Counts]) -> bool:
        """Simulate the K that are new; return whether one is better."""
        nonlocal best, best_prediction
        start = best
        for counts in every:
            if counts not in tried:
                tried.add(counts)
                other = _with_counts(plan, counts)
                prediction = predict(problem, other)
                fewer = sum(counts) < sum(_counts(best))
                limit_s = best_prediction.step_s * (1.0 + (1e-9 if fewer else -1e-3))
                if prediction.step_s <= limit_s:
                    best, best_prediction = other, prediction
        return best is not start

    for found in quick.with_best_counts(quick.by_rules([layout]), _TRIED_COUNTS):
        try_all(each.counts for each in found)
    # Transfers that share links move the best K away from that of `QuickSchedule`.
    while most is not None and _is_small(problem) and try_all(sorted(steps(_counts(best), most))):
        pass
    return best, best_prediction


def _counts(plan: PipelinePlan) -> Counts:
    return tuple(stage.in_flight for stage in plan.stages)


def with_in_flight(
    problem: PipelineProblem, plan: PipelinePlan, counts: Sequence[int]
) -> PipelinePlan:
    """Return the plan with at most these K, as far as the budgets allow; K never rises from stage to stage."""
    most, found = plan.num_micro_batches, []
    for stage, count in zip(plan.stages, counts, strict=True):
        most = max(1, min(most, count, most_in_flight(problem, stage.layers, stage.members)))
        found.append(most)
    return _with_counts(plan, found)


def _with_counts(plan: PipelinePlan, counts: Sequence[int]) -> PipelinePlan:
    stages = [
        replace(stage, in_flight=count) for stage, count in zip(plan.stages, counts, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def fits(problem: PipelineProblem, plan: Plan) -> bool:
    """Return whether a plan keeps all budgets."""
    try:
        plan.check(problem)
    except InfeasiblePlan:
        return False
    return True


def single_stage(
    problem: PipelineProblem, devices: Sequence[PipelineDevice]
) -> PipelinePlan | None:
    """Return the plan of one stage on some devices; None if it does not fit."""
    found = next(search(problem, devices, bounds=np.array([0, problem.model.num_layers])), None)
    return None if found is None else found.plan


def micro_batch_choices(problem: PipelineProblem, sizes: Iterable[int]) -> list[PipelineProblem]:
    """Return the problem, and its mini-batch in micro-batches of other sizes.

    Raises `ConfigError` if a size does not divide the mini-batch.
    """
    total, found = problem.mini_batch_size, {problem.micro_batch_size: problem}
    for size in sizes:
        if size < 1 or total % size:
            raise ConfigError(
                f"planner: micro_batch_sizes has {size}, which does not divide the mini-batch of {total}"
            )
        sized = replace(problem, micro_batch_size=size, num_micro_batches=total // size)
        found.setdefault(size, sized)
    return list(found.values())


def _in_two_dimensions(problem: PipelineProblem, samples_on: int | None) -> list[Planned]:
    """Return the best plan of pipelines in parallel by the closed form, if there is one."""
    found = best_two_d(problem)
    if found is None:
        return []
    plan = with_samples_on(found, samples_on)
    return [Planned(problem=problem, plan=plan, prediction=predict(problem, plan))]


def _best_grid(
    choices: Sequence[PipelineProblem], settings: PlannerSettings, num_groups: int, on_step: OnStep
) -> Planned:
    """Return the quickest plan of 2-D parallelism over all sizes of micro-batches."""
    ranked = []
    for number, sized in enumerate(choices):
        what = f"searching grids, micro-batches of {sized.micro_batch_size}"
        on_step(what, number, len(choices))
        for found in grid_plans(sized, num_groups):
            plan = with_samples_on(found, settings.samples_on)
            ranked.append(Planned(problem=sized, plan=plan, prediction=predict(sized, plan)))
    if not ranked:
        raise _no_grid(choices[0], num_groups)
    best, *others = sorted(ranked, key=_step_s)
    return replace(best, num_candidates=len(ranked), alternatives=tuple(others))


def _no_grid(problem: PipelineProblem, num_groups: int) -> InfeasiblePlan:
    """Return the error that no groups of pipelines have a layer a stage, a sample a group and room for both."""
    groups = counted(num_groups, "group") if num_groups else "equal groups"
    return InfeasiblePlan(
        f"2-D parallelism: no plan of {groups} fits {counted(len(problem.devices), 'device')}: a group needs 2 devices "
        f"or more, at most one for each of {counted(problem.model.num_layers, 'layer')} of {problem.model.name}, room "
        "for its layers, and a sample of each micro-batch; use another number of groups or of SoCs, or strategy "
        "'hybrid-pipeline'"
    )


def _check(problem: PipelineProblem) -> None:
    model = problem.model
    if model.num_layers == 1:
        raise ConfigError(
            f"pipeline: model {model.name} has one layer; profile it in finer layers, or use groups"
        )
    if len(problem.devices) == 1:
        (only,) = problem.devices
        raise ConfigError(f"pipeline: {only.name} is the only device; give more, or train on it")


def _simulated(
    problem: PipelineProblem, plans: Sequence[PipelinePlan], settings: PlannerSettings
) -> list[Planned]:
    """Return the best plans by `QuickSchedule`, and the best of each number of stages, in the simulator."""
    quick = QuickSchedule(problem, settings.samples_on)
    timed = quick.by_rules([Layout.of(plan) for plan in plans])
    if _is_tiny(problem):
        # The rules may miss the K with which one of these is the best.
        timed = [best for (best,) in quick.with_best_counts(timed, 1)]
    socs = [device.soc for device in problem.devices]
    factor = _CHANGED_OF_SMALL if _is_small(problem) else _CHANGED
    better = improved(quick, timed, socs, width=factor * settings.width)
    ranked = [
        replace(each.plan(problem.num_micro_batches), samples_on=settings.samples_on)
        for each in sorted({*timed, *better})
    ]
    count = settings.num_simulated if _is_small(problem) else -(-settings.num_simulated // 2)
    chosen = dict.fromkeys(_different(ranked, count))
    if problem.model.num_layers * len(problem.devices) <= _MOST_OF_PAPER:
        every = search(problem, by_memory(problem.devices))
        paper = min(every, key=lambda each: each.latency_s, default=None)
        if paper is not None:
            chosen[replace(paper.plan, samples_on=settings.samples_on)] = None
    return [
        Planned(problem=problem, plan=plan, prediction=predict(problem, plan)) for plan in chosen
    ]


def _climbed(start: Planned, samples_on: int | None) -> Planned:
    """Return a plan after changes for which the simulator finds it faster, one at a time, each with its best K.

    `QuickSchedule` lets the devices of a stage keep pace, so it does not tell which device waits for which share.
    """
    best, problem = start, start.problem
    quick, socs = QuickSchedule(problem, samples_on), [each.soc for each in problem.devices]
    tried = set[Layout]()
    while isinstance(best.plan, PipelinePlan):
        layout = Layout.of(best.plan)
        new = [each for each in dict.fromkeys(neighbours(layout, socs)) if each not in tried]
        timed = sorted(each for (each,) in quick.with_best_counts(quick.by_rules(new), 1))
        plans = [
            replace(each.plan(problem.num_micro_batches), samples_on=samples_on)
            for each in timed[:_NEIGHBOURS]
        ]
        tried |= {layout, *map(Layout.of, plans)}
        every = [
            Planned(problem=problem, plan=plan, prediction=predict(problem, plan)) for plan in plans
        ]
        every.sort(key=_step_s)
        found = min(_tuned(every[:1], PlannerSettings()), key=_step_s, default=best)
        if _step_s(found) >= _step_s(best) * (1.0 - 1e-9):
            break
        best = found
    return best


def _may_be_best(
    problem: PipelineProblem, plans: Sequence[PipelinePlan], ranked: Iterable[Planned]
) -> bool:
    """Return whether the simulator may prefer one of `plans`, the least latency first, to all of `ranked`."""
    least_s = update_latency(problem, plans[0], duplex=True) if plans else inf
    return least_s <= _CLOSED_FORM_ERROR * min(map(_step_s, ranked))


def _step_s(planned: Planned) -> float:
    return planned.prediction.step_s


def _tuned(simulated: Sequence[Planned], settings: PlannerSettings) -> list[Planned]:
    """Return the plans, the best `num_tuned` of them with their best K, and more of a tiny problem."""
    found = []
    best_s = inf
    for index, each in enumerate(sorted(simulated, key=_step_s)):
        is_near = index < _TUNED_OF_TINY and _step_s(each) <= _NEAR_BEST * best_s
        chosen = index < settings.num_tuned or (is_near and _is_tiny(each.problem))
        if chosen and isinstance(each.plan, PipelinePlan):
            plan, prediction = best_in_flight(each.problem, each.plan, each.prediction)
            each = replace(each, plan=plan, prediction=prediction)
        best_s = min(best_s, _step_s(each))
        found.append(each)
    return found


def _different(plans: Sequence[PipelinePlan], count: int) -> list[PipelinePlan]:
    """Return the first `count` plans and the best of each number of stages up to `count`."""
    chosen = dict.fromkeys(plans[:count])
    for stages in range(1, count + 1):
        best = next((plan for plan in plans if len(plan.stages) == stages), None)
        if best is not None:
            chosen[best] = None
    return list(chosen)


def _is_small(problem: PipelineProblem) -> bool:
    return problem.model.num_layers * len(problem.devices) <= _MOST_OF_SMALL


def _is_tiny(problem: PipelineProblem) -> bool:
    return problem.model.num_layers * len(problem.devices) <= _MOST_OF_TINY


def _memory_is_scarce(problem: PipelineProblem) -> bool:
    """Return whether a device cannot hold the whole model with all of a pipeline's micro-batches in flight."""
    model, whole = problem.model, (0, problem.model.num_layers - 1)
    in_flight = ASTEROID.count(len(problem.devices), problem.num_micro_batches)
    kept = problem.micro_batch_size * in_flight * model.kept_bytes(*whole)
    needed = model.state_bytes(*whole, problem.optimizer_copies) + kept
    return min(device.memory_bytes for device in problem.devices) < needed


def nothing_fits(problem: PipelineProblem) -> InfeasiblePlan:
    """Return the error that no plan keeps the budgets, with the numbers."""
    model, copies = problem.model, problem.optimizer_copies
    layers_mb = [
        (model.state_bytes(index, index, copies) + model.kept_bytes(index, index)) / 1e6
        for index in range(model.num_layers)
    ]
    largest = layers_mb.index(max(layers_mb))
    budgets_mb = [device.memory_bytes / 1e6 for device in problem.devices]
    return InfeasiblePlan(
        f"pipeline: no plan of {model.name} fits: weights, gradients and optimiser take "
        f"{model.state_bytes(0, model.num_layers - 1, copies) / 1e6:.1f} MB and layer "
        f"{model.layers[largest].name} {layers_mb[largest]:.1f} MB with one sample; {len(budgets_mb)} "
        f"devices have {sum(budgets_mb):.1f} MB, at most {max(budgets_mb):.1f} MB each, for micro-batches "
        f"of {problem.micro_batch_size}; use smaller ones, more devices or an optimiser with less state"
    )
