"""The choice among pipelines: a small Pareto set of Algorithm 2, re-ranked and given its K by the simulator (F28, F32).

Algorithm 2 fixes the order of devices and believes the closed form. Here it runs on several orders, keeps several
pipelines of each state and may leave devices out. The best by the closed form are simulated, and the best of those with
other numbers of micro-batches in flight.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from socflower.errors import ConfigError, InfeasiblePlan, require_range
from socflower.pipeline.plan import PipelinePlan, Plan, Policy, Prediction, Stage, with_samples_on
from socflower.pipeline.planner.closed_form import update_latency
from socflower.pipeline.planner.dynamic_program import Found, search
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
from socflower.pipeline.planner.two_dimensions import best_two_d
from socflower.pipeline.problem import PipelineDevice, PipelineProblem
from socflower.pipeline.schedule.order import ASTEROID, RULES, InFlight
from socflower.pipeline.schedule.run import simulate_schedule
from socflower.plain_numbers import plain_numbers

WORK_LIMIT = 5e8
"""Values that the exact search may compute over all orders, rules and sizes of micro-batches (`search_work`), about six
seconds of one core. Beyond it cuts, stages and groups are pruned."""

OnStep = Callable[[str, int, int], None]
"""Gets what is computed next, and the numbers of finished steps and of all."""

_MOST_OF_PAPER = 4000
"""Layers x devices up to which the plan of Algorithm 2 itself is among those that are simulated."""


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerSettings:
    """How far the planner looks."""

    width: int = 4  # pipelines kept of each state
    num_simulated: int = 8  # the best by the closed form that are simulated
    num_tuned: int = 3  # the best of those that are simulated with other K
    micro_batch_sizes: tuple[int, ...] = ()  # others of the same mini-batch to try; each divides it
    samples_on: int | None = (
        None  # the SoC that has samples and labels; None: they are where they are needed
    )
    two_d: bool = True  # whether to look at pipelines in parallel too
    prune: bool | None = None  # None: if the search would exceed `WORK_LIMIT`

    def __post_init__(self) -> None:
        require_range(
            "planner",
            least=1,
            width=self.width,
            num_simulated=self.num_simulated,
            num_tuned=self.num_tuned,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with its prediction, and how it was found."""

    problem: PipelineProblem  # with the micro-batch size of the plan
    plan: Plan
    prediction: Prediction
    exact: bool = True  # whether all cuts and numbers of stages were looked at
    num_candidates: int = 1
    alternatives: "tuple[Planned, ...]" = ()  # the next best that were simulated

    def to_document(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            **self.plan.to_document(self.problem, self.prediction),
            "exact": self.exact,
            "num_candidates": self.num_candidates,
        }


def predict(problem: PipelineProblem, plan: Plan, *, within_memory: bool = True) -> Prediction:
    """Return what an update of a plan costs, by the closed form and in virtual time at full speed.

    Raises `InfeasiblePlan` if it exceeds a budget, unless budgets are left out of account.
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


def algorithm_2(problem: PipelineProblem) -> Found:
    """Return the paper's plan: devices by memory, descending, one pipeline a state, the least latency of Eq. 4.

    Raises `InfeasiblePlan` if no pipeline fits the budgets.
    """
    found = min(
        search(problem, by_memory(problem.devices)), key=lambda each: each.latency_s, default=None
    )
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
    Other K are tried for the best `num_tuned` plans of each size of micro-batches, and of all sizes together where the
    search is pruned, whose plans take long to simulate.

    Raises
    ------
    ConfigError
        If the model has one layer, so that it cannot be cut, or there is only one device.
    InfeasiblePlan
        If no plan fits the budgets.
    """
    settings = settings or PlannerSettings()
    _check(problem)
    if settings.samples_on is not None:
        problem.device(settings.samples_on)
    ranked: list[Planned] = []
    num_candidates, exact = 0, True
    choices = micro_batch_choices(problem, settings.micro_batch_sizes)
    total = 2 * len(choices) + 1 + settings.two_d
    for number, sized in enumerate(choices):
        what = f"micro-batches of {sized.micro_batch_size}"
        on_step(f"searching plans, {what}", 2 * number, total)
        found, own_exact = candidates(sized, settings)
        num_candidates, exact = num_candidates + len(found), exact and own_exact
        on_step(f"simulating the best, {what}", 2 * number + 1, total)
        simulated = _simulated(sized, found, settings)
        ranked += _tuned(simulated, settings) if own_exact else simulated
    if not ranked:
        raise nothing_fits(problem)
    on_step("choosing K", 2 * len(choices), total)
    if not exact:
        ranked = _tuned(ranked, settings)
    ranked.sort(key=_step_s)
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
    """Return different plans, the least latency of the closed form first, and whether nothing was pruned.

    They are those of several orders of devices: by memory as in the paper, by speed in either direction, and as they
    are numbered, which keeps boards together; with the paper's K and with one a stage where memory is scarce. Of a few
    devices all orders are tried. A pruned
    search looks at the likeliest cuts and at even groups of devices first, and then at all near the best it found.
    """
    rules = (ASTEROID, RULES["b"]) if _memory_is_scarce(problem) else (ASTEROID,)
    to_search = orders(problem, settings.samples_on)
    num_searches = (
        len(rules) * len(to_search) * len({problem.micro_batch_size, *settings.micro_batch_sizes})
    )
    pruned = (
        settings.prune
        if settings.prune is not None
        else (num_searches * search_work(problem, settings.width) > WORK_LIMIT)
    )
    bounds, most_stages = (likely_cuts(problem, MOST_CUTS), MOST_STAGES) if pruned else (None, None)
    found: dict[PipelinePlan, float] = {}
    searches: dict[PipelinePlan, tuple[list[PipelineDevice], InFlight]] = {}
    for rule in rules:
        for order in to_search:
            places = likely_places(order, MOST_PLACES) if pruned else None
            for each in search(
                problem,
                order,
                bounds=bounds,
                places=places,
                rule=rule,
                width=settings.width,
                max_stages=most_stages,
                may_skip=True,
                duplex=True,
            ):
                plan = replace(each.plan, samples_on=settings.samples_on)
                if plan not in found:
                    found[plan] = update_latency(problem, plan, duplex=True)
                    searches[plan] = order, rule
    if pruned:
        for plan in sorted(found, key=found.__getitem__)[: settings.num_tuned]:
            order, rule = searches[plan]
            close, places = near(problem, plan, order)
            for each in search(
                problem,
                order,
                bounds=close,
                places=places,
                rule=rule,
                width=settings.width,
                max_stages=len(plan.stages),
                may_skip=True,
                duplex=True,
            ):
                moved = replace(each.plan, samples_on=settings.samples_on)
                found[moved] = update_latency(problem, moved, duplex=True)
    for device in problem.devices:
        alone = single_device(problem, device)
        if alone is not None:
            alone = replace(alone, samples_on=settings.samples_on)
            found[alone] = update_latency(problem, alone, duplex=True)
    return sorted(found, key=found.__getitem__), not pruned


