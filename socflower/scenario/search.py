"""The search of `compare --search`: the same number of trainings for each strategy, to the quickest to the target.

Settings move by factors, without a grid that would end somewhere: from the best settings so far, each of the strategy's
keys is halved and doubled, the batch also together with the learning rate and with the number of SoCs. The search ends
where no such move is quicker, or when its trainings are used up.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from socflower.engines.ending import Ending
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.report.quality import QUALITIES
from socflower.scenario.predicted_epochs import mean_epoch
from socflower.scenario.schema.config import TrainConfig
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import GroupStrategy

Choice: TypeAlias = Mapping[str, Any]
Cost: TypeAlias = tuple[float, float]
"""Seconds to the target; if it was not reached infinity, and a rank of the quality, smaller if better."""
NOT_REACHED: Cost = (math.inf, math.inf)

_TOGETHER = (("batch_size", "learning_rate"), ("batch_size", "socs"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How many trainings each strategy may have."""

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 2:
            raise ConfigError(f"--search {self.budget}: give 2 or more trainings for each strategy")

    @property
    def key(self) -> str:
        """What is searched, for people."""
        return f"settings, {self.budget} trainings each"

    def require_target(self, scenario: Scenario, engine: str) -> None:
        """Raise `ConfigError` for a scenario without a target, and for an engine without virtual time."""
        option = f"--search {self.budget}"
        require_target(scenario, f"{option}: looks for the quickest to a target")
        if engine == "deployment":
            raise ConfigError(
                f"{option}: compares virtual times, which --engine deployment has not; use local"
            )


def require_target(scenario: Scenario, what: str) -> None:
    """Raise `ConfigError` for a scenario whose `[compare]` has no target; `what` says who needs one."""
    if scenario.compare.target_accuracy is None and scenario.compare.target_loss is None:
        raise ConfigError(f"{what}; give [compare] target_accuracy or target_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTrial:
    """One training of a search, and what it came to."""

    choice: Choice
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """All trainings of a search in their order; `is_done` if no move from the best one was left to try."""

    trials: tuple[SearchTrial, ...]
    is_done: bool

    @property
    def best(self) -> SearchTrial:
        """The cheapest; the first of several."""
        return min(self.trials, key=lambda trial: trial.cost)


def pattern_search(
    start: Choice,
    moves_from: Callable[[Choice], Iterator[Choice]],
    cost_of: Callable[[Choice, Cost], Cost | None],
    budget: int,
) -> SearchResult:
    """Try `start`, then moves from the best choice so far, until none is better or `budget` choices were tried.

    `cost_of` is given the best cost so far, above which it need not know how much a choice costs; None is a choice
    that cannot run, which is not counted. A move that was better is made again, before others.
    """
    best, cost = start, NOT_REACHED
    trials: list[SearchTrial] = []
    tried: set[tuple[tuple[str, Any], ...]] = set()
    ahead = [start]
    while True:
        moves = (*ahead, *moves_from(best))
        choice = next((each for each in moves if _key(each) not in tried), None)
        if choice is None or len(trials) == budget:
            return SearchResult(trials=tuple(trials), is_done=choice is None)
        tried.add(_key(choice))
        ahead = []
        now = cost_of(choice, cost)
        if now is None:
            continue
        trials.append(SearchTrial(choice=choice, cost=now))
        if now < cost:
            ahead = [again] if (again := _again(best, choice)) is not None else []
            best, cost = choice, now


def _key(choice: Choice) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(choice.items()))


def _again(before: Choice, after: Choice) -> Choice | None:
    """Return the choice that the same move makes of its result; None where a number would not stay whole."""
    # By the factor, which is exact: value * value / before would be a neighbour of a value that did not move.
    made = {key: value * (value / before[key]) for key, value in after.items()}
    whole = {key: int(made[key]) for key, value in after.items() if isinstance(value, int)}
    return {**made, **whole} if all(made[key] == whole[key] >= 1 for key in whole) else None


