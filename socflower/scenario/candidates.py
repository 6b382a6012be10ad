"""The settings that `socflower tune` chooses from, with what an epoch of each costs by prediction.

A candidate is all settings with the same steps: how many SoCs share a batch, over which exchange, with which overlap or
in which stages changes time and energy, and not what a step computes, up to rounding and the statistics of BatchNorm.
So one training tells how many epochs all settings of a candidate need, and the prediction what these cost.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.prepared_run import PreparedRun, prepare
from socflower.scenario.schema.config import ARITHMETICS
from socflower.scenario.schema.file import num_participants, scenario_cluster, to_document
from socflower.scenario.schema.pipeline import PipelineConfig
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.search import searched_keys, start_of, value_of
from socflower.strategies.presets import STRATEGIES, GroupStrategy

_FACTORS: Mapping[str, tuple[float, ...]] = {
    "batch_size": (0.5, 1.0, 2.0),
    "learning_rate": (0.5, 1.0, 2.0),
    "groups": (0.5, 1.0, 2.0),
    "sync_interval_epochs": (0.5, 1.0, 2.0),
    "local_epochs": (1.0, 2.0),
}
_BUCKETS = (1, 8)
_EXCHANGES = ("ring", "server")
_MOST_STAGES = 8
"""SoCs up to which pipelines are tried: planning one over more takes minutes, and their batches have few samples."""
# Keys of [train] that candidates differ in, or share.
_TRIED_OF_TRAIN = ("batch_size", "learning_rate", "epochs", "local_epochs")
# Keys of [strategy] that change what a step costs, and not what it computes.
_OF_COSTS = ("exchange", "overlap_buckets", "uplink_turns", "leaders", "fusion")
_SYNCHRONOUS = "socflower.strategies.socflow:SoCFlow"
"""What trains one group; pipelines compute the same steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedCosts:
    """Virtual seconds and joules."""

    time_s: float
    energy_j: float

    def times(self, number: float) -> "PredictedCosts":
        """Return what so many cost."""
        return PredictedCosts(time_s=self.time_s * number, energy_j=self.energy_j * number)

    def is_dominated(self, others: Iterable["PredictedCosts"]) -> bool:
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
    epoch: PredictedCosts

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
    # All that determines the weights, as a text; on other links or devices it is the same.
    key: str

    @property
    def trained(self) -> Setting:
        """The setting that is trained for all: the quickest one, but not a pipeline, whose stages train slower here."""
        whole = (each for each in self.settings if not STRATEGIES[each.strategy].is_pipeline)
        return next(whole, self.settings[0])


def candidates_of(
    scenario: Scenario, strategies: Sequence[str], arithmetics: Sequence[str] = ARITHMETICS
) -> tuple[list[Candidate], dict[str, str]]:
    """Return all candidates of these strategies, and why strategies have none.

    Tried are halves and doubles of the scenario's settings under each strategy, in each arithmetic, of SoCs down to
    one. A strategy has none in an arithmetic in which all that it tries is refused; a model that int8 cannot train has
    none in int8.
    """
    by_key: dict[str, list[Setting]] = {}
    refused: dict[str, str] = {}
    for arithmetic in arithmetics:
        try:
            changed = _in_arithmetic(scenario, arithmetic)
            _require_operators(changed)
        except ConfigError as error:
            refused[arithmetic] = str(error)
            continue
        for name in strategies:
            errors: list[str] = []
            settings = list(_settings(changed, name, errors))
            for setting in settings:
                by_key.setdefault(weights_key(setting.scenario), []).append(setting)
            if not settings:
                refused[f"{name} in {arithmetic}"] = errors[0]
    return [_candidate(key, settings) for key, settings in by_key.items()], refused