def best_in_flight(problem: PipelineProblem, plan: PipelinePlan) -> tuple[PipelinePlan, Prediction]:
    """Return a plan with the K of least simulated time among the rules of the paper and larger ones, within memory.

    Of equal times the smaller K wins, which keeps less memory.
    """
    best, best_prediction = plan, predict(problem, plan)
    if len(plan.stages) == 1 or plan.policy == Policy.BACKWARD_AFTER_FORWARD:
        return best, best_prediction
    tried = {tuple(stage.in_flight for stage in plan.stages)}
    rules = [
        RULES["b"],
        RULES["a"],
        RULES["c"],
        InFlight(3, 0),
        InFlight(4, 1),
        InFlight(0, plan.num_micro_batches),
    ]
    for rule in rules:
        other = with_in_flight(problem, plan, rule.counts(len(plan.stages), plan.num_micro_batches))
        counts = tuple(stage.in_flight for stage in other.stages)
        if counts in tried or not fits(problem, other):
            continue
        tried.add(counts)
        prediction = predict(problem, other)
        fewer = sum(counts) < sum(stage.in_flight for stage in best.stages)
        limit_s = best_prediction.step_s * (1.0 + (1e-9 if fewer else -1e-3))
        if prediction.step_s <= limit_s:
            best, best_prediction = other, prediction
    return best, best_prediction


def with_in_flight(
    problem: PipelineProblem, plan: PipelinePlan, counts: Sequence[int]
) -> PipelinePlan:
    """Return the plan with at most these K, fewer where a budget holds fewer; K never rises from stage to stage."""
    stages, most = [], plan.num_micro_batches
    for stage, count in zip(plan.stages, counts, strict=True):
        most = max(
            1,
            min(
                [
                    most,
                    count,
                    *(
                        _most_in_flight(problem, stage, soc, share)
                        for soc, share in zip(stage.devices, stage.shares, strict=True)
                    ),
                ]
            ),
        )
        stages.append(replace(stage, in_flight=most))
    return replace(plan, stages=tuple(stages))


def fits(problem: PipelineProblem, plan: Plan) -> bool:
    """Return whether a plan keeps all budgets."""
    try:
        plan.check(problem)
    except InfeasiblePlan:
        return False
    return True


def single_device(problem: PipelineProblem, device: PipelineDevice) -> PipelinePlan | None:
    """Return the plan of one device alone; None if it does not fit."""
    found = next(search(problem, [device], bounds=np.array([0, problem.model.num_layers])), None)
    return None if found is None else found.plan