def is_over(ending: Ending, latest: Mapping[str, Any]) -> bool:
    """Whether a run has ended by its latest round: by its quality, its virtual time, or its epochs."""
    quality = ending.quality
    if quality is not None and QUALITIES[quality].reaches(latest[quality], ending.target):
        return True
    limits = {"virtual_s": ending.most_virtual_s, "epoch": ending.most_epochs}
    return any(limit is not None and latest[key] >= limit for key, limit in limits.items())


# --------------------------------------------------------------------------------------------- of a scenario
def searched_keys(scenario: Scenario) -> tuple[str, ...]:
    """Return the keys of `[train]` and `[strategy]` that a search moves for the scenario's strategy.

    Its other settings are the scenario's. One group has no interval: it is evaluated as often as the scenario says.
    """
    kind = scenario.kind
    keys = ["batch_size", "learning_rate", "epochs", "socs", "groups", "sync_interval_epochs"]
    synchronises = isinstance(kind, GroupStrategy) and kind.num_groups != 1
    unread = kind.unread_keys | (set() if synchronises else {"sync_interval_epochs"})
    if kind.uses_cloud:
        unread |= {"socs"}
    texts = {key for key in keys if isinstance(value_of(scenario, key), str)}
    return tuple(key for key in keys if key not in unread | texts)


def value_of(scenario: Scenario, key: str) -> Any:
    """Return the value of a key of `[train]` or `[strategy]`."""
    table = scenario.train if key in TrainConfig.model_fields else scenario.strategy
    return getattr(table, key)


def start_of(scenario: Scenario) -> dict[str, Any]:
    """Return the choice that the scenario is."""
    values = {key: value_of(scenario, key) for key in searched_keys(scenario)}
    if "socs" in values and values["socs"] is None:
        values["socs"] = scenario_cluster(scenario).num_socs
    return values


def first_choice(scenario: Scenario) -> dict[str, Any]:
    """Return the choice that a search begins with: the scenario's, in one group with the SoCs of its quickest epoch.

    How many SoCs share a batch leaves exact training as it is, so that no training is needed to choose them: from all
    SoCs down, a ring would spend its trainings on the way to the few that small models want.
    """
    choice, kind = start_of(scenario), scenario.kind
    if "socs" not in choice or not isinstance(kind, GroupStrategy) or kind.num_groups != 1:
        return choice
    epochs_s: dict[int, float] = {}
    cluster, number = scenario_cluster(scenario), int(choice["socs"])
    while number:
        tried = scenario.replaced(strategy=scenario.strategy.replaced(socs=number))
        # Such as a share of the batch beyond a device's memory.
        with suppress(ConfigError, InfeasiblePlan):
            epochs_s[number] = mean_epoch(tried, cluster).duration_s
        number //= 2
    return (
        {**choice, "socs": min(epochs_s, key=lambda each: epochs_s[each])} if epochs_s else choice
    )


def moves_of(scenario: Scenario) -> Callable[[Choice], Iterator[Choice]]:
    """Return the moves from a choice: of one key at a time, then of two together; none beyond the cluster."""
    num_socs = scenario_cluster(scenario).num_socs

    def allowed(choice: Choice) -> bool:
        socs: int = choice.get("socs", num_socs)
        return 1 <= socs <= num_socs and 1 <= int(choice.get("groups", 1)) <= socs

    def moves(choice: Choice) -> Iterator[Choice]:
        singles = [(key,) for key in choice]
        pairs = [pair for pair in _TOGETHER if all(key in choice for key in pair)]
        for keys in (*singles, *pairs):
            for factor in (2, 0.5):
                moved = {**choice, **{key: _times(choice[key], factor) for key in keys}}
                if allowed(moved) and moved != choice:
                    yield moved

    return moves


def _times(value: float, factor: float) -> float:
    """Return a value times a factor; whole numbers stay whole, and at least 1."""
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor
