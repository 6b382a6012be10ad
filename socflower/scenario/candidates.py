"""The settings that `socflower tune` chooses from, with what an epoch of each costs by prediction.

A candidate is all settings with the same steps: how many SoCs share a batch, over which exchange and with which overlap
changes time and energy, and not what a step computes, up to rounding and the statistics of BatchNorm. So one training
tells how many epochs all settings of a candidate need, and the prediction what these cost.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.scenario.planning import planned_training
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import scenario_cluster, to_document
from socflower.scenario.schema.strategies import STRATEGIES, GroupStrategy, group_strategy
from socflower.scenario.search import searched_keys, start_of

_FACTORS: Mapping[str, tuple[float, ...]] = {
    "batch_size": (0.5, 1.0, 2.0),
    "learning_rate": (0.5, 1.0, 2.0),
    "groups": (0.5, 1.0, 2.0),
    "sync_interval_epochs": (0.5, 1.0, 2.0),
}
_BUCKETS = (1, 8)
# Keys of [train] that candidates differ in, or share.
_TRIED_OF_TRAIN = ("batch_size", "learning_rate", "epochs")
# Keys of [strategy] that change what a step costs, and not what it computes.
_OF_COSTS = ("exchange", "overlap_buckets", "uplink_turns", "leaders", "fusion")


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Virtual seconds and joules."""

    time_s: float
    energy_j: float

    def times(self, number: float) -> "Costs":
        """Return what so many cost."""
        return Costs(time_s=self.time_s * number, energy_j=self.energy_j * number)

    def is_dominated(self, others: Iterable["Costs"]) -> bool:
        """Whether another is as quick and as frugal, and better in one of the two."""
        return any(
            other.time_s <= self.time_s and other.energy_j <= self.energy_j and other != self
            for other in others
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A scenario with all of its settings, what distinguishes them, and the mean cost of an epoch."""

    scenario: Scenario
    choice: Mapping[str, Any]
    epoch: Costs

    @property
    def strategy(self) -> str:
        """The name of its strategy."""
        return self.scenario.strategy.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Settings with the same steps, of which none dominates another; the quickest is the first."""

    settings: tuple[Setting, ...]
    # What a step and its synchronisations are: (samples a step, groups, epochs between synchronisations).
    step: tuple[int, int, float]
    # What else determines the weights, but for the learning rate.
    arithmetic: str


def candidates_of(
    scenario: Scenario, strategies: Sequence[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates of these strategies that no other one is bound to beat, and why strategies have none.

    Tried are halves and doubles of the scenario's settings under each strategy, of SoCs down to one. A candidate is
    left out if another one of the same arithmetic, with no more samples a step, no more groups and no longer intervals,
    so that it needs no more epochs, takes less for an epoch. A strategy has none if all that it tries is refused.
    """
    by_key: dict[str, list[Setting]] = {}
    refused: dict[str, str] = {}
    for name in strategies:
        errors: list[str] = []
        settings = list(_settings(scenario, name, errors))
        for setting in settings:
            by_key.setdefault(_key(setting.scenario), []).append(setting)
        if not settings:
            refused[name] = errors[0]
    found = [_candidate(settings) for settings in by_key.values()]
    return [each for each in found if not _is_beaten(each, found)], refused


def _settings(scenario: Scenario, name: str, errors: list[str]) -> Iterator[Setting]:
    """Yield the settings that are tried for a strategy and that fit; add why the others do not to `errors`."""
    own = dict(scenario.compare.train.get(name, {}))
    # Learning rates of one schedule are compared.
    own.pop("epochs", None)
    try:
        under = scenario.under(name, own)
    except ConfigError as error:
        errors.append(str(error))
        return
    kind, start = group_strategy(name), start_of(under)
    keys = [key for key in searched_keys(under) if key in _FACTORS]
    values = [_around(start[key], _FACTORS[key]) for key in keys]
    counts = list(_halves(start["socs"])) if "socs" in start else [None]
    exchanges = kind.num_socs is None and not kind.never_exchanges_gradients(under.strategy.groups)
    overlaps = _BUCKETS if exchanges else (None,)
    # The learning rate costs nothing.
    costs: dict[str, Costs] = {}
    for chosen in product(*values, counts, overlaps):
        *moved, socs, buckets = chosen
        choice: dict[str, Any] = dict(zip(keys, moved, strict=True))
        choice |= {"socs": socs} if socs is not None else {}
        choice |= {"overlap_buckets": buckets} if buckets is not None else {}
        priced = json.dumps({**choice, "learning_rate": None})
        try:
            changed = scenario.under(name, {**own, **choice})
            if priced not in costs:
                costs[priced] = _epoch_of(changed)
        except (ConfigError, InfeasiblePlan) as error:
            # Such as more groups than SoCs, or a share of a batch beyond a device's memory.
            errors.append(str(error))
            continue
        yield Setting(scenario=changed, choice=choice, epoch=costs[priced])


def _epoch_of(scenario: Scenario) -> Costs:
    planned = planned_training(scenario, scenario_cluster(scenario))
    whole = Costs(time_s=planned.duration_s, energy_j=planned.energy_j)
    return whole.times(1 / scenario.train.epochs)


def _around(value: Any, factors: Sequence[float]) -> list[Any]:
    """Return a value times the factors; whole numbers stay whole, and at least 1."""
    if isinstance(value, int):
        return list(dict.fromkeys(max(1, round(value * factor)) for factor in factors))
    return [value * factor for factor in factors]


def _halves(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


def _key(scenario: Scenario) -> str:
    """Return what determines the weights after a number of epochs, as a text."""
    return json.dumps(
        [_arithmetic(scenario), _step(scenario), scenario.train.learning_rate], sort_keys=True
    )


def _arithmetic(scenario: Scenario) -> str:
    """Return what determines the weights besides step and learning rate."""
    document = to_document(scenario)
    kind = STRATEGIES[scenario.strategy.name]
    strategy = {
        key: value
        for key, value in document["strategy"].items()
        if key not in (*_OF_COSTS, "name", "socs", "groups", "sync_interval_epochs", "compression")
    }
    # Which a strategy may decide.
    strategy["compression"] = scenario.gradient_exchange[1]
    # With one group all synchronous strategies compute the same steps; an arithmetic of its own has its own class.
    own = getattr(kind, "target", scenario.strategy.name)
    train = {key: value for key, value in document["train"].items() if key not in _TRIED_OF_TRAIN}
    # A method may bring them.
    train |= {"optimizer": scenario.optimizer, "momentum": scenario.momentum}
    return json.dumps([strategy, own, train, document["precision"]], sort_keys=True)


def _step(scenario: Scenario) -> tuple[int, int, float]:
    kind, settings = STRATEGIES[scenario.strategy.name], scenario.strategy
    assert isinstance(kind, GroupStrategy)
    num_socs = settings.socs or scenario_cluster(scenario).num_socs
    groups = kind.groups(settings.groups, num_socs)
    if not isinstance(groups, int):
        raise ConfigError(
            f"tune: groups = {groups!r} is tried while training; give a number of groups"
        )
    interval = kind.sync_interval_epochs(settings.sync_interval_epochs)
    # One group has nothing to synchronise.
    epochs = 0.0 if groups == 1 or isinstance(interval, str) else float(interval)
    return groups * scenario.train.batch_size, groups, epochs


def _candidate(settings: Sequence[Setting]) -> Candidate:
    """Return settings with the same steps as a candidate, without those that others dominate."""
    kept = [
        each
        for index, each in enumerate(settings)
        if not each.epoch.is_dominated(other.epoch for other in settings)
        and each.epoch not in [other.epoch for other in settings[:index]]
    ]
    kept.sort(key=lambda setting: setting.epoch.time_s)
    first = kept[0].scenario
    return Candidate(settings=tuple(kept), step=_step(first), arithmetic=_arithmetic(first))


def _is_beaten(candidate: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether each of a candidate's settings is dominated by settings of candidates that need no more epochs."""
    stronger = [
        setting.epoch
        for other in others
        if other is not candidate
        and other.arithmetic == candidate.arithmetic
        and other.step != candidate.step
        and all(theirs <= own for theirs, own in zip(other.step, candidate.step, strict=True))
        for setting in other.settings
    ]
    return all(setting.epoch.is_dominated(stronger) for setting in candidate.settings)


# ---------------------------------------------------------------------------------------------------- the front
def front(costs: Sequence[Costs]) -> list[int]:
    """Return the indices of costs that no other dominates, the quickest first; the first of equal ones."""
    kept = [
        index
        for index, own in enumerate(costs)
        if not own.is_dominated(costs) and own not in costs[:index]
    ]
    return sorted(kept, key=lambda index: costs[index].time_s)


def with_front(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with `time_s` and `energy_j`, and whether each is `on_front`."""
    best = front([Costs(time_s=row["time_s"], energy_j=row["energy_j"]) for row in rows])
    return [{**row, "on_front": index in best} for index, row in enumerate(rows)]


def by_fronts(costs: Sequence[Costs]) -> list[int]:
    """Return all indices: first those of the front, then of the front of the others, and so on."""
    left, order = list(range(len(costs))), []
    while left:
        layer = [left[index] for index in front([costs[each] for each in left])]
        order += layer
        left = [index for index in left if index not in layer]
    return order