def unbeaten(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other one is bound to beat.

    One is left out if another one of the same arithmetic, with no more samples a step, no more groups and no longer
    intervals, so that it needs no more epochs, takes less for an epoch.
    """
    return [each for each in candidates if not _is_beaten(each, candidates)]


def _require_operators(scenario: Scenario) -> None:
    """Raise `ConfigError` for a model with operators that the scenario's arithmetic lacks."""
    if scenario.precision.arithmetic != "fp32":
        # One SoC alone needs the least: what it cannot train, no strategy can.
        prepare(scenario.under("sgd", {}).replaced(events=()))


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
    # The learning rate costs nothing.
    costs: dict[str, PredictedCosts] = {}
    for choice in _choices(under):
        priced = json.dumps({**choice, "learning_rate": None})
        try:
            changed = scenario.under(name, {**own, **choice})
            if priced not in costs:
                PreparedRun(changed).check("local", trains_here=False)
                costs[priced] = _epoch_of(changed)
        except (ConfigError, InfeasiblePlan) as error:
            # Such as more groups than SoCs, or a share of a batch beyond a device's memory.
            errors.append(str(error))
            continue
        said = {**choice, "arithmetic": scenario.precision.arithmetic}
        yield Setting(scenario=changed, choice=said, epoch=costs[priced])


def _choices(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Yield the values of keys that are tried for the scenario's strategy; not all of them fit."""
    kind, start = scenario.kind, start_of(scenario)
    keys = [key for key in searched_keys(scenario) if key in _FACTORS]
    if not isinstance(kind, GroupStrategy) and not kind.is_grid:
        keys = [key for key in keys if key not in ("groups", "sync_interval_epochs")]
    if "local_epochs" not in kind.unread_keys:
        keys.append("local_epochs")
    if kind.is_pipeline:
        # When it is evaluated, and how many groups are quickest, follow from the others.
        keys = ["batch_size", "learning_rate"]
    if scenario.precision.has_int8_weights:
        # They move by `gradient_bits`, or relative to themselves.
        keys.remove("learning_rate")
    axes = {key: _around(value_of(scenario, key), _FACTORS[key]) for key in keys}
    if "socs" in start:
        counts = list(_halves(start["socs"]))
        few = [count for count in counts if count <= _MOST_STAGES]
        axes["socs"] = few if kind.is_pipeline else counts
    if isinstance(kind, GroupStrategy) and kind.num_socs is None:
        axes |= _axes_of_exchange(scenario, kind)
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _axes_of_exchange(scenario: Scenario, kind: GroupStrategy) -> dict[str, list[Any]]:
    """Return what is tried of the exchange of gradients; nothing where there is none."""
    if kind.never_exchanges_gradients(scenario.strategy.groups):
        return {}
    axes: dict[str, list[Any]] = {}
    if scenario.precision.arithmetic != "int8":
        axes["overlap_buckets"] = list(_BUCKETS)
    if "exchange" not in kind.unread_keys:
        axes["exchange"] = list(_EXCHANGES)
    return axes


def _epoch_of(scenario: Scenario) -> PredictedCosts:
    planned = predicted_training(scenario, scenario_cluster(scenario))
    whole = PredictedCosts(time_s=planned.duration_s, energy_j=planned.energy_j)
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


def weights_key(scenario: Scenario) -> str:
    """Return what determines the weights after a number of epochs, as a text."""
    return json.dumps(
        [_arithmetic(scenario), _step(scenario), scenario.train.learning_rate], sort_keys=True
    )


def _arithmetic(scenario: Scenario) -> str:
    """Return what determines the weights besides step and learning rate."""
    document = to_document(scenario)
    name, kind = scenario.strategy.name, scenario.kind
    strategy = {
        key: value
        for key, value in document["strategy"].items()
        if key not in (*_OF_COSTS, "name", "socs", "groups", "sync_interval_epochs", "compression")
    }
    # Which a strategy may decide.
    strategy["compression"] = scenario.exchange.compression
    # With one group all synchronous strategies compute the same steps; an arithmetic of its own has its own class.
    own = name
    if isinstance(kind, GroupStrategy):
        own = kind.target if kind.num_groups is None else _SYNCHRONOUS
    if kind.is_pipeline:
        own = _arithmetic_of_pipeline(scenario.pipeline or PipelineConfig())
    train = {key: value for key, value in document["train"].items() if key not in _TRIED_OF_TRAIN}
    # A method may bring them.
    train |= {"optimizer": scenario.optimizer, "momentum": scenario.momentum}
    return json.dumps([strategy, own, train, document["precision"]], sort_keys=True)


def _arithmetic_of_pipeline(table: PipelineConfig) -> str:
    """Return what a pipeline computes: the steps of one group, unless activations are rounded or stages are in int8."""
    inexact = (table.activation_bits, table.gradient_bits, table.int8_socs)
    exact = (32, 32, ())
    return _SYNCHRONOUS if inexact == exact else f"pipeline {inexact} {table.activation_feedback}"


def _in_arithmetic(scenario: Scenario, arithmetic: str) -> Scenario:
    """Return the scenario with another arithmetic; without its momentum where integer updates have none."""
    precision = scenario.precision.under(arithmetic)
    momentum = None if precision.has_int8_weights else scenario.train.momentum
    return scenario.replaced(precision=precision, train=scenario.train.replaced(momentum=momentum))


def _step(scenario: Scenario) -> tuple[int, int, float]:
    kind, train = scenario.kind, scenario.train
    if kind.is_pipeline:
        return train.batch_size, 1, 0.0
    num_socs = num_participants(scenario, scenario_cluster(scenario))
    if not isinstance(kind, GroupStrategy):
        return num_socs * train.batch_size, num_socs, float(train.local_epochs)
    groups = scenario.strategy.num_groups(num_socs)
    if not isinstance(groups, int):
        raise ConfigError(
            f"tune: groups = {groups!r} is tried while training; give a number of groups"
        )
    interval = scenario.interval_epochs
    # One group has nothing to synchronise.
    epochs = 0.0 if groups == 1 or isinstance(interval, str) else float(interval)
    return groups * train.batch_size, groups, epochs


def _candidate(key: str, settings: Sequence[Setting]) -> Candidate:
    """Return settings with the same steps as a candidate, without those that others dominate."""
    kept = [
        each
        for index, each in enumerate(settings)
        if not each.epoch.is_dominated(other.epoch for other in settings)
        and each.epoch not in [other.epoch for other in settings[:index]]
    ]
    kept.sort(key=lambda setting: setting.epoch.time_s)
    first = kept[0].scenario
    return Candidate(
        settings=tuple(kept), step=_step(first), arithmetic=_arithmetic(first), key=key
    )


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
def front(costs: Sequence[PredictedCosts]) -> list[int]:
    """Return the indices of costs that no other dominates, the quickest first; the first of equal ones."""
    kept = [
        index
        for index, own in enumerate(costs)
        if not own.is_dominated(costs) and own not in costs[:index]
    ]
    return sorted(kept, key=lambda index: costs[index].time_s)


def with_front(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with `time_s` and `energy_j`, and whether each is `on_front`."""
    best = front([PredictedCosts(time_s=row["time_s"], energy_j=row["energy_j"]) for row in rows])
    return [{**row, "on_front": index in best} for index, row in enumerate(rows)]


def by_fronts(costs: Sequence[PredictedCosts]) -> list[int]:
    """Return all indices: first those of the front, then of the front of the others, and so on."""
    left, order = list(range(len(costs))), []
    while left:
        layer = [left[index] for index in front([costs[each] for each in left])]
        order += layer
        left = [index for index in left if index not in layer]
    return order