def micro_batch_choices(problem: PipelineProblem, sizes: Iterable[int]) -> list[PipelineProblem]:
    """Return the problem, and its mini-batch in micro-batches of other sizes; `ConfigError` if one does not divide."""
    found = {problem.micro_batch_size: problem}
    for size in sizes:
        if size < 1 or problem.mini_batch_size % size:
            raise ConfigError(
                f"planner: a micro-batch of {size} samples does not divide the mini-batch of "
                f"{problem.mini_batch_size}; use one of its divisors"
            )
        found.setdefault(
            size,
            replace(
                problem, micro_batch_size=size, num_micro_batches=problem.mini_batch_size // size
            ),
        )
    return list(found.values())


def _in_two_dimensions(problem: PipelineProblem, samples_on: int | None) -> list[Planned]:
    """Return the best plan of pipelines in parallel by the closed form, if there is one."""
    found = best_two_d(problem)
    if found is None:
        return []
    plan = with_samples_on(found, samples_on)
    return [Planned(problem=problem, plan=plan, prediction=predict(problem, plan))]


def _check(problem: PipelineProblem) -> None:
    model = problem.model
    if model.num_layers == 1:
        raise ConfigError(
            f"pipeline: model {model.name} has one layer, {model.layers[0].name}, and cannot be cut into "
            "stages; profile it in finer layers, or train it by data parallelism"
        )
    if len(problem.devices) == 1:
        raise ConfigError(
            f"pipeline: one device, {problem.devices[0].name}, and a pipeline needs 2 or more; give more "
            "devices, or train on it alone"
        )


def _simulated(
    problem: PipelineProblem, plans: Sequence[PipelinePlan], settings: PlannerSettings
) -> list[Planned]:
    chosen = dict.fromkeys(_different(plans, settings.num_simulated))
    if plans and problem.model.num_layers * len(problem.devices) <= _MOST_OF_PAPER:
        chosen[replace(algorithm_2(problem).plan, samples_on=settings.samples_on)] = None
    return [
        Planned(problem=problem, plan=plan, prediction=predict(problem, plan)) for plan in chosen
    ]


def _step_s(planned: Planned) -> float:
    return planned.prediction.step_s


def _tuned(simulated: Sequence[Planned], settings: PlannerSettings) -> list[Planned]:
    """Return plans, the best of them with the K that are best."""
    found = []
    for index, each in enumerate(sorted(simulated, key=_step_s)):
        if index < settings.num_tuned and isinstance(each.plan, PipelinePlan):
            plan, prediction = best_in_flight(each.problem, each.plan)
            each = replace(each, plan=plan, prediction=prediction)
        found.append(each)
    return found


def _different(plans: Sequence[PipelinePlan], count: int) -> list[PipelinePlan]:
    """Return the first plans, with at least the best of each number of stages up to `count` among them."""
    chosen = dict.fromkeys(plans[:count])
    for stages in range(1, count + 1):
        best = next((plan for plan in plans if len(plan.stages) == stages), None)
        if best is not None:
            chosen[best] = None
    return list(chosen)


def _memory_is_scarce(problem: PipelineProblem) -> bool:
    """Return whether some device could not hold the whole model with all of a pipeline's micro-batches in flight."""
    model, size = problem.model, len(problem.devices)
    needed = model.state_bytes(
        0, model.num_layers - 1, problem.optimizer_copies
    ) + problem.micro_batch_size * ASTEROID.count(
        size, problem.num_micro_batches
    ) * model.kept_bytes(0, model.num_layers - 1)
    return min(device.memory_bytes for device in problem.devices) < needed


def _most_in_flight(problem: PipelineProblem, stage: Stage, soc: int, share: int) -> int:
    model = problem.model
    kept = share * model.kept_bytes(stage.first_layer, stage.last_layer)
    room = problem.device(soc).memory_bytes - model.state_bytes(
        stage.first_layer, stage.last_layer, problem.optimizer_copies
    )
    return int(room / kept) if kept else 1 << 30


def nothing_fits(problem: PipelineProblem) -> InfeasiblePlan:
    """Return the error that no plan keeps the budgets, with the numbers."""
    model = problem.model
    needed = model.state_bytes(0, model.num_layers - 1, problem.optimizer_copies)
    have = sum(device.memory_bytes for device in problem.devices)
    widest = max(
        range(model.num_layers),
        key=lambda layer: (
            model.state_bytes(layer, layer, problem.optimizer_copies)
            + model.kept_bytes(layer, layer)
        ),
    )
    one = model.state_bytes(widest, widest, problem.optimizer_copies) + model.kept_bytes(
        widest, widest
    )
    return InfeasiblePlan(
        f"pipeline: no plan of {model.name} fits: weights, gradients and optimiser take {needed / 1e6:.1f} MB and its "
        f"largest layer, {model.layers[widest].name}, {one / 1e6:.1f} MB with one sample, while {len(problem.devices)} "
        f"devices have {have / 1e6:.1f} MB, the largest "
        f"{max(device.memory_bytes for device in problem.devices) / 1e6:.1f} MB, and a stage shares micro-batches of "
        f"{problem.micro_batch_size}; use smaller micro-batches, more devices or an optimiser with less state"
    )
